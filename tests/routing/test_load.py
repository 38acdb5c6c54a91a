"""Load board and health: what the router and /health_scheduler may conclude from snapshots."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsparkd.messages import LoadSnapshot
from dsparkd.routing.load import Load, LoadBoard, Policy, judge_ranks
from tests.routing.fakes import Clock, make_snapshot

REFRESH_S = 0.020


class Board(LoadBoard):
    """With what stands in each rank's place, and how often it was read."""

    def __init__(self, policy: Policy, clock: Clock) -> None:
        self.places: dict[int, LoadSnapshot] = {}
        self.reads = 0
        super().__init__(policy, REFRESH_S, clock, self._read_place)

    def _read_place(self, dp_rank: int) -> LoadSnapshot | None:
        self.reads += 1
        return self.places.get(dp_rank)

    def offer(self, snapshot: LoadSnapshot) -> None:
        self.places[snapshot.dp_rank] = snapshot


def make_board(policy: Policy = "tokens", clock: Clock | None = None) -> Board:
    return Board(policy, clock or Clock())


def least_loaded(board: LoadBoard) -> int:
    return min(range(2), key=lambda rank: board.order(rank, Load()))


_loads = st.tuples(st.integers(0, 5), st.integers(0, 5))


@given(first=_loads, second=_loads, policy=st.sampled_from(["tokens", "requests"]))
def test_r10_smallest_load_wins_and_ties_go_to_the_lower_rank(
    first: tuple[int, int], second: tuple[int, int], policy: Policy
) -> None:
    """R-10: against a reference in a few lines; a replay must route alike, so equal loads have one answer."""
    board = make_board(policy)
    for rank, (requests, tokens) in enumerate((first, second)):
        board.offer(make_snapshot(rank, 1, outstanding_requests=requests, outstanding_tokens=tokens))
    board.refresh()

    def key(rank: int) -> tuple[int, int, int]:
        requests, tokens = (first, second)[rank]
        return (requests, tokens, rank) if policy == "requests" else (tokens, requests, rank)

    assert least_loaded(board) == min((0, 1), key=key)


def test_r11_dispatched_items_count_at_once_and_are_taken_back() -> None:
    """R-11: one request and its prompt tokens each, gone when the item ends."""
    board = make_board()
    board.add(0, 1, 10)
    board.add(0, 1, 5)
    board.add(0, 2, 7)
    assert board.speculative_load(0) == Load(3, 22)
    board.take_back(0, 1, 10)
    assert board.speculative_load(0) == Load(2, 12)
    board.take_back(0, 1, 5)
    board.take_back(0, 2, 7)
    assert board.speculative_load(0) == Load()


def test_r12_a_burst_splits_evenly_over_a_stale_snapshot() -> None:
    """R-12: a snapshot that cannot know of the burst is re-published each millisecond: 32/32, one refresh in 20 ms."""
    clock = Clock()
    board = make_board(clock=clock)
    counts = [0, 0]
    results = []
    for step in range(64):
        for rank in range(2):
            board.offer(make_snapshot(rank, step + 1, frame=0))
        results.append(board.refresh())
        rank = least_loaded(board)
        counts[rank] += 1
        board.add(rank, counts[rank], 8)
        clock.advance(0.001)
    assert counts == [32, 32]
    assert results.count("fresh") == 4  # at 0, 20, 40 and 60 ms
    assert board.reads == 2 * 4
    assert set(results) == {"fresh", "throttled"}


def test_r12_a_snapshot_absorbs_exactly_the_frames_it_has_taken_in() -> None:
    """R-12: increments of later frames stay on top of it; those it covers count through it only."""
    clock = Clock()
    board = make_board(clock=clock)
    for frame in (1, 2, 3):
        board.add(0, frame, 10)
    board.offer(make_snapshot(0, 1, frame=2, outstanding_requests=2, outstanding_tokens=15))
    board.refresh()
    assert (board.snapshot_load(0), board.speculative_load(0)) == (Load(2, 15), Load(1, 10))
    board.take_back(0, 1, 10)  # its end is the snapshot's business now
    assert board.speculative_load(0) == Load(1, 10)


def test_r13_snapshots_that_are_not_newer_change_nothing() -> None:
    """R-13: old and equal sequences, and none at all."""
    clock = Clock()
    board = make_board(clock=clock)
    board.offer(make_snapshot(0, 5, outstanding_tokens=50))
    assert board.refresh() == "fresh"
    for sequence in (4, 5):
        clock.advance(1)
        board.offer(make_snapshot(0, sequence, outstanding_tokens=1))
        assert board.refresh() == "unchanged"
    assert board.snapshot_load(0) == Load(0, 50)
    board.add(1, 1, 3)
    assert (board.snapshot_load(1), board.speculative_load(1)) == (Load(), Load(1, 3))


NOW = 100_000_000_000


def verdicts(*snapshots: LoadSnapshot) -> list[tuple[int, str]]:
    judged = judge_ranks(list(snapshots), NOW, max_age_s=30, max_skew_s=5)
    assert all(rank.ok == (rank.reason == "ok") for rank in judged)
    return [(rank.dp_rank, rank.reason) for rank in judged]


def at(dp_rank: int, age_s: float) -> LoadSnapshot:
    return make_snapshot(dp_rank, 1, published_ns=NOW - int(age_s * 1e9))


@pytest.mark.parametrize(
    ("snapshots", "expected"),
    [
        ((at(0, 0), at(1, 30)), [(0, "ok"), (1, "ok")]),
        ((at(0, 0), at(1, 30.001)), [(0, "ok"), (1, "stale")]),
        ((at(0, -5), at(1, -5.001)), [(0, "ok"), (1, "future")]),
        ((at(0, 0),), [(0, "ok"), (1, "missing")]),
        ((), [(0, "missing"), (1, "missing")]),
        ((at(0, 0), at(0, 1)), [(0, "duplicate"), (1, "missing")]),
        ((at(0, 0), at(1, 0), at(2, 0)), [(0, "ok"), (1, "ok"), (2, "unexpected")]),
        ((at(0, 0), make_snapshot(1, 1, published_ns=0)), [(0, "ok"), (1, "no_time")]),
    ],
)
def test_l11_each_rank_needs_exactly_one_fresh_snapshot(
    snapshots: tuple[LoadSnapshot, ...], expected: list[tuple[int, str]]
) -> None:
    """L-11: stale, future, missing, duplicate, unexpected and without a time, each with its reason."""
    assert verdicts(*snapshots) == expected


def test_l11_the_verdict_carries_age_tick_and_parked() -> None:
    """L-11: what an operator needs to see beside the verdict."""
    parked = make_snapshot(0, 9, published_ns=NOW - 2_000_000_000, parked=True)
    judged = judge_ranks([parked], NOW, max_age_s=30, max_skew_s=5)
    assert (judged[0].age_s, judged[0].tick, judged[0].parked) == (2.0, 9, True)
    assert (judged[1].age_s, judged[1].tick, judged[1].parked) == (None, None, None)
