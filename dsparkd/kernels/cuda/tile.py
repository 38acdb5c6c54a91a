"""Tiles of weights as bfloat16 (or float32) values, whatever format they are stored in: Triton functions.

A scale is a power of two and no format has more mantissa than bfloat16, so the values are those of the dense weight to
the bit, and packed and dense forms give the same results. Codes are not converted but shifted: their bits are those of
a bfloat16 value, often a subnormal one, that is too small by a power of two, which the scale's factor makes up for. So
factors reach bfloat16's last exponent sooner than scales do: at MAX_SCALES, which the loader checks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsparkd.kernels.weight import Format, Weight


@dataclass(frozen=True, slots=True)
class Tiles:
    """Shape of a product's tiles (rows, outputs, inputs a step), the warps that compute one, and how many steps are
    loaded ahead."""

    rows: int
    outputs: int
    inputs: int
    warps: int
    stages: int


FORMAT_CODES = {Format.DENSE: 0, Format.FP8: 1, Format.FP4: 2}  # what kernels are compiled for


@triton.jit  # type: ignore[untyped-decorator]
def weight_tile(  # type: ignore[no-untyped-def]
    values,
    scales,
    rows,
    rows_ok,
    k,
    width,
    FORMAT: tl.constexpr,
    OPERAND: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN: tl.constexpr,
):
    """Columns k .. k + BLOCK_K of these weight rows [BLOCK_N], zeros past the end -> [BLOCK_N, BLOCK_K] OPERAND.

    values, scales: codes_of and scales_of a weight; rows: int64. EVEN: nothing lies past an end. BLOCK_K
    is a multiple of 128 for FP8 and of 32 for FP4, and so is k.
    """
    if FORMAT == 0:
        columns = k + tl.arange(0, BLOCK_K)
        places = values + rows[:, None] * width + columns[None, :]
        if EVEN:
            return tl.load(places).to(OPERAND)
        return tl.load(places, mask=rows_ok[:, None] & (columns[None, :] < width), other=0.0).to(OPERAND)
    elif FORMAT == 1:
        return _fp8_tile(values, scales, rows, rows_ok, k, width, OPERAND, BLOCK_K, EVEN)
    else:
        return _fp4_tile(values, scales, rows, rows_ok, k, width, OPERAND, BLOCK_K, EVEN)


@triton.jit  # type: ignore[untyped-decorator]
def _fp8_tile(  # type: ignore[no-untyped-def]
    values,
    scales,
    rows,
    rows_ok,
    k,
    width,
    OPERAND: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN: tl.constexpr,
):
    GROUPS: tl.constexpr = BLOCK_K // 128
    half_width = width // 2
    columns = k // 2 + tl.arange(0, BLOCK_K // 2)
    groups = k // 128 + tl.arange(0, GROUPS)
    num_groups = (width + 127) // 128
    places = values + rows[:, None] * half_width + columns[None, :]
    scale_places = scales + rows[:, None] * num_groups + groups[None, :]
    if EVEN:
        codes = tl.load(places)
        scale = tl.load(scale_places)
    else:
        codes = tl.load(places, mask=rows_ok[:, None] & (columns[None, :] < half_width), other=0)
        scale = tl.load(scale_places, mask=rows_ok[:, None] & (groups[None, :] < num_groups), other=0)
    # Two codes at once, each to its half of a word; exponents are then 120 less than they should be.
    wide = codes.to(tl.int32)
    wide = (wide | (wide << 8)) & 0x00FF00FF
    pairs = ((wide << 8) & -0x7FFF8000) | ((wide << 4) & 0x07F007F0)
    plain = tl.reshape(_halves(pairs, OPERAND), (codes.shape[0], GROUPS, 128))
    factor = ((scale.to(tl.uint16) + 120) << 7).to(tl.bfloat16, bitcast=True).to(OPERAND)
    return tl.reshape(plain * factor[:, :, None], (codes.shape[0], BLOCK_K))


@triton.jit  # type: ignore[untyped-decorator]
def _fp4_tile(  # type: ignore[no-untyped-def]
    values,
    scales,
    rows,
    rows_ok,
    k,
    width,
    OPERAND: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN: tl.constexpr,
):
    GROUPS: tl.constexpr = BLOCK_K // 32
    half_width = width // 2
    columns = k // 2 + tl.arange(0, BLOCK_K // 2)
    groups = k // 32 + tl.arange(0, GROUPS)
    num_groups = (width + 31) // 32
    places = values + rows[:, None] * half_width + columns[None, :]
    scale_places = scales + rows[:, None] * num_groups + groups[None, :]
    if EVEN:
        codes = tl.load(places)
        scale = tl.load(scale_places)
    else:
        codes = tl.load(places, mask=rows_ok[:, None] & (columns[None, :] < half_width), other=0)
        scale = tl.load(scale_places, mask=rows_ok[:, None] & (groups[None, :] < num_groups), other=0)
    # Both codes of a byte at once, signs by one multiplication, the rest by another; exponents are then 126 less.
    wide = codes.to(tl.int32)
    pairs = ((wide * 0x1001000) & -0x7FFF8000) | ((wide * 0x40040) & 0x01C001C0)
    plain = tl.reshape(_halves(pairs, OPERAND), (codes.shape[0], GROUPS, 32))
    factor = ((scale.to(tl.uint16) + 126) << 7).to(tl.bfloat16, bitcast=True).to(OPERAND)
    return tl.reshape(plain * factor[:, :, None], (codes.shape[0], BLOCK_K))


@triton.jit  # type: ignore[untyped-decorator]
def _halves(pairs, OPERAND: tl.constexpr):  # type: ignore[no-untyped-def]
    """Words of two bfloat16 values, the low half first: [N, n] int32 -> [N, n, 2] OPERAND."""
    if tl.bfloat16 == OPERAND:
        low = pairs.to(tl.uint16).to(tl.bfloat16, bitcast=True)
        high = (pairs >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
        return tl.join(low, high)
    else:
        # The interpreter loses subnormal values in a cast. A bfloat16 is the upper half of a float32.
        return tl.join((pairs << 16).to(tl.float32, bitcast=True), (pairs & -65536).to(tl.float32, bitcast=True))


def codes_of(weight: Weight) -> Tensor:
    """Return the values as kernels read them: FP8 in pairs."""
    return weight.values.view(torch.uint16) if weight.format is Format.FP8 else weight.values


def scales_of(weight: Weight) -> Tensor:
    """Return a tensor for the kernel's argument; a dense weight's is never read."""
    return weight.values if weight.scales is None else weight.scales
