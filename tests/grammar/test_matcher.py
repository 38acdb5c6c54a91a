"""A request's matcher: its own state, its queue, and calls that keep Python's lock."""

from __future__ import annotations

import random

import numpy as np
import pytest
import xgrammar
from xgrammar.tvm_ffi_binding import GrammarMatcher

from dsparkd.grammar.matcher import Matcher, keep_lock_in_short_calls
from dsparkd.native.traversal import NativeTraversal, Walk
from tests.grammar.grammars import PADDED_SIZE, STOP_ID, allowed_ids, compile_all, tokenizer_info

OPEN, CLOSE = ord("("), ord(")")


@pytest.fixture(scope="module")
def parentheses() -> xgrammar.CompiledGrammar:
    return compile_all(tokenizer_info())[3]


def test_requests_of_one_grammar_do_not_touch_each_other(parentheses: xgrammar.CompiledGrammar) -> None:
    """G-17: eight interleaved runs equal eight alone; what comes later starts at the root."""
    draw = random.Random(4)
    runs = [[OPEN] * depth + [CLOSE] * depth for depth in range(8)]
    matchers = [Matcher(parentheses) for _ in runs]
    steps = [place for place, run in enumerate(runs) for _ in run]
    draw.shuffle(steps)
    told = [0] * len(runs)
    for place in steps:
        matchers[place].queue([runs[place][told[place]]])
        told[place] += 1
        assert matchers[place].commit()
    for matcher, run in zip(matchers, runs, strict=True):
        alone = xgrammar.GrammarMatcher(parentheses)
        assert all(alone.accept_token(token_id) for token_id in run)
        assert matcher.is_completed
        assert matcher._matcher._debug_print_internal_state() == alone._debug_print_internal_state()
    fresh = Matcher(parentheses)
    assert STOP_ID in allowed_ids(fresh._matcher, PADDED_SIZE)


def test_queued_ids_are_told_once_whoever_tells_them(parentheses: xgrammar.CompiledGrammar) -> None:
    """D-09, decisions 6: by the walk or by a call of its own, never by both."""
    matcher = Matcher(parentheses)
    walk = Walk(np.zeros((1, 1), np.int64), np.zeros((1, -(-PADDED_SIZE // 32)), np.int32), PADDED_SIZE, 4)
    pool = NativeTraversal.open(1)
    matcher.queue([OPEN])
    matcher.queue([OPEN, CLOSE])
    walk.begin(1)
    walk.add(matcher.handle, 0, commits=matcher.take_queue())
    pool.run(walk, 0)
    pool.close()
    assert walk.num_accepted[0] == 3
    assert matcher.commit(), "nothing is left to tell"
    matcher.queue([CLOSE, STOP_ID])
    assert not matcher.is_terminated
    assert matcher.commit()
    assert matcher.is_terminated


def test_a_refused_id_is_reported(parentheses: xgrammar.CompiledGrammar) -> None:
    """D-11: the request must end rather than go on without its grammar."""
    matcher = Matcher(parentheses)
    matcher.queue([CLOSE])
    assert not matcher.commit()


def test_short_calls_keep_the_lock_and_long_ones_give_it_up() -> None:
    """D-28: winning the lock back beside a busy thread takes a switch interval, a thousand times a short call."""
    keep_lock_in_short_calls()
    kept = {m.name: not m.func.release_gil for m in vars(GrammarMatcher)["__tvm_ffi_type_info__"].methods}
    assert kept["accept_token"]
    assert kept["rollback"]
    assert kept["is_terminated"]
    assert not kept["fill_next_token_bitmask"]
    assert not kept["traverse_draft_tree"]
