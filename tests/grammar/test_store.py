"""The store: entries that are whole or not there, locks that die with their holder, a ledger that is always right."""

from __future__ import annotations

import errno
import fcntl
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from dsparkd.config import MIB, GrammarStoreConfig
from dsparkd.errors import CapabilityError
from dsparkd.grammar.key import Scope, digest
from dsparkd.grammar.store import (
    Entry,
    EntryKind,
    GrammarStore,
    KeyLock,
    LocalDisk,
    Refusal,
    StoreCorrupt,
    StoreFull,
    parse,
    prepare,
    render,
    scope_name,
)
from dsparkd.messages import Grammar

SCOPE = Scope(xgrammar_version="1", tokenizer_digest="t", vocab_size=100)
DAY = 86_400.0


class Clock:
    def __init__(self) -> None:
        self.now_s = time.time()

    def __call__(self) -> float:
        self.now_s += 1
        return self.now_s


def grammar(text: str = "a") -> Grammar:
    return Grammar(kind="regex", text=text)


def name(text: str = "a") -> str:
    return digest(grammar(text), SCOPE)


def entry(text: str = "a", body: bytes = b"body") -> Entry:
    return Entry(EntryKind.SERIALIZED, grammar(text), body, 123, 456, len(body))


def config_of(path: Path, **keys: int) -> GrammarStoreConfig:
    return msgspec.structs.replace(GrammarStoreConfig(directory=str(path / "store")), **keys)


def open_store(path: Path, **keys: int) -> GrammarStore:
    config = config_of(path, **keys)
    return GrammarStore(prepare(config, SCOPE), config, clock=Clock())


def publish(store: GrammarStore, text: str, body: bytes = b"body") -> None:
    lock = store.try_lock(name(text))
    assert lock is not None
    try:
        store.publish(lock, entry(text, body))
    finally:
        lock.release()


def sizes_on_disk(store: GrammarStore) -> tuple[int, int]:
    paths = list(store.directory.glob("*.entry"))
    return sum(path.stat().st_size for path in paths), len(paths)


# --- entries --------------------------------------------------------------------------------------------------------


def test_what_was_published_is_read(tmp_path: Path) -> None:
    """Every field, and nothing for what was never written."""
    store = open_store(tmp_path)
    assert store.read(name(), grammar()) is None
    publish(store, "a", b"x" * 1000)
    assert store.read(name(), grammar()) == entry("a", b"x" * 1000)


def test_every_changed_byte_of_an_entry_is_noticed() -> None:
    """G-32, O-02: XGrammar's own reader took 122 of 149 changed digits as another grammar."""
    raw = render(entry("a", b'{"digits": 12345}'))
    assert parse(raw, name()) == entry("a", b'{"digits": 12345}')
    for place in range(len(raw)):
        for changed in (raw[place] ^ 1, raw[place] ^ 0x80):
            with pytest.raises(StoreCorrupt):
                parse(raw[:place] + bytes([changed]) + raw[place + 1 :], name())
    for cut in (0, 10, len(raw) - 1):
        with pytest.raises(StoreCorrupt):
            parse(raw[:cut], name())
    with pytest.raises(StoreCorrupt):
        parse(raw + b" ", name())


def test_a_corrupt_entry_fails_every_request_until_it_is_mended(tmp_path: Path) -> None:
    """G-33: it stays on disk, names itself, and answers again after repair without a restart."""
    store = open_store(tmp_path)
    publish(store, "a")
    path = store.directory / f"{name()}.entry"
    good = path.read_bytes()
    path.write_bytes(good[:-1] + b"\0")
    for _ in range(2):
        with pytest.raises(StoreCorrupt, match=name()) as caught:
            store.read(name(), grammar())
        assert (caught.value.status, caught.value.code) == (500, "grammar_store_corrupt")
    assert path.exists()
    path.write_bytes(good)
    assert store.read(name(), grammar()) == entry()


def test_another_grammars_entry_is_not_this_ones(tmp_path: Path) -> None:
    """The whole key is in the file; a name that two grammars share would hand out the wrong one."""
    store = open_store(tmp_path)
    publish(store, "a")
    os.rename(store.directory / f"{name()}.entry", store.directory / f"{name('b')}.entry")
    with pytest.raises(StoreCorrupt, match="another grammar"):
        store.read(name("b"), grammar("b"))


