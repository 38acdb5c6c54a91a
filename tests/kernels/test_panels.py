"""The layout of weights for the C kernels."""

from __future__ import annotations

import pytest
import torch

from dsparkd.kernels.panels import in_panels


@pytest.mark.parametrize("outer", [1, 7, 8, 25, 64, 89, 150])
def test_panels_hold_every_element_once_in_runs_of_their_width(outer: int) -> None:
    """Widths 64, 16, 8, 1, greedily; inside a panel one line an input."""
    operand = torch.arange(3.0 * outer).view(3, outer)
    panels = in_panels(operand)
    assert sorted(panels.tolist()) == operand.flatten().tolist()
    at = column = 0
    while column < outer:
        width = next(width for width in (64, 16, 8, 1) if column + width <= outer)
        for line in range(3):
            assert panels[at : at + width].tolist() == operand[line, column : column + width].tolist()
            at += width
        column += width
