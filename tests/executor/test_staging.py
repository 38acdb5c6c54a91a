"""Plan -> ForwardInputs, against a plain reading of the definitions, token by token."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from dsparkd.errors import InvariantError
from dsparkd.executor.plan import Plan, PlanRow, SnapshotSave, StepKind
from dsparkd.executor.staging import Drafted, Stager
from dsparkd.kv.geometry import KVGeometry
from dsparkd.model.inputs import CompressedMetadata

GEOMETRY = KVGeometry(
    num_layers=3,
    num_csa_layers=1,
    num_hca_layers=1,
    head_dim=8,
    index_head_dim=8,
    window=16,
    gamma=0,
    page_tokens=128,
    kv_bytes=4,
)


def row(slot: int, start: int, count: int, pages: tuple[int, ...], num_logits: int = 1) -> PlanRow:
    return PlanRow(
        request_id=f"slot {slot}",
        slot=slot,
        input_ids=tuple(range(100 * slot, 100 * slot + count)),
        start=start,
        page_table=pages,
        num_logits=num_logits,
        sampling=None,
        prompt_ids=(),
        output_ids=(),
    )


MIXED = Plan(
    StepKind.MIXED,
    (
        row(3, 130, 1, (9, 4)),
        row(1, 255, 1, (2, 7)),
        row(5, 0, 300, (1, 3, 5), num_logits=2),
        row(2, 126, 10, (6, 8), num_logits=0),
    ),
)


def stage(plan: Plan, topk: int = 16, geometry: KVGeometry = GEOMETRY):  # type: ignore[no-untyped-def]
    return Stager(geometry, topk, torch.device("cpu")).stage(plan)


def tokens_of(plan: Plan) -> list[tuple[PlanRow, int, int]]:
    """Row, its first token, position, for every real token."""
    listed = []
    for one in plan.rows:
        first = len(listed)
        listed += [(one, first, one.start + i) for i in range(len(one.input_ids))]
    return listed


def expected_source(one: PlanRow, first: int, position: int, ring: int) -> tuple[str, int]:
    """Where a row's state of a position lies: nowhere, in the ring, or in the chunk."""
    if position < 0:
        return "ring", 0
    if position < one.start:
        return "ring", one.slot * ring + position % ring
    return "chunk", first + position - one.start


def named(sources: Tensor) -> list[tuple[str, int]]:
    return [("ring", source) if source >= 0 else ("chunk", -1 - source) for source in sources.flatten().tolist()]


def test_drafts_that_only_the_device_knows_stand_behind_their_anchors() -> None:
    """D-07: the host lays out places and lengths; ids come from the windows, as many of each as are verified."""
    rows = (row(3, 130, 3, (9, 4)), row(1, 255, 1, (2, 7)), row(2, 126, 5, (6, 8)))
    windows = torch.arange(100, 118).view(3, 6)
    plan = Plan(StepKind.DECODE, rows)
    inputs = Stager(GEOMETRY, 16, torch.device("cpu")).stage(plan, None, Drafted(windows, (2, 0, 4)))
    known = Stager(GEOMETRY, 16, torch.device("cpu")).stage(plan)
    assert inputs.input_ids[:9].tolist() == [300, 101, 102, 100, 200, 113, 114, 115, 116]
    assert inputs.input_ids[9:].tolist() == [0] * 7
    assert torch.equal(inputs.positions, known.positions)
    assert torch.equal(inputs.logit_rows, known.logit_rows)


def test_tokens_are_flat_padded_and_positioned() -> None:
    """Ids and positions in plan order, padding to sixteen rows behind them."""
    inputs = stage(MIXED)
    expected = tokens_of(MIXED)
    assert inputs.num_tokens == 312
    assert inputs.num_padded_tokens == 320
    assert inputs.positions.tolist() == [position for _, _, position in expected] + [0] * 8
    assert inputs.input_ids[:2].tolist() == [300, 100]


def test_logit_rows_are_the_last_of_each_row() -> None:
    """A chunk that is not a prompt's last asks for none; the head's rows are padded too."""
    inputs = stage(MIXED)
    assert inputs.num_logits == 4
    assert inputs.logit_rows.tolist() == [0, 1, 300, 301] + [0] * 12


def test_window_keys_are_the_last_positions_in_order() -> None:
    """Each token sees positions p-15..p: from the ring before its row's start, from the chunk after it."""
    inputs = stage(MIXED)
    found: list[tuple[str, int]] = []
    hidden: list[bool] = []
    for block in inputs.attention.blocks:
        found += named(block.sources)
        hidden += (torch.arange(16) < block.first[:, None]).flatten().tolist()
        assert block.all_visible == (not block.first.any())
    expected, expected_hidden = [], []
    for one, first, position in tokens_of(MIXED):
        for p in range(position - 15, position + 1):
            expected.append(expected_source(one, first, p, GEOMETRY.window_ring_rows))
            expected_hidden.append(p < 0)
    assert found == expected
    assert hidden == expected_hidden


