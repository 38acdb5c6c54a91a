"""Times tile shapes of the weight-bound kernels at the released geometry: where the choices in kernels/cuda come from.

    python -m tools.bench tiles [--only PREFIX] [--seconds 130] [--out FILE] [--json]

Candidates are compiled in several processes first, which takes most of the time; what is not reached in --seconds is
left out, and said to be.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, TimeoutError
from dataclasses import astuple, dataclass
from multiprocessing import get_context
from pathlib import Path

import torch

from dsparkd.kernels.cuda.experts import TritonExperts
from dsparkd.kernels.cuda.linear import TritonLinear
from dsparkd.kernels.cuda.tile import Tiles
from dsparkd.kernels.weight import Format
from tools.bench.kernels import median_us
from tools.kernel_cases.experts import DECODE_ROWS, FLASH, PREFILL_ROWS, Geometry, random_rows, random_shard
from tools.kernel_cases.weights import random_weight

COMPILERS = 12
FEW = tuple(
    Tiles(16, outputs, inputs, warps, stages)
    for outputs, inputs, warps, stages in (
        (64, 128, 4, 2),
        (64, 128, 4, 3),
        (64, 128, 4, 4),
        (64, 256, 4, 2),
        (128, 128, 4, 3),
        (128, 128, 8, 3),
        (128, 256, 8, 3),
        (64, 64, 4, 4),
    )
)
MIDDLE = tuple(
    Tiles(rows, outputs, inputs, warps, stages)
    for rows, outputs, inputs, warps, stages in (
        (32, 64, 128, 4, 3),
        (32, 128, 128, 8, 3),
        (64, 64, 128, 4, 3),
        (64, 128, 128, 8, 3),
        (64, 128, 64, 4, 3),
        (128, 64, 64, 4, 3),
    )
)
MANY = tuple(
    Tiles(rows, outputs, inputs, warps, stages)
    for rows, outputs, inputs, warps, stages in (
        (64, 128, 128, 8, 3),
        (128, 128, 64, 8, 3),
        (128, 128, 64, 8, 4),
        (128, 128, 128, 8, 3),
        (256, 128, 64, 8, 3),
        (128, 256, 64, 8, 3),
        (128, 64, 128, 4, 3),
    )
)


@dataclass(frozen=True, slots=True)
class Trial:
    """A kernel (experts, linear), a format, rows, and tiles to try."""

    kernel: str
    form: Format
    rows: int
    tiles: Tiles


def trials(only: str) -> Iterator[Trial]:
    """List what is tried, the most wanted first."""
    for kernel, form, rows, candidates in (
        ("experts", Format.FP4, DECODE_ROWS, FEW + MIDDLE[:2]),
        ("experts", Format.FP4, PREFILL_ROWS, MANY),
        ("linear", Format.FP8, 384, MIDDLE + MANY[1:2]),
        ("linear", Format.FP8, PREFILL_ROWS, MANY),
        ("linear", Format.FP8, 16, FEW),
        ("linear", Format.DENSE, 384, MIDDLE + MANY[1:2]),
    ):
        if kernel.startswith(only):
            yield from (Trial(kernel, form, rows, tiles) for tiles in candidates)


def compile_trial(trial: Trial) -> str | None:
    """Run a trial over few rows and experts, which fills the compiler's cache; None, or what went wrong."""
    try:
        few = Geometry(FLASH.width, FLASH.expert_width, 1, 2)
        run_of(trial, few, min(trial.rows, 64))()
        torch.cuda.synchronize()
    except Exception as error:  # noqa: BLE001 - a candidate that cannot be compiled is a result
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return None


@torch.inference_mode()
def run_of(trial: Trial, geometry: Geometry, rows: int) -> Callable[[], object]:
    """Draw a trial's inputs."""
    device = torch.device("cuda")
    if trial.kernel == "experts":
        experts = TritonExperts(random_shard(geometry, trial.form, device), lambda *_: trial.tiles)
        inputs = random_rows(geometry, rows, device)
        return lambda: experts(*inputs)
    linear = TritonLinear(random_weight(trial.form, 4096, 4096, 1, device), choose=lambda *_: trial.tiles)
    x = torch.randn((rows, 4096), device=device).bfloat16()
    return lambda: linear(x)


def main(argv: list[str]) -> int:
    """Time all candidates and print a table; 2 without a GPU."""
    parser = argparse.ArgumentParser(prog="python -m tools.bench tiles", description=str(__doc__).splitlines()[0])
    parser.add_argument("--only", default="", help="kernels whose names begin so")
    parser.add_argument("--seconds", type=float, default=130)
    parser.add_argument("--out", type=Path, help="write the result there, too")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    arguments = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("kernels are timed on a CUDA device, and this machine has none")
        return 2
    deadline = time.monotonic() + arguments.seconds
    wanted = list(trials(arguments.only))
    rows: list[tuple[str, str, int, tuple[int, ...], float | str]] = []
    with ProcessPoolExecutor(COMPILERS, mp_context=get_context("spawn")) as pool:
        compiled = [pool.submit(compile_trial, trial) for trial in wanted]
        for trial, future in zip(wanted, compiled, strict=True):
            try:
                failure = future.result(max(0.0, deadline - time.monotonic()))
            except TimeoutError:
                failure = "left out: no time"
            took = failure if failure is not None else _time(trial, deadline)
            rows.append((trial.kernel, str(trial.form), trial.rows, astuple(trial.tiles), took))
        pool.shutdown(wait=False, cancel_futures=True)
    report = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "trials": rows}
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    if arguments.json:
        print(json.dumps(report))
        return 0
    print("kernel  format   rows  (rows, outputs, inputs, warps, stages)      us")
    for kernel, form, count, tiles, took in rows:
        print(f"{kernel:7} {form:6} {count:6}  {tiles!s:36} {took if isinstance(took, str) else format(took, '8.1f')}")
    return 0


def _time(trial: Trial, deadline: float) -> float | str:
    if time.monotonic() > deadline:
        return "left out: no time"
    try:
        return round(median_us(run_of(trial, FLASH, trial.rows), runs=7), 1)
    except RuntimeError as error:
        return str(error).splitlines()[0]
