"""Sizes of pages, slots and snapshots, against the published figures of the Flash geometry."""

from __future__ import annotations

import dataclasses
import re

import pytest

from dsparkd.config import Config, EngineConfig, KVConfig, SchedulerConfig
from dsparkd.errors import ConfigError
from dsparkd.kv.geometry import KVGeometry, PoolSizes, fit_pool, size_pool


def flash(gamma: int = 5, page_tokens: int = 256) -> KVGeometry:
    return KVGeometry(
        num_layers=43,
        num_csa_layers=21,
        num_hca_layers=20,
        head_dim=512,
        index_head_dim=128,
        window=128,
        gamma=gamma,
        page_tokens=page_tokens,
        kv_bytes=2,
    )


def test_a_flash_page_takes_the_published_bytes() -> None:
    """1,761,280 bytes hold 256 tokens of 43 layers in bfloat16: 6,880 bytes a token of context."""
    assert flash().page_bytes == 1_761_280
    assert flash().page_bytes / 256 == 6_880
    assert (flash().csa_entries_per_page, flash().hca_entries_per_page) == (64, 2)


def test_a_flash_snapshot_takes_the_published_bytes() -> None:
    """At a page end: 5,636,096 bytes of window rows and 430,080 bytes of CSA overlap."""
    assert flash().snapshot_bytes == 5_636_096 + 430_080


def test_a_packed_page_takes_four_sevenths() -> None:
    """592 bytes an entry, with its 7 scales, and 80 an indexer key: 927,808 bytes a page, in place of 1,761,280."""
    packed = dataclasses.replace(flash(), rotary_dim=64, is_packed=True)
    assert (packed.key_bytes, packed.index_key_bytes) == (592, 80)
    assert packed.page_bytes == 21 * 64 * (592 + 80) + 20 * 2 * 592
    assert packed.snapshot_bytes == 43 * 128 * 592 + 430_080
    assert flash().slot_bytes - packed.slot_bytes == 43 * 133 * (1024 - 592)


def test_a_drafter_s_keys_stay_as_they_are() -> None:
    """What it reads decides no token, and its rings are small."""
    plain, packed = (
        dataclasses.replace(flash(), rotary_dim=64, is_packed=is_packed, num_draft_stages=3)
        for is_packed in (False, True)
    )
    assert packed.snapshot_bytes - plain.snapshot_bytes == 43 * 128 * (592 - 1024)


@pytest.mark.parametrize(("index_width", "rotary"), [(16, 64), (96, 64), (128, 63)])
def test_widths_that_cannot_be_packed_are_refused(index_width: int, rotary: int) -> None:
    """The turn needs a power of two, a scale 32 columns, and the rotary columns an even byte to begin at."""
    with pytest.raises(ConfigError, match=r'engine\.kv_dtype.*of the checkpoint is .*; use "model"'):
        dataclasses.replace(flash(), index_head_dim=index_width, rotary_dim=rotary, is_packed=True)
    dataclasses.replace(flash(), index_head_dim=index_width, rotary_dim=rotary)


def test_a_flash_slot_is_its_three_rings() -> None:
    """Window rows are bfloat16, compressor rows float32: 10.5 MB a sequence in the HCA rings alone."""
    hca = 20 * 128 * 1024 * 4
    assert hca == 10_485_760
    assert flash(gamma=0).slot_bytes == 5_636_096 + 21 * 8 * (2048 + 512) * 4 + hca


@pytest.mark.parametrize(("gamma", "rows"), [(0, (128, 8, 128)), (1, (129, 9, 129)), (5, (133, 13, 133))])
def test_rings_keep_what_rejected_rows_would_overwrite(gamma: int, rows: tuple[int, int, int]) -> None:
    """A verify step's 1 + gamma rows are stored before any is read, so window + gamma is the tight bound."""
    g = flash(gamma)
    assert (g.window_ring_rows, g.csa_ring_rows, g.hca_ring_rows) == rows


def test_rings_that_gather_a_snapshot_are_without_those_of_hca() -> None:
    """No entry straddles a page, so nothing of an HCA ring is kept at its end: 8 MB a page end instead of 18."""
    assert flash(0).inner_slot_bytes == flash(0).slot_bytes - 10_485_760


