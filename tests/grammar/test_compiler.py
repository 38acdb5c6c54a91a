"""The compiler: every kind, the same result whatever came first, nothing kept inside, and readable refusals."""

from __future__ import annotations

import json
import os
import random
import weakref
from pathlib import Path

import pytest
import xgrammar

from dsparkd.errors import GrammarError
from dsparkd.grammar import compiler as compiler_module
from dsparkd.grammar.compiler import MAX_MESSAGE_CHARACTERS, Compiler, describe
from dsparkd.grammar.key import canonical_schema
from dsparkd.grammar.vocabulary import Vocabularies, Vocabulary
from dsparkd.messages import Grammar
from tests.grammar.grammars import CONTROL_ID, PADDED_SIZE, STOP_ID, entries

PLAIN = Vocabulary(tuple(entries()), (STOP_ID,), PADDED_SIZE, "0" * 64)
_marked = entries()
_marked[CONTROL_ID] = b"\xff<tool>"
VOCABULARIES = Vocabularies(PLAIN, Vocabulary(tuple(_marked), (STOP_ID,), PADDED_SIZE, "1" * 64))

TAG = {"type": "structural_tag", "format": {"type": "token", "token": CONTROL_ID}}
KINDS = [
    (Grammar(kind="json_schema", text='{"type":"boolean"}'), "true", "yes"),
    (Grammar(kind="regex", text="ab*"), "abbb", "b"),
    (Grammar(kind="ebnf", text='root ::= "x" root | "y"'), "xxy", "x y"),
    (Grammar(kind="choice", text='["yes","no \\"really\\""]'), 'no "really"', "maybe"),
    (
        Grammar(kind="structural_tag", text='{"type":"structural_tag","format":{"type":"const_string","value":"a"}}'),
        "a",
        "b",
    ),
]


@pytest.fixture(scope="module")
def compiler() -> Compiler:
    return Compiler(VOCABULARIES, num_threads=1)


@pytest.mark.parametrize(("grammar", "good", "bad"), KINDS, ids=lambda value: getattr(value, "kind", ""))
def test_every_kind_accepts_its_own_texts_only(compiler: Compiler, grammar: Grammar, good: str, bad: str) -> None:
    """Character by character, up to the stop token."""
    native = compiler.compile(grammar)
    matcher = xgrammar.GrammarMatcher(native)
    assert matcher.accept_string(good)
    assert matcher.accept_token(STOP_ID)
    assert matcher.is_terminated()
    assert not xgrammar.GrammarMatcher(native).accept_string(bad)


def test_tool_calls_alone_may_name_a_marker(compiler: Compiler) -> None:
    """The marker's token is admitted in the grammars that need it, and in no other."""
    for kind, admitted in (("tool_calls", True), ("structural_tag", False)):
        grammar = Grammar(kind="tool_calls" if kind == "tool_calls" else "structural_tag", text=json.dumps(TAG))
        matcher = xgrammar.GrammarMatcher(compiler.compile(grammar))
        assert matcher.accept_token(CONTROL_ID) == admitted


def test_equal_keys_give_equal_grammars_whatever_came_first() -> None:
    """G-04: 200 spellings of schemas, compiled from both ends, with one thread and with two."""
    draw = random.Random(9)
    texts = []
    for _ in range(200):
        names = [f"p{number}" for number in range(draw.randrange(1, 4))]
        members = [
            ("type", "object"),
            ("properties", {name: {"type": draw.choice(["string", "integer", "null"])} for name in names}),
            ("required", names),
        ]
        draw.shuffle(members)
        texts.append(canonical_schema(dict(members)))
    order = list(range(len(texts)))
    found: list[dict[str, str]] = []
    for threads, walk in ((1, order), (2, order[::-1])):
        one = Compiler(VOCABULARIES, num_threads=threads)
        grammars = {texts[place]: Grammar(kind="json_schema", text=texts[place]) for place in walk}
        found.append({text: one.compile(grammar).serialize_json() for text, grammar in grammars.items()})
    assert found[0] == found[1]


