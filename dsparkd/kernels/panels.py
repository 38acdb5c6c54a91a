"""Weights laid out for the C kernels: in panels of columns, each of which a product reads as one stream."""

from __future__ import annotations

import torch
from torch import Tensor

WIDE, NARROW = 64, 16  # the widths of cpu.h


def in_panels(operand: Tensor) -> Tensor:
    """operand [I, O] -> panel after panel of [I, WIDE] and then [I, NARROW], flat, zero columns behind the last."""
    wide = operand.shape[1] // WIDE * WIDE
    rest = operand[:, wide:]
    rest = torch.nn.functional.pad(rest, (0, -rest.shape[1] % NARROW))
    return torch.cat([panel.reshape(-1) for panel in (*_cut(operand[:, :wide], WIDE), *_cut(rest, NARROW))])


def _cut(operand: Tensor, width: int) -> list[Tensor]:
    """Cut whole panels of that width; none out of no columns."""
    return [operand[:, start : start + width] for start in range(0, operand.shape[1], width)]
