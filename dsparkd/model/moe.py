"""Mixture of experts: hash and scored routers, routed experts in two shards, shared expert.

Rank r owns experts r * E/2 .. (r+1) * E/2 - 1. Each rank sends its tokens to both, computes its own experts for all of
them, and adds: partial of rank 0, partial of rank 1, shared expert, in this order wherever the token lives.

Letters: T tokens of this rank, R rows of both ranks, D width, I expert width, E experts, k experts a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from dsparkd.errors import CheckpointError
from dsparkd.kernels import experts as kernel
from dsparkd.kernels import feed_forward, router
from dsparkd.kernels.beside import Beside, in_line
from dsparkd.kernels.crossing import Crossing, Parting
from dsparkd.kernels.feed_forward import Summands
from dsparkd.kernels.router import RouterRule
from dsparkd.kernels.weight import stacked
from dsparkd.model.config import ModelConfig
from dsparkd.model.layers import Linear, WeightSource, WideLinear

NUM_SHARDS = 2


class ExpertExchange(Protocol):
    """How tokens reach both shards and come back; collective, so both ranks make the same calls in the same order."""

    def begin_step(self, counts: tuple[int, int]) -> None:
        """Announce the padded token counts of rank 0 and rank 1 for every layer of one forward pass."""

    def room(self, width: int, device: torch.device) -> Tensor:
        """Memory [T, width] float32 for the rows that this rank gathers next: those that lie there are not copied."""

    def crossing(self) -> Crossing | None:
        """What is to exchange the rows of the room while they are written there; None: `gather` does all of it."""

    def gather(self, rows: Tensor) -> Tensor:
        """rows [T, C] float32 of this rank -> [R, C], rank 0's first. The words are bit patterns: only copy them."""

    def parting(self, width: int, device: torch.device) -> Parting | None:
        """What is to exchange the sums over gathered rows, `width` words each, while they are written; None: `combine`
        does all of it."""

    def combine(self, partial: Tensor) -> Sequence[Tensor]:
        """partial [R, D] float32, this rank's experts for all rows, or for its own [T, D] where a parting took the
        others away -> what is to be added for this rank's rows, in this order, [T, D] each: rank 0's and rank 1's."""


class Experts:
    """The routed experts of one layer that one rank owns."""

    def __init__(self, config: ModelConfig, source: WeightSource, prefix: str, rank: int) -> None:
        count = config.n_routed_experts // NUM_SHARDS
        ids = range(rank * count, (rank + 1) * count)
        self._top_k = config.num_experts_per_tok
        self._dtype = source.dtype
        self._width = config.hidden_size
        self._kernel = kernel.bind(
            kernel.ExpertShard(
                first=ids.start,
                w13=tuple(stacked([source.weight(f"{prefix}.{e}.{w}") for w in ("w1", "w3")]) for e in ids),
                w2=tuple(source.weight(f"{prefix}.{e}.w2") for e in ids),
                limit=config.swiglu_limit,
            )
        )
        self.takes_turned = self._kernel.takes_turned

    def partial(self, rows: Tensor, parting: Parting | None = None) -> Tensor:
        """Packed rows [R, C] of a router -> the sum over this shard's experts, ascending, [R, D] float32.

        parting: takes the peer's rows of it away; what is left is [T, D].
        """
        x, expert_ids, shares = unpack(rows, self._dtype, self._width, self._top_k)
        if rows.is_cuda:
            return self._kernel(x, expert_ids, shares, parting)
        # The forms for the cpu take contiguous tensors, those for cuda rows that lie apart.
        return self._kernel(x.contiguous(), expert_ids.contiguous(), shares.contiguous())

    def serve(self, rows: Tensor, exchange: ExpertExchange) -> Sequence[Tensor]:
        """Packed rows [R, C] of both ranks -> what this rank's rows get of either shard; see ExpertExchange.combine."""
        return exchange.combine(self.partial(rows, exchange.parting(self._width, rows.device)))


def hash_table(source: WeightSource, name: str, num_experts: int) -> Tensor:
    """Experts of each token [V, k]. Raises CheckpointError for one that does not exist or stands twice in a row."""
    table = source.integer(name)
    ordered = table.sort(dim=1).values
    if ordered.min() < 0 or ordered.max() >= num_experts or (ordered.diff(dim=1) == 0).any():
        raise CheckpointError(f"{name}: every token needs experts of 0..{num_experts - 1}, no one twice")
    return table


