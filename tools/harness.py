"""Starts a real server on a free port of this machine, for gates, benches and end-to-end tests."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import tomllib
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

ROOT = Path(__file__).resolve().parent.parent
POLL_S = 0.02

Tables = Mapping[str, Mapping[str, object]]


class ServerFailed(RuntimeError):
    """The server did not do what it was asked to in time; carries the end of its log."""


def free_port() -> int:
    """Return a port that nobody uses at this moment."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


def ensure_checkpoint() -> Path:
    """Return the checkpoint that ships with the project. Raises FileNotFoundError where its weights are missing."""
    directory = ROOT / "conf" / "nano"
    if not (directory / "model.safetensors").exists():
        raise FileNotFoundError(f"{directory} has no weights: is this a whole checkout?")
    return directory


def flatten(tables: Tables) -> dict[str, dict[str, object]]:
    """Give tables inside of tables names of their own, as TOML writes them: `grammar.store`."""
    flat: dict[str, dict[str, object]] = {}
    for table, keys in tables.items():
        flat[table] = {key: value for key, value in keys.items() if not isinstance(value, dict)}
        flat |= flatten({f"{table}.{key}": value for key, value in keys.items() if isinstance(value, dict)})
    return flat


def merge(base: Tables, overrides: Tables) -> dict[str, dict[str, object]]:
    """Return base with the keys of overrides replaced; the value None removes a key."""
    merged = flatten(base)
    for table, keys in overrides.items():
        merged.setdefault(table, {}).update(keys)
    return {table: {key: value for key, value in keys.items() if value is not None} for table, keys in merged.items()}


def to_toml(tables: Tables) -> str:
    """Write tables of scalars as TOML."""
    lines = []
    for table, keys in tables.items():
        lines.append(f"[{table}]")
        # JSON's spelling of strings, numbers and booleans is TOML's, too.
        lines += [f"{key} = {json.dumps(value)}" for key, value in keys.items()]
    return "\n".join(lines) + "\n"


class Server:
    """One server process, its configuration and its log. Leave the `with` block to end whatever is left of it.

    overrides: tables on top of conf/dev.toml. command: what runs, before `--config FILE`. environment: on top of ours.
    """

    def __init__(
        self,
        overrides: Tables | None = None,
        *,
        command: Sequence[str] = (sys.executable, "-m", "dsparkd", "--config"),
        environment: Mapping[str, str] | None = None,
        base: Path = ROOT / "conf" / "dev.toml",
        port: int | None = None,
    ) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="dsparkd-harness-")
        self.directory = Path(self._directory.name)
        self.port = port or free_port()
        self.base_url = f"http://127.0.0.1:{self.port}"
        tables = tomllib.loads(base.read_text(encoding="utf-8"))
        checkpoint = (base.parent / str(tables["engine"]["checkpoint"])).resolve()
        own: Tables = {
            "server": {"port": self.port, "host": "127.0.0.1"},
            "engine": {"checkpoint": str(checkpoint), "crash_dir": str(self.directory / "crash")},
            "log": {"format": "json"},
            "grammar.store": {"directory": str(self.directory / "grammar")},
            # Machines that run tests are slow and shared: what is tested there is not how fast a tick is.
            "health": {"max_age_s": 300.0},
            "exchange": {"timeout_s": 120.0},
        }
        self.config_file = self.directory / "config.toml"
        self.config_file.write_text(to_toml(merge(merge(tables, own), overrides or {})), encoding="utf-8")
        self.log_file = self.directory / "log"
        with self.log_file.open("wb") as log:
            self.process = subprocess.Popen(
                [*command, str(self.config_file)],
                stdout=log,
                stderr=log,
                cwd=ROOT,
                env={**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})},
            )
        self.pid = self.process.pid

    def __enter__(self) -> Server:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()
        self._directory.cleanup()

    def log_text(self) -> str:
        """Return everything that the server wrote."""
        return self.log_file.read_text(encoding="utf-8", errors="replace")

    def events(self, event: str | None = None) -> list[dict[str, object]]:
        """Return the log's events in order, or those with one name."""
        found = []
        for line in self.log_text().splitlines():
            if line.startswith("{"):
                try:
                    fields = json.loads(line)
                except json.JSONDecodeError:
                    continue  # a line that is being written
                if event is None or fields.get("event") == event:
                    found.append(fields)
        return found

    def wait_event(self, event: str, timeout_s: float = 60, count: int = 1) -> list[dict[str, object]]:
        """Wait until the event was logged `count` times. Raises ServerFailed."""
        deadline = time.monotonic() + timeout_s
        while len(found := self.events(event)) < count:
            if time.monotonic() > deadline:
                raise ServerFailed(f"no event {event!r} within {timeout_s} s\n{self.log_text()[-4000:]}")
            if self.process.poll() is not None and len(self.events(event)) < count:
                raise ServerFailed(f"ended ({self.process.returncode}) before {event!r}\n{self.log_text()[-4000:]}")
            time.sleep(POLL_S)
        return found

    def wait_ready(self, timeout_s: float = 120) -> Server:
        """Wait until requests are welcome. Raises ServerFailed."""
        self.wait_event("listening", timeout_s)
        deadline = time.monotonic() + timeout_s
        while self.status("/ready") != 200:
            if time.monotonic() > deadline or self.process.poll() is not None:
                raise ServerFailed(f"not ready within {timeout_s} s\n{self.log_text()[-4000:]}")
            time.sleep(POLL_S)
        return self

    def status(self, path: str, timeout_s: float = 5) -> int | None:
        """Return the status code of a GET, None when nobody answers."""
        try:
            with urllib.request.urlopen(self.base_url + path, timeout=timeout_s) as answer:
                status: int = answer.status
                return status
        except urllib.error.HTTPError as error:
            return error.code
        except OSError:
            return None

    def get(self, path: str, timeout_s: float = 10) -> str:
        """Return the body of a GET that must succeed."""
        with urllib.request.urlopen(self.base_url + path, timeout=timeout_s) as answer:
            body: bytes = answer.read()
            return body.decode()

    def children(self) -> dict[str, int]:
        """Return the pid of each child by name: rank 0, rank 1, detokenizer."""
        return {str(fields["child"]): int(str(fields["child_pid"])) for fields in self.events("child_started")}

    def pids(self) -> list[int]:
        """Return the pids of the server and of its children."""
        return [self.pid, *self.children().values()]

    def send_signal(self, number: int) -> None:
        """Send a signal to the parent."""
        self.process.send_signal(number)

    def wait_exit(self, timeout_s: float = 60) -> int:
        """Wait for the end and return the exit code, negative for a signal. Raises ServerFailed."""
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired as error:
            raise ServerFailed(f"still running after {timeout_s} s\n{self.log_text()[-4000:]}") from error

    def stop(self, timeout_s: float = 60) -> int:
        """Send SIGTERM and return the exit code."""
        self.send_signal(signal.SIGTERM)
        return self.wait_exit(timeout_s)

    def kill(self) -> None:
        """End the parent and every child that is left, at once."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        deadline = time.monotonic() + 10
        while any(alive(pid) for pid in self.children().values()) and time.monotonic() < deadline:
            time.sleep(POLL_S)  # they die with their parent


def alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"
