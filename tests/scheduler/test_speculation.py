"""Drafts in the scheduler: what both ranks verify, what a run of ids leaves, and what is counted."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import hypothesis.strategies as st
import pytest
from hypothesis import given

from dsparkd.errors import InvariantError, PeerError
from dsparkd.executor.costs import CostTable, Origin
from dsparkd.executor.plan import StepKind
from dsparkd.executor.shapes import choose_tiers
from dsparkd.scheduler.agreement import UNKNOWN_TIER, Channel, Drafting
from dsparkd.scheduler.pace import KNOWN_SAMPLES, Pace, PairCosts
from dsparkd.scheduler.request import Request
from dsparkd.scheduler.speculation import STALE_STEPS, SpeculationPlanner

ORIGIN = Origin(machine="test", device="cpu", dtype="float32", checkpoint="nano", measured="2026-01-01T00:00:00Z")


def table(verify: Callable[[int, int], float], draft_s: float = 0.1) -> CostTable:
    """Steps that cost what a function of rows and width says."""
    rows, widths = (1, 8), (1, 2, 4)
    return CostTable(
        version=1,
        origin=ORIGIN,
        rows=rows,
        widths=widths,
        verify_s=tuple(tuple(verify(row, width) for width in widths) for row in rows),
        draft_s=(draft_s, draft_s),
    )


FREE = table(lambda rows, width: 1.0)  # a step costs the same whatever it holds
DEAR = table(lambda rows, width: float(rows * width))  # each token costs as much as it can bring


def request(lab, survival=None, steps=0):
    made = Request(lab.request("r", 3), arrival=1, delivered_ns=1, max_context_tokens=64)
    made.survival, made.steps_since_drafts = survival, steps
    return made


def settled(costs: CostTable) -> SpeculationPlanner:
    """A planner that has seen a few rows take what the table says, drafted and not."""
    planner = SpeculationPlanner(3, 8, is_compact=True, table=costs)
    for rows in (1, 2):
        for drafting, seconds in (
            (Drafting.NONE, costs.plain_seconds(rows)),
            (Drafting.ALL, costs.drafted_seconds(rows, 3 * rows)),
        ):
            for _ in range(KNOWN_SAMPLES + 1):
                planner.settle((rows, 0), drafting)
                planner.learn(round(1e9 * seconds))
    planner.learn(0)
    planner.settle((0, 1), Drafting.NONE)
    return planner


def wanted(planner: SpeculationPlanner, *requests: Request) -> int:
    drafting = planner.vote(requests)
    if planner.wanted != UNKNOWN_TIER:
        everything = 4 * len(requests)
        assert drafting == (
            Drafting.NONE if not planner.wanted else Drafting.ALL if planner.wanted == everything else Drafting.SOME
        )
    return planner.wanted


def test_without_compact_windows_each_row_verifies_all(lab):
    """D-32: a function of the agreed rows, so nothing more has to be exchanged."""
    planner = SpeculationPlanner(3, 8)
    assert not planner.is_compact
    speculation = planner.all_drafts((5, 0))
    assert (speculation.max_drafts, speculation.num_tokens, speculation.is_compact) == (3, (20, 0), False)
    assert SpeculationPlanner(0, 8).all_drafts((5, 2)) is None
    assert planner.settle((5, 0), Drafting.NONE) == speculation
    compact = SpeculationPlanner(3, 8, is_compact=True)
    assert compact.settle((5, 0), Drafting.ALL) == speculation
    assert compact.settle((5, 0), Drafting.NONE) is None


@pytest.mark.parametrize(
    ("wanted", "num_tokens"),
    [
        ((0, 0), None),
        ((7, 0), (7, 2)),  # the other rank drafts for this one's sake and verifies its anchors
        ((7, 5), (7, 5)),
        ((UNKNOWN_TIER, 5), (16, 5)),
        ((UNKNOWN_TIER, UNKNOWN_TIER), (16, 8)),
        ((16, 8), (16, 8)),
        ((17, 8), (16, 8)),  # never more than there are drafts
    ],
)
def test_d30_x25_both_ranks_know_what_each_verifies(wanted, num_tokens):
    """D-30, X-25: at least each anchor, at most all drafts, the same pair on both ranks."""
    found = SpeculationPlanner(3, 8, is_compact=True).compact((4, 2), wanted)
    assert (found.num_tokens if found is not None else None) == num_tokens
    assert found is None or found.is_compact == (num_tokens != (16, 8)), "whether anything is left out"


@pytest.mark.parametrize(
    ("wanted", "num_tokens"),
    [
        ((0, 0), None),
        ((7, 0), (16, 8)),  # the graph of 16 tokens runs whatever it holds
        ((9, 5), (16, 8)),
        ((17, 5), (32, 8)),
        ((UNKNOWN_TIER, 0), (32, 8)),
    ],
)
def test_x25_d30_a_captured_tier_is_filled(wanted, num_tokens):
    """X-25, D-30: padding takes as long as drafts that may be accepted; above the tiers steps run eager."""
    planner = SpeculationPlanner(3, 12, is_compact=True, captured=(16, 32))
    found = planner.compact((8, 2), wanted)
    assert (found.num_tokens if found is not None else None) == num_tokens
    assert planner.compact((12, 2), (40, 3)).num_tokens == (40, 3)


@pytest.mark.parametrize(
    ("rows", "wanted", "num_tokens"),
    [
        ((1, 0), (3, 0), (4, 0)),
        ((1, 1), (2, 6), (6, 6)),  # a tier of one window
        ((1, 1), (0, 2), (2, 2)),
        ((2, 1), (5, 0), (6, 6)),
    ],
)
def test_x25_tiers_below_a_row_tile_are_filled_alike(rows, wanted, num_tokens):
    """X-25: a graph of few tokens runs for few; one row may have as many drafts as its tier holds."""
    planner = SpeculationPlanner(5, 12, is_compact=True, captured=choose_tiers(12 * 6))
    found = planner.compact(rows, wanted)
    assert found is not None
    assert found.num_tokens == num_tokens


def test_one_row_weighs_the_tiers_that_it_can_fill():
    """Numbers of drafts between two tiers cost what the next one does; a whole window is the last to be weighed."""
    costs = PairCosts(Pace(table(lambda rows, width: rows * width), 5), 1, 5, choose_tiers(12 * 6), None)
    assert list(costs.counts(1, 5)) == [1, 3, 5]


def test_x25_a_number_that_no_tier_holds_fails_the_pair():
    """X-25: a peer that asks for more than max_rows can hold is broken."""
    with pytest.raises(PeerError, match="tiers"):
        SpeculationPlanner(3, 8, is_compact=True).compact((4, 2), (33, 0))


def test_d31_what_is_wanted_follows_from_chances_that_are_no_news_any_more(lab):
    """D-31: earlier chances decide; rows that have none, or old ones, count as certain."""
    likely, unlikely = (0.9, 0.8, 0.7), (0.01, 0.0001, 0.0)
    planner = settled(FREE)
    assert wanted(planner) == 0
    assert wanted(planner, request(lab), request(lab)) == 8
    assert wanted(planner, request(lab, likely)) == 4
    assert wanted(planner, request(lab, unlikely)) == 0, "drafting costs more than it brings"
    assert wanted(planner, request(lab, unlikely, STALE_STEPS - 1)) == 0
    assert wanted(planner, request(lab, unlikely, STALE_STEPS)) == 4
    assert wanted(settled(DEAR), request(lab, likely)) == 0
    assert wanted(SpeculationPlanner(3, 8, is_compact=True), request(lab, unlikely)) == UNKNOWN_TIER


@pytest.mark.parametrize("chances", [(1.1, 0.5, 0.5), (0.5, float("nan"), 0.1), (0.5, 0.6, 0.1), (-0.1, -0.2, -0.3)])
def test_d31_chances_that_are_none_fail_the_pair(lab, chances):
    """D-31: they come from this program's own arithmetic."""
    with pytest.raises(InvariantError):
        wanted(settled(FREE), request(lab, chances))


