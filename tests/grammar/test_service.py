"""The service with a fake probe, fake compiles and fake clocks: who compiles what, when, and what is kept."""

from __future__ import annotations

import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import msgspec
import pytest
import xgrammar

from dsparkd.config import GrammarCacheConfig, GrammarConfig, GrammarStoreConfig
from dsparkd.errors import FatalError, GrammarError, PeerError, RequestError
from dsparkd.grammar.cache import Compiled, GrammarCache, Job, Source, Ticket
from dsparkd.grammar.key import Scope, digest
from dsparkd.grammar.probe import decide
from dsparkd.grammar.service import Built, Coordinator, GrammarService, Work
from dsparkd.grammar.store import Entry, EntryKind, GrammarStore, KeyLock, Refusal, prepare
from dsparkd.ipc.channel import Channel
from dsparkd.messages import (
    FromProbe,
    Grammar,
    ProbeBody,
    ProbeReady,
    ProbeRequest,
    ProbeVerdict,
    decode_from_probe,
    decode_to_probe,
)

SCOPE = Scope(xgrammar_version="1", tokenizer_digest="t", vocab_size=100)
S = 10**9


def grammar(text: str = "a") -> Grammar:
    return Grammar(kind="regex", text=text)


@dataclass
class FakeForm:
    """A compiled grammar of a size."""

    memory_size_bytes: int


@dataclass
class FakeCompiler:
    """Counts; a text may have an error or a hook that runs while it compiles."""

    size: int = 1000
    compiled: list[str] = field(default_factory=list)
    loaded: list[str] = field(default_factory=list)
    errors: dict[str, Exception] = field(default_factory=dict)
    hook: Callable[[str], None] = lambda text: None

    def compile(self, grammar: Grammar) -> xgrammar.CompiledGrammar:
        self.compiled.append(grammar.text)
        self.hook(grammar.text)
        if grammar.text in self.errors:
            raise self.errors[grammar.text]
        return cast(xgrammar.CompiledGrammar, FakeForm(self.size))

    def load(self, grammar: Grammar, body: bytes) -> xgrammar.CompiledGrammar:
        self.loaded.append(grammar.text)
        if body == b"unreadable":
            raise RuntimeError("DeserializeFormatError")
        return cast(xgrammar.CompiledGrammar, FakeForm(self.size))


class Inline:
    """Runs a compile at once, in the caller."""

    def submit(self, function: Callable[[Work], Built], work: Work, /) -> Future[Built]:
        future: Future[Built] = Future()
        future.set_result(function(work))
        return future


class Held:
    """Keeps compiles until they are let go, one after the other."""

    def __init__(self) -> None:
        self.waiting: list[tuple[Callable[[Work], Built], Work, Future[Built]]] = []

    def submit(self, function: Callable[[Work], Built], work: Work, /) -> Future[Built]:
        future: Future[Built] = Future()
        self.waiting.append((function, work, future))
        return future

    def let_go(self) -> None:
        function, work, future = self.waiting.pop(0)
        future.set_result(function(work))


