"""The native exchange in one process: layout, refusals, and every code with its message. Two ranks are two threads."""

from __future__ import annotations

import errno
import os
import resource
import socket
import struct
import subprocess
import sys
import time

import pytest

from dsparkd import system
from dsparkd.config import Config, EngineConfig, KVConfig
from dsparkd.errors import CapabilityError, DsparkdError, ExchangeError, ExchangeStopped, InvariantError
from dsparkd.native import exchange
from dsparkd.native.exchange import Attachment, Code, Words

# Contracts section 4.1, written down a second time: offset and bytes.
LAYOUT = {
    "header": (0x000, 56),
    "header.magic": (0x000, 8),
    "header.abi": (0x008, 4),
    "header.layout": (0x00C, 4),
    "header.num_ranks": (0x010, 4),
    "header.num_channels": (0x014, 4),
    "header.num_slots": (0x018, 4),
    "header.num_fields": (0x01C, 4),
    "header.region_bytes": (0x020, 4),
    "header.line_bytes": (0x024, 4),
    "header.session": (0x028, 8),
    "header.config_digest": (0x030, 8),
    "shared": (0x040, 24),
    "shared.error": (0x040, 8),  # error u32, error_rank u32
    "shared.error_seq": (0x048, 8),
    "shared.stop": (0x050, 4),
    "unused": (0x080, 128),
    "rank[0]": (0x100, 640),
    "rank[1]": (0x380, 640),
    "rank[0].wait": (0x100, 16),
    "rank[0].wait.bell": (0x100, 4),
    "rank[0].wait.waiting": (0x104, 4),
    "rank[0].wait.parked": (0x108, 4),
    "rank[0].wait.kick": (0x10C, 4),
    "rank[0].owner": (0x140, 32),
    "rank[0].owner.state": (0x140, 4),
    "rank[0].owner.pid": (0x144, 4),
    "rank[0].owner.start_ticks": (0x148, 8),
    "rank[0].owner.attach_ns": (0x150, 8),
    "rank[0].owner.attempts": (0x158, 4),
    "rank[0].channel[0]": (0x180, 256),
    "rank[0].channel[1]": (0x280, 256),
    "rank[0].channel[0].slot[0].seq": (0x180, 8),
    "rank[0].channel[0].slot[0].field": (0x188, 56),
    "rank[0].channel[0].slot[1].seq": (0x1C0, 8),
    "rank[0].channel[0].side[0].arrival_ns": (0x200, 8),
    "rank[0].channel[0].side[0].intent": (0x208, 4),
    "rank[0].channel[0].side[0].channel_tag": (0x20C, 4),
    "rank[0].channel[0].side[0].extra": (0x210, 48),
    "rank[0].channel[0].side[1].arrival_ns": (0x240, 8),
}
STATE, PID, TICKS, ATTEMPTS = 0x40, 0x44, 0x48, 0x58  # in a rank's area


def meet(lab, both, channel=0, words=None):
    """One exchange of both ranks: their results or exceptions, in rank order."""
    words = words or (lab.WORDS, lab.WORDS)
    other = lab.Background(lambda: both[1].exchange(channel, words[1]))
    own = lab.Background(lambda: both[0].exchange(channel, words[0])).result()
    return own, other.result()


def wait_until(condition) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "did not happen"
        time.sleep(0.0002)


def failed(result: object, code: str, text: str) -> ExchangeError:
    assert isinstance(result, ExchangeError), result
    assert result.code == code
    assert str(result).startswith(text), str(result)
    return result


def caught(call, *arguments) -> DsparkdError:
    """What a call raises."""
    with pytest.raises(DsparkdError) as info:
        call(*arguments)
    return info.value


def test_the_layout_is_the_described_one() -> None:
    """X-01: offsets, sizes and the size of the whole; slots and side lines keep to pairs of lines of their own rank."""
    library = exchange.load_library()
    count = library.ffi.new("size_t *")
    places = library.lib.dsx_layout(count)
    found = {
        library.ffi.string(places[index].name).decode(): (places[index].offset, places[index].bytes)
        for index in range(count[0])
    }
    assert found == LAYOUT
    assert exchange.region_bytes() == 1536
    assert not library.lib.dsx_layout(library.ffi.NULL)
    for name in ("rank[0]", "rank[1]"):
        assert found[name][0] % 128 == found[name][1] % 128 == 0


