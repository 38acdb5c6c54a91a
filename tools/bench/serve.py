"""Measures the server under 32 streams, and transformers' generate on the same prompts and cores in the same run.

    python -m tools.bench serve [--profile short] [--dtype float32|bfloat16] [--json]

Server and transformers take turns, so that a slow minute of the machine meets both; the ratio is that of the medians
of their output tokens a second. transformers gets batches of equal length (its compressor does not mask padding), its
cache, and one thread or all cores, whichever is faster here; the server has two ranks of one thread each, and its
client runs on the same cores.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from transformers import DeepseekV4ForCausalLM

from dsparkd.text.tokenizer import Tokenizer
from tools.harness import Server, ensure_checkpoint
from tools.oracle import load_oracle

AIM = 4.0  # times the output tokens a second of transformers


@dataclass(frozen=True)
class Profile:
    """lengths: prompt tokens of each batch of `concurrency` prompts. Every prompt yields output_tokens."""

    concurrency: int
    lengths: tuple[int, ...]
    output_tokens: int
    rounds: int


PROFILES = {"short": Profile(concurrency=32, lengths=(48, 160), output_tokens=24, rounds=2)}


@dataclass(frozen=True)
class Served:
    """One round of the server. Times in seconds; inter-token times are gaps between events of one stream."""

    seconds: float
    requests_per_s: float
    output_tokens_per_s: float
    ttft_p50_s: float
    ttft_p99_s: float
    inter_token_p50_s: float
    inter_token_p99_s: float


@dataclass(frozen=True)
class Stream:
    """What one stream showed: when it was sent, when each event with text came, tokens by the server's own count."""

    sent_s: float
    events_s: tuple[float, ...]
    output_tokens: int


def make_prompts(profile: Profile, vocab_size: int, seed: int) -> list[list[list[int]]]:
    """Batches of prompts, equal lengths in each; a new seed gives prompts that no cache knows."""
    draw = random.Random(seed)
    return [
        [[draw.randrange(3, vocab_size) for _ in range(length)] for _ in range(profile.concurrency)]
        for length in profile.lengths
    ]


