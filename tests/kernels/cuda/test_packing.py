"""Packed rows, Triton and torch form."""

from __future__ import annotations

import pytest
import torch

from dsparkd.kernels.cuda.packing import take_apart
from dsparkd.kernels.router import Routes, pack
from dsparkd.model.moe import unpack
from tests.kernels.cuda.values import DTYPES, noise


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [40, 4096])
def test_rows_come_apart_to_the_bit(device: torch.device, dtype: torch.dtype, width: int) -> None:
    """Values, shares and ids as the torch form gives them; ids are small integers, no numbers as float32 words."""
    x = noise(5, width).to(dtype)
    ids = torch.arange(15).view(5, 3).int() * 17
    packed = pack(x, Routes(noise(5, 3, seed=1), ids))
    expected = unpack(packed, dtype, width, 3)
    words, shares, expert_ids = take_apart(packed.to(device), 3)
    got = words.view(dtype), expert_ids, shares
    assert all(torch.equal(one.cpu(), other) for one, other in zip(got, expected, strict=True))
    assert torch.equal(expected[1], ids)
    assert [len(part) for part in take_apart(packed[:0].to(device), 3)] == [0, 0, 0]
