"""Every interleaving of the exchange's steps, on a machine with store buffers, and of parks and kicks.

The model's steps are those of exchange.c, one access of shared memory each; its sleeps have no deadline, so a lost wake
is a state from which nothing follows. A mutation changes one step, and the checker must find what comes of it.
tests/native/exchange.pml is the same protocol for spin.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROUNDS = 6
# Words of one rank in memory.
HEAD, TAIL, NUMBER = (0, 1), (2, 3), (4, 5)  # payload in two words and its number, for both slots
BELL, WAITING, ASLEEP = 6, 7, 8  # ASLEEP is the kernel's
NUM_WORDS = 9
STOP = 2 * NUM_WORDS
MUTATIONS = (
    "number before payload",
    "flag read before number is stored",
    "number stored without fence",
    "flag raised without fence",
    "no second look",
    "bell read after the look",
    "wake without ringing",
    "one slot",
    "payload read before number",
)

State = tuple[object, ...]


class Rank(NamedTuple):
    """One rank: step, exchange, the bell's value that it has read, a payload word, stores that memory has not seen."""

    at: str
    sequence: int
    bell: int
    head: int
    buffer: tuple[tuple[int, int], ...]


def explore(initial: State, follow: Callable[[State], Iterator[State]], done: Callable[[State], bool]) -> int:
    """Visit every state; returns how many. AssertionError when one of them is stuck or wrong."""
    seen, todo = {initial}, [initial]
    while todo:
        state = todo.pop()
        following = list(follow(state))
        assert following or done(state), f"stuck: {state}"
        for each in following:
            if each not in seen:
                seen.add(each)
                todo.append(each)
    return len(seen)


