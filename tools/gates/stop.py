"""Gate `stop`: every way to end the server ends it in time, with the right exit code, and leaves nothing behind.

    python -m tools.gates stop [--json] [--rounds N] [--streams N]

Each line starts a real server with two ranks, ends it one way, and then looks for what is left (`tools/traces.py`
lists where).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import socket
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tools.harness import Server, Tables, alive, ensure_checkpoint, free_port, merge
from tools.streams import Outcome, Streams
from tools.traces import CHECKED, Traces

ENDLESS_TOKENS = 16_000
CHILDREN = ("rank 0", "rank 1", "detokenizer", "probe")
IMPATIENT: Tables = {"exchange": {"timeout_s": 3.0}}
# What the machine withholds, as a shell says it, and what the refusal must name.
WITHHELD = (
    ("descriptors for shared memory", "ulimit -n 6", "ulimit -n"),
    ("descriptors for the wiring", "ulimit -n 14", "ulimit -n"),
    ("descriptors for the children", "ulimit -n 25", "ulimit -n"),
)
STUCK: Tables = {"shutdown": {"drain_timeout_s": 0.5, "barrier_timeout_s": 0.5, "exit_timeout_s": 3.0}}


@dataclass
class Line:
    """One scenario's result. exit_code is what was seen; bound_s and seconds: from the (last) signal to the end.

    error_event: the parent's one error line where expected_exit is a failure.
    """

    name: str
    expected_exit: int
    bound_s: float
    error_event: str = "server_failed"
    exit_code: int | None = None
    seconds: float = 0.0
    detail: str = ""
    left: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether everything held."""
        return self.exit_code == self.expected_exit and self.seconds <= self.bound_s and not self.left + self.faults


Scenario = Callable[[Server, Line], None]


def run_line(
    line: Line, scenario: Scenario, overrides: Tables, port: int | None = None, limit: str = "ulimit -c 0"
) -> Line:
    """Start a server, play the scenario (which ends it) and look for what is left. limit: its shell's first command."""
    traces = Traces()
    port = port or free_port()
    # The server's temporary files go to a directory of their own, outside what the harness deletes.
    with tempfile.TemporaryDirectory(prefix="dsparkd-gate-") as name:
        directory = Path(name)
        own: Tables = {"server": {"port": port}, "engine": {"crash_dir": str(directory / "crash")}}
        tables = merge(own, overrides)
        command = ("sh", "-c", f'{limit} && exec "$0" "$@"', sys.executable, "-m", "dsparkd", "--config")
        environment = traces.environment(directory / "tmp")
        with Server(tables, command=command, environment=environment, port=port) as server:
            try:
                scenario(server, line)
            except (TimeoutError, AssertionError, RuntimeError) as error:
                line.faults.append(f"{type(error).__name__}: {str(error)[:300]}")
                server.kill()
            line.left = traces.left(port, directory)
            line.faults += unexpected_log(server, line)
    return line


def unexpected_log(server: Server, line: Line) -> list[str]:
    """An orderly stop logs no error; after a failure the parent names its cause exactly once."""
    errors = [f"{fields['role']} {fields['event']}" for fields in server.events() if fields.get("level") == "error"]
    if line.expected_exit == 0:
        return [f"error line: {error}" for error in errors]
    parents = [error for error in errors if error.startswith("parent ")]
    # Before there is a log, a refusal is one plain line.
    parents += ["parent start_failed" for text in server.log_text().splitlines() if text.startswith("dsparkd: ")]
    expected = [] if line.expected_exit < 0 else [f"parent {line.error_event}"]
    return [] if parents == expected else [f"the parent's error lines: {parents}"]


def end_by(server: Server, line: Line, number: int) -> None:
    """Send the signal to the parent and measure its end."""
    begun = time.monotonic()
    server.send_signal(number)
    line.exit_code = server.wait_exit(line.bound_s + 20)
    line.seconds = time.monotonic() - begun


