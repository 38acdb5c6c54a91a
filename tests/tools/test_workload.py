"""The gates' shared prompts and client."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator

import pytest

from tools.workload import Client, growing_items, mixed_items

METRICS = """# HELP dsparkd_retractions_total Rows put back.
# TYPE dsparkd_retractions_total counter
dsparkd_retractions_total{dp_rank="0"} 2.0
dsparkd_retractions_total{dp_rank="1"} 3.0
dsparkd_retractions_total_other{dp_rank="1"} 100.0
dsparkd_ready 1.0
"""


class FakeServer(http.server.BaseHTTPRequestHandler):
    """Answers as a server would that has one model and always the same completion."""

    received: list[dict[str, object]]

    def do_GET(self) -> None:
        """Serve the model list and the metrics."""
        self._answer(METRICS if self.path == "/metrics" else json.dumps({"data": [{"id": "tiny"}]}))

    def do_POST(self) -> None:
        """Serve one completion and keep what was asked."""
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        type(self).received.append(body)
        tops = [{"a": -0.5, "b": -1.25}, {"c": -2.0}]
        logprobs = {"tokens": ["a", "c"], "token_logprobs": [-0.5, -2.0], "top_logprobs": tops}
        choice = {"text": "ac", "finish_reason": "length", "logprobs": logprobs}
        usage = {"prompt_tokens_details": {"cached_tokens": 256}}
        self._answer(json.dumps({"choices": [choice], "usage": usage}))

    def _answer(self, body: str) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, format: str, *args: object) -> None:
        """Stay silent."""


@pytest.fixture
def client() -> Iterator[Client]:
    """A client of the fake server."""
    FakeServer.received = []
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), FakeServer) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield Client(f"http://127.0.0.1:{server.server_address[1]}")
        server.shutdown()
        thread.join()


def test_prompts_are_distinct_repeatable_and_half_greedy() -> None:
    """Equal prompts would meet in the prefix cache where a gate asks for cold ones."""
    items = mixed_items(64, 6000, 16, seed=1)

    assert len({tuple(item.prompt) for item in items if len(item.prompt) > 3}) == len(
        [item for item in items if len(item.prompt) > 3]
    )
    assert items == mixed_items(64, 6000, 16, seed=1)
    assert sum(item.rules["temperature"] == 0.0 for item in items) == 32
    assert all("seed" in item.rules for item in items[1::2])
    assert {len(item.prompt) for item in items} >= {127, 128, 129, 255, 256, 257}
    assert all(3 <= token_id < 6000 for item in items for token_id in item.prompt)
    # A trained checkpoint ends most of its answers soon: those would compare little.
    assert sum("ignore_eos" in item.rules for item in items) == 48


def test_growing_prompts_cross_a_page_end_while_they_decode() -> None:
    """Only a row that needs a page more can find none."""
    for item in growing_items(64, 6000, 16, seed=2, page_tokens=256):
        end = len(item.prompt) + 16
        assert len(item.prompt) % 256 != 0
        assert len(item.prompt) // 256 < (end - 1) // 256
        assert item.rules["ignore_eos"] is True


def test_a_counter_sums_its_own_series_and_no_other_familys(client: Client) -> None:
    """A prefix of a longer name, or the help text, must not count."""
    assert client.counter("dsparkd_retractions_total") == 5.0
    assert client.counter("dsparkd_retractions_total", 'dp_rank="1"') == 3.0
    assert client.counter("dsparkd_ready") == 1.0
    assert client.counter("dsparkd_absent_total") == 0.0


def test_an_answer_holds_tokens_logprobs_margins_and_cached_tokens(client: Client) -> None:
    """What the gates compare; items go to the rank that is named for their index."""
    items = mixed_items(2, 100, 4, seed=5)

    answers = client.complete_all(items, 1, lambda index: index, alternatives=2)

    assert [answer.tokens for answer in answers] == [("a", "c")] * 2
    assert answers[0].logprobs == (-0.5, -2.0)
    assert answers[0].margins == (0.75,)
    assert answers[0].cached_tokens == 256
    assert [body["routed_dp_rank"] for body in FakeServer.received] == [0, 1]
    assert FakeServer.received[0]["logprobs"] == 2
    assert FakeServer.received[1]["seed"] == items[1].rules["seed"]
