"""Tiles of weights as bfloat16 (or float32) values, whatever format they are stored in: Triton functions.

A scale is a power of two and no format has more mantissa than bfloat16, so the values are those of the dense weight to
the bit, and packed and dense forms give the same results.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from dsparkd.kernels.weight import Format, Weight

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

    values, scales: as a Weight stores them; rows: int64. EVEN: nothing lies past an end. BLOCK_K is a multiple of 128
    for FP8 and of 32 for FP4, and so is k.
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
    columns = k + tl.arange(0, BLOCK_K)
    groups = k // 128 + tl.arange(0, GROUPS)
    num_groups = (width + 127) // 128
    places = values + rows[:, None] * width + columns[None, :]
    scale_places = scales + rows[:, None] * num_groups + groups[None, :]
    if EVEN:
        codes = tl.load(places)
        scale = tl.load(scale_places)
    else:
        codes = tl.load(places, mask=rows_ok[:, None] & (columns[None, :] < width), other=0)
        scale = tl.load(scale_places, mask=rows_ok[:, None] & (groups[None, :] < num_groups), other=0)
    plain = codes.to(tl.float8e4nv, bitcast=True).to(OPERAND)
    # A biased exponent is the bits of a bfloat16 power of two, shifted behind the mantissa.
    factor = (scale.to(tl.uint16) << 7).to(tl.bfloat16, bitcast=True).to(OPERAND)
    scaled = tl.reshape(plain, (plain.shape[0], GROUPS, 128)) * factor[:, :, None]
    return tl.reshape(scaled, (plain.shape[0], BLOCK_K))


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
        # 127 for columns past the end: their codes are 0, and 0 times 1 stays 0.
        scale = tl.load(scale_places, mask=rows_ok[:, None] & (groups[None, :] < num_groups), other=127)
    wide = codes.to(tl.uint16)
    pairs = tl.join(_fp4_bits(wide & 15), _fp4_bits(wide >> 4))  # [N, K / 2, 2]
    plain = tl.reshape(pairs, (codes.shape[0], GROUPS, 32)).to(tl.bfloat16, bitcast=True).to(OPERAND)
    factor = (scale.to(tl.uint16) << 7).to(tl.bfloat16, bitcast=True).to(OPERAND)
    return tl.reshape(plain * factor[:, :, None], (codes.shape[0], BLOCK_K))


@triton.jit
def _fp4_bits(code):  # type: ignore[no-untyped-def]
    """Four bits (sign, two of exponent, one of mantissa) -> the bits of that bfloat16 value."""
    size = code & 7
    # From 1.0 on exponent and mantissa lie as bfloat16 has them, 126 further; 0 and 0.5 have no leading one.
    bits = tl.where(size > 1, (size << 6) + 16128, size * 16128)
    return bits | ((code & 8) << 12)


def scales_of(weight: Weight) -> Tensor:
    """Return a tensor for the kernel's argument; a dense weight's is never read."""
    return weight.values if weight.scales is None else weight.scales
