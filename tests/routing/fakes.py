"""A router with stand-ins at the far ends of its real channels: two ranks and a detokenizer in the same loop."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable, Iterator

from dsparkd import messages
from dsparkd.config import Config, EngineConfig, HealthConfig, KVConfig, LimitsConfig, RoutingConfig
from dsparkd.errors import PeerError
from dsparkd.ipc.channel import AsyncChannel
from dsparkd.messages import (
    Abort,
    Admitted,
    Finish,
    FinishReason,
    LoadSnapshot,
    Progress,
    RankReady,
    RoutedBatch,
    SamplingParams,
    Shutdown,
    TextDelta,
    TextDeltas,
    TokenizedRequest,
)
from dsparkd.metrics import Registry
from dsparkd.routing.router import Item, Router

Script = Callable[[TokenizedRequest], list[TextDelta]]


class Clock:
    """A clock that stands still until it is moved; nanoseconds."""

    def __init__(self, now_ns: int = 1_000_000_000) -> None:
        self.now_ns = now_ns

    def __call__(self) -> int:
        return self.now_ns

    def advance(self, seconds: float) -> None:
        self.now_ns += int(seconds * 1e9)


def make_config(
    checkpoint: str = "/nowhere",
    limits: LimitsConfig | None = None,
    routing: RoutingConfig | None = None,
    health: HealthConfig | None = None,
    max_context_tokens: int = 4096,
    api_keys_file: str = "",
) -> Config:
    from dsparkd.config import ServerConfig

    return Config(
        engine=EngineConfig(checkpoint=checkpoint, device="cpu", max_context_tokens=max_context_tokens),
        kv=KVConfig(device_bytes=1 << 20),
        limits=limits or LimitsConfig(),
        routing=routing or RoutingConfig(),
        health=health or HealthConfig(),
        server=ServerConfig(api_keys_file=api_keys_file),
    )


def make_item(request_id: str, dp_rank: int | None = None, num_prompt_tokens: int = 4) -> Item:
    request = TokenizedRequest(
        request_id=request_id,
        prompt_ids=tuple(range(num_prompt_tokens)),
        sampling=SamplingParams(max_tokens=8, seed=1),
        received_ns=1,
        encoded_ns=2,
        tokenized_ns=3,
        dispatched_ns=0,
    )
    return Item(request, dp_rank)


def make_snapshot(dp_rank: int, sequence: int, **fields: int | bool) -> LoadSnapshot:
    values: dict[str, int | bool] = {
        "published_ns": 1,
        "frame": 0,
        "tick": sequence,
        "parked": False,
        "outstanding_requests": 0,
        "outstanding_tokens": 0,
        "waiting_requests": 0,
    }
    return LoadSnapshot(dp_rank=dp_rank, sequence=sequence, **(values | fields))  # type: ignore[arg-type]


def make_ready(dp_rank: int, longest_tick_s: float = 0.01) -> RankReady:
    return RankReady(
        dp_rank=dp_rank,
        device="cpu",
        weight_bytes=1,
        kv_bytes={"full": 2},
        num_pages=3,
        num_snapshots=4,
        longest_tick_s=longest_tick_s,
        gc_frozen_objects=5,
        paths=(messages.PathState("gloo_exchange", "active", "configured"),),
    )


def text_delta(
    request_id: str, text: str, token_ids: tuple[int, ...] = (), finish: Finish | None = None, **more: object
) -> TextDelta:
    return TextDelta(request_id=request_id, text=text, token_ids=token_ids, finish=finish, **more)  # type: ignore[arg-type]


def make_finish(
    reason: FinishReason = "stop", prompt_tokens: int = 4, output_tokens: int = 1, **more: object
) -> Finish:
    return Finish(reason=reason, prompt_tokens=prompt_tokens, cached_tokens=0, output_tokens=output_tokens, **more)  # type: ignore[arg-type]


class FakeRank:
    """The far end of one rank's channel; keeps what it received and answers by hand or by script."""

    def __init__(self, channel: AsyncChannel[messages.ToRank], backend: FakeBackend) -> None:
        self.channel = channel
        self.received: list[messages.ToRank] = []
        self._backend = backend

    @property
    def batches(self) -> list[RoutedBatch]:
        return [message for message in self.received if isinstance(message, RoutedBatch)]

    @property
    def request_ids(self) -> list[str]:
        return [request.request_id for batch in self.batches for request in batch.requests]

    @property
    def aborted(self) -> list[str]:
        return [message.request_id for message in self.received if isinstance(message, Abort)]

    async def read(self) -> None:
        with contextlib.suppress(PeerError):
            while True:
                for message in await self.channel.receive():
                    self.received.append(message)
                    self._backend.changed.set()
                    await self._answer(message)

    async def _answer(self, message: messages.ToRank) -> None:
        backend = self._backend
        match message:
            case RoutedBatch():
                if backend.script is None:
                    return
                for request in message.requests:
                    await self.channel.send(Admitted(request.request_id, 1))
                for request in message.requests:
                    await backend.say(*backend.script(request))
            case Abort():
                if backend.answers_aborts:
                    await backend.say(text_delta(message.request_id, "", finish=make_finish("abort")))
            case Shutdown():
                pass