class Rig:
    """One rank's grammar side without threads: `turn` does one step of the grammar thread."""

    def __init__(
        self,
        store: GrammarStore | None = None,
        *,
        workers: Inline | Held | None = None,
        config: GrammarConfig | None = None,
        cpu_clock: Callable[[int], int] = lambda thread: 0,
    ) -> None:
        self.config = GrammarConfig(workers=1) if config is None else config
        self.now_ns = 0
        ours, theirs = socket.socketpair()
        self.probe: Channel[ProbeRequest] = Channel(
            theirs, decode_to_probe, send_timeout_s=5, max_pending_bytes=1 << 20
        )
        channel: Channel[FromProbe] = Channel(ours, decode_from_probe, send_timeout_s=5, max_pending_bytes=1 << 20)
        self.channels = (self.probe, channel)
        self.compiler = FakeCompiler()
        self.cache = GrammarCache(self.config.cache, lambda: self.now_ns)
        self.told: list[Ticket] = []
        self.store = store
        self.on_told: Callable[[], None] = lambda: None
        self.coordinator = Coordinator(
            self.config,
            self.cache,
            SCOPE,
            store,
            channel,
            self.compiler,
            Inline() if workers is None else workers,
            self._tell,
            lambda: self.now_ns,
            cpu_clock,
        )

    def _tell(self, tickets: list[Ticket]) -> None:
        self.told += tickets
        self.on_told()

    def ask(self, text: str = "a") -> Ticket:
        ticket = Ticket(grammar(text), self.now_ns, self.now_ns + 30 * S)
        job = self.cache.look_up(ticket)
        if job is not None:
            self.coordinator.post(job)
        return ticket

    def turn(self) -> None:
        self.coordinator.step(0)

    def requests(self) -> list[ProbeRequest]:
        return self.probe.receive_nowait()

    def answer(self, message: FromProbe) -> None:
        self.probe.send_nowait(message)
        self.turn()
        self.turn()  # an inline worker's result is in the inbox

    def answer_sound(self, compile_ns: int = 5) -> None:
        (request,) = self.requests()
        self.answer(ProbeVerdict(number=request.number, state="sound", compile_ns=compile_ns, compiled_bytes=1000))

    def events(self) -> list[tuple[str, str]]:
        taken = [(name, label) for name, label, _ in self.coordinator.events]
        self.coordinator.events.clear()
        return taken

    def close(self) -> None:
        self.coordinator.close()
        for channel in self.channels:
            channel.close()


@pytest.fixture
def rigs() -> Iterator[Callable[..., Rig]]:
    made: list[Rig] = []

    def make(*arguments: GrammarStore, **keys: Inline | Held | GrammarConfig | Callable[[int], int]) -> Rig:
        made.append(Rig(*arguments, **keys))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for rig in made:
        rig.close()


@pytest.fixture
def store(tmp_path: Path) -> GrammarStore:
    config = GrammarStoreConfig(directory=str(tmp_path / "store"))
    return GrammarStore(prepare(config, SCOPE), config)


def put(store: GrammarStore, entry: Entry) -> None:
    lock = store.try_lock(digest(entry.grammar, SCOPE))
    assert lock is not None
    store.publish(lock, entry)
    lock.release()


def entry_of(store: GrammarStore, text: str = "a") -> Entry | None:
    return store.read(digest(grammar(text), SCOPE), grammar(text))


def failure(ticket: Ticket) -> tuple[int, str]:
    assert isinstance(ticket.outcome, RequestError)
    return ticket.outcome.status, ticket.outcome.code


# --- the ways to a grammar ------------------------------------------------------------------------------------------


def test_a_new_grammar_is_probed_then_compiled_and_marked(rigs: Callable[..., Rig], store: GrammarStore) -> None:
    """G-11, G-35, decisions 12, 14: nothing is compiled here that was not tried elsewhere; then the lock is free."""
    rig = rigs(store)
    ticket = rig.ask()
    rig.turn()
    assert rig.compiler.compiled == []
    assert store.try_lock(digest(grammar(), SCOPE)) is None, "held until it is published"
    rig.answer_sound()
    assert rig.told == [ticket]
    assert ticket.source == "compile"
    assert isinstance(ticket.outcome, Compiled)
    found = entry_of(store)
    assert found is not None
    assert found.kind == EntryKind.LOCAL_COMPILE
    lock = store.try_lock(digest(grammar(), SCOPE))
    assert lock is not None
    lock.release()
    again = rig.ask()
    assert again.is_done
    assert again.source == "memory"
    assert rig.compiler.compiled == ["a"]


@pytest.mark.parametrize(
    ("kind", "body", "source"),
    [(EntryKind.SERIALIZED, b"body", "disk"), (EntryKind.LOCAL_COMPILE, b"", "local_compile")],
)
def test_a_known_grammar_is_never_probed_again(
    rigs: Callable[..., Rig], store: GrammarStore, kind: EntryKind, body: bytes, source: Source
) -> None:
    """G-35, G-11: a body is loaded, a marker is followed by a compile of one's own."""
    put(store, Entry(kind, grammar(), body, 5, 5, len(body)))
    rig = rigs(store)
    ticket = rig.ask()
    rig.turn()
    rig.turn()
    assert ticket.source == source
    assert isinstance(ticket.outcome, Compiled)
    assert (rig.compiler.loaded, rig.compiler.compiled) == ((["a"], []) if body else ([], ["a"]))
    assert rig.requests() == []


