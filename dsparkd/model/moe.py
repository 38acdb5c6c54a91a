"""Mixture of experts: hash and scored routers, routed experts in two shards, shared expert.

Rank r owns experts r * E/2 .. (r+1) * E/2 - 1. Each rank sends its tokens to both, computes its own experts for all of
them, and adds: partial of rank 0, partial of rank 1, shared expert, in this order wherever the token lives.

Letters: T tokens of this rank, R rows of both ranks, D width, I expert width, E experts, k experts a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dsparkd.model.config import ModelConfig
from dsparkd.model.inputs import ROW_TILE
from dsparkd.model.layers import WeightSource, linear, silu, sqrt_softplus, transposed

NUM_SHARDS = 2


class ExpertExchange(Protocol):
    """How tokens reach both shards and come back; collective, so both ranks make the same calls in the same order."""

    def begin_step(self, counts: tuple[int, int]) -> None:
        """Announce the padded token counts of rank 0 and rank 1 for every layer of one forward pass."""

    def gather(self, rows: Tensor) -> Tensor:
        """rows [T, C] float32 of this rank -> [R, C], rank 0's first. The words are bit patterns: only copy them."""

    def combine(self, partial: Tensor) -> Tensor:
        """partial [R, D] float32, this rank's experts for all rows -> [2, T, D]: both ranks' for this rank's rows."""


class Experts:
    """The routed experts of one layer that one rank owns."""

    def __init__(self, config: ModelConfig, source: WeightSource, prefix: str, rank: int) -> None:
        self._count = config.n_routed_experts // NUM_SHARDS
        self._first = rank * self._count
        self._limit = config.swiglu_limit
        self._top_k = config.num_experts_per_tok
        self._dtype = source.dtype
        self.width = config.hidden_size
        ids = range(self._first, self._first + self._count)
        self._w13 = [transposed(source.linear(f"{prefix}.{e}.w1"), source.linear(f"{prefix}.{e}.w3")) for e in ids]
        self._w2 = [transposed(source.linear(f"{prefix}.{e}.w2")) for e in ids]

    def partial(self, rows: Tensor) -> Tensor:
        """Packed rows [R, C] of `pack` -> the sum over this shard's experts, ascending, [R, D] float32."""
        x, weights, expert_ids = unpack(rows, self._dtype, self.width, self._top_k)
        # The only host read of the forward pass: the experts' loads decide which products run.
        tiles = _Tiles(expert_ids.cpu().numpy(), self._first, self._count)
        if not tiles.num_rows:
            return torch.zeros((rows.shape[0], self.width), dtype=torch.float32, device=rows.device)
        device = rows.device
        inputs = x.index_select(0, torch.from_numpy(tiles.tokens).to(device))
        hidden = inputs.new_empty((tiles.num_rows, self._w13[0].shape[1]))
        for expert, part in tiles.parts:
            torch.mm(inputs[part], self._w13[expert], out=hidden[part])
        shares = weights.reshape(-1, 1).index_select(0, torch.from_numpy(tiles.choices).to(device))
        activated = swiglu(hidden, self._limit).mul_(shares).to(self._dtype)
        # One row more, of zeros, stands for every choice that the other shard serves.
        outputs = activated.new_empty((tiles.num_rows + 1, self.width))
        outputs[-1] = 0
        for expert, part in tiles.parts:
            torch.mm(activated[part], self._w2[expert], out=outputs[part])
        total: Tensor | None = None
        for choice in torch.from_numpy(tiles.places).to(device):  # k of [R]
            served = outputs.index_select(0, choice).float()
            total = served if total is None else total.add_(served)
        assert total is not None
        return total


