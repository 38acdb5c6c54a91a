"""Windows under rejection: the rule's own runs, handed to rows of any plan, and read back by the coupled rule."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from dsparkd.executor import rejection
from dsparkd.executor.accept import Block, NoiseKeys, accept_coupled, accept_rejection
from dsparkd.executor.draft import Blocks
from dsparkd.executor.plan import Plan, PlanRow, Speculation, StepKind
from dsparkd.executor.rejection import picker
from dsparkd.executor.sampler import SampleRow
from dsparkd.executor.verify import Asked, cut
from dsparkd.messages import SamplingParams
from dsparkd.model.dspark import Drafts
from tests.executor.test_verify import GREEDY, Lab, Text, plain, prefill, prompt

VOCAB, GAMMA = 16, 3


class Case:
    """Windows of a step: drafts, how many are verified and how many rows can be read; some rows sample nothing."""

    def __init__(self, count: int, seed: int) -> None:
        draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
        self.ids = torch.randint(0, VOCAB, (count, GAMMA), generator=generator)
        self.logits = torch.randn(count, GAMMA, VOCAB, generator=generator) * 2
        self.drafts = [tuple(row[: draw.randint(0, GAMMA)]) for row in self.ids.tolist()]
        self.readable = [draw.choice((0, *range(1, len(ids) + 2))) for ids in self.drafts]
        self.params = [
            SamplingParams(max_tokens=9, seed=50 + i, choice=i % 2, temperature=draw.choice((0.0, 0.7, 1.0)))
            for i in range(count)
        ]
        self.positions = [draw.randint(1, 900) for _ in range(count)]
        target = torch.randn(count, GAMMA + 1, VOCAB, generator=generator).mul(2)
        # The target likes the drafts, or next to none would stand.
        target[:, :GAMMA].scatter_add_(2, self.ids[:, :, None], torch.full((count, GAMMA, 1), 4.0))
        self.target = target.softmax(-1)

    def part(self, rows: list[int]) -> tuple[Blocks, list[tuple[int, ...]], Asked, torch.Tensor]:
        """The step that holds these windows only, and what its rows would be drawn from."""
        samples, probs = [], []
        for i in rows:
            for j in range(self.readable[i]):
                samples.append(SampleRow(len(samples), self.params[i], (), (), self.positions[i] + 1 + j))
                probs.append(self.target[i, j])
        drafts = Drafts(self.ids[rows], self.logits[rows], torch.zeros(len(rows), GAMMA))
        windows = torch.cat((torch.zeros((len(rows), 1), dtype=torch.int64), self.ids[rows]), 1)
        blocks = Blocks(windows, torch.full((len(rows), GAMMA), 0.5), drafts)
        asked = Asked(samples, [], tuple(self.readable[i] for i in rows))
        return blocks, [self.drafts[i] for i in rows], asked, torch.stack(probs) if probs else torch.empty(0, VOCAB)

    def pick(self, rows: list[int]) -> list[list[int]]:
        """Each window's ids, row by row."""
        blocks, drafts, asked, probs = self.part(rows)
        ids = picker(blocks, drafts, asked)(probs).tolist()
        return [[ids.pop(0) for _ in range(self.readable[i])] for i in rows]

    def run(self, i: int, ids: list[int]) -> list[int]:
        """A window's ids as far as the coupled rule keeps them."""
        width = len(self.drafts[i])
        block = Block(
            torch.tensor([self.drafts[i]]).view(1, width).long(), torch.tensor([width]), torch.tensor([len(ids)])
        )
        padded = torch.tensor([ids + [0] * (width + 1 - len(ids))])
        return ids[: int(accept_coupled(block, padded).lens) + 1]


@pytest.fixture
def case() -> Case:
    """Forty windows of all kinds."""
    return Case(40, seed=3)


def test_each_window_gets_the_run_that_the_rule_gives_it_alone(case: Case) -> None:
    """Layout must not matter: a window's run is the rule's on its own rows, and the coupled rule reads it back."""
    picked = case.pick(list(range(40)))

    lengths = set()
    for i, ids in enumerate(picked):
        if not ids:
            continue
        width, params = len(case.drafts[i]), case.params[i]
        block = Block(
            torch.tensor([case.drafts[i]]).view(1, width).long(), torch.tensor([width]), torch.tensor([len(ids)])
        )
        if params.temperature:
            believed = (case.logits[i : i + 1, :width] / params.temperature).softmax(-1)
        else:
            believed = torch.nn.functional.one_hot(case.ids[i : i + 1, :width], VOCAB).float()
        keys = NoiseKeys(*(torch.tensor([value]) for value in (params.seed, params.choice, case.positions[i])))
        wanted = accept_rejection(block, believed, case.target[i : i + 1, : width + 1], keys)
        run = case.run(i, ids)
        assert run == [each for each in wanted.ids[0].tolist() if each >= 0]
        lengths.add(len(run))
    assert lengths >= {1, 2, 3}


def test_a_window_gets_the_same_run_alone_and_among_any_neighbours(case: Case) -> None:
    """Seeded text must be reproducible for the same windows, whatever else the step holds."""
    together = case.pick(list(range(40)))

    assert case.pick(list(range(40))[::-1]) == together[::-1]
    for i in range(40):
        assert case.run(i, case.pick([i])[0] or [0]) == case.run(i, together[i] or [0])