async def stream_one(host: str, port: int, model: str, prompt: list[int], max_tokens: int) -> Stream:
    """Send one streamed completion and note when its events come. A bare client: its work shares the two cores."""
    body = json.dumps(
        {
            "model": model,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    sent_s = time.perf_counter()
    reader, writer = await asyncio.open_connection(host, port)
    writer.write(f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body)
    events_s: list[float] = []
    output_tokens = 0
    async for line in reader:
        if not line.startswith(b"data: {"):
            continue
        event = json.loads(line[6:])
        if "error" in event:
            raise RuntimeError(f"the server answered {event}")
        if event.get("usage"):
            output_tokens = event["usage"]["completion_tokens"]
        elif event["choices"]:
            events_s.append(time.perf_counter())
    writer.close()
    if output_tokens != max_tokens:
        raise RuntimeError(f"a stream of {max_tokens} tokens ended after {output_tokens}")
    return Stream(sent_s, tuple(events_s), output_tokens)


async def stream_all(port: int, model: str, batches: list[list[list[int]]], profile: Profile) -> list[Stream]:
    """Keep `concurrency` streams open until every prompt has been answered."""
    room = asyncio.Semaphore(profile.concurrency)

    async def one(prompt: list[int]) -> Stream:
        async with room:
            return await stream_one("127.0.0.1", port, model, prompt, profile.output_tokens)

    return await asyncio.gather(*(one(prompt) for batch in batches for prompt in batch))


def serve_round(port: int, model: str, batches: list[list[list[int]]], profile: Profile) -> Served:
    """Run one round and reduce it to its figures."""
    began = time.perf_counter()
    streams = asyncio.run(stream_all(port, model, batches, profile))
    seconds = time.perf_counter() - began
    first = [stream.events_s[0] - stream.sent_s for stream in streams]
    gaps = [b - a for stream in streams for a, b in zip(stream.events_s, stream.events_s[1:], strict=False)]
    return Served(
        seconds=seconds,
        requests_per_s=len(streams) / seconds,
        output_tokens_per_s=sum(stream.output_tokens for stream in streams) / seconds,
        ttft_p50_s=percentile(first, 50),
        ttft_p99_s=percentile(first, 99),
        inter_token_p50_s=percentile(gaps, 50),
        inter_token_p99_s=percentile(gaps, 99),
    )


def generate_round(model: DeepseekV4ForCausalLM, batches: list[list[list[int]]], profile: Profile) -> float:
    """Output tokens a second of transformers' generate over the same batches."""
    began = time.perf_counter()
    for batch in batches:
        ids = torch.tensor(batch)
        count = profile.output_tokens
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            use_cache=True,
            max_new_tokens=count,
            eos_token_id=None,
            pad_token_id=0,
        )
        if output.shape != (ids.shape[0], ids.shape[1] + count):
            raise RuntimeError(f"generate gave {tuple(output.shape)}")
    return sum(map(len, batches)) * profile.output_tokens / (time.perf_counter() - began)


def choose_threads(model: DeepseekV4ForCausalLM, batches: list[list[list[int]]], profile: Profile) -> int:
    """Set and return the number of threads with which transformers is faster: beside a neighbour, fewer may be."""
    speeds: dict[int, float] = {}
    for threads in (1, os.cpu_count() or 1):
        torch.set_num_threads(threads)
        speeds[threads] = generate_round(model, batches, profile)
    best = max(speeds, key=lambda threads: speeds[threads])
    torch.set_num_threads(best)
    return best


def percentile(values: list[float], percent: int) -> float:
    """The smallest value that `percent` of all do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, -(-len(ordered) * percent // 100) - 1)]


def main(argv: list[str]) -> int:
    """Measure and print; 0 whenever both ran: the ratio is a figure, not a verdict."""
    parser = argparse.ArgumentParser(prog="python -m tools.bench serve", description="the server against transformers")
    parser.add_argument("--profile", choices=sorted(PROFILES), default="short")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--checkpoint", type=Path, help="directory; the small checkpoint by default")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    arguments = parser.parse_args(argv)
    profile = PROFILES[arguments.profile]
    checkpoint = (arguments.checkpoint or ensure_checkpoint()).resolve()
    vocab_size = Tokenizer.load(checkpoint).vocab_size
    began = time.perf_counter()
    oracle = load_oracle(checkpoint).to(getattr(torch, arguments.dtype))
    served: list[Served] = []
    generated: list[float] = []
    engine = {"checkpoint": str(checkpoint), "dtype": arguments.dtype, "max_context_tokens": 2048}
    with Server({"engine": engine}) as server:
        server.wait_ready()
        model = str(json.loads(server.get("/v1/models"))["data"][0]["id"])
        warm = Profile(profile.concurrency, profile.lengths[:1], 4, 1)
        generate_round(oracle, make_prompts(warm, vocab_size, seed=0), warm)
        threads = choose_threads(oracle, make_prompts(warm, vocab_size, seed=0), warm)
        serve_round(server.port, model, make_prompts(warm, vocab_size, seed=0), warm)
        for turn in range(profile.rounds):
            batches = make_prompts(profile, vocab_size, seed=1 + turn)
            generated.append(generate_round(oracle, batches, profile))
            served.append(serve_round(server.port, model, batches, profile))
        server.stop()
    ours, theirs = statistics.median(one.output_tokens_per_s for one in served), statistics.median(generated)
    ratio = ours / theirs
    figures = {
        "profile": {"name": arguments.profile, **asdict(profile)},
        "dtype": arguments.dtype,
        "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}",
        "elapsed_s": round(time.perf_counter() - began, 1),
        "server": [asdict(one) for one in served],
        "transformers_output_tokens_per_s": generated,
        "transformers_threads": threads,
        "ratio": ratio,
        "aim": AIM,
    }
    print(json.dumps(figures) if arguments.json else render(figures, served, generated, ratio))
    return 0


def render(figures: dict[str, object], served: list[Served], generated: list[float], ratio: float) -> str:
    """The table: a line a round, then the ratio."""
    lines = [f"{figures['machine']}, {figures['dtype']}, {figures['profile']}"]
    lines.append("round  req/s  out tok/s  ttft p50   p99 ms  inter-token p50   p99 ms  transformers tok/s")
    for turn, (one, theirs) in enumerate(zip(served, generated, strict=True), 1):
        ms = [1000 * value for value in (one.ttft_p50_s, one.ttft_p99_s, one.inter_token_p50_s, one.inter_token_p99_s)]
        lines.append(
            f"{turn:5} {one.requests_per_s:6.2f} {one.output_tokens_per_s:10.1f} {ms[0]:9.0f} {ms[1]:8.0f} "
            f"{ms[2]:16.1f} {ms[3]:8.1f} {theirs:19.1f}"
        )
    threads = figures["transformers_threads"]
    lines.append(f"ratio {ratio:.2f} (aim {AIM:g}), transformers on {threads} threads, {figures['elapsed_s']} s")
    return "\n".join(lines)
