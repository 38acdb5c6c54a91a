"""What a layer's exchange of expert rows between two GPUs costs inside a CUDA graph, by how it is made.

    python -m tools.bench swaps [--rows 16 64 384] [--width 4096] [--top-k 6] [--env NAME=VALUE ...] [--json]

Two processes, one a GPU. A layer gives its rows to the peer and takes its rows, then the partial sums the same way;
LAYERS of them are captured in one graph, and the time of a replay is divided by their number. Forms: as the server does
it (of up to 64 rows marked words, which it puts into other kernels still, above it stores and a number behind them),
all-to-all as it does where more rows than fit have to go, all-gather and reduce-scatter, and copies into the peer's
memory with torch's barrier. --env sets variables of NCCL before it starts. It needs two CUDA devices, and ends with 2
where there are less.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import socket
import statistics
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import TCPStore  # torch.distributed re-exports it, but not for a type checker

from dsparkd.executor.collectives import FEW_ROWS, FEW_WORDS, PEER_WORDS
from dsparkd.kernels.cuda.peer import PeerWords, memory_size

LAYERS = 40
REPLAYS = 20
ROUNDS = 5

Layer = Callable[[Tensor, Tensor], Tensor]  # rows [T, C], partial [2 T, D] -> what comes back


class Forms:
    """Ways to make a layer's exchange between this rank and the other one."""

    def __init__(
        self, rank: int, num_rows: int, packed: int, width: int, device: torch.device, words: PeerWords
    ) -> None:
        self._rank, self._T, self._packed, self._width, self._device = rank, num_rows, packed, width, device
        self._words = words

    def stored_words(self) -> Layer:
        """As executor/collectives.py, each way in a launch of its own. Raises RuntimeError for too many rows."""
        rank, T, words = self._rank, self._T, self._words
        if T * max(2 * self._packed, self._width) > words.many:
            raise RuntimeError("does not fit")

        def few(rows: Tensor, partial: Tensor) -> Tensor:
            both = rows.new_empty((2 * T, rows.shape[1]))
            words.swap(rows, both[(1 - rank) * T : (2 - rank) * T])
            sums = partial.new_empty((T, partial.shape[1]))
            words.swap(partial[(1 - rank) * T : (2 - rank) * T], sums)
            return sums

        def many(rows: Tensor, partial: Tensor) -> Tensor:
            words.push(rows, rank * rows.numel())
            sums = words.arrivals(T, partial.shape[1])
            words.push(partial[(1 - rank) * T : (2 - rank) * T], 0)
            return sums

        return few if T <= FEW_ROWS else many

    def all_to_all(self) -> Layer:
        """As executor/collectives.py where rows go over NCCL."""
        rank, T = self._rank, self._T

        def swap(sent: Tensor, received: Tensor) -> None:
            taken, given = ([0, one.numel()] if rank == 0 else [one.numel(), 0] for one in (received, sent))
            dist.all_to_all_single(received.view(-1), sent.view(-1), taken, given)

        def layer(rows: Tensor, partial: Tensor) -> Tensor:
            both = rows.new_empty((2 * T, rows.shape[1]))
            both[rank * T : (rank + 1) * T].copy_(rows)
            swap(rows, both[(1 - rank) * T : (2 - rank) * T])
            sums = partial.new_empty((2, T, partial.shape[1]))
            sums[rank] = partial[rank * T : (rank + 1) * T]
            swap(partial[(1 - rank) * T : (2 - rank) * T], sums[1 - rank])
            return sums

        return layer

    def gather_and_scatter(self) -> Layer:
        """The sum of two is the same in either order, so a reduction keeps the bits."""
        T = self._T

        def layer(rows: Tensor, partial: Tensor) -> Tensor:
            both = rows.new_empty((2 * T, rows.shape[1]))
            dist.all_gather_into_tensor(both, rows)
            total = partial.new_empty((T, partial.shape[1]))
            dist.reduce_scatter_tensor(total, partial)
            return total

        return layer

    def peer_memory(self) -> Layer:
        """Stores over NVLink into memory that the peer reads, and a barrier behind them."""
        import torch.distributed._symmetric_memory as symmetric

        rank, T = self._rank, self._T
        world = dist.group.WORLD
        assert world is not None
        parts = []
        for shape in ((2 * T, self._packed), (2, T, self._width)):
            own = symmetric.empty(shape, dtype=torch.float32, device=self._device)
            handle = symmetric.rendezvous(own, world.group_name)
            parts.append((own, handle.get_buffer(1 - rank, shape, torch.float32), handle))
        (both, peer_both, gathered), (sums, peer_sums, combined) = parts

        def layer(rows: Tensor, partial: Tensor) -> Tensor:
            mine = slice(rank * T, (rank + 1) * T)
            peer_both[mine].copy_(rows)
            both[mine].copy_(rows)
            gathered.barrier(channel=0)
            peer_sums[rank].copy_(partial[(1 - rank) * T : (2 - rank) * T])
            sums[rank].copy_(partial[mine])
            combined.barrier(channel=1)
            return sums

        return layer


