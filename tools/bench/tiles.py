"""Times tile shapes of the weight-bound kernels at the released geometry: where the choices in kernels/cuda come from.

    python -m tools.bench tiles [--only PREFIX] [--seconds 130] [--out FILE] [--json]

Candidates are compiled in several processes first, which takes most of the time; what is not reached in --seconds is
left out, and said to be. The bits of each are compared with those of the first one at its place in the table: tiles
must not change them. The fastest ones stand last, beside what kernels/cuda chooses.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, TimeoutError
from dataclasses import asdict, astuple, dataclass
from functools import partial
from itertools import groupby
from multiprocessing import get_context
from pathlib import Path

import torch
from torch import Tensor

from dsparkd.kernels.cuda.experts import TritonExperts
from dsparkd.kernels.cuda.experts import choose_tiles as choose_expert_tiles
from dsparkd.kernels.cuda.linear import TritonLinear, choose_tiles
from dsparkd.kernels.cuda.tile import Tiles, turn
from dsparkd.kernels.weight import Format
from tools.bench.kernels import median_us
from tools.kernel_cases.experts import DECODE_ROWS, FLASH, PREFILL_ROWS, Geometry, random_rows, random_shard
from tools.kernel_cases.weights import random_weight

COMPILERS = 12
# (rows, outputs, inputs, warps, stages, registers, held)
FEW = (
    Tiles(16, 64, 128, 4, 3, held=True),
    Tiles(16, 64, 128, 4, 4, held=True),
    Tiles(16, 128, 128, 4, 3, held=True),
    Tiles(16, 128, 128, 8, 3, held=True),
    Tiles(16, 64, 128, 4, 3),
)
MIDDLE = (
    Tiles(32, 64, 128, 4, 3, held=True),
    Tiles(32, 128, 128, 8, 3, held=True),
    Tiles(16, 64, 128, 4, 3, held=True),
    Tiles(64, 64, 128, 4, 3),
    Tiles(64, 64, 128, 4, 4),
    Tiles(64, 64, 128, 4, 3, 128),
    Tiles(64, 128, 128, 8, 3),
)
LARGE = (
    Tiles(64, 128, 128, 8, 4, 128, held=True),
    Tiles(128, 256, 128, 16, 3),
    Tiles(64, 256, 128, 16, 3, held=True),
    Tiles(128, 128, 128, 8, 3, held=True),
)
MANY = (
    Tiles(256, 64, 128, 8, 3),
    Tiles(128, 128, 128, 8, 3),
    Tiles(128, 128, 128, 8, 2),
    Tiles(128, 128, 128, 8, 3, 128),
    Tiles(256, 64, 128, 8, 2),
    Tiles(128, 256, 128, 8, 2),
)


@dataclass(frozen=True, slots=True)
class Place:
    """Where tiles are needed: a kernel (experts, linear), a format, rows; of a linear its inputs and outputs."""

    kernel: str
    form: Format
    rows: int
    inputs: int = 0
    outputs: int = 0


@dataclass(frozen=True, slots=True)
class Trial:
    """Tiles to try at a place."""

    place: Place
    tiles: Tiles


@dataclass(frozen=True, slots=True)
class Found:
    """What a trial took, or why nothing is known; and whether its bits were those of the place's first trial."""

    trial: Trial
    time_us: float | None
    note: str


def trials(only: str) -> Iterator[Trial]:
    """List what is tried, the most wanted first."""
    for place, candidates in (
        (Place("experts", Format.FP4, 2), FEW),
        (Place("experts", Format.FP4, 16), FEW),
        (Place("experts", Format.FP4, 128), FEW),
        (Place("experts", Format.FP4, DECODE_ROWS), MIDDLE),
        (Place("experts", Format.FP4, PREFILL_ROWS), LARGE),
        (Place("linear", Format.FP8, 64, 4096, 4096), FEW[:2] + MIDDLE[2:7]),
        (Place("linear", Format.FP8, 384, 4096, 4096), MIDDLE[2:7] + MANY[1:4]),
        (Place("linear", Format.FP8, PREFILL_ROWS, 4096, 4096), MANY[1:]),
        (Place("linear", Format.FP8, 16, 8192, 4096), FEW),
        (Place("linear", Format.DENSE, 384, 4096, 129280), MIDDLE[3:7] + MANY[1:4]),
        (Place("linear", Format.DENSE, PREFILL_ROWS, 4096, 2560), MANY[1:]),
    ):
        if place.kernel.startswith(only):
            yield from (Trial(place, tiles) for tiles in candidates)