def test_a_page_shorter_than_the_window_is_refused() -> None:
    """A snapshot inside a chunk is of the chunk's own rows, from a page before it on."""
    with pytest.raises(ConfigError, match=r"kv\.page_tokens.*window of 512"):
        dataclasses.replace(flash(), window=512)


def test_a_page_that_would_split_an_entry_is_refused() -> None:
    """No entry straddles a page, so a page is a multiple of 128 tokens."""
    with pytest.raises(ConfigError, match=r"kv\.page_tokens"):
        flash(page_tokens=192)


def test_a_budget_is_never_exceeded_and_hardly_left_unused() -> None:
    """C-01: kv.device_bytes bounds pages, slots and snapshots together."""
    budget = 20 << 30
    sizes = fit_pool(flash(), budget, max_rows=64, snapshot_share=0.25)

    assert sizes.num_slots == 65
    used = sizes.device_bytes(flash())
    assert budget - flash().page_bytes - flash().snapshot_bytes < used <= budget
    assert sizes.num_snapshots * flash().snapshot_bytes <= 0.25 * budget


def test_a_budget_without_room_for_a_page_names_the_least_that_has() -> None:
    """The remedy is a number that works."""
    least = 9 * flash().slot_bytes + 2 * flash().page_bytes
    with pytest.raises(ConfigError, match=str(least)):
        fit_pool(flash(), least - 1, max_rows=8, snapshot_share=0.0)
    assert fit_pool(flash(), least, max_rows=8, snapshot_share=0.0) == PoolSizes(2, 9, 0)


@pytest.mark.parametrize("num_layers", [(4, 18, 12), (4, 0, 0)])
@pytest.mark.parametrize("snapshot_share", [0.001, 0.25, 0.9])
def test_the_least_leaves_its_pages_whatever_share_snapshots_take(
    num_layers: tuple[int, int, int], snapshot_share: float
) -> None:
    """Also of pages that are larger than snapshots, and of a model that keeps nothing in them."""
    total, csa, hca = num_layers
    geometry = dataclasses.replace(flash(page_tokens=8192), num_layers=total, num_csa_layers=csa, num_hca_layers=hca)
    with pytest.raises(ConfigError) as refusal:
        fit_pool(geometry, 1, max_rows=8, snapshot_share=snapshot_share)
    found = re.search(r"at least (\d+) bytes", str(refusal.value))
    assert found is not None
    assert fit_pool(geometry, int(found[1]), max_rows=8, snapshot_share=snapshot_share).num_pages >= 2


def test_pages_for_tokens_round_up() -> None:
    """The last page may be partly filled."""
    assert [flash().num_pages_for(n) for n in (0, 1, 256, 257)] == [0, 1, 1, 2]


def config_of(budget: int, max_context_tokens: int, snapshot_share: float) -> Config:
    return Config(
        engine=EngineConfig(checkpoint="/model", max_context_tokens=max_context_tokens),
        kv=KVConfig(device_bytes=budget, snapshot_share=snapshot_share),
        scheduler=SchedulerConfig(max_rows=8, chunk_tokens=2048),
    )


@pytest.mark.parametrize("snapshot_share", [0.001, 0.25, 0.9])
@pytest.mark.parametrize("context", [256, 16_384, 100_000])
def test_a_pool_without_room_for_one_longest_sequence_is_refused_with_the_bytes_that_do(
    context: int, snapshot_share: float
) -> None:
    """Decision 11: else one admitted request could never finish. The remedy, followed, works."""
    geometry = flash()
    budget = 9 * geometry.slot_bytes + 8 * geometry.inner_slot_bytes + 2 * geometry.page_bytes
    with pytest.raises(ConfigError, match=r"kv\.device_bytes") as refusal:
        size_pool(geometry, config_of(budget, context, snapshot_share), budget)
    assert f"engine.max_context_tokens ({context})" in str(refusal.value)
    found = re.search(r"at least (\d+) bytes", str(refusal.value))
    assert found is not None
    enough = int(found[1])

    sizes = size_pool(geometry, config_of(enough, context, snapshot_share), enough)

    assert (sizes.num_pages - 1) * 256 >= context + geometry.gamma + 1
    assert sizes.num_inner_slots == 8, "a page end inside a chunk has a page of the chunk before it"
    assert sizes.device_bytes(geometry) <= enough