class _Tiles:
    """Which rows each expert of a shard computes, in whole row tiles. Host arrays.

    num_rows: A, all tiles together. tokens [A]: row that each computes, some row for padding. choices [A]: index
    into the flattened [R, k] weights. places [k, R]: where a row's choices lie, ascending by expert, A for none.
    parts: expert and its slice of A.
    """

    def __init__(self, expert_ids: NDArray[np.int32], first: int, count: int) -> None:
        num_tokens, top_k = expert_ids.shape
        local = expert_ids.ravel() - first
        served = np.flatnonzero((local >= 0) & (local < count))
        served = served[np.argsort(local[served], kind="stable")]
        expert = local[served]
        loads = np.bincount(expert, minlength=count)
        padded = -(-loads // ROW_TILE) * ROW_TILE
        stops = np.cumsum(padded)
        starts = stops - padded
        place = np.arange(len(served)) + (starts - (np.cumsum(loads) - loads))[expert]
        self.num_rows = int(stops[-1])
        self.choices = np.zeros(self.num_rows, np.int64)
        self.choices[place] = served
        self.tokens = self.choices // top_k
        places = np.full(num_tokens * top_k, self.num_rows, np.int64)
        places[served] = place
        self.places = np.ascontiguousarray(places.reshape(num_tokens, top_k).T)
        self.parts = [(int(e), slice(int(starts[e]), int(stops[e]))) for e in np.flatnonzero(loads)]


def swiglu(hidden: Tensor, limit: float) -> Tensor:
    """hidden [A, 2I], gate then up -> silu(min(gate, limit)) * clamp(up), [A, I] float32."""
    hidden32 = hidden.float()
    width = hidden.shape[1] // 2
    gate = hidden32[:, :width].clamp(max=limit)
    return silu(gate).mul_(hidden32[:, width:].clamp(min=-limit, max=limit))


def pack(x: Tensor, weights: Tensor, expert_ids: Tensor) -> Tensor:
    """x [T, D], weights [T, k] float32, expert_ids [T, k] int64 -> [T, C] float32 words, bit patterns."""
    return torch.cat((x.view(torch.float32), weights, expert_ids.int().view(torch.float32)), 1)


def unpack(rows: Tensor, dtype: torch.dtype, width: int, top_k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Undo `pack`: x [R, D], weights [R, k] float32, expert_ids [R, k] int32."""
    words = rows.shape[1] - 2 * top_k
    x = rows[:, :words].contiguous().view(dtype)
    assert x.shape[1] == width
    return x, rows[:, words : words + top_k], rows[:, words + top_k :].contiguous().view(torch.int32)


class MoE:
    """One layer's feed-forward half; `name` is its official prefix, for instance layers.3.ffn."""

    def __init__(self, config: ModelConfig, source: WeightSource, name: str, hashed: bool, rank: int) -> None:
        self._num_experts = config.n_routed_experts
        self._top_k = config.num_experts_per_tok
        self._scaling = config.routed_scaling_factor
        self._limit = config.swiglu_limit
        self._dtype = source.dtype
        self._packed_width = config.hidden_size * source.dtype.itemsize // 4 + 2 * self._top_k
        self._gate = transposed(source.float32(f"{name}.gate.weight"))
        self._table = source.integer(f"{name}.gate.tid2eid") if hashed else None
        self._bias = None if hashed else source.float32(f"{name}.gate.bias")
        shared = f"{name}.shared_experts"
        self._shared_w13 = transposed(source.linear(f"{shared}.w1"), source.linear(f"{shared}.w3"))
        self._shared_w2 = transposed(source.linear(f"{shared}.w2"))
        self.experts = Experts(config, source, f"{name}.experts", rank)

    def forward(self, x: Tensor, input_ids: Tensor, num_tokens: int, exchange: ExpertExchange) -> Tensor:
        """x [T, D], normed; input_ids [T]; tokens from num_tokens on are padding -> [T, D]."""
        weights, expert_ids = self._route(x.float(), input_ids)
        expert_ids[num_tokens:] = self._num_experts  # no expert's id: padding goes nowhere
        partials = exchange.combine(self.experts.partial(exchange.gather(pack(x, weights, expert_ids))))
        activated = swiglu(linear(x, self._shared_w13), self._limit).to(self._dtype)
        shared = linear(activated, self._shared_w2)
        return (partials[0] + partials[1]).add_(shared).to(x.dtype)

    def assist(self, exchange: ExpertExchange, device: torch.device) -> None:
        """Compute this rank's experts for the peer's tokens, with none of its own."""
        rows = exchange.gather(torch.empty((0, self._packed_width), dtype=torch.float32, device=device))
        exchange.combine(self.experts.partial(rows))

    def _route(self, x32: Tensor, input_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Weights [T, k] float32 and expert ids [T, k] int64, ascending by expert."""
        scores = sqrt_softplus(linear(x32, self._gate))
        if self._table is not None:
            chosen = self._table.index_select(0, input_ids)
        else:
            # The bias selects and never weighs. A stable order gives equal scores to the lower id.
            assert self._bias is not None
            chosen = (scores + self._bias).sort(dim=1, descending=True, stable=True).indices[:, : self._top_k]
        expert_ids = chosen.sort(dim=1).values
        weights = scores.gather(1, expert_ids)
        return weights.mul_(self._scaling / weights.sum(1, keepdim=True).add_(1e-20)), expert_ids


class LocalExpertExchange:
    """Both shards in one process, with the sums in the order of two ranks. This process is rank 0; rank 1 is idle.

    peer_experts: rank 1's experts, a layer each. Owned by the thread that runs the forward pass.
    """

    def __init__(self, peer_experts: Sequence[Experts]) -> None:
        self._peer_experts = peer_experts
        self._layer = 0
        self._rows: Tensor | None = None

    def begin_step(self, counts: tuple[int, int]) -> None:
        """Start at the first layer; counts[1] is 0, there being no second rank."""
        assert counts[1] == 0
        self._layer = 0

    def gather(self, rows: Tensor) -> Tensor:
        """Keep the rows for the peer's shard."""
        self._rows = rows
        return rows

    def combine(self, partial: Tensor) -> Tensor:
        """Compute what rank 1 would have sent."""
        assert self._rows is not None
        peer = self._peer_experts[self._layer].partial(self._rows)
        self._layer += 1
        return torch.stack((partial, peer))
