"""Linux calls that Python lacks or hides: death signal, descriptors, pidfds, service notification, CPU count."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import math
import os
import signal
import socket
import struct
from collections.abc import Collection
from pathlib import Path

from dsparkd.errors import CapabilityError, PeerError

DESCRIPTOR_REMEDY = "raise the limit of open files (LimitNOFILE; ulimit -n)"
_PR_SET_PDEATHSIG = 1
_SYS_SCHED_SETATTR = {"x86_64": 314, "aarch64": 274}[os.uname().machine]
_SCHED_ATTR = struct.Struct("=IIQiIQQQ")  # size, policy, flags, nice, priority, runtime, deadline, period
_SHORTEST_TURN_NS = 100_000


def set_parent_death_signal(expected_parent_pid: int) -> None:
    """Have the kernel kill this process when its parent ends. Call first thing after the fork.

    Raises PeerError when the parent ended before the call: no signal would ever come.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise CapabilityError("supervisor", f"PR_SET_PDEATHSIG ({os.strerror(number)})", "run on Linux")
    if os.getppid() != expected_parent_pid:
        raise PeerError("the parent ended while this process started")


def close_other_fds(keep: set[int]) -> None:
    """Close every descriptor except 0, 1, 2 and `keep`."""
    kept = keep | {0, 1, 2}
    for name in os.listdir("/proc/self/fd"):
        number = int(name)
        if number in kept:
            continue
        try:
            os.close(number)
        except OSError:
            continue  # the descriptor that listed the directory is gone already


def open_fds() -> set[int]:
    """Return the numbers of all open descriptors of this process."""
    listed = {int(name) for name in os.listdir("/proc/self/fd")}
    # One of them listed the directory and is closed by now.
    return {number for number in listed if os.path.exists(f"/proc/self/fd/{number}")}


def pidfd_open(pid: int) -> int:
    """Return a descriptor that becomes readable when the process ends. Raises CapabilityError without pidfds."""
    try:
        return os.pidfd_open(pid)
    except OSError as error:
        remedy = DESCRIPTOR_REMEDY if error.errno == errno.EMFILE else "use Linux 5.4 or newer"
        raise CapabilityError("supervisor", f"pidfd_open ({error.strerror})", remedy) from error


def reap_nowait(pid: int) -> int | None:
    """Return the exit code of a child that ended (negative: the signal), or None while it runs."""
    ended, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if ended else None


def eventfd() -> int:
    """Return a new non-blocking, close-on-exec event descriptor with count 0."""
    return os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)


def sealed_memory(name: str, num_bytes: int) -> int:
    """Return a close-on-exec descriptor of shared zeros whose size nobody can change. Raises OSError."""
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, num_bytes)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def notify(state: str) -> bool:
    """Send `state` (lines of NAME=VALUE) to the service manager; False when there is none.

    A manager that does not listen is not this server's failure, so errors are not raised.
    """
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return False
    if address.startswith("@"):
        address = "\0" + address[1:]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
        try:
            sock.connect(address)
            sock.sendall(state.encode())
        except OSError:
            return False
    return True


def watchdog_interval_s() -> float | None:
    """How often the service manager must hear of this process at the latest; None when it does not watch it."""
    try:
        microseconds = int(os.environ.get("WATCHDOG_USEC", "0"))
        watched_pid = int(os.environ.get("WATCHDOG_PID", str(os.getpid())))
    except ValueError:
        return None
    return microseconds / 1e6 if microseconds > 0 and watched_pid == os.getpid() else None


def schedule_as_batch() -> None:
    """Let the kernel treat this process and its later children as batch work: waking, they preempt nobody.

    A process that was started in another class than the usual one stays there: somebody chose it.
    """
    if os.sched_getscheduler(0) == os.SCHED_OTHER:
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


class Seat:
    """A processor of the calling thread's own while it sleeps, and until it gives it up. Owned by that thread.

    Where there are fewer processors than processes, the kernel wakes two sleepers on one when the other is taken for a
    moment, and leaves them there for half a millisecond although one of them is idle again. Batch work, moreover, waits
    for the end of whatever runs when it wakes: for milliseconds beside a busy program. A thread in its seat does not.
    """

    def __init__(self, number: int, processors: Collection[int]) -> None:
        self._all = frozenset(processors)
        self._own = frozenset({sorted(processors)[number % len(processors)]})
        self._is_taken = False
        self._is_batch = False

    def take(self) -> None:
        """Run and wake on the own processor alone, and at once if this is batch work."""
        os.sched_setaffinity(0, self._own)
        self._is_taken = True
        self._is_batch = os.sched_getscheduler(0) == os.SCHED_BATCH
        if self._is_batch:
            _schedule_thread(os.SCHED_OTHER, _SHORTEST_TURN_NS)

    def leave(self) -> None:
        """Run wherever there is room again, as before; costs nothing when no seat is taken."""
        if not self._is_taken:
            return
        self._is_taken = False
        os.sched_setaffinity(0, self._all)
        if self._is_batch:
            _schedule_thread(os.SCHED_BATCH, 0)


def _schedule_thread(policy: int, turn_ns: int) -> None:
    """Choose the calling thread's class and the length of its turns, 0 for the kernel's own; its nice value stays.

    The kernel (6.12 or newer; an older one knows one length for all) lets a waking thread with shorter turns go first.
    Nothing but promptness depends on it, so a refusal is passed over.
    """
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    attributes = _SCHED_ATTR.pack(_SCHED_ATTR.size, policy, 0, nice, 0, turn_ns, 0, 0)
    ctypes.CDLL(None).syscall(_SYS_SCHED_SETATTR, 0, attributes, 0)


def schedule_when_idle() -> None:
    """Let the kernel run the calling thread, and what it starts, only on processors that nobody else wants."""
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


def cpu_count_available(cgroup_root: Path = Path("/sys/fs/cgroup")) -> int:
    """Return how many CPUs this process may use: the smaller of its affinity and its cgroup v2 quota, rounded up."""
    return max(1, math.ceil(cpu_share_available(cgroup_root)))


def cpu_share_available(
    cgroup_root: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")
) -> float:
    """Return the CPU time a second that this process may use: its affinity, or the least cgroup v2 quota above it."""
    share = float(len(os.sched_getaffinity(0)))
    for directory in _cgroups(cgroup_root, membership):
        try:
            quota, period = (directory / "cpu.max").read_text().split()
        except (OSError, ValueError):
            continue
        if quota != "max":
            share = min(share, int(quota) / int(period))
    return share


def _cgroups(root: Path, membership: Path) -> list[Path]:
    """The directory of this process' cgroup and all above it, as far as they are visible."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        lines = []
    inside = next((line.removeprefix("0::").strip("/") for line in lines if line.startswith("0::")), "")
    path = root / inside
    return [path, *(above for above in path.parents if above.is_relative_to(root))] if inside else [root]
