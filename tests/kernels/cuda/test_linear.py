"""The product's Triton form: values in every format, packed against dense bits, any number of rows."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from dsparkd.kernels.cuda.linear import (
    APART_TILES,
    DENSE_TILES,
    PACKED_TILES,
    WHOLE_TILES,
    WIDE_TILE,
    TritonLinear,
    choose_tiles,
    forms_of,
    is_spread,
    splits_of,
)
from dsparkd.kernels.cuda.tile import Tiles
from dsparkd.kernels.weight import Format, Weight, decode, dense, stacked
from tools.gates.kernels import poisoned_memory
from tools.kernel_cases.weights import random_weight


def noise(device: torch.device, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).bfloat16().to(device)


@pytest.mark.parametrize("form", list(Format))
@pytest.mark.parametrize(("inputs", "outputs"), [(128, 64), (160, 70), (40, 8)])
def test_the_product_is_right(device: torch.device, form: Format, inputs: int, outputs: int) -> None:
    """Widths that fill tiles, and odd ends; one cast to bfloat16 at the end."""
    weight, x = random_weight(form, outputs, inputs, 3, device), noise(device, 21, inputs)
    got, expected = TritonLinear(weight)(x), x.double() @ decode(weight, torch.float32).double().t()
    assert got.dtype == torch.bfloat16
    assert (got.double() - expected).abs().max() < 2**-7 * expected.abs().max()


@pytest.mark.parametrize("form", [Format.FP4, Format.FP8])
@pytest.mark.parametrize("inputs", [160, 256])
def test_packed_weights_have_the_values_of_dense_ones(device: torch.device, form: Format, inputs: int) -> None:
    """A code times its scale is exact in bfloat16, subnormal codes included: an input of ones picks them one by one."""
    weight, x = random_weight(form, 70, inputs, 3, device), torch.eye(inputs, dtype=torch.bfloat16, device=device)
    for num_rows in (16, inputs):  # in tiles of few rows, and of more
        got = TritonLinear(weight, wide=True)(x[-num_rows:].contiguous())
        assert torch.equal(got, decode(weight, torch.float32).t()[-num_rows:])


@pytest.mark.parametrize("form", list(Format))
@pytest.mark.parametrize(("inputs", "groups"), [(256, 1), (1024, 1), (256, 2)])
def test_tiles_of_any_shape_give_the_same_bits(device: torch.device, form: Format, inputs: int, groups: int) -> None:
    """Of few rows codes are taken apart in the product, of many before it; FP4's inputs are turned likewise."""
    weight, x = random_weight(form, groups * 72, inputs, 3, device), noise(device, 200, groups * inputs)
    few, *others = DENSE_TILES if form is Format.DENSE else (*PACKED_TILES, WIDE_TILE)
    kernel = TritonLinear(weight, wide=True, groups=groups)
    whole = kernel._product(x, few)
    for tiles in (*others, *APART_TILES, *WHOLE_TILES, Tiles(192, 128, 128, 8, 2, apart=True)):
        if device.type == "cpu":  # a product of 64 inputs is rounded elsewhere there: the interpreter's is numpy's
            tiles = dataclasses.replace(tiles, inputs=128)
        for spread in {False, splits_of(*weight.shape) > 1}:
            with poisoned_memory():
                assert torch.equal(kernel._product(x, tiles, spread), whole)
    assert not kernel._arrivals.any()


def test_fp8_values_are_added_in_the_order_of_dense_ones(device: torch.device) -> None:
    """Their codes lie as the matrix unit wants them, so inputs need no other order: bits as of the dense weight."""
    weight, x = random_weight(Format.FP8, 70, 256, 3, device), noise(device, 21, 256)
    plain = dense(decode(weight, torch.bfloat16))
    assert torch.equal(TritonLinear(weight, wide=True)(x), TritonLinear(plain, wide=True)(x))


def test_a_wide_product_is_not_rounded(device: torch.device) -> None:
    """Router, head: bfloat16 factors, a float32 sum."""
    weight, x = random_weight(Format.DENSE, 40, 256, 3, device), noise(device, 16, 256)
    got, expected = TritonLinear(weight, wide=True)(x), x.double() @ weight.values.double().t()
    assert got.dtype == torch.float32
    assert (got.double() - expected).abs().max() < 1e-6 * expected.abs().max()


