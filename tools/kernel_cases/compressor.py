"""Compressed entries that close, and the norm and rotation of rows by themselves."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from dsparkd.kernels.cuda.compressor import Closing, Part, Rows, close_entries
from dsparkd.kernels.cuda.norm import rms_norm, rotate_
from dsparkd.kernels.rotary import rotate_ as torch_rotate_
from tools.kernel_cases import Case, Scale
from tools.kernel_cases.rows import random_floats, random_rotation, random_values

EPS = 1e-6
RING_ROWS = 8192


def cases(device: torch.device, scale: Scale) -> Iterator[Case]:
    """Both compressors at the entries that close in a decode step of 64 sequences, and in a prefill of 8,192 tokens."""
    if scale is Scale.SMALL:
        yield _closing(5, 8, 32, 16, 8, device)
        yield _closing(2, 128, 32, 0, 8, device)
        yield _keeping(6, 2, 8, 32, 16, 8, device)
        yield _keeping(6, 2, 128, 32, 0, 8, device)
        yield _norm(6, 48, device)
        yield _rotation(6, 4, 32, 8, device)
        return
    for entries in (96, 2048):
        yield _closing(entries, 8, 512, 128, 64, device)
    for entries in (3, 64):
        yield _closing(entries, 128, 512, 0, 64, device)
    for tokens in (1, 384):
        yield _keeping(tokens, 1, 8, 512, 128, 64, device)
        yield _keeping(tokens, 1, 128, 512, 0, 64, device)
    for tokens in (384, 8192):
        yield _norm(tokens, 1024, device)
        yield _rotation(tokens, 64, 128, 64, device)


def _closing(num_entries: int, span: int, width: int, key_width: int, rotary: int, device: torch.device) -> Case:
    """span 8 with indexer keys, or 128 without."""
    channels = width + key_width
    row = (4 if key_width else 2) * channels
    ring, rows = random_floats(device, RING_ROWS, row, seed=1), random_floats(device, 512, row, seed=2)
    parts = 2 if key_width else 1
    bias = random_floats(device, span // parts, row // 2, seed=6)
    made_of = Rows(rows, ring, bias)
    draw = torch.Generator().manual_seed(3)
    sources = torch.randint(1, RING_ROWS + 512, (num_entries, span), generator=draw)
    sources = torch.where(sources >= RING_ROWS, RING_ROWS - 1 - sources, sources).to(device)
    if key_width:  # the first entry of a sequence has no window before its own, and nothing is read in its place
        sources[::3, : span // 2] = 0
        ring[0] = torch.nan
    rotation = random_rotation(device, num_entries, rotary)
    norm, key_norm = 1 + 0.2 * random_floats(device, width, seed=4), 1 + 0.2 * random_floats(device, width, seed=5)

    def run(part: slice) -> Tensor:
        n = part.stop - part.start
        pages = torch.empty((n, width), dtype=torch.bfloat16, device=device)
        keys = torch.empty((n, key_width), dtype=torch.bfloat16, device=device)
        closing = Closing(sources[part].view(-1), torch.arange(n, device=device), rotation.rows(part))
        second = Part(key_norm[:key_width], keys) if key_width else None
        close_entries(made_of, closing, EPS, Part(norm, pages), second)
        return torch.cat((pages, keys), 1)

    def reference(part: slice) -> Tensor:
        spans = torch.where((sources[part] > 0)[..., None], ring[sources[part].clamp(min=0)], 0)
        fresh = rows[(-1 - sources[part]).clamp(min=0)]
        spans = torch.where((sources[part] >= 0)[..., None], spans, fresh).view(
            -1, span, 2, row // 2 // channels, channels
        )
        spans[:, :, 1] += bias.view(-1, parts, channels).repeat(parts, 1, 1)
        if key_width:
            spans[:, :, 1][sources[part] == 0] = -torch.inf
            spans = torch.cat((spans[:, :4, :, 0], spans[:, 4:, :, 1]), 1)[:, :, :, None]
        mixed = (spans[:, :, 1, 0].softmax(1) * spans[:, :, 0, 0]).sum(1).bfloat16().float()
        made = []
        for x, weight in ((mixed[:, :width], norm), (mixed[:, width:], key_norm[:key_width])):
            normed = x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * weight
            made.append(torch_rotate_(normed[:, None], rotation.rows(part))[:, 0] if x.shape[1] else x)
        return torch.cat(made, 1)

    made, made_keys = (torch.empty((num_entries, w), dtype=torch.bfloat16, device=device) for w in (width, key_width))
    closing = Closing(sources.view(-1), torch.arange(num_entries, device=device), rotation)
    second = Part(key_norm[:key_width], made_keys) if key_width else None
    num_rows = int((sources != 0).sum())
    read = channels if key_width else row // 2  # of values, and as many gates, of each row of the span
    return Case(
        name="compressor.csa" if key_width else "compressor.hca",
        shape=f"{num_entries} entries of {span}",
        num_rows=num_entries,
        run=run,
        reference=reference,
        tolerance=1e-2,
        floor_bytes=num_rows * 2 * read * 4 + num_entries * 2 * channels,
        timed=lambda: close_entries(made_of, closing, EPS, Part(norm, made), second),
    )


def _keeping(
    tokens: int, num_entries: int, span: int, width: int, key_width: int, rotary: int, device: torch.device
) -> Case:
    """A step's rows, stored beside the entries that close, every fifth of them padding; of the entries a row is read
    that the step stores."""
    channels, parts = width + key_width, 2 if key_width else 1
    row = 2 * parts * channels
    rows, bias = random_floats(device, tokens, row, seed=1), random_floats(device, span // parts, row // 2, seed=2)
    ring_rows = 3 * tokens
    dst = torch.randperm(ring_rows, generator=torch.Generator().manual_seed(3))[:tokens]
    dst[4::5] = -1
    dst = dst.to(device)
    sources = torch.full((num_entries * span,), -1, dtype=torch.int64, device=device)
    closing = Closing(sources, torch.arange(num_entries, device=device), random_rotation(device, num_entries, rotary))
    pages, keys = (torch.zeros((num_entries, w), dtype=torch.bfloat16, device=device) for w in (width, key_width))
    norms = [torch.ones(w, device=device) for w in (width, key_width)]
    second = Part(norms[1], keys) if key_width else None
    kept, nothing = torch.zeros((ring_rows, row), device=device), torch.zeros((tokens, row), device=device)

    def run(part: slice) -> Tensor:
        """Stored rows, nothing in place of padding, and beside each how many others changed."""
        ring = torch.zeros_like(kept)
        close_entries(Rows(rows, ring, bias, dst[: part.stop]), closing, EPS, Part(norms[0], pages), second)
        places = dst[part].clamp(min=0)
        found = torch.where((dst[part] >= 0)[:, None], ring[places], nothing[:1])
        ring.index_copy_(0, dst[: part.stop].clamp(min=0), nothing[: part.stop])  # a fill's number lies on the host
        return torch.cat((found, (ring != 0).sum().float().expand(len(found), 1)), 1)

    def reference(part: slice) -> Tensor:
        stored = torch.where((dst[part] >= 0)[:, None], rows[part], 0)
        return torch.cat((stored, stored.new_zeros((len(stored), 1))), 1)

    return Case(
        name="compressor.keep",
        shape=f"{tokens} rows of {4 * row} bytes, {num_entries} entries of {span}",
        num_rows=tokens,
        run=run,
        reference=reference,
        tolerance=0,
        floor_bytes=2 * tokens * row * 4,
        timed=lambda: close_entries(Rows(rows, kept, bias, dst), closing, EPS, Part(norms[0], pages), second),
    )


def _norm(tokens: int, width: int, device: torch.device) -> Case:
    wide, weight = random_values(device, tokens, width + 512, seed=1), 1 + 0.2 * random_floats(device, width, seed=2)

    def reference(part: slice) -> Tensor:
        x = wide[part, :width].double()
        return x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * weight.double()

    return Case(
        name="norm",
        shape=f"{tokens} x {width}",
        num_rows=tokens,
        run=lambda part: rms_norm(wide[part, :width], weight, EPS),
        reference=reference,
        tolerance=1e-2,
        floor_bytes=4 * tokens * width,
    )


def _rotation(tokens: int, heads: int, width: int, rotary: int, device: torch.device) -> Case:
    x, rotation = random_values(device, tokens, heads, width, seed=1), random_rotation(device, tokens, rotary)
    turned = x.clone()
    return Case(
        name="rotation",
        shape=f"{tokens} x {heads} x {width}",
        num_rows=tokens,
        run=lambda part: rotate_(x[part].clone(), rotation.rows(part)),
        reference=lambda part: torch_rotate_(x[part].float(), rotation.rows(part)),
        tolerance=1e-2,
        floor_bytes=tokens * heads * 2 * 2 * rotary,
        timed=lambda: rotate_(turned, rotation),
    )
