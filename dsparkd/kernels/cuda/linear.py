"""Product of rows with a weight, dense or packed: Triton form, for cuda.

Each element is a sum over the inputs, in one order whatever the number of rows; so a row's bits depend on that row
alone, which the library's products on cuda do not promise. A weight of few outputs is summed in splits of its inputs,
and these are added in their order: by one program where rows make enough of them, else by the last of the programs that
had a split each. How many splits there are follows from the weight alone.

With many rows a packed weight is first laid out in bfloat16, in memory that the next product takes again: taking its
codes apart for every tile of rows anew costs more than to write and read it once.

Letters: M rows, I inputs, O outputs, S splits.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsparkd.kernels.cuda import many_rows
from dsparkd.kernels.cuda.compiling import ahead
from dsparkd.kernels.cuda.launch import EARLY, follow_alone
from dsparkd.kernels.cuda.products import add_splits, operand, precision, store_tile
from dsparkd.kernels.cuda.tile import (
    FORMAT_CODES,
    Tiles,
    in_pieces,
    in_rows,
    input_tile,
    is_turned,
    turn,
    turned_tile,
    weight_tile,
)
from dsparkd.kernels.tiles import count_tiles
from dsparkd.kernels.weight import Format, Weight

SPLIT_OUTPUTS = 64  # outputs of one program, as the number of splits is reckoned
SPLIT_INPUTS = 512  # the least inputs of a split
SPLIT_PROGRAMS = 256  # more programs than these are not made by splits of the inputs of one row tile
SPREAD_PROGRAMS = 128  # with so many programs or fewer each split gets one of its own
SPREAD_APART = 64  # the same of tiles of many rows
NARROW_OUTPUTS = 512  # so few make more programs of 32 rows than of 64
LARGE_ROWS = 192  # of more rows weights are taken apart once
LARGE_PROGRAMS = 64  # with fewer of such tiles, smaller ones are faster
WIDE_ROWS = 512  # up to these a weight without splits is not taken apart: it is as large as what it saves
GROUP_TILES = 16  # blocks of outputs that are computed for all rows before the next: their weights stay in the cache

PACKED_TILES = (
    Tiles(16, 64, 128, 4, 3, held=True),
    Tiles(32, 64, 128, 4, 4, held=True),
    Tiles(48, 64, 128, 4, 3, held=True),
    Tiles(64, 128, 128, 8, 3, held=True),
    Tiles(96, 64, 128, 4, 3, held=True),
)
DENSE_TILES = (Tiles(16, 64, 128, 4, 4), Tiles(32, 64, 128, 4, 4), Tiles(64, 64, 128, 4, 3))
WIDE_TILE = Tiles(128, 128, 128, 8, 3)
APART_TILES = (Tiles(128, 128, 64, 8, 4, apart=True), Tiles(128, 64, 128, 4, 3, apart=True))
WHOLE_TILES = (Tiles(128, 128, 64, 8, 3, apart=True), *APART_TILES[1:])  # without splits two fit on a processor


class TritonLinear:
    """Form for cuda. Implements LinearKernel; any number of rows. wide: the product is float32.

    groups: G products side by side: x is [M, G * I], and the g-th O / G outputs read the g-th I of its columns.
    choose: tiles by number of rows, outputs, inputs, format and dtype; they must not change a row's bits.
    One call at a time: the counters of arrived splits are kept, and zero between calls.
    """

    def __init__(
        self,
        weight: Weight,
        *,
        wide: bool = False,
        groups: int = 1,
        choose: Callable[[int, int, int, Format, torch.dtype], Tiles] | None = None,
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
        return self._product(x, self._choose(x.shape[0], *self._shape, self._format, x.dtype))

    @ahead()
    def compile(self) -> None:
        """Compile all that rows may ask for, at start: no step shall wait for a compiler."""
        dtype = self._values.dtype if self._format is Format.DENSE else torch.bfloat16
        x = torch.zeros((1, self._groups * self._shape[1]), dtype=dtype, device=self._values.device)
        for tiles, spread in forms_of(*self._shape, self._groups, self._format, dtype):
            self._product(x, tiles, spread)

    def _product(self, x: Tensor, tiles: Tiles, spread: bool | None = None) -> Tensor:
        """spread: a program for each split; None for where there are few programs."""
        M, (O, I) = x.shape[0], self._shape  # noqa: E741
        out = torch.empty((M, O), dtype=torch.float32 if self._wide else x.dtype, device=x.device)
        if not M:
            return out
        if spread is None:
            spread = is_spread(M, O, I, self._groups, tiles)
        if tiles.apart:
            self._multiply_apart(x, out, tiles, spread)
            return out
        programs = count_programs(M, O, self._groups, tiles)
        block = 1 << (tiles.rows.bit_length() - 1)
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
            TURN=is_turned(self._format),
            HELD=tiles.held,
            GROUPS=self._groups,
            FORMAT=FORMAT_CODES[self._format],
            OPERAND=operand(x),
            PRECISION=precision(x),
            EVEN=O // self._groups % tiles.outputs == 0 and I % tiles.inputs == 0,
            GROUP=GROUP_TILES,
            BLOCK_M=block,
            MORE=tiles.rows - block,
            BLOCK_N=tiles.outputs,
            BLOCK_K=tiles.inputs,
            num_warps=tiles.warps,
            num_stages=tiles.stages,
            maxnreg=tiles.registers,
            launch_pdl=EARLY,
        )
        return out

    def _multiply_apart(self, x: Tensor, out: Tensor, tiles: Tiles, spread: bool) -> None:
        weight = self._values
        if self._format is not Format.DENSE:
            weight = in_rows(self._values, self._scales, self._format, self._shape, self._groups)
        if is_turned(self._format):
            x = turn(x)
        many_rows.multiply(x, weight, out, self._groups, self._splits, tiles, self._arrivals if spread else None)


def count_programs(num_rows: int, outputs: int, groups: int, tiles: Tiles) -> int:
    """Tiles of the outputs, whose inputs one program or as many as there are splits have."""
    return int(count_tiles(num_rows, tiles.rows) * groups * count_tiles(outputs // groups, tiles.outputs))


def is_spread(num_rows: int, outputs: int, inputs: int, groups: int, tiles: Tiles) -> bool:
    """Whether so few programs would be made that each split gets one."""
    most = SPREAD_APART if tiles.apart else SPREAD_PROGRAMS
    return splits_of(outputs, inputs) > 1 and count_programs(num_rows, outputs, groups, tiles) <= most


def splits_of(outputs: int, inputs: int) -> int:
    """Into how many splits the inputs of a weight are cut: a power of two, of equal ones."""
    blocks, splits = count_tiles(outputs, SPLIT_OUTPUTS), 1
    if blocks <= SPREAD_PROGRAMS:
        while 2 * splits * blocks <= SPLIT_PROGRAMS and inputs % (2 * splits * SPLIT_INPUTS) == 0:
            splits *= 2
    return splits


def forms_of(
    outputs: int, inputs: int, groups: int, form: Format, dtype: torch.dtype
) -> tuple[tuple[Tiles, bool], ...]:
    """List the tile shapes that a weight's products ask for, and whether splits are spread, the fewest rows first."""
    most = max(tiles.rows for tiles in APART_TILES)
    tried = (*range(16, 1024, 16), *range(1024, (LARGE_PROGRAMS + 1) * most, most))
    forms: dict[tuple[Tiles, bool], None] = {}
    for num_rows in tried:
        tiles = choose_tiles(num_rows, outputs, inputs, form, dtype)
        forms[tiles, is_spread(num_rows, outputs, inputs, groups, tiles)] = None
    return tuple(forms)


