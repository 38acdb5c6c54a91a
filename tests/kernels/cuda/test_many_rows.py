"""The product of many rows: values, odd ends, groups, and splits whoever adds them."""

from __future__ import annotations

import pytest
import torch

from dsparkd.kernels.cuda.many_rows import multiply
from dsparkd.kernels.cuda.tile import Tiles
from tools.gates.kernels import poisoned_memory

TILES = (Tiles(64, 64, 128, 4, 3), Tiles(128, 128, 128, 8, 3), Tiles(192, 128, 128, 8, 2))


def noise(device: torch.device, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).bfloat16().to(device)


@pytest.mark.parametrize("tiles", TILES)
@pytest.mark.parametrize("rows", [1, 200])
def test_the_product_is_right(device: torch.device, tiles: Tiles, rows: int) -> None:
    """Rows and outputs that fill no tile, and an output of one cast at the end."""
    x, weight = noise(device, rows, 256), noise(device, 200, 256)
    expected = x.double() @ weight.double().t()
    for dtype, tolerance in ((torch.float32, 1e-6), (torch.bfloat16, 2**-7)):
        with poisoned_memory():
            out = torch.empty((rows, 200), dtype=dtype, device=device)
            multiply(x, weight, out, 1, 1, tiles, None)
        assert (out.double() - expected).abs().max() < tolerance * expected.abs().max()


@pytest.mark.parametrize("tiles", TILES)
def test_a_group_reads_its_own_columns_and_section(device: torch.device, tiles: Tiles) -> None:
    """What fills a section up behind a group's outputs is not read, or not kept."""
    x, weight = noise(device, 70, 3 * 128), noise(device, 3 * 128, 128)
    weight.view(3, 128, 128)[:, 40:] = float("nan")
    out, alone = (torch.empty((70, 120), device=device) for _ in range(2))
    multiply(x, weight, out, 3, 1, tiles, None)
    for g in range(3):
        own = torch.empty((70, 40), device=device)
        multiply(x[:, 128 * g : 128 * g + 128].contiguous(), weight[128 * g : 128 * g + 40], own, 1, 1, tiles, None)
        alone[:, 40 * g : 40 * g + 40] = own
    assert torch.equal(out, alone)


@pytest.mark.parametrize("tiles", TILES)
def test_splits_are_added_in_their_order_by_one_program_or_the_last(device: torch.device, tiles: Tiles) -> None:
    """Time and again; the counters are zero afterwards."""
    x, weight = noise(device, 200, 512), noise(device, 130, 512)
    arrivals = torch.zeros(64, dtype=torch.int32, device=device)
    ordered = torch.zeros((200, 130), device=device)
    for split in range(4):
        columns = slice(128 * split, 128 * split + 128)
        part = torch.empty((200, 130), device=device)
        multiply(x[:, columns].contiguous(), weight[:, columns].contiguous(), part, 1, 1, tiles, None)
        ordered += part
    for counters in (None, arrivals, arrivals):
        with poisoned_memory():
            out = torch.empty((200, 130), device=device)
            multiply(x, weight, out, 1, 4, tiles, counters)
        assert torch.equal(out, ordered)
    assert not arrivals.any()
