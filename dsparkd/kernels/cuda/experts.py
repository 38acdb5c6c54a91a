"""One shard's routed experts: Triton form, for cuda. No host reads; launch grids follow from bounds the host knows.

Choices (a row's k experts) are laid out by expert, each expert's in whole tiles of rows, in the order of the rows.
Where all choices fit into any tile they stay where they are: an expert's tile has them all, and computes its own. A
product's tile reads one expert's weights; a row's bits depend on that row alone, as every element is one sum over the
inputs in one order, and the last sum goes over a row's experts in ascending order.

Letters: R rows, k experts a row, D width, I expert width, E experts of the shard, A slots (rows of all tiles).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsparkd.kernels.crossing import Parting
from dsparkd.kernels.cuda.compiling import ahead
from dsparkd.kernels.cuda.launch import EARLY, follow, follow_alone
from dsparkd.kernels.cuda.peer import post, take
from dsparkd.kernels.cuda.products import operand, precision
from dsparkd.kernels.cuda.tile import (
    FORMAT_CODES,
    Tiles,
    blocks_of,
    in_pieces,
    input_tile,
    is_turned,
    packed_tile,
    turned_place,
    turned_tile,
    weight_tile,
)
from dsparkd.kernels.experts import ExpertShard
from dsparkd.kernels.tiles import count_tiles, power_of_two
from dsparkd.kernels.weight import FP8_GROUP, Format, stacked

SHORT_SCAN = 128  # of a few rows' choices at as many
SCAN = 1024  # choices that a program of the layout looks at in one go
LONG_SCAN = 4096  # of more than two of these it looks at as many
FEW_CHOICES = 16  # so many fit into every tile, and are not laid out
GROUP_TILES = 16  # row tiles that are computed for all columns before the next: their inputs stay in the cache
ROW_UNIT = 8  # elements that are loaded at once, where rows begin at multiples of so many
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
        self._w13, self._w2 = in_pieces(w13, 2 * self._num_experts), in_pieces(w2, self._num_experts)
        self._expert_width = shard.w2[0].shape[1]
        # Inputs come, and activations come to lie, in the order in which a product takes them, if they can.
        self._takes_turned = is_turned(self._format) and self._width % FP8_GROUP == 0
        self._is_hidden_turned = is_turned(self._format) and self._expert_width % FP8_GROUP == 0

    @property
    def takes_turned(self) -> bool:
        """See ExpertsKernel; as tile.turn orders them."""
        return self._takes_turned

    def __call__(self, x: Tensor, expert_ids: Tensor, shares: Tensor, parting: Parting | None = None) -> Tensor:
        """See ExpertsKernel. Rows may lie apart, those of expert_ids and of shares equally far."""
        assert len(x) < 2 or expert_ids.stride() == shares.stride()
        tiles = self._choose(expert_ids.numel(), self._num_experts, self._format, x.dtype)
        return self._sum(x, expert_ids, shares, tiles, parting)

    @ahead()
    def compile(self) -> None:
        """Compile for every tile shape that loads may ask for, at start: no step shall wait for a compiler."""
        values = self._w13[0]
        dtype = values.dtype if self._format is Format.DENSE else torch.bfloat16
        shapes = tiles_of(self._format, dtype)
        for tiles in shapes:
            foreign = self._first + self._num_experts
            # Choices in place, and laid out; few and many.
            for num_rows in (1, FEW_CHOICES + 1) if tiles is shapes[0] else (FEW_CHOICES + 1,):
                x = torch.zeros((num_rows, self._width), dtype=dtype, device=values.device)
                # One row for this shard: a tile is enough.
                expert_ids = torch.full((num_rows, 1), foreign, dtype=torch.int32, device=values.device)
                expert_ids[:1] = self._first
                self._sum(x, expert_ids, torch.zeros((num_rows, 1), device=values.device), tiles)
            for num_choices in (SHORT_SCAN + 1, 2 * LONG_SCAN + 1):
                many = expert_ids.new_full((num_choices, 1), foreign)
                lay_out(many, self._first, self._num_experts, tiles.rows)

    def _sum(
        self, x: Tensor, expert_ids: Tensor, shares: Tensor, tiles: Tiles, parting: Parting | None = None
    ) -> Tensor:
        R, D = x.shape
        num_stay = R if parting is None else parting.counts[parting.rank]
        total = torch.empty((num_stay, D), dtype=torch.float32, device=x.device)
        if not R:
            return total
        layout = lay_out(expert_ids, self._first, self._num_experts, tiles.rows)
        hidden = x.new_empty((layout.num_slots, self._expert_width))
        self._gate_up(x, shares, layout, tiles, hidden)
        outputs = x.new_empty((layout.num_slots, D))
        self._down(hidden, layout, tiles, outputs)
        crossing = None if parting is None else parting.crossing
        _combine[(R, count_tiles(D, COMBINED))](
            outputs,
            layout.places,
            total,
            # Without a parting nothing is loaded from here.
            *(
                (total, total, total, total)
                if crossing is None
                else (crossing.received, crossing.theirs, crossing.ours, crossing.number)
            ),
            0 if crossing is None else crossing.index,
            0 if crossing is None else crossing.num_spins,
            R if parting is None else parting.counts[0],
            num_stay,
            0 if parting is None else parting.rank,
            layout.places.stride(0),
            expert_ids.shape[1],
            self._first,
            self._num_experts,
            D,
            PARTS=parting is not None,
            IN_PLACE=layout.is_in_place,
            BLOCK=COMBINED,
            launch_pdl=EARLY,
            sanitize_overflow=False,
        )
        return total

    def _gate_up(self, x: Tensor, shares: Tensor, layout: Layout, tiles: Tiles, hidden: Tensor) -> None:
        width = self._expert_width
        # Tiles of 128 outputs or more of a packed weight have half of them of each section, smaller ones all.
        is_joined = self._format is not Format.DENSE and tiles.outputs > 64
        unit = math.gcd(x.stride(0), ROW_UNIT)
        outputs = tiles.outputs // 2 if is_joined else tiles.outputs
        _gate_up_kernel[(layout.num_tiles * count_tiles(width, outputs),)](
            x,
            *self._w13,
            layout.choices,
            layout.tile_experts,
            shares,
            hidden,
            layout.num_tiles,
            self._first,
            self._num_experts,
            shares.shape[1],
            shares.stride(0),
            x.stride(0) // unit,
            self._limit,
            UNIT=unit,
            IN_PLACE=layout.is_in_place,
            WIDTH=x.shape[1],
            EXPERT_WIDTH=width,
            TURN=is_turned(self._format) and not self._takes_turned,
            HIDDEN_TURNED=self._is_hidden_turned,
            FORMAT=FORMAT_CODES[self._format],
            OPERAND=operand(x),
            PRECISION=precision(x),
            EVEN=width % outputs == 0 and x.shape[1] % tiles.inputs == 0,
            HELD=tiles.held,
            GROUP=group_of(tiles),
            BLOCK_M=tiles.rows,
            BLOCK_N=outputs,
            JOINED=is_joined,
            BLOCK_K=tiles.inputs,
            num_warps=tiles.warps,
            num_stages=tiles.stages,
            maxnreg=tiles.registers,
            launch_pdl=EARLY,
        )

    def _down(self, hidden: Tensor, layout: Layout, tiles: Tiles, outputs: Tensor) -> None:
        width, tiles = outputs.shape[1], second_tiles(tiles, self._format)
        block = tiles.outputs if width % tiles.outputs == 0 else min(tiles.outputs, 128)
        _down_kernel[(layout.num_tiles * count_tiles(width, block),)](
            hidden,
            *self._w2,
            layout.choices,
            layout.tile_experts,
            outputs,
            layout.num_tiles,
            self._first,
            self._num_experts,
            layout.places.shape[1],
            layout.places.stride(0),
            IN_PLACE=layout.is_in_place,
            WIDTH=width,
            EXPERT_WIDTH=hidden.shape[1],
            TURN=is_turned(self._format) and not self._is_hidden_turned,
            FORMAT=FORMAT_CODES[self._format],
            OPERAND=operand(hidden),
            PRECISION=precision(hidden),
            EVEN=width % block == 0 and hidden.shape[1] % tiles.inputs == 0,
            HELD=tiles.held,
            GROUP=group_of(tiles),
            BLOCK_M=tiles.rows,
            BLOCK_N=block,
            BLOCK_K=tiles.inputs,
            num_warps=tiles.warps,
            num_stages=tiles.stages,
            maxnreg=tiles.registers,
            launch_pdl=EARLY,
        )


def group_of(tiles: Tiles) -> int:
    """Row tiles side by side; of the fewest rows one, as an expert has hardly more: tiles without any come last."""
    return GROUP_TILES if tiles.rows > FEW_CHOICES else 1


def tiles_of(form: Format, dtype: torch.dtype) -> tuple[Tiles, ...]:
    """List the tile shapes of a format and dtype, the fewest rows first."""
    if dtype == torch.float32:
        return (Tiles(16, 32, 32, 4, 2),)
    if form is Format.DENSE:
        return (
            Tiles(16, 64, 128, 4, 3, 96),
            Tiles(32, 64, 128, 4, 3, 128),
            Tiles(64, 64, 128, 4, 3),
            Tiles(128, 128, 64, 8, 3),
        )
    return (
        Tiles(16, 64, 128, 4, 3, held=True),
        Tiles(32, 64, 128, 4, 3, held=True),
        Tiles(64, 128, 128, 8, 4, held=True),
        Tiles(128, 256, 128, 16, 3),
    )


def second_tiles(tiles: Tiles, form: Format) -> Tiles:
    """Return the second product's tiles beside these of the first: it has no halves, and reads fewer inputs."""
    return Tiles(32, 256, 128, 8, 3, 128) if tiles.rows == 32 and is_turned(form) else tiles


