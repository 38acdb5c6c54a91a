"""RMSNorm, linear, RoPE and the activations that several layers share.

Every function here gives a row the same bits in any batch on the cpu in float32. Therefore torch.sigmoid and
softplus are spelled with exp (their vector bodies and tails differ), sums over a dimension that is not the last are
adds in a fixed order, and products that could be contracted to a fused multiply-add are separate operations.

Letters: T tokens, h heads, d head width, r rotary width.
"""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch import Tensor

from dsparkd.kernels import linear as kernel
from dsparkd.kernels.rotary import Rotation
from dsparkd.kernels.weight import Weight, dense, stacked
from dsparkd.model.config import ModelConfig, YarnScaling


class WeightSource(Protocol):
    """Where layers take their parameters from, by official name, on the model's device."""

    dtype: torch.dtype  # of activations and linears
    device: torch.device

    def weight(self, name: str) -> Weight:
        """Weight [O, I] of the linear NAME as its products read it: packed, or in the model's dtype."""

    def exact(self, name: str) -> Tensor:
        """The tensor NAME for a WideLinear: every stored bit, in float32 or in the dtype that kernels multiply."""

    def linear(self, name: str) -> Tensor:
        """Weight [O, I] of the linear NAME in the model's dtype, dequantised."""

    def float32(self, name: str) -> Tensor:
        """The tensor NAME in float32."""

    def integer(self, name: str) -> Tensor:
        """The int64 tensor NAME."""


class Linear:
    """Product with stacked weights [O, I] of one format, in the model's dtype. The model has no biases."""

    def __init__(self, *weights: Weight | Tensor) -> None:
        parts = [weight if isinstance(weight, Weight) else dense(weight) for weight in weights]
        self._kernel = kernel.bind(stacked(parts))

    def __call__(self, x: Tensor) -> Tensor:
        """x [M, I] contiguous -> [M, O], the weights' outputs side by side; M is a multiple of ROW_TILE."""
        return self._kernel(x)


class WideLinear:
    """Product in float32 with stacked weights [O, I] of `WeightSource.exact`, of values in the model's dtype.

    Products of two bfloat16 values are exact in float32: the matrix unit adds what float32 arithmetic would.
    """

    def __init__(self, *weights: Tensor) -> None:
        self._dtype = weights[0].dtype
        self._kernel = kernel.bind(stacked([dense(weight) for weight in weights]), wide=True)

    def __call__(self, x: Tensor) -> Tensor:
        """x [M, I] contiguous, in the model's dtype -> [M, O] float32; M is a multiple of ROW_TILE."""
        return self._kernel(x.to(self._dtype))


def inverse_rms(x: Tensor, eps: float) -> Tensor:
    """x [..., n] float32 -> (mean of squares + eps) ** -1/2, [..., 1]. On cuda x is [T, n], contiguous."""
    if x.is_cuda:
        from dsparkd.kernels.cuda import norm  # a cpu start imports no triton

        return norm.inverse_rms(x, eps)
    return x.square().mean(-1, keepdim=True).add_(eps).rsqrt_()


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., n] any dtype, weight [n] float32; float32 inside, one cast back. On cuda x is [T, n]."""
    if x.is_cuda:
        from dsparkd.kernels.cuda import norm  # a cpu start imports no triton

        return norm.rms_norm(x, weight, eps)
    x32 = x.float()
    return (x32 * inverse_rms(x32, eps)).mul_(weight).to(x.dtype)


def sigmoid(x: Tensor) -> Tensor:
    """Logistic function, elementwise, float32."""
    return x.neg().exp_().add_(1).reciprocal_()


def ordered_sum(x: Tensor, dim: int) -> Tensor:
    """Sum over `dim` by halving: elementwise adds alone, so the other dimensions' sizes change no bits."""
    while (n := x.shape[dim]) > 1:
        half = n // 2
        total = x.narrow(dim, 0, half) + x.narrow(dim, half, half)
        x = torch.cat((total, x.narrow(dim, n - 1, 1)), dim) if n % 2 else total
    return x.squeeze(dim)


class RotaryEmbedding:
    """Angles of one base. frequencies [r] float32: each pair's, twice."""

    def __init__(self, rotary_dim: int, base: float, scaling: YarnScaling | None, device: torch.device) -> None:
        frequencies = rotary_frequencies(rotary_dim, base, scaling)
        self._frequencies = frequencies.repeat_interleave(2).to(device)
        self._signs = torch.tensor([-1.0, 1.0], device=device).repeat(rotary_dim // 2)

    def at(self, positions: Tensor) -> Rotation:
        """positions [T] int64 -> their rotation. Angles are float32, as the released weights were trained."""
        if positions.is_cuda:
            from dsparkd.kernels.cuda import norm  # a cpu start imports no triton

            return norm.angles(positions, self._frequencies, self._signs)
        angles = positions.float()[:, None, None] * self._frequencies
        return Rotation(angles.cos(), angles.sin().mul_(self._signs))


def rotary_frequencies(rotary_dim: int, base: float, scaling: YarnScaling | None) -> Tensor:
    """[r / 2] float32, radians a token; YaRN blends in frequencies divided by its factor, and scales no magnitude."""
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.int64).float() / rotary_dim
    plain = 1.0 / (base**exponents)
    if scaling is None:
        return plain

    def pair_of(rotations: float) -> float:
        turns = scaling.original_max_position_embeddings / (rotations * 2 * math.pi)
        return rotary_dim * math.log(turns) / (2 * math.log(base))

    low = max(math.floor(pair_of(scaling.beta_fast)), 0)
    high = min(math.ceil(pair_of(scaling.beta_slow)), rotary_dim - 1)
    span = high - low if high != low else 0.001
    ramp = ((torch.arange(rotary_dim // 2, dtype=torch.float32) - low) / span).clamp_(0, 1)
    return plain * (1 - ramp) + plain / scaling.factor * ramp


def main_rotary(config: ModelConfig, device: torch.device) -> RotaryEmbedding:
    """Angles of sliding-window layers and draft stages: plain."""
    return RotaryEmbedding(config.qk_rope_head_dim, config.rope_theta, None, device)


def compressed_rotary(config: ModelConfig, device: torch.device) -> RotaryEmbedding:
    """Angles of everything in layers that compress."""
    return RotaryEmbedding(config.qk_rope_head_dim, config.compress_rope_theta, config.rope_scaling, device)