def choose_tiles(num_rows: int, outputs: int, inputs: int, form: Format, dtype: torch.dtype) -> Tiles:
    """Pick the tile shape that an H200 found fastest for a number of rows."""
    if dtype == torch.float32:
        return Tiles(16, 32, 32, 4, 2)
    is_dense = form is Format.DENSE
    few = DENSE_TILES if is_dense else PACKED_TILES
    if is_dense and outputs <= NARROW_OUTPUTS and 16 < num_rows <= 64:
        return few[1]
    for tiles in few:
        if num_rows <= tiles.rows:
            return tiles
    if num_rows > LARGE_ROWS and inputs % 128 == 0:
        is_whole = splits_of(outputs, inputs) == 1
        if is_whole and not is_dense and num_rows <= WIDE_ROWS:
            return WIDE_TILE
        for tiles in WHOLE_TILES if is_whole else APART_TILES:
            if count_tiles(num_rows, tiles.rows) * count_tiles(outputs, tiles.outputs) >= LARGE_PROGRAMS:
                return tiles
    return few[-1]


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
    MORE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """out [M, O] = x times the weight, one tile: BLOCK_M rows, and MORE behind them. The weight is the left operand:
    its many rows fill the matrix unit."""
    follow_alone()
    program = tl.program_id(0)
    num_tiles = tl.cdiv(num_rows, BLOCK_M + MORE)
    height = outputs // GROUPS
    group_blocks = tl.cdiv(height, BLOCK_N)
    num_blocks = GROUPS * group_blocks
    first = program // (GROUP * num_tiles) * GROUP
    size = tl.minimum(GROUP, num_blocks - first)
    rest = program - first * num_tiles
    block = first + rest % size
    group, start = (block // group_blocks).to(tl.int64), block % group_blocks * BLOCK_N
    row = (rest // size) * (BLOCK_M + MORE)
    column = group * height + start
    inputs = x + group * INPUTS
    LENGTH: tl.constexpr = INPUTS // SPLITS
    if SPREAD:
        split = tl.program_id(1)
        total, more = _sum_inputs(
            inputs, values, scales, group, start, height, row, num_rows, split * LENGTH,
            LENGTH, INPUTS, TURN, HELD, GROUPS, FORMAT, OPERAND, PRECISION, EVEN, BLOCK_M, MORE, BLOCK_N, BLOCK_K,
        )  # fmt: skip
        place = parts + split * num_rows.to(tl.int64) * outputs
        store_tile(place, tl.trans(total), row, column, start, height, num_rows, outputs)
        if MORE:
            store_tile(place, tl.trans(more), row + BLOCK_M, column, start, height, num_rows, outputs)
        # Every thread's stores come before the arrival, and the last arrival before any load of the others' splits.
        tl.debug_barrier()
        if tl.atomic_add(arrivals + program, 1, sem="acq_rel") == SPLITS - 1:
            add_splits(parts, out, row, column, start, height, num_rows, outputs, SPLITS, BLOCK_M, BLOCK_N)
            if MORE:
                add_splits(parts, out, row + BLOCK_M, column, start, height, num_rows, outputs, SPLITS, MORE, BLOCK_N)
            tl.store(arrivals + program, 0)
    else:
        total, more = _sum_inputs(
            inputs, values, scales, group, start, height, row, num_rows, 0,
            LENGTH, INPUTS, TURN, HELD, GROUPS, FORMAT, OPERAND, PRECISION, EVEN, BLOCK_M, MORE, BLOCK_N, BLOCK_K,
        )  # fmt: skip
        if SPLITS > 1:
            total += 0.0  # as when splits are added to zeros: -0 becomes 0
            if MORE:
                more += 0.0
            for split in range(1, SPLITS):
                part, part_more = _sum_inputs(
                    inputs, values, scales, group, start, height, row, num_rows, split * LENGTH,
                    LENGTH, INPUTS, TURN, HELD, GROUPS, FORMAT, OPERAND, PRECISION, EVEN, BLOCK_M, MORE, BLOCK_N,
                    BLOCK_K,
                )  # fmt: skip
                total += part
                if MORE:
                    more += part_more
        store_tile(out, tl.trans(total), row, column, start, height, num_rows, outputs)
        if MORE:
            store_tile(out, tl.trans(more), row + BLOCK_M, column, start, height, num_rows, outputs)


@triton.jit  # type: ignore[untyped-decorator]
def _sum_inputs(  # type: ignore[no-untyped-def]
    x, values, scales, group, start, height, row, num_rows, first,
    LENGTH: tl.constexpr, INPUTS: tl.constexpr, TURN: tl.constexpr, HELD: tl.constexpr, GROUPS: tl.constexpr,
    FORMAT: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr, EVEN: tl.constexpr, BLOCK_M: tl.constexpr,
    MORE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Sums over LENGTH inputs from `first` on, as one chain: [BLOCK_N, BLOCK_M] and [BLOCK_N, MORE] float32; the first
    twice without MORE."""
    LAST: tl.constexpr = (LENGTH - 1) // BLOCK_K * BLOCK_K
    own = row + tl.arange(0, BLOCK_M)
    rows, row_ok = x + own.to(tl.int64) * (GROUPS * INPUTS), own < num_rows
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    if HELD:
        held = input_tile(rows, row_ok, first, INPUTS, False, EVEN, BLOCK_K)
    if MORE:
        behind = row + BLOCK_M + tl.arange(0, MORE)
        rows_more, more_ok = x + behind.to(tl.int64) * (GROUPS * INPUTS), behind < num_rows
        more = tl.zeros((BLOCK_N, MORE), tl.float32)
        held_more = input_tile(rows_more, more_ok, first, INPUTS, False, EVEN, BLOCK_K)
    for k in range(first, first + LENGTH, BLOCK_K):
        if HELD:
            part = tl.trans(turned_tile(held, BLOCK_M) if TURN else held).to(OPERAND)
            held = input_tile(rows, row_ok, tl.minimum(k + BLOCK_K, first + LAST), INPUTS, False, EVEN, BLOCK_K)
        else:
            part = tl.trans(input_tile(rows, row_ok, k, INPUTS, TURN, EVEN, BLOCK_K)).to(OPERAND)
        if MORE:  # these inputs are always held
            part_more = tl.trans(turned_tile(held_more, MORE) if TURN else held_more).to(OPERAND)
            next_ = tl.minimum(k + BLOCK_K, first + LAST)
            held_more = input_tile(rows_more, more_ok, next_, INPUTS, False, EVEN, BLOCK_K)
        weight = weight_tile(values, scales, group, start, k, height, INPUTS, FORMAT, OPERAND, BLOCK_N, BLOCK_K, EVEN)
        total = tl.dot(weight, part, total, input_precision=PRECISION)
        if MORE:
            more = tl.dot(weight, part_more, more, input_precision=PRECISION)
    if MORE:
        return total, more
    else:
        return total, total