def compile_trial(trial: Trial) -> str | None:
    """Run a trial over few rows and experts, which fills the compiler's cache; None, or what went wrong."""
    try:
        few = Geometry(FLASH.width, FLASH.expert_width, 1, 2)
        Bound.of(trial.place, few, min(trial.place.rows, 64)).run(trial.tiles)
        torch.cuda.synchronize()
    except Exception as error:  # noqa: BLE001 - a candidate that cannot be compiled is a result
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return None


@dataclass(frozen=True, slots=True)
class Bound:
    """A place's inputs on the device; chosen: the tiles that kernels/cuda has for it."""

    run: Callable[[Tiles], Tensor]
    chosen: Tiles

    @classmethod
    def of(cls, place: Place, geometry: Geometry, rows: int) -> Bound:
        """Draw them."""
        device = torch.device("cuda")
        if place.kernel == "experts":
            shard = random_shard(geometry, place.form, device)
            inputs = random_rows(geometry, rows, device)
            chosen = choose_expert_tiles(inputs[1].numel(), geometry.num_experts, place.form, torch.bfloat16)
            holder = [chosen]
            experts = TritonExperts(shard, lambda *_: holder[0])
            if experts.takes_turned:
                inputs = (turn(inputs[0]), *inputs[1:])

            def run_experts(tiles: Tiles) -> Tensor:
                holder[0] = tiles
                return experts(*inputs)

            return cls(run_experts, chosen)
        weight = random_weight(place.form, place.outputs, place.inputs, 1, device)
        x = torch.randn(
            (rows, place.inputs), generator=torch.Generator(device).manual_seed(1), device=device
        ).bfloat16()

        chosen = choose_tiles(rows, place.outputs, place.inputs, place.form, torch.bfloat16)
        own = [chosen]
        linear = TritonLinear(weight, choose=lambda *_: own[0])

        def run_linear(tiles: Tiles) -> Tensor:
            own[0] = tiles
            return linear(x)

        return cls(run_linear, chosen)


@torch.inference_mode()
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
    found: list[Found] = []
    with ProcessPoolExecutor(COMPILERS, mp_context=get_context("spawn")) as pool:
        compiled = [pool.submit(compile_trial, trial) for trial in wanted]
        for place, group in groupby(zip(wanted, compiled, strict=True), lambda pair: pair[0].place):
            found += _time_place(place, list(group), deadline)
        pool.shutdown(wait=False, cancel_futures=True)
    report = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "trials": [asdict(one) for one in found],
    }
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    if arguments.json:
        print(json.dumps(report))
        return 0
    print(f"{'':42} (rows, outputs, inputs, warps, stages, registers, held)")
    for one in found:
        print(_line(one))
    print("the fastest, and what is chosen")
    for _, ones in groupby(found, lambda one: one.trial.place):
        timed = [one for one in ones if one.time_us is not None]
        for one in sorted(timed, key=lambda one: one.time_us or 0)[:1] + [one for one in timed if "chosen" in one.note]:
            print(_line(one))
    return 0


def _line(one: Found) -> str:
    place = one.trial.place
    where = f"{place.kernel} {place.form} {place.rows}"
    if place.inputs:
        where += f" x {place.inputs} x {place.outputs}"
    took = " " * 8 if one.time_us is None else f"{one.time_us:8.1f}"
    return f"{where:42} {astuple(one.trial.tiles)!s:43} {took}  {one.note}"


def _time_place(place: Place, group: Sequence[tuple[Trial, Future[str | None]]], deadline: float) -> list[Found]:
    """Time one place's trials on the same inputs."""
    found: list[Found] = []
    bound: Bound | None = None
    first: Tensor | None = None
    for trial, future in group:
        try:
            failure = future.result(max(0.0, deadline - time.monotonic()))
        except TimeoutError:
            failure = "left out: no time"
        if failure is not None or time.monotonic() > deadline:
            found.append(Found(trial, None, failure or "left out: no time"))
            continue
        if bound is None:
            bound = Bound.of(place, FLASH, place.rows)
        run = partial(bound.run, trial.tiles)
        try:
            made = run()
            time_us = round(median_us(run, runs=7), 1)
        except RuntimeError as error:
            found.append(Found(trial, None, str(error).splitlines()[0]))
            continue
        first = made if first is None else first
        notes = ["chosen"] if trial.tiles == bound.chosen else []
        if not torch.equal(first, made):
            notes.append("OTHER BITS")
        found.append(Found(trial, time_us, ", ".join(notes)))
    return found
