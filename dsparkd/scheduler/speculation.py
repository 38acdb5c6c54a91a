"""How much of what is drafted a decode step verifies, agreed by both ranks. Owned by the tick thread.

The drafter's experts are collective, so both ranks draft in a step or neither does, and each knows how many tokens the
other one verifies. What a rank wants follows from chances of earlier steps that are on the host already (D-31).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from dsparkd.executor.costs import CostTable
from dsparkd.executor.lengths import plan_budget
from dsparkd.executor.plan import Speculation
from dsparkd.kernels.tiles import ROW_TILE
from dsparkd.scheduler.agreement import UNKNOWN_TIER, agree_tier
from dsparkd.scheduler.pace import Layout, Pace, PairCosts, Served
from dsparkd.scheduler.request import Request

# Decode steps after which chances are no news any more: rows that were not drafted for meanwhile are tried again.
STALE_STEPS = 256


class TierVote(NamedTuple):
    """What a rank says in the tier's exchange.

    wanted: tokens that it would verify, UNKNOWN_TIER without a cost table. step_ns: time of the decode step before,
    from its agreement to this one; 0 where another kind of step came between. gain_millionths: tokens that its rows
    would bring with every draft verified, by earlier chances.
    """

    wanted: int
    step_ns: int
    gain_millionths: int


class SpeculationPlanner:
    """Decides by the cost table and by what steps really take where layouts are compact, else verifies every draft.

    max_drafts: of a row, 0 where nothing is drafted. max_rows: of a rank. table: None where every draft pays. captured:
    ascending numbers of tokens that steps are captured for; empty where they run eager.
    """

    def __init__(
        self,
        max_drafts: int,
        max_rows: int,
        *,
        is_compact: bool = False,
        table: CostTable | None = None,
        captured: Sequence[int] = (),
    ) -> None:
        self.max_drafts = max_drafts
        self.is_compact = is_compact and max_drafts > 0
        self._pace = Pace(table, max_drafts) if table is not None else None
        self._step: Served | None = None  # the last decode step
        self._tokens_per_row = 1.0
        self._captured = tuple(captured)
        most = -(-max_rows * (1 + max_drafts) // ROW_TILE) * ROW_TILE
        above = captured[-1] if captured else 0
        self._tiers = (*captured, *(tier for tier in range(ROW_TILE, most + 1, ROW_TILE) if tier > above))

    def vote(self, requests: Sequence[Request], num_rows: tuple[int, int], step_ns: int) -> TierVote:
        """What this rank says of its requests. num_rows: decode rows of both ranks. step_ns: see TierVote.

        Raises InvariantError for chances that are none.
        """
        chances = [_chances(request) for request in requests]
        gain = sum(1.0 + (sum(block[: self.max_drafts]) if block is not None else self.max_drafts) for block in chances)
        return TierVote(self._wanted(chances, max(num_rows)), step_ns, round(1e6 * gain))

    def _wanted(self, chances: Sequence[tuple[float, ...] | None], most_rows: int) -> int:
        """Tokens that this rank would verify: 0 where drafting does not pay."""
        if self._pace is None:
            return UNKNOWN_TIER
        if not chances:
            return 0
        kept = self._step.layout if self._step is not None else None
        costs = PairCosts(self._pace, most_rows, self.max_drafts, self._captured, kept)
        num_drafts = plan_budget(costs, chances, self.max_drafts)
        match self._pace.trial(most_rows, self._tokens_per_row):
            case Layout.PLAIN:
                return 0
            case Layout.ALL:
                return len(chances) * (1 + self.max_drafts)
        return len(chances) + num_drafts if num_drafts else 0

    def all_drafts(self, num_rows: tuple[int, int]) -> Speculation | None:
        """The layout that needs no exchange. num_rows: decode rows, in rank order."""
        if not self.max_drafts:
            return None
        width = 1 + self.max_drafts
        return Speculation(self.max_drafts, (num_rows[0] * width, num_rows[1] * width))

    def agree(self, num_rows: tuple[int, int], votes: tuple[TierVote, TierVote]) -> Speculation | None:
        """The layout of a step by both ranks' votes, in rank order; None where neither wants to draft.

        Takes in what the step before took: the longer of both times. Raises PeerError.
        """
        speculation = self.compact(num_rows, (votes[0].wanted, votes[1].wanted))
        if self._pace is not None and self._step is not None:
            times = [vote.step_ns for vote in votes]
            self._pace.learn(self._step, max(times) / 1e9 if min(times) > 0 else 0.0)
        self._step = Served.of(speculation, num_rows)
        self._tokens_per_row = sum(vote.gain_millionths for vote in votes) / 1e6 / max(1, sum(num_rows))
        return speculation

    def compact(self, num_rows: tuple[int, int], wanted: tuple[int, int]) -> Speculation | None:
        """The layout that both ranks make of what they want; None where neither wants to draft. Raises PeerError."""
        tier = agree_tier(wanted, self._tiers)
        if not tier:
            return None
        most = [rows * (1 + self.max_drafts) for rows in num_rows]
        # A rank that would not draft does so for its peer's sake, and verifies none of it, unless a graph takes as long
        # for drafts as for padding.
        asked = [
            all_of if want == UNKNOWN_TIER else min(max(want, rows), all_of)
            for want, rows, all_of in zip(wanted, num_rows, most, strict=True)
        ]
        room = next((tier for tier in self._captured if tier >= max(asked)), 0)
        asked = [max(count, min(room, all_of)) for count, all_of in zip(asked, most, strict=True)]
        return Speculation(self.max_drafts, (asked[0], asked[1]), is_compact=asked != most)


def _chances(request: Request) -> tuple[float, ...] | None:
    """What the request's last block was given, unless that is too long ago."""
    return request.survival if request.steps_since_drafts < STALE_STEPS else None