def test_a_known_grammar_is_locked_only_while_it_is_read(rigs: Callable[..., Rig], store: GrammarStore) -> None:
    """G-35: a peer that wants the same grammar compiles at the same time."""
    put(store, Entry(EntryKind.LOCAL_COMPILE, grammar()))
    workers = Held()
    rig = rigs(store, workers=workers)
    rig.ask()
    rig.turn()
    assert len(workers.waiting) == 1
    lock = store.try_lock(digest(grammar(), SCOPE))
    assert lock is not None
    lock.release()
    workers.let_go()
    rig.turn()
    assert len(rig.told) == 1


def test_two_ranks_share_what_one_of_them_found_out(rigs: Callable[..., Rig], store: GrammarStore) -> None:
    """G-35: 64 keys asked by both at once: one probe each; bodies are loaded, markers compiled by both."""
    one, other = rigs(store), rigs(store)
    texts = [str(number) for number in range(64)]
    for text in texts:
        one.ask(text)
        other.ask(text)
    one.turn()
    other.turn()
    requests = one.requests()
    assert len(requests) == 64
    assert other.requests() == []
    for request in requests:
        one.answer(ProbeVerdict(number=request.number, state="sound"))
    other.turn()
    other.turn()
    assert len(one.told) == len(other.told) == 64
    assert len(one.compiler.compiled) + len(other.compiler.compiled) == 128
    assert {ticket.source for ticket in other.told} == {"local_compile"}
    for text in texts:
        put(store, Entry(EntryKind.SERIALIZED, grammar(text), b"body", 5, 5, 4))
    third = rigs(store)
    for text in texts:
        third.ask(text)
    third.turn()
    third.turn()
    assert {ticket.source for ticket in third.told} == {"disk"}
    assert third.compiler.compiled == []


def test_without_a_store_nothing_answers_from_disk(rigs: Callable[..., Rig], tmp_path: Path) -> None:
    """G-31: and every new grammar is probed."""
    rig = rigs()
    ticket = rig.ask()
    rig.turn()
    rig.answer_sound()
    assert ticket.source == "compile"
    assert list(tmp_path.iterdir()) == []


def test_inline_workers_are_as_good_as_any(rigs: Callable[..., Rig]) -> None:
    """G-13: a compile that is over before anybody could wait for it blocks nobody; 1,000 keys."""
    rig = rigs(config=GrammarConfig(workers=1, cache=GrammarCacheConfig(entries=2000)))
    for number in range(1000):
        rig.ask(str(number))
        rig.turn()
        rig.answer_sound()
    assert len(rig.told) == 1000


# --- refusals -------------------------------------------------------------------------------------------------------


def test_a_refusal_is_remembered_on_disk_and_in_memory(rigs: Callable[..., Rig], store: GrammarStore) -> None:
    """G-18: an invalid grammar costs one probe, ever."""
    rig = rigs(store)
    ticket = rig.ask()
    rig.turn()
    (request,) = rig.requests()
    rig.answer(ProbeVerdict(number=request.number, state="refused", code="invalid_grammar", message="no"))
    assert failure(ticket) == (400, "invalid_grammar")
    again = rig.ask()
    assert again.is_done
    assert failure(again) == (400, "invalid_grammar")
    fresh = rigs(store)
    known = fresh.ask()
    fresh.turn()
    assert failure(known) == (400, "invalid_grammar")
    assert known.source == "disk"
    assert fresh.requests() == []
    assert fresh.compiler.compiled == []