def describe(line: Line, outcomes: list[Outcome]) -> None:
    """Count how the streams ended; one that broke off without a word is a fault."""
    ends = Counter(outcome.finish or ("error event" if outcome.readable else "broken") for outcome in outcomes)
    line.detail = ", ".join(f"{count} {end}" for end, count in sorted(ends.items()))
    if ends["broken"]:
        line.faults.append(f"{ends['broken']} streams broke off: {next(o.error for o in outcomes if not o.readable)}")


def idle(number: int) -> Scenario:
    """A signal to a server without work."""

    def play(server: Server, line: Line) -> None:
        server.wait_ready()
        end_by(server, line, number)

    return play


def under_streams(count: int, max_tokens: int, expected: set[str]) -> Scenario:
    """SIGTERM while streams run; expected: their finish reasons."""

    def play(server: Server, line: Line) -> None:
        server.wait_ready()
        with Streams(server.base_url, count, max_tokens) as streams:
            streams.wait_flowing()
            end_by(server, line, signal.SIGTERM)
            outcomes = streams.outcomes()
        describe(line, outcomes)
        if {outcome.finish for outcome in outcomes} - expected:
            line.faults.append(f"finish reasons other than {sorted(expected)}")

    return play


def twice(count: int) -> Scenario:
    """A second SIGTERM while the first one waits for endless streams; measured from the second."""

    def play(server: Server, line: Line) -> None:
        server.wait_ready()
        with Streams(server.base_url, count, ENDLESS_TOKENS) as streams:
            streams.wait_flowing()
            server.send_signal(signal.SIGTERM)
            server.wait_event("drain_begun")
            time.sleep(0.3)
            if server.process.poll() is not None:
                line.faults.append("did not drain")
            end_by(server, line, signal.SIGTERM)
            describe(line, streams.outcomes())

    return play


def while_starting(event: str, stage: str | None) -> Scenario:
    """SIGTERM as soon as the log has the event, and its stage."""

    def play(server: Server, line: Line) -> None:
        deadline = time.monotonic() + 60
        while not any(stage in (None, fields.get("stage")) for fields in server.events(event)):
            if time.monotonic() > deadline or server.process.poll() is not None:
                raise TimeoutError(f"no {event} {stage}: {server.log_text()[-300:]}")
            time.sleep(0.002)
        end_by(server, line, signal.SIGTERM)
        if server.events("listening"):
            line.faults.append("it was already up: nothing was shown")

    return play


def kill_child(name: str, count: int) -> Scenario:
    """SIGKILL one child under streams; measured to the parent's end."""

    def play(server: Server, line: Line) -> None:
        server.wait_ready()
        with Streams(server.base_url, count, ENDLESS_TOKENS) as streams:
            streams.wait_flowing()
            begun = time.monotonic()
            os.kill(server.children()[name], signal.SIGKILL)
            outcomes = streams.outcomes()
            line.exit_code = server.wait_exit(line.bound_s + 20)
            line.seconds = time.monotonic() - begun
        describe(line, outcomes)
        line.faults += report_faults(server, name)
        slowest_s = max(outcome.ended_s for outcome in outcomes) - begun
        line.detail += f", last after {slowest_s:.2f} s"
        if slowest_s > 1.0:
            line.faults.append(f"a client waited {slowest_s:.2f} s for its error (bound 1 s)")

    return play


def report_faults(server: Server, victim: str) -> list[str]:
    """What is wrong with the crash report that the log names: each rank that was not killed tells its agreements."""
    written = server.events("crash_report_written")
    if len(written) != 1:
        return [f"{len(written)} crash reports"]
    report = json.loads(Path(str(written[0]["path"])).read_text(encoding="utf-8"))
    faults = [] if victim in report["error"] else [f"the report blames {report['error']}"]
    for dp_rank, said in enumerate(report["ranks"]):
        if victim == f"rank {dp_rank}":
            continue
        if said is None:
            faults.append(f"rank {dp_rank} said nothing of its end")
        elif not (1 <= len(said["ticks"]) <= 256 and said["stacks"] and "requests" in said):
            faults.append(f"rank {dp_rank}'s report has {len(said['ticks'])} ticks")
    return faults