def test_d31_chances_belong_to_one_life_of_a_row(lab):
    """D-31: whoever resumes after a retract, or comes into a slot, has no chances yet."""
    with contextlib.closing(lab.Pair(lab.Sizes(max_drafts=3))) as pair:
        rank = pair.ranks[0]
        rank.submit(lab.request("a", 9, max_tokens=40, ignore_eos=True))
        pair.tick(3)
        running = rank.queue.find("a")
        assert running.survival is not None
        assert 0.5 < running.survival[0] < 1.0  # a mean, certain at first, of blocks that said 0.5
        assert running.steps_since_drafts == 0
        rank.memory.release(running)
        assert running.survival is None
        rank.queue.put_back(running)
        pair.drain()
        assert rank.output("a")[0] == lab.expected(lab.request("a", 9, max_tokens=40, ignore_eos=True), 64)[0]


def test_runs_of_ids_reach_the_client_whole_and_in_order(lab):
    """One delta a step, with as many ids as were accepted; the outputs are those of plain decoding."""
    with contextlib.closing(lab.Pair(lab.Sizes(max_drafts=3))) as pair:
        rank = pair.ranks[0]
        requests = [lab.request(f"r{number}", 5 + number, max_tokens=17, top_logprobs=0) for number in range(4)]
        rank.submit(*requests)
        pair.drain()
        sizes = set()
        for each in requests:
            assert rank.output(each.request_id) == lab.expected(each, 64)
            for delta in rank.deltas[each.request_id]:
                assert len(delta.logprobs) == len(delta.token_ids)
                assert [entry.token_id for entry in delta.logprobs] == list(delta.token_ids)
                sizes.add(len(delta.token_ids))
        assert sizes > {1, 4}


