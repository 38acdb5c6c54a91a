"""What the chaos run does to a server, and what may come of it."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass

from tools.chaos.client import Crowd
from tools.chaos.world import EXCHANGE_TIMEOUT_S, Burners, World, fill, renice

KILLED = -signal.SIGKILL
FAILED = 70


@dataclass(frozen=True)
class Event:
    """One kind of disturbance.

    exits: codes that the server may end with, empty when it must not end; must_exit: it has to.
    may_break: clients may lose their connection without a word, because nobody is left who could write one.
    """

    name: str
    weight: int
    play: Callable[[World, Crowd, random.Random], str]
    exits: frozenset[int] = frozenset()
    must_exit: bool = False
    may_break: bool = False


def _kill_child(world: World, _crowd: Crowd, draw: random.Random) -> str:
    name = draw.choice(world.children())
    os.kill(world.child(name), signal.SIGKILL)
    return name


def _kill_both_ranks(world: World, _crowd: Crowd, draw: random.Random) -> str:
    for dp_rank in draw.sample((0, 1), 2):
        os.kill(world.child(f"rank {dp_rank}"), signal.SIGKILL)
    return "both ranks"


def _kill_parent(world: World, _crowd: Crowd, _draw: random.Random) -> str:
    world.server.process.kill()
    return "parent"


def _terminate(world: World, _crowd: Crowd, draw: random.Random) -> str:
    world.server.send_signal(draw.choice((signal.SIGTERM, signal.SIGINT)))
    if draw.random() < 0.3:
        time.sleep(draw.uniform(0, 1))
        if not world.has_exited():
            world.server.send_signal(signal.SIGTERM)
        return "twice"
    return "once"


def _kill_while_starting(world: World, _crowd: Crowd, draw: random.Random) -> str:
    """The parent dies, and a child of its next life dies before it is up."""
    world.server.process.kill()
    world.server.process.wait()
    world.start_again()
    world.server.wait_event("child_started", 60)
    time.sleep(draw.uniform(0, 2))
    return _kill_child(world, _crowd, draw)


def _pause(world: World, _crowd: Crowd, draw: random.Random) -> str:
    """Any process stands still for a while, shorter than what others wait for it."""
    name = draw.choice(("parent", *world.children()))
    pid = world.server.pid if name == "parent" else world.child(name)
    seconds = draw.uniform(0.05, 3)
    os.kill(pid, signal.SIGSTOP)
    time.sleep(seconds)
    os.kill(pid, signal.SIGCONT)
    return f"{name} for {seconds:.1f} s"


def _delay(world: World, _crowd: Crowd, draw: random.Random) -> str:
    """One rank is late again and again."""
    pid = world.child(f"rank {draw.randrange(2)}")
    for _ in range(30):
        os.kill(pid, signal.SIGSTOP)
        time.sleep(draw.uniform(0, 0.1))
        os.kill(pid, signal.SIGCONT)
        time.sleep(draw.uniform(0, 0.05))
    return "30 delays of 0 to 100 ms"


def _hold_rank(world: World, _crowd: Crowd, draw: random.Random) -> str:
    """A rank stands still for longer than the other one waits."""
    dp_rank = draw.randrange(2)
    os.kill(world.child(f"rank {dp_rank}"), signal.SIGSTOP)
    deadline = time.monotonic() + EXCHANGE_TIMEOUT_S + 15
    while not world.has_exited() and time.monotonic() < deadline:
        time.sleep(0.05)
    return f"rank {dp_rank} for good"


def _starve(world: World, _crowd: Crowd, draw: random.Random) -> str:
    """One process gets only what two busy processes a core leave."""
    name = draw.choice(world.children())
    pid = world.child(name)
    renice(pid, 19)
    with Burners(2 * (os.cpu_count() or 1)):
        time.sleep(4)
    if name in world.children():
        renice(pid, 0)
    return name


def _fill_disk(world: World, _crowd: Crowd, draw: random.Random) -> str:
    """The run directory has no room, and a rank dies: its report cannot be written, and the next start has no room."""
    file = fill(world.run_directory)
    try:
        time.sleep(1)
        if draw.random() < 0.5 or world.has_exited():
            return "and room again"
        os.kill(world.child(f"rank {draw.randrange(2)}"), signal.SIGKILL)
        world.server.wait_exit(30)
        return "and a rank killed"
    finally:
        file.unlink()


def _cut_clients(_world: World, crowd: Crowd, _draw: random.Random) -> str:
    for _ in range(3):
        crowd.cut()
        time.sleep(0.2)
    return "all clients, three times"


_MAY_FAIL = frozenset({FAILED})

EVENTS: tuple[Event, ...] = (
    Event("SIGKILL a child", 4, _kill_child, _MAY_FAIL, must_exit=True),
    Event("SIGKILL both ranks", 1, _kill_both_ranks, _MAY_FAIL, must_exit=True),
    Event("SIGKILL the parent", 1, _kill_parent, frozenset({KILLED}), must_exit=True, may_break=True),
    Event("SIGKILL a child while starting", 1, _kill_while_starting, _MAY_FAIL, must_exit=True, may_break=True),
    Event("SIGTERM or SIGINT", 2, _terminate, frozenset({0}), must_exit=True),
    Event("SIGSTOP, then SIGCONT", 4, _pause),
    Event("delays of one rank", 3, _delay),
    Event("SIGSTOP a rank for good", 1, _hold_rank, _MAY_FAIL, must_exit=True),
    Event("starve a child", 2, _starve, _MAY_FAIL),
    Event("clients leave by FIN and RST", 3, _cut_clients),
    Event("run directory full", 2, _fill_disk, _MAY_FAIL),
)