def test_the_header_is_written_once(lab, region) -> None:
    """X-30: a fresh region has magic, counts, session and digest; a second dsx_init would hide a used one."""
    assert bytes(region.bytes[:8]) == b"dsparkX2"
    assert struct.unpack_from("<8I2Q", region.bytes, 8) == (2, 1, 2, 2, 2, 7, 1536, 64, lab.SESSION, lab.DIGEST)
    with pytest.raises(CapabilityError, match="dsx: region has magic 0x32586b7261707364, expected 0x0"):
        exchange.init_region(region.fd, session=1, digest=1)


@pytest.mark.parametrize(
    ("name", "kind"),
    [(name, "Q" if size == 8 else "I") for name, (_, size) in LAYOUT.items() if name.startswith("header.")],
)
def test_a_region_of_another_build_session_or_configuration_is_refused(region, name: str, kind: str) -> None:
    """X-02, X-31: one changed word of the header each; the message has found and expected; nothing is written."""
    offset = LAYOUT[name][0]
    value = region.read(offset, kind) + 1
    region.write(offset, value, kind)
    before = bytes(region.bytes)

    with pytest.raises(CapabilityError) as caught:
        region.attach(0)

    field = name.removeprefix("header.")
    if field == "config_digest":
        assert "dsx: ranks were started with different configurations" in str(caught.value)
    else:
        assert f"dsx: region has {field} {value:#x}, expected {value - 1:#x}" in str(caught.value)
    assert "start the server anew" in str(caught.value)
    assert bytes(region.bytes) == before


def test_a_foreign_descriptor_is_refused(region, tmp_path) -> None:
    """X-02: sockets, closed numbers, files of another size, unsealed memory and files that others may write."""
    pair = socket.socketpair()
    with pytest.raises(CapabilityError, match="dsx: region has file_type"):
        region.attach(0, fd=pair[0].fileno())
    for end in pair:
        end.close()
    with pytest.raises(CapabilityError, match="dsx: invalid argument fd"):
        region.attach(0, fd=987)
    short = system.sealed_memory("short", 1535)
    with pytest.raises(CapabilityError, match="dsx: region has file_bytes 0x5ff, expected 0x600"):
        region.attach(0, fd=short)
    os.close(short)
    loose = os.memfd_create("loose", os.MFD_CLOEXEC)
    os.ftruncate(loose, 1536)
    exchange.init_region(loose, session=1, digest=1)
    with pytest.raises(CapabilityError, match="dsx: region has seals 0x1, expected 0x7"):
        region.attach(0, fd=loose)
    os.close(loose)
    (tmp_path / "open").write_bytes(bytes(1536))
    (tmp_path / "open").chmod(0o666)
    with (tmp_path / "open").open("r+b") as file, pytest.raises(CapabilityError, match="file_mode 0x1b6"):
        region.attach(0, fd=file.fileno())


def test_a_named_object_is_attached_by_the_same_call(lab) -> None:
    """Contracts 4.1: for tools, a POSIX object of mode 0600, made exclusively and unlinked once both are attached."""
    path = f"/dev/shm/dsparkd-test-{os.getpid()}"
    fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        os.ftruncate(fd, exchange.region_bytes())
        exchange.init_region(fd, session=lab.SESSION, digest=lab.DIGEST)
        options = {"session": lab.SESSION, "digest": lab.DIGEST, "timeout_s": 10.0, "spin_s": 0.0}
        both = [Attachment.open(fd, rank, **options) for rank in (0, 1)]
    finally:
        os.unlink(path)
        os.close(fd)
    assert meet(lab, both) == (lab.WORDS, lab.WORDS)
    for each in both:
        each.close()


@pytest.mark.parametrize("rank", [-1, 2])
def test_only_two_ranks_exist(region, rank: int) -> None:
    """X-03: nobody else may attach."""
    with pytest.raises(CapabilityError, match="dsx: invalid argument rank"):
        region.attach(rank)


