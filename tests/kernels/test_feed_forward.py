"""Activation and last sum, in torch."""

from __future__ import annotations

import pytest
import torch

from dsparkd.kernels.feed_forward import Summands, bind


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gate_is_clamped_above_and_the_other_half_on_both_sides(dtype: torch.dtype) -> None:
    """silu(min(gate, 2)) * clamp(up, -2, 2), in float32 with one cast."""
    hidden = torch.tensor([[-30.0, 1.0, 5.0, 5.0, -9.0, 3.0]], dtype=dtype)
    got = bind(torch.device("cpu")).activate(hidden, 2.0)
    silu = torch.nn.functional.silu(torch.tensor([-30.0, 1.0, 2.0]))
    assert got.dtype == dtype
    assert torch.allclose(got.float(), (silu * torch.tensor([2.0, -2.0, 2.0]))[None], rtol=2**-8)


def test_partials_are_added_before_the_shared_expert() -> None:
    """The order is the same wherever a token lives: rank 0, rank 1, shared."""
    first, second = torch.tensor([[[2.0**24]], [[-(2.0**24)]]])
    assert Summands((first, second), torch.tensor([[1.0]])).total().item() == 1.0