def test_mixed_steps_carry_no_drafts(lab):
    """decisions.md 9: decode rows join a peer's prefill with their anchors alone."""
    with contextlib.closing(lab.Pair(lab.Sizes(max_drafts=3))) as pair:
        pair.ranks[0].submit(lab.request("a", 5, max_tokens=40, ignore_eos=True))
        pair.tick(2)
        pair.ranks[1].submit(lab.request("b", 40, max_tokens=4))
        pair.drain()
        kinds = {(plan.kind, plan.speculation is not None) for rank in pair.ranks for plan in rank.device.plans}
        assert {(StepKind.MIXED, False), (StepKind.DECODE, True)} <= kinds
        assert not kinds & {(StepKind.MIXED, True), (StepKind.PREFILL, True), (StepKind.DECODE, False)}
        assert pair.ranks[0].output("a") == lab.expected(lab.request("a", 5, max_tokens=40, ignore_eos=True), 64)


def test_m02_drafts_are_counted_by_their_fate(lab):
    """M-02: accepted and refused add up to what was verified, and lengths to the ids of drafted steps."""
    with contextlib.closing(lab.Pair(lab.Sizes(max_drafts=3))) as pair:
        rank = pair.ranks[0]
        rank.submit(*[lab.request(f"r{number}", 5, max_tokens=12, ignore_eos=True) for number in range(3)])
        pair.drain()
        drafted = [plan for plan in rank.device.plans if plan.speculation is not None and plan.rows]
        rows = sum(len(plan.rows) for plan in drafted)
        accepted = rank.value("dsparkd_draft_tokens_total", "accepted")
        assert accepted > 0
        assert accepted + rank.value("dsparkd_draft_tokens_total", "refused") == 3 * rows
        assert rank.value("dsparkd_draft_tokens_total", "not_verified") == 0
        assert rank.value("dsparkd_verify_steps_total", "all") == len(drafted)
        counts = rank.tally.frame()[1]["dsparkd_accepted_per_step\0000"]
        assert counts[-1] == accepted + rows  # the histogram's sum


def test_the_next_turn_resumes_behind_an_answer_that_was_drafted(lab):
    """Page ends inside of windows leave boundaries, as those of plain decoding do."""
    with contextlib.closing(lab.Pair(lab.Sizes(max_drafts=3, max_context=64))) as pair:
        rank = pair.ranks[0]
        first = lab.request("first", 9, max_tokens=24, ignore_eos=True)
        rank.submit(first)
        pair.drain()
        ids = (*first.prompt_ids, *rank.output("first")[0])
        rank.submit(lab.request("next", [*ids, 5, 6], max_tokens=2))
        pair.drain()
        cached = rank.deltas["next"][-1].finish.cached_tokens
        assert cached == (len(ids) - 1) // lab.PAGE * lab.PAGE


@given(data=st.data())
def test_x13_compact_ranks_agree_in_every_tick(lab, data):
    """X-13, X-25, D-32: both make the tier's exchange or neither does, and both run the same pair of counts."""
    with contextlib.closing(lab.Pair(lab.Sizes(max_drafts=3, num_pages=40, table=FREE))) as pair:
        for number in range(data.draw(st.integers(1, 5))):
            rank = pair.ranks[data.draw(st.integers(0, 1))]
            rank.submit(lab.request(f"r{number}", data.draw(st.integers(1, 20)), max_tokens=12))
            pair.tick(data.draw(st.integers(0, 3)))
        pair.drain()
        plans = [rank.device.plans for rank in pair.ranks]
        assert [plan.speculation for plan in plans[0]] == [plan.speculation for plan in plans[1]]
        for rank in pair.ranks:
            rank.assert_nothing_held()
        sequences = [rank.exchange.sequence(Channel.TIER) for rank in pair.ranks]
        cut = [plan for plan in plans[0] if plan.speculation is not None and plan.speculation.is_compact]
        assert sequences[0] == sequences[1] >= len(cut)
