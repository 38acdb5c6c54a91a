"""The cases of the kernels that move keys, streams and scores, on small shapes."""

from __future__ import annotations

import os

import pytest
import torch

from tools.gates.kernels import check
from tools.kernel_cases import Scale, all_cases

PREFIXES = ["attention", "mhc", "indexer", "compressor", "norm", "rotation", "rows"]


def hold(device: torch.device, prefix: str) -> bool:
    outcomes = [check(case, device) for case in all_cases(device, Scale.SMALL, prefix)]
    return bool(outcomes) and all(outcome.ok for outcome in outcomes)


@pytest.mark.skipif("TRITON_INTERPRET" not in os.environ, reason="the GPU runs the kernels")
@pytest.mark.parametrize("prefix", PREFIXES)
def test_they_hold_under_the_interpreter(prefix: str) -> None:
    """Values, poisoned outputs, repeats and batch-free bits."""
    assert hold(torch.device("cpu"), prefix)


@pytest.mark.gpu
@pytest.mark.parametrize("prefix", PREFIXES)
def test_they_hold_on_the_device(prefix: str) -> None:
    """Compiled, and captured into a graph, too; the gate runs the real geometry."""
    assert hold(torch.device("cuda"), prefix)
