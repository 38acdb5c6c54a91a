"""Clients of the chaos run: each sends a job whose right answer is known, and says how it ended."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

# What a client may see: the whole answer; an end that the server named (finish reason abort, error event); a status
# with an error object; nobody at the port, or a reset before the first byte; its own leaving. The rest are violations.
Verdict = Literal["finished", "ended", "refused", "unreachable", "left", "wrong", "broken", "hung", "unreadable"]
VIOLATIONS: frozenset[Verdict] = frozenset(("wrong", "broken", "hung", "unreadable"))

RETRY_S = 0.25
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)  # SO_LINGER with no time: close sends RST instead of FIN


@dataclass(frozen=True)
class Job:
    """A body of /v1/completions and the texts of its choices, when nothing disturbs it."""

    name: str
    body: Mapping[str, object]
    texts: tuple[str, ...]


@dataclass(frozen=True)
class Outcome:
    """How one request ended; times are time.monotonic()."""

    job: str
    verdict: Verdict
    detail: str
    begun_s: float
    ended_s: float


@dataclass
class Answer:
    """What has been read of one response."""

    status: int = 0
    texts: dict[int, str] = field(default_factory=dict)
    reasons: dict[int, str] = field(default_factory=dict)
    error: str = ""
    complete: bool = False  # it ended as the protocol says, not by a connection that broke off

    def take(self, payload: Mapping[str, object]) -> None:
        """Take a response body or one event of a stream."""
        error = payload.get("error")
        if isinstance(error, dict):
            self.error = str(error.get("message"))
        choices = payload.get("choices")
        for choice in choices if isinstance(choices, list) else []:
            index = choice["index"]
            self.texts[index] = self.texts.get(index, "") + choice.get("text", "")
            if choice.get("finish_reason"):
                self.reasons[index] = choice["finish_reason"]


def judge(job: Job, answer: Answer) -> tuple[Verdict, str]:
    """Compare an answer with what is known of its job. A part of an answer must be the beginning of the right one."""
    for index, text in answer.texts.items():
        if not job.texts[index].startswith(text):
            return "wrong", f"choice {index}: {text!r}, expected {job.texts[index]!r}"
    if not answer.status:
        return "unreachable", answer.error
    if answer.status != 200:
        return ("refused", answer.error) if answer.error else ("unreadable", f"status {answer.status} without an error")
    if answer.error:
        return "ended", answer.error
    if not answer.complete:
        return "broken", f"after {sum(map(len, answer.texts.values()))} characters"
    for index, text in enumerate(job.texts):
        reason = answer.reasons.get(index)
        if reason == "abort":
            continue
        if reason not in ("length", "stop") or answer.texts.get(index) != text:
            return "wrong", f"choice {index} ended by {reason} with {answer.texts.get(index)!r}, expected {text!r}"
    return ("ended", "abort") if "abort" in answer.reasons.values() else ("finished", "")


async def ask(
    port: int, body: Mapping[str, object], answer: Answer, leave_after: int | None = None, reset: bool = False
) -> bool:
    """Send one request and read its answer. leave_after: events after which the client leaves; True if it did.

    reset: whoever leaves before the end does so by RST, not by FIN.

    Raises OSError where the connection breaks; `answer` holds what came before.
    """
    text = json.dumps(body).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        head = "POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Connection: close\r\nContent-Length: {len(text)}\r\n\r\n".encode() + text)
        await writer.drain()
        line = await reader.readline()
        if not line:
            raise ConnectionResetError("closed before the first byte")
        answer.status = int(line.split()[1])
        length = None
        while (line := await reader.readline()) not in (b"\r\n", b""):
            if line.lower().startswith(b"content-length:"):
                length = int(line.split(b":")[1])
        if length is not None:
            answer.take(json.loads(await reader.readexactly(length)))
            answer.complete = True
            return False
        return await _read_events(reader, writer, answer, leave_after)
    except asyncio.IncompleteReadError as error:
        raise ConnectionResetError("closed inside the body") from error
    finally:
        if reset and not answer.complete:
            _reset_on_close(writer)
        writer.close()


async def _read_events(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, answer: Answer, leave_after: int | None
) -> bool:
    """Read a stream's events; the frames of chunked transfer lie on lines of their own."""
    events = 0
    while line := await reader.readline():
        if line.startswith(b"data: [DONE]"):
            answer.complete = True
        elif line.startswith(b"data: "):
            answer.take(json.loads(line[6:]))
            events += 1
            if events == leave_after:
                return True
    return False


