"""Verify lengths: budgets against exhaustive search, and cuts that never tell what was cut."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsparkd.errors import InvariantError
from dsparkd.executor.costs import CostTable, Origin
from dsparkd.executor.lengths import LEAST_SURVIVAL, admit, blend, plan_budget

GAMMA = 4
ORIGIN = Origin(machine="test", device="cpu", dtype="float32", checkpoint="nano", measured="2026-01-01T00:00Z")


def table_of(verify_s: list[list[float]], draft_s: list[float]) -> CostTable:
    """A table over rows 1, 2, 4, ... and widths 1, 2, 3, ..."""
    rows = tuple(2**i for i in range(len(verify_s)))
    widths = tuple(range(1, 1 + len(verify_s[0])))
    lines = tuple(map(tuple, verify_s))
    return CostTable(version=1, origin=ORIGIN, rows=rows, widths=widths, verify_s=lines, draft_s=tuple(draft_s))


def linear_table(fixed_s: float, per_token_s: float, draft_s: float = 1e-3) -> CostTable:
    """A step that costs so much, and so much more for each token."""
    lines = [[fixed_s + per_token_s * rows * width for width in range(1, GAMMA + 2)] for rows in (1, 2, 4)]
    return table_of(lines, [draft_s] * 3)


blocks = st.lists(st.floats(0, 1), min_size=GAMMA, max_size=GAMMA).map(
    lambda chances: list(itertools.accumulate(chances, lambda a, b: a * b))
)
batches = st.lists(blocks, min_size=1, max_size=3)


def rate(table: CostTable, survivals: list[list[float]], lengths: tuple[int, ...]) -> float:
    """Expected tokens a second when each row verifies that many drafts; nothing is drafted where none is verified."""
    rows = len(lengths)
    if not any(lengths):
        return rows / table.seconds(rows, rows)
    tokens = rows + sum(sum(block[:length]) for block, length in zip(survivals, lengths, strict=True))
    return tokens / (table.seconds(rows, rows + sum(lengths)) + table.draft_seconds(rows))


@given(batches, st.floats(1e-3, 1), st.floats(1e-4, 1))
def test_budget_and_admission_are_the_best_of_all_lengths(
    survivals: list[list[float]], fixed_s: float, per_token_s: float
) -> None:
    """For any cost of a step, no other choice of lengths yields more tokens a second."""
    table = linear_table(fixed_s, per_token_s)

    lengths = admit(survivals, plan_budget(table, survivals, GAMMA), GAMMA)

    best = max(rate(table, survivals, other) for other in itertools.product(range(GAMMA + 1), repeat=len(survivals)))
    # What is left out as next to impossible could add that much at most.
    assert rate(table, survivals, lengths) >= best * (1 - GAMMA * LEAST_SURVIVAL) - 1e-12


@given(batches, st.integers(-1, 20), st.integers(0, GAMMA))
def test_lengths_stay_within_block_and_budget(survivals: list[list[float]], budget: int, max_verify: int) -> None:
    """D-30: every row verifies its anchor, none more than is allowed, and the sum is at most what was agreed."""
    lengths = admit(survivals, budget, max_verify)

    assert len(lengths) == len(survivals)
    assert all(0 <= length <= max_verify for length in lengths)
    assert sum(lengths) <= max(budget, 0)
    likely = sum(chance >= LEAST_SURVIVAL for block in survivals for chance in block[:max_verify])
    assert sum(lengths) == min(max(budget, 0), likely)


@given(batches, st.integers(0, 12), st.data())
def test_whether_a_draft_is_verified_does_not_depend_on_what_it_is(
    survivals: list[list[float]], budget: int, data: st.DataObject
) -> None:
    """The condition of lossless rejection: a draft moves only the chances behind its own, and these move no cut at or
    before it."""
    row = data.draw(st.integers(0, len(survivals) - 1))
    place = data.draw(st.integers(0, GAMMA - 1))
    other = list(survivals)
    tail = data.draw(blocks)
    other[row] = survivals[row][: place + 1] + [survivals[row][place] * chance for chance in tail[place + 1 :]]

    before, after = admit(survivals, budget, GAMMA)[row], admit(other, budget, GAMMA)[row]

    assert (before > place) == (after > place)


def first_token_chance(lengths: dict[str, int]) -> float:
    """Chance that the first token is `a`, where p = 0.7, 0.3 and q = 0.5, 0.5, for the length that each draft gets."""
    p, q = {"a": 0.7, "b": 0.3}, {"a": 0.5, "b": 0.5}
    chance = 0.0
    for draft in "ab":
        if lengths[draft] == 0:
            chance += q[draft] * p["a"]  # unseen: drawn anew
        else:
            kept = min(1.0, p[draft] / q[draft])
            chance += q[draft] * ((draft == "a") * kept + (1 - kept))  # the residual is all `a`
    return chance


def test_a_budget_of_the_past_keeps_the_distribution_and_one_of_the_present_does_not() -> None:
    """The published example: lengths that are best by present chances turn 0.7 into 0.85."""
    # Two tokens cost as much as three, so the first draft pays only together with a likely second one.
    table = table_of([[1.0, 2.0, 2.0], [2.0, 4.0, 4.0]], [1e-9, 1e-9])
    present = {"a": [0.8, 0.72], "b": [0.8, 0.0]}

    best = {draft: admit([chances], plan_budget(table, [chances], 2), 2)[0] for draft, chances in present.items()}
    assert first_token_chance(best) == pytest.approx(0.85)

    for past in ([0.9, 0.9], [0.5, 0.1], None):
        budget = plan_budget(table, [past], 2)
        ours = {draft: admit([chances], budget, 2)[0] for draft, chances in present.items()}
        assert first_token_chance(ours) == pytest.approx(0.7)


def test_rows_that_have_not_drafted_yet_count_as_certain() -> None:
    """D-31: a missing or stale chance means all of the window; where a step costs the same, all is verified."""
    assert plan_budget(linear_table(1.0, 1e-6), [None, None], GAMMA) == 2 * GAMMA
    assert plan_budget(linear_table(1.0, 1e-6), [None, [0.0] * GAMMA], GAMMA) == GAMMA


@pytest.mark.parametrize("wrong", [1.1, -0.1, float("nan"), float("inf")])
@pytest.mark.parametrize("place", [0, 3])
def test_a_chance_that_is_none_stops_the_pair(wrong: float, place: int) -> None:
    """D-31: outside of 0..1 or not finite it is a bug, and both ranks must not go on with different ideas."""
    block = [0.5] * GAMMA
    block[place] = wrong

    with pytest.raises(InvariantError, match="survival"):
        admit([block], 1, GAMMA)
    with pytest.raises(InvariantError, match="survival"):
        plan_budget(linear_table(1, 1), [block], GAMMA)


def test_chances_that_grow_or_are_too_few_are_refused() -> None:
    """They would admit a draft before the one in front of it, or none at all."""
    with pytest.raises(InvariantError):
        admit([[0.2, 0.3, 0.1, 0.0]], 2, GAMMA)
    with pytest.raises(InvariantError):
        admit([[0.5, 0.5]], 2, GAMMA)


def test_equal_chances_go_to_the_nearer_draft_then_to_the_earlier_row() -> None:
    """Ranks and replays must agree on ties."""
    assert admit([[0.5] * 4, [0.5] * 4], 1, GAMMA) == (1, 0)
    assert admit([[0.5] * 4, [0.5] * 4], 2, GAMMA) == (1, 1)
    assert admit([[0.5] * 4, [0.5] * 4], 3, GAMMA) == (2, 1)
    assert admit([[0.5] * 4, [0.5, 0.1, 0.1, 0.1]], 2, GAMMA) == (1, 1)


def test_a_step_whose_tokens_cost_as_much_as_they_bring_is_better_without_drafts() -> None:
    """At many rows a machine is busy with arithmetic: then the drafter only costs."""
    dear = linear_table(1e-3, 1.0, draft_s=0.5)
    cheap = linear_table(1.0, 1e-3, draft_s=0.1)
    chances = [[0.6, 0.3, 0.1, 0.05]]

    assert plan_budget(dear, chances, GAMMA) == 0
    assert plan_budget(cheap, chances, GAMMA) == GAMMA


@given(st.lists(blocks, min_size=1, max_size=8))
def test_blended_chances_are_chances_that_never_grow(history: list[list[float]]) -> None:
    """They feed the budget, which refuses anything else."""
    known = None
    for block in history:
        known = blend(known, block)

    assert known is not None
    plan_budget(linear_table(1, 1), [known], GAMMA)


def test_one_unlikely_block_does_not_end_drafting_where_it_paid() -> None:
    """Without drafts there is no news, so a stream would go on plain for a long while."""
    table = linear_table(10e-3, 1e-3, draft_s=6e-3)
    known = None
    for _ in range(12):
        known = blend(known, [0.9, 0.8, 0.7, 0.6])
    unlikely = [0.2, 0.1, 0.05, 0.01]

    assert not plan_budget(table, [unlikely], GAMMA)
    assert plan_budget(table, [blend(known, unlikely)], GAMMA)
    for _ in range(12):
        known = blend(known, unlikely)
    assert not plan_budget(table, [known], GAMMA)


def test_a_step_without_rows_verifies_nothing() -> None:
    """D-32: an idle rank takes part with nothing of its own."""
    assert plan_budget(linear_table(1, 1), [], GAMMA) == 0
    assert admit([], 5, GAMMA) == ()
