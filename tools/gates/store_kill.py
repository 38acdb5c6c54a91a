"""Gate `store_kill`: two ranks share a grammar store, and one is killed in the middle of publishing, 200 times.

    python -m tools.gates store_kill [--kills 200] [--json]

Both are processes with the real service, store and locks; compiling and probing are stood in for, so that a kill hits
the store and not XGrammar. Half of the kills come at a named step of a publication, where the victim waits for them;
the others at a random instant. After each: every entry is whole, the ledger is the sum, no lock is left held, and the
survivor has an answer to each of its requests.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import select
import signal
import socket
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import cast

import xgrammar

from dsparkd import system
from dsparkd.config import GrammarConfig, GrammarStoreConfig
from dsparkd.grammar.cache import Compiled
from dsparkd.grammar.key import Scope, digest
from dsparkd.grammar.service import GrammarService
from dsparkd.grammar.store import GrammarStore, LocalDisk, StoreCorrupt, prepare
from dsparkd.ipc.channel import Channel
from dsparkd.messages import FromProbe, Grammar, ProbeRequest, ProbeVerdict, decode_from_probe, decode_to_probe

SCOPE = Scope(xgrammar_version="gate", tokenizer_digest="gate", vocab_size=1)
KEYS = 8  # grammars a round
STEPS = ("half written", "written", "replaced")
SERVE_TIMEOUT_S = 20.0


@dataclass
class Report:
    """What was seen. steps: where the victims died; sources: who answered the survivor."""

    kills: int = 0
    steps: dict[str, int] = field(default_factory=dict)
    torn_entries: int = 0
    wrong_ledgers: int = 0
    held_locks: int = 0
    unserved: int = 0
    temporaries_after_restart: int = 0
    sources: dict[str, int] = field(default_factory=dict)
    elapsed_s: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether nothing went wrong, and every step was hit."""
        faults = self.torn_entries + self.wrong_ledgers + self.held_locks + self.unserved
        return not faults and not self.temporaries_after_restart and all(self.steps.get(step) for step in STEPS)


@dataclass(frozen=True)
class Form:
    """Stands for a compiled grammar."""

    memory_size_bytes: int = 1000


class Compiler:
    """Compiles nothing, in no time."""

    def compile(self, grammar: Grammar) -> xgrammar.CompiledGrammar:
        """See dsparkd.grammar.service.Compiles."""
        return cast(xgrammar.CompiledGrammar, Form())

    def load(self, grammar: Grammar, body: bytes) -> xgrammar.CompiledGrammar:
        """See dsparkd.grammar.service.Compiles."""
        return cast(xgrammar.CompiledGrammar, Form())


