"""Measures the ranks' agreement: shared memory with and without spinning beside gloo, in turns of one run.

    python -m tools.bench exchange [--count 20000] [--cpus 0,1] [--busy-gpus] [--json]

Two processes, pinned to a core each, exchange in blocks that alternate between the kinds, so that a slow moment of the
machine meets all of them. native: what the C call measures of itself, from its first clock to its last. python: what is
seen around the call that the scheduler's loop makes; empty: around a call that does nothing, which is what the clock
and Python cost by themselves. skew: how far apart the ranks came; after last: from the later one's arrival to the end,
which is what an exchange costs. C: the same two processes without Python, nothing but exchanges; waking: half a round
trip of one futex word between two sleepers, which is what the machine takes to wake one, and no more; meeting: two
sleepers that meet by a word each, a wake and a sleep, and nothing else. Where a bound for exchanges that sleep lies
below that meeting, the bound says nothing of the code; the verdict is then "floor", as long as an exchange costs no
more than the meeting, within this machine's noise, and an exchange without sleep.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from dsparkd import system
from dsparkd.native import exchange
from dsparkd.native.exchange import Attachment, Timing, Words
from dsparkd.scheduler.agreement import Channel
from dsparkd.scheduler.exchange import NativeExchange
from tools.harness import ROOT

SPIN_S = 20e-6
TIMEOUT_S = 60.0
BLOCK = 500
SLEEPING = "native, spin 0"
GLOO_SHARE = 10  # one gloo exchange for so many native ones: it takes a hundred times as long
WORDS = (1, 2, 3, 4, 5, 6, 7, 1, 2, 3, 4, 5, 6, 0)
AWAKE_US = 0.6  # p50 of an exchange in which nobody sleeps
FLOOR_MARGIN = 1.25  # turns of one and the same meeting differ by more on two cores: medians of 9 to 16 us were seen
TURNS = 10  # of the C driver, so that what it measures beside each other meets the same moments of the machine
# What must hold, microseconds: kind, series, percentile, bound, and the series that is the machine's own.
BOUNDS = (
    ("native", "C: native", "p50", AWAKE_US, ""),
    ("native", "C: native", "p99", 3.0, ""),
    ("native", "python", "p50", 2.0, ""),
    ("native", "python", "p99", 10.0, ""),
    (SLEEPING, "C: native", "p50", 6.0, "C: meeting"),
)
DRIVER = ROOT / "tests" / "native" / "exchange_driver.c"
SERIES = ("native", "skew", "after last", "python", "empty")


# By kind, series and percentile; microseconds, except the series "counts".
Figures = dict[str, dict[str, dict[str, float]]]


@dataclass(frozen=True)
class Shared:
    """What both rank processes inherit of one native kind."""

    memory: int
    events: tuple[int, int]
    peers: tuple[socket.socket, socket.socket]
    spin_s: float


def make_shared(spin_s: float) -> Shared:
    """A fresh region with its events and the sockets that stand for the ranks' lives."""
    memory = system.sealed_memory("dsparkd-bench", exchange.region_bytes())
    exchange.init_region(memory, session=1, digest=1)
    return Shared(memory, (system.eventfd(), system.eventfd()), socket.socketpair(), spin_s)


