"""Sums over the vocabulary and the best of it, Triton and torch form."""

from __future__ import annotations

import pytest
import torch

from dsparkd.kernels import sampling
from dsparkd.kernels.cuda.sampling import best, log_totals
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


@pytest.mark.parametrize("vocab_size", [1, 11, 2048, 9001])
def test_the_best_score_is_the_lowest_of_equals_wherever_it_lies(device: torch.device, vocab_size: int) -> None:
    """Exactly torch's on the cpu, in a row apart from others, and with biases that are added in place."""
    rows = (noise(5, 3, vocab_size) * 2).round() / 2  # ties, within parts and across them
    rows[1] = -torch.inf
    rows[1, :, -1] = -3.0
    rows[2, 0] = 7.0
    rows[3, :, vocab_size // 2] = 9.0
    biases = (noise(5, vocab_size) * 2).round()
    for added in (None, biases):
        expected, got = rows.clone(), rows.clone().to(device)
        values, ids = sampling.best(expected[:, 1], added)
        own = best(got[:, 1], None if added is None else added.to(device))
        assert torch.equal(own[0].cpu(), values)
        assert torch.equal(own[1].cpu(), ids)
        assert torch.equal(got.cpu(), expected)
        alone = best(rows[3:4, 1].clone().to(device), None if added is None else added[3:4].to(device))
        assert torch.equal(alone[1].cpu(), ids[3:4])
    empty = best(rows[:0, 0].to(device))
    assert [len(part) for part in empty] == [0, 0]


@pytest.mark.parametrize("at", [0, 3000])
def test_a_row_with_nan_has_no_finite_best(device: torch.device, at: int) -> None:
    """A broken model is seen wherever it shows; what is minus infinity throughout has none either."""
    scores = noise(3, 4100)
    scores[1, at] = torch.nan
    scores[2] = -torch.inf
    assert best(scores.to(device))[0].cpu().isfinite().tolist() == [True, False, False]
