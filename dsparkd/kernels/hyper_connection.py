"""Manifold-constrained hyper-connections around a sublayer: torch form, and C form for the cpu in float32.

A collapse gives the sublayer's normed input; an expansion takes its output back into the streams. The Sinkhorn
normalisations are some 120 tiny operations a call, so on the cpu one C call does them. The form for cuda is
kernels/cuda/hyper_connection.py.

Letters: T tokens, S streams, D width, P parts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from dsparkd.errors import CapabilityError
from dsparkd.kernels._cpu import lib
from dsparkd.kernels.pointers import floats

MAX_STREAMS = 8  # DSPARKD_MAX_STREAMS of cpu.h


@dataclass(frozen=True, slots=True)
class Mixing:
    """One sublayer's numbers: scale and base [(2 + S) * S], the norm's weight [D], all float32."""

    scale: Tensor
    base: Tensor
    norm: Tensor
    num_streams: int
    iterations: int
    eps: float
    norm_eps: float


@dataclass(frozen=True, slots=True)
class Collapsed:
    """A sublayer's normed input [T, D] in the streams' dtype; post [T, S] and comb [T, S, S] float32 lead back."""

    input: Tensor
    post: Tensor
    comb: Tensor


class HyperConnectionKernel(Protocol):
    """What `bind` returns."""

    def collapse(self, streams: Tensor, raw: Tensor, mixing: Mixing) -> Collapsed:
        """streams [T, S, D]; raw [P, T, (2 + S) * S] float32: their product with the mixing matrix, not yet normed, is
        the sum over P, taken in ascending order."""

    def expand(self, output: Tensor, streams: Tensor, collapsed: Collapsed) -> Tensor:
        """post_k * output + sum_j comb[j, k] * streams[j]: [T, S, D]; float32 inside, one cast at the end."""


def bind(device: torch.device, dtype: torch.dtype, num_streams: int) -> HyperConnectionKernel:
    """Pick the form for a device and a streams' dtype, once. Raises CapabilityError for too many streams."""
    if device.type == "cuda":
        from dsparkd.kernels.cuda.hyper_connection import TritonHyperConnection  # a cpu start imports no triton

        return TritonHyperConnection(num_streams)
    if dtype != torch.float32:
        return TorchHyperConnection()
    if num_streams > MAX_STREAMS:
        raise CapabilityError(
            "engine.device = 'cpu'", f"room for {num_streams} residual streams (at most {MAX_STREAMS})", "use cuda"
        )
    return CpuHyperConnection()


class TorchHyperConnection:
    """The reference, and the form for the cpu in bfloat16."""

    def collapse(self, streams: Tensor, raw: Tensor, mixing: Mixing) -> Collapsed:
        """See HyperConnectionKernel."""
        streams32 = streams.float()
        weights = _total(raw) * _inverse_rms(streams32.flatten(1), mixing.norm_eps)
        pre, post, comb = mixing_weights(weights, mixing)
        collapsed = weighted_sum(streams32, pre).to(streams.dtype).float()
        normed = (collapsed * _inverse_rms(collapsed, mixing.norm_eps)).mul_(mixing.norm)
        return Collapsed(normed.to(streams.dtype), post, comb)

    def expand(self, output: Tensor, streams: Tensor, collapsed: Collapsed) -> Tensor:
        """See HyperConnectionKernel."""
        own = collapsed.post[:, :, None] * output.float()[:, None, :]
        return torch.baddbmm(own, collapsed.comb.transpose(1, 2), streams.float()).to(streams.dtype)


class CpuHyperConnection:
    """One C call each; float32, one thread."""

    def collapse(self, streams: Tensor, raw: Tensor, mixing: Mixing) -> Collapsed:
        """See HyperConnectionKernel."""
        T, S, D = streams.shape
        collapsed = Collapsed(streams.new_empty((T, D)), streams.new_empty((T, S)), streams.new_empty((T, S, S)))
        total = _total(raw)  # kept: it is the memory behind the pointer
        lib.dsparkd_collapse(
            floats(streams),
            floats(total),
            floats(mixing.scale),
            floats(mixing.base),
            floats(mixing.norm),
            T,
            S,
            D,
            mixing.iterations,
            mixing.eps,
            mixing.norm_eps,
            floats(collapsed.input),
            floats(collapsed.post),
            floats(collapsed.comb),
        )
        return collapsed

    def expand(self, output: Tensor, streams: Tensor, collapsed: Collapsed) -> Tensor:
        """See HyperConnectionKernel."""
        T, S, D = streams.shape
        expanded = torch.empty_like(streams)
        lib.dsparkd_expand(
            floats(output),
            floats(streams),
            floats(collapsed.post),
            floats(collapsed.comb),
            T,
            S,
            D,
            floats(expanded),
        )
        return expanded


def mixing_weights(weights: Tensor, mixing: Mixing) -> tuple[Tensor, Tensor, Tensor]:
    """Turn the normed products [T, (2 + S) * S] into pre [T, S], post [T, S] and comb [T, S, S].

    comb's first index is the source stream; rows, then columns, are normalised `iterations` times, columns last.
    """
    S, eps = mixing.num_streams, mixing.eps
    weights = weights.mul(mixing.scale).add_(mixing.base)
    gates = weights[:, : 2 * S].neg().exp_().add_(1).reciprocal_()
    pre = gates[:, :S] + eps
    post = gates[:, S:] * 2
    comb = torch.softmax(weights[:, 2 * S :].reshape(-1, S, S), dim=-1).add_(eps)
    comb.div_(comb.sum(1, keepdim=True).add_(eps))
    for _ in range(mixing.iterations - 1):
        comb.div_(comb.sum(2, keepdim=True).add_(eps))
        comb.div_(comb.sum(1, keepdim=True).add_(eps))
    return pre, post, comb


def weighted_sum(streams: Tensor, weights: Tensor) -> Tensor:
    """Sum over the streams [T, S, D] by weights [T, S], float32 [T, D], in ascending order."""
    total = streams[:, 0] * weights[:, 0:1]
    for s in range(1, streams.shape[1]):
        total.add_(streams[:, s] * weights[:, s : s + 1])
    return total


def _total(parts: Tensor) -> Tensor:
    """Sum over the first dimension in ascending order; the part itself where there is one."""
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def _inverse_rms(x: Tensor, eps: float) -> Tensor:
    return x.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