def choose_tiles(num_choices: int, num_experts: int, form: Format, dtype: torch.dtype) -> Tiles:
    """Pick one of them for a number of choices over both shards: few rows a tile where experts get few.

    The largest are for loads of which they waste little: one tile holds most of them, or they take several.
    """
    shapes = tiles_of(form, dtype)
    load = num_choices // (2 * num_experts)
    size = (load > 12) + (load > 24) + (80 < load <= 116 or load > 192)
    return shapes[min(size, len(shapes) - 1)]


@dataclass(frozen=True, slots=True)
class Layout:
    """Where each choice is computed. choices [A] int32: a slot's index into the flattened [R, k], -1 for padding.
    tile_experts int32: each row tile's expert of the shard, -1 past the last. places [R, k] int32: slots, -1 for a
    choice that another shard serves. Slots behind the last tile hold nothing.

    is_in_place: all three are the chosen experts' ids, slots are the choices, and there are as many tiles, of which
    the first ones compute an expert of the shard each, for all choices.
    """

    choices: Tensor
    tile_experts: Tensor
    places: Tensor
    is_in_place: bool

    @property
    def num_slots(self) -> int:
        """A."""
        return self.choices.numel()

    @property
    def num_tiles(self) -> int:
        """Row tiles, whether they hold something or not."""
        return self.tile_experts.numel()


