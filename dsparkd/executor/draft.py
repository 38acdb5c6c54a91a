"""Drafting: one block behind each anchor of a step, and the context keys that blocks read.

The keys of a token follow from the target's taps alone. They are stored with every step that computes tokens, chunks of
prompts included, so that a sequence can be drafted for wherever it stands: after a prefix hit, a retract or a resume.

Letters: B rows of a plan, G drafts of a block (gamma), W window, T tokens, R ring rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dsparkd.errors import InvariantError
from dsparkd.executor.plan import PlanRow
from dsparkd.executor.sampler import GREEDY_TEMPERATURE
from dsparkd.executor.staging import pad_rows
from dsparkd.executor.upload import upload, upload_ids
from dsparkd.kv.pool import KVPool
from dsparkd.messages import SamplingParams
from dsparkd.model.dspark import Drafter, DraftInputs, Drafts, DraftSampling
from dsparkd.model.inputs import ForwardInputs
from dsparkd.model.moe import ExpertExchange


@dataclass(frozen=True, slots=True)
class Blocks:
    """A step's drafts, on the device. windows [B, 1 + G] int64: each anchor and its drafts, contiguous.

    survival [B, G] float32: chances that a draft and all before it are accepted. drafts: with the logits that they were
    chosen by.
    """

    windows: Tensor
    survival: Tensor
    drafts: Drafts


class DraftDesk:
    """The drafter over one rank's rings. Owned by the tick thread.

    exchange: carries the drafter's expert rows; both ranks propose in the same steps. is_coupled: drafts are drawn for
    coupled acceptance, else for rejection.
    """

    def __init__(self, drafter: Drafter, pool: KVPool, exchange: ExpertExchange, *, is_coupled: bool = True) -> None:
        self.is_coupled = is_coupled
        self._drafter = drafter
        self._pool = pool
        self._exchange = exchange
        self.taps = drafter.dspark.target_layer_ids
        kept, needed = pool.geometry.num_draft_stages, drafter.dspark.num_stages
        if kept != needed:
            raise InvariantError(f"rings for {kept} draft stages, and the drafter has {needed}")

    def propose(self, rows: Sequence[PlanRow], num_blocks: tuple[int, int]) -> Blocks:
        """Draft behind each row's last token. num_blocks: both ranks' rows; a rank without any takes part.

        Coupled draws have the noise of their positions, as plain decoding's do, so the two mostly agree. No host sync.
        """
        return self.draft(self._inputs(rows), self._sampling(rows), num_blocks)

    def draft(self, inputs: DraftInputs, sampling: DraftSampling | None, num_blocks: tuple[int, int]) -> Blocks:
        """Draft what has been laid out; the device's part of `propose`. num_blocks: both ranks', padding included."""
        counts = [self._drafter.num_padded_rows(count) for count in num_blocks]
        self._exchange.begin_step((counts[0], counts[1]))
        drafts = self._drafter.draft(inputs, self._exchange, sampling)
        windows = torch.cat((inputs.anchor_ids[:, None], drafts.ids), 1)
        return Blocks(windows, self._drafter.survival(drafts.confidence), drafts)

    def keep(self, taps: Tensor, inputs: ForwardInputs) -> None:
        """Store the context keys of a step's tokens; taps [T, layers * D] are the target's.

        Drafts that will be refused are stored, too: the ring is longer than what a block reads by more than a block.
        """
        store = inputs.draft_store
        if store is None:
            raise InvariantError("a step without a place for its context keys")
        num_rows, positions = store.src.shape[0], inputs.positions
        if not store.in_order:
            src = torch.nn.functional.pad(store.src, (0, pad_rows(num_rows) - num_rows))
            taps, positions = taps.index_select(0, src), positions.index_select(0, src)
        self._drafter.keep_context(taps, positions, self._pool.draft_keys, store.dst)

    def _inputs(self, rows: Sequence[PlanRow]) -> DraftInputs:
        geometry = self._pool.geometry
        ring, window = geometry.draft_ring_rows, geometry.window
        positions = anchor_positions(rows)
        slots = np.array([row.slot for row in rows], np.int64)
        wanted = positions[:, None] + np.arange(-window, 0)
        hidden = np.maximum(window - positions, 0)
        return DraftInputs(
            anchor_ids=self._ids([row.input_ids[-1] for row in rows]),
            positions=upload(positions, self._drafter.device),
            rings=self._pool.draft_keys,
            sources=upload(
                np.where(wanted < 0, 0, slots[:, None] * ring + wanted % ring).astype(np.int64), self._drafter.device
            ),
            first=upload(hidden, self._drafter.device),
            all_visible=not hidden.any(),
        )

    def _sampling(self, rows: Sequence[PlanRow]) -> DraftSampling | None:
        params = [sampling_params(row) for row in rows]
        temperatures = drawn_temperatures(params)
        if not temperatures.any():
            return None
        return DraftSampling(
            temperatures=upload(temperatures.astype(np.float32), self._drafter.device),
            seeds=self._ids([each.seed for each in params]),
            choices=self._ids([each.choice for each in params]),
            is_coupled=self.is_coupled,
        )

    def _ids(self, values: Sequence[int]) -> Tensor:
        return upload_ids(values, self._drafter.device)


def anchor_positions(rows: Sequence[PlanRow]) -> NDArray[np.int64]:
    """Position of each row's last token, [B]."""
    return np.array([row.start + len(row.input_ids) - 1 for row in rows], np.int64)


def drawn_temperatures(params: Sequence[SamplingParams]) -> NDArray[np.float64]:
    """Temperature of each row, 0 where it is greedy, [B]."""
    return np.array([p.temperature if p.temperature > GREEDY_TEMPERATURE else 0.0 for p in params], np.float64)


def sampling_params(row: PlanRow) -> SamplingParams:
    """How a row that is drafted for is sampled. Raises InvariantError where it is not."""
    if row.sampling is None:
        raise InvariantError(f"request {row.request_id} is drafted for and not sampled")
    return row.sampling
