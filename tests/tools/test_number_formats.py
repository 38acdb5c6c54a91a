"""Rounding and encoding of the small number formats."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from dsparkd.kernels.weight import FP4_VALUES, decode_e8m0, decode_fp4, decode_fp8
from tools.number_formats import (
    E2M1,
    E4M3,
    SmallFloat,
    encode_fp4,
    encode_fp8,
    round_bfloat16,
    round_fp4,
    round_fp8,
    round_to,
    scale_exponent,
)


def same_bits(ours: Tensor, theirs: Tensor) -> bool:
    """Compare float32 tensors by their bits, so that 0.0 and -0.0 differ."""
    return torch.equal(ours.contiguous().view(torch.int32), theirs.contiguous().view(torch.int32))


def spread(*shape: int, seed: int = 0) -> Tensor:
    """Values of both signs over many magnitudes, some zero of either sign."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator) * torch.exp2(20 * torch.rand(shape, generator=generator) - 15)
    flat = values.view(-1)
    flat[::17], flat[5::31] = 0.0, -0.0
    return values


@pytest.mark.parametrize(("to", "largest"), [(E4M3, 448.0), (E2M1, 6.0)])
def test_the_scale_is_the_least_power_of_two_that_holds_the_largest_value(to: SmallFloat, largest: float) -> None:
    """At amax = largest * 2 ** k the scale is 2 ** k, one float above it is the next one."""
    exponents = torch.arange(-18, 60)
    at = largest * torch.exp2(exponents.float())
    assert torch.equal(scale_exponent(at, to), exponents.int())
    assert torch.equal(scale_exponent(torch.nextafter(at, torch.tensor(math.inf)), to), exponents.int() + 1)
    assert torch.equal(scale_exponent(torch.nextafter(at, torch.tensor(0.0)), to), exponents.int())


def test_the_scale_of_zeros_is_that_of_the_floor() -> None:
    """An all-zero group has a scale, and stays zero."""
    assert scale_exponent(torch.tensor(0.0), E4M3).item() == math.ceil(math.log2(1e-4 / 448))
    assert scale_exponent(torch.tensor(0.0), E2M1).item() == -126
    assert same_bits(round_fp4(torch.zeros(2, 64)), torch.zeros(2, 64))


def test_fp8_rounds_as_the_cast_does() -> None:
    """Nearest, ties to even, subnormals included: torch's own cast is the reference."""
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    exact = codes[codes.isfinite()].unique()
    between = (exact[1:] + exact[:-1]) / 2
    infinity = torch.tensor(math.inf)
    values = torch.cat((exact, between, between.nextafter(infinity), between.nextafter(-infinity), spread(999)))
    values = values.clamp(-448, 448)
    assert same_bits(round_to(values, E4M3), values.to(torch.float8_e4m3fn).float())


def test_fp4_rounds_half_way_values_to_the_even_code() -> None:
    """Thresholds .25, .75, 1.25, 1.75, 2.5, 3.5, 5 go to 0, 1, 1, 2, 2, 4, 4."""
    halves = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    assert round_to(halves, E2M1).tolist() == [0, 1, 1, 2, 2, 4, 4]
    assert round_to(halves.nextafter(torch.tensor(9.0)), E2M1).tolist() == [0.5, 1, 1.5, 2, 3, 4, 6]
    assert round_to(halves.nextafter(torch.tensor(0.0)), E2M1).tolist() == [0, 0.5, 1, 1.5, 2, 3, 4]
    exact = torch.tensor(FP4_VALUES)
    assert same_bits(round_to(exact, E2M1), exact)


def test_bfloat16_rounds_as_the_cast_does() -> None:
    """Nearest, ties to even."""
    values = torch.cat((spread(9999), torch.tensor([1 + 2.0**-8, 1 + 3 * 2.0**-8, 3e38, 1e-39])))
    assert same_bits(round_bfloat16(values), values.bfloat16().float())


@pytest.mark.parametrize("shape", [(128, 256), (70, 90), (3, 64, 96), (130, 258)])
def test_rounding_is_encoding_and_decoding(shape: tuple[int, ...]) -> None:
    """What training sees is what the file holds, bit for bit; also where the last block is cut, also stacked."""
    values = spread(*shape, seed=1)
    parts = values.reshape(-1, *shape[-2:])
    weight, scale = encode_fp4(values)
    decoded = [
        decode_fp4(w, decode_e8m0(s.view(torch.uint8)))
        for w, s in zip(weight.reshape(-1, *weight.shape[-2:]), scale.reshape(-1, *scale.shape[-2:]), strict=True)
    ]
    assert same_bits(torch.stack(decoded), round_fp4(parts))
    weight, scale = encode_fp8(values)
    decoded = [
        decode_fp8(w, decode_e8m0(s.view(torch.uint8)))
        for w, s in zip(weight.reshape(-1, *weight.shape[-2:]), scale.reshape(-1, *scale.shape[-2:]), strict=True)
    ]
    assert same_bits(torch.stack(decoded), round_fp8(parts))
    assert not same_bits(parts, round_fp8(parts))


def test_rounding_twice_changes_nothing() -> None:
    """A trained master that already lies on the grid stays there."""
    values = spread(128, 128, seed=2)
    assert same_bits(round_fp8(round_fp8(values)), round_fp8(values))
    assert same_bits(round_bfloat16(round_bfloat16(values)), round_bfloat16(values))
    assert same_bits(round_fp4(round_fp4(values)), round_fp4(values))
