"""Sequential temperature scaling against rounds whose true chances are known."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from dsparkd.model.config import load_model_config
from tests.model.values import small_values
from tools.draft_rounds import Floats, Rounds
from tools.random_checkpoint import write_checkpoint
from tools.train_nano.calibrate import (
    calibration_error,
    fit_temperatures,
    position_errors,
    survival,
    write_temperatures,
)

GAMMA = 5


def test_the_error_is_the_mean_distance_of_what_is_said_and_what_happens() -> None:
    """Bins of a tenth, weighted by their numbers; a chance of 1 lies in the last one."""
    chance = np.array([0.11, 0.19, 0.55, 0.55, 0.55, 0.55, 1.0, 0.93])
    event = np.array([True, False, True, True, True, False, True, False])
    by_hand = (2 * abs(0.15 - 0.5) + 4 * abs(0.55 - 0.75) + 2 * abs(0.965 - 0.5)) / 8
    assert calibration_error(chance, event) == pytest.approx(by_hand)
    assert calibration_error(np.zeros(0), np.zeros(0, np.bool_)) == 0


def drawn_rounds(temperatures: Floats, count: int, seed: int) -> Rounds:
    """Rounds in which draft j is right with the chance sigmoid(confidence / temperature), if those before it are."""
    draw = np.random.default_rng(seed)
    confidence = draw.normal(1.0, 2.5, (count, GAMMA))
    right = draw.random((count, GAMMA)) < 1 / (1 + np.exp(-confidence / temperatures))
    accepted = np.cumprod(right, 1).sum(1)
    judged = np.where(draw.random(count) < 0.1, draw.integers(1, GAMMA, count), GAMMA)
    accepted = np.minimum(accepted, judged)
    return Rounds(np.zeros(count, np.int64), judged, accepted, np.minimum(accepted + 1, judged), confidence)


def test_the_temperatures_that_made_the_events_are_found() -> None:
    """Position by position, though later positions count few acceptances; held-out rounds are calibrated then."""
    truth = np.array([0.5, 1.0, 2.0, 1.5, 0.7])
    fitted = fit_temperatures(drawn_rounds(truth, 40_000, seed=1))
    assert np.abs(np.log(fitted[:3] / truth[:3])).max() < 0.25
    held_out = drawn_rounds(truth, 20_000, seed=2)
    assert max(position_errors(held_out, fitted)) < 0.02
    assert max(position_errors(held_out, np.ones(GAMMA))) > 0.04


def test_a_draft_behind_the_answers_end_is_not_judged() -> None:
    """There the text has no token, so neither right nor wrong happened."""
    rounds = Rounds(
        text=np.zeros(2, np.int64),
        judged=np.array([2, 5]),
        accepted=np.array([2, 5]),
        emitted=np.array([2, 6]),
        confidence=np.full((2, GAMMA), 50.0),
    )
    assert position_errors(rounds, np.ones(GAMMA)) == pytest.approx([0.0] * GAMMA)


def test_survival_falls_with_every_draft() -> None:
    """A product of chances, as the drafter computes it."""
    chance = survival(np.array([[0.0, 2.0, -1.0, 0.5, 3.0]]), np.array([1.0, 2.0, 0.5, 1.0, 1.0]))
    parts = [0.5, 1 / (1 + np.exp(-1)), 1 / (1 + np.exp(2)), 1 / (1 + np.exp(-0.5)), 1 / (1 + np.exp(-3))]
    assert chance[0].tolist() == pytest.approx(np.cumprod(parts).tolist())


def test_a_fit_goes_into_the_config_that_the_server_reads(tmp_path: Path) -> None:
    """One key more, replaced by the next fit; everything else stays."""
    write_checkpoint(tmp_path, small_values(), seed=1)
    before = json.loads((tmp_path / "config.json").read_bytes())
    write_temperatures(tmp_path, np.array([9.0] * GAMMA))
    write_temperatures(tmp_path, np.array([0.5, 1.0, 1.25, 2.0, 3.33333]))
    after = json.loads((tmp_path / "config.json").read_bytes())
    dspark = load_model_config(tmp_path).dspark
    assert dspark is not None
    assert dspark.confidence_temperatures == (0.5, 1.0, 1.25, 2.0, 3.3333)
    assert {key: value for key, value in after.items() if key != "dspark_confidence_temperatures"} == before
