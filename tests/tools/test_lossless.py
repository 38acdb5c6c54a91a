"""How the gate lossless counts, what it takes as proof, and which prompts it asks."""

from __future__ import annotations

import dataclasses

import pytest

from tools import exam
from tools.acceptance_draws import Result
from tools.gates import lossless
from tools.gates.invariance import PAGE_TOKENS
from tools.gates.lossless import Axis, fits, growing, prompts_of
from tools.harness import ensure_checkpoint
from tools.workload import Answer, Item

AXIS = Axis("max_verify 2", 10, 0, 0, 0, 100, 50, "proof", True, 1.0)


@pytest.mark.parametrize(
    ("changes", "ok"),
    [
        ({}, True),
        ({"differing_ids": 1}, False),
        ({"differing_logprobs": 1}, False),
        ({"proven": False}, False),
        ({"compared_ids": 0}, False),
    ],
)
def test_an_axis_passes_only_when_it_was_taken_and_every_digit_is_equal(changes: dict[str, object], ok: bool) -> None:
    """An axis that compared nothing, or did not move, shows nothing."""
    assert dataclasses.replace(AXIS, **changes).ok == ok  # type: ignore[arg-type]


@pytest.mark.parametrize(("p_value", "impossible", "ok"), [(0.5, 0, True), (1e-4, 0, False), (0.5, 1, False)])
def test_draws_fit_only_without_a_single_impossible_one(p_value: float, impossible: int, ok: bool) -> None:
    """What has no probability may not be drawn once, however well the rest fits."""
    assert fits(Result("case", "coupled", 100, 1.0, 3, p_value, impossible, 1.5)) == ok


def test_prompts_are_two_in_five_copies_and_sampled_in_turn() -> None:
    """Copies are where drafts are accepted most; greedy and both temperatures take a third of each task."""
    items = prompts_of(10, exam.load_encoding(ensure_checkpoint()))

    assert len(items) == 10
    assert len({tuple(item.prompt) for item in items}) == 10
    assert [item.rules["temperature"] for item in items[:4]] == [0.0, 0.7, 1.0, 0.0]
    assert all(item.rules.get("top_p") == (0.95 if item.rules["temperature"] else None) for item in items)
    assert len({item.rules["seed"] for item in items}) == 10


def test_growing_prompts_end_just_before_a_page_does() -> None:
    """Each needs one page more while it answers; only so is the pool too small for all."""
    copies = [Item([5] * length, {}, 64) for length in (90, 300)]

    for item in growing(copies, seed=1):
        left = -len(item.prompt) % PAGE_TOKENS
        assert 1 <= left <= lossless.MAX_TOKENS // 2
        assert item.rules["ignore_eos"]


def test_a_prefix_hit_is_proven_by_every_long_prompt() -> None:
    """One that was computed cold would be compared with itself."""
    items = [Item([3] * length, {}, 4) for length in (100, 300, 600)]
    answers = [Answer(("a",), (-1.0,), "a", "length", (), cached) for cached in (0, 256, 512)]

    assert lossless._hits(items)(answers)[1]
    assert not lossless._hits(items)([answers[0], answers[0], answers[2]])[1]
    assert not lossless._hits(items[:1])(answers[:1])[1]
    assert lossless._no_hits([answers[0]] * 2)[1]
    assert not lossless._no_hits(answers)[1]