def test_a_rank_is_attached_once(lab, region) -> None:
    """X-03, X-31: the owner's pid is named; pid, start ticks and attempts are on record."""
    own = region.attach(0)
    with pytest.raises(CapabilityError, match=f"dsx: rank 0 is already attached by pid {os.getpid()}"):
        region.attach(0)
    area = lab.rank(0)
    assert (region.read(area + STATE), region.read(area + PID), region.read(area + ATTEMPTS)) == (1, os.getpid(), 2)
    with open("/proc/self/stat") as file:
        assert region.read(area + TICKS, "Q") == int(file.read().rpartition(")")[2].split()[19])
    own.close()


def test_a_region_is_never_used_twice(region) -> None:
    """X-03: after any rank has left, neither rank's place can be taken again."""
    region.attach(0).close()
    with pytest.raises(CapabilityError, match=r"dsx: rank 0 is already attached by pid .*, which left"):
        region.attach(0)
    with pytest.raises(CapabilityError, match=r"dsx: rank 0 .* left before sequence 1"):
        region.attach(1)


@pytest.mark.parametrize(("timeout_s", "spin_s", "name"), [(0.0, 0.0, "timeout_ns"), (1.0, 1.1, "spin_ns")])
def test_impossible_times_are_refused(region, timeout_s: float, spin_s: float, name: str) -> None:
    """X-30: a wait without an end, or a spin beyond it."""
    with pytest.raises(CapabilityError, match=f"dsx: invalid argument {name}"):
        region.attach(0, timeout_s=timeout_s, spin_s=spin_s)


def test_each_rank_gets_the_words_of_the_other_one(lab, both) -> None:
    """X-15: fields, extra words and intent, whatever the own rank is; channels count for themselves."""
    low, high = -(1 << 63), (1 << 63) - 1
    told = (low, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 1), (12, 13, 14, 15, 16, 17, 18, 19, 20, 8, 21, high, low, 2)
    for number in (1, 2, 3):
        assert meet(lab, both, words=told) == told[::-1]
        assert [each.timing(0).sequence for each in both] == [number, number]
    assert meet(lab, both, channel=1) == (lab.WORDS, lab.WORDS)
    assert [(each.sequence(0), each.sequence(1)) for each in both] == [(3, 1), (3, 1)]


def test_no_pointer_may_be_null(lab, both) -> None:
    """X-30, X-31: each is named, and the exchange that was refused took no number."""
    ffi, lib = both[0]._library
    assert lib.dsx_exchange(both[0]._handle, 0, ffi.NULL) == Code.ARG
    assert both[0]._library.message(both[0]._handle) == "dsx: invalid argument own"
    assert meet(lab, both) == (lab.WORDS, lab.WORDS)
    assert not lib.dsx_outcome_of(ffi.NULL)


def test_other_arguments_are_checked(both) -> None:
    """X-30: channels, intents, handles and message buffers; a text is cut to its buffer."""
    ffi, lib = exchange.load_library()
    null, text = ffi.NULL, ffi.new("char[]", 8)
    for channel in (-1, 2):
        assert lib.dsx_exchange(both[0]._handle, channel, bytes(112)) == Code.ARG
        assert both[0]._library.message(both[0]._handle) == "dsx: invalid argument channel"
    for intent in (4, -1):
        failed(caught(both[0].exchange, 0, (*range(13), intent)), "ARG", "dsx: invalid argument intent")
    assert lib.dsx_exchange(null, 0, null) == Code.ARG
    assert lib.dsx_attach(0, 0, 0, 0, 1, 1, null) == Code.ARG
    for call in (lib.dsx_park, lib.dsx_kick, lib.dsx_detach):
        assert call(null) == Code.ARG
    assert lib.dsx_set_timeout(null, 1) == Code.ARG
    assert lib.dsx_set_timeout(both[0]._handle, 0) == Code.ARG
    assert lib.dsx_take_kick(both[0]._handle, null) == Code.ARG
    assert lib.dsx_message(null, null, 8) == lib.dsx_message(null, text, 0) == Code.ARG
    assert lib.dsx_message(both[0]._handle, text, 8) == Code.OK
    assert ffi.string(text) == b"dsx: in"


def test_a_message_is_that_of_its_handle(both) -> None:
    """X-30: another handle's failure is not this one's, and no failure has no text."""
    library = both[0]._library
    with pytest.raises(ExchangeError):
        both[0].exchange(0, (*range(13), 4))
    assert library.message(both[0]._handle) == "dsx: invalid argument intent"
    assert library.message(both[1]._handle) == ""


