"""Product of few rows with a packed weight: Triton form, for cuda.

What few rows take is ways to the memory. A weight is there before its inputs are, so the first of its tiles are on
their way when a program waits for the kernels before; and each goes straight from memory to the registers where its
codes are taken apart, some steps ahead of its use. The order of the sums is that of the other forms: the bits are the
same.

Letters: M rows, I inputs, O outputs, S splits.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from dsparkd.kernels.cuda.launch import EARLY, follow_alone
from dsparkd.kernels.cuda.products import add_splits, operand, precision, store_tile
from dsparkd.kernels.cuda.tile import (
    FORMAT_CODES,
    Tiles,
    blocks_of,
    codes_of,
    input_tile,
    is_turned,
    turned_tile,
    values_of,
)
from dsparkd.kernels.tiles import count_tiles
from dsparkd.kernels.weight import Format


def multiply(
    x: Tensor,
    pieces: tuple[Tensor, Tensor],
    form: Format,
    out: Tensor,
    groups: int,
    splits: int,
    tiles: Tiles,
    parts: Tensor | None,
    arrivals: Tensor,
) -> None:
    """x [M, G * I] times a weight in pieces (tile.in_pieces), of which the g-th O / G outputs read the g-th I columns,
    to out [M, O].

    parts: memory [S, M, O] float32 for a program for each split, and arrivals zeros, as many as there are tiles; None
    for one for all. tiles.outputs is 64, tiles.inputs 128; rows are a power of two or one and a half.
    """
    (num_rows, outputs), inputs = out.shape, x.shape[1] // groups
    block = 1 << (tiles.rows.bit_length() - 1)
    blocks = groups * count_tiles(outputs // groups, tiles.outputs)
    _multiply[(blocks * count_tiles(num_rows, tiles.rows), 1 if parts is None else splits)](
        x,
        *pieces,
        out,
        out if parts is None else parts,
        arrivals,
        num_rows,
        outputs,
        INPUTS=inputs,
        SPLITS=splits,
        SPREAD=parts is not None,
        GROUPS=groups,
        FORMAT=FORMAT_CODES[form],
        TURN=is_turned(form),
        OPERAND=operand(x),
        PRECISION=precision(x),
        EVEN=inputs % tiles.inputs == 0,
        BLOCK_M=block,
        MORE=tiles.rows - block,
        AHEAD=tiles.stages,
        num_warps=tiles.warps,
        launch_pdl=EARLY,
    )


@triton.jit(do_not_specialize=["num_rows"])  # type: ignore[untyped-decorator]
def _multiply(  # type: ignore[no-untyped-def]
    x,
    values,
    scales,
    out,
    parts,
    arrivals,
    num_rows,
    outputs,
    INPUTS: tl.constexpr,
    SPLITS: tl.constexpr,
    SPREAD: tl.constexpr,
    GROUPS: tl.constexpr,
    FORMAT: tl.constexpr,
    TURN: tl.constexpr,
    OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    MORE: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """One tile of out: 64 outputs of BLOCK_M rows, and of MORE behind them. AHEAD, 2 or 3: steps that codes come before
    their use. The weight is the left operand: its many rows fill the matrix unit."""
    program = tl.program_id(0)
    height = outputs // GROUPS
    group_blocks = tl.cdiv(height, 64)
    block = program % (GROUPS * group_blocks)
    group, start = (block // group_blocks).to(tl.int64), block % group_blocks * 64
    row = program // (GROUPS * group_blocks) * (BLOCK_M + MORE)
    column = group * height + start
    own = group * blocks_of(height) + start // 64
    LENGTH: tl.constexpr = INPUTS // SPLITS
    LAST: tl.constexpr = ((LENGTH if SPREAD else INPUTS) - 1) // 128 * 128
    first = tl.program_id(1) * LENGTH  # 0 for a program that has all splits
    last = first + LAST
    words, pairs = codes_of(values, scales, own, first, INPUTS, FORMAT)
    words_1, pairs_1 = codes_of(values, scales, own, tl.minimum(first + 128, last), INPUTS, FORMAT)
    if AHEAD == 3:
        words_2, pairs_2 = codes_of(values, scales, own, tl.minimum(first + 256, last), INPUTS, FORMAT)
    follow_alone()
    m = row + tl.arange(0, BLOCK_M)
    rows, row_ok = x + m.to(tl.int64) * (GROUPS * INPUTS) + group * INPUTS, m < num_rows
    held = input_tile(rows, row_ok, first, INPUTS, False, EVEN, 128)
    part = tl.zeros((64, BLOCK_M), tl.float32)
    total = tl.zeros((64, BLOCK_M), tl.float32)
    if MORE:
        behind = row + BLOCK_M + tl.arange(0, MORE)
        rows_more, more_ok = x + behind.to(tl.int64) * (GROUPS * INPUTS) + group * INPUTS, behind < num_rows
        held_more = input_tile(rows_more, more_ok, first, INPUTS, False, EVEN, 128)
        part_more = tl.zeros((64, MORE), tl.float32)
        total_more = tl.zeros((64, MORE), tl.float32)
    # Not pipelined: what is loaded is carried along, and waits in registers.
    for k in tl.range(first, last + 128, 128, num_stages=1):
        inputs = tl.trans(turned_tile(held, BLOCK_M) if TURN else held).to(OPERAND)
        held = input_tile(rows, row_ok, tl.minimum(k + 128, last), INPUTS, False, EVEN, 128)
        if MORE:
            inputs_more = tl.trans(turned_tile(held_more, MORE) if TURN else held_more).to(OPERAND)
            held_more = input_tile(rows_more, more_ok, tl.minimum(k + 128, last), INPUTS, False, EVEN, 128)
        weight = values_of(words, pairs, k, FORMAT, OPERAND)
        words, pairs = words_1, pairs_1
        if AHEAD == 3:
            words_1, pairs_1 = words_2, pairs_2
            words_2, pairs_2 = codes_of(values, scales, own, tl.minimum(k + 384, last), INPUTS, FORMAT)
        else:
            words_1, pairs_1 = codes_of(values, scales, own, tl.minimum(k + 256, last), INPUTS, FORMAT)
        part = tl.dot(weight, inputs, part, input_precision=PRECISION)
        if MORE:
            part_more = tl.dot(weight, inputs_more, part_more, input_precision=PRECISION)
        if SPLITS > 1 and not SPREAD:  # noqa: SIM102  the compiler decides this one, the device the next
            if (k + 128) % LENGTH == 0:
                total += part
                part = tl.zeros((64, BLOCK_M), tl.float32)
                if MORE:
                    total_more += part_more
                    part_more = tl.zeros((64, MORE), tl.float32)
    if SPREAD:
        place = parts + tl.program_id(1) * num_rows.to(tl.int64) * outputs
        store_tile(place, tl.trans(part), row, column, start, height, num_rows, outputs)
        if MORE:
            store_tile(place, tl.trans(part_more), row + BLOCK_M, column, start, height, num_rows, outputs)
        # Every thread's stores come before the arrival, and the last arrival before any load of the others' splits.
        tl.debug_barrier()
        if tl.atomic_add(arrivals + program, 1, sem="acq_rel") == SPLITS - 1:
            add_splits(parts, out, row, column, start, height, num_rows, outputs, SPLITS, BLOCK_M, 64)
            if MORE:
                add_splits(parts, out, row + BLOCK_M, column, start, height, num_rows, outputs, SPLITS, MORE, 64)
            tl.store(arrivals + program, 0)
    else:
        whole = total if SPLITS > 1 else part
        store_tile(out, tl.trans(whole), row, column, start, height, num_rows, outputs)
        if MORE:
            whole_more = total_more if SPLITS > 1 else part_more
            store_tile(out, tl.trans(whole_more), row + BLOCK_M, column, start, height, num_rows, outputs)
