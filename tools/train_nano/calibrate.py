"""Fits the confidence head's temperatures on the validation split and writes them into a checkpoint's config.json.

    python -m tools.train_nano.calibrate --checkpoint DIR [--count N] [--device cpu|cuda]

Sequential temperature scaling (model.md 5.6): position by position, the temperature that makes survival, the product
of the chances so far, fit best how often so many drafts were right, with those before it kept.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from tools import exam
from tools.draft_rounds import MAX_TOKENS, Floats, Rounds, play, write_texts

NUM_BINS = 10
GRID = np.geomspace(0.1, 10.0, 401)  # holds 1 exactly
KEY = "dspark_confidence_temperatures"


def survival(confidence: Floats, temperatures: Floats) -> Floats:
    """Confidence logits [N, G] by temperatures [G] -> chance that a draft and all before it are right, [N, G]."""
    return np.cumprod(1 / (1 + np.exp(-confidence / temperatures)), 1, np.float64)


def calibration_error(chance: Floats, event: NDArray[np.bool_]) -> float:
    """Expected calibration error over equal bins of chance [N]: how far said and happened lie apart, on average."""
    if not len(chance):
        return 0.0
    bins = np.minimum((chance * NUM_BINS).astype(np.int64), NUM_BINS - 1)
    said = np.bincount(bins, chance, NUM_BINS)
    happened = np.bincount(bins, event, NUM_BINS)
    return float(np.abs(said - happened).sum() / len(chance))


def position_errors(rounds: Rounds, temperatures: Floats) -> list[float]:
    """Calibration error of survival at each draft position, over the rounds that could judge it."""
    chance = survival(rounds.confidence, temperatures)
    return [
        calibration_error(chance[rounds.judged > j, j], rounds.accepted[rounds.judged > j] > j)
        for j in range(chance.shape[1])
    ]


def fit_temperatures(rounds: Rounds) -> Floats:
    """Return the temperature of each position, [G]; of equally good ones that nearest to 1."""
    temperatures = np.ones(rounds.confidence.shape[1])
    order = sorted(GRID, key=lambda t: abs(np.log(t)))
    for j in range(len(temperatures)):
        judged = rounds.judged > j
        confidence, event = rounds.confidence[judged], rounds.accepted[judged] > j
        before = survival(confidence, temperatures)[:, j - 1] if j else np.ones(len(confidence))

        def error(t: float, j: int = j, confidence: Floats = confidence, before: Floats = before) -> float:
            return calibration_error(before / (1 + np.exp(-confidence[:, j] / t)), event)  # noqa: B023

        temperatures[j] = min(order, key=error)
    return temperatures


def write_temperatures(checkpoint: Path, temperatures: Floats) -> None:
    """Put the key into config.json, whatever it held before."""
    path = checkpoint / "config.json"
    values = json.loads(path.read_bytes())
    values[KEY] = [round(float(t), 4) for t in temperatures]
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m tools.train_nano.calibrate", description="fit temperatures")
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--count", type=int, default=64, help="examples of each task")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    began = time.perf_counter()
    device = torch.device(arguments.device)
    encoding = exam.load_encoding(arguments.checkpoint)
    texts = write_texts(arguments.checkpoint, encoding, "validation", arguments.count, MAX_TOKENS, device)
    rounds = play(arguments.checkpoint, texts, device)
    temperatures = fit_temperatures(rounds)
    write_temperatures(arguments.checkpoint, temperatures)
    for name, used in (("without", np.ones_like(temperatures)), ("with", temperatures)):
        errors = " ".join(f"{error:.3f}" for error in position_errors(rounds, used))
        print(f"calibration error by position, {name:7} temperatures: {errors}")
    print(f"temperatures: {' '.join(f'{t:.3f}' for t in temperatures)}")
    print(f"{len(rounds.text)} rounds, mean length {rounds.mean_length:.2f}, {time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()
