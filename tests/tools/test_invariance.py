"""How the invariance gate counts, and what it takes as proof."""

from __future__ import annotations

import msgspec
import pytest

from dsparkd.config import Config, EngineConfig, KVConfig, SchedulerConfig
from dsparkd.kv.geometry import size_pool
from dsparkd.model.config import load_model_config
from tools.gates import invariance
from tools.gates.invariance import Way
from tools.harness import ensure_checkpoint
from tools.placement import Placement
from tools.workload import Answer, Item, num_differing


def answer(cached_tokens: int) -> Answer:
    """An answer of which only the cached tokens matter."""
    return Answer(("a",), (-1.0,), "a", "length", (), cached_tokens)


@pytest.mark.parametrize(
    ("base", "other", "count"), [("abc", "abc", 0), ("abc", "axc", 1), ("abc", "ab", 1), ("ab", "axyz", 3)]
)
def test_a_shorter_or_longer_run_differs_in_what_the_other_lacks(base: str, other: str, count: int) -> None:
    """A run that ended early must not look equal because its beginning is."""
    assert num_differing(tuple(base), tuple(other)) == count


def test_a_prefix_hit_is_proven_by_every_long_prompt() -> None:
    """One that was computed cold would be compared with itself."""
    items = [Item([3] * length, {}, 4) for length in (100, 300, 600)]

    assert invariance._hits(items, [answer(0), answer(256), answer(512)])[1]
    assert not invariance._hits(items, [answer(0), answer(0), answer(512)])[1]
    assert not invariance._hits(items[:1], [answer(0)])[1]
    assert invariance._no_hits(items, [answer(0)] * 3)[1]
    assert not invariance._no_hits(items, [answer(0), answer(256), answer(0)])[1]


@pytest.mark.parametrize(
    ("dtype", "ids", "logprobs", "proven", "ok"),
    [
        ("float32", 0, 0, True, True),
        ("float32", 1, 1, True, False),
        ("float32", 0, 1, True, False),
        ("float32", 0, 0, False, False),
        ("bfloat16", 3, 9, True, True),
        ("bfloat16", 0, 0, False, False),
    ],
)
def test_float32_must_be_exact_and_every_way_proven(
    dtype: str, ids: int, logprobs: int, proven: bool, ok: bool
) -> None:
    """A way that was not taken shows nothing, whatever the counts."""
    way = Way("way", dtype, "cpu", ids, ids, logprobs, 100, "proof", proven, 1.0)

    assert way.ok == ok


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_tiny_pool_buys_the_pages_whose_lack_forces_a_retract(dtype: str) -> None:
    """With one page more nothing is retracted, and the way would prove nothing."""
    checkpoint = ensure_checkpoint()

    pool = invariance.tiny_pool(checkpoint, Placement(dtype=dtype))

    geometry = load_model_config(checkpoint).kv_geometry(
        invariance.PAGE_TOKENS, "float32" if dtype == "float32" else "bfloat16", drafts=True
    )
    kv, scheduler = pool["kv"], pool["scheduler"]
    config = Config(
        engine=EngineConfig(checkpoint=str(checkpoint), max_context_tokens=256),
        kv=msgspec.convert(kv, KVConfig),
        scheduler=msgspec.convert(scheduler, SchedulerConfig),
    )
    sizes = size_pool(geometry, config, int(str(kv["device_bytes"])))
    assert (sizes.num_pages, sizes.num_snapshots) == (invariance.TINY_PAGES, 2)
