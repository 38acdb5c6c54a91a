"""Gate `grammar_fuzz`: random and hostile grammars against a live server that serves plain traffic all the while.

    python -m tools.gates grammar_fuzz [--cases N] [--checkpoint DIR] [--json]

No answer is a 5xx other than the documented 503 and 504, every refusal is one error object, no process ends, the ranks'
resident memory stays within the cache's bound and SPARE_BYTES, and the 99th percentile of the plain requests is within
25% of its calm value: compiles and probes run only when nobody else wants the processor.

The plain requests come from a process of their own. Grammars come in storms; after each one there is a pause, and then
an echo: requests of the storm that were answered come again, at the same moments, with grammars that are known by then.
Calm is the echo: the server answers in it what it answers in a storm, and only compiles, probes and refusals are
missing. What the plain requests take when nothing else is answered, in the pauses, is reported, too. A machine changes
over a run; storms, pauses and echoes in turn see the same changes.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median

from tools.grammar_cases import Json, hostile, make_case
from tools.harness import Server, Tables, alive, ensure_checkpoint

FIRST_PAUSE_S = 20.0
STORM_S = 60.0
PAUSE_S = 3.0
ECHO_S = 7.0
SETTLE_S = 1.0  # for what is still written of the grammars, and for the last answers
MAX_ECHOES = 16
PLAIN_INTERVAL_S = 0.25
CONCURRENCY = 4
CACHE_BYTES = 64 << 20
SPARE_BYTES = 256 << 20  # heaps keep holes; a rank that forgets nothing gains gigabytes
TIMEOUT_S = 120.0
SLOWER = 1.25
OVERRIDES: Tables = {"grammar.cache": {"bytes": CACHE_BYTES}}


@dataclass(frozen=True)
class Plain:
    """One plain request; begun_s: time.monotonic()."""

    begun_s: float
    ms: float
    status: int
    text: str


@dataclass
class Outcome:
    """What came of the whole; times of plain requests in milliseconds."""

    statuses: Counter[str] = field(default_factory=Counter)
    codes: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    storm_ms: list[float] = field(default_factory=list)
    pause_ms: list[float] = field(default_factory=list)
    echo_ms: list[float] = field(default_factory=list)
    num_echoed: int = 0
    grown_bytes: int = 0


class Traffic:
    """Plain requests, one every PLAIN_INTERVAL_S, sent and timed by a process that does nothing else."""

    def __init__(self, base_url: str, model: str) -> None:
        context = multiprocessing.get_context("spawn")
        self._ours, theirs = context.Pipe()
        self._process = context.Process(target=send_plain, args=(base_url, model, theirs), daemon=True)

    @property
    def pid(self) -> int | None:
        """Of the process."""
        return self._process.pid

    def start(self) -> None:
        """Begin; returns when the first request is about to be sent."""
        self._process.start()
        self._ours.recv()

    def stop(self) -> list[Plain]:
        """End, wait for the last answer and return all of them."""
        self._ours.send("stop")
        found: list[Plain] = self._ours.recv()
        self._process.join()
        return found


def send_plain(base_url: str, model: str, orders: Connection) -> None:
    """Be the process: send until an order comes, then hand over what was found."""
    found: list[Plain] = []

    def one(number: int) -> None:
        body: Json = {"prompt": f"Request {number}", "max_tokens": 8, "ignore_eos": True, "routed_dp_rank": number % 2}
        begun_s = time.monotonic()
        status, text = post(base_url, model, body)
        found.append(Plain(begun_s, (time.monotonic() - begun_s) * 1e3, status, text))

    orders.send("ready")
    with ThreadPoolExecutor(16) as threads:
        for number in itertools.count():
            if orders.poll(PLAIN_INTERVAL_S):
                break
            threads.submit(one, number)
    orders.send(found)


@dataclass(frozen=True)
class Window:
    """From one moment to another, of time.monotonic()."""

    begun_s: float
    end_s: float

    def times(self, plain: list[Plain]) -> list[float]:
        """Milliseconds of the requests that were sent in it."""
        return [one.ms for one in plain if self.begun_s <= one.begun_s < self.end_s]


class Storms:
    """Sends the cases in storms, with a pause and an echo behind each. One thread runs it."""

    def __init__(self, base_url: str, model: str, num_cases: int, outcome: Outcome) -> None:
        self._base_url = base_url
        self._model = model
        self._outcome = outcome
        self._known = hostile()
        self._numbers = iter(range(num_cases))
        self._num_left = num_cases
        self._lock = threading.Lock()  # of the two above and of the outcome
        self._threads = ThreadPoolExecutor(CONCURRENCY)
        self.storms: list[Window] = []
        self.pauses: list[Window] = []
        self.echoes: list[Window] = []

    def run(self) -> None:
        """Until every case was sent."""
        self._pause(FIRST_PAUSE_S)
        while self._num_left:
            answered = self._storm()
            time.sleep(SETTLE_S)
            self._pause(PAUSE_S)
            self._echo(answered)
            time.sleep(SETTLE_S)
        self._threads.shutdown()

    def _pause(self, seconds: float) -> None:
        begun_s = time.monotonic()
        time.sleep(seconds)
        self.pauses.append(Window(begun_s, time.monotonic()))

    def _storm(self) -> list[tuple[float, Json]]:
        """One storm; returns the requests that were answered, each with the time from the storm's beginning."""
        begun_s = time.monotonic()
        answered: list[tuple[float, Json]] = []

        def work(worker: int) -> None:
            while time.monotonic() < begun_s + STORM_S:
                with self._lock:
                    number = next(self._numbers, None)
                    self._num_left -= number is not None
                if number is None:
                    return
                sent_s = time.monotonic() - begun_s
                case = make_case(number, self._known)
                fields = {"prompt": "x", "max_tokens": 8, "routed_dp_rank": number % 2, **case}
                status, text = post(self._base_url, self._model, fields)
                with self._lock:
                    judge(case, status, text, self._outcome)
                    if status == 200:
                        answered.append((sent_s, fields))

        list(self._threads.map(work, range(CONCURRENCY)))
        self.storms.append(Window(begun_s, time.monotonic()))
        return answered

    def _echo(self, answered: list[tuple[float, Json]]) -> None:
        """Send again what was answered in the first ECHO_S, at the same moments."""
        begun_s = time.monotonic()
        with ThreadPoolExecutor(MAX_ECHOES) as threads:
            for sent_s, fields in sorted(answered, key=lambda one: one[0]):
                if sent_s < ECHO_S:
                    time.sleep(max(0.0, begun_s + sent_s - time.monotonic()))
                    threads.submit(self._send_again, fields)
            time.sleep(max(0.0, begun_s + ECHO_S - time.monotonic()))
            self.echoes.append(Window(begun_s, time.monotonic()))

    def _send_again(self, fields: Json) -> None:
        status, text = post(self._base_url, self._model, fields)
        with self._lock:
            self._outcome.num_echoed += 1
            if status not in (200, 503, 504):
                self._outcome.faults.append(f"echo: {status} {text[:200]} for {json.dumps(fields)[:300]}")


