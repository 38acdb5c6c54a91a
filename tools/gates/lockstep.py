"""Gate `lockstep`: two real rank processes stay in step through random work, aborts, parks, stops and delays.

    python -m tools.gates lockstep [--ticks 100000] [--wakes 10000] [--one-sided-s 600] [--exchanges 10000000]
                                   [--seed 1] [--json]

random work: short lives of both ranks, each ended by Shutdown given to them up to five ticks apart, busy, idle or
parked; both leave after the same exchange, with the same agreements, and every answer is the one that its prompt has.
wakes: messages to one parked rank, the other, or both at once. one side: all work on rank 0 for minutes. delay: one
rank comes the exchange's time-out minus, then plus, a second late. C: exchange.c alone, spinning and not, meanwhile.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import mmap
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

from dsparkd import metrics
from dsparkd.errors import EXIT_FATAL, EXIT_OK, PeerError
from dsparkd.ipc.board import BOARD_BYTES, BoardReader, prepare_board
from dsparkd.ipc.channel import Channel
from dsparkd.messages import (
    Abort,
    Farewell,
    FromRank,
    LoadSnapshot,
    RoutedBatch,
    SamplingParams,
    Shutdown,
    ToDetokenizer,
    TokenDeltas,
    TokenizedRequest,
    decode_from_rank,
    decode_to_detokenizer,
)
from tools.harness import ROOT
from tools.lockstep_rank import EOS, MAX_CONTEXT, VOCAB, Ends, lose_time, make_region, next_token, run_rank

TICKS_A_LIFE = 150
HANG_S = 30.0
TIMEOUT_S = 10.0  # of the exchange, where no delay is meant
DELAY_TIMEOUT_S = 3.0
DRIVER = ROOT / "tests" / "native" / "exchange_driver.c"


@dataclass
class Line:
    """One part's result: what was counted, and what was wrong."""

    name: str
    counts: dict[str, float] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def add(self, name: str, count: float) -> None:
        """Count."""
        self.counts[name] = self.counts.get(name, 0) + count


