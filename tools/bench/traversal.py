"""Measures the masks of 64 constrained rows at 129,280 ids: the native walk against XGrammar's own call in a loop.

    python -m tools.bench traversal [--rounds 60] [--rows 64] [--forward-ms 30] [--json]

Rows of six nodes (an anchor and five drafts that their grammar accepts), in a tool-like schema and in free JSON. The
loop's call keeps Python's lock or gives it up, as XGrammar does by itself. Beside it: nothing; a thread that compiles,
as one of the ranks does; a thread that turns results into lists; both; a thread that computes in Python. Then how much
of the native walk, on one thread, a forward pass of --forward-ms hides when both run at once: matrix products on
another thread. A machine whose every core computes forward passes hides nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack

import torch
from xgrammar.tvm_ffi_binding import GrammarMatcher

from dsparkd import system
from dsparkd.grammar.compiler import Compiler
from dsparkd.grammar.matcher import keep_lock_in_short_calls
from dsparkd.grammar.traversal import StockTraversal
from dsparkd.messages import Grammar
from dsparkd.native.traversal import NativeTraversal, Walk
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

RESULT_INTERVAL_S = 0.002


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
    """Matrix products that take about so many milliseconds on one thread."""

    def __init__(self, milliseconds: float) -> None:
        self._left, self._right = torch.randn(96, 1024), torch.randn(1024, 1024)
        once = statistics.median(timed(lambda: self._left @ self._right) for _ in range(50))
        self._count = max(1, round(milliseconds / once))

    def run(self) -> None:
        """Compute; gives up Python's lock for most of it, as a model's forward pass does."""
        for _ in range(self._count):
            self._left @ self._right


def measure_hiding(walk: Walk, native: NativeTraversal, forward: Forward, rounds: int) -> Figures:
    """How much of the walk costs no time when it runs beside a forward pass; medians over the rounds."""

    def together() -> None:
        walker = threading.Thread(target=native.run, args=(walk, 0))
        walker.start()
        forward.run()
        walker.join()

    times: dict[str, list[float]] = {"forward": [], "walk": [], "together": []}
    for _ in range(rounds):
        times["forward"].append(timed(forward.run))
        times["walk"].append(timed(lambda: native.run(walk, 0)))
        times["together"].append(timed(together))
    medians = {name: statistics.median(values) for name, values in times.items()}
    left = max(0.0, medians["together"] - medians["forward"])
    hidden = max(0.0, 1 - left / medians["walk"])
    figures: Figures = {f"{name}_ms": value for name, value in medians.items()}
    return figures | {"hidden_share": hidden}


def render(cases: dict[str, Figures]) -> str:
    """A line for each surrounding of each grammar."""
    lines = [f"{'p50/p99 ms':32}{'native':>18}{'loop, lock given up':>24}{'loop, lock kept':>20}"]
    for grammar, case in cases.items():
        for name, row in case.items():
            if not isinstance(row, dict) or "native" not in row:
                lines.append(f"{grammar}, {name}: {json.dumps(row)}")
                continue
            cells = [f"{pair['p50']:9.2f}/{pair['p99']:8.2f}" for pair in row.values()]
            lines.append(f"{grammar + ', ' + name:32}{cells[0]:>18}{cells[1]:>24}{cells[2]:>20}")
    return "\n".join(lines)


def main(argv: list[str]) -> int:
    """Measure and print; always 0: figures, not verdicts."""
    parser = argparse.ArgumentParser(prog="python -m tools.bench traversal", description=str(__doc__).splitlines()[0])
    parser.add_argument("--rounds", type=int, default=60, help="steps a way and a surrounding")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--forward-ms", type=float, default=30.0, help="of the forward pass that hides the walk")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    began = time.perf_counter()
    load = os.getloadavg()[0]
    vocabularies = load_vocabularies()
    vocab_size = vocabularies.plain.vocab_size
    compiler = Compiler(vocabularies, num_threads=1)
    keep_lock_in_short_calls()
    num_threads = min(2, system.cpu_count_available())
    native = NativeTraversal.open(num_threads)
    single = NativeTraversal.open(1)
    forward = Forward(arguments.forward_ms)
    cases: dict[str, Figures] = {}
    free = Grammar(kind="json_schema", text='{"type":"object"}')
    for name, grammar in (("schema", schema(12)), ("free JSON", free)):
        walk = Step(compiler.compile(grammar), arguments.rows, vocab_size, seed=arguments.rows).walk
        cases[name] = measure(compiler, walk, native, arguments.rounds)
        cases[name]["hiding"] = measure_hiding(walk, single, forward, arguments.rounds)
    native.close()
    single.close()
    elapsed = round(time.perf_counter() - began, 1)
    if arguments.json:
        cores = system.cpu_count_available()
        facts: Figures = {
            "machine": f"{platform.machine()}, {cores} cores, Python {platform.python_version()}",
            "load_before": load,
            "vocab_size": vocab_size,
            "rows": arguments.rows,
            "native_threads": num_threads,
            "walks_ms": cases,
            "elapsed_s": elapsed,
        }
        print(json.dumps(facts))
    else:
        print(render(cases))
        print(f"{arguments.rows} rows of {NODES} at {vocab_size} ids, load before {load:.1f}, {elapsed} s")
    return 0
