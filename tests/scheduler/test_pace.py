"""What steps really take: what both ranks learn of it, and that nobody plans worse than without drafts or with all."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsparkd.executor.costs import CostTable, Origin
from dsparkd.executor.lengths import plan_budget
from dsparkd.executor.plan import Speculation
from dsparkd.scheduler.agreement import Drafting
from dsparkd.scheduler.pace import (
    KEPT_SHARE,
    KNOWN_SAMPLES,
    NEWS_STEPS,
    RETRY_STEPS,
    SAMPLES,
    Layout,
    Pace,
    PairCosts,
    Served,
)
from dsparkd.scheduler.speculation import SpeculationPlanner

GAMMA = 3
ORIGIN = Origin(machine="test", device="cpu", dtype="float32", checkpoint="nano", measured="2026-01-01T00:00:00Z")


def table(verify: Callable[[int, int], float], draft_s: float = 0.1) -> CostTable:
    """Steps that cost what a function of rows and width says."""
    rows, widths = (1, 4, 16), (1, 2, 4)
    return CostTable(
        version=1,
        origin=ORIGIN,
        rows=rows,
        widths=widths,
        verify_s=tuple(tuple(verify(row, width) for width in widths) for row in rows),
        draft_s=(draft_s,) * 3,
    )


FLAT = table(lambda rows, width: 1.0)


def served(layout: Layout, rows: int) -> Served:
    return Served(layout, rows, rows * (1 if layout is Layout.PLAIN else 1 + GAMMA))


def taught(pace: Pace, layout: Layout, rows: int, seconds: float, count: int = KNOWN_SAMPLES) -> Pace:
    """A pace that has seen so many steps in a row."""
    for _ in range(count):
        pace.learn(served(layout, rows), seconds)
    return pace


def test_nothing_measured_is_what_the_table_says() -> None:
    """A table is all there is at start."""
    pace = Pace(FLAT, GAMMA)

    assert pace.seconds(served(Layout.PLAIN, 4)) == 1.0
    assert pace.seconds(served(Layout.ALL, 4)) == pytest.approx(1.1)
    assert pace.seconds(Served(Layout.CUT, 4, 8)) == pytest.approx(1.1)


def test_a_few_steps_replace_what_the_table_says_and_one_long_step_does_not() -> None:
    """A table knows nothing of exchange, scheduler and host; and any step may be held up by something else."""
    pace = taught(Pace(FLAT, GAMMA), Layout.ALL, 4, 3.0, KNOWN_SAMPLES - 1)
    assert pace.seconds(served(Layout.ALL, 4)) == pytest.approx(1.1)

    taught(pace, Layout.ALL, 4, 3.0)
    assert pace.seconds(served(Layout.ALL, 4)) == pytest.approx(3.0)
    taught(pace, Layout.ALL, 4, 99.0, 1)
    assert pace.seconds(served(Layout.ALL, 4)) == pytest.approx(3.0)
    taught(pace, Layout.ALL, 4, 2.0, SAMPLES)
    assert pace.seconds(served(Layout.ALL, 4)) == pytest.approx(2.0)


def test_the_first_step_of_a_layout_is_not_of_its_kind() -> None:
    """It drafts in front of the target, or waits for drafts that the step before began and nobody wants."""
    pace = Pace(FLAT, GAMMA)
    for _ in range(SAMPLES):
        pace.learn(served(Layout.ALL, 4), 9.0, is_first=True)

    assert pace.seconds(served(Layout.ALL, 4)) == pytest.approx(1.1)


def test_what_nobody_knows_is_as_far_from_the_table_as_its_nearest_kin() -> None:
    """All steps have most of what a table leaves out, the more alike the more."""
    pace = taught(Pace(FLAT, GAMMA), Layout.PLAIN, 4, 1.5)
    assert pace.seconds(served(Layout.ALL, 4)) == pytest.approx(1.6)
    assert pace.seconds(served(Layout.PLAIN, 16)) == pytest.approx(1.5)

    taught(pace, Layout.ALL, 1, 2.1)
    assert pace.seconds(served(Layout.ALL, 2)) == pytest.approx(2.1)
    taught(pace, Layout.PLAIN, 16, 0.0001)
    assert pace.seconds(served(Layout.PLAIN, 16)) == pytest.approx(0.1), "no step is free"


def test_measurements_grow_old() -> None:
    """A machine, or what it is asked, may be another one by then."""
    pace = taught(Pace(FLAT, GAMMA), Layout.ALL, 4, 3.0)
    taught(pace, Layout.PLAIN, 1, 1.0, RETRY_STEPS)
    assert pace.seconds(served(Layout.ALL, 4)) == pytest.approx(3.0)
    taught(pace, Layout.PLAIN, 1, 1.0, 1)
    assert pace.seconds(served(Layout.ALL, 4)) == pytest.approx(1.1)

    taught(pace, Layout.ALL, 4, 2.0, KNOWN_SAMPLES)
    assert pace.seconds(served(Layout.ALL, 4)) == pytest.approx(2.0), "old and new times are not mixed"


def test_what_nearly_decides_is_looked_at_again_and_stands_meanwhile() -> None:
    """One slow moment of a machine would else rule a layout out for a long while."""
    pace = taught(Pace(FLAT, GAMMA), Layout.ALL, 4, 3.0, SAMPLES)
    taught(pace, Layout.PLAIN, 4, 1.4, NEWS_STEPS + 1)
    assert pace.trial(4, 2.0) is Layout.ALL
    assert pace.trial(4, 1.5) is None, "0.7 of the other's speed"

    taught(pace, Layout.ALL, 4, 2.0, KNOWN_SAMPLES - 1)
    assert pace.trial(4, 2.0) is Layout.ALL
    assert pace.seconds(served(Layout.ALL, 4)) == pytest.approx(3.0)
    taught(pace, Layout.ALL, 4, 2.0, 1)
    assert pace.trial(4, 2.0) is None
    assert pace.seconds(served(Layout.ALL, 4)) == pytest.approx(2.0)


def test_a_cut_layout_is_looked_at_again_while_drafting_pays() -> None:
    """It is never tried by itself, only planned where it seems to pay."""
    pace = taught(Pace(FLAT, GAMMA), Layout.ALL, 4, 1.5)
    for _ in range(KNOWN_SAMPLES):
        pace.learn(Served(Layout.CUT, 4, 8), 9.0)

    def cut_s(kept: Layout) -> float:
        return PairCosts(pace, 4, GAMMA, (), kept).drafted_seconds(4, 4)

    assert cut_s(Layout.ALL) == pytest.approx(9.0)
    taught(pace, Layout.ALL, 4, 1.5, NEWS_STEPS + 1)
    assert cut_s(Layout.PLAIN) == pytest.approx(9.0)
    assert cut_s(Layout.ALL) == pytest.approx(1.5)
    pace.learn(Served(Layout.CUT, 4, 8), 2.0)
    pace.learn(Served(Layout.CUT, 4, 8), 2.0)
    assert cut_s(Layout.CUT) == pytest.approx(KEPT_SHARE * 1.5), "until there is news enough"
    pace.learn(Served(Layout.CUT, 4, 8), 2.0)
    assert cut_s(Layout.CUT) == pytest.approx(KEPT_SHARE * 2.0)


def test_a_layout_that_nobody_knows_is_tried_where_it_may_come_near() -> None:
    """A table that thinks too ill of drafts would never be proven wrong."""
    pace = taught(Pace(table(lambda rows, width: 1.0 * width), GAMMA), Layout.PLAIN, 4, 1.0)
    assert pace.trial(4, 2.0) is Layout.ALL  # half as fast as plain steps by what is known
    assert pace.trial(4, 1.2) is None
    taught(pace, Layout.ALL, 4, 2.0)
    assert pace.trial(4, 2.0) is None

    pace = taught(Pace(FLAT, GAMMA), Layout.ALL, 4, 1.1)
    assert pace.trial(4, 1.2) is Layout.PLAIN
    assert pace.trial(4, 1.5) is None, "it would be slower by its table alone"
    taught(pace, Layout.PLAIN, 4, 1.0)
    assert pace.trial(4, 1.2) is None


def test_a_step_takes_what_the_larger_rank_takes() -> None:
    """Both wait for each other in every step."""
    assert Served.of(None, (3, 5)) == Served(Layout.PLAIN, 5, 5)
    assert Served.of(Speculation(3, (12, 20)), (3, 5)) == Served(Layout.ALL, 5, 20)
    assert Served.of(Speculation(3, (12, 8), is_compact=True), (3, 5)) == Served(Layout.CUT, 5, 12)


times = st.floats(1e-4, 10)
lines = st.lists(times, min_size=9, max_size=9)
blocks = st.lists(st.floats(0, 1), min_size=GAMMA, max_size=GAMMA).map(
    lambda chances: tuple(itertools.accumulate(chances, lambda a, b: a * b))
)


def growing_table(values: Sequence[float], draft_s: float) -> CostTable:
    """A table of any times that never shrink."""
    lines = [list(itertools.accumulate(values[at : at + 3], max)) for at in (0, 3, 6)]
    for upper, lower in itertools.pairwise(lines):
        lower[:] = [max(pair) for pair in zip(upper, lower, strict=True)]
        lower[:] = itertools.accumulate(lower, max)
    return CostTable(
        version=1,
        origin=ORIGIN,
        rows=(1, 4, 16),
        widths=(1, 2, 4),
        verify_s=tuple(map(tuple, lines)),
        draft_s=(draft_s,) * 3,
    )


@given(
    lines,
    times,
    st.lists(st.tuples(st.sampled_from(Layout), st.integers(1, 16), times), max_size=6),
    st.lists(blocks | st.none(), min_size=1, max_size=6),
    st.integers(0, 10),
    st.sampled_from([(), (16,), (16, 32, 64)]),
    st.sampled_from([*Layout, None]),
)
def test_no_plan_is_worse_than_no_drafts_or_all_of_them(
    values: Sequence[float],
    draft_s: float,
    history: Sequence[tuple[Layout, int, float]],
    survivals: Sequence[tuple[float, ...] | None],
    more: int,
    captured: tuple[int, ...],
    kept: Layout | None,
) -> None:
    """By its own measure, whatever table, times and chances are: within what a change of layout must be worth."""
    pace = Pace(growing_table(values, draft_s), GAMMA)
    for layout, rows, seconds in history:
        taught(pace, layout, rows, seconds)
    most, count = len(survivals) + more, len(survivals)

    budget = plan_budget(PairCosts(pace, most, GAMMA, captured, kept), survivals, GAMMA)

    fair = PairCosts(pace, most, GAMMA, captured, None)
    chances = sorted((a for block in survivals for a in block or (1.0,) * GAMMA), reverse=True)

    def rate(num_drafts: int) -> float:
        return (count + sum(chances[:num_drafts])) / fair.drafted_seconds(count, num_drafts)

    plain = count / fair.plain_seconds(count)
    ours = rate(budget) if budget else plain
    # What is left out as next to impossible brings that much at most.
    assert ours >= KEPT_SHARE * max(plain, rate(count * GAMMA)) * (1 - 1e-4)


def agree_both(
    planners: list[SpeculationPlanner], requests: list[list[Row]], rows: tuple[int, int], step_ns: int
) -> Speculation | None:
    """One decode step as two loops agree on it."""
    votes = [planner.vote(each) for planner, each in zip(planners, requests, strict=True)]
    heard = {vote for vote, count in zip(votes, rows, strict=True) if count}
    drafting = heard.pop() if len(heard) == 1 else Drafting.SOME
    wanted = (planners[0].wanted, planners[1].wanted)
    agreed = []
    for planner in planners:
        planner.learn(step_ns)
        some = drafting is Drafting.SOME
        agreed.append(planner.compact(rows, wanted) if some else planner.settle(rows, drafting))
    assert agreed[0] == agreed[1]
    return agreed[0]


def play(costs: CostTable, true_s: Callable[[Served], float], chances: tuple[float, ...], rows: int, steps: int):
    """Tokens a second of two ranks of equal rows on a machine that takes true_s, and of plain steps and all drafts.

    The first fifth of the steps, in which every layout is tried, does not count.
    """
    planners = [SpeculationPlanner(GAMMA, 16, is_compact=True, table=costs) for _ in range(2)]
    step_ns, seconds, tokens = 0, 0.0, 0.0
    requests = [Row(chances) for _ in range(rows)]
    for number in range(steps):
        if number == steps // 5:
            seconds, tokens = 0.0, 0.0
        agreed = agree_both(planners, [requests, requests], (rows, rows), step_ns)
        now = Served.of(agreed, (rows, rows))
        step_ns = round(1e9 * true_s(now))
        seconds += step_ns / 1e9
        likeliest = sorted(chances * rows, reverse=True)
        tokens += rows + sum(likeliest[: now.num_tokens - rows])
        for request in requests:
            request.steps_since_drafts = 0 if agreed is not None else request.steps_since_drafts + 1
    plain, every = served(Layout.PLAIN, rows), served(Layout.ALL, rows)
    return tokens / seconds, rows / true_s(plain), rows * (1 + sum(chances)) / true_s(every)


class Row:  # stands for a Request
    """What a planner reads of a request."""

    def __init__(self, survival: tuple[float, ...]) -> None:
        self.survival = survival
        self.steps_since_drafts = 0


DEAR = table(lambda rows, width: 1.0 + 1.5 * (width - 1))  # says that drafts lose
CHEAP = table(lambda rows, width: 1.0, draft_s=0.01)  # says that drafts are free


@pytest.mark.parametrize("costs", [DEAR, CHEAP])
@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("chances", [(0.9, 0.85, 0.8), (0.5, 0.2, 0.1), (0.05, 0.01, 0.0)])
@pytest.mark.parametrize(
    "true_s",
    [
        {Layout.PLAIN: 2.7, Layout.ALL: 3.3, Layout.CUT: 4.5},  # where drafting hides behind the host
        {Layout.PLAIN: 1.0, Layout.ALL: 5.0, Layout.CUT: 3.0},  # where tokens are dear
        {Layout.PLAIN: 1.0, Layout.ALL: 1.9, Layout.CUT: 1.9},
    ],
)
def test_a_table_that_is_wrong_is_found_out(
    costs: CostTable, rows: int, chances: tuple[float, ...], true_s: dict[Layout, float]
) -> None:
    """Whatever it says, what is served is as fast as the better of both ways in the long run, trials included."""
    ours, plain, every = play(costs, lambda step: true_s[step.layout], chances, rows, 1200)

    assert ours >= 0.97 * max(plain, every)


@settings(deadline=None)
@given(st.data())
def test_d31_x25_ranks_that_hear_the_same_agree_whatever_they_want(data: st.DataObject) -> None:
    """X-25, D-31: rows and chances of the ranks differ; both make the same layout of what both know, and learn it."""
    costs = growing_table(data.draw(lines), data.draw(times))
    captured = data.draw(st.sampled_from([(), (16, 32)]))
    planners = [SpeculationPlanner(GAMMA, 16, is_compact=True, table=costs, captured=captured) for _ in range(2)]
    for _ in range(data.draw(st.integers(1, 25))):
        rows = data.draw(st.tuples(st.integers(0, 16), st.integers(0, 16)).filter(any))
        requests = [
            [Row(data.draw(blocks)) for _ in range(min(count, 2))] + [Row((0.5,) * 3)] * max(0, count - 2)
            for count in rows
        ]
        agreed = agree_both(planners, requests, rows, data.draw(st.integers(0, 10**10)))
        if agreed is None:
            assert planners[0].wanted == planners[1].wanted == 0
        else:
            for count, tokens in zip(rows, agreed.num_tokens, strict=True):
                assert count <= tokens <= count * (1 + GAMMA)
        steps = [served(layout, 4) for layout in Layout]
        assert len({tuple(map(planner._pace.seconds, steps)) for planner in planners}) == 1


def test_a_tick_without_a_decode_step_teaches_nothing() -> None:
    """A step behind one that was none of this kind is the first of its layout no more than any."""
    planner = SpeculationPlanner(GAMMA, 16, is_compact=True, table=FLAT)
    for _ in range(SAMPLES):
        planner.settle((4, 4), Drafting.ALL)
        planner.learn(0)
        planner.learn(10**10)
    assert planner._pace.seconds(served(Layout.ALL, 4)) == pytest.approx(1.1)
    for drafting in (Drafting.ALL, Drafting.NONE) * SAMPLES:
        planner.settle((4, 4), drafting)
        planner.learn(10**10)
    assert planner._pace.seconds(served(Layout.ALL, 4)) == pytest.approx(1.1), "each the first of its layout"
    for _ in range(KNOWN_SAMPLES):
        planner.settle((4, 4), Drafting.ALL)
        planner.learn(10**10)
        planner.learn(0)
    assert planner._pace.seconds(served(Layout.ALL, 4)) == pytest.approx(10.0)
