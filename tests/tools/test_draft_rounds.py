"""Rounds that are played without the target are those that a server would make."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from dsparkd.kv.geometry import PoolSizes
from dsparkd.model.config import load_model_config
from dsparkd.model.dspark import DraftInputs
from dsparkd.model.weights import load_both_draft_shards
from dsparkd.text.encoding import Prompt
from tests.model.values import small_values
from tools import draft_rounds
from tools.draft_rounds import Rounds, Text, play
from tools.oracle import Engine, plan_row
from tools.random_checkpoint import write_checkpoint

CPU = torch.device("cpu")
GAMMA, WINDOW = 5, 128


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("rounds")
    write_checkpoint(directory, small_values(), seed=4)
    return directory


def text(num_ids: int, num_prompt_ids: int, seed: int) -> Text:
    draw = random.Random(seed)
    return Text("copy", tuple(draw.randrange(192) for _ in range(num_ids)), num_prompt_ids)


def test_each_round_drafts_from_the_whole_window_before_its_anchor(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long and short prompts, cut into chunks or not: confidences are those of one round alone over all keys."""
    monkeypatch.setattr(draft_rounds, "CHUNK_TOKENS", 64)
    monkeypatch.setattr(draft_rounds, "BLOCKS_AT_ONCE", 2)
    texts = [text(320, 300, 1), text(30, 4, 2), text(146, 132, 3)]
    rounds = play(checkpoint, texts, CPU)

    engine = Engine(checkpoint, sizes=PoolSizes(4, 2, 1))
    drafter, exchange = load_both_draft_shards(checkpoint, engine.model)
    assert len(rounds.text) >= 19 + 25 + 13
    for index, one in enumerate(texts):
        taps = engine.step([plan_row(list(one.ids), 0, 1, (1, 2), 0)], drafter.dspark.target_layer_ids).taps
        assert taps is not None
        keys = drafter.context_keys(taps, torch.arange(taps.shape[0]))
        anchor = one.num_prompt_ids
        for n in np.flatnonzero(rounds.text == index):
            wanted = torch.arange(anchor - WINDOW, anchor)
            first = torch.tensor([max(0, WINDOW - anchor)])
            inputs = DraftInputs(
                torch.tensor([one.ids[anchor]]), torch.tensor([anchor]), keys, wanted.clamp(min=0)[None], first, False
            )
            exchange.begin_step((16, 0))
            drafts = drafter.draft(inputs, exchange)
            assert rounds.confidence[n].tolist() == drafts.confidence[0].tolist()
            right = [int(a) == b for a, b in zip(drafts.ids[0], one.ids[anchor + 1 :], strict=False)]
            assert rounds.accepted[n] == [*right, False].index(False)
            anchor += int(rounds.emitted[n])
        assert anchor == len(one.ids) - 1


_draw = random.Random(0)
RIGHT = [_draw.randrange(6) for _ in range(40)]  # drafts that are right behind each position


class FakeRings:
    """Drafts that agree with the text for as long as a schedule says."""

    num_drafts = GAMMA

    def __init__(self, checkpoint: Path, texts: Sequence[Text], device: torch.device) -> None:
        self._texts = texts
        self.steps: list[int] = []

    def draft(self, anchors: Sequence[tuple[int, int]]) -> tuple[list[list[int]], list[list[float]]]:
        drafts = []
        for index, position in anchors:
            following = [*self._texts[index].ids[position + 1 :], *[0] * GAMMA][:GAMMA]
            right = RIGHT[position]
            drafts.append([token if i < right else token + 1 for i, token in enumerate(following)])
        return drafts, [[float(position)] * GAMMA for _, position in anchors]


def test_a_round_yields_what_was_right_and_one_token_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds follow each other without gap or overlap; the answer's end cuts the last one, and what it can judge."""
    monkeypatch.setattr(draft_rounds, "_Rings", FakeRings)
    texts = [text(40, 10, 1), text(12, 11, 2), text(13, 11, 3)]
    rounds = play(Path(), texts, CPU)
    expected, position = [], 10
    while position < 39:
        left = 39 - position
        accepted = min(RIGHT[position], left)
        expected.append((min(GAMMA, left), accepted, min(accepted + 1, left)))
        position += expected[-1][2]
    of_first = rounds.of([0])
    assert list(zip(of_first.judged, of_first.accepted, of_first.emitted, strict=True)) == expected
    assert {accepted for _, accepted, _ in expected} >= {0, 4, 5}
    assert expected[-1] == (4, 4, 4)
    assert of_first.mean_length == 29 / len(expected)
    assert len(rounds.of([1]).text) == 0  # an answer of its first token alone: the prefill gave it
    assert rounds.of([2]).emitted.tolist() == [1]
    assert rounds.confidence[0].tolist() == [10.0] * GAMMA


def test_no_rounds_have_no_length() -> None:
    """Texts of one token: a mean over nothing."""
    nothing = np.zeros(0, np.int64)
    assert Rounds(nothing, nothing, nothing, nothing, np.zeros((0, GAMMA))).mean_length == 0


def test_texts_end_where_the_target_ends_them(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """EOS is the last token of an answer, and missing where the answer was cut."""

    class Encoding:
        def render(self, chat: object) -> object:
            return chat

        def tokenize(self, rendered: object) -> Prompt:
            return Prompt([5, 6, 7], starts_in_reasoning=True)

    class Loop:
        def __init__(self, *arguments: object) -> None:
            pass

        def run(self, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
            return [[9] * (max_tokens if index % 2 else 2) for index in range(len(prompts))]

    monkeypatch.setattr(draft_rounds, "DecodeLoop", Loop)
    texts = draft_rounds.write_texts(checkpoint, Encoding(), "test", 1, 4, CPU)  # type: ignore[arg-type]
    eos = load_model_config(checkpoint).eos_token_id
    assert [one.task for one in texts] == list(draft_rounds.TASKS)
    assert texts[0].ids == (5, 6, 7, 9, 9, eos)
    assert texts[1].ids == (5, 6, 7, 9, 9, 9, 9)
    assert {one.num_prompt_ids for one in texts} == {3}