def measure(layer: Layer, rows: Tensor, partial: Tensor, words: PeerWords) -> float:
    """Microseconds of a layer's exchange inside of a graph of LAYERS."""

    def body() -> None:
        words.begin_step()
        for _ in range(LAYERS):
            layer(rows, partial)

    body()
    torch.cuda.synchronize()
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        graph.capture_begin(capture_error_mode="thread_local")
        body()
        graph.capture_end()
    times: list[float] = []
    for _ in range(ROUNDS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        graph.replay()
        begin.record()
        for _ in range(REPLAYS):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / REPLAYS / LAYERS)
    graph.reset()
    return statistics.median(times)


def open_words(rank: int, device: torch.device) -> PeerWords:
    """Map each rank's memory for words into the other one, as the server does."""
    import torch.distributed._symmetric_memory as symmetric

    group, size = dist.group.WORLD, memory_size(FEW_WORDS, PEER_WORDS)
    assert group is not None
    ours = symmetric.empty(size, dtype=torch.int64, device=device).zero_()
    torch.cuda.synchronize(device)
    theirs = symmetric.rendezvous(ours, group.group_name).get_buffer(1 - rank, (size,), torch.int64)
    return PeerWords(ours, theirs, FEW_WORDS, PEER_WORDS, timeout_s=20)


def serve_rank(rank: int, port: int, arguments: argparse.Namespace, result: Connection) -> None:
    """Measure every form on one rank, and send what came out: by form, a time or why there is none."""
    os.environ |= {"NCCL_SOCKET_IFNAME": "lo", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
    os.environ |= dict(each.split("=", 1) for each in arguments.env)
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    store = TCPStore("127.0.0.1", port, 2, rank == 0)
    dist.init_process_group("nccl", store=store, rank=rank, world_size=2, device_id=device)
    words = open_words(rank, device)
    packed = arguments.width // 2 + 2 * arguments.top_k
    found: list[tuple[int, str, float | str]] = []
    for num_rows in arguments.rows:
        rows = torch.zeros((num_rows, packed), device=device)
        partial = torch.zeros((2 * num_rows, arguments.width), device=device)
        forms = Forms(rank, num_rows, packed, arguments.width, device, words)
        for name in ("stored_words", "all_to_all", "gather_and_scatter", "peer_memory"):
            try:
                found.append((num_rows, name, round(measure(getattr(forms, name)(), rows, partial, words), 2)))
            except (RuntimeError, AttributeError) as error:
                found.append((num_rows, name, str(error).splitlines()[0][:80] if str(error) else repr(error)))
    result.send(found)
    dist.destroy_process_group()


def main(argv: Sequence[str]) -> int:
    """Run both ranks and print rank 0's figures; 2 where there are no two devices."""
    parser = argparse.ArgumentParser(prog="python -m tools.bench swaps", description="a layer's exchange in a graph")
    parser.add_argument("--rows", type=int, nargs="+", default=[16, 64, 384], help="padded tokens of each rank")
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--top-k", type=int, default=6)
    parser.add_argument("--env", nargs="*", default=[], help="variables of NCCL")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    arguments = parser.parse_args(argv)
    if torch.cuda.device_count() < 2:
        print("swaps needs two CUDA devices: nothing was measured")
        return 2
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe(duplex=False) for _ in range(2)]
    ranks = [
        context.Process(target=serve_rank, args=(rank, port, arguments, pipes[rank][1]), daemon=True)
        for rank in range(2)
    ]
    for each in ranks:
        each.start()
    found = pipes[0][0].recv() if pipes[0][0].poll(120) else []
    for each in ranks:
        each.join(20)
    if arguments.json:
        print(json.dumps({"env": arguments.env, "us_a_layer": found}))
    else:
        print(f"microseconds of a layer's exchange, {' '.join(arguments.env) or 'NCCL as it is'}")
        for num_rows, name, value in found:
            print(f"{num_rows:5} rows  {name:20} {value}")
    return 0 if found else 1
