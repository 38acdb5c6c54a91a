"""Lightning indexer: which compressed entries of a CSA layer a token attends to.

Letters: T tokens, n tokens of one block, h indexer heads, i indexer width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dsparkd.kernels import indexer as kernel
from dsparkd.kernels import packed, rotary
from dsparkd.kernels.indexer import Visible
from dsparkd.kernels.rotary import Rotation
from dsparkd.model.config import ModelConfig
from dsparkd.model.layers import Linear, WeightSource, WideLinear


@dataclass(frozen=True, slots=True)
class IndexQuery:
    """What tokens ask with: vectors [T, h, i] in the model's dtype and head weights [T, h] float32."""

    vectors: Tensor
    weights: Tensor


class Indexer:
    """One layer's indexer; `name` is its official prefix, for instance layers.2.attn.indexer."""

    def __init__(self, config: ModelConfig, source: WeightSource, name: str) -> None:
        self.topk = config.index_topk
        self._heads = config.index_n_heads
        self._wq_b = Linear(source.weight(f"{name}.wq_b"))
        head_weights = source.exact(f"{name}.weights_proj.weight")
        if head_weights.dtype == torch.float32:
            # In bfloat16 the scale would cost digits; being positive, it changes no choice.
            head_weights = head_weights * (config.index_head_dim**-0.5 * config.index_n_heads**-0.5)
        self._head_weights = WideLinear(head_weights)
        self._rotate_ = rotary.bind(source.device)
        self._kernel = kernel.bind(source.device, source.dtype)
        self._width = config.index_head_dim
        self.prepare(None)

    def prepare(self, keys: Tensor | None) -> None:
        """Compile at start for plain keys, or for packed ones."""
        self._kernel.prepare(self._heads, self._width, self.topk, keys)

    def query(self, residual: Tensor, x: Tensor, rotation: Rotation, *, is_packed: bool) -> IndexQuery:
        """residual [T, q_lora] and x [T, D], in the model's dtype. is_packed: what the keys are."""
        vectors = self._rotate_(self._wq_b(residual).view(residual.shape[0], self._heads, -1), rotation)
        return IndexQuery(packed.round_queries(vectors) if is_packed else vectors, self._head_weights(x))

    def choose(self, query: IndexQuery, part: slice, keys: Tensor, visible: Visible) -> Tensor:
        """Keep the best topk entries of each token of a block: slots, ascending by entry, zeros behind them."""
        return self._kernel.choose(query.vectors[part], query.weights[part], keys, visible, self.topk)
