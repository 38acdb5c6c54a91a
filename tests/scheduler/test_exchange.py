"""The meeting of two ranks, and kicks that end exactly the park they were meant for; over both kinds of exchange."""

from __future__ import annotations

import dataclasses
import random
import resource
import select
import threading
import time

import pytest

from dsparkd.errors import ExchangeStopped, InvariantError, PeerError
from dsparkd.messages import Shutdown
from dsparkd.native.exchange import Words
from dsparkd.scheduler.agreement import Channel
from dsparkd.scheduler.exchange import _pattern


def words(seed: int) -> Words:
    extra = [seed * 100 + index for index in range(6)]
    extra[2] = 5  # the tick: the same for both ranks
    return (*(seed * 10 + index for index in range(7)), *extra, seed)


@pytest.fixture(params=["native", "gloo"])
def kind(request):
    """The kinds that exchange.kind may name."""
    return request.param


@pytest.fixture
def pair(lab, kind):
    """Two ranks that agree over one kind."""
    made = lab.Pair(kind=kind)
    yield made
    made.close()


@pytest.fixture
def both(lab, kind):
    """Two exchanges that meet between threads."""
    made = lab.exchanges(kind)
    yield made
    for exchange in made:
        exchange.close()


def on_both(act):
    """Run act(0) and act(1) in two threads; returns results or exceptions."""
    results = [None, None]

    def run(rank):
        try:
            results[rank] = act(rank)
        except PeerError as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return results


def test_each_rank_gets_the_peers_payload(both):
    """X-10: fields, extras and intent arrive untouched, and exchanges are numbered from 1."""
    for round_number in (1, 2, 3):
        got = on_both(lambda rank: both[rank].exchange(Channel.PLAN, words(rank + 1)))
        assert got == [words(2), words(1)]
        assert [exchange.sequence(Channel.PLAN) for exchange in both] == [round_number] * 2
        assert both[0].sequence(Channel.TIER) == 0


def test_crossed_channels_are_refused_on_both_sides(both):
    """X-13: a tag that is not the channel's means that the ranks are in different exchanges."""
    got = on_both(lambda rank: both[rank].exchange(Channel(rank), words(1)))
    assert all(isinstance(result, PeerError) and "channel" in str(result).lower() for result in got)


@pytest.mark.parametrize("kind", ["gloo"], indirect=True)  # the native one's numbers: tests/native/test_exchange.py
def test_a_skipped_exchange_is_refused_on_both_sides(both):
    """X-26's sibling: one rank made an exchange that the other did not."""
    both[0]._sequences[Channel.PLAN] += 1
    got = on_both(lambda rank: both[rank].exchange(Channel.PLAN, words(1)))
    assert all(isinstance(result, PeerError) and "exchange" in str(result) for result in got)


def test_a_kick_ends_only_its_own_park(both):
    """X-28: when both wake at once, each finds the other's kick during its next park, where it is too old."""
    on_both(lambda rank: both[rank].exchange(Channel.PLAN, words(1)))
    assert not both[1].take_kick()
    both[0].kick()
    both[1].kick()  # both were woken by messages of their own
    on_both(lambda rank: both[rank].exchange(Channel.PLAN, words(1)))

    assert [exchange.take_kick() for exchange in both] == [False, False]

    both[0].kick()
    assert both[1].take_kick()
    assert not both[1].take_kick()


def test_a_dead_peer_ends_a_park(both):
    """X-21's purpose while nobody exchanges: the socket's end is the peer's death."""
    both[1].close()
    assert select.select([both[0].fileno()], [], [], 1)[0]
    with pytest.raises(PeerError, match="closed"):
        both[0].take_kick()

    def go_on():
        both[0].kick()
        both[0].exchange(Channel.PLAN, words(1))

    with pytest.raises(PeerError):
        go_on()


@pytest.mark.parametrize("kind", ["native"], indirect=True)
def test_a_kick_wakes_whoever_polls(both):
    """X-28: the descriptor becomes readable with the kick, and not again with an old one."""
    on_both(lambda rank: both[rank].exchange(Channel.PLAN, words(1)))
    both[1].park()
    assert not select.select([both[1].fileno()], [], [], 0)[0]
    both[0].kick()
    assert select.select([both[1].fileno()], [], [], 1)[0]
    assert both[1].take_kick()
    assert not select.select([both[1].fileno()], [], [], 0)[0]


@pytest.mark.parametrize("kind", ["native"], indirect=True)
def test_the_path_is_proven_on_both_channels_before_it_is_used(both):
    """M-06, X-05: words that no tick says arrive unchanged, and only then the short time-out begins."""
    assert on_both(lambda rank: both[rank].prove(0.05)) == [None, None]
    assert [[exchange.sequence(channel) for channel in Channel] for exchange in both] == [[1, 1], [1, 1]]
    with pytest.raises(PeerError, match="within 50 ms"):
        both[0].exchange(Channel.PLAN, words(1))


