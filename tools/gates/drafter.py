"""Gate `drafter`: mean accepted length of the shipped drafter over the task mix, and how well it knows its chances.

    python -m tools.gates drafter [--checkpoint DIR] [--count N] [--full] [--device cpu|cuda] [--json]

The target answers the first N examples of each task's test split greedily (recall prompts of up to 2,048 tokens: the
drafter sees a window of 128), and every round of speculation over these answers is played, all drafts verified. The
mean accepted length counts accepted drafts and the target's own token, cut at the answer's end. Calibration is the
expected error of survival, by draft position, with the checkpoint's temperatures, which the validation split gave.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

from dsparkd.model.config import load_model_config
from dsparkd.model.dspark import require_dspark
from tools import exam
from tools.draft_rounds import MAX_TOKENS, Rounds, Text, play, write_texts
from tools.harness import ensure_checkpoint
from tools.train_nano.calibrate import position_errors
from tools.train_nano.tasks import TASKS

MIN_LENGTH = 3.5
MAX_ERROR = 0.05
SUBSET, FULL = 32, 256  # examples of each task


@dataclass(frozen=True, slots=True)
class Row:
    """One task's figures, or all tasks'. reached: share of rounds in which each draft position was accepted."""

    task: str
    texts: int
    rounds: int
    tokens: int
    mean_length: float
    reached: tuple[float, ...]

    def line(self) -> str:
        """One line under HEADER."""
        shares = " ".join(f"{share:6.1%}" for share in self.reached)
        return f"{self.task:11} {self.texts:5} {self.rounds:6} {self.tokens:7} {self.mean_length:7.2f}  {shares}"


HEADER = "task        texts rounds  tokens  length  accepted at position 1, 2, ..."


def row(task: str, texts: Sequence[int], rounds: Rounds) -> Row:
    """Sum up the rounds of some texts."""
    chosen = rounds.of(texts)
    num_drafts = rounds.confidence.shape[1]
    return Row(
        task=task,
        texts=len(texts),
        rounds=len(chosen.text),
        tokens=int(chosen.emitted.sum()),
        mean_length=chosen.mean_length,
        reached=tuple(float((chosen.accepted > j).sum() / max(1, len(chosen.text))) for j in range(num_drafts)),
    )


def rows_of(texts: Sequence[Text], rounds: Rounds) -> list[Row]:
    """One row a task, then one of all."""
    by_task = [(task, [index for index, text in enumerate(texts) if text.task == task]) for task in TASKS]
    return [row(task, chosen, rounds) for task, chosen in by_task] + [row("all", range(len(texts)), rounds)]


def main(argv: list[str]) -> int:
    """Play the rounds; 0 when the mean length over all tasks and every position's calibration are good enough."""
    parser = argparse.ArgumentParser(prog="python -m tools.gates drafter", description=str(__doc__).splitlines()[0])
    parser.add_argument("--checkpoint", type=Path, help="directory; the shipped checkpoint by default")
    parser.add_argument("--count", type=int, help=f"examples of each task, {SUBSET} by default")
    parser.add_argument("--full", action="store_true", help=f"{FULL} examples of each task")
    parser.add_argument("--max-tokens", type=int, default=MAX_TOKENS, help="of an answer, behind which it is cut")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    began = time.perf_counter()
    checkpoint = (arguments.checkpoint or ensure_checkpoint()).resolve()
    temperatures = np.array(require_dspark(load_model_config(checkpoint)).confidence_temperatures)
    count = arguments.count or (FULL if arguments.full else SUBSET)
    device = torch.device(arguments.device)
    texts = write_texts(checkpoint, exam.load_encoding(checkpoint), "test", count, arguments.max_tokens, device)
    rounds = play(checkpoint, texts, device)
    rows = rows_of(texts, rounds)
    errors = position_errors(rounds, temperatures)
    ok = rows[-1].mean_length >= MIN_LENGTH and max(errors) <= MAX_ERROR
    elapsed = round(time.perf_counter() - began, 1)
    if arguments.json:
        facts = {"ok": ok, "elapsed_s": elapsed, "checkpoint": checkpoint.name, "min_length": MIN_LENGTH}
        facts |= {"max_error": MAX_ERROR, "temperatures": temperatures.tolist(), "calibration_errors": errors}
        print(json.dumps(facts | {"tasks": [asdict(one) for one in rows]}))
        return 0 if ok else 1
    print(HEADER)
    for one in rows:
        print(one.line())
    print(f"calibration error by position: {' '.join(f'{error:.3f}' for error in errors)} (at most {MAX_ERROR})")
    verdict = f"mean length {rows[-1].mean_length:.2f} of {MIN_LENGTH}"
    print(f"{'ok' if ok else 'FAIL'}: {checkpoint.name}, {verdict}, {elapsed:.0f} s")
    return 0 if ok else 1
