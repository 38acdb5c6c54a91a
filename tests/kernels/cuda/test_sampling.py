"""Sums over the vocabulary, Triton and torch form."""

from __future__ import annotations

import pytest
import torch

from dsparkd.kernels.cuda.sampling import log_totals
from tests.kernels.cuda.values import noise


@pytest.mark.parametrize("vocab_size", [11, 4096, 9001])
def test_totals_are_those_of_the_torch_form_and_a_rows_own(device: torch.device, vocab_size: int) -> None:
    """Within rounding, for large and very negative logits; the same bits alone and beside any other rows."""
    logits = (noise(7, vocab_size) * torch.tensor([0.1, 1, 10, 100, 1, 1, 1])[:, None]).to(device)
    logits[4] += 1e4
    logits[5, 1:] = -torch.inf
    whole = log_totals(logits)
    assert torch.allclose(whole.double().cpu(), logits.double().cpu().logsumexp(1), rtol=1e-6, atol=2e-6)
    for row in range(7):
        assert torch.equal(log_totals(logits[row : row + 1]), whole[row : row + 1])
    assert log_totals(logits[:0]).shape == (0,)
