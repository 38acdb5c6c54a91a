"""Attention over keys where they lie, and the norm and rotation before it: Triton form, for cuda.

Here one program reduces one part of a token's keys for a block of heads, tile by tile, each oldest first. The first
part is the window and the first PART entries, each further one the next PART entries; so a long context fills the
device. The last program of a token to arrive adds its parts, in their order. Parts and tiles follow from positions and
the geometry alone, so neither neighbours nor the batch's size change a token's bits. Keys are read by index out of
ring, chunk and pages. Tokens of one part and of wide heads have other ways, of the same bits: few of them that of
attention_few, many that of attention_many.

Letters: T tokens, n tokens of one call, H heads, d head width, W window, E entries a row has at most, P parts, r rotary
width.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsparkd.errors import InvariantError
from dsparkd.kernels.attention import EntryKeys, KeptKeys, TorchAttention, WindowKeys
from dsparkd.kernels.cuda.attention_few import FEW_TOKENS, attend_few
from dsparkd.kernels.cuda.attention_many import attend_many
from dsparkd.kernels.cuda.attention_tile import (
    SUMS,
    Keys,
    Tile,
    entry_keys,
    is_wide,
    keys_of,
    logits_of,
    rotate_pairs,
    settled_angles,
    take,
    turn_pairs,
    window_keys,
)
from dsparkd.kernels.cuda.compiling import ahead
from dsparkd.kernels.cuda.launch import EARLY, IS_COMPILED, constant, follow, follow_alone
from dsparkd.kernels.cuda.products import operand, precision
from dsparkd.kernels.indexer import Visible
from dsparkd.kernels.packed import is_packed
from dsparkd.kernels.rotary import Rotation
from dsparkd.kernels.tiles import KEY_TILE, count_tiles, power_of_two

HEAD_ROWS = 8  # vectors that one program norms and rotates
PART = 512  # entries of one part: as many as an indexer chooses, whose tokens have one part and need no sum
PART_BYTES = 256 << 20  # of parts' results that may lie in memory at once
ARRIVALS = 8192  # programs that may wait for each other's parts
SUM_COLUMNS = 64  # of a head, in which parts are added at once


class TritonAttention:
    """Form for cuda. Implements AttentionKernel.

    One call at a time: the counters of arrived parts are kept, and zero between calls.
    """

    def __init__(self) -> None:
        self._arrivals: Tensor | None = None
        self._processors = 0  # of the device, once it is known

    @ahead()
    def prepare(self, heads: int, width: int, rotary: int, like: Tensor, kept: Tensor | None = None) -> None:
        """See AttentionKernel. The first context of more than one part comes long after the first step."""
        sink, angles = (torch.zeros(shape, device=like.device) for shape in ((heads,), (FEW_TOKENS + 1, 1, rotary)))
        zeros = torch.zeros((FEW_TOKENS + 1) * 2 * PART, dtype=torch.int64, device=like.device)
        for n, count in ((1, PART), (FEW_TOKENS, PART), (FEW_TOKENS + 1, PART), (1, PART + 1)):
            queries, keys = like.new_zeros((n, heads, width)), like.new_zeros((n, width))
            rows = keys if kept is None else torch.zeros_like(kept[:1])
            window = WindowKeys(rows, keys, zeros[:n, None], zeros[:n], True)
            slots = zeros[: n * 2 * PART].view(n, -1)[:, : count_tiles(count, PART) * PART]
            entries = EntryKeys(rows, slots, zeros[:n] + count)
            self.attend(queries, window, entries, sink, Rotation(angles[:n], angles[:n]), torch.empty_like(queries))
        query, latent = like.new_zeros((1, heads * width)), like.new_zeros((1, 2 * width))[:, width:]
        norms, ring = like.new_zeros((heads + 1, width), dtype=torch.float32), like.new_zeros((1, width))
        for kept_keys in (None, KeptKeys(ring, zeros[:1])):
            self.heads(query, latent, norms, Rotation(angles[:1], angles[:1]), 1.0, kept_keys)

    def gather(self, ring: Tensor, chunk: Tensor, sources: Tensor) -> Tensor:
        """See AttentionKernel."""
        return TorchAttention().gather(ring, chunk, sources)

    def heads(
        self,
        query: Tensor,
        latent: Tensor,
        norms: Tensor,
        rotation: Rotation,
        eps: float,
        kept: KeptKeys | None = None,
    ) -> tuple[Tensor, Tensor]:
        """See AttentionKernel. The queries lie in query's own storage."""
        T, H, d = query.shape[0], norms.shape[0] - 1, norms.shape[1]
        queries, keys = query.view(T, H, d), query.new_empty((T, d))
        norm_and_rotate(query, latent, norms, rotation, eps, queries, keys, kept)
        return queries, keys

    def see(self, entries: Tensor, visible: Visible) -> EntryKeys:
        """See AttentionKernel."""
        seen = count_tiles(visible.most, KEY_TILE) * KEY_TILE  # a captured shape has slots for any context
        return EntryKeys(entries, visible.slots[:, :seen], visible.counts, visible.rows)

    def attend(
        self,
        queries: Tensor,
        window: WindowKeys,
        entries: EntryKeys | None,
        sink: Tensor,
        inverse: Rotation,
        output: Tensor,
    ) -> None:
        """See AttentionKernel."""
        n, H, d = queries.shape
        packed = is_packed(window.ring)
        tile = Tile(H, d, queries.dtype, packed)
        num_parts = 1 if entries is None else max(1, count_tiles(entries.slots.shape[1], PART))
        if num_parts == 1:
            keys = keys_of(window, entries, d, inverse.cos.shape[-1])
            wide = is_wide(queries.dtype, d, tile, packed)
            if wide and n <= FEW_TOKENS:
                attend_few(queries, keys, sink, inverse, output, tile)
            elif wide and IS_COMPILED:
                if not self._processors:
                    self._processors = torch.cuda.get_device_properties(queries.device).multi_processor_count
                attend_many(queries, keys, sink, inverse, output, tile, self._processors)
            else:
                _attend_parts(queries, keys, sink, inverse, output, tile, 1, sink)
            return
        if self._arrivals is None:
            self._arrivals = torch.zeros(ARRIVALS, dtype=torch.int32, device=queries.device)
        # Whole sixteens: Triton compiles anew for pointers that are aligned to less than that.
        most = ARRIVALS // count_tiles(H, 16)
        step = max(16, min(most, PART_BYTES // (4 * num_parts * H * (d + 2))) // 16 * 16)
        for start in range(0, n, step):
            few = slice(start, min(start + step, n))
            seen = WindowKeys(window.ring, window.chunk, window.sources[few], window.first[few], window.all_visible)
            assert entries is not None
            keys = keys_of(seen, _entries_of(entries, few), d, inverse.cos.shape[-1])
            _attend_parts(
                queries[few], keys, sink, inverse.rows(few), output[few], tile, num_parts, self._arrivals
            )  # fmt: skip


def _entries_of(entries: EntryKeys, few: slice) -> EntryKeys:
    """What some of the tokens see."""
    if entries.rows is None:
        return EntryKeys(entries.entries, entries.slots[few], entries.counts[few])
    return EntryKeys(entries.entries, entries.slots, entries.counts[few], entries.rows[few])


def _attend_parts(
    queries: Tensor,
    keys: Keys,
    sink: Tensor,
    inverse: Rotation,
    output: Tensor,
    tile: Tile,
    num_parts: int,
    arrivals: Tensor,
) -> None:
    """Attend with room for the results of num_parts parts a token; arrivals: zeros, and zeros again behind it."""
    n, H, d = queries.shape
    num_blocks = count_tiles(H, tile.heads)
    mixes = sums = sink  # not written where a token has one part
    if num_parts > 1:
        mixes, sums = sink.new_empty((n, num_parts, H, d)), sink.new_empty((n, num_parts, 2, H))
    # One compiled kernel serves all layer kinds, and a second one any number of parts above one, whose sum takes
    # registers from the rest.
    _attend[(n, num_blocks, num_parts)](
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
        sink,
        inverse.cos,
        inverse.sin,
        output,
        mixes,
        sums,
        arrivals,
        num_parts,
        H,
        MANY_PARTS=num_parts > 1,
        D=d,
        R=inverse.cos.shape[-1],
        B=keys.packed_bytes,
        SCALES=keys.scales,
        PART=PART,
        BLOCK_H=tile.heads,
        BLOCK_D=tile.width,
        BLOCK_K=tile.keys,
        BLOCK_C=min(SUM_COLUMNS, tile.width),
        OPERAND=operand(queries),
        PRECISION=precision(queries),
        num_warps=tile.warps,
        num_stages=tile.stages,
        launch_pdl=EARLY,
    )


def norm_and_rotate(
    query: Tensor,
    latent: Tensor,
    norms: Tensor,
    rotation: Rotation,
    eps: float,
    queries: Tensor,
    keys: Tensor,
    kept: KeptKeys | None = None,
) -> None:
    """Norm, weigh and rotate query [T, H * d] into queries [T, H, d], and latent [T, d], rows apart, into keys [T, d].

    kept: where keys are stored as well; a place behind its ring stops the device.
    norms [H + 1, d] float32, the latent's last. queries may be query itself: each vector is loaded whole before its
    first store. Raises InvariantError where they overlap in part.
    """
    T, H, d = queries.shape
    if not (query.is_contiguous() and queries.is_contiguous() and keys.is_contiguous() and latent.stride(1) == 1):
        raise InvariantError("norm and rotary of queries: a tensor is not contiguous")
    distance = abs(query.data_ptr() - queries.data_ptr())
    if 0 < distance < query.numel() * query.itemsize:
        raise InvariantError(f"norm and rotary of queries: input and output overlap, {distance} bytes apart")
    # Where nothing is kept, their pointers are not read.
    ring, dst = (keys, keys) if kept is None else (kept.ring, kept.dst)
    assert ring.is_contiguous()
    assert dst.shape[0] <= T
    _norm_and_rotate[(T, count_tiles(H + 1, HEAD_ROWS))](
        query,
        latent,
        latent.stride(0),
        norms,
        rotation.cos,
        rotation.sin,
        queries,
        keys,
        ring,
        dst,
        dst.shape[0],
        ring.shape[0],
        eps,
        KEPT=kept is not None,
        H=H,
        D=d,
        R=rotation.cos.shape[-1],
        BLOCK_H=HEAD_ROWS,
        BLOCK_D=power_of_two(d),
        num_warps=4,
        launch_pdl=EARLY,
        sanitize_overflow=False,
    )


@triton.jit(do_not_specialize=["W", "slot_stride", "E", "by_rows", "num_parts"])  # type: ignore[untyped-decorator]
def _attend(  # type: ignore[no-untyped-def]
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
    sink,  # [H]
    cos,  # [n, 1, r]
    sin,  # [n, 1, r]
    output,  # [n, H, d]
    mixes,  # [n, P, H, d] float32
    sums,  # [n, P, 2, H] float32: maximum and denominator
    arrivals,  # [n, blocks of heads]
    num_parts,
    H,
    MANY_PARTS: tl.constexpr,
    D: tl.constexpr,
    R: tl.constexpr,
    B: tl.constexpr,
    SCALES: tl.constexpr,
    PART: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_C: tl.constexpr,
    OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
):
    follow_alone()
    t = tl.program_id(0).to(tl.int64)
    count = tl.minimum(tl.load(counts + t).to(tl.int32), E)
    part = 0
    end = count
    if MANY_PARTS:
        part = tl.program_id(2)
        end = tl.minimum(count, (part + 1) * PART)
        if part * PART >= tl.maximum(count, 1):  # the first part has the window, whatever else
            return
    h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    c = tl.arange(0, BLOCK_D)
    own = (t * H + h)[:, None] * D + c[None, :]
    real = (h < H)[:, None] & (c < D)[None, :]
    q = tl.load(queries + own, mask=real, other=0.0).to(OPERAND)
    # The sink is a key of no value: it starts the first part's maximum, and its denominator with e^0.
    top = tl.load(sink + h, mask=h < H, other=0.0)
    total = tl.full([BLOCK_H, SUMS], 1.0, tl.float32)
    mixed = tl.zeros([BLOCK_H, BLOCK_D], tl.float32)
    hidden = tl.load(first + t).to(tl.int32)
    begin = hidden // BLOCK_K * BLOCK_K
    if MANY_PARTS:  # noqa: SIM102 - this one is decided when the kernel is compiled
        if part > 0:
            top = tl.full([BLOCK_H], float("-inf"), tl.float32)
            total = tl.zeros([BLOCK_H, SUMS], tl.float32)
            begin = W

    for start in range(begin, W, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        keys = window_keys(
            ring, ring_tails, chunk, sources + t * W, k, hidden, W, D, R, B, SCALES, BLOCK_D, OPERAND
        )  # fmt: skip
        logits = logits_of(q, keys, (k >= hidden) & (k < W), PRECISION)
        top, total, mixed = take(logits, keys, top, total, mixed, OPERAND, PRECISION)
    own_slots = slots + t * slot_stride
    if by_rows:
        own_slots = slots + tl.load(rows + t) * slot_stride
    for start in range(part * PART, end, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        keys = entry_keys(entries, entry_tails, own_slots, k, count, D, R, B, SCALES, BLOCK_D, OPERAND)
        logits = logits_of(q, keys, k < count, PRECISION)
        top, total, mixed = take(logits, keys, top, total, mixed, OPERAND, PRECISION)

    denominator = tl.max(total, 1)
    if MANY_PARTS:
        live_parts = (count + PART - 1) // PART
        if live_parts > 1:
            first_part = t * num_parts
            own_sums = sums + (first_part + part) * 2 * H
            tl.store(mixes + ((first_part + part) * H + h)[:, None] * D + c[None, :], mixed, mask=real)
            tl.store(own_sums + h, top, mask=h < H)
            tl.store(own_sums + H + h, denominator, mask=h < H)
            # Every thread's stores come before the arrival, and the last arrival before any load of others' parts.
            tl.debug_barrier()
            arrival = arrivals + t * tl.num_programs(1) + tl.program_id(1)
            if tl.atomic_add(arrival, 1, sem="acq_rel") == live_parts - 1:
                tl.store(arrival, 0)
                _add_parts(
                    mixes + first_part * H * D, sums + first_part * 2 * H, output, cos, sin, t, h, live_parts,
                    H, D, R, BLOCK_H, BLOCK_D, BLOCK_C,
                )  # fmt: skip
            return
    mixed = rotate_pairs(mixed / denominator[:, None], cos, sin, t, D, R, BLOCK_H, BLOCK_D)
    tl.store(output + own, mixed.to(output.dtype.element_ty), mask=real)


@triton.jit  # type: ignore[untyped-decorator]
def _add_parts(  # type: ignore[no-untyped-def]
    mixes, sums, output, cos, sin, t, h, live_parts,
    H, D: tl.constexpr, R: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Add the parts of token t in their order: mixes [P, H, d], sums [P, 2, H], heads h."""
    top = tl.full([BLOCK_H], float("-inf"), tl.float32)
    for part in range(live_parts):
        top = tl.maximum(top, tl.load(sums + part * 2 * H + h, mask=h < H, other=0.0, cache_modifier=".cg"))
    total = tl.zeros([BLOCK_H], tl.float32)
    for part in range(live_parts):
        own_top = tl.load(sums + part * 2 * H + h, mask=h < H, other=0.0, cache_modifier=".cg")
        own_total = tl.load(sums + part * 2 * H + H + h, mask=h < H, other=1.0, cache_modifier=".cg")
        total += own_total * tl.exp(own_top - top)
    for column in range(0, BLOCK_D, BLOCK_C):
        c = column + tl.arange(0, BLOCK_C)
        real = (h < H)[:, None] & (c < D)[None, :]
        mixed = tl.zeros([BLOCK_H, BLOCK_C], tl.float32)
        for part in range(live_parts):
            own_top = tl.load(sums + part * 2 * H + h, mask=h < H, other=0.0, cache_modifier=".cg")
            own = mixes + (part * H + h)[:, None].to(tl.int64) * D + c[None, :]
            share = tl.exp(own_top - top)[:, None]
            mixed += tl.load(own, mask=real, other=0.0, cache_modifier=".cg") * share
        mixed = rotate_pairs(mixed / total[:, None], cos, sin, t, D, R, BLOCK_H, BLOCK_C, column)
        tl.store(output + (t * H + h)[:, None] * D + c[None, :], mixed.to(output.dtype.element_ty), mask=real)


@triton.jit(debug=True, do_not_specialize=["num_stores", "num_kept"])  # type: ignore[untyped-decorator]
def _norm_and_rotate(  # type: ignore[no-untyped-def]
    query,  # [T, H, d]
    latent,  # [T, d], rows latent_stride apart
    latent_stride,
    norms,  # [H + 1, d]
    cos,  # [T, 1, r]
    sin,  # [T, 1, r]
    queries,  # [T, H, d]
    keys,  # [T, d]
    ring,  # [num_kept, d]
    dst,  # [num_stores] int64
    num_stores,
    num_kept,
    eps,
    KEPT: tl.constexpr,
    H: tl.constexpr,
    D: tl.constexpr,
    R: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    c = tl.arange(0, BLOCK_D)
    real = (h <= H)[:, None] & (c < D)[None, :]
    t = tl.program_id(0).to(tl.int64)
    weight = constant(norms + h[:, None] * D + c[None, :], real)
    pair_cos, pair_sin = settled_angles(cos, sin, t, D, R, BLOCK_D)
    follow()
    is_query = h < H
    source = tl.where(is_query, query + (t * H + h) * D, latent + t * latent_stride)
    target = tl.where(is_query, queries + (t * H + h) * D, keys + t * D)
    x = tl.load(source[:, None] + c[None, :], mask=real, other=0.0).to(tl.float32)
    # Squares are rounded before they are added, in either form of this kernel.
    inverse_rms = tl.rsqrt(tl.sum(tl.fma(x, x, tl.zeros_like(x)), 1) / D + eps)
    x = turn_pairs(x * inverse_rms[:, None] * weight, pair_cos, pair_sin, BLOCK_H, BLOCK_D)
    x = x.to(queries.dtype.element_ty)
    tl.store(target[:, None] + c[None, :], x, mask=real)
    if KEPT:  # noqa: SIM102 - this one is decided when the kernel is compiled
        if (tl.program_id(1) == H // BLOCK_H) & (t < num_stores):
            place = tl.load(dst + t)
            tl.device_assert(place < num_kept, "attention.norm_and_rotate: a key is kept behind its ring")
            if (place >= 0) & (place < num_kept):
                own = (ring + place * D) + tl.zeros_like(h)[:, None] + c[None, :]
                tl.store(own, x, mask=(h == H)[:, None] & (c < D)[None, :])
