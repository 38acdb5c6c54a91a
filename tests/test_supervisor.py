"""Start, watch, failure and stop of the process tree, with stand-in children and everything else real."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dsparkd import metrics, system
from dsparkd.config import ServerConfig
from dsparkd.errors import ConfigError, FatalError
from dsparkd.messages import CrashReport
from dsparkd.supervisor import (
    Child,
    ChildWatch,
    bind_listener,
    describe_failure,
    http_settings,
    report_exception,
)
from tools.harness import ROOT, Server, Tables, alive, free_port

FAKE_SERVER = (sys.executable, str(ROOT / "tests" / "fake_server.py"))
QUICK: Tables = {
    "shutdown": {"drain_timeout_s": 20.0, "exit_timeout_s": 2.0},
    "scheduler": {"chunk_tokens": 1024},
}


def fake_server(overrides: Tables = QUICK, port: int | None = None, **faults: str) -> Server:
    environment = {f"FAKE_{process.upper()}": fault for process, fault in faults.items()}
    environment["PYTHONPATH"] = str(ROOT)
    return Server(overrides, command=FAKE_SERVER, environment=environment, port=port)


@pytest.fixture
def server() -> Iterator[Server]:
    with fake_server() as running:
        yield running.wait_ready(30)


class Stream:
    """A request that is read to its end by a thread."""

    def __init__(self, server: Server, request_id: str, tokens: int, rank: int = 0) -> None:
        self._url = f"{server.base_url}/generate?id={request_id}&tokens={tokens}&rank={rank}"
        self.text = ""
        self.gaps_s: list[float] = []
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        last = time.monotonic()
        with urllib.request.urlopen(self._url, timeout=60) as answer:
            while piece := answer.read1(4096):
                now = time.monotonic()
                self.gaps_s.append(now - last)
                last = now
                self.text += piece.decode()

    def finish(self) -> str:
        self._thread.join(60)
        assert not self._thread.is_alive()
        return self.text

    def wait_for_text(self) -> None:
        deadline = time.monotonic() + 30
        while not self.text:
            assert time.monotonic() < deadline
            time.sleep(0.01)


def assert_nothing_left(server: Server) -> None:
    """No process of the tree, and nobody on its port."""
    deadline = time.monotonic() + 1  # L-39's bound
    while any(alive(pid) for pid in server.pids()) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert [pid for pid in server.pids() if alive(pid)] == []
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(("127.0.0.1", server.port))


def names(server: Server) -> list[str]:
    return [str(fields["event"]) for fields in server.events()]


def test_an_idle_stop_is_clean_and_in_order(server: Server) -> None:
    """L-33: drain, shutdown, children, parent; exit 0 and no ERROR line."""
    assert server.stop(20) == 0

    events = [name for name in names(server) if name not in ("start_progress", "child_started")]
    assert events == [
        "starting",
        "listening",
        "signal_received",
        "drain_begun",
        "shutdown_sent",
        "child_ended",
        "child_ended",
        "child_ended",
        "stopped",
    ]
    ends = server.events("child_ended")
    assert all(end["exit_code"] == 0 and end["expected"] for end in ends)
    assert not [fields for fields in server.events() if fields["level"] in ("error", "warning")]
    assert_nothing_left(server)


def test_an_idle_connection_outlives_a_proxys_but_not_the_stop(server: Server) -> None:
    """A proxy that keeps one for 60 s must not send a request into its end; a stop does not wait for it."""
    assert http_settings(0).keep_alive_timeout > 60
    with socket.create_connection(("127.0.0.1", server.port), 10) as sock:
        sock.sendall(b"GET /ready HTTP/1.1\r\nHost: x\r\n\r\n")
        assert sock.recv(1 << 16).startswith(b"HTTP/1.1 200")

        server.send_signal(signal.SIGTERM)

        while sock.recv(1 << 16):
            pass
    assert server.wait_exit(20) == 0


def test_running_streams_finish_before_the_ranks_stop_and_new_work_is_refused(server: Server) -> None:
    """L-33, L-34: draining lets what runs end and admits nothing; L-16: /ready is 503 at once."""
    streams = [Stream(server, f"r{index}", 60, rank=index % 2) for index in range(8)]
    for stream in streams:
        stream.wait_for_text()

    server.send_signal(signal.SIGTERM)
    server.wait_event("drain_begun")
    refused = [server.status(f"/generate?id=new{index}&tokens=1") for index in range(5)]
    ready = server.status("/ready")
    scraped = server.get("/metrics")
    texts = [stream.finish() for stream in streams]

    assert refused == [503] * 5
    assert ready == 503
    assert "dsparkd_ready 0.0" in scraped
    assert all(text.endswith("finish length\n") and text.count("x") == 60 for text in texts)
    assert server.wait_exit(20) == 0
    assert server.events("drain_cut") == []


def test_what_does_not_drain_in_time_is_aborted_with_its_reason() -> None:
    """L-33: after the drain's time-out the rest ends with finish reason abort, and the stop is still clean."""
    with fake_server({"shutdown": {"drain_timeout_s": 0.3, "exit_timeout_s": 5.0}}) as server:
        server.wait_ready(30)
        stream = Stream(server, "long", 100_000)
        stream.wait_for_text()

        code = server.stop(20)

        assert stream.finish().endswith("finish abort\n")
        assert code == 0
        assert [fields["aborted"] for fields in server.events("drain_cut")] == [1]