class Life:
    """Both rank processes from fork to exit, and the driver's ends of their channels."""

    def __init__(self, timeout_s: float = TIMEOUT_S) -> None:
        parents, texts = [socket.socketpair() for _ in range(2)], [socket.socketpair() for _ in range(2)]
        peers, steps = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(2)]
        memory, kicks = make_region()
        board = mmap.mmap(-1, BOARD_BYTES)
        prepare_board(board)
        self._board = BoardReader(board)
        self.delay = mmap.mmap(-1, 16)
        self.reports: list[int] = []
        self.pids: list[int] = []
        mine = [*(pair[0] for pair in parents), *(pair[0] for pair in texts)]
        for rank in (0, 1):
            ends = Ends(
                rank,
                parents[rank][1],
                texts[rank][1],
                peers[rank],
                steps[rank],
                board,
                memory,
                kicks,
                self.delay,
                timeout_s,
                heartbeat_s=0.5,
            )
            others = [*mine, parents[1 - rank][1], texts[1 - rank][1], peers[1 - rank], steps[1 - rank]]
            self._fork(ends, others)
        for sock in (*(pair[1] for pair in parents), *(pair[1] for pair in texts), *peers, *steps):
            sock.close()
        for number in (memory, *kicks):
            os.close(number)
        self.parents: list[Channel[FromRank]] = [
            Channel(pair[0], decode_from_rank, send_timeout_s=HANG_S, max_pending_bytes=1 << 26) for pair in parents
        ]
        self.texts: list[Channel[ToDetokenizer]] = [
            Channel(pair[0], decode_to_detokenizer, send_timeout_s=HANG_S, max_pending_bytes=1 << 26) for pair in texts
        ]
        self.frames = [0, 0]
        self.requests: dict[str, TokenizedRequest] = {}
        self.outputs: dict[str, list[int]] = {}
        self.ends: dict[str, str] = {}
        self.farewells = 0

    def _fork(self, ends: Ends, others: list[socket.socket]) -> None:
        read_end, write_end = os.pipe()
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                for sock in others:
                    sock.close()
                os.close(read_end)
                cores = sorted(os.sched_getaffinity(0))
                os.sched_setaffinity(0, {cores[ends.dp_rank % len(cores)]})
                code = run_rank(ends, write_end)
            finally:
                os._exit(code)
        os.close(write_end)
        self.pids.append(pid)
        self.reports.append(read_end)

    def submit(self, dp_rank: int, requests: list[TokenizedRequest]) -> None:
        """Send one batch."""
        self.frames[dp_rank] += 1
        self.requests |= {request.request_id: request for request in requests}
        self.parents[dp_rank].send_nowait(RoutedBatch(dp_rank, self.frames[dp_rank], tuple(requests)))

    def collect(self) -> bool:
        """Read what has come; False when all channels are closed and read to their end.

        A closed channel is the process' end and shows elsewhere; what its other channel still holds counts.
        """
        some_open = False
        for rank in (0, 1):
            with contextlib.suppress(PeerError):
                self.parents[rank].flush_nowait()
            with contextlib.suppress(PeerError):
                self.parents[rank].receive_nowait()
                some_open = True
            with contextlib.suppress(PeerError):
                for text in self.texts[rank].receive_nowait():
                    self._take(text)
                some_open = True
        return some_open

    def _take(self, message: ToDetokenizer) -> None:
        if isinstance(message, Farewell):
            self.farewells += 1
        elif isinstance(message, TokenDeltas):
            for delta in message.deltas:
                self.outputs.setdefault(delta.request_id, []).extend(delta.token_ids)
                if delta.finish is not None:
                    self.ends[delta.request_id] = delta.finish.reason

    def wait_for(self, condition: Callable[[], bool], seconds: float = HANG_S) -> bool:
        """Collect until it holds; False when it did not in time."""
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.0002)
            self.collect()
        return True

    def _snapshots(self) -> list[LoadSnapshot | None]:
        return [self._board.read(rank) for rank in (0, 1)]

    def ticks(self) -> int:
        """The later rank's tick, as far as it has said."""
        return max(snapshot.tick if snapshot is not None else 0 for snapshot in self._snapshots())

    def outstanding(self) -> int:
        """Requests without an end."""
        return len(self.requests) - len(self.ends)

    def has_fewer(self, count: int) -> bool:
        """Whether fewer requests than that have no end yet."""
        return self.outstanding() < count

    def have_ended(self, names: list[str]) -> bool:
        """Whether these requests have ended."""
        return all(name in self.ends for name in names)

    def parked(self) -> bool:
        """Whether both ranks have said that they sleep."""
        return all(snapshot is not None and snapshot.parked for snapshot in self._snapshots())

    def stop(self, first: int, gap_s: float) -> None:
        """Give Shutdown to one rank, and a little later to the other one, which may have left by then."""
        self.parents[first].send_nowait(Shutdown())
        if gap_s:
            time.sleep(gap_s)
        try:
            self.parents[1 - first].send_nowait(Shutdown())
        except PeerError:
            return

    def finish(self, line: Line, expected: int = EXIT_OK) -> list[dict[str, object]]:
        """Wait for both ends and compare them; returns both reports."""
        codes: list[int | None] = [None, None]

        def ended() -> bool:
            for rank, pid in enumerate(self.pids):
                if codes[rank] is None:
                    done, status = os.waitpid(pid, os.WNOHANG)
                    codes[rank] = os.waitstatus_to_exitcode(status) if done else None
            return None not in codes

        if not self.wait_for(ended):
            line.faults.append(f"hang: exit codes {codes}, at tick {self.ticks()}")
            for rank, pid in enumerate(self.pids):
                if codes[rank] is None:
                    os.kill(pid, 9)
                    os.waitpid(pid, 0)
        while self.collect():
            pass
        reports = []
        for number in self.reports:
            with open(number) as file:
                text = file.read()
            reports.append(json.loads(text) if text else {})
        for parent in self.parents:
            parent.close()
        for texts in self.texts:
            texts.close()
        self.delay.close()
        if codes != [expected, expected]:
            line.faults.append(f"exit codes {codes}: {[report.get('error') for report in reports]}")
        return reports

    def check_answers(self, line: Line) -> None:
        """Every request that reached its rank has an end, and each token is the one that its prompt has."""
        line.add("requests", len(self.requests))
        for request_id, output in self.outputs.items():
            request = self.requests[request_id]
            ids = list(request.prompt_ids)
            for token in output:
                if token != next_token(ids):
                    line.faults.append(f"{request_id}: a wrong token after {len(ids)} ids")
                    break
                ids.append(token)
            end = self.ends.get(request_id)
            if end is None:
                line.faults.append(f"{request_id} has no end")
            elif end == "length" and len(output) != min(
                request.sampling.max_tokens, MAX_CONTEXT - len(request.prompt_ids)
            ):
                line.faults.append(f"{request_id} ended after {len(output)} tokens")


def make_request(dice: random.Random, name: str, max_tokens: int) -> TokenizedRequest:
    """A prompt of its own."""
    sampling = SamplingParams(max_tokens=dice.randint(1, max_tokens), seed=1, ignore_eos=dice.random() < 0.5)
    prompt = tuple(dice.choice([token for token in range(VOCAB) if token != EOS]) for _ in range(dice.randint(1, 40)))
    return TokenizedRequest(
        request_id=name,
        prompt_ids=prompt,
        sampling=sampling,
        received_ns=1,
        encoded_ns=2,
        tokenized_ns=3,
        dispatched_ns=time.monotonic_ns(),
    )


