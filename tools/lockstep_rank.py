"""A rank without a model, for the lock-step gate: the real loop, queue, planner and exchange, and a device of sums.

Its step is a collective: both ranks say what they step, over a socket of their own, and must say the same. The next
token is a pure function of the sequence, so whatever the scheduler does wrong shows as a wrong token.
"""

from __future__ import annotations

import json
import mmap
import os
import socket
import struct
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn

from dsparkd import log, system
from dsparkd.errors import EXIT_FATAL, EXIT_OK, ExchangeError, FatalError, InvariantError
from dsparkd.executor.plan import Plan, PlanRow, RowOutput, StepOutput
from dsparkd.ipc.board import BoardWriter
from dsparkd.ipc.channel import Channel as Line
from dsparkd.messages import decode_to_rank
from dsparkd.metrics import Tally
from dsparkd.native import exchange
from dsparkd.native.exchange import Attachment
from dsparkd.scheduler.account import Account
from dsparkd.scheduler.agreement import Agreement, Channel, Payload
from dsparkd.scheduler.exchange import NativeExchange
from dsparkd.scheduler.loop import Bounds, Lines, Loop, Parts
from dsparkd.scheduler.policy import Limits, Planner, Proposal
from dsparkd.scheduler.queue import RequestQueue
from dsparkd.scheduler.request import Memory
from dsparkd.scheduler.results import Committer

VOCAB, EOS, PAGE_TOKENS = 29, 1, 4
MAX_CONTEXT = 96
STEP_TIMEOUT_S = 60.0
MAX_PENDING_BYTES = 1 << 26
_STEP = struct.Struct("<4q")  # tick, kind, tokens of both ranks
_DELAY = struct.Struct("<d")


def next_token(ids: Sequence[int]) -> int:
    """The id that follows a sequence."""
    return (zlib.crc32(bytes(ids)) >> 8) % VOCAB


@dataclass(frozen=True)
class Ends:
    """What one rank process is given. delay: seconds to lose after a step, once, for each rank."""

    dp_rank: int
    parent: socket.socket
    detokenizer: socket.socket
    peer: socket.socket
    step: socket.socket
    board: mmap.mmap
    memory: int
    kicks: tuple[int, int]
    delay: mmap.mmap
    timeout_s: float
    heartbeat_s: float


class Device:
    """Runs a plan together with the peer. See scheduler.loop.Stepper."""

    def __init__(self, ends: Ends) -> None:
        self._ends = ends
        self._steps = 0
        self._last: tuple[RowOutput, ...] = ()
        ends.step.settimeout(STEP_TIMEOUT_S)

    def launch(self, plan: Plan, counts: tuple[int, int]) -> Callable[[], StepOutput]:
        """See scheduler.loop.Stepper. Raises InvariantError when the peer steps something else, or nothing."""
        self._steps += 1
        own = (self._steps, int(plan.kind), *counts)
        try:
            self._ends.step.send(_STEP.pack(*own))
            packet = self._ends.step.recv(_STEP.size)
        except OSError as error:
            raise InvariantError(f"alone in step {own}: {error}") from error
        if not packet or _STEP.unpack(packet) != own:
            raise InvariantError(f"this rank steps {own}, its peer {_STEP.unpack(packet) if packet else 'has gone'}")
        self._lose_time()
        rows = tuple(map(self._run, plan.rows))
        self._last = tuple(row for row in rows if row.token_ids)
        return lambda: StepOutput(rows)

    def _run(self, row: PlanRow) -> RowOutput:
        ids = row.prompt_ids + row.output_ids
        if row.follows is not None:
            ids += self._last[row.follows].token_ids
        return RowOutput(() if row.sampling is None else (next_token(ids),))

    def _lose_time(self) -> None:
        (seconds,) = _DELAY.unpack_from(self._ends.delay, 8 * self._ends.dp_rank)
        if seconds:
            _DELAY.pack_into(self._ends.delay, 8 * self._ends.dp_rank, 0.0)
            time.sleep(seconds)


class Texts:
    """Id n reads as the n-th letter."""

    def token_bytes(self, token_id: int) -> bytes:
        """See scheduler.results.TokenTexts."""
        return bytes([97 + token_id % 26])

    def is_special(self, token_id: int) -> bool:
        """See scheduler.results.TokenTexts."""
        return token_id == EOS


class Watch:
    """No watch: the driver has the deadlines."""

    def arm(self) -> None:
        """See scheduler.loop.TickWatch."""

    def disarm(self) -> None:
        """See scheduler.loop.TickWatch."""


