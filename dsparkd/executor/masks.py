"""Masks: which ids each row with a grammar may choose from, one walk a step over all of them.

Memory is made once. A chain has `width` nodes, the anchor and what is drafted behind it; its mask rows lie together.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from dsparkd.errors import FatalError, InvariantError
from dsparkd.executor.plan import PlanRow, RowFailure
from dsparkd.native.traversal import Traversal, Walk, WalkStatus

if TYPE_CHECKING:
    from dsparkd.grammar.matcher import Matcher

NO_DRAFT = -1  # no id: every grammar refuses it, so a chain ends before it
# How often the time of a walk a request may take beyond it, in processor time, over its whole life.
OVERTIME_FACTOR = 10
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
    """Masks of one step. Letters: R constrained rows, W width, N words of 32 ids.

    rows: by plan index. words [R * W, N] int32, on the host: bit id % 32 of word id // 32; row place * W + j holds what
    may follow draft j of its row. failures: by plan index.
    """

    rows: dict[int, Held]
    width: int
    words: Tensor
    failures: dict[int, RowFailure]
    walk_ns: int


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
        pin: bool = False,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._traversal = traversal
        self.think_end_id = think_end_id
        self._width = width
        self._timeout_ns = int(timeout_s * 1e9)
        self._hang_s = hang_s
        self._clock = clock
        num_words = -(-vocab_size // 32)
        self._mask = torch.full((num_rows * width, num_words), -1, dtype=torch.int32, pin_memory=pin)
        drafts = np.zeros((num_rows, width), np.int64)
        # A step keeps at most a chain of ids of a row, and the next walk hears of them.
        self._walk = Walk(drafts, self._mask.numpy(), vocab_size, max_commits=width)

    def fill(self, rows: Sequence[PlanRow], drafts: Sequence[tuple[int, ...]] = ()) -> Masks | None:
        """Tell each grammar what its row kept and find what may follow that and each of the row's drafts, if any.

        None where no row is held by a grammar. A reasoning row is held from the draft on that ends the reasoning.
        Raises InvariantError for a walk that cannot be right, FatalError for a step that does not end.
        """
        drafts = drafts or ((),) * len(rows)
        held = [
            (index, row.matcher, first)
            for index, (row, drafted) in enumerate(zip(rows, drafts, strict=True))
            if row.matcher is not None and (first := grammar_start(row, drafted, self.think_end_id)) <= len(drafted)
        ]
        if not held:
            return None
        for tree, (index, _, _) in enumerate(held):
            self._walk.drafts[tree] = NO_DRAFT
            self._walk.drafts[tree, 1 : 1 + len(drafts[index])] = drafts[index]
        walk_ns = self._run([matcher for _, matcher, _ in held], [first for _, _, first in held], commits_only=False)
        found, failures = {}, {}
        for place, (index, matcher, first) in enumerate(held):
            failure = self._failure(place)
            # Before its first row the grammar holds nothing; what is wrong with it shows when that row is the anchor's,
            # unless nothing may be asked of it any more.
            if failure is not None and (first == 0 or matcher.is_stuck):
                failures[index] = failure
            usable = min(max(int(self._walk.usable_rows[place]), first), 1 + len(drafts[index]))
            found[index] = Held(place, first, usable)
        return Masks(found, self._width, self._mask[: len(held) * self._width], failures, walk_ns)

    def commit(self, matchers: Sequence[Matcher]) -> list[RowFailure | None]:
        """Tell grammars the ids of rows that take part in no walk any more, and say which of them cannot be right.

        Masks of the last `fill` stay as they are. Raises as `fill`.
        """
        self._run(matchers, [0] * len(matchers), commits_only=True)
        sound = (WalkStatus.WALKED, WalkStatus.ENDED)
        return [
            None if self._walk.status(request) in sound else self._failure(request) for request in range(len(matchers))
        ]

    def _run(self, matchers: Sequence[Matcher], roots: Sequence[int], *, commits_only: bool) -> int:
        """Walk from these rows on, charge each request what it took, and return the nanoseconds of the whole."""
        walk = self._walk
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
        begun_ns = self._clock()
        self._traversal.run(walk, begun_ns + self._timeout_ns)
        walk_ns = self._clock() - begun_ns
        for request, matcher in enumerate(matchers):
            matcher.overtime_ns += max(int(walk.spent_ns[request]) - self._timeout_ns, 0)
            matcher.is_stuck = walk.status(request) is WalkStatus.STUCK
        self._require_ends()
        return walk_ns

    def _require_ends(self) -> None:
        """Raise FatalError when what was given up does not end: nothing can stop it, and its memory may grow."""
        num_stuck, longest_ns = self._traversal.stuck()
        if num_stuck > MAX_STUCK or longest_ns > self._hang_s * 1e9:
            longest = f"the longest has taken {longest_ns / 1e9:.1f} s"
            raise FatalError(f"{num_stuck} grammar steps that were given up do not end; {longest}")

    def _failure(self, request: int) -> RowFailure | None:
        """Why a request has not even the row of its next id; all its rows are ones then."""
        walk = self._walk
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


def grammar_start(row: PlanRow, drafts: Sequence[int], think_end_id: int | None) -> int:
    """The first logit row of a window that a grammar holds; behind the window while the reasoning goes on (D-16)."""
    if not row.is_thinking:
        return 0
    return drafts.index(think_end_id) + 1 if think_end_id in drafts else len(drafts) + 1


def allowed_ids(words: Tensor, vocab_size: int) -> Tensor:
    """Unpack mask rows: words [R, N] int32 -> [R, vocab_size] bool, on the same device."""
    bits = torch.arange(32, dtype=torch.int32, device=words.device)
    return ((words[:, :, None] >> bits) & 1).view(words.shape[0], -1)[:, :vocab_size].bool()
