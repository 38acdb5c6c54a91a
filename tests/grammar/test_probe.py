"""The probe process with real XGrammar: what hangs, crashes or eats memory comes back as a plain verdict."""

from __future__ import annotations

import ctypes
import os
import select
import signal
import socket
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from dsparkd.config import MIB, GrammarConfig, GrammarStoreConfig
from dsparkd.errors import GrammarError
from dsparkd.grammar import probe
from dsparkd.grammar.compiler import Compiler
from dsparkd.grammar.key import digest
from dsparkd.grammar.probe import ProbeChild, ProbeParent, spawn_child, verdict_of_end
from dsparkd.grammar.store import Entry, EntryKind, GrammarStore, prepare
from dsparkd.grammar.vocabulary import Vocabularies, Vocabulary
from dsparkd.ipc.channel import Channel
from dsparkd.messages import FromProbe, Grammar, ProbeBody, ProbeReady, ProbeRequest, ProbeVerdict, decode_from_probe
from tests.grammar.grammars import PADDED_SIZE, STOP_ID, entries

RATE = 44e6
PLAIN = Vocabulary(tuple(entries()), (STOP_ID,), PADDED_SIZE, "0" * 64)
VOCABULARIES = Vocabularies(PLAIN, PLAIN)
SCOPE = VOCABULARIES.scope()


# Optional properties and a bound of their number: XGrammar's cost is the product.
COUNTED = msgspec.json.encode(
    {
        "type": "object",
        "properties": {f"p{number}": {"type": "null"} for number in range(300)},
        "minProperties": 100,
        "maxProperties": 200,
    }
).decode()


@pytest.fixture(scope="module")
def compiler() -> Compiler:
    return Compiler(VOCABULARIES, num_threads=1)


def regex(text: str) -> Grammar:
    return Grammar(kind="regex", text=text)


class Scripted:
    """A compiler whose behaviour is the grammar's text; run in children only."""

    def __init__(self, real: Compiler) -> None:
        self._real = real

    def compile(self, grammar: Grammar) -> probe.CompiledForm:
        match grammar.text:
            case "hang":
                while True:
                    time.sleep(1)
            case "burn":
                while True:
                    pass
            case "crash":
                os.kill(os.getpid(), signal.SIGSEGV)
            case "abort":
                os.abort()
            case "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            case "eat":
                kept = [bytearray(64 * MIB) for _ in range(1000)]
                raise AssertionError(len(kept))
            case "warn":
                os.write(2, b"[01:02:03] /project/cpp/regex_converter.cc:12: Warning: Regex parsing warning: ignored\n")
            case "bug":
                raise ZeroDivisionError
            case "no":
                raise GrammarError("no such rule", code="invalid_grammar")
        return self._real.compile(regex("[a-z]+"))


class Rig:
    """A probe parent on a thread of this process, with real children, and one rank's end of it."""

    def __init__(self, config: GrammarConfig, child: ProbeChild, max_children: int = 2) -> None:
        self.pids: list[int] = []
        pairs = [socket.socketpair() for _ in range(2)]
        self._theirs = tuple(pair[1] for pair in pairs)
        self.ranks: list[Channel[FromProbe]] = [
            Channel(pair[0], decode_from_probe, send_timeout_s=5, max_pending_bytes=1 << 20) for pair in pairs
        ]

        def spawn(request: ProbeRequest, sockets: tuple[socket.socket, ...]) -> tuple[int, socket.socket]:
            pid, answers = spawn_child(request, sockets, child.run)
            self.pids.append(pid)
            return pid, answers

        self.parent = ProbeParent(config, self._theirs, spawn, max_children)
        self._thread = threading.Thread(target=self.parent.run, args=(RATE,))
        self._thread.start()
        assert self.receive(0) == ProbeReady(RATE)

    def ask(self, grammar: Grammar, *, number: int = 1, rank: int = 0) -> None:
        request = ProbeRequest(number=number, digest=digest(grammar, SCOPE), grammar=grammar, bytes_per_s=RATE)
        self.ranks[rank].send_nowait(request)

    def receive(self, rank: int = 0, timeout_s: float = 100) -> FromProbe:
        channel = self.ranks[rank]
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            messages = channel.receive_nowait(1)
            if messages:
                return messages[0]
            select.select([channel], [], [], 1)
        raise AssertionError("no answer")

    def verdict(self, grammar: Grammar) -> ProbeVerdict:
        self.ask(grammar)
        answer = self.receive()
        assert isinstance(answer, ProbeVerdict)
        return answer

    def close(self) -> None:
        for channel in self.ranks:
            if channel.fileno() >= 0:
                channel.close()
        self._thread.join(20)
        assert not self._thread.is_alive()
        for sock in self._theirs:
            sock.close()