class Exchange:
    """Both ranks make some exchanges. stops: the parent ends all waits at some moment; alone: rank 1 never comes."""

    def __init__(
        self,
        mutation: str = "",
        *,
        rounds: int = ROUNDS,
        stops: bool = False,
        ring_first: bool = False,
        alone: bool = False,
    ) -> None:
        self.mutation = mutation
        self.rounds = rounds
        self.stops = stops
        self.alone = alone
        self.parent_steps = ["ring 0", "ring 1", "stop"] if ring_first else ["stop", "ring 0", "ring 1"]

    def run(self) -> int:
        start = Rank("write head" if self.mutation != "number before payload" else "store number", 1, 0, 0, ())
        memory = (0,) * (2 * NUM_WORDS + 1)
        parent = 0 if self.stops else len(self.parent_steps)
        peer = start._replace(at="end") if self.alone else start
        return explore((memory, start, peer, parent), self.follow, self.done)

    def done(self, state: State) -> bool:
        return all(rank.at in ("end", "stopped") for rank in state[1:3]) and state[3] == len(self.parent_steps)

    def follow(self, state: State) -> Iterator[State]:
        memory, parent = state[0], state[3]
        for who in (0, 1):
            for after, rank in self.step(memory, state[1 + who], who):
                yield (after, rank, state[2], parent) if who == 0 else (after, state[1], rank, parent)
        if parent < len(self.parent_steps):
            what = self.parent_steps[parent]
            if what == "stop":
                yield (put(memory, STOP, 1), state[1], state[2], parent + 1)
            else:
                base = NUM_WORDS * int(what[-1])
                rung = put(memory, base + BELL, memory[base + BELL] + 1)
                yield (put(rung, base + ASLEEP, 0), state[1], state[2], parent + 1)

    def step(self, memory: tuple[int, ...], rank: Rank, who: int) -> Iterator[tuple[tuple[int, ...], Rank]]:
        """What a rank may do next, and what its store buffer may do by itself."""
        own, peer = NUM_WORDS * who, NUM_WORDS * (1 - who)
        if rank.buffer:
            (place, value), *rest = rank.buffer
            yield put(memory, place, value), rank._replace(buffer=tuple(rest))
        s = rank.sequence
        index = s % 2 if self.mutation != "one slot" else 0

        def store(place: int, value: int, at: str, *, fenced: bool) -> Iterator[tuple[tuple[int, ...], Rank]]:
            if not fenced:
                yield memory, rank._replace(at=at, buffer=(*rank.buffer, (place, value)))
            elif not rank.buffer:  # a sequentially consistent store drains what was stored before it
                yield put(memory, place, value), rank._replace(at=at)

        early = self.mutation == "number before payload"
        late_flag = self.mutation != "flag read before number is stored"
        match rank.at:
            case "write head":
                yield from store(own + HEAD[index], s, "write tail", fenced=False)
            case "write tail":
                then = "store number" if late_flag and not early else "read flag"
                yield from store(own + TAIL[index], s, then, fenced=False)
            case "store number":
                then = "write head" if early else "read flag" if late_flag else "look"
                fenced = self.mutation != "number stored without fence"
                yield from store(own + NUMBER[index], s, then, fenced=fenced)
            case "read flag":
                sleeper = memory[peer + WAITING]
                then = "look" if late_flag else "store number"
                yield memory, rank._replace(at="ring" if sleeper else then)
            case "ring":
                if not rank.buffer:
                    ringing = self.mutation != "wake without ringing"
                    rung = put(memory, peer + BELL, memory[peer + BELL] + ringing)
                    yield rung, rank._replace(at="wake")
            case "wake":
                then = "look" if late_flag else "store number"
                yield put(memory, peer + ASLEEP, 0), rank._replace(at=then)
            case "look" if self.mutation == "payload read before number":
                yield memory, rank._replace(at="look at number", head=memory[peer + HEAD[index]])
            case "look" | "look at number":
                yield from self.look(memory, rank, who, index, waits=False)
            case "read bell":
                yield memory, rank._replace(at="raise flag", bell=memory[own + BELL])
            case "raise flag":
                fenced = self.mutation != "flag raised without fence"
                then = "sleep" if self.mutation == "no second look" else "look again"
                yield from store(own + WAITING, 1, then, fenced=fenced)
            case "look again":
                yield from self.look(memory, rank, who, index, waits=True)
            case "read bell late":
                yield memory, rank._replace(at="sleep", bell=memory[own + BELL])
            case "sleep":  # the kernel compares and puts to sleep in one step, after all earlier stores
                if not rank.buffer:
                    sleeps = memory[own + BELL] == rank.bell
                    yield put(memory, own + ASLEEP, int(sleeps)), rank._replace(at="asleep" if sleeps else "lower flag")
            case "asleep":
                if not memory[own + ASLEEP]:
                    yield memory, rank._replace(at="lower flag")
            case "lower flag":
                yield from store(own + WAITING, 0, "look", fenced=False)
            case "lower flag and read":
                yield from store(own + WAITING, 0, "read head", fenced=False)
            case "lower flag and stop":
                yield from store(own + WAITING, 0, "stopped", fenced=False)
            case "read head":
                yield memory, rank._replace(at="read tail", head=memory[peer + HEAD[index]])
            case "read tail":
                words = (rank.head, memory[peer + TAIL[index]])
                assert words == (s, s), f"rank {who} read {words} in exchange {s}"
                yield memory, self.next_round(rank)

    def look(
        self, memory: tuple[int, ...], rank: Rank, who: int, index: int, *, waits: bool
    ) -> Iterator[tuple[tuple[int, ...], Rank]]:
        """The peer's number, then the parent's word; spinning may end whenever nothing is there."""
        peer, s = NUM_WORDS * (1 - who), rank.sequence
        seen = memory[peer + NUMBER[index]]
        if seen == s:
            ready = "read tail" if rank.at == "look at number" else "read head"
            yield memory, rank._replace(at="lower flag and read" if waits else ready)
            return
        assert seen in (max(s - 2, 0), s - 1 if self.mutation == "one slot" else s), f"{seen} instead of {s}"
        if memory[STOP]:
            yield memory, rank._replace(at="lower flag and stop" if waits else "stopped")
        elif waits:
            yield memory, rank._replace(at="read bell late" if self.mutation == "bell read after the look" else "sleep")
        else:
            late = self.mutation == "bell read after the look"
            yield memory, rank._replace(at="raise flag" if late else "read bell")

    def next_round(self, rank: Rank) -> Rank:
        if rank.sequence == self.rounds:
            return rank._replace(at="end", head=0, bell=0)
        first = "write head" if self.mutation != "number before payload" else "store number"
        return Rank(first, rank.sequence + 1, 0, 0, rank.buffer)


def put(memory: tuple[int, ...], place: int, value: int) -> tuple[int, ...]:
    return (*memory[:place], value, *memory[place + 1 :])


def test_six_exchanges_in_every_interleaving() -> None:
    """X-16, X-17: no state is stuck, no payload torn, old or early, and no number out of order."""
    assert Exchange().run() > 30_000


@pytest.mark.parametrize("alone", [False, True])
def test_a_stop_ends_every_wait_in_every_interleaving(alone: bool) -> None:
    """X-24: whatever the ranks are doing when the parent stores the word and rings, and also when one never comes."""
    assert Exchange(rounds=2, stops=True, alone=alone).run() > 30


def test_a_stop_that_rings_first_is_found_stuck() -> None:
    """X-24: a sleeper that woke before the word was there sleeps again."""
    with pytest.raises(AssertionError, match="stuck"):
        Exchange(rounds=2, stops=True, alone=True, ring_first=True).run()


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_each_step_of_the_protocol_is_needed(mutation: str) -> None:
    """X-16, X-17: without any one of them some interleaving gets stuck or reads a wrong word."""
    with pytest.raises(AssertionError):
        Exchange(mutation).run()


PROMELA = Path(__file__).with_name("exchange.pml")


