"""What is known of grammars across restarts: one file a grammar, whole or not there, under locks that die with their
holder.

    directory/<scope>/<digest>.entry   header, key, body, SHA-256 over all of it
    directory/<scope>/<digest>.lock    held from before an entry is read until after it is published
    directory/<scope>/ledger           bytes and number of entries; empty while they change
    directory/<scope>/used             its time stamp is the scope's last start

An entry is a serialized grammar, a marker ("compile it yourself, it is known to be harmless"), or a refusal. Writing is
atomic for readers; the checksum finds what a disk or a person did. It proves integrity and not who wrote the file: that
is the business of the directory's owner and mode.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import itertools
import os
import stat
import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Protocol

import msgspec

from dsparkd.config import GrammarStoreConfig
from dsparkd.errors import CapabilityError, GrammarError
from dsparkd.grammar.key import Scope
from dsparkd.messages import Grammar

FORMAT = 1
_MAGIC = b"DSPKGRAM"
# magic, format, kind, key bytes, body bytes, compile ns, deserialize ns, bytes that a body has or would have
_HEADER = struct.Struct("<8sII6Q")
_CHECKSUM_BYTES = hashlib.sha256().digest_size
_LEDGER = struct.Struct("<8sQQ")
_LEDGER_MAGIC = b"DSPKLEDG"
_KEEP_SHARE = 0.9  # pruning goes on to here, so that a full store does not list its directory for each new entry
_FEATURE = "grammar.store"


class EntryKind(IntEnum):
    """What an entry says."""

    SERIALIZED = 1
    LOCAL_COMPILE = 2
    REFUSED = 3


class Refusal(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Why a grammar is refused. cpu_s and num_bytes: the limits that it broke, 0 for one that broke none: larger limits
    in today's configuration make it worth another try."""

    code: str
    message: str
    cpu_s: int = 0
    num_bytes: int = 0


@dataclass(frozen=True)
class Entry:
    """One entry. Times in nanoseconds, 0 for not measured; body_bytes: of the body, or of one that was not worth it."""

    kind: EntryKind
    grammar: Grammar
    body: bytes = b""
    compile_ns: int = 0
    deserialize_ns: int = 0
    body_bytes: int = 0

    @property
    def refusal(self) -> Refusal:
        """Of an entry that refuses."""
        return msgspec.msgpack.decode(self.body, type=Refusal)


class StoreCorrupt(GrammarError):
    """An entry is not what was written: requests for it fail until `dsparkd grammar-store repair`."""

    def __init__(self, digest: str, why: str) -> None:
        super().__init__(
            f"the stored grammar {digest} is damaged ({why}); the operator mends it with dsparkd grammar-store repair",
            status=500,
            code="grammar_store_corrupt",
        )


class StoreFull(Exception):
    """An entry was withdrawn: the store is at its limit, and everything older is in use."""


class Disk(Protocol):
    """The calls that can fail while the store works; a test's disk fails them."""

    def read(self, path: Path) -> bytes: ...
    def write(self, path: Path, raw: bytes) -> None: ...
    def replace(self, source: Path, target: Path) -> None: ...


class LocalDisk:
    """The file system."""

    def read(self, path: Path) -> bytes:
        """Read a file of ours, never through a link. Raises OSError."""
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        with open(descriptor, "rb") as file:
            return file.read()

    def write(self, path: Path, raw: bytes) -> None:
        """Write a new file and wait until the device has it. Raises OSError."""
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with open(descriptor, "wb", buffering=0) as file:
            view = memoryview(raw)
            while view:
                view = view[file.write(view) :]
            os.fdatasync(descriptor)

    def replace(self, source: Path, target: Path) -> None:
        """Let the target's name stand for the source from one instant to the next. Raises OSError."""
        os.replace(source, target)


@dataclass(frozen=True)
class KeyLock:
    """A held lock of one grammar; `release` at the latest when the process ends."""

    digest: str
    descriptor: int

    def release(self) -> None:
        """Let the next one in."""
        os.close(self.descriptor)


