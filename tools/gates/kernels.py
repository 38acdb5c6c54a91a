"""Every Triton kernel against its torch reference: values, poisoned outputs, repeats, and bits under other batches.

    python -m tools.gates kernels [--device cpu|cuda] [--only PREFIX] [--out FILE] [--json]

On cuda the shapes are the released geometry's, and each kernel is captured into a CUDA graph, too: a kernel that reads
a value back to the host, or takes memory in a way that a graph cannot hold, fails there. On cpu (--device cpu) small
shapes run under Triton's interpreter.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from tools.kernel_cases import Case, Scale, all_cases

CUTS = (1, 5, 16, 48, 96, 192, 333, 2000)  # rows of a run whose bits are compared with those of the whole
NUM_PLACES = 3  # and at how many places


@dataclass(frozen=True, slots=True)
class Outcome:
    """One case: error relative to the largest magnitude, and whether each claim held; None: not claimed here."""

    name: str
    shape: str
    error: float
    tolerance: float
    finite: bool
    repeats: bool
    invariant: bool
    captured: bool | None
    seconds: float

    @property
    def ok(self) -> bool:
        """Whether all of it held."""
        held = self.finite and self.repeats and self.invariant and self.captured is not False
        return held and self.error <= self.tolerance


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Fill every tensor that is made without values with NaN (integers with their largest), as torch can for tests."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    before = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.utils.deterministic.fill_uninitialized_memory = before  # type: ignore[attr-defined]
        torch.use_deterministic_algorithms(False)


@torch.inference_mode()
def check(case: Case, device: torch.device) -> Outcome:
    """Run one case through all comparisons."""
    began = time.perf_counter()
    rows = slice(0, case.num_rows)
    with poisoned_memory():
        whole = case.run(rows)
        repeats = torch.equal(case.run(rows), whole)
        invariant = all(torch.equal(case.run(part), whole[part]) for part in parts(case))
        captured = _equals_when_captured(case, whole) if device.type == "cuda" else None
    expected = case.reference(rows).double()
    error = float((whole.double() - expected).abs().max() / expected.abs().max())
    return Outcome(
        name=case.name,
        shape=case.shape,
        error=error,
        tolerance=case.tolerance,
        finite=bool(whole.isfinite().all()),
        repeats=repeats,
        invariant=invariant,
        captured=captured,
        seconds=round(time.perf_counter() - began, 2),
    )


def parts(case: Case) -> Iterator[slice]:
    """Runs of fewer rows: the first, the last and some in between."""
    for size in sorted({-(-cut // case.row_tile) * case.row_tile for cut in CUTS}):
        last = (case.num_rows - size) // case.row_tile * case.row_tile
        if last >= 0:
            for start in sorted({last * place // (NUM_PLACES - 1) for place in range(NUM_PLACES)}):
                at = start // case.row_tile * case.row_tile
                yield slice(at, at + size)


def _equals_when_captured(case: Case, whole: Tensor) -> bool:
    """Capture the run into a graph, replay it twice and compare. False too where capture is impossible."""
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            held = case.run(slice(0, case.num_rows))
    except RuntimeError as error:
        print(f"{case.name} {case.shape}: not captured: {str(error).splitlines()[0]}")
        torch.cuda.synchronize()
        return False
    equal = True
    for _ in range(2):
        held.zero_()
        graph.replay()
        equal = equal and torch.equal(held, whole)
    return equal


def main(argv: list[str]) -> int:
    """Check all cases; 0 when each held."""
    parser = argparse.ArgumentParser(prog="python -m tools.gates kernels", description=str(__doc__).splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--only", default="", help="kernels whose names begin so")
    parser.add_argument("--out", type=Path, help="write the result there, too")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    arguments = parser.parse_args(argv)
    began = time.perf_counter()
    device = torch.device(arguments.device)
    if device.type == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported, which the cases do
    scale = Scale.FLASH if device.type == "cuda" else Scale.SMALL
    outcomes = [check(case, device) for case in all_cases(device, scale, arguments.only)]
    elapsed = round(time.perf_counter() - began, 1)
    ok = bool(outcomes) and all(outcome.ok for outcome in outcomes)
    where = torch.cuda.get_device_name() if device.type == "cuda" else "Triton's interpreter"
    report = {
        "ok": ok,
        "elapsed_s": elapsed,
        "device": where,
        "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "outcomes": [asdict(outcome) | {"ok": outcome.ok} for outcome in outcomes],
    }
    text = json.dumps(report, indent=2) + "\n"
    if arguments.out is not None:
        arguments.out.write_text(text, encoding="utf-8")
    if arguments.json:
        print(json.dumps(report))
        return 0 if ok else 1
    print(f"{'kernel':22} {'shape':34} {'error':>8} {'bound':>8} finite repeats bits  graph     s")
    for outcome in outcomes:
        captured = "-" if outcome.captured is None else _word(outcome.captured)
        print(
            f"{outcome.name:22} {outcome.shape:34} {outcome.error:8.1e} {outcome.tolerance:8.0e} "
            f"{_word(outcome.finite):6} {_word(outcome.repeats):7} {_word(outcome.invariant):5} {captured:5} "
            f"{outcome.seconds:5.1f}  {'ok' if outcome.ok else 'FAIL'}"
        )
    print(f"{'ok' if ok else 'FAIL'}: {len(outcomes)} cases on {where}, {elapsed} s")
    return 0 if ok else 1


def _word(held: bool) -> str:
    return "yes" if held else "NO"
