"""Linux calls, each against the kernel itself."""

import os
import select
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from dsparkd import system


def run_python(code: str, *arguments: str, timeout_s: float = 30) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=timeout_s, check=False
    )


def test_a_child_ends_when_its_parent_is_killed() -> None:
    """L-39: children die with their parent, also when it is killed with -9 and cannot tell them."""
    read_end, write_end = os.pipe()
    code = f"""
import os, sys, time
from dsparkd import system
parent = os.getpid()
if os.fork() == 0:
    system.set_parent_death_signal(parent)
    os.write({write_end}, b"ready")
    time.sleep(60)
time.sleep(60)
"""
    process = subprocess.Popen([sys.executable, "-c", code], pass_fds=[write_end])
    os.close(write_end)
    assert os.read(read_end, 5) == b"ready"

    process.kill()
    process.wait()

    # The grandchild holds the pipe's last writing end: its end of file is the grandchild's death.
    assert select.select([read_end], [], [], 10)[0]
    assert os.read(read_end, 1) == b""
    os.close(read_end)


def test_a_parent_that_ended_before_the_call_is_noticed() -> None:
    """decisions 13: the signal is only armed from the call on, so the parent is looked at once more after it."""
    done = run_python(
        """
import os
from dsparkd import system
from dsparkd.errors import PeerError
try:
    system.set_parent_death_signal(os.getppid() + 1)
except PeerError as error:
    print(error)
"""
    )

    assert done.stdout.strip() == "the parent ended while this process started"


def test_close_other_fds_is_complete() -> None:
    """decisions 13: /proc/self/fd afterwards holds the standard three and the list, nothing else."""
    done = run_python(
        """
import os, socket
from dsparkd import system
files = [os.open("/dev/null", os.O_RDONLY) for _ in range(20)]
pair = socket.socketpair()
keep = {pair[0].fileno(), files[3]}
system.close_other_fds(keep)
print(sorted(system.open_fds() - keep), flush=True)
os._exit(0)
"""
    )

    assert done.stdout.strip() == "[0, 1, 2]"


def test_a_pidfd_is_readable_once_the_process_ended_and_the_code_is_told() -> None:
    """L-30: ends are seen through the pidfd, and exit codes and signals are told apart."""
    for argument, expected in (("exit(0)", 0), ("exit(3)", 3), ("import os; os.kill(os.getpid(), 9)", -9)):
        pid = os.posix_spawn(sys.executable, [sys.executable, "-c", argument], os.environ)
        pidfd = system.pidfd_open(pid)

        assert select.select([pidfd], [], [], 30)[0] == [pidfd]
        assert system.reap_nowait(pid) == expected
        os.close(pidfd)


def test_reap_nowait_tells_a_running_child_apart() -> None:
    """A wait that blocks would stop the loop (L-36)."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])

    assert system.reap_nowait(process.pid) is None

    process.send_signal(signal.SIGKILL)
    assert process.wait() == -9


def test_notify_sends_the_state_to_the_socket_in_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The service manager's protocol is one datagram a state; a path and an abstract name are both used."""
    for address in (str(tmp_path / "notify"), f"\0dsparkd-test-{os.getpid()}"):
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
            manager.bind(address)
            monkeypatch.setenv("NOTIFY_SOCKET", address.replace("\0", "@"))

            assert system.notify("READY=1\nSTATUS=here")

            assert manager.recv(100) == b"READY=1\nSTATUS=here"


def test_notify_without_a_manager_does_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outside systemd, and when the manager is gone, the server goes on."""
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    assert not system.notify("READY=1")

    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "nobody"))
    assert not system.notify("READY=1")


@pytest.mark.parametrize(
    ("cpu_max", "expected"),
    [("max 100000", 4), ("150000 100000", 2), ("10000 100000", 1), ("900000 100000", 4), (None, 4)],
)
def test_cpu_count_is_the_smaller_of_affinity_and_quota(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cpu_max: str | None, expected: int
) -> None:
    """U-01: min(affinity, cgroup quota rounded up), never below one."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {0, 1, 2, 3})
    if cpu_max is not None:
        (tmp_path / "cpu.max").write_text(cpu_max + "\n")

    assert system.cpu_count_available(tmp_path) == expected


def test_an_eventfd_counts_from_zero_and_never_blocks() -> None:
    """A kick that was already taken must not stop the reader."""
    descriptor = system.eventfd()
    with pytest.raises(BlockingIOError):
        os.eventfd_read(descriptor)
    os.eventfd_write(descriptor, 1)
    assert os.eventfd_read(descriptor) == 1
    os.close(descriptor)


