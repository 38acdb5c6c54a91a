"""The cache's official encoding: keys rounded and stored, queries of the indexer, its scores, entries that close."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from dsparkd.kernels import packed as torch_form
from dsparkd.kernels.cuda import packed as kernel
from dsparkd.kernels.cuda.compressor import Closing, Part, Rows, close_entries
from dsparkd.kernels.cuda.indexer import score
from dsparkd.kernels.indexer import Visible
from dsparkd.kernels.row_layout import INDEX_GROUP, index_key_bytes, key_bytes
from dsparkd.kernels.weight import FP4_VALUES, decode_e8m0
from tools.kernel_cases import Case, Scale
from tools.kernel_cases.rows import DECODE, SMALL, Step, random_floats, random_rotation, random_values

EPS = 1e-6
RATIO = 4
REFERENCE_TOKENS = 64  # the reference makes the products of so many at once


def cases(device: torch.device, scale: Scale) -> Iterator[Case]:
    """At a decode step, and rows at a prefill, too."""
    if scale is Scale.SMALL:
        yield _round(6, 96, 32, device)
        yield _store(6, 96, 32, device)
        yield _queries(5, 8, 64, device)
        yield _score(SMALL, 8, 64, device)
        yield _closing(5, 8, 96, 64, 32, device)
        yield _closing(2, 128, 96, 0, 32, device)
        return
    for tokens in (384, 8192):
        yield _round(tokens, 512, 64, device)
        yield _store(tokens, 512, 64, device)
        yield _queries(tokens, 64, 128, device)
    yield _score(DECODE, 64, 128, device)
    yield _closing(96, 8, 512, 128, 64, device)
    yield _closing(3, 128, 512, 0, 64, device)


def _keys(tokens: int, width: int, rotary: int, device: torch.device, seed: int = 1) -> Tensor:
    """Of many magnitudes; the interpreter truncates what is no bfloat16, so all is."""
    return (
        random_values(device, tokens, width, seed=seed)
        * torch.logspace(-3, 2, tokens, device=device)[:, None].bfloat16()
    )


def _round(tokens: int, width: int, rotary: int, device: torch.device) -> Case:
    keys = _keys(tokens, width, rotary, device)
    worn = keys.clone()

    def run(part: slice) -> Tensor:
        own = keys[part].clone()
        kernel.round_(own, rotary)
        return own

    def reference(part: slice) -> Tensor:
        return torch_form.unpack(torch_form.pack(keys[part], rotary), width, rotary, torch.float32)

    return Case(
        name="packed.round",
        shape=f"{tokens} keys of {width}",
        num_rows=tokens,
        run=run,
        reference=reference,
        tolerance=0,
        floor_bytes=2 * 2 * keys.numel(),
        timed=lambda: kernel.round_(worn, rotary),
    )


def _store(tokens: int, width: int, rotary: int, device: torch.device) -> Case:
    """Every second token, to scattered places of a ring three times as long."""
    stored, row = tokens // 2, key_bytes(width, rotary)
    keys, src = _keys(tokens, width, rotary, device), torch.arange(0, 2 * stored, 2, device=device)
    dst = torch.randperm(3 * stored, generator=torch.Generator().manual_seed(2))[:stored].to(device)
    kept = torch.zeros((3 * stored, row), dtype=torch.uint8, device=device)

    def run(part: slice) -> Tensor:
        """Stored bytes, and beside each how many others changed."""
        ring = torch.zeros((3 * stored, row), dtype=torch.uint8, device=device)
        kernel.store(ring, dst[part], keys, src[part], rotary)
        found = ring[dst[part]]
        ring.index_fill_(0, dst[part], 0)
        return torch.cat((found.float(), (ring != 0).sum().float().expand(len(found), 1)), 1)

    def reference(part: slice) -> Tensor:
        rows = torch_form.pack(keys[src[part]], rotary).float()
        return torch.cat((rows, rows.new_zeros((len(rows), 1))), 1)

    return Case(
        name="packed.store",
        shape=f"{stored} of {tokens} keys of {width}",
        num_rows=stored,
        run=run,
        reference=reference,
        tolerance=0,
        floor_bytes=stored * (2 * width + row),
        timed=lambda: kernel.store(kept, dst, keys, src, rotary),
    )


def _queries(tokens: int, heads: int, width: int, device: torch.device) -> Case:
    """What lies half way between two codes may go either way, for the turn's sums go another way: half a step."""
    queries = random_values(device, tokens, heads, width, seed=1)

    def reference(part: slice) -> Tensor:
        rows = queries[part].float().view(-1, width)
        return torch_form.unpack_index(torch_form.pack_index(rows), width, torch.float32).view(-1, heads, width)

    return Case(
        name="packed.queries",
        shape=f"{tokens} x {heads} of {width}",
        num_rows=tokens,
        run=lambda part: kernel.round_queries(queries[part]),
        reference=reference,
        tolerance=0.34,
        floor_bytes=2 * 2 * queries.numel(),
    )


