"""Both ranks' groups, one thread each in this process: real gloo over real loopback sockets."""

from __future__ import annotations

import multiprocessing
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, cast

import pytest
import torch

from dsparkd.errors import PeerError
from dsparkd.executor.collectives import RankGroups, SwapExpertExchange
from dsparkd.kernels.crossing import Crossing

if TYPE_CHECKING:
    from dsparkd.kernels.cuda.peer import PeerWords

CPU = torch.device("cpu")
LIMIT_S = 20.0
T = TypeVar("T")


class Pair:
    """Two ranks that meet and then do the same things, each in its own thread."""

    def __init__(self) -> None:
        self.threads = ThreadPoolExecutor(2)
        self.peers = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.groups = self.both(
            lambda rank: RankGroups.open(rank, self.peers[rank], CPU, startup_timeout_s=LIMIT_S, timeout_s=LIMIT_S)
        )

    def both(self, act: Callable[[int], T]) -> list[T]:
        """Run act(rank) on both ranks at once."""
        return [future.result(LIMIT_S) for future in [self.threads.submit(act, rank) for rank in (0, 1)]]

    def close(self) -> None:
        """Let go of everything."""
        self.groups.clear()
        self.threads.shutdown()
        for sock in self.peers:
            sock.close()


@pytest.fixture
def pair() -> Iterator[Pair]:
    """Two ranks that have met."""
    pair = Pair()
    yield pair
    pair.close()


def test_both_ranks_gather_the_same_words_in_rank_order(pair: Pair) -> None:
    """X-10: each rank computes the agreement for itself, so both must hold the same numbers, 64 bits wide."""
    words = [(1, -2, 2**62), (-(2**63), 0, 7)]
    for _ in range(20):
        assert pair.both(lambda rank: pair.groups[rank].gather(words[rank])) == [tuple(words)] * 2


@pytest.mark.parametrize("counts", [(16, 32), (48, 48), (16, 0), (0, 64)])
def test_expert_rows_reach_both_shards_and_partial_sums_come_back_in_rank_order(
    pair: Pair, counts: tuple[int, int]
) -> None:
    """A rank without tokens takes part with empty rows; sums must be those of rank 0 and rank 1, in this order."""
    width = 24
    rows = [
        torch.arange(count * width, dtype=torch.float32).view(count, width) + 1e6 * r for r, count in enumerate(counts)
    ]
    everything = torch.cat(rows)

    def step(rank: int) -> tuple[torch.Tensor, Sequence[torch.Tensor]]:
        exchange = pair.groups[rank].expert_exchange()
        exchange.begin_step(counts)
        gathered = exchange.gather(rows[rank])
        return gathered, exchange.combine(gathered * (rank + 2))

    for rank, (gathered, combined) in enumerate(pair.both(step)):
        assert torch.equal(gathered, everything)
        assert torch.equal(combined[0], rows[rank] * 2)
        assert torch.equal(combined[1], rows[rank] * 3)


@pytest.mark.parametrize("counts", [(16, 32), (16, 0), (0, 64)])
def test_rows_in_the_room_for_them_are_gathered_where_they_lie(pair: Pair, counts: tuple[int, int]) -> None:
    """The router writes them there, so nothing is copied; and a room is good for one gathering."""

    def step(rank: int) -> tuple[bool, torch.Tensor, torch.Tensor]:
        exchange = pair.groups[rank].expert_exchange()
        exchange.begin_step(counts)
        rows = exchange.room(8, torch.device("cpu")).fill_(rank + 1.0)
        assert rows.shape == (counts[rank], 8)
        gathered = exchange.gather(rows)
        again = exchange.gather(torch.full((counts[rank], 8), rank + 3.0))
        return rows.untyped_storage().data_ptr() == gathered.untyped_storage().data_ptr(), gathered, again

    for in_place, gathered, again in pair.both(step):
        assert in_place
        assert gathered[:, 0].tolist() == [1.0] * counts[0] + [2.0] * counts[1]
        assert again[:, 0].tolist() == [3.0] * counts[0] + [4.0] * counts[1]


