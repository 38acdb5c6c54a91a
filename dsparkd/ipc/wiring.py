"""The socketpairs of one server, made before the fork, and which process holds which ends.

Each process keeps only its own ends, so that an end's last holder is the peer itself and end-of-file means its death.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass


@dataclass(frozen=True)
class ParentWiring:
    """Ends of the parent: one to each rank, one to the detokenizer."""

    ranks: tuple[socket.socket, socket.socket]
    detokenizer: socket.socket

    def sockets(self) -> tuple[socket.socket, ...]:
        """Every end of this process."""
        return (*self.ranks, self.detokenizer)


@dataclass(frozen=True)
class RankWiring:
    """Ends of one rank. `peer` is a SOCK_SEQPACKET pair between the ranks; the others are streams."""

    dp_rank: int
    parent: socket.socket
    detokenizer: socket.socket
    peer: socket.socket

    def sockets(self) -> tuple[socket.socket, ...]:
        """Every end of this process."""
        return (self.parent, self.detokenizer, self.peer)


@dataclass(frozen=True)
class DetokenizerWiring:
    """Ends of the detokenizer: one to the parent, one from each rank."""

    parent: socket.socket
    ranks: tuple[socket.socket, socket.socket]

    def sockets(self) -> tuple[socket.socket, ...]:
        """Every end of this process."""
        return (self.parent, *self.ranks)


@dataclass(frozen=True)
class Wiring:
    """All ends of all processes."""

    parent: ParentWiring
    ranks: tuple[RankWiring, RankWiring]
    detokenizer: DetokenizerWiring

    def close_all_but(self, own: ParentWiring | RankWiring | DetokenizerWiring) -> None:
        """Close every end that belongs to another process."""
        kept = own.sockets()
        for wiring in (self.parent, *self.ranks, self.detokenizer):
            for sock in wiring.sockets():
                if sock not in kept:
                    sock.close()


def make_wiring() -> Wiring:
    """Create every socketpair. Descriptors are close-on-exec."""
    parent_rank = [socket.socketpair() for _ in range(2)]
    detokenizer_rank = [socket.socketpair() for _ in range(2)]
    parent_detokenizer = socket.socketpair()
    peers = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    return Wiring(
        parent=ParentWiring(ranks=(parent_rank[0][0], parent_rank[1][0]), detokenizer=parent_detokenizer[0]),
        ranks=(
            RankWiring(0, parent_rank[0][1], detokenizer_rank[0][1], peers[0]),
            RankWiring(1, parent_rank[1][1], detokenizer_rank[1][1], peers[1]),
        ),
        detokenizer=DetokenizerWiring(
            parent=parent_detokenizer[1], ranks=(detokenizer_rank[0][0], detokenizer_rank[1][0])
        ),
    )
