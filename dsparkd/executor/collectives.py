"""torch.distributed between the two ranks: one swap of tensors, and what is made of it.

Host data (plan words, barriers, experts on cpu) goes over gloo. Experts on cuda go by stores into the peer's memory
where their words fit into what is kept for them, else over NCCL; or over gloo through host memory where both ranks
share one device, which NCCL refuses. Both ranks know both numbers of rows, so they go the same way. Everything binds to
loopback; the ranks find each other by a port that rank 0 tells rank 1 over a socketpair made before the fork.

Letters: T tokens of this rank, R rows of both ranks, C packed width, D width.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Sequence
from datetime import timedelta
from enum import Enum, auto
from typing import TYPE_CHECKING, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import (  # torch.distributed re-exports them, but not for a type checker
    PrefixStore,
    ProcessGroupGloo,
    Store,
    TCPStore,
)

from dsparkd.errors import CapabilityError, PeerError
from dsparkd.kernels.crossing import Crossing, Parting

if TYPE_CHECKING:
    from dsparkd.kernels.cuda.peer import PeerWords

NUM_RANKS = 2
FEW_ROWS = 64  # of a rank, up to which their words go while they are made: all programs that make them fit at once
FEW_WORDS = 1 << 19  # that such rows may have
PEER_WORDS = 1 << 24  # that an exchange of more rows may store into the peer's memory: 4,000 rows of 4,096
HOST = "127.0.0.1"
_PORT = struct.Struct("<H")


class _Work(Protocol):
    """A transfer under way."""

    def wait(self, timeout: timedelta = ...) -> bool:
        """Return when it is done. Raises RuntimeError when it failed or its time is up."""


class _Gloo(Protocol):
    """What is used of torch's gloo group; its stubs leave this out."""

    def send(self, tensors: list[Tensor], to_rank: int, tag: int) -> _Work: ...

    def recv(self, tensors: list[Tensor], from_rank: int, tag: int) -> _Work: ...


class Swap(Protocol):
    """Give the peer a tensor and take one from it."""

    def __call__(self, sent: Tensor, received: Tensor) -> None:
        """Both contiguous, of one dtype, and as long as the peer's counterpart; either may be empty."""


