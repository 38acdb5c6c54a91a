"""Masks: which ids each row with a grammar may choose from, one walk a step over all of them.

A chain has `width` nodes, the anchor and what is drafted behind it; its mask rows lie together. Where the walk's memory
lies, and when it runs, is the business of grammar/pipeline.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dsparkd.errors import FatalError, InvariantError
from dsparkd.executor.plan import PlanRow, RowFailure
from dsparkd.native.traversal import Traversal, Walk, WalkStatus

if TYPE_CHECKING:
    from dsparkd.grammar.matcher import Matcher
    from dsparkd.grammar.pipeline import Slot

NO_DRAFT = -1  # no id: every grammar refuses it, so a chain ends before it
# How often the time of a walk a request may take beyond it, in processor time, over its whole life.
OVERTIME_FACTOR = 10
_NO_IDS = np.empty(0, np.int64)
MAX_STUCK = 32  # steps that were given up and still run: each holds a thread and its memory


@dataclass(frozen=True, slots=True)
class Held:
    """What a grammar says of one row's window, which has a logit row for its anchor and each of its drafts.

    place: of its chain among the masks. first: the first logit row that the grammar holds, more than 0 only where
    it begins behind a draft. usable: leading logit rows that may be drawn from; drafts behind them cannot be accepted.
    """

    place: int
    first: int
    usable: int


@dataclass(frozen=True, slots=True)
class Masks:
    """What the grammars say of one step. rows: by plan index; their mask rows are place * width + j, j a row of the
    window. failures: by plan index.
    """

    rows: dict[int, Held]
    width: int
    failures: dict[int, RowFailure]


@dataclass(frozen=True, slots=True)
class _Chain:
    """A row in the walk. index: of its plan row. first: the first logit row that its grammar holds."""

    index: int
    matcher: Matcher
    first: int
    num_drafts: int


class Masker:
    """Owned by the tick thread. clock: CLOCK_MONOTONIC nanoseconds, as the traversal reads it.

    num_rows: most constrained rows of a step. width: nodes of a chain, at least 1. timeout_s: after it a walk begins
    with no further node; a request whose walks have taken OVERTIME_FACTOR times as much beyond it, over its whole life
    and in processor time, is given up. hang_s: processor time after which a step that was given up must have ended.
    think_end_id: ends the reasoning.
    """

    def __init__(
        self,
        traversal: Traversal,
        num_rows: int,
        width: int,
        vocab_size: int,
        timeout_s: float,
        hang_s: float,
        *,
        think_end_id: int | None = None,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self.num_rows, self.width, self.vocab_size = num_rows, width, vocab_size
        self.think_end_id = think_end_id
        self._traversal = traversal
        self._timeout_ns = int(timeout_s * 1e9)
        self._hang_s = hang_s
        self._clock = clock
        # Tells commits alone: its mask and drafts are never touched, but a walk has them.
        words = np.zeros((num_rows, -(-vocab_size // 32)), np.int32)
        self._commits = Walk(np.zeros((num_rows, 1), np.int64), words, vocab_size, max_commits=width)

    def begin(self, rows: Sequence[PlanRow], lengths: Sequence[int]) -> StepGrammars | None:
        """What the grammars of a step will do; lengths: drafts of each row. None where no row has a grammar."""
        if not any(row.matcher is not None for row in rows):
            return None
        return StepGrammars(self, rows, lengths)

    def commit(self, matchers: Sequence[Matcher]) -> list[RowFailure | None]:
        """Tell grammars the ids of rows that take part in no walk any more, and say which of them cannot be right.

        Raises as `run`.
        """
        walk = self._commits
        self.lay(walk, matchers, [0] * len(matchers), commits_only=True)
        self.run(walk)
        self.charge(walk, matchers)
        sound = (WalkStatus.WALKED, WalkStatus.ENDED)
        return [
            None if walk.status(request) in sound else self.failure(walk, request) for request in range(len(matchers))
        ]

    def lay(self, walk: Walk, matchers: Sequence[Matcher], roots: Sequence[int], *, commits_only: bool) -> None:
        """Add each matcher with what its row kept, which it hears first thing and only now (D-09)."""
        walk.begin(len(matchers), commits_only=commits_only)
        firsts: dict[int, int] = {}
        for tree, (matcher, root) in enumerate(zip(matchers, roots, strict=True)):
            left_ns = max(OVERTIME_FACTOR * self._timeout_ns - matcher.overtime_ns, 0)
            walk.add(
                matcher.handle,
                tree,
                root=root,
                commits=matcher.take_queue(),
                grammar=firsts.setdefault(id(matcher.compiled), tree),
                budget_ns=self._timeout_ns + left_ns,
            )

    def run(self, walk: Walk) -> int:
        """Walk, and return the nanoseconds that it took; on any thread, one walk at a time.

        Raises InvariantError for a walk that cannot be right.
        """
        begun_ns = self._clock()
        self._traversal.run(walk, begun_ns + self._timeout_ns)
        return self._clock() - begun_ns

    def charge(self, walk: Walk, matchers: Sequence[Matcher]) -> None:
        """Charge each request what its walk took. Raises FatalError for what was given up and does not end: nothing
        can stop it, and its memory may grow."""
        for request, matcher in enumerate(matchers):
            matcher.overtime_ns += max(int(walk.spent_ns[request]) - self._timeout_ns, 0)
            matcher.is_stuck = walk.status(request) is WalkStatus.STUCK
        num_stuck, longest_ns = self._traversal.stuck()
        if num_stuck > MAX_STUCK or longest_ns > self._hang_s * 1e9:
            longest = f"the longest has taken {longest_ns / 1e9:.1f} s"
            raise FatalError(f"{num_stuck} grammar steps that were given up do not end; {longest}")

    def failure(self, walk: Walk, request: int) -> RowFailure | None:
        """Why a request has not even the row of its next id; all its rows are ones then."""
        match walk.status(request):
            case WalkStatus.WALKED | WalkStatus.LATE if walk.usable_rows[request] > 0:
                return None
            case WalkStatus.LATE | WalkStatus.STUCK:
                text = "the grammar's next step took too long"
                return RowFailure(504, "grammar_traversal_timeout", text)
            case WalkStatus.COMMIT_REFUSED | WalkStatus.ENDED:
                return RowFailure(500, "grammar_violation", "the answer left its grammar, so a mask was wrong")
            case WalkStatus.NO_TOKEN:
                text = "no token can follow what the answer has so far; the grammar has a dead end"
                return RowFailure(400, "grammar_dead_end", text)
            case WalkStatus.MATCHER_FAILED | WalkStatus.WALKED:
                text = f"the grammar's matcher failed: {walk.message(request) or 'it gives no reason'}"
                return RowFailure(500, "grammar_traversal_failed", text)
            case status:
                raise InvariantError(f"a grammar's walk ended as {status.name}")

    def close(self) -> None:
        """End the traversal's threads."""
        self._traversal.close()


