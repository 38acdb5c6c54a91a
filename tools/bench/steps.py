"""Measures what a decode step takes by rows and verified tokens, and writes the file that dspark.cost_table names.

    python -m tools.bench steps [--out FILE] [--max-rows 32] [--checkpoint DIR] [--device cpu|cuda] [--dtype float32]
        [--eager]

The real executor runs in one process, both expert shards in it: as much work as one of two ranks has when its peer has
the same rows. What the exchange and the scheduler add to every step is left out: a server learns that from the steps it
serves (scheduler/pace.py), and has from the table how times grow with rows and tokens. On cuda steps are replayed from
graphs, as two ranks on two GPUs do it; --eager is for a device that both share. Medians of --rounds steps, taken in
turn; a figure below one for less work takes that one's place.
"""

from __future__ import annotations

import argparse
import itertools
import json
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Literal, get_args

import msgspec
import torch

from dsparkd.executor.costs import VERSION, CostTable, Origin
from dsparkd.executor.draft import DraftDesk
from dsparkd.executor.executor import DTYPES, Executor
from dsparkd.executor.plan import Plan, PlanRow, SlotStart, Speculation, StepKind
from dsparkd.executor.shapes import ShapeLimits, choose_tiers
from dsparkd.kv.geometry import PoolSizes
from dsparkd.kv.pool import KVPool
from dsparkd.messages import SamplingParams
from dsparkd.model.config import load_model_config
from dsparkd.model.weights import load_both_draft_shards, load_both_shards
from dsparkd.text.tokenizer import Tokenizer
from tools.harness import ensure_checkpoint

DType = Literal["float32", "bfloat16"]

PAGE_TOKENS = 256
CONTEXT_TOKENS = 600
WARM_UP = 2
GREEDY = SamplingParams(max_tokens=64, seed=1, temperature=0.0)


class Bench:
    """An executor over empty sequences of CONTEXT_TOKENS, max_rows of them. has_graphs: steps are replayed."""

    def __init__(
        self, checkpoint: Path, device: torch.device, dtype: DType, max_rows: int, *, has_graphs: bool
    ) -> None:
        config = load_model_config(checkpoint)
        self.gamma = config.gamma
        model, exchange = load_both_shards(checkpoint, config, DTYPES[dtype], device)
        drafter, draft_exchange = load_both_draft_shards(checkpoint, model)
        geometry = config.kv_geometry(PAGE_TOKENS, dtype, drafts=True)
        self._num_pages = geometry.num_pages_for(CONTEXT_TOKENS + 1 + self.gamma)
        sizes = PoolSizes(1 + max_rows * self._num_pages, 1 + max_rows, 1)
        pool = KVPool(geometry, sizes, DTYPES[dtype], device)
        self._desk = DraftDesk(drafter, pool, draft_exchange)
        self._executor = Executor(
            0, model, 0, pool, exchange, Tokenizer.load(checkpoint), masker=None, draft_desk=self._desk
        )
        self._device = device
        self._has_graphs = has_graphs
        if has_graphs:
            width = 1 + self.gamma
            limits = ShapeLimits(max_rows, self._num_pages, width)
            # A step that drafts is to hold both parts.
            self._executor.capture(choose_tiers(max_rows * width), limits, lambda done, total: None, drafts_ahead=False)
        starts = tuple(SlotStart(slot, None, 0) for slot in range(1, 1 + max_rows))
        self._executor.step(Plan(StepKind.DECODE, self._rows(max_rows), starts), (max_rows, 0))

    def _rows(self, count: int) -> tuple[PlanRow, ...]:
        return tuple(
            PlanRow(
                request_id=str(index),
                slot=1 + index,
                input_ids=(3 + index,),
                start=CONTEXT_TOKENS,
                page_table=tuple(range(1 + index * self._num_pages, 1 + (1 + index) * self._num_pages)),
                num_logits=1,
                sampling=GREEDY,
                prompt_ids=(3 + index,),
                output_ids=(),
            )
            for index in range(count)
        )

    def step(self, num_rows: int, width: int) -> None:
        """One step of so many windows, drafting included where they are wider than the anchor."""
        speculation = Speculation(width - 1, (num_rows * width, 0)) if width > 1 else None
        plan = Plan(StepKind.DECODE, self._rows(num_rows), speculation=speculation, replays=self._has_graphs)
        self._executor.step(plan, (num_rows, 0))
        self._wait()

    def draft(self, num_rows: int) -> None:
        """Draft alone."""
        rows, graphs = self._rows(num_rows), self._executor.graphs
        tier = graphs.draft_tier((num_rows, 0)) if graphs is not None else None
        with torch.inference_mode():
            if graphs is not None and tier is not None:
                graphs.propose(tier, rows)
            else:
                self._desk.propose(rows, (num_rows, 0))
        self._wait()

    def close(self) -> None:
        """Let go of graphs before the process ends."""
        self._executor.close()

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize()


