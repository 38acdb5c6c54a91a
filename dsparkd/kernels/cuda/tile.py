"""Tiles of weights as bfloat16 (or float32) values, whatever format they are stored in: Triton functions.

A scale is a power of two and no format has more mantissa than bfloat16, so the values are those of the dense weight to
the bit. Codes are not converted but shifted: their bits are those of a bfloat16 value, often a subnormal one, that is
too small by a power of two, which the scale's factor makes up for. So factors reach bfloat16's last exponent sooner
than scales do: at MAX_SCALES, which the loader checks.

Integer operations bound these products of few rows, so `regroup` orders the bits of each word of codes once, when a
weight is taken over, for the fewest of them. A word becomes words of two bfloat16 values, of which each half has
four codes' bits (FP4) or two's (FP8), by letters of the pairs, s sign, e exponent, m mantissa, from bit 15 on:

    FP4: As Ds Cs Bs  De De Dm Ae  Ae Am Be Be  Bm Ce Ce Cm    A in place; B is shifted left by 3; C left by 6, its
                                                               sign by 2; D right by 3, its sign left by 1
    FP8: As Bs Be Be  Be Ae Ae Ae  Ae Am Am Am  Be Bm Bm Bm    A in place; B in three pieces

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
    """Shape of a product's tiles (rows, outputs, inputs a step), the warps that compute one, how many steps are loaded
    ahead, and the most registers of a thread: with fewer, more tiles are under way at once. None: as many as wanted."""

    rows: int
    outputs: int
    inputs: int
    warps: int
    stages: int
    registers: int | None = None


TURNED_COLUMNS = 1024  # of one program that turns them
REGROUPED = 4096  # words of one program
TURNED_ROWS = 64  # with so many rows, in all or in a tile, it pays to turn the inputs once, before the product
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

    values, scales: regroup and scales_of a weight; rows: int64. EVEN: nothing lies past an end. BLOCK_K of packed
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
            .reg .b32 low, high, sign;
            shl.b32 low, $2, 4;
            shr.u32 high, $2, 3;
            shl.b32 sign, $2, 1;
            and.b32 $0, $2, 0x87F087F0;
            and.b32 $1, low, 0x00F000F0;
            lop3.b32 $1, high, 0x07000700, $1, 0xEA;
            lop3.b32 $1, sign, 0x80008000, $1, 0xEA;
            mul.rn.bf16x2 $0, $0, $3;
            mul.rn.bf16x2 $1, $1, $3;
            }""",
            "=&r,=&r,r,r",
            [words, factor],
            dtype=(tl.int32, tl.int32),
            is_pure=True,
            pack=1,
        )
    else:
        first = words & -0x780F7810
        second = ((words << 4) & 0x00F000F0) | ((words >> 3) & 0x07000700) | ((words << 1) & -0x7FFF8000)
    pairs = tl.join(first, second)
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
            .reg .b32 b, c, cs, d, ds;
            shl.b32 b, $4, 3;
            shl.b32 c, $4, 6;
            shl.b32 cs, $4, 2;
            shr.u32 d, $4, 3;
            shl.b32 ds, $4, 1;
            and.b32 $0, $4, 0x81C081C0;
            and.b32 $1, b, 0x81C081C0;
            and.b32 $2, c, 0x01C001C0;
            and.b32 $3, d, 0x01C001C0;
            lop3.b32 $2, cs, 0x80008000, $2, 0xEA;
            lop3.b32 $3, ds, 0x80008000, $3, 0xEA;
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
        first = words & -0x7E3F7E40
        second = (words << 3) & -0x7E3F7E40
        third = ((words << 6) & 0x01C001C0) | ((words << 2) & -0x7FFF8000)
        fourth = ((words >> 3) & 0x01C001C0) | ((words << 1) & -0x7FFF8000)
    pairs = tl.join(tl.join(first, third), tl.join(second, fourth))  # [.., words, j of a word, h]
    # [.., t, word, j of it, h], as the codes lie, to [.., word, j, h, t].
    pairs = tl.permute(tl.reshape(pairs, (BLOCK_N, BLOCKS, 4, 4, 2, 2)), (0, 1, 3, 4, 5, 2))
    plain = _halves(tl.reshape(pairs, (BLOCK_N, BLOCK_K // 2)), OPERAND)
    if tl.bfloat16 == OPERAND:
        return tl.reshape(plain, (BLOCK_N, BLOCK_K))
    else:
        return _exact_product(plain, scale + 126, BLOCK_N, BLOCK_K)


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


def regroup(weight: Weight) -> Tensor:
    """Return a dense weight's values as they are, and of a packed one a copy of its words [O, words] int32, whose bits
    lie in the order that kernels take them apart in."""
    if weight.format is Format.DENSE:
        return weight.values
    words = weight.values.view(torch.int32)
    regrouped = torch.empty_like(words)
    _regroup[(triton.cdiv(words.numel(), REGROUPED),)](
        words, regrouped, words.numel(), FORMAT=FORMAT_CODES[weight.format], BLOCK=REGROUPED
    )
    return regrouped


@triton.jit(do_not_specialize=["num_words"])  # type: ignore[untyped-decorator]
def _regroup(words, regrouped, num_words, FORMAT: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    word = tl.load(words + index, mask=index < num_words, other=0)
    if FORMAT == 1:
        own = _fp8_half(word, 0) | (_fp8_half(word, 8) << 16)
    else:
        own = _fp4_half(word, 0) | (_fp4_half(word, 4) << 16)
    tl.store(regrouped + index, own, mask=index < num_words)


@triton.jit
def _fp8_half(word, first):  # type: ignore[no-untyped-def]
    """Bits of the codes at `first` (A) and 16 further (B), as bits of a half."""
    a, b = word >> first, word >> (first + 16)
    return ((a & 0x80) << 8) | ((a & 0x7F) << 4) | ((b & 0x80) << 7) | ((b & 0x70) << 7) | (b & 0x0F)


@triton.jit
def _fp4_half(word, first):  # type: ignore[no-untyped-def]
    """Bits of the codes at `first` (A) and 8 (B), 16 (C) and 24 (D) further, as bits of a half."""
    a, b, c, d = word >> first, word >> (first + 8), word >> (first + 16), word >> (first + 24)
    signs = ((a & 8) << 12) | ((b & 8) << 9) | ((c & 8) << 10) | ((d & 8) << 11)
    return signs | ((a & 7) << 6) | ((b & 7) << 3) | (c & 7) | ((d & 7) << 9)


def scales_of(weight: Weight) -> Tensor:
    """Return a tensor for the kernel's argument; a dense weight's is never read."""
    return weight.values if weight.scales is None else weight.scales
