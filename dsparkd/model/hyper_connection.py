"""Hyper-connections (mHC): collapse the residual streams into a sublayer's input, expand its output into them.

Letters: T tokens, S streams, D width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dsparkd.kernels import hyper_connection as kernel
from dsparkd.model.config import ModelConfig
from dsparkd.model.layers import WeightSource, inverse_rms, linear, sigmoid, transposed


@dataclass(frozen=True, slots=True)
class Mix:
    """How a sublayer's output goes back: post [T, S], comb [T, S, S], float32."""

    post: Tensor
    comb: Tensor


class HyperConnection:
    """One sublayer's connection; `name` is the official prefix, for instance layers.0.hc_attn."""

    def __init__(self, config: ModelConfig, source: WeightSource, name: str) -> None:
        S = config.hc_mult
        self._streams = S
        self._iterations = config.hc_sinkhorn_iters
        self._eps = config.hc_eps
        self._norm_eps = config.rms_norm_eps
        self._fn = transposed(source.float32(f"{name}_fn"))  # [S * D, (2 + S) * S]
        self._base = source.float32(f"{name}_base")
        pre, post, comb = source.float32(f"{name}_scale").unbind()
        self._scale = torch.cat((pre.expand(S), post.expand(S), comb.expand(S * S)))

    def collapse(self, streams: Tensor) -> tuple[Tensor, Mix]:
        """streams [T, S, D] -> the sublayer's input [T, D] in the streams' dtype, and the way back."""
        streams32 = streams.float()
        flat = streams32.flatten(1)
        raw = linear(flat, self._fn).mul_(inverse_rms(flat, self._norm_eps))
        pre, post, comb = kernel.mixing_weights(
            raw, self._scale, self._base, self._streams, self._iterations, self._eps
        )
        return kernel.collapse(streams32, pre).to(streams.dtype), Mix(post, comb)

    def expand(self, output: Tensor, streams: Tensor, mix: Mix) -> Tensor:
        """output [T, D], streams [T, S, D] -> the next streams, float32 inside, one cast."""
        return kernel.expand(output.float(), streams.float(), mix.post, mix.comb).to(streams.dtype)


class HyperHead:
    """The last collapse: sigmoid weights, neither normalised nor mixed."""

    def __init__(self, config: ModelConfig, source: WeightSource, prefix: str) -> None:
        self._eps = config.hc_eps
        self._norm_eps = config.rms_norm_eps
        self._fn = transposed(source.float32(f"{prefix}hc_head_fn"))  # [S * D, S]
        self._base = source.float32(f"{prefix}hc_head_base")
        self._scale = source.float32(f"{prefix}hc_head_scale")

    def collapse(self, streams: Tensor) -> Tensor:
        """streams [L, S, D] -> [L, D] in the streams' dtype; L is a multiple of ROW_TILE."""
        streams32 = streams.float()
        flat = streams32.flatten(1)
        raw = linear(flat, self._fn).mul_(inverse_rms(flat, self._norm_eps))
        weights = sigmoid(raw.mul_(self._scale).add_(self._base)).add_(self._eps)
        return kernel.collapse(streams32, weights).to(streams.dtype)