def compare(line: Line, reports: list[dict[str, object]]) -> None:
    """Both ranks made the same agreements and left after the same exchange."""
    for name in ("sequence", "tick", "digest"):
        values = [report.get(name) for report in reports]
        if values[0] != values[1] or values[0] is None:
            line.faults.append(f"{name} differs: {values}")
    for name in ("parks", "sleeps", "tick"):
        line.add({"tick": "ticks"}.get(name, name), max(float(str(report.get(name, 0))) for report in reports))


def random_work(line: Line, dice: random.Random, ticks: int) -> None:
    """Lives of TICKS_A_LIFE ticks or so, each with work, aborts and pauses, and an end that comes at any moment."""
    while line.counts.get("ticks", 0) < ticks and not line.faults:
        life = Life()
        number, target = 0, dice.randint(1, 2 * TICKS_A_LIFE)
        deadline = time.monotonic() + HANG_S
        while life.ticks() < target and time.monotonic() < deadline:
            for rank in dice.choice([(0,), (1,), (0, 1), ()]):
                batch = [make_request(dice, f"r{number}-{item}", 40) for item in range(dice.randint(1, 6))]
                number += 1
                life.submit(rank, batch)
                for request in dice.sample(batch, dice.randint(0, len(batch)) if dice.random() < 0.3 else 0):
                    life.parents[rank].send_nowait(Abort(request.request_id))
            if dice.random() < 0.1:
                life.wait_for(life.parked)
            elif dice.random() < 0.5:
                time.sleep(dice.random() * 0.003)
            life.collect()
            if life.outstanding() > 200:
                life.wait_for(partial(life.has_fewer, 50))
        if time.monotonic() >= deadline:
            line.faults.append(f"hang at tick {life.ticks()} of {target}")
        life.stop(dice.randint(0, 1), dice.choice([0.0, dice.random() * 0.001]))
        reports = life.finish(line)
        if not line.faults:
            compare(line, reports)
        life.check_answers(line)
        line.add("stops", 1)


def wakes(line: Line, dice: random.Random, count: int) -> None:
    """One life that parks again and again, woken by a message to one rank, the other, or both at about once."""
    life = Life()
    for number in range(count):
        if dice.random() < 0.7 and not life.wait_for(life.parked):
            line.faults.append(f"not parked before wake {number}")
            break
        names = []
        for rank in dice.choice([(0,), (1,), (0, 1), (1, 0)]):
            name = f"w{number}-{rank}"
            names.append(name)
            life.submit(rank, [make_request(dice, name, 2)])
            if dice.random() < 0.3:
                time.sleep(dice.random() * 0.0003)
        if not life.wait_for(partial(life.have_ended, names)):
            line.faults.append(f"wake {number} was lost")
            break
    line.add("wakes", number + 1)
    life.stop(dice.randint(0, 1), 0.0)
    reports = life.finish(line)
    compare(line, reports)
    add_wake_times(line, reports)
    life.check_answers(line)


def add_wake_times(line: Line, reports: list[dict[str, object]]) -> None:
    """Add what it took from a waking message to the first step: a figure, which decides nothing."""
    told = [report.get("unparks") for report in reports]
    counts = [sum(column) for column in zip(*(each for each in told if isinstance(each, list) and each), strict=True)]
    if not counts:
        return
    *buckets, _seconds = counts
    reached, all_wakes = 0.0, sum(buckets)
    for edge, count in zip((*metrics.UNPARK_SECONDS.buckets, float("inf")), buckets, strict=True):
        reached += count
        for name, share in (("wake_p50_ms", 0.5), ("wake_p99_ms", 0.99)):
            if reached >= share * all_wakes:
                line.counts.setdefault(name, 1e3 * edge)


def one_side(line: Line, dice: random.Random, seconds: float) -> None:
    """All work goes to rank 0; rank 1 takes part idle, and after a while both park, and go on."""
    life, number = Life(), 0
    until = time.monotonic() + seconds
    while time.monotonic() < until and not line.faults:
        life.submit(0, [make_request(dice, f"o{number}-{item}", 50) for item in range(8)])
        number += 1
        if not life.wait_for(partial(life.has_fewer, 16)):
            line.faults.append(f"hang at tick {life.ticks()}")
        if dice.random() < 0.01 and not life.wait_for(life.parked):
            line.faults.append("did not park")
    life.stop(0, 0.0)
    compare(line, life.finish(line))
    life.check_answers(line)


