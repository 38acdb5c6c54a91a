"""The Triton norm and rotation against the torch forms."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from dsparkd.kernels.cuda.norm import angles, inverse_rms, rms_norm, rotate_
from dsparkd.kernels.rotary import Rotation
from dsparkd.kernels.rotary import rotate_ as torch_rotate_
from dsparkd.model import layers
from tests.kernels.cuda.values import DTYPES, close, noise


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [50, 64])
def test_a_norm_is_the_torch_forms_wherever_the_rows_lie(device: torch.device, dtype: torch.dtype, width: int) -> None:
    """Rows of a wider product; the result is contiguous, and a row's bits are its own."""
    wide, weight = noise(7, width + 14).to(dtype), 1 + 0.2 * noise(width, seed=1)
    there = wide.to(device)[:, 14:]
    got = rms_norm(there, weight.to(device), 1e-6)
    assert got.is_contiguous()
    assert close(got.cpu(), layers.rms_norm(wide[:, 14:], weight, 1e-6))
    assert torch.equal(rms_norm(there[3:4], weight.to(device), 1e-6), got[3:4])


@pytest.mark.parametrize("width", [50, 9000])
def test_an_inverse_root_mean_square_is_a_rows_own(device: torch.device, width: int) -> None:
    """As the torch form gives it, within rounding; the same bits beside any other rows."""
    x = noise(7, width)
    there = x.to(device)
    got = inverse_rms(there, 1e-6)
    assert torch.allclose(got.cpu(), layers.inverse_rms(x, 1e-6), rtol=2e-6)
    for row in range(7):
        assert torch.equal(inverse_rms(there[row : row + 1], 1e-6), got[row : row + 1])


def test_angles_are_the_torch_forms(device: torch.device) -> None:
    """At every position of a context of a million tokens; and a token's bits are its own."""
    positions = torch.tensor([0, 1, 7, 1000, 65_536, 999_999, 3, 4, 5])
    frequencies = (10_000.0 ** -(torch.arange(6) / 6)).repeat_interleave(2)
    signs = torch.tensor([-1.0, 1.0] * 6)
    there = [each.to(device) for each in (positions, frequencies, signs)]
    got = angles(*there)
    expected = positions.float()[:, None, None] * frequencies
    assert torch.allclose(got.cos.cpu(), expected.cos(), atol=1e-6)
    assert torch.allclose(got.sin.cpu(), expected.sin() * signs, atol=1e-6)
    alone = angles(there[0][5:6], *there[1:])
    assert torch.equal(alone.cos, got.cos[5:6])
    assert torch.equal(alone.sin, got.sin[5:6])


def test_angles_compile_nothing_new_for_any_number_of_entries_that_close() -> None:
    """One entry, or no multiple of sixteen, is another kernel unless Triton is told not to look."""
    marked = "*(param.name for param in kernel.params if param.do_not_specialize)"
    code = f"from dsparkd.kernels.cuda.norm import _angles as kernel; print({marked})"
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = [sys.executable, "-W", "ignore", "-c", code]
    result = subprocess.run(run, env=environment, capture_output=True, text=True, check=False)
    assert result.stdout.split() == ["T"], result.stderr[-2000:]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [1, 5, 16])
def test_a_rotation_is_the_torch_forms_and_leaves_the_rest_alone(
    device: torch.device, dtype: torch.dtype, heads: int
) -> None:
    """Of the last dims, in place, to the bit for the dims before them."""
    x = noise(4, heads, 24).to(dtype)
    angles = noise(4, 1, 6, seed=1).repeat_interleave(2, 2)
    rotation = Rotation(angles.cos(), angles.sin() * torch.tensor([-1.0, 1.0] * 6))
    there = x.clone().to(device)
    got = rotate_(there, Rotation(rotation.cos.to(device), rotation.sin.to(device)))
    assert got.data_ptr() == there.data_ptr()
    assert torch.equal(got.cpu()[..., :12], x[..., :12])
    assert close(got.cpu(), torch_rotate_(x.clone(), rotation))
