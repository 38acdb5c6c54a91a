"""Process main: tries grammars in children that may hang, run out of memory or crash, so that no rank does.

The process imports xgrammar once, after its own fork, and forks a child for each new grammar. A child that finds its
grammar sound says so and may then write the serialized form to the store; whatever becomes of a child, the rank gets
one verdict. The process ends when both ranks have closed their ends.
"""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import select
import signal
import socket
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import xgrammar

from dsparkd import log as log_module
from dsparkd import system
from dsparkd.config import GrammarConfig
from dsparkd.errors import EXIT_OK, GrammarError, InvariantError, PeerError
from dsparkd.grammar.compiler import Compiler, describe
from dsparkd.grammar.store import Entry, EntryKind, GrammarStore, StoreFull
from dsparkd.grammar.trial import require_quick_steps
from dsparkd.grammar.vocabulary import Vocabularies
from dsparkd.ipc.channel import Channel
from dsparkd.messages import (
    Grammar,
    ProbeBody,
    ProbeReady,
    ProbeRequest,
    ProbeVerdict,
    decode_from_probe,
    decode_to_probe,
    encode,
)

log = log_module.get()

SEND_TIMEOUT_S = 60.0
MAX_PENDING_BYTES = 64 << 20
LOCK_TIMEOUT_S = 30.0  # how long a child waits for the rank that compiles what it has a body of
LOCK_POLL_S = 0.01
MAX_WRITERS = 4  # children that write bodies, for each place to try a grammar
_CRASHES = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)
_MAX_ANSWER_BYTES = 1 << 16
_MAX_WARNING_BYTES = 1 << 14
# What is compiled at start to see how fast this machine loads a body.
_REFERENCE = Grammar(
    kind="ebnf",
    text='root ::= "{" pair ("," pair)* "}"\npair ::= "\\"" [a-z]+ "\\":" ("\\"" [^"]* "\\"" | [0-9]+ | "true" | root)',
)


class CompiledForm(Protocol):
    """What a probe needs of a compiled grammar."""

    @property
    def memory_size_bytes(self) -> int: ...
    def serialize_json(self) -> str: ...


class Compiles(Protocol):
    """dsparkd.grammar.compiler.Compiler, or a test's."""

    def compile(self, grammar: Grammar) -> CompiledForm: ...


@dataclass
class Child:
    """One running child. Owned by the parent's loop; deadline_ns is CLOCK_MONOTONIC.

    stage: it tries the grammar, then writes the body of a sound one; "over" when nothing more comes but its end.
    has_hung_up: it has closed its end of `answers`.
    """

    request: ProbeRequest
    rank: int
    pid: int
    pidfd: int
    answers: socket.socket
    deadline_ns: int
    stage: Literal["trying", "writing", "over"] = "trying"
    has_hung_up: bool = False


