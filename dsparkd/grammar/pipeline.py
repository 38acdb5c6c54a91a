"""Pipeline: what crosses between host and device beside a step's forward pass: drafted ids, masks, what was chosen.

A step takes one of two slots of memory and passes begun, launched, finished, consumed. On cuda drafted ids come to the
host on the copy stream while the target verifies them; the grammars are walked meanwhile, and their masks go back on
the same stream. What was chosen comes to the host on the results stream, and the worker thread turns it into lists. So
the tick thread waits for two things in a step, the ids and the lists, and never for a stream or the device; a compact
layout is made on the host, so it waits for the chances, too (`fetch`). On the cpu ids need no copy: the worker thread
walks from the step's begin on, beside the forward pass.

Letters: B rows of a step, W width of a window, M mask rows, N words of 32 ids.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from enum import IntEnum
from functools import partial
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dsparkd.errors import FatalError, InvariantError
from dsparkd.native.traversal import Walk

NUM_SLOTS = 2
NUM_SAMPLES = 8  # of the device's time that may be open: far more than there are slots


class Stage(IntEnum):
    """How far a step has come; consumed and free are one."""

    FREE = 0
    BEGUN = 1
    LAUNCHED = 2
    FINISHED = 3
    EMITTED = 4


class Work(Protocol):
    """What a step's grammars do once the drafted ids are on the host (executor/masks.py)."""

    def lay(self, walk: Walk, ids: NDArray[np.int64]) -> int:
        """Put each grammar's news and drafts into the walk; returns the mask rows that it will fill, 0 for no walk.

        ids [B, W], column 0 the anchors; [0, 0] in a step without drafts. Called by the tick thread.
        """

    def run(self, walk: Walk) -> int:
        """Walk, on whichever thread; returns the nanoseconds that it took."""


class Timings:
    """Times of a step's parts, by phase; whatever is wrong with one is dropped and counted, and never fails a step.

    Times of the device are open until its stream has passed both events; only so many can be.
    """

    def __init__(self, max_open: int = NUM_SAMPLES) -> None:
        self._max_open = max_open
        self._open: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []
        self._noted: list[tuple[str, float]] = []
        self._num_dropped = 0

    def note(self, phase: str, seconds: float) -> None:
        """Add a time; dropped unless it is finite and not negative."""
        if math.isfinite(seconds) and seconds >= 0:
            self._noted.append((phase, seconds))
        else:
            self._num_dropped += 1

    def open(self, phase: str, start: torch.cuda.Event, end: torch.cuda.Event) -> None:
        """Add a time between two events of a stream; dropped where too many are open."""
        if len(self._open) < self._max_open:
            self._open.append((phase, start, end))
        else:
            self._num_dropped += 1

    def take(self) -> tuple[tuple[tuple[str, float], ...], int]:
        """What is known by now, and how many were dropped; each is handed out once."""
        still_open = []
        for phase, start, end in self._open:
            if end.query():  # type: ignore[no-untyped-call]
                self.note(phase, start.elapsed_time(end) / 1e3)
            else:
                still_open.append((phase, start, end))
        self._open = still_open
        taken, dropped = tuple(self._noted), self._num_dropped
        self._noted, self._num_dropped = [], 0
        return taken, dropped


