"""Tiles of weights as bfloat16 (or float32) values, whatever format they are stored in: Triton functions.

A scale is a power of two and no format has more mantissa than bfloat16, so the values are those of the dense weight to
the bit. Codes are not converted but shifted: their bits are those of a bfloat16 value, often a subnormal one, that is
too small by a power of two, which the scale's factor makes up for. So factors reach bfloat16's last exponent sooner
than scales do: at MAX_SCALES, which the loader checks.

Integer operations bound these products of few rows, so `regroup` orders the bits of each word of codes once, when a
weight is taken over, for the fewest of them. A word becomes words of two bfloat16 values, of which each half has
four codes' bits (FP4) or two's (FP8), by letters of the pairs, s sign, e exponent, m mantissa, from bit 15 on:

    FP4: As Ds Cs Bs  De De Dm Ae  Ae Am Be Be  Bm Ce Ce Cm    A in place; B is shifted left by 3; C left by 6, its
                                                               sign by 2: as one multiplication by 68; D
                                                               right by 3, its sign left by 1
    FP8: As Bs Be Be  Be Ae Ae Ae  Ae Am Am Am  Be Bm Bm Bm    A in place; B in three pieces

The matrix unit gives each thread t of four the columns 2t, 2t + 1, 2t + 8 and 2t + 9 of every sixteen: of 128 columns
32. FP8 codes of these lie side by side, as one scale is that of all 128. FP4 has a scale for every 32 columns, so its
tiles have their columns in another order, in which those of a thread are 32 neighbours that share one: of every 128
columns 32 t + 4 j + 2 h + i comes to place 16 j + 8 h + 2 t + i (j below 8, t below 4, h and i below 2), and inputs are
taken in the same order, turned. So the sums of FP4 and dense weights differ in their order.

Packed weights lie in pieces of 64 rows and 128 columns, of which each of four warps multiplies 16 rows: thread t of
every four has rows r and 8 + r of them (r below 8). A piece has what is loaded at once side by side, 16 bytes a thread,
so that it comes from memory as one stretch of 4 or 8 KiB straight to where it is used: [row half, quarter of a
thread's codes (FP8: 2, FP4: 1), warp, r, t, 4 words]. The pieces of the same rows follow each other, then come the next
64 rows; a tall weight may be one of equal sections, each filled up to whole pairs of pieces with zeros. A thread's
scales of two neighbouring pieces are one word: [warp, r, t (FP4 alone)], its bytes the row's halves of one piece, then
of the other.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsparkd.kernels.cuda.launch import EARLY, follow
from dsparkd.kernels.tiles import count_tiles
from dsparkd.kernels.weight import Format, Weight


@dataclass(frozen=True, slots=True)
class Tiles:
    """Shape of a product's tiles (rows, outputs, inputs a step), the warps that compute one, how many steps are loaded
    ahead, and the most registers of a thread: with fewer, more tiles are under way at once. None: as many as wanted.

    held: inputs come one step ahead into registers, and weights alone so many ahead. Then a step's products are begun
    together, with fewer instructions between them.
    apart: of linears, a packed weight is laid out as rows first, and both operands come through shared memory.
    """

    rows: int
    outputs: int
    inputs: int
    warps: int
    stages: int
    registers: int | None = None
    held: bool = False
    apart: bool = False


TURNED_COLUMNS = 1024  # of one program that turns them
TURNED_UNIT = 8  # elements that are loaded at once, where rows begin at multiples of so many
REGROUPED = 4096  # words of one program
STRETCH = 4  # pieces that one program lays out as rows
FORMAT_CODES = {Format.DENSE: 0, Format.FP8: 1, Format.FP4: 2}  # what kernels are compiled for


def is_turned(form: Format) -> bool:
    """Whether a weight's tiles have their columns in another order, in which inputs must come."""
    return form is Format.FP4


