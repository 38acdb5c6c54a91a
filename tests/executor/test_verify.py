"""Windows of drafts through a small model: whatever is drafted, what comes out is what plain decoding gives."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import xgrammar
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dsparkd.errors import InvariantError
from dsparkd.executor import verify
from dsparkd.executor.draft import Blocks
from dsparkd.executor.executor import Executor
from dsparkd.executor.masks import Held, Masker, Masks
from dsparkd.executor.plan import Plan, PlanRow, RowOutput, SlotStart, SnapshotSave, Speculation, StepKind
from dsparkd.executor.verify import ask, with_drafts
from dsparkd.grammar.compiler import tokenizer_info
from dsparkd.grammar.matcher import Matcher
from dsparkd.grammar.traversal import open_traversal
from dsparkd.grammar.vocabulary import make_vocabulary
from dsparkd.kernels.blocks import Anchors, go_on
from dsparkd.kv.geometry import PoolSizes
from dsparkd.kv.pool import KVPool
from dsparkd.messages import SamplingParams
from dsparkd.model.config import load_model_config
from dsparkd.model.dspark import Drafts
from dsparkd.model.weights import load_both_shards
from dsparkd.native.traversal import Traversal, Walk, WalkStatus
from dsparkd.text.tokenizer import Tokenizer

CPU = torch.device("cpu")
PAGE = 128
VOCAB = 320
GAMMA = 5
OUTPUTS = 24
THINK_END = 7
GREEDY = SamplingParams(max_tokens=64, seed=1, temperature=0.0, top_logprobs=2)
SEEDED = SamplingParams(max_tokens=64, seed=77, temperature=0.9, top_p=0.95, top_logprobs=2)
RULES = SamplingParams(
    max_tokens=64,
    seed=5,
    choice=3,
    temperature=1.3,
    top_k=40,
    min_p=0.01,
    repetition_penalty=1.4,
    presence_penalty=0.8,
    frequency_penalty=0.6,
    logit_bias=((9, 3.0), (33, -4.0)),
    min_tokens=12,
    stop_ids=(9, 44),
    top_logprobs=1,
)


class ScriptedDesk:
    """Drafts what a test says, by request: right ids as far as it wants, then wrong ones."""

    taps: tuple[int, ...] = ()

    def __init__(self) -> None:
        self.blocks: dict[str, tuple[int, ...]] = {}
        self.survival: dict[str, tuple[float, ...]] = {}

    def propose(self, rows: Sequence[PlanRow], num_blocks: tuple[int, int]) -> Blocks:
        assert num_blocks[0] == len(rows)
        nothing = torch.empty(0)
        windows = [(row.input_ids[-1], *self.blocks[row.request_id]) for row in rows]
        survival = [self.survival.get(row.request_id, (1.0,) * GAMMA) for row in rows]
        return Blocks(
            torch.tensor(windows).view(-1, 1 + GAMMA), torch.tensor(survival), Drafts(nothing, nothing, nothing)
        )


class Lab:
    """An executor over the small checkpoint with a scripted drafter, and the plain outputs that it must repeat."""

    def __init__(self, checkpoint: Path) -> None:
        torch.set_num_threads(1)
        config = load_model_config(checkpoint)
        geometry = dataclasses.replace(config.kv_geometry(PAGE, "float32"), gamma=GAMMA)
        model, exchange = load_both_shards(checkpoint, config, torch.float32, CPU)
        pool = KVPool(geometry, PoolSizes(40, 7, 4), torch.float32, CPU)
        tokenizer = Tokenizer.load(checkpoint)
        self.info = tokenizer_info(make_vocabulary(tokenizer, VOCAB, (config.eos_token_id,)))
        masker = Masker(open_traversal("native", 1, self.info), 6, 1 + GAMMA, VOCAB, 60.0, 60.0, think_end_id=THINK_END)
        self.desk = ScriptedDesk()
        # What a drafter is to the executor is its two calls.
        self.executor = Executor(0, model, 0, pool, exchange, tokenizer, masker, self.desk)  # type: ignore[arg-type]

    def matcher(self, ebnf: str) -> Matcher:
        return Matcher(xgrammar.GrammarCompiler(self.info, cache_enabled=False).compile_grammar(ebnf))

    def step(
        self,
        rows: Sequence[PlanRow],
        speculation: Speculation | None = None,
        starts: tuple[SlotStart, ...] = (),
        saves: tuple[SnapshotSave, ...] = (),
    ) -> tuple[RowOutput, ...]:
        plan = Plan(StepKind.DECODE, tuple(rows), starts, saves, speculation)
        return self.executor.step(plan, (plan.num_tokens, 0)).rows


@pytest.fixture(scope="module")
def lab(checkpoint: Path) -> Lab:
    return Lab(checkpoint)


def prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(torch.randint(0, 256, (length,), generator=torch.Generator().manual_seed(seed)).tolist())


class Text:
    """What a scheduler keeps of one request."""

    def __init__(
        self,
        ids: tuple[int, ...],
        params: SamplingParams,
        place: int,
        grammar: Matcher | None = None,
        thinks: bool = False,
    ) -> None:
        self.ids, self.params, self.place = ids, params, place
        self.matcher, self.thinks = grammar, thinks
        self.outputs: tuple[int, ...] = ()
        self.logprobs: list[object] = []
        self.computed = 0

    def row(self) -> PlanRow:
        known = self.ids + self.outputs
        return PlanRow(
            request_id=str(self.place),
            slot=self.place,
            input_ids=known[self.computed :],
            start=self.computed,
            page_table=tuple(range(6 * self.place - 5, 6 * self.place + 1)),
            num_logits=1,
            sampling=self.params,
            prompt_ids=self.ids,
            output_ids=self.outputs,
            matcher=self.matcher,
            is_thinking=self.thinks,
        )

    def take(self, output: RowOutput, limit: int) -> None:
        """Commit a row's output, cut at the limit."""
        ids = output.token_ids[: limit - len(self.outputs)]
        self.computed = len(self.ids) + len(self.outputs) + len(ids) - 1
        for token in ids:
            if self.thinks:
                self.thinks = token != THINK_END
            elif self.matcher is not None:
                self.matcher.queue((token,))
        self.outputs += ids
        self.logprobs += (output.logprobs or ())[: len(ids)]


