"""Two ranks in two processes: what happens when one is slow, killed, replaced, gone, or interrupted by signals."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time

import pytest

from dsparkd.native import exchange

# Each rank says a function of (rank, sequence, field); the peer's words are checked in place. `pauses` are seconds.
TRADE = """
import random
dice = random.Random(rank)
sleeps = wakes = longest_ns = 0
for s in range(1, {count} + 1):
    if {pause} and dice.random() < {pause_share}:
        time.sleep(dice.random() * {pause})
    mine, theirs = ((s * 31 + 7 * r) % 1_000_003 for r in (rank, 1 - rank))
    told = [(*range(word, word + 7), word, word - 1, s, word, word, word, s & 3) for word in (mine, theirs)]
    heard = a.exchange(s % {channels}, told[0])
    assert heard == told[1], (s, heard)
    t = a.timing(s % {channels})
    sleeps += t.sleeps
    wakes += t.wakes
    longest_ns = max(longest_ns, t.after_last_ns)
    assert t.total_ns >= t.after_last_ns and t.total_ns - t.after_last_ns in (0, t.arrival_skew_ns)
result = [sleeps, wakes, longest_ns]
"""


def trade(ranks, count: int, *, pause: float = 0.0, pause_share: float = 0.0, channels: int = 1):
    code = TRADE.format(count=count, pause=pause, pause_share=pause_share, channels=channels)
    for each in ranks:
        each.begin(code)
    return [each.answer() for each in ranks]


def two_cores() -> list[int]:
    cores = sorted(os.sched_getaffinity(0))
    return [cores[0], cores[1 % len(cores)]]


@pytest.mark.parametrize("spin_s", [20e-6, 0.0])
def test_no_value_is_torn_old_or_early(start, spin_s: float) -> None:
    """X-15, X-32: words are functions of rank, sequence and place; also the identities of the times."""
    cores = two_cores()
    for sleeps, wakes, _ in trade([start(rank, cpu=cores[rank], spin_s=spin_s) for rank in (0, 1)], 30_000):
        assert (sleeps > 0 and wakes > 0) or spin_s > 0


def test_no_wake_is_lost_around_the_sleep_point(start) -> None:
    """X-17: spin 0, and delays about as long as falling asleep takes: a lost wake would end at the liveness check.

    Ten such in a row would be a second; counted are waits that outlast their ends, of which there are none.
    """
    results = trade([start(rank, spin_s=0.0) for rank in (0, 1)], 8_000, pause=30e-6, pause_share=0.3)
    for sleeps, _, longest_ns in results:
        assert sleeps > 100
        assert longest_ns < 90_000_000, "a rank slept on until the next liveness check"


def test_two_channels_count_for_themselves(start) -> None:
    """X-13, X-15: in one order on both ranks."""
    trade([start(rank) for rank in (0, 1)], 5_000, channels=2)


def test_a_shared_core_is_correct_without_spinning(start) -> None:
    """X-19: both ranks on one CPU."""
    core = two_cores()[0]
    for sleeps, _, _ in trade([start(rank, cpu=core, spin_s=0.0) for rank in (0, 1)], 10_000):
        assert sleeps > 0


def test_ranks_that_spin_make_hardly_a_system_call(start) -> None:
    """X-18: pinned to two cores, wakes and sleeps are the exception. The share is a bench figure; here: far below all.

    A machine that takes the cores away makes ranks sleep, so the best of three runs counts.
    """
    cores = two_cores()
    if cores[0] == cores[1]:
        pytest.skip("one CPU: two ranks that spin on it take turns, so sleeping is right there")
    ranks = [start(rank, cpu=cores[rank], spin_s=200e-6) for rank in (0, 1)]
    shares = []
    for _ in range(3):
        for each in ranks:
            each.begin(SPINNING)
        shares.append(max(each.answer() for each in ranks) / 20_000)
    assert min(shares) < 0.05


SPINNING = """
result = 0
for _ in range(20_000):
    a.exchange(0, words)
    result += a.timing(0).sleeps + a.timing(0).wakes
