"""One shard's routed experts: Triton form, for cuda. No host reads; launch grids follow from bounds the host knows.

Choices (a row's k experts) are laid out by expert, each expert's in whole tiles of rows, in the order of the rows. A
product's tile reads one expert's weights; a row's bits depend on that row alone, as every element is one sum over the
inputs in one order, and the last sum goes over a row's experts in ascending order.

Letters: R rows, k experts a row, D width, I expert width, E experts of the shard, A slots (rows of all tiles).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsparkd.kernels.cuda.products import operand, precision
from dsparkd.kernels.cuda.tile import (
    FORMAT_CODES,
    TURNED_ROWS,
    Tiles,
    input_columns,
    regroup,
    scales_of,
    turn,
    turned_place,
    weight_tile,
)
from dsparkd.kernels.experts import ExpertShard
from dsparkd.kernels.weight import FP8_GROUP, Format, stacked

SCAN = 1024  # choices that a program of the layout looks at in one go
GROUP_TILES = 16  # row tiles that are computed for all columns before the next: their inputs stay in the cache
COMBINED = 1024  # columns of a program that sums a row's experts


class TritonExperts:
    """Form for cuda. Implements ExpertsKernel. Keeps the shard's weights stacked, as they are stored.

    choose: tiles by number of choices, of experts of the shard, format and dtype; they must not change a row's bits.
    """

    def __init__(
        self, shard: ExpertShard, choose: Callable[[int, int, Format, torch.dtype], Tiles] | None = None
    ) -> None:
        self._choose = choose or choose_tiles
        self._first, self._limit = shard.first, shard.limit
        self._num_experts = len(shard.w13)
        w13, w2 = stacked(shard.w13), stacked(shard.w2)  # [E * 2 I, D], gate rows first, and [E * D, I]
        self._format, self._width = w13.format, w13.shape[1]
        self._w13, self._w2 = (regroup(w13), scales_of(w13)), (regroup(w2), scales_of(w2))
        self._expert_width = shard.w2[0].shape[1]
        # Activations come to lie in the order in which packed weights are multiplied.
        self._is_hidden_turned = self._format is not Format.DENSE and self._expert_width % FP8_GROUP == 0

    def __call__(self, x: Tensor, expert_ids: Tensor, shares: Tensor) -> Tensor:
        """See ExpertsKernel."""
        tiles = self._choose(expert_ids.numel(), self._num_experts, self._format, x.dtype)
        return self._sum(x, expert_ids, shares, tiles)

    def compile(self) -> None:
        """Compile for every tile shape that loads may ask for, at start: no step shall wait for a compiler."""
        values = self._w13[0]
        dtype = values.dtype if self._format is Format.DENSE else torch.bfloat16
        for num_rows in (1, TURNED_ROWS):  # from so many rows on their columns are turned before the product
            x = torch.zeros((num_rows, self._width), dtype=dtype, device=values.device)
            # One row for this shard: a tile is enough.
            foreign = self._first + self._num_experts
            expert_ids = torch.full((num_rows, 1), foreign, dtype=torch.int32, device=values.device)
            expert_ids[:1] = self._first
            shares = torch.zeros((num_rows, 1), device=values.device)
            for tiles in tiles_of(self._format, dtype):
                self._sum(x, expert_ids, shares, tiles)

    def _sum(self, x: Tensor, expert_ids: Tensor, shares: Tensor, tiles: Tiles) -> Tensor:
        R, D = x.shape
        total = torch.empty((R, D), dtype=torch.float32, device=x.device)
        if not R:
            return total
        top_k = expert_ids.shape[1]
        layout = lay_out(expert_ids, self._first, self._num_experts, tiles.rows)
        hidden = x.new_empty((len(layout.choices), self._expert_width))
        self._gate_up(x, shares, layout, tiles, hidden)
        outputs = x.new_empty((len(layout.choices), D))
        self._down(hidden, layout, tiles, outputs)
        _combine[(R, triton.cdiv(D, COMBINED))](outputs, layout.places, total, top_k, D, BLOCK=COMBINED)
        return total

    def _gate_up(self, x: Tensor, shares: Tensor, layout: Layout, tiles: Tiles, hidden: Tensor) -> None:
        width, is_packed = self._expert_width, self._format is not Format.DENSE
        is_turned = is_packed and max(len(x), tiles.rows) >= TURNED_ROWS and x.shape[1] % FP8_GROUP == 0
        if is_turned:
            x = turn(x)
        _gate_up_kernel[(len(layout.tile_experts) * triton.cdiv(width, tiles.outputs),)](
            x,
            *self._w13,
            layout.choices,
            layout.tile_experts,
            shares,
            hidden,
            len(layout.tile_experts),
            shares.shape[1],
            self._limit,
            WIDTH=x.shape[1],
            EXPERT_WIDTH=width,
            TURN=is_packed and not is_turned,
            HIDDEN_TURNED=self._is_hidden_turned,
            FORMAT=FORMAT_CODES[self._format],
            OPERAND=operand(x),
            PRECISION=precision(x),
            EVEN=width % tiles.outputs == 0 and x.shape[1] % tiles.inputs == 0,
            GROUP=GROUP_TILES,
            BLOCK_M=tiles.rows,
            BLOCK_N=tiles.outputs,
            BLOCK_K=tiles.inputs,
            num_warps=tiles.warps,
            num_stages=tiles.stages,
            maxnreg=tiles.registers,
        )

    def _down(self, hidden: Tensor, layout: Layout, tiles: Tiles, outputs: Tensor) -> None:
        width = outputs.shape[1]
        _down_kernel[(len(layout.tile_experts) * triton.cdiv(width, tiles.outputs),)](
            hidden,
            *self._w2,
            layout.tile_experts,
            outputs,
            len(layout.tile_experts),
            WIDTH=width,
            EXPERT_WIDTH=hidden.shape[1],
            TURN=self._format is not Format.DENSE and not self._is_hidden_turned,
            FORMAT=FORMAT_CODES[self._format],
            OPERAND=operand(hidden),
            PRECISION=precision(hidden),
            EVEN=width % tiles.outputs == 0 and hidden.shape[1] % tiles.inputs == 0,
            GROUP=GROUP_TILES,
            BLOCK_M=tiles.rows,
            BLOCK_N=tiles.outputs,
            BLOCK_K=tiles.inputs,
            num_warps=tiles.warps,
            num_stages=tiles.stages,
            maxnreg=tiles.registers,
        )


def tiles_of(form: Format, dtype: torch.dtype) -> tuple[Tiles, ...]:
    """List the tile shapes of a format and dtype, the fewest rows first."""
    if dtype == torch.float32:
        return (Tiles(16, 32, 32, 4, 2),)
    return (
        Tiles(16, 64, 128, 4, 3, 96),
        Tiles(32, 64, 128, 4, 3, 128),
        Tiles(64, 64, 128, 4, 3),
        Tiles(128, 128, 64, 8, 3) if form is Format.DENSE else Tiles(256, 64, 128, 8, 3),
    )


def choose_tiles(num_choices: int, num_experts: int, form: Format, dtype: torch.dtype) -> Tiles:
    """Pick one of them for a number of choices over both shards: few rows a tile where experts get few."""
    shapes = tiles_of(form, dtype)
    load = num_choices // (2 * num_experts)
    return shapes[min(sum(load > limit for limit in (8, 24, 128)), len(shapes) - 1)]


@dataclass(frozen=True, slots=True)
class Layout:
    """Where each choice is computed. choices [A] int32: a slot's index into the flattened [R, k], -1 for padding.
    tile_experts int32: each row tile's expert of the shard, -1 past the last. places [R, k] int32: slots, -1 for a
    choice that another shard serves. Slots behind the last tile hold nothing."""

    choices: Tensor
    tile_experts: Tensor
    places: Tensor


def lay_out(expert_ids: Tensor, first: int, num_experts: int, tile_rows: int) -> Layout:
    """Lay the choices [R, k] int32 out in tiles; as many as the worst distribution needs."""
    num_choices = expert_ids.numel()
    # Each expert wastes less than a tile, and each tile has a choice.
    num_tiles = min(num_choices, triton.cdiv(num_choices + num_experts * (tile_rows - 1), tile_rows))
    counts = expert_ids.new_empty(num_experts)
    choices = expert_ids.new_empty(num_tiles * tile_rows)
    tile_experts = expert_ids.new_empty(num_tiles)
    places = torch.empty_like(expert_ids)
    _count_kernel[(num_experts,)](expert_ids, counts, num_choices, first, BLOCK=SCAN)
    _place_kernel[(num_experts,)](
        expert_ids,
        counts,
        choices,
        tile_experts,
        places,
        num_choices,
        first,
        num_experts,
        num_tiles,
        EXPERTS=triton.next_power_of_2(num_experts),
        BLOCK_M=tile_rows,
        BLOCK=SCAN,
    )
    return Layout(choices, tile_experts, places)


@triton.jit(do_not_specialize=["num_choices", "first"])  # type: ignore[untyped-decorator]
def _count_kernel(expert_ids, counts, num_choices, first, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """One program an expert: how many choices name it."""
    expert = tl.program_id(0)
    total = 0
    for start in range(0, num_choices, BLOCK):
        index = start + tl.arange(0, BLOCK)
        ids = tl.load(expert_ids + index, mask=index < num_choices, other=-1)
        total += tl.sum((ids == first + expert).to(tl.int32))
    tl.store(counts + expert, total)


@triton.jit(do_not_specialize=["num_choices", "first", "num_experts", "num_tiles"])  # type: ignore[untyped-decorator]
def _place_kernel(  # type: ignore[no-untyped-def]
    expert_ids,
    counts,
    choices,
    tile_experts,
    places,
    num_choices,
    first,
    num_experts,
    num_tiles,
    EXPERTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program an expert: its slots, in the order of the choices, its padding and its tiles."""
    expert = tl.program_id(0)
    each = tl.arange(0, EXPERTS)
    loads = tl.load(counts + each, mask=each < num_experts, other=0)
    tiles = (loads + BLOCK_M - 1) // BLOCK_M
    first_tile = tl.sum(tl.where(each < expert, tiles, 0))
    own_tiles = tl.sum(tl.where(each == expert, tiles, 0))
    slot = first_tile * BLOCK_M
    end = slot + own_tiles * BLOCK_M
    for start in range(0, num_choices, BLOCK):
        index = start + tl.arange(0, BLOCK)
        ids = tl.load(expert_ids + index, mask=index < num_choices, other=-1)
        own = ids == first + expert
        place = slot + tl.cumsum(own.to(tl.int32), 0) - 1
        tl.store(choices + place, index, mask=own)
        tl.store(places + index, place, mask=own)
        slot += tl.sum(own.to(tl.int32))
        # The first expert's program also speaks for choices that no program of this shard serves.
        if expert == 0:
            foreign = (index < num_choices) & ((ids < first) | (ids >= first + num_experts))
            tl.store(places + index, tl.full((BLOCK,), -1, tl.int32), mask=foreign)
    padding = slot + tl.arange(0, BLOCK_M)
    tl.store(choices + padding, tl.full((BLOCK_M,), -1, tl.int32), mask=padding < end)
    for start in range(0, own_tiles, 16):
        tile = start + tl.arange(0, 16)
        tl.store(tile_experts + first_tile + tile, tl.full((16,), 0, tl.int32) + expert, mask=tile < own_tiles)
    if expert == num_experts - 1:
        for start in range(first_tile + own_tiles, num_tiles, 16):
            tile = start + tl.arange(0, 16)
            tl.store(tile_experts + tile, tl.full((16,), -1, tl.int32), mask=tile < num_tiles)


