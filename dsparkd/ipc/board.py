"""The load board: what each rank last said of itself, in memory that the parent shares with both.

A rank writes from its tick thread and the parent reads whenever it likes; neither waits for the other or calls the
kernel. Of a rank's two slots the writer fills the one that nobody is told of, then publishes its number: a reader that
finds the same number before and after has read it whole, and a writer killed in between leaves the last one standing.

Native 64-bit words, aligned, each written and read by one instruction; the order of a program's own stores and of its
own loads is kept by x86-64, the one architecture that this project runs on.

    0x000             header: magic, number of ranks
    0x040 + r*0x140   rank r: number of its last snapshot; 0x40 later two slots of 0x80 bytes, the words of LoadSnapshot
"""

from __future__ import annotations

import mmap
import struct

from dsparkd.errors import BoardError, CapabilityError
from dsparkd.messages import LoadSnapshot

BOARD_BYTES = 0x40 + 2 * 0x140
NUM_RANKS = 2
FEATURE = "load board"
MAGIC = 0x4452424B_50534431
READ_ATTEMPTS = 100  # a read takes microseconds and the writer needs a whole tick for each snapshot

_SLOT = struct.Struct("=9q")
_SLOT_BYTES = 0x80
_RANK_BYTES = 0x140


def open_board(descriptor: int) -> mmap.mmap:
    """Map a board; the mapping holds a descriptor of its own. Raises CapabilityError."""
    try:
        return mmap.mmap(descriptor, BOARD_BYTES)
    except (OSError, ValueError) as error:
        raise CapabilityError(
            FEATURE, f"a mapping of it ({error})", "raise the limits of memory and of open files"
        ) from error


def prepare_board(memory: mmap.mmap) -> None:
    """Write the header of an empty board."""
    struct.pack_into("=2q", memory, 0, MAGIC, NUM_RANKS)


class BoardWriter:
    """One rank's side, owned by its tick thread."""

    def __init__(self, memory: mmap.mmap, dp_rank: int) -> None:
        self._memory = memory
        self._start = 0x40 + dp_rank * _RANK_BYTES
        self._numbers = memoryview(memory).cast("q")

    def publish(self, snapshot: LoadSnapshot) -> None:
        """Replace what the rank said before. snapshot.sequence: one more than the last one's."""
        slot = self._start + 0x40 + (snapshot.sequence & 1) * _SLOT_BYTES
        _SLOT.pack_into(
            self._memory,
            slot,
            snapshot.sequence,
            snapshot.dp_rank,
            snapshot.published_ns,
            snapshot.frame,
            snapshot.tick,
            snapshot.parked,
            snapshot.outstanding_requests,
            snapshot.outstanding_tokens,
            snapshot.waiting_requests,
        )
        # After the slot: whoever sees the number finds what it stands for.
        self._numbers[self._start // 8] = snapshot.sequence


class BoardReader:
    """The parent's side."""

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory = memory
        self._numbers = memoryview(memory).cast("q")

    def read(self, dp_rank: int) -> LoadSnapshot | None:
        """Return what stands in a rank's place; None before its first snapshot. Raises BoardError."""
        if (self._numbers[0], self._numbers[1]) != (MAGIC, NUM_RANKS):
            raise BoardError("the load board has no header")
        start = 0x40 + dp_rank * _RANK_BYTES
        for _ in range(READ_ATTEMPTS):
            number = self._numbers[start // 8]
            if number == 0:
                return None
            words = _SLOT.unpack_from(self._memory, start + 0x40 + (number & 1) * _SLOT_BYTES)
            if words[0] == number == self._numbers[start // 8]:
                return LoadSnapshot(
                    sequence=words[0],
                    dp_rank=words[1],
                    published_ns=words[2],
                    frame=words[3],
                    tick=words[4],
                    parked=bool(words[5]),
                    outstanding_requests=words[6],
                    outstanding_tokens=words[7],
                    waiting_requests=words[8],
                )
        raise BoardError(f"rank {dp_rank}'s place on the load board was never whole in {READ_ATTEMPTS} reads")
