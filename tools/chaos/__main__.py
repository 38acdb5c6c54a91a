"""Chaos: break a loaded server at random, again and again, and check after each event what must always hold.

    python -m tools.chaos --minutes M --seed S [--checkpoint DIR] [--json]

After each event: every client got an end or a readable error; no token differs from what a calm server said; the server
is healthy again within the bound, or ended with the right exit code and is healthy after a restart; nothing of it is
left on the machine. Only processes that this program started are touched, and all traffic is on a loopback device of
their own. The run directory lies on a file system of its own (32 MB), which an event fills.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import platform
import random
import shutil
import signal
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tools.chaos.client import VIOLATIONS, Crowd, Job, Outcome, count
from tools.chaos.events import EVENTS, Event
from tools.chaos.world import READY_TIMEOUT_S, World, post
from tools.harness import ROOT, ServerFailed, ensure_checkpoint, free_port

RECOVERY_BOUND_S = 60.0  # from the end of an event to a server that answers, restart included
EXIT_BOUND_S = 30.0  # from an event that must end the server to its end
HUNG_S = 120.0
SETTLE_S = 1.0
NUM_CLIENTS = 8
QUIET_EVERY = 10  # events between two looks at a server that nobody asks anything
DISK_BYTES = 32 << 20
_SIOCSIFFLAGS, _IFF_UP, _IFF_RUNNING = 0x8914, 0x1, 0x40
INSIDE = "DSPARKD_CHAOS_MOUNTED"

LENGTHS = (8, 24, 64)
REGEX = "[a-f]{24}"


@dataclass
class Round:
    """One event and what came of it. seconds: from the event's end to the first right answers of both ranks."""

    number: int
    event: str
    detail: str = ""
    end: str = "stayed up"
    seconds: float = 0.0
    outcomes: dict[str, int] = field(default_factory=dict)
    violations: list[str] = field(default_factory=list)


def record_jobs(world: World) -> list[Job]:
    """Ask a calm server everything that will be asked, and keep what it says; greedy and seeded, short and long."""
    prompts = [f"chaos prompt number {number} says" for number in range(4)]
    prompts += [" ".join(f"word{number}-{index}" for index in range(60 * number)) for number in (1, 4)]
    jobs = []
    for number, prompt in enumerate(prompts):
        for temperature in (0.0, 1.0):
            for max_tokens in LENGTHS:
                body: dict[str, object] = {
                    "model": "nano",
                    "prompt": prompt,
                    "max_tokens": max_tokens,
                    "temperature": temperature,
                    "seed": 17,
                    "ignore_eos": True,
                }
                text = post(world.port, body, HUNG_S).texts[0]
                name = f"prompt {number}, {max_tokens} ids, temperature {temperature:g}"
                jobs += [Job(name, body, (text,)), Job(f"{name}, stream", {**body, "stream": True}, (text,))]
    singles = [job for job in jobs if "stream" not in job.body and job.body["temperature"] == 0.0]
    for max_tokens in LENGTHS:
        same = [job for job in singles if job.body["max_tokens"] == max_tokens]
        batch = {**same[0].body, "prompt": [job.body["prompt"] for job in same]}
        jobs.append(Job(f"batch of {len(same)}, {max_tokens} ids", batch, tuple(job.texts[0] for job in same)))
    return jobs + grammar_jobs(world)


def grammar_jobs(world: World) -> list[Job]:
    """Constrained jobs; none when this server has no grammars."""
    body: dict[str, object] = {"model": "nano", "prompt": "letters:", "max_tokens": 48, "temperature": 0.0, "seed": 17}
    body["regex"] = REGEX
    try:
        text = post(world.port, body, HUNG_S).texts[0]
    except OSError:
        return []
    return [Job("regex", body, (text,)), Job("regex, stream", {**body, "stream": True}, (text,))]


