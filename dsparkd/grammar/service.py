"""From a grammar to a matcher: memory, then the store, then a probe and a compile, off the tick thread.

`GrammarService` is the tick thread's side and never waits. `Coordinator` sees to what is not in memory: it runs on the
grammar thread, which reads and writes the store and talks to the probe process, and hands compiles to worker threads.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import os
import queue
import select
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Literal, Protocol

import msgspec
import xgrammar

from dsparkd import log as log_module
from dsparkd import system
from dsparkd.config import GrammarConfig
from dsparkd.errors import FatalError, GrammarError, InvariantError, PeerError, RequestError
from dsparkd.grammar import key
from dsparkd.grammar.cache import Compiled, GrammarCache, Job, Source, Ticket
from dsparkd.grammar.key import Scope
from dsparkd.grammar.store import Entry, EntryKind, GrammarStore, KeyLock, Refusal, StoreCorrupt, StoreFull
from dsparkd.ipc.channel import Channel
from dsparkd.messages import FromProbe, Grammar, ProbeBody, ProbeReady, ProbeRequest, ProbeVerdict

log = log_module.get()

LOCK_POLL_S = 0.01  # between two looks at the locks that another process holds
HANG_CHECK_S = 1.0
WRITE_LOG_INTERVAL_S = 60.0
THREAD_STACK_BYTES = 8 << 20  # XGrammar recurses into what it compiles; less crashed on what 8 MB took
_RATE_WEIGHT = 0.25  # of the newest measurement in the moving average
# What the grammar itself brings about again; anything else may go better next time.
_REMEMBERED = ("invalid_grammar", "grammar_too_costly")

EventName = Literal["compile_seconds", "store_decision", "store_error"]
Event = tuple[EventName, str, float]  # what happened, its label, and how long it took or how often it happened


class Compiles(Protocol):
    """dsparkd.grammar.compiler.Compiler, or a test's; called by the workers."""

    def compile(self, grammar: Grammar) -> xgrammar.CompiledGrammar: ...
    def load(self, grammar: Grammar, body: bytes) -> xgrammar.CompiledGrammar: ...


class Workers(Protocol):
    """What runs compiles; one that runs them at once, in the caller, is one too."""

    def submit(self, function: Callable[[Work], Built], work: Work, /) -> Future[Built]: ...


@dataclass(eq=False)
class Work:
    """What the grammar thread knows of one job. thread and begun_ns: of the worker, while it compiles."""

    job: Job
    digest: str
    number: int
    source: Source = "compile"
    lock: KeyLock | None = None
    entry: Entry | None = None
    thread: int = 0
    begun_ns: int = 0

    def release(self) -> None:
        """Let another process see to the grammar."""
        if self.lock is not None:
            self.lock.release()
            self.lock = None


@dataclass(frozen=True)
class Built:
    """What a worker made; outcome None: nobody waited any more. cpu_ns: its processor time."""

    outcome: Compiled | RequestError | None
    cpu_ns: int


