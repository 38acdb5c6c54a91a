"""Noise, Triton and torch form: the same words, hence the same noise up to the rounding of two logarithms."""

from __future__ import annotations

import pytest
import torch

from dsparkd.kernels import noise
from dsparkd.kernels.cuda.noise import gumbel

SEEDS = torch.tensor([0, 5, 5, 5, 2**63 - 1, 1 << 40, 1 << 31])
CHOICES = torch.tensor([0, 0, 1, 0, 7, 0, 2**32 - 1])
POSITIONS = torch.tensor([0, 0, 0, 1, 2**20, 31, 2**32 - 1])


@pytest.mark.parametrize("stream", [noise.SAMPLING, noise.ACCEPTANCE, noise.DRAFTS + 4])
@pytest.mark.parametrize("vocab_size", [3, 1024, 2051])
def test_noise_follows_every_part_of_the_key(device: torch.device, stream: int, vocab_size: int) -> None:
    """One other bit of a word would show: seeds of 63 bits, counters of 32, a vocabulary that fills no block."""
    expected = noise.gumbel(SEEDS, CHOICES, POSITIONS, vocab_size, stream)
    got = gumbel(SEEDS.to(device), CHOICES.to(device), POSITIONS.to(device), vocab_size, stream).cpu()
    assert got.shape == expected.shape
    # Near zero a rounding of the inner logarithm counts as itself, not by the noise's size.
    assert torch.allclose(got, expected, rtol=2e-6, atol=3e-6)
    keys = torch.stack((SEEDS, CHOICES, POSITIONS), 1).to(device)
    seeds, choices, positions = keys.unbind(dim=1)  # as the sampler has them
    columns = gumbel(seeds, choices, positions, vocab_size, stream).cpu()
    assert torch.equal(columns, got)
    alone = gumbel(SEEDS[3:4].to(device), CHOICES[3:4].to(device), POSITIONS[3:4].to(device), vocab_size, stream).cpu()
    assert torch.equal(alone[0], got[3])


def test_the_largest_noise_keeps_its_digits(device: torch.device) -> None:
    """G is large where the word is small: its logarithm must not be that of a rounded one."""
    seeds = torch.arange(400)
    zeros = torch.zeros_like(seeds)
    expected = noise.gumbel(seeds, zeros, zeros, 2048)
    got = gumbel(seeds.to(device), zeros.to(device), zeros.to(device), 2048, noise.SAMPLING).cpu()
    best = expected.flatten().topk(50)
    assert best.values[-1] > 9
    assert torch.allclose(got.flatten()[best.indices], best.values, rtol=1e-6)
    assert got.isfinite().all()
