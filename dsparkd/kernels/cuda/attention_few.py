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

from dsparkd.kernels.cuda.attention_tile import SUMS, Keys, Tile, entry_keys, logits_of, rotate_pairs, take, window_keys
from dsparkd.kernels.cuda.launch import EARLY, follow
from dsparkd.kernels.cuda.products import operand, precision
from dsparkd.kernels.rotary import Rotation
from dsparkd.kernels.tiles import count_tiles

FEW_TOKENS = 32
KEYS, KEY_WARPS = 32, 4  # of a program of the first launch
COLUMNS, WARPS = 128, 8  # and of the second
FEWER_TOKENS, FEWER_COLUMNS = 6, 64  # so few leave processors idle even then


def attend_few(queries: Tensor, keys: Keys, sink: Tensor, inverse: Rotation, output: Tensor, tile: Tile) -> None:
    """See AttentionKernel.attend. Wide heads, entries of one part. Takes n * K * (4 * H + 2 * d) bytes in between."""
    n, H, d = queries.shape
    window_room = count_tiles(keys.window, tile.keys) * tile.keys
    room = window_room + count_tiles(keys.most, tile.keys) * tile.keys
    laid = queries.new_empty((n, room, d))
    logits = sink.new_empty((n, H, room))
    num_blocks, rotary = count_tiles(H, tile.heads), inverse.cos.shape[-1]
    few = min(KEYS, tile.keys)
    _lay_keys[(n, room // few, num_blocks)](
        queries,
        keys.ring,
        keys.ring_tails,
        keys.chunk,
        keys.sources,
        keys.first,
        keys.window,
        keys.entries,
        keys.entry_tails,
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
        R=rotary,
        B=keys.packed_bytes,
        SCALES=keys.scales,
        BLOCK_H=tile.heads,
        BLOCK_D=tile.width,
        BLOCK_K=tile.keys,
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
        num_stages=3,
        launch_pdl=EARLY,
    )


@triton.jit(do_not_specialize=["W", "slot_stride", "E", "by_rows"])  # type: ignore[untyped-decorator]
def _lay_keys(  # type: ignore[no-untyped-def]
    queries,  # [n, H, d]
    ring,  # [*, d], or packed [*, B]
    ring_tails,  # the same memory as bfloat16, where packed
    chunk,  # [*, d]
    sources,  # [n, W]
    first,  # [n]
    W,
    entries,  # [*, d], or packed [*, B]
    entry_tails,
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
    R: tl.constexpr,
    B: tl.constexpr,
    SCALES: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_K: tl.constexpr,
    FEW: tl.constexpr,
    OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
):
    follow()
    t = tl.program_id(0).to(tl.int64)
    start = tl.program_id(1) * FEW
    count = tl.minimum(tl.load(counts + t).to(tl.int32), E)
    hidden = tl.load(first + t).to(tl.int32)
    # Whole tiles, as the second launch reads them; of tiles that no key of is seen none.
    begin = hidden // BLOCK_K * BLOCK_K
    if (start < begin) & (start < window_room):
        return
    if start >= window_room + (count + BLOCK_K - 1) // BLOCK_K * BLOCK_K:
        return
    h = tl.program_id(2) * BLOCK_H + tl.arange(0, BLOCK_H)
    c = tl.arange(0, BLOCK_D)
    own = (t * H + h)[:, None] * D + c[None, :]
    q = tl.load(queries + own, mask=(h < H)[:, None] & (c < D)[None, :], other=0.0).to(OPERAND)
    place = start + tl.arange(0, FEW)
    if start < window_room:
        keys = window_keys(
            ring, ring_tails, chunk, sources + t * W, place, hidden, W, D, R, B, SCALES, BLOCK_D, OPERAND
        )  # fmt: skip
        live = (place >= hidden) & (place < W)
    else:
        own_slots = slots + t * slot_stride
        if by_rows:
            own_slots = slots + tl.load(rows + t) * slot_stride
        k = place - window_room
        keys = entry_keys(entries, entry_tails, own_slots, k, count, D, R, B, SCALES, BLOCK_D, OPERAND)
        live = k < count
    if tl.program_id(2) == 0:
        own_place = (t * room + place)[:, None] * D + c[None, :]
        tl.store(laid + own_place, keys.to(laid.dtype.element_ty), mask=(c < D)[None, :])
    own_logits = (t * H + h)[:, None] * room + place[None, :]
    tl.store(logits + own_logits, logits_of(q, keys, live, PRECISION), mask=(h < H)[:, None])


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
    follow()
    t = tl.program_id(0).to(tl.int64)
    first_column = tl.program_id(1) * BLOCK_C
    count = tl.minimum(tl.load(counts + t).to(tl.int32), E)
    begin = tl.minimum(tl.load(first + t).to(tl.int32) // BLOCK_K * BLOCK_K, window_room)
    h = tl.program_id(2) * BLOCK_H + tl.arange(0, BLOCK_H)
    c = first_column + tl.arange(0, BLOCK_C)
    top = tl.load(sink + h, mask=h < H, other=0.0)
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
    mixed = rotate_pairs(mixed, cos, sin, t, D, R, BLOCK_H, BLOCK_C, first_column)
    own = (t * H + h)[:, None] * D + c[None, :]
    tl.store(output + own, mixed.to(output.dtype.element_ty), mask=(h < H)[:, None] & (c < D)[None, :])