class GrammarStore:
    """One scope of a store. Any process may open it; within one, a single thread uses an object of it."""

    def __init__(
        self,
        directory: Path,
        config: GrammarStoreConfig,
        disk: Disk | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`directory`: the scope's, as prepare() returned it. clock: the wall clock, which file stamps are in."""
        self.directory = directory
        self._config = config
        self._disk = LocalDisk() if disk is None else disk
        self._clock = clock
        self._names = itertools.count()

    def try_lock(self, digest: str) -> KeyLock | None:
        """Take the grammar's lock, or return None while somebody holds it. Raises OSError."""
        descriptor = _try_flock(self.directory / f"{digest}.lock")
        return None if descriptor is None else KeyLock(digest, descriptor)

    def read(self, digest: str, grammar: Grammar) -> Entry | None:
        """Return the grammar's entry; None when there is none. Counts as a use.

        Raises StoreCorrupt for one that is not whole or another grammar's, OSError for one that cannot be read.
        """
        path = self.directory / f"{digest}.entry"
        try:
            raw = self._disk.read(path)
        except FileNotFoundError:
            return None
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise StoreCorrupt(digest, "it is a link") from error
            raise
        entry = parse(raw, digest)
        if entry.grammar != grammar:
            raise StoreCorrupt(digest, "it is another grammar's")
        with contextlib.suppress(FileNotFoundError):  # pruned in this very moment
            os.utime(path, (self._clock(), self._clock()))
        return entry

    def publish(self, lock: KeyLock, entry: Entry) -> None:
        """Put an entry in place of what was there; the lock is the grammar's.

        Raises OSError, and StoreFull for an entry that there is no room for; then none is left.
        """
        raw = render(entry)
        target = self.directory / f"{lock.digest}.entry"
        temporary = self.directory / f".{lock.digest}.{os.getpid()}.{next(self._names)}.tmp"
        try:
            self._disk.write(temporary, raw)
            with self._changing_ledger() as ledger:
                ledger.forget(target)
                self._disk.replace(temporary, target)
                ledger.note(len(raw))
                if ledger.num_bytes > self._config.bytes:
                    self._prune(ledger, lock.digest)
                is_full = ledger.num_bytes > self._config.bytes
                if is_full:
                    ledger.forget(target)
                    target.unlink()
            if is_full:
                raise StoreFull(f"{len(raw)} bytes find no room in {self._config.bytes}")
        finally:
            temporary.unlink(missing_ok=True)

    def totals(self) -> tuple[int, int]:
        """Bytes and number of all entries. Raises OSError."""
        with self._changing_ledger() as ledger:
            return ledger.num_bytes, ledger.num_entries

    def prune(self) -> None:
        """Remove what was not used for longest until the store is below its limit. Raises OSError."""
        with self._changing_ledger() as ledger:
            if ledger.num_bytes > self._config.bytes:
                self._prune(ledger, "")

    def remove(self, lock: KeyLock) -> None:
        """Take an entry away, however damaged; the lock is the grammar's. Raises OSError."""
        target = self.directory / f"{lock.digest}.entry"
        with self._changing_ledger() as ledger:
            ledger.forget(target)
            target.unlink(missing_ok=True)

    def remove_strays(self) -> int:
        """Remove temporaries whose process is gone; returns their number. Raises OSError."""
        count = 0
        for path in self.directory.glob(".*.tmp"):
            pid = path.name.split(".")[2]
            if not os.path.exists(f"/proc/{pid}"):
                path.unlink(missing_ok=True)
                count += 1
        return count

    def rebuild(self) -> tuple[int, int]:
        """Count everything anew; returns totals(). Raises OSError."""
        with self._changing_ledger(trust=False) as ledger:
            return ledger.num_bytes, ledger.num_entries

    def digests(self) -> list[str]:
        """Digests of all entries, least recently used first. Raises OSError."""
        return [path.stem for _, path in _by_use(self.directory)]

    def _prune(self, ledger: Ledger, keep: str) -> None:
        """Remove entries whose lock is free, and their lock files, least recently used first."""
        goal = int(self._config.bytes * _KEEP_SHARE)
        for _, path in _by_use(self.directory):
            if ledger.num_bytes <= goal:
                return
            lock_path = path.with_suffix(".lock")
            descriptor = None if path.stem == keep else _try_flock(lock_path)
            if descriptor is None:
                continue
            ledger.forget(path)
            path.unlink(missing_ok=True)
            # Whoever waits for this lock looks again whether its file is still the one with that name.
            lock_path.unlink(missing_ok=True)
            os.close(descriptor)

    @contextlib.contextmanager
    def _changing_ledger(self, *, trust: bool = True) -> Iterator[Ledger]:
        """Hold the ledger; every change of an entry happens inside.

        The file is empty while it is held: who finds it so counts anew, because a holder died or failed in the middle.
        """
        path = self.directory / "ledger"
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            raw = os.pread(descriptor, _LEDGER.size + 1, 0)
            ledger = _parse_ledger(raw) if trust else None
            os.ftruncate(descriptor, 0)
            if ledger is None:
                ledger = _scan(self.directory)
            yield ledger
            os.pwrite(descriptor, _LEDGER.pack(_LEDGER_MAGIC, ledger.num_bytes, ledger.num_entries), 0)
        finally:
            os.close(descriptor)


@dataclass
class Ledger:
    """The sum over all entries; changed under its lock only."""

    num_bytes: int
    num_entries: int

    def note(self, num_bytes: int) -> None:
        """Add an entry."""
        self.num_bytes += num_bytes
        self.num_entries += 1

    def forget(self, path: Path) -> None:
        """Subtract an entry that is about to go, if it is there."""
        with contextlib.suppress(FileNotFoundError):
            self.num_bytes -= path.stat(follow_symlinks=False).st_size
            self.num_entries -= 1


def render(entry: Entry) -> bytes:
    """The bytes of an entry's file."""
    key = msgspec.msgpack.encode(entry.grammar)
    header = _HEADER.pack(
        _MAGIC,
        FORMAT,
        entry.kind,
        len(key),
        len(entry.body),
        entry.compile_ns,
        entry.deserialize_ns,
        entry.body_bytes,
        0,
    )
    whole = header + key + entry.body
    return whole + hashlib.sha256(whole).digest()


def parse(raw: bytes, digest: str) -> Entry:
    """The entry of a file's bytes. Raises StoreCorrupt unless every byte is as it was written."""
    if len(raw) < _HEADER.size + _CHECKSUM_BYTES:
        raise StoreCorrupt(digest, "it is too short")
    whole, checksum = raw[:-_CHECKSUM_BYTES], raw[-_CHECKSUM_BYTES:]
    if hashlib.sha256(whole).digest() != checksum:
        raise StoreCorrupt(digest, "its checksum is wrong")
    magic, format, kind, key_bytes, body_bytes, compile_ns, deserialize_ns, measured_bytes, _ = _HEADER.unpack_from(raw)
    if magic != _MAGIC or format != FORMAT or len(whole) != _HEADER.size + key_bytes + body_bytes:
        raise StoreCorrupt(digest, "its header is wrong")
    try:
        grammar = msgspec.msgpack.decode(whole[_HEADER.size : _HEADER.size + key_bytes], type=Grammar)
        found = EntryKind(kind)
    except (msgspec.DecodeError, ValueError) as error:
        raise StoreCorrupt(digest, "its key is wrong") from error
    return Entry(found, grammar, whole[_HEADER.size + key_bytes :], compile_ns, deserialize_ns, measured_bytes)


def scope_name(scope: Scope) -> str:
    """The directory of a scope: what is stored depends on it, and on nothing that an operator tunes."""
    return f"v{FORMAT}-" + hashlib.sha256(msgspec.msgpack.encode(scope)).hexdigest()[:32]


def prepare(config: GrammarStoreConfig, scope: Scope, clock: Callable[[], float] = time.time) -> Path:
    """Make the store ready, once a launch and before the ranks are forked; returns the scope's directory.

    Removes scopes that nobody has started with for `scope_retention_s` and temporaries that a killed process left, and
    counts the ledger anew. Raises CapabilityError unless the directories are real, private and our own.
    """
    root = Path(config.directory)
    directory = root / scope_name(scope)
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        _require_private(root)
        with _flocked(root / "lock"):
            _remove_old_scopes(root, directory, config.scope_retention_s, clock())
            directory.mkdir(mode=0o700, exist_ok=True)
            _require_private(directory)
            _touch(directory / "used", clock())
            for path in directory.glob("*.entry"):
                _require_private(path)
        store = GrammarStore(directory, config)
        store.remove_strays()
        store.rebuild()
    except OSError as error:
        missing = f"a usable {error.filename or root} ({error.strerror})"
        raise CapabilityError(_FEATURE, missing, "mend it, or set grammar.store.enabled = false") from error
    return directory


def _require_private(path: Path) -> None:
    """Raise CapabilityError unless nobody else can put something there."""
    found = path.lstat()
    wanted = stat.S_ISREG if path.suffix == ".entry" else stat.S_ISDIR
    if not wanted(found.st_mode) or found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise CapabilityError(
            _FEATURE,
            f"privacy of {path} (mode {stat.S_IMODE(found.st_mode):04o}, owner {found.st_uid})",
            "make it a directory (mode 0700) or file (mode 0600) of the running user, no link",
        )


def _remove_old_scopes(root: Path, current: Path, retention_s: int, now_s: float) -> None:
    for directory in root.iterdir():
        if directory == current or directory.is_symlink() or not directory.is_dir():
            continue
        try:
            used_s = (directory / "used").stat().st_mtime
        except FileNotFoundError:
            used_s = directory.stat().st_mtime
        if now_s - used_s > retention_s:
            for path in directory.iterdir():
                path.unlink(missing_ok=True)
            directory.rmdir()


def _touch(path: Path, now_s: float) -> None:
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))
    os.utime(path, (now_s, now_s))


def _by_use(directory: Path) -> list[tuple[float, Path]]:
    found = []
    for path in directory.glob("*.entry"):
        with contextlib.suppress(FileNotFoundError):
            found.append((path.lstat().st_mtime, path))
    return sorted(found)


def _scan(directory: Path) -> Ledger:
    ledger = Ledger(0, 0)
    for _, path in _by_use(directory):
        ledger.note(path.lstat().st_size)
    return ledger


def _parse_ledger(raw: bytes) -> Ledger | None:
    """None for an empty or damaged one: it is derived, so it is counted anew."""
    if len(raw) != _LEDGER.size:
        return None
    magic, num_bytes, num_entries = _LEDGER.unpack(raw)
    return Ledger(num_bytes, num_entries) if magic == _LEDGER_MAGIC else None


def _try_flock(path: Path) -> int | None:
    """Lock a file that may be removed by whoever holds its lock; None while it is held. The lock ends with close."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return None
        with contextlib.suppress(FileNotFoundError):
            if os.fstat(descriptor).st_ino == path.lstat().st_ino:
                return descriptor
        os.close(descriptor)


@contextlib.contextmanager
def _flocked(path: Path) -> Iterator[None]:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
