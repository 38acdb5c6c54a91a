"""Captured shapes: what a graph makes of their words, against what staging lays out for the same plan."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from dsparkd.errors import InvariantError
from dsparkd.executor.plan import Plan, PlanRow, StepKind
from dsparkd.executor.shapes import FAR, Behind, DraftShape, Feed, ShapeLimits, VerifyShape, choose_tiers
from dsparkd.executor.staging import Drafted, Stager
from dsparkd.kv.geometry import KVGeometry, PoolSizes
from dsparkd.kv.pool import KVPool
from dsparkd.messages import SamplingParams
from dsparkd.model.inputs import CompressedMetadata

CPU = torch.device("cpu")
GAMMA, MAX_ROWS, PAGES, TOPK = 5, 7, 6, 64
GEOMETRY = KVGeometry(
    num_layers=3,
    num_csa_layers=1,
    num_hca_layers=1,
    head_dim=8,
    index_head_dim=8,
    window=16,
    gamma=GAMMA,
    page_tokens=128,
    kv_bytes=4,
    num_draft_stages=1,
)
SIZES = PoolSizes(num_pages=1 + MAX_ROWS * PAGES, num_slots=1 + MAX_ROWS, num_snapshots=1)
LIMITS = ShapeLimits(MAX_ROWS, PAGES, 1 + GAMMA)
GREEDY = SamplingParams(max_tokens=8, seed=3, temperature=0.0)


def make_pool() -> KVPool:
    return KVPool(GEOMETRY, SIZES, torch.float32, CPU)


def make_windows() -> Tensor:
    """Ids of every row's window, and the row of zeros."""
    ids = torch.arange(1000, 1000 + (1 + MAX_ROWS) * (1 + GAMMA)).view(1 + MAX_ROWS, 1 + GAMMA)
    ids[-1] = 0
    return ids


def make_shape(num_tokens: int = 48, limits: ShapeLimits = LIMITS) -> VerifyShape:
    windows = make_windows()
    return VerifyShape(num_tokens, limits, make_pool(), TOPK, windows)


def row(slot: int, start: int, width: int = 1, **other: object) -> PlanRow:
    made = PlanRow(
        request_id=f"slot {slot}",
        slot=slot,
        input_ids=(7 + slot, *(3,) * (width - 1)),  # drafts' own ids stand elsewhere
        start=start,
        page_table=tuple(range(1 + max(slot - 1, 0) * PAGES, 1 + max(slot, 1) * PAGES)),
        num_logits=width,
        sampling=GREEDY,
        prompt_ids=(),
        output_ids=(),
    )
    return dataclasses.replace(made, **other)  # type: ignore[arg-type]


def random_plan(draw: random.Random, num_tokens: int) -> Plan:
    """Any decode step that a tier of num_tokens admits; positions near the ends of pages and entries are common."""
    rows: list[PlanRow] = []
    left = num_tokens
    for slot in draw.sample(range(1, 1 + MAX_ROWS), draw.randint(0, MAX_ROWS)):
        width = min(draw.randint(1, 1 + GAMMA), left)
        if width:
            most = PAGES * GEOMETRY.page_tokens - width
            near = 128 * draw.randint(0, PAGES) + draw.randint(-8, 8)
            rows.append(row(slot, min(max(draw.choice((near, draw.randint(0, most))), 0), most), width))
            left -= width
    return Plan(StepKind.DECODE, tuple(rows))


@pytest.mark.parametrize("num_tokens", [1, 2, 6, 16, 32, 48])
def test_every_admitted_plan_is_laid_out_as_staging_does(num_tokens: int) -> None:
    """P-03, T-02: the tier admits by numbers of tokens alone, and no plan within them meets a reason to refuse. The
    shape is one object that all plans go through in turn, so nothing of an earlier one may show. T-05: there is one
    path, the general one, for windows of one length, too."""
    draw = random.Random(num_tokens)
    shape, stager = make_shape(num_tokens), Stager(GEOMETRY, TOPK, CPU)
    for _ in range(150):
        plan = random_plan(draw, num_tokens)
        lengths = [len(each.input_ids) - 1 for each in plan.rows]
        windows = make_windows()[: len(plan.rows)]
        expected = stager.stage(plan, num_tokens, Drafted(windows, lengths) if plan.rows else None)

        shape.refresh(plan, lengths)
        got = shape.inputs(is_long=shape.is_long)

        n = plan.num_tokens
        assert got.num_live.tolist() == [n]
        assert got.num_tokens == got.num_logits == num_tokens
        assert got.logit_rows is None
        assert torch.equal(got.input_ids, expected.input_ids)
        assert torch.equal(got.positions, expected.positions)
        window = got.attention.blocks[0]
        assert window.all_visible is False
        for block in expected.attention.blocks:
            part = slice(block.start, block.stop)
            assert torch.equal(window.sources[part], block.sources)
            assert torch.equal(window.first[part], block.first)
        stores = [
            (got.attention.window_store, expected.attention.window_store),
            (got.draft_store, expected.draft_store),
        ]
        for one, other in stores:
            assert one is not None
            assert other is not None
            assert torch.equal(one.dst[:n], other.dst)
            assert not one.dst[n:].any()
        for kind, span in (("csa", 8), ("hca", 128)):
            compare(getattr(got.attention, kind), getattr(expected.attention, kind), n, span)
        csa = expected.attention.csa
        assert csa is not None
        assert shape.is_long == (int(csa.counts.max()) > TOPK)


