"""What the scheduler's policy makes of given step times: first tokens and throughput of many streams, without a device.

    python -m tools.bench policy [--results FILE] [--concurrency 1,16,64,128] [--prompt-tokens 1024] [--json]
        [--output-tokens 256] [--chunk-tokens 2048] [--streak 4] [--launch-ms 80] [--host-ms 5] [--arrival-ms 1.2]

Both ranks' real planners agree on each step and commit made-up ids; a clock goes on by what the step takes. Decode and
prefill times are those of a file of `bench geometry`, on the lines between what was measured; a step with chunks takes
--launch-ms at least, in which the host launches its kernels, and --host-ms more for what the device waits for. Requests
reach the ranks --arrival-ms after one another, the less loaded one each, as the front hands them on. For comparing
policies: with the results of the tree of 6afb5dc the policy of that tree gave first tokens of 16 and 128 streams within
a tenth of those that two GPUs served, of 64 an eighth sooner and of one a quarter.
"""

from __future__ import annotations

import argparse
import heapq
import json
import random
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dsparkd.executor.plan import Plan, RowOutput, StepKind, StepOutput
from dsparkd.messages import SamplingParams, TokenizedRequest
from dsparkd.scheduler.agreement import Intent, Payload, PlanExtra, combine, vote
from dsparkd.scheduler.policy import Limits, Planner, Proposal
from dsparkd.scheduler.queue import RequestQueue
from dsparkd.scheduler.request import Memory, Request
from dsparkd.scheduler.results import Committer
from tools.harness import ROOT

RESULTS = ROOT / "docs" / "results" / "h200x2" / "geometry.json"
NUM_REQUESTS = {1: 4, 16: 48, 64: 128, 128: 128}  # by concurrency, as bench geometry asks
PAGE_TOKENS, SNAPSHOT_TOKENS = 256, 4096
MAX_ROWS, MAX_CONTEXT = 72, 16_384
ROOM = 64 * MAX_CONTEXT // PAGE_TOKENS
FRONT_MS = 2.0  # from a client to a rank


@dataclass(frozen=True)
class StepTimes:
    """Milliseconds of a step. decode: rows a rank and times, ascending; prefill: tokens and times, ascending."""

    decode: tuple[tuple[float, ...], tuple[float, ...]]
    prefill: tuple[tuple[float, ...], tuple[float, ...]]
    launch_ms: float
    host_ms: float

    @classmethod
    def read(cls, path: Path, launch_ms: float, host_ms: float) -> StepTimes:
        """Take the times at the shortest context out of a file of bench geometry. Raises ValueError without any."""
        rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
        steps = [row for row in rows if row["kind"] == "decode" and not row["drafts"]]
        context = min((row["context"] for row in steps), default=0)
        decode = sorted((float(row["rows"]), float(row["ms"])) for row in steps if row["context"] == context)
        prefill = sorted((float(row["tokens"]), float(row["ms"])) for row in rows if row["kind"] == "prefill")
        if len(decode) < 2 or len(prefill) < 2:
            raise ValueError(f"{path} has {len(decode)} decode steps and {len(prefill)} prefills, not two of each")
        return cls(_columns(decode), _columns(prefill), launch_ms, host_ms)

    def of(self, kind: StepKind, plans: Sequence[Plan]) -> float:
        """What a step of both ranks takes: as long as the larger one."""
        num_rows = max(len(plan.rows) for plan in plans)
        if kind is StepKind.DECODE:
            return float(np.interp(num_rows, *self.decode))
        (few, many), (short, long) = (values[:2] for values in self.prefill)
        tokens = max(plan.num_tokens for plan in plans)
        device_ms = short + (tokens - few) * (long - short) / (many - few)
        return max(device_ms, float(np.interp(min(num_rows, tokens), *self.decode)), self.launch_ms) + self.host_ms