class StepGrammars:
    """The grammars of one step: what grammar/pipeline.py runs once the drafted ids are on the host, and what it found.

    A reasoning row is held from the draft on that ends the reasoning, so not before its drafts are known.
    """

    def __init__(self, masker: Masker, rows: Sequence[PlanRow], lengths: Sequence[int]) -> None:
        self._masker = masker
        self._rows = rows
        self._lengths = lengths
        self._chains: list[_Chain] = []

    def lay(self, walk: Walk, ids: NDArray[np.int64]) -> int:
        """See grammar.pipeline.Work."""
        masker = self._masker
        for index, (row, length) in enumerate(zip(self._rows, self._lengths, strict=True)):
            if row.matcher is None:
                continue
            drafts = ids[index, 1 : 1 + length] if length else _NO_IDS
            first = grammar_start(row, drafts.tolist(), masker.think_end_id)
            if first > length:
                continue
            tree = len(self._chains)
            walk.drafts[tree] = NO_DRAFT
            walk.drafts[tree, 1 : 1 + length] = drafts
            self._chains.append(_Chain(index, row.matcher, first, length))
        if not self._chains:
            return 0
        matchers, roots = self._matchers(), [chain.first for chain in self._chains]
        masker.lay(walk, matchers, roots, commits_only=False)
        return len(self._chains) * masker.width

    def run(self, walk: Walk) -> int:
        """See grammar.pipeline.Work."""
        return self._masker.run(walk)

    def masks(self, slot: Slot) -> Masks:
        """What the walk of a finished step found; once. Raises as Masker.charge."""
        walk = slot.walk
        if walk is None:
            raise InvariantError("masks of a step that has no walk")
        if self._chains:
            self._masker.charge(walk, self._matchers())
        found, failures = {}, {}
        for place, chain in enumerate(self._chains):
            failure = self._masker.failure(walk, place)
            # Before its first row the grammar holds nothing; what is wrong with it shows when that row is the anchor's,
            # unless nothing may be asked of it any more.
            if failure is not None and (chain.first == 0 or chain.matcher.is_stuck):
                failures[chain.index] = failure
            usable = min(max(int(walk.usable_rows[place]), chain.first), 1 + chain.num_drafts)
            found[chain.index] = Held(place, chain.first, usable)
        return Masks(found, self._masker.width, failures)

    def _matchers(self) -> list[Matcher]:
        return [chain.matcher for chain in self._chains]


def grammar_start(row: PlanRow, drafts: Sequence[int], think_end_id: int | None) -> int:
    """The first logit row of a window that a grammar holds; behind the window while the reasoning goes on (D-16)."""
    if not row.is_thinking:
        return 0
    return drafts.index(think_end_id) + 1 if think_end_id in drafts else len(drafts) + 1


def allowed_ids(words: Tensor, vocab_size: int) -> Tensor:
    """Unpack mask rows: words [R, N] int32 -> [R, vocab_size] bool, on the same device."""
    bits = torch.arange(32, dtype=torch.int32, device=words.device)
    return ((words[:, :, None] >> bits) & 1).view(words.shape[0], -1)[:, :vocab_size].bool()