def spin(tmp_path: Path, *defines: str) -> str:
    """What spin's exhaustive search says of the protocol with some steps changed."""
    for tool in ("spin", "gcc"):
        assert shutil.which(tool), f"{tool} is missing: apt-get install {tool}"
    shutil.copy(PROMELA, tmp_path)
    subprocess.run(["spin", *(f"-D{name}" for name in defines), "-a", "exchange.pml"], cwd=tmp_path, check=True)
    # No reduction of any kind: every interleaving, in memory.
    compile_search = ["gcc", "-O2", "-w", "-DSAFETY", "-DNOREDUCE", "-o", "pan", "pan.c"]
    subprocess.run(compile_search, cwd=tmp_path, check=True)
    search = ["./pan", "-m200000"]
    return subprocess.run(search, cwd=tmp_path, check=True, capture_output=True, text=True).stdout


def test_spin_finds_nothing_wrong(tmp_path: Path) -> None:
    """X-16, X-17, X-24: the whole space is searched, and no state of it is stuck or breaks an assertion."""
    report = spin(tmp_path)
    assert "errors: 0" in report
    assert "Search not completed" not in report
    assert "max search depth too small" not in report


@pytest.mark.parametrize(
    "mutation", ["NO_FENCE", "NO_SECOND_LOOK", "NO_RING", "ONE_SLOT", "NUMBER_FIRST", "RING_BEFORE_STOP"]
)
def test_spin_finds_each_mutation(tmp_path: Path, mutation: str) -> None:
    """X-16, X-17: a search that finds nothing in a broken protocol proves nothing."""
    assert "errors: 1" in spin(tmp_path, mutation)


class Sleeper(NamedTuple):
    """A rank between exchanges: step, exchange, messages that may still come, whether one is there unread."""

    at: str
    sequence: int
    to_come: int
    pending: bool


class Park:
    """Exchanges as one step; parks, kicks and messages in all orders. Each rank gets some messages at any time."""

    def __init__(self, mutation: str = "", messages: int = 3) -> None:
        self.mutation = mutation
        self.messages = messages

    def run(self) -> int:
        rank = Sleeper("tick", 0, self.messages, False)
        return explore((rank, rank, (0, 0), (0, 0)), self.follow, self.done)

    def done(self, state: State) -> bool:
        """Everything was read, and both sleep after the same exchange."""
        first, second = state[0], state[1]
        return first == second and first.at == "parked" and not first.pending and not first.to_come

    def follow(self, state: State) -> Iterator[State]:
        ranks, words, events = state[:2], state[2], state[3]

        def changed(who: int, rank: Sleeper, words=words, events=events) -> State:  # type: ignore[no-untyped-def]
            return (rank, ranks[1], words, events) if who == 0 else (ranks[0], rank, words, events)

        if ranks[0].at == ranks[1].at == "exchange" and ranks[0].sequence == ranks[1].sequence:
            # Both have said whether they may park: a message that came since does not change what they agreed on.
            both = tuple(rank._replace(at="parked", sequence=rank.sequence + 1) for rank in ranks)
            yield (*both, words, events)
        for at in (("exchange", "busy"), ("busy", "exchange"), ("busy", "busy")):
            if (ranks[0].at, ranks[1].at) == at and ranks[0].sequence == ranks[1].sequence:
                both = tuple(rank._replace(at="tick", sequence=rank.sequence + 1) for rank in ranks)
                yield (*both, words, events)
        for who, rank in enumerate(ranks):
            other = 1 - who
            if rank.to_come and not rank.pending:
                yield changed(who, rank._replace(to_come=rank.to_come - 1, pending=True))
            if rank.at == "tick":  # a tick takes in what has come; only an idle rank may park
                yield changed(who, rank._replace(at="busy" if rank.pending else "exchange", pending=False))
            if rank.at == "parked" and rank.pending:
                yield changed(who, rank._replace(at="tick" if self.mutation == "no kick" else "kick"))
            if rank.at == "kick":
                if self.mutation == "event before word":
                    yield changed(who, rank._replace(at="kick late"), words, put(events, other, 1))
                else:
                    yield changed(who, rank._replace(at="event"), put(words, other, rank.sequence), events)
            if rank.at == "kick late":
                yield changed(who, rank._replace(at="tick"), put(words, other, rank.sequence), events)
            if rank.at == "event":
                yield changed(who, rank._replace(at="tick"), words, put(events, other, 1))
            if rank.at == "parked" and events[who]:
                yield changed(who, rank._replace(at="woken"), words, put(events, who, 0))
            if rank.at == "woken":
                ends = words[who] == rank.sequence or self.mutation == "any kick ends a park"
                yield changed(who, rank._replace(at="tick" if ends else "parked"))


def test_parks_and_kicks_in_every_interleaving() -> None:
    """X-28: whoever gets work wakes both; no kick is lost, none ends a later park, and both sleep in the end."""
    assert Park().run() > 3_000


@pytest.mark.parametrize("mutation", ["no kick", "event before word", "any kick ends a park"])
def test_each_part_of_a_kick_is_needed(mutation: str) -> None:
    """X-28: without it one rank waits in an exchange for a rank that sleeps."""
    with pytest.raises(AssertionError, match="stuck"):
        Park(mutation).run()
