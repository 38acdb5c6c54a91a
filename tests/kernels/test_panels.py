"""The layout of weights for the C kernels."""

from __future__ import annotations

import pytest
import torch

from dsparkd.kernels.panels import in_panels


@pytest.mark.parametrize("outer", [1, 7, 16, 25, 50, 64, 89, 150, 509])
def test_panels_hold_every_column_once_in_runs_of_their_width(outer: int) -> None:
    """Widths 64 and 16, greedily, and zero columns behind the last; inside a panel one line an input."""
    operand = torch.arange(1.0, 3.0 * outer + 1).view(3, outer)
    panels = in_panels(operand)
    filled = torch.zeros(3, -(-outer // 16) * 16)
    filled[:, :outer] = operand
    at = column = 0
    while column < outer:
        width = 64 if column + 64 <= outer else 16
        assert torch.equal(panels[at : at + 3 * width].view(3, width), filled[:, column : column + width])
        at, column = at + 3 * width, column + width
    assert at == panels.numel() == filled.numel()
