"""Measures the whole server with each kind of exchange in turns: idle cores, waking, phases of a tick, tail latency.

    python -m tools.bench agreement [--turns 2] [--idle-s 10] [--wakes 500] [--json]

Each turn starts a server with one kind on the same checkpoint and prompts. idle: the share of a core that a parked rank
uses. wake: from the parent's sending of the message that wakes a parked pair to its first step, by one clock, and how
much of it each part took: wake until the rank runs, receive until it has read the message and kicked its peer, plan,
agree until the peer has come, launch. foreign: the cores that other programs kept busy meanwhile, on average; above a
few hundredths the wakes are theirs. phases: microseconds a tick under 32 streams, and what clients saw of them.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import re
import time
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from dsparkd.text.tokenizer import Tokenizer
from tools.bench.serve import PROFILES, Served, make_prompts, serve_round
from tools.harness import Server, ensure_checkpoint

KINDS = ("native", "gloo")
MAX_IDLE_SHARE = 0.005
MAX_WAKE_S = 0.001
WAKE_EVENT = "launched_after_park"
PHASES = ("receive", "plan", "agree", "launch", "commit", "publish")
# The stamps of launched_after_park in order, and what each part between two of them is called.
STAMPS = ("sent_ns", "woken_ns", "received_ns", "planned_ns", "agreed_ns", "launched_ns")
PARTS = ("wake", "receive", "plan", "agree", "launch")

Series = Mapping[tuple[str, str], float]  # (name, labels) of /metrics


@dataclass(frozen=True)
class Turn:
    """One server's life. wake_us: p50, p99 and the largest of a wake's parts and of their sum, total.

    foreign_cores: what other programs used of the machine while the wakes were measured.
    """

    kind: str
    idle_share: dict[str, float]
    foreign_cores: float
    wakes: int
    wakes_within_1ms: int
    wake_us: dict[str, dict[str, float]]
    phase_us: dict[str, float]
    exchange_us: float
    served: dict[str, float]


def scrape(server: Server) -> Series:
    """All series of /metrics."""
    found = re.findall(r"^(\w+)(?:\{(.*)\})? (\S+)$", server.get("/metrics"), re.MULTILINE)
    return {(name, labels): float(value) for name, labels, value in found}


def total(series: Series, name: str, label: str = "") -> float:
    """Sum of a family over ranks, of those with a label's text."""
    return sum(value for (found, labels), value in series.items() if found == name and label in labels)


def cpu_seconds(pid: int) -> float:
    """Time that all threads of a process have run; the scheduler's own, for an idle rank runs less than a tick."""
    spent_ns = 0
    for path in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        spent_ns += int(path.read_text(encoding="ascii").split()[0])
    return spent_ns / 1e9


def idle_seconds() -> float:
    """Time that processors had nothing to run, over all of them: idle and waiting for disks."""
    words = Path("/proc/stat").read_text(encoding="ascii").split(maxsplit=6)
    return (int(words[4]) + int(words[5])) / os.sysconf("SC_CLK_TCK")


def own_seconds(server: Server) -> float:
    """Time that the server's processes and this one have run."""
    return sum(cpu_seconds(pid) for pid in (*server.pids(), os.getpid()))


def idle_shares(server: Server, seconds: float) -> dict[str, float]:
    """Share of a core that each rank uses while nobody asks for anything."""
    time.sleep(1.0)  # what the readiness probes began has ended
    ranks = {name: pid for name, pid in server.children().items() if name.startswith("rank")}
    before = {name: cpu_seconds(pid) for name, pid in ranks.items()}
    time.sleep(seconds)
    return {name: (cpu_seconds(pid) - before[name]) / seconds for name, pid in ranks.items()}


