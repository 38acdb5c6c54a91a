"""Captured decode steps and drafts against eager ones: the same bits, from memory that never moves.

On the cpu a record is the body itself, run again: what differs from a CUDA graph is only that the launches are made
anew, so that shapes, padding, addresses and the choice of a tier are proven here, and capture itself on a GPU.
"""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import msgspec
import pytest
import torch
from torch import Tensor

from dsparkd.errors import EXIT_CONFIG, CapabilityError, InvariantError
from dsparkd.executor import verify
from dsparkd.executor.draft import DraftDesk
from dsparkd.executor.executor import DTYPES, Executor
from dsparkd.executor.graphs import CudaRecorder, Graphs, Recorder, require_room
from dsparkd.executor.plan import Plan, PlanRow, RowOutput, SlotStart, Speculation, StepKind, StepOutput
from dsparkd.executor.shapes import Behind, ShapeLimits
from dsparkd.kv.geometry import PoolSizes
from dsparkd.kv.pool import KVPool
from dsparkd.messages import SamplingParams
from dsparkd.model.config import load_model_config
from dsparkd.model.weights import load_both_draft_shards, load_both_shards
from dsparkd.text.tokenizer import Tokenizer
from tools.harness import ensure_checkpoint

ROWS = 6
PAGES = 8
GREEDY = SamplingParams(max_tokens=64, seed=1, temperature=0.0, top_logprobs=0)
SEEDED = SamplingParams(max_tokens=64, seed=77, temperature=0.9, top_p=0.95, top_logprobs=0)
TEXT = "The list has these entries: " + ", ".join(f"item {n} costs {7 * n % 31} coins" for n in range(120))
# The cpu's products need whole row tiles; those of a device take any number of rows.
TIERS = {"cpu": (16, 32, 48), "cuda": (1, 2, 4, 6, 8, 12, 16, 32, 48)}
DRAFTING = {"cpu": (16, 32, 48), "cuda": (6, 12, 32, 48)}  # those that hold more windows than the one before
DEVICES = [pytest.param("cpu", id="cpu"), pytest.param("cuda", id="cuda", marks=pytest.mark.gpu)]


class Rerun:
    """Records by keeping the body."""

    num_bytes = 0

    def __init__(self) -> None:
        self.names: list[str] = []
        self.runs = 0

    def record(self, name: str, body: Callable[[], None]) -> Callable[[], None]:
        self.names.append(name)
        body()

        def replay() -> None:
            self.runs += 1
            body()

        return replay

    def close(self) -> None:
        self.names.clear()


class Lab:
    """The shipped checkpoint, both shards in this process; one executor that runs eager or replays."""

    def __init__(self, device: str, kv_dtype: Literal["model", "fp8"] = "model") -> None:
        torch.set_num_threads(1)
        checkpoint, self.device = ensure_checkpoint(), torch.device(device, 0)
        name: Literal["bfloat16", "float32"] = "float32" if device == "cpu" else "bfloat16"
        config = load_model_config(checkpoint)
        self.gamma, self.topk = config.gamma, config.index_topk
        model, exchange = load_both_shards(checkpoint, config, DTYPES[name], self.device)
        drafter, draft_exchange = load_both_draft_shards(checkpoint, model)
        geometry = config.kv_geometry(256, name, drafts=True, kv_dtype=kv_dtype)
        self.pool = KVPool(geometry, PoolSizes(1 + ROWS * PAGES, 1 + ROWS, 2), DTYPES[name], self.device)
        model.prepare(self.pool)
        desk = DraftDesk(drafter, self.pool, draft_exchange)
        tokenizer = Tokenizer.load(checkpoint)
        self.ids = tuple(tokenizer.encode(TEXT))
        self.executor = Executor(0, model, 0, self.pool, exchange, tokenizer, None, desk)
        self.recorder = Rerun()
        recorder: Recorder = self.recorder if device == "cpu" else CudaRecorder(self.device)
        self.limits = ShapeLimits(ROWS, PAGES, 1 + self.gamma)
        self.executor.capture(TIERS[device], self.limits, lambda done, total: None, recorder, drafts_ahead=False)
        assert self.executor.graphs is not None
        self.graphs: Graphs = self.executor.graphs

    def tier_of(self, tokens: int) -> int:
        """The smallest tier that holds so many."""
        return next(tier for tier in TIERS[self.device.type] if tier >= tokens)

    def step(
        self,
        rows: Sequence[PlanRow],
        *,
        replays: bool,
        most: int = 0,
        room: int | None = None,
        peer: int = 0,
        kind: StepKind = StepKind.DECODE,
        starts: tuple[SlotStart, ...] = (),
    ) -> tuple[tuple[RowOutput, ...], int | None]:
        """Outputs, and the tier. room: for drafts, of a compact layout. peer: rows of a rank that is not here."""
        tokens = len(rows) * (1 + most) if room is None else len(rows) + room
        speculation = Speculation(most, (tokens, peer * (1 + most)), room is not None) if most else None
        plan = Plan(kind, tuple(rows), starts, speculation=speculation, replays=replays)
        output = self.executor.step(plan, (plan.num_tokens, peer))
        return output.rows, output.tier


