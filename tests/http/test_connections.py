"""What only real connections show: clients that leave, do not read or do not write, over the real HTTP server."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import struct
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import hypercorn.asyncio
import pytest
import structlog

from dsparkd.config import LimitsConfig
from dsparkd.http.app import build_app
from dsparkd.http.intake import CompletionWork, Envelope, Intake
from dsparkd.messages import Admitted, RoutedBatch, TextDelta, TokenizedRequest
from dsparkd.supervisor import http_settings
from tests.http.conftest import MODEL, say
from tests.routing.fakes import FakeBackend, make_config, make_finish, metric, started_backend, text_delta


@dataclass
class Listening:
    backend: FakeBackend
    port: int

    async def connect(self, receive_buffer: int | None = None) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        sock = socket.socket()
        if receive_buffer is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", self.port))
        return await asyncio.open_connection(sock=sock, limit=4096 if receive_buffer else 1 << 20)

    async def post(
        self, body: object, path: str = "/v1/completions", receive_buffer: int | None = None
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await self.connect(receive_buffer)
        raw = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(raw)}\r\n\r\n"
        writer.write(head.encode() + raw)
        await writer.drain()
        return reader, writer

    async def admit_all(self) -> None:
        """Admit everything that the ranks hold by now."""
        for rank in self.backend.ranks:
            for request_id in rank.request_ids:
                await rank.channel.send(Admitted(request_id, 1))

    async def aborted(self, count: int) -> list[str]:
        await self.backend.until(lambda: sum(len(rank.aborted) for rank in self.backend.ranks) >= count)
        return sorted(request_id for rank in self.backend.ranks for request_id in rank.aborted)


@contextlib.asynccontextmanager
async def listening(checkpoint: Path, limits: LimitsConfig | None = None) -> AsyncIterator[Listening]:
    config = make_config(str(checkpoint), limits=limits)
    async with started_backend(config) as backend:
        listener = socket.create_server(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        server = http_settings(listener.detach())
        server.graceful_timeout = 0.1
        stop = asyncio.Event()
        app = build_app(config, backend.router, backend.registry)
        serving = asyncio.ensure_future(
            hypercorn.asyncio.serve(app, server, shutdown_trigger=stop.wait, mode="asgi")  # type: ignore[arg-type]
        )
        try:
            yield Listening(backend, port)
        finally:
            stop.set()
            await serving


@pytest.fixture
async def server(checkpoint: Path) -> AsyncIterator[Listening]:
    async with listening(checkpoint) as running:
        yield running


def reset(writer: asyncio.StreamWriter) -> None:
    """Close with RST instead of FIN, as a killed client's kernel does."""
    sock = writer.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


def connections() -> list[asyncio.Task[object]]:
    """Tasks of connections that the HTTP server has not let go of."""
    return [task for task in asyncio.all_tasks() if "_server_callback" in repr(task.get_coro())]


def request(request_id: str, **fields: object) -> dict[str, object]:
    return {"model": MODEL, "prompt": "a", "request_id": request_id, **fields}


@pytest.mark.parametrize("end", ["fin", "rst"])
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("state", ["queued", "admitted", "running"])
async def test_r15_a_client_that_leaves_is_aborted_in_every_state(
    server: Listening, stream: bool, state: str, end: str
) -> None:
    """R-15: streamed or not, before admission, after it and in the middle; by FIN and by RST; its neighbour goes on."""
    backend = server.backend
    staying, writer = await server.post(request("stay", routed_dp_rank=0))
    _, leaving = await server.post(request("leave", stream=stream, routed_dp_rank=0))
    await backend.until(lambda: len(backend.ranks[0].request_ids) == 2)
    if state != "queued":
        await server.admit_all()
    if state == "running":
        await backend.say(text_delta("leave", "x", (7,)))
        await asyncio.sleep(0.02)
    if end == "rst":
        reset(leaving)
    else:
        leaving.close()
    assert await server.aborted(1) == ["leave"]
    await server.admit_all()
    await backend.say(text_delta("stay", "whole", (7,), make_finish()))
    answer = await staying.readuntil(b"usage")
    assert b"200" in answer.split(b"\r\n")[0]
    assert b"whole" in answer
    await backend.until(lambda: backend.router.outstanding() == 0)
    writer.close()
    assert backend.ranks[0].aborted == ["leave"]

    def counted(status: str) -> float:
        return metric(backend.registry, "dsparkd_http_requests_total", route="/v1/completions", status=status)

    await backend.until(lambda: sum(map(counted, ("2xx", "4xx", "5xx"))) == 2)
    assert counted("5xx") == 0
    assert state != "queued" or counted("4xx") == 1