def test_a_second_signal_ends_the_drain(server: Server) -> None:
    """L-34: the first waits for the stream (which never ends), the second does not."""
    stream = Stream(server, "long", 100_000)
    stream.wait_for_text()
    server.send_signal(signal.SIGTERM)
    server.wait_event("drain_begun")
    assert server.events("drain_cut") == []

    begun = time.monotonic()
    server.send_signal(signal.SIGTERM)
    code = server.wait_exit(20)

    assert code == 0
    assert stream.finish().endswith("finish abort\n")
    assert time.monotonic() - begun < 10, "far below drain_timeout_s (20 s)"


def test_a_signal_while_starting_ends_everything_with_exit_0() -> None:
    """L-33, L-40: there is nothing to drain yet, and children that still load are not waited for."""
    with fake_server(rank1="start_hang") as server:
        server.wait_event("start_progress", 30)

        assert server.stop(10) == 0

        assert server.events("listening") == []
        assert_nothing_left(server)


@pytest.mark.parametrize(
    ("fault", "message"), [("hang_at_shutdown", "still runs"), ("crash_at_shutdown", "ended with exit code 5")]
)
def test_a_child_that_hangs_or_fails_at_the_stop_makes_it_unclean(fault: str, message: str) -> None:
    """L-31: exit 70 and one error that names the child; nothing is left although it hung."""
    with fake_server(rank1=fault) as server:
        server.wait_ready(30)

        assert server.stop(30) == 70

        (error,) = server.events("server_failed")
        assert "rank 1" in str(error["error"])
        assert message in str(error["error"])
        assert_nothing_left(server)


def test_streams_keep_flowing_while_children_are_awaited(server: Server) -> None:
    """L-36: no wait for a child blocks the loop, so the pauses of a stream do not grow during the stop."""
    stream = Stream(server, "flow", 100)
    stream.wait_for_text()
    server.send_signal(signal.SIGTERM)

    text = stream.finish()

    assert text.count("x") == 100
    assert len(stream.gaps_s) > 10, "it came in pieces, not at the end"
    assert server.wait_exit(20) == 0


@pytest.mark.parametrize("child", ["rank 0", "rank 1", "detokenizer"])
@pytest.mark.parametrize(
    ("number", "how"),
    [
        (signal.SIGKILL, "was ended by signal 9"),
        (signal.SIGUSR1, "ended with exit code 0"),
        (signal.SIGUSR2, "ended with exit code 1"),
    ],
)
def test_any_end_of_a_child_fails_the_server_readably(server: Server, child: str, number: int, how: str) -> None:
    """L-30, L-38: exit code 0 counts, too; clients read an error, the others are stopped, exit 70, nothing is left."""
    stream = Stream(server, "cut", 100_000, rank=0)
    stream.wait_for_text()

    os.kill(server.children()[child], number)
    text = stream.finish()
    code = server.wait_exit(15)

    assert code == 70
    (error,) = [fields for fields in server.events() if fields["level"] == "error"]
    assert error["event"] == "server_failed"
    assert how in str(error["error"])
    assert child in str(error["error"])
    assert f"error {error['error']}" in text
    assert_nothing_left(server)


def test_a_rank_that_fails_by_itself_is_named_with_its_cause_to_log_and_clients() -> None:
    """L-38: an exit code says nothing to whoever must mend it; the rank told why before it left."""
    with fake_server(rank1="bug_at_crash") as server:
        server.wait_ready(30)
        stream = Stream(server, "cut", 100_000, rank=0)
        stream.wait_for_text()
        assert server.status("/generate?id=crash&tokens=1&rank=1") == 503

        assert server.wait_exit(15) == 70

        (error,) = server.events("server_failed")
        assert error["error"] == "rank 1 failed: fake bug in a tick"
        assert "error rank 1 failed: fake bug in a tick" in stream.finish()
        assert_nothing_left(server)