class Native:
    """One rank of a native kind and what it measured, in nanoseconds by series."""

    def __init__(self, rank: int, shared: Shared) -> None:
        attachment = Attachment.open(
            shared.memory, rank, session=1, digest=1, timeout_s=TIMEOUT_S, spin_s=shared.spin_s
        )
        kicks = (shared.events[rank], shared.events[1 - rank])
        self._exchange = NativeExchange(rank, attachment, kicks, shared.peers[rank])
        self.measured: dict[str, list[int]] = {name: [] for name in SERIES}
        self.calls = self.sleeps = self.wakes = 0

    def block(self) -> None:
        """BLOCK calls as the loop makes them, as many that are asked for their times, and as many that do nothing.

        Asking takes longer than the call, and ranks that do so between two calls come further apart.
        """
        clock, exchange, seen = time.perf_counter_ns, self._exchange, self.measured["python"]
        for _ in range(BLOCK):
            begun = clock()
            exchange.exchange(Channel.PLAN, WORDS)
            seen.append(clock() - begun)
        for _ in range(BLOCK):
            exchange.exchange(Channel.PLAN, WORDS)
            self._note(exchange.timing(Channel.PLAN))
        for _ in range(BLOCK):
            begun = clock()
            nothing(Channel.PLAN, WORDS)
            self.measured["empty"].append(clock() - begun)

    def _note(self, timing: Timing) -> None:
        self.measured["native"].append(timing.total_ns)
        self.measured["skew"].append(timing.arrival_skew_ns)
        self.measured["after last"].append(timing.after_last_ns)
        self.calls += 1
        self.sleeps += timing.sleeps
        self.wakes += timing.wakes


def nothing(_channel: Channel, _words: Words) -> None:
    """Do nothing."""


def gloo_call(rank: int, peer: socket.socket) -> Callable[[], object]:
    """The same exchange over gloo, as executor.collectives sets it up."""
    import torch

    from dsparkd.executor.collectives import RankGroups
    from dsparkd.scheduler.exchange import GlooExchange

    torch.set_num_threads(1)
    groups = RankGroups.open(rank, peer, torch.device("cpu"), startup_timeout_s=TIMEOUT_S, timeout_s=TIMEOUT_S)
    gloo = GlooExchange(rank, groups.gather, peer)
    return lambda: gloo.exchange(Channel.PLAN, WORDS)


