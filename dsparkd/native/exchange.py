"""The rank exchange in shared memory: the region that the parent makes before the fork, and one rank's end of it.

exchange.h and exchange.c are the mechanism; here its codes become exceptions and its words tuples.
"""

from __future__ import annotations

import hashlib
import importlib.util
import struct
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from dsparkd.config import Config
from dsparkd.errors import CapabilityError, ExchangeError, ExchangeStopped, InvariantError

if TYPE_CHECKING:
    from dsparkd.native._exchange import _Library, _Pointers

ABI = 2
NUM_FIELDS = 7
NUM_EXTRA = 6
NUM_WORDS = NUM_FIELDS + NUM_EXTRA + 1
# What one rank says in one exchange, as integers of 64 bits: NUM_FIELDS fields, NUM_EXTRA extra words and the intent.
# A flat tuple, because each tuple inside it would cost as much time as the exchange itself.
Words = tuple[int, ...]
FEATURE = 'exchange.kind = "native"'
_MODULE = "dsparkd.native._exchange"
_BUILD_REMEDY = "reinstall dsparkd, or in a checkout run `python setup.py build_ext --inplace`"
_ATTACH_REMEDY = "start the server anew: both ranks must come from one parent"
_PIDFD_REMEDY = (
    "use Linux 5.4 or newer, allow pidfd_open in the seccomp filter and raise the limit of open files"
    ' (LimitNOFILE, ulimit -n), or set exchange.kind = "gloo"'
)
_MESSAGE_BYTES = 256
_WORDS = struct.Struct(f"={NUM_WORDS}q")  # dsx_words
# Looked up once: beside a call that takes half a microsecond each look-up shows.
_pack, _unpack = _WORDS.pack, _WORDS.unpack


class Code(IntEnum):
    """What a call returns; see exchange.h."""

    OK = 0
    ARG = 1
    ABI = 2
    DIGEST = 3
    OWNED = 4
    FORKED = 5
    BUSY = 6
    SEQ_LOCAL = 7
    SEQ_PEER = 8
    TIMEOUT = 9
    PEER_DEAD = 10
    PEER_REPLACED = 11
    PEER_LEFT = 12
    PEER_ERROR = 13
    CHANNEL = 14
    TICK = 15
    FUTEX = 16
    CLOCK = 17
    STOPPED = 18
    LIVENESS = 19


class Timing(NamedTuple):
    """One exchange in nanoseconds; see dsx_stats in exchange.h. Until a late peer came: total_ns - after_last_ns."""

    sequence: int
    total_ns: int
    peer_wait_ns: int
    arrival_skew_ns: int
    after_last_ns: int
    sleeps: int
    wakes: int


class Library(NamedTuple):
    """The compiled functions and what makes their pointers."""

    ffi: _Pointers
    lib: _Library

    def message(self, handle: object) -> str:
        """Text of this thread's last failure in a call with a handle, or with NULL."""
        text = self.ffi.new("char[]", _MESSAGE_BYTES)
        self.lib.dsx_message(handle, text, _MESSAGE_BYTES)
        return self.ffi.string(text).decode()


def load_library() -> Library:
    """Return the library. Raises CapabilityError when it is not built or not the one that this code was written for."""
    if importlib.util.find_spec(_MODULE) is None:
        raise CapabilityError(FEATURE, f"the compiled library {_MODULE}", _BUILD_REMEDY)
    from dsparkd.native import _exchange

    library = Library(_exchange.ffi, _exchange.lib)
    require_abi(library)
    return library


def require_abi(library: Library) -> None:
    """Raise CapabilityError unless the library has this module's version of the region."""
    found = library.lib.dsx_abi()
    if found != ABI:
        raise CapabilityError(FEATURE, f"version {ABI} of {_MODULE} (found {found})", _BUILD_REMEDY)


def config_digest(config: Config) -> int:
    """What both ranks must have in common: 64 bits of the resolved configuration and the checkpoint's geometry."""
    whole = hashlib.sha256(msgspec.json.encode(config))
    whole.update((Path(config.engine.checkpoint) / "config.json").read_bytes())
    return int.from_bytes(whole.digest()[:8], "little")


def region_bytes() -> int:
    """Size of a region."""
    return load_library().lib.dsx_region_bytes()