BUG = CrashReport(1, "InvariantError: two", False, b"{}")
SAW_PEER = CrashReport(0, "ExchangeError PEER_ERROR: one", True, b"{}")


@pytest.mark.parametrize(
    ("name", "exit_code", "said", "text"),
    [
        ("rank 1", 70, [BUG], "rank 1 failed: InvariantError: two"),
        ("rank 0", 70, [SAW_PEER, BUG], "rank 1 failed: InvariantError: two"),
        ("rank 0", 70, [SAW_PEER], "rank 0 failed: ExchangeError PEER_ERROR: one"),
        ("detokenizer", 70, [SAW_PEER], "detokenizer (pid 7) ended with exit code 70 unexpectedly"),
        ("rank 1", -9, [SAW_PEER], "rank 1 (pid 7) was ended by signal 9 unexpectedly"),
        ("rank 1", 70, [], "rank 1 (pid 7) ended with exit code 70 unexpectedly"),
        (
            "rank 1",
            -14,
            [SAW_PEER],
            "rank 1 (pid 7) was ended by signal 14 (its tick took longer than watchdog.tick_timeout_s) unexpectedly",
        ),
    ],
)
def test_the_first_cause_is_told_and_not_what_it_brought_about(
    name: str, exit_code: int, said: list[CrashReport], text: str
) -> None:
    """L-38: whichever end is seen first, and whichever report is read first."""
    child = Child(name, "rank", 7, -1, exit_code)
    assert describe_failure(child, {f"rank {report.dp_rank}": report for report in said}) == text


def test_a_failure_leaves_one_report_of_parent_and_ranks(server: Server, tmp_path: Path) -> None:
    """L-38: the log names a file with the cause, the children's ends and what the surviving rank said; the dead said
    nothing. A report larger than the socket holds arrives whole."""
    stream = Stream(server, "cut", 100_000, rank=0)
    stream.wait_for_text()
    os.kill(server.children()["rank 1"], signal.SIGKILL)
    assert server.wait_exit(15) == 70
    stream.finish()

    (written,) = server.events("crash_report_written")
    path = Path(str(written["path"]))
    report = json.loads(path.read_text())
    assert list(path.parent.iterdir()) == [path]
    assert "rank 1" in report["error"]
    assert report["outstanding_requests"] == 1
    ends = {child["name"]: child["exit_code"] for child in report["children"]}
    assert ends == {"detokenizer": 70, "rank 0": 70, "rank 1": -9}
    assert report["ranks"][1] is None
    assert "closed" in report["ranks"][0]["error"]
    assert len(report["ranks"][0]["padding"]) == 1 << 20


def test_a_crash_directory_that_cannot_be_made_is_a_start_failure(tmp_path: Path) -> None:
    """L-40: found at the start, not when the report is needed; nothing is forked."""
    (tmp_path / "file").write_text("in the way")
    with fake_server({"engine": {"crash_dir": str(tmp_path / "file" / "crash")}}) as server:
        assert server.wait_exit(10) == 78
        assert "engine.crash_dir" in server.log_text()
        assert server.events("child_started") == []


def test_a_report_that_cannot_be_written_changes_nothing_else(server: Server) -> None:
    """L-38: the directory has gone meanwhile; the failure is told, the exit code and the clients' errors stay."""
    directory = server.directory / "crash"
    directory.rmdir()
    directory.write_text("in the way")
    os.kill(server.children()["rank 1"], signal.SIGKILL)

    assert server.wait_exit(15) == 70

    assert len(server.events("crash_report_failed")) == 1
    assert server.events("crash_report_written") == []
    assert_nothing_left(server)


@pytest.mark.parametrize("hang", [False, True])
def test_children_die_with_a_parent_that_is_killed(server: Server, hang: bool) -> None:
    """L-39: kill -9 of the parent leaves no process, not even one that hangs and so reads of no end."""
    if hang:
        for pid in server.children().values():
            os.kill(pid, signal.SIGSTOP)
    server.process.kill()
    server.process.wait()

    assert_nothing_left(server)