def test_rows_travel_as_bit_patterns(pair: Pair) -> None:
    """Packed rows hold expert ids and bfloat16 pairs, which are NaNs and denormals when read as float32."""
    words = [torch.randint(-(2**31), 2**31, (16, 8), generator=torch.Generator().manual_seed(r)).int() for r in (0, 1)]

    def step(rank: int) -> torch.Tensor:
        exchange = pair.groups[rank].expert_exchange()
        exchange.begin_step((16, 16))
        return exchange.gather(words[rank].view(torch.float32)).view(torch.int32)

    for gathered in pair.both(step):
        assert torch.equal(gathered, torch.cat(words))


@pytest.mark.gpu
def test_ranks_on_one_device_swap_its_memory(pair: Pair) -> None:
    """engine.shared_device: NCCL refuses two ranks on one GPU, so rows go through host memory, bits unchanged."""
    device = torch.device("cuda", 0)
    sent = [torch.randn((size, 24), device=device) for size in (16, 0)]

    def step(rank: int) -> torch.Tensor:
        received = torch.full_like(sent[1 - rank], torch.nan)
        pair.groups[rank].swap_staged(sent[rank], received)
        return received

    received = pair.both(step)

    assert torch.equal(received[0], sent[1])
    assert torch.equal(received[1], sent[0])


class NearWords:
    """Carries few or many words, up to so many, and notes what it was asked for; the others go the far way."""

    def __init__(self, few: int, many: int) -> None:
        self.few, self.many = few, many
        self.calls: list[str] = []

    def begin_step(self) -> None:
        self.calls.append("begin")

    def swap(self, sent: torch.Tensor, received: torch.Tensor) -> None:
        self.calls.append(f"swap {sent.numel()} {received.numel()}")

    def cross(self, received: torch.Tensor) -> Crossing:
        self.calls.append(f"cross {received.numel()}")
        return Crossing(received, received, received, 0, 1, received)

    def arrivals(self, rows: int, width: int) -> torch.Tensor:
        self.calls.append(f"arrivals {rows} {width}")
        return torch.full((rows, width), 7.0)

    def push(self, sent: torch.Tensor, place: int) -> None:
        self.calls.append(f"push {sent.numel()} to {place}")


def exchange_over(rank: int, few: int, many: int) -> tuple[SwapExpertExchange, NearWords, list[str]]:
    """An exchange, what it asks of the near way, and what of the far one."""
    near, far = NearWords(few, many), NearWords(0, 0)
    return SwapExpertExchange(rank, far.swap, cast("PeerWords", near)), near, far.calls


@pytest.mark.parametrize(
    ("few", "many", "way"), [(40, 400, "cross"), (39, 40, "push"), (0, 40, "push"), (39, 39, "far"), (0, 0, "far")]
)
@pytest.mark.parametrize("counts", [(3, 5), (5, 3), (0, 5)])
def test_both_ranks_choose_the_same_way(counts: tuple[int, int], few: int, many: int, way: str) -> None:
    """The larger rank decides: one that stored while the other waited for NCCL would hang both. A step is announced
    even if nothing of it goes a near way, so that its number is the same on both."""
    for rank in (0, 1):
        exchange, near, far = exchange_over(rank, few, many)
        own, peers, device = counts[rank], counts[1 - rank], torch.device("cpu")
        exchange.begin_step(counts)
        rows = exchange.room(4, device)
        assert (exchange.crossing() is not None) == (way == "cross")
        exchange.gather(rows)
        assert (exchange.parting(8, device) is not None) == (way == "cross")
        exchange.combine(torch.zeros(own if way == "cross" else sum(counts), 8))
        place = counts[0] * 4 * rank
        wanted = {
            "cross": ["begin", f"cross {4 * peers}", f"cross {8 * own}"],
            "push": [
                *("begin", f"arrivals {sum(counts)} 4", f"push {4 * own} to {place}"),
                *(f"arrivals {own} 8", f"push {8 * peers} to 0"),
            ],
            "far": ["begin"],
        }
        assert near.calls == wanted[way]
        assert far == ([f"swap {4 * own} {4 * peers}", f"swap {8 * peers} {8 * own}"] if way == "far" else [])


