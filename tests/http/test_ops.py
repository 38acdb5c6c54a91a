"""Operating endpoints."""

from __future__ import annotations

import json
import time
from pathlib import Path

import jsonschema
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsparkd.config import MetricsConfig
from dsparkd.errors import CheckpointError
from dsparkd.http import openai
from dsparkd.http.body import decode
from dsparkd.http.ops import read_geometry
from tests.http.conftest import MODEL, Served, error_of, served
from tests.routing.fakes import make_config, make_snapshot, metric


def beat(server: Served, sequence: int = 1, parked: bool = False) -> None:
    """Have both ranks publish a fresh snapshot."""
    for rank in range(2):
        snapshot = make_snapshot(rank, sequence, published_ns=time.monotonic_ns(), tick=sequence, parked=parked)
        server.backend.board[rank] = snapshot


async def test_l11_health_of_the_scheduler(server: Served) -> None:
    """L-11: 503 with reasons until both ranks have spoken, then 200 with rank, age, tick and parked."""
    response = await server.client.get("/health_scheduler")
    assert response.status_code == 503
    assert [rank["reason"] for rank in response.json()["ranks"]] == ["missing", "missing"]
    beat(server, 3, parked=True)
    response = await server.client.get("/health_scheduler")
    assert response.status_code == 200
    body = response.json()
    assert body["server"] == "serving"
    assert [(rank["dp_rank"], rank["tick"], rank["parked"], rank["reason"]) for rank in body["ranks"]] == [
        (0, 3, True, "ok"),
        (1, 3, True, "ok"),
    ]
    assert all(0 <= rank["age_s"] < 30 for rank in body["ranks"])


async def test_l16_drain_turns_ready_at_once_while_probes_answer(server: Served) -> None:
    """L-11, L-16: stopping is 503 on /ready and /health_scheduler, which both still answer, as /metrics does."""
    beat(server)
    assert (await server.client.get("/ready")).status_code == 200
    assert metric(server.backend.registry, "dsparkd_ready") == 1
    server.backend.router.begin_drain()
    ready = await server.client.get("/ready")
    assert (ready.status_code, ready.json()) == (503, {"status": "draining"})
    scheduler = await server.client.get("/health_scheduler")
    assert (scheduler.status_code, scheduler.json()["server"]) == (503, "draining")
    assert (await server.client.get("/metrics")).status_code == 200
    assert metric(server.backend.registry, "dsparkd_ready") == 0
    assert (await server.client.get("/health")).status_code == 200


async def test_health_says_so_when_the_pair_has_failed(server: Served) -> None:
    """A front end without ranks is of no use to a balancer."""
    server.backend.router.fail_all("rank 0 was lost")
    assert (await server.client.get("/health")).status_code == 503
    assert (await server.client.get("/ready")).status_code == 503


async def test_u09_l10_probes_start_no_work_and_count_as_none(server: Served) -> None:
    """L-10, U-09: a probe storm sends nothing to a rank and moves no request or load figure."""
    beat(server)
    before = server.backend.registry.render().decode().splitlines()
    for _ in range(50):
        for path in ("/health", "/ready", "/health_scheduler", "/metrics"):
            await server.client.get(path)
    after = server.backend.registry.render().decode().splitlines()
    changed = {line.split("{")[0].split(" ")[0] for line in set(before) ^ set(after)}
    timed = {f"dsparkd_http_handler_seconds_{part}" for part in ("bucket", "sum", "count")}
    assert changed == {"dsparkd_http_requests_total", "dsparkd_snapshot_age_seconds", *timed}
    assert all(rank.received == [] for rank in server.backend.ranks)


async def test_each_handler_is_timed_under_its_route(server: Served) -> None:
    """M-02: one observation for each request, refused ones too; none on a neighbour's route."""
    for path in ("/health", "/health", "/v1/models/nobody"):
        await server.client.get(path)
    text = server.backend.registry.render().decode()
    assert 'dsparkd_http_handler_seconds_count{route="/health"} 2.0' in text
    assert 'dsparkd_http_handler_seconds_count{route="/v1/models"} 1.0' in text
    assert 'dsparkd_http_handler_seconds_count{route="/ready"}' not in text


async def test_models(server: Served) -> None:
    """The one model, in the list and by its id."""
    listed = (await server.client.get("/v1/models")).json()
    assert [model["id"] for model in listed["data"]] == [MODEL]
    one = (await server.client.get(f"/v1/models/{MODEL}")).json()
    assert one == listed["data"][0]
    assert one["max_model_len"] == 4096


async def test_server_info_names_version_geometry_and_every_path(server: Served) -> None:
    """What runs, on what, and why each path is (not) in use."""
    info = (await server.client.get("/server_info")).json()
    assert info["model"] == MODEL
    assert info["geometry"] == {"hidden_size": 64, "compress_ratios": [0, 4], "model_type": "deepseek_v4"}
    assert [rank["dp_rank"] for rank in info["ranks"]] == [0, 1]
    assert info["ranks"][0]["paths"] == [{"path": "gloo_exchange", "state": "active", "why": "configured"}]
    assert info["limits"]["queue_items"] == 4096
    assert info["dspark"]["enabled"] is False
    assert (info["dspark"]["gamma"], info["dspark"]["acceptance"]) == (None, "coupled")
    assert len(info["tokenizer"]["digest"]) == 64


