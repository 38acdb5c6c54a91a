"""Product of rows with a weight, dense or packed: Triton form, for cuda.

Each element is a sum over the inputs, in one order whatever the number of rows; so a row's bits depend on that row
alone, which the library's products on cuda do not promise. A weight of few outputs is summed in splits of its inputs,
and these are added in their order: by one program where rows make enough of them, else by the last of the programs that
had a split each. How many splits there are follows from the weight alone.

Letters: M rows, I inputs, O outputs, S splits.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsparkd.kernels.cuda.launch import EARLY, follow_alone
from dsparkd.kernels.cuda.products import operand, precision
from dsparkd.kernels.cuda.tile import (
    FORMAT_CODES,
    Tiles,
    in_pieces,
    input_tile,
    is_turned,
    turn,
    turned_tile,
    weight_tile,
)
from dsparkd.kernels.weight import FP8_GROUP, Format, Weight

SPLIT_OUTPUTS = 64  # outputs of one program, as the number of splits is reckoned
SPLIT_INPUTS = 512  # the least inputs of a split
SPLIT_PROGRAMS = 256  # more programs than these are not made by splits of the inputs of one row tile
LARGE_PROGRAMS = 96  # with fewer of the largest tiles, smaller ones are faster
SPREAD_PROGRAMS = 128  # with so many programs of one row tile, or fewer of more, each split gets one of its own
NARROW_OUTPUTS = 512  # so few make more programs of 32 rows than of 64
TURNED_ROWS = 64  # of a tile
GROUP_TILES = 16  # blocks of outputs that are computed for all rows before the next: their weights stay in the cache


class TritonLinear:
    """Form for cuda. Implements LinearKernel; any number of rows. wide: the product is float32.

    groups: G products side by side: x is [M, G * I], and the g-th O / G outputs read the g-th I of its columns.
    choose: tiles by number of rows, outputs, format and dtype; they must not change a row's bits.
    One call at a time: the counters of arrived splits are kept, and zero between calls.
    """

    def __init__(
        self,
        weight: Weight,
        *,
        wide: bool = False,
        groups: int = 1,
        choose: Callable[[int, int, Format, torch.dtype], Tiles] | None = None,
    ) -> None:
        self._format, self._shape = weight.format, weight.shape
        self._values, self._scales = in_pieces(weight, groups)
        self._groups = groups
        self._wide = wide
        self._choose = choose or choose_tiles
        self._splits = splits_of(*weight.shape)
        self._arrivals = torch.zeros(SPREAD_PROGRAMS, dtype=torch.int32, device=weight.values.device)

    def __call__(self, x: Tensor) -> Tensor:
        """See LinearKernel."""
        return self._product(x, self._choose(x.shape[0], self._shape[0], self._format, x.dtype))

    def compile(self) -> None:
        """Compile for every tile shape that rows may ask for, at start: no step shall wait for a compiler."""
        dtype = self._values.dtype if self._format is Format.DENSE else torch.bfloat16
        x = torch.zeros((1, self._groups * self._shape[1]), dtype=dtype, device=self._values.device)
        for tiles in tiles_of(self._format, dtype):
            for spread in {False, self._is_spread(1, tiles)}:
                self._product(x, tiles, spread)

    def _product(self, x: Tensor, tiles: Tiles, spread: bool | None = None) -> Tensor:
        """spread: a program for each split; None for where there are few programs."""
        M, (O, I) = x.shape[0], self._shape  # noqa: E741
        out = torch.empty((M, O), dtype=torch.float32 if self._wide else x.dtype, device=x.device)
        if not M:
            return out
        if spread is None:
            spread = self._is_spread(M, tiles)
        programs = self._count_programs(M, tiles)
        in_turns = is_turned(self._format)
        # Held inputs are turned in registers, others before the product, where their rows are many.
        turned = in_turns and not tiles.held and tiles.rows >= TURNED_ROWS and I % FP8_GROUP == 0
        if turned:
            x = turn(x)
        parts = out  # not touched where a program has all splits
        if spread:
            parts = torch.empty((self._splits, M, O), dtype=torch.float32, device=x.device)
        _linear_kernel[(programs, self._splits if spread else 1)](
            x,
            self._values,
            self._scales,
            out,
            parts,
            self._arrivals,
            M,
            O,
            INPUTS=I,
            SPLITS=self._splits,
            SPREAD=spread,
            TURN=in_turns and not turned,
            HELD=tiles.held,
            GROUPS=self._groups,
            FORMAT=FORMAT_CODES[self._format],
            OPERAND=operand(x),
            PRECISION=precision(x),
            EVEN=O // self._groups % tiles.outputs == 0 and I % tiles.inputs == 0,
            GROUP=GROUP_TILES,
            BLOCK_M=tiles.rows,
            BLOCK_N=tiles.outputs,
            BLOCK_K=tiles.inputs,
            num_warps=tiles.warps,
            num_stages=tiles.stages,
            maxnreg=tiles.registers,
            launch_pdl=EARLY,
        )
        return out

    def _is_spread(self, num_rows: int, tiles: Tiles) -> bool:
        """Whether so few programs would be made that each split gets one; where one row is not spread, none are."""
        programs = self._count_programs(num_rows, tiles)
        return (
            self._splits > 1 and programs <= SPREAD_PROGRAMS and (num_rows <= tiles.rows or programs < SPREAD_PROGRAMS)
        )

    def _count_programs(self, num_rows: int, tiles: Tiles) -> int:
        """Tiles of the outputs, which all read the same inputs."""
        height = self._shape[0] // self._groups
        return int(triton.cdiv(num_rows, tiles.rows) * self._groups * triton.cdiv(height, tiles.outputs))


def splits_of(outputs: int, inputs: int) -> int:
    """Into how many splits the inputs of a weight are cut: a power of two, of equal ones."""
    blocks, splits = triton.cdiv(outputs, SPLIT_OUTPUTS), 1
    if blocks <= SPREAD_PROGRAMS:
        while 2 * splits * blocks <= SPLIT_PROGRAMS and inputs % (2 * splits * SPLIT_INPUTS) == 0:
            splits *= 2
    return splits


def tiles_of(form: Format, dtype: torch.dtype) -> tuple[Tiles, ...]:
    """List the tile shapes of a format and dtype, the fewest rows first."""
    if dtype == torch.float32:
        return (Tiles(16, 32, 32, 4, 2),)
    if form is Format.DENSE:
        return (
            Tiles(16, 64, 128, 4, 4),
            Tiles(32, 64, 128, 4, 4),
            Tiles(64, 64, 128, 4, 3),
            Tiles(128, 128, 128, 8, 3),
        )
    return (
        Tiles(16, 64, 128, 4, 3, held=True),
        Tiles(32, 64, 128, 4, 4, held=True),
        Tiles(64, 128, 128, 8, 3, held=True),
        Tiles(128, 128, 128, 8, 3),
    )


def choose_tiles(num_rows: int, outputs: int, form: Format, dtype: torch.dtype) -> Tiles:
    """Pick one of them for a number of rows and outputs: the largest only where it still makes many programs."""
    shapes = tiles_of(form, dtype)
    large = shapes[-1]
    if triton.cdiv(num_rows, large.rows) * triton.cdiv(outputs, large.outputs) >= LARGE_PROGRAMS and num_rows > 192:
        return large
    is_narrow = form is Format.DENSE and outputs <= NARROW_OUTPUTS
    limits = (16, 64) if is_narrow and num_rows <= 64 else (16, 32)
    return shapes[min(sum(num_rows > limit for limit in limits), len(shapes) - 1)]


@triton.jit(do_not_specialize=["num_rows"])  # type: ignore[untyped-decorator]
def _linear_kernel(  # type: ignore[no-untyped-def]
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
    TURN: tl.constexpr,
    HELD: tl.constexpr,
    GROUPS: tl.constexpr,
    FORMAT: tl.constexpr,
    OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
    EVEN: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """out [M, O] = x times the weight, one tile. The weight is the left operand: its many rows fill the matrix unit."""
    follow_alone()
    program = tl.program_id(0)
    num_tiles = tl.cdiv(num_rows, BLOCK_M)
    height = outputs // GROUPS
    group_blocks = tl.cdiv(height, BLOCK_N)
    num_blocks = GROUPS * group_blocks
    first = program // (GROUP * num_tiles) * GROUP
    size = tl.minimum(GROUP, num_blocks - first)
    rest = program - first * num_tiles
    block = first + rest % size
    group, start = (block // group_blocks).to(tl.int64), block % group_blocks * BLOCK_N
    column = start + tl.arange(0, BLOCK_N)
    row = (rest // size) * BLOCK_M + tl.arange(0, BLOCK_M)
    column_ok = column < height
    row_ok = row < num_rows
    rows = row.to(tl.int64)
    inputs = x + rows * (GROUPS * INPUTS) + group * INPUTS
    places = rows[:, None] * outputs + group * height + column[None, :]
    mask = row_ok[:, None] & column_ok[None, :]
    LENGTH: tl.constexpr = INPUTS // SPLITS
    if SPREAD:
        split = tl.program_id(1)
        total = _sum_inputs(
            inputs, values, scales, group, start, height, row_ok, split * LENGTH,
            LENGTH, INPUTS, TURN, HELD, FORMAT, OPERAND, PRECISION, EVEN, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
        size = num_rows.to(tl.int64) * outputs
        tl.store(parts + split * size + places, tl.trans(total), mask=mask)
        # Every thread's stores come before the arrival, and the last arrival before any load of the others' splits.
        tl.debug_barrier()
        if tl.atomic_add(arrivals + program, 1, sem="acq_rel") == SPLITS - 1:
            whole = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
            for one in range(SPLITS):
                whole += tl.load(parts + one * size + places, mask=mask, other=0.0, cache_modifier=".cg")
            tl.store(out + places, whole.to(out.dtype.element_ty), mask=mask)
            tl.store(arrivals + program, 0)
    elif SPLITS == 1:
        total = _sum_inputs(
            inputs, values, scales, group, start, height, row_ok, 0,
            LENGTH, INPUTS, TURN, HELD, FORMAT, OPERAND, PRECISION, EVEN, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
        tl.store(out + places, tl.trans(total).to(out.dtype.element_ty), mask=mask)
    else:
        total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        for split in range(SPLITS):
            total += _sum_inputs(
                inputs, values, scales, group, start, height, row_ok, split * LENGTH,
                LENGTH, INPUTS, TURN, HELD, FORMAT, OPERAND, PRECISION, EVEN, BLOCK_M, BLOCK_N, BLOCK_K,
            )  # fmt: skip
        tl.store(out + places, tl.trans(total).to(out.dtype.element_ty), mask=mask)


@triton.jit  # type: ignore[untyped-decorator]
def _sum_inputs(  # type: ignore[no-untyped-def]
    rows, values, scales, group, start, height, row_ok, first,
    LENGTH: tl.constexpr, INPUTS: tl.constexpr, TURN: tl.constexpr, HELD: tl.constexpr, FORMAT: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr, EVEN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Sum over LENGTH inputs from `first` on: [BLOCK_N, BLOCK_M] float32, as one chain."""
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    LAST: tl.constexpr = (LENGTH - 1) // BLOCK_K * BLOCK_K
    if HELD:
        held = input_tile(rows, row_ok, first, INPUTS, False, EVEN, BLOCK_K)
    for k in range(first, first + LENGTH, BLOCK_K):
        if HELD:
            part = tl.trans(turned_tile(held, BLOCK_M) if TURN else held).to(OPERAND)
            held = input_tile(rows, row_ok, tl.minimum(k + BLOCK_K, first + LAST), INPUTS, False, EVEN, BLOCK_K)
        else:
            part = tl.trans(input_tile(rows, row_ok, k, INPUTS, TURN, EVEN, BLOCK_K)).to(OPERAND)
        weight = weight_tile(values, scales, group, start, k, height, INPUTS, FORMAT, OPERAND, BLOCK_N, BLOCK_K, EVEN)
        total = tl.dot(weight, part, total, input_precision=PRECISION)
    return total
