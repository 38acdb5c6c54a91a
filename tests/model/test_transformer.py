"""The whole forward pass: bits between ways of computing a token, values against transformers."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from torch import Tensor

from dsparkd.executor.plan import Plan, StepKind
from dsparkd.executor.staging import Stager
from dsparkd.kernels.beside import Branch
from dsparkd.kv.geometry import KVGeometry, PoolSizes
from tools.gates.oracle import random_chunks, run_case
from tools.oracle import Engine, load_oracle, oracle_logits, plan_row, relative_error

LENGTH = 330
IDS = [random.Random(0).randrange(192) for _ in range(1)] + [random.Random(i).randrange(192) for i in range(1, LENGTH)]
PAGES = (3, 1)


@pytest.fixture(scope="module")
def engine(small_checkpoint: Path) -> Engine:
    return Engine(small_checkpoint, sizes=PoolSizes(40, 8, 4))


@pytest.fixture(scope="module")
def whole(engine: Engine) -> Tensor:
    """The prompt in one step, alone: what every other way must reproduce."""
    return engine.logits(IDS, [LENGTH], slot=1, pages=PAGES)


def test_logits_are_spread(whole: Tensor) -> None:
    """Otherwise equality of ids would prove little."""
    assert 0.5 < whole.std() < 4
    assert whole.argmax(1).unique().numel() > 20


@pytest.mark.parametrize("seed", range(4))
def test_any_cut_into_chunks_gives_the_same_bits(engine: Engine, whole: Tensor, seed: int) -> None:
    """Long chunks, short ones, single tokens: prefill and decode are one code path."""
    assert torch.equal(engine.logits(IDS, random_chunks(LENGTH, seed), slot=2, pages=(9, 5)), whole)


def late(work: Branch) -> Branch:
    """A second stream that is as slow as may be: work is done when it is asked for."""
    return work


def test_branches_are_joined_before_their_results_are_read(
    small_checkpoint: Path, whole: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On cuda a branch may run at any time up to there; what it reads must still be what it was when it began."""
    monkeypatch.setattr("dsparkd.model.transformer.beside.bind", lambda device: late)
    engine = Engine(small_checkpoint, sizes=PoolSizes(40, 8, 4))
    assert torch.equal(engine.logits(IDS, random_chunks(LENGTH, 1), slot=2, pages=(9, 5)), whole)


def test_token_by_token_gives_the_same_bits(engine: Engine, whole: Tensor) -> None:
    """Decode from the first token on, across entry, window and page boundaries."""
    assert torch.equal(engine.logits(IDS, [1] * LENGTH, slot=3, pages=(6, 7)), whole)


def test_a_batch_of_strangers_gives_the_same_bits(engine: Engine, whole: Tensor) -> None:
    """Decode rows beside prefill chunks of other sequences, in changing company."""
    draw = random.Random(5)
    others = {slot: [draw.randrange(192) for _ in range(300)] for slot in (5, 6, 7)}
    pages = {5: (10, 11), 6: (12, 13), 7: (14, 15)}
    at = dict.fromkeys(others, 0)
    outputs, start = [], 0
    while start < LENGTH:
        count = min(draw.choice((1, 1, 2, 5, 70)), LENGTH - start)
        rows = [plan_row(IDS[start : start + count], start, 4, (20, 21))]
        for slot, ids in others.items():
            more = min(draw.choice((0, 1, 1, 9, 40)), len(ids) - at[slot])
            if more:
                rows.insert(
                    draw.randrange(len(rows) + 1),
                    plan_row(ids[at[slot] : at[slot] + more], at[slot], slot, pages[slot], num_logits=1, name="other"),
                )
                at[slot] += more
        logits, first = engine.step(rows).logits, 0
        for row in rows:
            if row.slot == 4:
                outputs.append(logits[first : first + row.num_logits].clone())
            first += row.num_logits
        start += count
    assert torch.equal(torch.cat(outputs), whole)
    assert at[5] > 100


