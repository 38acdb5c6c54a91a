"""Waiting and running requests of one rank. Owned by the tick thread.

Waiting requests start in order of arrival, but those that were put back for want of pages come first: they were
promised progress already. A request whose grammar is not there yet stands apart and holds up nobody.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from dsparkd.errors import InvariantError
from dsparkd.scheduler.request import Request, State


class RequestQueue:
    """Every request between admission and its end, by id."""

    def __init__(self) -> None:
        self._grammar_wait: dict[str, Request] = {}
        self._waiting: dict[str, Request] = {}  # a dict keeps the order of arrival
        self._retracted: dict[str, Request] = {}
        self._running: dict[str, Request] = {}
        self._num_waiting_tokens = 0

    def __len__(self) -> int:
        return self.num_waiting + len(self._running)

    @property
    def num_waiting(self) -> int:
        """Requests that hold no slot."""
        return len(self._grammar_wait) + len(self._waiting) + len(self._retracted)

    @property
    def has_work(self) -> bool:
        """Whether a step could do something for any of them: not for those that wait for their grammar."""
        return bool(self._waiting or self._retracted or self._running)

    @property
    def num_outstanding_tokens(self) -> int:
        """Tokens that are known and not computed: whole sequences that wait, what prefills lack, one a decode row."""
        running = self._running.values()
        return self._num_waiting_tokens + sum(request.num_tokens - request.num_computed for request in running)

    def counts(self) -> dict[State, int]:
        """Requests by state."""
        return {
            State.GRAMMAR_WAIT: len(self._grammar_wait),
            State.WAITING: len(self._waiting) + len(self._retracted),
            State.PREFILL: len(self.running(State.PREFILL)),
            State.DECODE: len(self.running(State.DECODE)),
        }

    def waiting(self) -> Iterator[Request]:
        """Requests that lack a slot alone, in the order in which they may start."""
        yield from sorted(self._retracted.values(), key=lambda request: request.arrival)
        yield from self._waiting.values()

    def running(self, state: State | None = None) -> list[Request]:
        """Requests with a slot, oldest first; only those in `state` if it is given."""
        found = [request for request in self._running.values() if state is None or request.state is state]
        return sorted(found, key=lambda request: request.arrival)

    def all(self) -> list[Request]:
        """Every request, in no order that matters."""
        return [request for table in self._tables() for request in table.values()]

    def find(self, request_id: str) -> Request | None:
        """The live request with exactly this id."""
        for table in self._tables():
            if request_id in table:
                return table[request_id]
        return None

    def _tables(self) -> tuple[dict[str, Request], ...]:
        return (self._running, self._waiting, self._retracted, self._grammar_wait)

    def add(self, requests: Iterable[Request]) -> None:
        """Put new requests at the end. Raises InvariantError for an id that is alive: the parent refuses those."""
        for request in requests:
            if self.find(request.request_id) is not None:
                raise InvariantError(f"request {request.request_id} is already alive on this rank")
            table = self._grammar_wait if request.state is State.GRAMMAR_WAIT else self._waiting
            table[request.request_id] = request
            self._num_waiting_tokens += request.num_tokens

    def has_grammar(self, request: Request) -> None:
        """Put a request whose grammar has come behind those that wait for a slot."""
        del self._grammar_wait[request.request_id]
        request.move_to(State.WAITING)
        self._waiting[request.request_id] = request

    def start(self, request: Request) -> None:
        """Move a request that has just been given its slot."""
        self._take(request)
        self._running[request.request_id] = request

    def put_back(self, request: Request) -> None:
        """Move a request that has just lost its slot to the front of those that wait."""
        self._take(request)
        request.move_to(State.WAITING)
        request.num_retractions += 1
        self._retracted[request.request_id] = request
        self._num_waiting_tokens += request.num_tokens

    def remove(self, request: Request) -> None:
        """Forget a request that has ended."""
        self._take(request)
        request.move_to(State.FINISHED)

    def _take(self, request: Request) -> None:
        for table in self._tables():
            if table.pop(request.request_id, None) is not None:
                if table is not self._running:
                    self._num_waiting_tokens -= request.num_tokens
                return
        raise InvariantError(f"request {request.request_id} is not in the queue")
