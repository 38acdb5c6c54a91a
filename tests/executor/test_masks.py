"""Masks: what a walk says of each row, what becomes of a row that has none, and what the sampler does with them."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import time
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import xgrammar
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dsparkd.errors import FatalError, InvariantError
from dsparkd.executor.masks import MAX_STUCK, OVERTIME_FACTOR, Held, Masker, allowed_ids
from dsparkd.executor.plan import PlanRow, RowFailure
from dsparkd.executor.sampler import Sampler, SampleRow
from dsparkd.grammar.matcher import Matcher
from dsparkd.grammar.pipeline import NUM_SLOTS, Pipeline
from dsparkd.grammar.traversal import StockTraversal, open_traversal
from dsparkd.messages import SamplingParams
from dsparkd.native.traversal import Traversal, Walk, WalkStatus

VOCAB = 300  # 256 bytes, the end, and padding that the tokenizer does not have
STOP = 256
WORDS = -(-VOCAB // 32)
GREEDY = SamplingParams(max_tokens=9, seed=1, temperature=0.0)
SEEDED = SamplingParams(max_tokens=9, seed=5, temperature=1.0)
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def info() -> xgrammar.TokenizerInfo:
    entries = [bytes([byte]) for byte in range(256)] + [b""]
    return xgrammar.TokenizerInfo(entries, xgrammar.VocabType.RAW, vocab_size=VOCAB, stop_token_ids=[STOP])


def matcher_of(info: xgrammar.TokenizerInfo, ebnf: str) -> Matcher:
    compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
    return Matcher(compiler.compile_grammar(xgrammar.Grammar.from_ebnf(ebnf)))


def row(name: str, matcher: Matcher | None) -> PlanRow:
    return PlanRow(name, 1, (5,), 8, (1,), 1, GREEDY, (5,), (), matcher=matcher)


@dataclasses.dataclass
class Filled:
    """What a step knows of its masks when its walk is over."""

    rows: dict[int, Held]
    failures: dict[int, RowFailure]
    words: torch.Tensor


class Desk:
    """A masker with a pipeline of its own, through which it takes a step's rows and their drafts."""

    def __init__(self, traversal: Traversal, rows: int, width: int, timeout_s: float, hang_s: float, **rest: Any):
        self.masker = Masker(traversal, rows, width, VOCAB, timeout_s, hang_s, **rest)
        self.pipeline = Pipeline(rows, width, width, VOCAB, 4096, CPU)

    def fill(self, rows: Sequence[PlanRow], drafts: Sequence[tuple[int, ...]] = ()) -> Filled | None:
        drafts = drafts or ((),) * len(rows)
        longest = max(map(len, drafts))
        ids = [[9, *drafted, *(0,) * (longest - len(drafted))] for drafted in drafts]
        work = self.masker.begin(rows, [len(drafted) for drafted in drafts])
        slot = self.pipeline.begin(torch.tensor(ids), work)
        self.pipeline.launched(slot)
        try:
            self.pipeline.finish(slot)
            masks = work.masks(slot) if work is not None else None
        finally:
            self.pipeline.emit(slot, torch.zeros(0, dtype=torch.float64))
            self.pipeline.consume(slot)
        if masks is None or not masks.rows:
            return None
        return Filled(masks.rows, masks.failures, slot.words[: slot.num_mask_rows])


def masker_of(traversal: Traversal, rows: int = 8, width: int = 1) -> Desk:
    return Desk(traversal, rows, width, timeout_s=5.0, hang_s=5.0)


@pytest.fixture(params=["native", "per_matcher"])
def traversal(request: pytest.FixtureRequest, info: xgrammar.TokenizerInfo) -> Traversal:
    return open_traversal(request.param, 1, info)


def ids_of(words: torch.Tensor) -> list[set[int]]:
    return [set(np.flatnonzero(allowed.numpy()).tolist()) for allowed in allowed_ids(words, VOCAB)]