"""


def test_a_killed_peer_is_found_though_nobody_has_reaped_it(lab, region, start) -> None:
    """X-21, X-31: a zombie is no life; `kill(pid, 0)` would say that it is one."""
    own, peer = region.attach(0, timeout_s=30), start(1)
    peer.begin("a.exchange(0, words)")
    own.exchange(0, lab.WORDS)
    peer.answer()
    waiting = lab.Background(lambda: own.exchange(0, lab.WORDS))
    while not region.read(lab.waiting(0)):
        time.sleep(0.001)
    peer.process.kill()  # not waited for: it stays a zombie
    killed = time.monotonic()
    error = waiting.result()
    assert time.monotonic() - killed < 5
    with open(f"/proc/{peer.process.pid}/stat") as file:
        assert file.read().rpartition(")")[2].split()[0] == "Z"
    assert str(error) == f"dsx: rank 1 (pid {peer.process.pid}) ended before sequence 2"
    assert error.code == "PEER_DEAD"
    own.close()


def test_a_peer_that_dies_before_the_first_exchange_is_found(lab, region, start) -> None:
    """X-21: the first look opens the descriptor, and finds a zombie or nobody."""
    own, peer = region.attach(0, timeout_s=30), start(1)
    peer.process.kill()
    error = lab.Background(lambda: own.exchange(0, lab.WORDS)).result()
    assert error.code == "PEER_DEAD"
    own.close()


def test_what_a_peer_published_before_it_died_counts(lab, region, start) -> None:
    """X-21: the exchange is complete; the next one fails."""
    own, peer = region.attach(0), start(1)
    peer.begin("a.exchange(0, words)")
    while not region.read(lab.waiting(1)):
        time.sleep(0.001)
    peer.process.kill()
    peer.process.wait()
    assert own.exchange(0, lab.WORDS)
    error = lab.Background(lambda: own.exchange(0, lab.WORDS)).result()
    assert error.code == "PEER_DEAD"
    own.close()


def test_a_stopped_peer_is_waited_for(lab, region, start) -> None:
    """X-20, X-21: SIGSTOP is no death; the peer goes on where it was."""
    own, peer = region.attach(0), start(1)
    os.kill(peer.process.pid, signal.SIGSTOP)
    waiting = lab.Background(lambda: own.exchange(0, lab.WORDS))
    time.sleep(0.25)  # two liveness checks
    assert region.read(lab.waiting(0)) == 1
    peer.begin("a.exchange(0, words)")
    os.kill(peer.process.pid, signal.SIGCONT)
    peer.answer()
    assert not isinstance(waiting.result(), Exception)
    own.close()


def test_a_storm_of_signals_does_not_move_the_deadline(region, start) -> None:
    """X-20: hundreds of interruptions of a 200 ms wait; it takes 200 ms and not one interval more for each of them."""
    own = start(0, timeout_s=0.2)
    code, text, channel, sequence, seconds = own.run(
        """
import signal
hits = []
signal.signal(signal.SIGALRM, lambda *_: hits.append(1))
signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.0005)
began = time.monotonic()
try:
    a.exchange(0, words)
except ExchangeError as error:
    signal.setitimer(signal.ITIMER_REAL, 0)
    result = [error.code, str(error), error.channel, error.sequence, time.monotonic() - began]