def run_rank(rank: int, cpu: int, kinds: dict[str, Shared], peer: socket.socket, count: int) -> dict[str, object]:
    """One rank's whole life; returns its measurements by kind."""
    call = gloo_call(rank, peer)  # before the pinning, which gloo's own threads would inherit
    os.sched_setaffinity(0, {cpu})
    natives = {name: Native(rank, shared) for name, shared in kinds.items()}
    gloo: list[int] = []
    for number in range(-1, -(-count // BLOCK)):
        for native in natives.values():
            native.block()
        for _ in range(BLOCK // GLOO_SHARE):
            begun = time.perf_counter_ns()
            call()
            gloo.append(time.perf_counter_ns() - begun)
        if number < 0:  # warm-up
            gloo.clear()
            for native in natives.values():
                native.calls = native.sleeps = native.wakes = 0
                for seen in native.measured.values():
                    seen.clear()
    return {
        "natives": {
            name: {"series": native.measured, "calls": native.calls, "syscalls": native.sleeps + native.wakes}
            for name, native in natives.items()
        },
        "gloo": gloo,
    }


def fork(work: Callable[[], object]) -> tuple[int, int]:
    """Run work in a child; returns its pid and a descriptor from which its result comes as JSON."""
    read_end, write_end = os.pipe()
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.close(read_end)
            with open(write_end, "w") as pipe:
                json.dump(work(), pipe)
            code = 0
        finally:
            os._exit(code)
    os.close(write_end)
    return pid, read_end


def keep_gpu_busy(index: int, report: int) -> None:
    """Multiply matrices on one GPU until killed; writes a byte to report once it is under way."""
    import torch

    torch.cuda.set_device(index)
    matrix = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    is_told = False
    while True:
        for _ in range(20):
            torch.mm(matrix, matrix)
        torch.cuda.synchronize()
        if not is_told:
            is_told = os.write(report, b"1") == 1


def start_load(index: int) -> int:
    """Return the pid of a process that keeps a GPU busy. Raises RuntimeError when it cannot."""
    read_end, write_end = os.pipe()
    parent_pid = os.getpid()
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        try:
            system.set_parent_death_signal(parent_pid)  # whatever else fails, no GPU stays busy
            keep_gpu_busy(index, write_end)
        finally:
            os._exit(1)
    os.close(write_end)
    is_busy = os.read(read_end, 1) == b"1"
    os.close(read_end)
    if not is_busy:
        os.waitpid(pid, 0)
        raise RuntimeError(f"GPU {index} cannot be kept busy")
    return pid


def end_load(pid: int) -> None:
    """Kill it. Raises RuntimeError when it had ended before."""
    os.kill(pid, signal.SIGKILL)
    if os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) != -signal.SIGKILL:
        raise RuntimeError("a GPU did not stay busy")


def run_c(
    directory: Path, count: int, kinds: dict[str, Shared], cpus: tuple[int, int]
) -> dict[str, dict[str, list[int]]]:
    """What the C driver measures in turns, by kind and series, in nanoseconds."""
    measured: dict[str, dict[str, list[int]]] = {name: {} for name in kinds}
    share = -(-count // TURNS)
    for _ in range(TURNS):
        for mode, series in (("floor", "C: waking"), ("meeting", "C: meeting")):
            told = [line[0] for line in run_driver(directory, mode, share, 0.0, cpus)]
            measured[SLEEPING].setdefault(series, []).extend(told)
        for name, shared in kinds.items():
            columns = zip(*run_driver(directory, "measure", share, shared.spin_s, cpus), strict=True)
            for series, column in zip(SERIES, columns, strict=False):
                measured[name].setdefault(f"C: {series}", []).extend(column)
    return measured


def run_driver(directory: Path, mode: str, count: int, spin_s: float, cpus: tuple[int, int]) -> list[list[int]]:
    """The numbers of each line that the C driver prints."""
    driver = directory / "driver"
    if not driver.exists():
        include = f"-I{ROOT / 'dsparkd' / 'native'}"
        subprocess.run(["cc", "-std=c11", "-O2", include, str(DRIVER), "-o", str(driver), "-lpthread"], check=True)
    command = [str(driver), mode, str(count), str(round(spin_s * 1e9)), *map(str, cpus)]
    told = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return [[int(word) for word in line.split()] for line in told.splitlines()]


def two_cores(allowed: Collection[int]) -> tuple[int, ...]:
    """The first processor that this process may use, and the next one on another core, where there is one."""
    first, *others = sorted(allowed)
    siblings = Path(f"/sys/devices/system/cpu/cpu{first}/topology/thread_siblings_list")
    shared: set[int] = set()
    if siblings.exists():
        for part in siblings.read_text(encoding="ascii").strip().split(","):
            low, _, high = part.partition("-")
            shared |= set(range(int(low), int(high or low) + 1))
    apart = [cpu for cpu in others if cpu not in shared]
    return (first, *(apart or others)[:1])


def percentiles(values: list[int]) -> dict[str, float]:
    """p50, p99 and the largest, in microseconds."""
    ordered = sorted(values)
    last = len(ordered) - 1
    return {name: ordered[last * share // 100] / 1e3 for name, share in (("p50", 50), ("p99", 99), ("max", 100))}


def measure(directory: Path, count: int, cpus: tuple[int, int], busy_gpus: bool) -> Figures:
    """Run both ranks and put their figures together, by kind and series. Raises RuntimeError when a rank fails."""
    kinds = {"native": make_shared(SPIN_S), SLEEPING: make_shared(0.0)}
    peers = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    loads = [start_load(index) for index in (0, 1)] if busy_gpus else []
    alone = run_c(directory, count, kinds, cpus)
    children = [fork(partial(run_rank, rank, cpus[rank], kinds, peers[rank], count)) for rank in (0, 1)]
    told = []
    for pid, pipe in children:
        with open(pipe) as file:
            told.append(file.read())
        if os.waitpid(pid, 0)[1] != 0:
            raise RuntimeError("a rank failed")
    for pid in loads:
        end_load(pid)
    both = [json.loads(text) for text in told]
    figures: Figures = {}
    for name in kinds:
        parts = [rank["natives"][name] for rank in both]
        figures[name] = {series: percentiles(values) for series, values in alone[name].items()}
        figures[name] |= {
            series: percentiles(parts[0]["series"][series] + parts[1]["series"][series]) for series in SERIES
        }
        share = sum(part["syscalls"] for part in parts) / sum(part["calls"] for part in parts)
        figures[name]["counts"] = {"exchanges": parts[0]["calls"], "syscalls per exchange": share}
    gloo = [rank["gloo"] for rank in both]
    figures["gloo"] = {"python": percentiles(gloo[0] + gloo[1]), "counts": {"exchanges": len(gloo[0])}}
    return figures


def judge(figures: Figures) -> list[dict[str, object]]:
    """Each bound with what was measured: ok, over, or floor where this machine cannot do better."""
    verdicts: list[dict[str, object]] = []
    for kind, series, percentile, bound, own in BOUNDS:
        found = figures[kind][series][percentile]
        floor = figures[kind][own][percentile] if own else 0.0
        verdict = "ok" if found <= bound else "floor" if found <= FLOOR_MARGIN * floor + AWAKE_US else "over"
        what = f"{kind}: {series} {percentile}"
        verdicts.append({"what": what, "us": found, "bound_us": bound, "floor_us": floor, "verdict": verdict})
    return verdicts


def main(argv: list[str]) -> int:
    """Measure and print; 0 when no bound is missed that this machine could hold."""
    parser = argparse.ArgumentParser(prog="python -m tools.bench exchange", description="the ranks' agreement")
    parser.add_argument("--count", type=int, default=20_000, help="exchanges of each native series")
    parser.add_argument("--cpus", help="two processors, one a rank; by default the first two cores' of those allowed")
    parser.add_argument("--busy-gpus", action="store_true", help="while both GPUs multiply matrices")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    arguments = parser.parse_args(argv)
    cpus = [int(cpu) for cpu in arguments.cpus.split(",")] if arguments.cpus else two_cores(os.sched_getaffinity(0))
    if len(set(cpus)) != 2:
        parser.error("name two cores: each rank has one to itself")
    begun = time.perf_counter()
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as name:
        figures = measure(Path(name), arguments.count, (cpus[0], cpus[1]), arguments.busy_gpus)
    verdicts = judge(figures)
    result = {
        "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, cores {cpus} used",
        "load_before": load,
        "busy_gpus": arguments.busy_gpus,
        "spin_s": SPIN_S,
        "elapsed_s": round(time.perf_counter() - begun, 1),
        "figures_us": figures,
        "bounds": verdicts,
        "ok": all(verdict["verdict"] != "over" for verdict in verdicts),
    }
    print(json.dumps(result) if arguments.json else render(result, figures, verdicts))
    return 0 if result["ok"] else 1


def render(result: dict[str, object], figures: Figures, verdicts: list[dict[str, object]]) -> str:
    """The table: a line a series, then the bounds."""
    lines = [f"{result['machine']}, load before {result['load_before']:.2f}, {result['elapsed_s']} s; microseconds"]
    for kind, series in figures.items():
        lines.append(f"{kind}: " + ", ".join(f"{name} {value:g}" for name, value in series["counts"].items()))
        for name, values in series.items():
            if name != "counts":
                lines.append(
                    f"  {name:<14} p50 {values['p50']:9.2f}  p99 {values['p99']:9.2f}  max {values['max']:11.2f}"
                )
    for verdict in verdicts:
        line = f"{verdict['verdict']:<6}{verdict['what']}: {verdict['us']:.2f}, bound {verdict['bound_us']}"
        lines.append(line + (f", this machine's floor {verdict['floor_us']:.2f}" if verdict["floor_us"] else ""))
    return "\n".join(lines)