@pytest.mark.parametrize(
    ("refusal", "keys", "refused"),
    [
        (Refusal("grammar_too_costly", "m", cpu_s=2), {"probe_cpu_s": 2}, True),
        (Refusal("grammar_too_costly", "m", cpu_s=2), {"probe_cpu_s": 1}, True),
        (Refusal("grammar_too_costly", "m", cpu_s=2), {"probe_cpu_s": 3}, False),
        (Refusal("grammar_too_costly", "m", num_bytes=1 << 30), {"probe_bytes": 1 << 30}, True),
        (Refusal("grammar_too_costly", "m", num_bytes=1 << 30), {"probe_bytes": 1 << 31}, False),
        (Refusal("grammar_too_costly", "it crashes"), {"probe_cpu_s": 100, "probe_bytes": 1 << 40}, True),
    ],
)
def test_a_broken_limit_is_tried_again_under_a_larger_one(
    rigs: Callable[..., Rig], store: GrammarStore, refusal: Refusal, keys: dict[str, int], refused: bool
) -> None:
    """What was too costly for yesterday's limits may be fine today; a crash stays one."""
    put(store, Entry(EntryKind.REFUSED, grammar(), msgspec.msgpack.encode(refusal)))
    rig = rigs(store, config=GrammarConfig(workers=1, **keys))  # type: ignore[arg-type]
    ticket = rig.ask()
    rig.turn()
    assert ticket.is_done == refused
    assert len(rig.requests()) == (0 if refused else 1)


def test_what_is_not_the_grammars_fault_is_not_remembered(rigs: Callable[..., Rig], store: GrammarStore) -> None:
    """G-18, O-08: too busy, out of memory: 503 now, and fine the next time."""
    rig = rigs(store)
    busy = rig.ask()
    rig.turn()
    (request,) = rig.requests()
    rig.answer(ProbeVerdict(number=request.number, state="busy"))
    assert failure(busy) == (503, "grammar_unavailable")
    assert entry_of(store) is None
    rig.compiler.errors["a"] = MemoryError()
    short = rig.ask()
    rig.turn()
    rig.answer_sound()
    assert failure(short) == (503, "grammar_unavailable")
    rig.compiler.errors.clear()
    fine = rig.ask()
    rig.turn()
    rig.answer_sound()
    assert isinstance(fine.outcome, Compiled)


# --- the store's failures -------------------------------------------------------------------------------------------


def test_a_corrupt_entry_is_an_error_of_ours_until_it_is_mended(rigs: Callable[..., Rig], store: GrammarStore) -> None:
    """G-33, O-07: 500 twice and no compile, then 200 without a restart; never the client's fault."""
    put(store, Entry(EntryKind.SERIALIZED, grammar(), b"body", 5, 5, 4))
    path = store.directory / f"{digest(grammar(), SCOPE)}.entry"
    good = path.read_bytes()
    path.write_bytes(good[:-1])
    rig = rigs(store)
    for _ in range(2):
        ticket = rig.ask()
        rig.turn()
        assert failure(ticket) == (500, "grammar_store_corrupt")
    assert (rig.compiler.compiled, rig.requests()) == ([], [])
    assert rig.events() == [("store_error", "corrupt")] * 2
    path.write_bytes(good)
    ticket = rig.ask()
    rig.turn()
    rig.turn()
    assert ticket.source == "disk"


def test_a_body_that_the_library_refuses_is_corrupt_too(rigs: Callable[..., Rig], store: GrammarStore) -> None:
    """G-33: its checksum is right, so it was written wrong; the client is not told that its grammar is invalid."""
    put(store, Entry(EntryKind.SERIALIZED, grammar(), b"unreadable", 5, 5, 10))
    rig = rigs(store)
    ticket = rig.ask()
    rig.turn()
    rig.turn()
    assert failure(ticket) == (500, "grammar_store_corrupt")
    assert rig.events() == [("store_error", "corrupt")]
    assert not rig.ask().is_done, "not remembered"