async def test_r15_leaving_before_dispatch_drops_the_item(server: Listening, monkeypatch: pytest.MonkeyPatch) -> None:
    """R-15: a client that is gone while its prompt is tokenized costs the ranks nothing."""
    working, go_on = threading.Event(), threading.Event()
    tokenize = Intake.completion

    def slow(intake: Intake, raw: bytes, envelope: Envelope) -> CompletionWork:
        working.set()
        assert go_on.wait(10)
        return tokenize(intake, raw, envelope)

    monkeypatch.setattr(Intake, "completion", slow)
    _, writer = await server.post(request("gone"))
    await server.backend.until(working.is_set)
    writer.close()
    registry = server.backend.registry
    await server.backend.until(
        lambda: metric(registry, "dsparkd_http_requests_total", route="/v1/completions", status="4xx") == 1
    )
    go_on.set()
    await asyncio.sleep(0.05)
    assert all(rank.received == [] for rank in server.backend.ranks)


async def test_r15_leaving_a_batch_aborts_all_its_items_that_run(server: Listening) -> None:
    """R-15: each unfinished item by its exact id, none twice."""
    _, writer = await server.post(request("b", prompt=["a", "b", "c"], routed_dp_rank=1, stream=True))
    await server.backend.until(lambda: len(server.backend.ranks[1].request_ids) == 3)
    await server.admit_all()
    await server.backend.say(text_delta("b-1", "x", (7,), make_finish()))
    await asyncio.sleep(0.02)
    writer.close()
    assert await server.aborted(2) == ["b-0", "b-2"]


async def test_a_stream_read_to_its_end_is_not_logged_as_left_and_keeps_its_connection(server: Listening) -> None:
    """The HTTP server reports a disconnect after each whole response; operators look for `client_left` in the log."""
    with structlog.testing.capture_logs() as events:
        reader, writer = await server.connect()
        for name in ("first", "second"):
            raw = json.dumps(request(name, stream=True, routed_dp_rank=0)).encode()
            head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(raw)}\r\n\r\n"
            writer.write(head.encode() + raw)
            await server.backend.until(lambda name=name: name in server.backend.ranks[0].request_ids)
            await server.admit_all()
            await server.backend.say(text_delta(name, "whole", (7,), make_finish()))
            assert b"[DONE]" in await reader.readuntil(b"0\r\n\r\n")
        await server.backend.until(lambda: len([e for e in events if e["event"] == "http_request"]) == 2)
        writer.close()
    assert [event.get("client_left") for event in events if event["event"] == "http_request"] == [None, None]


@pytest.mark.parametrize("end", ["fin", "rst"])
async def test_a_client_that_leaves_with_a_request_in_waiting_leaves_no_task(server: Listening, end: str) -> None:
    """R34: the task that would have read the second request waited for ever, and each stop for it."""
    backend = server.backend
    reader, writer = await server.connect()
    for name in ("first", "second"):
        raw = json.dumps(request(name, stream=True, routed_dp_rank=0)).encode()
        writer.write(f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(raw)}\r\n\r\n".encode() + raw)
    await backend.until(lambda: backend.ranks[0].request_ids == ["first"])
    await server.admit_all()
    await backend.say(text_delta("first", "x", (7,)))
    await reader.readuntil(b"x")
    if end == "rst":
        reset(writer)
    else:
        writer.close()
    while not backend.ranks[0].aborted:
        await backend.say(text_delta("first", "y" * 1000, (7,)))
        await asyncio.sleep(0.01)
    assert backend.ranks[0].aborted == ["first"]
    assert backend.ranks[0].request_ids == ["first"]
    await backend.until(lambda: connections() == [])


