"""Verification: windows of an anchor and its drafts through the target, and what of them is accepted.

A window's rows are judged in order, each with the state that includes the drafts before it: penalties, biases, stop
ids that are held back, the grammar. What row j chooses is what plain decoding would choose behind the same ids.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from dsparkd.errors import InvariantError
from dsparkd.executor.lengths import admit
from dsparkd.executor.masks import Masks, grammar_start
from dsparkd.executor.plan import Plan, PlanRow, RowOutput
from dsparkd.executor.sampler import Choices, PromptRow, SampleRow

Drafted = tuple[int, ...]


def require_sound(plan: Plan, *, has_masks: bool) -> None:
    """Raise InvariantError for rows whose outcome nobody could tell, before anything is launched for them."""
    for row in plan.rows:
        if row.prompt_top_logprobs is not None and row.num_logits != len(row.input_ids):
            raise InvariantError(
                f"request {row.request_id}: {row.num_logits} logit rows for its prompt's log-probabilities"
            )
        if row.matcher is not None and not has_masks:
            raise InvariantError(f"request {row.request_id} has a grammar and no mask")
        # A mask and a window need the anchor on the host.
        waits = row.matcher is not None or plan.speculation is not None or len(row.input_ids) != 1
        if row.follows is not None and waits:
            raise InvariantError(f"request {row.request_id} follows an id that its row cannot do without")


def cut(plan: Plan, survival: Sequence[Sequence[float]] | None, dp_rank: int) -> tuple[int, ...]:
    """How many drafts of each row are verified: the likeliest that the step has room for, each with those before it.

    survival: of this step's blocks; None where the layout does not depend on them.
    """
    speculation = plan.speculation
    if speculation is None:
        return (0,) * len(plan.rows)
    if not needs_chances(plan, dp_rank):
        return (speculation.max_drafts,) * len(plan.rows)
    if survival is None:
        raise InvariantError("a compact layout without the chances that it depends on")
    room = speculation.num_tokens[dp_rank] - len(plan.rows)
    return tuple(admit(survival, room, speculation.max_drafts))


def needs_chances(plan: Plan, dp_rank: int) -> bool:
    """Whether this step's layout depends on its blocks' chances: not where there is room for every draft."""
    speculation = plan.speculation
    if speculation is None or not speculation.is_compact:
        return False
    return speculation.num_tokens[dp_rank] < len(plan.rows) * (1 + speculation.max_drafts)


def with_drafts(plan: Plan, lengths: Sequence[int]) -> Plan:
    """Make room behind each row's anchor for its drafts, each with a row of logits; their ids come later."""
    return dataclasses.replace(plan, rows=tuple(map(_window, plan.rows, lengths)))


def _window(row: PlanRow, length: int) -> PlanRow:
    if not length:
        return row
    return dataclasses.replace(row, input_ids=row.input_ids + (0,) * length, num_logits=row.num_logits + length)


def drafted(ids: NDArray[np.int64], lengths: Sequence[int]) -> tuple[Drafted, ...]:
    """Each row's drafts that are verified; ids [B, W] as in Blocks.windows, [0, 0] where there are none."""
    if not len(ids):
        return ((),) * len(lengths)
    return tuple(tuple(row[1 : 1 + length]) for row, length in zip(ids.tolist(), lengths, strict=True))


@dataclasses.dataclass(frozen=True, slots=True)
class Asked:
    """What a step asks of the sampler. readable: per plan row, how many of its window's rows may be drawn from."""

    samples: list[SampleRow]
    prompts: list[PromptRow]
    readable: tuple[int, ...]


def ask(plan: Plan, drafts: Sequence[Drafted], masks: Masks | None, think_end_id: int | None) -> Asked:
    """List what the sampler does for each row of a plan with its drafts, in plan order."""
    samples: list[SampleRow] = []
    prompts = []
    readable = []
    first_row = 0
    for index, (row, drafted) in enumerate(zip(plan.rows, drafts, strict=True)):
        if row.prompt_top_logprobs is not None:
            prompts.append(PromptRow(first_row, _next_prompt_ids(row), row.prompt_top_logprobs))
        first_row += row.num_logits
        if row.sampling is None:
            readable.append(0)
            continue
        window = _sample_rows(row, drafted, first_row - 1 - len(drafted), index, masks, think_end_id)
        samples += window
        readable.append(len(window))
    return Asked(samples, prompts, tuple(readable))