def delay(line: Line, dice: random.Random, extra_s: float) -> None:
    """Rank 1 comes late by the exchange's time-out plus extra_s, in the middle of both ranks' work."""
    life = Life(timeout_s=DELAY_TIMEOUT_S)
    for rank in (0, 1):
        life.submit(rank, [make_request(dice, f"d{rank}-{item}", 50) for item in range(8)])
    life.wait_for(lambda: life.ticks() > 10)
    life.submit(0, [make_request(dice, f"e{item}", 50) for item in range(8)])
    lose_time(life.delay, 1, DELAY_TIMEOUT_S + extra_s)
    begun = time.monotonic()
    if extra_s < 0:
        if not life.wait_for(partial(life.has_fewer, 1)):
            line.faults.append("work was lost")
        line.add("waited_s", time.monotonic() - begun)
        life.stop(0, 0.0)
        compare(line, life.finish(line))
        life.check_answers(line)
        return
    reports = life.finish(line, EXIT_FATAL)
    line.add("failed_after_s", time.monotonic() - begun)
    codes = [report.get("code") for report in reports]
    # Rank 1 was in a step, and hears of it in its next exchange, or from the end of rank 0's process.
    if codes[0] != "TIMEOUT" or codes[1] not in ("PEER_ERROR", "PeerError"):
        line.faults.append(f"codes {codes}: {[report.get('error') for report in reports]}")


class Driver:
    """exchange.c alone between two processes, in the background: words are functions of rank, sequence and place."""

    def __init__(self, directory: Path, count: int, spin_ns: int) -> None:
        target = directory / f"driver-{spin_ns}"
        include = f"-I{ROOT / 'dsparkd' / 'native'}"
        subprocess.run(["cc", "-std=c11", "-O2", include, str(DRIVER), "-o", str(target), "-lpthread"], check=True)
        self._count = count
        self._process = subprocess.Popen(
            [str(target), "processes", str(count), str(spin_ns)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def finish(self, line: Line, _dice: random.Random) -> None:
        """Wait for its end."""
        told, errors = self._process.communicate()
        if self._process.returncode != 0:
            line.faults.append(errors[:300])
        else:
            line.counts |= {"exchanges": self._count, "sleeps": int(told.split()[0])}


def main(argv: list[str]) -> int:
    """Run the parts and print a table; 0 when no rank was ever out of step."""
    parser = argparse.ArgumentParser(prog="python -m tools.gates lockstep", description="two ranks in step")
    parser.add_argument("--ticks", type=int, default=100_000, help="ticks of random work")
    parser.add_argument("--wakes", type=int, default=10_000, help="wakes of a parked pair")
    parser.add_argument("--one-sided-s", type=float, default=600.0, help="seconds of work on one rank alone")
    parser.add_argument("--exchanges", type=int, default=10_000_000, help="exchanges of C alone; a tenth without spin")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    arguments = parser.parse_args(argv)
    begun = time.monotonic()
    lines = play_parts(arguments)
    ok = not any(line.faults for line in lines)
    elapsed_s = time.monotonic() - begun
    if arguments.json:
        print(json.dumps({"ok": ok, "elapsed_s": elapsed_s, "parts": [asdict(line) for line in lines]}))
    else:
        print(f"{'ok' if ok else 'FAIL'}: {len(lines)} parts, {elapsed_s:.0f} s")
    return 0 if ok else 1


def play_parts(arguments: argparse.Namespace) -> list[Line]:
    """Every part in turn; C alone runs beside the long one."""
    lines = []

    def play(name: str, part: Callable[[Line, random.Random], None]) -> None:
        line, begun = Line(name), time.monotonic()
        part(line, random.Random(arguments.seed))
        line.seconds = time.monotonic() - begun
        lines.append(line)
        if not arguments.json:
            print(render(line), flush=True)

    play("random work", lambda line, dice: random_work(line, dice, arguments.ticks))
    play("wakes", lambda line, dice: wakes(line, dice, arguments.wakes))
    play("late, within the time-out", lambda line, dice: delay(line, dice, -1.0))
    play("late, beyond the time-out", lambda line, dice: delay(line, dice, 1.0))
    with tempfile.TemporaryDirectory() as name:
        spinning = Driver(Path(name), arguments.exchanges, 20_000)
        sleeping = Driver(Path(name), arguments.exchanges // 10, 0)
        play("work on one side", lambda line, dice: one_side(line, dice, arguments.one_sided_s))
        play("C, spinning", spinning.finish)
        play("C, sleeping", sleeping.finish)
    return lines


def render(line: Line) -> str:
    """One row of the table."""
    counts = ", ".join(f"{value:g} {name}" for name, value in line.counts.items())
    state = "FAIL" if line.faults else "ok"
    return f"{state:<5}{line.name:<27}{line.seconds:7.1f} s  {'; '.join([counts, *line.faults[:3]])}"