def compare(got: CompressedMetadata, expected: CompressedMetadata, n: int, span: int) -> None:
    """One ratio: the live part is staging's, the rest is nobody's."""
    m = expected.num_closing
    assert torch.equal(got.store.dst[:n], expected.store.dst)
    assert torch.equal(got.closing.view(-1, span)[:m], expected.closing.view(-1, span))
    assert torch.equal(got.closing_positions[:m], expected.closing_positions)
    assert torch.equal(got.closing_dst[:m], expected.closing_dst)
    assert not got.closing_dst[m:].any()
    assert (got.closing.view(-1, span)[m:] >= 0).all()  # of the step's own rows none
    assert torch.equal(got.counts, expected.counts)
    assert torch.equal(got.row_ids, expected.row_ids)
    for token, count in enumerate(expected.counts[:n].tolist()):
        own, other = int(got.row_ids[token]), int(expected.row_ids[token])
        assert torch.equal(got.entry_slots[own, :count], expected.entry_slots[other, :count])
        assert count <= got.entry_slots.shape[1]
    if span == 8 and expected.first is not None:
        assert got.first is not None
        assert torch.equal(got.first[:m], expected.first)


def test_addresses_and_shapes_never_change_and_every_word_behind_the_rows_is_a_sentinel() -> None:
    """P-11, P-12, T-01: a full step, then one of a single row, many times; what the single one leaves is what it would
    leave alone."""
    full = Plan(StepKind.DECODE, tuple(row(slot, 100 * slot, 6) for slot in range(1, 1 + MAX_ROWS)))
    single = Plan(StepKind.DECODE, (row(3, 127, 2),))
    fresh, shape = make_shape(), make_shape()
    for _ in range(2):  # both host buffers
        fresh.refresh(single, [1])
    before = {name: (words.data_ptr(), words.shape, words.stride()) for name, words in shape.feed.tensors.items()}

    for _ in range(50):
        shape.refresh(full, [5] * MAX_ROWS)
        shape.refresh(single, [1])
        shape.refresh(single, [1])

    after = {name: (words.data_ptr(), words.shape, words.stride()) for name, words in shape.feed.tensors.items()}
    assert after == before
    for name, words in shape.feed.tensors.items():
        assert torch.equal(words, fresh.feed.tensors[name]), name
    assert shape.feed.tensors["hca.starts"].tolist() == [127] + [FAR] * (MAX_ROWS - 1)
    assert not shape.feed.tensors["pages"][1:].any()


class Event:
    """A copy's end."""

    def __init__(self, log: list[str], name: str) -> None:
        self.log, self.name, self.is_done = log, name, True

    def query(self) -> bool:
        return self.is_done

    def synchronize(self) -> None:
        self.log.append(f"wait {self.name}")

    def record(self) -> None:
        self.log.append(f"sent {self.name}")


def test_words_that_are_still_read_are_not_written() -> None:
    """U-04: a buffer waits for its own copy alone, and only where that is not done."""
    log: list[str] = []
    feed = Feed({"x": (3,)}, CPU)
    events = Event(log, "first"), Event(log, "second")
    feed._sent = events  # type: ignore[assignment]
    for value in (1, 2, 3):
        feed.arrays()["x"][:] = value
        feed.send()
        assert feed.tensors["x"].tolist() == [value] * 3
    assert log == ["sent first", "sent second", "sent first"]
    events[0].is_done = False
    feed.arrays()
    assert log[3:] == []
    feed.send()
    feed.arrays()
    assert log[3:] == ["sent second", "wait first"]


@pytest.mark.gpu
def test_a_forward_that_is_late_reads_what_it_was_launched_with() -> None:
    """U-04: three refreshes while the stream is busy; each copy out of the words sees its own."""
    feed, seen = Feed({"x": (5000,)}, torch.device("cuda", 0)), []
    torch.cuda._sleep(40_000_000)  # type: ignore[no-untyped-call]
    for value in (1, 2, 3):
        feed.arrays()["x"][:] = value
        feed.send()
        seen.append(feed.tensors["x"].clone())
    assert [(int(each.min()), int(each.max())) for each in seen] == [(1, 1), (2, 2), (3, 3)]


