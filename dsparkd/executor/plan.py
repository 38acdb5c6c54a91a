"""Plan: what one rank executes in one tick. Built by scheduler/policy.py, read by the executor; pure data."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from dsparkd.messages import SamplingParams


class StepKind(IntEnum):
    """Agreed kind of a tick; values are field 5 of the plan exchange (contracts 4.2)."""

    IDLE = 0
    PREFILL = 1
    MIXED = 2
    DECODE = 3


@dataclass(frozen=True, slots=True)
class PlanRow:
    """One request's share of a step.

    slot: index of its rings; never 0, which belongs to padding.
    input_ids: the tokens to process, at positions start .. start + len - 1.
    page_table: page ids from the sequence's first page on; covers start + len tokens. Page 0 belongs to padding.
    num_logits: how many trailing tokens of input_ids need logits: 0 for a chunk that is not a prompt's last,
        1 for a last chunk or decode row, more for prompt log-probabilities (and verify rows later).
    sampling: None when no token is sampled from this row in this step.
    prompt_ids, output_ids: the whole history before this step (for penalties and min_tokens).
    """

    request_id: str
    slot: int
    input_ids: tuple[int, ...]
    start: int
    page_table: tuple[int, ...]
    num_logits: int
    sampling: SamplingParams | None
    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """Rows in execution order: decode rows first, then prefill chunks. Empty for an idle rank."""

    kind: StepKind
    rows: tuple[PlanRow, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens to process on this rank."""
        return sum(len(row.input_ids) for row in self.rows)