def test_d14_rows_without_a_grammar_have_no_mask_and_a_step_without_one_no_walk(
    info: xgrammar.TokenizerInfo, traversal: Traversal
) -> None:
    """D-14: mask rows belong to constrained rows alone, in plan order; without any, nothing is touched."""
    masker = masker_of(traversal)
    assert masker.fill([row("a", None), row("b", None)]) is None

    masks = masker.fill(
        [row("a", None), row("b", matcher_of(info, 'root ::= "x" | "y"')), row("c", matcher_of(info, 'root ::= "z"'))]
    )
    assert masks is not None
    assert (masks.rows, masks.failures) == ({1: Held(0, 0, 1), 2: Held(1, 0, 1)}, {})
    assert ids_of(masks.words) == [{ord("x"), ord("y")}, {ord("z")}]


def test_a_walk_tells_each_grammar_what_its_row_kept_exactly_once(
    info: xgrammar.TokenizerInfo, traversal: Traversal
) -> None:
    """D-09, decisions.md 6: the queue is applied by the next walk, and by that one alone."""
    masker = masker_of(traversal)
    matcher = matcher_of(info, 'root ::= "ab" "a"')
    allowed = []
    for kept in (b"", b"a", b"b", b"a"):
        matcher.queue(tuple(kept))
        masks = masker.fill([row("x", matcher)])
        assert masks is not None
        allowed.append(ids_of(masks.words)[0])
    assert allowed == [{ord("a")}, {ord("b")}, {ord("a")}, {STOP}]
    masks = masker.fill([row("x", matcher)])
    assert masks is not None
    assert ids_of(masks.words) == [{STOP}]


def test_d20_ids_without_a_token_are_in_no_mask(info: xgrammar.TokenizerInfo, traversal: Traversal) -> None:
    """D-20: padding behind the tokenizer's ids is never allowed, however wide the grammar."""
    masks = masker_of(traversal).fill([row("x", matcher_of(info, r"root ::= [\x00-\U0010FFFF]*"))])
    assert masks is not None
    assert max(ids_of(masks.words)[0]) == STOP


def test_d11_an_id_that_the_grammar_refuses_fails_its_row_alone(
    info: xgrammar.TokenizerInfo, traversal: Traversal
) -> None:
    """D-11, D-15: its mask is all ones, never all zeros; the neighbour's is right."""
    masker = masker_of(traversal)
    wrong, right = matcher_of(info, 'root ::= "ab"'), matcher_of(info, 'root ::= "ab"')
    wrong.queue((ord("z"),))
    right.queue((ord("a"),))
    masks = masker.fill([row("wrong", wrong), row("free", None), row("right", right)])
    assert masks is not None
    assert {index: failure.code for index, failure in masks.failures.items()} == {0: "grammar_violation"}
    assert masks.words[0].tolist() == [-1] * WORDS
    assert ids_of(masks.words)[1] == {ord("b")}

    ended = matcher_of(info, 'root ::= "a"')
    ended.queue((ord("a"), STOP)[:1])
    masker.fill([row("ended", ended)])
    ended.queue((STOP,))
    masks = masker.fill([row("ended", ended)])
    assert masks is not None
    assert masks.failures[0].status == 500


@pytest.mark.parametrize(
    ("status", "usable", "expected"),
    [
        (WalkStatus.WALKED, 1, None),
        (WalkStatus.LATE, 1, None),
        (WalkStatus.LATE, 0, (504, "grammar_traversal_timeout")),
        (WalkStatus.STUCK, 0, (504, "grammar_traversal_timeout")),
        (WalkStatus.ENDED, 0, (500, "grammar_violation")),
        (WalkStatus.COMMIT_REFUSED, 0, (500, "grammar_violation")),
        (WalkStatus.NO_TOKEN, 0, (400, "grammar_dead_end")),
        (WalkStatus.MATCHER_FAILED, 0, (500, "grammar_traversal_failed")),
        (WalkStatus.BAD_HANDLE, 0, InvariantError),
        (WalkStatus.REPEATED_HANDLE, 0, InvariantError),
        (WalkStatus.NOT_A_TREE, 0, InvariantError),
    ],
)
def test_each_status_of_a_walk_has_its_radius(
    info: xgrammar.TokenizerInfo, status: WalkStatus, usable: int, expected: object
) -> None:
    """D-17 as decisions.md 1 has it: 504 only where even the first row is missing; our own mistakes are the pair's."""

    class Scripted:
        def run(self, walk: Walk, deadline_ns: int) -> None:
            assert deadline_ns == 7 + 5_000_000_000
            walk.mask[: walk.num_trees] = -1
            walk.statuses[:2] = (WalkStatus.WALKED, status)
            walk.usable_rows[:2] = (1, usable)
            walk.set_message(1, "it is broken")

        def stuck(self) -> tuple[int, int]:
            return 0, 0

        def close(self) -> None:
            pass

    masker = Desk(Scripted(), 4, 1, timeout_s=5.0, hang_s=5.0, clock=lambda: 7)
    rows = [row(name, matcher_of(info, 'root ::= "a"')) for name in ("a", "b")]
    if expected is InvariantError:
        with pytest.raises(InvariantError, match=status.name):
            masker.fill(rows)
        return
    masks = masker.fill(rows)
    assert masks is not None
    failure = masks.failures.get(1)
    assert (failure is None) == (expected is None)
    if failure is not None:
        assert isinstance(failure, RowFailure)
        assert (failure.status, failure.code) == expected
    assert 0 not in masks.failures


