"""What the stop gate looks for: each kind of leftover is seen, and a clean machine is clean."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tools.harness import Server, alive, free_port
from tools.traces import Traces


@pytest.fixture
def traces() -> Traces:
    return Traces()


@pytest.fixture
def port() -> int:
    return free_port()


def test_a_clean_machine_has_nothing_left(traces: Traces, tmp_path: Path, port: int) -> None:
    """Otherwise every line of the gate would fail."""
    traces.environment(tmp_path / "tmp")

    assert traces.left(port, tmp_path, within_s=0) == []


def test_an_orphan_is_found_by_its_mark(traces: Traces, tmp_path: Path, port: int) -> None:
    """R34: a grandchild that lost its parent has no pid that anybody wrote down."""
    code = "import os, time\nif os.fork() == 0:\n    time.sleep(60)\nos._exit(0)"
    environment = {**os.environ, **traces.environment(tmp_path / "tmp")}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)

    (found,) = traces.left(port, tmp_path, within_s=0)

    pid = int(found.removeprefix("process "))
    assert alive(pid)
    os.kill(pid, signal.SIGKILL)
    assert traces.left(port, tmp_path) == []


def test_listeners_sockets_memory_and_files_are_found(traces: Traces, tmp_path: Path, port: int) -> None:
    """Each kind of the gate's list."""
    traces.environment(tmp_path / "tmp")
    memory = Path(f"/dev/shm/dsparkd-test-{os.getpid()}")
    with socket.create_server(("127.0.0.1", port)), socket.socket(socket.AF_UNIX) as named:
        named.bind(f"\0dsparkd-test-{os.getpid()}")
        memory.touch()
        try:
            (tmp_path / "tmp" / "left").touch()
            (tmp_path / "crash").mkdir()
            (tmp_path / "crash" / "report.json.part").touch()
            (tmp_path / "crash" / "report.json").touch()

            found = traces.left(port, tmp_path, within_s=0)
        finally:
            memory.unlink()

    assert len(found) == 5
    for word in ("listener", "unix socket @dsparkd-test", "/dev/shm/dsparkd-test", "tmp/left", "report.json.part"):
        assert any(word in item for item in found), word


def test_a_zombie_is_not_alive() -> None:
    """A killed process that nobody has waited for yet is gone all the same."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)

    assert not alive(process.pid)
    process.wait()


def test_the_harness_ends_a_server_that_was_left_running() -> None:
    """A failing test must not leave a server behind for the next one."""
    code = "import sys, time; print(sys.argv, flush=True); time.sleep(600)"
    with Server(command=(sys.executable, "-c", code)) as server:
        pid = server.pid
        assert alive(pid)

    assert not alive(pid)
    assert not server.directory.exists()