@triton.jit  # type: ignore[untyped-decorator]
def weight_tile(  # type: ignore[no-untyped-def]
    values,
    scales,
    section,
    start,
    k,
    height,
    width,
    FORMAT: tl.constexpr,
    OPERAND: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN: tl.constexpr,
):
    """Columns k .. k + BLOCK_K of rows start .. start + BLOCK_N of a section of `height` rows, zeros past the end ->
    [BLOCK_N, BLOCK_K] OPERAND.

    values, scales: of in_pieces; section: int64. EVEN: nothing lies past an end. Of packed weights BLOCK_N is 64, 128
    or, of a height of whole tiles, 256, BLOCK_K is 128, and start and k are multiples of them.
    """
    if FORMAT == 0:
        row = start + tl.arange(0, BLOCK_N)
        columns = k + tl.arange(0, BLOCK_K)
        places = values + (section * height + row)[:, None] * width + columns[None, :]
        if EVEN:
            return tl.load(places).to(OPERAND)
        return tl.load(places, mask=(row < height)[:, None] & (columns[None, :] < width), other=0.0).to(OPERAND)
    else:
        tl.static_assert(BLOCK_K == 128)
        block = section * blocks_of(height) + start // 64
        return packed_tile(values, scales, block, 2 if BLOCK_N == 256 else 1, k, width, FORMAT, OPERAND, BLOCK_N)


@triton.jit
def blocks_of(height):  # type: ignore[no-untyped-def]
    """Blocks of 64 rows that a section of a packed weight lies in."""
    return (height + 127) // 128 * 2


