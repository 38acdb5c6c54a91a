"""A small real tokenizer and the whole application over a fake pair of ranks."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from dsparkd.config import Config
from dsparkd.http.app import build_app
from dsparkd.messages import TextDelta, TokenizedRequest
from dsparkd.text.tokenizer import Tokenizer
from tests.routing.fakes import FakeBackend, make_config, make_finish, started_backend, text_delta
from tools.nano_tokenizer import train_tokenizer

Answer = Callable[[TokenizedRequest], list[TextDelta]]
MODEL = "nano"


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("checkpoints") / MODEL
    directory.mkdir()
    train_tokenizer().save(str(directory / "tokenizer.json"))
    config = {
        "hidden_size": 64,
        "compress_ratios": [0, 4],
        "rope_scaling": {"type": "yarn"},
        "model_type": "deepseek_v4",
    }
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@pytest.fixture(scope="session")
def tokenizer(checkpoint: Path) -> Tokenizer:
    return Tokenizer.load(checkpoint)


def say(*pieces: str, reason: str = "stop", ids: tuple[int, ...] = (7,), **finish: object) -> Answer:
    """Answer every request with these pieces, one delta each."""

    def script(request: TokenizedRequest) -> list[TextDelta]:
        last = make_finish(
            reason,  # type: ignore[arg-type]
            prompt_tokens=len(request.prompt_ids),
            output_tokens=len(pieces) * len(ids),
            **finish,
        )
        deltas = [text_delta(request.request_id, piece, ids) for piece in pieces]
        return [*deltas, text_delta(request.request_id, "", finish=last)]

    return script


@dataclass
class Served:
    """The application, its far ends, and a client."""

    backend: FakeBackend
    client: httpx.AsyncClient

    async def chat(self, **fields: object) -> httpx.Response:
        body = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], **fields}
        return await self.client.post("/v1/chat/completions", json=body)

    async def complete(self, **fields: object) -> httpx.Response:
        return await self.client.post("/v1/completions", json={"model": MODEL, "prompt": "Hi", **fields})

    @property
    def requests(self) -> list[TokenizedRequest]:
        """Everything that reached a rank, in order of delivery."""
        batches = [batch for rank in self.backend.ranks for batch in rank.batches]
        return [request for batch in batches for request in batch.requests]


@contextlib.asynccontextmanager
async def served(config: Config) -> AsyncIterator[Served]:
    async with started_backend(config) as backend:
        backend.script = say("Hello", " world")
        app = build_app(config, backend.router, backend.registry)
        transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            yield Served(backend, client)


@pytest.fixture
async def server(checkpoint: Path) -> AsyncIterator[Served]:
    async with served(make_config(str(checkpoint))) as running:
        yield running


def events(response: httpx.Response) -> list[dict]:  # type: ignore[type-arg]
    """JSON of every server-sent event; checks that the stream ends as clients expect."""
    lines = [line for line in response.text.split("\n\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def error_of(response: httpx.Response, status: int) -> dict:  # type: ignore[type-arg]
    """The error object of a refusal, after checking its shape."""
    assert response.status_code == status, response.text
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["message"]
    assert response.headers["x-request-id"]
    return body["error"]
