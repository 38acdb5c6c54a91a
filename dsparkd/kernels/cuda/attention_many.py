"""Attention of many tokens of wide heads over plain keys, one after the other in a program: Gluon form, for cuda.

What attention's general kernel does, with layouts and waits that Triton does not choose so: the logits' product is
shared by the two warp groups, where Triton has each compute all of it; and while a tile is computed the next one's keys
are under way, be it this token's or the next one's. Products, tiles and their order are the same, and so are the bits.
Not interpreted: without a device the general kernel serves in its place.

Letters: n tokens, H heads, d head width, W window, E entries a row has at most, K keys of a tile, r rotary width.
"""

from __future__ import annotations

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from dsparkd.kernels.cuda.attention_tile import SUMS, Keys, Tile
from dsparkd.kernels.cuda.launch import EARLY, follow_alone
from dsparkd.kernels.rotary import Rotation
from dsparkd.kernels.tiles import count_tiles

# Two names of Triton 3.6 are others in 3.9.
async_load = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
barrier = getattr(gl, "barrier", None) or gl.thread_barrier


def attend_many(
    queries: Tensor, keys: Keys, sink: Tensor, inverse: Rotation, output: Tensor, tile: Tile, num_programs: int
) -> None:
    """See AttentionKernel.attend. Wide heads, entries of one part. num_programs: that the device runs at once."""
    n, H, d = queries.shape
    blocks = count_tiles(H, tile.heads)
    _attend_wide[(max(1, min(n, num_programs // blocks)), blocks)](
        queries,
        n,
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
        sink,
        inverse.cos,
        inverse.sin,
        output,
        H=H,
        D=d,
        R=inverse.cos.shape[-1],
        BLOCK_H=tile.heads,
        BLOCK_K=tile.keys,
        SUMS=SUMS,
        num_warps=8,
        launch_pdl=EARLY,
    )


@gluon.jit
def _seen(t, n, first, counts, rows, E, by_rows):  # type: ignore[no-untyped-def]
    """What token t sees, or the last one in place of any behind it: the first key of its window, how many entries, and
    its row of slots."""
    t = gl.minimum(t, n - 1)
    row = gl.where(by_rows != 0, gl.load(rows + gl.where(by_rows != 0, t, 0)).to(gl.int32), t)
    return gl.load(first + t).to(gl.int32), gl.minimum(gl.load(counts + t).to(gl.int32), E), row


@gluon.jit  # type: ignore[untyped-decorator]
def _first_tile(hidden, count, window_tiles, BLOCK_K: gl.constexpr):  # type: ignore[no-untyped-def]
    """The first with a key that is seen; for a token that sees none the window's last, so that each has a tile."""
    return gl.minimum(hidden // BLOCK_K, gl.where(count > 0, window_tiles, window_tiles - 1))


@gluon.jit  # type: ignore[untyped-decorator]
def _places(  # type: ignore[no-untyped-def]
    t, i, hidden, count, row, window_tiles, k, n, ring, chunk, sources, W, entries, slots, slot_stride,
    BLOCK_K: gl.constexpr, D: gl.constexpr,
):  # fmt: skip
    """Where the keys k [K] of token t's tile i lie. In place of a hidden one lies one that is not, if there is one."""
    in_window = i < window_tiles
    own_sources = sources + gl.minimum(t, n - 1).to(gl.int64) * W
    in_sources = own_sources + gl.minimum(gl.maximum(i * BLOCK_K + k, hidden), W - 1)
    own_slots = slots + row.to(gl.int64) * slot_stride
    in_slots = own_slots + gl.maximum(gl.minimum((i - window_tiles) * BLOCK_K + k, count - 1), 0)
    source = gl.load(gl.where(in_window, in_sources, in_slots))
    place = gl.where(source >= 0, ring + source * D, chunk + (-1 - source) * D)
    return gl.multiple_of(gl.where(in_window, place, entries + source * D), 16)  # bytes: what one thread copies at once


@gluon.jit  # type: ignore[untyped-decorator]
def _store_mixed(  # type: ignore[no-untyped-def]
    mixed, denominator, sees, t, first_head, cos, sin, output, H: gl.constexpr, D: gl.constexpr, R: gl.constexpr,
):  # fmt: skip
    """Divide, rotate back and store mixed [heads, d] of token t; zeros if it sees no key, whatever lay in its tile."""
    BLOCK_H: gl.constexpr = mixed.shape[0]
    mixed = gl.where(sees, mixed / denominator[:, None], 0.0)
    even, odd = gl.split(gl.reshape(mixed, [BLOCK_H, D // 2, 2]))
    HALF: gl.constexpr = even.type.layout
    pair = 2 * gl.arange(0, D // 2, gl.SliceLayout(0, HALF))
    turned = pair >= D - R
    at = t.to(gl.int64) * R + pair - (D - R)
    x = gl.load(cos + at, mask=turned, other=1.0)[None, :]
    y = gl.load(sin + at + 1, mask=turned, other=0.0)[None, :]  # the odd one has the plain sign
    turned_pairs = gl.join(gl.fma(even, x, -(odd * y)), gl.fma(odd, x, even * y))  # as attention_tile.turn_pairs
    mixed = gl.reshape(turned_pairs, [BLOCK_H, D]).to(gl.bfloat16)
    WHOLE: gl.constexpr = mixed.type.layout
    h = first_head + gl.arange(0, BLOCK_H, gl.SliceLayout(1, WHOLE))
    c = gl.arange(0, D, gl.SliceLayout(0, WHOLE))
    gl.store(output + t.to(gl.int64) * (H * D) + (h * D)[:, None] + c[None, :], mixed, mask=(h < H)[:, None])


@gluon.jit(do_not_specialize=["n", "W", "slot_stride", "E", "by_rows"])  # type: ignore[untyped-decorator]
def _attend_wide(  # type: ignore[no-untyped-def]
    queries,  # [n, H, d]
    n,
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
    sink,  # [H]
    cos,  # [n, 1, r]
    sin,  # [n, 1, r]
    output,  # [n, H, d]
    H: gl.constexpr,
    D: gl.constexpr,
    R: gl.constexpr,
    BLOCK_H: gl.constexpr,
    BLOCK_K: gl.constexpr,
    SUMS: gl.constexpr,
):
    LOAD: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [8, 1], [1, 0])
    LOADED_ROW: gl.constexpr = gl.SliceLayout(1, LOAD)
    LOGITS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, BLOCK_K // 2, 16])
    TOTAL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, SUMS // 2, 16])
    MIXED: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, D // 2, 16])
    ONES: gl.constexpr = gl.BlockedLayout([1, 2], [4, 8], [8, 1], [1, 0])
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16)
    follow_alone()
    stride = gl.num_programs(0)
    window_tiles = (W + BLOCK_K - 1) // BLOCK_K
    first_head = gl.program_id(1) * BLOCK_H
    q = gl.allocate_shared_memory(gl.bfloat16, [BLOCK_H, D], SHARED)
    keys = gl.allocate_shared_memory(gl.bfloat16, [2, BLOCK_K, D], SHARED)
    ones = gl.allocate_shared_memory(
        gl.bfloat16, [BLOCK_K, SUMS], gl.NVMMASharedLayout(32, 16), gl.full([BLOCK_K, SUMS], 1.0, gl.bfloat16, ONES)
    )
    hopper.fence_async_shared()
    c = gl.arange(0, D, gl.SliceLayout(0, LOAD))
    k = gl.arange(0, BLOCK_K, LOADED_ROW)
    loaded_h = first_head + gl.arange(0, BLOCK_H, LOADED_ROW)
    of_token = (loaded_h * D)[:, None] + c[None, :]
    h = first_head + gl.arange(0, BLOCK_H, gl.SliceLayout(1, LOGITS))
    column = gl.arange(0, BLOCK_K, gl.SliceLayout(0, LOGITS))
    sinks = gl.load(sink + h, mask=h < H, other=0.0)
    zeros = gl.zeros([BLOCK_H, BLOCK_K], gl.float32, LOGITS)

    # Token t's tile i is computed, while token u's tile j, the next one, comes, and the places of v's tile m are
    # loaded. What a token sees is loaded a tile before its first places.
    t = gl.program_id(0)
    hidden, count, row = _seen(t, n, first, counts, rows, E, by_rows)
    i = _first_tile(hidden, count, window_tiles, BLOCK_K)
    place = _places(
        t, i, hidden, count, row, window_tiles, k, n, ring, chunk, sources, W, entries, slots, slot_stride, BLOCK_K, D
    )
    async_load(q, queries + t.to(gl.int64) * (H * D) + of_token, mask=(loaded_h < H)[:, None])
    async_load(keys.index(0), place[:, None] + c[None, :])
    async_copy.commit_group()
    new_hidden, new_count, new_row = _seen(t + stride, n, first, counts, rows, E, by_rows)
    is_last = i + 1 >= window_tiles + (count + BLOCK_K - 1) // BLOCK_K
    u = gl.where(is_last, t + stride, t)
    j = gl.where(is_last, _first_tile(new_hidden, new_count, window_tiles, BLOCK_K), i + 1)
    u_hidden = gl.where(is_last, new_hidden, hidden)
    u_count = gl.where(is_last, new_count, count)
    u_row = gl.where(is_last, new_row, row)
    place = _places(
        u, j, u_hidden, u_count, u_row, window_tiles, k, n, ring, chunk, sources, W, entries, slots, slot_stride,
        BLOCK_K, D,
    )  # fmt: skip
    new_hidden, new_count, new_row = _seen(u + stride, n, first, counts, rows, E, by_rows)

    # The sink is a key of no value: it starts the maximum, and the denominator with e^0.
    top = sinks
    total = gl.full([BLOCK_H, SUMS], 1.0, gl.float32, TOTAL)
    mixed = gl.zeros([BLOCK_H, D], gl.float32, MIXED)
    turn = 0
    while t < n:
        tile = keys.index(turn)
        turn = 1 - turn
        async_copy.wait_group(0)
        barrier()  # all have their share of this tile, and are done with the last one
        # Up to the wait for the product there is no branch: one would have it waited for at once.
        product = hopper.warpgroup_mma(q, tile.permute((1, 0)), zeros, use_acc=False, is_async=True)
        async_load(keys.index(turn), place[:, None] + c[None, :], mask=(k < gl.where(u < n, BLOCK_K, 0))[:, None])
        is_last = j + 1 >= window_tiles + (u_count + BLOCK_K - 1) // BLOCK_K
        v = gl.where(is_last, u + stride, u)
        m = gl.where(is_last, _first_tile(new_hidden, new_count, window_tiles, BLOCK_K), j + 1)
        v_hidden = gl.where(is_last, new_hidden, u_hidden)
        v_count = gl.where(is_last, new_count, u_count)
        v_row = gl.where(is_last, new_row, u_row)
        place = _places(
            v, m, v_hidden, v_count, v_row, window_tiles, k, n, ring, chunk, sources, W, entries, slots, slot_stride,
            BLOCK_K, D,
        )  # fmt: skip
        new_hidden, new_count, new_row = _seen(v + stride, n, first, counts, rows, E, by_rows)
        logits = hopper.warpgroup_mma_wait(0, deps=[product])
        in_window = i < window_tiles
        seen_k = gl.where(in_window, i, i - window_tiles) * BLOCK_K + column
        live = (seen_k >= gl.where(in_window, hidden, 0)) & (seen_k < gl.where(in_window, W, count))
        logits = gl.where(live[None, :], logits, float("-inf"))
        new_top = gl.maximum(top, gl.max(logits, 1))
        barrier()  # all are done with the queries
        if (u != t) & (u < n):  # a branch: what a mask leaves out is filled with zeros
            async_load(q, queries + u.to(gl.int64) * (H * D) + of_token, mask=(loaded_h < H)[:, None])
        async_copy.commit_group()
        shares = gl.exp(logits - new_top[:, None]).to(gl.bfloat16)
        shrink = gl.exp(top - new_top)
        top = new_top
        total = total * gl.convert_layout(shrink, gl.SliceLayout(1, TOTAL))[:, None]
        mixed = mixed * gl.convert_layout(shrink, gl.SliceLayout(1, MIXED))[:, None]
        shares = gl.convert_layout(shares, gl.DotOperandLayout(0, MIXED, 2))
        counted = gl.convert_layout(shares, gl.DotOperandLayout(0, TOTAL, 2))
        total_product = hopper.warpgroup_mma(counted, ones, total, is_async=True)
        mixed_product = hopper.warpgroup_mma(shares, tile, mixed, is_async=True)
        total, mixed = hopper.warpgroup_mma_wait(0, deps=[total_product, mixed_product])
        if u != t:
            denominator = gl.convert_layout(gl.max(total, 1), gl.SliceLayout(1, MIXED))
            _store_mixed(mixed, denominator, (hidden < W) | (count > 0), t, first_head, cos, sin, output, H, D, R)
            top = sinks
            total = gl.full([BLOCK_H, SUMS], 1.0, gl.float32, TOTAL)
            mixed = gl.zeros([BLOCK_H, D], gl.float32, MIXED)
        t, i, hidden, count = u, j, u_hidden, u_count
        u, j, u_hidden, u_count, u_row = v, m, v_hidden, v_count, v_row