def prefill(lab: Lab, sequences: Sequence[Text]) -> None:
    starts = tuple(SlotStart(sequence.place, None, 0) for sequence in sequences)
    for sequence, output in zip(sequences, lab.step([s.row() for s in sequences], starts=starts), strict=True):
        sequence.take(output, OUTPUTS)


def plain(lab: Lab, sequence: Text, count: int = OUTPUTS) -> Text:
    """Decode a sequence alone and without drafts."""
    prefill(lab, [sequence])
    while len(sequence.outputs) < count and sequence.outputs[-1] != lab.executor.model_config.eos_token_id:
        (output,) = lab.step([sequence.row()])
        assert len(output.token_ids) == 1
        sequence.take(output, count)
    return sequence


def speculate(lab: Lab, sequences: Sequence[Text], targets: Sequence[Text], draw: random.Random, most: int) -> int:
    """Decode together with drafts that follow the targets for a random while; returns the steps that it took."""
    prefill(lab, sequences)
    steps = 0
    while live := [
        (sequence, target)
        for sequence, target in zip(sequences, targets, strict=True)
        if len(sequence.outputs) < len(target.outputs)
    ]:
        for sequence, target in live:
            at, right = len(sequence.outputs), draw.randint(0, GAMMA)
            block = [*target.outputs[at : at + right]]
            block += [draw.choice((0, 9, THINK_END, 257, 258, 300, 319)) for _ in range(GAMMA - len(block))]
            lab.desk.blocks[str(sequence.place)] = tuple(block)
        rows = [sequence.row() for sequence, _ in live]
        outputs = lab.step(rows, Speculation(most, (len(rows) * (1 + most), 0)))
        for (sequence, target), output in zip(live, outputs, strict=True):
            assert output.failure is None
            assert (output.num_drafts, output.num_verified) == (GAMMA, most)
            sequence.take(output, len(target.outputs))
        steps += 1
    return steps


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**31), most=st.integers(1, GAMMA))
@pytest.mark.parametrize("params", [GREEDY, SEEDED, RULES])
def test_any_drafts_give_the_ids_and_logprobs_of_plain_decoding(
    lab: Lab, plain_outputs: dict[SamplingParams, list[Text]], params: SamplingParams, seed: int, most: int
) -> None:
    """Path invariance: right and wrong drafts, windows over ends of entries and pages, neighbours, all rules.

    Rows of what was refused stay behind in rings and pages; whatever reads them shows here, to the last bit.
    """
    targets = plain_outputs[params]
    sequences = [Text(target.ids, params, place) for place, target in enumerate(targets, 1)]

    steps = speculate(lab, sequences, targets, random.Random(seed), most)

    assert [s.outputs for s in sequences] == [target.outputs for target in targets]
    assert [s.logprobs for s in sequences] == [target.logprobs for target in targets]
    assert steps < OUTPUTS - 1, "some drafts were right"


