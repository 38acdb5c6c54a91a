"""What is wrong with hypercorn's connections, mended: waits for clients that have left, ends of those that have not.

All of it reaches into hypercorn, so pyproject.toml names the one series that it was written for.
"""

from __future__ import annotations

import contextlib

import h2.events
import h2.exceptions
import h11
import hypercorn.protocol
from hypercorn.events import Closed, Event, Updated
from hypercorn.protocol.h2 import H2Protocol
from hypercorn.protocol.h11 import H11Protocol


def mend_connections() -> None:
    """Have hypercorn use the connections below; once per process, before it serves."""
    hypercorn.protocol.H11Protocol = Connection  # type: ignore[attr-defined]
    hypercorn.protocol.H2Protocol = SharedConnection  # type: ignore[attr-defined]


class _Requests(h11.Connection):
    """Reads a client's requests; none of a client that has left."""

    has_ended = False

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        """See h11.Connection."""
        return h11.NEED_DATA if self.has_ended else super().next_event()


class Connection(H11Protocol):
    """One client's connection, in HTTP/1.1.

    While a request is answered, hypercorn lets the task that reads wait for the answer's end if another request has
    come behind it. When the write of that answer finds that the client has left, nobody tells this task: it waited for
    ever, and a stop waited for it. Nor is the wait for the next request told when the client has closed.
    """

    async def initiate(self) -> None:
        """See H11Protocol."""
        self.connection = _Requests(h11.SERVER, max_incomplete_event_size=self.config.h11_max_incomplete_size)

    async def handle(self, event: Event) -> None:
        """See H11Protocol."""
        await super().handle(event)
        if not isinstance(event, Closed):
            return
        await self.send(Updated(idle=False))
        if isinstance(self.connection, _Requests):
            self.connection.has_ended = True
            await self.can_read.set()


class SharedConnection(H2Protocol):
    """A connection of many requests at once, in HTTP/2: a proxy's brings those of all its clients.

    Of a request that is answered before its body is there, the rest of the body still comes. hypercorn looked for a
    stream that it had forgotten, and the whole connection ended. HTTP/2 has no other word for "send no more" that
    clients understand, so the rest is read and dropped.
    """

    async def handle(self, event: Event) -> None:
        """See Connection."""
        await super().handle(event)
        if isinstance(event, Closed):
            await self.send(Updated(idle=False))

    async def _handle_events(self, events: list[h2.events.Event]) -> None:
        for event in events:
            if isinstance(event, h2.events.DataReceived) and event.stream_id not in self.streams:
                with contextlib.suppress(h2.exceptions.ProtocolError):  # the connection has ended meanwhile
                    self.connection.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
                await self._flush()
            else:
                await super()._handle_events([event])
