"""How two ranks tell each other seven integers in lock-step, and wake each other from a park.

`Exchange` is all that the loop knows of it; `NativeExchange` and `GlooExchange` are the kinds of `exchange.kind`.
Exchanges of one channel are numbered from 1; both ranks make the same ones in the same order or the pair fails.
"""

from __future__ import annotations

import os
import select
import socket
import struct
from collections.abc import Callable, Sequence
from typing import Protocol

from dsparkd.errors import InvariantError, PeerError
from dsparkd.native.exchange import NUM_EXTRA, NUM_FIELDS, Attachment, Timing, Words
from dsparkd.scheduler.agreement import Channel

_KICK = struct.Struct("<Q")  # number of the plan exchange that agreed on the park which the kick ends

# All ranks' integers, in rank order, from this rank's; raises PeerError when the peer does not come or has gone.
Gather = Callable[[Sequence[int]], tuple[tuple[int, ...], tuple[int, ...]]]


class Exchange(Protocol):
    """Owned by the tick thread.

    A park begins with an exchange after which both ranks sleep, each on `fileno` and its own sources of work. The one
    that wakes first kicks the other; a kick ends only the park it was meant for.
    """

    def exchange(self, channel: Channel, words: Words, /) -> Words:
        """Meet the peer and return its words for these.

        Raises PeerError, or ExchangeStopped when the parent has ended all waits.
        """

    def sequence(self, channel: Channel) -> int:
        """Number of the last exchange on a channel."""

    def timing(self, channel: Channel) -> Timing | None:
        """Times of the last exchange on a channel; None for a kind that does not take them."""

    def park(self) -> None:
        """Say that this rank sleeps from here on, until a kick or work of its own."""

    def fileno(self) -> int:
        """Descriptor that becomes readable when the peer kicks or dies."""

    def kick(self) -> None:
        """End the peer's park. A peer that has gone is a PeerError here or in the next exchange."""

    def take_kick(self) -> bool:
        """Whether the peer has ended this park, told once; never blocks. Raises PeerError when the peer has gone."""

    def close(self) -> None:
        """Let go of what the exchange owns."""


class NativeExchange:
    """Exchange over shared memory. Owns all that it is given.

    kicks: this rank's event descriptor and the peer's. peer: a socket that only dies when the peer does, because a
    parked rank looks at descriptors alone.
    """

    def __init__(self, dp_rank: int, attachment: Attachment, kicks: tuple[int, int], peer: socket.socket) -> None:
        self._dp_rank = dp_rank
        self._attachment = attachment
        self.exchange = attachment.exchange  # see Exchange; a function of this class around it would take as long as C
        self._own_kick, self._peer_kick = kicks
        self._peer = peer
        self._poll = select.epoll()
        self._poll.register(self._own_kick, select.EPOLLIN)
        self._poll.register(peer, select.EPOLLIN)

    def prove(self, timeout_s: float) -> None:
        """Meet the peer once on each channel; later exchanges wait for it for timeout_s.

        Raises InvariantError when the words arrive changed.
        """
        for channel in Channel:
            own, peer = (_pattern(rank, channel) for rank in (self._dp_rank, 1 - self._dp_rank))
            if self.exchange(channel, own) != peer:
                raise InvariantError(f"words changed on their way through channel {channel.name}")
        self._attachment.set_timeout(timeout_s)

    def sequence(self, channel: Channel) -> int:
        """See Exchange."""
        return self._attachment.sequence(channel)

    def timing(self, channel: Channel) -> Timing:
        """See Exchange."""
        return self._attachment.timing(channel)

    def park(self) -> None:
        """See Exchange."""
        self._attachment.park()

    def fileno(self) -> int:
        """See Exchange."""
        return self._poll.fileno()

    def kick(self) -> None:
        """See Exchange."""
        self._attachment.kick()
        os.eventfd_write(self._peer_kick, 1)  # after the word: who is woken by it finds it

    def take_kick(self) -> bool:
        """See Exchange."""
        for descriptor, _ in self._poll.poll(0):
            if descriptor != self._own_kick:
                raise PeerError("the peer rank closed its socket")
            os.eventfd_read(descriptor)
        return self._attachment.take_kick()

    def close(self) -> None:
        """See Exchange."""
        if self._poll.closed:
            return
        self._attachment.close()
        self._poll.close()
        os.close(self._own_kick)
        os.close(self._peer_kick)
        self._peer.close()


class GlooExchange:
    """Exchange over a gloo gather, with kicks over a SOCK_SEQPACKET pair that was made before the fork."""

    def __init__(self, dp_rank: int, gather: Gather, peer: socket.socket) -> None:
        peer.setblocking(False)
        self._dp_rank = dp_rank
        self._gather = gather
        self._peer = peer
        self._sequences = [0 for _ in Channel]

    def exchange(self, channel: Channel, words: Words, /) -> Words:
        """See Exchange."""
        self._sequences[channel] += 1
        head = (channel, self._sequences[channel])
        both = self._gather((*head, *words))
        for rank, told in enumerate(both):
            if told[0] != channel:
                raise PeerError(f"rank {rank} is on channel {told[0]}, this rank on {int(channel)}")
            if told[1] != head[1]:
                raise PeerError(f"rank {rank} is at exchange {told[1]} of {channel.name}, this rank at {head[1]}")
        return both[1 - self._dp_rank][len(head) :]

    def sequence(self, channel: Channel) -> int:
        """See Exchange."""
        return self._sequences[channel]

    def timing(self, channel: Channel) -> None:
        """See Exchange: gloo tells nothing of the peer's arrival."""

    def park(self) -> None:
        """See Exchange."""

    def fileno(self) -> int:
        """See Exchange."""
        return self._peer.fileno()

    def kick(self) -> None:
        """See Exchange."""
        try:
            self._peer.send(_KICK.pack(self._sequences[Channel.PLAN]))
        except OSError as error:
            raise PeerError(f"the peer rank closed its socket ({error.strerror})") from error

    def take_kick(self) -> bool:
        """See Exchange."""
        kicked = False
        while True:
            try:
                packet = self._peer.recv(_KICK.size)
            except BlockingIOError:
                return kicked
            except OSError as error:
                raise PeerError(f"the peer rank closed its socket ({error.strerror})") from error
            if not packet:
                raise PeerError("the peer rank closed its socket")
            # When both ranks wake at once, both kick, and each finds the other's kick during its next park: too old.
            kicked |= _KICK.unpack(packet)[0] == self._sequences[Channel.PLAN]

    def close(self) -> None:
        """See Exchange."""
        self._peer.close()


def _pattern(rank: int, channel: Channel) -> Words:
    """Words that differ by rank, channel and place, down to the last bit of a signed integer; one tick for both."""
    seed = (2 * channel + rank + 1) << 56
    extra = [-seed - place for place in range(NUM_EXTRA)]
    extra[2] = 0  # the tick
    return (*(seed + place for place in range(NUM_FIELDS)), *extra, 0)
