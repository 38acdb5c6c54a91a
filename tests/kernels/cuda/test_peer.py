"""Words that two ranks store into each other's memory: on one device, and between two processes that share memory."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection

import pytest
import torch
from torch import Tensor
from triton.runtime import interpreter

from dsparkd.kernels.cuda.peer import NUM_BOXES, NUM_PROGRAMS, STEP, PeerWords, memory_size
from tests.kernels.cuda.values import NUMBER, Peers, arrive, noise

LIMIT_S = 60.0
CPU = torch.device("cpu")
interpreted = pytest.mark.skipif("TRITON_INTERPRET" not in os.environ, reason="takes memory of the host")


def asserting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the interpreter assert what the device does."""
    builder = interpreter.interpreter_builder
    monkeypatch.setattr(builder, "options", dataclasses.replace(builder.options, debug=True, sanitize_overflow=False))


@pytest.mark.parametrize(("num_sent", "num_received"), [(700, 300), (5, 1000), (512, 512), (0, 3), (3, 0)])
def test_few_words_go_to_the_peers_box_and_come_from_the_own(
    device: torch.device, num_sent: int, num_received: int
) -> None:
    """The boxes are taken in turn, numbers rise, and nothing beyond the words is touched."""
    near = Peers(device, 1024)
    near.words.begin_step()
    for index in range(3):
        sent, coming = noise(num_sent, seed=index).to(device), noise(num_received, seed=9 + index).to(device)
        arrive(near.box(near.ours, index), coming, NUMBER + index)
        before, received = near.theirs.clone(), torch.full((num_received + 2,), 7.0, device=device)
        near.words.swap(sent, received[:-2])
        assert torch.equal(received[:-2], coming)
        assert received[-2:].tolist() == [7.0, 7.0]
        arrive(near.box(before, index), sent, NUMBER + index)
        assert torch.equal(near.theirs, before)
        assert not near.ours.any()


def test_words_are_bit_patterns(device: torch.device) -> None:
    """Packed rows hold ids and pairs of bfloat16: NaNs of any payload and denormals must come as they went."""
    near = Peers(device, 512)
    near.words.begin_step()
    bits = torch.randint(-(2**31), 2**31, (512,), generator=torch.Generator().manual_seed(1)).int().to(device)
    bits[:4] = torch.tensor([-1, 0x7F800001, 1, -(2**31)])
    arrive(near.box(near.ours, 0), bits, NUMBER)
    wanted, received = near.ours.clone(), torch.empty(512, device=device)
    near.words.swap(bits.view(torch.float32), received)
    assert torch.equal(received.view(torch.int32), bits)
    assert torch.equal(near.theirs, wanted)