@triton.jit  # type: ignore[untyped-decorator]
def _own_tile(num_tiles, num_blocks, GROUP: tl.constexpr):  # type: ignore[no-untyped-def]
    """This program's row tile and block of columns: GROUP tiles side by side, for all blocks, then the next GROUP."""
    program = tl.program_id(0)
    first = program // (GROUP * num_blocks) * GROUP
    size = tl.minimum(GROUP, num_tiles - first)
    rest = program - first * num_blocks
    return first + rest % size, rest // size


@triton.jit(do_not_specialize=["num_tiles", "top_k", "limit"])  # type: ignore[untyped-decorator]
def _gate_up_kernel(  # type: ignore[no-untyped-def]
    x,
    values,
    scales,
    choices,
    tile_experts,
    shares,
    hidden,
    num_tiles,
    top_k,
    limit,
    WIDTH: tl.constexpr,
    EXPERT_WIDTH: tl.constexpr,
    TURN: tl.constexpr,
    HIDDEN_TURNED: tl.constexpr,
    FORMAT: tl.constexpr,
    OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
    EVEN: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """hidden [A, I] = share * silu(min(gate, limit)) * clamp(up) for one tile of slots and one block of I.

    The weights are the left operand: their many rows fill the matrix unit, however few a tile's rows are.
    """
    tile, block = _own_tile(num_tiles, tl.cdiv(EXPERT_WIDTH, BLOCK_N), GROUP)
    expert = tl.load(tile_experts + tile)
    if expert < 0:
        return
    slots = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    choice = tl.load(choices + slots)
    real = choice >= 0
    rows = (tl.where(real, choice, 0) // top_k).to(tl.int64)
    column = block * BLOCK_N + tl.arange(0, BLOCK_N)
    column_ok = column < EXPERT_WIDTH
    gate_rows = expert.to(tl.int64) * (2 * EXPERT_WIDTH) + column
    up_rows = gate_rows + EXPERT_WIDTH
    gate = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    up = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for k in range(0, WIDTH, BLOCK_K):
        inputs = input_columns(k, TURN, BLOCK_K)
        mask = real[:, None] if EVEN else real[:, None] & (inputs[None, :] < WIDTH)
        part = tl.trans(tl.load(x + rows[:, None] * WIDTH + inputs[None, :], mask=mask, other=0.0)).to(OPERAND)
        gate_part = weight_tile(values, scales, gate_rows, column_ok, k, WIDTH, FORMAT, OPERAND, BLOCK_K, EVEN)
        gate = tl.dot(gate_part, part, gate, input_precision=PRECISION)
        up_part = weight_tile(values, scales, up_rows, column_ok, k, WIDTH, FORMAT, OPERAND, BLOCK_K, EVEN)
        up = tl.dot(up_part, part, up, input_precision=PRECISION)
    gate = tl.minimum(gate, limit)
    up = tl.minimum(tl.maximum(up, -limit), limit)
    share = tl.load(shares + choice, mask=real, other=0.0)
    activated = gate / (1.0 + tl.exp(-gate)) * up * share[None, :]
    place = turned_place(column) if HIDDEN_TURNED else column
    places = hidden + slots[:, None].to(tl.int64) * EXPERT_WIDTH + place[None, :]
    tl.store(places, tl.trans(activated).to(hidden.dtype.element_ty), mask=column_ok[None, :])


@triton.jit(do_not_specialize=["num_tiles"])  # type: ignore[untyped-decorator]
def _down_kernel(  # type: ignore[no-untyped-def]
    hidden,
    values,
    scales,
    tile_experts,
    outputs,
    num_tiles,
    WIDTH: tl.constexpr,
    EXPERT_WIDTH: tl.constexpr,
    TURN: tl.constexpr,
    FORMAT: tl.constexpr,
    OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
    EVEN: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """outputs [A, D] = hidden times the expert's second weight, one tile of slots and one block of D."""
    tile, block = _own_tile(num_tiles, tl.cdiv(WIDTH, BLOCK_N), GROUP)
    expert = tl.load(tile_experts + tile)
    if expert < 0:
        return
    slots = (tile * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    column = block * BLOCK_N + tl.arange(0, BLOCK_N)
    column_ok = column < WIDTH
    weight_rows = expert.to(tl.int64) * WIDTH + column
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for k in range(0, EXPERT_WIDTH, BLOCK_K):
        inputs = input_columns(k, TURN, BLOCK_K)
        places = hidden + slots[:, None] * EXPERT_WIDTH + inputs[None, :]
        if EVEN:
            part = tl.trans(tl.load(places)).to(OPERAND)
        else:
            part = tl.trans(tl.load(places, mask=inputs[None, :] < EXPERT_WIDTH, other=0.0)).to(OPERAND)
        weight_part = weight_tile(
            values, scales, weight_rows, column_ok, k, EXPERT_WIDTH, FORMAT, OPERAND, BLOCK_K, EVEN
        )
        total = tl.dot(weight_part, part, total, input_precision=PRECISION)
    places = outputs + slots[:, None] * WIDTH + column[None, :]
    tl.store(places, tl.trans(total).to(outputs.dtype.element_ty), mask=column_ok[None, :])


@triton.jit(do_not_specialize=["top_k"])  # type: ignore[untyped-decorator]
def _combine(outputs, places, total, top_k, WIDTH, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """total [R, D] float32: a row's outputs, ascending by expert, which is the order of its choices."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    column_ok = column < WIDTH
    sum_ = tl.zeros((BLOCK,), tl.float32)
    for choice in range(top_k):
        place = tl.load(places + row * top_k + choice)
        width = tl.where(place >= 0, WIDTH, 0)  # another shard's choice has no columns here
        served = tl.load(outputs + place.to(tl.int64) * WIDTH + column, mask=column < width, other=0.0)
        sum_ += served.to(tl.float32)
    tl.store(total + row * WIDTH + column, sum_, mask=column_ok)