def _columns(pairs: Sequence[tuple[float, float]]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    return tuple(pair[0] for pair in pairs), tuple(pair[1] for pair in pairs)


class Texts:
    """Every id reads as a letter."""

    def token_bytes(self, token_id: int) -> bytes:
        """See scheduler.results.TokenTexts."""
        return b"a"

    def is_special(self, token_id: int) -> bool:
        """See scheduler.results.TokenTexts."""
        return False


class Rank:
    """The queue, memory, planner and committer of one rank."""

    def __init__(self, chunk_tokens: int) -> None:
        self.queue = RequestQueue()
        memory = Memory(num_pages=ROOM, num_slots=1 + MAX_ROWS, num_snapshots=ROOM, page_tokens=PAGE_TOKENS)
        self.planner = Planner(self.queue, memory, Limits(chunk_tokens, PAGE_TOKENS, SNAPSHOT_TOKENS, PAGE_TOKENS))
        self.committer = Committer(self.queue, memory, Texts(), frozenset())

    def offer(self, tick: int) -> tuple[Proposal, Payload]:
        """What this rank would run, and its vote."""
        proposal = self.planner.propose()
        num_rows = len(proposal.decode_rows)
        own = vote(
            num_chunk_tokens=proposal.num_chunk_tokens,
            num_chunk_logit_rows=proposal.num_chunk_logit_rows,
            num_decode_rows=num_rows,
            decode_graphs=True,
        )
        return proposal, Payload(own, PlanExtra(tick=tick, num_decode_rows=num_rows), Intent.NONE)


@dataclass(frozen=True)
class Load:
    """Streams at once, requests in all, and tokens of each. streak: scheduler.max_prefill_streak."""

    concurrency: int
    requests: int
    prompt_tokens: int
    output_tokens: int
    chunk_tokens: int
    streak: int
    arrival_ms: float


class Run:
    """One load, from its first request to its last token. Times are milliseconds from the beginning."""

    def __init__(self, load: Load, times: StepTimes) -> None:
        self._load = load
        self._times = times
        self._ranks = (Rank(load.chunk_tokens), Rank(load.chunk_tokens))
        self._draw = random.Random(0)
        self._arriving: list[tuple[float, int]] = []
        self._sent: dict[str, float] = {}
        self._first: dict[str, float] = {}
        self._last: dict[str, float] = {}
        self.now = 0.0
        self.steps: Counter[str] = Counter()

    def go(self) -> dict[str, object]:
        """Serve all of it; the figures of bench geometry's headline."""
        for place in range(min(self._load.concurrency, self._load.requests)):
            self._send(place * self._load.arrival_ms)
        streak = tick = 0
        while len(self._last) < self._load.requests:
            tick += 1
            self._take_in()
            offers = [rank.offer(tick) for rank in self._ranks]
            payloads = [payload for _, payload in offers]
            agreed = combine(*payloads, prefill_streak=streak, max_prefill_streak=self._load.streak)
            streak = agreed.prefill_streak
            if agreed.kind is StepKind.IDLE:
                self.now = self._arriving[0][0]
                continue
            self._step(agreed.kind, [proposal for proposal, _ in offers])
        return self._figures()

    def _send(self, late_ms: float = 0.0) -> None:
        number = len(self._sent)
        if number < self._load.requests:
            self._sent[str(number)] = self.now
            heapq.heappush(self._arriving, (self.now + FRONT_MS + late_ms, number))

    def _take_in(self) -> None:
        while self._arriving and self._arriving[0][0] <= self.now:
            _, number = heapq.heappop(self._arriving)
            sampling = SamplingParams(max_tokens=self._load.output_tokens, seed=1, temperature=0.0, ignore_eos=True)
            prompt = tuple(self._draw.choices(range(3, 1000), k=self._load.prompt_tokens))
            message = TokenizedRequest(
                request_id=str(number),
                prompt_ids=prompt,
                sampling=sampling,
                received_ns=1,
                encoded_ns=1,
                tokenized_ns=1,
                dispatched_ns=1,
            )
            request = Request(message, arrival=number, delivered_ns=1, max_context_tokens=MAX_CONTEXT)
            rank = min(self._ranks, key=lambda each: each.queue.num_outstanding_tokens)
            rank.queue.add([request])

    def _step(self, kind: StepKind, proposals: Sequence[Proposal]) -> None:
        plans = [rank.planner.settle(each, kind) for rank, each in zip(self._ranks, proposals, strict=True)]
        self.now += self._times.of(kind, plans)
        self.steps[kind.name.lower()] += 1
        for rank, plan in zip(self._ranks, plans, strict=True):
            output = StepOutput(tuple(RowOutput(() if row.sampling is None else (2,)) for row in plan.rows))
            done = rank.committer.commit(plan, output)
            for request, _ in done.advanced:
                self._first.setdefault(request.request_id, self.now)
            for end in done.ended:
                self._last[end.request.request_id] = self.now
                self._send()

    def _figures(self) -> dict[str, object]:
        first = sorted(self._first[name] - sent for name, sent in self._sent.items())
        outputs = self._load.output_tokens
        gaps = [(self._last[name] - self._first[name]) / max(outputs - 1, 1) for name in self._sent]
        return {
            "concurrency": self._load.concurrency,
            "requests": self._load.requests,
            "output_tokens_per_s": round(outputs * self._load.requests / self.now * 1e3, 1),
            "token_ms": round(statistics.median(gaps), 2),
            "ttft_p50_s": round(statistics.median(first) / 1e3, 3),
            "ttft_p99_s": round(first[-(-len(first) * 99 // 100) - 1] / 1e3, 3),
            "steps": dict(self.steps),
        }


def parse(argv: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tools.bench policy", description=str(__doc__).splitlines()[0])
    parser.add_argument("--results", type=Path, default=RESULTS, help="of bench geometry: where step times come from")
    parser.add_argument("--concurrency", default="1,16,64,128")
    parser.add_argument("--prompt-tokens", type=int, default=1024)
    parser.add_argument("--output-tokens", type=int, default=256)
    parser.add_argument("--chunk-tokens", type=int, default=2048)
    parser.add_argument("--streak", type=int, default=4, help="scheduler.max_prefill_streak")
    parser.add_argument("--launch-ms", type=float, default=80.0, help="of the host for a step with chunks")
    parser.add_argument("--host-ms", type=float, default=5.0, help="in which the device waits, of such a step")
    parser.add_argument("--arrival-ms", type=float, default=1.2, help="between two requests that are sent at once")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args(argv)


def main(argv: list[str]) -> int:
    """Go through each load; 0."""
    arguments = parse(argv)
    times = StepTimes.read(arguments.results, arguments.launch_ms, arguments.host_ms)
    rows = []
    for concurrency in (int(part) for part in arguments.concurrency.split(",")):
        load = Load(
            concurrency,
            NUM_REQUESTS.get(concurrency, concurrency),
            arguments.prompt_tokens,
            arguments.output_tokens,
            arguments.chunk_tokens,
            arguments.streak,
            arguments.arrival_ms,
        )
        row = Run(load, times).go()
        rows.append(row)
        if not arguments.json:
            print(
                f"C = {concurrency:3}: {row['output_tokens_per_s']:>8} output tokens/s, {row['token_ms']} ms a token, "
                f"first token {row['ttft_p50_s']} s, p99 {row['ttft_p99_s']} s, steps {row['steps']}"
            )
    if arguments.json:
        print(json.dumps({"bench": "policy", "arguments": argv, "rows": rows}))
    return 0
