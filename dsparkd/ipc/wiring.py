"""The socketpairs and the shared region of one server, made before the fork, and which process holds which ends.

Each process keeps only its own ends, so that an end's last holder is the peer itself and end-of-file means its death.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass, field


@dataclass(frozen=True)
class SharedRegion:
    """What the native exchange inherits: descriptors, and the session that an attaching rank must know.

    memory: the region, also held by the parent. kicks: the event that ends each rank's park.
    """

    memory: int
    session: int
    kicks: tuple[int, int]

    def descriptors(self) -> tuple[int, ...]:
        """Every descriptor of a rank."""
        return (self.memory, *self.kicks)


@dataclass(frozen=True)
class ParentWiring:
    """Ends of the parent: one to each rank, one to the detokenizer. board: the load board's descriptor."""

    ranks: tuple[socket.socket, socket.socket]
    detokenizer: socket.socket
    shared: SharedRegion | None = None
    board: int = field(kw_only=True)

    def sockets(self) -> tuple[socket.socket, ...]:
        """Every end of this process."""
        return (*self.ranks, self.detokenizer)


@dataclass(frozen=True)
class RankWiring:
    """Ends of one rank. `peer` is a SOCK_SEQPACKET pair between the ranks; the others are streams.

    probe: None where requests have no grammars.
    """

    dp_rank: int
    parent: socket.socket
    detokenizer: socket.socket
    peer: socket.socket
    shared: SharedRegion | None = None
    probe: socket.socket | None = None
    board: int = field(kw_only=True)

    def sockets(self) -> tuple[socket.socket, ...]:
        """Every end of this process."""
        probe = () if self.probe is None else (self.probe,)
        return (self.parent, self.detokenizer, self.peer, *probe)

    def descriptors(self) -> set[int]:
        """Every descriptor that this process inherits for its own use."""
        shared = self.shared.descriptors() if self.shared is not None else ()
        return {*(sock.fileno() for sock in self.sockets()), self.board, *shared}


@dataclass(frozen=True)
class DetokenizerWiring:
    """Ends of the detokenizer: one to the parent, one from each rank."""

    parent: socket.socket
    ranks: tuple[socket.socket, socket.socket]

    def sockets(self) -> tuple[socket.socket, ...]:
        """Every end of this process."""
        return (self.parent, *self.ranks)

    def descriptors(self) -> set[int]:
        """Every descriptor that this process inherits for its own use."""
        return {sock.fileno() for sock in self.sockets()}


@dataclass(frozen=True)
class ProbeWiring:
    """Ends of the process that tries grammars: one from each rank."""

    ranks: tuple[socket.socket, socket.socket]

    def sockets(self) -> tuple[socket.socket, ...]:
        """Every end of this process."""
        return self.ranks

    def descriptors(self) -> set[int]:
        """Every descriptor that this process inherits for its own use."""
        return {sock.fileno() for sock in self.ranks}


ChildWiring = RankWiring | DetokenizerWiring | ProbeWiring


@dataclass(frozen=True)
class Wiring:
    """All ends of all processes. probe: None where requests have no grammars."""

    parent: ParentWiring
    ranks: tuple[RankWiring, RankWiring]
    detokenizer: DetokenizerWiring
    probe: ProbeWiring | None = None

    def close_all_but(self, own: ParentWiring | ChildWiring) -> None:
        """Close every end that belongs to another process."""
        shared = self.parent.shared
        if shared is not None and not isinstance(own, RankWiring):
            for number in shared.kicks if isinstance(own, ParentWiring) else shared.descriptors():
                os.close(number)
        kept = own.sockets()
        probe = () if self.probe is None else (self.probe,)
        for wiring in (self.parent, *self.ranks, self.detokenizer, *probe):
            for sock in wiring.sockets():
                if sock not in kept:
                    sock.close()


def make_wiring(shared: SharedRegion | None = None, *, board: int, has_probe: bool = False) -> Wiring:
    """Create every socketpair. Descriptors are close-on-exec; parent and ranks use the board."""
    probe_rank = [socket.socketpair() for _ in range(2)] if has_probe else []
    probe_ends: list[socket.socket | None] = [ends[1] for ends in probe_rank]
    probe_ends = probe_ends or [None, None]
    parent_rank = [socket.socketpair() for _ in range(2)]
    detokenizer_rank = [socket.socketpair() for _ in range(2)]
    parent_detokenizer = socket.socketpair()
    peers = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    return Wiring(
        parent=ParentWiring(
            ranks=(parent_rank[0][0], parent_rank[1][0]),
            detokenizer=parent_detokenizer[0],
            shared=shared,
            board=board,
        ),
        ranks=(
            RankWiring(0, parent_rank[0][1], detokenizer_rank[0][1], peers[0], shared, probe_ends[0], board=board),
            RankWiring(1, parent_rank[1][1], detokenizer_rank[1][1], peers[1], shared, probe_ends[1], board=board),
        ),
        detokenizer=DetokenizerWiring(
            parent=parent_detokenizer[1], ranks=(detokenizer_rank[0][0], detokenizer_rank[1][0])
        ),
        probe=ProbeWiring((probe_rank[0][0], probe_rank[1][0])) if has_probe else None,
    )
