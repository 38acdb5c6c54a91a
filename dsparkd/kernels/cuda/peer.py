"""Words between two GPUs: Triton form, for cuda. Each stores into the memory of the other, and takes from its own.

Few words travel with the number of their exchange, eight bytes that are stored and loaded as one. So the word itself
says that it is there: an exchange is one way over the wire, without a barrier, and kernels that make words can exchange
them themselves (`post`, `take`). Its time is that of twice the bytes, and of that way.

Many words are stored where the peer's next kernels read them. Every program stores its part, then the number behind it,
and waits for the number of the program that is its like there: two ways, but the bytes once.

Both ranks make the same exchanges in the same order, and these take turns between two boxes of memory, and two rows of
numbers: nothing that has not been taken is stored over. Of few words, every rank whose words the second of two
exchanges takes away has got words in the first, from a peer that had therefore ended the one before: who sends no rows
to experts takes no sums back. Of many words the numbers go both ways, even with no words, so that at the end of an
exchange all that the peer launched before its own has ended, as what reads the words of the last exchange has.

Whoever has taken a word, or seen a number, puts zero there, and zero is no exchange's number: so none is ever found of
an exchange long ago, though numbers come again after 2**32.
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
STEP = 1 << 10  # numbers of a step, the last of which is none's
SPINS_PER_S = 5_000_000  # looks at words that have not come: 4.7 million on an H200
SWAPPED = 256  # words of a program where few are exchanged
PUSHED = 4096  # words that a program stores at once where many are
NUM_PROGRAMS = 64  # that store many words: more are no faster on an H200
UNIT = 4  # words that are moved at once, where their numbers are multiples of it


def memory_size(few: int, many: int) -> int:
    """Elements of the memory for exchanges of so many words, 64 bits each; `many` is even."""
    return NUM_BOXES * (few + many // 2 + NUM_PROGRAMS // 2)


class PeerWords:
    """Exchanges of words between this device and its peer, ordered on the current stream. Owned by the tick thread.

    ours, theirs: memory of this rank and of its peer, memory_size(few, many) int64, zeros at first. few, many: words
    that an exchange of either kind may bring in a direction. timeout_s: a peer that does not come for longer fails the
    device.
    """

    def __init__(self, ours: Tensor, theirs: Tensor, few: int, many: int, timeout_s: float) -> None:
        self.few, self.many = few, many
        self._ours, self._theirs = _Memory(ours, few, many), _Memory(theirs, few, many)
        # On the device, as a captured step is launched again as it is.
        self._number = torch.ones(1, dtype=torch.int32, device=ours.device)
        self._index = 0
        self._spins = int(timeout_s * SPINS_PER_S)

    def compile(self) -> None:
        """Compile at start: no step shall wait for a compiler. The peer's memory is not touched."""
        nothing = torch.empty(0, device=self._number.device)
        self._launch_swap(nothing, nothing, 1)
        self._launch_push(nothing, 0, self._ours)  # each program sees its own number

    def begin_step(self) -> None:
        """Begin the next step, with the first box."""
        self._number += STEP
        self._index = 0

    def swap(self, sent: Tensor, received: Tensor) -> None:
        """Give the peer few words and take its: float32, contiguous, as many as the peer's counterpart has."""
        assert sent.is_contiguous()
        assert received.is_contiguous()
        most = max(sent.numel(), received.numel())
        assert most <= self.few
        self._launch_swap(sent, received, count_tiles(most, SWAPPED))
        self._index += 1

    def cross(self, received: Tensor) -> Crossing:
        """Take the next turn for a kernel that exchanges few words itself; received: where the peer's come to lie."""
        assert received.is_contiguous()
        assert received.numel() <= self.few
        box = self._turn()
        crossing = Crossing(
            self._theirs.boxes[box], self._ours.boxes[box], self._number, self._index, self._spins, received
        )
        self._index += 1
        return crossing

    def arrivals(self, rows: int, width: int) -> Tensor:
        """Memory [rows, width] float32 where the peer's words of the next `push` come to lie, and this rank's may.

        What is there is good until the second push after it.
        """
        return self._ours.places[self._turn()].narrow(0, 0, rows * width).view(rows, width)

    def push(self, sent: Tensor, place: int) -> None:
        """Give the peer many words, to lie from word `place` of its arrivals on, and wait for its: float32, contiguous.

        What was launched on the peer before its own push has ended then.
        """
        assert sent.is_contiguous()
        assert place + sent.numel() <= self.many
        self._launch_push(sent, place, self._theirs)
        self._index += 1

    def close(self) -> None:
        """Let go of both ranks' memory."""
        del self._ours, self._theirs

    def _launch_push(self, sent: Tensor, place: int, target: _Memory) -> None:
        box, unit = self._turn(), math.gcd(sent.numel(), place, UNIT)
        _push[(NUM_PROGRAMS,)](
            sent,
            target.places[box],
            target.flags[box],
            self._ours.flags[box],
            self._number,
            self._index,
            place // unit,
            sent.numel() // unit,
            self._spins,
            UNIT=unit,
            PROGRAMS=NUM_PROGRAMS,
            BLOCK=PUSHED,
            num_warps=8,
            launch_pdl=EARLY,
            sanitize_overflow=False,
        )

    def _launch_swap(self, sent: Tensor, received: Tensor, num_programs: int) -> None:
        box, unit = self._turn(), math.gcd(sent.numel(), received.numel(), UNIT)
        _swap[(num_programs,)](
            sent,
            received,
            self._theirs.boxes[box],
            self._ours.boxes[box],
            self._number,
            self._index,
            sent.numel() // unit,
            received.numel() // unit,
            self._spins,
            UNIT=unit,
            BLOCK=SWAPPED,
            num_warps=1,
            launch_pdl=EARLY,
            sanitize_overflow=False,
        )

    def _turn(self) -> int:
        """Which box is next."""
        assert self._index < STEP - 1
        return self._index % NUM_BOXES


