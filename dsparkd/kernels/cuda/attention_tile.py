"""What attention's kernels for cuda share: a token's keys, a tile of its softmax, the rotation back.

Every way of computing a token, by one program or by several, takes its keys in the same tiles and in the same order
with what is here, so that all give the same bits. What threads would add among themselves, in an order that follows
from how a tile lies over them, is a product: the denominator is one with ones.

Letters: H heads, K keys of a tile, d head width, W window, E entries a row has at most, r rotary width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsparkd.kernels.attention import EntryKeys, WindowKeys
from dsparkd.kernels.cuda.launch import settled
from dsparkd.kernels.cuda.packed import block_of, load_keys, tails_of
from dsparkd.kernels.packed import is_packed
from dsparkd.kernels.row_layout import scales_at
from dsparkd.kernels.tiles import power_of_two

SUMS = tl.constexpr(16)  # columns of a denominator, all alike: as few as a product has
WIDTHS = (256, 512)  # of wide heads


class Tile:
    """Sizes of one program, by geometry and dtype alone: `keys` and `heads` fix the order of every reduction."""

    def __init__(self, num_heads: int, width: int, dtype: torch.dtype, packed: bool) -> None:
        self.width = block_of(width) if packed else power_of_two(width)
        # A tensor core tile has 16 rows; 64 heads share each key that is read and fill a warp group's product.
        self.heads = min(max(power_of_two(num_heads), 16), 64 if dtype == torch.bfloat16 else 16)
        if dtype == torch.bfloat16:
            # Places are loaded two tiles ahead and keys one: queries, two tiles of keys and the shares of 64 heads by
            # 512 take 195 of the 227 KiB of shared memory.
            # Packed ones lie there as codes, as rotary columns and as values: 32 of them take 150 KiB.
            self.keys, self.stages = 32 if packed else 64, 3
        else:
            self.keys, self.stages = 32, 1  # keys of 512 leave no room for a second stage
        self.warps = 8 if self.heads * self.width >= 64 * 256 else 4


def is_wide(dtype: torch.dtype, width: int, tile: Tile, packed: bool) -> bool:
    """Whether all products of a token are a warp group's, however its work is cut: the general kernel, few tokens'
    and many tokens' have the same bits then. Narrow heads and float32 have others."""
    return dtype == torch.bfloat16 and tile.heads == 64 and width in WIDTHS and not packed


@dataclass(frozen=True, slots=True)
class Keys:
    """What the tokens of one call see, as kernels take it. Without entries their pointers are not read, and the
    window's stand in. packed_bytes: of a row, 0 where rows are not packed; scales: where its scales begin.

    slots of a token begin slot_stride apart, in its row of `rows` where by_rows.
    """

    ring: Tensor
    ring_tails: Tensor
    chunk: Tensor
    sources: Tensor
    first: Tensor
    entries: Tensor
    entry_tails: Tensor
    slots: Tensor
    slot_stride: int
    rows: Tensor
    counts: Tensor
    most: int
    by_rows: int
    packed_bytes: int
    scales: int

    @property
    def window(self) -> int:
        """W."""
        return self.sources.shape[1]


def keys_of(window: WindowKeys, entries: EntryKeys | None, width: int, rotary: int) -> Keys:
    """For kernels of head width `width`."""
    packed = is_packed(window.ring)
    kept = window.ring if entries is None else entries.entries
    slots = window.sources if entries is None else entries.slots
    rows = None if entries is None else entries.rows
    return Keys(
        ring=window.ring,
        ring_tails=tails_of(window.ring),
        chunk=window.chunk,
        sources=window.sources,
        first=window.first,
        entries=kept,
        entry_tails=tails_of(kept),
        slots=slots,
        slot_stride=slots.stride(0),
        rows=slots if rows is None else rows,
        counts=window.first if entries is None else entries.counts,
        most=0 if entries is None else slots.shape[1],
        by_rows=int(rows is not None),
        packed_bytes=window.ring.shape[1] if packed else 0,
        scales=scales_at(width, rotary) if packed else 0,
    )


@triton.jit  # type: ignore[untyped-decorator]
def rotate_pairs(x, cos, sin, t, D: tl.constexpr, R: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr, first=0):  # type: ignore[no-untyped-def]
    """Rotate the last R of D columns by token t's angles; elsewhere cos 1 and sin 0. x [ROWS, BLOCK_D] float32 is those
    from `first` on."""
    c, s = settled_angles(cos, sin, t, D, R, BLOCK_D, first)
    return turn_pairs(x, c, s, ROWS, BLOCK_D)


