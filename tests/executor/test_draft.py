"""The shipped checkpoint's drafter in the executor: the same drafts however the context came about, and good ones."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from dsparkd.errors import InvariantError
from dsparkd.executor.draft import Blocks, DraftDesk
from dsparkd.executor.executor import Executor
from dsparkd.executor.plan import Plan, PlanRow, RowOutput, SlotStart, SnapshotSave, Speculation, StepKind
from dsparkd.kv.geometry import PoolSizes
from dsparkd.kv.pool import KVPool
from dsparkd.messages import SamplingParams
from dsparkd.model.config import load_model_config
from dsparkd.model.weights import load_both_draft_shards, load_both_shards
from dsparkd.text.tokenizer import Tokenizer
from tools.harness import ensure_checkpoint

CPU = torch.device("cpu")
PAGE = 128
OUTPUTS = 12
GREEDY = SamplingParams(max_tokens=64, seed=1, temperature=0.0, top_logprobs=0)
SEEDED = SamplingParams(max_tokens=64, seed=77, temperature=0.9, top_p=0.95, top_logprobs=0)
# Prose that the model continues as it likes; long enough for a full window behind a page end.
TEXT = "The list has these entries: " + ", ".join(f"item {n} costs {7 * n % 31} coins" for n in range(90))


class Lab:
    """An executor with the shipped drafter that remembers what was drafted."""

    def __init__(self, checkpoint: Path) -> None:
        torch.set_num_threads(1)
        config = load_model_config(checkpoint)
        self.gamma = config.gamma
        model, exchange = load_both_shards(checkpoint, config, torch.float32, CPU)
        drafter, draft_exchange = load_both_draft_shards(checkpoint, model)
        pool = KVPool(config.kv_geometry(PAGE, "float32", drafts=True), PoolSizes(60, 7, 4, 2), torch.float32, CPU)
        self.drafter, self.pool = drafter, pool
        self.desk = DraftDesk(drafter, pool, draft_exchange)
        self.blocks: list[Blocks] = []
        tokenizer = Tokenizer.load(checkpoint)
        self.ids = tuple(tokenizer.encode(TEXT))
        self.executor = Executor(0, model, 0, pool, exchange, tokenizer, None, self)  # type: ignore[arg-type]
        self.taps = self.desk.taps
        self.keep = self.desk.keep

    def propose(self, rows: Sequence[PlanRow], num_blocks: tuple[int, int]) -> Blocks:
        self.blocks.append(self.desk.propose(rows, num_blocks))
        return self.blocks[-1]

    def step(self, rows: Sequence[PlanRow], most: int = 0, **moves: tuple) -> tuple[RowOutput, ...]:  # type: ignore[type-arg]
        speculation = Speculation(most, (len(rows) * (1 + most), 0)) if most else None
        plan = Plan(StepKind.DECODE if most else StepKind.MIXED, tuple(rows), speculation=speculation, **moves)
        return self.executor.step(plan, (plan.num_tokens, 0)).rows


@pytest.fixture(scope="module")
def lab() -> Lab:
    return Lab(ensure_checkpoint())


class Text:
    """What a scheduler keeps of one request."""

    def __init__(self, ids: tuple[int, ...], params: SamplingParams, place: int) -> None:
        self.ids, self.params, self.place = ids, params, place
        self.outputs: tuple[int, ...] = ()
        self.logprobs: list[object] = []
        self.computed = 0
        self.pages = tuple(range(9 * place - 8, 9 * place + 1))

    def row(self, limit: int = 10**6) -> PlanRow:
        known = self.ids + self.outputs
        part = known[self.computed : self.computed + limit]
        last = self.computed + len(part) == len(known)
        return PlanRow(
            request_id=str(self.place),
            slot=self.place,
            input_ids=part,
            start=self.computed,
            page_table=self.pages,
            num_logits=int(last),
            sampling=self.params if last else None,
            prompt_ids=self.ids,
            output_ids=self.outputs,
        )

    def take(self, row: PlanRow, output: RowOutput) -> None:
        self.computed += len(row.input_ids) + max(len(output.token_ids) - 1, 0)
        self.outputs += output.token_ids
        self.logprobs += output.logprobs or ()


def prefill(lab: Lab, texts: Sequence[Text], chunk: int = 10**6, **moves: tuple) -> None:  # type: ignore[type-arg]
    moves = moves or {"slot_starts": tuple(SlotStart(text.place, None, 0) for text in texts)}
    while any(not text.outputs or text.computed < len(text.ids) + len(text.outputs) - 1 for text in texts):
        rows = [text.row(chunk) for text in texts]
        for text, row, output in zip(texts, rows, lab.step(rows, **moves), strict=True):
            text.take(row, output)
        moves = {}


def decode(lab: Lab, texts: Sequence[Text], most: int, count: int = OUTPUTS) -> int:
    """Until each has `count` outputs, at which they are cut; returns the steps that it took."""
    steps = 0
    while live := [text for text in texts if len(text.outputs) < count]:
        rows = [text.row() for text in live]
        for text, row, output in zip(live, rows, lab.step(rows, most), strict=True):
            text.take(row, output)
        steps += 1
    for text in texts:
        text.outputs, text.logprobs = text.outputs[:count], text.logprobs[:count]
    return steps


@pytest.mark.parametrize("params", [GREEDY, SEEDED])
@pytest.mark.parametrize("most", [1, 3, 5])
def test_drafts_of_the_shipped_drafter_change_no_id_and_save_steps(lab: Lab, params: SamplingParams, most: int) -> None:
    """Path invariance with the real drafter, in a batch; and it is worth having."""
    lengths = (40, 126, 300, 505)
    plain = [Text(lab.ids[:n], params, place) for place, n in enumerate(lengths, 1)]
    prefill(lab, plain)
    decode(lab, plain, 0)
    texts = [Text(lab.ids[:n], params, place) for place, n in enumerate(lengths, 1)]
    prefill(lab, texts)

    steps = decode(lab, texts, most)

    assert [text.outputs for text in texts] == [text.outputs for text in plain]
    assert [text.logprobs for text in texts] == [text.logprobs for text in plain]
    assert steps < OUTPUTS - 1


def same(first: Blocks, second: Blocks) -> bool:
    """Drafts, their logits and confidence, to the last bit."""
    return (
        torch.equal(first.windows, second.windows)
        and torch.equal(first.survival, second.survival)
        and torch.equal(first.drafts.logits, second.drafts.logits)
    )


def block(lab: Lab, text: Text) -> Blocks:
    """Draft once behind a text that stands at its last token."""
    lab.step([text.row()], lab.gamma)
    return lab.blocks[-1]


@pytest.mark.parametrize("params", [GREEDY, SEEDED])
def test_drafts_do_not_depend_on_how_their_context_was_computed(lab: Lab, params: SamplingParams) -> None:
    """Whole and chunked prefill, a prefix hit from a snapshot, a resume after a retract, mixed and drafted decoding.

    The rings are what the drafter sees, so equal logits mean equal rings, the refused drafts' rows never read.
    """
    ids = lab.ids[: 3 * PAGE + 60]
    whole = Text(ids, params, 1)
    prefill(lab, [whole])
    expected = block(lab, whole)

    chunked = Text(ids, params, 2)
    prefill(lab, [chunked], PAGE)
    assert same(block(lab, chunked), expected), "chunked"

    first = Text(ids, params, 3)
    row = first.row(2 * PAGE)
    lab.step([row], slot_starts=(SlotStart(3, None, 0),), snapshot_saves=(SnapshotSave(3, 1, 2 * PAGE),))
    hit = Text(ids, params, 4)
    hit.pages = first.pages[:2] + hit.pages[2:]
    hit.computed = 2 * PAGE
    prefill(lab, [hit], slot_starts=(SlotStart(4, 1, 2 * PAGE),))
    assert same(block(lab, hit), expected), "prefix hit"

    # 257 tokens are fewer than those that are kept of them: each in its place, and a window before each page end.
    for count, ends in ((len(ids), (2 * PAGE,)), (2 * PAGE + 1, (PAGE, 2 * PAGE))):
        first = Text(ids[:count], params, 3)
        saves = tuple(SnapshotSave(3, number, end, inner_slot=7 + number) for number, end in enumerate(ends))
        lab.step([first.row()], slot_starts=(SlotStart(3, None, 0),), snapshot_saves=saves)
        for save in saves:
            hit = Text(ids, params, 4)
            hit.pages = first.pages[: save.position // PAGE] + hit.pages[save.position // PAGE :]
            hit.computed = save.position
            prefill(lab, [hit], slot_starts=(SlotStart(4, save.snapshot, save.position),))
            assert same(block(lab, hit), expected), f"prefix hit inside a chunk of {count}"

    # From here on the context holds outputs: computed one by one, in windows, and all at once after a retract.
    mixed, drafted = Text(ids, params, 1), Text(ids, params, 2)
    prefill(lab, [mixed])
    while len(mixed.outputs) < OUTPUTS:
        row = mixed.row()
        mixed.take(row, lab.step([row])[0])
    prefill(lab, [drafted])
    while len(drafted.outputs) < OUTPUTS:
        row = drafted.row()
        (output,) = lab.step([row], min(lab.gamma, OUTPUTS - len(drafted.outputs) - 1) or 1)
        output = dataclasses.replace(output, token_ids=output.token_ids[: OUTPUTS - len(drafted.outputs)])
        drafted.take(row, output)
    assert drafted.outputs == mixed.outputs
    retracted = Text(ids, params, 5)
    retracted.outputs = mixed.outputs[:-1]
    prefill(lab, [retracted], 2 * PAGE, slot_starts=(SlotStart(5, None, 0),))
    assert retracted.outputs == mixed.outputs
    expected = block(lab, mixed)
    assert same(block(lab, drafted), expected), "drafted"
    assert same(block(lab, retracted), expected), "retracted"


def test_blocks_of_which_nothing_is_kept_leave_no_trace(lab: Lab) -> None:
    """The ring is longer than a window and a block: a refused block overwrites nothing that the next one reads."""
    ids = lab.ids[: 2 * PAGE + 3]
    plain, refused = Text(ids, GREEDY, 1), Text(ids, GREEDY, 2)
    prefill(lab, [plain, refused])
    for _ in range(3):
        row = plain.row()
        plain.take(row, lab.step([row])[0])
        row = refused.row()
        (output,) = lab.step([row], lab.gamma)
        refused.take(row, dataclasses.replace(output, token_ids=output.token_ids[:1]))
    assert same(block(lab, refused), block(lab, plain))


def test_a_block_sees_no_key_before_the_sequence(lab: Lab) -> None:
    """What lies there in the ring is another sequence's or nothing."""
    rows = [dataclasses.replace(Text(lab.ids[:n], GREEDY, 1).row(), slot=place) for place, n in ((1, 41), (2, 130))]
    inputs = lab.desk._inputs(rows)
    assert inputs.first.tolist() == [PAGE - 40, 0]
    assert not inputs.all_visible
    assert inputs.sources[0, : PAGE - 40].unique().tolist() == [0]
    ring = lab.pool.geometry.draft_ring_rows
    assert inputs.sources[1].tolist() == [2 * ring + position % ring for position in range(1, 129)]