def measure(bench: Bench, rows: Sequence[int], widths: Sequence[int], rounds: int, origin: Origin) -> CostTable:
    """Take every kind of step in turn, so that a machine that slows down slows down all of them."""
    calls: dict[tuple[int, int], Callable[[], None]] = {}
    for num_rows in rows:
        calls[num_rows, 0] = partial(bench.draft, num_rows)
        for width in widths:
            calls[num_rows, width] = partial(bench.step, num_rows, width)
    times: dict[tuple[int, int], list[float]] = {key: [] for key in calls}
    for turn in range(WARM_UP + rounds):
        for key, call in calls.items():
            begun = time.perf_counter()
            call()
            if turn >= WARM_UP:
                times[key].append(time.perf_counter() - begun)
    medians = {key: statistics.median(values) for key, values in times.items()}
    draft_s = growing([medians[num_rows, 0] for num_rows in rows])
    # A step that drafts holds both parts; the plain one only the target's.
    verify_s = [
        [medians[num_rows, width] - (medians[num_rows, 0] if width > 1 else 0.0) for width in widths]
        for num_rows in rows
    ]
    return CostTable(
        version=VERSION,
        origin=origin,
        rows=tuple(rows),
        widths=tuple(widths),
        verify_s=tuple(map(tuple, growing_both_ways(verify_s))),
        draft_s=tuple(draft_s),
    )


def growing(values: Sequence[float]) -> list[float]:
    """Replace each value that is less than one before it by that one."""
    return list(itertools.accumulate(values, max))


def growing_both_ways(lines: Sequence[Sequence[float]]) -> list[list[float]]:
    """The same along both axes."""
    columns = zip(*(growing(line) for line in lines), strict=True)
    return [list(line) for line in zip(*(growing(column) for column in columns), strict=True)]


def powers_to(most: int) -> list[int]:
    """1, 2, 4, ... and `most` itself."""
    return sorted({1, most} | {2**i for i in range(most.bit_length()) if 2**i <= most})


def table_text(table: CostTable) -> str:
    """Milliseconds by rows and widths."""
    lines = ["rows    draft " + "".join(f"{f'width {width}':>10}" for width in table.widths) + "   ms, target's part"]
    for num_rows, draft_s, verify_s in zip(table.rows, table.draft_s, table.verify_s, strict=True):
        lines.append(f"{num_rows:4} {1e3 * draft_s:8.2f} " + "".join(f"{1e3 * value:10.2f}" for value in verify_s))
    return "\n".join(lines)


def main(argv: list[str]) -> int:
    """Measure and write; always 0."""
    parser = argparse.ArgumentParser(prog="python -m tools.bench steps", description=str(__doc__).splitlines()[0])
    parser.add_argument("--out", type=Path, help="the file to write")
    parser.add_argument("--checkpoint", type=Path, help="directory; the shipped checkpoint by default")
    parser.add_argument("--max-rows", type=int, default=32, help="scheduler.max_rows of the server")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", choices=get_args(DType), default="float32")
    parser.add_argument("--eager", action="store_true", help="cuda: without graphs")
    parser.add_argument("--json", action="store_true", help="print the file instead of a table")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)  # as a rank
    began = time.perf_counter()
    checkpoint = (arguments.checkpoint or ensure_checkpoint()).resolve()
    is_cuda = arguments.device == "cuda"
    place = torch.device("cuda", 0) if is_cuda else torch.device("cpu")
    has_graphs = is_cuda and not arguments.eager
    bench = Bench(checkpoint, place, arguments.dtype, arguments.max_rows, has_graphs=has_graphs)
    device = torch.cuda.get_device_name() if is_cuda else platform.processor() or platform.machine()
    origin = Origin(
        machine=f"{platform.node()}, {device}",
        device=arguments.device,
        dtype=arguments.dtype,
        checkpoint=checkpoint.name,
        measured=datetime.now(UTC).strftime("%Y-%m-%dT%H:%MZ"),
    )
    widths = range(1, bench.gamma + 2)
    table = measure(bench, powers_to(arguments.max_rows), widths, arguments.rounds, origin)
    bench.close()
    text = msgspec.json.format(msgspec.json.encode(table), indent=1).decode()
    if arguments.out is not None:
        arguments.out.write_text(text + "\n", encoding="utf-8")
    elapsed = round(time.perf_counter() - began, 1)
    if arguments.json:
        print(json.dumps(json.loads(text) | {"elapsed_s": elapsed}))
    else:
        print(table_text(table))
        print(f"{arguments.out or 'nothing'} written, {elapsed} s")
    return 0