@interpreted
def test_what_bears_another_number_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that were not in step would exchange words of different layers."""
    asserting(monkeypatch)
    near = Peers(CPU, 64)
    near.words.begin_step()
    arrive(near.box(near.ours, 0), noise(64), NUMBER - STEP)
    with pytest.raises(Exception, match="words did not come"):
        near.words.swap(noise(64), torch.empty(64))


def test_no_exchange_has_the_number_of_a_word_that_is_not_there(device: torch.device) -> None:
    """Numbers come again: zero is skipped in every step, and what was taken is zero again."""
    near = Peers(device, 64)
    for step in (1, 2, (1 << 22) - 1, 1 << 22, (1 << 22) + 1):
        near.words._number.fill_((1 + (step - 1) * STEP + (1 << 31)) % (1 << 32) - (1 << 31))
        near.words.begin_step()
        number = int(near.words._number)
        assert number % STEP == 1
        coming, received = noise(64, seed=step).to(device), torch.empty(64, device=device)
        arrive(near.box(near.ours, 0), coming, number)
        near.words.swap(coming, received)
        assert torch.equal(received, coming)
        assert not near.ours.any()


@pytest.mark.parametrize(("num_sent", "place"), [(0, 0), (4, 8), (7, 3), (5000, 4), (600_000, 0)])
def test_many_words_lie_where_they_are_read(device: torch.device, num_sent: int, place: int) -> None:
    """From a place on, in two memories in turn, and the number of the exchange behind them from every program."""
    near = Peers(device, 8, 1 << 20)
    places = near.theirs[NUM_BOXES * 8 :].view(torch.float32)
    flags = near.theirs[-NUM_PROGRAMS:].view(torch.int32).view(NUM_BOXES, NUM_PROGRAMS)
    own_flags = near.ours[-NUM_PROGRAMS:].view(torch.int32).view(NUM_BOXES, NUM_PROGRAMS)
    near.words.begin_step()
    for index in range(3):
        sent, box = noise(num_sent, seed=index).to(device), index % 2
        own_flags[box] = NUMBER + index
        arrivals = near.words.arrivals(3, 5)
        wanted = near.theirs.clone()
        start = (box << 20) + place
        wanted[NUM_BOXES * 8 :].view(torch.float32)[start : start + num_sent] = sent
        wanted[-NUM_PROGRAMS:].view(torch.int32).view(NUM_BOXES, NUM_PROGRAMS)[box] = NUMBER + index
        near.words.push(sent, place)
        assert torch.equal(places[start : start + num_sent], sent)
        assert (flags[box] == NUMBER + index).all()
        assert torch.equal(near.theirs, wanted)
        assert not own_flags.any()
        near.ours[NUM_BOXES * 8 :].view(torch.float32)[(box << 20) : (box << 20) + 15] = torch.arange(15.0)
        assert arrivals.flatten().tolist() == list(range(15))


def few(near: Peers) -> None:
    coming = noise(64)
    arrive(near.box(near.ours, 0), coming, NUMBER)
    near.ours[63] -= 1 << 32  # of the exchange before
    near.words.swap(coming, torch.empty(64))


def many(near: Peers) -> None:
    near.ours[-NUM_PROGRAMS:].view(torch.int32)[: NUM_PROGRAMS - 1] = NUMBER
    near.words.push(noise(64), 0)


@interpreted
@pytest.mark.parametrize("exchange", [few, many])
def test_a_peer_that_does_not_come_is_no_endless_wait(
    exchange: Callable[[Peers], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """L-37: past the deadline the device fails instead of hanging, though only a single word is missing."""
    asserting(monkeypatch)
    near = Peers(CPU, 64)
    near.words.begin_step()
    with pytest.raises(Exception, match="words did not come"):
        exchange(near)


def test_forms_are_compiled_without_an_exchange(device: torch.device) -> None:
    """At start the peer may be minutes behind; nothing is stored, nothing waited for, and no turn is taken."""
    near = Peers(device, 64)
    near.words.compile()
    assert not near.ours.any()
    assert not near.theirs.any()
    near.words.begin_step()
    arrive(near.box(near.ours, 0), noise(8), NUMBER)
    near.words.swap(noise(8).to(device), torch.empty(8, device=device))
    assert not near.box(near.ours, 1).any()
    assert near.box(near.theirs, 0)[:8].all()


def steps() -> Sequence[tuple[int, int]]:
    """Both ranks' rows in the steps that two processes make: none, few, and more of either."""
    return [(1, 1), (3, 0), (3, 0), (0, 2), (0, 2), (16, 5), (5, 16), (1, 1)] * 2


def live(rank: int, ours: Tensor, theirs: Tensor, result: Connection) -> None:
    """Make the steps' exchanges as one rank: rows to the peer, and sums that came of the peer's rows back.

    Steps of few words and of many take turns in pairs.
    """
    words, wrong = PeerWords(ours, theirs, 1024, 1024, LIMIT_S), 0
    for step, counts in enumerate(steps()):
        words.begin_step()
        own, peers = counts[rank], counts[1 - rank]
        for layer in range(2):
            value = float(100 * step + 10 * layer)
            rows, came = torch.full((own, 20), value + rank), torch.empty((peers, 20))
            if step % 4 < 2:
                words.swap(rows, came)
            else:
                came = words.arrivals(sum(counts), 20)[(1 - rank) * counts[0] :][:peers]
                words.push(rows, rank * counts[0] * 20)
            wrong += int((came != value + 1 - rank).sum())
            sums, back = came.mean(1, keepdim=True).expand(-1, 36) + torch.arange(36.0), torch.empty((own, 36))
            if step % 4 < 2:
                words.swap(sums, back)
            else:
                back = words.arrivals(own, 36)
                words.push(sums, 0)
            wrong += int((back != value + rank + torch.arange(36.0)).sum())
    result.send(wrong)


@interpreted
def test_two_processes_exchange_over_many_steps() -> None:
    """Neither waits but for words, and memory is used again: nothing is lost or taken twice, whatever the counts."""
    context = multiprocessing.get_context("spawn")
    memory = [torch.zeros(memory_size(1024, 1024), dtype=torch.int64) for _ in range(2)]
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