@pytest.mark.parametrize("process", ["rank0", "rank1", "detokenizer"])
@pytest.mark.parametrize(("fault", "code"), [("start_78", 78), ("start_70", 70), ("start_exit", 70)])
def test_a_failed_start_ends_all_of_it_with_one_error_line(process: str, fault: str, code: int) -> None:
    """L-40: whichever child fails, within 10 s everything is gone, and one line says why."""
    with fake_server(**{process: fault}) as server:
        begun = time.monotonic()

        assert server.wait_exit(10) == code

        errors = [fields for fields in server.events() if fields["level"] == "error"]
        assert [fields["event"] for fields in errors] == ["start_failed"]
        expected = "ended with exit code 3" if fault == "start_exit" else f"fake fault {fault}"
        assert expected in str(errors[0]["error"])
        assert server.events("listening") == []
        assert time.monotonic() - begun < 10
        assert_nothing_left(server)


def test_a_bug_in_a_child_is_logged_and_ends_the_start() -> None:
    """A process main catches what nobody expected, once, with its stack."""
    with fake_server(rank0="start_raise") as server:
        assert server.wait_exit(10) == 70

        (failure,) = server.events("start_failed")
        assert "ended with exit code 70" in str(failure["error"])
        (crash,) = server.events("child_crashed")
        assert "RuntimeError: fake bug" in str(crash["exception"])
        assert crash["dp_rank"] == 0


def test_a_start_that_takes_too_long_is_ended() -> None:
    """L-40: exchange.startup_timeout_s bounds the start."""
    with fake_server({"exchange": {"timeout_s": 0.5, "startup_timeout_s": 0.5}}, rank1="start_hang") as server:
        assert server.wait_exit(15) == 70
        (error,) = server.events("start_failed")
        assert "startup_timeout_s" in str(error["error"])
        assert_nothing_left(server)


def test_a_restart_works_right_after_any_kind_of_end() -> None:
    """L-40: the same configuration and port, after a clean stop and after a kill, without a pause."""
    port = free_port()
    for end in ("stop", "kill parent", "kill rank", "stop"):
        with fake_server(port=port) as server:
            server.wait_ready(30)
            if end == "stop":
                assert server.stop(20) == 0
            elif end == "kill parent":
                server.process.kill()
                server.process.wait()
            else:
                os.kill(server.children()["rank 0"], signal.SIGKILL)
                assert server.wait_exit(15) == 70


def test_a_taken_port_is_a_start_failure_that_names_the_key() -> None:
    """C-01: nothing is forked, the exit code is 78 and systemd does not restart."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]

        with pytest.raises(ConfigError, match=r"server\.port"):
            bind_listener(ServerConfig(port=port))
        with fake_server(port=port) as server:
            assert server.wait_exit(10) == 78
            assert f"server.port = {port}" in server.log_text()
            assert server.events("child_started") == []


@pytest.mark.parametrize("host", ["host.invalid.", "192.0.2.1"])
def test_a_host_that_is_not_ours_is_a_start_failure_that_names_the_key(host: str) -> None:
    """C-01: a name that does not resolve, or another machine's address, is a mistake, and not the port's."""
    with pytest.raises(ConfigError, match=r"server\.host"):
        bind_listener(ServerConfig(host=host))


def test_nobody_can_connect_before_the_ranks_are_ready() -> None:
    """architecture 6: the address is reserved early and answers late."""
    with fake_server(rank1="start_hang") as server:
        server.wait_event("start_progress", 30)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", server.port), timeout=5)


def hold_region(server: Server) -> int:
    """A descriptor of the exchange's region, which outlives the server."""
    directory = f"/proc/{server.pid}/fd"
    (number,) = [name for name in os.listdir(directory) if "dsparkd-exchange" in os.readlink(f"{directory}/{name}")]
    return os.open(f"{directory}/{number}", os.O_RDONLY)


def stop_word(region: int) -> int:
    """Whether somebody has ended all waits: contracts 4.1, offset 0x50."""
    word = os.pread(region, 4, 0x50)
    os.close(region)
    return int.from_bytes(word, "little")


def test_an_unexpected_end_also_ends_the_waits_of_the_ranks(server: Server) -> None:
    """L-38: `stop` is set in the exchange region: a rank that sleeps there leaves at once."""
    region = hold_region(server)
    os.kill(server.children()["detokenizer"], signal.SIGKILL)
    assert server.wait_exit(30) == 70
    assert stop_word(region) == 1


def test_an_orderly_stop_leaves_the_waits_to_the_ranks(server: Server) -> None:
    """X-27: the ranks agree on their last exchange; a stop word would part them."""
    region = hold_region(server)
    assert server.stop(30) == 0
    assert stop_word(region) == 0


