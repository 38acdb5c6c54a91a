"""Where the Triton forms run: interpreted on the cpu, or compiled on the device."""

from __future__ import annotations

import os

import pytest
import torch


@pytest.fixture(
    params=[
        pytest.param(
            "cpu", marks=pytest.mark.skipif("TRITON_INTERPRET" not in os.environ, reason="the GPU runs the kernels")
        ),
        pytest.param("cuda", marks=pytest.mark.gpu),
    ]
)
def device(request: pytest.FixtureRequest) -> torch.device:
    """The interpreter's device where there is no GPU; else the GPU."""
    return torch.device(request.param)
