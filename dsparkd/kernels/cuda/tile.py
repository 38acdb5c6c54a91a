"""Tiles of weights as bfloat16 (or float32) values, whatever format they are stored in: Triton functions.

A scale is a power of two and no format has more mantissa than bfloat16, so the values are those of the dense weight to
the bit. Codes are not converted but shifted: their bits are those of a bfloat16 value, often a subnormal one, that is
too small by a power of two, which the scale's factor makes up for. So factors reach bfloat16's last exponent sooner
than scales do: at MAX_SCALES, which the loader checks.

The matrix unit gives each thread t of four the columns 2t, 2t + 1, 2t + 8 and 2t + 9 of every sixteen. Tiles of packed
weights have their columns in another order, in which those of a thread are 32 that lie side by side: it loads 16 codes
of four bits, or 8 of eight, at once, and they share a scale. Of every 128 columns 32 t + 4 j + 2 h + i comes to place
16 j + 8 h + 2 t + i (j below 8, t below 4, h and i below 2), and inputs are taken in the same order. So the sums of
packed and dense weights differ in their order.
"""

from __future__ import annotations

import math
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


TURNED_COLUMNS = 1024  # of one program that turns them
TURNED_ROWS = 64  # with tiles of so many rows it pays to turn the inputs once, before the product
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

    values, scales: codes_of and scales_of a weight; rows: int64. EVEN: nothing lies past an end. BLOCK_K of packed
    weights is a multiple of 128, and so is k.
    """
    if FORMAT == 0:
        columns = k + tl.arange(0, BLOCK_K)
        places = values + rows[:, None] * width + columns[None, :]
        if EVEN:
            return tl.load(places).to(OPERAND)
        return tl.load(places, mask=rows_ok[:, None] & (columns[None, :] < width), other=0.0).to(OPERAND)
    elif FORMAT == 1:
        return _fp8_tile(values, scales, rows, rows_ok, k, width, OPERAND, rows.shape[0], BLOCK_K, EVEN)
    else:
        return _fp4_tile(values, scales, rows, rows_ok, k, width, OPERAND, rows.shape[0], BLOCK_K, EVEN)


@triton.jit  # type: ignore[untyped-decorator]
def input_columns(k, TURNED: tl.constexpr, BLOCK_K: tl.constexpr):  # type: ignore[no-untyped-def]
    """Columns k .. k + BLOCK_K; TURNED: in the order of a packed weight's tile."""
    p = tl.arange(0, BLOCK_K)
    if TURNED:
        own = p // 128 * 128 + p % 8 // 2 * 32 + p % 128 // 16 * 4 + p % 16 // 8 * 2 + p % 2
        return k + tl.max_contiguous(own, 2)
    else:
        return k + p


@triton.jit
def turned_place(column):  # type: ignore[no-untyped-def]
    """Where a column lies in a row of that order: the inverse of input_columns."""
    return column // 128 * 128 + column % 32 // 4 * 16 + column % 4 // 2 * 8 + column % 128 // 32 * 2 + column % 2


