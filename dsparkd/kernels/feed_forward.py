"""What lies between a feed-forward layer's products and behind them: torch form, Triton form for cuda.

Letters: T tokens, D width, I expert width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Summands:
    """What a layer of experts gives: two partials [T, D] float32 and shared [T, D] in the model's dtype, to be added in
    this order. On cuda the expansion into the streams adds them."""

    partials: tuple[Tensor, Tensor]
    shared: Tensor

    def total(self) -> Tensor:
        """Their sum, [T, D] in shared's dtype."""
        first, second = self.partials
        return (first + second).add_(self.shared).to(self.shared.dtype)


class FeedForwardKernel(Protocol):
    """What `bind` returns."""

    def activate(self, hidden: Tensor, limit: float) -> Tensor:
        """hidden [T, 2I], gate then up -> silu(min(gate, limit)) * clamp(up), [T, I]; float32 inside, one cast back."""


def bind(device: torch.device) -> FeedForwardKernel:
    """Pick the form for a device, once."""
    if device.type == "cuda":
        from dsparkd.kernels.cuda.feed_forward import TritonFeedForward  # a start on the cpu loads no compiler

        return TritonFeedForward()
    return TorchFeedForward()


class TorchFeedForward:
    """The reference, and the form for the cpu."""

    def activate(self, hidden: Tensor, limit: float) -> Tensor:
        """See FeedForwardKernel."""
        return swiglu(hidden, limit).to(hidden.dtype)


def swiglu(hidden: Tensor, limit: float) -> Tensor:
    """hidden [T, 2I], gate then up -> silu(min(gate, limit)) * clamp(up), [T, I] float32."""
    hidden32 = hidden.float()
    width = hidden.shape[1] // 2
    gate = hidden32[:, :width].clamp(max=limit)
    # silu, spelled with exp: torch's differs in its last bits between the body and the tail of a tensor.
    return (gate / gate.neg().exp_().add_(1)).mul_(hidden32[:, width:].clamp(min=-limit, max=limit))