class Run:
    """One chaos run against one world."""

    def __init__(self, world: World, crowd: Crowd, probes: list[Job], seed: int) -> None:
        self._world = world
        self._crowd = crowd
        self._probes = probes
        self._draw = random.Random(seed)
        self.rounds: list[Round] = []

    def play(self, event: Event) -> Round:
        """Play one event, wait for the recovery and judge."""
        round_ = Round(len(self.rounds) + 1, event.name)
        self.rounds.append(round_)
        try:
            round_.detail = event.play(self._world, self._crowd, self._draw)
        except LookupError as error:
            round_.detail = f"too late: {error}"
        except (ServerFailed, OSError) as error:
            round_.violations.append(f"{type(error).__name__}: {str(error)[:300]}")
        begun = time.monotonic()
        self._recover(event, round_)
        round_.seconds = time.monotonic() - begun
        if len(self.rounds) % QUIET_EVERY == 0:
            self._look_at_quiet(round_)
        self._judge(event, round_)
        return round_

    def _recover(self, event: Event, round_: Round) -> None:
        """Wait until the server is well again, starting it again after its end."""
        begun = time.monotonic()
        why = "not looked at"
        while time.monotonic() < begun + RECOVERY_BOUND_S:
            if self._world.has_exited():
                self._take_end(event, round_)
                begun = time.monotonic()
                continue
            if event.must_exit and round_.end == "stayed up":
                why = "it still runs"
                if time.monotonic() > begun + EXIT_BOUND_S:
                    break
                time.sleep(0.02)
                continue
            why = self._world.unhealthy(self._probes)
            if not why:
                time.sleep(SETTLE_S)
                if not self._world.has_exited():
                    return
            time.sleep(0.1)
        round_.violations.append(f"not well after {time.monotonic() - begun:.0f} s: {why}")
        round_.end = "did not recover"
        # The next event needs a server; what is wrong with this one is told.
        self._world.server.kill()
        self._start_again(round_)

    def _take_end(self, event: Event, round_: Round) -> None:
        """Judge an end of the server, then do what a service manager does."""
        code = self._world.server.process.returncode
        round_.end = f"exit {code}"
        if code not in event.exits:
            round_.violations.append(f"exit code {code}, allowed {sorted(event.exits) or 'none'}")
        errors = self._world.error_lines()
        if code == 70 and len(errors) != 1:
            round_.violations.append(f"error lines of the parent: {errors}")
        if code == 0 and errors:
            round_.violations.append(f"error lines of an orderly stop: {errors}")
        round_.violations += [f"left: {what}" for what in self._world.left()]
        if round_.violations:
            round_.violations.append(f"log: {self._world.server.log_text()[-1500:]}")
        self._start_again(round_)

    def _start_again(self, round_: Round) -> None:
        self._world.start_again()
        try:
            self._world.server.wait_ready(READY_TIMEOUT_S)
        except ServerFailed as error:
            round_.violations.append(f"restart: {str(error)[:500]}")

    def _look_at_quiet(self, round_: Round) -> None:
        """Without clients nothing is held, by any rank."""
        if not self._crowd.pause(HUNG_S):
            round_.violations.append("clients had no end")
        held = self._world.held()
        round_.violations += [f"held without clients: {line}" for line in held]
        self._crowd.resume()

    def _judge(self, event: Event, round_: Round) -> None:
        outcomes = self._crowd.take_outcomes()
        round_.outcomes = count(outcomes)
        bad = [outcome for outcome in outcomes if self._is_violation(event, round_, outcome)]
        round_.violations += [
            f"{one.verdict} after {one.ended_s - one.begun_s:.1f} s: {one.job}: {one.detail[:300]}" for one in bad[:5]
        ]
        if len(bad) > 5:
            round_.violations.append(f"and {len(bad) - 5} more clients")

    @staticmethod
    def _is_violation(event: Event, round_: Round, outcome: Outcome) -> bool:
        if outcome.verdict == "broken" and event.may_break:
            return False
        if outcome.verdict == "unreachable":  # nobody listens: only while it is down
            return round_.end == "stayed up"
        return outcome.verdict in VIOLATIONS


@contextmanager
def run_directory() -> Iterator[Path]:
    """A directory on a small file system of its own, which goes with the mount namespace of this process."""
    with tempfile.TemporaryDirectory(prefix="dsparkd-chaos-") as name:
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "chaos", name], check=True)
        try:
            yield Path(name)
        finally:
            for path in Path(name).iterdir():
                shutil.rmtree(path) if path.is_dir() else path.unlink()
            subprocess.run(["umount", name], check=True)