def test_a_detached_handle_is_refused_and_detaching_twice_is_nothing(region) -> None:
    """X-30, X-33: the handle's page outlives the region's mapping, so a late call reads no freed memory."""
    own = region.attach(0)
    own.close()
    own.close()
    for call in (own.park, own.kick, own.take_kick, lambda: own.exchange(0, bytes(14))):
        failed(caught(call), "ARG", "dsx: invalid argument handle")


def test_two_threads_in_one_handle_are_told_apart(lab, region, both) -> None:
    """X-04, X-31: the second one gets BUSY at once, and the first one's exchange goes on unharmed."""
    first = lab.Background(lambda: both[0].exchange(0, lab.WORDS))
    wait_until(lambda: region.read(lab.waiting(0)))
    failed(caught(both[0].exchange, 0, lab.WORDS), "BUSY", "dsx: two threads in one handle")
    failed(caught(both[0].close), "BUSY", "dsx: two threads in one handle")
    both[1].exchange(0, lab.WORDS)
    assert first.result() == lab.WORDS


def test_a_fork_leaves_the_handle_to_the_parent(lab) -> None:
    """X-04, X-31: the child is refused by a word that the fork wiped; the parent's exchange goes on unharmed."""
    code = """
import os, sys
from dsparkd import system
from dsparkd.errors import ExchangeError
from dsparkd.native import exchange
fd = system.sealed_memory("x", exchange.region_bytes())
exchange.init_region(fd, session=1, digest=1)
options = {"session": 1, "digest": 1, "timeout_s": 10.0, "spin_s": 0.0}
own = exchange.Attachment.open(fd, 0, **options)
child = os.fork()
if child == 0:
    def region():  # but for the flag that the waiting parent raises and lowers
        return os.pread(fd, 0x104, 0) + os.pread(fd, 1536, 0x108)
    while os.pread(fd, 4, 0x104) == bytes(4):
        pass
    before = region()
    for call in (lambda: own.exchange(0, bytes(14)), own.park, own.close):
        try:
            call()
        except ExchangeError as error:
            print(error.code, error, region() == before, flush=True)
    peer = exchange.Attachment.open(fd, 1, **options)
    peer.exchange(0, bytes(14))
    os._exit(0)
own.exchange(0, bytes(14))
print(os.waitpid(child, 0)[1])
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=lab.ROOT, capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == ["FORKED dsx: handle crossed a fork True"] * 3 + ["0"]


# Every failure of a pair. The peer sleeps while rank 0 fails, and must hear of it.


def break_own_slot(lab, region) -> None:
    region.write(lab.slot(0, 0, 1), 7, "Q")


def break_peers_slot(lab, region) -> None:
    region.write(lab.slot(1, 0, 1), 9, "Q")


def break_peers_tag(lab, region) -> None:
    region.write(lab.side(1, 0, 1) + 12, 99)


FAULTS = [
    ("SEQ_LOCAL", break_own_slot, "dsx: rank 0 expected sequence 0 on plan, found 7"),
    ("SEQ_PEER", break_peers_slot, "dsx: rank 1 expected sequence 1 on plan, found 9"),
    ("CHANNEL", break_peers_tag, "dsx: rank 1 is on channel 0x63, this rank on plan"),
]


@pytest.mark.parametrize(("code", "fault", "text"), FAULTS)
def test_the_first_cause_reaches_a_sleeping_peer_and_stays(lab, region, both, code, fault, text) -> None:
    """X-23, X-31: error, rank and sequence are in the region; every later call of either rank names the first cause.

    The peer sleeps in an exchange that can only end by its time-out, or by the failure.
    """
    sleeper = lab.Background(lambda: both[1].exchange(0, lab.WORDS))
    wait_until(lambda: region.read(lab.waiting(1)))
    fault(lab, region)
    bells = [region.read(lab.rank(rank)) for rank in (0, 1)]

    error = failed(caught(both[0].exchange, 0, lab.WORDS), code, text)

    assert (error.channel, error.sequence) == (0, 1)
    # Counted, not timed: a sleeper that nobody rings for would also hear of it at its next liveness check.
    assert all(region.read(lab.rank(rank)) > bells[rank] for rank in (0, 1))
    cause = f"dsx: rank 0 reported {code} at sequence 1"
    told = sleeper.result()
    if code == "SEQ_LOCAL":
        failed(told, "PEER_ERROR", cause)
    else:  # its own exchange was whole: rank 0 had published
        assert told == lab.WORDS
    for each in both:
        for channel in (0, 1):
            failed(caught(each.exchange, channel, lab.WORDS), "PEER_ERROR", cause)
    words = [region.read(offset) for offset in (lab.ERROR, lab.ERROR_RANK)]
    assert words == [Code[code], 0]
    assert region.read(lab.ERROR_SEQ, "Q") == 1


def test_a_number_that_was_skipped_is_found(lab, region, both) -> None:
    """X-16: the slot of s holds s - 2 or s; anything else is an exchange that this rank did not make."""
    for _ in range(3):
        meet(lab, both)
    region.write(lab.slot(1, 0, 0), 6, "Q")  # this rank is at 4
    failed(
        caught(both[0].exchange, 0, lab.WORDS),
        "SEQ_PEER",
        "dsx: rank 1 expected sequence 4 on plan, found 6",
    )


def test_crossed_channels_fail_at_once_on_both_sides(lab, both) -> None:
    """X-13, X-31: neither waits for its time-out; whoever sees it first names it, the other one too or by its cause."""
    first = lab.Background(lambda: both[0].exchange(0, lab.WORDS))
    second = lab.Background(lambda: both[1].exchange(1, lab.WORDS))
    results = [first.result(), second.result()]
    texts = ["dsx: rank 1 is on channel tier, this rank on plan", "dsx: rank 0 is on channel plan, this rank on tier"]
    codes = []
    for rank, result in enumerate(results):
        assert isinstance(result, ExchangeError)
        codes.append(result.code)
        assert str(result) in (texts[rank], f"dsx: rank {1 - rank} reported CHANNEL at sequence 1")
    assert "CHANNEL" in codes


def test_the_next_channel_does_not_hide_the_last_one(lab, both) -> None:
    """X-13: a peer that has gone on to the other channel has published on this one before, and that counts."""

    def run(rank: int) -> list[Words]:
        return [both[rank].exchange(number % 2, lab.WORDS) for number in range(3_000)]

    other = lab.Background(lambda: run(1))
    assert run(0) == other.result()


def test_different_ticks_fail_both_ranks(lab, both) -> None:
    """X-26, X-31: one rank missed a tick, so nothing that they would do together fits."""
    words = [(*(0,) * 9, tick, 0, 0, 0, 0) for tick in (4, 5)]
    for result in meet(lab, both, words=words):
        failed(result, "TICK", "dsx: ticks differ: 4, 5")


def test_ticks_are_not_compared_on_the_tier_channel(lab, both) -> None:
    """X-26: its extra words are free."""
    words = [(*(0,) * 9, tick, 0, 0, 0, 0) for tick in (4, 5)]
    assert meet(lab, both, channel=1, words=words) == (words[1], words[0])


def test_a_peer_that_does_not_come_is_a_timeout(lab, region) -> None:
    """X-20, X-22, X-31: "not attached yet" keeps waiting; the message names rank, sequence and where the peer is."""
    own = region.attach(0, timeout_s=0.05)
    began = time.monotonic()
    error = failed(
        caught(own.exchange, 0, lab.WORDS),
        "TIMEOUT",
        "dsx: rank 1 did not reach sequence 1 on plan within 50 ms (it is at 0)",
    )
    assert time.monotonic() - began >= 0.05
    assert (error.code, error.channel, error.sequence) == ("TIMEOUT", 0, 1)
    own.close()


def test_the_timeout_may_change_between_exchanges(lab, both) -> None:
    """X-20: a start may take longer than a tick."""
    meet(lab, both)
    both[0].set_timeout(0.03)
    failed(
        caught(both[0].exchange, 0, lab.WORDS),
        "TIMEOUT",
        "dsx: rank 1 did not reach sequence 2 on plan within 30 ms (it is at 1)",
    )


def test_a_stop_ends_sleepers_and_later_calls(lab, region, both) -> None:
    """X-24, X-31: on both ranks, for good; it is not a failure of the pair."""
    waiting = [lab.Background(lambda: both[0].exchange(0, lab.WORDS))]
    wait_until(lambda: region.read(lab.waiting(0)))
    bells = [region.read(lab.rank(rank)) for rank in (0, 1)]
    exchange.stop_region(region.fd)
    assert [region.read(lab.rank(rank)) for rank in (0, 1)] == [bell + 1 for bell in bells]
    results = [waiting[0].result(), caught(both[1].exchange, 0, lab.WORDS)]
    for result in results:
        assert isinstance(result, ExchangeStopped)
        assert str(result) == "dsx: stopped by the parent"
    assert region.read(lab.ERROR) == 0


def test_a_stop_ends_a_spinner(lab, region) -> None:
    """X-24: who spins looks at more than the slot every 64 turns."""
    own = region.attach(0, spin_s=9.0)
    spinner = lab.Background(lambda: own.exchange(0, lab.WORDS))
    wait_until(lambda: region.read(lab.slot(0, 0, 1), "Q") == 1)
    assert region.read(lab.waiting(0)) == 0
    exchange.stop_region(region.fd)
    assert isinstance(spinner.result(), ExchangeStopped)
    own.close()


def test_only_a_region_can_be_stopped(region) -> None:
    """X-30: a foreign descriptor is refused before it is written to."""
    other = system.sealed_memory("other", exchange.region_bytes())
    with pytest.raises(InvariantError, match="dsx: region has magic 0x0"):
        exchange.stop_region(other)
    assert os.pread(other, 1536, 0) == bytes(1536)
    os.close(other)


def test_an_exchange_that_is_complete_is_not_stopped(lab, region, both) -> None:
    """X-24: the peer may have gone on with it, so its words count."""
    ahead = lab.Background(lambda: both[1].exchange(0, lab.WORDS))
    wait_until(lambda: region.read(lab.waiting(1)))
    assert both[0].exchange(0, lab.WORDS)
    exchange.stop_region(region.fd)
    assert not isinstance(ahead.result(), Exception)


def test_a_peer_that_leaves_ends_the_wait(lab, region, both) -> None:
    """X-22, X-33, X-31: in order, and at once, not at the time-out."""
    waiting = lab.Background(lambda: both[0].exchange(0, lab.WORDS))
    wait_until(lambda: region.read(lab.waiting(0)))
    bell = region.read(lab.rank(0))
    both[1].close()
    assert region.read(lab.rank(0)) > bell, "counted, not timed"
    failed(waiting.result(), "PEER_LEFT", f"dsx: rank 1 (pid {os.getpid()}) left before sequence 1")
    assert region.read(lab.rank(1) + STATE) == 3
    assert region.read(lab.rank(0) + STATE) == 4


def test_what_a_peer_published_before_it_left_counts(lab, region, both) -> None:
    """X-22: the exchange is complete."""
    leaving = lab.Background(lambda: (both[1].exchange(0, lab.WORDS), both[1].close()))
    wait_until(lambda: region.read(lab.waiting(1)))
    assert both[0].exchange(0, lab.WORDS)
    leaving.result()
    failed(caught(both[0].exchange, 0, lab.WORDS), "PEER_LEFT", "dsx: rank 1")


def test_forged_start_ticks_are_a_replaced_peer(lab, region) -> None:
    """X-21, X-31: the pid runs, but it is another process than the one that attached."""
    own, peer = region.attach(0), region.attach(1)
    region.write(lab.rank(1) + TICKS, region.read(lab.rank(1) + TICKS, "Q") + 1, "Q")
    failed(
        caught(own.exchange, 0, lab.WORDS),
        "PEER_REPLACED",
        f"dsx: rank 1 (pid {os.getpid()}) was replaced before sequence 1",
    )
    for each in (own, peer):
        each.close()


def test_a_pid_that_nobody_has_is_an_ended_peer(lab, region, both) -> None:
    """X-21: reaped before the first look."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    region.write(lab.rank(1) + PID, process.pid)
    failed(
        caught(both[0].exchange, 0, lab.WORDS),
        "PEER_DEAD",
        f"dsx: rank 1 (pid {process.pid}) ended before sequence 1",
    )