def test_resuming_from_a_snapshot_gives_the_same_bits(engine: Engine, whole: Tensor) -> None:
    """Pages and one boundary snapshot are the complete reusable state, in another slot, the old one gone on."""
    engine.step([plan_row(IDS[:256], 0, 1, PAGES)])
    engine.pool.save_snapshot(1, 2, 256)
    engine.step([plan_row([1] * 40, 256, 1, (PAGES[0], 30))])  # the rings go on; the snapshot was copied before
    engine.pool.window[:, 6 * engine.geometry.window_ring_rows :] = torch.nan
    engine.pool.csa_rows[:, 6 * engine.geometry.csa_ring_rows :] = torch.nan
    engine.pool.hca_rows[:, 6 * engine.geometry.hca_ring_rows :] = torch.nan

    engine.pool.load_snapshot(6, 2, 256)
    outputs = [engine.step([plan_row(IDS[256:300], 256, 6, (PAGES[0], 31))]).logits]
    outputs += [engine.step([plan_row([IDS[p]], p, 6, (PAGES[0], 31))]).logits for p in range(300, LENGTH)]

    assert torch.equal(torch.cat(outputs), whole[256:])
    for tensor in engine.pool.tensors()[:3]:
        tensor.nan_to_num_(nan=0.0)


@pytest.mark.parametrize("part", ["window", "overlap"])
def test_a_snapshot_without_one_of_its_parts_is_noticed(engine: Engine, whole: Tensor, part: str) -> None:
    """The control: each part of the snapshot matters, and leaving it out crashes nothing."""
    engine.step([plan_row(IDS[:256], 0, 1, PAGES)])
    engine.pool.save_snapshot(1, 0, 256)
    stale = engine.pool.window_snapshots if part == "window" else engine.pool.overlap_snapshots
    stale.zero_()
    engine.pool.load_snapshot(6, 0, 256)
    resumed = engine.step([plan_row(IDS[256:], 256, 6, (PAGES[0], 31))]).logits
    assert not torch.equal(resumed, whole[256:])


def test_nothing_outside_a_sequence_is_read(small_checkpoint: Path, whole: Tensor) -> None:
    """NaN in every page and slot but the null ones: masking must select, for 0 * NaN is NaN."""
    engine = Engine(small_checkpoint, sizes=PoolSizes(40, 8, 4))
    g, pool = engine.geometry, engine.pool
    for tensor, null_rows in (
        (pool.window, g.window_ring_rows),
        (pool.csa_rows, g.csa_ring_rows),
        (pool.hca_rows, g.hca_ring_rows),
        (pool.csa_entries, g.csa_entries_per_page),
        (pool.csa_keys, g.csa_entries_per_page),
        (pool.hca_entries, g.hca_entries_per_page),
    ):
        tensor[:, null_rows:] = torch.nan
    assert torch.equal(engine.logits(IDS, [LENGTH], slot=1, pages=PAGES), whole)
    assert torch.equal(engine.logits(IDS, random_chunks(LENGTH, 9), slot=2, pages=(9, 5)), whole)


def test_null_page_and_slot_stay_zero(engine: Engine, whole: Tensor) -> None:
    """Masked positions gather from them, so no step may ever write them."""
    del whole  # the steps above have run
    g, pool = engine.geometry, engine.pool
    assert not pool.window[:, : g.window_ring_rows].any()
    assert not pool.csa_rows[:, : g.csa_ring_rows].any()
    assert not pool.hca_rows[:, : g.hca_ring_rows].any()
    assert not pool.csa_entries[:, : g.csa_entries_per_page].any()
    assert not pool.csa_keys[:, : g.csa_entries_per_page].any()
    assert not pool.hca_entries[:, : g.hca_entries_per_page].any()