def test_refusals_keep_their_reason_and_limits(tmp_path: Path) -> None:
    """What a probe found out is not found out again."""
    store = open_store(tmp_path)
    refusal = Refusal("grammar_too_costly", "it takes more than 2 s", cpu_s=2)
    lock = store.try_lock(name())
    assert lock is not None
    store.publish(lock, Entry(EntryKind.REFUSED, grammar(), msgspec.msgpack.encode(refusal)))
    lock.release()
    found = store.read(name(), grammar())
    assert found is not None
    assert found.refusal == refusal


# --- scope, owner, mode ---------------------------------------------------------------------------------------------


def test_the_scope_is_what_compiled_forms_depend_on_and_nothing_else(tmp_path: Path) -> None:
    """G-30, O-06: another library or tokenizer is another directory; another quota finds the old entries."""
    others = (
        Scope(xgrammar_version="2", tokenizer_digest="t", vocab_size=100),
        Scope(xgrammar_version="1", tokenizer_digest="u", vocab_size=100),
        Scope(xgrammar_version="1", tokenizer_digest="t", vocab_size=101),
    )
    assert len({scope_name(scope) for scope in (SCOPE, *others)}) == 4
    publish(open_store(tmp_path), "a")
    tuned = open_store(tmp_path, bytes=2 * MIB, max_entry_bytes=1 * MIB, max_compiled_bytes=1, margin=5)
    assert tuned.read(name(), grammar()) == entry()


def test_directories_and_files_are_private(tmp_path: Path) -> None:
    """G-31, O-03: ownership and mode protect the store; the checksum does not."""
    store = open_store(tmp_path)
    publish(store, "a")
    assert (tmp_path / "store").stat().st_mode & 0o777 == 0o700
    assert store.directory.stat().st_mode & 0o777 == 0o700
    for path in store.directory.iterdir():
        assert path.stat().st_mode & 0o777 == 0o600, path.name


@pytest.mark.parametrize("which", ["root", "scope", "entry"])
def test_what_others_may_write_does_not_start(tmp_path: Path, which: str) -> None:
    """G-31: whoever can put an entry there decides what answers look like."""
    store = open_store(tmp_path)
    publish(store, "a")
    path = {"root": tmp_path / "store", "scope": store.directory, "entry": store.directory / f"{name()}.entry"}[which]
    path.chmod(path.stat().st_mode | 0o020)
    with pytest.raises(CapabilityError, match=r"grammar\.store.*mode"):
        open_store(tmp_path)


@pytest.mark.parametrize("which", ["root", "scope", "entry"])
def test_links_are_not_followed(tmp_path: Path, which: str) -> None:
    """G-31: a link leads where somebody else may write."""
    store = open_store(tmp_path)
    publish(store, "a")
    path = {"root": tmp_path / "store", "scope": store.directory, "entry": store.directory / f"{name()}.entry"}[which]
    moved = tmp_path / "moved"
    path.rename(moved)
    path.symlink_to(moved)
    if which == "entry":
        with pytest.raises(StoreCorrupt, match="link"):
            store.read(name(), grammar())
    with pytest.raises(CapabilityError, match=r"grammar\.store"):
        open_store(tmp_path)


def test_foreign_owners_do_not_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """G-31: a directory that another user made before us."""
    open_store(tmp_path)
    real = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: real + 1)
    with pytest.raises(CapabilityError, match="owner"):
        open_store(tmp_path)


def test_a_directory_that_cannot_be_made_does_not_start(tmp_path: Path) -> None:
    """G-31: the message names it and the way out."""
    (tmp_path / "store").write_text("in the way", encoding="ascii")
    with pytest.raises(CapabilityError, match=r"grammar\.store.*enabled = false"):
        open_store(tmp_path)


def test_scopes_that_nobody_used_for_long_go_at_start(tmp_path: Path) -> None:
    """G-43, O-06: upgrades must not fill the disk."""
    config = config_of(tmp_path, scope_retention_s=14 * int(DAY))
    now_s = time.time()
    scopes = [Scope(xgrammar_version=str(n), tokenizer_digest="t", vocab_size=1) for n in range(3)]
    ages = (15 * DAY, 13 * DAY, 12 * DAY)
    directories = [prepare(config, scope, lambda age=age: now_s - age) for scope, age in zip(scopes, ages, strict=True)]
    for directory in directories:
        (directory / "x.entry").write_bytes(b"")
        (directory / "x.entry").chmod(0o600)
    assert [directory.exists() for directory in directories] == [True, True, True]

    prepare(config, scopes[2], lambda: now_s)

    assert [directory.exists() for directory in directories] == [False, True, True]


