"""The mean of tapped streams, Triton form against torch."""

from __future__ import annotations

import pytest
import torch

from dsparkd.kernels.cuda.taps import average
from tests.kernels.cuda.values import noise


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("streams", "width"), [(2, 40), (4, 1100)])
def test_taps_are_means_in_their_own_columns(
    device: torch.device, dtype: torch.dtype, streams: int, width: int
) -> None:
    """Within a rounding; the other taps' columns stay, and a token's bits are its own."""
    values = noise(6, streams, width).to(dtype)
    features = torch.full((6, 3 * width), 7.0, dtype=dtype, device=device)
    average(values.to(device), features[:, width : 2 * width])
    got = features.cpu()
    exact = values.double().mean(1)
    rounding = 2.0**-7 if dtype == torch.bfloat16 else 2.0**-22  # the interpreter cuts digits off
    assert torch.allclose(got[:, width : 2 * width].double(), exact, rtol=rounding, atol=1e-6)
    assert (got[:, :width] == 7.0).all()
    assert (got[:, 2 * width :] == 7.0).all()
    for t in (0, 5):
        alone = torch.empty((1, width), dtype=dtype, device=device)
        average(values[t : t + 1].to(device), alone)
        assert torch.equal(alone.cpu()[0], got[t, width : 2 * width])
