"""Cost tables: what is read, what is refused at start, and what lies between measured points."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dsparkd.errors import ConfigError
from dsparkd.executor.costs import CostTable, load_cost_table

GOOD: dict[str, object] = {
    "version": 1,
    "origin": {"machine": "m", "device": "cpu", "dtype": "float32", "checkpoint": "nano", "measured": "now"},
    "rows": [1, 2, 8],
    "widths": [1, 2, 6],
    "verify_s": [[1.0, 2.0, 6.0], [2.0, 4.0, 12.0], [8.0, 16.0, 48.0]],
    "draft_s": [0.5, 0.5, 2.0],
}


def load(directory: Path, **changes: object) -> CostTable:
    """Write the good table with changes and read it for an engine that it fits."""
    path = directory / "costs.json"
    path.write_text(json.dumps(GOOD | changes), encoding="utf-8")
    return load_cost_table(path, gamma=5, max_rows=8, device="cpu", dtype="float32")


def test_between_measured_points_time_is_linear_and_outside_it_stays(tmp_path: Path) -> None:
    """A tick asks for any number of rows and tokens; nothing beyond the last point is free below it."""
    table = load(tmp_path)

    assert table.seconds(1, 1) == 1.0
    assert table.seconds(8, 48) == 48.0
    assert table.seconds(5, 5) == pytest.approx(5.0)
    assert table.seconds(5, 15) == pytest.approx(15.0)  # three tokens a row, between widths 2 and 6
    assert table.seconds(16, 16) == 8.0
    assert table.draft_seconds(1) == 0.5
    assert table.draft_seconds(5) == pytest.approx(1.25)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"version": 2}, "version 2"),
        ({"rows": [2, 4, 8]}, "rows"),
        ({"rows": [1, 8, 8]}, "rows"),
        ({"widths": [1]}, "widths"),
        ({"verify_s": [[1.0, 2.0, 6.0]]}, "no figure"),
        ({"draft_s": [0.5]}, "no figure"),
        ({"draft_s": [0.5, 0.4, 2.0]}, "shrink"),
        ({"verify_s": [[1.0, 2.0, 6.0], [2.0, 4.0, 5.0], [8.0, 16.0, 48.0]]}, "shrink"),
        ({"verify_s": [[0.0, 2.0, 6.0], [2.0, 4.0, 12.0], [8.0, 16.0, 48.0]]}, "positive"),
        ({"widths": [1, 2, 5]}, "gamma \\+ 1 is 6"),
        ({"rows": [1, 2, 7]}, "scheduler.max_rows is 8"),
        ({"origin": dict(GOOD["origin"], device="cuda")}, "measured on cuda, float32"),  # type: ignore[call-overload]
        ({"origin": dict(GOOD["origin"], dtype="bfloat16")}, "cpu, bfloat16"),  # type: ignore[call-overload]
        ({"surplus": 1}, "surplus"),
        ({"rows": [1, 2, "8"]}, "no cost table"),
    ],
)
def test_a_table_that_does_not_fit_is_a_start_failure_that_says_why(
    changes: dict[str, object], reason: str, tmp_path: Path
) -> None:
    """A planner over wrong times would cut drafts at random and nobody would see it."""
    with pytest.raises(ConfigError, match=reason) as caught:
        load(tmp_path, **changes)

    assert "dspark.cost_table" in str(caught.value)
    assert "tools.bench steps" in str(caught.value)


def test_an_unreadable_table_is_a_start_failure(tmp_path: Path) -> None:
    """A missing file must not mean that everything is verified."""
    for path in (tmp_path / "none.json", tmp_path):
        with pytest.raises(ConfigError, match="cannot be read"):
            load_cost_table(path, gamma=5, max_rows=8, device="cpu", dtype="float32")
