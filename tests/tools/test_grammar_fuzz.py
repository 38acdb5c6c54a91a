"""The gate of hostile grammars: what is sent when, what counts as calm, and what is a fault."""

from __future__ import annotations

import json
import os
import threading
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from tools.gates import grammar_fuzz
from tools.gates.grammar_fuzz import Outcome, Plain, Storms, Traffic, Window, judge
from tools.grammar_cases import Json

REFUSAL = json.dumps({"error": {"message": "no", "code": "invalid_schema"}})


class Fake:
    """Answers completions: plain ones and regexes with 200, every other grammar with 400. `bodies`: all that came."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, object]] = []
        bodies = self.bodies

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                bodies.append(body)
                is_broken = body.get("regex") == "first 200, then 500" and bodies.count(body) > 1
                is_good = not {"json_schema", "response_format", "ebnf", "structural_tag", "choice"} & body.keys()
                answer = b"{}" if is_good else REFUSAL.encode()
                self.send_response(500 if is_broken else 200 if is_good else 400)
                self.send_header("content-length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, format: str, *args: object) -> None:
                del format, args

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.base_url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[Fake]:
    for name in ("FIRST_PAUSE_S", "PAUSE_S", "SETTLE_S"):
        monkeypatch.setattr(grammar_fuzz, name, 0.01)
    server = Fake()
    yield server
    server.close()


def test_every_case_is_sent_once_and_only_what_was_answered_comes_again(
    fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The echo must cost the server what the answered part of the storm did, and nothing for what was refused."""
    known: list[Json] = [{"regex": "a"}, {"json_schema": 5}, {"regex": "b"}, {"ebnf": ""}]
    monkeypatch.setattr(grammar_fuzz, "hostile", lambda: known)
    monkeypatch.setattr(grammar_fuzz, "ECHO_S", 1.0)
    outcome = Outcome()
    storms = Storms(fake.base_url, "nano", len(known), outcome)

    storms.run()

    sent = Counter(str(body.get("regex", body.get("json_schema", body.get("ebnf")))) for body in fake.bodies)
    assert sent == {"a": 2, "b": 2, "5": 1, "": 1}
    assert (outcome.statuses, outcome.num_echoed, outcome.faults) == ({"200": 2, "400": 2}, 2, [])
    assert (len(storms.storms), len(storms.echoes), len(storms.pauses)) == (1, 1, 2)
    assert storms.storms[0].end_s < storms.pauses[1].begun_s < storms.echoes[0].begun_s, "nothing in between is counted"


def test_an_echo_of_another_status_is_a_fault(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a server that knows the grammar makes of it counts as much as what it made of the new one."""
    monkeypatch.setattr(grammar_fuzz, "hostile", lambda: [{"regex": "first 200, then 500"}])
    monkeypatch.setattr(grammar_fuzz, "ECHO_S", 1.0)
    outcome = Outcome()

    Storms(fake.base_url, "nano", 1, outcome).run()

    assert [fault[:9] for fault in outcome.faults] == ["echo: 500"]


def test_plain_requests_are_sent_by_a_process_of_their_own(fake: Fake) -> None:
    """What the gate itself computes must not be measured with them."""
    traffic = Traffic(fake.base_url, "nano")
    traffic.start()
    while len(fake.bodies) < 2:
        pass

    plain = traffic.stop()

    assert traffic.pid not in (None, os.getpid())
    assert len(plain) == len(fake.bodies) >= 2
    assert {one.status for one in plain} == {200}
    assert [body["routed_dp_rank"] for body in fake.bodies[:2]] == [0, 1], "both ranks, in turn"


def test_a_request_counts_where_it_was_sent() -> None:
    """One that a storm delays into the pause is the storm's."""
    plain = [Plain(begun_s, ms, 200, "") for begun_s, ms in ((0.9, 1.0), (1.0, 2.0), (1.9, 3000.0), (2.0, 4.0))]

    assert Window(1.0, 2.0).times(plain) == [2.0, 3000.0]


@pytest.mark.parametrize(
    ("status", "text", "is_fault"),
    [
        (200, "", False),
        (400, REFUSAL, False),
        (503, REFUSAL, False),
        (504, REFUSAL, False),
        (500, REFUSAL, True),
        (400, "no", True),
        (400, '{"error": {"message": "", "code": "x"}}', True),
        (0, "ConnectionRefusedError()", True),
    ],
)
def test_a_refusal_is_one_error_object_of_a_documented_status(status: int, text: str, is_fault: bool) -> None:
    """G-02: anything else is the server's fault, and the gate says for which case."""
    outcome = Outcome()

    judge({"regex": "("}, status, text, outcome)

    assert bool(outcome.faults) == is_fault
    assert all('{"regex": "("}' in fault for fault in outcome.faults)