def test_more_than_few_rows_go_behind_what_makes_them() -> None:
    """All programs that wait for words have to fit on the device at once."""
    for most, is_few in ((64, True), (65, False)):
        exchange, _, _ = exchange_over(0, 10_000, 10_000)
        exchange.begin_step((most, 2))
        exchange.room(4, torch.device("cpu"))
        assert (exchange.crossing() is not None) == is_few


@pytest.mark.parametrize("rank", [0, 1])
def test_rows_that_cross_while_they_are_made_lie_where_they_always_do(rank: int) -> None:
    """Whoever writes them brings the peer's; sums stay in rank order."""
    exchange, _, _ = exchange_over(rank, 1000, 1000)
    counts, device = (3, 5), torch.device("cpu")
    for _ in range(2):
        exchange.begin_step(counts)
        rows, crossing = exchange.room(4, device).fill_(rank), exchange.crossing()
        assert crossing is not None
        crossing.received.fill_(1 - rank)
        assert exchange.gather(rows)[:, 0].tolist() == [0.0] * counts[0] + [1.0] * counts[1]
        parting = exchange.parting(8, device)
        assert parting is not None
        assert (parting.counts, parting.rank) == (counts, rank)
        parting.crossing.received.fill_(7.0)
        sums = exchange.combine(torch.full((counts[rank], 8), 5.0))
        assert [float(part[0, 0]) for part in sums] == ([5.0, 7.0] if rank == 0 else [7.0, 5.0])


@pytest.mark.parametrize("rank", [0, 1])
def test_many_rows_lie_in_memory_that_the_peer_stores_into(rank: int) -> None:
    """This rank's are written there, too, and nothing is copied; sums stay in rank order."""
    exchange, _, _ = exchange_over(rank, 0, 1000)
    exchange.begin_step((3, 5))
    rows = exchange.room(4, torch.device("cpu")).fill_(1.0)
    wanted = [1.0] * 3 + [7.0] * 5 if rank == 0 else [7.0] * 3 + [1.0] * 5
    assert exchange.gather(rows)[:, 0].tolist() == wanted
    sums = exchange.combine(torch.full((8, 8), 5.0))
    assert [float(part[0, 0]) for part in sums] == ([5.0, 7.0] if rank == 0 else [7.0, 5.0])


def test_a_rank_without_rows_takes_them_in_a_launch_of_its_own() -> None:
    """No kernel of its own writes rows for it to wait beside."""
    exchange, near, _ = exchange_over(0, 1000, 1000)
    exchange.begin_step((0, 3))
    exchange.gather(torch.empty((0, 4)))
    assert exchange.parting(8, torch.device("cpu")) is not None
    assert near.calls == ["begin", "swap 0 12", "cross 0"]


def wrong_replays(groups: RankGroups, exchange: SwapExpertExchange, rank: int, count: int) -> int:
    """Replay a captured step of three layers, its rows changing each time, and count what NCCL brings otherwise."""
    device, width, most = torch.device("cuda", rank), 2060, 4096
    rows = torch.randn((count, width), generator=torch.Generator().manual_seed(rank)).to(device)
    gathered, came = torch.empty((3, 2 * count, width), device=device), torch.empty((3, count, most), device=device)

    def sums(layer: int, rows: torch.Tensor, rank: int) -> torch.Tensor:
        return (rows + layer).repeat(1, 2)[:, :most] * (rank + 2)

    def step() -> None:
        rows.add_(1.0)
        exchange.begin_step((count, count))
        for layer in range(3):
            own = exchange.room(width, device)
            own.copy_(rows + layer)
            gathered[layer] = exchange.gather(own)
            came[layer] = exchange.combine(sums(0, gathered[layer], rank))[1 - rank]

    step()
    torch.cuda.synchronize()
    graph, wanted, wrong = torch.cuda.CUDAGraph(), torch.empty_like(rows), 0
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        step()
    for _ in range(250):
        graph.replay()
        groups.swap_device(rows, wanted)
        for layer in range(3):
            wrong += not torch.equal(gathered[layer, (1 - rank) * count :][:count], wanted + layer)
            wrong += not torch.equal(came[layer], sums(layer, rows, 1 - rank))
    graph.reset()
    return wrong