def test_sealed_memory_keeps_its_size_and_starts_as_zeros() -> None:
    """X-02: a file that somebody could shrink would end who touches its mapping."""
    descriptor = system.sealed_memory("test", 1000)
    assert os.pread(descriptor, 2000, 0) == bytes(1000)
    assert not os.get_inheritable(descriptor)
    for size in (999, 1001):
        with pytest.raises(PermissionError):
            os.ftruncate(descriptor, size)
    os.close(descriptor)


def test_the_cpu_share_is_the_least_quota_on_the_way_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """X-19: a service's own cgroup lies below the root, and any one above it may be the narrow one."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {0, 1, 2, 3})
    membership = tmp_path / "membership"
    membership.write_text("1:name=systemd:/other\n0::/system.slice/dsparkd.service\n")
    root = tmp_path / "cgroup"
    own = root / "system.slice" / "dsparkd.service"
    own.mkdir(parents=True)
    assert system.cpu_share_available(root, membership) == 4
    (own / "cpu.max").write_text("300000 100000")
    assert system.cpu_share_available(root, membership) == 3
    (root / "system.slice" / "cpu.max").write_text("150000 100000")
    assert system.cpu_share_available(root, membership) == 1.5
    (root / "cpu.max").write_text("max 100000")
    assert system.cpu_share_available(root, membership) == 1.5
    membership.unlink()
    assert system.cpu_share_available(root, membership) == 4


@pytest.mark.parametrize(("before", "after"), [("SCHED_OTHER", "SCHED_BATCH"), ("SCHED_IDLE", "SCHED_IDLE")])
def test_batch_scheduling_leaves_a_class_that_somebody_chose(before: str, after: str) -> None:
    """Who starts a server in the idle class does not want it to disturb anybody."""
    code = f"""
import os
from dsparkd import system
os.sched_setscheduler(0, os.{before}, os.sched_param(0))
system.schedule_as_batch()
print(os.sched_getscheduler(0))
"""
    assert int(run_python(code).stdout) == getattr(os, after)


def test_a_seat_is_one_processor_until_it_is_left() -> None:
    """X-28: two sleepers that wake on one processor wait for each other, though another one is idle."""
    code = """
import os
from dsparkd.system import Seat
everywhere = os.sched_getaffinity(0)
for number in range(3):
    seat = Seat(number, everywhere)
    seat.leave()
    seat.take()
    assert os.sched_getaffinity(0) == {sorted(everywhere)[number % len(everywhere)]}
    seat.leave()
    assert os.sched_getaffinity(0) == everywhere
    os.sched_setaffinity(0, {min(everywhere)})  # as a manager may, meanwhile
    seat.leave()
    assert os.sched_getaffinity(0) == {min(everywhere)}
    os.sched_setaffinity(0, everywhere)
"""
    done = run_python(code)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("before", "seated"), [("SCHED_BATCH", "SCHED_OTHER"), ("SCHED_OTHER", "SCHED_OTHER"), ("SCHED_IDLE", "SCHED_IDLE")]
)
def test_batch_work_in_its_seat_wakes_like_other_work_with_the_shortest_turns(before: str, seated: str) -> None:
    """X-28: beside a busy program batch work waits for a turn to end; who chose another class keeps it."""
    code = f"""
import ctypes, os, struct
from dsparkd.system import Seat, _SYS_SCHED_SETATTR

def attributes():
    held = ctypes.create_string_buffer(48)
    number = _SYS_SCHED_SETATTR + 1  # sched_getattr is its neighbour
    assert ctypes.CDLL(None).syscall(number, 0, held, len(held), 0) == 0
    size, policy, flags, nice, priority, turn_ns, deadline, period = struct.unpack("=IIQiIQQQ", held.raw)
    return policy, nice, turn_ns

os.nice(7)
os.sched_setscheduler(0, os.{before}, os.sched_param(0))
at_first = attributes()
seat = Seat(0, os.sched_getaffinity(0))
for _ in range(2):
    seat.take()
    policy, nice, turn_ns = attributes()
    assert (policy, nice) == (os.{seated}, at_first[1])
    # Kernels before 6.12 tell no turns.
    assert "{before}" != "SCHED_BATCH" or turn_ns in (0, 100_000)
    seat.leave()
    assert attributes() == at_first
"""
    done = run_python(code)
    assert (done.returncode, done.stderr) == (0, "")
