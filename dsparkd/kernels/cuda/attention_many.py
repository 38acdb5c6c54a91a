"""Attention of many tokens of wide heads over plain keys, one program each: Gluon form, for cuda.

What attention's general kernel does, with layouts and waits that Triton does not choose so: the logits' product is
shared by the two warp groups, where Triton has each compute all of it, and the next tile's keys are under way while
this one is computed. Products, tiles and their order are the same, and so are the bits. Not interpreted: without a
device the general kernel serves in its place.

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


def attend_many(queries: Tensor, keys: Keys, sink: Tensor, inverse: Rotation, output: Tensor, tile: Tile) -> None:
    """See AttentionKernel.attend. Wide heads, entries of one part."""
    n, H, d = queries.shape
    _attend_wide[(n, count_tiles(H, tile.heads))](
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
        sink,
        inverse.cos,
        inverse.sin,
        output,
        H,
        D=d,
        R=inverse.cos.shape[-1],
        BLOCK_H=tile.heads,
        BLOCK_K=tile.keys,
        SUMS=SUMS,
        num_warps=8,
        launch_pdl=EARLY,
    )


@gluon.jit  # type: ignore[untyped-decorator]
def _rows_of(  # type: ignore[no-untyped-def]
    i, window_tiles, ring, chunk, sources, hidden, W, entries, slots, count, k, BLOCK_K: gl.constexpr, D: gl.constexpr
):
    """Where the keys k [K] of tile i lie. In place of a hidden one lies one that is not."""
    in_window = i < window_tiles
    in_sources = sources + gl.minimum(gl.maximum(i * BLOCK_K + k, hidden), W - 1)
    in_slots = slots + gl.maximum(gl.minimum((i - window_tiles) * BLOCK_K + k, count - 1), 0)
    source = gl.load(gl.where(in_window, in_sources, in_slots))
    row = gl.where(source >= 0, ring + source * D, chunk + (-1 - source) * D)
    return gl.multiple_of(gl.where(in_window, row, entries + source * D), 16)  # bytes: what one thread copies at once


@gluon.jit(do_not_specialize=["W", "slot_stride", "E", "by_rows"])  # type: ignore[untyped-decorator]
def _attend_wide(  # type: ignore[no-untyped-def]
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
    sink,  # [H]
    cos,  # [n, 1, r]
    sin,  # [n, 1, r]
    output,  # [n, H, d]
    H,
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
    t = gl.program_id(0).to(gl.int64)
    count = gl.minimum(gl.load(counts + t).to(gl.int32), E)
    hidden = gl.load(first + t).to(gl.int32)
    own_slots = slots + t * slot_stride
    if by_rows:
        own_slots = slots + gl.load(rows + t) * slot_stride
    own_sources = sources + t * W
    window_tiles = (W + BLOCK_K - 1) // BLOCK_K
    begin = gl.minimum(hidden // BLOCK_K, window_tiles)
    end = window_tiles + (count + BLOCK_K - 1) // BLOCK_K

    q = gl.allocate_shared_memory(gl.bfloat16, [BLOCK_H, D], SHARED)
    keys = gl.allocate_shared_memory(gl.bfloat16, [2, BLOCK_K, D], SHARED)
    ones = gl.allocate_shared_memory(
        gl.bfloat16, [BLOCK_K, SUMS], gl.NVMMASharedLayout(32, 16), gl.full([BLOCK_K, SUMS], 1.0, gl.bfloat16, ONES)
    )
    hopper.fence_async_shared()
    c = gl.arange(0, D, gl.SliceLayout(0, LOAD))
    loaded_h = gl.program_id(1) * BLOCK_H + gl.arange(0, BLOCK_H, LOADED_ROW)
    own = ((t * H + loaded_h) * D)[:, None] + c[None, :]
    loaded_k = gl.arange(0, BLOCK_K, LOADED_ROW)
    row = _rows_of(
        begin, window_tiles, ring, chunk, own_sources, hidden, W, entries, own_slots, count, loaded_k, BLOCK_K, D
    )
    async_load(q, queries + own, mask=(loaded_h < H)[:, None])
    some = (loaded_k < (end - begin) * BLOCK_K)[:, None]
    async_load(keys.index(0), row[:, None] + c[None, :], mask=some)
    async_copy.commit_group()
    row = _rows_of(
        begin + 1, window_tiles, ring, chunk, own_sources, hidden, W, entries, own_slots, count, loaded_k, BLOCK_K, D
    )

    h = gl.program_id(1) * BLOCK_H + gl.arange(0, BLOCK_H, gl.SliceLayout(1, LOGITS))
    column = gl.arange(0, BLOCK_K, gl.SliceLayout(0, LOGITS))
    # The sink is a key of no value: it starts the maximum, and the denominator with e^0.
    top = gl.load(sink + h, mask=h < H, other=0.0)
    zeros = gl.zeros([BLOCK_H, BLOCK_K], gl.float32, LOGITS)
    total = gl.full([BLOCK_H, SUMS], 1.0, gl.float32, TOTAL)
    mixed = gl.zeros([BLOCK_H, D], gl.float32, MIXED)
    for i in range(begin, end):
        tile = keys.index((i - begin) % 2)
        async_copy.wait_group(0)
        barrier()  # all have their share of this tile, and are done with the last one
        product = hopper.warpgroup_mma(q, tile.permute((1, 0)), zeros, use_acc=False, is_async=True)
        some = (loaded_k < (end - i - 1) * BLOCK_K)[:, None]
        async_load(
            keys.index((i + 1 - begin) % 2), row[:, None] + c[None, :], mask=some
        )  # fmt: skip
        async_copy.commit_group()
        # Behind the last tile places are loaded that nothing uses. Without a branch: one would have the products wait.
        row = _rows_of(
            i + 2, window_tiles, ring, chunk, own_sources, hidden, W, entries, own_slots, count, loaded_k, BLOCK_K, D
        )
        logits = hopper.warpgroup_mma_wait(0, deps=[product])
        in_window = i < window_tiles
        k = gl.where(in_window, i, i - window_tiles) * BLOCK_K + column
        live = (k >= gl.where(in_window, hidden, 0)) & (k < gl.where(in_window, W, count))
        logits = gl.where(live[None, :], logits, float("-inf"))
        new_top = gl.maximum(top, gl.max(logits, 1))
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

    async_copy.wait_group(0)  # of a token that sees nothing queries may be under way, to memory that is used again
    denominator = gl.convert_layout(gl.max(total, 1), gl.SliceLayout(1, MIXED))
    even, odd = gl.split(gl.reshape(mixed / denominator[:, None], [BLOCK_H, D // 2, 2]))
    HALF: gl.constexpr = even.type.layout
    pair = 2 * gl.arange(0, D // 2, gl.SliceLayout(0, HALF))
    turned = pair >= D - R
    at = t * R + pair - (D - R)
    x = gl.load(cos + at, mask=turned, other=1.0)[None, :]
    y = gl.load(sin + at + 1, mask=turned, other=0.0)[None, :]  # the odd one has the plain sign
    mixed = gl.reshape(gl.join(even * x - odd * y, odd * x + even * y), [BLOCK_H, D]).to(gl.bfloat16)
    gl.store(output + own, gl.convert_layout(mixed, LOAD), mask=(loaded_h < H)[:, None])