class Text:
    """One request; place: its slot, and which pages are its own."""

    def __init__(self, ids: tuple[int, ...], params: SamplingParams, place: int) -> None:
        self.ids, self.params, self.place = ids, params, place
        self.outputs: tuple[int, ...] = ()
        self.seen: list[object] = []
        self.num_verified = 0  # of the last step

    def row(self) -> PlanRow:
        known = self.ids + self.outputs
        start = len(known) - 1 if self.outputs else 0
        return PlanRow(
            request_id=str(self.place),
            slot=self.place,
            input_ids=known[start:],
            start=start,
            page_table=tuple(range(1 + PAGES * (self.place - 1), 1 + PAGES * self.place)),
            num_logits=1,
            sampling=self.params,
            prompt_ids=self.ids,
            output_ids=self.outputs,
        )

    def take(self, output: RowOutput) -> None:
        self.outputs += output.token_ids
        self.seen += [output.logprobs, output.survival]
        self.num_verified = output.num_verified


@pytest.fixture(scope="module", params=DEVICES)
def lab(request: pytest.FixtureRequest) -> Lab:
    return Lab(request.param)


def begin(lab: Lab, lengths: Sequence[int]) -> list[Text]:
    """Fresh requests behind their prefill, every second one seeded."""
    texts = [Text(lab.ids[:n], (GREEDY, SEEDED)[place % 2], place) for place, n in enumerate(lengths, 1)]
    for text in texts:
        starts = (SlotStart(text.place, None, 0),)
        text.take(lab.step([text.row()], replays=True, kind=StepKind.PREFILL, starts=starts)[0][0])
    return texts


def advance(lab: Lab, texts: Sequence[Text], **how: object) -> int | None:
    """One step of some texts; returns its tier."""
    rows, tier = lab.step([text.row() for text in texts], **how)  # type: ignore[arg-type]
    for text, output in zip(texts, rows, strict=True):
        text.take(output)
    return tier


# Lengths around a page's end, a compressed entry's, a window's and where the indexer begins to choose.
LENGTHS = (1, 126, 250, 254, 519, 900)


def sequence(lab: Lab, *, replays: bool) -> tuple[list[Text], list[int | None]]:
    """Steps of every kind: widths 1 to a block's, few and all rows, compact, a peer with more rows, none of ours."""
    texts = begin(lab, LENGTHS)
    tiers = []
    for most, count, room, peer in (
        (0, 6, None, 0),
        (5, 1, None, 0),
        (5, 6, None, 0),
        (2, 3, None, 6),
        (5, 6, 11, 2),
        (0, 1, None, 1),
        (3, 0, None, 2),
        (5, 5, 0, 6),
        (1, 6, None, 0),
        (5, 6, None, 6),
    ):
        rows = texts[len(texts) - count :]
        tiers.append(advance(lab, rows, replays=replays, most=most, room=room, peer=peer))
    return texts, tiers


