"""Confidence of drafts, Triton and torch form."""

from __future__ import annotations

import pytest
import torch

from dsparkd.kernels.confidence import TorchConfidence
from dsparkd.kernels.confidence import survival as reference
from dsparkd.kernels.cuda.confidence import TritonConfidence, survival
from tests.kernels.cuda.values import noise


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("width", "rank"), [(64, 16), (200, 24)])
def test_confidence_is_that_of_the_torch_form_and_a_blocks_own(
    device: torch.device, dtype: torch.dtype, width: int, rank: int
) -> None:
    """Within rounding; the same bits alone, among others and in another place, of widths that fill no block, too."""
    hidden, markov = noise(6, 5, width).to(dtype), noise(5, 6, rank)
    weight = noise(1, width + rank)
    expected = TorchConfidence(weight)(hidden.float(), markov)
    kernel = TritonConfidence(weight.to(device))
    whole = kernel(hidden.to(device), markov.to(device)).cpu()
    assert torch.allclose(whole, expected, rtol=1e-5, atol=1e-5 * (width + rank))
    for b in range(6):
        own = kernel(hidden[b : b + 1].to(device), markov[:, b : b + 1].contiguous().to(device)).cpu()
        assert torch.equal(own[0], whole[b])
    assert kernel(hidden[:0].to(device), markov[:, :0].contiguous().to(device)).shape == (0, 5)


def test_survival_never_grows_and_is_a_blocks_own(device: torch.device) -> None:
    """Products of the torch form's chances; of logits that leave no chance, and of certain ones, too."""
    logits, temperatures = noise(7, 5) * 3, torch.tensor([0.5, 1.0, 2.0, 4.0, 0.25])
    logits[2], logits[3] = 200.0, torch.tensor([1.0, -80.0, 9.0, 9.0, 9.0])
    whole = survival(logits.to(device), temperatures.to(device)).cpu()
    assert torch.allclose(whole, reference(logits, temperatures), rtol=1e-5, atol=1e-7)
    assert (whole.diff(dim=1) <= 0).all()
    assert whole[2:4, -1].tolist() == pytest.approx([1.0, 0.0], abs=1e-15)
    for b in range(7):
        own = survival(logits[b : b + 1].to(device), temperatures.to(device)).cpu()
        assert torch.equal(own[0], whole[b])
