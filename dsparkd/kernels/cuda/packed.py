"""Cached rows in the official encoding: Triton form, for cuda. Bits are those of kernels/packed.py.

Codes are made and read by integer operations on their bits, which are exact and the same under the interpreter.

Letters: T tokens, K rows, d head width, r rotary width, h indexer heads, i indexer width, B bytes of a row, G groups.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsparkd.kernels.cuda.launch import EARLY, IS_COMPILED, follow
from dsparkd.kernels.cuda.products import operand, precision
from dsparkd.kernels.row_layout import GROUP, INDEX_GROUP, scales_at
from dsparkd.kernels.tiles import count_tiles, power_of_two

SPAN = tl.constexpr(GROUP)
INDEX_SPAN = tl.constexpr(INDEX_GROUP)
QUERY_HEADS = 64  # of a token, that one program turns


def round_(keys: Tensor, rotary: int) -> None:
    """See kernels/packed.py."""
    T, width = keys.shape
    assert keys.is_contiguous()
    if T:
        _round[(T,)](keys, D=width, R=rotary, BLOCK_D=block_of(width), num_warps=1, launch_pdl=EARLY)


def store(ring: Tensor, dst: Tensor, keys: Tensor, src: Tensor, rotary: int) -> None:
    """See kernels/packed.py; what goes to -1 is padding of a captured shape, and is not stored."""
    width = keys.shape[1]
    assert ring.is_contiguous()
    assert keys.is_contiguous()
    if src.shape[0]:
        _store[(src.shape[0],)](
            ring,
            tails_of(ring),
            dst,
            keys,
            src,
            ring.shape[0],
            keys.shape[0],
            D=width,
            R=rotary,
            B=ring.shape[1],
            SCALES=scales_at(width, rotary),
            BLOCK_D=block_of(width),
            num_warps=1,
            launch_pdl=EARLY,
            sanitize_overflow=False,
        )


def round_queries(queries: Tensor) -> Tensor:
    """See kernels/packed.py."""
    T, heads, width = queries.shape
    assert queries.is_contiguous()
    rounded = torch.empty_like(queries)
    rows = min(QUERY_HEADS, max(16, power_of_two(heads)))
    if T:
        _round_queries[(T, count_tiles(heads, rows))](
            queries,
            rounded,
            H=heads,
            D=width,
            BLOCK_H=rows,
            SCALE=width**-0.5,
            OPERAND=operand(queries),
            PRECISION=precision(queries),
            num_warps=4,
            launch_pdl=EARLY,
        )
    return rounded


def block_of(width: int) -> int:
    """Columns of a tile: whole groups, and a power of two."""
    return max(GROUP, 1 << (width - 1).bit_length())


def tails_of(rows: Tensor) -> Tensor:
    """The same memory as bfloat16, for the rotary columns; anything else as it is."""
    return rows.view(torch.bfloat16) if rows.element_size() == 1 else rows


@triton.jit  # type: ignore[untyped-decorator]
def _column(BLOCK_D: tl.constexpr):  # type: ignore[no-untyped-def]
    """Columns by group, [G, SPAN]."""
    return tl.arange(0, BLOCK_D // SPAN)[:, None] * SPAN + tl.arange(0, SPAN)[None, :]


@triton.jit
def _e4m3_value(codes):  # type: ignore[no-untyped-def]
    """Codes, int32 -> float32, too small by 2 ** 8: as bits of a float16 their exponent counts from 15, not 7."""
    bits = ((codes & 0x80) << 8) | ((codes & 0x7F) << 7)
    return bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _e4m3_code(values):  # type: ignore[no-untyped-def]
    """float32 within 448 -> the nearest code, int32, ties to even."""
    bits = values.to(tl.int32, bitcast=True)
    size = tl.abs(values)
    size_bits = bits & 0x7FFFFFFF
    normal = ((size_bits + 0x7FFFF + ((size_bits >> 20) & 1)) >> 20) - 960  # 120 exponents of 8 mantissas
    # Below 2 ** -6 steps are 2 ** -9: 2 ** 23 leaves no digits behind them.
    small = (size * 512.0 + 8388608.0).to(tl.int32, bitcast=True) & 15
    return tl.where(size >= 0.015625, normal, small) | ((bits >> 24) & 0x80)


@triton.jit  # type: ignore[untyped-decorator]
def _encode(x, AXIS: tl.constexpr):  # type: ignore[no-untyped-def]
    """x [.., SPAN] float32 -> codes alike and scale codes [..], int32. See packed._scale_codes."""
    bits = tl.maximum(tl.max(tl.abs(x), AXIS), 1e-4).to(tl.int32, bitcast=True)
    scales = (bits >> 23) - 8 + ((bits & 0x7FFFFF) > 0x600000).to(tl.int32)
    inverse = ((254 - scales) << 23).to(tl.float32, bitcast=True)
    scaled = x * tl.expand_dims(inverse, AXIS)
    return _e4m3_code(tl.minimum(tl.maximum(scaled, -448.0), 448.0)), scales


@triton.jit  # type: ignore[untyped-decorator]
def _round(keys, D: tl.constexpr, R: tl.constexpr, BLOCK_D: tl.constexpr):  # type: ignore[no-untyped-def]
    follow()
    row = keys + tl.program_id(0).to(tl.int64) * D
    c = _column(BLOCK_D)
    plain = c < D - R
    codes, scales = _encode(tl.load(row + c, mask=plain, other=0.0).to(tl.float32), 1)
    values = _e4m3_value(codes) * ((scales + 8) << 23).to(tl.float32, bitcast=True)[:, None]
    tail = tl.load(row + c, mask=(c >= D - R) & (c < D), other=0.0).to(tl.bfloat16).to(tl.float32)
    tl.store(row + c, tl.where(plain, values, tail).to(keys.dtype.element_ty), mask=c < D)


@triton.jit  # type: ignore[untyped-decorator]
def store_key(  # type: ignore[no-untyped-def]
    x, rows, tails, place, D: tl.constexpr, R: tl.constexpr, B: tl.constexpr, SCALES: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Pack one key x [G, SPAN] float32 into row `place` of rows [*, B]; tails is the same memory as bfloat16."""
    c = _column(BLOCK_D)
    g = tl.arange(0, BLOCK_D // SPAN)
    plain = c < D - R
    codes, scales = _encode(tl.where(plain, x, 0.0), 1)
    row = rows + place * B
    tl.store(row + c, codes.to(tl.uint8), mask=plain)
    tl.store(row + SCALES + g, scales.to(tl.uint8), mask=g * SPAN < D - R)
    tail = tails + place * (B // 2) + (D - R) // 2 + c - (D - R)
    tl.store(tail, x.to(tl.bfloat16), mask=(c >= D - R) & (c < D))


@triton.jit(debug=True, do_not_specialize=["num_kept", "num_rows"])  # type: ignore[untyped-decorator]
def _store(  # type: ignore[no-untyped-def]
    ring,  # [num_kept, B]
    tails,
    dst,
    keys,  # [num_rows, d]
    src,
    num_kept,
    num_rows,
    D: tl.constexpr,
    R: tl.constexpr,
    B: tl.constexpr,
    SCALES: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    follow()
    k = tl.program_id(0)
    place = tl.load(dst + k)
    source = tl.load(src + k)
    fits = (place < num_kept) & (source >= 0) & (source < num_rows)
    tl.device_assert((place < 0) | fits, "packed.store: a key is kept behind its ring, or is none of the step's")
    if (place >= 0) & fits:
        c = _column(BLOCK_D)
        x = tl.load(keys + source * D + c, mask=c < D, other=0.0).to(tl.float32)
        store_key(x, ring, tails, place, D, R, B, SCALES, BLOCK_D)


@triton.jit  # type: ignore[untyped-decorator]
def load_keys(  # type: ignore[no-untyped-def]
    rows, tails, places, D: tl.constexpr, R: tl.constexpr, B: tl.constexpr, SCALES: tl.constexpr,
    BLOCK_D: tl.constexpr, OPERAND: tl.constexpr,
):  # fmt: skip
    """Rows `places` [K] int64 of rows [*, B] -> [K, BLOCK_D] OPERAND, zeros past the width."""
    G: tl.constexpr = BLOCK_D // SPAN
    c = _column(BLOCK_D)
    g = tl.arange(0, G)
    plain = c < D - R
    row = rows + places * B
    codes = tl.load(row[:, None, None] + c[None, :, :], mask=plain[None, :, :], other=0)
    scales = tl.load(row[:, None] + SCALES + g[None, :], mask=(g * SPAN < D - R)[None, :], other=0).to(tl.int32)
    if IS_COMPILED:
        factor = (scales << 23).to(tl.float32, bitcast=True)
        values = codes.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    else:
        factor = ((scales + 8) << 23).to(tl.float32, bitcast=True)
        values = _e4m3_value(codes.to(tl.int32))
    values = (values * factor[:, :, None]).to(OPERAND)
    tail = tails + places * (B // 2) - (D - R) // 2
    turned = ((c >= D - R) & (c < D))[None, :, :]
    if (D - R) // SPAN * SPAN == D - R and R <= SPAN:  # the rotary columns are one group: they are loaded once
        j = tl.arange(0, SPAN)
        own = tl.load(tail[:, None] + (D - R) + j[None, :], mask=(j < R)[None, :], other=0.0).to(OPERAND)[:, None, :]
    else:
        own = tl.load(tail[:, None, None] + c[None, :, :], mask=turned, other=0.0).to(OPERAND)
    values = tl.where(turned, own, values)
    return tl.reshape(values, (places.shape[0], BLOCK_D))


@triton.jit  # type: ignore[untyped-decorator]
def _sign(D: tl.constexpr):  # type: ignore[no-untyped-def]
    """The Sylvester matrix [D, D], D up to 256: minus one where row and column share an odd number of ones."""
    both = tl.arange(0, D)[:, None] & tl.arange(0, D)[None, :]
    both = both ^ (both >> 4)
    both = both ^ (both >> 2)
    both = both ^ (both >> 1)
    return (1 - 2 * (both & 1)).to(tl.float32)


@triton.jit  # type: ignore[untyped-decorator]
def _fp4_scales(x, AXIS: tl.constexpr):  # type: ignore[no-untyped-def]
    """x [.., INDEX_SPAN] float32 -> scale codes [..], int32, and x over the scales. See packed._scale_codes."""
    bits = tl.maximum(tl.max(tl.abs(x), AXIS), 7.052966104933725e-38).to(tl.int32, bitcast=True)
    scales = (bits >> 23) - 2 + ((bits & 0x7FFFFF) > 0x400000).to(tl.int32)
    inverse = ((254 - scales) << 23).to(tl.float32, bitcast=True)
    return scales, x * tl.expand_dims(inverse, AXIS)


@triton.jit
def _fp4_code(values):  # type: ignore[no-untyped-def]
    """float32 within 6 -> the nearest code, int32, ties to even."""
    size = tl.abs(values)
    code = (size > 0.25).to(tl.int32) + (size >= 0.75).to(tl.int32) + (size > 1.25).to(tl.int32)
    code += (size >= 1.75).to(tl.int32) + (size > 2.5).to(tl.int32) + (size >= 3.5).to(tl.int32)
    return code + (size > 5.0).to(tl.int32) + 8 * (values < 0).to(tl.int32)


@triton.jit
def _fp4_value(codes):  # type: ignore[no-untyped-def]
    """Codes, int32 -> float32, too small by 2 ** 14: as bits of a float16 their exponent counts from 15, not 1."""
    bits = ((codes & 8) << 12) | ((codes & 7) << 9)
    return bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit  # type: ignore[untyped-decorator]
def store_index_key(x, rows, place, D: tl.constexpr, B: tl.constexpr, BLOCK_D: tl.constexpr):  # type: ignore[no-untyped-def]
    """Turn, round and pack one indexer key x [BLOCK_D] float32, zero past D, into row `place` of rows [*, B]."""
    own = tl.sum(tl.reshape(x, (BLOCK_D // D, D)), 0)  # what lies past D is zero
    turned = tl.sum(own[:, None] * _sign(D), 0) * (1.0 / tl.sqrt(float(D)))
    scales, values = _fp4_scales(tl.reshape(turned, (D // INDEX_SPAN, INDEX_SPAN)), 1)
    first, second = tl.split(tl.reshape(_fp4_code(values), (D // 2, 2)))
    row = rows + place * B
    tl.store(row + tl.arange(0, D // 2), (first | (second << 4)).to(tl.uint8))
    tl.store(row + D // 2 + tl.arange(0, D // INDEX_SPAN), scales.to(tl.uint8))


@triton.jit  # type: ignore[untyped-decorator]
def load_index_keys(rows, places, live, D: tl.constexpr, B: tl.constexpr, OPERAND: tl.constexpr):  # type: ignore[no-untyped-def]
    """Rows `places` [K] int64 of rows [*, B] where live -> [K, D] OPERAND."""
    GROUPS: tl.constexpr = D // INDEX_SPAN
    PAIRS: tl.constexpr = INDEX_SPAN // 2
    c = tl.arange(0, GROUPS)[:, None] * PAIRS + tl.arange(0, PAIRS)[None, :]
    g = tl.arange(0, GROUPS)
    row = rows + places * B
    pairs = tl.load(row[:, None, None] + c[None, :, :], mask=live[:, None, None], other=0).to(tl.int32)
    scales = tl.load(row[:, None] + D // 2 + g[None, :], mask=live[:, None], other=0).to(tl.int32)
    factor = ((scales + 14) << 23).to(tl.float32, bitcast=True)[:, :, None]
    values = tl.join(_fp4_value(pairs & 15) * factor, _fp4_value(pairs >> 4) * factor)
    return tl.reshape(values, (places.shape[0], D)).to(OPERAND)


@triton.jit  # type: ignore[untyped-decorator]
def _round_queries(  # type: ignore[no-untyped-def]
    queries,  # [T, h, i]
    rounded,
    H: tl.constexpr,
    D: tl.constexpr,
    BLOCK_H: tl.constexpr,
    SCALE: tl.constexpr,
    OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
):
    follow()
    t = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    c = tl.arange(0, D)
    own = (t * H + h)[:, None] * D + c[None, :]
    real = (h < H)[:, None] & (c >= 0)[None, :]
    x = tl.load(queries + own, mask=real, other=0.0).to(OPERAND)
    turned = tl.dot(x, _sign(D).to(OPERAND), input_precision=PRECISION) * SCALE
    scales, values = _fp4_scales(tl.reshape(turned, (BLOCK_H, D // INDEX_SPAN, INDEX_SPAN)), 2)
    factor = ((scales + 14) << 23).to(tl.float32, bitcast=True)
    values = _fp4_value(_fp4_code(values)) * tl.expand_dims(factor, 2)
    tl.store(rounded + own, tl.reshape(values, (BLOCK_H, D)).to(rounded.dtype.element_ty), mask=real)
