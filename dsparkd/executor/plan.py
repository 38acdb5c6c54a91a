"""Plan: what one rank executes in one tick. Built by scheduler/policy.py, read by the executor; pure data."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING

from dsparkd.messages import SamplingParams, TokenLogprob

if TYPE_CHECKING:
    from dsparkd.grammar.matcher import Matcher


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
        1 for a last chunk or decode row, more for prompt log-probabilities and behind drafts.
    sampling: None when no token is sampled from this row in this step.
    prompt_ids, output_ids: the whole history before this step (for penalties and min_tokens).
    prompt_top_logprobs: how many alternatives to report beside each prompt token's log-probability; None when those
        are not wanted. Where they are, num_logits covers every token of input_ids, and sampling may still be None.
    matcher: the place in the grammar that sampled ids must follow; None where any id may be sampled. With is_thinking
        the grammar begins behind the end of the reasoning only, and may do so behind a draft.
    is_thinking: the id is reasoning before a grammar, which the end of the text would leave without its sentence.
    follows: of a decode row whose anchor the host does not know yet: which of the ids of the step launched just before
        it is, counted over the rows that sample. input_ids then holds a 0 in its place, and output_ids ends before it.
        None: the host knows all ids.
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
    prompt_top_logprobs: int | None = None
    matcher: Matcher | None = None
    is_thinking: bool = False
    follows: int | None = None


@dataclass(frozen=True, slots=True)
class SlotStart:
    """Before the step: clear a slot's rings, or fill them from a boundary snapshot taken at `position`."""

    slot: int
    snapshot: int | None
    position: int


@dataclass(frozen=True, slots=True)
class SnapshotSave:
    """After the step: copy what a slot's rings hold of the positions before `position`, a page end, into a snapshot.

    Of a step that drafts it is worth something only if the row is accepted up to there. inner_slot: of a position
    inside the row's chunk, a page or more behind its start: the rings will have gone on, so these take what they hold
    of the window before it; no two saves of a step have the same. None at the row's end.
    """

    slot: int
    snapshot: int
    position: int
    inner_slot: int | None = None


@dataclass(frozen=True, slots=True)
class Speculation:
    """How a decode step drafts and verifies; equal on both ranks.

    max_drafts: most drafts of a row that are verified. num_tokens: what each rank verifies at most, in rank order: its
    anchors, and the likeliest of its drafts as far as this leaves room for them. is_compact: room was made for fewer
    than all.
    """

    max_drafts: int
    num_tokens: tuple[int, int]
    is_compact: bool = False


@dataclass(frozen=True, slots=True)
class Plan:
    """Rows in execution order: decode rows first, then prefill chunks. Empty for an idle rank.

    speculation: of a decode step that drafts. Its rows hold their anchors alone, and their page tables cover all drafts
    that may be verified; None: nothing is drafted. replays: both ranks agreed to replay captured graphs where the step
    has the shape of one.
    """

    kind: StepKind
    rows: tuple[PlanRow, ...]
    slot_starts: tuple[SlotStart, ...] = ()
    snapshot_saves: tuple[SnapshotSave, ...] = ()
    speculation: Speculation | None = None
    replays: bool = False

    @property
    def num_tokens(self) -> int:
        """Tokens to process on this rank."""
        return sum(len(row.input_ids) for row in self.rows)


@dataclass(frozen=True, slots=True)
class RowFailure:
    """Why a row has no id: its request ends with this status, code and message, its neighbours go on."""

    status: int
    code: str
    message: str


@dataclass(frozen=True, slots=True)
class RowOutput:
    """What a step produced for one PlanRow: ids in order (none, one, or accepted drafts and the id behind them), the
    logprobs of each id if asked for, and log-probabilities of prompt tokens (of input_ids[1:], and of the next prompt
    token for the chunk's last position where the prompt goes on) if `prompt_logprobs` was asked for. failure: the ids
    mean nothing. num_drafts, num_verified: of the row, whatever was accepted. survival: the chances of its drafts."""

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None
    failure: RowFailure | None = None
    num_drafts: int = 0
    num_verified: int = 0
    survival: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class StepOutput:
    """Outputs aligned with Plan.rows. num_masked: rows that a grammar held. mask_times: seconds of the masks' parts, by
    phase; on cuda some are an earlier step's. num_dropped_times: that could not be told. tier: tokens of the graph that
    was replayed, None where the target ran eager."""

    rows: tuple[RowOutput, ...]
    num_masked: int = 0
    mask_times: tuple[tuple[str, float], ...] = ()
    num_dropped_times: int = 0
    tier: int | None = None
