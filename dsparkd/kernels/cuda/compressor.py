"""Mixing of the compressed entries that close in a step: Triton form, for cuda.

One program makes one entry, or one indexer key: it takes the rows of its window where they lie, mixes them channel by
channel, norms, rotates and stores the result in its page. Rows are taken in tiles of a fixed size, oldest first. Others
copy the step's rows into the ring meanwhile, where it is long enough for that.

Letters: T tokens, N closing entries, c channels (d main + i indexer), w row width, r rotary width, K stored rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsparkd.kernels.cuda.attention_tile import rotate_pairs
from dsparkd.kernels.cuda.compiling import ahead
from dsparkd.kernels.cuda.launch import EARLY, follow_alone, settled
from dsparkd.kernels.cuda.packed import SPAN as SPAN_OF_SCALE
from dsparkd.kernels.cuda.packed import block_of, store_index_key, store_key, tails_of
from dsparkd.kernels.packed import is_packed
from dsparkd.kernels.rotary import Rotation
from dsparkd.kernels.row_layout import scales_at
from dsparkd.kernels.tiles import power_of_two

BLOCK_ROWS = 16  # rows of a window that are mixed at once
STAGES = 3  # of such rows: places are loaded ahead, and then rows


@dataclass(frozen=True, slots=True)
class Rows:
    """What one compressor's entries are made of.

    step [T, w], ring [*, w] float32: values, then gates. bias [period, w / 2] float32: of the gates, by a token's place
    in its window. dst [K] int64: where in the ring the step's first K rows are stored, -1 for padding; None where that
    must wait for the entries.
    """

    step: Tensor
    ring: Tensor
    bias: Tensor
    dst: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Closing:
    """Entries of one compression ratio that close in a step.

    sources [N * span] int64: ring[source], or rows[-1 - source] where that is negative; 0 stands for a position that
    does not exist. places [N] int64: where each entry is stored, -1 for one that is not made.
    rotation: at each entry's first token.
    """

    sources: Tensor
    places: Tensor
    rotation: Rotation


@dataclass(frozen=True, slots=True)
class Part:
    """Where one kind of entries goes: its norm's weight [width] float32, and the pages [*, width] of the layer.

    dtype: the model's, where pages are packed rows; of others it is theirs.
    """

    norm: Tensor
    pages: Tensor
    dtype: torch.dtype | None = None


def close_entries(rows: Rows, closing: Closing, eps: float, entries: Part, keys: Part | None) -> None:
    """Store the entries that close, with keys those of the indexer, and the rows that are stored already.

    With keys (CSA) each row's half is [A main, A index, B main, B index] of a token; an entry mixes the A halves of the
    window before its own and the B halves of its own.
    """
    num_entries, width = closing.places.shape[0], entries.norm.shape[0]
    span = closing.sources.shape[0] // num_entries
    other, parts = (entries, 1) if keys is None else (keys, 2)
    key_width = 0 if keys is None else other.norm.shape[0]
    rotary, packed = closing.rotation.cos.shape[-1], is_packed(entries.pages)
    dtype = entries.dtype if packed else entries.pages.dtype
    row_width = rows.step.shape[1]
    dst, num_stores = (closing.places, 0) if rows.dst is None else (rows.dst, rows.dst.shape[0])
    assert rows.ring.is_contiguous()
    assert rows.step.is_contiguous()
    assert num_stores <= rows.step.shape[0]
    assert rows.bias.shape == (span // parts, row_width // 2)
    _close[(num_entries * parts + num_stores,)](
        rows.step,
        rows.ring,
        rows.bias,
        dst,
        rows.ring.shape[0],
        closing.sources,
        closing.places,
        num_entries,
        entries.norm,
        other.norm,
        closing.rotation.cos,
        closing.rotation.sin,
        entries.pages,
        tails_of(entries.pages),
        other.pages,
        min(entries.pages.shape[0], other.pages.shape[0]),
        eps,
        WIDTH=width,
        KEY_WIDTH=key_width,
        ROW=row_width,
        SPAN=span,
        R=rotary,
        B=entries.pages.shape[1] if packed else 0,
        KEY_B=other.pages.shape[1] if packed else 0,
        SCALES=scales_at(width, rotary) if packed else 0,
        DTYPE=tl.float32 if dtype == torch.float32 else tl.bfloat16,
        BLOCK_ROWS=min(BLOCK_ROWS, span),
        STAGES=STAGES if span > BLOCK_ROWS else 1,
        BLOCK_D=(block_of if packed else power_of_two)(max(width, key_width)),
        BLOCK_W=power_of_two(row_width),
        num_warps=8,
        launch_pdl=EARLY,
        sanitize_overflow=False,
    )


@ahead()
def prepare(
    norm: Tensor,
    key_norm: Tensor | None,
    span: int,
    rotary: int,
    dtype: torch.dtype,
    pages: tuple[Tensor, ...] | None = None,
) -> None:
    """Compile for these norms' widths, spans and rotary width at start: an entry of 128 tokens closes long after the
    first step, and no step shall wait for a compiler. pages: rows of entries and keys, where these are packed."""
    width = norm.shape[0]
    channels = width if key_norm is None else width + key_norm.shape[0]
    parts = 1 if key_norm is None else 2
    row = norm.new_zeros((1, channels * 2 * parts))
    rows = Rows(row, torch.zeros_like(row), norm.new_zeros((span // parts, channels * parts)))
    sources, angles = torch.ones(span, dtype=torch.int64, device=norm.device), norm.new_zeros((1, 1, rotary))
    closing = Closing(-sources, sources[:1] - 1, Rotation(angles, angles))
    if pages is None:
        pages = tuple(norm.new_zeros((1, columns), dtype=dtype) for columns in (width, channels - width))
    kept = [torch.zeros_like(one[:1]) for one in pages]
    keys = None if key_norm is None else Part(key_norm, kept[1], dtype)
    close_entries(rows, closing, 1.0, Part(norm, kept[0], dtype), keys)


@triton.jit(debug=True, do_not_specialize=["num_rows", "num_entries", "num_kept"])  # type: ignore[untyped-decorator]
def _close(  # type: ignore[no-untyped-def]
    rows,  # [T, w]
    ring,  # [num_rows, w]
    bias,  # [period, w / 2]
    dst,  # [K]
    num_rows,
    sources,  # [N, SPAN]
    places,  # [N]
    num_entries,  # N
    norm,  # [WIDTH]
    key_norm,  # [KEY_WIDTH]
    cos,  # [N, 1, r]
    sin,  # [N, 1, r]
    pages,  # [*, WIDTH], or packed [*, B]
    tails,  # the same memory as bfloat16, where packed
    key_pages,  # [*, KEY_WIDTH], or packed [*, KEY_B]
    num_kept,
    eps,
    WIDTH: tl.constexpr,
    KEY_WIDTH: tl.constexpr,
    ROW: tl.constexpr,
    SPAN: tl.constexpr,
    R: tl.constexpr,
    B: tl.constexpr,
    KEY_B: tl.constexpr,
    SCALES: tl.constexpr,
    DTYPE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    STAGES: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    PARTS: tl.constexpr = 2 if KEY_WIDTH > 0 else 1
    program = tl.program_id(0)
    n = (program // PARTS).to(tl.int64)
    k = (program - num_entries * PARTS).to(tl.int64)
    place = settled(tl.where(k < 0, places + n, dst + k), True)
    follow_alone()
    if k >= 0:
        _store_row(rows, ring, k, place, num_rows, ROW, BLOCK_W)
        return
    tl.device_assert(place < num_kept, "compressor.close_entries: an entry is kept behind its pages")
    # Padding of a captured shape: most steps close fewer entries than it has room for.
    if (place < 0) | (place >= num_kept):
        return
    if program % PARTS == 0:
        _close_part(
            rows, ring, bias, sources, places, norm, cos, sin, pages, tails, eps, n,
            0, WIDTH, WIDTH + KEY_WIDTH, KEY_WIDTH > 0, ROW, SPAN, R, B, SCALES, DTYPE, BLOCK_ROWS, STAGES, BLOCK_D,
        )  # fmt: skip
    elif KEY_WIDTH > 0:
        _close_part(
            rows, ring, bias, sources, places, key_norm, cos, sin, key_pages, tails, eps, n,
            WIDTH, KEY_WIDTH, WIDTH + KEY_WIDTH, True, ROW, SPAN, R, KEY_B, 0, DTYPE, BLOCK_ROWS, STAGES, BLOCK_D,
        )  # fmt: skip


@triton.jit  # type: ignore[untyped-decorator]
def _store_row(rows, ring, k, place, num_rows, ROW: tl.constexpr, BLOCK_W: tl.constexpr):  # type: ignore[no-untyped-def]
    """Keep row k of the step: no entry that closes in it reads what lay there."""
    tl.device_assert(place < num_rows, "compressor.close_entries: a row is kept behind its ring")
    if (place >= 0) & (place < num_rows):
        c = tl.arange(0, BLOCK_W)
        tl.store(ring + place * ROW + c, tl.load(rows + k * ROW + c, mask=c < ROW), mask=c < ROW)


@triton.jit  # type: ignore[untyped-decorator]
def _close_part(  # type: ignore[no-untyped-def]
    rows, ring, bias, sources, places, norm, cos, sin, pages, tails, eps, n,
    FIRST: tl.constexpr, D: tl.constexpr, CHANNELS: tl.constexpr, OVERLAP: tl.constexpr, ROW: tl.constexpr,
    SPAN: tl.constexpr, R: tl.constexpr, B: tl.constexpr, SCALES: tl.constexpr, DTYPE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, STAGES: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Make entry n of channels FIRST .. FIRST + D."""
    PERIOD: tl.constexpr = SPAN // 2 if OVERLAP else SPAN
    c = tl.arange(0, BLOCK_D)
    top = tl.full([BLOCK_D], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_D], tl.float32)
    mixed = tl.zeros([BLOCK_D], tl.float32)
    for start in tl.range(0, SPAN, BLOCK_ROWS, num_stages=STAGES):  # loads run ahead: few entries close at once
        k = start + tl.arange(0, BLOCK_ROWS)
        source = tl.load(sources + n * SPAN + k)
        row = tl.where(source >= 0, ring + source * ROW, rows + (-1 - source) * ROW)
        column = FIRST + c[None, :]
        live = (k >= 0)[:, None] & (c < D)[None, :]
        if OVERLAP:  # the first half of the span is the window before, of which the A channels count
            before = k < SPAN // 2
            column = column + tl.where(before, 0, CHANNELS)[:, None]
            live = live & ((source != 0) | (k >= SPAN // 2))[:, None]
        values = tl.load(row[:, None] + column, mask=live, other=0.0)
        gates = tl.load(row[:, None] + ROW // 2 + column, mask=live, other=float("-inf"))
        phase = k % PERIOD  # an entry's windows begin at whole ones
        gates += tl.load(bias + phase[:, None] * (ROW // 2) + column, mask=live, other=0.0)
        gates = tl.where((c < D)[None, :], gates, 0.0)  # past the width anything finite
        new_top = tl.maximum(top, tl.max(gates, 0))
        shares = tl.exp(gates - new_top[None, :])
        shrink = tl.exp(top - new_top)
        total = total * shrink + tl.sum(shares, 0)
        mixed = mixed * shrink + tl.sum(shares * values, 0)
        top = new_top
    # The mixture is a tensor of the model's dtype before it is normed: it is rounded in between.
    x = (mixed / total).to(DTYPE).to(tl.float32)
    x = x * tl.rsqrt(tl.sum(x * x, 0) / D + eps) * tl.load(norm + c, mask=c < D, other=0.0)
    x = rotate_pairs(x[None, :], cos, sin, n, D, R, 1, BLOCK_D)
    place = tl.load(places + n)
    x = x.to(DTYPE)
    if B == 0:
        tl.store(pages + place * D + c[None, :], x, mask=(c < D)[None, :])
    elif FIRST > 0:  # channels behind others are an indexer's
        own = tl.where((c < D)[None, :], x.to(tl.float32), 0.0)
        store_index_key(tl.reshape(own, (BLOCK_D,)), pages, place, D, B, BLOCK_D)
    else:
        store_key(
            tl.reshape(x.to(tl.float32), (BLOCK_D // SPAN_OF_SCALE, SPAN_OF_SCALE)),
            pages,
            tails,
            place,
            D,
            R,
            B,
            SCALES,
            BLOCK_D,
        )