def test_float32_weights_are_multiplied_in_float32(device: torch.device) -> None:
    """Not in TF32."""
    weight, x = dense(random_weight(Format.DENSE, 40, 96, 3, device).values.float()), noise(device, 16, 96).float() / 3
    expected = x.double() @ weight.values.double().t()
    assert (TritonLinear(weight)(x).double() - expected).abs().max() < 1e-6 * expected.abs().max()


def test_stacked_fp8_weights_keep_their_own_scales(device: torch.device) -> None:
    """Weights whose heights are no multiples of a scale's block lie side by side in one product."""
    first, second = (random_weight(Format.FP8, outputs, 128, outputs, device) for outputs in (40, 24))
    x = noise(device, 16, 128)
    both = TritonLinear(stacked([first, second]))(x)
    assert torch.equal(both, torch.cat((TritonLinear(first)(x), TritonLinear(second)(x)), 1))


@pytest.mark.parametrize("form", [Format.DENSE, Format.FP8])
def test_all_that_rows_ask_for_is_compiled_at_start(device: torch.device, form: Format) -> None:
    """No step waits for a compiler; and nothing is compiled in vain."""
    for dtype in (torch.bfloat16, torch.float32):
        for outputs, inputs, groups in (
            (4096, 4096, 1),
            (32768, 1024, 1),
            (8192, 4096, 8),
            (192, 4096, 1),
            (96, 160, 1),
        ):
            asked = set()
            for num_rows in range(1, 9000, 7):
                tiles = choose_tiles(num_rows, outputs, inputs, form, dtype)
                asked.add((tiles, is_spread(num_rows, outputs, inputs, groups, tiles)))
            assert asked == set(forms_of(outputs, inputs, groups, form, dtype))
    TritonLinear(random_weight(form, 64, 2 * 128, 1, device), groups=2).compile()


@pytest.mark.parametrize("form", list(Format))
@pytest.mark.parametrize(("inputs", "outputs"), [(1024, 70), (2048, 8)])
def test_splits_are_added_in_their_order_whoever_sums_them(
    device: torch.device, form: Format, inputs: int, outputs: int
) -> None:
    """Few programs: one for each split, and the last adds, time and again. Many: each has all splits."""
    weight, x = random_weight(form, outputs, inputs, 3, device), noise(device, 21, inputs)
    splits = splits_of(outputs, inputs)
    assert splits == inputs // 512
    kernel, tiles = TritonLinear(weight, wide=True), choose_tiles(21, outputs, inputs, form, torch.bfloat16)
    alone = kernel._product(x, tiles, spread=False)
    with poisoned_memory():
        for _ in range(2):
            assert torch.equal(kernel(x), alone)
    part = inputs // splits
    ordered = torch.zeros((21, outputs), device=device)
    for split in range(splits):
        own = Weight(form, *(None if t is None else cut(t, split, splits) for t in (weight.values, weight.scales)))
        ordered += TritonLinear(own, wide=True)(x[:, split * part : (split + 1) * part].contiguous())
    assert torch.equal(ordered, alone)
    assert not kernel._arrivals.any()


def cut(columns: torch.Tensor, split: int, splits: int) -> torch.Tensor:
    """One of equally many columns."""
    return columns.chunk(splits, 1)[split].contiguous()


def test_how_a_weight_is_split_follows_from_its_shape() -> None:
    """The geometry's weights of few outputs make some hundred programs a row tile; wide and odd ones stay whole."""
    assert [splits_of(outputs, 4096) for outputs in (64, 256, 1024, 1536, 2560, 4096, 8192)] == [8, 8, 8, 8, 4, 4, 2]
    assert [splits_of(8256, 4096), splits_of(32768, 1024), splits_of(129280, 4096), splits_of(64, 1000)] == [1] * 4


def test_no_rows_give_no_rows(device: torch.device) -> None:
    """A rank without tokens."""
    assert TritonLinear(random_weight(Format.FP8, 40, 128, 1, device))(noise(device, 0, 128)).shape == (0, 40)


@pytest.mark.parametrize("form", [Format.FP8, Format.DENSE])
def test_grouped_outputs_read_their_own_columns(device: torch.device, form: Format) -> None:
    """The bits of each group's product by itself, whatever rows come along."""
    parts = [random_weight(form, 64, 128, seed, device) for seed in range(3)]
    x = noise(device, 21, 3 * 128)
    got = TritonLinear(stacked(parts), groups=3)(x)
    alone = [TritonLinear(part)(x[:, g * 128 : (g + 1) * 128].contiguous()) for g, part in enumerate(parts)]
    assert torch.equal(got, torch.cat(alone, 1))