class Coordinator:
    """Sees to jobs. Everything but `post` and the compiles happens on the grammar thread.

    finished: told of tickets whose outcome has come, on the grammar thread. cpu_clock: processor time of a thread in
    nanoseconds, by its number.
    """

    def __init__(
        self,
        config: GrammarConfig,
        cache: GrammarCache,
        scope: Scope,
        store: GrammarStore | None,
        probe: Channel[FromProbe],
        compiler: Compiles,
        workers: Workers,
        finished: Callable[[list[Ticket]], None],
        clock: Callable[[], int] = time.monotonic_ns,
        cpu_clock: Callable[[int], int] = lambda thread: time.clock_gettime_ns(time.pthread_getcpuclockid(thread)),
    ) -> None:
        self._config = config
        self._cache = cache
        self._scope = scope
        self._store = store
        self._probe = probe
        self._compiler = compiler
        self._workers = workers
        self._finished = finished
        self._clock = clock
        self._cpu_clock = cpu_clock
        self._inbox: queue.SimpleQueue[Job | tuple[Work, Future[Built]] | None] = queue.SimpleQueue()
        self._wake = system.eventfd()
        self._numbers = itertools.count(1)
        self._locked_out: list[Work] = []  # another process holds their lock
        self._probing: dict[int, Work] = {}
        self._compiling: set[Work] = set()
        self._bytes_per_s = 0.0  # at which bodies are loaded; 0 until the probe process says so
        self._write_logged_ns: int | None = None
        self.events: deque[Event] = deque()  # for the tick thread's metrics
        self.has_probe = threading.Event()  # the probe process has said that it takes requests
        self.is_closing = False
        self._ending = threading.Lock()
        self._is_closed = False

    def post(self, item: Job | tuple[Work, Future[Built]] | None) -> None:
        """Hand over a new job or a worker's result; None ends `run`. Any thread."""
        self._inbox.put(item)
        with self._ending:
            if not self._is_closed:  # a compile may end after the service did
                os.eventfd_write(self._wake, 1)

    def run(self) -> None:
        """Be the grammar thread until told to end. Raises FatalError for what no request is to blame for."""
        while not self.is_closing:
            self.step(None)
        for work in (*self._locked_out, *self._probing.values(), *self._compiling):
            work.release()

    def step(self, wait_s: float | None) -> None:
        """Wait for something to do, at most wait_s, and do all that there is."""
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        poll.register(self._probe, select.POLLIN | (select.POLLOUT if self._probe.wants_write else 0))
        bounds = [wait_s, LOCK_POLL_S if self._locked_out else None, HANG_CHECK_S if self._compiling else None]
        wanted = [bound for bound in bounds if bound is not None]
        poll.poll(min(wanted) * 1000 if wanted else None)
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)
        self._probe.flush_nowait()
        for message in self._probe.receive_nowait():
            self._hear(message)
        self._take_inbox()
        waiting, self._locked_out = self._locked_out, []
        for work in waiting:
            self._lock(work)
        self._require_progress()

    def _take_inbox(self) -> None:
        while True:
            try:
                item = self._inbox.get_nowait()
            except queue.Empty:
                return
            match item:
                case None:
                    self.is_closing = True
                case Job():
                    self._lock(Work(item, key.digest(item.grammar, self._scope), next(self._numbers)))
                case (work, future):
                    self._built(work, future.result())

    def _lock(self, work: Work) -> None:
        """Get hold of a grammar before it is looked for on disk, so that one process sees to it."""
        if not self._cache.keep(work.job):
            return
        if self._store is None:
            self._ask_probe(work)
            return
        try:
            work.lock = self._store.try_lock(work.digest)
            if work.lock is None:
                self._locked_out.append(work)
                return
            work.entry = self._store.read(work.digest, work.job.grammar)
        except StoreCorrupt as error:
            self._count("store_error", "corrupt")
            self._finish(work, error)
        except OSError as error:
            self._count("store_error", "read")
            message = f"the stored grammar {work.digest} cannot be read ({error.strerror})"
            self._finish(work, RequestError(message, status=500, code="grammar_store_io"))
        else:
            self._follow_entry(work)

    def _follow_entry(self, work: Work) -> None:
        entry = work.entry
        if entry is None:
            self._ask_probe(work)
        elif entry.kind == EntryKind.REFUSED and self._still_refused(entry.refusal):
            work.source = "disk"
            self._finish(work, GrammarError(entry.refusal.message, code=entry.refusal.code))
        elif entry.kind == EntryKind.REFUSED:
            work.entry = None
            self._ask_probe(work)
        else:
            work.source = "disk" if entry.kind == EntryKind.SERIALIZED else "local_compile"
            work.release()
            self._start_worker(work)

    def _still_refused(self, refusal: Refusal) -> bool:
        """Whether what broke a limit would break today's, too."""
        return (not refusal.cpu_s or refusal.cpu_s >= self._config.probe_cpu_s) and (
            not refusal.num_bytes or refusal.num_bytes >= self._config.probe_bytes
        )

    def _ask_probe(self, work: Work) -> None:
        self._probing[work.number] = work
        self._send_request(work)

    def _send_request(self, work: Work) -> None:
        request = ProbeRequest(
            number=work.number, digest=work.digest, grammar=work.job.grammar, bytes_per_s=self._bytes_per_s
        )
        self._probe.send_nowait(request)

    def _hear(self, message: FromProbe) -> None:
        match message:
            case ProbeReady():
                self._bytes_per_s = message.bytes_per_s
                self.has_probe.set()
            case ProbeBody():
                self._count("store_decision", message.decision)
            case ProbeVerdict():
                work = self._probing.pop(message.number, None)
                if work is not None:  # else only its body was asked for
                    self._judge(work, message)

    def _judge(self, work: Work, verdict: ProbeVerdict) -> None:
        if verdict.state == "sound":
            if self._cache.keep(work.job):
                self._start_worker(work)
            else:
                work.release()
        elif verdict.state == "busy":
            message = "the machine is too busy to try the grammar; try again later"
            error = RequestError(message, status=503, code="grammar_unavailable", retry_after_s=5)
            self._finish(work, error)
        else:
            refusal = Refusal(verdict.code, verdict.message, verdict.cpu_s, verdict.num_bytes)
            self._finish(
                work,
                GrammarError(verdict.message, code=verdict.code),
                publish=Entry(EntryKind.REFUSED, work.job.grammar, msgspec.msgpack.encode(refusal)),
            )

    def _start_worker(self, work: Work) -> None:
        self._compiling.add(work)
        future = self._workers.submit(self._build, work)
        future.add_done_callback(lambda done: self.post((work, done)))

    def _build(self, work: Work) -> Built:
        """Compile or load; on a worker thread."""
        if not self._cache.keep(work.job):
            return Built(None, 0)
        work.begun_ns = time.thread_time_ns()
        work.thread = threading.get_ident()
        outcome = self._make(work)
        work.thread = 0
        return Built(outcome, time.thread_time_ns() - work.begun_ns)

    def _make(self, work: Work) -> Compiled | RequestError:
        grammar = work.job.grammar
        try:
            if work.source != "disk" or work.entry is None:
                native = self._compiler.compile(grammar)
            else:
                native = self._compiler.load(grammar, work.entry.body)
        except GrammarError as error:
            return error
        except MemoryError:
            message = "there is not enough memory to compile the grammar now"
            return RequestError(message, status=503, code="grammar_unavailable", retry_after_s=5)
        except RuntimeError as error:  # the library refuses a body whose checksum is right
            return StoreCorrupt(work.digest, type(error).__name__)
        return Compiled(native, native.memory_size_bytes)

    def _built(self, work: Work, built: Built) -> None:
        self._compiling.discard(work)
        if built.outcome is None:
            work.release()
            return
        marker = None
        if isinstance(built.outcome, Compiled):
            self._learn(work, built.cpu_ns)
            if work.entry is None:
                marker = Entry(EntryKind.LOCAL_COMPILE, work.job.grammar, compile_ns=built.cpu_ns)
        elif isinstance(built.outcome, StoreCorrupt):
            self._count("store_error", "corrupt")
        self._finish(work, built.outcome, publish=marker)
        if isinstance(built.outcome, Compiled) and self._deserves_body(work, built):
            self._send_request(work)

    def _learn(self, work: Work, cpu_ns: int) -> None:
        """Keep the time that compiles took, and the speed of loading, as measured here."""
        if work.source != "disk":
            self._count("compile_seconds", work.job.grammar.kind, cpu_ns / 1e9)
        elif work.entry is not None:
            rate = len(work.entry.body) / max(cpu_ns, 1) * 1e9
            self._bytes_per_s += _RATE_WEIGHT * (rate - self._bytes_per_s) if self._bytes_per_s else rate

    def _deserves_body(self, work: Work, built: Built) -> bool:
        """Whether a marker that was followed would be a body by today's measurements (G-39)."""
        entry, limits = work.entry, self._config.store
        if self._store is None or entry is None or work.source != "local_compile" or not self._bytes_per_s:
            return False
        assert isinstance(built.outcome, Compiled)
        if not entry.body_bytes:  # nobody has serialized it yet
            return built.outcome.num_bytes <= limits.max_compiled_bytes
        load_ns = entry.body_bytes / self._bytes_per_s * 1e9
        return entry.body_bytes <= limits.max_entry_bytes and built.cpu_ns * limits.margin >= load_ns

    def _finish(self, work: Work, outcome: Compiled | RequestError, *, publish: Entry | None = None) -> None:
        """Tell who waits; only then see to the store (G-36)."""
        remember = isinstance(outcome, Compiled) or outcome.code in _REMEMBERED
        self._finished(self._cache.finish(work.job, outcome, work.source, remember=remember))
        try:
            if self._store is not None and work.lock is not None and publish is not None:
                self._store.publish(work.lock, publish)
        except StoreFull:
            self._count("store_error", "quota")
        except OSError as error:
            self._count("store_error", "write")
            self._log_write_failure(work.digest, error)
        finally:
            work.release()

    def _log_write_failure(self, digest: str, error: OSError) -> None:
        now_ns = self._clock()
        if self._write_logged_ns is None or now_ns - self._write_logged_ns >= WRITE_LOG_INTERVAL_S * 1e9:
            self._write_logged_ns = now_ns
            log.warning("grammar_store_write_failed", digest=digest, error=str(error))

    def _require_progress(self) -> None:
        """Raise FatalError for a compile that the probe saw end and that does not: nothing can stop it.

        Processor time is looked at: on a busy machine a compile, which runs only when nothing else does, may take long.
        """
        limit_ns = int(self._config.compile_timeout_s * 1e9)
        for work in self._compiling:
            thread = work.thread  # read once: the worker sets it to 0 at any moment, and asking for that is a crash
            if thread and self._cpu_clock(thread) - work.begun_ns > limit_ns:
                raise FatalError(f"the compile of grammar {work.digest}, which its probe finished, does not end")

    def _count(
        self, event: Literal["compile_seconds", "store_decision", "store_error"], label: str, value: float = 1
    ) -> None:
        self.events.append((event, label, value))

    def close(self) -> None:
        """Free what the thread no longer uses; again is nothing."""
        with self._ending:
            if not self._is_closed:
                self._is_closed = True
                os.close(self._wake)


