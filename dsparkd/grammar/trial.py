"""A few walks along a compiled grammar, in a process that may die: some compile at once and take a step for ever.

Nothing can interrupt a matcher inside a step, so a rank must never meet such a one. A walk is no proof; it finds rules
that can be read in too many ways, which is what makes steps slow.
"""

from __future__ import annotations

import random
import time

import numpy as np
import xgrammar
from numpy.typing import NDArray

from dsparkd.errors import GrammarError
from dsparkd.grammar.matcher import ffi_matcher

NUM_STEPS = 96
# Of processor time inside XGrammar; what is done here over a vocabulary of 129,280 ids takes longer than most steps.
MAX_STEP_S = 0.25
MAX_TOTAL_S = 0.6  # for all walks
_CHOICES = 24


def require_quick_steps(compiled: xgrammar.CompiledGrammar) -> None:
    """Walk with long ids, with any, and with short ones. Raises GrammarError beyond either limit."""
    info = compiled.tokenizer_info
    lengths = np.array([len(entry) for entry in info.decoded_vocab])
    spent_s = 0.0
    for best_first in (np.argsort(-lengths, kind="stable"), None, np.argsort(lengths, kind="stable")):
        spent_s = _walk(xgrammar.GrammarMatcher(compiled), info.vocab_size, best_first, spent_s)


def _walk(
    matcher: xgrammar.GrammarMatcher, vocab_size: int, best_first: NDArray[np.int64] | None, spent_s: float
) -> float:
    """Take steps by any allowed id, or by one of the first allowed of `best_first`; returns the time of all walks."""
    draw = random.Random(0)
    row = np.zeros((1, -(-vocab_size // 32)), np.int32)
    for _ in range(NUM_STEPS):
        begun_s = time.thread_time()
        ffi_matcher(matcher).fill_next_token_bitmask(row, 0, False)
        fill_s = time.thread_time() - begun_s
        is_allowed = np.unpackbits(row.view(np.uint8), bitorder="little")[:vocab_size]
        is_allowed[matcher.stop_token_ids] = 0
        if best_first is None:
            choices = np.flatnonzero(is_allowed)
        else:
            choices = best_first[np.flatnonzero(is_allowed[best_first])[:_CHOICES]]
        if not len(choices):
            return spent_s + fill_s
        token_id = int(choices[draw.randrange(len(choices))])
        begun_s = time.thread_time()
        accepted = matcher.accept_token(token_id)
        step_s = fill_s + time.thread_time() - begun_s
        spent_s += step_s
        if step_s > MAX_STEP_S:
            raise _too_costly(f"a step along it takes more than {MAX_STEP_S} s")
        if spent_s > MAX_TOTAL_S:
            raise _too_costly(f"walks of {NUM_STEPS} steps along it take more than {MAX_TOTAL_S} s")
        if not accepted:
            break
    return spent_s


def _too_costly(what: str) -> GrammarError:
    return GrammarError(f"{what}; its rules can be read in too many ways", code="grammar_too_costly")
