"""Log lines: one event a line, machine- or man-readable, and every event documented."""

import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from typing import Literal

import pytest
import structlog

from dsparkd import log

Format = Literal["json", "console"]
Level = Literal["debug", "info", "warning", "error"]


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    """The library's configuration is global: give it back."""
    root = logging.getLogger()
    handlers, level = root.handlers, root.level
    yield
    structlog.reset_defaults()
    root.handlers, root.level = handlers, level


def lines(capfdbinary: pytest.CaptureFixture[bytes]) -> list[bytes]:
    out, err = capfdbinary.readouterr()
    assert out == b"", "the log goes to standard error"
    return err.splitlines()


def configure(format: Format = "json", level: Level = "info", dp_rank: int | None = 1) -> None:
    log.configure("rank", dp_rank, format, level)


@pytest.fixture
def stderr(capfdbinary: pytest.CaptureFixture[bytes]) -> pytest.CaptureFixture[bytes]:
    return capfdbinary


def test_a_json_line_is_one_object_with_the_bound_fields_first(stderr: pytest.CaptureFixture[bytes]) -> None:
    """Ingestion reads ts, level, event, role, pid and dp_rank of every line without knowing the event."""
    configure()

    log.get().info("rank_ready", device="cpu", kv_bytes={"pages": 1})

    (line,) = lines(stderr)
    fields = json.loads(line)
    assert list(fields)[:5] == ["ts", "level", "event", "role", "pid"]
    assert (fields["level"], fields["event"], fields["role"], fields["dp_rank"]) == ("info", "rank_ready", "rank", 1)
    assert fields["kv_bytes"] == {"pages": 1}
    assert fields["ts"].endswith("Z")


@pytest.mark.parametrize("format", ["json", "console"])
def test_no_text_of_a_client_can_start_a_line(stderr: pytest.CaptureFixture[bytes], format: Format) -> None:
    """A request id with a line break would forge an event."""
    configure(format)

    log.get().info("http_request", request_id='a\nb\r\x1b[31m\u2028{"event":"forged"}', text="\ud800")

    assert len(lines(stderr)) == 1


def test_a_bound_request_id_is_on_every_line(stderr: pytest.CaptureFixture[bytes]) -> None:
    """One grep follows a request through the processes."""
    configure()
    bound = log.get().bind(request_id="r-1")

    bound.info("http_request")
    bound.warning("http_request")

    assert [json.loads(line)["request_id"] for line in lines(stderr)] == ["r-1", "r-1"]


def test_lines_below_the_level_are_not_written(stderr: pytest.CaptureFixture[bytes]) -> None:
    """C-01: log.level is the least severe level that is written."""
    configure(level="warning")

    log.get().info("rank_ready")
    log.get().error("rank_failed")

    assert [json.loads(line)["event"] for line in lines(stderr)] == ["rank_failed"]


def test_an_exception_stays_inside_its_line(stderr: pytest.CaptureFixture[bytes]) -> None:
    """One event is one line, stack included; people get it readable."""
    configure()
    try:
        raise RuntimeError("boom")
    except RuntimeError:
        log.get().error("rank_crashed", exc_info=True)
    (line,) = lines(stderr)
    assert "RuntimeError: boom" in json.loads(line)["exception"]

    configure("console")
    try:
        raise RuntimeError("boom")
    except RuntimeError:
        log.get().exception("rank_crashed")
    text = b"\n".join(lines(stderr)).decode()
    assert text.endswith("RuntimeError: boom")
    assert "Traceback" in text


def test_console_lines_are_short_and_plain(stderr: pytest.CaptureFixture[bytes]) -> None:
    """log.format = "console" is for a person at a terminal, to whom monotonic nanoseconds say nothing."""
    configure("console")

    log.get().warning("rank_lost", peer="rank 0", count=3, received_ns=6023113525302)

    (line,) = lines(stderr)
    assert line.decode()[8:] == " warning rank1       rank_lost  peer='rank 0'  count=3"


def test_messages_of_libraries_become_events(stderr: pytest.CaptureFixture[bytes]) -> None:
    """A library's own format would break ingestion; below warning they are noise."""
    configure()

    logging.getLogger("hypercorn.error").warning("odd %s", "thing")
    logging.getLogger("asyncio").info("chatter")

    (line,) = lines(stderr)
    fields = json.loads(line)
    assert (fields["event"], fields["library"], fields["message"]) == (
        "library_message",
        "hypercorn.error",
        "odd thing",
    )


def test_values_that_json_lacks_are_written_as_text(stderr: pytest.CaptureFixture[bytes]) -> None:
    """A log call never fails a step: paths, bytes, huge integers and exceptions come out as text."""
    configure()

    log.get().info("rank_ready", path=sys, huge=1 << 80, raw=b"\xff", error=ValueError("x"), number=float("nan"))

    (line,) = lines(stderr)
    assert json.loads(line)["error"] == "x"


def test_a_log_that_nobody_takes_stops_nothing() -> None:
    """`dsparkd 2>&1 | head -1`, or a terminal that was closed: the server goes on."""
    code = """
import os
from dsparkd import log
log.configure("parent", None, "json", "info")
read_end, write_end = os.pipe()
os.dup2(write_end, 2)
os.close(read_end)
os.close(write_end)
log.get().info("rank_ready", text="x" * 100_000)
print("alive")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)

    assert (done.stdout, done.returncode) == ("alive\n", 0)
