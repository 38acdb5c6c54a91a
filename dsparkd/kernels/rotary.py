"""RoPE: interleaved pairs of the last dims, by the angles of a step's positions.

Letters: T tokens, h heads, d head width, r rotary width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Rotation:
    """cos and sin of T positions, [T, 1, r] float32; pair i fills 2i and 2i+1, sin with signs -, +."""

    cos: Tensor
    sin: Tensor

    def inverse(self) -> Rotation:
        """The rotation by the negated angles."""
        return Rotation(self.cos, self.sin.neg())

    def rows(self, part: slice) -> Rotation:
        """The rotation of some of the positions."""
        return Rotation(self.cos[part], self.sin[part])


def bind(device: torch.device) -> Callable[[Tensor, Rotation], Tensor]:
    """Pick the form of `rotate_` for contiguous tensors of a device, once."""
    if device.type == "cuda":
        from dsparkd.kernels.cuda import norm  # a cpu start imports no triton

        return norm.rotate_
    return rotate_


def rotate_(x: Tensor, rotation: Rotation) -> Tensor:
    """Rotate interleaved pairs of the last r of d dims of x [T, h, d] in place; float32 inside."""
    tail = x[..., x.shape[-1] - rotation.cos.shape[-1] :]
    tail32 = tail.float()
    swapped = tail32.view(*tail32.shape[:-1], -1, 2).flip(-1).view(tail32.shape)
    tail.copy_((tail32 * rotation.cos).add_(swapped.mul_(rotation.sin)))
    return x