def live(lab: Lab) -> list[Tensor]:
    """All that sequences own: pools without the null slot and page."""
    pool, g = lab.pool, lab.pool.geometry
    return [
        pool.window[:, g.window_ring_rows :].clone(),
        pool.csa_rows[:, g.csa_ring_rows :].clone(),
        pool.hca_rows[:, g.hca_ring_rows :].clone(),
        pool.draft_keys[:, g.draft_ring_rows :].clone(),
        pool.csa_entries[:, g.csa_entries_per_page :].clone(),
        pool.csa_keys[:, g.csa_entries_per_page :].clone(),
        pool.hca_entries[:, g.hca_entries_per_page :].clone(),
    ]


def test_replayed_steps_give_the_bits_of_eager_ones(lab: Lab) -> None:
    """P-22, T-04: ids, log-probabilities, chances and all cached state, over plans of every width and number of rows,
    beside padding, with other steps between."""
    for tensor in lab.pool.tensors():
        tensor.zero_()
    eager, none = sequence(lab, replays=False)
    kept = live(lab)
    for tensor in lab.pool.tensors():
        tensor.zero_()

    texts, tiers = sequence(lab, replays=True)

    assert none == [None] * 10
    assert tiers == [lab.tier_of(tokens) for tokens in (6, 6, 36, 18, 17, 1, 8, 36, 12, 36)]
    assert [text.outputs for text in texts] == [text.outputs for text in eager]
    assert [text.seen for text in texts] == [text.seen for text in eager]
    assert all(torch.equal(one, other) for one, other in zip(live(lab), kept, strict=True))
    assert max(len(text.outputs) for text in texts) > 9  # drafts were accepted
    assert (LENGTHS[-1] // 4 > lab.topk) == any(tier.verify.is_long for tier in lab.graphs._verify.values())


@pytest.mark.parametrize("device", DEVICES)
def test_replays_over_packed_rows_give_the_bits_of_eager_steps(device: str) -> None:
    """P-22, T-37: with keys in the official encoding; all that is cached, with its scales, and the drafter's keys."""
    lab = Lab(device, "fp8")
    eager, _ = sequence(lab, replays=False)
    kept = live(lab)
    for tensor in lab.pool.tensors():
        tensor.zero_()
    texts, tiers = sequence(lab, replays=True)
    assert None not in tiers
    assert [text.outputs for text in texts] == [text.outputs for text in eager]
    assert [text.seen for text in texts] == [text.seen for text in eager]
    assert all(torch.equal(one, other) for one, other in zip(live(lab), kept, strict=True))
    assert lab.pool.csa_entries.dtype == torch.uint8


@pytest.fixture
def ahead(lab: Lab) -> Iterator[Lab]:
    """The same executor, which drafts behind its steps."""
    lab.executor._drafts_ahead = True
    yield lab
    lab.executor._drafts_ahead = False


def test_blocks_that_were_drafted_ahead_are_those_of_the_next_step(ahead: Lab) -> None:
    """Overlap: the anchors are what the host will find; rows may leave and change places, a step may come between."""

    def run(*, replays: bool) -> list[Text]:
        texts = begin(ahead, LENGTHS)
        for rows, most in (
            (texts, 5),
            (texts, 5),
            (texts[1:], 5),
            (texts[:0:-1], 3),
            (texts[3:], 5),
            (texts, 0),
            (texts, 5),
            ([texts[4], texts[0]], 5),
            ([texts[0]], 5),
        ):
            advance(ahead, rows, replays=replays, most=most)
        return texts

    eager = run(replays=False)
    proposed = ahead.recorder.runs

    texts = run(replays=True)

    assert [text.outputs for text in texts] == [text.outputs for text in eager]
    assert [text.seen for text in texts] == [text.seen for text in eager]
    if ahead.device.type == "cpu":  # eight of the nine steps draft behind themselves, two in front as well
        assert ahead.recorder.runs - proposed == 9 + 8 + 2


def test_blocks_go_on_behind_windows_wherever_these_lie(lab: Lab) -> None:
    """The anchors are found in the graph, of windows that were put together elsewhere, too: rows had changed places."""
    rows = [text.row() for text in begin(lab, LENGTHS[:2])]
    tier = lab.graphs.draft_tier((2, 0))
    assert tier is not None
    with torch.inference_mode():
        windows = lab.graphs.propose(tier, rows).windows.clone()
        chosen = windows[:, 1:].clone()
        chosen[1, 2] = (chosen[1, 2] + 1) % 50  # two of its drafts stand
        lab.graphs._windows.zero_()
        bounds = verify.bounds((4, 5), verify.Asked([], [], (5, 5)))
        behind = Behind(windows, chosen.flatten(), *bounds)
        got = lab.graphs.propose(tier, rows, behind).windows.clone()
        moved = [
            dataclasses.replace(row, start=row.start + steps, input_ids=(int(ids[steps - 1]),))
            for row, ids, steps in zip(rows, chosen, (5, 3), strict=True)
        ]
        expected = lab.graphs.propose(tier, moved).windows
    assert torch.equal(got, expected)


def test_a_row_that_comes_between_has_no_drafts_this_once(ahead: Lab) -> None:
    """Both ranks drafted already; the row goes on by one token, with the id that it would have had."""
    texts = begin(ahead, LENGTHS)
    advance(ahead, texts[2:], replays=True, most=5)
    advance(ahead, texts, replays=True, most=5, peer=3)
    assert [len(text.outputs) for text in texts[:2]] == [2, 2]
    assert [text.seen[-1] for text in texts[:2]] == [(), ()]
    assert [text.num_verified for text in texts] == [0, 0, 5, 5, 5, 5]
    assert all(len(text.seen[-1]) == ahead.gamma for text in texts[2:])  # type: ignore[arg-type]
    advance(ahead, texts, replays=True, most=5, room=9)
    advance(ahead, [], replays=True, most=5, peer=2)
    advance(ahead, texts, replays=True, most=5)
    assert len(texts[0].outputs) > 2
    plain = begin(ahead, LENGTHS)
    while min(map(len, (text.outputs for text in plain))) < 8:
        advance(ahead, plain, replays=False)
    for text, other in zip(texts, plain, strict=True):
        count = min(len(text.outputs), 8)
        assert text.outputs[:count] == other.outputs[:count]


# What is seen once comes again: a row that does not count its last id goes another way.
REPEATING = msgspec.structs.replace(SEEDED, temperature=1.5, top_p=1.0, frequency_penalty=-2.0, presence_penalty=-2.0)


def behind(text: Text, follows: int) -> PlanRow:
    """The row behind one that has not landed: all of it but the id."""
    row = text.row()
    return dataclasses.replace(row, start=row.start + 1, input_ids=(5,), follows=follows)


@pytest.mark.parametrize("replays", [False, True])
def test_steps_that_are_launched_over_one_another_give_what_others_give(lab: Lab, replays: bool) -> None:
    """Overlap: ids come from the device, rows leave, the host reads a step late: ids, log-probabilities and cached
    state are those of steps that land one by one; replayed and eager, mixed steps between."""

    def begun() -> list[Text]:
        for tensor in lab.pool.tensors():
            tensor.zero_()
        texts = begin(lab, LENGTHS)
        for text in texts[1:]:
            text.params = REPEATING
        return texts

    plain = begun()
    members = (plain, plain, plain[1:], plain[1:], plain[2:5], plain[4:5], plain[4:5])
    for rows in members:
        advance(lab, rows, replays=replays)
    kept = live(lab)

    texts = begun()
    flying: list[Text] = []
    land: Callable[[], StepOutput] | None = None
    for rows, kind in zip(members, [StepKind.DECODE, StepKind.DECODE, StepKind.MIXED] * 3, strict=False):
        names = [text.place for text in rows]
        now = [text for text in texts if text.place in names]
        plan = Plan(
            kind,
            tuple(behind(text, flying.index(text)) if text in flying else text.row() for text in now),
            replays=replays and kind is StepKind.DECODE,
        )
        launched = lab.executor.launch(plan, (plan.num_tokens, 0))
        if land is not None:
            for text, output in zip(flying, land().rows, strict=True):
                text.take(output)
        flying, land = now, launched
    assert land is not None
    for text, output in zip(flying, land().rows, strict=True):
        text.take(output)

    assert [text.outputs for text in texts] == [text.outputs for text in plain]
    assert [text.seen for text in texts] == [text.seen for text in plain]
    assert all(torch.equal(one, other) for one, other in zip(live(lab), kept, strict=True))


def test_a_row_cannot_follow_what_is_not_there(lab: Lab) -> None:
    """An id of the step before the last, of a row that it did not have, or behind a window: the pair ends."""
    texts = begin(lab, LENGTHS[:2])
    advance(lab, texts, replays=True)
    ahead = behind(texts[0], 0)
    lab.executor.step(Plan(StepKind.DECODE, (ahead,), replays=True), (1, 0))
    advance(lab, texts[1:], replays=True)
    with pytest.raises(InvariantError, match="follows id 1 of a step that gave 1"):
        lab.step([behind(texts[1], 1)], replays=True)
    advance(lab, texts, replays=True, most=5)
    with pytest.raises(InvariantError, match="follows id 0 of a step that gave 0"):
        lab.step([behind(texts[0], 0)], replays=True)
    with pytest.raises(InvariantError, match="cannot do without"):
        lab.step([behind(texts[0], 0)], replays=True, most=5)


def test_addresses_stay_and_a_rank_without_rows_changes_nothing(lab: Lab) -> None:
    """P-08, P-10, P-13: padded replays of every tier write no state, live page or slot; nothing moves."""
    texts = begin(lab, LENGTHS)
    advance(lab, texts, replays=True, most=5)
    owned = [*lab.pool.tensors(), *vars(lab.graphs).values()]
    addresses = [each.data_ptr() for each in owned if isinstance(each, Tensor)]
    feeds = [tier.verify.feed.tensors for tier in lab.graphs._verify.values()]
    feeds += [tier.shape.feed.tensors for tier in lab.graphs._draft.values()]
    before = [words.data_ptr() for feed in feeds for words in feed.values()]
    kept = live(lab)

    tiers = {advance(lab, [], replays=True, most=most, peer=peer) for most in (0, 2, 5) for peer in range(1, 1 + ROWS)}

    assert tiers == {lab.tier_of(peer * width) for width in (1, 3, 6) for peer in range(1, 1 + ROWS)}
    assert all(torch.equal(one, other) for one, other in zip(live(lab), kept, strict=True))
    gc.collect()
    advance(lab, texts, replays=True, most=5)
    assert [each.data_ptr() for each in owned if isinstance(each, Tensor)] == addresses
    assert [words.data_ptr() for feed in feeds for words in feed.values()] == before


def test_one_row_among_padding_gives_what_it_gives_alone(lab: Lab) -> None:
    """P-12, T-04: a tier that the peer fills, behind a step of all rows: nothing of those rows is left in it."""
    alone, texts = begin(lab, LENGTHS[:1])[0], begin(lab, LENGTHS)
    for _ in range(3):
        advance(lab, texts, replays=True, most=5)
    for text in texts:
        text.seen.clear()
    text = begin(lab, LENGTHS[:1])[0]
    for _ in range(3):
        advance(lab, [text], replays=True, most=5, peer=ROWS)

    again = begin(lab, LENGTHS[:1])[0]
    for _ in range(3):
        advance(lab, [again], replays=False, most=5)

    assert text.outputs == again.outputs
    assert text.seen == again.seen
    assert alone.outputs == again.outputs[: len(alone.outputs)]


def test_both_ranks_choose_by_what_both_know(lab: Lab) -> None:
    """P-05, P-07, X-25: the larger rank's tokens, whichever it is; chunks and what no tier holds run eager on both."""
    graphs = lab.graphs
    for own, peer in ((0, 17), (17, 0), (17, 1), (20, 32)):
        assert graphs.tier(StepKind.DECODE, (own, peer)) == graphs.tier(StepKind.DECODE, (peer, own)) == 32
    assert graphs.tier(StepKind.DECODE, (48, 0)) == 48
    assert graphs.tier(StepKind.DECODE, (48, 49)) is None
    for kind in (StepKind.PREFILL, StepKind.MIXED):
        assert graphs.tier(kind, (1, 1)) is None
    expected = [lab.tier_of(6 * blocks) for blocks in (1, 2, 3, 5, 6)]
    assert [graphs.draft_tier((0, blocks)) for blocks in (1, 2, 3, 5, 6, 7)] == [*expected, None]


def test_a_step_that_no_tier_holds_runs_eager_with_the_same_ids(lab: Lab) -> None:
    """P-07: nothing is refused; what both agreed on is all that decides."""
    texts, others = begin(lab, LENGTHS[:2]), []
    assert advance(lab, texts, replays=True, most=5, peer=9) is None
    others = begin(lab, LENGTHS[:2])
    assert advance(lab, others, replays=True, most=5, peer=2) == lab.tier_of(12)
    assert [text.outputs for text in texts] == [text.outputs for text in others]


def test_tiers_are_captured_from_the_largest_down_with_one_memory(lab: Lab) -> None:
    """P-10, P-21: what is captured is known, and what it takes."""
    tiers = list(TIERS[lab.device.type])
    drafting = list(DRAFTING[lab.device.type])
    assert lab.graphs.num_shapes == {"decode": len(tiers), "draft": len(drafting)}
    assert set(lab.graphs.num_bytes) == {"decode", "draft"}
    assert list(lab.graphs._verify) == tiers[::-1]
    assert list(lab.graphs._draft) == drafting[::-1]
    assert lab.graphs.num_bytes["decode"] >= 48 * lab.executor.model_config.vocab_size * 4


def test_graphs_end_before_what_they_hold() -> None:
    """P-10, L-33: at the stop records go first, then weights and pools; communicators end after the executor."""
    lab = Lab("cpu")
    seen: list[bool] = []
    close = lab.recorder.close

    def look() -> None:
        seen.append(hasattr(lab.executor, "_pool") and len(lab.graphs._verify) == 3)
        close()

    lab.recorder.close = look  # type: ignore[method-assign]

    lab.executor.close()

    assert seen == [True]
    assert lab.executor.graphs is None
    assert not hasattr(lab.executor, "_pool")


def test_memory_that_is_missing_is_named() -> None:
    """P-21: the tier, the number needed and the number found, as a start failure."""
    require_room("a decode step of 384 tokens", 100, 100)
    with pytest.raises(
        CapabilityError, match=r"101 bytes of device memory for a decode step of 384 .*found 100"
    ) as caught:
        require_room("a decode step of 384 tokens", 101, 100)
    assert caught.value.exit_code == EXIT_CONFIG


def test_plans_that_break_the_shape_fail_before_a_launch(lab: Lab) -> None:
    """T-02, P-07: a rank that cannot go on raises, and the pair ends."""
    text = begin(lab, LENGTHS[:1])[0]
    row = dataclasses.replace(text.row(), slot=1 + ROWS)
    with pytest.raises(InvariantError, match=f"slot {1 + ROWS} of {1 + ROWS}"):
        lab.step([row], replays=True)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_a_replayed_step_takes_no_memory_and_waits_for_nothing() -> None:
    """P-11, U-08: between launches of a decode step the allocator gives nothing away inside the graphs."""
    lab = Lab("cuda")
    texts = begin(lab, LENGTHS)
    for _ in range(3):
        advance(lab, texts, replays=True, most=5)
    reserved = torch.cuda.memory_stats(lab.device)["num_device_alloc"]
    plan = Plan(StepKind.DECODE, tuple(text.row() for text in texts), replays=True)
    with torch.inference_mode():
        try:
            torch.cuda.set_sync_debug_mode("error")
            before = torch.cuda.memory_stats(lab.device)["allocation.all.allocated"]
            lab.graphs.verify(48, plan, [0] * ROWS, None)
            lab.graphs.propose(48, plan.rows)
            after = torch.cuda.memory_stats(lab.device)["allocation.all.allocated"]
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert after == before
    assert torch.cuda.memory_stats(lab.device)["num_device_alloc"] == reserved
