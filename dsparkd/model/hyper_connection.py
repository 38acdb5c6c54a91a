"""Hyper-connections (mHC): collapse the residual streams into a sublayer's input, expand its output into them.

Letters: T tokens, S streams, D width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from dsparkd.kernels import hyper_connection as kernel
from dsparkd.kernels.feed_forward import Summands
from dsparkd.kernels.hyper_connection import Collapsed
from dsparkd.model.config import ModelConfig
from dsparkd.model.layers import Linear, WeightSource, inverse_rms, sigmoid


@dataclass(frozen=True, slots=True)
class Residual:
    """streams [T, S, D] between two sublayers. raw: what HyperConnectionKernel.collapse wants of them for the sublayer
    to come, where it is made already."""

    streams: Tensor
    raw: Tensor | None = None


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
        if source.device.type == "cuda":
            # A cpu start imports no triton.
            from dsparkd.kernels.cuda.hyper_connection import TritonHyperConnection, TritonProduct

            assert isinstance(self._kernel, TritonHyperConnection)
            assert isinstance(self._product, TritonProduct)
            self._kernel.compile(self._product, self._mixing, source.dtype)

    def collapse(self, residual: Residual) -> Collapsed:
        """The sublayer's normed input [T, D] in the streams' dtype, and the way back."""
        raw = self._product(residual.streams) if residual.raw is None else residual.raw
        return self._kernel.collapse(residual.streams, raw, self._mixing)

    def expand(
        self, output: Tensor | Summands, residual: Residual, collapsed: Collapsed, following: HyperConnection | None
    ) -> Residual:
        """output [T, D], or what adds up to it -> the next streams, float32 inside, one cast.

        following: the connection that collapses them, where there is one: on cuda it is multiplied with at once.
        """
        streams = residual.streams
        if streams.is_cuda:
            return self._advance(output, streams, collapsed, following)
        whole = output.total() if isinstance(output, Summands) else output
        return Residual(self._kernel.expand(whole, streams, collapsed))

    def _advance(
        self, output: Tensor | Summands, streams: Tensor, collapsed: Collapsed, following: HyperConnection | None
    ) -> Residual:
        from dsparkd.kernels.cuda.hyper_connection import TritonProduct, advance  # a cpu start imports no triton

        product = None if following is None else following._product
        assert product is None or isinstance(product, TritonProduct)
        return Residual(*advance(output, streams, collapsed, product))


class HyperHead:
    """The last collapse: sigmoid weights, neither normalised nor mixed."""

    def __init__(self, config: ModelConfig, source: WeightSource, prefix: str) -> None:
        self._eps = config.hc_eps
        self._norm_eps = config.rms_norm_eps
        self._product = _product(source.float32(f"{prefix}hc_head_fn"), source.dtype)  # S * D -> S
        self._base = source.float32(f"{prefix}hc_head_base")
        self._scale = source.float32(f"{prefix}hc_head_scale")
        if source.device.type == "cuda":
            # A cpu start imports no triton.
            from dsparkd.kernels.cuda.hyper_connection import TritonProduct, compile_last

            assert isinstance(self._product, TritonProduct)
            compile_last(self._product, self._scale, self._base, source.dtype)

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
