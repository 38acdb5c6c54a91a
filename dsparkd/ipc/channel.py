"""Length-framed messages on a stream socket; end-of-file is the peer's death.

A frame is its body's length (u32, little-endian) and the body (msgpack). `Channel` never blocks and serves the ranks
and the detokenizer, `AsyncChannel` is the same thing behind the parent's event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
import struct
import time
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

import msgspec

from dsparkd.errors import InvariantError, PeerError
from dsparkd.messages import encode

MAX_FRAME_BYTES = 256 << 20
_HEADER = struct.Struct("<I")
_READ_BYTES = 1 << 18  # the default size of a Unix socket's buffer: one call usually empties it
_VIEWS_PER_SEND = 64
_LATE_S = 0.001  # beyond a deadline, so that looking at the clock again finds it passed

M = TypeVar("M")


class Channel(Generic[M]):
    """One end of a socketpair, owned by one thread; no call blocks.

    send_timeout_s: a peer that takes nothing for longer than this, while something waits for it, is stuck. One that
    takes a large frame piece by piece, between long ticks, is not.
    max_pending_bytes: the bound of what may wait; beyond it the peer is stuck, too.
    name: what error messages call the peer. clock: CLOCK_MONOTONIC nanoseconds.
    """

    def __init__(
        self,
        sock: socket.socket,
        decode: Callable[[bytes], M],
        *,
        send_timeout_s: float,
        max_pending_bytes: int,
        name: str = "peer",
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._decode = decode
        self._send_timeout_s = send_timeout_s
        self._max_pending_bytes = max_pending_bytes
        self.name = name
        self._clock = clock
        self._outgoing: deque[memoryview] = deque()  # bytes not yet written
        self._progress_ns = 0  # when the peer last took something, or had taken everything
        self._pending_bytes = 0
        self._incoming = bytearray()
        self._frames: deque[bytes] = deque()
        self._num_received = 0
        self._ended = False

    def fileno(self) -> int:
        """Descriptor to poll for reading, and for writing while `wants_write`."""
        return self._sock.fileno()

    @property
    def wants_write(self) -> bool:
        """Whether bytes wait for room in the socket."""
        return bool(self._outgoing)

    @property
    def has_frames(self) -> bool:
        """Whether whole frames wait in memory, so that polling the socket would sleep past them."""
        return bool(self._frames)

    def send_nowait(self, message: msgspec.Struct) -> None:
        """Queue one message and write what fits. Raises PeerError when the peer is gone or stuck."""
        body = encode(message)
        if len(body) > MAX_FRAME_BYTES:
            raise InvariantError(f"a message of {len(body)} bytes for {self.name} exceeds {MAX_FRAME_BYTES}")
        if not self._outgoing:
            self._progress_ns = self._clock()
        self._outgoing.append(memoryview(_HEADER.pack(len(body)) + body))
        self._pending_bytes += _HEADER.size + len(body)
        self.flush_nowait()
        if self._pending_bytes > self._max_pending_bytes:
            raise PeerError(f"{self.name} does not read: {self._pending_bytes} bytes wait for it")

    def flush_nowait(self) -> bool:
        """Write what fits; True when nothing is pending. Raises PeerError when the peer is gone or stuck."""
        while self._outgoing:
            views = list(itertools.islice(self._outgoing, _VIEWS_PER_SEND))
            try:
                sent = self._sock.sendmsg(views)
            except BlockingIOError:
                self._refuse_stuck_peer()
                return False
            except OSError as error:
                raise PeerError(f"{self.name} closed its channel ({error.strerror})") from error
            self._pending_bytes -= sent
            self._progress_ns = self._clock()
            self._drop_written(sent)
        return True

    def _drop_written(self, sent: int) -> None:
        """Take `sent` bytes off the head of the queue."""
        while sent:
            view = self._outgoing[0]
            if sent < len(view):
                self._outgoing[0] = view[sent:]
                return
            sent -= len(view)
            self._outgoing.popleft()

    def patience_s(self) -> float:
        """Seconds until the peer counts as stuck, if it takes nothing; negative when it does."""
        return self._send_timeout_s - (self._clock() - self._progress_ns) / 1e9

    def _refuse_stuck_peer(self) -> None:
        if self.patience_s() < 0:
            raise PeerError(f"{self.name} has not read for {self._send_timeout_s:g} s")

    def receive_nowait(self, max_frames: int | None = None) -> list[M]:
        """Return the whole frames that have arrived, at most max_frames, in order; may be empty.

        Frames beyond max_frames wait for the next call (`has_frames`). Raises PeerError once the peer has closed and
        all its frames are delivered, InvariantError for a frame that does not decode.
        """
        while (max_frames is None or len(self._frames) < max_frames) and self._read():
            self._split_frames()
        if not self._frames and self._ended:
            rest = " inside a frame" if self._incoming else ""
            raise PeerError(f"{self.name} closed{rest}")
        count = len(self._frames) if max_frames is None else min(max_frames, len(self._frames))
        return [self._decoded(self._frames.popleft()) for _ in range(count)]

    def _read(self) -> bool:
        """Take one piece from the socket; False when there is none now or no more ever."""
        if self._ended:
            return False
        try:
            piece = self._sock.recv(_READ_BYTES)
        except BlockingIOError:
            return False
        except OSError:
            # A reset is what a killed peer with unread bytes leaves behind: an end like any other.
            piece = b""
        self._ended = not piece
        self._incoming += piece
        return not self._ended

    def _split_frames(self) -> None:
        """Move whole frames from the byte buffer to the frame queue."""
        start = 0
        while len(self._incoming) - start >= _HEADER.size:
            (length,) = _HEADER.unpack_from(self._incoming, start)
            if length > MAX_FRAME_BYTES:
                raise InvariantError(f"{self.name} announced a frame of {length} bytes")
            end = start + _HEADER.size + length
            if end > len(self._incoming):
                break
            self._frames.append(bytes(self._incoming[start + _HEADER.size : end]))
            start = end
        del self._incoming[:start]

    def _decoded(self, frame: bytes) -> M:
        self._num_received += 1
        try:
            return self._decode(frame)
        except msgspec.DecodeError as error:
            raise InvariantError(f"frame {self._num_received} from {self.name}: {error}") from error

    def end_sending(self) -> None:
        """Close this direction alone: the peer reads an end. What is pending is dropped."""
        with contextlib.suppress(OSError):  # the peer has gone: it needs no end
            self._sock.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Close the socket; the peer reads an end. What is pending is dropped."""
        self._sock.close()


