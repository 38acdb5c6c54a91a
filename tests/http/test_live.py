"""The front end over two real ranks with the small checkpoint."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import pytest

from tools.harness import Server, ensure_checkpoint


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    ensure_checkpoint()
    with Server() as running:
        yield running.wait_ready()


@pytest.fixture
async def client(server: Server) -> AsyncIterator[httpx.AsyncClient]:
    limits = httpx.Limits(max_connections=100)
    async with httpx.AsyncClient(base_url=server.base_url, timeout=60, limits=limits) as client:
        yield client


def body(prompt: object, **fields: object) -> dict[str, object]:
    return {"model": "nano", "prompt": prompt, "max_tokens": 8, "temperature": 0, **fields}


async def settled(client: httpx.AsyncClient) -> None:
    """Wait until nothing is outstanding, at the router and in the ranks' own last word."""
    async with asyncio.timeout(30):
        while (await client.get("/server_info")).json()["outstanding_requests"]:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        while any(value for name, value in (await gauges(client)).items() if "r_requests" in name):  # noqa: ASYNC110
            await asyncio.sleep(0.1)


async def gauges(client: httpx.AsyncClient) -> dict[str, float]:
    lines = (await client.get("/metrics")).text.splitlines()
    pairs = (line.rpartition(" ") for line in lines if line and not line.startswith("#"))
    return {name: float(value) for name, _, value in pairs}


async def stream(client: httpx.AsyncClient, number: int, leave_after: int | None) -> str:
    """Text of one stream; leaves after some events if told to."""
    text = ""
    request = body(f"Prompt {number % 7} number {number}", stream=True, seed=number, temperature=1.0, max_tokens=12)
    async with client.stream("POST", "/v1/completions", json=request) as answer:
        assert answer.status_code == 200
        count = 0
        async for line in answer.aiter_lines():
            if line == "data: [DONE]":
                return text
            if line:
                text += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
                count += 1
                if count == leave_after:
                    return text
    raise AssertionError("no [DONE]")


async def test_r15_64_streams_of_which_13_leave(client: httpx.AsyncClient) -> None:
    """R-15, R31's kind: 51 full texts equal the run without leavers; rows and pages come back."""
    whole = await asyncio.gather(*(stream(client, number, None) for number in range(64)))
    await settled(client)
    draw = random.Random(5)
    leavers = {number: draw.randint(1, 4) for number in draw.sample(range(64), 13)}
    again = await asyncio.gather(*(stream(client, number, leavers.get(number)) for number in range(64)))
    for number in range(64):
        if number not in leavers:
            assert again[number] == whole[number]
    await settled(client)
    used = {name: value for name, value in (await gauges(client)).items() if 'state="used"' in name}
    assert used
    assert set(used.values()) == {0.0}


async def test_l10_u09_probes_during_load_move_no_request_counter(client: httpx.AsyncClient) -> None:
    """L-10, U-09: 500 probes during a load that saturates the ranks: all 200, and only the load is counted."""

    def counted(values: dict[str, float]) -> float:
        return sum(value for name, value in values.items() if name.startswith("dsparkd_routed_requests_total"))

    before = counted(await gauges(client))
    load = [asyncio.ensure_future(stream(client, number, None)) for number in range(32)]
    statuses = [(await client.get("/health_scheduler")).status_code for _ in range(500)]
    await asyncio.gather(*load)
    assert set(statuses) == {200}
    assert counted(await gauges(client)) == before + 32


async def test_d27_logprobs_and_echo_by_length_beside_neighbours(client: httpx.AsyncClient) -> None:
    """D-27: {echo, top_logprobs} x {max_tokens 1, 2}, alone and in company: the same numbers, never an error."""

    async def ask() -> list[list[float]]:
        found = []
        for echo, top, max_tokens in itertools.product((False, True), (0, 3), (1, 2)):
            request = body("The quick brown fox", echo=echo, logprobs=top, max_tokens=max_tokens, ignore_eos=True)
            answer = await client.post("/v1/completions", json=request)
            assert answer.status_code == 200, answer.text
            (choice,) = answer.json()["choices"]
            numbers = choice["logprobs"]["token_logprobs"]
            prompt_tokens = answer.json()["usage"]["prompt_tokens"] if echo else 0
            assert len(numbers) == prompt_tokens + max_tokens
            assert (numbers[0] is None) == echo
            found.append(numbers)
        return found

    alone = await ask()
    neighbours = [asyncio.ensure_future(stream(client, number, None)) for number in range(8)]
    assert await ask() == alone
    await asyncio.gather(*neighbours)


@pytest.mark.parametrize("rank", [-1, 2, True, "0"])
async def test_r03_bad_ranks_leave_the_server_serving(client: httpx.AsyncClient, rank: object) -> None:
    """R-03, R28: the seed of this design lost its router process to such a request."""
    answer = await client.post("/v1/completions", json=body("a", routed_dp_rank=rank))
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_dp_rank")
    assert (await client.post("/v1/completions", json=body("a", routed_dp_rank=0))).status_code == 200


async def test_r04_batches_give_what_their_prompts_give(client: httpx.AsyncClient) -> None:
    """R-02, R-04: a uniform batch, a mixed one and a balanced one: the same texts in item order."""
    prompts = [f"Item {number}:" for number in range(16)]
    texts: list[Any] = []
    for fields in ({"routed_dp_rank": 0}, {"routed_dp_ranks": [0, None, 1, None] * 4}, {}):
        answer = await client.post("/v1/completions", json=body(prompts, **fields))
        texts.append([choice["text"] for choice in answer.json()["choices"]])
    assert texts[0] == texts[1] == texts[2]


async def test_r23_prompts_at_the_edge_of_the_context(checkpoint_limit: Server) -> None:
    """R23 on real ranks: L-8 .. L+1 ids with max_tokens 1 and 64: "length" below the limit, 400 over it."""
    limit = 300
    async with httpx.AsyncClient(base_url=checkpoint_limit.base_url, timeout=60) as client:
        for over, max_tokens in itertools.product((-8, -2, -1, 0, 1), (1, 64)):
            request = body([5] * (limit + over), max_tokens=max_tokens, ignore_eos=True)
            answer = await client.post("/v1/completions", json=request)
            if over < 0:
                assert answer.json()["choices"][0]["finish_reason"] == "length"
                assert answer.json()["usage"]["completion_tokens"] == min(max_tokens, -over)
            else:
                assert answer.json()["error"]["code"] == "context_length_exceeded"


@pytest.fixture
def checkpoint_limit() -> Iterator[Server]:
    ensure_checkpoint()
    with Server({"engine": {"max_context_tokens": 300}}) as running:
        yield running.wait_ready()


async def test_head_and_options_of_a_real_server(client: httpx.AsyncClient) -> None:
    """Balancers use HEAD; an OPTIONS that is not served is 405, not an open connection."""
    head = await client.head("/health")
    assert (head.status_code, head.content) == (200, b"")
    assert (await client.options("/v1/completions")).status_code == 405
    assert (await client.get("/health")).status_code == 200


def test_the_parent_never_imports_torch() -> None:
    """Layer rule: torch, CUDA and native handles exist only in the processes that own them."""
    code = "import sys, dsparkd.http.app; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