def unpack(rows: Tensor, dtype: torch.dtype, width: int, top_k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Undo router.pack: x [R, D], expert_ids [R, k] int32, shares [R, k] float32, as columns of the rows."""
    words = rows.shape[1] - 2 * top_k
    x = rows[:, :words].view(dtype)
    assert x.shape[1] == width
    return x, rows.view(torch.int32)[:, words + top_k :], rows[:, words : words + top_k]


class MoE:
    """One layer's feed-forward half; `name` is its official prefix, for instance layers.3.ffn.

    beside: runs the shared expert beside the others.
    """

    def __init__(
        self, config: ModelConfig, source: WeightSource, name: str, hashed: bool, rank: int, beside: Beside = in_line
    ) -> None:
        self._limit = config.swiglu_limit
        self._beside = beside
        self._packed_width = config.hidden_size * source.dtype.itemsize // 4 + 2 * config.num_experts_per_tok
        self._gate = WideLinear(source.exact(f"{name}.gate.weight"))
        rule = RouterRule(
            num_experts=config.n_routed_experts,
            top_k=config.num_experts_per_tok,
            scaling=config.routed_scaling_factor,
            bias=None if hashed else source.float32(f"{name}.gate.bias"),
            table=hash_table(source, f"{name}.gate.tid2eid", config.n_routed_experts) if hashed else None,
        )
        self.experts = Experts(config, source, f"{name}.experts", rank)
        self._route = router.bind(rule, source.device, self.experts.takes_turned)
        self._between = feed_forward.bind(source.device)
        shared = f"{name}.shared_experts"
        self._shared_w13 = Linear(source.weight(f"{shared}.w1"), source.weight(f"{shared}.w3"))
        self._shared_w2 = Linear(source.weight(f"{shared}.w2"))

    def forward(self, x: Tensor, input_ids: Tensor, num_live: Tensor, exchange: ExpertExchange) -> Summands:
        """x [T, D], normed; input_ids [T]; tokens from num_live [1] int64 on are padding -> what adds up to [T, D]."""
        # The shared expert waits for nobody: it runs while rows are routed and travel.
        shared = self._beside(lambda: self._shared_w2(self._between.activate(self._shared_w13(x), self._limit)))
        logits = self._gate(x)
        rows = exchange.room(self._packed_width, x.device)
        self._route.pack(x, logits, input_ids, num_live, rows, exchange.crossing())
        first, second = self.experts.serve(exchange.gather(rows), exchange)
        return Summands((first, second), shared())

    def assist(self, exchange: ExpertExchange, device: torch.device) -> None:
        """Compute this rank's experts for the peer's tokens, with none of its own."""
        rows = exchange.gather(torch.empty((0, self._packed_width), dtype=torch.float32, device=device))
        self.experts.serve(rows, exchange)


class LocalExpertExchange:
    """Both shards in one process, with the sums in the order of two ranks. This process is rank 0; rank 1 is idle.

    peer_experts: rank 1's experts, a layer each. Owned by the thread that runs the forward pass.
    """

    def __init__(self, peer_experts: Sequence[Experts]) -> None:
        self._peer_experts = peer_experts
        self._layer = 0
        self._num_rows = 0
        self._rows: Tensor | None = None

    def begin_step(self, counts: tuple[int, int]) -> None:
        """Start at the first layer. What counts[1] announces never comes, there being no second rank."""
        self._layer = 0
        self._num_rows = counts[0]

    def room(self, width: int, device: torch.device) -> Tensor:
        """See ExpertExchange."""
        return torch.empty((self._num_rows, width), dtype=torch.float32, device=device)

    def crossing(self) -> None:
        """See ExpertExchange."""

    def parting(self, width: int, device: torch.device) -> None:
        """See ExpertExchange."""

    def gather(self, rows: Tensor) -> Tensor:
        """Keep the rows for the peer's shard."""
        self._rows = rows
        return rows

    def combine(self, partial: Tensor) -> Sequence[Tensor]:
        """Compute what rank 1 would have sent."""
        assert self._rows is not None
        peer = self._peer_experts[self._layer].partial(self._rows)
        self._layer += 1
        return partial, peer