def test_sampled_blocks_are_drawn_with_their_seed_and_choice(lab: Lab) -> None:
    """The noise of plain decoding's draws: without it drafts and draws would hardly ever agree when it is hot."""
    drawn = set()
    for seed, choice in ((1, 0), (2, 0), (1, 1)):
        text = Text(lab.ids[:200], SamplingParams(max_tokens=9, seed=seed, choice=choice, temperature=3.0), 1)
        prefill(lab, [text])
        text.outputs = (lab.ids[200],)
        drawn.add(tuple(block(lab, text).drafts.ids[0].tolist()))
    assert len(drawn) == 3


def test_a_snapshot_inside_a_window_holds_the_drafters_ring(lab: Lab) -> None:
    """A page end that a window reaches beyond resumes with the drafts of a cold run, wherever the window began."""
    for ahead in range(1, 1 + lab.gamma):
        cold = Text(lab.ids[: PAGE + 1], GREEDY, 1)
        prefill(lab, [cold])
        expected = block(lab, cold)
        known = lab.ids[: PAGE + 6]
        first = Text(known[: PAGE - ahead], GREEDY, 2)
        prefill(lab, [first])
        # A chunk as long as a window does what a window does.
        first.ids, first.outputs = known[: PAGE - ahead + lab.gamma + 1], ()
        lab.step([first.row()], snapshot_saves=(SnapshotSave(2, 2, PAGE),))
        hit = Text(cold.ids, GREEDY, 3)
        hit.pages = first.pages[:1] + hit.pages[1:]
        hit.computed = PAGE
        prefill(lab, [hit], slot_starts=(SlotStart(3, 2, PAGE),))
        assert same(block(lab, hit), expected), ahead