@pytest.fixture(scope="module")
def plain_outputs(lab: Lab) -> dict[SamplingParams, list[Text]]:
    """Prompts whose outputs cross the ends of windows, of CSA and HCA entries and of pages."""
    lengths = (2, 113, 120, 125, 240, 250)
    return {
        params: [plain(lab, Text(prompt(n, i), params, 1)) for i, n in enumerate(lengths)]
        for params in (GREEDY, SEEDED, RULES)
    }


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**31), most=st.integers(1, GAMMA), thinks=st.booleans())
@pytest.mark.parametrize("params", [GREEDY, SEEDED])
def test_d16_d24_d25_grammars_hold_drafts_as_they_hold_plain_decoding(
    lab: Lab, params: SamplingParams, seed: int, most: int, thinks: bool
) -> None:
    """D-16, D-24, D-25: the text is valid and the same as without drafts; reasoning may end inside a block."""
    grammar = r'root ::= "q" [a-f0-9]{3,9} ("!" | "?")'
    # Reasoning that would hardly ever end is made likely to.
    rules = SamplingParams(
        max_tokens=64,
        seed=params.seed + seed % 5,
        temperature=params.temperature,
        top_p=params.top_p,
        logit_bias=((THINK_END, 4.0 if thinks else 0.0),),
    )
    target = plain(lab, Text(prompt(90, seed % 3), rules, 1, lab.matcher(grammar), thinks))
    free = plain(lab, Text(prompt(40, 8), params, 2))
    held = Text(target.ids, rules, 1, lab.matcher(grammar), thinks)
    beside = Text(free.ids, params, 2)

    speculate(lab, [held, beside], [target, free], random.Random(seed), most)

    assert held.outputs == target.outputs
    assert beside.outputs == free.outputs
    text = target.outputs[target.outputs.index(THINK_END) + 1 :] if thinks and THINK_END in target.outputs else None
    for ids in (text,) if thinks else (target.outputs,):
        if ids is not None:
            oracle = lab.matcher(grammar)
            oracle.queue(ids)
            assert oracle.commit()


class GivesUp:
    """A traversal that finds one matcher's step does not end, as the native pool says it."""

    def __init__(self, traversal: Traversal, matcher: Matcher) -> None:
        self._traversal, self._matcher = traversal, matcher

    def run(self, walk: Walk, deadline_ns: int) -> None:
        self._traversal.run(walk, deadline_ns)
        for request in range(walk.num_matchers):
            if walk.matchers[request] is self._matcher.handle:
                tree = int(walk.indices[request])
                walk.mask[tree * walk.num_nodes : (tree + 1) * walk.num_nodes] = -1
                walk.statuses[request] = WalkStatus.STUCK
                walk.usable_rows[request] = 0

    def stuck(self) -> tuple[int, int]:
        return 1, 0

    def close(self) -> None:
        """Ended by the lab."""


@pytest.mark.parametrize("place", [1, 3, GAMMA])
def test_d16_d17_a_grammar_stuck_behind_a_draft_ends_one_request(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, place: int
) -> None:
    """D-16, D-17: through a whole step and its commit: one error of 504, and both neighbours' ids are as without it."""
    masker = lab.executor._masker
    assert masker is not None
    held = plain(lab, Text(prompt(30), GREEDY, 1, lab.matcher('root ::= "abcdefghijkl"')), 8)
    free = plain(lab, Text(prompt(40, 8), SEEDED, 1), 8)
    stuck = lab.matcher('root ::= "ok"')
    rows = [
        Text(prompt(25, 4), GREEDY, 1, stuck, thinks=True),
        Text(held.ids, GREEDY, 2, lab.matcher('root ::= "abcdefghijkl"')),
        Text(free.ids, SEEDED, 3),
    ]
    prefill(lab, rows)
    monkeypatch.setattr(masker, "_traversal", GivesUp(masker._traversal, stuck))
    drafts = [50] * GAMMA
    drafts[place - 1] = THINK_END
    lab.desk.blocks = {
        "1": tuple(drafts),
        "2": held.outputs[1 : 1 + GAMMA],
        "3": free.outputs[1 : 1 + GAMMA],
    }
    outputs = lab.step([text.row() for text in rows], Speculation(GAMMA, (3 * (1 + GAMMA), 0)))
    failures = [output.failure for output in outputs]
    assert failures[0] is not None
    assert (failures[0].status, failures[0].code, failures[1:]) == (504, "grammar_traversal_timeout", [None, None])
    assert stuck.is_stuck
    for text, output, target in zip(rows[1:], outputs[1:], (held, free), strict=True):
        text.take(output, 8)
        assert text.outputs == target.outputs[: len(text.outputs)]
        assert len(text.outputs) == 2 + GAMMA
    (output,) = lab.step([rows[1].row()])
    rows[1].take(output, 8)
    assert rows[1].outputs == held.outputs


