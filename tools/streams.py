"""Many streaming completions at once against one server, read by one thread."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from dataclasses import dataclass, field
from types import TracebackType

import httpx


@dataclass
class Outcome:
    """What one stream saw. finish: its finish reason. error: an error object's message, or how the connection broke."""

    events: int = 0
    finish: str | None = None
    error: str | None = None
    readable: bool = False  # ended by a finish reason, an error event or an error status, not by a broken connection
    ended_s: float = field(default=0.0)  # time.monotonic()


class Streams:
    """`count` streams of at most max_tokens each; they start on entry, `outcomes` waits for all of them."""

    def __init__(self, base_url: str, count: int, max_tokens: int) -> None:
        self._base_url = base_url
        self._count = count
        self._max_tokens = max_tokens
        self._outcomes = [Outcome() for _ in range(count)]
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)

    def __enter__(self) -> Streams:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._thread.join(60)

    def wait_flowing(self, timeout_s: float = 60) -> None:
        """Wait until every stream has had an event or has ended."""
        deadline = time.monotonic() + timeout_s
        while not all(outcome.events or outcome.ended_s for outcome in self._outcomes):
            if time.monotonic() > deadline:
                raise TimeoutError(f"not every stream had an event within {timeout_s} s")
            time.sleep(0.02)

    def outcomes(self, timeout_s: float = 60) -> list[Outcome]:
        """Wait for the end of all streams."""
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise TimeoutError(f"streams still open after {timeout_s} s")
        return self._outcomes

    async def _run(self) -> None:
        limits = httpx.Limits(max_connections=self._count)
        client = httpx.AsyncClient(base_url=self._base_url, timeout=120, limits=limits)
        async with client, asyncio.TaskGroup() as group:
            for index in range(self._count):
                group.create_task(self._read(client, index))

    async def _read(self, client: httpx.AsyncClient, index: int) -> None:
        outcome = self._outcomes[index]
        body = {
            "model": "nano",
            "prompt": f"stream number {index} says",
            "max_tokens": self._max_tokens,
            "ignore_eos": True,
            "stream": True,
            "seed": index,
        }
        try:
            async with client.stream("POST", "/v1/completions", json=body) as answer:
                if answer.status_code != 200:
                    await answer.aread()
                    outcome.error = answer.json()["error"]["message"]
                    outcome.readable = True
                async for line in answer.aiter_lines():
                    _take_line(outcome, line)
        except httpx.HTTPError as error:
            outcome.error = outcome.error or f"{type(error).__name__}: {error}"
        outcome.ended_s = time.monotonic()


def _take_line(outcome: Outcome, line: str) -> None:
    if not line.startswith("data: ") or line == "data: [DONE]":
        return
    outcome.events += 1
    event = json.loads(line.removeprefix("data: "))
    if "error" in event:
        outcome.error = event["error"]["message"]
        outcome.readable = True
    for choice in event.get("choices", ()):
        if choice.get("finish_reason"):
            outcome.finish = choice["finish_reason"]
            outcome.readable = True