def init_region(fd: int, *, session: int, digest: int) -> None:
    """Make a region of a file of region_bytes() zeros. Raises CapabilityError."""
    library = load_library()
    code = library.lib.dsx_init(fd, session, digest)
    if code != Code.OK:
        raise CapabilityError(FEATURE, f"a fresh region ({library.message(library.ffi.NULL)})", _ATTACH_REMEDY)


def stop_region(fd: int) -> None:
    """End every wait of both ranks, now and later. Raises InvariantError for a file that is no region."""
    library = load_library()
    code = library.lib.dsx_stop(fd)
    if code != Code.OK:
        raise InvariantError(library.message(library.ffi.NULL))


class Attachment:
    """One rank's end of a region, owned by one thread of the process that opened it."""

    def __init__(self, library: Library, handle: object) -> None:
        ffi, lib = library
        self._library = library
        self._handle = handle
        outcome = lib.dsx_outcome_of(handle)
        self._peer = memoryview(ffi.buffer(outcome, _WORDS.size))  # its first member
        self._stats = outcome.stats
        self._kicked = ffi.new("int *")
        self._exchange = lib.dsx_exchange

    @classmethod
    def open(
        cls,
        fd: int,
        rank: int,
        *,
        session: int,
        digest: int,
        timeout_s: float,
        spin_s: float,
        library: Library | None = None,
    ) -> Attachment:
        """Become a rank of a region. Raises CapabilityError with what is wrong with the region or the kernel."""
        library = load_library() if library is None else library
        made = library.ffi.new("dsx_handle **")
        code = library.lib.dsx_attach(fd, rank, session, digest, int(timeout_s * 1e9), int(spin_s * 1e9), made)
        if code == Code.LIVENESS:
            raise CapabilityError(FEATURE, f"pidfd_open ({library.message(library.ffi.NULL)})", _PIDFD_REMEDY)
        if code != Code.OK:
            text = library.message(library.ffi.NULL)
            raise CapabilityError(FEATURE, f"a usable exchange region ({text})", _ATTACH_REMEDY)
        return cls(library, made[0])

    def exchange(self, channel: int, words: Words) -> Words:
        """Meet the peer: its words for these. channel: 0 plan, 1 tier.

        Raises ExchangeError, or ExchangeStopped when the parent ended the wait.
        """
        code = self._exchange(self._handle, channel, _pack(*words))
        if code:
            raise self._failure(code, channel)
        return _unpack(self._peer)

    def sequence(self, channel: int) -> int:
        """Number of the last exchange on a channel that succeeded."""
        return self._stats[channel].sequence

    def timing(self, channel: int) -> Timing:
        """Times of the last exchange on a channel that succeeded."""
        stats = self._stats[channel]
        return Timing(
            stats.sequence,
            stats.total_ns,
            stats.peer_wait_ns,
            stats.arrival_skew_ns,
            stats.after_last_ns,
            stats.sleeps,
            stats.wakes,
        )

    def set_timeout(self, timeout_s: float) -> None:
        """Change how long later exchanges wait for the peer."""
        self._check(self._library.lib.dsx_set_timeout(self._handle, int(timeout_s * 1e9)))

    def park(self) -> None:
        """Say that this rank goes to sleep after the last plan exchange."""
        self._check(self._library.lib.dsx_park(self._handle))

    def kick(self) -> None:
        """Say that the peer's park after the last plan exchange is over."""
        self._check(self._library.lib.dsx_kick(self._handle))

    def take_kick(self) -> bool:
        """Whether the peer has ended the park after the last plan exchange."""
        self._check(self._library.lib.dsx_take_kick(self._handle, self._kicked))
        return bool(self._kicked[0])

    def close(self) -> None:
        """Leave; a peer that waits is told. May be called again."""
        self._check(self._library.lib.dsx_detach(self._handle))

    def _check(self, code: int) -> None:
        if code:
            raise self._failure(code, None)

    def _failure(self, code: int, channel: int | None) -> ExchangeError | ExchangeStopped:
        text = self._library.message(self._handle)
        if code == Code.STOPPED:
            return ExchangeStopped(text)
        sequence = None if channel is None else self.sequence(channel) + 1
        return ExchangeError(text, code=Code(code).name, channel=channel, sequence=sequence)
