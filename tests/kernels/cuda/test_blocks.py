"""Blocks, where they begin and laid out as rows, Triton and torch form."""

from __future__ import annotations

import pytest
import torch

from dsparkd.kernels import blocks
from dsparkd.kernels.blocks import Anchors
from dsparkd.kernels.cuda.blocks import go_on, lay_out


@pytest.mark.parametrize(("num_blocks", "gamma", "window"), [(1, 5, 128), (7, 5, 128), (3, 1, 16), (2, 3, 5)])
def test_rows_of_blocks_are_those_of_the_torch_form(
    device: torch.device, num_blocks: int, gamma: int, window: int
) -> None:
    """Every word: anchors and noise, positions, context and the block's own rows, what is hidden."""
    draw = torch.Generator().manual_seed(num_blocks)
    anchor_ids, positions, first = (torch.randint(0, 1 << 40, (num_blocks,), generator=draw) for _ in range(3))
    sources = torch.randint(0, 1 << 40, (num_blocks, window), generator=draw)
    expected = blocks.lay_out(anchor_ids, positions, sources, first, gamma, 99, num_blocks * gamma)
    parts = [part.to(device) for part in (anchor_ids, positions, sources, first)]
    got = lay_out(parts[0], parts[1], parts[2], parts[3], gamma, 99)
    for name in ("input_ids", "positions", "sources", "first"):
        assert torch.equal(getattr(got, name).cpu(), getattr(expected, name)), name
    assert lay_out(parts[0][:0], parts[1][:0], parts[2][:0], parts[3][:0], gamma, 99).sources.shape[0] == 0


def test_padding_is_noise_at_position_0() -> None:
    """On the cpu blocks fill whole row tiles; nothing reads behind sources and first."""
    ones = torch.ones(2, dtype=torch.int64)
    rows = blocks.lay_out(ones, 40 * ones, torch.zeros((2, 4), dtype=torch.int64), ones, 3, 9, 16)
    assert rows.input_ids.tolist() == [1, 9, 9, 1, 9, 9] + [9] * 10
    assert rows.positions.tolist() == [40, 41, 42, 40, 41, 42] + [0] * 10
    assert rows.sources[:, 4:].tolist() == [[-1, -2, -3]] * 3 + [[-4, -5, -6]] * 3


@pytest.mark.parametrize("num_blocks", [1, 9])
def test_anchors_behind_a_step_are_those_of_the_torch_form(device: torch.device, num_blocks: int) -> None:
    """All numbers of drafts that may stand, and blocks that stay where they are; drafts often agree."""
    draw = torch.Generator().manual_seed(num_blocks)
    seen = set()
    for _ in range(100 // num_blocks):
        windows = torch.ones((num_blocks + 2, 6), dtype=torch.int64)
        limits = torch.randint(-1, 6, (num_blocks,), generator=draw)
        firsts = (limits + 1).cumsum(0) - limits - 1
        ids = (torch.rand(int((limits + 1).sum()) + 1, generator=draw) < 0.85).long()
        known = Anchors(10 + torch.arange(num_blocks), 100 * torch.arange(num_blocks))
        expected = blocks.go_on(known, windows, ids, firsts, limits)
        places = Anchors(known.ids.to(device), known.positions.to(device))
        got = go_on(places, windows.to(device), ids.to(device), firsts.to(device), limits.to(device))
        assert torch.equal(got.ids.cpu(), expected.ids)
        assert torch.equal(got.positions.cpu(), expected.positions)
        seen |= set((expected.positions - known.positions).tolist())
    assert seen == set(range(7))
