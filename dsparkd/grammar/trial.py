"""A few walks along a compiled grammar, in a process that may die: some compile at once and take a step for ever.

Nothing can interrupt a matcher inside a step, so a rank must never meet such a one. A walk is no proof; it finds rules
that can be read in too many ways, which is what makes steps slow.
"""

from __future__ import annotations

import random
import time

import numpy as np
import xgrammar

from dsparkd.errors import GrammarError
from dsparkd.grammar.matcher import ffi_matcher

NUM_STEPS = 96
MAX_STEP_S = 0.25  # of processor time
MAX_TOTAL_S = 0.6  # of processor time for all walks
_CHOICES = 24


def require_quick_steps(compiled: xgrammar.CompiledGrammar) -> None:
    """Walk with long ids, with any, and with short ones. Raises GrammarError beyond either limit."""
    info = compiled.tokenizer_info
    lengths = np.array([len(entry) for entry in info.decoded_vocab])
    begun_s = time.thread_time()
    for order in (-lengths, np.zeros_like(lengths), lengths):
        _walk(xgrammar.GrammarMatcher(compiled), info.vocab_size, order, begun_s)


def _walk(matcher: xgrammar.GrammarMatcher, vocab_size: int, order: np.ndarray, begun_s: float) -> None:
    draw = random.Random(0)
    row = np.zeros((1, -(-vocab_size // 32)), np.int32)
    for _ in range(NUM_STEPS):
        step_s = time.thread_time()
        if step_s - begun_s > MAX_TOTAL_S:
            raise _too_costly(f"walks of {NUM_STEPS} steps along it take more than {MAX_TOTAL_S} s")
        ffi_matcher(matcher).fill_next_token_bitmask(row, 0, False)
        ids = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")[: len(order)])
        ids = ids[~np.isin(ids, matcher.stop_token_ids)]
        if not len(ids):
            return
        best = ids[np.argsort(order[ids], kind="stable")[:_CHOICES]] if order.any() else ids
        accepted = matcher.accept_token(int(draw.choice(best.tolist())))
        if time.thread_time() - step_s > MAX_STEP_S:
            raise _too_costly(f"a step along it takes more than {MAX_STEP_S} s")
        if not accepted:
            return


def _too_costly(what: str) -> GrammarError:
    return GrammarError(f"{what}; its rules can be read in too many ways", code="grammar_too_costly")
