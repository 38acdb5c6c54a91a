"""Attention of few tokens, which one program each would leave to a few processors: Triton form, for cuda.

Two launches. The first one's programs take a few keys each: they lay them down in a token's order, and their logits for
all heads. The second one's take a few columns of the heads each, and walk through all tiles. Bits are those of one
program for a token: logits and columns do not depend on which others a program has.

Letters: n tokens, H heads, d head width, W window, E entries a row has at most, K keys of a token, r rotary width.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from dsparkd.kernels.cuda.attention_tile import (
    SUMS,
    Keys,
    Tile,
    settled_angles,
    take,
    turn_pairs,
)
from dsparkd.kernels.cuda.launch import EARLY, IS_COMPILED, constant, follow, settled
from dsparkd.kernels.cuda.products import operand, precision
from dsparkd.kernels.rotary import Rotation
from dsparkd.kernels.tiles import count_tiles

FEW_TOKENS = 32
KEYS, KEY_WARPS = 32, 4  # of a program of the first launch
KEY_COLUMNS = 128  # that it multiplies at once; the interpreter all, as it adds in another order than the matrix unit
COLUMNS, WARPS, STAGES = 128, 8, 3  # and of the second
FEWER_TOKENS, FEWER_COLUMNS = 6, 64  # so few leave processors idle even then


def attend_few(queries: Tensor, keys: Keys, sink: Tensor, inverse: Rotation, output: Tensor, tile: Tile) -> None:
    """See AttentionKernel.attend. Wide heads, plain keys, entries of one part.

    Takes n * K * (4 * H + 2 * d) bytes in between.
    """
    n, H, d = queries.shape
    window_room = count_tiles(keys.window, tile.keys) * tile.keys
    room = window_room + count_tiles(keys.most, tile.keys) * tile.keys
    laid = queries.new_empty((n, room, d))
    logits = sink.new_empty((n, H, room))
    num_blocks, rotary = count_tiles(H, tile.heads), inverse.cos.shape[-1]
    few = min(KEYS, tile.keys)
    # All of a row at once; or one part less, so that two programs find room on a processor.
    parts = d // KEY_COLUMNS + (n <= FEWER_TOKENS)
    _lay_keys[(n, room // few, num_blocks)](
        queries,
        keys.ring,
        keys.chunk,
        keys.sources,
        keys.first,
        keys.window,
        keys.entries,
        keys.slots,
        keys.slot_stride,
        keys.rows,
        keys.counts,
        keys.most,
        keys.by_rows,
        laid,
        logits,
        room,
        window_room,
        H,
        D=d,
        BLOCK_H=tile.heads,
        BLOCK_K=tile.keys,
        BLOCK_C=KEY_COLUMNS if IS_COMPILED else d,
        KEY_STAGES=max(2, parts),
        FEW=few,
        OPERAND=operand(queries),
        PRECISION=precision(queries),
        num_warps=KEY_WARPS,
        launch_pdl=EARLY,
    )
    columns = min(FEWER_COLUMNS if n <= FEWER_TOKENS else COLUMNS, tile.width)
    _mix_columns[(n, count_tiles(d, columns), num_blocks)](
        laid,
        logits,
        room,
        window_room,
        keys.first,
        keys.counts,
        keys.most,
        sink,
        inverse.cos,
        inverse.sin,
        output,
        H,
        D=d,
        R=rotary,
        BLOCK_H=tile.heads,
        BLOCK_C=columns,
        BLOCK_K=tile.keys,
        OPERAND=operand(queries),
        PRECISION=precision(queries),
        num_warps=WARPS,
        num_stages=STAGES,
        launch_pdl=EARLY,
    )


@triton.jit(do_not_specialize=["W", "slot_stride", "E", "by_rows"])  # type: ignore[untyped-decorator]
def _lay_keys(  # type: ignore[no-untyped-def]
    queries,  # [n, H, d]
    ring,  # [*, d]
    chunk,  # [*, d]
    sources,  # [n, W]
    first,  # [n]
    W,
    entries,  # [*, d]
    slots,  # rows of E, slot_stride apart
    slot_stride,
    rows,  # [n]
    counts,  # [n]
    E,
    by_rows,
    laid,  # [n, K, d]
    logits,  # [n, H, K] float32
    room,  # K
    window_room,  # of K
    H,
    D: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_C: tl.constexpr,
    KEY_STAGES: tl.constexpr,
    FEW: tl.constexpr,
    OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
):
    t = tl.program_id(0).to(tl.int64)
    start = tl.program_id(1) * FEW
    place = start + tl.arange(0, FEW)
    k = place - window_room
    in_window = start < window_room
    hidden = settled(first + t, True).to(tl.int32)
    count = tl.minimum(settled(counts + t, True).to(tl.int32), E)
    index = tl.zeros([FEW], tl.int64)  # a window key's source, an entry's slot
    if in_window:
        index = settled(sources + t * W + tl.minimum(tl.maximum(place, hidden), W - 1), place >= 0)
    elif by_rows:
        index = settled(slots + settled(rows + t, True) * slot_stride + tl.minimum(k, count - 1), k < count)
    follow()
    if (start >= window_room) & (by_rows == 0):  # the launch before may have chosen them
        index = tl.load(slots + t * slot_stride + tl.minimum(k, count - 1), mask=k < count, other=0)
    # Whole tiles, as the second launch reads them; of tiles that no key of is seen none.
    begin = tl.where(in_window, hidden // BLOCK_K * BLOCK_K, 0)
    end = tl.where(in_window, window_room, window_room + (count + BLOCK_K - 1) // BLOCK_K * BLOCK_K)
    if (start < begin) | (start >= end):
        return
    ringed = tl.where(index >= 0, ring + index * D, chunk + (-1 - index) * D)
    row = tl.multiple_of(tl.where(in_window, ringed, entries + index * D), 16)
    live = tl.where(in_window, (place >= hidden) & (place < W), k < count)
    h = tl.program_id(2) * BLOCK_H + tl.arange(0, BLOCK_H)
    products = tl.zeros([BLOCK_H, FEW], tl.float32)
    # All loads are under way at once: these, and those of the product by its stages, which take no registers.
    every = tl.arange(0, D)
    keys = tl.load(row[:, None] + every[None, :])
    for column in tl.range(0, D, BLOCK_C, num_stages=KEY_STAGES):
        c = column + tl.arange(0, BLOCK_C)
        part = tl.load(row[:, None] + c[None, :])
        q = tl.load(queries + (t * H + h)[:, None] * D + c[None, :], mask=(h < H)[:, None], other=0.0)
        products = tl.dot(q.to(OPERAND), tl.trans(part.to(OPERAND)), products, input_precision=PRECISION)
    if tl.program_id(2) == 0:
        tl.store(laid + (t * room + place)[:, None] * D + every[None, :], keys)
    own_logits = (t * H + h)[:, None] * room + place[None, :]
    tl.store(logits + own_logits, tl.where(live[None, :], products, float("-inf")), mask=(h < H)[:, None])


@triton.jit(do_not_specialize=["E"])  # type: ignore[untyped-decorator]
def _mix_columns(  # type: ignore[no-untyped-def]
    laid,  # [n, K, d]
    logits,  # [n, H, K] float32
    room,  # K
    window_room,  # of K
    first,  # [n]
    counts,  # [n]
    E,
    sink,  # [H]
    cos,  # [n, 1, r]
    sin,  # [n, 1, r]
    output,  # [n, H, d]
    H,
    D: tl.constexpr,
    R: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_K: tl.constexpr,
    OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
):
    t = tl.program_id(0).to(tl.int64)
    first_column = tl.program_id(1) * BLOCK_C
    h = tl.program_id(2) * BLOCK_H + tl.arange(0, BLOCK_H)
    # The launch before writes keys and logits alone.
    top = constant(sink + h, h < H)
    count = tl.minimum(settled(counts + t, True).to(tl.int32), E)
    begin = tl.minimum(settled(first + t, True).to(tl.int32) // BLOCK_K * BLOCK_K, window_room)
    pair_cos, pair_sin = settled_angles(cos, sin, t, D, R, BLOCK_C, first_column)
    follow()
    c = first_column + tl.arange(0, BLOCK_C)
    total = tl.full([BLOCK_H, SUMS], 1.0, tl.float32)
    mixed = tl.zeros([BLOCK_H, BLOCK_C], tl.float32)
    own_logits = logits + (t * H + h)[:, None] * room
    own_keys = laid + t * room * D + c[None, :]
    for start in range(begin, window_room + count, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        tile = tl.load(own_logits + k[None, :], mask=(h < H)[:, None], other=0.0)
        keys = tl.load(own_keys + k[:, None] * D, mask=(c < D)[None, :], other=0.0).to(OPERAND)
        top, total, mixed = take(tile, keys, top, total, mixed, OPERAND, PRECISION)
    mixed = mixed / tl.max(total, 1)[:, None]
    mixed = turn_pairs(mixed, pair_cos, pair_sin, BLOCK_H, BLOCK_C)
    own = (t * H + h)[:, None] * D + c[None, :]
    tl.store(output + own, mixed.to(output.dtype.element_ty), mask=(h < H)[:, None] & (c < D)[None, :])