@triton.jit  # type: ignore[untyped-decorator]
def packed_tile(  # type: ignore[no-untyped-def]
    values, scales, block, distance, k, width, FORMAT: tl.constexpr, OPERAND: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Columns k .. k + 128 of a block of 64 rows, of BLOCK_N = 128 of the one so many blocks further, too, and of 256
    of both's next ones."""
    steps = (width + 127) // 128
    pairs = (steps + 1) // 2
    words = _words_of(values, block * steps + k // 128, steps, distance * steps, FORMAT, BLOCK_N)
    scale = _scales_of(scales, block * pairs + k // 256, pairs, distance * pairs, k // 128 % 2, FORMAT, BLOCK_N)
    if FORMAT == 1:
        return _fp8_tile(words, scale, OPERAND, BLOCK_N)
    else:
        return _fp4_tile(words, scale, OPERAND, BLOCK_N)


@triton.jit  # type: ignore[untyped-decorator]
def _words_of(  # type: ignore[no-untyped-def]
    values, piece, next_, distance, FORMAT: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Codes of a tile's pieces: [BLOCK_N, words of 128 columns] int32."""
    SIZE: tl.constexpr = 2048 if FORMAT == 1 else 1024
    index = tl.arange(0, BLOCK_N * 8)  # of 16 bytes a thread: a half, and a quarter of it
    if BLOCK_N == 64:
        far = index
    elif BLOCK_N == 128:
        far = index // 512 * (distance * SIZE) + index % 512
    else:
        far = index // 1024 * (distance * SIZE) + index // 512 % 2 * (next_ * SIZE) + index % 512
    places = values + piece * SIZE + far
    if FORMAT == 1:
        first = tl.join(tl.load(places), tl.load(places + 1024))
        words = tl.join(first, tl.join(tl.load(places + 512), tl.load(places + 1536)))  # [.., half, quarter]
        words = tl.permute(tl.reshape(words, (BLOCK_N // 64, 4, 8, 4, 4, 2, 2)), (0, 1, 5, 2, 3, 6, 4))
        return tl.reshape(words, (BLOCK_N, 32))
    else:
        words = tl.join(tl.load(places), tl.load(places + 512))
        words = tl.permute(tl.reshape(words, (BLOCK_N // 64, 4, 8, 4, 4, 2)), (0, 1, 5, 2, 3, 4))
        return tl.reshape(words, (BLOCK_N, 16))


@triton.jit  # type: ignore[untyped-decorator]
def _scales_of(  # type: ignore[no-untyped-def]
    scales, pair, next_, distance, second, FORMAT: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Codes of their scales of every 32 columns [BLOCK_N, 4] int32; second: 1 for the second piece of a pair, else 0.

    A word for the scales of a pair, although one is asked for: a smaller load would not be made ahead of its use.
    """
    SIZE: tl.constexpr = 32 if FORMAT == 1 else 128
    lane = tl.arange(0, BLOCK_N * 2)
    own = lane % 128 // (128 // SIZE)
    if BLOCK_N == 128:
        own += lane // 128 * (distance * SIZE)
    elif BLOCK_N == 256:
        own += lane // 256 * (distance * SIZE) + lane // 128 % 2 * (next_ * SIZE)
    both = tl.load(scales + pair * SIZE + own) >> (16 * second)
    halves = tl.reshape(tl.join(both & 255, (both >> 8) & 255), (BLOCK_N // 64, 4, 8, 4, 2))
    return tl.reshape(tl.permute(halves, (0, 1, 4, 2, 3)), (BLOCK_N, 4))


@triton.jit  # type: ignore[untyped-decorator]
def input_tile(  # type: ignore[no-untyped-def]
    rows, rows_ok, k, width, TURN: tl.constexpr, EVEN: tl.constexpr, BLOCK_K: tl.constexpr
):
    """Columns k .. k + BLOCK_K of rows, which begin at these pointers [M], zeros where there are none -> [M, BLOCK_K].

    TURN: in the order of an FP4 weight's tile. EVEN: all columns are there.
    """
    columns = input_columns(k, TURN, BLOCK_K)
    mask = rows_ok[:, None] if EVEN else rows_ok[:, None] & (columns[None, :] < width)
    return tl.load(rows[:, None] + columns[None, :], mask=mask, other=0.0)


@triton.jit  # type: ignore[untyped-decorator]
def input_columns(k, TURNED: tl.constexpr, BLOCK_K: tl.constexpr):  # type: ignore[no-untyped-def]
    """Columns k .. k + BLOCK_K; TURNED: in the order of an FP4 weight's tile."""
    p = tl.arange(0, BLOCK_K)
    if TURNED:
        own = p // 128 * 128 + p % 8 // 2 * 32 + p % 128 // 16 * 4 + p % 16 // 8 * 2 + p % 2
        return k + tl.max_contiguous(own, 2)
    else:
        return k + p


@triton.jit  # type: ignore[untyped-decorator]
def turned_tile(rows, BLOCK_M: tl.constexpr):  # type: ignore[no-untyped-def]
    """Rows [M, 128] in the order of an FP4 weight's tile."""
    parts = tl.permute(tl.reshape(rows, (BLOCK_M, 4, 8, 2, 2)), (0, 2, 3, 1, 4))  # [t, j, h, i] to [j, h, t, i]
    return tl.reshape(parts, (BLOCK_M, 128))


@triton.jit
def turned_place(column):  # type: ignore[no-untyped-def]
    """Where a column lies in a row of that order: the inverse of input_columns."""
    return column // 128 * 128 + column % 32 // 4 * 16 + column % 4 // 2 * 8 + column % 128 // 32 * 2 + column % 2


def turn(x: Tensor) -> Tensor:
    """Copy x [M, n] with every 128 columns in the order of an FP4 weight's tile; n is a multiple, rows contiguous."""
    num_rows, width = x.shape
    turned = x.new_empty(x.shape)
    block, unit = math.gcd(TURNED_COLUMNS, width), math.gcd(TURNED_UNIT, x.stride(0))
    _turn[(num_rows, width // block)](
        x, turned, x.stride(0) // unit, UNIT=unit, WIDTH=width, BLOCK=block, launch_pdl=EARLY
    )
    return turned


@triton.jit(do_not_specialize=["row_units"])  # type: ignore[untyped-decorator]
def _turn(  # type: ignore[no-untyped-def]
    x, turned, row_units, UNIT: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):
    follow()
    row, columns = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    own = tl.reshape(tl.load(x + row * (row_units * UNIT) + columns), (BLOCK // 128, 128))
    tl.store(turned + row * WIDTH + columns, tl.reshape(turned_tile(own, BLOCK // 128), (BLOCK,)))


@triton.jit  # type: ignore[untyped-decorator]
def _fp8_tile(words, scale, OPERAND: tl.constexpr, BLOCK_N: tl.constexpr):  # type: ignore[no-untyped-def]
    """Words [N, 32] and codes of scales [N, 4] -> [N, 128] OPERAND."""
    # Exponents of shifted codes are 120 less than they should be.
    factor = _over_words((scale + 120) * 0x800080, BLOCK_N, 8)
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
    # [t, j, h], as the codes lie, to [j, h, t].
    pairs = tl.permute(tl.reshape(pairs, (BLOCK_N, 4, 8, 2)), (0, 2, 3, 1))
    plain = _halves(tl.reshape(pairs, (BLOCK_N, 64)), OPERAND)
    if tl.bfloat16 == OPERAND:
        return tl.reshape(plain, (BLOCK_N, 128))
    else:
        return _exact_product(plain, scale + 120, BLOCK_N)


@triton.jit  # type: ignore[untyped-decorator]
def _fp4_tile(words, scale, OPERAND: tl.constexpr, BLOCK_N: tl.constexpr):  # type: ignore[no-untyped-def]
    """Words [N, 16] and codes of scales [N, 4] -> [N, 128] OPERAND."""
    # Exponents of shifted codes are 126 less than they should be.
    factor = _over_words((scale + 126) * 0x800080, BLOCK_N, 4)
    if tl.bfloat16 == OPERAND:
        first, second, third, fourth = tl.inline_asm_elementwise(
            """{
            .reg .b32 b, c, d, ds;
            shl.b32 b, $4, 3;
            and.b32 c, $4, 0x20072007;
            mul.lo.u32 c, c, 68;
            shr.u32 d, $4, 3;
            shl.b32 ds, $4, 1;
            and.b32 $0, $4, 0x81C081C0;
            and.b32 $1, b, 0x81C081C0;
            and.b32 $2, c, 0x81C081C0;
            and.b32 $3, d, 0x01C001C0;
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
    # [t, word, j of it, h], as the codes lie, to [word, j, h, t].
    pairs = tl.permute(tl.reshape(pairs, (BLOCK_N, 4, 4, 2, 2)), (0, 2, 3, 4, 1))
    plain = _halves(tl.reshape(pairs, (BLOCK_N, 64)), OPERAND)
    if tl.bfloat16 == OPERAND:
        return tl.reshape(plain, (BLOCK_N, 128))
    else:
        return _exact_product(plain, scale + 126, BLOCK_N)


@triton.jit  # type: ignore[untyped-decorator]
def _exact_product(plain, exponent, BLOCK_N: tl.constexpr):  # type: ignore[no-untyped-def]
    """Values [N, 64, 2] float32 in a tile's order, times 2 ** (exponent - 127) of every 32 columns."""
    factor = tl.reshape((exponent << 23).to(tl.float32, bitcast=True), (BLOCK_N, 1, 4, 1))
    return tl.reshape(tl.reshape(plain, (BLOCK_N, 16, 4, 2)) * factor, (BLOCK_N, 128))


@triton.jit  # type: ignore[untyped-decorator]
def _over_words(factor, BLOCK_N: tl.constexpr, WORDS: tl.constexpr):  # type: ignore[no-untyped-def]
    """[N, 4] -> [N, 4 * words]: each for the words of its group."""
    return tl.reshape(tl.broadcast_to(factor[:, :, None], (BLOCK_N, 4, WORDS)), (BLOCK_N, 4 * WORDS))


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


def in_pieces(weight: Weight, sections: int = 1) -> tuple[Tensor, Tensor]:
    """Return a weight's values and scales as weight_tile reads them: a dense one's values as they are, and a packed
    one's copied, int32. sections: how many of equal height lie stacked."""
    if weight.scales is None:
        return weight.values, weight.values  # scales of dense ones are never read
    (outputs, width), fp8 = weight.shape, weight.format is Format.FP8
    height, code = outputs // sections, FORMAT_CODES[weight.format]
    steps, rows = count_tiles(width, 128), sections * count_tiles(height, 128)
    runs = weight.values.view(torch.int16 if fp8 else torch.int32)  # codes that come to lie side by side
    pieces = weight.values.new_empty((2 * rows, steps * (2048 if fp8 else 1024)), dtype=torch.int32)
    scales = pieces.new_empty((2 * rows, (steps + 1) // 2 * (32 if fp8 else 128)))
    shape = height, runs.shape[1], weight.scales.shape[1], 2 * count_tiles(height, 128), steps
    _order_words[(count_tiles(pieces.numel(), REGROUPED),)](
        runs, pieces, pieces.numel(), *shape, FORMAT=code, BLOCK=REGROUPED
    )
    _order_scales[(count_tiles(scales.numel(), REGROUPED // 4),)](
        weight.scales, scales, scales.numel(), *shape, FORMAT=code, BLOCK=REGROUPED // 4
    )
    return pieces, scales


def in_rows(values: Tensor, scales: Tensor, form: Format, shape: tuple[int, int], sections: int = 1) -> Tensor:
    """Return the weight of these pieces [O, I] as bfloat16, columns in the order of its tiles; I is a multiple of 128.

    Every section is filled up with zeros to whole 128 rows: [sections * ceil(O / sections, 128), I].
    """
    outputs, width = shape
    rows = sections * count_tiles(outputs // sections, 128) * 128
    out = torch.empty((rows, width), dtype=torch.bfloat16, device=values.device)
    steps = math.gcd(width // 128, STRETCH)
    _in_rows[(rows // 64, width // 128 // steps)](
        values,
        scales,
        out,
        WIDTH=width,
        STEPS=steps,
        FORMAT=FORMAT_CODES[form],
        OPERAND=tl.bfloat16 if values.is_cuda else tl.float32,
        launch_pdl=EARLY,
    )
    return out


@triton.jit  # type: ignore[untyped-decorator]
def _in_rows(  # type: ignore[no-untyped-def]
    values, scales, out, WIDTH: tl.constexpr, STEPS: tl.constexpr, FORMAT: tl.constexpr, OPERAND: tl.constexpr
):
    follow()
    block = tl.program_id(0).to(tl.int64)
    rows = out + (block * 64 + tl.arange(0, 64))[:, None] * WIDTH + tl.arange(0, 128)[None, :]
    first = tl.program_id(1) * STEPS * 128
    for k in range(first, first + STEPS * 128, 128):
        tile = packed_tile(values, scales, block, 1, k, WIDTH, FORMAT, OPERAND, 64)
        tl.store(rows + k, tile.to(tl.bfloat16))


@triton.jit(do_not_specialize=["size", "height", "row_runs", "row_scales", "blocks", "steps"])  # type: ignore[untyped-decorator]
def _order_words(  # type: ignore[no-untyped-def]
    runs, pieces, size, height, row_runs, row_scales, blocks, steps, FORMAT: tl.constexpr, BLOCK: tl.constexpr
):
    SIZE: tl.constexpr = 2048 if FORMAT == 1 else 1024
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    piece, rest = index // SIZE, (index % SIZE).to(tl.int32)
    row = piece // steps % blocks * 64 + rest // 128 % 4 * 16 + rest // (SIZE // 2) * 8 + rest // 16 % 8
    section = piece // (steps * blocks)
    own = (index < size) & (row < height)
    begin = (section * height + row) * row_runs
    quarter = rest // 4 % 4  # t of the columns
    if FORMAT == 1:  # two codes a run, 8 columns apart
        run = piece % steps * 64 + (rest // 512 % 2 * 4 + rest % 4) * 8 + quarter
        low = tl.load(runs + begin + run, mask=own & (run < row_runs), other=0).to(tl.int32) & 0xFFFF
        high = tl.load(runs + begin + run + 4, mask=own & (run + 4 < row_runs), other=0).to(tl.int32)
        word = low | (high << 16)
        ordered = _fp8_half(word, 0) | (_fp8_half(word, 8) << 16)
    else:
        run = piece % steps * 16 + quarter * 4 + rest % 4
        word = tl.load(runs + begin + run, mask=own & (run < row_runs), other=0)
        ordered = _fp4_half(word, 0) | (_fp4_half(word, 4) << 16)
    tl.store(pieces + index, ordered, mask=index < size)


@triton.jit(do_not_specialize=["size", "height", "row_runs", "row_scales", "blocks", "steps"])  # type: ignore[untyped-decorator]
def _order_scales(  # type: ignore[no-untyped-def]
    scales, ordered, size, height, row_runs, row_scales, blocks, steps, FORMAT: tl.constexpr, BLOCK: tl.constexpr
):
    SIZE: tl.constexpr = 32 if FORMAT == 1 else 128
    GROUPS: tl.constexpr = 1 if FORMAT == 1 else 4  # of a piece's columns
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    pairs = (steps + 1) // 2
    pair, lane = index // SIZE, (index % SIZE).to(tl.int32) // GROUPS
    row = pair // pairs % blocks * 64 + lane // 8 * 16 + lane % 8
    section = pair // (pairs * blocks)
    word = tl.zeros((BLOCK,), tl.int32)
    for byte in tl.static_range(4):
        own_row = row + byte % 2 * 8
        column = (pair % pairs * 2 + byte // 2) * GROUPS + index % GROUPS
        own = (index < size) & (own_row < height) & (column < row_scales)
        code = tl.load(scales + (section * height + own_row) * row_scales + column, mask=own, other=0)
        word |= code.to(tl.int32) << (8 * byte)
    tl.store(ordered + index, word, mask=index < size)


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