def _sample_rows(
    row: PlanRow, drafts: Drafted, logits_row: int, index: int, masks: Masks | None, think_end_id: int | None
) -> list[SampleRow]:
    """The rows of one window that may be drawn from; logits_row is the anchor's."""
    assert row.sampling is not None
    first = grammar_start(row, drafts, think_end_id)
    held = masks.rows.get(index) if masks is not None else None
    if row.matcher is not None and held is None and first <= len(drafts):
        raise InvariantError(f"request {row.request_id} has a grammar and no mask")
    usable = 1 + len(drafts) if held is None else max(held.usable, 1)  # a row that fails is drawn from all the same
    position = row.start + len(row.input_ids) - len(drafts)
    rows = []
    for j in range(usable):
        mask_row = None
        if held is not None and masks is not None and j >= first:
            mask_row = held.place * masks.width + j
        rows.append(
            SampleRow(
                logits_row + j,
                row.sampling,
                row.prompt_ids,
                row.output_ids + drafts[:j],
                position + j,
                mask_row,
                row.is_thinking and j < first,
                row.follows,
            )
        )
    return rows


def _next_prompt_ids(row: PlanRow) -> tuple[int, ...]:
    """The prompt tokens that follow each token of a chunk; the prompt's last token has none."""
    return row.prompt_ids[row.start + 1 : row.start + len(row.input_ids) + 1]


def collect(
    plan: Plan,
    drafts: Sequence[Drafted],
    asked: Asked,
    choices: Choices,
    masks: Masks | None,
    survival: Sequence[tuple[float, ...]],
) -> tuple[RowOutput, ...]:
    """Hand the sampler's results back to the plan's rows: of a window, the accepted drafts and the id behind them.

    survival: chances of all drafts of each row, empty where nothing was drafted.
    """
    read = iter(choices.prompt_logprobs)
    failures = masks.failures if masks is not None else {}
    kept = iter(_accept(drafts, asked, choices.token_ids))
    rows, at = [], 0
    for index, row in enumerate(plan.rows):
        prompt_logprobs = next(read) if row.prompt_top_logprobs is not None else None
        num_kept = next(kept)
        part = slice(at, at + num_kept)
        at += asked.readable[index]
        if row.sampling is None:
            rows.append(RowOutput((), None, prompt_logprobs))
            continue
        logprobs = tuple(entry for entry in choices.logprobs[part] if entry is not None)
        rows.append(
            RowOutput(
                token_ids=choices.token_ids[part],
                logprobs=None if row.sampling.top_logprobs is None else logprobs,
                prompt_logprobs=prompt_logprobs,
                failure=failures.get(index),
                num_drafts=len(survival[index]) if survival else 0,
                num_verified=len(drafts[index]),
                survival=survival[index] if survival else (),
            )
        )
    return tuple(rows)


def bounds(lengths: Sequence[int], asked: Asked) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Where each window's chosen ids begin, and how many of its drafts may stand, -1 where nothing was chosen.

    So that blocks can begin behind a step before the host knows what `collect` will say (kernels.blocks.go_on).
    """
    readable = np.array(asked.readable, np.int64)
    limits = np.minimum(np.array(lengths, np.int64), readable - 1)  # one row is needed behind each draft that stands
    return np.cumsum(readable) - readable, limits


def _accept(drafts: Sequence[Drafted], asked: Asked, token_ids: Sequence[int]) -> list[int]:
    """How many of each row's chosen ids are kept: accept_coupled on the host, where a step's end waits for it."""
    kept, at = [], 0
    for drafted, readable in zip(drafts, asked.readable, strict=True):
        most, count = min(len(drafted), readable - 1), 0
        while count < most and drafted[count] == token_ids[at + count]:
            count += 1
        kept.append(count + 1 if readable else 0)
        at += readable
    return kept