def kill_child_while_starting(name: str, stage: str) -> Scenario:
    """SIGKILL one child when the start has come to a stage."""

    def play(server: Server, line: Line) -> None:
        deadline = time.monotonic() + 60
        while not any(fields.get("stage") == stage for fields in server.events("start_progress")):
            if time.monotonic() > deadline or server.process.poll() is not None:
                raise TimeoutError(f"no {stage}: {server.log_text()[-300:]}")
            time.sleep(0.002)
        begun = time.monotonic()
        os.kill(server.children()[name], signal.SIGKILL)
        line.exit_code = server.wait_exit(line.bound_s + 20)
        line.seconds = time.monotonic() - begun
        if server.events("listening"):
            line.faults.append("it was already up: nothing was shown")

    return play


def refused(what: str) -> Scenario:
    """A start that must fail by itself, with one line that holds a text."""

    def play(server: Server, line: Line) -> None:
        begun = time.monotonic()
        line.exit_code = server.wait_exit(line.bound_s + 20)
        line.seconds = time.monotonic() - begun
        if what not in server.log_text():
            line.faults.append(f"no word of {what!r}: {server.log_text()[-300:]}")

    return play


def held_rank(count: int) -> Scenario:
    """A rank stands still under streams for longer than the other one waits; measured from its SIGSTOP."""

    def play(server: Server, line: Line) -> None:
        server.wait_ready()
        with Streams(server.base_url, count, ENDLESS_TOKENS) as streams:
            streams.wait_flowing()
            begun = time.monotonic()
            os.kill(server.children()["rank 1"], signal.SIGSTOP)
            outcomes = streams.outcomes()
            line.exit_code = server.wait_exit(line.bound_s + 20)
            line.seconds = time.monotonic() - begun
        describe(line, outcomes)
        causes = [str(fields["error"]) for fields in server.events("server_failed")]
        # Whichever rank 0 waited in: the agreement or the experts' exchange.
        if not any(cause.startswith("rank 0 failed: ") and "rank 1 did not " in cause for cause in causes):
            line.faults.append(f"the cause is told as {causes}")

    return play


def flood(count: int) -> Scenario:
    """SIGTERM while streams run for ever and new requests come without end: none of them prolongs the drain."""

    def play(server: Server, line: Line) -> None:
        server.wait_ready()
        statuses: Counter[int] = Counter()
        flooding = threading.Event()

        def ask() -> None:
            body = json.dumps({"model": "nano", "prompt": "more", "max_tokens": 1}).encode()
            while not flooding.is_set():
                request = urllib.request.Request(
                    f"{server.base_url}/v1/completions", data=body, headers={"Content-Type": "application/json"}
                )
                try:
                    with urllib.request.urlopen(request, timeout=30) as answer:
                        statuses[answer.status] += 1
                except urllib.error.HTTPError as error:
                    statuses[error.code] += 1
                except OSError:
                    time.sleep(0.01)

        with Streams(server.base_url, count, ENDLESS_TOKENS) as streams:
            streams.wait_flowing()
            askers = [threading.Thread(target=ask) for _ in range(4)]
            for asker in askers:
                asker.start()
            try:
                end_by(server, line, signal.SIGTERM)
            finally:
                flooding.set()
                for asker in askers:
                    asker.join()
            describe(line, streams.outcomes())
        line.detail += f", meanwhile {dict(sorted(statuses.items()))}"
        if not statuses[503]:
            line.faults.append("nothing was refused while it drained")

    return play