def test_a_rank_without_rows_picks_nothing() -> None:
    """It takes part in the step of its peer."""
    case = Case(0, seed=1)
    blocks, drafts, asked, probs = case.part([])

    assert picker(blocks, drafts, asked)(probs).shape == (0,)


def test_windows_without_drafts_draw_from_the_target() -> None:
    """A compact step may have room for no draft of this rank."""
    case = Case(30, seed=2)
    case.drafts, case.readable = [()] * 30, [1] * 30

    for i, ids in enumerate(case.pick(list(range(30)))):
        assert case.target[i, 0, ids[0]] > 0
    case.target = torch.nn.functional.one_hot(torch.arange(120).view(30, 4) % VOCAB, VOCAB).float()
    assert case.pick(list(range(30))) == [[4 * i % VOCAB] for i in range(30)]


@pytest.mark.parametrize("is_coupled", [True, False])
def test_a_step_that_drafts_lets_the_configured_rule_choose(
    is_coupled: bool, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With rejection configured, no id of a window may come from the coupled draw, and the other way round."""
    lab = Lab(checkpoint)
    lab.executor._is_coupled = is_coupled
    monkeypatch.setattr(rejection, "picker", lambda blocks, drafts, asked: lambda probs: torch.full((len(probs),), 5))
    text = Text(prompt(20), GREEDY, 1)
    prefill(lab, [text])
    lab.desk.blocks["1"] = (5, 5, 9, 9, 9)

    (output,) = lab.step([text.row()], Speculation(5, (6, 0)))

    assert (output.token_ids == (5, 5, 5)) != is_coupled


def compact_lengths(case: Case, room: int, seed: int) -> tuple[int, ...]:
    """How a compact step with room for so many drafts cuts the case's blocks, by chances of its own."""
    chances = torch.rand((len(case.drafts), GAMMA), generator=torch.Generator().manual_seed(seed)).cumprod(1)
    row = Text(prompt(3), GREEDY, 1).row()
    rows = tuple(dataclasses.replace(row, request_id=str(place)) for place in range(len(case.drafts)))
    speculation = Speculation(GAMMA, (len(rows) + room, 0), is_compact=True)
    return cut(Plan(StepKind.DECODE, rows, speculation=speculation), chances.tolist(), 0)


@pytest.mark.parametrize("room", [0, 1, 20, 60, 119, 120])
def test_a_compact_window_accepts_what_the_whole_one_does_as_far_as_it_reaches(case: Case, room: int) -> None:
    """D-30: cutting a window keeps each draft's fate; only what stands at the cut is drawn instead of judged."""
    case.drafts = [tuple(ids) for ids in case.ids.tolist()]
    case.readable = [GAMMA + 1] * 40
    whole = [case.run(i, ids) for i, ids in enumerate(case.pick(list(range(40))))]
    lengths = compact_lengths(case, room, seed=room)
    assert sum(lengths) == room
    case.drafts = [ids[:length] for ids, length in zip(case.drafts, lengths, strict=True)]
    case.readable = [length + 1 for length in lengths]

    runs = [case.run(i, ids) for i, ids in enumerate(case.pick(list(range(40))))]

    for run, all_of, length, drafts in zip(runs, whole, lengths, case.drafts, strict=True):
        if len(all_of) <= length:
            assert run == all_of, "what refused a draft in front of the cut is the same"
        else:
            assert (tuple(run[:length]), len(run)) == (drafts, length + 1)


@pytest.mark.parametrize("room", [0, 1, 4, 10])
def test_greedy_rows_of_compact_steps_get_the_ids_of_plain_decoding(checkpoint: Path, room: int) -> None:
    """D-30, D-31: end to end under rejection, with right and wrong drafts, windows as long as the step has room."""
    lab = Lab(checkpoint)
    lab.executor._is_coupled = False

    def propose(rows: Sequence[PlanRow], num_blocks: tuple[int, int]) -> Blocks:
        blocks = type(lab.desk).propose(lab.desk, rows, num_blocks)
        ids = blocks.windows[:, 1:].contiguous()
        return dataclasses.replace(blocks, drafts=Drafts(ids, torch.zeros((*ids.shape, 320)), blocks.survival))

    lab.desk.propose = propose  # type: ignore[method-assign]
    targets = [plain(lab, Text(prompt(50, i), GREEDY, 1), 14) for i in range(2)]
    texts = [Text(target.ids, GREEDY, place) for place, target in enumerate(targets, 1)]
    prefill(lab, texts)
    draw = random.Random(room)
    verified = set()
    while live := [(text, target) for text, target in zip(texts, targets, strict=True) if len(text.outputs) < 14]:
        for text, target in live:
            right = draw.randint(0, 5)
            block = [*target.outputs[len(text.outputs) :][:right], *(9,) * 5][:5]
            lab.desk.blocks[str(text.place)] = tuple(block)
            lab.desk.survival[str(text.place)] = tuple(draw.random() * 0.8**j for j in range(5))
            lab.desk.survival[str(text.place)] = tuple(sorted(lab.desk.survival[str(text.place)], reverse=True))
        space = min(room, 5 * len(live))
        outputs = lab.step([text.row() for text, _ in live], Speculation(5, (len(live) + space, 0), is_compact=True))
        for (text, _), output in zip(live, outputs, strict=True):
            verified.add(output.num_verified)
            text.take(output, 14)
    assert [text.outputs for text in texts] == [target.outputs for target in targets]
    assert len(verified) > 1 or room in (0, 10)
