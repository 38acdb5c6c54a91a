"""Who holds which end of which socketpair."""

import os
import socket

import pytest

from dsparkd.ipc.wiring import SharedRegion, make_wiring

BOARD = 4321  # a number that nothing here opens or closes


def test_every_end_reaches_the_end_that_it_is_named_after() -> None:
    """A swapped pair would send rank 1's work to rank 0."""
    wiring = make_wiring(board=BOARD, has_probe=True)
    assert wiring.probe is not None
    pairs = [
        *((wiring.parent.ranks[rank], wiring.ranks[rank].parent) for rank in range(2)),
        *((wiring.ranks[rank].detokenizer, wiring.detokenizer.ranks[rank]) for rank in range(2)),
        (wiring.parent.detokenizer, wiring.detokenizer.parent),
        *((wiring.ranks[rank].probe, wiring.probe.ranks[rank]) for rank in range(2)),
        (wiring.ranks[0].peer, wiring.ranks[1].peer),
    ]

    for number, (one, other) in enumerate(pairs):
        assert one is not None
        one.send(bytes([number]))
        assert other.recv(1) == bytes([number])

    assert wiring.ranks[0].peer.type == socket.SOCK_SEQPACKET
    wiring.close_all_but(wiring.parent)
    for sock in wiring.parent.sockets():
        sock.close()


def test_closing_all_but_one_process_ends_keeps_exactly_those() -> None:
    """L-39: only when no other process holds a copy of an end is end-of-file the owner's death."""
    for keep in ("parent", "rank 0", "rank 1", "detokenizer", "probe"):
        wiring = make_wiring(board=BOARD, has_probe=True)
        assert wiring.probe is not None
        owners = {
            "parent": wiring.parent,
            "rank 0": wiring.ranks[0],
            "rank 1": wiring.ranks[1],
            "detokenizer": wiring.detokenizer,
            "probe": wiring.probe,
        }

        wiring.close_all_but(owners[keep])

        for name, owner in owners.items():
            for sock in owner.sockets():
                assert (sock.fileno() >= 0) == (name == keep)
                sock.close()


@pytest.mark.parametrize(("keep", "kept"), [("parent", 1), ("rank 0", 3), ("rank 1", 3), ("detokenizer", 0)])
def test_the_shared_region_stays_open_where_it_is_used(keep: str, kept: int) -> None:
    """decisions 13: ranks have the region and both events, the parent the region alone, to stop it."""
    numbers = [os.open("/dev/null", os.O_RDONLY) for _ in range(3)]
    wiring = make_wiring(SharedRegion(numbers[0], session=7, kicks=(numbers[1], numbers[2])), board=BOARD)
    owners = {
        "parent": wiring.parent,
        "rank 0": wiring.ranks[0],
        "rank 1": wiring.ranks[1],
        "detokenizer": wiring.detokenizer,
    }
    own = owners[keep]

    wiring.close_all_but(own)

    still = [number for number in numbers if os.path.exists(f"/proc/self/fd/{number}")]
    assert still == numbers[:kept]
    if keep.startswith("rank"):
        assert own.descriptors() == {*(sock.fileno() for sock in own.sockets()), *numbers, BOARD}
    for number in still:
        os.close(number)
    for sock in own.sockets():
        sock.close()


def test_without_grammars_there_is_no_probe_and_no_end_of_it() -> None:
    """`grammar.enabled = false` costs no process and no descriptor."""
    wiring = make_wiring(board=BOARD)
    assert wiring.probe is None
    assert [len(rank.sockets()) for rank in wiring.ranks] == [3, 3]
    for owner in (wiring.parent, *wiring.ranks, wiring.detokenizer):
        for sock in owner.sockets():
            sock.close()
