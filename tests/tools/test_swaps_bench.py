"""The bench of exchanges says when it has measured nothing."""

from __future__ import annotations

import pytest
import torch

from tools.bench import swaps


def test_without_two_gpus_nothing_is_measured(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A figure of one device would be none."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert swaps.main([]) == 2
    assert "needs two CUDA devices" in capsys.readouterr().out
