"""Lightning indexer: which compressed entries of a CSA layer a token attends to.

Letters: n tokens of one block, h indexer heads, i indexer width, E entries a token may see, K entries kept.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dsparkd.kernels.rotary import Rotation, rotate_
from dsparkd.kernels.tiles import KEY_TILE
from dsparkd.model.config import ModelConfig
from dsparkd.model.layers import Linear, WeightSource, ordered_sum


class Indexer:
    """One layer's indexer; `name` is its official prefix, for instance layers.2.attn.indexer."""

    def __init__(self, config: ModelConfig, source: WeightSource, name: str) -> None:
        self.topk = config.index_topk
        self._heads = config.index_n_heads
        self._wq_b = Linear(source.linear(f"{name}.wq_b"))
        scale = config.index_head_dim**-0.5 * config.index_n_heads**-0.5
        self._head_weights = Linear(source.float32(f"{name}.weights_proj.weight") * scale)

    def query(self, residual: Tensor, x32: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
        """residual [T, q_lora], x32 [T, D] float32 -> float32 queries [T, h, i] and head weights [T, h]."""
        query = self._wq_b(residual).view(residual.shape[0], self._heads, -1)
        return rotate_(query, rotation).float(), self._head_weights(x32)

    def select(self, query: Tensor, weights: Tensor, keys: Tensor, slots: Tensor, hidden: Tensor) -> Tensor:
        """Keep each token's best entries, in ascending order of their index.

        query [n, h, i], weights [n, h], keys [n, E, i] float32; slots [n, E] int64, hidden [n, E] bool; E > topk and
        a multiple of KEY_TILE. Returns the slots of the kept ones and zeros behind them, [n, K], K a multiple of
        KEY_TILE.
        Scores are float32; equal ones go to the lower index.
        """
        products = torch.bmm(query, keys.transpose(1, 2)).relu_().mul_(weights[:, :, None])
        scores = ordered_sum(products, 1).masked_fill_(hidden, -torch.inf)
        # The K-th best score is a value, whichever of its equals topk took. Everything above it stays, and of its
        # equals the first ones that there is room for.
        least = scores.topk(self.topk, dim=1).values[:, -1:]
        above = scores > least
        equal = (scores == least) & ~hidden
        room = self.topk - above.sum(1, keepdim=True)
        kept = above | (equal & (equal.cumsum(1) <= room))
        num_entries = slots.shape[1]
        index = torch.arange(num_entries, device=slots.device)
        width = -(-self.topk // KEY_TILE) * KEY_TILE  # at most E, itself a multiple above topk
        order = torch.where(kept, index, num_entries).topk(width, dim=1, largest=False, sorted=True).values
        gone = order == num_entries
        return slots.gather(1, order.clamp_(max=num_entries - 1)).masked_fill_(gone, 0)
