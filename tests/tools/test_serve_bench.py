"""The figures of the serve bench."""

from __future__ import annotations

import pytest

from tools.bench.serve import PROFILES, make_prompts, percentile


@pytest.mark.parametrize(
    ("values", "percent", "expected"),
    [
        ([3.0], 50, 3.0),
        ([4.0, 1.0, 3.0, 2.0], 50, 2.0),
        ([1.0, 2.0, 3.0], 99, 3.0),
        (list(map(float, range(1, 101))), 99, 99.0),
    ],
)
def test_a_percentile_is_a_value_that_was_measured(values: list[float], percent: int, expected: float) -> None:
    """The smallest value that this share does not exceed: no interpolation between a tail's two values."""
    assert percentile(values, percent) == expected


def test_batches_are_of_equal_length_and_new_for_each_seed() -> None:
    """transformers cannot mask padding here, and a prompt in the server's cache would be cheaper than theirs."""
    profile = PROFILES["short"]
    first, second = (make_prompts(profile, 6000, seed) for seed in (1, 2))

    assert [{len(prompt) for prompt in batch} for batch in first] == [{length} for length in profile.lengths]
    assert all(len(batch) == profile.concurrency for batch in first)
    assert not {tuple(p) for batch in first for p in batch} & {tuple(p) for batch in second for p in batch}
