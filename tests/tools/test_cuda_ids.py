"""When a difference between two devices counts as rounding, and when it does not."""

from __future__ import annotations

import pytest

from tools.gates.cuda_ids import Ahead, Replay, compare, compare_overlap, report_graphs, report_overlap
from tools.harness import ensure_checkpoint
from tools.workload import Answer, mixed_items


def answer(tokens: str, logprobs: list[float], margins: list[float] | None = None) -> Answer:
    """An answer of one-letter tokens."""
    return Answer(tuple(tokens), tuple(logprobs), tokens, "length", tuple(margins or [1.0] * len(tokens)), 0)


@pytest.mark.parametrize(("lead", "unexplained"), [(0.19, 0), (0.21, 1)])
def test_a_difference_is_explained_only_by_a_lead_within_twice_the_rounding(lead: float, unexplained: int) -> None:
    """Both candidates move by at most the rounding, in opposite directions; a larger lead cannot be overturned."""
    base = [answer("abc", [-1.0, -1.0, -1.0], [5.0, 5.0, lead])]
    other = [answer("abd", [-1.0, -1.1, -9.0])]

    got = compare("cuda", "bfloat16", base, other, 2, 1.0)

    assert (got.differing, got.agreeing_ids, got.compared_ids) == (1, 2, 3)
    assert got.rounding == pytest.approx(0.1)
    assert got.unexplained == unexplained
    assert got.ok == (unexplained == 0)


def test_what_follows_a_difference_is_not_compared() -> None:
    """Behind it the two continue different texts, so neither ids nor log-probabilities mean anything."""
    base = [answer("abcd", [-1.0] * 4, [0.0] * 4)]
    other = [answer("axcd", [-1.0, -2.0, -50.0, -50.0])]

    got = compare("cuda", "float32", base, other, 2, 1.0)

    assert (got.differing, got.agreeing_ids, got.rounding) == (1, 1, 0.0)


def test_an_idle_rank_fails_the_gate_however_equal_the_ids() -> None:
    """One GPU that did all the work proves nothing about two."""
    same = [answer("ab", [-1.0, -1.0])]

    assert compare("cuda", "float32", same, same, 2, 1.0).ok
    assert not compare("cuda", "float32", same, same, 1, 1.0).ok


@pytest.mark.parametrize(("moved", "is_ok"), [(0.14, True), (0.16, False)])
def test_a_control_in_the_same_dtype_explains_leads_and_bounds_the_mean(moved: float, is_ok: bool) -> None:
    """What the reference arithmetic overturns by rounding may be overturned; to round half as much again may not."""
    base = [answer("abc", [-1.0, -1.0, -1.0], [5.0, 5.0, 0.3])]
    control = compare("cpu", "bfloat16", base, [answer("abd", [-1.0, -1.2, -9.0])], 2, 1.0)

    got = compare("cuda", "bfloat16", base, [answer("abd", [-1.0 - moved, -1.0 - moved, -9.0])], 2, 1.0, control)

    assert control.unexplained == 0
    assert got.unexplained == 0
    assert got.ok == is_ok


def replay(**other: int) -> Replay:
    counts = {"differing": 0, "seen": 0, "replayed": 9, "eager": 0, "eager_replayed": 0, "not_plain": 0} | other
    return Replay(drafts=False, requests=4, compared_ids=40, seconds=1.0, **counts)


@pytest.mark.parametrize(
    "fault", [{"differing": 1}, {"seen": 1}, {"replayed": 0}, {"eager": 1}, {"eager_replayed": 1}, {"not_plain": 1}, {}]
)
def test_replayed_steps_are_held_to_every_id_and_log_probability(
    fault: dict[str, int], capsys: pytest.CaptureFixture[str]
) -> None:
    """P-22: and graphs must have run, alone where they were on, not at all where they were off."""
    assert replay(**fault).ok == (not fault)
    assert report_graphs([replay(), replay(**fault)], 2.0, as_json=True) == (1 if fault else 0)
    assert ("FAIL" in capsys.readouterr().out) is False
    report_graphs([replay(**fault)], 2.0, as_json=False)
    assert ("FAIL" in capsys.readouterr().out) == bool(fault)


def ahead(**other: int) -> Ahead:
    counts = {"differing": 0, "seen": 0, "ahead": 9, "ahead_off": 0, "dropped": 1} | other
    return Ahead(requests=4, compared_ids=40, seconds=1.0, **counts)


@pytest.mark.parametrize("fault", [{"differing": 1}, {"seen": 1}, {"ahead": 0}, {"ahead_off": 1}, {}])
def test_steps_launched_ahead_are_held_to_every_answer(
    fault: dict[str, int], capsys: pytest.CaptureFixture[str]
) -> None:
    """And steps must have been launched ahead, where that is on alone."""
    assert ahead(**fault).ok == (not fault)
    assert report_overlap(ahead(**fault), as_json=True) == (1 if fault else 0)
    assert report_overlap(ahead(**fault), as_json=False) == (1 if fault else 0)
    assert ("FAIL" in capsys.readouterr().out) == bool(fault)


def test_both_ways_are_served() -> None:
    """The gate itself, on the cpu: the servers differ in nothing but the overlap."""
    items = mixed_items(6, 500, 4, seed=3)

    got = compare_overlap(ensure_checkpoint(), items, {"device": "cpu", "dtype": "float32"})

    assert got.ok
    assert got.compared_ids == 24
