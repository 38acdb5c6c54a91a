"""Feeds training: processes that draw, encode and pack examples into rows of one length.

    python -m tools.train_nano.stream --bench     tokens a second of one core, and how full the rows are

The order of rows depends on recipe, seed and number of workers alone. Letters: R rows, L tokens of a row.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import queue as queues
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing.context import SpawnContext
from multiprocessing.queues import Queue
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tools.train_nano.encode import Encoded, Encoder
from tools.train_nano.tasks import TASKS, draw
from tools.train_nano.tasks.example import Task
from tools.train_nano.tokenizer import DEFAULT_PATH

PAD_ID = 2
NO_DOCUMENT = -1
ALIGNMENT = 4  # so that a window of the ratio-4 compressor is four neighbours in a row, too
ROWS_A_MESSAGE = 8
MESSAGES_AHEAD = 8  # of each worker
_BUFFERED = 48  # examples among which the next one of a row is chosen
_SHUTDOWN_S = 5.0

# Shares of tokens. Recall examples are long and need few answer tokens, so their share counts little in steps learnt.
DEFAULT_MIX: dict[Task, float] = {
    "arithmetic": 0.2,
    "extraction": 0.25,
    "recall": 0.2,
    "copy": 0.12,
    "tools": 0.18,
    "chat": 0.05,
}


@dataclass(frozen=True)
class Recipe:
    """What rows are made of. mix: task -> share of tokens. lengths: tokens of a row."""

    lengths: int
    mix: dict[Task, float] = field(default_factory=lambda: dict(DEFAULT_MIX))
    tokenizer_path: Path = DEFAULT_PATH


class Row(NamedTuple):
    """One row. ids [L] uint16; loss [L] bool: ids[i] is to be predicted; document [L] int16, NO_DOCUMENT on padding."""

    ids: NDArray[np.uint16]
    loss: NDArray[np.bool_]
    document: NDArray[np.int16]


class Batch(NamedTuple):
    """Rows, stacked: ids [R, L] uint16, loss [R, L] bool, document [R, L] int16."""

    ids: NDArray[np.uint16]
    loss: NDArray[np.bool_]
    document: NDArray[np.int16]


def worker(recipe: Recipe, seed: int, worker: int, num_workers: int) -> Iterator[Row]:
    """Yield rows for ever; worker and num_workers choose which examples of the split train they are made of."""
    examples = _examples(recipe, seed, worker, num_workers)
    buffer = list(itertools.islice(examples, _BUFFERED))
    while True:
        # The oldest one comes first, so none waits for ever; then always the longest that still fits.
        chosen = [buffer.pop(0)]
        room = recipe.lengths - aligned(len(chosen[0].ids))
        while True:
            buffer.append(next(examples))
            sizes = (aligned(len(encoded.ids)) for encoded in buffer)
            fitting = [(size, -index) for index, size in enumerate(sizes) if size <= room]
            if not fitting:
                break
            size, index = max(fitting)
            chosen.append(buffer.pop(-index))
            room -= size
        yield pack_row(chosen, recipe.lengths)


def _examples(recipe: Recipe, seed: int, worker: int, num_workers: int) -> Iterator[Encoded]:
    """Yield encoded examples of the mix; the task is always the one that is farthest behind its share of tokens."""
    encoder = Encoder(recipe.tokenizer_path)
    indices = {task: itertools.count((seed << 40) + worker, num_workers) for task in recipe.mix}
    spent = dict.fromkeys(recipe.mix, 0)
    while True:
        task = min(recipe.mix, key=lambda task: spent[task] / recipe.mix[task])
        encoded = encoder.encode(draw(task, "train", next(indices[task]), recipe.lengths))
        if len(encoded.ids) <= recipe.lengths:
            spent[task] += len(encoded.ids)
            yield encoded


def aligned(length: int) -> int:
    """What a document takes of a row: the next one starts at a multiple of ALIGNMENT."""
    return -(-length // ALIGNMENT) * ALIGNMENT


def pack_row(documents: list[Encoded], length: int) -> Row:
    """Lay documents out in a row, in order. They must fit."""
    row = Row(np.full(length, PAD_ID, np.uint16), np.zeros(length, np.bool_), np.full(length, NO_DOCUMENT, np.int16))
    start = 0
    for number, encoded in enumerate(documents):
        end = start + len(encoded.ids)
        row.ids[start:end] = encoded.ids
        row.loss[start:end] = encoded.loss
        row.document[start:end] = number
        start += aligned(len(encoded.ids))
    return row


def _stack(rows: list[Row]) -> Batch:
    return Batch(*(np.stack(parts) for parts in zip(*rows, strict=True)))


def _produce(recipe: Recipe, seed: int, index: int, num_workers: int, queue: Queue[Batch]) -> None:
    """Main of a worker process."""
    rows = worker(recipe, seed, index, num_workers)
    while True:
        queue.put(_stack(list(itertools.islice(rows, ROWS_A_MESSAGE))))


class RowStream:
    """Batches out of num_workers processes. Owns them: use it in a `with` block. For one thread."""

    def __init__(self, recipe: Recipe, seed: int, num_workers: int) -> None:
        self._recipe = recipe
        self._seed = seed
        self._num_workers = num_workers
        self._queues: list[Queue[Batch]] = []
        self._processes: list[multiprocessing.context.SpawnProcess] = []
        self._turn = 0
        self._left: list[Row] = []

    def __enter__(self) -> RowStream:
        context: SpawnContext = multiprocessing.get_context("spawn")  # a fork would copy the parent's CUDA state
        for index in range(self._num_workers):
            queue: Queue[Batch] = context.Queue(MESSAGES_AHEAD)
            process = context.Process(
                target=_produce, args=(self._recipe, self._seed, index, self._num_workers, queue), daemon=True
            )
            process.start()
            self._queues.append(queue)
            self._processes.append(process)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for process in self._processes:
            process.terminate()
        for process, queue in zip(self._processes, self._queues, strict=True):
            process.join(_SHUTDOWN_S)
            queue.close()
            queue.cancel_join_thread()

    def batch(self, num_rows: int) -> Batch:
        """Wait for the next rows. Raises RuntimeError when a worker has ended."""
        while len(self._left) < num_rows:
            message = self._next_message()
            self._left += [Row(*parts) for parts in zip(*message, strict=True)]
        rows, self._left = self._left[:num_rows], self._left[num_rows:]
        return _stack(rows)

    def _next_message(self) -> Batch:
        queue = self._queues[self._turn]
        while True:
            try:
                message = queue.get(timeout=1.0)
            except queues.Empty:
                if not self._processes[self._turn].is_alive():
                    raise RuntimeError(f"data worker {self._turn} has ended; its error is above") from None
                continue
            self._turn = (self._turn + 1) % self._num_workers
            return message


def _bench(length: int, seconds: float) -> None:
    encoder = Encoder(DEFAULT_PATH)
    for task in TASKS:
        lengths: list[int] = []
        answers = 0
        start = time.perf_counter()
        while time.perf_counter() - start < seconds:
            encoded = encoder.encode(draw(task, "train", len(lengths)))
            lengths.append(len(encoded.ids))
            answers += sum(encoded.loss)
        elapsed = time.perf_counter() - start
        print(
            f"{task:10} {sum(lengths) / elapsed:9,.0f} tokens/s  examples {len(lengths):6,}"
            f"  mean {np.mean(lengths):7.1f}  longest {max(lengths):6,}  to predict {answers / len(lengths):6.1f}"
        )
    rows = worker(Recipe(length), seed=0, worker=0, num_workers=1)
    used = total = learnt = 0
    start = time.perf_counter()
    while time.perf_counter() - start < 2 * seconds:
        row = next(rows)
        used += int((row.document != NO_DOCUMENT).sum())
        learnt += int(row.loss.sum())
        total += length
    elapsed = time.perf_counter() - start
    print(
        f"rows of {length:,}: {used / elapsed:,.0f} tokens/s a core, {used / total:.2%} filled, "
        f"{learnt / used:.1%} of the tokens to predict"
    )


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bench", action="store_true", required=True)
    parser.add_argument("--length", type=int, default=2048, help="tokens of a row")
    parser.add_argument("--seconds", type=float, default=2.0, help="for each measurement")
    arguments = parser.parse_args()
    _bench(arguments.length, arguments.seconds)


if __name__ == "__main__":
    main()
