"""The forward pass on one CUDA device, eager, against the cpu's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.model.values import small_values
from tools.oracle import Engine, plan_row
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


@pytest.mark.gpu
def test_packed_rows_give_the_same_bits_whatever_path_wrote_them(checkpoint: Path) -> None:
    """T-37: prefill, chunks, single tokens and a prefix hit over a cache in the official encoding; near the cpu's."""
    expected = Engine(checkpoint, kv_dtype="fp8").logits(IDS, [300])
    engine = Engine(checkpoint, dtype=torch.bfloat16, device=torch.device("cuda"), kv_dtype="fp8")
    engine.model.prepare(engine.pool)
    whole = engine.logits(IDS, [300])
    assert (whole.cpu() - expected).abs().mean() < 0.15 * expected.std()
    assert torch.equal(engine.logits(IDS, [150, 1, 1, 60, 7, 81], slot=2, pages=(5, 6)), whole)
    assert torch.equal(engine.logits(IDS, [256, *([1] * 44)], slot=3, pages=(7, 8)), whole)
    engine.step([plan_row(IDS[:256], 0, 1, (1, 2))])
    engine.pool.save_snapshot(1, 0, 256)
    engine.pool.load_snapshot(4, 0, 256)
    assert torch.equal(engine.step([plan_row(IDS[256:], 256, 4, (1, 9))]).logits, whole[256:])
