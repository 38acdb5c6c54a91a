"""The chaos run's eyes: what counts as a violation, and that the run finds one."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tools.chaos.__main__ import Round, Run
from tools.chaos.client import Answer, Crowd, Job, Outcome, judge
from tools.chaos.events import EVENTS
from tools.harness import ROOT

JOB = Job("job", {"model": "nano", "prompt": "x"}, ("hello world",))


def answer(text: str = "", reason: str = "", **fields: object) -> Answer:
    made = Answer(status=200, complete=True)
    if text or reason:
        made.take({"choices": [{"index": 0, "text": text, "finish_reason": reason or None}]})
    for name, value in fields.items():
        setattr(made, name, value)
    return made


@pytest.mark.parametrize(
    ("seen", "verdict"),
    [
        (answer("hello world", "length"), "finished"),
        (answer("hello", "abort"), "ended"),
        (answer("hello", error="the server has failed"), "ended"),
        (answer("hello worlds", "length"), "wrong"),
        (answer("hellp", complete=False), "wrong"),
        (answer("hello", "length"), "wrong"),
        (answer("hello", "stop"), "wrong"),
        (answer("hello", complete=False), "broken"),
        (answer(complete=False), "broken"),
        (answer(status=503, error="draining"), "refused"),
        (answer(status=500), "unreadable"),
        (Answer(error="ConnectionRefusedError"), "unreachable"),
    ],
)
def test_an_answer_is_judged_by_what_is_known_of_it(seen: Answer, verdict: str) -> None:
    """A part must be the beginning of the right answer, and an end must be a word of the server."""
    assert judge(JOB, seen)[0] == verdict


def test_what_counts_as_a_violation_depends_on_what_was_done() -> None:
    """Nobody can say a word after kill -9 of the parent; nobody may be unreachable while the server stays up."""
    by_name = {event.name: event for event in EVENTS}

    def violates(event: str, verdict: str, end: str) -> bool:
        return Run._is_violation(by_name[event], Round(1, event, end=end), Outcome("job", verdict, "", 0.0, 1.0))  # type: ignore[arg-type]

    assert violates("SIGKILL a child", "broken", "exit 70")
    assert not violates("SIGKILL the parent", "broken", "exit -9")
    assert violates("SIGSTOP, then SIGCONT", "unreachable", "stayed up")
    assert not violates("SIGKILL a child", "unreachable", "exit 70")
    for verdict in ("wrong", "hung", "unreadable"):
        assert violates("SIGKILL the parent", verdict, "exit -9")
    for verdict in ("finished", "ended", "refused", "left"):
        assert not violates("SIGSTOP, then SIGCONT", verdict, "stayed up")


def serve_wrongly(listener: socket.socket, body: bytes) -> None:
    """Answer every connection with the same bytes, then close."""
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:
            return
        with connection, contextlib.suppress(OSError):  # the client may have left
            connection.recv(65536)
            connection.sendall(body)


@pytest.mark.parametrize(
    ("body", "verdict"),
    [
        (
            b"HTTP/1.1 200 OK\r\n\r\ndata: " + json.dumps({"choices": [{"index": 0, "text": "help"}]}).encode() + b"\n",
            "wrong",
        ),
        (
            b"HTTP/1.1 200 OK\r\n\r\ndata: " + json.dumps({"choices": [{"index": 0, "text": "hell"}]}).encode() + b"\n",
            "broken",
        ),
        (b'HTTP/1.1 200 OK\r\nContent-Length: 900\r\n\r\n{"choices": [', "broken"),
        (b"", "unreachable"),
    ],
)
def test_a_client_sees_wrong_tokens_and_broken_streams(body: bytes, verdict: str) -> None:
    """Over a real socket, from a server that is at fault."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve_wrongly, args=(listener, body), daemon=True)
        thread.start()
        crowd = Crowd(listener.getsockname()[1], [JOB], 1, seed=1, hung_s=10)
        crowd.start()
        outcomes: list[Outcome] = []
        while not outcomes:
            outcomes = crowd.take_outcomes()
        crowd.stop()
        listener.shutdown(socket.SHUT_RDWR)
    assert {outcome.verdict for outcome in outcomes} == {verdict}


def test_a_client_that_gets_nothing_is_hung_and_one_that_is_cut_has_left() -> None:
    """The listener's backlog takes the request and nobody answers."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        crowd = Crowd(listener.getsockname()[1], [JOB], 1, seed=1, hung_s=0.2)
        crowd.start()
        outcomes: list[Outcome] = []
        while not outcomes:
            outcomes = crowd.take_outcomes()
        assert outcomes[0].verdict == "hung"
        crowd.stop()
        assert all(outcome.verdict in ("hung", "left") for outcome in crowd.take_outcomes())


def test_a_full_file_system_is_really_full(tmp_path: Path) -> None:
    """The event would show nothing if there were room; run where a mount of one's own is possible."""
    script = f"""
mount -t tmpfs -o size=1m full {tmp_path} && {sys.executable} - <<'END'
import pathlib
from tools.chaos.world import fill
file = fill(pathlib.Path("{tmp_path}"))
try:
    (file.parent / "more").write_bytes(bytes(65536))
except OSError as error:
    print(error.strerror)
END
"""
    done = subprocess.run(
        ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", script],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert done.stdout.strip() == "No space left on device", done.stderr
