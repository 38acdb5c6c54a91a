"""The drafter gate's sums and verdict."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests.model.values import small_values
from tools.draft_rounds import Rounds, Text
from tools.gates import drafter
from tools.random_checkpoint import write_checkpoint
from tools.train_nano.tasks import TASKS

GAMMA = 5


def rounds_of(accepted: list[int], confidence: float, num_texts: int = len(TASKS)) -> Rounds:
    """As many rounds of each text as there are numbers, all judged to the end."""
    count = len(accepted) * num_texts
    right = np.array(accepted * num_texts, np.int64)
    text = np.repeat(np.arange(num_texts), len(accepted))
    return Rounds(text, np.full(count, GAMMA), right, right + 1, np.full((count, GAMMA), confidence))


def test_each_task_has_its_row_and_all_have_one() -> None:
    """Mean length, and the share of rounds that got so far."""
    texts = [Text(task, (1, 2), 1) for task in TASKS]
    rounds = rounds_of([0, 5, 3, 4], 0.0)
    rounds = Rounds(
        rounds.text, rounds.judged, np.where(rounds.text == 1, 0, rounds.accepted), rounds.emitted, rounds.confidence
    )
    rows = drafter.rows_of(texts, rounds)
    assert [row.task for row in rows] == [*TASKS, "all"]
    assert rows[0].reached == (0.75, 0.75, 0.75, 0.5, 0.25)
    assert rows[1].reached == (0.0,) * GAMMA
    assert (rows[0].rounds, rows[0].tokens, rows[0].mean_length) == (4, 16, 4.0)
    assert (rows[-1].texts, rows[-1].rounds) == (len(TASKS), 4 * len(TASKS))


@pytest.mark.parametrize(
    ("accepted", "confidence", "code"),
    [([5, 5, 5, 5], 50.0, 0), ([5, 5, 5, 5], 0.0, 1), ([0, 0, 0, 0], -50.0, 1), ([2, 2, 2, 4], 50.0, 1)],
    ids=["long and known", "long and not known", "short and known", "just too long for none"],
)
def test_both_length_and_calibration_decide(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    accepted: list[int],
    confidence: float,
    code: int,
) -> None:
    """A drafter that is good and does not know it misleads the planner as one that is bad."""
    write_checkpoint(tmp_path, small_values(), seed=1)
    texts = [Text(task, (1, 2), 1) for task in TASKS]
    monkeypatch.setattr(drafter.exam, "load_encoding", lambda checkpoint: None)
    monkeypatch.setattr(drafter, "write_texts", lambda *arguments: texts)
    monkeypatch.setattr(drafter, "play", lambda *arguments: rounds_of(accepted, confidence))

    assert drafter.main(["--checkpoint", str(tmp_path), "--json"]) == code

    report = json.loads(capsys.readouterr().out)
    assert report["ok"] == (code == 0)
    assert len(report["calibration_errors"]) == GAMMA
    assert report["tasks"][-1]["mean_length"] == pytest.approx(1 + sum(accepted) / 4)
    assert drafter.main(["--checkpoint", str(tmp_path)]) == code
    assert ("FAIL" in capsys.readouterr().out) == (code == 1)
