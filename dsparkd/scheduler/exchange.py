"""How two ranks tell each other seven integers in lock-step, and wake each other from a park.

`Exchange` is all that the loop knows of it; `GlooExchange` is `exchange.kind = "gloo"`. Exchanges of one channel are
numbered from 1; both ranks make the same ones in the same order or the pair fails.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from dsparkd.errors import PeerError
from dsparkd.scheduler.agreement import Channel

NUM_FIELDS = 7
NUM_EXTRA = 6
_KICK = struct.Struct("<Q")  # number of the plan exchange that agreed on the park which the kick ends

# All ranks' integers, in rank order, from this rank's; raises PeerError when the peer does not come or has gone.
Gather = Callable[[Sequence[int]], tuple[tuple[int, ...], tuple[int, ...]]]


class Words(NamedTuple):
    """What one rank says in one exchange, as plain integers of 64 bits."""

    fields: tuple[int, ...]
    extra: tuple[int, ...]
    intent: int


class Exchange(Protocol):
    """Owned by the tick thread.

    A park begins with an exchange after which both ranks sleep, each on `fileno` and its own sources of work. The one
    that wakes first kicks the other; a kick ends only the park it was meant for.
    """

    def exchange(self, channel: Channel, words: Words) -> tuple[Words, Words]:
        """Meet the peer and return both ranks' words in rank order. Raises PeerError."""

    def sequence(self, channel: Channel) -> int:
        """Number of the last exchange on a channel."""

    def fileno(self) -> int:
        """Descriptor that becomes readable when the peer kicks or dies."""

    def kick(self) -> None:
        """End the peer's park. Raises PeerError when the peer has gone."""

    def take_kick(self) -> bool:
        """Whether the peer has ended this park; never blocks. Raises PeerError when the peer has gone."""

    def close(self) -> None:
        """Let go of what the exchange owns."""


class GlooExchange:
    """Exchange over a gloo gather, with kicks over a SOCK_SEQPACKET pair that was made before the fork."""

    def __init__(self, gather: Gather, peer: socket.socket) -> None:
        peer.setblocking(False)
        self._gather = gather
        self._peer = peer
        self._sequences = [0 for _ in Channel]

    def exchange(self, channel: Channel, words: Words) -> tuple[Words, Words]:
        """See Exchange."""
        self._sequences[channel] += 1
        head = (channel, self._sequences[channel], words.intent)
        rank0, rank1 = self._gather((*head, *words.fields, *words.extra))
        for rank, told in enumerate((rank0, rank1)):
            if told[0] != channel:
                raise PeerError(f"rank {rank} is on channel {told[0]}, this rank on {int(channel)}")
            if told[1] != head[1]:
                raise PeerError(f"rank {rank} is at exchange {told[1]} of {channel.name}, this rank at {head[1]}")
        return _unpack(rank0), _unpack(rank1)

    def sequence(self, channel: Channel) -> int:
        """See Exchange."""
        return self._sequences[channel]

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


def _unpack(told: tuple[int, ...]) -> Words:
    return Words(fields=told[3 : 3 + NUM_FIELDS], extra=told[3 + NUM_FIELDS :], intent=told[2])