class Spending:
    """A traversal whose requests take the processor time that a test says; None is a step that was given up."""

    def __init__(self) -> None:
        self.spends_ns: list[int | None] = []
        self.budgets_ns: list[list[int]] = []
        self.grammars: list[list[int]] = []
        self.left_behind = (0, 0)

    def run(self, walk: Walk, deadline_ns: int) -> None:
        count = walk.num_matchers
        self.budgets_ns.append(walk.budgets_ns[:count].tolist())
        self.grammars.append(walk.grammars[:count].tolist())
        for request in range(count):
            spent_ns = self.spends_ns.pop(0)
            walk.statuses[request] = WalkStatus.STUCK if spent_ns is None else WalkStatus.WALKED
            walk.spent_ns[request] = spent_ns or 0
            walk.usable_rows[request] = int(spent_ns is not None)

    def stuck(self) -> tuple[int, int]:
        return self.left_behind

    def close(self) -> None:
        pass


def test_a_request_may_be_slow_now_and_then_but_not_for_ever(info: xgrammar.TokenizerInfo) -> None:
    """D-17: each walk may take its time; what it takes beyond is charged, until nothing is left to be beyond with."""
    spending = Spending()
    masker = Desk(spending, 4, 1, timeout_s=0.05, hang_s=5.0)
    matcher, quick = matcher_of(info, 'root ::= "a"*'), matcher_of(info, 'root ::= "a"*')
    for spent_ms in (350, 40, 250, 90):
        spending.spends_ns = [spent_ms * 1_000_000, 0]
        assert masker.fill([row("slow", matcher), row("quick", quick)]) is not None
    assert [slow // 1_000_000 for slow, _ in spending.budgets_ns] == [550, 250, 250, 50]
    assert {fast // 1_000_000 for _, fast in spending.budgets_ns} == {550}
    assert (matcher.overtime_ns // 1_000_000, quick.overtime_ns) == (540, 0)


def test_a_step_that_was_given_up_marks_its_matcher(info: xgrammar.TokenizerInfo) -> None:
    """Nothing of XGrammar may be called on it again; and requests of one grammar are told apart from others."""
    spending = Spending()
    masker = Desk(spending, 4, 1, timeout_s=0.05, hang_s=5.0)
    one = matcher_of(info, 'root ::= "a"*')
    same, other = Matcher(one.compiled), matcher_of(info, 'root ::= "b"*')
    spending.spends_ns = [0, None, 0]
    masks = masker.fill([row("one", one), row("other", other), row("same", same)])
    assert masks is not None
    assert [matcher.is_stuck for matcher in (one, other, same)] == [False, True, False]
    assert masks.failures[1].status == 504
    assert spending.grammars == [[0, 1, 0]]


@pytest.mark.parametrize(("left_behind", "ends"), [((1, 4_900_000_000), True), ((1, 5_100_000_000), False)])
def test_a_step_that_was_given_up_must_end_some_day(
    info: xgrammar.TokenizerInfo, left_behind: tuple[int, int], ends: bool
) -> None:
    """decisions.md 14: nothing can stop it, and what it takes may grow, so then the pair fails."""
    spending = Spending()
    masker = Desk(spending, 4, 1, timeout_s=0.05, hang_s=5.0)
    spending.spends_ns, spending.left_behind = [0], left_behind
    if ends:
        masker.fill([row("x", matcher_of(info, 'root ::= "a"'))])
        return
    with pytest.raises(FatalError, match="do not end"):
        masker.fill([row("x", matcher_of(info, 'root ::= "a"'))])


def test_steps_that_were_given_up_may_not_pile_up(info: xgrammar.TokenizerInfo) -> None:
    """Each of them holds a thread and memory, however little processor time it gets."""
    spending = Spending()
    masker = Desk(spending, 4, 1, timeout_s=0.05, hang_s=5.0)
    for number, expected in ((MAX_STUCK, None), (MAX_STUCK + 1, FatalError)):
        spending.spends_ns, spending.left_behind = [0], (number, 0)
        with contextlib.nullcontext() if expected is None else pytest.raises(expected):
            masker.fill([row("x", matcher_of(info, 'root ::= "a"'))])


LONG = 257  # one id that stands for many letters


@pytest.fixture(scope="module")
def slow() -> xgrammar.CompiledGrammar:
    """A grammar that XGrammar reads in every way there is: the first long id takes 0.02 s, the third more than 1 s."""
    entries = [bytes([byte]) for byte in range(256)] + [b"", b"a" * 120]
    info = xgrammar.TokenizerInfo(entries, xgrammar.VocabType.RAW, vocab_size=VOCAB, stop_token_ids=[STOP])
    compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
    return compiler.compile_grammar(xgrammar.Grammar.from_ebnf('root ::= root root | "a"'))


def slow_matcher(slow: xgrammar.CompiledGrammar) -> Matcher:
    """A matcher that has a long step before it."""
    matcher = Matcher(slow)
    matcher.queue((LONG, LONG, LONG))
    return matcher


def wait_for_the_end(pool: Traversal) -> None:
    while pool.stuck()[0]:
        time.sleep(0.05)


def test_a_really_slow_grammar_costs_its_request_and_nobody_else(
    info: xgrammar.TokenizerInfo, slow: xgrammar.CompiledGrammar
) -> None:
    """D-17, decisions.md 1: the call returns while XGrammar is still inside the step; the neighbour's mask is right,
    and when the step has ended at last nothing is left of it."""
    pool = open_traversal("native", 1, info)
    masker = Desk(pool, 4, 3, timeout_s=0.05, hang_s=60.0)
    never, quick = slow_matcher(slow), matcher_of(info, 'root ::= "xy"')
    masks = masker.fill([row("slow", never), row("quick", quick)])
    assert masks is not None
    num_stuck, longest_ns = pool.stuck()
    assert num_stuck == 1
    assert longest_ns >= (1 + OVERTIME_FACTOR) * 50_000_000
    assert {index: (failure.status, failure.code) for index, failure in masks.failures.items()} == {
        0: (504, "grammar_traversal_timeout")
    }
    assert never.is_stuck
    assert (masks.words[:3] == -1).all(), "no row of it forbids everything (D-15)"
    assert ids_of(masks.words)[3] == {ord("x")}

    quick.queue((ord("x"),))
    masks = masker.fill([row("quick", quick)])
    assert masks is not None
    assert ids_of(masks.words)[0] == {ord("y")}
    del never, masks
    wait_for_the_end(pool)
    masker.masker.close()


def test_rows_of_the_same_slow_grammar_cost_one_wait(
    info: xgrammar.TokenizerInfo, slow: xgrammar.CompiledGrammar
) -> None:
    """64 rows of one grammar that is slow would else hold the tick 64 times as long."""
    pool = open_traversal("native", 1, info)
    masker = Desk(pool, 6, 3, timeout_s=0.05, hang_s=600.0)
    matchers = [slow_matcher(slow) for _ in range(6)]
    masks = masker.fill([row(str(place), matcher) for place, matcher in enumerate(matchers)])
    assert masks is not None
    assert sorted(masks.failures) == [0, 1, 2, 3, 4, 5]
    assert pool.stuck()[0] == 1
    wait_for_the_end(pool)
    masker.masker.close()


def test_the_last_ids_of_a_row_cannot_hold_the_tick_either(info: xgrammar.TokenizerInfo, traversal: Traversal) -> None:
    """decisions.md 6, D-11: a row that ends tells its ids by a call of its own, which knows the same bounds."""
    masker = masker_of(traversal, 4)
    right, wrong, done = (matcher_of(info, 'root ::= "ab"') for _ in range(3))
    masks = masker.fill([row(name, matcher) for name, matcher in (("a", right), ("b", wrong), ("c", done))])
    assert masks is not None
    words = masks.words.clone()
    for matcher, ids in ((right, b"a"), (wrong, b"z"), (done, b"a")):
        matcher.queue(tuple(ids))
    assert [failure and failure.code for failure in masker.masker.commit([right, wrong, done])] == [
        None,
        "grammar_violation",
        None,
    ]
    assert torch.equal(masks.words, words), "masks that are still being read stay"
    masker = Desk(traversal, 4, 2, timeout_s=5.0, hang_s=5.0)
    done.queue((ord("b"), STOP))
    assert masker.masker.commit([done]) == [None]
    assert done.is_terminated


def test_a_slow_last_step_is_given_up(info: xgrammar.TokenizerInfo, slow: xgrammar.CompiledGrammar) -> None:
    """D-17: as in a walk."""
    pool = open_traversal("native", 1, info)
    masker = Desk(pool, 4, 3, timeout_s=0.05, hang_s=600.0)
    never = slow_matcher(slow)
    (failure,) = masker.masker.commit([never])
    assert failure is not None
    assert (failure.status, never.is_stuck) == (504, True)
    wait_for_the_end(pool)
    masker.masker.close()


def test_d16_a_grammar_that_is_stuck_behind_a_draft_costs_its_request_and_nobody_else(
    info: xgrammar.TokenizerInfo, slow: xgrammar.CompiledGrammar
) -> None:
    """D-16, D-17: the grammar begins behind the draft that ends the reasoning, with a step that does not end.

    The reasoning could go on, but nothing may be asked of this grammar any more, so its request ends here.
    """
    pool = open_traversal("native", 1, info)
    masker = Desk(pool, 4, 5, timeout_s=0.05, hang_s=60.0, think_end_id=THINK_END)
    never, quick = slow_matcher(slow), matcher_of(info, 'root ::= "xy"')
    thinking = dataclasses.replace(row("slow", never), is_thinking=True)
    masks = masker.fill([thinking, row("quick", quick)], [(THINK_END, LONG), tuple(b"xy")])
    assert masks is not None
    assert pool.stuck()[0] == 1
    assert {index: failure.code for index, failure in masks.failures.items()} == {0: "grammar_traversal_timeout"}
    assert never.is_stuck
    assert masks.rows[0] == Held(0, 1, 1)
    assert masks.rows[1].usable >= 1, "it came late, which shortens its chain at most"
    assert (masks.words[:5] == -1).all()
    assert ids_of(masks.words)[5] == {ord("x")}
    quick.queue(tuple(b"x"))
    masks = masker.fill([row("quick", quick)], [tuple(b"y")])
    assert masks is not None
    assert (masks.failures, ids_of(masks.words)[0]) == ({}, {ord("y")})
    wait_for_the_end(pool)
    masker.masker.close()


def test_a_pool_may_be_closed_over_a_step_that_still_runs(
    info: xgrammar.TokenizerInfo, slow: xgrammar.CompiledGrammar
) -> None:
    """L-33: a stop does not wait for what was given up; its thread ends by itself, or with the process."""
    known = set(os.listdir("/proc/self/task"))
    pool = open_traversal("native", 2, info)
    masker = Desk(pool, 4, 3, timeout_s=0.05, hang_s=600.0)
    masker.masker.commit([slow_matcher(slow)])
    assert pool.stuck()[0] == 1
    masker.masker.close()
    assert pool.stuck() == (0, 0)
    while set(os.listdir("/proc/self/task")) - known:
        time.sleep(0.05)


THINK_END = 7


def test_d14_each_draft_has_the_row_behind_it_and_the_anchor_is_not_told_again(
    info: xgrammar.TokenizerInfo, traversal: Traversal
) -> None:
    """D-14: mask row place * W + j is what may follow draft j; the matcher stands where it stood, so a walk repeats."""
    masker = masker_of(traversal, width=4)
    matcher = matcher_of(info, 'root ::= "abcd" | "axy"')
    matcher.queue((ord("a"),))
    for _ in range(2):
        masks = masker.fill([row("free", None), row("x", matcher)], [(1, 2, 3), tuple(b"bc")])
        assert masks is not None
        assert masks.rows == {1: Held(0, 0, 3)}
        assert ids_of(masks.words)[:3] == [{ord("b"), ord("x")}, {ord("c")}, {ord("d")}]
        assert masks.words[3].tolist() == [-1] * WORDS


@pytest.mark.parametrize(
    ("drafts", "usable"),
    [(b"zbc", 1), (b"azc", 2), (b"abz", 3), (b"abc", 4), (b"ab", 3), (b"", 1), (b"ab\xff", 3)],
)
def test_d15_rows_behind_a_refused_draft_are_ones_and_are_not_usable(
    info: xgrammar.TokenizerInfo, traversal: Traversal, drafts: bytes, usable: int
) -> None:
    """D-15, decisions.md 1: wherever a chain breaks, no row is all zeros, and none behind it may be drawn from.

    Chains shorter than the masks' width end where their drafts do.
    """
    masker = masker_of(traversal, width=4)
    for _ in range(NUM_SLOTS):  # must not be walked again in either
        masker.fill([row("long", matcher_of(info, 'root ::= "abcd"'))], [tuple(b"abc")])
    masks = masker.fill([row("x", matcher_of(info, 'root ::= "abcd"'))], [tuple(drafts)])
    assert masks is not None
    assert masks.rows[0].usable == usable
    rows = ids_of(masks.words)
    assert rows[:usable] == [{ord(letter)} for letter in "abcd"[:usable]]
    assert all(masks.words[j].tolist() == [-1] * WORDS for j in range(usable, 4))


def test_d15_the_row_behind_a_draft_that_ends_the_text_is_not_usable(
    info: xgrammar.TokenizerInfo, traversal: Traversal
) -> None:
    """D-15, decisions.md 1: the end can be accepted as the id behind the draft before it, and nothing follows it."""
    masks = masker_of(traversal, width=4).fill([row("x", matcher_of(info, 'root ::= "a"'))], [(ord("a"), STOP, STOP)])
    assert masks is not None
    assert masks.rows[0].usable == 2
    assert ids_of(masks.words)[1] == {STOP}


@pytest.mark.parametrize("place", [1, 2, 3, None])
def test_d16_a_grammar_holds_the_rows_from_the_draft_on_that_ends_the_reasoning(
    info: xgrammar.TokenizerInfo, traversal: Traversal, place: int | None
) -> None:
    """D-16: rows before it are all ones and usable, its own row is the start; without it the grammar is not walked."""
    masker = Desk(traversal, 8, 4, timeout_s=5.0, hang_s=5.0, think_end_id=THINK_END)
    matcher = matcher_of(info, 'root ::= "abcd"')
    drafts = [50, 51, 52]
    if place is not None:
        drafts[place - 1 :] = [THINK_END, *b"abc"][: 4 - place]
    thinking = dataclasses.replace(row("x", matcher), is_thinking=True)
    masks = masker.fill([thinking], [tuple(drafts)])
    if place is None:
        assert masks is None
        return
    assert masks is not None
    assert masks.rows == {0: Held(0, place, 4)}
    assert all(masks.words[j].tolist() == [-1] * WORDS for j in range(place))
    assert ids_of(masks.words)[place:] == [{ord(letter)} for letter in "abcd"[: 4 - place]]
    # The switch becomes state through the kept ids alone: the next walk starts anew.
    masks = masker.fill([dataclasses.replace(thinking, is_thinking=False)])
    assert masks is not None
    assert ids_of(masks.words)[0] == {ord("a")}


def test_d16_a_grammar_that_fails_behind_the_reasoning_fails_nobody_yet(info: xgrammar.TokenizerInfo) -> None:
    """D-16: the draft that ends the reasoning may be refused; what is wrong shows when the grammar holds the anchor."""

    class Failing:
        def run(self, walk: Walk, deadline_ns: int) -> None:
            walk.mask[:] = -1
            walk.statuses[0] = WalkStatus.NO_TOKEN
            walk.usable_rows[0] = 0

        def stuck(self) -> tuple[int, int]:
            return 0, 0

        def close(self) -> None:
            pass

    masker = Desk(Failing(), 4, 4, timeout_s=5.0, hang_s=5.0, think_end_id=THINK_END)
    thinking = dataclasses.replace(row("x", matcher_of(info, 'root ::= "a"')), is_thinking=True)
    masks = masker.fill([thinking], [(50, THINK_END, 51)])
    assert masks is not None
    assert masks.failures == {}
    assert masks.rows == {0: Held(0, 2, 2)}
    masks = masker.fill([dataclasses.replace(thinking, is_thinking=False)])
    assert masks is not None
    assert masks.failures[0].code == "grammar_dead_end"


def words_of(*sets: set[int]) -> torch.Tensor:
    words = np.zeros((len(sets), WORDS * 32), np.uint8)
    for place, ids in enumerate(sets):
        words[place, list(ids)] = 1
    return torch.from_numpy(np.packbits(words, axis=1, bitorder="little").view(np.int32))


def sampler() -> Sampler:
    return Sampler([True] * (STOP + 1) + [False] * (VOCAB - STOP - 1), (STOP,), CPU)


def logits_of(rows: int) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(3)) * 3


@pytest.mark.parametrize("params", [GREEDY, SEEDED, msgspec.structs.replace(SEEDED, top_k=3, temperature=2.0)])
def test_d14_four_masked_rows_move_no_bit_of_the_twelve_others(params: SamplingParams) -> None:
    """D-14: ids and log-probabilities of unconstrained rows are those of a step without any mask."""
    logits, params = logits_of(16), msgspec.structs.replace(params, top_logprobs=2)
    masked = {2: 0, 3: 1, 9: 2, 15: 3}
    rows = [SampleRow(i, params, (5,), (), 40 + i, masked.get(i)) for i in range(16)]
    plain = [one._replace(mask_row=None) for one in rows]
    words = words_of({1, 2}, {7}, {STOP}, {100, 200, 250})
    own = sampler()
    without = own.choose(logits.clone(), plain)
    chosen = own.choose(logits.clone(), rows, words=words)
    for i in range(16):
        if i in masked:
            assert chosen.token_ids[i] in ids_of(words)[masked[i]]
        else:
            assert (chosen.token_ids[i], chosen.logprobs[i]) == (without.token_ids[i], without.logprobs[i])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_masked_choice_is_the_best_of_what_is_allowed(temperature: float) -> None:
    """The mask comes before temperature and filters, and the noise of the ids that stay is the same."""
    logits = logits_of(1)
    params = SamplingParams(max_tokens=9, seed=5, temperature=temperature)
    allowed = {3, 40, 41, 90, 200}
    (got,) = sampler().choose(logits.clone(), [SampleRow(0, params, (5,), (), 7, 0)], words=words_of(allowed)).token_ids
    bare = torch.full_like(logits, -math.inf)
    bare[0, list(allowed)] = logits[0, list(allowed)]
    (expected,) = Sampler([True] * VOCAB, (STOP,), CPU).choose(bare, [SampleRow(0, params, (5,), (), 7)]).token_ids
    assert got == expected


def test_penalties_and_biases_let_no_forbidden_id_back_in() -> None:
    """A bias of 100 or a penalty that lifts a score must not undo the mask."""
    params = SamplingParams(
        max_tokens=9, seed=5, temperature=0.0, logit_bias=((9, 100.0),), repetition_penalty=0.1, presence_penalty=-2.0
    )
    (got,) = (
        sampler().choose(logits_of(1), [SampleRow(0, params, (9, 10), (9, 10), 7, 0)], words=words_of({4, 5})).token_ids
    )
    assert got in {4, 5}


def test_decisions_7_logprobs_are_those_before_the_mask() -> None:
    """decisions.md 7: of the model's distribution, whatever the mask left of it."""
    params = SamplingParams(max_tokens=9, seed=5, temperature=0.0, top_logprobs=1)
    logits = logits_of(1)
    choices = sampler().choose(logits.clone(), [SampleRow(0, params, (5,), (), 7, 0)], words=words_of({4}))
    told = choices.logprobs[0]
    assert told is not None
    assert choices.token_ids == (4,)
    assert told.logprob == pytest.approx(float(logits[0].log_softmax(-1)[4]), abs=1e-5)
    assert told.top[0][0] != 4


@pytest.mark.parametrize(("allowed", "expected"), [({STOP}, {STOP}), ({STOP, 8}, {8}), ({8, 9}, {9}), ({9}, {9})])
def test_d26_min_tokens_holds_back_the_end_only_where_another_id_is_allowed(
    allowed: set[int], expected: set[int]
) -> None:
    """D-26: stop ids of the client too; a row whose ids are all ends keeps them."""
    params = SamplingParams(
        max_tokens=9, seed=5, temperature=0.0, min_tokens=5, stop_ids=(8,) if STOP not in allowed else ()
    )
    (got,) = (
        sampler()
        .choose(torch.zeros(1, VOCAB), [SampleRow(0, params, (5,), (), 7, 0)], words=words_of(allowed))
        .token_ids
    )
    assert got in expected


def test_d16_reasoning_before_a_grammar_cannot_end_the_text() -> None:
    """D-16, D-24: an answer that ends there would be no sentence of its grammar."""
    logits = torch.zeros(2, VOCAB)
    logits[:, STOP] = 50.0
    rows = [SampleRow(0, GREEDY, (5,), (), 7, None, True), SampleRow(1, GREEDY, (5,), (), 7, None, False)]
    got = sampler().choose(logits, rows).token_ids
    assert got[0] != STOP
    assert got[1] == STOP


def test_a_mask_that_is_named_must_be_there() -> None:
    """A row with a grammar is never sampled without its mask."""
    with pytest.raises(InvariantError, match="no masks"):
        sampler().choose(logits_of(1), [SampleRow(0, GREEDY, (5,), (), 7, 0)])


def test_the_stock_traversal_is_one_of_the_two(info: xgrammar.TokenizerInfo) -> None:
    """`grammar.traversal` chooses; both were walked above."""
    assert isinstance(open_traversal("per_matcher", 1, info), StockTraversal)


GRAMMARS = (
    r'root ::= "{\"n\": " [0-9]{1,4} ", \"s\": \"" [^"\\\x00-\x1f]{0,5} "\"}"',
    'root ::= ("the " | "a ")* [a-z]+ ("ing" | "ed") [.!?]',
    'root ::= "(" root ")" root | ""',
    'root ::= [éß漢]{1,3} | "x"*',
    'root ::= "yes" | "no" | "yesterday"',
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**31), temperature=st.sampled_from([0.0, 0.7, 2.0]))
def test_d24_every_answer_is_a_prefix_of_a_sentence_and_a_finished_one_is_a_sentence(
    info: xgrammar.TokenizerInfo, traversal: Traversal, seed: int, temperature: float
) -> None:
    """D-24 without drafts: any logits, any grammars together in a step; a fresh matcher is the oracle."""
    generator = torch.Generator().manual_seed(seed)
    masker, own = masker_of(traversal), sampler()
    params = SamplingParams(max_tokens=30, seed=seed, temperature=temperature)
    matchers = [matcher_of(info, text) for text in GRAMMARS]
    outputs: list[list[int]] = [[] for _ in matchers]
    live = list(range(len(matchers)))
    for position in range(24):
        rows = [row(str(place), matchers[place]) for place in live]
        masks = masker.fill(rows)
        if masks is None:
            break
        assert masks.failures == {}
        logits = torch.randn(len(live), VOCAB, generator=generator) * 4
        samples = [SampleRow(i, params, (5,), tuple(outputs[place]), position, i) for i, place in enumerate(live)]
        for place, token in zip(live, own.choose(logits, samples, words=masks.words).token_ids, strict=True):
            outputs[place].append(token)
            matchers[place].queue((token,))
        live = [place for place in live if outputs[place][-1] != STOP]
    for text, ids in zip(GRAMMARS, outputs, strict=True):
        oracle = matcher_of(info, text)
        oracle.queue(ids)
        assert oracle.commit(), (text, bytes(ids[:-1]))
        assert oracle.is_terminated == (STOP in ids)
