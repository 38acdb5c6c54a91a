"""Cached rows in the official encoding, Triton and torch form."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dsparkd.kernels import packed as torch_packed
from dsparkd.kernels.attention import EntryKeys, TorchAttention, WindowKeys
from dsparkd.kernels.cuda import packed as triton_packed
from dsparkd.kernels.cuda.attention import TritonAttention
from dsparkd.kernels.cuda.compressor import Closing, Part, Rows, close_entries
from dsparkd.kernels.cuda.indexer import TritonIndexer, score
from dsparkd.kernels.indexer import TorchIndexer, Visible
from dsparkd.kernels.rotary import Rotation
from dsparkd.kernels.row_layout import index_key_bytes, key_bytes
from tests.kernels.cuda.values import DTYPES, close, noise

WIDTHS = [(64, 32), (192, 64), (40, 16)]


def many(num_rows: int, width: int, seed: int = 0) -> Tensor:
    """Values of magnitudes from nothing to thousands, zeros and powers of two among them."""
    values = noise(num_rows, width, seed=seed) * torch.logspace(-7, 4, num_rows)[:, None]
    values[1] = 0
    values[2, ::3] = 448.0
    values[3] = values[3].sign()
    return values


def rotation(n: int, rotary: int) -> Rotation:
    angles = noise(n, 1, rotary // 2, seed=9).repeat_interleave(2, 2)
    return Rotation(angles.cos(), angles.sin() * torch.tensor([-1.0, 1.0]).repeat(rotary // 2))


def on(device: torch.device, turn: Rotation) -> Rotation:
    return Rotation(turn.cos.to(device), turn.sin.to(device))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("width", "rotary"), WIDTHS)
def test_rounding_gives_the_torch_form_s_bits(
    device: torch.device, dtype: torch.dtype, width: int, rotary: int
) -> None:
    """Of every magnitude; codes and scales are integers, and the rest is exact."""
    keys = many(50, width).to(dtype)
    if dtype == torch.float32:  # the interpreter truncates to bfloat16
        keys[:, width - rotary :] = keys[:, width - rotary :].bfloat16().float()
    expected = keys.clone()
    torch_packed.round_(expected, rotary)
    got = keys.to(device)
    triton_packed.round_(got, rotary)
    assert torch.equal(got.cpu(), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("width", "rotary"), WIDTHS)
def test_stored_rows_have_the_torch_form_s_bytes(
    device: torch.device, dtype: torch.dtype, width: int, rotary: int
) -> None:
    """T-37: scales lie in the row that they belong to. P-13: what goes to -1 is not stored, and the rest stays."""
    keys = many(50, width).to(dtype)
    keys[:, width - rotary :] = keys[:, width - rotary :].bfloat16().to(dtype)
    whole = torch.full((61, key_bytes(width, rotary)), 7, dtype=torch.uint8)
    src = torch.arange(50)
    dst = 59 - src
    dst[5] = -1
    expected, real = whole.clone(), dst >= 0
    torch_packed.store(expected[1:], dst[real], keys, src[real], rotary)
    got = whole.to(device)
    triton_packed.store(got[1:], dst.to(device), keys.to(device), src.to(device), rotary)
    got = got.cpu()
    untouched = got == 7  # the bytes behind a row's scales
    assert torch.equal(torch.where(untouched, expected, got), expected)
    assert bool(((expected == 7) | (expected == 0) | ~untouched).all())
    assert bool((got[[0, 55]] == 7).all())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "width"), [(4, 64), (20, 128)])
def test_queries_are_turned_and_rounded_as_by_torch(
    device: torch.device, dtype: torch.dtype, heads: int, width: int
) -> None:
    """Sums of the turn go another way, so what lies half way may round either way; that is rare."""
    queries = noise(9, heads, width).to(dtype)
    expected = torch_packed.round_queries(queries).float()
    got = triton_packed.round_queries(queries.to(device)).cpu().float()
    assert (got == expected).float().mean() > 0.995
    assert (got - expected).abs().max() < 0.6
    alone = triton_packed.round_queries(queries[3:4].to(device)).cpu().float()
    assert torch.equal(alone, got[3:4])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_entries", [0, 5, 130, 700])
def test_attention_reads_packed_rows(device: torch.device, dtype: torch.dtype, num_entries: int) -> None:
    """Ring and pages packed, the step's own rows rounded: one part of entries and several."""
    n, heads, width, rotary, window = 5, 3, 96, 32, 40
    queries = (noise(n, heads, width) * width**-0.5).to(dtype)
    ring = torch_packed.pack(noise(60, width, seed=1).to(dtype), rotary)
    chunk = noise(n, width, seed=2).to(dtype)
    torch_packed.round_(chunk, rotary)
    sources = torch.arange(1, 1 + window).repeat(n, 1) + torch.arange(n)[:, None]
    sources[:, -3:] = -1 - torch.arange(n)[:, None].clamp(min=2) + torch.arange(2, -1, -1)
    first = torch.tensor([0, 3, 33, 0, 39])
    pages = torch_packed.pack(noise(900, width, seed=3).to(dtype), rotary)
    turn, sink = rotation(n, rotary), noise(heads, seed=4)
    columns = max(64, -(-num_entries // 64) * 64)
    slots = torch.randint(1, 900, (n, columns), generator=torch.Generator().manual_seed(5))
    counts = torch.tensor([num_entries, num_entries // 2, 0, 1, num_entries]).clamp(max=num_entries)
    hidden = torch.arange(columns) >= counts[:, None]
    entries = EntryKeys(pages, slots.masked_fill(hidden, 0), counts) if num_entries else None
    expected = torch.empty(n, heads, width)
    TorchAttention().attend(
        queries.float(), WindowKeys(ring, chunk.float(), sources, first, False), entries, sink, turn, expected
    )
    on_device = WindowKeys(ring.to(device), chunk.to(device), sources.to(device), first.to(device), False)
    seen = None if entries is None else EntryKeys(pages.to(device), entries.slots.to(device), counts.to(device))
    got = torch.empty_like(queries, device=device)
    TritonAttention().attend(queries.to(device), on_device, seen, sink.to(device), on(device, turn), got)
    assert close(got.cpu(), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_indexer_scores_packed_keys(device: torch.device, dtype: torch.dtype) -> None:
    """And keeps the torch form's choice."""
    n, heads, width, top_k = 4, 6, 64, 16
    query = torch_packed.round_queries(noise(n, heads, width).to(dtype))
    keys, weights = torch_packed.pack_index(noise(500, width, seed=1)), noise(n, heads, seed=2)
    slots = torch.randint(1, 500, (2, 128), generator=torch.Generator().manual_seed(3))
    visible = Visible(slots, torch.tensor([0, 1, 1, 0]), torch.tensor([128, 100, 17, 3]), 128)
    there = Visible(slots.to(device), visible.rows.to(device), visible.counts.to(device), 128)
    values = torch_packed.unpack_index(keys, width, torch.float32)
    got = score(query.to(device), weights.to(device), keys.to(device), there).cpu()
    for t in range(n):
        own = values[slots[visible.rows[t]]][: visible.counts[t]]
        expected = (weights[t] @ (query[t].float() @ own.t()).relu())[None]
        torch.testing.assert_close(got[t : t + 1, : own.shape[0]], expected, rtol=1e-4, atol=1e-4)
    chosen = TritonIndexer(device, dtype).choose(query.to(device), weights.to(device), keys.to(device), there, top_k)
    assert torch.equal(chosen.cpu(), TorchIndexer().choose(query, weights, keys, visible, top_k))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("span", [8, 128])
def test_closed_entries_are_packed(device: torch.device, dtype: torch.dtype, span: int) -> None:
    """T-37: the entries of the plain form, packed into their places, with their scales; T-04: none where it is -1."""
    width, index_width, rotary, num_entries = 96, 64 if span == 8 else 0, 32, 5
    channels = width + index_width
    row = (4 if index_width else 2) * channels
    rows, ring = noise(30, row), noise(200, row, seed=1)
    bias = noise(span // (2 if index_width else 1), row // 2, seed=5)
    sources = torch.randint(1, 200, (num_entries * span,), generator=torch.Generator().manual_seed(2))
    sources[::7] = -1 - sources[::7] % 30
    places = torch.tensor([4, -1, 0, 9, 7])
    turn = rotation(num_entries, rotary)
    norm, key_norm = 1 + 0.1 * noise(width, seed=3), 1 + 0.1 * noise(max(index_width, 1), seed=4)

    def run(entries: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
        entries, keys = entries.to(device), keys.to(device)
        closing = Closing(sources.to(device), places.to(device), on(device, turn))
        second = Part(key_norm.to(device), keys, dtype) if index_width else None
        made_of = Rows(rows.to(device), ring.to(device), bias.to(device))
        close_entries(made_of, closing, 1e-6, Part(norm.to(device), entries, dtype), second)
        return entries.cpu(), keys.cpu()

    plain, plain_keys = run(torch.zeros(10, width, dtype=dtype), torch.zeros(10, index_width, dtype=dtype))
    packed_rows = torch.full((10, key_bytes(width, rotary)), 7, dtype=torch.uint8)
    key_rows = torch.full((10, index_key_bytes(index_width)), 7, dtype=torch.uint8)
    packed_rows, key_rows = run(packed_rows, key_rows)
    real = places[places >= 0]
    expected = torch_packed.pack(plain[real], rotary)
    got = torch_packed.unpack(packed_rows[real], width, rotary, torch.float32)
    wanted = torch_packed.unpack(expected, width, rotary, torch.float32)
    assert torch.equal(got[:, : width - rotary], wanted[:, : width - rotary])
    assert close(got.bfloat16(), wanted.bfloat16())  # the interpreter truncates to bfloat16
    assert bool((packed_rows[[1, 2, 3, 5, 6, 8]] == 7).all())
    if index_width:
        values = torch_packed.unpack_index(key_rows[real], index_width, torch.float32)
        keys = torch_packed.unpack_index(torch_packed.pack_index(plain_keys[real]), index_width, torch.float32)
        assert (values == keys).float().mean() > 0.99
        assert (values - keys).abs().max() < 1.1
        assert bool((key_rows[[1, 2, 3, 5, 6, 8]] == 7).all())
