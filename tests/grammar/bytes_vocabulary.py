"""A vocabulary of single bytes, so that what a grammar admits can be asked character by character."""

from __future__ import annotations

import json
import random

import torch
import xgrammar

from dsparkd.grammar.compile import compile_grammar
from dsparkd.grammar.tools import MARKER
from dsparkd.messages import Grammar

MARKER_ID, BLANK_ID, STOP_ID = 256, 257, 258
# The marker's entry begins with a byte that no text has, so only a token format can name it.
_ENTRIES = [bytes([byte]) for byte in range(256)] + [b"\xff" + MARKER.encode(), b"", b""]
_SIZE = len(_ENTRIES)
_CLOSING, _BLANKS = frozenset(b'"]}'), frozenset(b" \n\r\t")


def make_compiler(max_threads: int = 1) -> xgrammar.GrammarCompiler:
    """A compiler without cache."""
    info = xgrammar.TokenizerInfo(_ENTRIES, xgrammar.VocabType.RAW, vocab_size=_SIZE, stop_token_ids=[STOP_ID])
    return xgrammar.GrammarCompiler(info, max_threads=max_threads, cache_enabled=False)


class Language:
    """What one grammar admits."""

    def __init__(self, compiler: xgrammar.GrammarCompiler, grammar: Grammar) -> None:
        self._compiled = compile_grammar(compiler, grammar)

    def admits(self, text: str) -> bool:
        """Whether the whole text is a sentence; the marker in it stands for its token."""
        matcher = xgrammar.GrammarMatcher(self._compiled)
        for index, part in enumerate(text.split(MARKER)):
            if index and not matcher.accept_token(MARKER_ID):
                return False
            if part and not matcher.accept_string(part):
                return False
        # Of a blank stop token alone, XGrammar may say that it was taken and do nothing.
        return bool(matcher.accept_token(STOP_ID)) and matcher.is_terminated()

    def admits_json(self, value: object) -> bool:
        """Whether a value's JSON is a sentence, with spaces or without, an integral number as an integer or not."""
        return any(
            self.admits(json.dumps(one, ensure_ascii=False, separators=separators))
            for one in (value, _with_integers(value))
            for separators in ((", ", ": "), (",", ":"))
        )

    def allowed(self, text: str) -> set[int]:
        """Ids that may follow a text."""
        matcher = xgrammar.GrammarMatcher(self._compiled)
        assert matcher.accept_string(text)
        return set(_allowed(matcher))

    def sample(self, rng: random.Random, max_bytes: int = 600) -> str | None:
        """Write a random sentence, in a hurry to end it; None when it does not end."""
        matcher = xgrammar.GrammarMatcher(self._compiled)
        text = bytearray()
        while len(text) < max_bytes:
            allowed = _allowed(matcher)
            assert allowed, f"nothing may follow {bytes(text)!r}"
            if STOP_ID in allowed and (len(allowed) == 1 or rng.random() < 0.5):
                # XGrammar's plain strings have UTF-8's forms of surrogates; whoever decodes makes U+FFFD of them.
                return text.decode(errors="replace")
            token = _pick(allowed, rng, is_late=len(text) > max_bytes // 2)
            assert matcher.accept_token(token)
            text += MARKER.encode() if token == MARKER_ID else bytes([token])
        return None


def _with_integers(value: object) -> object:
    match value:
        case float() if value.is_integer() and abs(value) <= 2**53:
            return int(value)
        case list():
            return [_with_integers(item) for item in value]
        case dict():
            return {name: _with_integers(item) for name, item in value.items()}
        case _:
            return value


def _allowed(matcher: xgrammar.GrammarMatcher) -> list[int]:
    mask = torch.full((1, (_SIZE + 31) // 32), -1, dtype=torch.int32)
    matcher.fill_next_token_bitmask(mask, 0)
    words = mask[0].tolist()
    return [token for token in range(_SIZE) if words[token // 32] >> (token % 32) & 1]


def _pick(allowed: list[int], rng: random.Random, *, is_late: bool) -> int:
    closing = [token for token in allowed if token in _CLOSING]
    if closing and (is_late or rng.random() < 0.3):
        return rng.choice(closing)
    # A character is begun often enough, but mostly text is ASCII and white space is rare.
    plain = [token for token in allowed if token < 128 and token not in _BLANKS]
    return rng.choice(plain if plain and rng.random() < 0.95 else [token for token in allowed if token != STOP_ID])