def test_padding_attends_to_nothing_and_stores_nothing() -> None:
    """Otherwise it costs time, or the null slot is written."""
    inputs = stage(MIXED)
    assert inputs.attention.blocks[-1].stop == 312
    csa, hca = inputs.attention.csa, inputs.attention.hca
    assert csa is not None
    assert hca is not None
    for store, ring in ((inputs.attention.window_store, 16), (csa.store, 8), (hca.store, 128)):
        assert int(store.src.max()) < 312
        assert int(store.dst.min()) >= ring
    assert not csa.counts[312:].any()


@pytest.mark.parametrize("ratio", [4, 128])
def test_entries_that_close_gather_their_window_and_land_in_their_page(ratio: int) -> None:
    """A CSA entry gathers the window before its own as well; an entry's place follows from the page table alone."""
    inputs = stage(MIXED)
    metadata = inputs.attention.csa if ratio == 4 else inputs.attention.hca
    assert isinstance(metadata, CompressedMetadata)
    ring = GEOMETRY.csa_ring_rows if ratio == 4 else GEOMETRY.hca_ring_rows
    expected, destinations, positions = [], [], []
    for one, first, position in tokens_of(MIXED):
        if (position + 1) % ratio == 0:
            w = position // ratio
            low = ratio * w - (4 if ratio == 4 else 0)
            expected += [expected_source(one, first, p, ring) for p in range(low, position + 1)]
            per_page = 128 // ratio
            destinations.append(one.page_table[w // per_page] * per_page + w % per_page)
            positions.append(ratio * w)
    assert named(metadata.closing) == expected
    assert metadata.closing_dst.tolist() == destinations
    assert metadata.closing_positions.tolist() == positions
    assert metadata.num_closing == len(destinations)
    if ratio == 4:
        assert metadata.first is not None
        assert metadata.first.nonzero().flatten().tolist() == [positions.index(0)]


@pytest.mark.parametrize("ratio", [4, 128])
def test_each_token_sees_the_entries_closed_up_to_itself(ratio: int) -> None:
    """floor((p + 1) / ratio) entries, the one that the token closes included."""
    inputs = stage(MIXED)
    metadata = inputs.attention.csa if ratio == 4 else inputs.attention.hca
    assert isinstance(metadata, CompressedMetadata)
    expected = [(position + 1) // ratio for _, _, position in tokens_of(MIXED)]
    assert metadata.counts[:312].tolist() == expected
    for b, block in enumerate(inputs.attention.blocks):
        assert metadata.block_counts[b] == int(metadata.counts[block.start : block.stop].max())


@pytest.mark.parametrize(("name", "ring"), [("window", 16), ("csa", 8), ("hca", 128)])
def test_rings_keep_the_last_rows_of_each_chunk(name: str, ring: int) -> None:
    """A chunk longer than the ring stores its last rows, each place once."""
    attention = stage(MIXED).attention
    if name == "window":
        store = attention.window_store
    else:
        metadata = attention.csa if name == "csa" else attention.hca
        assert metadata is not None
        store = metadata.store
    expected = []
    for index, (one, _, position) in enumerate(tokens_of(MIXED)):
        if position >= one.start + len(one.input_ids) - ring:
            expected.append((index, one.slot * ring + position % ring))
    assert list(zip(store.src.tolist(), store.dst.tolist(), strict=True)) == expected
    assert len(set(store.dst.tolist())) == len(expected)


@pytest.mark.parametrize(("name", "ring", "before"), [("window", 16, 16), ("csa", 8, 4), ("hca", 128, 0)])
def test_a_page_end_inside_a_chunk_has_its_rows_in_a_slot_of_its_own(name: str, ring: int, before: int) -> None:
    """Decision 10: the chunk's own ring goes on over them; no row of an HCA ring outlives a page end."""
    saves = (SnapshotSave(5, 0, 128, inner_slot=8), SnapshotSave(5, 1, 256, inner_slot=7), SnapshotSave(1, 2, 256))
    plain, gathered = (stage(plan).attention for plan in (MIXED, dataclasses.replace(MIXED, snapshot_saves=saves)))
    stores = []
    for attention in (plain, gathered):
        metadata = {"csa": attention.csa, "hca": attention.hca}.get(name)
        store = attention.window_store if metadata is None else metadata.store
        stores.append(list(zip(store.src.tolist(), store.dst.tolist(), strict=True)))
    first = next(first for one, first, _ in tokens_of(MIXED) if one.slot == 5)
    expected = [
        (first + position, slot * ring + position % ring)
        for end, slot in ((128, 8), (256, 7))
        for position in range(end - before, end)
    ]
    assert stores[1] == stores[0] + expected


def test_only_tokens_that_are_all_kept_once_are_said_to_be_in_order() -> None:
    """The drafter then takes the step's rows as they lie; with a page end among them they are more, padding fewer."""
    geometry = dataclasses.replace(GEOMETRY, window=128, num_draft_stages=1)
    rows = (row(1, 0, 129, (1, 2)), *(row(slot, 130, 1, (3, 4)) for slot in range(2, 17)))
    saves = (SnapshotSave(1, 0, 128, inner_slot=20),)
    found = []
    for plan in (Plan(StepKind.MIXED, rows), Plan(StepKind.MIXED, rows, (), saves), Plan(StepKind.MIXED, rows[1:])):
        store = Stager(geometry, 16, torch.device("cpu")).stage(plan).draft_store
        assert store is not None
        found.append((len(store.src), store.in_order))
    assert found == [(144, True), (144 + 128, False), (15, False)]


def test_only_rows_of_a_verify_step_are_stored_before_the_ring_is_read() -> None:
    """A longer chunk would overwrite what its first tokens need; and rows of page ends have no order."""
    geometry = dataclasses.replace(GEOMETRY, gamma=3)
    short, long_ = row(2, 300, 4, (3, 4, 9)), row(1, 0, 129, (1, 2))
    fits, too_long = row(3, 300, 1, (5, 6, 9)), row(4, 300, 5, (7, 8, 9))
    found = []
    for rows in ((short, fits), (fits, too_long), (long_, fits)):
        inputs = stage(Plan(StepKind.MIXED, rows), geometry=geometry)
        stores = [inputs.attention.window_store]
        stores += [each.store for each in (inputs.attention.csa, inputs.attention.hca) if each is not None]
        assert len(stores) == 3
        (early,) = {store.early for store in stores}
        found.append(early)
        assert not early or all(store.src.tolist() == list(range(len(store.src))) for store in stores)
    assert found == [True, False, False]
    saves = (SnapshotSave(1, 0, 128, inner_slot=7),)
    wide = dataclasses.replace(GEOMETRY, gamma=200)
    assert not stage(Plan(StepKind.MIXED, (long_,), (), saves), geometry=wide).attention.window_store.early
    assert stage(Plan(StepKind.MIXED, (long_,)), geometry=wide).attention.window_store.early


@pytest.mark.parametrize(("slot", "position"), [(5, 384), (5, 0), (2, 128)])
def test_a_page_end_without_a_window_of_its_chunk_is_refused(slot: int, position: int) -> None:
    """Behind the chunk, or so near its start that the window before it is older."""
    saves = (SnapshotSave(slot, 0, position, inner_slot=7),)
    with pytest.raises(InvariantError, match="snapshots at"):
        stage(dataclasses.replace(MIXED, snapshot_saves=saves))


def test_a_device_that_gathers_no_keys_gets_one_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every block is a launch of each layer, and only the cpu's forms copy keys."""
    monkeypatch.setattr("dsparkd.executor.staging.upload", lambda array, device: torch.from_numpy(array).to(device))
    cut = stage(MIXED).attention.blocks
    assert len(cut) > 1
    blocks = Stager(GEOMETRY, 16, torch.device("meta")).stage(MIXED).attention.blocks
    assert [(block.start, block.stop) for block in blocks] == [(0, cut[-1].stop)]


def test_an_empty_plan_has_no_tokens() -> None:
    """A rank without work takes part with zero tokens."""
    inputs = stage(Plan(StepKind.IDLE, ()))
    assert inputs.num_padded_tokens == 0
    assert inputs.num_logits == 0
    assert inputs.attention.blocks == ()


@pytest.mark.parametrize(
    "bad",
    [
        row(0, 0, 4, (1,)),
        row(1, 126, 4, (1,)),
        row(1, -1, 4, (1,)),
        row(1, 0, 0, (1,)),
        row(1, 0, 4, (1,), num_logits=5),
    ],
)
def test_a_row_that_cannot_be_is_refused(bad: PlanRow) -> None:
    """The null slot, pages that do not cover the tokens, a negative start, no tokens, more logits than tokens."""
    with pytest.raises(InvariantError):
        stage(Plan(StepKind.PREFILL, (bad,)))
