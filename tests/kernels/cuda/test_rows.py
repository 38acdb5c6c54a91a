"""Stores into rings, Triton and torch form."""

from __future__ import annotations

import pytest
import torch

from dsparkd.kernels import rows as torch_rows
from dsparkd.kernels.cuda import rows as triton_rows
from tests.kernels.cuda.values import DTYPES, noise


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [40, 1500])
def test_rows_lie_where_they_belong_and_the_rest_stays(device: torch.device, dtype: torch.dtype, width: int) -> None:
    """Bits are copied; a step that keeps nothing changes nothing."""
    ring, rows = noise(12, width).to(dtype), noise(5, width, seed=1).to(dtype)
    dst, src = torch.tensor([7, 0, 11]), torch.tensor([4, 2, 2])
    expected = ring.clone()
    torch_rows.store(expected, dst, rows, src)
    assert torch.equal(expected[7], rows[4])
    got = ring.clone().to(device)
    triton_rows.store(got, dst.to(device), rows.to(device), src.to(device))
    assert torch.equal(got.cpu(), expected)
    triton_rows.store(got, dst[:0].to(device), rows.to(device), src[:0].to(device))
    assert torch.equal(got.cpu(), expected)


def test_what_goes_nowhere_is_not_stored(device: torch.device) -> None:
    """P-13: padding of a captured shape goes to -1, which lies in front of the ring."""
    whole = noise(6, 40).to(device)
    ring, rows = whole[1:], noise(3, 40, seed=1).to(device)
    expected = whole.clone()
    expected[3] = rows[1]
    triton_rows.store(ring, torch.tensor([-1, 2, -1], device=device), rows, torch.arange(3, device=device))
    assert torch.equal(whole, expected)