# System calls that fail


def test_a_kernel_without_futexes_or_clock_is_named(lab, region, faults) -> None:
    """X-31: FUTEX and CLOCK."""
    own, peer = (region.attach(rank, library=faults) for rank in (0, 1))
    faults.lib.fault_futex_wait = errno.EPERM
    failed(
        caught(own.exchange, 0, lab.WORDS),
        "FUTEX",
        f"dsx: futex wait failed ({errno.EPERM})",
    )
    failed(
        caught(peer.exchange, 0, lab.WORDS),
        "PEER_ERROR",
        "dsx: rank 0 reported FUTEX at sequence 1",
    )
    for each in (own, peer):
        each.close()


@pytest.mark.parametrize("number", [errno.EAGAIN, errno.EINTR])
def test_a_wait_that_did_not_happen_is_tried_again(lab, region, faults, number: int) -> None:
    """X-20: a rung bell and a signal only mean to look again, and do not move the deadline."""
    own = region.attach(0, library=faults, timeout_s=0.05)
    faults.lib.fault_futex_wait = number
    failed(caught(own.exchange, 0, lab.WORDS), "TIMEOUT", "dsx: rank 1")
    own.close()


def test_a_broken_clock_is_named(lab, region, faults) -> None:
    """X-31, X-23: CLOCK, in an exchange and at the attach; a peer that sleeps hears of it."""
    own, peer = region.attach(0, library=faults), region.attach(1)
    sleeper = lab.Background(lambda: peer.exchange(0, lab.WORDS))
    wait_until(lambda: region.read(lab.waiting(1)))
    faults.lib.fault_clock = errno.EINVAL
    failed(caught(own.exchange, 0, lab.WORDS), "CLOCK", "dsx: clock failed")
    failed(sleeper.result(), "PEER_ERROR", "dsx: rank 0 reported CLOCK at sequence 1")
    for each in (own, peer):
        each.close()
    fresh = lab.Region()
    with pytest.raises(CapabilityError, match="dsx: clock failed"):
        fresh.attach(0, library=faults)
    fresh.close()