def test_d19_acceptance_stops_where_the_masks_do(lab: Lab) -> None:
    """Decisions.md 1, D-19: behind a refused draft nothing may be drawn; the row before it chooses in its place."""
    target = plain(lab, Text(prompt(30), GREEDY, 1, lab.matcher('root ::= "abcdefgh"')), 8)
    assert bytes(target.outputs) == b"abcdefgh"
    held = Text(target.ids, GREEDY, 1, lab.matcher('root ::= "abcdefgh"'))
    prefill(lab, [held])
    for drafts, expected in ((b"bcxef", b"bcd"), (b"efghz", b"efgh")):
        lab.desk.blocks["1"] = tuple(drafts)
        (output,) = lab.step([held.row()], Speculation(GAMMA, (1 + GAMMA, 0)))
        assert bytes(output.token_ids[:4]) == expected
        held.take(output, 8)
    assert held.outputs == target.outputs


def test_d16_d19_each_row_of_a_window_has_the_state_behind_the_drafts_before_it(lab: Lab) -> None:
    """D-14, D-16, D-19: position, history, mask and held-back ends row by row; only rows that may be drawn from."""
    thinking = dataclasses.replace(Text(prompt(9), RULES, 1, lab.matcher('root ::= "abc"'), True).row(), num_logits=1)
    anchor = dataclasses.replace(thinking, input_ids=thinking.input_ids[-1:], start=8)
    drafts = (50, THINK_END, ord("a"), ord("z"), 9)
    free = dataclasses.replace(anchor, request_id="free", matcher=None, is_thinking=False)
    chunk = dataclasses.replace(free, request_id="chunk", sampling=None, num_logits=0)
    plan = with_drafts(Plan(StepKind.DECODE, (free, chunk, anchor)), (2, 0, 5))
    assert len(plan.rows[2].input_ids) == 6
    assert [row.num_logits for row in plan.rows] == [3, 0, 6]
    held = Held(place=4, first=2, usable=4)
    masks = Masks({2: held}, 1 + GAMMA, {})

    asked = ask(plan, ((7, 8), (), drafts), masks, THINK_END)

    assert asked.readable == (3, 0, 4)
    of_free, of_held = asked.samples[:3], asked.samples[3:]
    assert [(row.logits_row, row.position, row.mask_row, row.keeps_on) for row in of_free] == [
        (0, 9, None, False),
        (1, 10, None, False),
        (2, 11, None, False),
    ]
    assert [(row.logits_row, row.position, row.mask_row, row.keeps_on) for row in of_held] == [
        (3, 9, None, True),
        (4, 10, None, True),
        (5, 11, 26, False),
        (6, 12, 27, False),
    ]
    assert [row.output_ids for row in of_held] == [drafts[:j] for j in range(4)]


@pytest.mark.parametrize("room", [0, 1, 4, 7, 10])
def test_d30_compact_windows_keep_each_anchor_and_the_likeliest_drafts(lab: Lab, room: int) -> None:
    """D-30: fewer drafts than all are verified, at least every anchor, and what is emitted does not change."""
    targets = [plain(lab, Text(prompt(60, i), GREEDY, 1), 12) for i in range(2)]
    sequences = [Text(target.ids, GREEDY, place) for place, target in enumerate(targets, 1)]
    prefill(lab, sequences)
    for place, target in enumerate(targets, 1):
        lab.desk.blocks[str(place)] = target.outputs[1 : 1 + GAMMA]
    lab.desk.survival = {"1": (0.9, 0.8, 0.7, 0.6, 0.1), "2": (0.95, 0.5, 0.4, 0.3, 0.2)}
    speculation = Speculation(GAMMA, (2 + room, 0), is_compact=True)
    outputs = lab.step([s.row() for s in sequences], speculation)
    lab.desk.survival = {}
    ranked = sorted(
        [(-a, i, 0) for i, a in enumerate((0.9, 0.8, 0.7, 0.6, 0.1))]
        + [(-a, i, 1) for i, a in enumerate((0.95, 0.5, 0.4, 0.3, 0.2))]
    )[:room]
    for index, (output, target) in enumerate(zip(outputs, targets, strict=True)):
        verified = sum(row == index for _, _, row in ranked)
        assert output.num_verified == verified
        assert output.token_ids == target.outputs[1 : 2 + verified]