def turn(x: Tensor) -> Tensor:
    """Copy x [M, n], contiguous, with every 128 columns in the order of a packed weight's tile; n is a multiple."""
    num_rows, width = x.shape
    turned = torch.empty_like(x)
    block = math.gcd(TURNED_COLUMNS, width)
    _turn[(num_rows, width // block)](x, turned, WIDTH=width, BLOCK=block)
    return turned


@triton.jit  # type: ignore[untyped-decorator]
def _turn(x, turned, WIDTH: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64) * WIDTH
    start = tl.program_id(1) * BLOCK
    own = tl.load(x + row + input_columns(start, True, BLOCK))
    tl.store(turned + row + start + tl.arange(0, BLOCK), own)


@triton.jit  # type: ignore[untyped-decorator]
def _fp8_tile(  # type: ignore[no-untyped-def]
    values,
    scales,
    rows,
    rows_ok,
    k,
    width,
    OPERAND: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN: tl.constexpr,
):
    GROUPS: tl.constexpr = BLOCK_K // 128
    num_words = width // 4
    columns = k // 4 + tl.arange(0, BLOCK_K // 4)
    places = values + rows[:, None] * num_words + columns[None, :]
    if EVEN:
        words = tl.load(places)
    else:
        words = tl.load(places, mask=rows_ok[:, None] & (columns[None, :] < num_words), other=0)
    scale = _scale_tile(scales, rows, rows_ok, k, width, 128, BLOCK_K, EVEN)
    # Exponents of shifted codes are 120 less than they should be.
    factor = _over_words((scale + 120) * 0x800080, BLOCK_N, BLOCK_K // 32, 8)
    if tl.bfloat16 == OPERAND:
        first, second = tl.inline_asm_elementwise(
            """{
            .reg .b32 a, b;
            prmt.b32 a, $2, 0, 0x1404;
            prmt.b32 b, $2, 0, 0x3424;
            and.b32 $0, a, 0x80008000;
            and.b32 $1, b, 0x80008000;
            shr.u32 a, a, 4;
            shr.u32 b, b, 4;
            lop3.b32 $0, a, 0x07F007F0, $0, 0xEA;
            lop3.b32 $1, b, 0x07F007F0, $1, 0xEA;
            mul.rn.bf16x2 $0, $0, $3;
            mul.rn.bf16x2 $1, $1, $3;
            }""",
            "=&r,=&r,r,r",
            [words, factor],
            dtype=(tl.int32, tl.int32),
            is_pure=True,
            pack=1,
        )
        pairs = tl.join(first, second)
    else:
        spread = (words & 0xFF) | ((words & 0xFF00) << 8)
        high = ((words >> 16) & 0xFF) | ((words >> 8) & 0xFF0000)
        pairs = tl.join(spread, high)
        pairs = ((pairs << 8) & -0x7FFF8000) | ((pairs << 4) & 0x07F007F0)
    # [.., t, j, h], as the codes lie, to [.., j, h, t].
    pairs = tl.permute(tl.reshape(pairs, (BLOCK_N, GROUPS, 4, 8, 2)), (0, 1, 3, 4, 2))
    plain = _halves(tl.reshape(pairs, (BLOCK_N, BLOCK_K // 2)), OPERAND)
    if tl.bfloat16 == OPERAND:
        return tl.reshape(plain, (BLOCK_N, BLOCK_K))
    else:
        return _exact_product(plain, scale + 120, BLOCK_N, BLOCK_K)


@triton.jit  # type: ignore[untyped-decorator]
def _fp4_tile(  # type: ignore[no-untyped-def]
    values,
    scales,
    rows,
    rows_ok,
    k,
    width,
    OPERAND: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN: tl.constexpr,
):
    BLOCKS: tl.constexpr = BLOCK_K // 128
    num_words = width // 8
    columns = k // 8 + tl.arange(0, BLOCK_K // 8)
    places = values + rows[:, None] * num_words + columns[None, :]
    if EVEN:
        words = tl.load(places)
    else:
        words = tl.load(places, mask=rows_ok[:, None] & (columns[None, :] < num_words), other=0)
    scale = _scale_tile(scales, rows, rows_ok, k, width, 32, BLOCK_K, EVEN)
    # Exponents of shifted codes are 126 less than they should be.
    factor = _over_words((scale + 126) * 0x800080, BLOCK_N, BLOCK_K // 32, 4)
    if tl.bfloat16 == OPERAND:
        first, second, third, fourth = tl.inline_asm_elementwise(
            """{
            .reg .b32 low, a, b, c, d;
            shl.b32 low, $4, 4;
            prmt.b32 a, low, $4, 0x4400;
            prmt.b32 b, low, $4, 0x5511;
            prmt.b32 c, low, $4, 0x6622;
            prmt.b32 d, low, $4, 0x7733;
            and.b32 $0, a, 0x80008000;
            and.b32 $1, b, 0x80008000;
            and.b32 $2, c, 0x80008000;
            and.b32 $3, d, 0x80008000;
            shr.u32 a, a, 6;
            shr.u32 b, b, 6;
            shr.u32 c, c, 6;
            shr.u32 d, d, 6;
            lop3.b32 $0, a, 0x01C001C0, $0, 0xEA;
            lop3.b32 $1, b, 0x01C001C0, $1, 0xEA;
            lop3.b32 $2, c, 0x01C001C0, $2, 0xEA;
            lop3.b32 $3, d, 0x01C001C0, $3, 0xEA;
            mul.rn.bf16x2 $0, $0, $5;
            mul.rn.bf16x2 $1, $1, $5;
            mul.rn.bf16x2 $2, $2, $5;
            mul.rn.bf16x2 $3, $3, $5;
            }""",
            "=&r,=&r,=&r,=&r,r,r",
            [words, factor],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
            is_pure=True,
            pack=1,
        )
    else:
        first, second, third, fourth = (
            _fp4_pair(words),
            _fp4_pair(words >> 8),
            _fp4_pair(words >> 16),
            _fp4_pair(words >> 24),
        )
    pairs = tl.join(tl.join(first, third), tl.join(second, fourth))  # [.., words, j of a word, h]
    # [.., t, word, j of it, h], as the codes lie, to [.., word, j, h, t].
    pairs = tl.permute(tl.reshape(pairs, (BLOCK_N, BLOCKS, 4, 4, 2, 2)), (0, 1, 3, 4, 5, 2))
    plain = _halves(tl.reshape(pairs, (BLOCK_N, BLOCK_K // 2)), OPERAND)
    if tl.bfloat16 == OPERAND:
        return tl.reshape(plain, (BLOCK_N, BLOCK_K))
    else:
        return _exact_product(plain, scale + 126, BLOCK_N, BLOCK_K)


@triton.jit
def _fp4_pair(byte):  # type: ignore[no-untyped-def]
    """The lowest byte's codes as words of two bfloat16 values: signs by one multiplication, the rest by another."""
    wide = byte & 0xFF
    return ((wide * 0x1001000) & -0x7FFF8000) | ((wide * 0x40040) & 0x01C001C0)


@triton.jit  # type: ignore[untyped-decorator]
def _scale_tile(  # type: ignore[no-untyped-def]
    scales, rows, rows_ok, k, width, GROUP: tl.constexpr, BLOCK_K: tl.constexpr, EVEN: tl.constexpr
):
    """Codes of the scales of every 32 columns [N, BLOCK_K / 32] int32, zeros past the end. GROUP: columns of a scale.

    Where rows have whole words each is loaded with its word: a smaller load would not be made ahead of its use.
    """
    own = (k + 32 * tl.arange(0, BLOCK_K // 32)[None, :]) // GROUP
    num_groups = (width + GROUP - 1) // GROUP
    if EVEN and num_groups % 4 == 0:
        words = scales.to(tl.pointer_type(tl.int32)) + rows[:, None] * (num_groups // 4)
        return (tl.load(words + own // 4) >> (8 * (own % 4))) & 255
    else:
        mask = rows_ok[:, None] & (own < num_groups)
        return tl.load(scales + rows[:, None] * num_groups + own, mask=mask, other=0).to(tl.int32)


@triton.jit  # type: ignore[untyped-decorator]
def _exact_product(plain, exponent, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):  # type: ignore[no-untyped-def]
    """Values [N, BLOCK_K / 2, 2] float32 in a tile's order, times 2 ** (exponent - 127) of every 32 columns."""
    factor = (exponent << 23).to(tl.float32, bitcast=True)
    factor = tl.reshape(factor, (BLOCK_N, BLOCK_K // 128, 1, 4, 1))
    return tl.reshape(tl.reshape(plain, (BLOCK_N, BLOCK_K // 128, 16, 4, 2)) * factor, (BLOCK_N, BLOCK_K))


@triton.jit  # type: ignore[untyped-decorator]
def _over_words(factor, BLOCK_N: tl.constexpr, GROUPS: tl.constexpr, WORDS: tl.constexpr):  # type: ignore[no-untyped-def]
    """[N, groups of 32] -> [N, groups * words]: each for the words of its group."""
    spread = tl.broadcast_to(factor[:, :, None], (BLOCK_N, GROUPS, WORDS))
    return tl.reshape(spread, (BLOCK_N, GROUPS * WORDS))


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
    """Return the values as kernels read them: codes in words of four bytes."""
    return weight.values if weight.format is Format.DENSE else weight.values.view(torch.int32)


def scales_of(weight: Weight) -> Tensor:
    """Return a tensor for the kernel's argument; a dense weight's is never read."""
    return weight.values if weight.scales is None else weight.scales
