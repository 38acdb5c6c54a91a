"""Words that two ranks store into each other's memory: on one device, and between two processes that share memory."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
from collections.abc import Sequence
from multiprocessing.connection import Connection

import pytest
import torch
from torch import Tensor
from triton.runtime import interpreter

from dsparkd.kernels.cuda.peer import NUM_BOXES, STEP, PeerWords
from tests.kernels.cuda.values import arrive, noise

LIMIT_S = 60.0
interpreted = pytest.mark.skipif(
    "TRITON_INTERPRET" not in os.environ, reason="the interpreter takes memory of the host"
)


def boxes(num_words: int, device: torch.device) -> Tensor:
    """Memory for what arrives."""
    return torch.zeros((NUM_BOXES, num_words), dtype=torch.int64, device=device)


@pytest.mark.parametrize(("num_sent", "num_received"), [(700, 300), (5, 1000), (512, 512), (0, 3), (3, 0)])
def test_words_go_to_the_peers_box_and_come_from_the_own(
    device: torch.device, num_sent: int, num_received: int
) -> None:
    """The boxes are taken in turn, numbers rise, and nothing beyond the words is touched."""
    ours, theirs = boxes(1024, device), boxes(1024, device)
    words = PeerWords(ours, theirs, LIMIT_S)
    words.begin_step()
    for index in range(3):
        sent, coming = noise(num_sent, seed=index).to(device), noise(num_received, seed=9 + index).to(device)
        box, number = index % NUM_BOXES, STEP + index
        arrive(ours[box], coming, number)
        before, received = theirs.clone(), torch.full((num_received + 2,), 7.0, device=device)
        words.swap(sent, received[:-2])
        assert torch.equal(received[:-2], coming)
        assert received[-2:].tolist() == [7.0, 7.0]
        arrive(before[box], sent, number)
        assert torch.equal(theirs, before)


def test_large_exchanges_take_fewer_larger_programs(device: torch.device) -> None:
    """More words than the small programs are for, which could not all wait at once."""
    ours = boxes((1 << 18) + 100, device)
    words = PeerWords(ours, ours, LIMIT_S)
    words.begin_step()
    sent = noise(ours.shape[1]).to(device)
    received = torch.empty_like(sent)
    words.swap(sent, received)
    assert torch.equal(received, sent)


def test_words_are_bit_patterns(device: torch.device) -> None:
    """Packed rows hold ids and pairs of bfloat16: NaNs of any payload and denormals must come as they went."""
    ours = boxes(512, device)
    words = PeerWords(ours, ours, LIMIT_S)
    words.begin_step()
    bits = torch.randint(-(2**31), 2**31, (512,), generator=torch.Generator().manual_seed(1)).int().to(device)
    bits[:4] = torch.tensor([-1, 0x7F800001, 1, -(2**31)])
    received = torch.empty(512, device=device)
    words.swap(bits.view(torch.float32), received)
    assert torch.equal(received.view(torch.int32), bits)


def test_what_lies_there_from_an_earlier_exchange_is_not_taken(device: torch.device) -> None:
    """A box still holds the words of two exchanges ago: only those with the number of this one count."""
    ours, theirs = boxes(64, device), boxes(64, device)
    words = PeerWords(ours, theirs, LIMIT_S)
    for step in (1, 2):
        words.begin_step()
        coming = torch.full((64,), float(step), device=device)
        arrive(ours[0], coming, step * STEP)
        received = torch.empty_like(coming)
        words.swap(coming, received)
        assert torch.equal(received, coming)


@interpreted
@pytest.mark.parametrize("late", [0, 63])
def test_a_peer_that_does_not_come_is_no_endless_wait(late: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """L-37: past the deadline the device fails instead of hanging, though a single word is missing."""
    builder = interpreter.interpreter_builder
    monkeypatch.setattr(builder, "options", dataclasses.replace(builder.options, debug=True, sanitize_overflow=False))
    ours, coming = boxes(64, torch.device("cpu")), noise(64)
    words = PeerWords(ours, ours.clone(), 2e-5)
    words.begin_step()
    arrive(ours[0], coming, STEP)
    ours[0, late] -= 1 << 32  # of the exchange before
    with pytest.raises(Exception, match="words did not come"):
        words.swap(coming, torch.empty(64))


def test_forms_are_compiled_without_an_exchange(device: torch.device) -> None:
    """At start the peer may be minutes behind; nothing is stored, nothing waited for, and no turn is taken."""
    ours, theirs = boxes(64, device), boxes(64, device)
    words = PeerWords(ours, theirs, LIMIT_S)
    words.compile()
    words.begin_step()
    arrive(ours[0], noise(8), STEP)
    words.swap(noise(8).to(device), torch.empty(8, device=device))
    assert not ours[1].any()
    assert theirs[0, :8].all()


def steps() -> Sequence[tuple[int, int]]:
    """Both ranks' rows in the steps that two processes make: none, few, and more of either."""
    return [(1, 1), (3, 0), (3, 0), (0, 2), (0, 2), (16, 5), (5, 16), (1, 1)] * 2


def live(rank: int, ours: Tensor, theirs: Tensor, result: Connection) -> None:
    """Make the steps' exchanges as one rank: rows to the peer, and sums that came of the peer's rows back."""
    words = PeerWords(ours, theirs, LIMIT_S)
    wrong = 0
    for step, counts in enumerate(steps()):
        words.begin_step()
        own, peers = counts[rank], counts[1 - rank]
        for layer in range(2):
            value = float(100 * step + 10 * layer)
            rows, came = torch.full((own, 20), value + rank), torch.empty((peers, 20))
            words.swap(rows, came)
            wrong += int((came != value + 1 - rank).sum())
            back = torch.empty((own, 36))
            words.swap(came.mean(1, keepdim=True).expand(-1, 36) + torch.arange(36.0), back)
            wrong += int((back != value + rank + torch.arange(36.0)).sum())
    result.send(wrong)


@interpreted
def test_two_processes_exchange_over_many_steps() -> None:
    """Neither waits but for words, and boxes are used again: nothing is lost or taken twice, whatever the counts."""
    context = multiprocessing.get_context("spawn")
    memory = [boxes(1024, torch.device("cpu")) for _ in range(2)]
    for each in memory:
        each.share_memory_()  # type: ignore[no-untyped-call]
    pipes = [context.Pipe(duplex=False) for _ in range(2)]
    ranks = [
        context.Process(target=live, args=(rank, memory[rank], memory[1 - rank], pipes[rank][1])) for rank in range(2)
    ]
    for process in ranks:
        process.start()
    try:
        assert all(receiving.poll(LIMIT_S) for receiving, _ in pipes)
        assert [receiving.recv() for receiving, _ in pipes] == [0, 0]
    finally:
        for process in ranks:
            process.kill()
            process.join()
