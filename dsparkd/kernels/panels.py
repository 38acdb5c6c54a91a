"""Weights laid out for the C kernels: in panels of columns, each of which a product reads as one stream."""

from __future__ import annotations

import torch
from torch import Tensor

WIDTHS = (64, 16, 8, 1)  # the widths of cpu.h, in its order


def in_panels(operand: Tensor) -> Tensor:
    """operand [I, O] -> its I * O elements, panel after panel of [I, width]."""
    panels, column = [], 0
    for width in WIDTHS:
        while column + width <= operand.shape[1]:
            panels.append(operand[:, column : column + width].reshape(-1))
            column += width
    return torch.cat(panels)