def test_a_kernel_without_pidfds_is_no_start(lab, region, faults) -> None:
    """X-21, X-31: LIVENESS when attaching, with what to change, and before anything is written."""
    faults.lib.fault_pidfd = errno.ENOSYS
    with pytest.raises(CapabilityError, match=r"dsx: no pidfd \(Function not implemented\).*Linux 5\.4.*\"gloo\""):
        region.attach(0, library=faults)
    assert region.read(lab.rank(0) + STATE) == 0


def test_a_pidfd_refused_later_is_named(lab, region, faults) -> None:
    """X-31: LIVENESS in an exchange: the descriptors ran out since the start."""
    own, peer = region.attach(0, library=faults), region.attach(1)
    faults.lib.fault_pidfd = errno.EMFILE
    failed(
        caught(own.exchange, 0, lab.WORDS),
        "LIVENESS",
        "dsx: no pidfd (Too many open files)",
    )
    for each in (own, peer):
        each.close()


def test_a_peer_that_publishes_and_dies_between_two_looks_has_published(lab, region, faults) -> None:
    """X-21: its slot is looked at once more after its death was seen."""
    own, peer = region.attach(0, library=faults, spin_s=0.0), region.attach(1)

    @faults.ffi.callback("void()")
    def publish_and_die() -> None:
        region.write(lab.side(1, 0, 1) + 12, 0x64737830)  # the channel's tag
        region.write(lab.side(1, 0, 1) + 16 + 2 * 8, lab.WORDS[9], "q")  # the same tick
        region.write(lab.slot(1, 0, 1), 1, "Q")

    faults.lib.fault_before_pidfd = publish_and_die
    faults.lib.fault_pidfd = errno.ESRCH
    assert own.exchange(0, lab.WORDS) == (*(0,) * 9, lab.WORDS[9], *(0,) * 4)
    for each in (own, peer):
        each.close()


