"""A server that launches steps ahead beside one that does not: the same answers, usage and ends, whatever happens."""

from __future__ import annotations

import http.client
import json
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from dsparkd.kv.geometry import PoolSizes
from dsparkd.model.config import load_model_config
from dsparkd.text.tokenizer import Tokenizer
from tools.harness import Server, Tables, ensure_checkpoint
from tools.workload import Answer, Client, growing_items, mixed_items

MAX_TOKENS = 16
PAGE_TOKENS = 256
# Four rows of a page each find room, and not all of them can grow by another one.
CHUNK_TOKENS = 1024
SIZES = PoolSizes(num_pages=8, num_slots=9, num_snapshots=2, num_inner_slots=CHUNK_TOKENS // PAGE_TOKENS)
ASKED: tuple[dict[str, object], ...] = (
    {"prompt": "The list has", "n": 3, "seed": 5, "max_tokens": 12},
    {"prompt": "The list has", "n": 2, "seed": 8, "max_tokens": 40, "stop": ["e", "th", "."]},
    {"prompt": "One and two", "temperature": 0, "seed": 1, "max_tokens": 1},
    {"prompt": "One and two", "temperature": 0, "seed": 1, "max_tokens": 2, "logprobs": 3},
    {"prompt": "Say it again: ", "temperature": 0.8, "seed": 4, "max_tokens": 30, "min_tokens": 25, "stop": ["a"]},
    {"prompt": "Say it again: ", "temperature": 0.8, "seed": 4, "max_tokens": 30, "frequency_penalty": 1.5},
    {"prompt": "A word", "seed": 3, "max_tokens": 8, "echo": True, "logprobs": 0},
)


def post(server: Server, body: dict[str, object]) -> object:
    """A completion without what differs from call to call."""
    request = urllib.request.Request(
        server.base_url + "/v1/completions",
        json.dumps({"model": "nano", **body}).encode(),
        {"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        got = json.load(answer)
    return got["choices"], {name: count for name, count in got["usage"].items() if isinstance(count, int)}


def leave(server: Server, number: int) -> None:
    """A stream whose client leaves after three events, so that its rows are aborted in flight."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    body = {"model": "nano", "prompt": f"leave {number}", "max_tokens": 4000, "ignore_eos": True, "stream": True}
    connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
    answer = connection.getresponse()
    for _ in range(6):
        answer.readline()
    connection.close()


def count_ahead(client: Client) -> float:
    """Steps that were launched ahead; a rank's counters reach the parent once a second."""
    deadline = time.monotonic() + 20
    while not (count := client.counter("dsparkd_steps_ahead_total")) and time.monotonic() < deadline:
        time.sleep(0.1)
    return count


def tiny_cache() -> dict[str, object]:
    """Keys of a cache of just these sizes, without room for drafts."""
    geometry = load_model_config(ensure_checkpoint()).kv_geometry(PAGE_TOKENS, "float32", drafts=False)
    snapshots = SIZES.num_snapshots * geometry.snapshot_bytes
    share = (snapshots + 1) / (SIZES.num_pages * geometry.page_bytes + snapshots)
    size = SIZES.device_bytes(geometry)
    return {"page_tokens": PAGE_TOKENS, "device_bytes": size, "snapshot_share": share}


def serve(overlap: bool) -> tuple[list[Answer], list[object], int]:
    """All answers of one server, while clients leave, and how often it put a row back."""
    vocab_size = Tokenizer.load(ensure_checkpoint()).vocab_size
    items = growing_items(8, vocab_size, MAX_TOKENS, seed=2, page_tokens=PAGE_TOKENS)
    # Of one length, so that they want their second page at the same time.
    items = [replace(item, prompt=item.prompt[:248]) for item in items]
    items += mixed_items(16, vocab_size, MAX_TOKENS, seed=1)
    tables: Tables = {
        "scheduler": {"overlap": overlap, "max_rows": SIZES.num_slots - 1, "chunk_tokens": CHUNK_TOKENS},
        "dspark": {"enabled": False},
        "engine": {"max_context_tokens": 1024},
        "kv": tiny_cache(),
    }
    with Server(tables) as server:
        client = Client(server.wait_ready().base_url)
        answers = client.complete_all(items[:8], 8, lambda index: index % 2)
        with ThreadPoolExecutor(4) as leaving:
            left = [leaving.submit(leave, server, number) for number in range(4)]
            answers += client.complete_all(items[8:], 12, lambda index: index % 2)
        for each in left:
            each.result()
        asked = [post(server, body) for body in ASKED]
        assert not overlap or count_ahead(client) > 0
        assert server.stop() == 0
        log = server.events("request_finished")
        retractions = sum(int(str(event["retractions"])) for event in log)
        assert sum(event["reason"] == "abort" for event in log) == 4
        states = [event["paths"]["overlap"] for event in server.events("rank_ready")]  # type: ignore[index]
        assert states == ["active" if overlap else "off"] * 2
        return answers, asked, retractions


def test_answers_are_the_same_with_steps_launched_ahead() -> None:
    """Path invariance, C-01: ids, log-probabilities with all digits, finish reasons and usage; few pages, so that rows
    are put back; clients that leave; stop strings, choices, penalties, texts of one and two tokens."""
    plain, plain_asked, put_back = serve(False)
    ahead, ahead_asked, also_put_back = serve(True)

    assert ahead == plain
    assert ahead_asked == plain_asked
    assert put_back > 0
    assert also_put_back > 0
