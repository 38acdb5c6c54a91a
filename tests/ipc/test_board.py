"""The load board: whole snapshots or none, whatever happens to the writer."""

from __future__ import annotations

import mmap
import os
import random
import resource
import signal
import subprocess
import sys
import time

import pytest

from dsparkd.errors import BoardError, CapabilityError
from dsparkd.ipc import board
from dsparkd.ipc.board import BOARD_BYTES, BoardReader, BoardWriter, open_board, prepare_board
from dsparkd.supervisor import create_board
from tests.routing.fakes import make_snapshot
from tools.harness import ROOT

# Publishes as fast as it can; every word of a snapshot follows from its number.
WRITER = """
import sys
from dsparkd.ipc.board import BoardReader, BoardWriter, open_board
from tests.ipc.test_board import snapshot
memory = open_board(int(sys.argv[1]))
held = BoardReader(memory).read(1)
number = held.sequence if held is not None else 0
writer = BoardWriter(memory, 1)
print("writing", flush=True)
while True:
    number += 1
    writer.publish(snapshot(number))
"""


def snapshot(number: int):
    """A snapshot whose words are all different and all known from its number."""
    return make_snapshot(
        1,
        number,
        published_ns=number * 3,
        frame=number * 5,
        tick=number * 7,
        parked=bool(number % 3),
        outstanding_requests=number * 11,
        outstanding_tokens=number * 13,
        waiting_requests=number * 17,
    )


@pytest.fixture
def memory() -> mmap.mmap:
    descriptor = create_board()
    mapped = open_board(descriptor)
    os.close(descriptor)
    return mapped


def test_a_rank_is_read_as_it_wrote_itself(memory: mmap.mmap) -> None:
    """L-14: field by field; the other rank's place stays empty."""
    reader = BoardReader(memory)
    assert (reader.read(0), reader.read(1)) == (None, None)
    for number in (1, 2, 3):
        BoardWriter(memory, 1).publish(snapshot(number))
        assert reader.read(1) == snapshot(number)
    assert reader.read(0) is None


def test_l14_a_writer_killed_at_any_moment_leaves_a_whole_snapshot() -> None:
    """L-14: kill -9 again and again in the middle of publishing; every word of what is read fits every other."""
    draw = random.Random(1)
    descriptor = create_board()
    reader = BoardReader(open_board(descriptor))
    last = 0
    for _ in range(12):
        with subprocess.Popen(
            [sys.executable, "-c", WRITER, str(descriptor)], pass_fds=[descriptor], cwd=ROOT, stdout=subprocess.PIPE
        ) as writer:
            assert writer.stdout is not None
            writer.stdout.readline()
            until = time.monotonic() + draw.uniform(0.005, 0.03)
            while time.monotonic() < until:
                found = reader.read(1)
                if found is not None:
                    assert found == snapshot(found.sequence)
                    assert found.sequence >= last
                    last = found.sequence
            writer.send_signal(signal.SIGKILL)
        found = reader.read(1)
        assert found is not None
        assert found == snapshot(found.sequence)
        last = found.sequence
    os.close(descriptor)
    assert last > 1000, "the writers were at work when they were killed"


def test_l14_what_was_written_half_is_not_shown(memory: mmap.mmap) -> None:
    """L-14: the words of the next snapshot change nothing before its number is published."""
    reader, writer = BoardReader(memory), BoardWriter(memory, 1)
    writer.publish(snapshot(4))
    before = bytes(memory)
    writer.publish(snapshot(5))
    after = bytes(memory)
    number_at = 0x40 + 0x140
    for end in range(0, BOARD_BYTES, 8):
        torn = bytearray(before)
        torn[:end] = after[:end]
        torn[number_at : number_at + 8] = before[number_at : number_at + 8]
        memory[:] = bytes(torn)
        assert reader.read(1) == snapshot(4)


def test_a_number_that_moves_during_the_read_is_read_again(memory: mmap.mmap, monkeypatch: pytest.MonkeyPatch) -> None:
    """L-14: a writer that laps the reader overwrites what it reads; the reader starts over, not for ever."""
    writer = BoardWriter(memory, 1)
    writer.publish(snapshot(1))
    laps = iter(range(2, 1000))

    class Lapped:
        size = board._SLOT.size

        def __init__(self, times: int) -> None:
            self.times = times

        def pack_into(self, *words: object) -> None:
            SLOT.pack_into(*words)

        def unpack_from(self, *where: object) -> tuple[int, ...]:
            words = SLOT.unpack_from(*where)
            if self.times:
                self.times -= 1
                writer.publish(snapshot(next(laps)))
            return words

    SLOT = board._SLOT
    monkeypatch.setattr(board, "_SLOT", Lapped(5))
    assert BoardReader(memory).read(1) == snapshot(6)
    monkeypatch.setattr(board, "_SLOT", Lapped(10_000))
    with pytest.raises(BoardError, match="rank 1"):
        BoardReader(memory).read(1)


def test_a_board_without_its_header_is_unreadable() -> None:
    """L-11: memory that is no board says nothing of a rank."""
    memory = mmap.mmap(-1, BOARD_BYTES)
    with pytest.raises(BoardError, match="header"):
        BoardReader(memory).read(0)
    prepare_board(memory)
    assert BoardReader(memory).read(0) is None


def test_l15_a_board_that_cannot_be_made_or_mapped_is_a_start_failure(tmp_path) -> None:
    """L-15: exit 78 with what to change; never a server whose health nobody can read."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest_free = os.dup(0)  # the limit is on numbers: other tests may have left gaps below the highest one in use
    os.close(lowest_free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, hard))
    try:
        with pytest.raises(CapabilityError, match=r"load board.*open files"):
            create_board()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    with (tmp_path / "short").open("w+b") as file:
        file.write(b"short")
        file.flush()
        with pytest.raises(CapabilityError, match="load board"):
            open_board(file.fileno())