def _score(step: Step, heads: int, width: int, device: torch.device) -> Case:
    n, most = step.num_tokens, step.context // RATIO
    num_entries = step.num_sequences * most
    order = 1 + torch.randperm(num_entries, generator=torch.Generator().manual_seed(1))
    slots, rows = order.view(step.num_sequences, most).to(device), step.sequences().to(device)
    counts = torch.full((n,), most, device=device)
    query = kernel.round_queries(random_values(device, n, heads, width, seed=2))
    keys = torch_form.pack_index(random_values(device, num_entries + 1, width, seed=3))
    values = torch_form.unpack_index(keys, width, torch.float32)
    weights = random_floats(device, n, heads, seed=4) * (heads * width) ** -0.5

    def reference(part: slice) -> Tensor:
        return torch.stack(
            [
                (weights[t, None] @ (query[t].float() @ values[slots[rows[t]]].t()).relu())[0]
                for t in range(part.start, part.stop)
            ]
        )

    return Case(
        name="packed.score",
        shape=step.words,
        num_rows=n,
        run=lambda part: score(query[part], weights[part], keys, Visible(slots, rows[part], counts[part], most)),
        reference=reference,
        tolerance=1e-5,
        floor_bytes=keys.numel() + 2 * query.numel() + 4 * n * most,
        floor_flops=2 * n * most * heads * width,
    )


def _closing(num_entries: int, span: int, width: int, key_width: int, rotary: int, device: torch.device) -> Case:
    """Entries as the plain form makes them, packed by torch. Compared are values, not bytes: of the indexer's keys one
    half way between two codes may go either way."""
    row = (4 if key_width else 2) * (width + key_width)
    ring, rows = random_floats(device, 4096, row, seed=1), random_floats(device, 8, row, seed=2)
    made_of = Rows(rows, ring, random_floats(device, span // (2 if key_width else 1), row // 2, seed=6))
    sources = torch.randint(1, 4096, (num_entries, span), generator=torch.Generator().manual_seed(3)).to(device)
    rotation = random_rotation(device, num_entries, rotary)
    norm, key_norm = 1 + 0.2 * random_floats(device, width, seed=4), 1 + 0.2 * random_floats(device, width, seed=5)

    # On the device before any capture, which holds no copy from the host.
    fp4 = torch.tensor(FP4_VALUES, device=device)

    def index_values(rows: Tensor) -> Tensor:
        codes = rows[:, : key_width // 2].long()
        scales = decode_e8m0(rows[:, key_width // 2 : key_width // 2 + key_width // INDEX_GROUP])
        pairs = torch.stack((fp4[codes & 15], fp4[codes >> 4]), -1).flatten(1)
        return pairs * scales.repeat_interleave(INDEX_GROUP, 1)

    def close(part: slice, pages: Tensor, keys: Tensor) -> None:
        places = torch.arange(part.stop - part.start, device=device)
        closing = Closing(sources[part].view(-1), places, rotation.rows(part))
        second = Part(key_norm[:key_width], keys, torch.bfloat16) if key_width else None
        close_entries(made_of, closing, EPS, Part(norm, pages, torch.bfloat16), second)

    def run(part: slice) -> Tensor:
        n = part.stop - part.start
        pages = torch.empty((n, key_bytes(width, rotary)), dtype=torch.uint8, device=device)
        keys = torch.empty((n, index_key_bytes(key_width)), dtype=torch.uint8, device=device)
        close(part, pages, keys)
        values = torch_form.unpack(pages, width, rotary, torch.float32)
        return torch.cat((values, index_values(keys)), 1)

    def reference(part: slice) -> Tensor:
        n = part.stop - part.start
        pages, keys = (torch.empty((n, w), dtype=torch.bfloat16, device=device) for w in (width, key_width))
        close(part, pages, keys)
        values = torch_form.unpack(torch_form.pack(pages, rotary), width, rotary, torch.float32)
        if not key_width:
            return values
        return torch.cat((values, torch_form.unpack_index(torch_form.pack_index(keys), key_width, torch.float32)), 1)

    made = torch.zeros((num_entries, key_bytes(width, rotary)), dtype=torch.uint8, device=device)
    made_keys = torch.zeros((num_entries, index_key_bytes(key_width)), dtype=torch.uint8, device=device)
    whole = slice(0, num_entries)
    return Case(
        name="packed.csa" if key_width else "packed.hca",
        shape=f"{num_entries} entries of {span}",
        num_rows=num_entries,
        run=run,
        reference=reference,
        tolerance=0.34,
        floor_bytes=num_entries * (span * row * 4 // (2 if key_width else 1) + made.shape[1] + made_keys.shape[1]),
        timed=lambda: close(whole, made, made_keys),
    )