async def test_metrics_are_prometheus_text_and_can_be_off(server: Served, checkpoint: Path) -> None:
    """metrics.enabled decides; what is off is 404."""
    response = await server.client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    assert "# TYPE dsparkd_http_requests_total counter" in response.text
    config = msgspec.structs.replace(make_config(str(checkpoint)), metrics=MetricsConfig(enabled=False))
    async with served(config) as off:
        assert error_of(await off.client.get("/metrics"), 404)["code"] == "metrics_disabled"


async def test_head_works_where_get_does(server: Served) -> None:
    """Balancers probe with HEAD."""
    response = await server.client.head("/health")
    assert response.status_code == 200


async def test_tokenize_and_detokenize_are_inverse(server: Served) -> None:
    """Text to ids and back; special ids shown unless hidden."""
    response = await server.client.post("/tokenize", json={"prompt": "Hello <think>"})
    body = response.json()
    assert (body["tokens"][0], body["count"], body["max_model_len"]) == (0, len(body["tokens"]), 4096)
    shown = await server.client.post("/detokenize", json={"tokens": body["tokens"]})
    assert shown.json() == {"prompt": "<｜begin▁of▁sentence｜>Hello <think>"}
    hidden = await server.client.post("/detokenize", json={"tokens": body["tokens"], "skip_special_tokens": True})
    assert hidden.json() == {"prompt": "Hello <think>"}
    bare = await server.client.post("/tokenize", json={"prompt": "Hello <think>", "add_special_tokens": False})
    assert bare.json()["tokens"] == body["tokens"][1:]
    assert (await server.client.post("/detokenize", json={"tokens": []})).json() == {"prompt": ""}


async def test_tokenize_renders_chats_as_chat_does(server: Served) -> None:
    """Operators count a chat's tokens before they send it."""
    messages = [{"role": "user", "content": "Hi"}]
    for fields in ({}, {"thinking": False}, {"reasoning_effort": "max"}):
        await server.chat(messages=messages, routed_dp_rank=0, **fields)
        counted = await server.client.post("/tokenize", json={"messages": messages, **fields})
        assert tuple(counted.json()["tokens"]) == server.requests[-1].prompt_ids


async def test_openapi_lists_every_route_and_every_field(server: Served) -> None:
    """The document is made from the structs; no route may be missing in it, and no body may be open."""
    document = (await server.client.get("/openapi.json")).json()
    assert document["openapi"].startswith("3.1")
    transport = server.client._transport
    routes = {route.path for route in transport.app.routes}  # type: ignore[attr-defined]
    assert set(document["paths"]) == routes
    schemas = document["components"]["schemas"]
    for name, kind in (("ChatRequest", openai.ChatRequest), ("CompletionRequest", openai.CompletionRequest)):
        assert set(schemas[name]["properties"]) == {field.encode_name for field in msgspec.structs.fields(kind)}
        assert schemas[name]["additionalProperties"] is False
    jsonschema.Draft202012Validator.check_schema(schemas["CompletionRequest"])


PROMPTS: list[tuple[object, bool]] = [
    ("a", True),
    (["a", "b"], True),
    ([5, 6], True),
    ([[5], [6]], True),
    ("", False),
    ([], False),
    ([""], False),
    ([[]], False),
    ([[-1]], False),
    (["a", 5], False),
    (5, False),
]


@pytest.mark.parametrize(("prompt", "valid"), PROMPTS)
async def test_openapi_and_server_agree_on_prompts(server: Served, prompt: object, valid: bool) -> None:
    """The one field whose type the structs cannot state: the document's own schema says what the server says."""
    document = (await server.client.get("/openapi.json")).json()
    schema = document["components"]["schemas"]["CompletionRequest"]["properties"]["prompt"]
    assert jsonschema.Draft202012Validator(schema).is_valid(prompt) is valid
    assert ((await server.complete(prompt=prompt)).status_code == 200) is valid


@given(value=st.dictionaries(st.sampled_from([f.name for f in msgspec.structs.fields(openai.ChatRequest)]), st.none()))
def test_null_is_accepted_wherever_it_means_nothing(value: dict[str, object]) -> None:
    """Clients send null for what they leave out; only model and messages are needed."""
    body = {**value, "model": "m", "messages": [{"role": "user", "content": "x"}]}
    assert decode(body, openai.ChatRequest).model == "m"


@pytest.mark.parametrize("text", [None, "{", "[]"])
def test_a_checkpoint_without_a_readable_config_is_a_start_failure(tmp_path: Path, text: str | None) -> None:
    """The error names the file."""
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        read_geometry(tmp_path)


def test_geometry_keeps_numbers_and_names_only(tmp_path: Path) -> None:
    """Nested objects are left out; everything else is as the file has it."""
    (tmp_path / "config.json").write_text(json.dumps({"a": 1, "b": [1, 2], "c": {"d": 1}, "e": None, "f": [[1]]}))
    assert read_geometry(tmp_path) == {"a": 1, "b": [1, 2], "e": None}
