"""What a session on the GPU host runs, part by part, with result files that say where and of what they are.

    python -m tools.gpu_session --part nano|kernels|gates|identity|bench|geometry|quality|suite|exchange
        --out DIR [--commit ID]

nano: the cuda_ids gate, graphs against eager, and the tests marked gpu and gpu2. kernels: each against its reference,
and how near to the hardware it is. gates: what the pipeline waits for, and the ids of both ranks on one GPU.
identity: logits against transformers, and ids by every way and with speculation, on two GPUs. bench:
speculation beside plain decoding, both ranks on one GPU. geometry: steps and streams of the released geometry with
random weights, on two GPUs. quality: the whole exam of the shipped checkpoint, served on two GPUs. suite: the cpu
test suite, on that host's Python and torch, without tests/test_unit_file.py, which needs systemd. exchange: the
ranks' agreement beside gloo, on an idle host and while both GPUs are busy (needs a C compiler).
Each part ends within ten minutes, writes DIR/PART.json and the output of each step, and prints a short table last.
Without a .git directory beside it, name the commit.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Step:
    """One command of a part; `limit_s` keeps a step that hangs from taking the session's time.

    `{out}` in an argument stands for the directory of the result files.
    """

    name: str
    command: tuple[str, ...]
    limit_s: int


@dataclass(frozen=True)
class Result:
    """How a step ended: its exit code (None past its limit) and its last line."""

    name: str
    command: str
    exit_code: int | None
    seconds: float
    last_line: str


PYTHON = sys.executable
GPU_TESTS = (PYTHON, "-m", "pytest", "-m", "gpu", "-p", "no:cacheprovider")
PARTS: dict[str, tuple[Step, ...]] = {
    "nano": (
        Step("cuda_ids", (PYTHON, "-m", "tools.gates", "cuda_ids"), 240),
        Step("graph_ids", (PYTHON, "-m", "tools.gates", "cuda_ids", "--graphs"), 150),
        Step("gpu_tests", (PYTHON, "-m", "pytest", "-m", "gpu or gpu2", "-p", "no:cacheprovider"), 120),
    ),
    "kernels": (
        Step(
            "kernels", (PYTHON, "-m", "tools.gates", "kernels", "--device", "cuda", "--out", "{out}/checked.json"), 180
        ),
        Step("kernel_tests", (*GPU_TESTS, "tests/kernels", "tests/tools"), 150),
        Step("kernel_bench", (PYTHON, "-m", "tools.bench", "kernels", "--out", "{out}/bench_kernels.json"), 240),
    ),
    "gates": (
        Step("trace", (PYTHON, "-m", "tools.gates", "pipeline_trace", "--out", "{out}/pipeline_trace.json"), 100),
        Step(
            "trace_graphs",
            (PYTHON, "-m", "tools.gates", "pipeline_trace", "--graphs", "--out", "{out}/pipeline_trace_graphs.json"),
            100,
        ),
        Step("shared_ids", (PYTHON, "-m", "tools.gates", "cuda_ids", "--shared-device"), 150),
        Step("other_tests", (*GPU_TESTS, "tests/executor", "tests/grammar", "tests/gpu"), 150),
    ),
    "identity": (
        Step("oracle", (PYTHON, "-m", "tools.gates", "oracle", "--device", "cuda"), 90),
        Step("invariance", (PYTHON, "-m", "tools.gates", "invariance", "--device", "cuda"), 120),
        Step("invariance_dense", (PYTHON, "-m", "tools.gates", "invariance", "--device", "cuda", "--dense"), 120),
        Step("lossless", (PYTHON, "-m", "tools.gates", "lossless", "--device", "cuda"), 200),
    ),
    "bench": (
        Step(
            "dspark",
            (PYTHON, "-m", "tools.bench", "dspark", "--device", "cuda", "--shared-device", "--rounds", "1"),
            580,
        ),
    ),
    "geometry": (
        Step(
            "geometry",
            (PYTHON, "-m", "tools.bench", "geometry", "--seconds", "480", "--out", "{out}/geometry_rows.json"),
            590,
        ),
    ),
    "quality": (
        Step(
            "quality",
            (
                *(PYTHON, "-m", "tools.gates", "quality", "--full", "--device", "cuda"),
                *("--failures", "{out}/quality_failures.jsonl"),
            ),
            570,
        ),
    ),
    "exchange": tuple(
        Step(name, (PYTHON, "-m", "tools.bench", "exchange", "--json", *busy), 200)
        for name, busy in (("exchange_idle", ()), ("exchange_busy", ("--busy-gpus",)))
    ),
    "suite": (
        Step(
            "cpu_tests",
            (
                *(PYTHON, "-m", "pytest", "-m", "not gpu and not gpu2", "-p", "no:cacheprovider"),
                *("--ignore=tests/test_unit_file.py", "--maxfail=60"),
            ),
            580,
        ),
    ),
}


def hardware() -> dict[str, object]:
    """The machine, as far as a reader needs it to weigh the figures."""
    return {
        "gpus": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
        "cpus": os.cpu_count(),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
    }


def current_commit() -> str:
    """The checkout's commit, marked when files differ from it."""
    done = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=40"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return done.stdout.strip() if done.returncode == 0 else "unknown"


def run_step(step: Step, directory: Path) -> Result:
    """Run one command with its output in a file of the step's name."""
    began = time.perf_counter()
    path = directory / f"{step.name}.txt"
    command = [argument.replace("{out}", str(directory)) for argument in step.command]
    with path.open("wb") as output:
        # A session of its own, so that a step past its limit takes the servers that it started along.
        process = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            code: int | None = process.wait(step.limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            code = None
    lines = path.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    seconds = round(time.perf_counter() - began, 1)
    return Result(step.name, " ".join(command[1:]), code, seconds, lines[-1] if lines else "")


def main(argv: list[str]) -> int:
    """Run a part; 0 when every step ended with 0."""
    parser = argparse.ArgumentParser(prog="python -m tools.gpu_session", description=str(__doc__).splitlines()[0])
    parser.add_argument("--part", choices=sorted(PARTS), required=True)
    parser.add_argument("--out", type=Path, required=True, help="directory for the result files")
    parser.add_argument("--commit", help="what is run, where there is no .git to ask")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    arguments = parser.parse_args(argv)
    arguments.out.mkdir(parents=True, exist_ok=True)
    results = [run_step(step, arguments.out.resolve()) for step in PARTS[arguments.part]]
    ok = all(result.exit_code == 0 for result in results)
    report = {
        "part": arguments.part,
        "ok": ok,
        "commit": arguments.commit or current_commit(),
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "hardware": hardware(),
        "steps": [asdict(result) for result in results],
    }
    text = json.dumps(report, indent=2) + "\n"
    (arguments.out / f"{arguments.part}.json").write_text(text, encoding="utf-8")
    if arguments.json:
        print(json.dumps(report))
        return 0 if ok else 1
    print(f"{report['commit']} {report['date']} {report['hardware']}")
    for result in results:
        code = "past its limit" if result.exit_code is None else f"exit {result.exit_code}"
        print(f"{result.name:10} {code:14} {result.seconds:6.1f} s  {result.last_line}")
    print("ok" if ok else "FAIL")
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
