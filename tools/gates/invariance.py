"""Compares the ids of 64 prompts over every way to compute them: alone, batched, by rank, cache, chunk and retract.

    python -m tools.gates invariance [--requests 64] [--dtype float32|bfloat16|both] [--device cpu|cuda]
        [--shared-device] [--dense] [--kv-dtype model|fp8] [--json]

Each way starts from the same prompts, half greedy, half seeded under every sampling rule, and is compared token by
token with the first one: each prompt alone on rank 0, nothing cached. Prompts that grow by a page have a base of their
own, on an ample pool. The log-probability of each token is compared
with all its digits, so a difference that has not changed an id yet is seen, too.

In float32 nothing may differ, and on cuda in bfloat16 neither: its kernels give a row the same bits whatever it is
computed with. The cpu's bfloat16 is torch's, whose bits depend on the batch: there the count is the result. On cuda
each dtype has its own base, "both" is bfloat16 alone, and --dense and --kv-dtype choose other weights and caches.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from dsparkd.kv.geometry import PoolSizes
from dsparkd.model.config import load_model_config
from dsparkd.text.tokenizer import Tokenizer
from tools.harness import Server, Tables, ensure_checkpoint
from tools.placement import DType, Placement, add_arguments, placement
from tools.workload import Answer, Client, Item, growing_items, mixed_items, num_differing

MAX_TOKENS = 16
CONCURRENCY = 32
MAX_CONTEXT = 1024
PAGE_TOKENS = 256
# A rank admits a row if each running one can still grow by a page. Five pages (and the null one) so take in three rows
# of a page each, and when all three have grown by a page, one page is missing: the youngest is retracted. The others
# end together, and three are let in again. Fewer pages would not hold a sequence of MAX_CONTEXT.
TINY_PAGES, TINY_ROWS, TINY_CHUNK_TOKENS = 6, 8, 1024


Prove = Callable[[list[Item], list[Answer]], tuple[str, bool]]


@dataclass(frozen=True)
class Way:
    """One way to compute all prompts. proof: what shows that the way was really taken, and whether it was."""

    name: str
    dtype: str
    device: str
    differing_requests: int
    differing_ids: int
    differing_logprobs: int
    compared_ids: int
    proof: str
    proven: bool
    seconds: float

    @property
    def ok(self) -> bool:
        """All but the cpu's bfloat16 must be exact."""
        is_exact = not (self.differing_ids or self.differing_logprobs)
        return self.proven and (is_exact or (self.device, self.dtype) == ("cpu", "bfloat16"))


class Gate:
    """Runs the ways of one dtype and compares each with the first."""

    def __init__(self, placed: Placement, count: int, checkpoint: Path, report: Callable[[Way], None]) -> None:
        self._placed = placed
        vocab_size = Tokenizer.load(checkpoint).vocab_size
        self._mixed = mixed_items(count, vocab_size, MAX_TOKENS, seed=1)
        self._growing = growing_items(count, vocab_size, MAX_TOKENS, seed=2, page_tokens=PAGE_TOKENS)
        self._checkpoint = checkpoint
        self._report = report
        self._bases: dict[int, list[Answer]] = {}  # first answers, by the identity of the item list

    def run(self) -> None:
        """Start three servers in turn and take every way."""
        with self._server({"scheduler": {"chunk_tokens": 4096}}) as server:
            client = Client(server.wait_ready().base_url)
            mixed, growing = self._mixed, self._growing
            self._take("alone, rank 0, cold", client, mixed, 1, lambda index: 0, _no_hits)
            self._take("32 concurrent, rank 1, cold", client, mixed, CONCURRENCY, lambda index: 1, _no_hits)
            self._take("32 concurrent, rank 0, prefix hit", client, mixed, CONCURRENCY, lambda index: 0, _hits)
            self._take("alone, rank 1, prefix hit", client, mixed, 1, lambda index: 1, _hits)
            self._take("growing: 32 concurrent, both ranks", client, growing, CONCURRENCY, lambda i: i % 2, _no_hits)
        with self._server({"scheduler": {"chunk_tokens": 256}}) as server:
            client = Client(server.wait_ready().base_url)
            name = "32 concurrent, both ranks, chunks of 256"
            self._take(name, client, mixed, CONCURRENCY, lambda index: index % 2, _no_hits)
        with self._server(tiny_pool(self._checkpoint, self._placed)) as server:
            client = Client(server.wait_ready().base_url)
            name = "growing: 32 concurrent, forced retract"
            self._take(name, client, growing, CONCURRENCY, lambda i: i % 2, lambda *_: _retractions(client))

    def _server(self, overrides: Tables) -> Server:
        engine = {"max_context_tokens": MAX_CONTEXT, "checkpoint": str(self._checkpoint), **self._placed.engine()}
        base: dict[str, dict[str, object]] = {"engine": engine, "kv": {"page_tokens": PAGE_TOKENS}}
        for table, keys in overrides.items():
            base[table] = base.get(table, {}) | dict(keys)
        return Server(base)

    def _take(
        self,
        name: str,
        client: Client,
        items: list[Item],
        concurrency: int,
        dp_rank: Callable[[int], int],
        prove: Prove,
    ) -> None:
        began = time.perf_counter()
        answers = client.complete_all(items, concurrency, dp_rank)
        base = self._bases.setdefault(id(items), answers)
        proof, proven = prove(items, answers)
        pairs = list(zip(base, answers, strict=True))
        way = Way(
            name=name,
            dtype=self._placed.dtype,
            device=self._placed.device,
            differing_requests=sum(base.tokens != answer.tokens for base, answer in pairs),
            differing_ids=sum(num_differing(base.tokens, answer.tokens) for base, answer in pairs),
            differing_logprobs=sum(num_differing(base.logprobs, answer.logprobs) for base, answer in pairs),
            compared_ids=sum(len(answer.tokens) for answer in base),
            proof=proof,
            proven=proven,
            seconds=round(time.perf_counter() - began, 1),
        )
        self._report(way)


