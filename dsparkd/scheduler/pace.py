"""What decode steps take as they are served, beside what the cost table says of the model alone.

A table is measured without exchange, scheduler and host, and on a machine that did nothing else. So each rank times its
steps and tells its peer with the next vote; both learn the longer time, and what they know stays equal. Times decide
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
NEWS_STEPS = 192  # decode steps after which a time is looked at again where it nearly decides
NEAR_SHARE = 0.8  # that near: of the other layout's speed
RETRY_STEPS = 4096  # decode steps after which it is forgotten
# A layout that nobody knows is tried where it may come so near. Drafting may be much better than a table believes; a
# plain step takes no less than its table, which leaves things out, so trials of it are for where that may be enough.
TRY_DRAFTS_SHARE = 1 / 3
TRY_PLAIN_SHARE = 0.9
KEPT_SHARE = 0.97  # of a layout's time where the step before had it: a change costs, and times are never exact
LEAST_SHARE = 0.1  # of the table's time: no step is free


class Layout(IntEnum):
    """What a decode step verifies: anchors alone, every draft, or some drafts, which waits for their chances.

    The nearer the numbers, the more alike are the steps.
    """

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
    """Seconds above the table of steps of one layout and about as many rows.

    median_s: None until there were samples enough. last: number of the last such step.
    """

    samples_s: deque[float] = field(default_factory=lambda: deque(maxlen=SAMPLES))
    median_s: float | None = None
    last: int = 0


class Pace:
    """Owned by the tick thread; equal on both ranks as long as both learn the same. max_drafts: of a row."""

    def __init__(self, table: CostTable, max_drafts: int) -> None:
        self._table = table
        self._width = 1 + max_drafts
        self._cells: dict[tuple[Layout, int], _Cell] = {}
        self._num_steps = 0

    def learn(self, step: Served, seconds: float, *, is_first: bool = False) -> None:
        """Take in how long a decode step was. is_first: the one right before it had another layout."""
        self._num_steps += 1
        if is_first:
            return  # it finishes what the one before had begun, or begins what that one has not
        place = (step.layout, step.num_rows.bit_length())
        cell = self._cells.get(place)
        if cell is None or self._age(cell) > RETRY_STEPS:
            cell = self._cells[place] = _Cell()
        if self._age(cell) > NEWS_STEPS:
            cell.samples_s.clear()  # what is known stands until there is news enough
        cell.samples_s.append(seconds - self._table_s(step))
        if len(cell.samples_s) >= KNOWN_SAMPLES:
            cell.median_s = statistics.median(cell.samples_s)
        cell.last = self._num_steps

    def excess_s(self, layout: Layout, num_rows: int, *, by_kin: bool = False) -> float:
        """What is known of such steps above the table's time, or else of those that are nearest to them.

        by_kin: where the last such steps are long ago, as if they were not known.
        """
        place = (layout, num_rows.bit_length())
        own = self._known_s(*place)
        if own is not None and not (by_kin and self._lacks_news(*place)):
            return own
        known = {each: value for each in self._cells if (value := self._known_s(*each)) is not None}
        known.pop(place, None)
        if not known:
            return 0.0
        return known[min(known, key=lambda each: (abs(each[1] - place[1]) + abs(each[0] - layout), each))]

    def seconds(self, step: Served) -> float:
        """What a step takes."""
        return self.above_table(step, self.excess_s(step.layout, step.num_rows))

    def above_table(self, step: Served, excess_s: float) -> float:
        """The table's time and so much more, or less."""
        table_s = self._table_s(step)
        return max(table_s + excess_s, LEAST_SHARE * table_s)

    def trial(self, num_rows: int, tokens_per_row: float) -> Layout | None:
        """The layout that is to be tried, because nobody knows what it takes now with so many rows; None: none is.

        tokens_per_row: what a row would bring with every draft verified. A cut layout is never tried: planners take it
        for as good as its kin now and then.
        """
        bucket = num_rows.bit_length()
        plain = 1 / self._least_seconds(Served(Layout.PLAIN, num_rows, num_rows))
        drafted = tokens_per_row / self._least_seconds(Served(Layout.ALL, num_rows, num_rows * self._width))
        if self._lacks_news(Layout.ALL, bucket):
            share = TRY_DRAFTS_SHARE if self._known_s(Layout.ALL, bucket) is None else NEAR_SHARE
            if drafted >= share * plain:
                return Layout.ALL
        if self._lacks_news(Layout.PLAIN, bucket):
            share = TRY_PLAIN_SHARE if self._known_s(Layout.PLAIN, bucket) is None else NEAR_SHARE
            if plain >= share * drafted:
                return Layout.PLAIN
        return None

    def _lacks_news(self, layout: Layout, bucket: int) -> bool:
        cell = self._cells.get((layout, bucket))
        return cell is None or self._age(cell) > NEWS_STEPS or len(cell.samples_s) < KNOWN_SAMPLES

    def _least_seconds(self, step: Served) -> float:
        """What a step takes; of one that nobody knows, what it takes if its kin say too much."""
        seconds = self.seconds(step)
        is_known = self._known_s(step.layout, step.num_rows.bit_length()) is not None
        return seconds if is_known else min(seconds, self._table_s(step))

    def _known_s(self, layout: Layout, bucket: int) -> float | None:
        """Seconds above the table that are known of a cell."""
        cell = self._cells.get((layout, bucket))
        return None if cell is None or self._age(cell) > RETRY_STEPS else cell.median_s

    def _age(self, cell: _Cell) -> int:
        return self._num_steps - cell.last

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
        # While drafting pays, cutting is about as good as verifying all; once it was slow, nobody would look again.
        by_kin = {Layout.CUT: kept is not Layout.PLAIN}
        self._excess_s = {
            layout: pace.excess_s(layout, num_rows, by_kin=by_kin.get(layout, False)) for layout in Layout
        }

    def counts(self, num_rows: int, most: int) -> Sequence[int]:
        """See StepCosts: what fills a captured tier is better than what does not, and above them each number counts."""
        tiers = [tier for tier in self._captured if tier < self._most]
        filled = {tier * num_rows // self._num_rows - num_rows for tier in tiers}
        above = self._captured[-1] * num_rows // self._num_rows - num_rows if self._captured else 0
        eager = range(above + 1, most) if above < most else ()
        return [*sorted(count for count in filled if 0 < count < most), *(count for count in eager if count > 0), most]

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
