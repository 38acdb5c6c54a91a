"""Words between two GPUs: Triton form, for cuda. Each stores into the memory of the other, and takes from its own.

A word travels with the number of its exchange, eight bytes that are stored and loaded as one. So the word itself says
that it is there: an exchange is one launch and one way over the wire, without a barrier, and its time is that of the
bytes, twice as many, and of that way.

Exchanges take turns between two boxes of memory, first one, then the other. The two ranks make them in the same order,
and of two that follow each other every rank whose words the second takes away has got words in the first, from a peer
that had therefore ended the one before: nothing is stored over words that have not been taken. This holds for rows that
go to experts and sums that come back, whatever the ranks' numbers of rows: who sends nothing in one takes nothing in
the other.

Numbers come again after 2**32 exchanges. A box then holds those of the last ones.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsparkd.kernels.crossing import Crossing
from dsparkd.kernels.cuda.launch import EARLY, follow
from dsparkd.kernels.tiles import count_tiles

NUM_BOXES = 2
STEP = 1 << 10  # exchanges that a step may make
SPINS_PER_S = 5_000_000  # looks at words that have not come: 4.7 million on an H200
FORMS = ((256, 1), (2048, 8))  # words of a program and its warps
FEW_WORDS = 1 << 18  # up to here many small programs, which come sooner; above it fewer than the device holds at once
UNIT = 4  # words that are moved at once, where their numbers are multiples of it


class PeerWords:
    """Exchanges of words between this device and its peer, ordered on the current stream. Owned by the tick thread.

    ours, theirs: boxes [2, w] int64 of this rank and of its peer, zeros at first. timeout_s: a peer that does not come
    for longer fails the device.
    """

    def __init__(self, ours: Tensor, theirs: Tensor, timeout_s: float) -> None:
        self._ours, self._theirs = ours.unbind(), theirs.unbind()
        # On the device, as a captured step is launched again as it is.
        self._number = torch.zeros(1, dtype=torch.int32, device=ours.device)
        self._index = 0
        self._spins = int(timeout_s * SPINS_PER_S)

    @property
    def num_words(self) -> int:
        """The most words that an exchange may bring in either direction."""
        return self._ours[0].numel()

    def compile(self) -> None:
        """Compile all forms, at start: no step shall wait for a compiler. Nothing is stored."""
        nothing = torch.empty(0, device=self._number.device)
        for block, warps in FORMS:
            self._launch(nothing, nothing, 1, block, warps)

    def begin_step(self) -> None:
        """Begin the next step, with the first box."""
        self._number += STEP
        self._index = 0

    def swap(self, sent: Tensor, received: Tensor) -> None:
        """Give the peer words and take its: float32, contiguous, as many as the peer's counterpart has."""
        assert sent.is_contiguous()
        assert received.is_contiguous()
        most = max(sent.numel(), received.numel())
        assert most <= self.num_words
        block, warps = FORMS[most > FEW_WORDS]
        self._launch(sent, received, count_tiles(most, block), block, warps)
        self._index += 1

    def cross(self, received: Tensor) -> Crossing:
        """Take the next turn for a kernel that exchanges words itself; received: where the peer's come to lie."""
        assert received.is_contiguous()
        assert received.numel() <= self.num_words
        crossing = Crossing(*self._box(), self._number, self._index, self._spins, received)
        self._index += 1
        return crossing

    def close(self) -> None:
        """Let go of both ranks' memory."""
        self._ours = self._theirs = ()

    def _launch(self, sent: Tensor, received: Tensor, num_programs: int, block: int, warps: int) -> None:
        unit = math.gcd(sent.numel(), received.numel(), UNIT)
        _swap[(num_programs,)](
            sent,
            received,
            *self._box(),
            self._number,
            self._index,
            sent.numel() // unit,
            received.numel() // unit,
            self._spins,
            UNIT=unit,
            BLOCK=block,
            num_warps=warps,
            launch_pdl=EARLY,
            sanitize_overflow=False,
        )

    def _box(self) -> tuple[Tensor, Tensor]:
        """The peer's box and this rank's for the next exchange."""
        assert self._index < STEP
        return self._theirs[self._index % NUM_BOXES], self._ours[self._index % NUM_BOXES]


@triton.jit
def post(places, words, number, mask):  # type: ignore[no-untyped-def]
    """Store words, 32 bits each, into the peer's memory, marked with the exchange's number."""
    marked = (number.to(tl.int64) << 32) | (words.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF)
    tl.store(places, marked, mask=mask, cache_modifier=".wt")


@triton.jit
def take(places, number, mask, spins):  # type: ignore[no-untyped-def]
    """Wait until words with the exchange's number lie in this rank's own memory, and return them as float32."""
    marked = tl.load(places, mask=mask, other=0, volatile=True)
    while (tl.max((mask & ((marked >> 32).to(tl.int32) != number)).to(tl.int32), 0) > 0) & (spins > 0):
        marked = tl.load(places, mask=mask, other=0, volatile=True)
        spins -= 1
    tl.device_assert(spins > 0, "peer.take: the peer's words did not come")
    return marked.to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit(debug=True, do_not_specialize=["index", "units_sent", "units_received", "spins"])  # type: ignore[untyped-decorator]
def _swap(  # type: ignore[no-untyped-def]
    sent,
    received,
    theirs,
    ours,
    step_number,
    index,
    units_sent,
    units_received,
    spins,
    UNIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Every program gives its words before it waits for the peer's, which the program with its number there gives."""
    follow()
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    number = tl.load(step_number) + index
    goes, comes = place < units_sent * UNIT, place < units_received * UNIT
    post(theirs + place, tl.load(sent + place, mask=goes), number, goes)
    tl.store(received + place, take(ours + place, number, comes, spins), mask=comes)