def post(base_url: str, model: str, fields: Json) -> tuple[int, str]:
    """Send a completion; 0 for an answer that did not come."""
    request = urllib.request.Request(
        base_url + "/v1/completions",
        json.dumps({"model": model, **fields}).encode(),
        {"content-type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
            return int(answer.status), answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode(errors="replace")
    except OSError as error:
        return 0, repr(error)


def judge(case: Json, status: int, text: str, outcome: Outcome) -> None:
    """Count an answer; what must not come is a fault, with the case."""
    outcome.statuses[str(status)] += 1
    if status == 200:
        return
    try:
        error = json.loads(text)["error"]
        outcome.codes[f"{status} {error['code']}"] += 1
        is_sound = bool(error["message"]) and status in (400, 503, 504)
    except (ValueError, KeyError, TypeError):
        is_sound = False
    if not is_sound:
        outcome.faults.append(f"{status} {text[:200]} for {json.dumps(case)[:300]}")


def resident_bytes(pid: int) -> int:
    """Resident memory of a process."""
    for line in Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    return 0


def middle(times: list[float]) -> float:
    """The median to a tenth, 0 of none."""
    return round(median(times), 1) if times else 0.0


def p99(times: list[float]) -> float:
    """The 99th percentile, 0 of none."""
    return sorted(times)[min(len(times) - 1, int(len(times) * 0.99))] if times else 0.0


def run(checkpoint: Path, num_cases: int) -> Outcome:
    """Serve, and let the grammars come."""
    outcome = Outcome()
    with Server({**OVERRIDES, "engine": {"checkpoint": str(checkpoint)}}) as server:
        server.wait_ready()
        pids = server.pids()
        ranks = [pid for name, pid in server.children().items() if name.startswith("rank")]
        post(server.base_url, checkpoint.name, {"prompt": "x", "regex": "warm [0-9]", "max_tokens": 8})
        traffic = Traffic(server.base_url, checkpoint.name)
        storms = Storms(server.base_url, checkpoint.name, num_cases, outcome)
        traffic.start()
        before = [resident_bytes(pid) for pid in ranks]
        storms.run()
        plain = traffic.stop()
        outcome.grown_bytes = (
            max(resident_bytes(pid) - then for pid, then in zip(ranks, before, strict=True) if alive(pid))
            if all(map(alive, ranks))
            else -1
        )
        outcome.faults += [f"process {pid} has ended" for pid in pids if not alive(pid)]
        if server.status("/ready") != 200 or server.status("/health_scheduler") != 200:
            outcome.faults.append("the server is not healthy any more")
        if server.stop() != 0:
            outcome.faults.append("the server did not stop with 0")
    outcome.faults += [f"plain request: {one.status} {one.text[:200]}" for one in plain if one.status != 200]
    outcome.storm_ms = [ms for window in storms.storms for ms in window.times(plain)]
    outcome.pause_ms = [ms for window in storms.pauses for ms in window.times(plain)]
    outcome.echo_ms = [ms for window in storms.echoes for ms in window.times(plain)]
    return outcome


def main(argv: list[str]) -> int:
    """Run the gate and return its exit code."""
    parser = argparse.ArgumentParser(prog="tools.gates grammar_fuzz", description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--checkpoint", type=Path)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(argv)
    if options.cases < 1:
        parser.error("--cases: use at least 1")
    begun = time.monotonic()
    outcome = run((options.checkpoint or ensure_checkpoint()).resolve(), options.cases)
    storm, calm, alone = p99(outcome.storm_ms), p99(outcome.echo_ms), p99(outcome.pause_ms)
    ok_memory = 0 <= outcome.grown_bytes <= CACHE_BYTES + SPARE_BYTES
    ok_time = storm <= SLOWER * calm
    ok = not outcome.faults and ok_memory and ok_time
    facts: Json = {
        "ok": ok,
        "cases": options.cases,
        "statuses": dict(outcome.statuses),
        "codes": dict(outcome.codes),
        "faults": outcome.faults,
        "plain_calm_p99_ms": round(calm, 1),
        "plain_storm_p99_ms": round(storm, 1),
        "plain_alone_p99_ms": round(alone, 1),
        "plain_p50_ms": {
            "calm": middle(outcome.echo_ms),
            "storm": middle(outcome.storm_ms),
            "alone": middle(outcome.pause_ms),
        },
        "plain_requests": {
            "calm": len(outcome.echo_ms),
            "storm": len(outcome.storm_ms),
            "alone": len(outcome.pause_ms),
        },
        "echoed_cases": outcome.num_echoed,
        "grown_bytes": outcome.grown_bytes,
        "elapsed_s": round(time.monotonic() - begun, 1),
    }
    if options.json:
        print(json.dumps(facts))
        return 0 if ok else 1
    for fault in outcome.faults:
        print(f"FAIL {fault}")
    print(f"{options.cases} cases: {', '.join(f'{key} x {count}' for key, count in outcome.statuses.most_common())}")
    print(f"  {', '.join(f'{key} x {count}' for key, count in outcome.codes.most_common())}")
    print(
        f"plain requests, p99: {calm:.0f} ms calm, {storm:.0f} ms under grammars {'ok' if ok_time else 'FAIL'}; "
        f"{alone:.0f} ms when nothing else is answered"
    )
    print(f"memory of a rank: {outcome.grown_bytes / 2**20:+.0f} MiB {'ok' if ok_memory else 'FAIL'}")
    print(f"{'ok' if ok else 'FAIL'} in {facts['elapsed_s']} s")
    return 0 if ok else 1