def test_a_snapshot_inside_a_window_resumes_as_a_cold_run(lab: Lab) -> None:
    """The rings still hold a page end that the window reaches beyond, wherever the window starts before it."""
    for ahead in range(1, GAMMA + 1):
        target = plain(lab, Text(prompt(PAGE - 6, ahead), SEEDED, 1))
        first = Text(target.ids, SEEDED, 2)
        prefill(lab, [first])
        while first.computed < PAGE - ahead:
            first.take(lab.step([first.row()])[0], OUTPUTS)
        at = len(first.outputs)
        lab.desk.blocks["2"] = target.outputs[at : at + GAMMA]
        saves = (SnapshotSave(2, 1, PAGE),)
        (output,) = lab.step([first.row()], Speculation(GAMMA, (1 + GAMMA, 0)), saves=saves)
        assert len(output.token_ids) == 1 + GAMMA
        known = first.ids + first.outputs + output.token_ids
        resumed = Text(known[: PAGE + 1], SEEDED, 3)
        resumed.ids, resumed.outputs = target.ids, known[len(target.ids) : PAGE + 1]
        resumed.computed = PAGE
        row = dataclasses.replace(resumed.row(), page_table=(first.row().page_table[0], *resumed.row().page_table[1:]))
        (output,) = lab.step([row], starts=(SlotStart(3, 1, PAGE),))
        resumed.take(output, OUTPUTS)
        assert resumed.outputs == target.outputs[: len(resumed.outputs)]
        assert resumed.logprobs == target.logprobs[len(resumed.outputs) - 1 : len(resumed.outputs)]


def test_a_plan_that_drafts_where_nothing_is_drafted_is_refused(checkpoint: Path, lab: Lab) -> None:
    """One rank that drafts beside one that cannot would hang both."""
    config = load_model_config(checkpoint)
    model, exchange = load_both_shards(checkpoint, config, torch.float32, CPU)
    pool = KVPool(config.kv_geometry(PAGE, "float32"), PoolSizes(40, 7, 4), torch.float32, CPU)
    bare = Executor(0, model, 0, pool, exchange, Tokenizer.load(checkpoint))
    row = Text(prompt(5), GREEDY, 1).row()
    with pytest.raises(InvariantError, match="nothing is drafted"):
        bare.step(Plan(StepKind.DECODE, (row,), speculation=Speculation(GAMMA, (6, 0))), (5, 0))


def test_more_drafts_than_were_agreed_on_are_refused(lab: Lab) -> None:
    """The peer's experts make room for the agreed tokens and no more."""
    sequence = Text(prompt(5), GREEDY, 1)
    prefill(lab, [sequence])
    lab.desk.blocks["1"] = (1, 2, 3, 4, 5)
    with pytest.raises(InvariantError, match="agreed on"):
        lab.step([sequence.row()], Speculation(GAMMA, (3, 0)))


def test_the_device_finds_the_anchors_that_the_host_will() -> None:
    """Blocks are drafted behind a step from these: accepted drafts, rows that may not be read, refused first drafts."""
    draw = random.Random(5)
    for _ in range(200):
        count, width = draw.randint(1, 6), 6
        windows = [[draw.randint(0, 2) for _ in range(width)] for _ in range(count)]
        lengths = [draw.randint(0, width - 1) for _ in range(count)]
        readable = tuple(draw.randint(1, 1 + length) for length in lengths)
        drafts = tuple(tuple(row[1 : 1 + length]) for row, length in zip(windows, lengths, strict=True))
        ids = [
            row[1 + j] if j + 1 < width and draw.random() < 0.7 else draw.randint(0, 2)
            for row, number in zip(windows, readable, strict=True)
            for j in range(number)
        ]
        asked = verify.Asked([], [], readable)
        kept = verify._accept(drafts, asked, ids)
        firsts = [sum(readable[:index]) for index in range(count)]

        known = Anchors(torch.full((count,), 7), torch.full((count,), 40))
        bounds = [torch.from_numpy(part) for part in verify.bounds(lengths, asked)]
        found = go_on(known, torch.tensor(windows), torch.tensor(ids), bounds[0], bounds[1])

        assert (found.positions - 40).tolist() == kept
        assert found.ids.tolist() == [ids[first + number - 1] for first, number in zip(firsts, kept, strict=True)]
