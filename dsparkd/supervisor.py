"""The parent: forks the children, watches them, starts and stops the whole in a fixed order.

Everything here runs in the parent's main thread; the children are forked before a loop or a thread exists. Whatever
goes wrong ends all of it: exit 78 for what a restart cannot mend, 70 for the rest.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import importlib
import importlib.metadata
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal, cast

import msgspec

import dsparkd
from dsparkd import crash, metrics, system
from dsparkd import log as log_module
from dsparkd.config import Config, ServerConfig
from dsparkd.errors import EXIT_FATAL, EXIT_OK, CapabilityError, ConfigError, FatalError, PeerError, StartError
from dsparkd.ipc import board
from dsparkd.ipc.wiring import (
    ChildWiring,
    DetokenizerWiring,
    ParentWiring,
    ProbeWiring,
    RankWiring,
    SharedRegion,
    Wiring,
)
from dsparkd.native import exchange

if TYPE_CHECKING:
    import hypercorn
    from hypercorn.typing import ASGIFramework
    from starlette.applications import Starlette

    from dsparkd.ipc.channel import AsyncChannel
    from dsparkd.messages import CrashReport, FromDetokenizer, FromRank, Progress
    from dsparkd.routing.router import Router

    BuildApp = Callable[[Config, Router, metrics.Registry], Starlette]

log = log_module.get()

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
ABORT_TIMEOUT_S = 5.0  # from aborting what is left to the last final event
LAST_WORDS_TIMEOUT_S = 1.0  # for what ended children left in their sockets
SURVIVOR_GRACE_S = 5.0  # L-38: how long the others get after an unexpected end
# For the last bytes of responses that have their final event, and for refusals, which a busy machine makes slowly: a
# request that is cut off before its first byte gets a bare 500. Only a client that does not read makes anybody wait.
HTTP_GRACE_S = 5.0
# How long a connection without a request is kept. Proxies keep theirs for 60 s, and send the next request into one that
# is being closed here otherwise; a POST is not tried again by them.
KEEP_ALIVE_S = 75.0
BACKLOG = 1024  # connections that wait to be accepted
UNREAD_TIMEOUT_MS = 60_000  # how long the kernel keeps a connection whose other end takes nothing more
CAUSE_WINDOW_S = 0.5  # how much later than its sender's end a message may be read that says more than the end
CONSEQUENCE_DELAY_S = 0.5  # how much later than its cause the end may be seen that it brought about
PROGRESS_INTERVAL_S = 5
START_EXTENSION_S = 120  # of the service manager's start time-out, renewed by each progress message

MEMORY_REMEDY = (
    "allow memfd_create and eventfd2 in the seccomp filter and raise the limits of open files and of file size"
    " (LimitNOFILE, LimitFSIZE; ulimit -n, -f)"
)

RANK_PATH = "dsparkd.rank:main"
DETOKENIZER_PATH = "dsparkd.detokenizer:main"
PROBE_PATH = "dsparkd.probe:main"


@dataclass
class Child:
    """One child process; owned by the event loop once it is watched. exit_code is negative for a signal."""

    name: str
    role: Literal["rank", "detokenizer", "probe"]
    pid: int
    pidfd: int
    exit_code: int | None = None
    was_late: bool = False
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    def describe_end(self) -> str:
        """Say who ended and how."""
        who = f"{self.name} (pid {self.pid})"
        if self.exit_code is None:
            return f"{who} still runs"
        if self.exit_code < 0:
            why = " (its tick took longer than watchdog.tick_timeout_s)" if -self.exit_code == signal.SIGALRM else ""
            return f"{who} was ended by signal {-self.exit_code}{why}"
        return f"{who} ended with exit code {self.exit_code}"


def describe_failure(child: Child, crashes: Mapping[str, CrashReport]) -> str:
    """Say why the server ends with a child's end. crashes: what failing ranks said, by name, in the order of coming.

    Of two ranks that failed the one is named that blames nobody else: its end is what the other one saw.
    """
    if child.exit_code == EXIT_FATAL:
        first = next((name for name, said in crashes.items() if not said.is_consequence), child.name)
        if first in crashes:
            return f"{first} failed: {crashes[first].cause}"
    return f"{child.describe_end()} unexpectedly"


def fork_children(
    config: Config,
    wiring: Wiring,
    *,
    rank_path: str = RANK_PATH,
    detokenizer_path: str = DETOKENIZER_PATH,
    probe_path: str = PROBE_PATH,
) -> list[Child]:
    """Fork the probe process where there is one, the detokenizer and both ranks, close their ends here and return them.

    The stop signals must be blocked by the caller until it handles them: a child ignores them before it unblocks.
    """
    children = [_fork_child(config, wiring, wiring.probe, probe_path)] if wiring.probe is not None else []
    children.append(_fork_child(config, wiring, wiring.detokenizer, detokenizer_path))
    children += [_fork_child(config, wiring, own, rank_path) for own in wiring.ranks]
    wiring.close_all_but(wiring.parent)
    return children


def _fork_child(config: Config, wiring: Wiring, own: ChildWiring, path: str) -> Child:
    parent_pid = os.getpid()
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        pid = os.fork()
    except OSError as error:
        remedy = "raise the limit of processes (TasksMax, LimitNPROC; ulimit -u), or free memory"
        raise CapabilityError("supervisor", f"a new process ({error.strerror})", remedy) from error
    if pid == 0:
        _run_child(config, wiring, own, path, parent_pid)
    if isinstance(own, RankWiring):
        return Child(f"rank {own.dp_rank}", "rank", pid, system.pidfd_open(pid))
    role = _role(own)
    return Child(role, role, pid, system.pidfd_open(pid))


def _role(own: ChildWiring) -> Literal["rank", "detokenizer", "probe"]:
    match own:
        case RankWiring():
            return "rank"
        case DetokenizerWiring():
            return "detokenizer"
        case ProbeWiring():
            return "probe"


def _run_child(config: Config, wiring: Wiring, own: ChildWiring, path: str, parent_pid: int) -> None:
    """Become the child: never returns."""
    code = EXIT_FATAL
    try:
        system.set_parent_death_signal(parent_pid)
        for number in STOP_SIGNALS:
            # Ctrl-C and some managers signal the whole group; children stop when the parent tells them to.
            signal.signal(number, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        # Only when no other process holds a copy of an end does its closing mean that its owner died. The sockets
        # are closed as objects first: closed as bare numbers, their finalizers would later close a re-used number.
        wiring.close_all_but(own)
        system.close_other_fds(own.descriptors())
        log_module.configure(
            _role(own),
            own.dp_rank if isinstance(own, RankWiring) else None,
            config.log.format,
            config.log.level,
        )
        module, function = path.split(":")
        code = getattr(importlib.import_module(module), function)(config, own)
    except Exception:  # a process main: what its own main did not expect
        log.error("child_crashed", exc_info=True)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        # Not sys.exit: the stack below belongs to the parent's program.
        os._exit(code)


class ChildWatch:
    """Sees the end of every child through its pidfd, at once. Owned by the event loop.

    While armed any end, exit code 0 included, is unexpected and reported.
    """

    def __init__(
        self, children: Sequence[Child], on_unexpected_end: Callable[[Child], None], tally: metrics.Tally
    ) -> None:
        self._children = children
        self._on_unexpected_end = on_unexpected_end
        self._tally = tally
        self._armed = False

    def arm(self) -> None:
        """Start watching. Call once, inside the running loop."""
        self._armed = True
        loop = asyncio.get_running_loop()
        for child in self._children:
            loop.add_reader(child.pidfd, self._on_end, child)

    def disarm(self) -> None:
        """From here on ends are expected."""
        self._armed = False

    def _on_end(self, child: Child) -> None:
        code = system.reap_nowait(child.pid)
        if code is None:
            return
        asyncio.get_running_loop().remove_reader(child.pidfd)
        os.close(child.pidfd)
        child.exit_code = code
        child.ended.set()
        self._tally.inc(metrics.CHILD_EXITS, child.role, self._result(child))
        log.info("child_ended", child=child.name, child_pid=child.pid, exit_code=code, expected=not self._armed)
        if self._armed:
            self._on_unexpected_end(child)

    def _result(self, child: Child) -> str:
        if child.was_late:
            return "late"
        if child.exit_code == EXIT_OK:
            return "clean" if not self._armed else "failed"
        return "killed" if child.exit_code is not None and child.exit_code < 0 else "failed"

    async def wait_for_clean_exit(self, timeout_s: float) -> None:
        """Disarm and wait for all children against one deadline.

        Raises ValueError for a timeout that is not positive, and one FatalError that lists each child that still
        runs or ended with another code than 0.
        """
        if not timeout_s > 0:
            raise ValueError(f"timeout_s = {timeout_s}: use a positive number of seconds")
        self.disarm()
        await self._wait_for_ends(timeout_s)
        bad = [child.describe_end() for child in self._children if child.exit_code != EXIT_OK]
        if bad:
            raise FatalError(f"unclean end: {'; '.join(bad)}")

    async def end_all(self, grace_s: float) -> None:
        """Disarm, let the children end by themselves for grace_s, kill those that do not, and reap all."""
        self.disarm()
        await self._wait_for_ends(grace_s)
        for child in self._children:
            if child.exit_code is None:
                child.was_late = grace_s > 0
                # Not reaped yet, so the pid cannot have become another process.
                os.kill(child.pid, signal.SIGKILL)
        await self._wait_for_ends(None)

    async def _wait_for_ends(self, timeout_s: float | None) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                for child in self._children:
                    await child.ended.wait()


def open_exchange(config: Config) -> SharedRegion | None:
    """Make what both ranks of a native exchange inherit; None for another kind. Raises CapabilityError."""
    if config.exchange.kind != "native":
        return None
    num_bytes = exchange.region_bytes()
    try:
        memory = system.sealed_memory("dsparkd-exchange", num_bytes)
        kicks = (system.eventfd(), system.eventfd())
    except OSError as error:
        raise CapabilityError(
            exchange.FEATURE,
            f"memory that two processes share ({error.strerror})",
            f'{MEMORY_REMEDY}, or set exchange.kind = "gloo"',
        ) from error
    session = int.from_bytes(os.urandom(8), "little")
    exchange.init_region(memory, session=session, digest=exchange.config_digest(config))
    return SharedRegion(memory, session, kicks)


def create_board() -> int:
    """Make the load board that parent and ranks share. Raises CapabilityError."""
    descriptor = -1
    try:
        descriptor = system.sealed_memory("dsparkd-board", board.BOARD_BYTES)
        with board.open_board(descriptor) as memory:
            board.prepare_board(memory)
    except OSError as error:
        raise CapabilityError(
            board.FEATURE, f"memory that processes share ({error.strerror})", MEMORY_REMEDY
        ) from error
    except CapabilityError:
        os.close(descriptor)
        raise
    return descriptor


def bind_listener(config: ServerConfig) -> socket.socket:
    """Reserve the configured address; nobody can connect before `listen`. Raises ConfigError."""
    try:
        family, _, _, _, address = socket.getaddrinfo(config.host, config.port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError("server.host", config.host, f"not an address of this machine ({error})") from error
    try:
        # A restart finds connections of the last run in TIME_WAIT.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Accepted connections inherit these. A client that was ended because it does not read would otherwise keep its
        # connection, and the megabytes that the kernel holds for it, for as long as it lives.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNREAD_TIMEOUT_MS)
        listener.bind(address)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRNOTAVAIL:
            raise ConfigError("server.host", config.host, "not an address of this machine") from error
        remedy = f"cannot listen on {config.host} ({error.strerror}); use another port, or stop what listens there"
        raise ConfigError("server.port", config.port, remedy) from error
    return listener


def http_settings(descriptor: int) -> hypercorn.Config:
    """What the HTTP library is told. descriptor: a listening socket, which it takes over."""
    import hypercorn

    server = hypercorn.Config()
    server.bind = [f"fd://{descriptor}"]
    server.backlog = BACKLOG
    server.accesslog = None
    server.errorlog = None
    server.include_server_header = False
    server.graceful_timeout = HTTP_GRACE_S
    server.keep_alive_timeout = KEEP_ALIVE_S
    return server


def report_exception(loop: asyncio.AbstractEventLoop, context: dict[str, object]) -> None:
    """Log what no task took, but for a connection that ends with the loop: one that came in a stop's last moment.

    Python 3.11 takes its cancelled task for a callback that failed.
    """
    if not isinstance(context.get("exception"), asyncio.CancelledError):
        loop.default_exception_handler(context)


class Supervisor:
    """Brings the server up, keeps it, takes it down. One instance, one `run`, owned by the event loop."""

    def __init__(
        self,
        config: Config,
        wiring: ParentWiring,
        children: Sequence[Child],
        listener: socket.socket,
        build_app: BuildApp,
    ) -> None:
        self._config = config
        self._wiring = wiring
        self._children = children
        self._listener = listener
        self._build_app = build_app
        self._registry = metrics.Registry()
        self._watch = ChildWatch(children, self._on_unexpected_end, self._registry.tally)
        self._changed = asyncio.Event()  # set whenever something that `_until` waits for may have changed
        self._failure: StartError | FatalError | None = None
        self._crashes: dict[str, CrashReport] = {}  # by the child's name, in the order of their coming
        self._stop_signals = 0
        self._outstanding = 0  # requests at the moment of a failure
        self._serving = False
        self._progress_told_ns: dict[tuple[int, str], int] = {}  # by rank and stage
        self._channels: tuple[AsyncChannel[FromRank], AsyncChannel[FromRank], AsyncChannel[FromDetokenizer]] | tuple[()]
        self._channels = ()
        self._http_stop = asyncio.Event()

    async def run(self) -> int:
        """Serve until a signal or a failure; return the exit code. All children have ended then."""
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(report_exception)
        for number in STOP_SIGNALS:
            loop.add_signal_handler(number, self._on_signal, number)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        log.info("starting", version=dsparkd.__version__, checkpoint=self._config.engine.checkpoint)
        for child in self._children:
            log.info("child_started", child=child.name, child_pid=child.pid)
        self._watch.arm()
        try:
            async with asyncio.TaskGroup() as group:
                return await self._live(group)
        finally:
            # Also after a bug of our own: no child outlives this line.
            await self._watch.end_all(0)

    async def _live(self, group: asyncio.TaskGroup) -> int:
        router = await self._open_router()
        routing = group.create_task(self._run_router(router))
        http: asyncio.Task[None] | None = None
        feeding: asyncio.Task[None] | None = None
        try:
            app = await self._start(group, router)
            if self._stop_signals == 0:
                server = self._listen()
                http = group.create_task(self._serve_http(app, server))
                self._announce()
                feeding = group.create_task(self._feed_watchdog())
                await self._until(lambda: self._stop_signals > 0, None)
                await self._stop(group, router)
            code = EXIT_OK
        except (StartError, FatalError) as error:
            code = error.exit_code
            if self._serving:
                log.error("server_failed", error=str(error), exit_code=code)
            else:
                log.error("start_failed", error=str(error), exit_code=code)
            await self._abandon(router, routing, str(error))
            if code == EXIT_FATAL:
                await self._report(router, str(error))
        await self._watch.end_all(0)
        self._http_stop.set()
        if http is not None:
            await asyncio.wait([http], timeout=2 * HTTP_GRACE_S)
            http.cancel()
        routing.cancel()
        if feeding is not None:
            feeding.cancel()
        log.info("stopped", exit_code=code)
        return code

    async def _open_router(self) -> Router:
        from dsparkd.ipc.channel import AsyncChannel
        from dsparkd.messages import decode_from_detokenizer, decode_from_rank
        from dsparkd.routing.router import Router

        timeout_s = self._config.routing.send_timeout_s
        rank_0, rank_1 = [
            await AsyncChannel.open(sock, decode_from_rank, send_timeout_s=timeout_s, name=f"rank {dp_rank}")
            for dp_rank, sock in enumerate(self._wiring.ranks)
        ]
        detokenizer = await AsyncChannel.open(
            self._wiring.detokenizer, decode_from_detokenizer, send_timeout_s=timeout_s, name="detokenizer"
        )
        self._channels = (rank_0, rank_1, detokenizer)
        reader = board.BoardReader(board.open_board(self._wiring.board))
        return Router(
            self._config,
            (rank_0, rank_1),
            detokenizer,
            self._registry,
            board=reader.read,
            on_progress=self._on_progress,
            on_crash=self._on_crash,
        )

    async def _run_router(self, router: Router) -> None:
        try:
            await router.run()
        except PeerError as error:
            # Its process' end is the better message, and is seen before this if there is one.
            delay_s = CAUSE_WINDOW_S + 2 * CONSEQUENCE_DELAY_S
            asyncio.get_running_loop().call_later(delay_s, self._fail, error)
        except (StartError, FatalError) as error:
            self._fail(error)

    async def _start(self, group: asyncio.TaskGroup, router: Router) -> Starlette:
        """Return when both ranks and the detokenizer are ready, or when a stop signal came."""
        ready = group.create_task(self._await_ready(router))
        ready.add_done_callback(lambda _: self._changed.set())
        timeout_s = self._config.exchange.startup_timeout_s
        try:
            await asyncio.sleep(0)  # somebody awaits the children's outcome before anything here can fail
            # Before the wait, which may be long: the application reads files that may be wrong.
            app = self._build_app(self._config, router, self._registry)
            if not await self._until(lambda: ready.done() or self._stop_signals > 0, timeout_s):
                raise FatalError(f"the ranks were not ready within exchange.startup_timeout_s ({timeout_s:g} s)")
            return app
        finally:
            ready.cancel()

    async def _await_ready(self, router: Router) -> None:
        try:
            await router.started()
        except (StartError, FatalError) as error:
            self._fail(error)

    def _on_progress(self, progress: Progress) -> None:
        """Tell the log and the service manager of a stage's ends, and in between once in a while."""
        now_ns = time.monotonic_ns()
        stage = (progress.dp_rank, progress.stage)
        told_ns = self._progress_told_ns.get(stage, 0)
        if progress.done < progress.total and now_ns - told_ns < PROGRESS_INTERVAL_S * 1_000_000_000:
            return
        self._progress_told_ns[stage] = now_ns
        child = "detokenizer" if progress.dp_rank < 0 else f"rank {progress.dp_rank}"
        log.info("start_progress", child=child, stage=progress.stage, done=progress.done, total=progress.total)
        status = f"STATUS=starting, {child}: {progress.stage} {progress.done}/{progress.total}"
        system.notify(f"{status}\nEXTEND_TIMEOUT_USEC={START_EXTENSION_S * 1_000_000}")

    def _announce(self) -> None:
        """Say that requests are welcome: to the log, to people, to the service manager."""
        self._serving = True
        abi = "none" if self._wiring.shared is None else str(exchange.ABI)
        versions = (dsparkd.__version__, importlib.metadata.version("xgrammar"), abi)
        self._registry.tally.set(metrics.BUILD_INFO, *versions, to=1)
        host = f"[{self._config.server.host}]" if ":" in self._config.server.host else self._config.server.host
        url = f"http://{host}:{self._config.server.port}"
        log.info("listening", url=url)
        if self._config.log.format == "console":
            with contextlib.suppress(OSError):  # nobody reads it: no reason to stop
                sys.stdout.write(f"dsparkd: listening on {url} (Ctrl-C stops it)\n")
                sys.stdout.flush()
        system.notify(f"READY=1\nSTATUS=listening on {url}")

    async def _feed_watchdog(self) -> None:
        """Tell the service manager that this loop still turns; the ranks have a watchdog each of their own."""
        interval_s = system.watchdog_interval_s()
        while interval_s is not None:
            system.notify("WATCHDOG=1")
            await asyncio.sleep(interval_s / 2)

    def _listen(self) -> hypercorn.Config:
        """Open the reserved address: connections wait from here on. Raises ConfigError."""
        try:
            self._listener.listen(BACKLOG)
        except OSError as error:
            raise ConfigError("server.port", self._config.server.port, f"cannot listen ({error.strerror})") from error
        return http_settings(self._listener.detach())

    async def _serve_http(self, app: Starlette, server: hypercorn.Config) -> None:
        import hypercorn.asyncio

        # Starlette's and hypercorn's types of one ASGI callable differ in name only.
        await hypercorn.asyncio.serve(
            cast("ASGIFramework", app), server, shutdown_trigger=self._http_stop.wait, mode="asgi"
        )

    def _on_signal(self, number: int) -> None:
        self._stop_signals += 1
        log.info("signal_received", signal=signal.Signals(number).name, count=self._stop_signals)
        self._changed.set()

    def _on_unexpected_end(self, child: Child) -> None:
        # One end takes others along: who lost a peer leaves with EXIT_FATAL a moment later, or is seen first. While
        # starting, the child's own message says why, and may still be in its socket.
        delay_s = 0.0 if self._serving else CAUSE_WINDOW_S
        if child.exit_code == EXIT_FATAL:
            delay_s += CONSEQUENCE_DELAY_S
        asyncio.get_running_loop().call_later(
            delay_s, lambda: self._fail(FatalError(describe_failure(child, self._crashes)))
        )

    def _on_crash(self, report: CrashReport) -> None:
        self._crashes[f"rank {report.dp_rank}"] = report

    def _fail(self, error: StartError | FatalError) -> None:
        """Remember the first failure; it ends the server."""
        if self._failure is None:
            self._failure = error
        self._changed.set()

    async def _until(self, done: Callable[[], bool], timeout_s: float | None) -> bool:
        """Wait until done(); False when the time is over. Raises the failure if there is one."""
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    if self._failure is not None:
                        raise self._failure
                    if done():
                        return True
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            return False

    async def _stop(self, group: asyncio.TaskGroup, router: Router) -> None:
        """Drain, abort the rest, shut the ranks down, wait for all children: in this order (L-33)."""
        begun_ns = time.monotonic_ns()
        timeout_s = self._config.shutdown.drain_timeout_s
        log.info("drain_begun", outstanding=router.outstanding(), timeout_s=timeout_s)
        stop_s = timeout_s + ABORT_TIMEOUT_S + self._config.shutdown.exit_timeout_s + SURVIVOR_GRACE_S
        system.notify(f"STOPPING=1\nSTATUS=draining\nEXTEND_TIMEOUT_USEC={int(stop_s * 1e6)}")
        router.begin_drain()
        drained = group.create_task(router.drained(timeout_s))
        drained.add_done_callback(lambda _: self._changed.set())
        try:
            await self._until(lambda: drained.done() or self._stop_signals > 1, timeout_s)
        finally:
            drained.cancel()
        if router.outstanding():
            log.info("drain_cut", aborted=router.outstanding())
            router.abort_all()
            await router.drained(ABORT_TIMEOUT_S)
        self._watch.disarm()
        log.info("shutdown_sent", drained_s=(time.monotonic_ns() - begun_ns) / 1e9)
        system.notify("STATUS=stopping the ranks")
        router.send_shutdown()
        # Both ranks leave after the tick in which they hear of it. One whose peer never comes would wait for it.
        late = asyncio.get_running_loop().call_later(self._config.shutdown.barrier_timeout_s, self._end_waits)
        try:
            await self._watch.wait_for_clean_exit(self._config.shutdown.exit_timeout_s)
        finally:
            late.cancel()

    def _end_waits(self) -> None:
        """Let no rank wait for the other one any longer: who sleeps in an exchange leaves now."""
        if self._wiring.shared is not None:
            exchange.stop_region(self._wiring.shared.memory)

    async def _abandon(self, router: Router, routing: asyncio.Task[None], reason: str) -> None:
        """After a failure: a readable error to each client, a short grace for the other children, then SIGKILL."""
        system.notify(f"STOPPING=1\nSTATUS=failed: {reason[:200]}")
        self._outstanding = router.outstanding()
        router.fail_all(reason)
        self._watch.disarm()
        routing.cancel()
        await asyncio.wait([routing])
        # An end-of-file tells the others to leave, whatever they wait for; orders may no longer reach them. It comes
        # before the end of their waits, or they would take that for an orderly stop.
        # While starting they are killed at once instead: they have no work to end, and nothing to add to the one cause.
        if self._serving:
            for channel in self._channels:
                channel.end_sending()
            self._http_stop.set()
        self._end_waits()
        last_words = asyncio.ensure_future(router.receive_last_words())
        await self._watch.end_all(SURVIVOR_GRACE_S if self._serving else 0)
        await asyncio.wait([last_words], timeout=LAST_WORDS_TIMEOUT_S)
        last_words.cancel()
        for channel in self._channels:
            channel.close()

    async def _report(self, router: Router, reason: str) -> None:
        """Write the crash report."""
        report: dict[str, object] = {
            "version": dsparkd.__version__,
            "wall_time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "config_digest": hashlib.sha256(msgspec.json.encode(self._config)).hexdigest(),
            "error": reason,
            "outstanding_requests": self._outstanding,
            "children": [
                {"name": child.name, "pid": child.pid, "exit_code": child.exit_code} for child in self._children
            ],
            **router.describe_crash(),
        }
        await crash.write(Path(self._config.engine.crash_dir), report)


def serve(
    config: Config,
    wiring: ParentWiring,
    children: Sequence[Child],
    listener: socket.socket,
    build_app: BuildApp,
) -> int:
    """Run the parent until its end and return the exit code."""
    import uvloop

    async def run() -> int:
        code = await Supervisor(config, wiring, children, listener, build_app).run()
        # The interpreter takes its handlers down before itself: a second Ctrl-C would then end, with another exit code,
        # what has stopped already.
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        return code

    try:
        return uvloop.run(run())
    except Exception:  # a process main: what nobody expected
        log.error("supervisor_crashed", exc_info=True)
        return EXIT_FATAL
