"""Hyper-connections (mHC): collapse the residual streams into a sublayer's input, expand its output into them.

Letters: T tokens, S streams, D width.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from dsparkd.kernels import hyper_connection as kernel
from dsparkd.kernels.hyper_connection import Collapsed
from dsparkd.model.config import ModelConfig
from dsparkd.model.layers import Linear, WeightSource, inverse_rms, sigmoid


class HyperConnection:
    """One sublayer's connection and the norm of its input.

    part is attn or ffn, the official names' word for the sublayer; prefix the layer's, for instance layers.0.
    """

    def __init__(self, config: ModelConfig, source: WeightSource, prefix: str, part: str) -> None:
        S = config.hc_mult
        self._product = _product(source.float32(f"{prefix}.hc_{part}_fn"), source.dtype)
        pre, post, comb = source.float32(f"{prefix}.hc_{part}_scale").unbind()
        self._mixing = kernel.Mixing(
            scale=torch.cat((pre.expand(S), post.expand(S), comb.expand(S * S))),
            base=source.float32(f"{prefix}.hc_{part}_base"),
            norm=source.float32(f"{prefix}.{part}_norm.weight"),
            num_streams=S,
            iterations=config.hc_sinkhorn_iters,
            eps=config.hc_eps,
            norm_eps=config.rms_norm_eps,
        )
        self._kernel = kernel.bind(source.device, source.dtype, S)

    def collapse(self, streams: Tensor) -> Collapsed:
        """streams [T, S, D] -> the sublayer's normed input [T, D] in the streams' dtype, and the way back."""
        return self._kernel.collapse(streams, self._product(streams), self._mixing)

    def expand(self, output: Tensor, streams: Tensor, collapsed: Collapsed) -> Tensor:
        """output [T, D], streams [T, S, D] -> the next streams, float32 inside, one cast."""
        return self._kernel.expand(output, streams, collapsed)


class HyperHead:
    """The last collapse: sigmoid weights, neither normalised nor mixed."""

    def __init__(self, config: ModelConfig, source: WeightSource, prefix: str) -> None:
        self._eps = config.hc_eps
        self._norm_eps = config.rms_norm_eps
        self._product = _product(source.float32(f"{prefix}hc_head_fn"), source.dtype)  # S * D -> S
        self._base = source.float32(f"{prefix}hc_head_base")
        self._scale = source.float32(f"{prefix}hc_head_scale")

    def collapse(self, streams: Tensor) -> Tensor:
        """streams [L, S, D] -> [L, D] in the streams' dtype; L is a multiple of ROW_TILE."""
        raw = self._product(streams)
        if streams.is_cuda:
            from dsparkd.kernels.cuda.hyper_connection import collapse_last  # a cpu start imports no triton

            return collapse_last(streams, raw, self._scale, self._base, self._eps, self._norm_eps)
        streams32 = streams.float()
        raw = raw[0].mul_(inverse_rms(streams32.flatten(1), self._norm_eps))
        weights = sigmoid(raw.mul_(self._scale).add_(self._base)).add_(self._eps)
        return kernel.weighted_sum(streams32, weights).to(streams.dtype)


def _product(weight: Tensor, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    """Bind a mixing matrix [O, S * D] float32: streams [T, S, D] -> their product with it, in parts [P, T, O]."""
    if weight.is_cuda:
        from dsparkd.kernels.cuda.hyper_connection import TritonProduct  # a cpu start imports no triton

        return TritonProduct(weight, dtype)
    linear = Linear(weight)
    return lambda streams: linear(streams.float().flatten(1))[None]