def test_a_stored_body_matches_as_the_compiled_grammar_does(compiler: Compiler) -> None:
    """Same masks along a run."""
    grammar = Grammar(kind="regex", text="(the |ab)*[a-z]{2,5}")
    native = compiler.compile(grammar)
    loaded = compiler.load(grammar, native.serialize_json().encode())
    one, other = xgrammar.GrammarMatcher(native), xgrammar.GrammarMatcher(loaded)
    for character in "the abcde":
        masks = [xgrammar.allocate_token_bitmask(1, PADDED_SIZE) for _ in range(2)]
        one.fill_next_token_bitmask(masks[0])
        other.fill_next_token_bitmask(masks[1])
        assert masks[0].equal(masks[1])
        assert one.accept_string(character) == other.accept_string(character)
    with pytest.raises(RuntimeError):
        compiler.load(grammar, b"{}")


def test_xgrammar_keeps_nothing_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """G-24: its own cache is without bound, so it lives for one compile; one bounded cache owns what is compiled."""
    made: list[tuple[int, bool]] = []
    alive: list[weakref.ref[xgrammar.GrammarCompiler]] = []
    original = xgrammar.GrammarCompiler

    def watched(info: xgrammar.TokenizerInfo, *, max_threads: int, cache_enabled: bool) -> xgrammar.GrammarCompiler:
        made.append((max_threads, cache_enabled))
        compiler = original(info, max_threads=max_threads, cache_enabled=cache_enabled)
        alive.append(weakref.ref(compiler))
        return compiler

    monkeypatch.setattr(compiler_module.xgrammar, "GrammarCompiler", watched)
    compiler = Compiler(VOCABULARIES, num_threads=3)
    kept = [compiler.compile(Grammar(kind="regex", text=f"a{{{number + 1}}}")) for number in range(5)]
    assert made == [(3, True)] * 5
    assert [reference() for reference in alive] == [None] * 5
    assert len(kept) == 5


def test_many_grammars_leave_no_memory_behind(compiler: Compiler) -> None:
    """G-24: 600 different schemas that nobody holds; XGrammar's own cache would hold 50 MB of them."""

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def compile_some(first: int, count: int) -> None:
        for number in range(first, first + count):
            text = f'{{"properties":{{"p{number}":{{"type":"string"}}}},"type":"object"}}'
            compiler.compile(Grammar(kind="json_schema", text=text))

    compile_some(0, 100)
    before = resident()
    compile_some(100, 600)
    assert resident() - before < 8 << 20


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar(kind="regex", text="("),
        Grammar(kind="regex", text="[z-a]/usr/lib/x.cc:12: "),
        Grammar(kind="ebnf", text="root ::= nothing"),
        Grammar(kind="ebnf", text="a ::= b /etc/passwd"),
        Grammar(kind="structural_tag", text="{}"),
        Grammar(kind="json_schema", text='{"type":"nothing"}'),
    ],
    ids=lambda grammar: grammar.text[:12],
)
def test_a_broken_grammar_is_refused_in_readable_words(compiler: Compiler, grammar: Grammar) -> None:
    """G-25: the compiler's message, at most 500 characters, without a place in its sources."""
    with pytest.raises(GrammarError) as caught:
        compiler.compile(grammar)
    assert (caught.value.status, caught.value.code) == (400, "invalid_grammar")
    assert 0 < len(caught.value.message) <= MAX_MESSAGE_CHARACTERS
    assert "/" not in caught.value.message


def test_a_grammar_whose_refusal_cannot_be_read_is_refused_all_the_same(compiler: Compiler) -> None:
    """XGrammar's own message breaks off inside of the sign; that must not pass for a fault of the machine."""
    with pytest.raises(GrammarError, match="gives no reason") as refused:
        compiler.compile(Grammar(kind="ebnf", text="root ::= \U0001f4a9"))

    assert refused.value.code == "invalid_grammar"


def test_messages_keep_their_words_and_lose_their_places() -> None:
    """G-25: what a client can use stays."""
    text = "[12:34:56] /project/cpp/grammar_parser.cc:123: EBNF parser error at line 1, column 2: nothing\n  more"
    assert describe(text) == "EBNF parser error at line 1, column 2: nothing more"
    assert describe("/a/b.cc:1:") == "the compiler gives no reason"
    assert len(describe("x" * 1000)) == MAX_MESSAGE_CHARACTERS


def test_running_out_of_memory_is_no_verdict_on_the_grammar(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """G-18: XGrammar reports it as any other error."""

    def fail(*_: object) -> None:
        raise RuntimeError("std::bad_alloc")

    monkeypatch.setattr(compiler_module, "compile_grammar", fail)
    with pytest.raises(MemoryError):
        compiler.compile(Grammar(kind="regex", text="a"))
