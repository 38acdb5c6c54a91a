"""Regions, ranks of one in this process, ranks in processes of their own, and a build of the library that fails."""

from __future__ import annotations

import json
import mmap
import os
import select
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from cffi import FFI

from dsparkd import system
from dsparkd.errors import DsparkdError
from dsparkd.native import build, exchange
from dsparkd.native.exchange import Attachment, Library

ROOT = Path(build.__file__).parents[2]
HERE = Path(__file__).parent
SESSION, DIGEST = 0x1234567890ABCDEF, 0xFEDCBA0987654321
WORDS = (1, 2, 3, 4, 5, 6, 7, 1, 2, 3, 4, 5, 6, 0)

# Runs what it is told, line by line, beside a rank; answers each line with its `result` as JSON.
CHILD = """
import json, os, sys, time
from dsparkd.errors import ExchangeError, ExchangeStopped
from dsparkd.native.exchange import Attachment
fd, rank, session, digest, cpu = map(int, sys.argv[1:6])
if cpu >= 0:
    os.sched_setaffinity(0, {cpu})
a = Attachment.open(fd, rank, session=session, digest=digest, timeout_s=float(sys.argv[6]), spin_s=float(sys.argv[7]))
words = (1, 2, 3, 4, 5, 6, 7, 1, 2, 3, 4, 5, 6, 0)
print("null", flush=True)
for line in sys.stdin:
    result = None
    try:
        exec(json.loads(line))
    except ExchangeError as error:
        result = [error.code, str(error), error.channel, error.sequence]
    except ExchangeStopped as error:
        result = ["STOPPED", str(error)]
    print(json.dumps(result), flush=True)
"""


class Region:
    """A region's descriptor and its bytes."""

    def __init__(self) -> None:
        self.fd = system.sealed_memory("dsparkd-test", exchange.region_bytes())
        exchange.init_region(self.fd, session=SESSION, digest=DIGEST)
        self.bytes = mmap.mmap(self.fd, exchange.region_bytes())

    def read(self, offset: int, kind: str = "I") -> int:
        return struct.unpack_from(f"<{kind}", self.bytes, offset)[0]

    def write(self, offset: int, value: int, kind: str = "I") -> None:
        struct.pack_into(f"<{kind}", self.bytes, offset, value)

    def attach(
        self, rank: int, *, timeout_s: float = 10.0, spin_s: float = 20e-6, library: Library | None = None, fd: int = -1
    ) -> Attachment:
        return Attachment.open(
            self.fd if fd < 0 else fd,
            rank,
            session=SESSION,
            digest=DIGEST,
            timeout_s=timeout_s,
            spin_s=spin_s,
            library=library,
        )

    def close(self) -> None:
        self.bytes.close()
        os.close(self.fd)


class Remote:
    """A rank in a process of its own."""

    def __init__(self, region: Region, rank: int, cpu: int, timeout_s: float, spin_s: float) -> None:
        numbers = [region.fd, rank, SESSION, DIGEST, cpu, timeout_s, spin_s]
        self.process = subprocess.Popen(
            [sys.executable, "-c", CHILD, *map(str, numbers)],
            pass_fds=[region.fd],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        self.answer()

    def begin(self, code: str) -> None:
        """Have the process run some lines; its answer is read later."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(code) + "\n")
        self.process.stdin.flush()

    def answer(self) -> object:
        assert self.process.stdout is not None
        assert select.select([self.process.stdout], [], [], 40)[0], "no answer"
        line = self.process.stdout.readline()
        assert line, "the process has ended"
        return json.loads(line)

    def run(self, code: str) -> object:
        self.begin(code)
        return self.answer()

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


class Background:
    """A call in a thread of its own; `result` waits for its value or exception."""

    def __init__(self, call: Callable[[], object]) -> None:
        self._call = call
        self._value: object = None
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._value = self._call()
        except DsparkdError as error:
            self._value = error

    def result(self) -> object:
        self._thread.join(30)
        assert not self._thread.is_alive(), "still waiting"
        return self._value


@dataclass(frozen=True)
class Lab:
    """What test modules of this directory share: they cannot import from each other."""

    Region = Region
    Background = Background
    ROOT = ROOT
    HERE = HERE
    SESSION = SESSION
    DIGEST = DIGEST
    WORDS = WORDS
    # Offsets of contracts section 4.1, written down here a second time.
    ERROR, ERROR_RANK, ERROR_SEQ, STOP = 0x40, 0x44, 0x48, 0x50

    @staticmethod
    def rank(rank: int) -> int:
        return 0x100 + 640 * rank

    @classmethod
    def waiting(cls, rank: int) -> int:
        return cls.rank(rank) + 4

    @classmethod
    def slot(cls, rank: int, channel: int, index: int) -> int:
        return cls.rank(rank) + 0x80 + 256 * channel + 64 * index

    @classmethod
    def side(cls, rank: int, channel: int, index: int) -> int:
        return cls.slot(rank, channel, index) + 0x80


@pytest.fixture(scope="session")
def lab() -> Lab:
    return Lab()


@pytest.fixture
def region() -> Iterator[Region]:
    made = Region()
    yield made
    made.close()


@pytest.fixture
def both(region: Region) -> Iterator[tuple[Attachment, Attachment]]:
    """Two ranks in this process, for two threads."""
    made = (region.attach(0), region.attach(1))
    yield made
    for each in made:
        each.close()


@pytest.fixture
def start(region: Region) -> Iterator[Callable[..., Remote]]:
    """Start a rank of the region in a process."""
    started = []

    def run(rank: int, *, cpu: int = -1, timeout_s: float = 10.0, spin_s: float = 20e-6) -> Remote:
        started.append(Remote(region, rank, cpu, timeout_s, spin_s))
        return started[-1]

    yield run
    for each in started:
        each.close()


@pytest.fixture(scope="session")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> Library:
    """A build whose system calls fail on demand: lib.fault_clock, fault_futex_wait, fault_pidfd hold an errno."""
    target = tmp_path_factory.mktemp("faulty") / "exchange.so"
    directory = ROOT / "dsparkd" / "native"
    objects = [target.with_name("exchange.o"), target.with_name("faults.o")]
    rename = ["-Dsyscall=fault_syscall", "-Dclock_gettime=fault_clock_gettime"]
    compile_c = ["cc", "-std=c11", "-O1", "-fPIC", "-c"]
    subprocess.run([*compile_c, *rename, str(directory / "exchange.c"), "-o", str(objects[0])], check=True)
    subprocess.run([*compile_c, str(HERE / "faults.c"), "-o", str(objects[1])], check=True)
    subprocess.run(["cc", "-shared", "-o", str(target), *map(str, objects)], check=True)
    ffi = FFI()
    ffi.cdef(build.declarations())
    ffi.cdef("extern int fault_clock, fault_futex_wait, fault_pidfd; extern long fault_num_syscalls;")
    ffi.cdef("extern void (*fault_before_pidfd)(void), (*fault_before_clock)(void);")
    return Library(ffi, ffi.dlopen(str(target)))


@pytest.fixture
def faults(faulty: Library) -> Iterator[Library]:
    """The failing build, which does not fail yet."""
    yield faulty
    for name in ("fault_clock", "fault_futex_wait", "fault_pidfd"):
        setattr(faulty.lib, name, 0)
    faulty.lib.fault_before_pidfd = faulty.lib.fault_before_clock = faulty.ffi.NULL