class Crowd:
    """Clients in a thread of their own that ask, one job after another, until they are told to stop.

    port: of 127.0.0.1. Every `leaver`-th client leaves in the middle of its streams, by FIN and by RST in turns.
    """

    def __init__(self, port: int, jobs: list[Job], num_clients: int, seed: int, hung_s: float) -> None:
        self._port = port
        self._jobs = jobs
        self._num_clients = num_clients
        self._seed = seed
        self._hung_s = hung_s
        self._outcomes: list[Outcome] = []
        self._taken = 0
        self._loop = asyncio.new_event_loop()
        self._may_ask = asyncio.Event()
        self._stopping = False
        self._busy = 0
        self._open: set[asyncio.Task[bool]] = set()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        """Begin to ask."""
        self._thread.start()
        self.resume()

    def resume(self) -> None:
        """Go on after `pause`."""
        self._loop.call_soon_threadsafe(self._may_ask.set)

    def pause(self, timeout_s: float) -> bool:
        """Ask nothing new; True when everything asked before has ended."""
        self._loop.call_soon_threadsafe(self._may_ask.clear)
        deadline = time.monotonic() + timeout_s
        time.sleep(0.1)
        while self._busy and time.monotonic() < deadline:
            time.sleep(0.05)
        return not self._busy

    def cut(self) -> None:
        """Have every client leave at once, half of them by RST."""
        self._loop.call_soon_threadsafe(self._cut)

    def stop(self) -> None:
        """End all clients."""
        self._stopping = True
        self.resume()
        self.cut()
        self._thread.join(self._hung_s + 10)

    def take_outcomes(self) -> list[Outcome]:
        """Return what ended since the last call."""
        taken = self._outcomes[self._taken :]
        self._taken += len(taken)
        return taken

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._all())
        finally:
            self._loop.close()

    async def _all(self) -> None:
        async with asyncio.TaskGroup() as group:
            for number in range(self._num_clients):
                group.create_task(self._client(number))
        await asyncio.sleep(0.1)  # until the last connections have closed

    def _cut(self) -> None:
        for task in list(self._open):
            task.cancel()

    async def _client(self, number: int) -> None:
        draw = random.Random(self._seed * 1000 + number)
        while True:
            await self._may_ask.wait()
            if self._stopping:
                return
            job = draw.choice(self._jobs)
            leave_after = draw.randrange(1, 6) if number % 4 == 3 else None
            self._busy += 1
            try:
                reset = draw.random() < 0.5
                outcome = await self._one(job, leave_after if job.body.get("stream") else None, reset)
            finally:
                self._busy -= 1
            self._outcomes.append(outcome)
            if outcome.verdict in ("unreachable", "refused"):
                await asyncio.sleep(RETRY_S)

    async def _one(self, job: Job, leave_after: int | None, reset: bool) -> Outcome:
        begun_s = time.monotonic()
        answer = Answer()
        task = asyncio.ensure_future(ask(self._port, job.body, answer, leave_after, reset))
        self._open.add(task)
        await asyncio.wait({task}, timeout=self._hung_s)
        self._open.discard(task)
        verdict: Verdict | None = None
        if not task.done():
            verdict = "hung"
            task.cancel()
            await asyncio.wait({task})
        elif task.cancelled():
            verdict = "left"
        elif isinstance(failure := task.exception(), OSError | ValueError):
            answer.error = answer.error or ("" if answer.status else f"{type(failure).__name__}: {failure}")
        elif task.result():  # raises what is a bug of this program
            verdict = "left"
        judged, detail = judge(job, answer)
        # Who left, or waits in vain, may still have seen something wrong.
        if verdict is None or judged == "wrong":
            verdict = judged
        elif verdict == "hung":
            detail = f"no end within {self._hung_s:g} s; {len(answer.texts)} choices had text"
        return Outcome(job.name, verdict, detail, begun_s, time.monotonic())


def count(outcomes: list[Outcome]) -> dict[str, int]:
    """Outcomes by verdict."""
    return dict(sorted(Counter(outcome.verdict for outcome in outcomes).items()))


def _reset_on_close(writer: asyncio.StreamWriter) -> None:
    """Have the writer's close send RST."""
    sock = writer.get_extra_info("socket")
    if sock is not None:
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