class AsyncChannel(Generic[M]):
    """A Channel behind the running loop. One task receives; any task sends. Use `open`."""

    def __init__(self, channel: Channel[M], loop: asyncio.AbstractEventLoop) -> None:
        self._channel = channel
        self._loop = loop
        self._writing = False
        self._waiters: list[asyncio.Future[None]] = []
        self._receiver: asyncio.Future[None] | None = None
        self._failure: PeerError | None = None

    @classmethod
    async def open(
        cls,
        sock: socket.socket,
        decode: Callable[[bytes], M],
        *,
        send_timeout_s: float,
        name: str = "peer",
    ) -> AsyncChannel[M]:
        """Take the socket over for the running loop."""
        # send() waits, so what is pending is bounded by the number of senders; their deadline is the real bound.
        channel = Channel(sock, decode, send_timeout_s=send_timeout_s, max_pending_bytes=4 * MAX_FRAME_BYTES, name=name)
        return cls(channel, asyncio.get_running_loop())

    async def send(self, message: msgspec.Struct) -> None:
        """Return when the message is in the socket. Raises PeerError when the peer closed or is stuck.

        After a failure the channel is unusable: a frame that was cut in half must not be followed by another.
        Cancelling the caller does not cut a frame.
        """
        if self._failure is not None:
            raise self._failure
        try:
            self._channel.send_nowait(message)
        except PeerError as error:
            self._fail(error)
            raise
        if not self._channel.wants_write:
            return
        if not self._writing:
            self._writing = True
            self._loop.add_writer(self._channel.fileno(), self._on_writable)
        waiter = self._loop.create_future()
        self._waiters.append(waiter)
        try:
            while not waiter.done():
                await asyncio.wait((waiter,), timeout=max(0.0, self._channel.patience_s()) + _LATE_S)
                if not waiter.done():
                    self._on_writable()  # the loop may be the late one: the socket is asked before the peer is blamed
        finally:
            waiter.cancel()  # nothing happens to one that is done
        waiter.result()

    def _on_writable(self) -> None:
        try:
            if self._channel.flush_nowait():
                self._finish_writing(None)
        except PeerError as error:
            self._fail(error)

    def _finish_writing(self, failure: PeerError | None) -> None:
        """Release every sender: the queue is empty, or will never be."""
        if self._writing:
            self._writing = False
            self._loop.remove_writer(self._channel.fileno())
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if waiter.done():
                continue
            if failure is None:
                waiter.set_result(None)
            else:
                waiter.set_exception(failure)

    def _fail(self, error: PeerError) -> None:
        self._failure = error
        self._finish_writing(error)

    async def receive(self) -> list[M]:
        """Wait for at least one frame and return all that have arrived. Raises PeerError at the peer's end."""
        while True:
            messages = self._channel.receive_nowait()
            if messages:
                return messages
            await self._readable()

    async def _readable(self) -> None:
        # The descriptor is watched only while somebody waits, so a reader that is slow slows the peer down.
        self._receiver = self._loop.create_future()
        self._loop.add_reader(self._channel.fileno(), self._on_readable)
        try:
            await self._receiver
        finally:
            self._receiver = None
            if self._channel.fileno() >= 0:
                self._loop.remove_reader(self._channel.fileno())

    def _on_readable(self) -> None:
        if self._receiver is not None and not self._receiver.done():
            self._receiver.set_result(None)

    def end_sending(self) -> None:
        """Let the peer read an end while what it still sends can be received."""
        if self._channel.fileno() >= 0:
            self._fail(PeerError(f"nothing more is sent to {self._channel.name}"))
            self._channel.end_sending()

    def close(self) -> None:
        """Close the socket; who waits to send or to receive fails."""
        if self._channel.fileno() < 0:
            return
        closed = PeerError(f"the channel to {self._channel.name} was closed here")
        self._fail(closed)
        self._loop.remove_reader(self._channel.fileno())
        self._channel.close()
        if self._receiver is not None and not self._receiver.done():
            self._receiver.set_exception(closed)
