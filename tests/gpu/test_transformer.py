"""The forward pass on one CUDA device, eager, against the cpu's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.model.values import small_values
from tools.oracle import Engine
from tools.random_checkpoint import write_checkpoint

IDS = [(7 * i * i + 3 * i) % 192 for i in range(300)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("small")
    write_checkpoint(directory, small_values(), seed=3)
    return directory


@pytest.mark.gpu
def test_float32_logits_agree_with_the_cpu(checkpoint: Path) -> None:
    """The torch forms of all kernels, chunked and single tokens; only rounding differs."""
    expected = Engine(checkpoint).logits(IDS, [300])
    engine = Engine(checkpoint, device=torch.device("cuda"))
    for chunks in ([300], [130, 1, 1, 60, 7, 101]):
        got = engine.logits(IDS, chunks).cpu()
        assert (got - expected).abs().max() < 1e-4 * expected.abs().max()


@pytest.mark.gpu
def test_bfloat16_logits_are_near_the_cpus_float32(checkpoint: Path) -> None:
    """Most first choices agree, and nothing is far off."""
    expected = Engine(checkpoint).logits(IDS, [300])
    got = Engine(checkpoint, dtype=torch.bfloat16, device=torch.device("cuda")).logits(IDS, [150, 1, 149]).cpu()
    assert (got - expected).abs().mean() < 0.15 * expected.std()
    assert (got.argmax(1) == expected.argmax(1)).float().mean() > 0.6
