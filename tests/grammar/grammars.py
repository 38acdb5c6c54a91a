"""A small vocabulary, grammars over it, and drafts with every kind of refusal."""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
import xgrammar
from numpy.typing import NDArray

from dsparkd.grammar.matcher import ffi_matcher

STOP_ID = 300
CONTROL_ID = 301  # blank
PADDED_SIZE = 333  # not a multiple of 32; ids from 310 on have no entry

_WORDS = (
    "true",
    "false",
    "null",
    '"a',
    '":',
    ", ",
    "ab",
    "abc",
    "the ",
    "[[",
    "]]",
    "12",
    "3.",
    "\\n",
    "é",
    "日本",
    "((",
)


def entries() -> list[bytes]:
    """Bytes of ids 0..309: every byte, some words, then a stop token and blanks."""
    words = [word.encode() for word in _WORDS]
    filled = [bytes([byte]) for byte in range(256)] + words
    return filled + [b"zz"] * (STOP_ID - len(filled)) + [b""] * 10


def tokenizer_info() -> xgrammar.TokenizerInfo:
    """The vocabulary as XGrammar sees it."""
    return xgrammar.TokenizerInfo(entries(), xgrammar.VocabType.RAW, vocab_size=PADDED_SIZE, stop_token_ids=[STOP_ID])


def compile_all(info: xgrammar.TokenizerInfo) -> list[xgrammar.CompiledGrammar]:
    """A schema, free JSON, a pattern, a recursion, and an ambiguous grammar."""
    compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
    schema = (
        '{"type": "object", "required": ["a", "b"], "properties":'
        ' {"a": {"type": "string"}, "b": {"type": "array", "items": {"type": "integer"}}}}'
    )
    return [
        compiler.compile_json_schema(schema),
        compiler.compile_builtin_json_grammar(),
        compiler.compile_regex(r"(the |ab)*[a-z]{1,8}"),
        compiler.compile_grammar('root ::= "(" root ")" root | ""'),
        compiler.compile_grammar('root ::= root "a" | "a" root | "b"'),
    ]


def allowed_ids(matcher: xgrammar.GrammarMatcher, vocab_size: int) -> list[int]:
    """Every id that the matcher's mask allows now."""
    row = np.zeros((1, -(-vocab_size // 32)), np.int32)
    ffi_matcher(matcher).fill_next_token_bitmask(row, 0, False)
    return [int(x) for x in np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")[:vocab_size])]


@dataclass(frozen=True)
class Case:
    """One request: its grammar, what it has committed before, what is committed now, and its drafts."""

    compiled: xgrammar.CompiledGrammar
    past: list[int]
    commits: list[int]
    drafts: list[int]  # the first is the anchor, of no meaning

    def matcher(self) -> xgrammar.GrammarMatcher:
        """A matcher that knows the past alone."""
        matcher = xgrammar.GrammarMatcher(self.compiled)
        for token_id in self.past:
            assert matcher.accept_token(token_id)
        return matcher


def draw_case(compiled: xgrammar.CompiledGrammar, num_nodes: int, draw: random.Random) -> Case:
    """A random case; 60 of 100 chains have a place that is refused, stops, or is no id at all."""
    matcher = xgrammar.GrammarMatcher(compiled)
    ids: list[int] = []
    length = draw.randrange(0, 20) + 2 + num_nodes
    while len(ids) < length and not matcher.is_terminated():
        allowed = allowed_ids(matcher, PADDED_SIZE)
        if not allowed:
            break
        ids.append(STOP_ID if STOP_ID in allowed and draw.random() < 0.2 else draw.choice(allowed))
        matcher.accept_token(ids[-1])
    num_drafts = 0 if matcher.is_terminated() and draw.random() < 0.3 else min(num_nodes - 1, len(ids))
    num_commits = draw.randrange(0, 3) if len(ids) > num_drafts + 2 else 0
    cut = len(ids) - num_drafts
    drafts = [draw.randrange(PADDED_SIZE), *ids[cut:]]
    drafts += [draw.randrange(PADDED_SIZE) for _ in range(num_nodes - len(drafts))]
    if draw.random() < 0.6:
        odd = (STOP_ID, CONTROL_ID, PADDED_SIZE - 1, PADDED_SIZE, -1, 1 << 32, draw.randrange(PADDED_SIZE))
        drafts[draw.randrange(num_nodes)] = draw.choice(odd)
    return Case(compiled, ids[: cut - num_commits], ids[cut - num_commits : cut], drafts)


def scalar_rows(case: Case) -> NDArray[np.int32]:
    """Rows of a chain by XGrammar's scalar calls alone: filled one by one, up to the first place that is refused."""
    matcher = case.matcher()
    for token_id in case.commits:
        assert matcher.accept_token(token_id)
    if matcher.is_terminated():
        return np.zeros((0, -(-PADDED_SIZE // 32)), np.int32)
    rows = np.zeros((len(case.drafts), -(-PADDED_SIZE // 32)), np.int32)
    ffi_matcher(matcher).fill_next_token_bitmask(rows, 0, False)
    for place, token_id in enumerate(case.drafts[1:], 1):
        if token_id not in allowed_ids(matcher, PADDED_SIZE):
            return rows[:place]
        assert matcher.accept_token(token_id)
        if matcher.is_terminated():
            return rows[:place]
        ffi_matcher(matcher).fill_next_token_bitmask(rows, place, False)
    return rows
