"""Structured log lines on standard error: one event a line; role, pid and dp_rank bound once per process.

An event is a constant snake_case string plus fields; docs/logs.md lists them all. `json` is for machines, `console` for
people.
"""

from __future__ import annotations

import contextlib
import logging
import os
import traceback
from typing import BinaryIO, Literal, cast

import orjson
import structlog
from structlog.typing import EventDict, FilteringBoundLogger, Processor, WrappedLogger

_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


def configure(
    role: str,
    dp_rank: int | None,
    format: Literal["json", "console"],
    level: Literal["debug", "info", "warning", "error"],
) -> None:
    """Set this process's log up; call again after a fork. Messages of libraries come out as `library_message`."""
    processors: list[Processor] = [
        _bind_process(role, dp_rank),
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True, key="ts"),
    ]
    if format == "json":
        processors += [structlog.processors.format_exc_info, _render_json]
    else:
        processors += [_render_console]
    structlog.configure(
        processors=processors,
        wrapper_class=structlog.make_filtering_bound_logger(_LEVELS[level]),
        logger_factory=structlog.BytesLoggerFactory(cast(BinaryIO, _StandardError())),
        cache_logger_on_first_use=False,
    )
    root = logging.getLogger()
    root.handlers = [_LibraryHandler()]
    root.setLevel(max(_LEVELS[level], logging.WARNING))


def get() -> FilteringBoundLogger:
    """Return the logger; it may be bound with a request_id and is valid before and after `configure`."""
    return cast(FilteringBoundLogger, structlog.get_logger())


class _StandardError:
    """Standard error without a buffer: one write call a line, so lines of several processes on one pipe do not mix."""

    def write(self, line: bytes) -> int:
        """Write one line; lose it when nobody can take it, for the work that it tells of must not fail by it."""
        with contextlib.suppress(OSError):
            return os.write(2, line)
        return 0

    def flush(self) -> None:
        """Nothing is held back."""


def _bind_process(role: str, dp_rank: int | None) -> Processor:
    pid = os.getpid()

    def bind(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
        event["role"] = role
        event["pid"] = pid
        if dp_rank is not None:
            event.setdefault("dp_rank", dp_rank)
        return event

    return bind


def _render_json(_logger: WrappedLogger, _method: str, event: EventDict) -> bytes:
    head = {name: event.pop(name) for name in ("ts", "level", "event", "role", "pid")}
    fields = {**head, **event}
    try:
        return orjson.dumps(fields, default=str)
    except TypeError:
        # A lone surrogate or a number beyond 64 bits; a log call must not fail the work that it tells of.
        return orjson.dumps({name: _representable(value) for name, value in fields.items()}, default=str)


def _representable(value: object) -> object:
    try:
        orjson.dumps(value, default=str)
    except TypeError:
        return ascii(value)
    return value


def _render_console(_logger: WrappedLogger, _method: str, event: EventDict) -> bytes:
    """`12:34:56 warning rank1  event_name  key=value`; an exception's lines follow.

    Monotonic stamps (`_ns`) are left out: people cannot read them.
    """
    time_of_day = event.pop("ts")[11:19]
    who = event.pop("role")
    if who == "rank":
        who += str(event.pop("dp_rank", ""))
    event.pop("pid")
    line = f"{time_of_day} {event.pop('level'):<7} {who:<11} {event.pop('event')}"
    error = event.pop("exc_info", None)
    fields = "".join(f"  {name}={_plain(value)}" for name, value in event.items() if not name.endswith("_ns"))
    text = line + fields
    if error:
        text += "\n" + _format_exception(error)
    return text.encode(errors="backslashreplace")


def _plain(value: object) -> str:
    return value if isinstance(value, str) and value.isprintable() and " " not in value else repr(value)


def _format_exception(error: object) -> str:
    if isinstance(error, BaseException):
        return "".join(traceback.format_exception(error)).rstrip()
    return traceback.format_exc().rstrip()


class _LibraryHandler(logging.Handler):
    """Turns records of the standard library's logging into events."""

    def emit(self, record: logging.LogRecord) -> None:
        """Log one record under its own level."""
        fields = {"library": record.name, "message": record.getMessage(), "exc_info": record.exc_info}
        if record.levelno >= logging.ERROR:
            get().error("library_message", **fields)
        else:
            get().warning("library_message", **fields)