def test_a_stop_that_takes_too_long_ends_the_waits() -> None:
    """X-24: after shutdown.barrier_timeout_s a rank may wait for one that never comes."""
    with fake_server({"shutdown": {"barrier_timeout_s": 0.2}}, rank1="hang_at_shutdown") as server:
        server.wait_ready(30)
        region = hold_region(server)
        server.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + 20  # far below exit_timeout_s, when the failure would set it
        while stop_word(os.dup(region)) == 0 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert server.process.poll() is None
        assert stop_word(region) == 1


def test_children_hold_only_their_own_descriptors(server: Server) -> None:
    """decisions 13: 0, 1, 2 and the sockets of the wiring, nothing of the parent's or of a sibling's.

    The ranks also share the load board and, for a native exchange, its region and the two events.
    """
    sockets = {}
    for name, pid in server.children().items():
        links = {}
        for number in os.listdir(f"/proc/{pid}/fd"):
            links[int(number)] = os.readlink(f"/proc/{pid}/fd/{number}")
        own = [link for number, link in links.items() if number > 2]
        shared = sorted(link for link in own if not link.startswith("socket:"))
        regions = ["/memfd:dsparkd-board (deleted)", "/memfd:dsparkd-exchange (deleted)"]
        expected = [*regions, "anon_inode:[eventfd]", "anon_inode:[eventfd]"]
        assert shared == (expected if name.startswith("rank") else [])
        sockets[name] = {link for link in own if link.startswith("socket:")}
        assert len(sockets[name]) == 3
    held = [link for links in sockets.values() for link in links]
    assert len(set(held)) == len(held), "no end has two holders"


def test_metrics_count_the_ends_of_children() -> None:
    """M-01: dsparkd_child_exits_total by role and result."""

    async def ends() -> metrics.Tally:
        tally = metrics.Tally()
        children = [spawn("exit(0)"), spawn("exit(1)"), spawn("import os; os.kill(os.getpid(), 9)")]
        watch = ChildWatch(children, lambda _child: None, tally)
        watch.arm()
        with pytest.raises(FatalError):
            await watch.wait_for_clean_exit(30)
        return tally

    values, _ = asyncio.run(ends()).frame()

    assert values == {
        "dsparkd_child_exits_total\0rank\0clean": 1,
        "dsparkd_child_exits_total\0rank\0failed": 1,
        "dsparkd_child_exits_total\0rank\0killed": 1,
    }


CLEAN, CRASH, HANG = "exit(0)", "exit(3)", "import time; time.sleep(600)"


def spawn(code: str) -> Child:
    pid = os.posix_spawn(sys.executable, [sys.executable, "-c", code], os.environ)
    return Child(f"child {code[:8]}", "rank", pid, system.pidfd_open(pid))


@pytest.mark.parametrize("codes", [(CLEAN, CLEAN, CLEAN), (CLEAN, CRASH, CLEAN), (HANG, CLEAN, CRASH), (HANG,) * 3])
def test_wait_for_clean_exit_reports_every_bad_child_once_with_one_deadline(codes: tuple[str, ...]) -> None:
    """L-31: the deadline is shared, and one error lists name, pid and code of each that was late or failed."""

    async def wait() -> str:
        children = [spawn(code) for code in codes]
        watch = ChildWatch(children, lambda _child: pytest.fail("ends are expected"), metrics.Tally())
        watch.arm()
        bad = [code for code in codes if code != CLEAN]
        try:
            if not bad:
                await watch.wait_for_clean_exit(60)
                return ""
            timeout_s = 1.0 if HANG in codes else 60.0
            with pytest.raises(FatalError) as caught:
                await watch.wait_for_clean_exit(timeout_s)
            for child, code in zip(children, codes, strict=True):
                assert (f"pid {child.pid}" in str(caught.value)) == (code != CLEAN or child.exit_code is None)
            return str(caught.value)
        finally:
            await watch.end_all(0)

    message = asyncio.run(wait())

    assert message.count("still runs") >= codes.count(HANG)
    assert (message == "") == (set(codes) == {CLEAN})


@pytest.mark.parametrize("timeout_s", [0, -1, float("nan")])
def test_wait_for_clean_exit_refuses_a_timeout_that_is_not_positive(timeout_s: float) -> None:
    """L-31: zero would report every child as late."""
    watch = ChildWatch([], lambda _child: None, metrics.Tally())

    with pytest.raises(ValueError, match="timeout_s"):
        asyncio.run(watch.wait_for_clean_exit(timeout_s))