class _Memory:
    """One rank's memory for what arrives, in two of each: boxes of few words, places of many, and their flags."""

    def __init__(self, memory: Tensor, few: int, many: int) -> None:
        assert memory.numel() == memory_size(few, many)
        sizes = [NUM_BOXES * few, NUM_BOXES * many // 2, NUM_BOXES * NUM_PROGRAMS // 2]
        boxes, places, flags = torch.split(memory, sizes)
        self.boxes: tuple[Tensor, ...] = boxes.view(NUM_BOXES, few).unbind()
        self.places: tuple[Tensor, ...] = places.view(torch.float32).view(NUM_BOXES, many).unbind()
        self.flags: tuple[Tensor, ...] = flags.view(torch.int32).view(NUM_BOXES, NUM_PROGRAMS).unbind()


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
    # The peer stores here again only behind words of this rank that go later.
    tl.store(places, tl.zeros_like(marked), mask=mask)
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


@triton.jit(debug=True, do_not_specialize=["index", "place_units", "units", "spins"])  # type: ignore[untyped-decorator]
def _push(  # type: ignore[no-untyped-def]
    sent,
    places,
    their_flags,
    our_flags,
    step_number,
    index,
    place_units,
    units,
    spins,
    UNIT: tl.constexpr,
    PROGRAMS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Every program stores its words and the exchange's number behind them, then waits for the peer's number."""
    follow()
    program = tl.program_id(0)
    number = tl.load(step_number) + index
    for start in range(program * BLOCK, units * UNIT, PROGRAMS * BLOCK):
        word = start + tl.arange(0, BLOCK)
        goes = word < units * UNIT
        tl.store(places + place_units * UNIT + word, tl.load(sent + word, mask=goes), mask=goes)
    # The number is one thread's, and says so for all threads' words.
    tl.debug_barrier()
    tl.atomic_xchg(their_flags + program, number, sem="release", scope="sys")
    while (tl.atomic_add(our_flags + program, 0, sem="acquire", scope="sys") != number) & (spins > 0):
        spins -= 1
    tl.device_assert(spins > 0, "peer.push: the peer's words did not come")
    tl.store(our_flags + program, 0)
    tl.debug_barrier()
