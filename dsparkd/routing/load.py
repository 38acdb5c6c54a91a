"""Load board: what each rank last said of itself, plus what was sent to it since.

Two readers: the router takes the least loaded rank, and health judges whether the ranks still speak. Owned by the
event loop of the parent.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from dsparkd.messages import LoadSnapshot

NUM_RANKS = 2
Policy = Literal["tokens", "requests"]


@dataclass(frozen=True, slots=True)
class Load:
    """Outstanding work of a rank."""

    requests: int = 0
    tokens: int = 0

    def __add__(self, other: Load) -> Load:
        return Load(self.requests + other.requests, self.tokens + other.tokens)


class LoadBoard:
    """Snapshots of both ranks with the router's own counts on top.

    A snapshot carries the number of the last frame that its rank had taken in. Counts of later frames stay on top of
    it, so a burst's own counts are never overwritten by a snapshot that cannot know of them.
    clock: CLOCK_MONOTONIC nanoseconds. read: what a rank last said, None before it said anything.
    """

    def __init__(
        self,
        policy: Policy,
        refresh_s: float,
        clock: Callable[[], int],
        read: Callable[[int], LoadSnapshot | None],
    ) -> None:
        self._policy = policy
        self._refresh_ns = int(refresh_s * 1e9)
        self._clock = clock
        self._read = read
        self._held: list[LoadSnapshot | None] = [None] * NUM_RANKS
        self._sent: list[dict[int, Load]] = [{} for _ in range(NUM_RANKS)]  # frame -> what of it is still counted here
        self._refreshed_ns: int | None = None

    def refresh(self) -> Literal["fresh", "throttled", "unchanged"]:
        """Take over what the ranks said, at most once in refresh_s; what is not newer changes nothing."""
        now = self._clock()
        if self._refreshed_ns is not None and now - self._refreshed_ns < self._refresh_ns:
            return "throttled"
        self._refreshed_ns = now
        latest = [self._newer(rank) for rank in range(NUM_RANKS)]
        if latest == self._held:
            return "unchanged"
        self._held = latest
        for rank, snapshot in enumerate(self._held):
            if snapshot is not None:
                self._sent[rank] = {frame: load for frame, load in self._sent[rank].items() if frame > snapshot.frame}
        return "fresh"

    def _newer(self, dp_rank: int) -> LoadSnapshot | None:
        """What stands on the board if it is newer than what is held, else that."""
        held, found = self._held[dp_rank], self._read(dp_rank)
        if found is None or (held is not None and found.sequence <= held.sequence):
            return held
        return found

    def add(self, dp_rank: int, frame: int, tokens: int) -> None:
        """Count one dispatched item."""
        sent = self._sent[dp_rank]
        sent[frame] = sent.get(frame, Load()) + Load(1, tokens)

    def take_back(self, dp_rank: int, frame: int, tokens: int) -> None:
        """Uncount an item that ended or was never delivered; nothing to do once a snapshot has covered its frame."""
        sent = self._sent[dp_rank]
        left = sent.pop(frame, Load()) + Load(-1, -tokens)
        if left.requests > 0:
            sent[frame] = left

    def snapshot_load(self, dp_rank: int) -> Load:
        """What the rank said of itself, as of the last refresh."""
        held = self._held[dp_rank]
        return Load() if held is None else Load(held.outstanding_requests, held.outstanding_tokens)

    def speculative_load(self, dp_rank: int) -> Load:
        """What was sent to the rank and is not yet in its snapshot."""
        return sum(self._sent[dp_rank].values(), Load())

    def current(self, dp_rank: int) -> tuple[Load, Load]:
        """What the rank said last, and what was sent to it since: for those who watch, not for routing.

        Without requests nothing is refreshed, and a gauge of the last refresh would show a burst for ever.
        """
        latest = self._newer(dp_rank)
        if latest is None:
            return Load(), self.speculative_load(dp_rank)
        said = Load(latest.outstanding_requests, latest.outstanding_tokens)
        return said, sum((load for frame, load in self._sent[dp_rank].items() if frame > latest.frame), Load())

    def order(self, dp_rank: int, planned: Load) -> tuple[int, int, int]:
        """Sort key of a rank: the smallest gets the next item. Equal loads are decided by the rank's number.

        planned: what the batch that is being routed has already put there.
        """
        load = self.snapshot_load(dp_rank) + self.speculative_load(dp_rank) + planned
        if self._policy == "requests":
            return load.requests, load.tokens, dp_rank
        return load.tokens, load.requests, dp_rank


@dataclass(frozen=True, slots=True)
class RankHealth:
    """Verdict on one rank. age_s, tick and parked are None without a snapshot."""

    dp_rank: int
    ok: bool
    reason: str
    age_s: float | None = None
    tick: int | None = None
    parked: bool | None = None


def judge_ranks(snapshots: list[LoadSnapshot], now_ns: int, *, max_age_s: float, max_skew_s: float) -> list[RankHealth]:
    """Judge each expected rank, and each unexpected one, by its only snapshot. No inference, no waiting.

    snapshots: the latest of every channel. now_ns: CLOCK_MONOTONIC. An age below -max_skew_s is a stamp from the
    future and as unhealthy as one that is too old.
    """
    by_rank: dict[int, list[LoadSnapshot]] = {rank: [] for rank in range(NUM_RANKS)}
    for snapshot in snapshots:
        by_rank.setdefault(snapshot.dp_rank, []).append(snapshot)
    return [_judge_rank(rank, found, now_ns, max_age_s, max_skew_s) for rank, found in sorted(by_rank.items())]


def _judge_rank(
    dp_rank: int, found: list[LoadSnapshot], now_ns: int, max_age_s: float, max_skew_s: float
) -> RankHealth:
    if not found:
        return RankHealth(dp_rank, False, "missing")
    latest = max(found, key=lambda snapshot: snapshot.published_ns)
    age_s = (now_ns - latest.published_ns) / 1e9
    if not 0 <= dp_rank < NUM_RANKS:
        reason = "unexpected"
    elif len(found) > 1:
        reason = "duplicate"
    elif latest.published_ns <= 0:
        reason = "no_time"
    elif age_s > max_age_s:
        reason = "stale"
    elif age_s < -max_skew_s:
        reason = "future"
    else:
        reason = "ok"
    return RankHealth(dp_rank, reason == "ok", reason, age_s, latest.tick, latest.parked)