def test_block_cuts_change_no_bit(engine: Engine, whole: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens are attended in blocks that bound memory; where they are cut is nobody's business."""
    monkeypatch.setattr("dsparkd.executor.staging.BLOCK_TOKENS", 37)
    assert torch.equal(engine.logits(IDS, [LENGTH], slot=2, pages=(9, 5)), whole)


def test_rejected_rows_leave_no_trace(engine: Engine, whole: Tensor) -> None:
    """The rings' margin of gamma rows: a verify block of gamma + 1 rows may keep its anchor alone, at any position."""
    gamma = engine.config.gamma
    pages = (9, 5)
    outputs = [engine.step([plan_row(IDS[:100], 0, 2, pages)]).logits]
    for p in range(100, LENGTH - gamma):
        block = [IDS[p], *([(IDS[p] + 50) % 192] * gamma)]
        outputs.append(engine.step([plan_row(block, p, 2, pages)]).logits[:1])
    assert torch.equal(torch.cat(outputs), whole[: LENGTH - gamma])


@pytest.mark.parametrize("ring", ["window_ring_rows", "csa_ring_rows", "hca_ring_rows"])
def test_a_ring_one_row_shorter_is_noticed(
    small_checkpoint: Path, whole: Tensor, monkeypatch: pytest.MonkeyPatch, ring: str
) -> None:
    """The control: the margin is tight, so rejected rows then overwrite what a later token needs."""
    rows = getattr(KVGeometry, ring).fget
    monkeypatch.setattr(KVGeometry, ring, property(lambda geometry: rows(geometry) - 1))
    engine = Engine(small_checkpoint, sizes=PoolSizes(40, 8, 4))
    engine.step([plan_row(IDS[:240], 0, 2, (9, 5))])
    outputs = []
    for p in range(240, 270):  # over 254, where an HCA window is two rows from its end
        block = [IDS[p], *([(IDS[p] + 50) % 192] * engine.config.gamma)]
        outputs.append(engine.step([plan_row(block, p, 2, (9, 5))]).logits[:1])
    assert not torch.equal(torch.cat(outputs), whole[240:270])


def test_a_step_without_logits_still_stores_its_state(engine: Engine, whole: Tensor) -> None:
    """A chunk that is not a prompt's last asks for none."""
    empty = engine.step([plan_row(IDS[:200], 0, 2, (9, 5), num_logits=0)])
    assert empty.logits.shape == (0, 192)
    rest = engine.step([plan_row(IDS[200:], 200, 2, (9, 5), num_logits=3)])
    assert torch.equal(rest.logits, whole[-3:])


def test_taps_are_the_mean_of_the_streams_after_a_layer(engine: Engine, whole: Tensor) -> None:
    """Side by side in the order asked for; asking changes no logit."""
    step = engine.step([plan_row(IDS[:40], 0, 2, (9, 5))], taps=(5, 0))
    swapped = engine.step([plan_row(IDS[:40], 0, 2, (9, 5))], taps=(0, 5))
    assert step.taps is not None
    assert swapped.taps is not None
    assert step.taps.shape == (48, 128)
    assert torch.equal(step.taps, torch.cat(swapped.taps.chunk(2, 1)[::-1], 1))
    assert torch.equal(step.logits, whole[:40])
    assert step.taps[:40].std() > 0.1


def test_a_rank_without_tokens_takes_part(small_checkpoint: Path, engine: Engine) -> None:
    """It makes every layer's two calls, and returns no logits."""
    calls: list[str] = []

    class Watched:
        def begin_step(self, counts: tuple[int, int]) -> None:
            calls.append("begin")

        def room(self, width: int, device: torch.device) -> Tensor:
            raise AssertionError("there are no rows")

        def crossing(self) -> None:
            return None

        def parting(self, width: int, device: torch.device) -> None:
            return None

        def gather(self, rows: Tensor) -> Tensor:
            calls.append("gather")
            assert rows.shape[0] == 0
            return torch.zeros((16, rows.shape[1]))

        def combine(self, partial: Tensor) -> tuple[Tensor, Tensor]:
            calls.append("combine")
            assert partial.shape == (16, engine.config.hidden_size)
            return partial[:0], partial[:0]

    inputs = Stager(engine.geometry, engine.config.index_topk, torch.device("cpu")).stage(Plan(StepKind.IDLE, ()))
    output = engine.model.forward(inputs, engine.pool, Watched())
    assert output.logits.shape == (0, 192)
    assert calls == ["gather", "combine"] * engine.config.num_hidden_layers


def test_bfloat16_is_near_float32(small_checkpoint: Path, whole: Tensor) -> None:
    """No bits are promised in bfloat16; most first choices agree, and nothing is far off."""
    engine = Engine(small_checkpoint, dtype=torch.bfloat16)
    logits = engine.logits(IDS, [200, 1, 129], slot=1, pages=PAGES)
    assert logits.dtype == torch.float32
    assert (logits - whole).abs().mean() < 0.15 * whole.std()
    assert (logits.argmax(1) == whole.argmax(1)).float().mean() > 0.6


@pytest.mark.filterwarnings("ignore")
def test_quantised_checkpoint_gives_the_oracles_logits(small_checkpoint: Path, whole: Tensor) -> None:
    """The official layout, read by two independent readers: transformers in float32 agrees to 1e-4."""
    assert relative_error(whole, oracle_logits(load_oracle(small_checkpoint), IDS)) < 1e-4


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("seed", "length"), [(0, 130), (2, 66), (5, 129), (8, 270)])
def test_random_geometries_give_the_oracles_logits(tmp_path: Path, seed: int, length: int) -> None:
    """A small form of the oracle gate: one pass, chunks, token by token."""
    case = run_case(seed, "float32", length, tmp_path)
    assert case.worst < 1e-4