@pytest.mark.parametrize("is_http2", [False, True])
async def test_an_idle_connection_goes_with_its_client(server: Listening, is_http2: bool) -> None:
    """Kept for as long as a client may use it, and not for as long as none can: each holds a descriptor."""
    base_url = f"http://127.0.0.1:{server.port}"
    async with httpx.AsyncClient(http1=not is_http2, http2=is_http2, base_url=base_url) as client:
        assert (await client.get("/health")).status_code == 200
        await asyncio.sleep(0.02)
        assert len(connections()) == 1
    await server.backend.until(lambda: connections() == [])


@pytest.mark.parametrize(
    ("head", "status"),
    [
        ("POST /nowhere", 404),
        ("GET /health", 200),
        ("PUT /v1/completions", 405),
        ("POST /v1/completions HTTP/1.1\r\nContent-Encoding: gzip", 415),
    ],
)
async def test_a_request_that_is_answered_without_its_body_keeps_no_connection(
    server: Listening, head: str, status: int
) -> None:
    """R31: the HTTP server waits until somebody takes the body's parts; a thousand such requests used up all files."""
    for _ in range(3):
        reader, writer = await server.connect()
        line, _, more = head.partition(" HTTP/1.1\r\n")
        headers = "\r\n".join(filter(None, ("Host: x", more, "Transfer-Encoding: chunked")))
        writer.write(f"{line} HTTP/1.1\r\n{headers}\r\n\r\n".encode() + b"1\r\nx\r\n" * 100 + b"0\r\n\r\n")
        answer = await asyncio.wait_for(reader.readuntil(b"}"), 5)
        assert answer.startswith(f"HTTP/1.1 {status}".encode())
        writer.close()
    await server.backend.until(lambda: connections() == [])


async def test_decision_17_a_client_that_does_not_read_is_aborted_alone(checkpoint: Path) -> None:
    """Decision 17: beyond limits.stream_buffer_bytes it is aborted; the others' streams are not touched."""
    async with listening(checkpoint, LimitsConfig(stream_buffer_bytes=4096)) as server:
        backend = server.backend
        backend.script = None
        _, stuck = await server.post(request("stuck", stream=True, routed_dp_rank=0), receive_buffer=4096)
        reader, reads = await server.post(request("reads", stream=True, routed_dp_rank=0))
        await backend.until(lambda: len(backend.ranks[0].request_ids) == 2)
        await server.admit_all()

        reading = asyncio.ensure_future(reader.readuntil(b"[DONE]"))
        text = "x" * 20_000
        for _ in range(2000):
            await backend.say(text_delta("stuck", text, (7,)))
            await backend.say(text_delta("reads", "y", (7,)))
            await asyncio.sleep(0)
            if backend.ranks[0].aborted:
                break
        assert backend.ranks[0].aborted == ["stuck"]
        await backend.say(text_delta("reads", "z", (7,), make_finish()))
        raw = await reading
        assert raw.count(b"y") > 2
        assert b'"finish_reason":"stop"' in raw
        stuck.transport.abort()
        reads.close()
        await backend.until(lambda: metric(backend.registry, "dsparkd_http_open_streams") == 0)


async def test_many_deltas_of_one_wake_up_leave_in_one_write(server: Listening) -> None:
    """Many tokens a wake-up, never one message a token: 200 deltas of one frame are one chunk of the body."""

    def script(item: TokenizedRequest) -> list[TextDelta]:
        deltas = [text_delta(item.request_id, "ab", (7,)) for _ in range(200)]
        return [*deltas, text_delta(item.request_id, "", finish=make_finish(output_tokens=200))]

    server.backend.script = script
    reader, writer = await server.post(request("many", stream=True))
    raw = await reader.readuntil(b"[DONE]")
    assert b"ab" * 200 in raw
    assert raw.count(b'"text":"ab') == 1
    writer.close()


