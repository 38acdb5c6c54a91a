"""Grammars that compile at once and whose steps take for ever."""

from __future__ import annotations

import itertools

import pytest
import xgrammar

from dsparkd.errors import GrammarError
from dsparkd.grammar import trial
from tests.grammar.bytes_vocabulary import make_compiler


def test_a_slow_step_is_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inside a step nothing can stop a matcher, and a rank with it."""
    clock = itertools.count(0, 0.3)
    monkeypatch.setattr(trial.time, "thread_time", lambda: next(clock))
    with pytest.raises(GrammarError) as refused:
        trial.require_quick_steps(make_compiler().compile_grammar('root ::= "a"+\n'))
    assert refused.value.code == "grammar_too_costly"


def test_what_is_done_between_two_steps_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over a vocabulary of 129,280 ids choosing an id takes longer than XGrammar's step, so ordinary schemas of three
    properties were refused."""
    reads = itertools.count()

    def clock() -> float:
        # Four reads a step: around the fill and around the accept; a second passes between the two and behind them.
        return float(next(reads) // 2)

    monkeypatch.setattr(trial.time, "thread_time", clock)
    trial.require_quick_steps(make_compiler().compile_grammar('root ::= [a-z]+ "." root | "x"\n'))


@pytest.mark.parametrize("text", ['root ::= root root | "a"\n', "root ::= [a-z]? root*\n"])
def test_a_rule_that_can_be_read_in_many_ways_is_found(text: str) -> None:
    """By its real steps: both compile in a moment."""
    entries = [bytes([byte]) for byte in range(256)] + [b"", b"a" * 60]
    info = xgrammar.TokenizerInfo(entries, xgrammar.VocabType.RAW, vocab_size=len(entries), stop_token_ids=[256])
    compiled = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False).compile_grammar(
        xgrammar.Grammar.from_ebnf(text)
    )
    with pytest.raises(GrammarError) as refused:
        trial.require_quick_steps(compiled)
    assert refused.value.code == "grammar_too_costly"


@pytest.mark.parametrize("text", ['root ::= "yes" | "no"\n', 'root ::= [a-z]* ("," [a-z]*)*\n'])
def test_quick_steps_pass(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A walk ends at the end of a sentence, or when it has gone far enough."""
    monkeypatch.setattr(trial.time, "thread_time", lambda: 0.0)
    trial.require_quick_steps(make_compiler().compile_grammar(text))
