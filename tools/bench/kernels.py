"""Times every Triton kernel at the released geometry, against the memory or arithmetic floor of one GPU.

    python -m tools.bench kernels [--only PREFIX] [--seconds 125] [--out FILE] [--json]

The table begins with the kernels that are farthest from their floor: the larger of the bytes that have to move over the
bandwidth measured on this GPU, and of the operations over the matrix rate measured on it, and what an empty kernel
takes. Times are medians of runs captured into a CUDA graph; before each run the cache is filled with other bytes that
are only read, as the weights of other layers do between two runs of one. Beside a kernel stands what torch's own one
takes for the same work, where it has one. Cases that are not reached in --seconds are left out, and said to be.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from tools.kernel_cases import Case, Scale, all_cases

RUNS = 12
FLUSH_BYTES = 256 << 20  # several times the last-level cache
STREAM_BYTES = 2 << 30  # of each tensor that a bandwidth is measured with
NOMINAL_BYTES_S = 4.8e12  # of an H200


@dataclass(frozen=True, slots=True)
class Timing:
    """One case, in microseconds; share: of the floor in the time taken. bound: what the floor comes from.

    rival: whose time rival_us is, or why there is none.
    """

    name: str
    shape: str
    time_us: float
    floor_us: float
    share: float
    nominal_share: float
    bound: str
    rival: str = ""
    rival_us: float | None = None


@dataclass(frozen=True, slots=True)
class Machine:
    """What this GPU reaches: bytes a second copied (read and written) and only read, bfloat16 operations a second of a
    product, and what an empty kernel takes, in microseconds."""

    copied_bytes_s: float
    read_bytes_s: float
    flops_s: float
    empty_us: float

    @property
    def bytes_s(self) -> float:
        """The better bandwidth."""
        return max(self.copied_bytes_s, self.read_bytes_s)


def median_us(run: Callable[[], object], runs: int = RUNS) -> float:
    """Time a run by events around its graph."""
    flush = torch.zeros(FLUSH_BYTES // 4, dtype=torch.int32, device="cuda")
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        held = run()
    pairs = [(_event(), _event()) for _ in range(runs)]
    for start, end in pairs:
        flush.amax()
        start.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    del held
    return statistics.median(float(start.elapsed_time(end)) for start, end in pairs) * 1e3


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def measure_machine() -> Machine:
    """Copy and read gigabytes, multiply two large matrices, and set one number."""
    source = torch.zeros(STREAM_BYTES // 4, dtype=torch.int32, device="cuda")
    target = torch.empty_like(source)
    copies = (lambda: target.copy_(source), lambda: torch.add(source, 1, out=target))
    copy_us = min(median_us(copy) for copy in copies)
    read_us = median_us(source.amax)
    square = torch.randn((8192, 8192), device="cuda").bfloat16()
    product_us = median_us(lambda: square @ square)
    one = torch.zeros(1, device="cuda")
    return Machine(
        copied_bytes_s=2 * STREAM_BYTES / copy_us * 1e6,
        read_bytes_s=STREAM_BYTES / read_us * 1e6,
        flops_s=2 * 8192**3 / product_us * 1e6,
        empty_us=median_us(one.zero_),
    )


@torch.inference_mode()
def measure(case: Case, machine: Machine) -> Timing:
    """Time one case."""
    time_us = median_us(case.timed or (lambda: case.run(slice(0, case.num_rows))))
    rival, rival_us = case.rival_name, None
    if case.rival is not None:
        try:
            rival_us = round(median_us(case.rival), 1)
        except (RuntimeError, ValueError, AttributeError) as error:  # this torch does not have it for these shapes
            torch.cuda.synchronize()
            rival = f"{rival}: {str(error).splitlines()[0][:60]}"
    memory_us = case.floor_bytes / machine.bytes_s * 1e6
    arithmetic_us = case.floor_flops / machine.flops_s * 1e6
    floor_us = max(memory_us, arithmetic_us) + machine.empty_us
    nominal_us = max(case.floor_bytes / NOMINAL_BYTES_S * 1e6, arithmetic_us)
    return Timing(
        name=case.name,
        shape=case.shape,
        time_us=round(time_us, 1),
        floor_us=round(floor_us, 1),
        share=round(floor_us / time_us, 3),
        nominal_share=round(nominal_us / time_us, 3),
        bound="memory" if memory_us >= arithmetic_us else "arithmetic",
        rival=rival,
        rival_us=rival_us,
    )


def main(argv: list[str]) -> int:
    """Time all cases and print a table; 2 without a GPU."""
    parser = argparse.ArgumentParser(prog="python -m tools.bench kernels", description=str(__doc__).splitlines()[0])
    parser.add_argument("--only", default="", help="kernels whose names begin so")
    parser.add_argument("--seconds", type=float, default=125)
    parser.add_argument("--out", type=Path, help="write the result there, too")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    arguments = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("kernels are timed on a CUDA device, and this machine has none")
        return 2
    began = time.perf_counter()
    machine = measure_machine()
    timings, left_out = [], []
    for case in all_cases(torch.device("cuda"), Scale.FLASH, arguments.only):
        if case.untimed:
            continue
        if time.perf_counter() - began > arguments.seconds:
            left_out.append(f"{case.name} {case.shape}")
        else:
            timings.append(measure(case, machine))
    timings.sort(key=lambda timing: timing.share)
    report = {
        "elapsed_s": round(time.perf_counter() - began, 1),
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "machine": asdict(machine),
        "timings": [asdict(timing) for timing in timings],
        "left_out": left_out,
    }
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    if arguments.json:
        print(json.dumps(report))
        return 0
    print(f"{'kernel':22} {'shape':34} {'us':>9} {'floor':>9} {'share':>6} {'of nominal':>10}  bound       torch's")
    for timing in timings:
        rival = timing.rival if timing.rival_us is None else f"{timing.rival_us:.1f} {timing.rival}"
        print(
            f"{timing.name:22} {timing.shape:34} {timing.time_us:9.1f} {timing.floor_us:9.1f} {timing.share:6.0%} "
            f"{timing.nominal_share:10.0%}  {timing.bound:10}  {rival}"
        )
    if left_out:
        print(f"left out for want of time: {', '.join(left_out)}")
    print(
        f"copy {machine.copied_bytes_s / 1e12:.2f} TB/s, read {machine.read_bytes_s / 1e12:.2f} TB/s, bfloat16 product "
        f"{machine.flops_s / 1e12:.0f} TFLOP/s, an empty kernel {machine.empty_us:.1f} us, "
        f"{report['device']}, {report['elapsed_s']} s"
    )
    return 0
