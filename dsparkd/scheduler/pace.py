"""What decode steps take as they are served, beside what the cost table says of the model alone.

A table is measured without exchange, scheduler and host, and on a machine that did nothing else. So each rank times its
steps and tells its peer in the next agreement; both learn the longer time, and what they know stays equal. Times decide
only how much is drafted and verified, which no id depends on.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum

from dsparkd.executor.costs import CostTable
from dsparkd.executor.plan import Speculation

SAMPLES = 15  # of a cell, the latest; their median is what is known of it
KNOWN_SAMPLES = 3  # fewer say nothing
RETRY_STEPS = 4096  # decode steps after which what was measured is no news any more
# A layout that nobody knows is tried where it may come so near. Drafting may be much better than a table believes; a
# plain step takes no less than its table, which leaves things out, so trials of it are for where that may be enough.
TRY_DRAFTS_SHARE = 1 / 3
TRY_PLAIN_SHARE = 0.9
KEPT_SHARE = 0.97  # of a layout's time where the step before had it: a change costs, and times are never exact
LEAST_SHARE = 0.1  # of the table's time: no step is free


class Layout(IntEnum):
    """What a decode step verifies: anchors alone, every draft, or some drafts, which waits for their chances."""

    PLAIN = 0
    ALL = 1
    CUT = 2


@dataclass(frozen=True, slots=True)
class Served:
    """A decode step that both ranks run. num_rows, num_tokens: of the rank that has more; a step takes its time."""

    layout: Layout
    num_rows: int
    num_tokens: int

    @classmethod
    def of(cls, speculation: Speculation | None, num_rows: tuple[int, int]) -> Served:
        """The step of an agreement."""
        if speculation is None:
            return cls(Layout.PLAIN, max(num_rows), max(num_rows))
        layout = Layout.CUT if speculation.is_compact else Layout.ALL
        return cls(layout, max(num_rows), max(speculation.num_tokens))


@dataclass(slots=True)
class _Cell:
    """Seconds above the table of steps of one layout and about as many rows. last: number of the last such step."""

    excess_s: deque[float] = field(default_factory=lambda: deque(maxlen=SAMPLES))
    median_s: float = 0.0
    last: int = 0


class Pace:
    """Owned by the tick thread; equal on both ranks as long as both learn the same. max_drafts: of a row."""

    def __init__(self, table: CostTable, max_drafts: int) -> None:
        self._table = table
        self._width = 1 + max_drafts
        self._cells: dict[tuple[Layout, int], _Cell] = {}
        self._num_steps = 0
        self._before: Layout | None = None  # of the decode step right before the one that is learned next

    def learn(self, step: Served, seconds: float) -> None:
        """Take in how long a decode step was, from its agreement to the next one's; 0: another kind came behind it."""
        self._num_steps += 1
        before, self._before = self._before, step.layout if seconds else None
        if not seconds or before not in (None, step.layout):
            return  # the first step of a layout finishes what the one before it had begun, or begins what is missing
        place = (step.layout, step.num_rows.bit_length())
        cell = self._cells.get(place)
        if cell is None or self._is_old(cell):
            cell = self._cells[place] = _Cell()
        cell.excess_s.append(seconds - self._table_s(step))
        cell.median_s = statistics.median(cell.excess_s)
        cell.last = self._num_steps

    def excess_s(self, layout: Layout, num_rows: int) -> float:
        """What is known of such steps above the table's time, or else of those that are nearest to them."""
        bucket = num_rows.bit_length()
        known = [place for place in self._cells if self._is_known(*place)]
        if not known:
            return 0.0
        nearest = min(known, key=lambda place: (abs(place[1] - bucket) + (place[0] is not layout), place))
        return self._cells[nearest].median_s

    def seconds(self, step: Served) -> float:
        """What a step takes."""
        return self.above_table(step, self.excess_s(step.layout, step.num_rows))

    def above_table(self, step: Served, excess_s: float) -> float:
        """The table's time and so much more, or less."""
        table_s = self._table_s(step)
        return max(table_s + excess_s, LEAST_SHARE * table_s)

    def trial(self, num_rows: int, tokens_per_row: float) -> Layout | None:
        """The layout that is to be tried, because nobody knows what it takes with so many rows; None: there is none.

        tokens_per_row: what a row would bring with every draft verified, as both ranks see it.
        """
        bucket = num_rows.bit_length()
        plain = 1 / self._least_seconds(Served(Layout.PLAIN, num_rows, num_rows))
        drafted = tokens_per_row / self._least_seconds(Served(Layout.ALL, num_rows, num_rows * self._width))
        if not self._is_known(Layout.ALL, bucket) and drafted >= TRY_DRAFTS_SHARE * plain:
            return Layout.ALL
        if not self._is_known(Layout.PLAIN, bucket) and plain >= TRY_PLAIN_SHARE * drafted:
            return Layout.PLAIN
        return None

    def _least_seconds(self, step: Served) -> float:
        """What a step takes; of one that nobody knows, what it takes if its kin say too much."""
        seconds = self.seconds(step)
        is_known = self._is_known(step.layout, step.num_rows.bit_length())
        return seconds if is_known else min(seconds, self._table_s(step))

    def _is_known(self, layout: Layout, bucket: int) -> bool:
        cell = self._cells.get((layout, bucket))
        return cell is not None and len(cell.excess_s) >= KNOWN_SAMPLES and not self._is_old(cell)

    def _is_old(self, cell: _Cell) -> bool:
        return self._num_steps - cell.last > RETRY_STEPS

    def _table_s(self, step: Served) -> float:
        drafting_s = 0.0 if step.layout is Layout.PLAIN else self._table.draft_seconds(step.num_rows)
        return self._table.seconds(step.num_rows, step.num_tokens) + drafting_s


class PairCosts:
    """What steps of both ranks take, as one of them plans its own part: its peer is taken to draft as widely.

    num_rows: of the rank that has more. captured: ascending numbers of tokens that steps are captured for. kept: the
    layout of the step before, which is left only for one that is clearly better.
    """

    def __init__(
        self, pace: Pace, num_rows: int, max_drafts: int, captured: Sequence[int], kept: Layout | None
    ) -> None:
        self._pace = pace
        self._num_rows = num_rows
        self._most = num_rows * (1 + max_drafts)
        self._captured = captured
        self._kept = kept
        self._excess_s = {layout: pace.excess_s(layout, num_rows) for layout in Layout}

    def plain_seconds(self, num_rows: int) -> float:
        """See StepCosts."""
        return self._seconds(Served(Layout.PLAIN, self._num_rows, self._num_rows))

    def drafted_seconds(self, num_rows: int, num_drafts: int) -> float:
        """See StepCosts."""
        num_tokens = -(-self._num_rows * (num_rows + num_drafts) // num_rows)
        num_tokens = next((tier for tier in self._captured if tier >= num_tokens), num_tokens)
        layout = Layout.CUT if num_tokens < self._most else Layout.ALL
        return self._seconds(Served(layout, self._num_rows, min(num_tokens, self._most)))

    def _seconds(self, step: Served) -> float:
        seconds = self._pace.above_table(step, self._excess_s[step.layout])
        return KEPT_SHARE * seconds if step.layout is self._kept else seconds
