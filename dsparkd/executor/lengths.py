"""Verify lengths: how many drafts a step verifies, and which (model.md 5.7). Pure; torch-free.

Two decisions, apart on purpose. The budget of a step comes from the chances of an earlier one, before this step drafts;
the step then spends it on its own likeliest drafts. So whether a draft is verified depends on nothing that was known
only after it was drawn, and acceptance by rejection stays exact. The best lengths by the present chances would not do:
the chance of a draft tells of the one before it, which would be cut or kept by what it is.

Chances are survivals: that a draft and all before it in its block are accepted; they never grow along a block.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Protocol

from dsparkd.errors import InvariantError

# How much a block's chances count beside what was known of the request: one unlikely block says little of the next.
NEWS_SHARE = 0.25
LEAST_SURVIVAL = 1e-6  # a draft that is less likely is not worth a row, however cheap


class StepCosts(Protocol):
    """What a step takes."""

    def counts(self, num_rows: int, most: int) -> Sequence[int]:
        """Numbers of drafts, of all rows together, that are worth comparing; `most`, all of them, is the last."""

    def plain_seconds(self, num_rows: int) -> float:
        """One that drafts nothing."""

    def drafted_seconds(self, num_rows: int, num_drafts: int) -> float:
        """One that drafts for each row, and verifies so many drafts of all rows together."""


def plan_budget(costs: StepCosts, survivals: Sequence[Sequence[float] | None], max_verify: int) -> int:
    """Choose how many drafts the next step verifies, of all rows together, for the most tokens a second.

    0 where no drafts bring more than a step without drafting.

    survivals: of each row, what its earlier blocks were given (`blend`); None for a row that has not drafted yet, or
    not for long: all its drafts count as certain. At most max_verify drafts of a row. Among equals the fewest win.
    Raises InvariantError for a chance outside of 0..1, a length that differs or a block whose chances grow.
    """
    num_rows = len(survivals)
    if not num_rows:
        return 0
    chances = sorted((a for block in survivals for a in _chances(block, max_verify)), reverse=True)
    gains = list(itertools.accumulate(chances, initial=float(num_rows)))
    best, most = 0, num_rows / costs.plain_seconds(num_rows)
    # All of them may take less than most of them: nothing then waits for their chances.
    for count in costs.counts(num_rows, num_rows * max_verify):
        rate = gains[min(count, len(chances))] / costs.drafted_seconds(num_rows, count)
        if rate > most:
            best, most = count, rate
    return best


def blend(known: Sequence[float] | None, block: Sequence[float]) -> tuple[float, ...]:
    """What a request's chances are known to be after a block: a mean that forgets. None: certain till now."""
    before = known if known is not None else (1.0,) * len(block)
    mixed = (old + NEWS_SHARE * (new - old) for old, new in zip(before, block, strict=True))
    # A rounding must not let them grow.
    return tuple(itertools.accumulate(mixed, min))


def admit(survivals: Sequence[Sequence[float]], num_drafts: int, max_verify: int) -> tuple[int, ...]:
    """Spend a budget on the likeliest drafts: how many of each row are verified, 0..max_verify.

    Equal chances: the one nearer to its anchor first, then the earlier row. A row's drafts are admitted from the first
    on, because their chances never grow. Raises InvariantError as plan_budget does.
    """
    ranked = sorted(
        (-chance, column, row)
        for row, block in enumerate(survivals)
        for column, chance in enumerate(_chances(block, max_verify))
    )
    lengths = [0] * len(survivals)
    for _, _, row in ranked[: max(num_drafts, 0)]:
        lengths[row] += 1
    return tuple(lengths)


def _chances(block: Sequence[float] | None, max_verify: int) -> Sequence[float]:
    """A block's chances that are worth verifying, at most max_verify."""
    if block is None:
        return (1.0,) * max_verify
    if len(block) < max_verify:
        raise InvariantError(f"{len(block)} chances for {max_verify} drafts")
    previous = 1.0
    for chance in block:
        if not 0.0 <= chance <= previous:  # NaN is not between anything
            raise InvariantError(f"survival {chance} behind {previous}; it must be a chance, and never grow")
        previous = chance
    return [chance for chance in block[:max_verify] if chance >= LEAST_SURVIVAL]