def deaf_client() -> Scenario:
    """SIGTERM while a client with an endless stream reads nothing."""

    def play(server: Server, line: Line) -> None:
        server.wait_ready()
        body = {"model": "nano", "prompt": "deaf", "max_tokens": ENDLESS_TOKENS, "ignore_eos": True, "stream": True}
        text = json.dumps(body).encode()
        with socket.create_connection(("127.0.0.1", server.port)) as sock:
            head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            sock.sendall(f"{head}Content-Length: {len(text)}\r\n\r\n".encode() + text)
            time.sleep(1)
            end_by(server, line, signal.SIGTERM)

    return play


def kill_parent(count: int) -> Scenario:
    """SIGKILL the parent under streams; measured to the last child's end."""

    def play(server: Server, line: Line) -> None:
        server.wait_ready()
        children = server.children().values()
        with Streams(server.base_url, count, ENDLESS_TOKENS) as streams:
            streams.wait_flowing()
            begun = time.monotonic()
            server.process.kill()
            line.exit_code = server.wait_exit(10)
            while any(alive(pid) for pid in children) and time.monotonic() < begun + 30:
                time.sleep(0.005)
            line.seconds = time.monotonic() - begun
            streams.outcomes()

    return play


def kill_any(victim: str) -> Scenario:
    """SIGKILL one process of an idle server."""

    def play(server: Server, line: Line) -> None:
        server.wait_ready()
        begun = time.monotonic()
        if victim == "parent":
            server.process.kill()
        else:
            os.kill(server.children()[victim], signal.SIGKILL)
        line.exit_code = server.wait_exit(line.bound_s + 20)
        line.seconds = time.monotonic() - begun

    return play


def stopped_rank(count: int) -> Scenario:
    """SIGTERM while rank 1 is stopped and rank 0 waits for it: the exchange's 30 s must not decide the end."""

    def play(server: Server, line: Line) -> None:
        server.wait_ready()
        os.kill(server.children()["rank 1"], signal.SIGSTOP)
        with Streams(server.base_url, count, 32) as streams:
            time.sleep(0.5)  # until rank 0 has work, and waits
            end_by(server, line, signal.SIGTERM)
            describe(line, streams.outcomes())

    return play


def scenarios(count: int) -> list[tuple[Line, Scenario, Tables]]:
    """List every line but the rounds; count: streams."""
    # A row for each stream on one rank, however they are routed: no stream waits for another one's end.
    roomy: Tables = {"scheduler": {"max_rows": count}}
    quick = merge(roomy, {"shutdown": {"drain_timeout_s": 1.0}})
    starting = [("fork", "child_started", None), ("import", "start_progress", "detokenizer_ready")]
    starting += [(f"start: {stage}", "start_progress", stage) for stage in ("groups", "weights", "pools", "warm_up")]
    lines: list[tuple[Line, Scenario, Tables]] = [
        (Line("SIGTERM, idle", 0, 5), idle(signal.SIGTERM), {}),
        (Line("SIGINT, idle", 0, 5), idle(signal.SIGINT), {}),
        (Line(f"SIGTERM, {count} streams drain", 0, 60), under_streams(count, 48, {"length"}), roomy),
        (
            Line(f"SIGTERM, {count} streams cut after 1 s", 0, 1 + 5),
            under_streams(count, ENDLESS_TOKENS, {"abort"}),
            quick,
        ),
        (Line(f"SIGTERM twice, {count} streams", 0, 2), twice(count), roomy),
        *(
            (Line(f"SIGTERM while starting ({name})", 0, 5), while_starting(event, stage), {})
            for name, event, stage in starting
        ),
        *((Line(f"SIGKILL {name}, {count} streams", 70, 10), kill_child(name, count), roomy) for name in CHILDREN),
        (Line("SIGTERM, rank 1 stopped", 70, 20), stopped_rank(4), STUCK),
        (Line("SIGSTOP rank 1 for good, exchange.timeout_s 3", 70, 3 + 20), held_rank(4), IMPATIENT),
        (Line(f"SIGTERM, {count} streams and a flood", 0, 1 + 5), flood(count), quick),
        (Line("SIGTERM, a client that does not read", 0, 1 + 8), deaf_client(), quick),
        *(
            (Line(f"SIGKILL {name} while starting ({stage})", 70, 10, "start_failed"), play, {})
            for name, stage in (
                ("rank 0", "groups"),
                ("rank 1", "weights"),
                ("detokenizer", "pools"),
                ("rank 0", "warm_up"),
            )
            for play in (kill_child_while_starting(name, stage),)
        ),
        (
            Line("start refused: no directory for crash reports", 78, 10, "start_failed"),
            refused("engine.crash_dir"),
            {"engine": {"crash_dir": "/proc/crash"}},
        ),
        (
            Line("start refused: no memory for the caches", 78, 10, "start_failed"),
            refused("kv.device_bytes"),
            {"kv": {"device_bytes": 4096}},
        ),
        (
            Line("start refused: no checkpoint", 78, 10, "start_failed"),
            refused("/nowhere"),
            {"engine": {"checkpoint": "/nowhere"}},
        ),
        (Line(f"SIGKILL parent, {count} streams", -signal.SIGKILL, 1), kill_parent(count), roomy),
    ]
    return lines