def tiny_pool(checkpoint: Path, placed: Placement) -> Tables:
    """A budget of TINY_PAGES pages for TINY_ROWS rows, and few snapshots."""
    geometry = load_model_config(checkpoint).kv_geometry(
        PAGE_TOKENS, placed.dtype, drafts=True, kv_dtype=placed.kv_dtype
    )
    sizes = PoolSizes(TINY_PAGES, TINY_ROWS + 1, num_snapshots=2, num_inner_slots=TINY_CHUNK_TOKENS // PAGE_TOKENS)
    rest = TINY_PAGES * geometry.page_bytes + 2 * geometry.snapshot_bytes
    share = (2 * geometry.snapshot_bytes + 1) / rest  # a byte more, for the rounding of the product
    return {
        "kv": {"device_bytes": sizes.device_bytes(geometry), "snapshot_share": share},
        "scheduler": {"max_rows": TINY_ROWS, "chunk_tokens": TINY_CHUNK_TOKENS},
    }


def _no_hits(items: list[Item], answers: list[Answer]) -> tuple[str, bool]:
    cached = sum(answer.cached_tokens for answer in answers)
    return f"cached tokens: {cached}", cached == 0


def _hits(items: list[Item], answers: list[Answer]) -> tuple[str, bool]:
    """Every prompt of more than a page must have found it."""
    long = [answer for item, answer in zip(items, answers, strict=True) if len(item.prompt) > PAGE_TOKENS]
    cached = sum(answer.cached_tokens for answer in answers)
    hits = sum(answer.cached_tokens > 0 for answer in long)
    return f"cached tokens: {cached} in {hits} of {len(long)} long prompts", hits == len(long) > 0


def _retractions(client: Client) -> tuple[str, bool]:
    time.sleep(1.5)  # a rank's counters reach the parent once a second
    count = int(client.counter("dsparkd_retractions_total"))
    return f"retractions: {count}", count > 0


def main(argv: list[str]) -> int:
    """Take every way; 0 when float32 is exact and each way was really taken."""
    parser = argparse.ArgumentParser(prog="python -m tools.gates invariance", description="ids by every way")
    parser.add_argument("--requests", type=int, default=64, help="prompts a way")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "both"), default="both")
    add_arguments(parser, dtype=False)
    parser.add_argument("--checkpoint", type=Path, help="directory; the small checkpoint by default")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    arguments = parser.parse_args(argv)
    checkpoint = (arguments.checkpoint or ensure_checkpoint()).resolve()
    ways: list[Way] = []
    began = time.perf_counter()

    def report(way: Way) -> None:
        ways.append(way)
        if not arguments.json:
            print(
                f"{way.dtype:9} {way.name:42} {way.differing_ids:5} {way.differing_logprobs:8} {way.compared_ids:6} "
                f"{way.seconds:6.1f}  {way.proof:45} {'ok' if way.ok else 'FAIL'}",
                flush=True,
            )

    if not arguments.json:
        print(f"{'dtype':9} {'way':42} {'ids':>5} {'logprobs':>8} {'of':>6} {'s':>6}  proof")
    both: tuple[DType, ...] = ("float32", "bfloat16") if arguments.device == "cpu" else ("bfloat16",)
    dtypes: tuple[DType, ...] = both if arguments.dtype == "both" else (arguments.dtype,)
    for dtype in dtypes:
        placed = placement(arguments, dtype)
        with placed.checkpoint(checkpoint) as directory:
            Gate(placed, arguments.requests, directory, report).run()
    elapsed = round(time.perf_counter() - began, 1)
    ok = all(way.ok for way in ways)
    if arguments.json:
        print(
            json.dumps(
                {
                    "ok": ok,
                    "elapsed_s": elapsed,
                    "placed": str(placed),
                    "requests": arguments.requests,
                    "ways": [asdict(w) for w in ways],
                }
            )
        )
    else:
        print(f"{'ok' if ok else 'FAIL'}: {placed}: {arguments.requests} requests, {len(ways)} ways, {elapsed} s")
    return 0 if ok else 1
