"""Grammars that compile at once and whose steps take for ever."""

from __future__ import annotations

import itertools

import pytest

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


@pytest.mark.parametrize("text", ['root ::= "yes" | "no"\n', 'root ::= [a-z]* ("," [a-z]*)*\n'])
def test_quick_steps_pass(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A walk ends at the end of a sentence, or when it has gone far enough."""
    monkeypatch.setattr(trial.time, "thread_time", lambda: 0.0)
    trial.require_quick_steps(make_compiler().compile_grammar(text))
