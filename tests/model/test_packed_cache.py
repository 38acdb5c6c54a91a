"""The whole forward pass over a cache in the official encoding: whatever path wrote a row, the bits are the same."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Literal

import pytest
import torch
from torch import Tensor

from dsparkd.kernels import packed
from dsparkd.kernels.indexer import Visible
from dsparkd.kernels.row_layout import scales_at
from dsparkd.kv.geometry import PoolSizes
from dsparkd.model.indexer import Indexer, IndexQuery
from tools.gates.oracle import random_chunks
from tools.oracle import Engine, plan_row

LENGTH = 330
IDS = [random.Random(i).randrange(192) for i in range(LENGTH)]
PAGES = (3, 1)
KV_DTYPES: tuple[Literal["model", "fp8"], ...] = ("model", "fp8")
NAN = 0xFF  # of a code, of a scale, and twice of a bfloat16


@pytest.fixture(scope="module")
def engine(small_checkpoint: Path) -> Engine:
    return Engine(small_checkpoint, sizes=PoolSizes(40, 8, 4), kv_dtype="fp8")


@pytest.fixture(scope="module")
def whole(engine: Engine) -> Tensor:
    """The prompt in one step, alone: what every other way must reproduce."""
    return engine.logits(IDS, [LENGTH], slot=1, pages=PAGES)


def test_it_is_near_the_plain_cache_and_not_the_same(small_checkpoint: Path, whole: Tensor) -> None:
    """Rounded keys move logits a little; if they moved none, nothing would be rounded."""
    plain = Engine(small_checkpoint, sizes=PoolSizes(40, 8, 4)).logits(IDS, [LENGTH], slot=1, pages=PAGES)
    assert not torch.equal(plain, whole)
    assert (plain - whole).abs().mean() < 0.15 * plain.std()
    assert (plain.argmax(1) == whole.argmax(1)).float().mean() > 0.6


def test_the_indexer_mostly_chooses_as_over_plain_keys(small_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Queries are turned as their keys are: products of which only one side were would choose by chance."""
    chosen: list[Tensor] = []
    choose = Indexer.choose

    def watched(self: Indexer, query: IndexQuery, part: slice, keys: Tensor, visible: Visible) -> Tensor:
        slots = choose(self, query, part, keys, visible)
        chosen.append(slots[:, : self.topk])
        return slots

    monkeypatch.setattr(Indexer, "choose", watched)
    for kv_dtype in KV_DTYPES:
        engine = Engine(small_checkpoint, sizes=PoolSizes(40, 8, 4), kv_dtype=kv_dtype)
        engine.logits(IDS, [LENGTH], slot=1, pages=PAGES)
    plain, turned = chosen[: len(chosen) // 2], chosen[len(chosen) // 2 :]
    same = [len({*one.tolist()} & {*other.tolist()}) for one, other in zip(plain[0], turned[0], strict=True)]
    assert sum(same[-50:]) > 0.7 * 50 * 16


@pytest.mark.parametrize("seed", range(3))
def test_any_cut_into_chunks_gives_the_same_bits(engine: Engine, whole: Tensor, seed: int) -> None:
    """T-37: rows are rounded alike whether they are read in the step that makes them or out of the pool."""
    assert torch.equal(engine.logits(IDS, random_chunks(LENGTH, seed), slot=2, pages=(9, 5)), whole)


def test_token_by_token_gives_the_same_bits(engine: Engine, whole: Tensor) -> None:
    """Decode from the first token on, across entry, window and page boundaries."""
    assert torch.equal(engine.logits(IDS, [1] * LENGTH, slot=3, pages=(6, 7)), whole)


def test_a_prefix_hit_gives_the_same_bits(engine: Engine, whole: Tensor) -> None:
    """T-37: pages and a snapshot carry their scales into another slot, behind rings that were full of NaN."""
    engine.step([plan_row(IDS[:256], 0, 1, PAGES)])
    engine.pool.save_snapshot(1, 2, 256)
    engine.step([plan_row([1] * 40, 256, 1, (PAGES[0], 30))])
    engine.pool.window[:, 6 * engine.geometry.window_ring_rows :] = NAN
    engine.pool.load_snapshot(6, 2, 256)
    outputs = [engine.step([plan_row(IDS[256:300], 256, 6, (PAGES[0], 31))]).logits]
    outputs += [engine.step([plan_row([IDS[p]], p, 6, (PAGES[0], 31))]).logits for p in range(300, LENGTH)]
    assert torch.equal(torch.cat(outputs), whole[256:])


@pytest.mark.parametrize("name", ["csa_entries", "hca_entries", "window"])
def test_a_row_without_its_scales_is_noticed(engine: Engine, whole: Tensor, name: str) -> None:
    """The control: scales that a copy left behind would show."""
    engine.step([plan_row(IDS[:256], 0, 1, PAGES)])
    engine.pool.save_snapshot(1, 0, 256)
    engine.pool.load_snapshot(6, 0, 256)
    rows = getattr(engine.pool, name)
    kept = rows.clone()
    begin = scales_at(64, 32)
    rows[..., begin : begin + 1] += (rows[..., begin : begin + 1] > 0).to(torch.uint8)
    resumed = engine.step([plan_row(IDS[256:], 256, 6, (PAGES[0], 31))]).logits
    rows.copy_(kept)
    assert not torch.equal(resumed, whole[256:])


def test_rejected_rows_leave_no_trace(engine: Engine, whole: Tensor) -> None:
    """Retraction: what a rejected draft stored is stored again, scales and all, before anything reads it."""
    gamma, pages = engine.config.gamma, (9, 5)
    outputs = [engine.step([plan_row(IDS[:240], 0, 2, pages)]).logits]
    for p in range(240, 290):
        block = [IDS[p], *([(IDS[p] + 50) % 192] * gamma)]
        outputs.append(engine.step([plan_row(block, p, 2, pages)]).logits[:1])
    assert torch.equal(torch.cat(outputs), whole[:290])


def test_nothing_outside_a_sequence_is_read(small_checkpoint: Path, whole: Tensor) -> None:
    """NaN in every page and slot but the null ones: masking must select, for 0 * NaN is NaN."""
    engine = Engine(small_checkpoint, sizes=PoolSizes(40, 8, 4), kv_dtype="fp8")
    g, pool = engine.geometry, engine.pool
    for tensor, null_rows in (
        (pool.window, g.window_ring_rows),
        (pool.csa_entries, g.csa_entries_per_page),
        (pool.csa_keys, g.csa_entries_per_page),
        (pool.hca_entries, g.hca_entries_per_page),
    ):
        tensor[:, null_rows:] = NAN
    assert torch.equal(engine.logits(IDS, random_chunks(LENGTH, 9), slot=2, pages=(9, 5)), whole)


def test_the_pool_is_as_large_as_the_geometry_says(engine: Engine) -> None:
    """And holds bytes, each of a row of the encoding."""
    g, pool = engine.geometry, engine.pool
    assert pool.device_bytes == pool.sizes.device_bytes(g)
    assert pool.csa_entries.shape[2] == g.key_bytes == 112
    assert pool.csa_keys.shape[2] == g.index_key_bytes == 48
    assert all(packed.is_packed(rows) for rows in (pool.window, pool.csa_entries, pool.csa_keys, pool.hca_entries))
    assert not packed.is_packed(pool.draft_keys)


def test_bfloat16_gives_the_same_bits_in_any_chunks(small_checkpoint: Path) -> None:
    """Rounding is exact in bfloat16: what it adds to a step is nothing that depends on the path."""
    engine = Engine(small_checkpoint, dtype=torch.bfloat16, sizes=PoolSizes(40, 8, 4), kv_dtype="fp8")
    whole = engine.logits(IDS, [LENGTH], slot=1, pages=PAGES)
    assert torch.equal(engine.logits(IDS, random_chunks(LENGTH, 1), slot=2, pages=(9, 5)), whole)
