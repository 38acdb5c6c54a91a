"""The product of few rows: values, odd ends, groups, and splits whoever adds them, however far ahead codes come."""

from __future__ import annotations

import pytest
import torch

from dsparkd.kernels.cuda.few_rows import multiply
from dsparkd.kernels.cuda.tile import Tiles, in_pieces
from dsparkd.kernels.weight import Format, Weight, decode
from tools.gates.kernels import poisoned_memory
from tools.kernel_cases.weights import random_weight

TILES = (
    Tiles(16, 64, 128, 4, 2, early=True),
    Tiles(16, 64, 128, 4, 3, early=True),
    Tiles(48, 64, 128, 4, 2, early=True),
)


def noise(device: torch.device, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).bfloat16().to(device)


def product(x: torch.Tensor, weight: Weight, tiles: Tiles, groups: int = 1, splits: int = 1) -> torch.Tensor:
    """In float32; one program has all splits."""
    out = torch.empty((x.shape[0], weight.shape[0]), device=x.device)
    arrivals = torch.zeros(1, dtype=torch.int32, device=x.device)
    pieces = in_pieces(weight, groups)
    with poisoned_memory():
        multiply(x, pieces, weight.format, out, groups, splits, tiles, None, arrivals)
    return out


@pytest.mark.parametrize("tiles", TILES)
@pytest.mark.parametrize("form", [Format.FP8, Format.FP4])
@pytest.mark.parametrize(("rows", "inputs"), [(1, 128), (21, 160), (50, 640)])
def test_the_product_is_right(device: torch.device, form: Format, tiles: Tiles, rows: int, inputs: int) -> None:
    """Fewer steps than come ahead, and more; rows, inputs and outputs that fill no tile."""
    x, weight = noise(device, rows, inputs), random_weight(form, 70, inputs, 3, device)
    expected = x.double() @ decode(weight, torch.float32).double().t()
    assert (product(x, weight, tiles).double() - expected).abs().max() < 1e-6 * expected.abs().max()


@pytest.mark.parametrize("tiles", TILES)
def test_a_group_reads_its_own_columns_and_section(device: torch.device, tiles: Tiles) -> None:
    """Sections of a height that fills no tile lie behind each other, filled up."""
    x, weight = noise(device, 20, 3 * 128), random_weight(Format.FP8, 3 * 40, 128, 3, device)
    assert weight.scales is not None
    whole = product(x, weight, tiles, groups=3)
    for g in range(3):
        own = Weight(Format.FP8, weight.values[40 * g : 40 * g + 40], weight.scales[40 * g : 40 * g + 40])
        alone = product(x[:, 128 * g : 128 * g + 128].contiguous(), own, tiles)
        assert torch.equal(whole[:, 40 * g : 40 * g + 40], alone)


@pytest.mark.parametrize("tiles", TILES)
def test_splits_are_added_in_their_order_by_one_program_or_the_last(device: torch.device, tiles: Tiles) -> None:
    """Time and again; the counters are zero afterwards."""
    x, weight = noise(device, 50, 1024), random_weight(Format.FP8, 130, 1024, 3, device)
    assert weight.scales is not None
    ordered = torch.zeros((50, 130), device=device)
    for split in range(4):
        own = Weight(
            Format.FP8,
            weight.values[:, 256 * split : 256 * split + 256].contiguous(),
            weight.scales[:, 2 * split : 2 * split + 2].contiguous(),
        )
        ordered += product(x[:, 256 * split : 256 * split + 256].contiguous(), own, tiles)
    assert torch.equal(product(x, weight, tiles, splits=4), ordered)
    arrivals, pieces = torch.zeros(12, dtype=torch.int32, device=device), in_pieces(weight)
    for _ in range(2):
        with poisoned_memory():
            out, parts = torch.empty((50, 130), device=device), torch.empty((4, 50, 130), device=device)
            multiply(x, pieces, Format.FP8, out, 1, 4, tiles, parts, arrivals)
        assert torch.equal(out, ordered)
    assert not arrivals.any()