class Slot:
    """One step's memory. Owned by the pipeline; read by who began the step, until it is consumed.

    ids [rows, W] int64 and mask [mask rows, N] int32 are on the host, pinned on cuda. words [mask rows, N] is the mask
    on the device: the same memory on the cpu, else read only by the stream that `finish` was called on. walk is None
    where there are no grammars.
    """

    def __init__(
        self, rows: int, width: int, mask_width: int, vocab_size: int, num_results: int, device: torch.device
    ) -> None:
        pin = device.type == "cuda"
        self.stage = Stage.FREE
        self.work: Work | None = None
        self.num_ids = (0, 0)
        self.num_mask_rows = 0
        self.walk_ns = 0
        self.source: Tensor | None = None  # of the ids, until they are here
        self.running: Future[int] | None = None
        self.emitted: Future[list[float]] | None = None
        self.ids = torch.zeros((rows, width), dtype=torch.int64, pin_memory=pin)
        self.results = torch.zeros(num_results, dtype=torch.float64, pin_memory=pin)
        num_words = -(-vocab_size // 32)
        self.mask = torch.full((rows * mask_width, num_words), -1, dtype=torch.int32, pin_memory=pin)
        self.words = torch.empty_like(self.mask, device=device) if pin else self.mask
        self.walk: Walk | None = None
        if mask_width:
            # A step keeps at most a window of a row, and the next walk hears of it.
            drafts = np.zeros((rows, mask_width), np.int64)
            self.walk = Walk(drafts, self.mask.numpy(), vocab_size, max_commits=mask_width)
        if pin:
            # Each has one waiter. ids_here: `finish`, before it reads ids. mask_sent: the stream that filters, and the
            # host before the slot's next walk writes the mask. mask_read: the copy stream, before words are written
            # again. chosen: the results stream. results_here: the worker thread, before it reads results.
            self.ids_here, self.mask_sent, self.mask_read = _event(), _event(), _event()
            self.drafted, self.chosen, self.results_here = _event(), _event(), _event()
            self.target_done, self.mask_ready = _event(timed=True), _event(timed=True)

    @property
    def host_ids(self) -> NDArray[np.int64]:
        """Drafted ids [B, W] of the step, column 0 the anchors; [0, 0] in a step without drafts."""
        if self.stage < Stage.FINISHED:
            raise InvariantError(f"ids of a step that is {self.stage.name.lower()}")
        return self._ids()

    def _ids(self) -> NDArray[np.int64]:
        count, width = self.num_ids
        array: NDArray[np.int64] = self.ids.view(-1)[: count * width].view(count, width).numpy()
        return array


class Pipeline:
    """Owned by the tick thread. Memory, streams and events are made here, and none in a step.

    rows: most rows of a step that drafts or has grammars. width: of a window of drafted ids. mask_width: of a window
    that grammars hold, 0 where there are none. num_results: most doubles that a step emits. clock: monotonic
    nanoseconds.
    """

    def __init__(
        self,
        rows: int,
        width: int,
        mask_width: int,
        vocab_size: int,
        num_results: int,
        device: torch.device,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self.rows, self.width = rows, width
        self.timings = Timings()
        self._device = device
        self._clock = clock
        self._slots = tuple(Slot(rows, width, mask_width, vocab_size, num_results, device) for _ in range(NUM_SLOTS))
        self._next = 0
        self.is_cuda = device.type == "cuda"
        # Starts its one thread with the first work. A thread begins on the first GPU, which may be another rank's.
        enter = partial(torch.cuda.set_device, device) if self.is_cuda else None
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="step-worker", initializer=enter)
        if self.is_cuda:
            self.copy_stream, self.results_stream = _stream(device), _stream(device)
        # Of `fetch`, which nobody leaves before they are read: the results stream waits for made, the host for here.
        self._chances = torch.zeros(rows * width, dtype=torch.float32, pin_memory=self.is_cuda)
        if self.is_cuda:
            self._chances_made, self._chances_here = _event(), _event()

    @staticmethod
    def reserved_bytes(rows: int, width: int, mask_width: int, vocab_size: int, num_results: int) -> tuple[int, int]:
        """Bytes of pinned (on cpu: plain) host memory and of device memory on cuda that a pipeline takes."""
        mask = rows * mask_width * -(-vocab_size // 32) * 4
        return NUM_SLOTS * (rows * width * 8 + num_results * 8 + mask) + rows * width * 4, NUM_SLOTS * mask

    def begin(self, ids: Tensor | None, work: Work | None) -> Slot:
        """Take a slot and send drafted ids to the host; on the cpu the walk starts, too. Waits for nothing.

        ids [B, W'] int64, contiguous, on the rank's device, W' at most W; column 0 holds the anchors. None in a step
        without drafts. work: None where no row has a grammar. Raises InvariantError for other ids, and where the step
        before the last one has not been consumed.
        """
        slot = self._slots[self._next]
        if slot.stage is not Stage.FREE:
            raise InvariantError(f"a step begins while {NUM_SLOTS} are not consumed; the older is {_name(slot.stage)}")
        if work is not None and slot.walk is None:
            raise InvariantError("a step with grammars in a pipeline without masks")
        if ids is not None:
            self._check(ids)
        self._next = (self._next + 1) % NUM_SLOTS
        slot.stage, slot.work, slot.num_mask_rows, slot.walk_ns = Stage.BEGUN, work, 0, 0
        slot.num_ids = (ids.shape[0], ids.shape[1]) if ids is not None else (0, 0)
        if ids is not None:
            self._fetch_ids(slot, ids)
        if not self.is_cuda and work is not None and self._lay(slot, work):
            slot.running = self._worker.submit(work.run, _walk_of(slot))
        return slot

    def launched(self, slot: Slot) -> None:
        """Note that the target's verification has been launched."""
        self._move(slot, Stage.BEGUN, Stage.LAUNCHED)
        if self.is_cuda and slot.work is not None:
            slot.target_done.record()

    def finish(self, slot: Slot) -> None:
        """Wait for the ids, walk the grammars, and have the current stream wait for the masks.

        Afterwards host_ids, num_mask_rows and words may be read. Raises what the walk raises.
        """
        self._move(slot, Stage.LAUNCHED, Stage.FINISHED)
        begun_ns = self._clock()
        if self.is_cuda:
            if slot.num_ids[0]:
                slot.ids_here.synchronize()
                slot.source = None
                if slot.work is not None:
                    self.timings.note("ids_wait", (self._clock() - begun_ns) / 1e9)
            if slot.work is not None and self._lay(slot, slot.work):
                slot.walk_ns = slot.work.run(_walk_of(slot))
                self._send_mask(slot)
        elif slot.running is not None:
            slot.walk_ns, slot.running = slot.running.result(), None
        if slot.num_mask_rows:
            self.timings.note("traverse", slot.walk_ns / 1e9)
            self.timings.note("finish", (self._clock() - begun_ns) / 1e9)

    def emit(self, slot: Slot, values: Tensor) -> None:
        """Send what was chosen to the host; whatever reads the masks is on the current stream already.

        values [K] float64 on the rank's device, K at most num_results. They stay referenced until they have been read.
        Raises InvariantError for more.
        """
        self._move(slot, Stage.FINISHED, Stage.EMITTED)
        count = values.numel()
        if count > slot.results.numel():
            raise InvariantError(f"a step gave {count} results, and no step gives more than {slot.results.numel()}")
        if not self.is_cuda:
            slot.emitted = Future()
            slot.emitted.set_result(values.tolist())
            return
        if slot.num_mask_rows:
            slot.mask_read.record()
        if not count:
            slot.emitted = Future()
            slot.emitted.set_result([])
            return
        self._copy(values, slot.results[:count], self.results_stream, slot.chosen, slot.results_here)
        slot.emitted = self._worker.submit(_read, slot, values)

    def consume(self, slot: Slot) -> list[float]:
        """Wait for what was chosen and give the slot back. Raises FatalError when it cannot be read."""
        if slot.emitted is None:
            raise InvariantError(f"a step is consumed that is {_name(slot.stage)}")
        self._move(slot, Stage.EMITTED, Stage.FREE)
        emitted, slot.emitted, slot.work = slot.emitted, None, None
        try:
            return emitted.result()
        except RuntimeError as error:  # what torch raises for every failure of a device
            raise FatalError(f"the results of a step did not come: {error}") from error

    def fetch(self, values: Tensor) -> list[list[float]]:
        """Bring chances [B, K] float32 to the host now, where a layout depends on them; waits for no later work.

        Raises InvariantError for more than there are drafts, or another type.
        """
        if values.dtype != torch.float32 or values.numel() > self._chances.numel():
            raise InvariantError(f"{tuple(values.shape)} {values.dtype} as chances of at most {self._chances.numel()}")
        host = values
        if self.is_cuda and values.numel():
            host = self._chances[: values.numel()].view(values.shape)
            self._copy(values, host, self.results_stream, self._chances_made, self._chances_here)
            self._chances_here.synchronize()
        rows: list[list[float]] = host.tolist()
        return rows

    def close(self) -> None:
        """End the worker thread; a walk returns in bounded time."""
        self._worker.shutdown()

    def _check(self, ids: Tensor) -> None:
        fits = ids.dim() == 2 and 1 <= ids.shape[0] <= self.rows and 1 <= ids.shape[1] <= self.width
        if not fits or ids.dtype != torch.int64 or not ids.is_contiguous() or ids.device.type != self._device.type:
            raise InvariantError(
                f"drafted ids are {ids.dtype} of shape {tuple(ids.shape)} on {ids.device}, contiguous: "
                f"{ids.is_contiguous()}; wanted int64, contiguous, on {self._device}, at most {self.rows} rows of "
                f"{self.width}"
            )

    def _fetch_ids(self, slot: Slot, ids: Tensor) -> None:
        host = slot.ids.view(-1)[: ids.numel()].view(ids.shape)
        if self.is_cuda:
            slot.source = ids
            self._copy(ids, host, self.copy_stream, slot.drafted, slot.ids_here)
        else:
            host.copy_(ids)

    def _lay(self, slot: Slot, work: Work) -> bool:
        """Fill the slot's walk. Its mask may still be on its way to the device, two steps later hardly ever."""
        if self.is_cuda:
            slot.mask_sent.synchronize()
        slot.num_mask_rows = work.lay(_walk_of(slot), slot._ids())
        return slot.num_mask_rows > 0

    def _send_mask(self, slot: Slot) -> None:
        """Copy the mask beside the forward pass; the current stream waits for it, the host does not."""
        used = slice(0, slot.num_mask_rows)
        with torch.cuda.stream(self.copy_stream):
            self.copy_stream.wait_event(slot.mask_read)
            slot.words[used].copy_(slot.mask[used], non_blocking=True)
            slot.mask_sent.record()
        torch.cuda.current_stream().wait_event(slot.mask_sent)
        slot.mask_ready.record()
        self.timings.open("gpu_gap", slot.target_done, slot.mask_ready)

    def _copy(
        self, source: Tensor, host: Tensor, stream: torch.cuda.Stream, made: torch.cuda.Event, here: torch.cuda.Event
    ) -> None:
        """Copy to pinned memory on a stream, behind what makes the source; `here` says when it is done.

        Until then the caller keeps the source: torch would hand its memory out again on the stream that made it.
        """
        made.record()
        with torch.cuda.stream(stream):
            stream.wait_event(made)
            host.copy_(source, non_blocking=True)
            here.record()

    def _move(self, slot: Slot, wanted: Stage, to: Stage) -> None:
        if slot.stage is not wanted:
            raise InvariantError(f"a step is to be {_name(to)} that is {_name(slot.stage)}, not {_name(wanted)}")
        slot.stage = to


def _read(slot: Slot, source: Tensor) -> list[float]:
    """Turn a step's results into a list, once they are here; the worker thread's part. Keeps the source until then."""
    slot.results_here.synchronize()
    values: list[float] = slot.results[: source.numel()].tolist()
    return values


def _event(*, timed: bool = False) -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=timed)  # type: ignore[no-untyped-call]


def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _walk_of(slot: Slot) -> Walk:
    if slot.walk is None:
        raise InvariantError("a walk in a pipeline without masks")
    return slot.walk


def _name(stage: Stage) -> str:
    return "consumed" if stage is Stage.FREE else stage.name.lower()