def rounds(number: int, show: Callable[[Line], None]) -> list[Line]:
    """Kill one process of a server and start the next one at once, on the same port."""
    draw = random.Random(2)
    port = free_port()
    lines = []
    for index in range(number):
        victim = draw.choice(("parent", *CHILDREN))
        expected, bound_s = (-signal.SIGKILL, 1.0) if victim == "parent" else (70, 10.0)
        line = Line(f"round {index + 1}: SIGKILL {victim}", expected, bound_s)
        lines.append(run_line(line, kill_any(victim), {}, port))
        show(lines[-1])
    return lines


def print_line(line: Line) -> None:
    """Print one row of the table."""
    print(
        f"{'ok' if line.ok else 'FAIL':4} {line.name:<42} exit {line.exit_code!s:>4} "
        f"{line.seconds:6.2f} s (<= {line.bound_s:g})  {line.detail}",
        flush=True,
    )
    for fault in [*line.faults, *(f"left: {item}" for item in line.left)]:
        print(f"       {fault}", flush=True)


def main(argv: list[str]) -> int:
    """Play every scenario; 0 when all hold."""
    parser = argparse.ArgumentParser(prog="python -m tools.gates stop", description="ways to end, and what is left")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument("--rounds", type=int, default=20, help="kill-and-restart rounds (default 20)")
    parser.add_argument("--only", default="", help="scenarios whose name holds this text, and no rounds")
    parser.add_argument("--streams", type=int, default=64, help="streams in the scenarios under load (default 64)")
    arguments = parser.parse_args(argv)
    begun = time.monotonic()
    ensure_checkpoint()
    show: Callable[[Line], None] = (lambda _line: None) if arguments.json else print_line
    lines = []
    for line, scenario, overrides in scenarios(arguments.streams):
        if arguments.only not in line.name:
            continue
        lines.append(run_line(line, scenario, overrides))
        show(lines[-1])
    for what, limit, named in WITHHELD:
        line = Line(f"start refused: no {what}", 78, 10, "start_failed")
        if arguments.only in line.name:
            lines.append(run_line(line, refused(named), {}, limit=limit))
            show(lines[-1])
    if not arguments.only:
        lines += rounds(arguments.rounds, show)
    elapsed_s = time.monotonic() - begun
    ok = all(line.ok for line in lines)
    if arguments.json:
        table = [{**asdict(line), "ok": line.ok} for line in lines]
        print(json.dumps({"ok": ok, "elapsed_s": elapsed_s, "lines": table, "checked_afterwards": CHECKED}))
    else:
        print("checked after each line:")
        for what in CHECKED:
            print(f"  {what}")
        print(f"{'ok' if ok else 'FAIL'}: {len(lines)} lines, {elapsed_s:.0f} s")
    return 0 if ok else 1