# --- locks ----------------------------------------------------------------------------------------------------------


def in_child(task: Callable[[], None], after: Callable[[int], None] = lambda pid: None) -> int:
    """Run a task in a forked child; returns its wait status. `after` runs in the parent meanwhile."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            task()
            code = 0
        finally:
            os._exit(code)
    after(pid)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_a_lock_has_one_holder_and_dies_with_it(tmp_path: Path) -> None:
    """G-34: a peer that is killed while it holds one keeps nobody waiting, and other grammars are free meanwhile."""
    store = open_store(tmp_path)
    reading, writing = os.pipe()
    held: list[KeyLock] = []

    def hold_eight() -> None:
        held.extend(lock for text in "abcdefgh" if (lock := store.try_lock(name(text))) is not None)
        os.write(writing, bytes([len(held)]))
        signal.pause()

    def look_and_kill(pid: int) -> None:
        assert os.read(reading, 1) == b"\x08"
        assert all(store.try_lock(name(text)) is None for text in "abcdefgh")
        other = store.try_lock(name("i"))
        assert other is not None
        other.release()
        os.kill(pid, signal.SIGKILL)

    assert in_child(hold_eight, look_and_kill) == -signal.SIGKILL
    for text in "abcdefgh":
        lock = store.try_lock(name(text))
        assert lock is not None
        lock.release()
    os.close(reading)
    os.close(writing)


def test_a_lock_whose_file_was_removed_is_taken_anew(tmp_path: Path) -> None:
    """G-42: pruning removes lock files; two processes must not hold two files of one name."""
    store = open_store(tmp_path)
    first = store.try_lock(name())
    assert first is not None
    (store.directory / f"{name()}.lock").unlink()
    second = store.try_lock(name())
    assert second is not None, "the name leads to a new file"
    assert os.fstat(second.descriptor).st_ino == (store.directory / f"{name()}.lock").stat().st_ino
    assert store.try_lock(name()) is None
    first.release()
    second.release()


def test_a_lock_that_was_removed_while_it_was_waited_for_is_not_taken_for_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """G-42: between opening a lock file and locking it a pruner may remove it; its name then leads to another one."""
    store = open_store(tmp_path)
    path = store.directory / f"{name()}.lock"
    real = fcntl.flock
    removed = []

    def remove_first(descriptor: int, operation: int) -> None:
        if not removed:
            removed.append(path.stat().st_ino)
            path.unlink()
            path.touch(mode=0o600)
        real(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", remove_first)
    lock = store.try_lock(name())
    assert lock is not None
    assert removed
    assert os.fstat(lock.descriptor).st_ino == path.stat().st_ino
    lock.release()


# --- publication ----------------------------------------------------------------------------------------------------


class FailingDisk(LocalDisk):
    """A disk on which one call fails."""

    def __init__(self, call: str, number: int) -> None:
        self.call, self.number = call, number

    def _fail(self, call: str) -> None:
        if call == self.call:
            raise OSError(self.number, os.strerror(self.number))

    def read(self, path: Path) -> bytes:
        self._fail("read")
        return super().read(path)

    def write(self, path: Path, raw: bytes) -> None:
        if self.call == "write":
            path.write_bytes(raw[: len(raw) // 2])
        self._fail("write")
        super().write(path, raw)

    def replace(self, source: Path, target: Path) -> None:
        self._fail("replace")
        super().replace(source, target)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EIO])
@pytest.mark.parametrize("call", ["write", "replace", "read"])
def test_a_disk_that_fails_leaves_no_half_entry(tmp_path: Path, call: str, number: int) -> None:
    """G-40, G-44: the old entry, or none, and no temporary; and the ledger is right."""
    good = open_store(tmp_path)
    publish(good, "a", b"old")
    store = GrammarStore(good.directory, config_of(tmp_path), FailingDisk(call, number))
    if call == "read":
        with pytest.raises(OSError, match=os.strerror(number)):
            store.read(name(), grammar())
    else:
        with pytest.raises(OSError, match=os.strerror(number)):
            publish(store, "a", b"new")
    assert good.read(name(), grammar()) == entry("a", b"old")
    assert not list(good.directory.glob("*.tmp"))
    assert good.totals() == sizes_on_disk(good)


def test_kills_at_any_instant_leave_whole_entries_and_a_right_ledger(tmp_path: Path) -> None:
    """G-40, G-41: 60 kills at random points of a publishing loop; the gate store_kill does 200 on two processes."""
    store = open_store(tmp_path)
    draw = random.Random(8)
    texts = [str(number) for number in range(6)]

    def publish_for_ever() -> None:
        rng = random.Random(os.getpid())
        while True:
            publish(store, rng.choice(texts), bytes(rng.randrange(1, 50_000)))

    for _ in range(60):

        def kill(pid: int) -> None:
            time.sleep(draw.random() * 0.02)
            os.kill(pid, signal.SIGKILL)

        assert in_child(publish_for_ever, kill) == -signal.SIGKILL
        for text in texts:
            found = store.read(name(text), grammar(text))
            assert found is None or found.grammar == grammar(text)
        assert store.totals() == sizes_on_disk(store), "also without a restart"
    again = open_store(tmp_path)
    assert not list(again.directory.glob(".*.tmp"))


def test_the_ledger_is_the_sum_whoever_publishes(tmp_path: Path) -> None:
    """G-41: two processes, eight threads each, 64 keys."""
    directory = open_store(tmp_path).directory
    config = config_of(tmp_path)

    def publish_all(seed: int) -> None:
        def one_thread(number: int) -> None:
            store = GrammarStore(directory, config)
            rng = random.Random(seed * 100 + number)
            for text in rng.sample([str(n) for n in range(64)], 64):
                lock = store.try_lock(name(text))
                if lock is not None:
                    store.publish(lock, entry(text, bytes(rng.randrange(1, 2000))))
                    lock.release()

        threads = [threading.Thread(target=one_thread, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    assert in_child(lambda: publish_all(1), lambda pid: publish_all(2)) == 0
    store = GrammarStore(directory, config)
    assert store.totals() == sizes_on_disk(store)
    assert store.totals()[1] == 64


@pytest.mark.parametrize("damage", [b"", b"garbage", b"x" * 24])
def test_a_damaged_ledger_is_counted_anew(tmp_path: Path, damage: bytes) -> None:
    """G-41: it is derived, so nothing is lost; also one that reads well and is wrong, at the next start."""
    store = open_store(tmp_path)
    publish(store, "a")
    publish(store, "b")
    (store.directory / "ledger").write_bytes(damage)
    assert store.totals() == sizes_on_disk(store)
    (store.directory / "ledger").unlink()
    assert store.totals() == sizes_on_disk(store)
    with store._changing_ledger() as ledger:
        ledger.num_bytes += 1
    assert store.totals() != sizes_on_disk(store)
    assert open_store(tmp_path).totals() == sizes_on_disk(store)


# --- quota ----------------------------------------------------------------------------------------------------------


def test_pruning_takes_what_was_not_used_for_longest_and_is_not_locked(tmp_path: Path) -> None:
    """G-42: entries and their lock files go, until there is room again."""
    store = open_store(tmp_path, bytes=MIB, max_entry_bytes=MIB)
    for text in "abcdefgh":
        publish(store, text, bytes(120_000))
    assert store.read(name("a"), grammar("a")) is not None  # used: now the youngest
    in_use = store.try_lock(name("b"))
    assert in_use is not None

    publish(store, "i", bytes(120_000))

    in_use.release()
    left = {text for text in "abcdefghi" if (store.directory / f"{name(text)}.entry").exists()}
    assert left == {"a", "b", *"efgh", "i"}
    assert not (store.directory / f"{name('c')}.lock").exists()
    assert store.totals() == sizes_on_disk(store)
    assert store.totals()[0] <= MIB


def test_an_entry_without_room_is_withdrawn(tmp_path: Path) -> None:
    """G-42: everything older is in use by a peer: the new one goes, the ledger stays below the limit."""
    store = open_store(tmp_path, bytes=MIB, max_entry_bytes=MIB)
    for text in "abcdefgh":
        publish(store, text, bytes(120_000))
    peer = [store.try_lock(name(text)) for text in "abcdefgh"]

    with pytest.raises(StoreFull):
        publish(store, "i", bytes(120_000))

    assert store.read(name("i"), grammar("i")) is None
    assert store.totals() == sizes_on_disk(store)
    assert store.totals()[0] <= MIB
    for lock in peer:
        assert lock is not None
        lock.release()
    publish(store, "i", bytes(120_000))
    assert store.read(name("i"), grammar("i")) is not None
