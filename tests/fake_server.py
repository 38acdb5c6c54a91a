"""A dsparkd whose children are stand-ins: the real supervisor, router, channels and HTTP server without a model.

Run as a script with a configuration file. What a child does wrong is chosen by FAKE_RANK0, FAKE_RANK1 and
FAKE_DETOKENIZER: start_78, start_70, start_exit, start_hang, start_raise, hang_at_shutdown, crash_at_shutdown,
early_farewell, bug_at_crash (a request of the id crash is one too many). SIGUSR1 makes a child exit 0, SIGUSR2 exit 1.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec

from dsparkd import config as config_module
from dsparkd import crash, log, supervisor
from dsparkd.config import Config, Hardware
from dsparkd.errors import FatalError, InvariantError, PeerError, StartError
from dsparkd.ipc.board import BoardWriter, open_board
from dsparkd.ipc.channel import Channel
from dsparkd.ipc.wiring import DetokenizerWiring, RankWiring, make_wiring
from dsparkd.messages import (
    Abort,
    Admitted,
    CrashReport,
    Farewell,
    Finish,
    FromDetokenizer,
    LoadSnapshot,
    Progress,
    RankReady,
    RoutedBatch,
    SamplingParams,
    Shutdown,
    StartFailed,
    TextDelta,
    TextDeltas,
    ToDetokenizer,
    TokenDelta,
    TokenDeltas,
    TokenizedRequest,
    ToRank,
    decode_to_detokenizer,
    decode_to_rank,
)

TICK_S = 0.02


def _exit_on_signals() -> None:
    def leave(number: int, _frame: FrameType | None) -> None:
        os._exit(0 if number == signal.SIGUSR1 else 1)

    signal.signal(signal.SIGUSR1, leave)
    signal.signal(signal.SIGUSR2, leave)


def _fail_start(parent: Channel[ToRank] | Channel[Any], role: str, fault: str) -> int | None:
    """Play a start-up fault; None when there is none."""
    match fault:
        case "start_78" | "start_70":
            code = int(fault[-2:])
            parent.send_nowait(StartFailed(role, code, f"fake fault {fault}"))
            return code
        case "start_exit":
            return 3
        case "start_raise":
            raise RuntimeError("fake bug")
        case "start_hang":
            time.sleep(600)
        case _:
            pass
    return None


class FakeRank:
    """Emits one token a tick for each request until max_tokens."""

    def __init__(self, wiring: RankWiring, fault: str) -> None:
        self.dp_rank = wiring.dp_rank
        self.fault = fault
        self.parent = Channel(wiring.parent, decode_to_rank, send_timeout_s=5, max_pending_bytes=1 << 24)
        self.detokenizer = Channel(
            wiring.detokenizer, decode_to_detokenizer, send_timeout_s=5, max_pending_bytes=1 << 24
        )
        self.board = BoardWriter(open_board(wiring.board), wiring.dp_rank)
        os.close(wiring.board)
        self.left: dict[str, int] = {}
        self.sequence = 0
        self.stopping = False

    def run(self) -> int:
        code = _fail_start(self.parent, f"rank {self.dp_rank}", self.fault)
        if code is not None:
            return code
        self.parent.send_nowait(Progress(self.dp_rank, "weights", 1, 1))
        self.parent.send_nowait(
            RankReady(
                dp_rank=self.dp_rank,
                device="cpu",
                weight_bytes=1,
                kv_bytes={},
                num_pages=2,
                num_snapshots=0,
                longest_tick_s=0.01,
                gc_frozen_objects=1,
                paths=(),
            )
        )
        while not self.stopping:
            select.select([self.parent], [], [], TICK_S)
            for message in self.parent.receive_nowait():
                self.take(message)
            self.emit()
            self.publish()
        if self.fault == "hang_at_shutdown":
            time.sleep(600)
        if self.fault == "crash_at_shutdown":
            return 5
        for channel in (self.detokenizer, self.parent):
            channel.send_nowait(Farewell(f"rank{self.dp_rank}"))
            while not channel.flush_nowait():
                time.sleep(0.001)
        return 0

    def take(self, message: ToRank) -> None:
        match message:
            case RoutedBatch():
                for request in message.requests:
                    if self.fault == "bug_at_crash" and request.request_id == "crash":
                        raise InvariantError("fake bug in a tick")
                    self.left[request.request_id] = request.sampling.max_tokens
                    self.parent.send_nowait(Admitted(request.request_id, time.monotonic_ns()))
            case Abort():
                if self.left.pop(message.request_id, None) is not None:
                    self.send([TokenDelta(request_id=message.request_id, token_ids=(), finish=self.finish("abort"))])
            case Shutdown():
                self.stopping = True

    def emit(self) -> None:
        deltas = []
        for request_id, left in list(self.left.items()):
            self.left[request_id] = left - 1
            done = left <= 1
            finish = self.finish("length") if done else None
            deltas.append(TokenDelta(request_id=request_id, token_ids=(7,), finish=finish))
            if done:
                del self.left[request_id]
        if deltas:
            self.send(deltas)

    def send(self, deltas: list[TokenDelta]) -> None:
        self.detokenizer.send_nowait(TokenDeltas(self.dp_rank, tuple(deltas)))

    def finish(self, reason: Any) -> Finish:
        return Finish(reason=reason, prompt_tokens=1, cached_tokens=0, output_tokens=1)

    def publish(self) -> None:
        self.sequence += 1
        self.board.publish(
            LoadSnapshot(
                dp_rank=self.dp_rank,
                sequence=self.sequence,
                published_ns=time.monotonic_ns(),
                frame=0,
                tick=self.sequence,
                parked=False,
                outstanding_requests=len(self.left),
                outstanding_tokens=len(self.left),
                waiting_requests=0,
            )
        )


def rank_main(_config: Config, wiring: RankWiring) -> int:
    """Process main of a stand-in rank."""
    _exit_on_signals()
    rank = FakeRank(wiring, os.environ.get(f"FAKE_RANK{wiring.dp_rank}", ""))
    try:
        return rank.run()
    except FatalError as error:
        report = {"error": str(error), "padding": "x" * (1 << 20)}  # more than the socket holds
        rank.parent.send_nowait(
            CrashReport(wiring.dp_rank, str(error), isinstance(error, PeerError), msgspec.json.encode(report))
        )
        while not rank.parent.flush_nowait():
            time.sleep(0.001)
        return 70


def detokenizer_main(_config: Config, wiring: DetokenizerWiring) -> int:
    """Process main of a stand-in detokenizer: each token becomes one letter."""
    _exit_on_signals()
    try:
        return _run_detokenizer(wiring)
    except PeerError:
        return 70


def _run_detokenizer(wiring: DetokenizerWiring) -> int:
    fault = os.environ.get("FAKE_DETOKENIZER", "")

    def open_channel(sock: Any) -> Channel[ToDetokenizer]:
        return Channel(sock, decode_to_detokenizer, send_timeout_s=5, max_pending_bytes=1 << 24)

    parent = open_channel(wiring.parent)
    ranks = [open_channel(sock) for sock in wiring.ranks]
    code = _fail_start(parent, "detokenizer", fault)
    if code is not None:
        return code
    parent.send_nowait(Progress(-1, "detokenizer_ready", 1, 1))
    open_ranks = set(ranks)
    while open_ranks:
        for channel in select.select(list(open_ranks), [], [], 1)[0]:
            for message in channel.receive_nowait():
                match message:
                    case TokenDeltas():
                        parent.send_nowait(TextDeltas(tuple(_text(delta) for delta in message.deltas)))
                    case Farewell():
                        open_ranks.discard(channel)
    if fault == "hang_at_shutdown":
        time.sleep(600)
    goodbye: FromDetokenizer = Farewell("detokenizer")
    parent.send_nowait(goodbye)
    while not parent.flush_nowait():
        time.sleep(0.001)
    return 0


def _text(delta: TokenDelta) -> TextDelta:
    return TextDelta(
        request_id=delta.request_id, text="x" * len(delta.token_ids), token_ids=delta.token_ids, finish=delta.finish
    )


def build_app(config: Config, router: Any, registry: Any) -> Any:
    """Return the smallest front end that shows what the supervisor does to requests."""
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import PlainTextResponse, StreamingResponse
    from starlette.routing import Route

    from dsparkd.errors import RequestError
    from dsparkd.routing.router import Item

    async def ready(_request: Request) -> PlainTextResponse:
        return PlainTextResponse(router.state, status_code=200 if router.state == "serving" else 503)

    async def scrape(_request: Request) -> PlainTextResponse:
        return PlainTextResponse(registry.render().decode())

    async def generate(request: Request) -> StreamingResponse | PlainTextResponse:
        tokens = int(request.query_params["tokens"])
        item = TokenizedRequest(
            request_id=request.query_params["id"],
            prompt_ids=(1,),
            sampling=SamplingParams(max_tokens=tokens, seed=0),
            received_ns=1,
            encoded_ns=1,
            tokenized_ns=1,
            dispatched_ns=1,
        )
        rank = request.query_params.get("rank")
        try:
            submission = await router.submit([Item(item, None if rank is None else int(rank))])
            await submission.admitted()
        except RequestError as error:
            return PlainTextResponse(error.message, status_code=error.status)

        async def stream() -> AsyncIterator[str]:
            try:
                while deltas := await submission.receive():
                    for _, delta in deltas:
                        yield delta.text
                        if delta.finish is not None:
                            yield f"\nfinish {delta.finish.reason}\n"
            except RequestError as error:
                yield f"\nerror {error.message}\n"

        return StreamingResponse(stream())

    return Starlette(routes=[Route("/ready", ready), Route("/metrics", scrape), Route("/generate", generate)])


def main(config_file: str, find_hardware: Callable[[], Hardware] = lambda: Hardware(num_cuda_devices=0)) -> int:
    """Do what dsparkd.__main__ does, with these children."""
    try:
        config = config_module.resolve(config_module.load(Path(config_file)), find_hardware())
        signal.pthread_sigmask(signal.SIG_BLOCK, supervisor.STOP_SIGNALS)
        log.configure("parent", None, config.log.format, config.log.level)
        crash.prepare_directory(config.engine.crash_dir)
        listener = supervisor.bind_listener(config.server)
        wiring = make_wiring(supervisor.open_exchange(config), board=supervisor.create_board())
        children = supervisor.fork_children(
            config, wiring, rank_path="fake_server:rank_main", detokenizer_path="fake_server:detokenizer_main"
        )
        return supervisor.serve(config, wiring.parent, children, listener, build_app)
    except StartError as error:
        sys.stderr.write(f"dsparkd: {error}\n")
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
