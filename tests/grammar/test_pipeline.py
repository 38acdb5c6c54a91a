"""The pipeline: its order of calls, its two slots, what waits for what; streams and events on a device."""

from __future__ import annotations

import gc
import random
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import cast

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from dsparkd.errors import FatalError, InvariantError
from dsparkd.grammar import pipeline as module
from dsparkd.grammar.pipeline import NUM_SLOTS, Pipeline, Slot, Stage, Timings
from dsparkd.native.traversal import Walk

ROWS, WIDTH, VOCAB, RESULTS = 6, 4, 300, 64
WORDS = -(-VOCAB // 32)
CPU = torch.device("cpu")
WAIT_S = 20  # longer than any of this takes
NOTHING = torch.zeros(0, dtype=torch.float64)


class Marking:
    """Work that writes one number into every word of its mask rows; notes what it was asked for."""

    def __init__(self, number: int = 0, rows: int = ROWS) -> None:
        self.number, self.rows = number, rows
        self.ids: NDArray[np.int64] | None = None
        self.log: list[str] = []

    def lay(self, walk: Walk, ids: NDArray[np.int64]) -> int:
        self.log.append("lay")
        self.ids = ids.copy()
        return self.rows * WIDTH

    def run(self, walk: Walk) -> int:
        self.log.append("run")
        walk.mask[: self.rows * WIDTH] = self.number
        return 7


class Blocked(Marking):
    """Work whose walk goes on until the test lets it end."""

    def __init__(self) -> None:
        super().__init__(5)
        self.begun, self.may_end = threading.Event(), threading.Event()

    def run(self, walk: Walk) -> int:
        self.begun.set()
        assert self.may_end.wait(WAIT_S)
        return super().run(walk)


def ids_of(number: int, device: torch.device = CPU) -> torch.Tensor:
    return torch.full((ROWS, WIDTH), number, dtype=torch.int64, device=device)


def open_pipeline(device: torch.device = CPU) -> Pipeline:
    return Pipeline(ROWS, WIDTH, WIDTH, VOCAB, RESULTS, device)


@pytest.fixture
def pipeline() -> Iterator[Pipeline]:
    opened = open_pipeline()
    yield opened
    opened.close()


CALLS: dict[str, Callable[[Pipeline, Slot], object]] = {
    "launched": lambda own, slot: own.launched(slot),
    "finish": lambda own, slot: own.finish(slot),
    "emit": lambda own, slot: own.emit(slot, NOTHING),
    "consume": lambda own, slot: own.consume(slot),
}


@pytest.mark.parametrize("done", range(len(CALLS) + 1))
@pytest.mark.parametrize("call", CALLS)
def test_d05_each_call_has_its_one_place_in_a_step(pipeline: Pipeline, done: int, call: str) -> None:
    """D-05: begun, launched, finished, emitted, consumed; any other pair of calls names both states."""
    slot = pipeline.begin(ids_of(1), Marking())
    names = list(CALLS)
    for name in names[:done]:
        CALLS[name](pipeline, slot)
    if names.index(call) == done:
        CALLS[call](pipeline, slot)
        return
    state = ("begun", "launched", "finished", "emitted", "consumed")[done]
    with pytest.raises(InvariantError, match=f"that is {state}"):
        CALLS[call](pipeline, slot)


def test_d05_ids_are_read_from_a_finished_step_alone(pipeline: Pipeline) -> None:
    """D-05, D-08: before `finish` has waited for them they may be another step's."""
    slot = pipeline.begin(ids_of(3), None)
    with pytest.raises(InvariantError, match="begun"):
        _ = slot.host_ids
    pipeline.launched(slot)
    pipeline.finish(slot)
    assert slot.host_ids.tolist() == ids_of(3).tolist()


@pytest.mark.parametrize(
    "ids",
    [
        torch.zeros((ROWS, WIDTH), dtype=torch.int32),
        torch.zeros((ROWS, WIDTH)),
        torch.zeros((ROWS + 1, WIDTH), dtype=torch.int64),
        torch.zeros((0, WIDTH), dtype=torch.int64),
        torch.zeros((ROWS, WIDTH + 1), dtype=torch.int64),
        torch.zeros(ROWS, dtype=torch.int64),
        torch.zeros((WIDTH, ROWS), dtype=torch.int64)[:, :WIDTH],
        torch.zeros((ROWS, WIDTH), dtype=torch.int64, device="meta"),
    ],
)
def test_d06_other_ids_are_refused_before_anything_is_taken(pipeline: Pipeline, ids: torch.Tensor) -> None:
    """D-06: type, rows, width, axes, strides and device; the pair fails, and no slot has gone."""
    with pytest.raises(InvariantError, match="drafted ids"):
        pipeline.begin(ids, None)
    for number in range(NUM_SLOTS):
        assert pipeline.begin(ids_of(number), None).stage is Stage.BEGUN


def test_d06_grammars_need_a_pipeline_that_has_masks() -> None:
    """D-06: the kind of work that a rank without grammars can never have; no slot has gone."""
    bare = Pipeline(ROWS, WIDTH, 0, 0, RESULTS, CPU)
    with pytest.raises(InvariantError, match="a step with grammars in a pipeline without masks"):
        bare.begin(ids_of(1), Marking())
    for number in range(NUM_SLOTS):
        assert bare.begin(ids_of(number), None).stage is Stage.BEGUN


def test_d07_the_walk_goes_on_beside_what_the_tick_thread_does(pipeline: Pipeline) -> None:
    """D-07: begin and launched return while the walk cannot end; finish alone waits for it, and what it wrote is there.

    Which thread is ahead is the test's decision, not the clock's.
    """
    work = Blocked()
    slot = pipeline.begin(ids_of(2), work)
    assert work.begun.wait(WAIT_S), "on the cpu the ids are there, so the walk begins with the step"
    pipeline.launched(slot)
    assert (slot.mask[: ROWS * WIDTH] == -1).all(), "not written yet"
    work.may_end.set()
    pipeline.finish(slot)
    assert (slot.words[: slot.num_mask_rows] == 5).all()
    assert slot.walk_ns == 7


def test_d08_grammars_hear_of_results_and_ids_before_they_are_walked(pipeline: Pipeline) -> None:
    """D-08, decisions.md 6: over 500 steps with 0 to 2 results pending, all are laid, oldest first, before the walk."""
    draw = random.Random(5)
    pending: list[int] = []
    told: list[int] = []
    log: list[tuple[str, int]] = []
    number = 0

    class Told(Marking):
        def lay(self, walk: Walk, ids: NDArray[np.int64]) -> int:
            told.extend(pending)
            pending.clear()
            log.append(("barrier", len(told)))
            log.append(("ids", int(ids[0, 0])))
            return super().lay(walk, ids)

        def run(self, walk: Walk) -> int:
            log.append(("walk", len(told)))
            return super().run(walk)

    for step in range(500):
        for _ in range(draw.randint(0, 2)):
            number += 1
            pending.append(number)
        slot = pipeline.begin(ids_of(step), Told())
        pipeline.launched(slot)
        pipeline.finish(slot)
        assert log == [("barrier", number), ("ids", step), ("walk", number)]
        log.clear()
        pipeline.emit(slot, NOTHING)
        pipeline.consume(slot)
    assert told == list(range(1, number + 1))


def test_d14_a_step_whose_grammars_hold_nothing_walks_nothing(pipeline: Pipeline) -> None:
    """D-14: laid and found to hold no row (all rows reason): no walk, no mask row, no time noted."""
    work = Marking(rows=0)
    slot = pipeline.begin(ids_of(1), work)
    pipeline.launched(slot)
    pipeline.finish(slot)
    assert (work.log, slot.num_mask_rows, pipeline.timings.take()) == (["lay"], 0, ((), 0))


def test_d18_a_step_leaves_the_other_slot_alone(pipeline: Pipeline) -> None:
    """D-18: ids and masks of a step that is not consumed stay, whatever the next one brings."""
    first = pipeline.begin(ids_of(1), Marking(11))
    pipeline.launched(first)
    pipeline.finish(first)
    second = pipeline.begin(ids_of(2), Marking(22))
    pipeline.launched(second)
    pipeline.finish(second)
    assert first.host_ids.tolist() == ids_of(1).tolist()
    assert (first.words == 11).all()
    assert second.host_ids.tolist() == ids_of(2).tolist()
    assert (second.words == 22).all()


def test_d22_a_third_step_is_refused_while_two_are_not_consumed(pipeline: Pipeline) -> None:
    """D-22: withheld commits; with the oldest consumed the third may begin."""
    first, _ = (pipeline.begin(ids_of(number), None) for number in range(NUM_SLOTS))
    with pytest.raises(InvariantError, match="2 are not consumed; the older is begun"):
        pipeline.begin(ids_of(3), None)
    for call in CALLS.values():
        call(pipeline, first)
    assert pipeline.begin(ids_of(3), None) is first


def test_what_was_chosen_comes_back_in_order(pipeline: Pipeline) -> None:
    """Each step's own values, also where the next step has begun meanwhile."""
    slots = []
    for number in (1.5, 2.5):
        slot = pipeline.begin(None, None)
        pipeline.launched(slot)
        pipeline.finish(slot)
        pipeline.emit(slot, torch.full((3,), number, dtype=torch.float64))
        slots.append(slot)
    assert [pipeline.consume(slot) for slot in slots] == [[1.5] * 3, [2.5] * 3]


def test_d21_a_failure_of_the_worker_is_the_pairs(pipeline: Pipeline) -> None:
    """D-21: what a walk raises reaches the tick thread as it is, what a device raises as FatalError."""

    class Failing(Marking):
        def run(self, walk: Walk) -> int:
            raise InvariantError("two requests for one tree")

    slot = pipeline.begin(ids_of(1), Failing())
    pipeline.launched(slot)
    with pytest.raises(InvariantError, match="one tree"):
        pipeline.finish(slot)
    pipeline.emit(slot, NOTHING)
    failed: Future[list[float]] = Future()
    failed.set_exception(RuntimeError("CUDA error: an illegal memory access was encountered"))
    slot.emitted = failed
    with pytest.raises(FatalError, match="illegal memory access"):
        pipeline.consume(slot)


def slots_of(own: Pipeline) -> tuple[Slot, ...]:
    return own._slots


def host_memory(own: Pipeline) -> list[torch.Tensor]:
    """Everything that copies come to on the host or leave it from."""
    return [own._chances, *(tensor for slot in slots_of(own) for tensor in (slot.ids, slot.mask, slot.results))]


def addresses(own: Pipeline) -> list[int]:
    return [tensor.data_ptr() for tensor in (*host_memory(own), *(slot.words for slot in slots_of(own)))]


def run_steps(own: Pipeline, count: int, device: torch.device = CPU) -> None:
    """Steps with drafts, compact layouts, grammars, and as many results as there is room for."""
    ids, values = ids_of(4, device), torch.ones(RESULTS, dtype=torch.float64, device=device)
    chances = torch.full((ROWS, WIDTH - 1), 0.5, device=device)
    work = Marking()
    for _ in range(count):
        assert own.fetch(chances) == [[0.5] * (WIDTH - 1)] * ROWS
        slot = own.begin(ids, work)
        own.launched(slot)
        own.finish(slot)
        own.emit(slot, values)
        assert own.consume(slot) == [1.0] * RESULTS


def test_d04_memory_is_made_once(pipeline: Pipeline) -> None:
    """D-04: the same addresses after 1,000 steps, as many bytes as the formula says, one worker thread."""
    before, threads = addresses(pipeline), threading.active_count()
    run_steps(pipeline, 1000)
    assert addresses(pipeline) == before
    assert threading.active_count() <= threads + 1
    num_bytes = sum(tensor.numel() * tensor.itemsize for tensor in host_memory(pipeline))
    assert num_bytes == Pipeline.reserved_bytes(ROWS, WIDTH, WIDTH, VOCAB, RESULTS)[0]
    assert num_bytes == 2 * (ROWS * WIDTH * 8 + RESULTS * 8 + ROWS * WIDTH * WORDS * 4) + ROWS * WIDTH * 4


def test_d04_more_results_than_there_is_room_for_are_refused(pipeline: Pipeline) -> None:
    """D-04: memory grows in no step; as many as there is room for come back."""
    for count, fits in ((RESULTS, True), (RESULTS + 1, False)):
        slot = pipeline.begin(None, None)
        pipeline.launched(slot)
        pipeline.finish(slot)
        values = torch.arange(count, dtype=torch.float64)
        if not fits:
            with pytest.raises(InvariantError, match=f"gave {count} results, and no step gives more than {RESULTS}"):
                pipeline.emit(slot, values)
            continue
        pipeline.emit(slot, values)
        assert pipeline.consume(slot) == list(range(count))


@pytest.mark.parametrize(
    "chances", [torch.zeros((ROWS, WIDTH - 1), dtype=torch.float64), torch.zeros((ROWS + 1, WIDTH))]
)
def test_d04_other_chances_are_refused(pipeline: Pipeline, chances: torch.Tensor) -> None:
    """D-04: they come to memory of one type, as much as there are drafts; anything else would be converted or grow."""
    with pytest.raises(InvariantError, match="as chances of at most 24"):
        pipeline.fetch(chances)


def test_chances_come_row_by_row_and_may_be_none(pipeline: Pipeline) -> None:
    """A rank without rows takes part in a compact step, too."""
    chances = torch.tensor([[0.5, 0.25], [1.0, 0.0]])
    assert pipeline.fetch(chances) == [[0.5, 0.25], [1.0, 0.0]]
    assert pipeline.fetch(chances[:0]) == []
    assert pipeline.fetch(torch.zeros((2, 0))) == [[], []]


class Instant:
    """An event that the stream passes when the test says so."""

    def __init__(self, at_ms: float, passed: bool = False) -> None:
        self.at_ms, self.passed = at_ms, passed

    def query(self) -> bool:
        return self.passed

    def elapsed_time(self, end: Instant) -> float:
        return end.at_ms - self.at_ms


def opened(timings: Timings, start: Instant, end: Instant) -> None:
    timings.open("gpu_gap", cast(torch.cuda.Event, start), cast(torch.cuda.Event, end))


def test_d23_a_full_ring_drops_the_sample_and_counts_it() -> None:
    """D-23, O-13: nine open samples in a ring of eight; the eight are told once their events have passed."""
    timings = Timings(8)
    ends = [Instant(10.0 + number) for number in range(9)]
    for end in ends:
        opened(timings, Instant(10.0), end)
    assert timings.take() == ((), 1)
    for end in ends:
        end.passed = True
    times, dropped = timings.take()
    assert [seconds for _, seconds in times] == [number / 1e3 for number in range(8)]
    assert (dropped, timings.take()) == (0, ((), 0))
    opened(timings, Instant(0.0), Instant(1.0, passed=True))
    assert timings.take() == ((("gpu_gap", 0.001),), 0), "there is room again"


@pytest.mark.parametrize("seconds", [float("nan"), float("inf"), -1.0])
def test_d23_what_is_no_time_is_dropped_and_counted(seconds: float) -> None:
    """D-23: measurements never fail a step."""
    timings = Timings()
    timings.note("finish", seconds)
    timings.note("finish", 0.0)
    opened(timings, Instant(0.0), Instant(seconds * 1e3, passed=True))
    assert timings.take() == ((("finish", 0.0),), 2)


# On a device

MILLISECOND = 2_000_000  # clock cycles of torch.cuda._sleep, about


def sleep(milliseconds: float) -> None:
    torch.cuda._sleep(int(milliseconds * MILLISECOND))  # type: ignore[no-untyped-call]


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda", 0)


@pytest.fixture
def on_device(device: torch.device) -> Iterator[Pipeline]:
    opened = open_pipeline(device)
    run_steps(opened, 2 * NUM_SLOTS, device)
    yield opened
    torch.cuda.synchronize()
    opened.close()


@pytest.mark.gpu
def test_d04_no_step_takes_memory_of_host_or_device(
    on_device: Pipeline, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """D-04: both allocators' counters are the same before and after 1,000 steps; memory is pinned and where it was."""

    def counters() -> tuple[int, int]:
        return torch.cuda.memory_stats()["allocation.all.allocated"], torch.cuda.host_memory_stats()["num_host_alloc"]

    def refuse(*_arguments: object, **_options: object) -> torch.Tensor:
        raise AssertionError("a step makes nothing of its own")

    ids, values, work = ids_of(4, device), torch.ones(RESULTS, dtype=torch.float64, device=device), Marking()
    chances = torch.full((ROWS, WIDTH - 1), 0.5, device=device)
    before, places = counters(), addresses(on_device)
    for name in ("empty", "zeros", "full"):
        monkeypatch.setattr(torch, name, refuse)
    monkeypatch.setattr(module, "_event", refuse)
    for _ in range(1000):
        on_device.fetch(chances)
        slot = on_device.begin(ids, work)
        on_device.launched(slot)
        on_device.finish(slot)
        on_device.emit(slot, values)
        on_device.consume(slot)
    assert counters() == before
    assert addresses(on_device) == places
    assert all(tensor.is_pinned() for tensor in host_memory(on_device))
    words = sum(slot.words.numel() * 4 for slot in slots_of(on_device))
    assert words == Pipeline.reserved_bytes(ROWS, WIDTH, WIDTH, VOCAB, RESULTS)[1]


@pytest.mark.gpu
def test_d06_begin_returns_while_the_device_is_busy(on_device: Pipeline, device: torch.device) -> None:
    """D-06: a long kernel stands before it in the stream; the ids come when that has ended, and are right."""
    ids = ids_of(0, device)
    busy = torch.cuda.Event()  # type: ignore[no-untyped-call]
    sleep(200)
    ids += 8
    busy.record()
    slot = on_device.begin(ids, Marking())
    on_device.launched(slot)
    assert not busy.query(), "begin waited"  # type: ignore[no-untyped-call]
    on_device.finish(slot)
    assert busy.query()  # type: ignore[no-untyped-call]
    assert slot.host_ids.tolist() == ids_of(8).tolist()
    on_device.emit(slot, torch.zeros(0, dtype=torch.float64, device=device))
    on_device.consume(slot)


@pytest.mark.gpu
@pytest.mark.parametrize("delayed", ["nothing", "ids", "masks", "filter", "results"])
def test_d18_d19_a_late_copy_or_filter_changes_nothing(on_device: Pipeline, device: torch.device, delayed: str) -> None:
    """D-18, D-19: a delay in front of each consumer in turn; each of 1,000 steps has its own ids and its own mask.

    What the filter read is sent home and compared: an early read shows an older step's number, a late write a newer's.
    """
    short = {"nothing": 0.0}.get(delayed, 0.05)
    waiting: list[tuple[Slot, int]] = []
    for number in range(1, 1001):
        ids = torch.full((ROWS, WIDTH), number, dtype=torch.int64, device=device)
        if delayed == "ids":
            with torch.cuda.stream(on_device.copy_stream):
                sleep(short)
        work = Marking(number)
        slot = on_device.begin(ids, work)
        on_device.launched(slot)
        if delayed == "masks":
            with torch.cuda.stream(on_device.copy_stream):
                sleep(short)
        on_device.finish(slot)
        assert slot.host_ids.tolist() == ids_of(number).tolist()
        if delayed == "filter":
            sleep(short)
        read = slot.words.view(-1)[: slot.num_mask_rows * WORDS].double()
        if delayed == "results":
            with torch.cuda.stream(on_device.results_stream):
                sleep(short)
        on_device.emit(slot, torch.stack((read.amin(), read.amax())))
        waiting.append((slot, number))
        if len(waiting) == NUM_SLOTS:
            older, expected = waiting.pop(0)
            assert on_device.consume(older) == [expected, expected]
    for slot, expected in waiting:
        assert on_device.consume(slot) == [expected, expected]


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_d07_d21_the_tick_thread_never_waits_for_a_stream(on_device: Pipeline, device: torch.device) -> None:
    """D-07, D-21: torch's own detector of synchronizing calls is set to raise throughout a step."""
    ids, work = ids_of(6, device), Marking(6)
    torch.cuda.set_sync_debug_mode("error")
    try:
        slot = on_device.begin(ids, work)
        on_device.launched(slot)
        on_device.finish(slot)
        on_device.emit(slot, slot.words.view(-1)[:3].double())
        got = on_device.consume(slot)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert got == [6.0] * 3


@pytest.mark.gpu
def test_d21_sources_stay_until_they_are_copied(on_device: Pipeline, device: torch.device) -> None:
    """D-21: nobody else keeps the tensors; they live while their copy waits, and go when it is over."""
    ids = ids_of(2, device)
    values = torch.full((5,), 3.0, dtype=torch.float64, device=device)
    of_ids, of_values = weakref.ref(ids), weakref.ref(values)
    with torch.cuda.stream(on_device.copy_stream):
        sleep(100)
    slot = on_device.begin(ids, None)
    del ids
    assert of_ids() is not None
    on_device.launched(slot)
    on_device.finish(slot)
    assert of_ids() is None
    assert slot.host_ids.tolist() == ids_of(2).tolist()
    with torch.cuda.stream(on_device.results_stream):
        sleep(100)
    on_device.emit(slot, values)
    del values
    assert of_values() is not None
    assert on_device.consume(slot) == [3.0] * 5
    # The worker lets go of its last work when it takes the next.
    run_steps(on_device, 1, device)
    gc.collect()
    assert of_values() is None


@pytest.mark.gpu
def test_d21_a_results_thread_that_raises_fails_the_pair(
    on_device: Pipeline, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """D-21: the tick thread hears of it where it waits for the results."""

    def refuse(slot: Slot, source: torch.Tensor) -> list[float]:
        raise RuntimeError("CUDA error: the launch timed out")

    monkeypatch.setattr(module, "_read", refuse)
    slot = on_device.begin(None, None)
    on_device.launched(slot)
    on_device.finish(slot)
    on_device.emit(slot, torch.ones(2, dtype=torch.float64, device=device))
    with pytest.raises(FatalError, match="launch timed out"):
        on_device.consume(slot)


@pytest.mark.gpu
def test_d04_chances_are_those_of_their_step(on_device: Pipeline, device: torch.device) -> None:
    """D-04, D-18: one piece of memory serves every step, because nobody goes on before it was read."""
    chances = torch.zeros((ROWS, WIDTH - 1), device=device)
    for number in range(200):
        sleep(0.05)
        chances.fill_(number)
        got = on_device.fetch(chances)
        chances.fill_(-1.0)
        assert got == [[float(number)] * (WIDTH - 1)] * ROWS
