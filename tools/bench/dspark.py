"""Measures speculation against plain decoding: off, all drafts verified, and as many as pay, in turn in one run.

    python -m tools.bench dspark [--cost-table FILE] [--rounds 3] [--tokens 64] [--concurrency 1 8 32]
        [--device cpu|cuda] [--shared-device] [--json]

Three servers stand side by side (idle ones are parked and use no processor) and answer the same prompts of the test
split, copies among them, greedily and as long as they like up to --tokens; each round takes every mode at every
concurrency once, with prompts that no cache knows. Ratios are medians of a round's pairs. Without --cost-table one is
measured first.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

import msgspec

from dsparkd.executor.costs import CostTable
from tools import exam
from tools.bench.serve import percentile
from tools.bench.steps import table_text
from tools.harness import ROOT, Server, Tables, ensure_checkpoint, merge
from tools.train_nano.tasks import TASKS, draw
from tools.workload import Client

AIM_SINGLE = 1.8  # times the output tokens a second of plain decoding, one stream
AIM_BUSY = 0.97  # at the largest concurrency
PROMPT_TOKENS = 1024
COUNTER_S = 1.5
DTYPES = {"cpu": "float32", "cuda": "bfloat16"}  # of the two, the one that is served there
MODES: dict[str, Tables] = {
    "off": {"dspark": {"enabled": False}},
    "all": {"dspark": {"enabled": True, "verify": "all"}},
    "compact": {"dspark": {"enabled": True, "verify": "compact"}},
}


LAYOUTS = ("plain", "all", "compact")
TICKS = ("prefill", "mixed", "decode", "idle_peer")
FATES = ("accepted", "refused", "not_verified")


@dataclass(frozen=True)
class Steps:
    """What the server says of decode steps of one layout, of both ranks: how many, and their mean time, from a step's
    agreement to the next vote."""

    layout: str
    count: int
    mean_s: float


@dataclass(frozen=True)
class Run:
    """One mode at one concurrency in one round.

    tokens_per_s: output tokens over the wall time. decode_tokens_per_s: over the time from each stream's first event to
    its last, of all streams: prefill left out. length: accepted drafts and the token behind them, a step of a row.
    between_s: time from one event to the next over the tokens that the next one brought. ticks: of both ranks, by kind.
    drafts: by their fate.
    """

    mode: str
    concurrency: int
    round: int
    tokens: int
    tokens_per_s: float
    decode_tokens_per_s: float
    length: float
    between_p50_s: float
    between_p99_s: float
    steps: tuple[Steps, ...] = ()
    ticks: tuple[tuple[str, float], ...] = ()
    drafts: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True)
class Stream:
    """When each event with tokens came, and how many it brought."""

    events: tuple[tuple[float, int], ...]


async def stream_one(port: int, model: str, prompt: Sequence[int], max_tokens: int) -> Stream:
    """Send one streamed completion and note when how many tokens come."""
    fields = {
        "model": model,
        "prompt": list(prompt),
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "logprobs": 0,  # one entry a token, so that an event's tokens can be counted
    }
    body = json.dumps(fields).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
    writer.write(f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body)
    events: list[tuple[float, int]] = []
    async for line in reader:
        if not line.startswith(b"data: {"):
            continue
        event = json.loads(line[6:])
        if "error" in event:
            raise RuntimeError(f"the server answered {event}")
        for choice in event.get("choices", ()):
            count = len((choice.get("logprobs") or {}).get("tokens") or ())
            if count:
                events.append((time.perf_counter(), count))
    writer.close()
    return Stream(tuple(events))


async def stream_all(
    port: int, model: str, prompts: Sequence[Sequence[int]], concurrency: int, max_tokens: int
) -> list[Stream]:
    """Keep that many streams open until every prompt has been answered."""
    room = asyncio.Semaphore(concurrency)

    async def one(prompt: Sequence[int]) -> Stream:
        async with room:
            return await stream_one(port, model, prompt, max_tokens)

    return await asyncio.gather(*(one(prompt) for prompt in prompts))


@dataclass(frozen=True)
class Counts:
    """Counters of a server, of both ranks together."""

    emitted: float
    drafted_rows: float
    steps: Mapping[str, float]
    seconds: Mapping[str, float]
    ticks: Mapping[str, float]
    drafts: Mapping[str, float]

    @classmethod
    def read(cls, client: Client) -> Counts:
        """Read all of them now."""
        step = "dsparkd_decode_step_seconds"
        return cls(
            emitted=client.counter("dsparkd_accepted_per_step_sum"),
            drafted_rows=client.counter("dsparkd_accepted_per_step_count"),
            steps={layout: client.counter(f"{step}_count", f'layout="{layout}"') for layout in LAYOUTS},
            seconds={layout: client.counter(f"{step}_sum", f'layout="{layout}"') for layout in LAYOUTS},
            ticks={kind: client.counter("dsparkd_ticks_total", f'kind="{kind}"') for kind in TICKS},
            drafts={fate: client.counter("dsparkd_draft_tokens_total", f'fate="{fate}"') for fate in FATES},
        )


def _mean(before: Counts, after: Counts, layout: str) -> float:
    return (after.seconds[layout] - before.seconds[layout]) / (after.steps[layout] - before.steps[layout])


def take(
    server: Server, mode: str, concurrency: int, number: int, prompts: Sequence[Sequence[int]], max_tokens: int
) -> Run:
    """Run one mode once."""
    client = Client(server.base_url)
    before = Counts.read(client)
    began = time.perf_counter()
    streams = asyncio.run(stream_all(server.port, model_of(server), prompts, concurrency, max_tokens))
    seconds = time.perf_counter() - began
    time.sleep(COUNTER_S)
    after = Counts.read(client)
    emitted, drafted_rows = after.emitted - before.emitted, after.drafted_rows - before.drafted_rows
    tokens = sum(count for stream in streams for _, count in stream.events)
    spans = [stream.events[-1][0] - stream.events[0][0] for stream in streams if len(stream.events) > 1]
    later = sum(count for stream in streams for _, count in stream.events[1:])
    between = [
        (now - then) / count
        for stream in streams
        for (then, _), (now, count) in pairwise(stream.events)
        for _ in range(count)
    ]
    return Run(
        mode=mode,
        concurrency=concurrency,
        round=number,
        tokens=tokens,
        tokens_per_s=tokens / seconds,
        decode_tokens_per_s=later / max(1e-9, sum(spans)) * min(concurrency, len(prompts)),
        length=emitted / drafted_rows if drafted_rows else 1.0,
        between_p50_s=percentile(between, 50) if between else 0.0,
        between_p99_s=percentile(between, 99) if between else 0.0,
        steps=tuple(
            Steps(layout, round(after.steps[layout] - before.steps[layout]), _mean(before, after, layout))
            for layout in LAYOUTS
            if after.steps[layout] > before.steps[layout]
        ),
        ticks=tuple((kind, after.ticks[kind] - before.ticks[kind]) for kind in TICKS),
        drafts=tuple((fate, after.drafts[fate] - before.drafts[fate]) for fate in FATES),
    )


def model_of(server: Server) -> str:
    """The name of the one model."""
    return str(json.loads(server.get("/v1/models"))["data"][0]["id"])


def prompts_of(checkpoint: Path, first: int, count: int) -> list[list[int]]:
    """Prompts number first to first + count of a mix of all tasks' test splits."""
    encoding = exam.load_encoding(checkpoint)
    prompts = []
    for index in range(first, first + count):
        example = draw(TASKS[index % len(TASKS)], "test", index // len(TASKS), PROMPT_TOKENS)
        prompts.append(list(encoding.tokenize(encoding.render(example.chat)).ids))
    return prompts


def num_prompts(concurrency: int) -> int:
    """Enough for a steady state: each stream answers more than one."""
    return max(6, 2 * concurrency)


def measure(servers: dict[str, Server], checkpoint: Path, arguments: argparse.Namespace) -> list[Run]:
    """Take every mode at every concurrency in turn; the order of modes moves on by one each time."""
    runs: list[Run] = []
    first = 0
    modes = list(servers)
    for mode in modes:  # nobody's first step is measured
        take(servers[mode], mode, 2, -1, prompts_of(checkpoint, 10_000, 4), 16)
    for number in range(arguments.rounds):
        for concurrency in arguments.concurrency:
            prompts = prompts_of(checkpoint, first, num_prompts(concurrency))
            first += len(prompts)
            for mode in modes[number % len(modes) :] + modes[: number % len(modes)]:
                runs.append(take(servers[mode], mode, concurrency, number, prompts, arguments.tokens))
                if not arguments.json:
                    print(line_of(runs[-1]), flush=True)
    return runs


def line_of(run: Run) -> str:
    """One line under HEADER."""
    p50, p99 = 1e3 * run.between_p50_s, 1e3 * run.between_p99_s
    return (
        f"{run.concurrency:11} {run.round:5} {run.mode:8} {run.tokens:6} {run.tokens_per_s:9.1f} "
        f"{run.decode_tokens_per_s:9.1f} {run.length:7.2f} {p50:8.1f} {p99:8.1f}"
    )


def steps_of(run: Run) -> str:
    """One line of what the ranks did in a run: decode steps and their times, ticks and drafts of both ranks."""
    steps = ", ".join(f"{each.layout} {each.count} x {1e3 * each.mean_s:.2f} ms" for each in run.steps)
    ticks = ", ".join(f"{kind} {count:.0f}" for kind, count in run.ticks if count)
    drafts = ", ".join(f"{fate} {count:.0f}" for fate, count in run.drafts if count)
    return (
        f"{run.mode} at {run.concurrency}, round {run.round}: {steps or 'no steps'}; {ticks}; {drafts or 'no drafts'}"
    )


HEADER = "concurrency round mode     tokens  tokens/s  decoding  length  p50 ms   p99 ms (between tokens)"


def ratios(runs: Sequence[Run], mode: str, concurrency: int) -> tuple[float, float]:
    """Medians over the rounds of a mode's output tokens a second over plain decoding's: in all, and decoding alone."""
    whole, decoding = [], []
    for run in runs:
        if (run.mode, run.concurrency) != (mode, concurrency):
            continue
        plain = next(one for one in runs if (one.mode, one.concurrency, one.round) == ("off", concurrency, run.round))
        whole.append(run.tokens_per_s / plain.tokens_per_s)
        decoding.append(run.decode_tokens_per_s / plain.decode_tokens_per_s)
    return statistics.median(whole), statistics.median(decoding)


def cost_table(arguments: argparse.Namespace, directory: str) -> Path:
    """The file that was named, or one measured now."""
    if arguments.cost_table is not None:
        return Path(arguments.cost_table).resolve()
    out = Path(directory) / "costs.json"
    subprocess.run(
        [
            *(sys.executable, "-m", "tools.bench", "steps", "--out", str(out), "--max-rows", str(arguments.max_rows)),
            *("--device", arguments.device, "--dtype", DTYPES[arguments.device]),
            *(("--eager",) if arguments.shared_device else ()),
        ],
        cwd=ROOT,
        check=True,
        stdout=subprocess.DEVNULL,
    )
    return out


def main(argv: list[str]) -> int:
    """Measure and print; 0 whenever all ran: ratios are figures, not a verdict."""
    parser = argparse.ArgumentParser(prog="python -m tools.bench dspark", description=str(__doc__).splitlines()[0])
    parser.add_argument("--cost-table", help="for compact; measured first by default")
    parser.add_argument("--max-rows", type=int, default=32, help="scheduler.max_rows of the servers")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=64, help="of an answer at most")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--modes", nargs="+", choices=tuple(MODES), default=list(MODES), help="off is always there")
    parser.add_argument("--checkpoint", type=Path, help="directory; the shipped checkpoint by default")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="cuda: bfloat16")
    parser.add_argument("--shared-device", action="store_true", help="cuda: both ranks on one GPU")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    arguments = parser.parse_args(argv)
    began = time.perf_counter()
    load = os.getloadavg()[0]
    checkpoint = (arguments.checkpoint or ensure_checkpoint()).resolve()
    base: Tables = {
        "engine": {
            "checkpoint": str(checkpoint),
            "max_context_tokens": 2048,
            "device": arguments.device,
            "shared_device": arguments.shared_device,
            "dtype": DTYPES[arguments.device],
        },
        "scheduler": {"max_rows": arguments.max_rows},
    }
    if not arguments.json:
        print(HEADER)
    with ExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="dsparkd-bench-"))
        path = cost_table(arguments, directory)
        costs = {"dspark": {"cost_table": str(path)}}
        table = msgspec.json.decode(path.read_bytes(), type=CostTable)
        servers: dict[str, Server] = {}
        for mode in dict.fromkeys(["off", *arguments.modes]):
            overrides = merge(merge(base, MODES[mode]), costs if mode == "compact" else {})
            servers[mode] = stack.enter_context(Server(overrides)).wait_ready()
        runs = measure(servers, checkpoint, arguments)
    pairs = {
        f"{mode} at {concurrency}": ratios(runs, mode, concurrency)
        for mode in servers
        for concurrency in arguments.concurrency
        if mode != "off"
    }
    elapsed = round(time.perf_counter() - began, 1)
    if arguments.json:
        facts = {"elapsed_s": elapsed, "machine": platform.processor() or platform.machine(), "load_before": load}
        print(
            json.dumps(
                facts
                | {"cost_table": msgspec.to_builtins(table), "ratios": pairs, "runs": [asdict(run) for run in runs]}
            )
        )
        return 0
    print(table_text(table))
    print("decode steps by what they verified, and their mean time; ticks; drafts; of both ranks:")
    for run in runs:
        print(steps_of(run))
    for name, (whole, decoding) in pairs.items():
        print(f"{name}: {whole:.2f} times off, decoding alone {decoding:.2f}")
    print(f"aims: {AIM_SINGLE} at 1, {AIM_BUSY} at {max(arguments.concurrency)}; load before {load:.1f}, {elapsed} s")
    return 0