@pytest.fixture
def rigs(compiler: Compiler) -> Iterator[Callable[..., Rig]]:
    made: list[Rig] = []

    def make(store: GrammarStore | None = None, *, real: bool = False, max_children: int = 2, **keys: float) -> Rig:
        config = GrammarConfig(workers=1, **{"probe_cpu_s": 1, "probe_wall_s": 60.0, **keys})  # type: ignore[arg-type]
        child = ProbeChild(config, compiler if real else Scripted(compiler), store)
        made.append(Rig(config, child, max_children))
        return made[-1]

    yield make
    for rig in made:
        rig.close()


@pytest.fixture
def store(tmp_path: Path) -> GrammarStore:
    config = GrammarStoreConfig(directory=str(tmp_path / "store"))
    return GrammarStore(prepare(config, SCOPE), config)


@pytest.mark.parametrize(
    ("text", "state", "code", "words"),
    [
        ("fine", "sound", "", ""),
        ("no", "refused", "invalid_grammar", "no such rule"),
        ("burn", "refused", "grammar_too_costly", "more than 1 s of processor time"),
        ("eat", "refused", "grammar_too_costly", "bytes to compile"),
        ("crash", "refused", "grammar_too_costly", "crashes"),
        ("abort", "refused", "grammar_too_costly", "crashes"),
        ("warn", "refused", "invalid_grammar", "would not enforce all of it: Warning: Regex parsing warning: ignored"),
        ("killed", "busy", "", ""),
        ("bug", "busy", "", ""),
    ],
)
def test_whatever_a_child_does_the_rank_gets_one_verdict(
    rigs: Callable[..., Rig], text: str, state: str, code: str, words: str
) -> None:
    """G-18, G-25, decisions 14: only what the grammar itself brings about is a refusal; then the next one is served."""
    rig = rigs(probe_bytes=256 * MIB)
    verdict = rig.verdict(regex(text))
    assert (verdict.state, verdict.code) == (state, code)
    assert words in verdict.message
    assert "/" not in verdict.message
    assert rig.verdict(regex("fine")).state == "sound"


def test_a_child_that_sleeps_is_ended_by_the_wall_clock(rigs: Callable[..., Rig]) -> None:
    """decisions 14, 21: a hang without processor time; nobody is told that the grammar is to blame."""
    rig = rigs(probe_wall_s=0.5)
    assert rig.verdict(regex("hang")).state == "busy"
    with pytest.raises(ProcessLookupError):
        os.kill(rig.pids[0], 0)
    assert rig.verdict(regex("fine")).state == "sound"


@pytest.mark.parametrize(
    ("grammar", "code"),
    [
        (regex("(?=a)b"), "invalid_grammar"),
        (regex("("), "invalid_grammar"),
        (regex("[b-a]"), "invalid_grammar"),
        (Grammar(kind="ebnf", text="a ::= b"), "invalid_grammar"),
        (Grammar(kind="ebnf", text="root ::= missing"), "invalid_grammar"),
        (Grammar(kind="json_schema", text='{"$ref": "#/$defs/none"}'), "invalid_grammar"),
        (Grammar(kind="structural_tag", text='{"type": "structural_tag"}'), "invalid_grammar"),
        (Grammar(kind="json_schema", text=COUNTED), "grammar_too_costly"),
        (Grammar(kind="ebnf", text="root ::= " + "(" * 40_000 + '"a"' + ")" * 40_000), "invalid_grammar"),
    ],
    ids=lambda value: value.text[:24] if isinstance(value, Grammar) else "",
)
def test_grammars_that_hurt_are_refused_with_a_reason(rigs: Callable[..., Rig], grammar: Grammar, code: str) -> None:
    """G-25, O-10: by the installed XGrammar; at most 500 characters, without file names."""
    rig = rigs(real=True)
    verdict = rig.verdict(grammar)
    assert (verdict.state, verdict.code) == ("refused", code), verdict
    assert 0 < len(verdict.message) <= 600
    assert "/" not in verdict.message
    assert ".cc" not in verdict.message
    assert rig.verdict(regex("[a-z]")).state == "sound"