"""
    )
    assert (code, channel, sequence) == ("TIMEOUT", 0, 1)
    assert text == "dsx: rank 1 did not reach sequence 1 on plan within 200 ms (it is at 0)"
    assert 0.2 <= seconds < 5


@pytest.mark.parametrize(
    ("act", "code", "text"),
    [
        ("a.close()", "PEER_LEFT", r"dsx: rank 1 \(pid \d+\) left before sequence 2"),
        ("a.exchange(1, words)", "CHANNEL", r"dsx: rank 1 is on channel tier, this rank on plan"),
        ("a.exchange(0, (*words[:9], 9, *words[10:]))", "TICK", r"dsx: ticks differ: 3, 9"),
    ],
)
def test_a_peers_fault_ends_a_sleep_in_the_other_process(lab, region, start, act: str, code: str, text: str) -> None:
    """X-22, X-23, X-26, X-13: through the bell, long before the time-out or the next liveness check could."""
    own, peer = region.attach(0, timeout_s=60), start(1, timeout_s=60)
    peer.begin("a.exchange(0, words)")
    own.exchange(0, lab.WORDS)
    peer.answer()
    waiting = lab.Background(lambda: own.exchange(0, lab.WORDS))
    while not region.read(lab.waiting(0)):
        time.sleep(0.001)
    peer.begin(act)
    error = waiting.result()
    if error.code == "PEER_ERROR":  # the peer saw the crossing first
        assert (code, str(error)) == ("CHANNEL", "dsx: rank 1 reported CHANNEL at sequence 1")
    else:
        assert error.code == code
        assert re.match(text, str(error))
    peer.answer()
    own.close()


def test_the_parent_ends_both_waits_in_other_processes(region, start) -> None:
    """X-24: whoever holds the descriptor can; spinner and sleeper alike; no signal handler of the ranks takes part."""
    ranks = [start(0, timeout_s=60, spin_s=0.0), start(1, timeout_s=60)]
    ranks[0].begin("a.exchange(0, words)")
    while not region.read(0x100 + 4):
        time.sleep(0.001)
    exchange.stop_region(region.fd)
    assert ranks[0].answer() == ["STOPPED", "dsx: stopped by the parent"]
    assert ranks[1].run("a.exchange(0, words)") == ["STOPPED", "dsx: stopped by the parent"]


def test_each_rank_may_close_twice_while_the_other_one_sleeps(lab, region, start) -> None:
    """X-33: the sleeper needs nothing of a rank that has left."""
    own, peer = region.attach(0), start(1)
    waiting = lab.Background(lambda: own.exchange(0, lab.WORDS))
    while not region.read(lab.waiting(0)):
        time.sleep(0.001)
    peer.run("a.close()\na.close()")
    assert waiting.result().code == "PEER_LEFT"
    own.close()
    own.close()


SECCOMP = """
import ctypes, errno, struct, sys
from pathlib import Path
from dsparkd import supervisor
from dsparkd.config import Config, EngineConfig, KVConfig
from dsparkd.errors import CapabilityError
libc = ctypes.CDLL(None, use_errno=True)
# BPF: load the call's number; memfd_create is refused, everything else allowed.
MEMFD_CREATE = {"x86_64": 319, "aarch64": 279}[__import__("platform").machine()]
refuse, allow = 0x00050000 | errno.EPERM, 0x7FFF0000
code = struct.pack("<" + "HBBI" * 4, 0x20, 0, 0, 0, 0x15, 0, 1, MEMFD_CREATE, 6, 0, 0, refuse, 6, 0, 0, allow)
memory = ctypes.create_string_buffer(code)
program = struct.pack("<H6xQ", 4, ctypes.addressof(memory))
assert libc.prctl(38, 1, 0, 0, 0) == 0 and libc.prctl(22, 2, program, 0, 0) == 0
"""
LIMIT = """
import resource
from dsparkd import supervisor
from dsparkd.config import Config, EngineConfig, KVConfig
from dsparkd.errors import CapabilityError
from dsparkd.native import exchange
exchange.region_bytes()  # loaded before nothing more can be opened
resource.setrlimit(resource.RLIMIT_{name}, ({limit}, {limit}))
"""
OPEN = """
try:
    supervisor.open_exchange(Config(engine=EngineConfig(checkpoint="/c"), kv=KVConfig(device_bytes=1)))
except CapabilityError as error:
    print(error.exit_code, error)
"""


@pytest.mark.parametrize(
    ("prepare", "reason"),
    [
        (SECCOMP, "Operation not permitted"),
        (LIMIT.format(name="NOFILE", limit=3), "Too many open files"),
        (LIMIT.format(name="NOFILE", limit=4), "Too many open files"),
        (LIMIT.format(name="FSIZE", limit=1000), "File too large"),
    ],
    ids=["seccomp", "no descriptor", "none for the events", "file size"],
)
def test_forbidden_shared_memory_is_a_start_failure_that_says_what_to_change(lab, prepare: str, reason: str) -> None:
    """Bad input: memfd forbidden, descriptors exhausted, file size limited: exit 78, and never gloo instead."""
    done = subprocess.run(
        [sys.executable, "-c", prepare + OPEN], cwd=lab.ROOT, capture_output=True, text=True, timeout=30
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f'78 exchange.kind = "native": missing memory that two processes share ({reason})')
    assert "LimitNOFILE" in done.stdout
    assert 'set exchange.kind = "gloo"' in done.stdout


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ("importlib.util.find_spec = lambda name: None", "missing the compiled library dsparkd.native._exchange"),
        ("_exchange = type('L', (), {'dsx_abi': lambda: 1})", "version 2 of dsparkd.native._exchange (found 1)"),
    ],
)
def test_a_library_that_is_absent_or_another_is_a_start_failure(lab, change: str, expected: str) -> None:
    """X-05: exit 78 with what to do; a native exchange never becomes gloo."""
    code = f"""
import importlib.util
from dsparkd.errors import CapabilityError
from dsparkd.native import exchange
from dsparkd.native import _exchange as built
_exchange = None
{change}
try:
    exchange.load_library() if _exchange is None else exchange.require_abi(exchange.Library(built.ffi, _exchange))
except CapabilityError as error:
    print(error.exit_code, error)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=lab.ROOT, capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("78 ")
    assert expected in done.stdout
    assert "reinstall dsparkd" in done.stdout