@dataclass(order=True)
class _Deadline:
    at_ns: int
    order: int
    ticket: Ticket = field(compare=False)


class GrammarService:
    """The tick thread's side. `wake` makes a sleeping tick thread look; it may be called by any thread."""

    def __init__(
        self,
        config: GrammarConfig,
        scope: Scope,
        store: GrammarStore | None,
        probe: Channel[FromProbe],
        compiler: Compiles,
        wake: Callable[[], None],
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        if config.workers is None:
            raise InvariantError("grammar.workers is filled by resolve()")
        self._config = config
        self._num_workers = config.workers
        self._clock = clock
        self._wake = wake
        self.cache = GrammarCache(config.cache, clock)
        self._done: deque[Ticket] = deque()
        self._deadlines: list[_Deadline] = []
        self._order = itertools.count()
        self._workers = ThreadPoolExecutor(config.workers, "grammar-compile", initializer=system.schedule_when_idle)
        self._thread = ThreadPoolExecutor(1, "grammar")
        self._coordinator = Coordinator(
            config, self.cache, scope, store, probe, compiler, self._workers, self._tell, clock
        )
        self._running: Future[None] | None = None

    def start(self) -> None:
        """Start the grammar thread."""
        before = threading.stack_size(THREAD_STACK_BYTES)
        try:
            self._running = self._thread.submit(self._coordinator.run)
            # Workers start when they are first needed, and would then get the default stack.
            barrier = threading.Barrier(self._num_workers + 1)
            for _ in range(self._num_workers):
                self._workers.submit(barrier.wait)
            barrier.wait()
        finally:
            threading.stack_size(before)
        self._running.add_done_callback(lambda _: self._wake())

    def wait_for_probe(self, timeout_s: float) -> None:
        """Wait until new grammars can be tried. Raises FatalError: the probe process ended, or is not there in time."""
        if self._running is None:
            raise InvariantError("a wait for the probe process before the start")
        self._running.add_done_callback(lambda _: self._coordinator.has_probe.set())
        answered = self._coordinator.has_probe.wait(timeout_s)
        if self._running.done():
            self._running.result()
        if not answered:
            raise PeerError(f"the probe process did not answer within {timeout_s:g} s")

    def request(self, grammar: Grammar) -> Ticket:
        """Ask for a grammar; the ticket is done at once when memory knows it, else it waits and `drain` returns it.

        A ticket whose request ended must be cancelled.
        """
        now_ns = self._clock()
        ticket = Ticket(grammar, now_ns, now_ns + int(self._config.wait_timeout_s * 1e9))
        job = self.cache.look_up(ticket)
        if job is not None:
            self._coordinator.post(job)
        if ticket.waits:
            heapq.heappush(self._deadlines, _Deadline(ticket.deadline_ns, next(self._order), ticket))
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        """Wait no longer: the ticket's request has ended. Others that wait for the same grammar are not touched."""
        ticket.is_cancelled = True
        self.cache.cancel(ticket)

    def condemn(self, grammar: Grammar) -> None:
        """Refuse a grammar that passed its probe and then took too long in a request; as long as memory knows of it."""
        message = "a step along it took too much processor time; its rules can be read in too many ways"
        self.cache.condemn(grammar, GrammarError(message, code="grammar_too_costly"))

    def drain(self) -> list[Ticket]:
        """Return the tickets that are done since the last call, those that waited too long among them; never waits.

        Raises FatalError when grammars cannot be had any more.
        """
        if self._running is not None and self._running.done():
            self._running.result()
            raise InvariantError("the grammar thread ended")
        finished = []
        while self._done:
            ticket = self._done.popleft()
            if not ticket.is_cancelled:
                finished.append(ticket)
        now_ns = self._clock()
        while self._deadlines and (self._deadlines[0].at_ns <= now_ns or self._deadlines[0].ticket.is_over):
            ticket = heapq.heappop(self._deadlines).ticket
            if not ticket.is_over and self.cache.cancel(ticket):
                message = f"the grammar was not ready within {self._config.wait_timeout_s:g} s"
                ticket.outcome = RequestError(message, status=504, code="grammar_timeout")
                finished.append(ticket)
        return finished

    def next_deadline_ns(self) -> int | None:
        """When `drain` must be called at the latest, although nothing woke the thread."""
        return self._deadlines[0].at_ns if self._deadlines else None

    def take_events(self) -> list[Event]:
        """What happened since the last call, for the metrics."""
        events = self._coordinator.events
        return [events.popleft() for _ in range(len(events))]

    def _tell(self, tickets: list[Ticket]) -> None:
        """On the grammar thread."""
        if tickets:
            self._done.extend(tickets)
            self._wake()

    def close(self) -> None:
        """End the threads; a compile that runs is left to end with the process."""
        self._coordinator.post(None)
        self._thread.shutdown(wait=True)
        self._workers.shutdown(wait=False, cancel_futures=True)
        self._coordinator.close()
