"""What hypercorn's HTTP/1.1 connections lack: an end when the client leaves behind a request that waits its turn."""

from __future__ import annotations

import h11
import hypercorn.protocol
from hypercorn.events import Closed, Event
from hypercorn.protocol.h11 import H11Protocol


def end_pipelined_connections() -> None:
    """Have hypercorn use the connection below; once per process, before it serves."""
    hypercorn.protocol.H11Protocol = Connection  # type: ignore[attr-defined]


class _Requests(h11.Connection):
    """Reads a client's requests; none of a client that has left."""

    has_ended = False

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        """See h11.Connection."""
        return h11.NEED_DATA if self.has_ended else super().next_event()


class Connection(H11Protocol):
    """One client's connection.

    While a request is answered, hypercorn lets the task that reads wait for the answer's end if another request has
    come behind it. When the write of that answer finds that the client has left, nobody tells this task: it waited for
    ever, and a stop waited for it.
    """

    async def initiate(self) -> None:
        """See H11Protocol."""
        self.connection = _Requests(h11.SERVER, max_incomplete_event_size=self.config.h11_max_incomplete_size)

    async def handle(self, event: Event) -> None:
        """See H11Protocol."""
        await super().handle(event)
        if isinstance(event, Closed) and isinstance(self.connection, _Requests):
            self.connection.has_ended = True
            await self.can_read.set()