def test_ranks_take_turns_and_places_are_bounded(rigs: Callable[..., Rig]) -> None:
    """A rank with many grammars does not keep the other from its one; never more children than configured."""
    rig = rigs(max_children=1, probe_wall_s=0.4)
    for number in range(5):
        rig.ask(regex("hang"), number=number)
    assert isinstance(rig.receive(0), ProbeVerdict)
    rig.ask(regex("fine"), number=7, rank=1)
    assert isinstance(rig.receive(1), ProbeReady)
    other = rig.receive(1)
    assert isinstance(other, ProbeVerdict)
    assert other.number == 7
    assert rig.parent._queues[0], "the first rank's are not all done yet"
    running = [pid for pid in rig.pids if Path(f"/proc/{pid}/stat").exists()]
    assert len(running) <= 2, "one that tries, and one that is just ending"


def test_a_body_that_pays_is_published_by_the_child(rigs: Callable[..., Rig], store: GrammarStore) -> None:
    """Decisions 12: after the verdict, once the rank has let the grammar's lock go; what is loaded matches alike."""
    rig = rigs(store, real=True)
    grammar = regex("[a-z]+[0-9]")
    name = digest(grammar, SCOPE)
    lock = store.try_lock(name)
    assert lock is not None
    rig.ask(grammar)
    verdict = rig.receive()
    assert isinstance(verdict, ProbeVerdict)
    assert verdict.compile_ns > 0
    store.publish(lock, Entry(EntryKind.LOCAL_COMPILE, grammar, compile_ns=verdict.compile_ns))
    lock.release()
    assert rig.receive() == ProbeBody(1, "serialized")
    found = store.read(name, grammar)
    assert found is not None
    assert found.kind == EntryKind.SERIALIZED
    loaded = Compiler(VOCABULARIES, num_threads=1).load(grammar, found.body)
    assert loaded.serialize_json().encode() == found.body


@pytest.mark.parametrize(
    ("size", "decision", "serialized"),
    [(262_144, "serialized", True), (262_145, "not_serialized", False)],
)
def test_nothing_large_is_serialized(
    store: GrammarStore, compiler: Compiler, size: int, decision: str, serialized: bool
) -> None:
    """G-37, O-04: 0.32 s to compile were 30.6 s to serialize."""
    calls = []

    class Form:
        memory_size_bytes = size

        def serialize_json(self) -> str:
            calls.append(size)
            return "body"

    child = ProbeChild(GrammarConfig(workers=1), compiler, store)
    grammar = regex("a")
    request = ProbeRequest(number=1, digest=digest(grammar, SCOPE), grammar=grammar, bytes_per_s=RATE)
    verdict = ProbeVerdict(number=1, state="sound", compile_ns=10**9, compiled_bytes=size)
    assert child.keep_body(store, request, verdict, Form()) == decision
    assert bool(calls) == serialized
    assert (store.read(request.digest, grammar) is not None) == serialized


def test_a_body_that_does_not_pay_leaves_what_it_would_have_cost(store: GrammarStore, compiler: Compiler) -> None:
    """G-38, G-39: the marker then knows the body's size, so that it can be decided anew by size and speed."""

    class Form:
        memory_size_bytes = 10

        def serialize_json(self) -> str:
            return "x" * 1000

    child = ProbeChild(GrammarConfig(workers=1), compiler, store)
    grammar = regex("a")
    request = ProbeRequest(number=1, digest=digest(grammar, SCOPE), grammar=grammar, bytes_per_s=1e6)
    verdict = ProbeVerdict(number=1, state="sound", compile_ns=1000, compiled_bytes=10)
    assert child.keep_body(store, request, verdict, Form()) == "local_faster"
    entry = store.read(request.digest, grammar)
    assert entry == Entry(EntryKind.LOCAL_COMPILE, grammar, b"", 1000, 10**6, 1000)


