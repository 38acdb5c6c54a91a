"""What a server may leave behind on a machine, found by a mark in its environment and by lists before and after."""

from __future__ import annotations

import os
import socket
import time
import uuid
from collections.abc import Callable
from pathlib import Path

from tools.harness import POLL_S, alive

CHECKED = (
    "processes whose environment carries this run's mark (found through /proc, so also orphans)",
    "TCP sockets that listen on the server's port",
    "Unix sockets with a name, in a file system or abstract (/proc/net/unix)",
    "files in /dev/shm (POSIX shared memory)",
    "System V shared memory segments",
    "files in the server's own TMPDIR, and new entries of /tmp with names that its libraries use",
    "half-written crash reports (files other than *.json in engine.crash_dir)",
)
MARK = "DSPARKD_TRACE"
# Names that libraries write into /tmp whatever TMPDIR says; what honours it lands in the server's own directory.
TMP_PREFIXES = ("torch", "triton", "gloo", "nccl", "cuda", "dsparkd.")


class Traces:
    """Looks at the machine when it is made, and again when `left` is called."""

    def __init__(self) -> None:
        self.mark = uuid.uuid4().hex
        self._before = _shared_state()

    def environment(self, tmp: Path) -> dict[str, str]:
        """Return what the server must be started with."""
        tmp.mkdir(exist_ok=True)
        return {MARK: self.mark, "TMPDIR": str(tmp)}

    def left(self, port: int, directory: Path, within_s: float = 2.0) -> list[str]:
        """Return what is left of the server, after at most within_s: the kernel takes moments to tidy up."""
        deadline = time.monotonic() + within_s
        while found := self._find(port, directory):
            if time.monotonic() > deadline:
                return found
            time.sleep(POLL_S)
        return []

    def _find(self, port: int, directory: Path) -> list[str]:
        found = [f"process {pid}" for pid in self._marked_processes()]
        if _listens(port):
            found.append(f"listener on port {port}")
        found += sorted(_shared_state() - self._before)
        found += [f"temporary file {path}" for path in (directory / "tmp").rglob("*") if path.is_file()]
        found += [f"half a crash report {path}" for path in (directory / "crash").glob("*") if path.suffix != ".json"]
        return found

    def _marked_processes(self) -> list[int]:
        wanted = f"{MARK}={self.mark}".encode()
        pids = []
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit() or int(entry.name) == os.getpid():
                continue
            try:
                environment = (entry / "environ").read_bytes()
            except OSError:
                continue  # ended meanwhile, or not ours to look at
            if wanted in environment and alive(int(entry.name)):
                pids.append(int(entry.name))
        return pids


def _listens(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=1):
            return True
    except OSError:
        return False


def _shared_state() -> set[str]:
    """List the machine's named objects that outlive processes."""
    found: set[str] = set()
    listers: list[Callable[[], set[str]]] = [_unix_sockets, _posix_memory, _system_v_memory, _temporary_files]
    for lister in listers:
        found |= lister()
    return found


def _unix_sockets() -> set[str]:
    lines = Path("/proc/net/unix").read_text(encoding="utf-8", errors="replace").splitlines()[1:]
    return {f"unix socket {fields[7]}" for line in lines if len(fields := line.split()) > 7}


def _posix_memory() -> set[str]:
    return {f"shared memory /dev/shm/{name}" for name in os.listdir("/dev/shm")}


def _system_v_memory() -> set[str]:
    lines = Path("/proc/sysvipc/shm").read_text(encoding="utf-8").splitlines()[1:]
    return {f"System V segment {line.split()[1]}" for line in lines}


def _temporary_files() -> set[str]:
    return {f"entry /tmp/{name}" for name in os.listdir("/tmp") if name.startswith(TMP_PREFIXES)}
