"""The command `dsparkd grammar-store`: looks into the store of grammars and mends it, also while a server runs.

list     one line an entry, least recently used first
verify   reads every entry; 1 when one is damaged
repair   removes damaged entries and what killed processes left, and counts the ledger anew
prune    removes what was not used for longest until the store is below grammar.store.bytes
warm     tries the grammars of request bodies, one JSON object a line, so that no request has to wait for that
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, TypeVar

import msgspec

from dsparkd import system
from dsparkd.config import Config
from dsparkd.errors import EXIT_OK, CapabilityError, ConfigError, GrammarError, PeerError
from dsparkd.grammar import key
from dsparkd.grammar.spec import ConstraintOptions, parse_constraint
from dsparkd.grammar.store import (
    Entry,
    EntryKind,
    GrammarStore,
    Refusal,
    StoreCorrupt,
    StoreFull,
    parse,
    prepare,
    scope_name,
)
from dsparkd.grammar.vocabulary import TOOL_MARKERS, Vocabularies, make_vocabularies
from dsparkd.ipc.channel import Channel
from dsparkd.messages import FromProbe, Grammar, ProbeBody, ProbeRequest, ProbeVerdict, decode_from_probe
from dsparkd.model.config import ModelConfig
from dsparkd.text.tokenizer import Tokenizer

Verb = Literal["list", "verify", "repair", "prune", "warm"]
VERBS: tuple[Verb, ...] = ("list", "verify", "repair", "prune", "warm")
EXIT_DAMAGED = 1
SHOWN_CHARACTERS = 60
LOCK_TIMEOUT_S = 60.0
BODY_TIMEOUT_S = 60.0

A = TypeVar("A", ProbeVerdict, ProbeBody)


def run(config: Config, model: ModelConfig, verb: Verb, bodies: Path | None) -> int:
    """Run one verb over the scope that a server with this configuration would use; returns the exit code.

    Raises ConfigError for a store that is off, CapabilityError for one that cannot be used.
    """
    if not config.grammar.store.enabled:
        raise ConfigError("grammar.store.enabled", False, "there is no store; use true")
    tokenizer = Tokenizer.load(Path(config.engine.checkpoint))
    vocabularies = make_vocabularies(tokenizer, model.vocab_size, (model.eos_token_id,))
    directory = Path(config.grammar.store.directory) / scope_name(vocabularies.scope())
    store = GrammarStore(directory, config.grammar.store)
    try:
        if verb == "warm":
            return _warm(config, vocabularies, tokenizer, bodies)
        if not directory.is_dir():
            _say(f"no entry: {directory} does not exist")
            return EXIT_OK
        verbs = {"list": _list, "verify": _verify, "repair": _repair, "prune": _prune}
        return verbs[verb](store)
    except OSError as error:
        raise CapabilityError("grammar.store", f"a usable {error.filename} ({error.strerror})", "mend it") from error


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")


def _entries(store: GrammarStore) -> Iterator[tuple[str, Entry | StoreCorrupt]]:
    """Every entry by its digest; reading them here is no use of them."""
    for digest in store.digests():
        try:
            yield digest, parse((store.directory / f"{digest}.entry").read_bytes(), digest)
        except StoreCorrupt as error:
            yield digest, error
        except FileNotFoundError:
            continue  # pruned by a server meanwhile


def _list(store: GrammarStore) -> int:
    now_s = time.time()
    for digest, entry in _entries(store):
        with contextlib.suppress(FileNotFoundError):
            found = (store.directory / f"{digest}.entry").stat()
            head = f"{digest}  {found.st_size:>10} B  used {(now_s - found.st_mtime) / 86_400:6.1f} d ago"
            _say(f"{head}  {_describe(entry)}")
    num_bytes, num_entries = store.totals()
    _say(f"{num_entries} entries, {num_bytes} bytes in {store.directory}")
    return EXIT_OK


def _describe(entry: Entry | StoreCorrupt) -> str:
    if isinstance(entry, StoreCorrupt):
        return "damaged"
    said = entry.refusal.code if entry.kind == EntryKind.REFUSED else f"compiles in {entry.compile_ns / 1e6:.1f} ms"
    # As JSON, so that no text of a client starts a line or moves the cursor.
    text = json.dumps(entry.grammar.text[:SHOWN_CHARACTERS])
    return f"{entry.kind.name.lower():13}  {said:24}  {entry.grammar.kind} {text}"


def _verify(store: GrammarStore) -> int:
    damaged = 0
    count = 0
    for digest, entry in _entries(store):
        count += 1
        if isinstance(entry, StoreCorrupt):
            damaged += 1
            _say(f"{digest}  {entry.message}")
    _say(f"{count} entries, {damaged} damaged")
    return EXIT_DAMAGED if damaged else EXIT_OK


def _repair(store: GrammarStore) -> int:
    removed = kept = 0
    for digest, entry in _entries(store):
        if not isinstance(entry, StoreCorrupt):
            continue
        lock = store.try_lock(digest)
        if lock is None:
            kept += 1
            _say(f"{digest}  damaged, in use now; try again")
            continue
        try:
            store.remove(lock)
        finally:
            lock.release()
        removed += 1
        _say(f"{digest}  removed")
    strays = store.remove_strays()
    num_bytes, num_entries = store.rebuild()
    _say(f"{removed} damaged entries and {strays} temporary files removed; {num_entries} entries, {num_bytes} bytes")
    return EXIT_DAMAGED if kept else EXIT_OK


def _prune(store: GrammarStore) -> int:
    before, _ = store.totals()
    store.prune()
    num_bytes, num_entries = store.totals()
    _say(f"{before - num_bytes} bytes removed; {num_entries} entries, {num_bytes} bytes")
    return EXIT_OK


# --- warm -----------------------------------------------------------------------------------------------------------


def _warm(config: Config, vocabularies: Vocabularies, tokenizer: Tokenizer, bodies: Path | None) -> int:
    if bodies is None:
        raise ConfigError("--bodies", None, "name a file with one request body, a JSON object, a line")
    try:
        lines = bodies.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise ConfigError("--bodies", str(bodies), f"is not UTF-8 at byte {error.start}; write it in UTF-8") from error
    directory = prepare(config.grammar.store, vocabularies.scope())
    store = GrammarStore(directory, config.grammar.store)
    failed = 0
    with _probe_process(config, vocabularies, directory) as probe:
        for number, line in enumerate(lines, 1):
            try:
                grammar = _grammar_of(line, config, tokenizer)
                said = "asks for no grammar"
                if grammar is not None:
                    said = _warm_one(store, vocabularies, probe, number, grammar)
            except GrammarError as error:
                failed += 1
                said = f"refused: {error.message}"
            except StoreFull as error:
                failed += 1
                said = f"not stored: {error} (grammar.store.bytes)"
            _say(f"line {number}: {said}")
    return EXIT_DAMAGED if failed else EXIT_OK


def _grammar_of(line: str, config: Config, tokenizer: Tokenizer) -> Grammar | None:
    """What a server would compile for a body. Raises GrammarError."""
    try:
        body = msgspec.json.decode(line, type=dict[str, object])
    except msgspec.DecodeError as error:
        raise GrammarError(f"no JSON object ({error})", code="invalid_json") from error
    options = ConstraintOptions(
        unsupported=config.grammar.unsupported,
        any_whitespace=config.grammar.any_whitespace,
        max_whitespace=config.grammar.max_whitespace,
        marker_id=tokenizer.marker_id(TOOL_MARKERS[0]),
    )
    constraint = parse_constraint(body, options)
    return None if constraint is None else constraint.grammar


def _warm_one(
    store: GrammarStore, vocabularies: Vocabularies, probe: Channel[FromProbe], number: int, grammar: Grammar
) -> str:
    """Have one grammar tried and what came of it kept. Raises GrammarError for one that is refused."""
    digest = key.digest(grammar, vocabularies.scope())
    deadline_s = time.monotonic() + LOCK_TIMEOUT_S
    while (lock := store.try_lock(digest)) is None:
        if time.monotonic() > deadline_s:
            return "a server is busy with it"
        time.sleep(0.01)
    try:
        if store.read(digest, grammar) is not None:
            return "known"
        probe.send_nowait(ProbeRequest(number=number, digest=digest, grammar=grammar, bytes_per_s=0.0))
        verdict = _receive(probe, number, ProbeVerdict, None)
        assert verdict is not None
        if verdict.state == "busy":
            return "not decided: the machine is too busy"
        if verdict.state == "refused":
            refusal = Refusal(verdict.code, verdict.message, verdict.cpu_s, verdict.num_bytes)
            store.publish(lock, Entry(EntryKind.REFUSED, grammar, msgspec.msgpack.encode(refusal)))
            raise GrammarError(verdict.message, code=verdict.code)
        store.publish(lock, Entry(EntryKind.LOCAL_COMPILE, grammar, compile_ns=verdict.compile_ns))
    finally:
        lock.release()
    body = _receive(probe, number, ProbeBody, BODY_TIMEOUT_S)
    return "stored" if body is not None and body.decision == "serialized" else "marked"


def _receive(probe: Channel[FromProbe], number: int, kind: type[A], timeout_s: float | None) -> A | None:
    """Wait for the answer of one kind to one request; None after timeout_s."""
    deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
    while deadline_s is None or time.monotonic() < deadline_s:
        for message in probe.receive_nowait(1):
            if isinstance(message, kind) and message.number == number:
                return message
        if not probe.has_frames:
            select.select([probe], [], [], 1.0)
    return None


@contextlib.contextmanager
def _probe_process(config: Config, vocabularies: Vocabularies, directory: Path) -> Iterator[Channel[FromProbe]]:
    ours, theirs = socket.socketpair()
    sys.stdout.flush()
    parent_pid = os.getpid()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            system.set_parent_death_signal(parent_pid)
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            ours.close()
            # Imported here, in the child: it loads xgrammar, and with it torch.
            from dsparkd.grammar import probe

            code = probe.serve(config.grammar, vocabularies, directory, (theirs,))
        finally:
            os._exit(code)
    theirs.close()
    channel: Channel[FromProbe] = Channel(
        ours, decode_from_probe, send_timeout_s=60, max_pending_bytes=1 << 24, name="probe process"
    )
    try:
        yield channel
    except PeerError as error:
        raise CapabilityError("grammar.store", f"a probe process ({error})", "see what it wrote above") from error
    finally:
        channel.close()
        os.waitpid(pid, 0)