@triton.jit  # type: ignore[untyped-decorator]
def settled_angles(cos, sin, t, D: tl.constexpr, R: tl.constexpr, BLOCK_D: tl.constexpr, first=0):  # type: ignore[no-untyped-def]
    """Cosines and sines [BLOCK_D / 2] of token t's pairs from column `first` on, ahead of the wait or behind."""
    column = first + 2 * tl.arange(0, BLOCK_D // 2)
    turned = (column >= D - R) & (column < D)
    at = t * R + column - (D - R)
    # The odd one has the plain sign.
    return tl.where(turned, settled(cos + at, turned), 1.0), settled(sin + at + 1, turned)


@triton.jit  # type: ignore[untyped-decorator]
def turn_pairs(x, c, s, ROWS: tl.constexpr, BLOCK_D: tl.constexpr):  # type: ignore[no-untyped-def]
    """Rotate pairs of x [ROWS, BLOCK_D] float32 by angles of cosines c and sines s [BLOCK_D / 2]."""
    even, odd = tl.split(tl.reshape(x, [ROWS, BLOCK_D // 2, 2]))
    c, s = c[None, :], s[None, :]
    # Which product is rounded is said here: the compiler's choice would differ from kernel to kernel.
    return tl.reshape(tl.join(tl.fma(even, c, -(odd * s)), tl.fma(odd, c, even * s)), [ROWS, BLOCK_D])


@triton.jit  # type: ignore[untyped-decorator]
def take(logits, keys, top, total, mixed, OPERAND: tl.constexpr, PRECISION: tl.constexpr):  # type: ignore[no-untyped-def]
    """Take one tile of keys into the running maximum [H], denominator [H, SUMS] and numerator [H, d] of a softmax.

    logits [H, K], keys [K, d]; hidden keys' logits are minus infinity.
    """
    new_top = tl.maximum(top, tl.max(logits, 1))
    shares = tl.exp(logits - new_top[:, None])
    shrink = tl.exp(top - new_top)
    shares = shares.to(OPERAND)
    ones = tl.full([shares.shape[1], SUMS], 1.0, OPERAND)
    # Both are scaled before the first product: what is computed between products has each wait for the last one.
    mixed = mixed * shrink[:, None]
    total = total * shrink[:, None]
    mixed = tl.dot(shares, keys, mixed, input_precision=PRECISION)
    total = tl.dot(shares, ones, total, input_precision=PRECISION)
    return new_top, total, mixed


@triton.jit  # type: ignore[untyped-decorator]
def logits_of(q, keys, live, PRECISION: tl.constexpr):  # type: ignore[no-untyped-def]
    """Logits [H, K] of q [H, d] and keys [K, d], minus infinity where not live."""
    logits = tl.dot(q, tl.trans(keys), input_precision=PRECISION)
    return tl.where(live[None, :], logits, float("-inf"))


@triton.jit  # type: ignore[untyped-decorator]
def window_keys(  # type: ignore[no-untyped-def]
    ring, ring_tails, chunk, sources, k, hidden, W, D: tl.constexpr, R: tl.constexpr, B: tl.constexpr,
    SCALES: tl.constexpr, BLOCK_D: tl.constexpr, OPERAND: tl.constexpr,
):  # fmt: skip
    """Keys [K, d] OPERAND of a token's window at k [K], where sources [W] say.

    In place of a key that is hidden one is loaded that is not: its share is zero, and it is finite.
    """
    source = tl.load(sources + tl.minimum(tl.maximum(k, hidden), W - 1))
    c = tl.arange(0, BLOCK_D)
    if B > 0:
        old = source >= 0
        keys = load_keys(ring, ring_tails, tl.where(old, source, 0), D, R, B, SCALES, BLOCK_D, OPERAND)
        row = chunk + tl.where(old, 0, -1 - source) * D
        fresh = (source < 0)[:, None] & (c < D)[None, :]
        return tl.where(fresh, tl.load(row[:, None] + c[None, :], mask=fresh, other=0.0).to(OPERAND), keys)
    else:
        row = tl.where(source >= 0, ring + source * D, chunk + (-1 - source) * D)
        return tl.load(row[:, None] + c[None, :], mask=(c < D)[None, :], other=0.0).to(OPERAND)


@triton.jit  # type: ignore[untyped-decorator]
def entry_keys(  # type: ignore[no-untyped-def]
    entries, entry_tails, slots, k, count, D: tl.constexpr, R: tl.constexpr, B: tl.constexpr,
    SCALES: tl.constexpr, BLOCK_D: tl.constexpr, OPERAND: tl.constexpr,
):  # fmt: skip
    """Keys [K, d] OPERAND of a token's entries k [K], whose slots [count] lie in a row."""
    slot = tl.load(slots + tl.minimum(k, count - 1))
    if B > 0:
        return load_keys(entries, entry_tails, slot, D, R, B, SCALES, BLOCK_D, OPERAND)
    else:
        c = tl.arange(0, BLOCK_D)
        row = entries + slot * D
        return tl.load(row[:, None] + c[None, :], mask=(c < D)[None, :], other=0.0).to(OPERAND)
