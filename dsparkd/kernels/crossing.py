"""How a launch's words reach the peer while they are made, and what the peer made meanwhile comes back, on cuda.

A kernel that takes one of these stores what belongs to the peer into its memory, and waits for what comes from there,
so that no launch is needed for the way. kernels.cuda.peer says how words travel and makes them.

Letters: T rows of this rank, P of the peer, R of both, w words of a row.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Crossing:
    """One exchange of words. theirs, ours: the box that the peer takes them from, and this rank's [n] int64.

    number [1] int32 and index: the exchange's number is their sum. num_spins: looks for the peer's words before the
    device fails. received float32: where they come to lie; both ranks' words are laid out row by row.
    """

    theirs: Tensor
    ours: Tensor
    number: Tensor
    index: int
    num_spins: int
    received: Tensor


@dataclass(frozen=True, slots=True)
class Parting:
    """The exchange of R rows of which rank 0's come first: the peer's go away, and as many as this rank has come.

    counts: rows of rank 0 and of rank 1. rank: this one. crossing.received is [T, w].
    """

    crossing: Crossing
    counts: tuple[int, int]
    rank: int