def wake(server: Server, model: str, count: int) -> None:
    """Ask for one token again and again, each time after the ranks have parked."""
    for number in range(count):
        body = {"model": model, "prompt": f"{number}", "max_tokens": 1, "routed_dp_rank": number % 2}
        request = urllib.request.Request(
            f"{server.base_url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            answer.read()
        time.sleep(0.02)


def run_turn(kind: str, turn: int, idle_for_s: float, wakes: int) -> Turn:
    """One server with one kind. Raises ServerFailed."""
    checkpoint = ensure_checkpoint().resolve()
    profile = PROFILES["short"]
    vocab_size = Tokenizer.load(checkpoint).vocab_size
    engine = {"checkpoint": str(checkpoint), "max_context_tokens": 2048}
    with Server({"engine": engine, "exchange": {"kind": kind}, "log": {"level": "debug"}}) as server:
        server.wait_ready()
        model = str(json.loads(server.get("/v1/models"))["data"][0]["id"])
        idle = idle_shares(server, idle_for_s)
        earlier = len(server.events(WAKE_EVENT))
        begun_s, idle_s, own_s = time.monotonic(), idle_seconds(), own_seconds(server)
        wake(server, model, wakes)
        seconds = time.monotonic() - begun_s
        busy = (os.cpu_count() or 1) - (idle_seconds() - idle_s) / seconds
        foreign = max(0.0, busy - (own_seconds(server) - own_s) / seconds)
        woken = server.wait_event(WAKE_EVENT, count=earlier + 1)[earlier:]
        time.sleep(1.5)  # until the counters of the last second have come
        before = scrape(server)
        served = serve_round(server.port, model, make_prompts(profile, vocab_size, seed=turn), profile)
        time.sleep(1.5)
        after = scrape(server)
        server.stop()
    return Turn(kind, idle, foreign, *wake_figures(woken), *tick_figures(before, after), seconds_of(served))


def wake_figures(events: Sequence[Mapping[str, object]]) -> tuple[int, int, dict[str, dict[str, float]]]:
    """Number of wakes, those within a millisecond, and percentiles of their parts and totals in microseconds."""
    times = [[int(str(event[stamp])) for stamp in STAMPS] for event in events]
    parts = {name: [(each[index + 1] - each[index]) / 1e3 for each in times] for index, name in enumerate(PARTS)}
    parts["total"] = [(each[-1] - each[0]) / 1e3 for each in times]
    within = sum(us <= MAX_WAKE_S * 1e6 for us in parts["total"])
    return len(times), within, {name: percentiles(each) for name, each in parts.items()}


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """p50, p99 and the largest: the smallest value that so many of a hundred do not exceed."""
    ordered = sorted(values)
    return {
        name: ordered[math.ceil(len(ordered) * share / 100) - 1]
        for name, share in (("p50", 50), ("p99", 99), ("max", 100))
    }


def tick_figures(before: Series, after: Series) -> tuple[dict[str, float], float]:
    """Microseconds a tick in each phase, and in the exchange itself."""

    def grown(name: str, label: str) -> float:
        return total(after, name, label) - total(before, name, label)

    ticks = grown("dsparkd_scheduler_phase_calls_total", 'phase="tick"')
    seconds = "dsparkd_scheduler_phase_seconds_total"
    phases = {phase: 1e6 * grown(seconds, f'phase="{phase}"') / ticks for phase in PHASES}
    # What a late peer costs is not the exchange's: with native it is left out.
    exact = grown("dsparkd_exchange_seconds_total", 'phase="after_last"')
    spent = exact or grown("dsparkd_exchange_seconds_total", 'phase="total"')
    return phases, 1e6 * spent / grown("dsparkd_exchange_calls_total", "")


def seconds_of(served: Served) -> dict[str, float]:
    """What the clients saw, by name."""
    return {name: float(value) for name, value in asdict(served).items()}


def main(argv: list[str]) -> int:
    """Measure and print; 0 when idle ranks with the native kind use no core and wake in time."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.bench agreement", description="the server with each exchange"
    )
    parser.add_argument("--turns", type=int, default=2, help="turns of each kind")
    parser.add_argument("--idle-s", type=float, default=10.0)
    parser.add_argument("--wakes", type=int, default=500)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    arguments = parser.parse_args(argv)
    begun, load = time.perf_counter(), os.getloadavg()[0]
    turns = [
        run_turn(kind, turn, arguments.idle_s, arguments.wakes)
        for turn in range(arguments.turns)
        for kind in (KINDS if turn % 2 == 0 else KINDS[::-1])
    ]
    native = [turn for turn in turns if turn.kind == "native"]
    ok = all(
        max(turn.idle_share.values()) < MAX_IDLE_SHARE and turn.wake_us["total"]["p99"] <= MAX_WAKE_S * 1e6
        for turn in native
    )
    result = {
        "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores",
        "load_before": load,
        "elapsed_s": round(time.perf_counter() - begun, 1),
        "ok": ok,
        "turns": [asdict(turn) for turn in turns],
    }
    print(json.dumps(result) if arguments.json else render(result, turns))
    return 0 if ok else 1


def render(result: dict[str, object], turns: list[Turn]) -> str:
    """The table: some lines a turn."""
    lines = [f"{result['machine']}, load before {result['load_before']:.2f}, {result['elapsed_s']} s"]
    for turn in turns:
        idle = ", ".join(f"{name} {100 * share:.2f} %" for name, share in turn.idle_share.items())
        phases = ", ".join(f"{name} {value:.0f}" for name, value in turn.phase_us.items())
        lines.append(f"{turn.kind}: idle {idle} of a core")
        lines.append(f"  other programs kept {turn.foreign_cores:.2f} cores busy")
        lines.append(f"  {turn.wakes} wakes, {turn.wakes_within_1ms} of them within 1 ms; p50, p99, max in us:")
        for name, us in turn.wake_us.items():
            lines.append(f"    {name:<8} {us['p50']:7.0f} {us['p99']:7.0f} {us['max']:7.0f}")
        lines.append(f"  us a tick: {phases}; exchange {turn.exchange_us:.1f}")
        served = turn.served
        lines.append(
            f"  {served['output_tokens_per_s']:.0f} tokens/s, ttft p99 {1e3 * served['ttft_p99_s']:.0f} ms, "
            f"between tokens p50 {1e3 * served['inter_token_p50_s']:.1f} ms, "
            f"p99 {1e3 * served['inter_token_p99_s']:.1f} ms"
        )
    return "\n".join(lines)
