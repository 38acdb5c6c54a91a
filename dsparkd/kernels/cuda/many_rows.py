"""Product of many rows with a weight in bfloat16: Triton form, for cuda.

Both operands come through shared memory, and whole tiles of them by one instruction. Only the matrix unit's own groups
of 16 inputs and the splits say what is added in which order, as in the product of few rows: the bits are the same.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from dsparkd.kernels.cuda.launch import EARLY, follow_alone
from dsparkd.kernels.cuda.products import add_splits, operand, precision, store_tile
from dsparkd.kernels.cuda.tile import Tiles
from dsparkd.kernels.tiles import count_tiles

GROUP_TILES = 16  # blocks of outputs that are computed for all rows before the next: their weights stay in the cache


def multiply(
    x: Tensor, weight: Tensor, out: Tensor, groups: int, splits: int, tiles: Tiles, arrivals: Tensor | None
) -> None:
    """x [M, G * I] times weight [G * H, I], of which out [M, O] takes the first O / G rows of every H.

    I / splits is a multiple of the tiles' inputs; x and weight are contiguous. tiles.rows: a power of two or one and a
    half; then they are two products with the same tile of the weight.
    arrivals: zeros, as many as there are tiles, for a program for each split; None for one for all.
    """
    (num_rows, outputs), inputs = out.shape, weight.shape[1]
    block = 1 << (tiles.rows.bit_length() - 1)
    more = tiles.rows - block
    blocks = groups * count_tiles(outputs // groups, tiles.outputs)
    rows = _tiles_of(x, block, tiles.inputs)
    parts = out  # not touched where a program has all splits
    if arrivals is not None:
        parts = torch.empty((splits, num_rows, outputs), dtype=torch.float32, device=x.device)
    _multiply[(count_tiles(num_rows, tiles.rows) * blocks, 1 if arrivals is None else splits)](
        rows,
        _tiles_of(x, more, tiles.inputs) if more else rows,
        _tiles_of(weight, tiles.outputs, tiles.inputs),
        out,
        parts,
        arrivals,
        num_rows,
        outputs,
        weight.shape[0] // groups,
        INPUTS=inputs,
        SPLITS=splits,
        SPREAD=arrivals is not None,
        GROUPS=groups,
        GROUP=GROUP_TILES,
        OPERAND=operand(x),
        PRECISION=precision(x),
        BLOCK_M=block,
        MORE=more,
        BLOCK_N=tiles.outputs,
        BLOCK_K=tiles.inputs,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
        launch_pdl=EARLY,
    )


def _tiles_of(matrix: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """Tiles of so many rows and columns, zeros past the end."""
    return TensorDescriptor.from_tensor(matrix, [rows, columns])


@triton.jit(do_not_specialize=["num_rows"])  # type: ignore[untyped-decorator]
def _multiply(  # type: ignore[no-untyped-def]
    x,
    x_more,
    weight,
    out,
    parts,
    arrivals,
    num_rows,
    outputs,
    section,
    INPUTS: tl.constexpr,
    SPLITS: tl.constexpr,
    SPREAD: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    MORE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One tile of out: BLOCK_M rows, and MORE behind them. section: rows of the weight for one group."""
    follow_alone()
    program = tl.program_id(0)
    num_tiles = tl.cdiv(num_rows, BLOCK_M + MORE)
    height = outputs // GROUPS
    group_blocks = tl.cdiv(height, BLOCK_N)
    first = program // (GROUP * num_tiles) * GROUP
    size = tl.minimum(GROUP, GROUPS * group_blocks - first)
    rest = program - first * num_tiles
    block = first + rest % size
    group, start = block // group_blocks, block % group_blocks * BLOCK_N
    row = rest // size * (BLOCK_M + MORE)
    own, begin = group * section + start, group * INPUTS
    LENGTH: tl.constexpr = INPUTS // SPLITS
    k_first = tl.program_id(1) * LENGTH  # 0 for a program that has all splits
    part = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    if MORE:
        part_more = tl.zeros((MORE, BLOCK_N), tl.float32)
        total_more = tl.zeros((MORE, BLOCK_N), tl.float32)
    for k in range(k_first, k_first + (LENGTH if SPREAD else INPUTS), BLOCK_K):
        factor = tl.trans(weight.load([own, k])).to(OPERAND)
        part = tl.dot(x.load([row, begin + k]).to(OPERAND), factor, part, input_precision=PRECISION)
        if MORE:
            inputs = x_more.load([row + BLOCK_M, begin + k]).to(OPERAND)
            part_more = tl.dot(inputs, factor, part_more, input_precision=PRECISION)
        if SPLITS > 1 and not SPREAD:  # noqa: SIM102  the compiler decides this one, the device the next
            if (k + BLOCK_K) % LENGTH == 0:
                total += part
                part = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
                if MORE:
                    total_more += part_more
                    part_more = tl.zeros((MORE, BLOCK_N), tl.float32)
    column = group * height + start
    if SPREAD:
        place = parts + tl.program_id(1) * num_rows.to(tl.int64) * outputs
        store_tile(place, part, row, column, start, height, num_rows, outputs)
        if MORE:
            store_tile(place, part_more, row + BLOCK_M, column, start, height, num_rows, outputs)
        # Every thread's stores come before the arrival, and the last arrival before any load of the others' splits.
        tl.debug_barrier()
        if tl.atomic_add(arrivals + program, 1, sem="acq_rel") == SPLITS - 1:
            add_splits(parts, out, row, column, start, height, num_rows, outputs, SPLITS, BLOCK_M, BLOCK_N)
            if MORE:
                add_splits(parts, out, row + BLOCK_M, column, start, height, num_rows, outputs, SPLITS, MORE, BLOCK_N)
            tl.store(arrivals + program, 0)
    else:
        store_tile(out, total if SPLITS > 1 else part, row, column, start, height, num_rows, outputs)
        if MORE:
            more = total_more if SPLITS > 1 else part_more
            store_tile(out, more, row + BLOCK_M, column, start, height, num_rows, outputs)