class WaitingDisk(LocalDisk):
    """Reports when a publication has come to a step and waits there for the end of its process."""

    def __init__(self, step: str, report: Callable[[], None]) -> None:
        self._step = step
        self._report = report

    def _reach(self, step: str) -> None:
        if step == self._step:
            self._report()
            signal.pause()

    def write(self, path: Path, raw: bytes) -> None:
        """See LocalDisk."""
        if self._step == "half written":
            path.touch(mode=0o600)
            path.write_bytes(raw[: len(raw) // 2])
            self._reach("half written")
        super().write(path, raw)

    def replace(self, source: Path, target: Path) -> None:
        """See LocalDisk."""
        self._reach("written")
        super().replace(source, target)
        self._reach("replaced")


def grammar_of(turn: int, number: int) -> Grammar:
    """A grammar that no earlier turn had."""
    return Grammar(kind="regex", text=f"{turn}-{number}-" + "x" * (97 * number))


def make_service(config: GrammarConfig, directory: Path, disk: LocalDisk, wake: Callable[[], None]) -> GrammarService:
    """A rank's service whose probe finds everything sound."""
    ours, theirs = socket.socketpair()
    threading.Thread(target=answer_probes, args=(theirs,), daemon=True).start()
    channel: Channel[FromProbe] = Channel(ours, decode_from_probe, send_timeout_s=60, max_pending_bytes=1 << 24)
    store = GrammarStore(directory, config.store, disk)
    service = GrammarService(config, SCOPE, store, channel, Compiler(), wake)
    service.start()
    return service


def answer_probes(sock: socket.socket) -> None:
    """Be the probe process, until this process ends."""
    channel: Channel[ProbeRequest] = Channel(sock, decode_to_probe, send_timeout_s=60, max_pending_bytes=1 << 24)
    while True:
        select.select([channel], [], [])
        for request in channel.receive_nowait():
            channel.send_nowait(ProbeVerdict(number=request.number, state="sound", compile_ns=1, compiled_bytes=1000))


def be_victim(config: GrammarConfig, directory: Path, turn: int, step: str, told: int) -> None:
    """Ask for all grammars of a turn in new publications, for ever; never returns."""

    def report() -> None:
        os.write(told, b"x")

    disk = WaitingDisk(step, report)
    wake = system.eventfd()
    service = make_service(config, directory, disk, lambda: os.eventfd_write(wake, 1))
    os.write(told, b"r")
    number = 0
    while True:
        # First the ones that the survivor will ask for, then ever new ones.
        service.request(grammar_of(turn, number))
        number += 1
        select.select([wake], [], [], 0.02 if number > KEYS else 0)
        service.drain()


def be_survivor(config: GrammarConfig, directory: Path, orders: int, answers: int) -> None:
    """Serve each turn that comes in `orders`; answer with the sources, one line a turn."""
    wake = system.eventfd()
    service = make_service(config, directory, LocalDisk(), lambda: os.eventfd_write(wake, 1))
    with open(orders, encoding="ascii") as lines:
        for line in lines:
            tickets = [service.request(grammar_of(int(line), number)) for number in range(KEYS)]
            deadline = time.monotonic() + SERVE_TIMEOUT_S
            while not all(ticket.is_done for ticket in tickets) and time.monotonic() < deadline:
                select.select([wake], [], [], 0.1)
                service.drain()
            good = [ticket.source for ticket in tickets if isinstance(ticket.outcome, Compiled)]
            os.write(answers, (json.dumps(good) + "\n").encode())


def fork(task: Callable[[], None]) -> int:
    """Run a task in a child that ends with it."""
    sys.stdout.flush()
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    try:
        system.set_parent_death_signal(parent)
        task()
    finally:
        os._exit(1)


def run(kills: int, seed: int, root: Path) -> Report:
    """Kill and look, `kills` times."""
    report = Report()
    steps: Counter[str] = Counter()
    sources: Counter[str] = Counter()
    draw = random.Random(seed)
    begun = time.monotonic()
    config = GrammarConfig(workers=1, store=GrammarStoreConfig(directory=str(root)))
    directory = prepare(config.store, SCOPE)
    orders_read, orders_write = os.pipe()
    answers_read, answers_write = os.pipe()
    survivor = fork(lambda: be_survivor(config, directory, orders_read, answers_write))
    with open(answers_read, encoding="ascii") as answers:
        for turn in range(kills):
            step = STEPS[turn // 2 % len(STEPS)] if turn % 2 else "random"
            kill_once(config, directory, turn, step, draw)
            report.kills += 1
            steps[step] += 1
            os.write(orders_write, f"{turn}\n".encode())
            served = json.loads(answers.readline())
            sources.update(served)
            report.unserved += KEYS - len(served)
            inspect(directory, config, turn, report)
        os.kill(survivor, signal.SIGKILL)
        os.waitpid(survivor, 0)
    prepare(config.store, SCOPE)
    report.temporaries_after_restart = len(list(directory.glob(".*.tmp")))
    report.steps, report.sources = dict(steps), dict(sources)
    report.elapsed_s = round(time.monotonic() - begun, 1)
    return report


def kill_once(config: GrammarConfig, directory: Path, turn: int, step: str, draw: random.Random) -> None:
    """Start a victim, wait until it is where it shall die, and kill it."""
    reading, writing = os.pipe()
    victim = fork(lambda: be_victim(config, directory, turn, step, writing))
    os.close(writing)
    os.read(reading, 1)
    if step == "random":
        time.sleep(draw.random() * 0.03)
    else:
        os.read(reading, 1)
    os.kill(victim, signal.SIGKILL)
    os.waitpid(victim, 0)
    os.close(reading)


def inspect(directory: Path, config: GrammarConfig, turn: int, report: Report) -> None:
    """Look at everything that a kill may have broken."""
    store = GrammarStore(directory, config.store)
    for number in range(KEYS):
        grammar = grammar_of(turn, number)
        # The survivor tells who waits before it publishes; when the lock is free it has done both.
        deadline = time.monotonic() + SERVE_TIMEOUT_S
        while (lock := store.try_lock(digest(grammar, SCOPE))) is None and time.monotonic() < deadline:
            time.sleep(0.001)
        if lock is None:
            report.held_locks += 1
        else:
            lock.release()
        try:
            if store.read(digest(grammar, SCOPE), grammar) is None:
                report.unserved += 1
        except StoreCorrupt:
            report.torn_entries += 1
    sizes = [path.stat().st_size for path in directory.glob("*.entry")]
    report.wrong_ledgers += store.totals() != (sum(sizes), len(sizes))


def main(argv: list[str]) -> int:
    """Print the report; 0 when nothing was torn, wrong, held or unserved."""
    parser = argparse.ArgumentParser(prog="python -m tools.gates store_kill", description="kills while publishing")
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of lines")
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="dsparkd-store-kill-") as name:
        report = run(arguments.kills, arguments.seed, Path(name) / "store")
    if arguments.json:
        print(json.dumps({"ok": report.ok, **asdict(report)}))
    else:
        for key, value in asdict(report).items():
            print(f"{key:26} {value}")
        print("ok" if report.ok else "FAIL")
    return 0 if report.ok else 1