@pytest.mark.parametrize("place", [0, 6, 12, 13])
@pytest.mark.parametrize("kind", ["native"], indirect=True)
def test_a_word_that_changes_on_its_way_is_a_bug_and_no_start(both, place):
    """M-06: a proof that cannot fail is none: one bit of the peer's fields, extra words or intent."""
    receive = both[1].exchange

    def receive_badly(channel, words):
        peer = receive(channel, words)
        return (*peer[:place], peer[place] ^ 1, *peer[place + 1 :])

    both[1].exchange = receive_badly
    peer = threading.Thread(target=lambda: both[0].exchange(Channel.PLAN, _pattern(0, Channel.PLAN)))
    peer.start()
    with pytest.raises(InvariantError, match="words changed on their way through channel PLAN"):
        both[1].prove(1.0)
    peer.join(10)


class Runner:
    """Two loops in two threads, each in `run`."""

    def __init__(self, pair) -> None:
        self.pair = pair
        self.failures = []
        self.threads = [threading.Thread(target=self._run, args=(rank,)) for rank in pair.ranks]
        for thread in self.threads:
            thread.start()

    def _run(self, rank) -> None:
        try:
            rank.loop.run()
        except PeerError as error:
            self.failures.append(error)

    def wait_for(self, condition) -> None:
        deadline = time.monotonic() + 20
        while not condition():
            assert time.monotonic() < deadline, "did not happen"
            assert not self.failures, self.failures
            for rank in self.pair.ranks:
                rank.collect()
            time.sleep(0.0005)

    def stop(self) -> None:
        self.pair.ranks[1].parent.send_nowait(Shutdown())
        self.wait_for(lambda: not any(thread.is_alive() for thread in self.threads))
        for rank in self.pair.ranks:
            rank.collect()


@pytest.fixture
def runner(pair):
    pair.clock.__class__ = type("RealClock", (), {"__call__": lambda _self: time.monotonic_ns()})
    made = Runner(pair)
    yield made
    for rank in pair.ranks:  # ends threads that the test left behind
        rank.parent.close()
    for thread in made.threads:
        # One that was kicked before its own parent went may wait for its peer until the exchange's 10 s are over.
        thread.join(30)


def test_parked_ranks_wake_for_every_message(lab, pair, runner):
    """X-28: 300 random wakes of one rank, the other or both at once: each request is served, and nothing hangs."""
    dice = random.Random(5)
    for number in range(300):
        ranks = dice.choice([(0,), (1,), (0, 1)])
        for dp_rank in ranks:
            pair.ranks[dp_rank].submit(lab.request(f"w{number}", 3, max_tokens=2, ignore_eos=True))
        runner.wait_for(
            lambda ranks=ranks, name=f"w{number}": all(
                name in pair.ranks[rank].deltas and pair.ranks[rank].deltas[name][-1].finish for rank in ranks
            )
        )
        if dice.random() < 0.5:
            runner.wait_for(lambda: all(rank.snapshots[-1].parked for rank in pair.ranks))
    runner.stop()
    assert pair.ranks[0].value("dsparkd_parks_total") > 100
    assert pair.ranks[0].exchange.sequence(Channel.PLAN) == pair.ranks[1].exchange.sequence(Channel.PLAN)
    assert sum(rank.loop._tick for rank in pair.ranks) == 2 * pair.ranks[0].loop._tick