class RecordingLoop(Loop):
    """A loop that remembers a checksum of all its agreements, so that two ranks' can be compared."""

    digest = 0

    def act(self, proposal: Proposal, rank0: Payload, rank1: Payload) -> Agreement:
        """See scheduler.loop.Loop."""
        agreement = super().act(proposal, rank0, rank1)
        self.digest = zlib.crc32(repr(agreement).encode(), self.digest)
        return agreement


def run_rank(ends: Ends, report: int) -> int:
    """A rank process' whole life; writes what it counted to the descriptor `report` as JSON; returns the exit code."""
    dp_rank, tally = ends.dp_rank, Tally()
    log.configure("rank", dp_rank, "json", "error")  # a line a request would be all that the gate shows
    attachment = Attachment.open(
        ends.memory,
        dp_rank,
        session=1,
        digest=1,
        timeout_s=ends.timeout_s,
        spin_s=20e-6 if system.cpu_share_available() >= 2 else 0.0,
    )
    native = NativeExchange(dp_rank, attachment, (ends.kicks[dp_rank], ends.kicks[1 - dp_rank]), ends.peer)
    loop = build_loop(ends, native, tally)
    told: dict[str, object] = {}
    try:
        loop.run()
        code = EXIT_OK
    except FatalError as error:
        told = {"error": str(error), "code": error.code if isinstance(error, ExchangeError) else type(error).__name__}
        code = EXIT_FATAL
    values, histograms = tally.frame()
    told |= {
        "digest": loop.digest,
        "sequence": native.sequence(Channel.PLAN),
        "tick": loop.records[-1].tick if loop.records else 0,
        "parks": values.get(f"dsparkd_parks_total\0{dp_rank}", 0),
        "unparks": histograms.get(f"dsparkd_unpark_seconds\0{dp_rank}", ()),
        "sleeps": values.get(f"dsparkd_exchange_sleeps_total\0{dp_rank}\0plan", 0),
    }
    with open(report, "w") as file:
        json.dump(told, file)
    native.close()
    return code


def build_loop(ends: Ends, native: NativeExchange, tally: Tally) -> RecordingLoop:
    """A small rank: few rows and pages, so that queues, retractions and chunks all happen."""
    queue = RequestQueue()
    memory = Memory(num_pages=65, num_slots=9, num_snapshots=8, page_tokens=PAGE_TOKENS)
    limits = Limits(chunk_tokens=16, page_tokens=PAGE_TOKENS, snapshot_tokens=16, prompt_logit_tokens=8)
    bounds = Bounds(
        dp_rank=ends.dp_rank,
        queue_items=4096,
        max_context_tokens=MAX_CONTEXT,
        max_frames_per_tick=256,
        max_prefill_streak=4,
        heartbeat_s=ends.heartbeat_s,
        farewell_s=5.0,
        overlap=True,
    )
    return RecordingLoop(
        bounds,
        Lines(
            Line(
                ends.parent,
                decode_to_rank,
                send_timeout_s=STEP_TIMEOUT_S,
                max_pending_bytes=MAX_PENDING_BYTES,
                name="parent",
            ),
            Line(
                ends.detokenizer,
                _refuse,
                send_timeout_s=STEP_TIMEOUT_S,
                max_pending_bytes=MAX_PENDING_BYTES,
                name="detokenizer",
            ),
            native,
            BoardWriter(ends.board, ends.dp_rank).publish,
        ),
        Parts(
            queue,
            memory,
            Planner(queue, memory, limits),
            Committer(queue, memory, Texts(), frozenset({EOS})),
            Device(ends),
            seat=system.Seat(ends.dp_rank, os.sched_getaffinity(0)),
        ),
        Account(ends.dp_rank, tally, time.monotonic_ns),
        Watch(),
        time.monotonic_ns,
    )


def make_region() -> tuple[int, tuple[int, int]]:
    """A fresh region and the events that end parks."""
    memory = system.sealed_memory("dsparkd-lockstep", exchange.region_bytes())
    exchange.init_region(memory, session=1, digest=1)
    return memory, (system.eventfd(), system.eventfd())


def _refuse(frame: bytes) -> NoReturn:
    raise InvariantError(f"the detokenizer sent {len(frame)} bytes")


def lose_time(delay: mmap.mmap, dp_rank: int, seconds: float) -> None:
    """Have a rank lose some seconds after its next step."""
    _DELAY.pack_into(delay, 8 * dp_rank, seconds)