class RankGroups:
    """The process groups of one rank, owned by its tick thread. Every operation is collective."""

    def __init__(
        self, dp_rank: int, store: Store, device: torch.device, timeout_s: float, *, shares_device: bool = False
    ) -> None:
        self._dp_rank = dp_rank
        # Kept alive: rank 0's store is the server that both groups were made through.
        self._store = store
        self._device = device
        self._timeout_s = timeout_s
        self._gloo = _open_gloo(dp_rank, store, timeout_s)
        self._has_nccl = device.type == "cuda" and not shares_device
        self._words: PeerWords | None = None
        if self._has_nccl:
            _open_nccl(dp_rank, store, device, timeout_s)
            self._words = _open_words(dp_rank, device, timeout_s)

    @classmethod
    def open(
        cls,
        dp_rank: int,
        peer: socket.socket,
        device: torch.device,
        *,
        startup_timeout_s: float,
        timeout_s: float,
        shares_device: bool = False,
    ) -> RankGroups:
        """Meet the peer within startup_timeout_s; later operations fail after timeout_s. Raises PeerError."""
        try:
            store = _open_store(dp_rank, peer, startup_timeout_s)
            return cls(dp_rank, store, device, timeout_s, shares_device=shares_device)
        except (OSError, RuntimeError) as error:
            raise PeerError(f"the ranks did not meet within {startup_timeout_s:g} s: {_first_line(error)}") from error

    def gather(self, words: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return both ranks' words, in rank order; as many on both, 64 bits each. Raises PeerError."""
        sent = torch.tensor(words, dtype=torch.int64)
        received = torch.empty_like(sent)
        self.swap_host(sent, received)
        own, peers = tuple(words), tuple(received.tolist())
        return (own, peers) if self._dp_rank == 0 else (peers, own)

    def barrier(self, timeout_s: float) -> None:
        """Return when the peer is here, too. Raises PeerError that names it after timeout_s."""
        sent, received = torch.zeros(1), torch.zeros(1)
        self._swap_host(sent, received, timeout_s, f"rank {1 - self._dp_rank} did not reach the barrier")

    def swap_host(self, sent: Tensor, received: Tensor) -> None:
        """Swap tensors in host memory over gloo. Raises PeerError when the peer does not come or has gone."""
        self._swap_host(sent, received, self._timeout_s, f"rank {1 - self._dp_rank} did not take part in an exchange")

    def _swap_host(self, sent: Tensor, received: Tensor, timeout_s: float, failure: str) -> None:
        peer, timeout = 1 - self._dp_rank, timedelta(seconds=timeout_s)
        try:
            # A receive and a send: a third less time than one all-to-all or all-gather, which hop through gloo's
            # own threads (two busy ranks of one core each: 120 us against 155 and 190).
            works = [self._gloo.recv([received], peer, 0)] if received.numel() else []
            works += [self._gloo.send([sent], peer, 0)] if sent.numel() else []
            for work in works:
                work.wait(timeout)
        except RuntimeError as error:
            raise PeerError(f"{failure}: {_first_line(error)}") from error

    def swap_staged(self, sent: Tensor, received: Tensor) -> None:
        """Swap tensors in device memory through host memory; waits for the current stream."""
        arrived = torch.empty(received.shape, dtype=received.dtype)
        self.swap_host(sent.cpu(), arrived)
        received.copy_(arrived)

    def swap_device(self, sent: Tensor, received: Tensor) -> None:
        """Swap tensors in device memory over NCCL; ordered on the current stream."""
        try:
            dist.all_to_all_single(received.view(-1), sent.view(-1), self._splits(received), self._splits(sent))
        except RuntimeError as error:
            raise PeerError(f"NCCL failed: {_first_line(error)}") from error

    def _splits(self, tensor: Tensor) -> list[int]:
        """Elements for (or from) each rank: all of them the peer's."""
        return [0, tensor.numel()] if self._dp_rank == 0 else [tensor.numel(), 0]

    def expert_exchange(self) -> SwapExpertExchange:
        """The transport of expert rows on this rank's device."""
        if self._has_nccl:
            return SwapExpertExchange(self._dp_rank, self.swap_device, self._words)
        return SwapExpertExchange(self._dp_rank, self.swap_host if self._device.type == "cpu" else self.swap_staged)

    def close(self) -> None:
        """Let go of the peer's memory, then destroy the groups, NCCL's first.

        Both ranks must have passed a barrier and use no group after it.
        """
        if self._words is not None:
            self._words.close()
        if self._has_nccl:
            dist.destroy_process_group()
        del self._gloo, self._store


class Way(Enum):
    """How a layer's rows and sums go. FEW: they are stored as the peer takes them, by the kernels that make them where
    it has rows of its own. MANY: by a kernel behind those. FAR: over a swap."""

    FEW = auto()
    MANY = auto()
    FAR = auto()


class SwapExpertExchange:
    """model.moe.ExpertExchange over a swap: rows to the peer and its rows here, partial sums back the same way.

    words: carries what fits in there instead, where the ranks reach each other's memory.
    """

    def __init__(self, dp_rank: int, swap: Swap, words: PeerWords | None = None) -> None:
        self._dp_rank = dp_rank
        self._swap = swap
        self._words = words
        self._way = Way.FAR
        self._counts = [0, 0]
        self._both: Tensor | None = None  # where the next rows are gathered, once their room is given out
        self._is_crossing = False  # the kernel that writes them there exchanges them, too
        self._peers: Tensor | None = None  # where the peer's sums come to lie, once a kernel is to wait for them

    def begin_step(self, counts: tuple[int, int]) -> None:
        """See model.moe.ExpertExchange."""
        self._counts = list(counts)
        self._both = None
        if self._words is not None:
            self._words.begin_step()

    def room(self, width: int, device: torch.device) -> Tensor:
        """See model.moe.ExpertExchange."""
        self._way = self._choose(width)
        if self._words is not None and self._way is Way.MANY:
            self._both = self._words.arrivals(sum(self._counts), width)
        else:
            self._both = torch.empty((sum(self._counts), width), dtype=torch.float32, device=device)
        return torch.split(self._both, self._counts)[self._dp_rank]

    def crossing(self) -> Crossing | None:
        """See model.moe.ExpertExchange."""
        if self._words is None or self._way is not Way.FEW:
            return None
        assert self._both is not None
        self._is_crossing = True
        return self._words.cross(torch.split(self._both, self._counts)[1 - self._dp_rank])

    def gather(self, rows: Tensor) -> Tensor:
        """See model.moe.ExpertExchange."""
        if self._both is None:
            self.room(rows.shape[1], rows.device)
        both, self._both = self._both, None
        assert both is not None
        if self._is_crossing:
            self._is_crossing = False
            return both
        parts = torch.split(both, self._counts)
        own = parts[self._dp_rank]
        if rows.data_ptr() != own.data_ptr():
            own.copy_(rows)
        if self._words is None or self._way is Way.FAR:
            self._swap(own, parts[1 - self._dp_rank])
        elif self._way is Way.MANY:
            self._words.push(own, self._dp_rank * self._counts[0] * both.shape[1])
        else:
            self._words.swap(own, parts[1 - self._dp_rank])
        return both

    def parting(self, width: int, device: torch.device) -> Parting | None:
        """See model.moe.ExpertExchange."""
        if self._words is None or self._way is not Way.FEW:
            return None
        self._peers = torch.empty((self._counts[self._dp_rank], width), dtype=torch.float32, device=device)
        return Parting(self._words.cross(self._peers), (self._counts[0], self._counts[1]), self._dp_rank)

    def combine(self, partial: Tensor) -> Sequence[Tensor]:
        """See model.moe.ExpertExchange."""
        own, peers, self._peers = partial, self._peers, None
        if peers is None:
            parts = torch.split(partial, self._counts)
            own, sent = parts[self._dp_rank], parts[1 - self._dp_rank]
            if self._words is None or self._way is Way.FAR:
                peers = torch.empty_like(own)
                self._swap(sent, peers)
            elif self._way is Way.MANY:
                peers = self._words.arrivals(*own.shape)
                self._words.push(sent, 0)
            else:
                peers = torch.empty_like(own)
                self._words.swap(sent, peers)
        return (own, peers) if self._dp_rank == 0 else (peers, own)

    def _choose(self, width: int) -> Way:
        """The way of rows of so many words, and of their sums, which have no more than twice as many."""
        most, words = max(self._counts), self._words
        if words is None:
            return Way.FAR
        if most <= FEW_ROWS and 2 * width * most <= words.few:
            return Way.FEW
        return Way.MANY if 2 * width * most <= words.many else Way.FAR


def _open_store(dp_rank: int, peer: socket.socket, timeout_s: float) -> Store:
    """Rank 0 serves the store on a port of loopback and tells rank 1 which. Raises OSError or RuntimeError."""
    timeout = timedelta(seconds=timeout_s)
    if dp_rank == 0:
        # Bound here: by itself the store listens on every interface. It takes the descriptor over.
        listener = socket.create_server((HOST, 0))
        port: int = listener.getsockname()[1]
        store = TCPStore(
            HOST, port, NUM_RANKS, True, timeout, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        peer.settimeout(timeout_s)
        peer.send(_PORT.pack(port))
        return store
    peer.settimeout(timeout_s)
    packet = peer.recv(_PORT.size)
    if not packet:
        raise OSError("rank 0 closed its socket")
    return TCPStore(HOST, _PORT.unpack(packet)[0], NUM_RANKS, False, timeout)


def _open_gloo(dp_rank: int, store: Store, timeout_s: float) -> _Gloo:
    """Connect gloo on loopback. init_process_group could be told the interface by an environment variable only."""
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [ProcessGroupGloo.create_device(hostname=HOST)]
    options._timeout = timedelta(seconds=timeout_s)
    return cast(_Gloo, ProcessGroupGloo(PrefixStore("gloo", store), dp_rank, NUM_RANKS, options))


def _open_nccl(dp_rank: int, store: Store, device: torch.device, timeout_s: float) -> None:
    """Make the default group NCCL's, connected at once. Raises CapabilityError where torch has none."""
    if not dist.is_nccl_available():
        raise CapabilityError("engine.device = 'cuda'", "NCCL in this torch build", "install torch with CUDA support")
    os.environ["NCCL_SOCKET_IFNAME"] = "lo"  # its handshake would listen on the first interface it finds
    dist.init_process_group(
        "nccl",
        store=PrefixStore("nccl", store),
        rank=dp_rank,
        world_size=NUM_RANKS,
        timeout=timedelta(seconds=timeout_s),
        device_id=device,
    )


def _open_words(dp_rank: int, device: torch.device, timeout_s: float) -> PeerWords:
    """Map each rank's memory for words that arrive into the other one. Raises CapabilityError where it cannot be."""
    from dsparkd.kernels.cuda.peer import PeerWords, memory_size  # a start on the cpu loads no compiler

    # Before its module is loaded: memory that many devices write at once is not needed, and not every host has it.
    os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
    import torch.distributed._symmetric_memory as symmetric

    group, size = dist.group.WORLD, memory_size(FEW_WORDS, PEER_WORDS)
    assert group is not None
    try:
        ours = symmetric.empty(size, dtype=torch.int64, device=device).zero_()
        torch.cuda.synchronize(device)  # the peer may store as soon as it knows the memory
        theirs = symmetric.rendezvous(ours, group.group_name).get_buffer(1 - dp_rank, (size,), torch.int64)
    except RuntimeError as error:
        raise CapabilityError(
            feature="engine.device = 'cuda'",
            missing=f"device memory that the peer can map ({_first_line(error)})",
            remedy="use two GPUs of one NVLink or PCIe domain, and a driver that shares their memory by descriptors",
        ) from error
    words = PeerWords(ours, theirs, FEW_WORDS, PEER_WORDS, timeout_s)
    words.compile()
    return words


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