def lay_out(expert_ids: Tensor, first: int, num_experts: int, tile_rows: int) -> Layout:
    """Lay the choices [R, k] int32 out in tiles; as many as the worst distribution needs.

    Ids that stand in a row of other words may begin anywhere: Triton is told not to compile anew for those that begin
    at 16 bytes, neither here nor where they stay in place.
    """
    num_choices = expert_ids.numel()
    if num_choices <= FEW_CHOICES:
        return Layout(expert_ids, expert_ids, expert_ids, is_in_place=True)
    # Each expert wastes less than a tile, and each tile has a choice.
    num_tiles = min(num_choices, count_tiles(num_choices + num_experts * (tile_rows - 1), tile_rows))
    choices = expert_ids.new_empty(num_tiles * tile_rows)
    tile_experts = expert_ids.new_empty(num_tiles)
    places = expert_ids.new_empty(expert_ids.shape)
    block, warps = SHORT_SCAN if num_choices <= SHORT_SCAN else SCAN, 4
    if num_choices > 2 * LONG_SCAN:
        block, warps = LONG_SCAN, 8
    _lay_out_kernel[(num_experts,)](
        expert_ids,
        choices,
        tile_experts,
        places,
        num_choices,
        expert_ids.shape[1],
        expert_ids.stride(0),
        first,
        num_experts,
        num_tiles,
        EXPERTS=max(16, power_of_two(num_experts)),
        BLOCK_M=tile_rows,
        BLOCK=block,
        num_warps=warps,
        launch_pdl=EARLY,
        sanitize_overflow=False,
    )
    return Layout(choices, tile_experts, places, is_in_place=False)