class FakeBackend:
    """Router, its stand-ins and what they share. script None: the test answers by hand."""

    def __init__(self, config: Config, clock: Callable[[], int] | None = None) -> None:
        self.config = config
        self.registry = Registry()
        self.script: Script | None = None
        self.answers_aborts = True
        self.changed = asyncio.Event()
        self.progress: list[Progress] = []
        self.board: dict[int, LoadSnapshot] = {}  # what stands in each rank's place
        self.read_place: Callable[[int], LoadSnapshot | None] = self.board.get
        self._clock = clock

    async def open(self) -> None:
        """Join the channels; nothing is ready yet."""
        parents, children = zip(*(socket.socketpair() for _ in range(3)), strict=True)
        timeout_s = self.config.routing.send_timeout_s
        rank_channels = [
            await AsyncChannel.open(sock, messages.decode_from_rank, send_timeout_s=timeout_s) for sock in parents[:2]
        ]
        detokenizer = await AsyncChannel.open(parents[2], messages.decode_from_detokenizer, send_timeout_s=timeout_s)
        clock = {} if self._clock is None else {"clock": self._clock}
        self.router = Router(
            self.config,
            (rank_channels[0], rank_channels[1]),
            detokenizer,
            self.registry,
            board=lambda dp_rank: self.read_place(dp_rank),
            on_progress=self.progress.append,
            **clock,
        )
        self.ranks = [
            FakeRank(await AsyncChannel.open(sock, messages.decode_to_rank, send_timeout_s=timeout_s), self)
            for sock in children[:2]
        ]
        self.detokenizer = await AsyncChannel.open(
            children[2], messages.decode_to_detokenizer, send_timeout_s=timeout_s
        )
        self._parents = [*rank_channels, detokenizer]
        self.running = asyncio.ensure_future(self.router.run())
        self._reading = [asyncio.ensure_future(rank.read()) for rank in self.ranks]

    async def start(self) -> None:
        """Say that everybody is warm."""
        for dp_rank, rank in enumerate(self.ranks):
            await rank.channel.send(make_ready(dp_rank))
        await self.detokenizer.send(Progress(-1, "detokenizer_ready", 1, 1))
        await self.router.started()

    async def say(self, *deltas: TextDelta) -> None:
        """Send text as the detokenizer."""
        await self.detokenizer.send(TextDeltas(deltas))

    async def until(self, done: Callable[[], bool]) -> None:
        """Let the loop turn until done(); fails the test after a while."""
        async with asyncio.timeout(5):
            while not done():  # noqa: ASYNC110  the condition may lie anywhere
                await asyncio.sleep(0.001)

    async def close(self) -> None:
        for task in (self.running, *self._reading):
            task.cancel()
        await asyncio.gather(self.running, *self._reading, return_exceptions=True)
        for channel in (*self._parents, *(rank.channel for rank in self.ranks), self.detokenizer):
            channel.close()


@contextlib.asynccontextmanager
async def started_backend(
    config: Config | None = None, clock: Callable[[], int] | None = None
) -> AsyncIterator[FakeBackend]:
    backend = FakeBackend(config or make_config(), clock)
    await backend.open()
    try:
        await backend.start()
        yield backend
    finally:
        await backend.close()


def metric(registry: Registry, name: str, **labels: str) -> float:
    """One series of the exposition, 0 when it is not there."""
    for line in _series(registry):
        head, _, value = line.rpartition(" ")
        found, _, inside = head.partition("{")
        given = dict(part.split("=", 1) for part in inside.rstrip("}").split(",") if part)
        if found == name and {key: value.strip('"') for key, value in given.items()} == labels:
            return float(value)
    return 0.0


def _series(registry: Registry) -> Iterator[str]:
    return (line for line in registry.render().decode().splitlines() if not line.startswith("#"))