def live_on_one_of_two_devices(rank: int, peer: socket.socket, result: Connection) -> None:
    """Open a rank, compare, and close it in order."""
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    groups = RankGroups.open(rank, peer, device, startup_timeout_s=LIMIT_S, timeout_s=LIMIT_S)
    exchange = groups.expert_exchange()
    wrong = sum(wrong_replays(groups, exchange, rank, count) for count in (1, 3, 64, 384))
    groups.barrier(LIMIT_S)
    del exchange
    groups.close()
    result.send(wrong)


@pytest.mark.gpu2
def test_words_stored_into_the_peers_memory_are_those_of_nccl() -> None:
    """Replayed a thousand times with other words each time, of few and of many rows: to the bit."""
    context = multiprocessing.get_context("spawn")
    peers, pipes = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET), [context.Pipe(False) for _ in range(2)]
    ranks = [
        context.Process(target=live_on_one_of_two_devices, args=(rank, peers[rank], pipes[rank][1]))
        for rank in range(2)
    ]
    for process in ranks:
        process.start()
    try:
        assert all(receiving.poll(60) for receiving, _ in pipes)
        assert [receiving.recv() for receiving, _ in pipes] == [0, 0]
    finally:
        for process, peer in zip(ranks, peers, strict=True):
            process.join(LIMIT_S)
            process.kill()
            peer.close()


def test_a_barrier_that_the_peer_does_not_reach_names_it(pair: Pair) -> None:
    """L-37: past the deadline the rank knows who is missing instead of hanging."""
    with pytest.raises(PeerError, match="rank 1 did not reach the barrier"):
        pair.groups[0].barrier(0.2)


def test_a_barrier_that_both_reach_lets_both_pass(pair: Pair) -> None:
    """Teardown begins with it."""
    assert pair.both(lambda rank: pair.groups[rank].barrier(LIMIT_S)) == [None, None]


def test_a_peer_that_dies_fails_the_exchange_at_once(pair: Pair) -> None:
    """A dead peer's sockets close; waiting for the whole time-out would keep clients hanging."""
    pair.both(lambda rank: pair.groups[rank].barrier(LIMIT_S))
    waiting = pair.threads.submit(pair.groups[0].gather, (1, 2))
    pair.groups.pop().close()

    with pytest.raises(PeerError, match="rank 1 did not take part"):
        waiting.result(LIMIT_S)


def test_ranks_that_do_not_meet_in_time_fail() -> None:
    """A peer that hangs in its start must not hang this one for ever."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs, pytest.raises(PeerError, match="did not meet within"):
        RankGroups.open(1, ours, CPU, startup_timeout_s=0.2, timeout_s=1)


def test_a_peer_that_closed_before_the_meeting_fails_it() -> None:
    """End-of-file is the peer's death, also before the first exchange."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    theirs.close()
    with ours, pytest.raises(PeerError, match="did not meet"):
        RankGroups.open(1, ours, CPU, startup_timeout_s=LIMIT_S, timeout_s=1)


def listening_addresses() -> set[str]:
    """Local addresses (hexadecimal) on which this process listens for TCP."""
    inodes = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        try:
            target = os.readlink(descriptor)
        except FileNotFoundError:
            continue  # the descriptor that lists the directory
        inodes.add(target.removeprefix("socket:[").removesuffix("]"))
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                found.add(fields[1].split(":")[0])
    return found


def test_nothing_listens_beyond_loopback(pair: Pair) -> None:
    """Decision 19: the store and gloo would by themselves listen on every interface of the host."""
    assert listening_addresses() == {"0100007F"}