class ProbeParent:
    """The loop. `spawn` runs a request in a child whose answers come out of the returned socket."""

    def __init__(
        self,
        config: GrammarConfig,
        ranks: tuple[socket.socket, ...],
        spawn: Callable[[ProbeRequest, tuple[socket.socket, ...]], tuple[int, socket.socket]],
        max_children: int,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._config = config
        self._spawn = spawn
        self._max_children = max_children
        self._clock = clock
        self._channels: dict[int, Channel[ProbeRequest]] = {
            rank: Channel(
                sock,
                decode_to_probe,
                send_timeout_s=SEND_TIMEOUT_S,
                max_pending_bytes=MAX_PENDING_BYTES,
                name=f"rank {rank}",
            )
            for rank, sock in enumerate(ranks)
        }
        self._sockets = ranks
        self._queues: dict[int, deque[ProbeRequest]] = {rank: deque() for rank in self._channels}
        self._turn = 0  # the rank whose request is next
        self._children: dict[int, Child] = {}  # by pidfd

    def run(self, bytes_per_s: float) -> int:
        """Answer until both ranks are gone, then end what still runs; returns the exit code."""
        for rank in list(self._channels):
            self._send(rank, ProbeReady(bytes_per_s))
        while self._channels:
            self.step()
        for child in list(self._children.values()):
            self._end(child)
        return EXIT_OK

    def step(self) -> None:
        """Wait for one event or deadline and handle all that is there."""
        poll = select.poll()
        for channel in self._channels.values():
            poll.register(channel, select.POLLIN | (select.POLLOUT if channel.wants_write else 0))
        for child in self._children.values():
            poll.register(child.pidfd, select.POLLIN)
            # A child hangs up before it has ended. To be told so again and again until then would take the processor
            # that it needs to end, and that the ranks want.
            if not child.has_hung_up:
                poll.register(child.answers, select.POLLIN)
        poll.poll(self._patience_ms())
        self._receive()
        for child in list(self._children.values()):
            self._look_after(child)
        self._start_children()

    def _patience_ms(self) -> float | None:
        deadlines = [child.deadline_ns for child in self._children.values()]
        return max(0.0, (min(deadlines) - self._clock()) / 1e6) + 1 if deadlines else None

    def _receive(self) -> None:
        for rank, channel in list(self._channels.items()):
            try:
                channel.flush_nowait()
                self._queues[rank] += channel.receive_nowait()
            except PeerError:
                self._drop_rank(rank)

    def _drop_rank(self, rank: int) -> None:
        channel = self._channels.pop(rank, None)
        if channel is not None:
            channel.close()
            self._queues[rank].clear()

    def _start_children(self) -> None:
        """Fill the places for probes, one rank after the other. A child that only writes its body takes none."""
        while self._count("trying") < self._max_children:
            request = self._next_request()
            if request is None:
                return
            rank, work = request
            pid, answers = self._spawn(work, self._sockets)
            deadline_ns = self._clock() + int(self._config.probe_wall_s * 1e9)
            child = Child(work, rank, pid, system.pidfd_open(pid), answers, deadline_ns)
            self._children[child.pidfd] = child

    def _next_request(self) -> tuple[int, ProbeRequest] | None:
        for _ in self._queues:
            rank, self._turn = self._turn, (self._turn + 1) % len(self._queues)
            if self._queues[rank]:
                return rank, self._queues[rank].popleft()
        return None

    def _look_after(self, child: Child) -> None:
        """Pass a child's answers on; when it is over, or takes too long, give the verdict that it did not."""
        self._pass_answers(child)
        code = system.reap_nowait(child.pid)
        if code is not None:
            self._pass_answers(child)  # what it wrote between the two looks
            self._forget(child)
            if child.stage == "trying":
                self._send(child.rank, verdict_of_end(child.request.number, code, self._config))
        elif self._clock() >= child.deadline_ns:
            self._end(child)
            if child.stage == "trying":
                self._send(child.rank, ProbeVerdict(number=child.request.number, state="busy"))
        elif child.stage == "writing" and self._count("writing") > MAX_WRITERS * self._max_children:
            self._end(child)  # its grammar stays a marker, and is decided about again at the next compile

    def _count(self, stage: Literal["trying", "writing"]) -> int:
        return sum(child.stage == stage for child in self._children.values())

    def _pass_answers(self, child: Child) -> None:
        while (raw := _receive_one(child.answers)) is not None:
            if not raw:
                child.has_hung_up = True
                return
            answer = decode_from_probe(raw)
            if isinstance(answer, ProbeBody):
                child.stage = "over"
            elif isinstance(answer, ProbeVerdict):
                child.stage = "writing" if answer.state == "sound" else "over"
                child.deadline_ns = self._clock() + int((LOCK_TIMEOUT_S + self._config.probe_wall_s) * 1e9)
            self._send(child.rank, answer)

    def _end(self, child: Child) -> None:
        """Kill a child and reap it."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(child.pid, signal.SIGKILL)
        os.waitpid(child.pid, 0)
        self._forget(child)

    def _forget(self, child: Child) -> None:
        if self._children.pop(child.pidfd, None) is not None:
            child.answers.close()
            os.close(child.pidfd)

    def _send(self, rank: int, message: ProbeReady | ProbeVerdict | ProbeBody) -> None:
        channel = self._channels.get(rank)
        if channel is not None:
            try:
                channel.send_nowait(message)
            except PeerError:
                self._drop_rank(rank)


def _receive_one(answers: socket.socket) -> bytes | None:
    """The next datagram; None when there is none now, empty when there is none ever again."""
    try:
        return answers.recv(_MAX_ANSWER_BYTES, socket.MSG_DONTWAIT)
    except BlockingIOError:
        return None


def verdict_of_end(number: int, code: int, config: GrammarConfig) -> ProbeVerdict:
    """The verdict on a child that ended without one; a negative code is the signal.

    Only what the grammar itself brings about again is a refusal: a child that somebody killed says nothing about it.
    """
    seconds = config.probe_cpu_s
    match -code:
        case signal.SIGXCPU:
            message = f"it takes more than {seconds} s of processor time to compile or to follow"
        case crash if crash in _CRASHES:
            message, seconds = "it crashes the grammar compiler", 0
        case _:
            return ProbeVerdict(number=number, state="busy")
    return ProbeVerdict(number=number, state="refused", code="grammar_too_costly", message=message, cpu_s=seconds)


def spawn_child(
    request: ProbeRequest, rank_sockets: tuple[socket.socket, ...], run: Callable[[ProbeRequest, socket.socket], None]
) -> tuple[int, socket.socket]:
    """Fork a child that runs `run` and ends; returns its pid and where its answers come out."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    parent_pid = os.getpid()
    with warnings.catch_warnings():
        # Newer Pythons warn of threads in a process that forks; the child calls nothing that one of them could hold.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        code = 1
        try:
            system.set_parent_death_signal(parent_pid)
            for sock in (*rank_sockets, ours):
                sock.close()
            system.close_other_fds({theirs.fileno()})
            run(request, theirs)
            code = 0
        except Exception:  # a process main: the parent gives the verdict on whatever this was
            log.exception("probe_child_failed", digest=request.digest)
        finally:
            os._exit(code)
    theirs.close()
    return pid, ours


class ProbeChild:
    """What one child does; made in the parent, used after the fork."""

    def __init__(
        self,
        config: GrammarConfig,
        compiler: Compiles,
        store: GrammarStore | None,
        try_steps: Callable[[CompiledForm], None] = lambda compiled: None,
    ) -> None:
        self._config = config
        self._compiler = compiler
        self._store = store
        self._try_steps = try_steps

    def run(self, request: ProbeRequest, answers: socket.socket) -> None:
        """Compile under limits and say what came of it; then see to the body."""
        gc.disable()  # a collection would copy pages that the parent shares
        for number in _CRASHES:
            # A handler that some library has set would spend the child's processor time on stacks, or end it otherwise.
            signal.signal(number, signal.SIG_DFL)
        self._limit_memory()
        _limit_cpu(self._config.probe_cpu_s, self._config.probe_cpu_s)
        verdict, compiled = self.try_grammar(request)
        answers.send(encode(verdict))
        if compiled is not None and self._store is not None:
            _limit_cpu(self._config.probe_cpu_s, self._config.probe_cpu_s)
            answers.send(encode(ProbeBody(request.number, self.keep_body(self._store, request, verdict, compiled))))

    def try_grammar(self, request: ProbeRequest) -> tuple[ProbeVerdict, CompiledForm | None]:
        """Compile; what XGrammar warns of it would not enforce, so a warning is a refusal, too."""
        begun_ns = time.thread_time_ns()
        number, num_bytes = request.number, self._config.probe_bytes
        try:
            with _captured_stderr() as warned:
                compiled = self._compiler.compile(request.grammar)
                self._try_steps(compiled)
        except GrammarError as error:
            return ProbeVerdict(number=number, state="refused", code=error.code, message=error.message), None
        except MemoryError:
            message = f"it takes more than {num_bytes} bytes to compile"
            code = "grammar_too_costly"
            return ProbeVerdict(number=number, state="refused", code=code, message=message, num_bytes=num_bytes), None
        if warned:
            message = f"the compiler would not enforce all of it: {describe(warned[0])}"
            return ProbeVerdict(number=number, state="refused", code="invalid_grammar", message=message), None
        compile_ns = time.thread_time_ns() - begun_ns
        size = compiled.memory_size_bytes
        return ProbeVerdict(number=number, state="sound", compile_ns=compile_ns, compiled_bytes=size), compiled

    def keep_body(
        self, store: GrammarStore, request: ProbeRequest, verdict: ProbeVerdict, compiled: CompiledForm
    ) -> Literal["serialized", "local_faster", "body_too_large", "not_serialized"]:
        """Serialize what may be worth it, decide, and publish the body or what is now known of it."""
        limits = self._config.store
        if verdict.compiled_bytes > limits.max_compiled_bytes:
            return "not_serialized"
        body = compiled.serialize_json().encode()
        deserialize_ns = int(len(body) / request.bytes_per_s * 1e9) if request.bytes_per_s else 0
        decision = decide(len(body), verdict.compile_ns, deserialize_ns, limits.max_entry_bytes, limits.margin)
        kind = EntryKind.SERIALIZED if decision == "serialized" else EntryKind.LOCAL_COMPILE
        entry = Entry(
            kind,
            request.grammar,
            body if kind == EntryKind.SERIALIZED else b"",
            verdict.compile_ns,
            deserialize_ns,
            len(body),
        )
        # The rank holds the lock until its marker stands; the body then takes the marker's place.
        deadline_s = time.monotonic() + LOCK_TIMEOUT_S
        while (lock := store.try_lock(request.digest)) is None:
            if time.monotonic() > deadline_s:
                return "not_serialized"
            time.sleep(LOCK_POLL_S)
        try:
            store.publish(lock, entry)
        except (OSError, StoreFull) as error:
            log.warning("grammar_store_write_failed", digest=request.digest, error=str(error))
            return "not_serialized"
        finally:
            lock.release()
        return decision

    def _limit_memory(self) -> None:
        """Bound the address space to what it is now and probe_bytes more: the libraries alone map gigabytes."""
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
        limit = pages * resource.getpagesize() + self._config.probe_bytes
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def decide(
    body_bytes: int, compile_ns: int, deserialize_ns: int, max_entry_bytes: int, margin: float
) -> Literal["serialized", "local_faster", "body_too_large"]:
    """Whether loading a body pays against compiling anew (G-38). deserialize_ns 0: unknown, and then it may."""
    if body_bytes > max_entry_bytes:
        return "body_too_large"
    return "local_faster" if compile_ns * margin < deserialize_ns else "serialized"


def _limit_cpu(seconds: int, spare_s: int) -> None:
    """Let the kernel end this process after `seconds` more of processor time; `spare_s` may be asked for later."""
    wanted = round(time.process_time()) + seconds
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    if hard == resource.RLIM_INFINITY:
        hard = wanted + spare_s + 1
    resource.setrlimit(resource.RLIMIT_CPU, (min(wanted, hard), hard))


@contextlib.contextmanager
def _captured_stderr() -> Iterator[list[str]]:
    """Take what C code writes to standard error: XGrammar's warnings quote the client's text. Filled at the end."""
    lines: list[str] = []
    before = os.dup(2)
    descriptor = os.memfd_create("warnings", os.MFD_CLOEXEC)
    try:
        os.dup2(descriptor, 2)
        yield lines
        lines += os.pread(descriptor, _MAX_WARNING_BYTES, 0).decode(errors="replace").splitlines()
    finally:
        os.dup2(before, 2)
        os.close(before)
        os.close(descriptor)


def measure_load(compiler: Compiles, load: Callable[[Grammar, bytes], object]) -> float:
    """Bytes a second of processor time that loading a body takes on this machine (G-38)."""
    body = compiler.compile(_REFERENCE).serialize_json().encode()
    begun_ns = time.thread_time_ns()
    load(_REFERENCE, body)
    return len(body) / max(time.thread_time_ns() - begun_ns, 1) * 1e9


def serve(
    config: GrammarConfig,
    vocabularies: Vocabularies,
    store_directory: Path | None,
    ranks: tuple[socket.socket, ...],
) -> int:
    """Be the process: make the compiler, say that it is ready, then run. Returns the exit code."""
    compiler = Compiler(vocabularies, num_threads=1)
    measured = config.store.initial_bytes_per_s or measure_load(compiler, compiler.load)
    store = None if store_directory is None else GrammarStore(store_directory, config.store)

    def try_steps(compiled: CompiledForm) -> None:
        assert isinstance(compiled, xgrammar.CompiledGrammar)
        require_quick_steps(compiled)

    child = ProbeChild(config, compiler, store, try_steps)
    max_children = config.workers
    if max_children is None:
        raise InvariantError("grammar.workers is filled by resolve()")
    gc.collect()
    gc.freeze()
    # Children inherit it. This process needs it as much as they do: a fork of it takes up to 40 ms of a processor.
    system.schedule_when_idle()

    def spawn(request: ProbeRequest, sockets: tuple[socket.socket, ...]) -> tuple[int, socket.socket]:
        return spawn_child(request, sockets, child.run)

    return ProbeParent(config, ranks, spawn, max_children).run(measured)
