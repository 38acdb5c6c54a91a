"""The counters of a real server against what its clients saw."""

import json
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tools.harness import Server, ensure_checkpoint

LONG = "a cache keeps whole pages of tokens, " * 60  # more than two pages of 256


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    ensure_checkpoint()
    with Server() as running:
        yield running.wait_ready()


def post(server: Server, body: dict[str, object]) -> tuple[int, dict[str, object]]:
    request = urllib.request.Request(
        server.base_url + "/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def scrape(server: Server) -> Counter[tuple[str, str]]:
    """Sum of each series over dp_rank: (name, other labels' values) -> value."""
    totals: Counter[tuple[str, str]] = Counter()
    for family in text_string_to_metric_families(server.get("/metrics")):
        for sample in family.samples:
            labels = ",".join(value for label, value in sorted(sample.labels.items()) if label != "dp_rank")
            totals[sample.name, labels] += sample.value
    return totals


def settled(server: Server, finished: float) -> Counter[tuple[str, str]]:
    """Scrape once the ranks' frames (one a second) have told of `finished` generations."""
    deadline = time.monotonic() + 30
    while True:
        totals = scrape(server)
        if sum(value for (name, _), value in totals.items() if name == "dsparkd_requests_total") >= finished:
            return totals
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_counters_equal_what_fifty_scripted_requests_saw(server: Server) -> None:
    """M-02: by name, labels and value: outcomes, tokens, routes, statuses, refusals."""
    before = settled(server, 0)
    expected: Counter[tuple[str, str]] = Counter()
    for number in range(50):
        match number % 5:
            case 0:  # explicit rank, two choices: one frame
                body = {"prompt": f"one {number}", "max_tokens": 3, "n": 2, "routed_dp_rank": number % 2}
            case 1:  # ends at a stop string or at its length
                body = {"prompt": f"two {number}", "max_tokens": 6, "stop": ["e"], "seed": number}
            case 2:
                body = {"prompt": f"three {number}", "max_tokens": 1, "logprobs": 2}
            case 3:  # refused
                body = {"prompt": f"four {number}", "max_tokens": -1}
            case _:
                body = {"prompt": [[number + 20, 21, 22], [23, 24]], "max_tokens": 2}
        status, answer = post(server, {"model": "nano", **body})
        expected["dsparkd_http_requests_total", f"/v1/completions,{status // 100}xx"] += 1
        if status != 200:
            expected["dsparkd_refusals_total", "invalid"] += 1
            continue
        choices, usage = answer["choices"], answer["usage"]
        assert isinstance(choices, list)
        assert isinstance(usage, dict)
        for choice in choices:
            expected["dsparkd_requests_total", choice["finish_reason"]] += 1
        route = "explicit" if "routed_dp_rank" in body else "balanced"
        expected["dsparkd_routed_requests_total", route] += len(choices)
        expected["dsparkd_output_tokens_total", ""] += usage["completion_tokens"]

    finished = sum(value for (name, _), value in (before + expected).items() if name == "dsparkd_requests_total")
    after = settled(server, finished)

    families = {name for name, _ in expected}
    seen = Counter({key: value - before[key] for key, value in after.items() if key[0] in families})
    del seen["dsparkd_http_requests_total", "/metrics,2xx"]  # this test's own scrapes
    assert +seen == expected


def test_histograms_count_each_request_once(server: Server) -> None:
    """M-02: one first token, one queue time and one duration for each finished generation."""
    before = settled(server, 0)
    for number in range(5):
        post(server, {"model": "nano", "prompt": f"histogram {number}", "max_tokens": 4, "ignore_eos": True})
    done = sum(value for (name, _), value in before.items() if name == "dsparkd_requests_total")
    after = settled(server, done + 5)

    for name in ("time_to_first_token", "request", "queue"):
        key = (f"dsparkd_{name}_seconds_count", "")
        assert after[key] - before[key] == 5
    key = ("dsparkd_inter_token_seconds_count", "")
    assert after[key] - before[key] == 5 * 3


def test_each_path_is_active_on_both_ranks_and_its_counter_moves_only_when_it_ran(server: Server) -> None:
    """M-06: "path X was used" is a query; the prefix cache's counter stands still for prompts that share nothing."""
    start = settled(server, 0)
    for path in ("native_exchange", "prefix_cache", "mixed_step"):
        assert start["dsparkd_path_active", path] == 2
    done = sum(value for (name, _), value in start.items() if name == "dsparkd_requests_total")

    body = {"model": "nano", "prompt": LONG, "max_tokens": 1, "routed_dp_rank": 0}
    status, _ = post(server, body)
    assert status == 200
    cold = settled(server, done + 1)
    post(server, body)
    hit = settled(server, done + 2)

    key = ("dsparkd_cached_prompt_tokens_total", "device")
    assert cold[key] == start[key]
    assert hit[key] - cold[key] >= 512
    assert hit["dsparkd_exchange_calls_total", "plan"] > start["dsparkd_exchange_calls_total", "plan"]


def test_what_clients_send_adds_no_series(server: Server) -> None:
    """M-01: fuzzed paths, methods, models, ids and headers leave the set of series bounded by what is declared."""
    known = set(settled(server, 0))
    for number in range(30):
        for path in (f"/nowhere/{number}", f"/v1/models/m{number}", f"/v1/completions?x={number}"):
            server.status(path)
        post(server, {"model": f"model-{number}", "prompt": "x", f"field_{number}": 1})

    added = {series for series in scrape(server) if series not in known}

    timed = {f"dsparkd_http_handler_seconds_{part}" for part in ("bucket", "sum", "count")}
    sent = [labels for name, labels in added if name not in timed and "xx" not in labels]  # a bucket's edge is a number
    assert all(str(number) not in labels for number in range(30) for labels in sent)
    assert {name for name, _ in added} <= {"dsparkd_http_requests_total", "dsparkd_refusals_total", *timed}
    assert len({series for series in added if series[0] not in timed}) <= 6