def test_batches_against_busy_ranks_are_never_seen_in_part(lab, pair, runner):
    """R-04, R-15: 40 rounds of 64 items while both ranks tick: each plan sees all of a round or none of it.

    The frames are larger than what one receive finds in the socket. 13 of each round's items are aborted at once; the
    others end with the ids that they would have had alone.
    """
    seen = [[], []]
    for rank, log in zip(pair.ranks, seen, strict=True):
        watch_planner(rank, log)
    dice = random.Random(3)
    requests = {}
    for number in range(40):
        dp_rank = number % 2
        rank = pair.ranks[dp_rank]
        batch = [lab.request(f"b{number}-{item}", 3 + item % 5, max_tokens=2) for item in range(64)]
        runner.wait_for(
            lambda rank=rank, before=64 * (number // 2): len(rank.admitted) == before and len(rank.queue) < 100
        )
        rank.submit(*batch)
        for request in dice.sample(batch, 13):
            rank.abort(request.request_id)
        requests |= {request.request_id: (rank, request) for request in batch}
    runner.wait_for(
        lambda: all(name in rank.deltas and rank.deltas[name][-1].finish for name, (rank, _) in requests.items())
    )
    runner.stop()
    for dp_rank, log in enumerate(seen):
        assert {frozenset(new) for new in log if new} == {
            frozenset(f"b{number}-{item}" for item in range(64)) for number in range(dp_rank, 40, 2)
        }
    for name, (rank, request) in requests.items():
        ids, reason = rank.output(name)
        expected = lab.expected(request, pair.sizes.max_context)
        assert (ids, reason) == expected or (reason == "abort" and ids == expected[0][: len(ids)])
    assert sum(rank.value("dsparkd_requests_total", "abort") for rank in pair.ranks) <= 40 * 13


def watch_planner(rank, log):
    """Note, before each plan, the requests that no earlier plan could see."""
    propose, known = rank.planner.propose, set()

    def noting(flying):
        # A request that was aborted in the same receive has ended already, but it was queued.
        new = set(rank.admissions) - known
        known.update(new)
        log.append(new)
        return propose(flying)

    admit = rank.loop._account.admitted
    rank.admissions = []

    def admitted(request):
        rank.admissions.append(request.request_id)
        admit(request)

    rank.loop._account.admitted = admitted
    rank.planner.propose = noting


def test_a_parked_rank_beats_and_uses_no_core(pair, runner):
    """L-13, X-28: snapshots go on at the heartbeat, marked parked, while the tick stands still and no CPU is burnt."""
    runner.wait_for(lambda: all(rank.snapshots and rank.snapshots[-1].parked for rank in pair.ranks))
    before = [(rank.snapshots[-1].sequence, rank.snapshots[-1].tick) for rank in pair.ranks]
    used = resource.getrusage(resource.RUSAGE_SELF)
    time.sleep(0.5)  # five heartbeats
    usage = resource.getrusage(resource.RUSAGE_SELF)
    runner.wait_for(
        lambda: all(
            rank.snapshots[-1].sequence >= sequence + 3 for rank, (sequence, _) in zip(pair.ranks, before, strict=True)
        )
    )
    assert [rank.snapshots[-1].tick for rank in pair.ranks] == [tick for _, tick in before]
    # Wakes are counted, not timed: a poll loop that spins switches thousands of times.
    assert usage.ru_nvcsw - used.ru_nvcsw < 200
    assert all(rank.watch.disarmed for rank in pair.ranks)
    runner.stop()


def test_metrics_are_flushed_when_a_rank_parks(pair):
    """M-03: three exchanges, then park: the counter shows 3 at once, not after the next second or event."""
    pair.tick(3)
    assert pair.agreements[-1].park
    pair.ranks[1].exchange.kick()
    pair.ranks[0].loop._park()  # returns at the kick
    pair.ranks[0].collect()
    values = pair.ranks[0].frames[-1].values
    assert values["dsparkd_exchange_calls_total\x000\x00plan"] == 3
    assert values["dsparkd_parks_total\x000"] == 1


def test_the_time_of_agreements_is_counted_by_phase(lab, pair, runner):
    """M-02, X-32: the native kind tells a late peer from the exchange itself; gloo knows only the whole."""
    for number in range(20):
        pair.ranks[number % 2].submit(lab.request(f"p{number}", 5, max_tokens=3))
    runner.wait_for(lambda: sum(len(rank.deltas) for rank in pair.ranks) == 20)
    runner.stop()
    for rank in pair.ranks:
        spent = {
            phase: rank.value("dsparkd_exchange_seconds_total", "plan", phase)
            for phase in ("total", "peer_wait", "arrival_skew", "after_last")
        }
        assert spent["total"] > 0
        if pair.kind == "native":
            assert spent["total"] >= spent["peer_wait"] > 0
            assert spent["total"] >= spent["after_last"] > 0
            assert spent["arrival_skew"] > 0
            assert rank.value("dsparkd_exchange_sleeps_total", "plan") >= 0
        else:
            assert {phase for phase, seconds in spent.items() if seconds} == {"total"}


@pytest.mark.parametrize("neighbour", ["parent", "detokenizer"])
def test_a_parked_rank_sees_the_end_of_its_neighbours(pair, runner, neighbour):
    """R38: a neighbour's end wakes the rank, which fails, and with it its peer, instead of sleeping for ever."""
    # The frame that goes out at the beginning of a park; the snapshot that says so comes before.
    parks = [f"dsparkd_parks_total\0{dp_rank}" for dp_rank in (0, 1)]
    runner.wait_for(
        lambda: all(
            rank.frames and rank.frames[-1].values.get(park) for rank, park in zip(pair.ranks, parks, strict=True)
        )
    )
    if pair.kind == "gloo":
        pair.ranks[1].exchange._gather = refuse  # what gloo says when the peer's process has gone
    getattr(pair.ranks[0], neighbour).close()
    runner.threads[0].join(20)
    pair.ranks[0].exchange.close()  # as its process' end would be seen
    for thread in runner.threads:
        thread.join(20)
    assert len(runner.failures) == 2
    assert any(f"{neighbour} closed" in str(failure) for failure in runner.failures)


def refuse(_words):
    raise PeerError("the peer did not come")


@pytest.mark.parametrize("apart", range(3))
def test_a_stop_given_to_one_rank_ends_both_at_one_exchange(lab, pair, runner, apart):
    """X-27: Shutdown delivered some ticks apart, under load: last sequences are equal and nothing is lost."""
    for rank in pair.ranks:
        rank.submit(*[lab.request(f"s{item}", 20, max_tokens=30, ignore_eos=True) for item in range(8)])
    pair.ranks[apart % 2].parent.send_nowait(Shutdown())
    runner.wait_for(lambda: not any(thread.is_alive() for thread in runner.threads))
    for rank in pair.ranks:
        rank.collect()
        assert sorted(rank.farewells) == [f"detokenizer:rank{rank.dp_rank}", f"parent:rank{rank.dp_rank}"]
        assert {request_id: rank.output(request_id)[1] for request_id in rank.deltas}.keys() <= set(rank.admitted)
        rank.assert_nothing_held()
    assert pair.ranks[0].exchange.sequence(Channel.PLAN) == pair.ranks[1].exchange.sequence(Channel.PLAN)


def test_m03_every_phase_and_agreement_of_a_rank_has_its_maximum(lab, pair, runner):
    """M-03: both families are filled from the tick thread, and fall to 0 once the rank sleeps.

    A frame that is late by a moment may pass over the one second that a launch lies in, so there are several launches.
    """
    frames = pair.ranks[0].frames

    def peak(name: str, *labels: str) -> float:
        key = "\0".join((name, "0", *labels))
        return max((frame.values.get(key, 0.0) for frame in frames), default=0.0)

    for name in "abcdef":
        pair.ranks[0].submit(lab.request(name, 5, max_tokens=3))
        runner.wait_for(lambda name=name: name in pair.ranks[0].deltas)
        seen = len(frames)
        runner.wait_for(lambda seen=seen: len(frames) >= seen + 3)  # park, and two seconds
        if peak("dsparkd_scheduler_phase_max_seconds", "launch") > 0:
            break
    assert peak("dsparkd_scheduler_phase_max_seconds", "launch") > 0
    assert peak("dsparkd_exchange_max_seconds", "plan", "total") > 0
    key = "\0".join(("dsparkd_scheduler_phase_max_seconds", "0", "launch"))
    runner.wait_for(lambda: pair.ranks[0].frames[-1].values[key] == 0)


@pytest.mark.parametrize("has_failed", [False, True])
def test_a_wait_ended_by_the_parent_is_an_order_to_leave_unless_the_parent_leaves_itself(pair, has_failed):
    """X-24, L-38: after a failure the parent closes its direction first, so that this rank reports its end."""
    rank = pair.ranks[0]

    def stopped(_channel, _words):
        if has_failed:
            rank.parent.end_sending()
        else:
            rank.parent.send_nowait(Shutdown())
        raise ExchangeStopped("dsx: stopped by the parent")

    rank.exchange.exchange = stopped
    if has_failed:
        with pytest.raises(PeerError, match="parent closed"):
            rank.loop.run()
    else:
        rank.loop.run()
    rank.collect()
    assert rank.farewells == ([] if has_failed else ["parent:rank0", "detokenizer:rank0"])


class FakeSeat:
    """Notes what happens while the seat is taken."""

    def __init__(self, rank) -> None:
        self._rank = rank
        self.told = []

    def take(self) -> None:
        self.told.append("take")

    def leave(self) -> None:
        self.told.append(("leave", len(self._rank.device.plans)))


def test_a_rank_takes_its_seat_to_park_and_leaves_it_behind_the_first_step(lab, pair, runner):
    """X-28: until the launch both ranks run side by side; later a seat would only keep one from a free processor."""
    seats = [FakeSeat(rank) for rank in pair.ranks]
    for rank, seat in zip(pair.ranks, seats, strict=True):
        rank.loop._parts = dataclasses.replace(rank.loop._parts, seat=seat)
    for number in range(3):
        pair.ranks[0].submit(lab.request(f"s{number}", 3, max_tokens=2, ignore_eos=True))
        runner.wait_for(
            lambda name=f"s{number}": name in pair.ranks[0].deltas and pair.ranks[0].deltas[name][-1].finish
        )
        runner.wait_for(lambda: all(rank.snapshots[-1].parked for rank in pair.ranks))
    runner.stop()
    for seat in seats:
        takes = [index for index, what in enumerate(seat.told) if what == "take"]
        assert len(takes) >= 2
        for index in takes[:-1]:
            before = max((count for what, count in (w for w in seat.told[:index] if w != "take")), default=0)
            after = [count for what, count in (w for w in seat.told[index:] if w != "take")]
            assert after[0] == before + 1, "it was left before the first step, or not at once behind it"