def enter_namespaces(arguments: list[str]) -> None:
    """Run this program again where it has mounts, shared memory and a loopback device of its own, and no other network.

    Nothing that another program of the machine leaves behind is then taken for the server's.
    """
    if not os.environ.get(INSIDE):
        user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
        os.environ[INSIDE] = "1"
        own = [*user, "--mount", "--ipc", "--net"]
        os.execvp("unshare", ["unshare", *own, sys.executable, "-m", "tools.chaos", *arguments])
    subprocess.run(["mount", "-t", "tmpfs", "shm", "/dev/shm"], check=True)
    with socket.socket() as sock:
        fcntl.ioctl(sock, _SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", _IFF_UP | _IFF_RUNNING))


def summarise(rounds: list[Round]) -> list[dict[str, object]]:
    """One row an event: how often, how it ended, how long until the server was well, violations."""
    rows: list[dict[str, object]] = []
    for event in EVENTS:
        played = [round_ for round_ in rounds if round_.event == event.name]
        if not played:
            continue
        seconds = [round_.seconds for round_ in played]
        rows.append(
            {
                "event": event.name,
                "count": len(played),
                "ends": dict(sorted(Counter(round_.end for round_ in played).items())),
                "median_s": round(statistics.median(seconds), 2),
                "worst_s": round(max(seconds), 2),
                "violations": sum(len(round_.violations) for round_ in played),
            }
        )
    return rows


def print_table(rows: list[dict[str, object]], clients: Counter[str], elapsed_s: float, seed: int) -> None:
    """Print the result as Markdown."""
    print(f"\n{elapsed_s / 60:.1f} minutes, seed {seed}, {platform.machine()}, {os.cpu_count()} cores\n")
    print("| event | count | ends | well again, median | worst | violations |")
    print("|---|---|---|---|---|---|")
    for row in rows:
        ends = row["ends"]
        told = ", ".join(f"{number} {name}" for name, number in ends.items()) if isinstance(ends, dict) else ""
        print(
            f"| {row['event']} | {row['count']} | {told} | {row['median_s']} s | {row['worst_s']} s "
            f"| {row['violations']} |"
        )
    print(f"\nclients: {', '.join(f'{number} {verdict}' for verdict, number in sorted(clients.items()))}")


def main(arguments: list[str]) -> int:
    """Play events for so many minutes; 0 without a violation."""
    parser = argparse.ArgumentParser(prog="python -m tools.chaos", description="break a loaded server, and look")
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--event", default="", help="only events whose name holds this text")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    options = parser.parse_args(arguments)
    enter_namespaces(arguments)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)  # also in the background: the server must not outlive this
    ensure_checkpoint()
    begun = time.monotonic()
    events = [event for event in EVENTS if options.event in event.name]
    draw = random.Random(options.seed)
    clients: Counter[str] = Counter()
    with run_directory() as directory:
        world = World(free_port(), directory, ROOT / "conf" / "dev.toml")
        try:
            world.server.wait_ready(READY_TIMEOUT_S)
            jobs = record_jobs(world)
            crowd = Crowd(world.port, jobs, NUM_CLIENTS, options.seed, HUNG_S)
            probes = [job for job in jobs if job.name.startswith("prompt 0, 8 ids, temperature 0") and job.texts[0]]
            run = Run(world, crowd, [probes[0], probes[0]], options.seed)
            crowd.start()
            while time.monotonic() < begun + options.minutes * 60:
                event = draw.choices(events, [event.weight for event in events])[0]
                time.sleep(draw.uniform(0.2, 2))
                round_ = run.play(event)
                clients.update(round_.outcomes)
                if not options.json:
                    state = "FAIL" if round_.violations else "ok"
                    print(
                        f"{state:4} {round_.number:3} {round_.event}: {round_.detail}; {round_.end}, "
                        f"{round_.seconds:.1f} s; {round_.outcomes}",
                        flush=True,
                    )
                    for violation in round_.violations:
                        print(f"       {violation}", flush=True)
            crowd.stop()
        finally:
            world.end()
    rows = summarise(run.rounds)
    violations = sum(len(round_.violations) for round_ in run.rounds)
    elapsed_s = time.monotonic() - begun
    if options.json:
        bad = [{"round": one.number, "event": one.event, "violations": one.violations} for one in run.rounds]
        found = [one for one in bad if one["violations"]]
        print(json.dumps({"ok": not violations, "elapsed_s": elapsed_s, "events": rows, "violations": found}))
    else:
        print_table(rows, clients, elapsed_s, options.seed)
        print(f"{'ok' if not violations else 'FAIL'}: {len(run.rounds)} events, {violations} violations")
    return 0 if not violations else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