def test_an_entry_that_cannot_be_read_is_not_silently_compiled(
    rigs: Callable[..., Rig], store: GrammarStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """G-44: 500 grammar_store_io."""
    put(store, Entry(EntryKind.SERIALIZED, grammar(), b"body", 5, 5, 4))

    def fail(*_: object) -> Entry:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(store, "read", fail)
    rig = rigs(store)
    ticket = rig.ask()
    rig.turn()
    assert failure(ticket) == (500, "grammar_store_io")
    assert (rig.compiler.compiled, rig.requests()) == ([], [])


def test_a_store_that_cannot_be_written_fails_no_request_and_logs_once_a_minute(
    rigs: Callable[..., Rig], store: GrammarStore, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """G-44: a full disk costs probes, not answers."""

    def fail(lock: KeyLock, entry: Entry) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(store, "publish", fail)
    rig = rigs(store)
    lines = 0
    for number in range(4):
        rig.now_ns = number * 29 * S
        ticket = rig.ask(str(number))
        rig.turn()
        rig.answer_sound()
        assert isinstance(ticket.outcome, Compiled)
        lines += capfd.readouterr().out.count("grammar_store_write_failed")
    assert rig.events().count(("store_error", "write")) == 4
    assert lines == 2
    lock = store.try_lock(digest(grammar("0"), SCOPE))
    assert lock is not None, "released all the same"
    lock.release()


def test_who_waits_is_told_before_anything_is_written(rigs: Callable[..., Rig], store: GrammarStore) -> None:
    """G-36, O-04: publication is nobody's wait."""
    rig = rigs(store)
    on_disk: list[bool] = []
    rig.on_told = lambda: on_disk.append(any(store.directory.glob("*.entry")))
    rig.ask()
    rig.turn()
    rig.answer_sound()
    assert on_disk == [False]
    assert entry_of(store) is not None


# --- locks, cancelling, hanging -------------------------------------------------------------------------------------


def test_a_locked_grammar_waits_and_others_go_on(rigs: Callable[..., Rig], store: GrammarStore) -> None:
    """G-34: eight keys that a peer holds occupy no worker; when it lets go its entry is used."""
    held = {text: store.try_lock(digest(grammar(text), SCOPE)) for text in "abcdefgh"}
    rig = rigs(store)
    waiting = [rig.ask(text) for text in "abcdefgh"]
    free = rig.ask("free")
    rig.turn()
    rig.answer_sound()
    assert free.is_done
    assert not any(ticket.is_done for ticket in waiting)
    for text, lock in held.items():
        assert lock is not None
        store.publish(lock, Entry(EntryKind.LOCAL_COMPILE, grammar(text)))
        lock.release()
    rig.turn()
    rig.turn()
    assert {ticket.source for ticket in waiting} == {"local_compile"}


@pytest.mark.parametrize("stage", ["inbox", "locked out", "probing", "before the worker"])
def test_a_grammar_that_nobody_wants_any_more_is_not_compiled(
    rigs: Callable[..., Rig], store: GrammarStore, stage: str
) -> None:
    """G-19: and its lock is free; the next request starts over."""
    workers = Held()
    rig = rigs(store, workers=workers)
    peer = store.try_lock(digest(grammar(), SCOPE)) if stage == "locked out" else None
    ticket = rig.ask()
    if stage == "inbox":
        assert rig.cache.cancel(ticket)
        rig.turn()
    else:
        rig.turn()
        if stage == "before the worker":
            rig.answer_sound()
        assert rig.cache.cancel(ticket)
        if peer is not None:
            peer.release()
        if stage == "probing":
            rig.answer_sound()
        if workers.waiting:
            workers.let_go()
        rig.turn()
    assert rig.compiler.compiled == []
    assert rig.told == []
    lock = store.try_lock(digest(grammar(), SCOPE))
    assert lock is not None
    lock.release()
    again = rig.ask()
    rig.turn()
    rig.answer_sound()
    workers.let_go()
    rig.turn()
    assert isinstance(again.outcome, Compiled)


def test_a_compile_that_its_probe_finished_and_that_hangs_is_the_pairs_end(rigs: Callable[..., Rig]) -> None:
    """G-22 as decisions 14 have it: by processor time, so that a busy machine is no hang."""
    spent_ns = {"now": 0}
    workers = Held()
    rig = rigs(workers=workers, cpu_clock=lambda thread: spent_ns["now"])
    rig.ask()
    rig.turn()
    rig.answer_sound()
    ((_, work, _),) = workers.waiting
    work.thread, work.begun_ns = 1, 0
    rig.now_ns = 10_000 * S
    rig.turn()
    spent_ns["now"] = 20 * S
    rig.turn()
    spent_ns["now"] += 1
    with pytest.raises(FatalError, match="does not end"):
        rig.turn()


def test_the_probe_processs_end_is_the_pairs_end(rigs: Callable[..., Rig]) -> None:
    """decisions 14: grammars cannot be had any more, and no request is to blame."""
    rig = rigs()
    rig.probe.close()
    with pytest.raises(PeerError):
        rig.turn()


def test_a_sound_grammar_that_does_not_compile_here_is_its_requests_error(rigs: Callable[..., Rig]) -> None:
    """G-25: never an exception on the grammar thread."""
    rig = rigs()
    rig.compiler.errors["a"] = GrammarError("no", code="invalid_grammar")
    ticket = rig.ask()
    rig.turn()
    rig.answer_sound()
    assert failure(ticket) == (400, "invalid_grammar")


# --- bodies ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body_bytes", "compile_ns", "deserialize_ns", "decision"),
    [
        (100, 50, 100, "serialized"),  # 50 * 2 is not less than 100
        (100, 49, 100, "local_faster"),
        (100, 49, 98, "serialized"),
        (100, 1, 0, "serialized"),
        (101, 50, 100, "body_too_large"),
    ],
)
def test_a_body_is_kept_where_loading_pays(
    body_bytes: int, compile_ns: int, deserialize_ns: int, decision: str
) -> None:
    """G-38, O-05: by this machine's figures, with a margin of 2, and never above the size limit."""
    assert decide(body_bytes, compile_ns, deserialize_ns, 100, 2.0) == decision


def test_the_speed_of_loading_is_learned_and_moves_the_decision(rigs: Callable[..., Rig], store: GrammarStore) -> None:
    """G-38, G-39: a marker of slow days is honoured, and asked about again once loading is fast."""
    put(
        store, Entry(EntryKind.LOCAL_COMPILE, grammar("slow"), b"", 1, 10**9, 10**7)
    )  # 10 ms: far beyond a fake compile
    put(store, Entry(EntryKind.LOCAL_COMPILE, grammar("large"), b"", 1, 1, 10**8))
    put(store, Entry(EntryKind.LOCAL_COMPILE, grammar("fast"), b"", 1, 100, 100))
    put(store, Entry(EntryKind.LOCAL_COMPILE, grammar("unknown"), b"", 1, 0, 0))
    rig = rigs(store)
    rig.answer(ProbeReady(bytes_per_s=1e9))
    for text in ("slow", "large", "fast", "unknown"):
        assert rig.ask(text).source == "memory", "its default, before it is known"
    rig.turn()
    rig.turn()
    assert [ticket.source for ticket in rig.told] == ["local_compile"] * 4
    assert {request.grammar.text for request in rig.requests()} == {"fast", "unknown"}
    put(store, Entry(EntryKind.SERIALIZED, grammar("x"), b"y" * 1000, 5, 5, 1000))
    before = rig.coordinator._bytes_per_s
    for _ in range(3):
        rig.cache.flush()
        rig.ask("x")
        rig.turn()
        rig.turn()
    assert rig.coordinator._bytes_per_s < before, "1,000 bytes in some microseconds are less than 1 GB a second"


def test_a_large_grammar_is_not_asked_to_be_serialized(rigs: Callable[..., Rig], store: GrammarStore) -> None:
    """G-37: its JSON can take a thousand times its memory."""
    put(store, Entry(EntryKind.LOCAL_COMPILE, grammar("a")))
    limit = GrammarStoreConfig().max_compiled_bytes
    for size, asked in ((limit, 1), (limit + 1, 0)):
        rig = rigs(store)
        rig.compiler.size = size
        rig.answer(ProbeReady(bytes_per_s=1e9))
        rig.ask("a")
        rig.turn()
        rig.turn()
        assert len(rig.requests()) == asked
    rig.answer(ProbeBody(99, "serialized"))
    assert ("store_decision", "serialized") in rig.events()


# --- the tick thread's side -----------------------------------------------------------------------------------------


class Threaded:
    """A real service with a fake compiler and a probe that finds everything sound at once."""

    def __init__(self, config: GrammarConfig | None = None, *, sound: bool = True) -> None:
        self.now_ns = time.monotonic_ns()
        self.woken = threading.Semaphore(0)
        ours, theirs = socket.socketpair()
        self.compiler = FakeCompiler()
        channel: Channel[FromProbe] = Channel(ours, decode_from_probe, send_timeout_s=5, max_pending_bytes=1 << 20)
        self.service = GrammarService(
            GrammarConfig(workers=2) if config is None else config,
            SCOPE,
            None,
            channel,
            self.compiler,
            self.woken.release,
            lambda: self.now_ns,
        )
        self._ours, self._theirs = channel, theirs
        self._probe = threading.Thread(target=self._answer)
        if sound:
            self._probe.start()
        self.service.start()

    def _answer(self) -> None:
        probe: Channel[ProbeRequest] = Channel(
            self._theirs, decode_to_probe, send_timeout_s=5, max_pending_bytes=1 << 20
        )
        self._theirs.setblocking(True)
        try:
            while True:
                self._theirs.recv(1, socket.MSG_PEEK)
                self._theirs.setblocking(False)
                for request in probe.receive_nowait():
                    probe.send_nowait(ProbeVerdict(number=request.number, state="sound"))
                self._theirs.setblocking(True)
        except (PeerError, OSError):
            return

    def drain(self, count: int) -> list[Ticket]:
        """Wait until `count` tickets are done."""
        done: list[Ticket] = []
        while len(done) < count:
            assert self.woken.acquire(timeout=10)
            done += self.service.drain()
        return done

    def close(self) -> None:
        self.service.close()
        if self._ours.fileno() >= 0:
            self._ours.close()
        if self._probe.ident is not None:
            self._probe.join(5)
        self._theirs.close()


@pytest.fixture
def threaded() -> Iterator[Callable[..., Threaded]]:
    made: list[Threaded] = []

    def make(config: GrammarConfig | None = None, *, sound: bool = True) -> Threaded:
        made.append(Threaded(config, sound=sound))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_a_thousand_requests_at_once_cost_one_compile(threaded: Callable[..., Threaded]) -> None:
    """G-12: and each has its own ticket."""
    rig = threaded()
    go_on = threading.Event()
    rig.compiler.hook = lambda text: go_on.wait(10) and None
    tickets = [rig.service.request(grammar()) for _ in range(1000)]
    go_on.set()
    assert len(rig.drain(1000)) == 1000
    assert rig.compiler.compiled == ["a"]
    assert [ticket.source for ticket in tickets].count("in_flight") == 999
    assert rig.service.request(grammar()).is_done


def test_the_tick_thread_only_hears_of_what_is_done(threaded: Callable[..., Threaded]) -> None:
    """G-21, O-15: with 1,000 waiting and none done a drain looks at none of them."""
    rig = threaded(sound=False)
    tickets = [rig.service.request(grammar(str(number % 100))) for number in range(1000)]
    looked_at: list[Ticket] = []

    class Watched(Ticket):
        @property
        def is_over(self) -> bool:
            looked_at.append(self)
            return super().is_over

    for ticket in tickets:
        ticket.__class__ = Watched
    assert rig.service.drain() == []
    assert len(looked_at) <= 1
    assert not any(ticket.is_done for ticket in tickets)


def test_what_the_grammar_thread_brings_at_once_is_heard_of_once(
    threaded: Callable[..., Threaded], monkeypatch: pytest.MonkeyPatch
) -> None:
    """G-11: on a busy machine it may be done before `request` returns; the ticket waits all the same."""
    rig = threaded(sound=False)
    error = GrammarError("no", code="invalid_grammar")

    def finish(job: Job) -> None:
        rig.service._tell(rig.service.cache.finish(job, error, "disk", remember=False))

    monkeypatch.setattr(rig.service._coordinator, "post", lambda item: item and finish(item))
    ticket = rig.service.request(grammar())
    assert (ticket.waits, ticket.outcome) == (True, error)
    assert rig.service.drain() == [ticket]
    assert rig.service.drain() == []


def test_who_waits_too_long_gets_504_and_the_others_wait_on(threaded: Callable[..., Threaded]) -> None:
    """G-20, G-18: at its own deadline, by the given clock; the compile goes on and is kept."""
    rig = threaded()
    release = threading.Event()
    rig.compiler.hook = lambda text: release.wait(10) and None
    first = rig.service.request(grammar())
    assert rig.service.next_deadline_ns() == rig.now_ns + 30 * S
    rig.now_ns += 10 * S
    second = rig.service.request(grammar())
    rig.now_ns += 20 * S - 1
    assert rig.service.drain() == []
    rig.now_ns += 1
    assert rig.service.drain() == [first]
    assert failure(first) == (504, "grammar_timeout")
    release.set()
    assert rig.drain(1) == [second]
    assert isinstance(second.outcome, Compiled)
    assert rig.service.request(grammar()).source == "memory"
    rig.now_ns += 60 * S
    assert rig.service.drain() == []
    assert rig.service.next_deadline_ns() is None


def test_a_grammar_whose_step_was_given_up_is_refused_like_one_that_its_probe_refused(
    threaded: Callable[..., Threaded],
) -> None:
    """D-17: 400 grammar_too_costly at once, without a probe or a compile, as long as memory knows of it."""
    rig = threaded()
    rig.service.request(grammar())
    rig.drain(1)
    rig.service.condemn(grammar())
    again = rig.service.request(grammar())
    assert not again.waits
    assert failure(again) == (400, "grammar_too_costly")
    assert rig.compiler.compiled == ["a"]


def test_a_cancelled_request_is_never_heard_of(threaded: Callable[..., Threaded]) -> None:
    """G-19: also when its grammar comes in that very moment."""
    rig = threaded()
    release = threading.Event()
    rig.compiler.hook = lambda text: release.wait(10) and None
    gone, stays = rig.service.request(grammar()), rig.service.request(grammar())
    rig.service.cancel(gone)
    release.set()
    assert rig.drain(1) == [stays]
    late = rig.service.request(grammar("b"))
    assert rig.woken.acquire(timeout=10)
    while not late.is_done:
        os.sched_yield()
    rig.service.cancel(late)
    assert rig.service.drain() == []
    assert rig.service.next_deadline_ns() is None


def test_l38_a_rank_is_ready_when_its_probe_process_is(threaded: Callable[..., Threaded]) -> None:
    """L-38, decisions.md 14: before that a new grammar would only wait, and nobody would know whether for ever."""
    rig = threaded(sound=False)
    with pytest.raises(PeerError, match=r"did not answer within 0\.01 s"):
        rig.service.wait_for_probe(0.01)
    probe = Channel(rig._theirs, decode_to_probe, send_timeout_s=5, max_pending_bytes=1 << 20)
    probe.send_nowait(ProbeReady(5.0))
    rig.service.wait_for_probe(10)


def test_l38_a_probe_process_that_ends_at_the_start_is_told_at_once(threaded: Callable[..., Threaded]) -> None:
    """L-38, L-40: not after the whole time that a start may take."""
    rig = threaded(sound=False)
    rig._theirs.close()
    with pytest.raises(PeerError) as failed:
        rig.service.wait_for_probe(60)
    assert "did not answer" not in str(failed.value)


def test_a_failure_of_the_grammar_thread_reaches_the_tick_thread(threaded: Callable[..., Threaded]) -> None:
    """decisions 14: it wakes the rank, and the next drain raises."""
    rig = threaded(sound=False)
    rig._theirs.close()
    assert rig.woken.acquire(timeout=10)
    with pytest.raises(PeerError):
        rig.service.drain()


def test_a_bug_in_a_compile_is_not_lost_in_its_thread(threaded: Callable[..., Threaded]) -> None:
    """An exception that nobody expected ends the rank rather than a request's wait."""
    rig = threaded()
    rig.compiler.errors["a"] = ZeroDivisionError("a bug")
    rig.service.request(grammar())
    assert rig.woken.acquire(timeout=10)
    with pytest.raises(ZeroDivisionError):
        rig.service.drain()


def test_compiles_run_only_when_nothing_else_does(threaded: Callable[..., Threaded]) -> None:
    """decisions 14: workers are scheduled idle; the tick thread and the grammar thread are not."""
    before = os.sched_getscheduler(0)
    rig = threaded()
    policies: queue.SimpleQueue[int] = queue.SimpleQueue()
    rig.compiler.hook = lambda text: policies.put(os.sched_getscheduler(0))
    rig.service.request(grammar())
    rig.drain(1)
    assert policies.get_nowait() == os.SCHED_IDLE
    assert os.sched_getscheduler(0) == before


def test_an_end_leaves_no_thread_behind(threaded: Callable[..., Threaded]) -> None:
    """Also while requests wait."""
    before = set(threading.enumerate())
    rig = threaded(sound=False)
    rig.service.request(grammar())
    rig.close()
    deadline = time.monotonic() + 10
    while set(threading.enumerate()) - before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert set(threading.enumerate()) - before == set()