def test_a_second_failure_does_not_hide_the_first(lab, region, faults) -> None:
    """X-23: two ranks fail at about the same time; what stays is the cause that came first."""
    own = region.attach(0, library=faults)

    @faults.ffi.callback("void()")
    def peer_fails() -> None:
        region.write(lab.ERROR, Code.TICK)
        region.write(lab.ERROR_RANK, 1)
        region.write(lab.ERROR_SEQ, 9, "Q")

    faults.lib.fault_before_clock = peer_fails
    faults.lib.fault_clock = errno.EINVAL
    failed(caught(own.exchange, 0, lab.WORDS), "CLOCK", "dsx: clock failed")
    failed(caught(own.exchange, 0, lab.WORDS), "PEER_ERROR", "dsx: rank 1 reported TICK at sequence 9")
    own.close()


def test_exhausted_descriptors_are_a_start_failure_that_says_what_to_change(region) -> None:
    """Bad input: RLIMIT_NOFILE reached when a rank attaches."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) - 1, hard))
    try:
        held = []
        while True:
            try:
                held.append(os.dup(0))
            except OSError:
                break
        with pytest.raises(CapabilityError, match=r"Too many open files.*LimitNOFILE"):
            region.attach(0)
    finally:
        for number in held:
            os.close(number)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


# Times, kicks, digest


def test_the_times_add_up(lab, both) -> None:
    """X-32: total >= after_last, and their difference is the wait for a peer that came later."""
    for number in range(200):
        if number % 50 == 0:
            other = lab.Background(lambda: both[1].exchange(0, lab.WORDS))
            time.sleep(0.002)
            own = lab.Background(lambda: both[0].exchange(0, lab.WORDS))
            own.result(), other.result()
            late, early = both[0].timing(0), both[1].timing(0)
            assert early.arrival_skew_ns == late.arrival_skew_ns >= 1_000_000
        else:
            meet(lab, both)
        for each in both:
            times = each.timing(0)
            waited = times.total_ns - times.after_last_ns
            assert times.total_ns >= times.peer_wait_ns
            assert waited in (0, times.arrival_skew_ns)
        assert {each.timing(0).total_ns - each.timing(0).after_last_ns for each in both} == {
            0,
            both[0].timing(0).arrival_skew_ns,
        }


def test_who_finds_the_peer_there_makes_no_system_call(lab, region, faults) -> None:
    """X-18: a syscall count of one exchange shows none, on the rank that comes second and finds nobody asleep."""
    own, peer = region.attach(0, library=faults, spin_s=5.0), region.attach(1, library=faults, spin_s=5.0)
    spinner = lab.Background(lambda: peer.exchange(0, lab.WORDS))
    wait_until(lambda: region.read(lab.slot(1, 0, 1), "Q") == 1)
    before = faults.lib.fault_num_syscalls
    own.exchange(0, lab.WORDS)
    spinner.result()
    assert faults.lib.fault_num_syscalls == before
    for each in (own, peer):
        assert (each.timing(0).sleeps, each.timing(0).wakes) == (0, 0)
        each.close()


def test_a_kick_ends_only_its_own_park(lab, region, both) -> None:
    """X-28: the word names the exchange that agreed on the park; when both kick, the next park finds it too old."""
    meet(lab, both)
    both[1].park()
    assert region.read(lab.rank(1) + 8) == 1
    assert not both[1].take_kick()
    both[0].kick()
    both[1].kick()
    assert region.read(lab.rank(1) + 8) == 0
    meet(lab, both)
    assert [each.take_kick() for each in both] == [False, False]
    both[1].park()
    both[0].kick()
    assert both[1].take_kick()
    assert region.read(lab.rank(1) + 8) == 0


def test_the_digest_is_that_of_configuration_and_checkpoint(tmp_path) -> None:
    """X-02: any key, and the checkpoint's geometry behind one path."""
    (tmp_path / "config.json").write_text('{"hidden_size": 64}')
    config = Config(engine=EngineConfig(checkpoint=str(tmp_path)), kv=KVConfig(device_bytes=1))
    other = Config(engine=EngineConfig(checkpoint=str(tmp_path)), kv=KVConfig(device_bytes=2))
    digest = exchange.config_digest(config)
    assert 0 <= digest < 1 << 64
    assert digest == exchange.config_digest(config) != exchange.config_digest(other)
    (tmp_path / "config.json").write_text('{"hidden_size": 128}')
    assert digest != exchange.config_digest(config)


def test_codes_have_the_headers_numbers() -> None:
    """X-31: the enumeration is written down twice."""
    ffi, _ = exchange.load_library()
    names = [name.removeprefix("DSX_") for _, name in sorted(ffi.typeof("dsx_code").elements.items())]
    assert names == [code.name for code in sorted(Code)]