def test_an_armed_watch_reports_each_end_at_once_and_a_disarmed_one_none() -> None:
    """L-30, L-31: the pidfd wakes the loop; nothing polls."""

    async def watch_two() -> tuple[list[str], list[str]]:
        armed: list[str] = []
        ended = asyncio.Event()

        def on_end(child: Child) -> None:
            armed.append(child.name)
            ended.set()

        first, second = spawn(CLEAN), spawn(HANG)
        watch = ChildWatch([first, second], on_end, metrics.Tally())
        watch.arm()
        async with asyncio.timeout(30):
            await ended.wait()
        before = list(armed)
        watch.disarm()
        await watch.end_all(0)
        return before, armed

    before, after = asyncio.run(watch_two())

    assert len(before) == 1
    assert after == before


def test_the_parent_imports_no_torch_and_no_loop_before_the_fork() -> None:
    """architecture 2: what the parent has loaded at the fork is copied into every child."""
    code = """
import sys
import dsparkd.__main__
print([name for name in ("torch", "uvloop", "hypercorn", "starlette", "prometheus_client") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)

    assert done.stdout.strip() == "[]"


def test_the_parent_never_imports_torch() -> None:
    """style.md: torch exists only in the ranks; the modules of the whole parent are loaded here."""
    code = """
import sys
import dsparkd.__main__, dsparkd.http.app, dsparkd.routing.router
import hypercorn.asyncio, uvloop
print("torch" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)

    assert done.stdout.strip() == "False"


def test_a_signal_after_the_stop_changes_no_exit_code() -> None:
    """R34: two of them in a row; the second may come while the interpreter takes itself down, its handlers first."""
    code = """
import os, signal, sys
import fake_server

class Late:
    def __del__(self, kill=os.kill, pid=os.getpid(), number=signal.SIGINT):
        if os.getpid() == pid:
            kill(pid, number)

late = Late()
sys.exit(fake_server.main(sys.argv[1]))
"""
    environment = {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    with Server(QUICK, command=(sys.executable, "-c", code), environment=environment) as server:
        server.wait_ready(30)
        assert server.stop(20) == 0


def test_the_service_manager_is_told_of_each_stage(tmp_path: Path) -> None:
    """decisions 19: READY=1 only when requests are welcome, then WATCHDOG=1, at the end STOPPING=1 with more time."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.settimeout(30)
        states: list[str] = []
        receive: Callable[[], None] = lambda: states.append(manager.recv(4096).decode())  # noqa: E731
        environment = {"NOTIFY_SOCKET": str(tmp_path / "notify"), "PYTHONPATH": str(ROOT), "WATCHDOG_USEC": "200000"}
        with Server(QUICK, command=FAKE_SERVER, environment=environment) as server:
            while not any("READY=1" in state for state in states):
                receive()
            assert server.status("/ready") == 200
            assert any("EXTEND_TIMEOUT_USEC=" in state for state in states)
            assert "WATCHDOG=1" not in states, "the manager watches from READY on"
            while states.count("WATCHDOG=1") < 3:
                receive()
            server.send_signal(signal.SIGTERM)
            while not any("STOPPING=1" in state for state in states):
                receive()
            (stopping,) = [state for state in states if "STOPPING=1" in state]
            assert "EXTEND_TIMEOUT_USEC=32000000" in stopping  # 20 to drain, 5 to abort, 2 for the children, 5 of grace
            assert server.wait_exit(20) == 0


def test_a_connection_that_a_stop_cancels_is_no_error_and_a_failed_callback_is_one(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """L-35: one that came in the last moment, unknown to the HTTP server, ends with the loop; a stop logs no error."""

    async def play() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(report_exception)
        served: asyncio.Future[asyncio.Task[None] | None] = loop.create_future()

        async def hang(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            served.set_result(asyncio.current_task())
            try:
                await reader.read()
            finally:
                writer.close()

        server = await asyncio.start_server(hang, "127.0.0.1", 0)
        _, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        task = await served
        assert task is not None
        task.cancel()
        await asyncio.wait([task])
        await asyncio.sleep(0)
        assert not caplog.records
        loop.call_soon(int, "none")
        writer.close()
        await writer.wait_closed()
        server.close()
        await server.wait_closed()

    asyncio.run(play())

    assert ["ValueError" in str(record.exc_info) for record in caplog.records] == [True]
