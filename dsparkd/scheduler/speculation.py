"""How much of what is drafted a decode step verifies, agreed by both ranks. Owned by the tick thread.

The drafter's experts are collective, so both ranks draft in a step or neither does, and each knows how many tokens the
other one verifies. What a rank wants follows from chances of earlier steps that are on the host already (D-31).
"""

from __future__ import annotations

from collections.abc import Sequence

from dsparkd.executor.costs import CostTable
from dsparkd.executor.lengths import plan_budget
from dsparkd.executor.plan import Speculation
from dsparkd.kernels.tiles import ROW_TILE
from dsparkd.scheduler.agreement import UNKNOWN_TIER, agree_tier
from dsparkd.scheduler.request import Request

# Decode steps after which chances are no news any more: rows that were not drafted for meanwhile are tried again.
STALE_STEPS = 64


class SpeculationPlanner:
    """Decides by the cost table where layouts are compact, else verifies every draft up to max_drafts.

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
        self._table = table
        self._captured = tuple(captured)
        most = -(-max_rows * (1 + max_drafts) // ROW_TILE) * ROW_TILE
        above = captured[-1] if captured else 0
        self._tiers = (*captured, *(tier for tier in range(ROW_TILE, most + 1, ROW_TILE) if tier > above))

    def wanted(self, requests: Sequence[Request]) -> int:
        """Tokens that this rank would verify: 0 where drafting does not pay, UNKNOWN_TIER without a cost table.

        Raises InvariantError for chances that are none.
        """
        if self._table is None:
            return UNKNOWN_TIER
        if not requests:
            return 0
        budget = plan_budget(self._table, [_chances(request) for request in requests], self.max_drafts)
        return len(requests) + budget.num_drafts if budget.pays and budget.num_drafts else 0

    def all_drafts(self, num_rows: tuple[int, int]) -> Speculation | None:
        """The layout that needs no exchange. num_rows: decode rows, in rank order."""
        if not self.max_drafts:
            return None
        width = 1 + self.max_drafts
        return Speculation(self.max_drafts, (num_rows[0] * width, num_rows[1] * width))

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