BROKEN: dict[str, Callable[[], tuple[PlanRow, ...]]] = {
    "8 rows of 8 tokens": lambda: tuple(row(1 + slot % MAX_ROWS, 9) for slot in range(8)),
    "rows of 17 tokens": lambda: (row(1, 9, 6), row(2, 9, 6), row(3, 9, 5)),
    "slot 8 of 8": lambda: (row(8, 9, page_table=(1,)),),
    "page 43 of 43": lambda: (row(1, 9, page_table=(43,)),),
    "1 logit rows": lambda: (row(1, 9, 2, num_logits=1),),
    "1 pages do not cover 129 tokens": lambda: (row(1, 127, 2, page_table=(1,)),),
    "a row at slot 0": lambda: (row(0, 9),),
    "3 entries of 4 tokens": lambda: (row(1, 10, 6), row(2, 9, 6)),
    "7 tokens in a graph's decode step": lambda: (row(1, 9, 7),),
}


@pytest.mark.parametrize("reason", BROKEN)
def test_a_plan_that_a_shape_does_not_hold_is_refused_before_anything_is_sent(reason: str) -> None:
    """T-02, P-07: each bound broken by one; the words on the device stay."""
    shape = make_shape(16 if "entries" not in reason else 32, ShapeLimits(MAX_ROWS, PAGES, 1 + GAMMA))
    if "entries" in reason:
        shape = make_shape(32, ShapeLimits(2, PAGES, 1))
    before = {name: words.clone() for name, words in shape.feed.tensors.items()}

    with pytest.raises(InvariantError, match=reason):
        shape.refresh(Plan(StepKind.DECODE, BROKEN[reason]()), [0] * len(BROKEN[reason]()))

    assert all(torch.equal(words, before[name]) for name, words in shape.feed.tensors.items())


def test_a_draft_shape_lays_anchors_out_and_hides_everything_from_padding() -> None:
    """P-12: blocks behind the live ones see no context, and are greedy."""
    pool = make_pool()
    shape = DraftShape(4, pool, is_coupled=True)
    seeded = SamplingParams(max_tokens=8, seed=77, temperature=0.7)
    rows = (row(2, 10), row(5, 300, sampling=seeded))
    shape.refresh(tuple(row(slot, 200 + slot, sampling=seeded) for slot in (1, 2, 3, 4)))
    shape.refresh(rows)
    shape.refresh(rows)

    got, sampling = shape.inputs(make_windows(), torch.zeros(1, dtype=torch.int64)), shape.sampling(is_drawn=True)

    ring = GEOMETRY.draft_ring_rows
    assert got.num_live_blocks is not None
    assert got.num_live_blocks.tolist() == [2]
    assert got.anchor_ids.tolist() == [9, 12, 0, 0]
    assert got.positions.tolist() == [10, 300, 0, 0]
    assert got.first.tolist() == [6, 0, 16, 16]
    assert got.sources[0].tolist() == [0] * 6 + [2 * ring + position for position in range(10)]
    assert got.sources[1].tolist() == [5 * ring + position % ring for position in range(284, 300)]
    assert not got.sources[2:].any()
    assert sampling is not None
    was_drawn = shape.is_drawn
    assert sampling.temperatures.tolist() == torch.tensor([0.0, 0.7, 0.0, 0.0]).tolist()
    assert sampling.seeds.tolist() == [3, 77, 0, 0]
    behind = Behind(make_windows()[:2], torch.tensor([1001, 1002, 5, 2]), np.array([0, 3]), np.array([2, 0]))
    shape.refresh(rows, behind)
    moved = shape.inputs(make_windows(), behind.ids)
    assert moved.anchor_ids.tolist() == [5, 2, 0, 0]  # two drafts stand, and none
    assert moved.positions.tolist() == [13, 301, 0, 0]
    assert moved.first.tolist() == [3, 0, 16, 16]
    shape.refresh(rows[:1])
    assert (was_drawn, shape.is_drawn) == (True, False)
    with pytest.raises(InvariantError, match="5 blocks in a graph for 4"):
        shape.refresh((rows[0],) * 5)
    with pytest.raises(InvariantError, match="slot 8 of 8"):
        shape.refresh((row(8, 1),))


@pytest.mark.parametrize(
    ("most", "tiers"),
    [
        (1, (1,)),
        (2, (1, 2)),
        (7, (1, 2, 4, 6, 7)),
        (16, (1, 2, 4, 6, 8, 12, 16)),
        (100, (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 100)),
        (384, (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384)),
    ],
)
def test_tiers_grow_by_half_at_most_up_to_what_can_come(most: int, tiers: tuple[int, ...]) -> None:
    """P-22: a step of one row runs as one row; padding is less than half, and the last holds the largest step."""
    assert choose_tiers(most) == tiers