@triton.jit(  # type: ignore[untyped-decorator]
    debug=True,
    do_not_specialize=["num_choices", "top_k", "stride", "first", "num_experts", "num_tiles"],
    do_not_specialize_on_alignment=["expert_ids"],
)
def _lay_out_kernel(  # type: ignore[no-untyped-def]
    expert_ids,
    choices,
    tile_experts,
    places,
    num_choices,
    top_k,
    stride,
    first,
    num_experts,
    num_tiles,
    EXPERTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program an expert: its slots, in the order of the choices, its padding and its tiles. Each counts them all:
    another kernel for that would take longer."""
    follow()
    expert = tl.program_id(0)
    each = tl.arange(0, 2 * EXPERTS)
    loads = tl.zeros((2 * EXPERTS,), tl.int32)  # behind those of the shard's experts: all others'
    for start in range(0, num_choices, BLOCK):
        index = start + tl.arange(0, BLOCK)
        own = _ids_of(expert_ids, index, num_choices, top_k, stride) - first
        loads += tl.histogram(tl.where((own >= 0) & (own < num_experts), own, EXPERTS), 2 * EXPERTS)
    tiles = (loads + BLOCK_M - 1) // BLOCK_M
    first_tile = tl.sum(tl.where(each < expert, tiles, 0))
    own_tiles = tl.sum(tl.where(each == expert, tiles, 0))
    slot = first_tile * BLOCK_M
    end = slot + own_tiles * BLOCK_M
    tl.device_assert(first_tile + own_tiles <= num_tiles, "experts.lay_out: choices take more tiles than there are")
    num_slots = num_tiles * BLOCK_M
    for start in range(0, num_choices, BLOCK):
        index = start + tl.arange(0, BLOCK)
        ids = _ids_of(expert_ids, index, num_choices, top_k, stride)
        own = ids == first + expert
        place = slot + tl.cumsum(own.to(tl.int32), 0) - 1
        tl.store(choices + place, index, mask=own & (place < num_slots))
        tl.store(places + index, place, mask=own)
        slot += tl.sum(own.to(tl.int32))
        # The first expert's program also speaks for choices that no program of this shard serves.
        if expert == 0:
            foreign = (index < num_choices) & ((ids < first) | (ids >= first + num_experts))
            tl.store(places + index, tl.full((BLOCK,), -1, tl.int32), mask=foreign)
    padding = slot + tl.arange(0, BLOCK_M)
    tl.store(choices + padding, tl.full((BLOCK_M,), -1, tl.int32), mask=padding < tl.minimum(end, num_slots))
    for start in range(0, own_tiles, 16):
        tile = start + tl.arange(0, 16)
        fits = (tile < own_tiles) & (first_tile + tile < num_tiles)
        tl.store(tile_experts + first_tile + tile, tl.full((16,), 0, tl.int32) + expert, mask=fits)
    if expert == num_experts - 1:
        for start in range(first_tile + own_tiles, num_tiles, 16):
            tile = start + tl.arange(0, 16)
            tl.store(tile_experts + tile, tl.full((16,), -1, tl.int32), mask=tile < num_tiles)


@triton.jit
def _ids_of(expert_ids, index, num_choices, top_k, stride):  # type: ignore[no-untyped-def]
    """Experts of choices by their number, -1 past the last; the rows of ids lie so far apart."""
    return tl.load(expert_ids + index // top_k * stride + index % top_k, mask=index < num_choices, other=-1)


@triton.jit  # type: ignore[untyped-decorator]
def _own_tile(num_tiles, num_blocks, GROUP: tl.constexpr):  # type: ignore[no-untyped-def]
    """This program's row tile and block of columns: GROUP tiles side by side, for all blocks, then the next GROUP."""
    program = tl.program_id(0)
    first = program // (GROUP * num_blocks) * GROUP
    size = tl.minimum(GROUP, num_tiles - first)
    rest = program - first * num_blocks
    return first + rest % size, rest // size


@triton.jit  # type: ignore[untyped-decorator]
def _slots(  # type: ignore[no-untyped-def]
    choices, tile_experts, tile, num_tiles, first, num_experts, top_k, stride, IN_PLACE: tl.constexpr,
    BLOCK_M: tl.constexpr,
):  # fmt: skip
    """A tile's expert, -1 without one, its slots [BLOCK_M] and their choices [BLOCK_M], -1 for padding.

    tile_experts is not read of choices in place, which are the experts' ids themselves.
    """
    if IN_PLACE:
        slots = tl.arange(0, BLOCK_M)
        ids = _ids_of(choices, slots, num_tiles, top_k, stride)
        others = _ids_of(choices, slots, num_tiles, top_k, stride)
        # An expert's first choice speaks for all, and the experts' tiles come first: they lie on as many processors.
        is_again = tl.sum(((ids[:, None] == others[None, :]) & (slots[None, :] < slots[:, None])).to(tl.int32), 1) > 0
        speaks = (ids >= first) & (ids < first + num_experts) & ~is_again
        is_own = speaks & (tl.cumsum(speaks.to(tl.int32), 0) == tile + 1)
        expert = tl.sum(tl.where(is_own, ids - first + 1, 0)) - 1
        return expert, slots, tl.where(ids == first + expert, slots, -1)
    else:
        slots = tile * BLOCK_M + tl.arange(0, BLOCK_M)
        return tl.load(tile_experts + tile), slots, tl.load(choices + slots)


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["num_tiles", "first", "num_experts", "top_k", "stride", "row_units", "limit"],
    do_not_specialize_on_alignment=["choices", "tile_experts"],
)
def _gate_up_kernel(  # type: ignore[no-untyped-def]
    x,
    values,
    scales,
    choices,
    tile_experts,
    shares,
    hidden,
    num_tiles,
    first,
    num_experts,
    top_k,
    stride,
    row_units,
    limit,
    UNIT: tl.constexpr,
    IN_PLACE: tl.constexpr,
    WIDTH: tl.constexpr,
    EXPERT_WIDTH: tl.constexpr,
    TURN: tl.constexpr,
    HIDDEN_TURNED: tl.constexpr,
    FORMAT: tl.constexpr,
    OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
    EVEN: tl.constexpr,
    HELD: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    JOINED: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """hidden [A, I] = share * silu(min(gate, limit)) * clamp(up) for one tile of slots and one block of I.

    The weights are the left operand: their many rows fill the matrix unit, however few a tile's rows are. JOINED: a
    block's gate rows and its up rows are one operand, the first half and the second: a step has one chain of products.
    """
    follow_alone()
    tile, block = _own_tile(num_tiles, tl.cdiv(EXPERT_WIDTH, BLOCK_N), GROUP)
    expert, slots, choice = _slots(
        choices, tile_experts, tile, num_tiles, first, num_experts, top_k, stride, IN_PLACE, BLOCK_M
    )
    if expert < 0:
        return
    real = choice >= 0
    rows = (tl.where(real, choice, 0) // top_k).to(tl.int64)
    column = block * BLOCK_N + tl.arange(0, BLOCK_N)
    column_ok = column < EXPERT_WIDTH
    section, start = expert.to(tl.int64) * 2, block * BLOCK_N
    LAST: tl.constexpr = (WIDTH - 1) // BLOCK_K * BLOCK_K
    both = tl.zeros((2 * BLOCK_N, BLOCK_M), tl.float32)
    gate = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    up = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    starts = x + rows * (row_units * UNIT)
    held = input_tile(starts, real, 0, WIDTH, TURN and not HELD, EVEN, BLOCK_K)
    for k in range(0, WIDTH, BLOCK_K):
        if HELD:
            part = tl.trans(turned_tile(held, BLOCK_M) if TURN else held).to(OPERAND)
            held = input_tile(starts, real, tl.minimum(k + BLOCK_K, LAST), WIDTH, False, EVEN, BLOCK_K)
        else:
            part = tl.trans(input_tile(starts, real, k, WIDTH, TURN, EVEN, BLOCK_K)).to(OPERAND)
        if JOINED:
            blocks = blocks_of(EXPERT_WIDTH)
            weight_part = packed_tile(
                values, scales, section * blocks + start // 64, blocks, k, WIDTH, FORMAT, OPERAND, 2 * BLOCK_N
            )
            both = tl.dot(weight_part, part, both, input_precision=PRECISION)
        else:
            gate_part = weight_tile(
                values, scales, section, start, k, EXPERT_WIDTH, WIDTH, FORMAT, OPERAND, BLOCK_N, BLOCK_K, EVEN
            )
            gate = tl.dot(gate_part, part, gate, input_precision=PRECISION)
            up_part = weight_tile(
                values, scales, section + 1, start, k, EXPERT_WIDTH, WIDTH, FORMAT, OPERAND, BLOCK_N, BLOCK_K, EVEN
            )
            up = tl.dot(up_part, part, up, input_precision=PRECISION)
    if JOINED:
        gate, up = tl.split(tl.permute(tl.reshape(both, (2, BLOCK_N, BLOCK_M)), (1, 2, 0)))
    gate = tl.minimum(gate, limit)
    up = tl.minimum(tl.maximum(up, -limit), limit)
    share = tl.load(shares + choice // top_k * stride + choice % top_k, mask=real, other=0.0)
    activated = gate / (1.0 + tl.exp(-gate)) * up * share[None, :]
    place = turned_place(column) if HIDDEN_TURNED else column
    places = hidden + slots[:, None].to(tl.int64) * EXPERT_WIDTH + place[None, :]
    tl.store(places, tl.trans(activated).to(hidden.dtype.element_ty), mask=real[:, None] & column_ok[None, :])


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["num_tiles", "first", "num_experts", "top_k", "stride"],
    do_not_specialize_on_alignment=["choices", "tile_experts"],
)
def _down_kernel(  # type: ignore[no-untyped-def]
    hidden,
    values,
    scales,
    choices,
    tile_experts,
    outputs,
    num_tiles,
    first,
    num_experts,
    top_k,
    stride,
    IN_PLACE: tl.constexpr,
    WIDTH: tl.constexpr,
    EXPERT_WIDTH: tl.constexpr,
    TURN: tl.constexpr,
    FORMAT: tl.constexpr,
    OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
    EVEN: tl.constexpr,
    HELD: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """outputs [A, D] = hidden times the expert's second weight, one tile of slots and one block of D."""
    follow_alone()
    tile, block = _own_tile(num_tiles, tl.cdiv(WIDTH, BLOCK_N), GROUP)
    expert, slots, choice = _slots(
        choices, tile_experts, tile, num_tiles, first, num_experts, top_k, stride, IN_PLACE, BLOCK_M
    )
    if expert < 0:
        return
    slots = slots.to(tl.int64)
    real = choice >= 0
    column = block * BLOCK_N + tl.arange(0, BLOCK_N)
    column_ok = column < WIDTH
    section, start = expert.to(tl.int64), block * BLOCK_N
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    starts = hidden + slots * EXPERT_WIDTH
    LAST: tl.constexpr = (EXPERT_WIDTH - 1) // BLOCK_K * BLOCK_K
    held = input_tile(starts, real, 0, EXPERT_WIDTH, TURN, EVEN, BLOCK_K)
    for k in range(0, EXPERT_WIDTH, BLOCK_K):
        if HELD:
            part = tl.trans(held).to(OPERAND)
            held = input_tile(starts, real, tl.minimum(k + BLOCK_K, LAST), EXPERT_WIDTH, TURN, EVEN, BLOCK_K)
        else:
            part = tl.trans(input_tile(starts, real, k, EXPERT_WIDTH, TURN, EVEN, BLOCK_K)).to(OPERAND)
        weight_part = weight_tile(
            values, scales, section, start, k, WIDTH, EXPERT_WIDTH, FORMAT, OPERAND, BLOCK_N, BLOCK_K, EVEN
        )
        total = tl.dot(weight_part, part, total, input_precision=PRECISION)
    places = outputs + slots[:, None] * WIDTH + column[None, :]
    tl.store(places, tl.trans(total).to(outputs.dtype.element_ty), mask=real[:, None] & column_ok[None, :])


@triton.jit(  # type: ignore[untyped-decorator]
    debug=True,
    do_not_specialize=["index", "spins", "split", "num_stay", "rank", "stride", "top_k", "first", "num_experts"],
    do_not_specialize_on_alignment=["places"],
)
def _combine(  # type: ignore[no-untyped-def]
    outputs,
    places,
    total,
    received,
    theirs,
    ours,
    step_number,
    index,
    spins,
    split,
    num_stay,
    rank,
    stride,
    top_k,
    first,
    num_experts,
    WIDTH,
    PARTS: tl.constexpr,
    IN_PLACE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """total [R, D] float32: a row's outputs, ascending by expert, which is the order of its choices.

    PARTS: of rows before `split`, rank 0's, and those behind it, the peer's go to it; then what it has summed for this
    rank's row at the same place is waited for. Rows of this rank that the peer has none beside wait themselves.
    """
    follow()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    column_ok = column < WIDTH
    sum_ = tl.zeros((BLOCK,), tl.float32)
    for choice in range(top_k):
        place = tl.load(places + row * stride + choice).to(tl.int64)
        if IN_PLACE:
            place = tl.where((place >= first) & (place < first + num_experts), row * top_k + choice, -1)
        width = tl.where(place >= 0, WIDTH, 0)  # another shard's choice has no columns here
        served = tl.load(outputs + place * WIDTH + column, mask=column < width, other=0.0)
        sum_ += served.to(tl.float32)
    if PARTS:
        number = tl.load(step_number) + index
        own = tl.where(row < split, row, row - split)
        goes = (row < split) == (rank == 1)
        post(theirs + own * WIDTH + column, sum_, number, column < tl.where(goes, WIDTH, 0))
        tl.store(total + own * WIDTH + column, sum_, mask=column < tl.where(goes, 0, WIDTH))
        is_awaited = (own < num_stay) & (goes | (own >= tl.num_programs(0) - num_stay))
        comes = column < tl.where(is_awaited, WIDTH, 0)
        tl.store(received + own * WIDTH + column, take(ours + own * WIDTH + column, number, comes, spins), mask=comes)
    else:
        tl.store(total + row * WIDTH + column, sum_, mask=column_ok)