@pytest.mark.parametrize("params", [GREEDY, SEEDED])
def test_drafts_do_not_depend_on_neighbours(lab: Lab, params: SamplingParams) -> None:
    """A block's bits are its own: its draws have the noise of its seed and positions."""
    alone = Text(lab.ids[:200], params, 1)
    prefill(lab, [alone])
    expected = block(lab, alone)
    texts = [Text(lab.ids[: 90 + 55 * place], GREEDY if place % 2 else SEEDED, place) for place in (2, 3, 4)]
    again = Text(lab.ids[:200], params, 5)
    prefill(lab, [*texts, again])
    lab.step([text.row() for text in (*texts, again)], lab.gamma)
    got = lab.blocks[-1]
    assert torch.equal(got.windows[-1], expected.windows[0])
    assert torch.equal(got.survival[-1], expected.survival[0])
    assert torch.equal(got.drafts.logits[-1], expected.drafts.logits[0])


def test_chances_are_chances_that_never_grow(lab: Lab) -> None:
    """D-31: the planner takes nothing else."""
    text = Text(lab.ids[:150], GREEDY, 1)
    prefill(lab, [text])
    decode(lab, [text], 2)
    for blocks in lab.blocks:
        for chances in blocks.survival.tolist():
            assert len(chances) == lab.gamma
            assert all(0 <= later <= sooner <= 1 for sooner, later in itertools.pairwise(chances))


def test_a_pool_without_rings_for_each_stage_is_refused(lab: Lab) -> None:
    """The geometry is made from the configuration, the drafter from the checkpoint."""
    config = load_model_config(ensure_checkpoint())
    pool = KVPool(config.kv_geometry(PAGE, "float32"), PoolSizes(3, 2, 0), torch.float32, CPU)
    with pytest.raises(InvariantError, match="0 draft stages"):
        DraftDesk(lab.drafter, pool, lab.desk._exchange)