async def test_slow_bodies_are_408_and_closed(checkpoint: Path) -> None:
    """limits.body_timeout_s: a client that sends a byte now and then cannot hold a connection."""
    async with listening(checkpoint, LimitsConfig(body_timeout_s=0.2)) as server:
        reader, writer = await server.connect()
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n{")
        raw = await asyncio.wait_for(reader.read(), 5)  # to the end: the server closes
        assert raw.startswith(b"HTTP/1.1 408")
        assert b"body_timeout" in raw
        writer.close()
        assert server.backend.router.outstanding() == 0


async def test_huge_bodies_are_413_before_they_are_sent(checkpoint: Path) -> None:
    """The declared length decides: the answer comes although not one byte of the body was sent."""
    async with listening(checkpoint, LimitsConfig(max_body_bytes=1000)) as server:
        reader, writer = await server.connect()
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000000000\r\n\r\n")
        raw = await asyncio.wait_for(reader.read(), 5)
        assert raw.startswith(b"HTTP/1.1 413")
        assert b"body_too_large" in raw
        writer.close()


async def test_a_client_that_leaves_inside_its_body_leaves_nothing(server: Listening) -> None:
    """Half a body, then the end: no request, no exception, and the server serves on."""
    _, writer = await server.connect()
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n{")
    await writer.drain()
    await asyncio.sleep(0.02)
    writer.close()
    registry = server.backend.registry
    await server.backend.until(
        lambda: metric(registry, "dsparkd_http_requests_total", route="/v1/completions", status="4xx") == 1
    )
    server.backend.script = say("fine")
    reader, writer = await server.post(request("next"))
    assert b"fine" in await reader.readuntil(b"usage")
    writer.close()


async def test_a_connection_serves_one_request_after_another(server: Listening) -> None:
    """Keep-alive: waiting for the client's end during one request must not eat the next one."""
    server.backend.script = say("fine")
    reader, writer = await server.connect()
    for number in range(3):
        raw = json.dumps(request(f"r{number}", stream=number == 1)).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(raw)}\r\n\r\n"
        writer.write(head.encode() + raw)
        answer = await asyncio.wait_for(reader.readuntil(b"0\r\n\r\n" if number == 1 else b"}}}"), 5)
        assert answer.startswith(b"HTTP/1.1 200")
    writer.close()


async def test_r04_a_posted_batch_is_one_frame(server: Listening) -> None:
    """R-04 from the socket on: 64 items that name one rank cross as one frame."""
    server.backend.script = say("x")
    reader, writer = await server.post(request("batch", prompt=["a"] * 64, routed_dp_rank=1))
    await reader.readuntil(b"usage")
    writer.close()
    (frame,) = server.backend.ranks[1].batches
    assert isinstance(frame, RoutedBatch)
    assert [item.request_id for item in frame.requests] == [f"batch-{index}" for index in range(64)]
    assert server.backend.ranks[0].batches == []


async def test_http2_clients_get_answers_and_refusals(server: Listening) -> None:
    """Headers about connections are illegal in HTTP/2; a refusal that names one must not break the connection."""
    server.backend.script = say("fine")
    base_url = f"http://127.0.0.1:{server.port}"
    async with httpx.AsyncClient(http1=False, http2=True, base_url=base_url) as client:
        assert "fine" in (await client.post("/v1/completions", json=request("h2", stream=True))).text
        server.backend.router.begin_drain()
        for _ in range(2):
            answer = await client.post("/v1/completions", json=request("h2"))
            assert (answer.http_version, answer.status_code) == ("HTTP/2", 503)


async def many_parts() -> AsyncIterator[bytes]:
    """A body of more parts than the HTTP server hands over at once."""
    for _ in range(1100):
        yield b"x"


async def test_an_early_answer_over_http2_leaves_its_neighbours_alone(checkpoint: Path) -> None:
    """A proxy's one connection carries many clients: a body that is too large must not end the others' streams."""
    async with listening(checkpoint, LimitsConfig(max_body_bytes=1000)) as server:
        base_url = f"http://127.0.0.1:{server.port}"
        async with httpx.AsyncClient(http1=False, http2=True, base_url=base_url) as client:
            streaming = client.stream("POST", "/v1/completions", json=request("stay", stream=True, routed_dp_rank=0))
            staying = asyncio.ensure_future(streaming.__aenter__())
            await server.backend.until(lambda: server.backend.ranks[0].request_ids == ["stay"])
            await server.admit_all()
            stay = await staying
            for path, status in (("/v1/completions", 413), ("/nowhere", 404), ("/v1/completions", 413)):
                answer = await client.post(path, content=b"x" * 300_000)
                assert answer.status_code == status
                assert (await client.post(path, content=many_parts())).status_code == status
            await server.backend.say(text_delta("stay", "whole", (7,), make_finish()))
            text = (await stay.aread()).decode()
            assert "whole" in text
            assert "[DONE]" in text
            await streaming.__aexit__(None, None, None)
