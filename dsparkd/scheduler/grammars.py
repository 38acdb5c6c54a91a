"""Requests that wait for their grammar, and the service that brings it. Owned by the tick thread; never waits."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, Protocol

from dsparkd.scheduler.request import Request

if TYPE_CHECKING:
    from dsparkd.grammar.cache import GrammarCache, Ticket
    from dsparkd.grammar.service import Event
    from dsparkd.messages import Grammar


class Service(Protocol):
    """dsparkd.grammar.service.GrammarService, or a test's."""

    def request(self, grammar: Grammar) -> Ticket: ...
    def cancel(self, ticket: Ticket) -> None: ...
    def condemn(self, grammar: Grammar) -> None: ...
    def drain(self) -> list[Ticket]: ...
    def next_deadline_ns(self) -> int | None: ...
    def take_events(self) -> list[Event]: ...
    @property
    def cache(self) -> GrammarCache: ...


class GrammarDesk:
    """wake: the event that the service raises when a ticket is done, or when grammars cannot be had any more."""

    def __init__(self, service: Service, wake: int) -> None:
        self.service = service
        self._wake = wake
        self._requests: dict[Ticket, Request] = {}
        self._tickets: dict[str, Ticket] = {}  # by request id

    def ask(self, request: Request, grammar: Grammar) -> Ticket:
        """Ask for a request's grammar. A ticket that waits comes out of `settled` later; any other is done."""
        ticket = self.service.request(grammar)
        if ticket.waits:
            self._requests[ticket] = request
            self._tickets[request.request_id] = ticket
        return ticket

    def settled(self) -> list[tuple[Request, Ticket]]:
        """Requests whose grammar, or the reason why there is none, has come. Raises FatalError."""
        done = [(self._requests.pop(ticket), ticket) for ticket in self.service.drain()]
        for request, _ in done:
            del self._tickets[request.request_id]
        return done

    def cancel(self, request: Request) -> None:
        """The request has ended before its grammar came."""
        ticket = self._tickets.pop(request.request_id)
        del self._requests[ticket]
        self.service.cancel(ticket)

    def condemn(self, grammar: Grammar) -> None:
        """A step of this grammar had to be given up: the next request with it is refused, for a while."""
        self.service.condemn(grammar)

    def fileno(self) -> int:
        """Readable when `settled` must be called."""
        return self._wake

    def clear(self) -> None:
        """Take back the event before looking at what it said."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)