def test_the_process_ends_with_the_ranks_and_takes_its_children_along(rigs: Callable[..., Rig]) -> None:
    """decisions 14: it outlives one of them, and ends after both; nothing stays behind."""
    rig = rigs(probe_wall_s=60)
    rig.ask(regex("hang"))
    while not rig.pids:
        time.sleep(0.01)
    rig.ranks[0].close()
    assert isinstance(rig.receive(1), ProbeReady)
    rig.ask(regex("fine"), rank=1)
    assert isinstance(rig.receive(1), ProbeVerdict)
    rig.ranks[1].close()
    rig._thread.join(20)
    assert not rig._thread.is_alive()
    for pid in rig.pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_children_hold_nothing_of_the_ranks_and_die_with_the_parent(compiler: Compiler) -> None:
    """decisions 13: a rank's end in a child would keep its death from being seen."""
    ours, theirs = socket.socketpair()
    report_read, report_write = socket.socketpair()
    config = GrammarConfig(workers=1)

    def run(request: ProbeRequest, answers: socket.socket) -> None:
        libc = ctypes.CDLL(None)
        signalled = ctypes.c_int()
        libc.prctl(2, ctypes.byref(signalled), 0, 0, 0)  # PR_GET_PDEATHSIG
        fds = sorted(int(name) for name in os.listdir("/proc/self/fd"))
        answers.send(repr((signalled.value, len([fd for fd in fds if fd > 2]))).encode())

    request = ProbeRequest(number=1, digest="d", grammar=regex("a"), bytes_per_s=0)
    pid, answers = spawn_child(request, (ours, theirs), run)
    assert answers.recv(100) == repr((int(signal.SIGKILL), 2)).encode(), "its own end, and the directory that it lists"
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    for sock in (answers, ours, theirs, report_read, report_write):
        sock.close()
    assert verdict_of_end(1, -signal.SIGTERM, config).state == "busy"


def test_probes_and_their_parent_run_only_when_nothing_else_does() -> None:
    """decisions 14: a schema never takes a processor that the ranks want; to fork a child alone takes milliseconds."""
    ours, theirs = socket.socketpair()
    other, other_theirs = socket.socketpair()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # newer Pythons, of threads in a process that forks
        pid = os.fork()
    if pid == 0:
        try:
            ours.close()
            other.close()
            probe.serve(GrammarConfig(workers=1, probe_cpu_s=30), VOCABULARIES, None, (theirs, other_theirs))
        finally:
            os._exit(0)
    theirs.close()
    other_theirs.close()
    channel: Channel[FromProbe] = Channel(ours, decode_from_probe, send_timeout_s=5, max_pending_bytes=1 << 20)
    select.select([ours], [], [], 100)
    assert isinstance(channel.receive_nowait(1)[0], ProbeReady)

    grammar = Grammar(kind="json_schema", text=COUNTED)
    channel.send_nowait(ProbeRequest(number=1, digest="d", grammar=grammar, bytes_per_s=0))
    children = Path(f"/proc/{pid}/task/{pid}/children")
    while not (found := children.read_text(encoding="ascii").split()):
        time.sleep(0.01)

    assert [os.sched_getscheduler(one) for one in (pid, int(found[0]))] == [os.SCHED_IDLE, os.SCHED_IDLE]
    channel.close()
    other.close()
    os.waitpid(pid, 0)


def test_a_child_that_hung_up_and_lives_is_waited_for_without_turning() -> None:
    """Hanging up is the last but one thing that a child does; a parent that turns would keep it from the last."""
    pair, other = socket.socketpair(), socket.socketpair()

    def spawn(request: ProbeRequest, sockets: tuple[socket.socket, ...]) -> tuple[int, socket.socket]:
        answers, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        theirs.close()
        return os.posix_spawn("/bin/sleep", ["sleep", "100"], {}), answers

    parent = ProbeParent(GrammarConfig(workers=1, probe_wall_s=0.3), (pair[1], other[1]), spawn, 1)
    channel: Channel[FromProbe] = Channel(pair[0], decode_from_probe, send_timeout_s=5, max_pending_bytes=1 << 20)
    channel.send_nowait(ProbeRequest(number=1, digest="d", grammar=regex("a"), bytes_per_s=0))
    steps = 0
    answers: list[FromProbe] = []
    while not answers:
        parent.step()
        steps += 1
        answers += channel.receive_nowait()

    assert answers == [ProbeVerdict(number=1, state="busy")]
    assert steps <= 5, "the request, the child's hanging up, its deadline"
    for sock in (*pair, *other):
        sock.close()


def test_loading_is_measured(compiler: Compiler) -> None:
    """G-38: no constant stands in for this machine's speed."""
    assert 1e4 < probe.measure_load(compiler, compiler.load) < 1e12
