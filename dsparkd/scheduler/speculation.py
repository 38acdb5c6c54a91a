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
from dsparkd.scheduler.agreement import UNKNOWN_TIER, Drafting, agree_tier
from dsparkd.scheduler.pace import Layout, Pace, PairCosts, Served
from dsparkd.scheduler.request import Request

# Decode steps after which chances are no news any more: rows that were not drafted for meanwhile are tried again.
STALE_STEPS = 256


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
        self._step: Served | None = None  # the last tick's, where it was a decode step
        self._before: Served | None = None  # that of the tick before it
        self._num_rows = (0, 0)  # of the last decode step
        self.wanted = UNKNOWN_TIER
        self._captured = tuple(captured)
        most = -(-max_rows * (1 + max_drafts) // ROW_TILE) * ROW_TILE
        above = captured[-1] if captured else 0
        self._tiers = (*captured, *(tier for tier in range(ROW_TILE, most + 1, ROW_TILE) if tier > above))

    def vote(self, requests: Sequence[Request]) -> Drafting:
        """What this rank would verify of its next decode step; wanted is the number of tokens, anchors included.

        UNKNOWN_TIER without a cost table. Raises InvariantError for chances that are none.
        """
        if self._pace is None:
            self.wanted = UNKNOWN_TIER
            return Drafting.ALL
        self.wanted = self._num_wanted(self._pace, requests)
        if not self.wanted:
            return Drafting.NONE
        return Drafting.ALL if self.wanted == len(requests) * (1 + self.max_drafts) else Drafting.SOME

    def _num_wanted(self, pace: Pace, requests: Sequence[Request]) -> int:
        """Tokens that this rank would verify: 0 where drafting does not pay."""
        if not requests:
            return 0
        # The peer's rows are those of the last step: what it has now, this vote is to tell as much as to hear.
        most_rows = max(len(requests), *self._num_rows)
        chances = [_chances(request) for request in requests]
        kept = self._step.layout if self._step is not None else None
        costs = PairCosts(pace, most_rows, self.max_drafts, self._captured, kept)
        num_drafts = plan_budget(costs, chances, self.max_drafts)
        # What was last known of a row is a better guess of what all its drafts bring than none.
        known = [request.survival for request in requests]
        gains = [self.max_drafts if block is None else sum(block[: self.max_drafts]) for block in known]
        match pace.trial(most_rows, 1 + sum(gains) / len(gains)):
            case Layout.PLAIN:
                return 0
            case Layout.ALL:
                return len(requests) * (1 + self.max_drafts)
        return len(requests) + num_drafts if num_drafts else 0

    def learn(self, step_ns: int) -> None:
        """Take in what the last tick's step took, as both ranks have agreed: called once a tick, before `settle`.

        step_ns: 0 where it was no decode step.
        """
        if self._pace is not None and self._step is not None and step_ns:
            is_first = self._before is not None and self._before.layout is not self._step.layout
            self._pace.learn(self._step, step_ns / 1e9, is_first=is_first)
        self._before, self._step = self._step, None

    def settle(self, num_rows: tuple[int, int], drafting: Drafting) -> Speculation | None:
        """The layout of a decode step that needs no exchange: without drafts, or with all of them."""
        is_plain = self.is_compact and drafting is Drafting.NONE
        return self._begin(num_rows, None if is_plain else self.all_drafts(num_rows))

    def _begin(self, num_rows: tuple[int, int], speculation: Speculation | None) -> Speculation | None:
        """Note a decode step that is agreed on."""
        self._num_rows, self._step = num_rows, Served.of(speculation, num_rows)
        return speculation

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
            return self._begin(num_rows, None)
        most = [rows * (1 + self.max_drafts) for rows in num_rows]
        # A rank that would not draft does so for its peer's sake, and verifies none of it, unless a graph takes as long
        # for drafts as for padding.
        asked = [
            all_of if want == UNKNOWN_TIER else min(max(want, rows), all_of)
            for want, rows, all_of in zip(wanted, num_rows, most, strict=True)
        ]
        room = next((tier for tier in self._captured if tier >= max(asked)), 0)
        asked = [max(count, min(room, all_of)) for count, all_of in zip(asked, most, strict=True)]
        return self._begin(num_rows, Speculation(self.max_drafts, (asked[0], asked[1]), is_compact=asked != most))


def _chances(request: Request) -> tuple[float, ...] | None:
    """What the request's last block was given, unless that is too long ago."""
    return request.survival if request.steps_since_drafts < STALE_STEPS else None
