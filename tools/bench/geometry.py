"""Measures the released geometry with random weights on two GPUs, beside what the hardware allows at the least.

    python -m tools.bench geometry [--part steps|headline|all] [--alone] [--layers N] [--seconds N] [--out FILE]
        [--rows 1,8,32,64] [--contexts 1024,8192] [--concurrency 1,16,64,128] [--files DIR]
        [--eager] [--speculation off|on|both] [--json]

steps: both ranks' executors without server and scheduler, over the groups of the server: start by stage, memory, step
times by rows, contexts and speculation, prefill, and where the time goes. headline: the server itself, and streams of
1,024 prompt tokens and 256 output tokens. --alone: one GPU computes what one of two does; transfers are missing.
--layers: the first layers alone. Floors are of an H200: 4.8 TB/s, 989 TFLOP/s in bfloat16, 1,979 in fp8. The file is
written after every figure; past --seconds no further one is begun. With random weights drafts mean nothing: speculation
is reported as cost a step, and its tokens a second are those of a simulated acceptance of 3.5 tokens a step.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import platform
import random
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import msgspec

from dsparkd.model.config import ModelConfig, load_model_config
from tools.flash_files import first_layers, flash_values, write_files
from tools.geometry_rank import MOST_ROUNDS, Request
from tools.harness import ROOT, Server, ServerFailed
from tools.roofline import Floor, Roofline

SIMULATED_ACCEPTANCE = 3.5
PROMPT_TOKENS, OUTPUT_TOKENS = 1024, 256
NUM_REQUESTS = {1: 4, 16: 48, 64: 128, 128: 128}  # by concurrency
STARTUP_S = 420.0
METRICS_S = 1.2  # after which the ranks' counts have arrived
MIB, GIB = 1 << 20, 1 << 30
SHARED_POOL_BYTES = 16 * GIB
MAX_ROWS = 72

SPECULATION = {"off": (False,), "on": (True,), "both": (False, True)}

Row = dict[str, object]


@dataclass(frozen=True)
class Incumbent:
    """SGLang 0.5.17 on the same host type, geometry and kind of weights, by concurrency over both GPUs."""

    step_ms: float
    verify_ms: float | None  # with six tokens a row
    floor_ms: float  # computed with a copy's 4.3 TB/s
    ttft_s: float


INCUMBENT = {
    1: Incumbent(10.4, 17.6, 2.3, 0.29),
    16: Incumbent(18.8, 40.5, 7.3, 0.89),
    64: Incumbent(32.6, 66.3, 15.2, 2.5),
    128: Incumbent(38.7, None, 18.2, 4.1),
}
INCUMBENT_OTHER = {"prompt_tokens_per_s": 17_000, "start_s": 194, "warm_start_s": 85, "weights_gib": 78.6}


class Report:
    """Collects rows, prints each at once, and writes the file after each."""

    def __init__(self, head: Row, out: Path | None, *, is_json: bool) -> None:
        self._head = head
        self._out = out
        self._is_json = is_json
        self._began_s = time.monotonic()
        self.rows: list[Row] = []

    def add(self, row: Row, line: str) -> None:
        """Take a row in; line says it to people."""
        self.rows.append(row)
        if not self._is_json:
            print(line, flush=True)
        self.write()

    def write(self) -> None:
        """Write what there is."""
        if self._out is not None:
            self._out.write_text(json.dumps(self.as_json(), indent=1) + "\n", encoding="utf-8")

    def as_json(self) -> Row:
        """The whole report."""
        return {**self._head, "elapsed_s": round(time.monotonic() - self._began_s, 1), "rows": self.rows}


def run_steps(request: Request, *, alone: bool, report: Report, floors: Roofline) -> bool:
    """Run the ranks and report their rows; whether all of them ended well."""
    with tempfile.TemporaryDirectory(prefix="dsparkd-geometry-") as directory:
        errors = [Path(directory) / f"rank{dp_rank}" for dp_rank in (0, 1)]
        processes = _start_ranks(request, alone, errors)
        has_ended = False
        for row in _lines(processes[0]):
            has_ended = row["kind"] == "end"
            _report_row(row, report, floors)
        codes = [process.wait(60) for process in processes]
        if any(codes) or not has_ended:
            said = "\n".join(
                path.read_text(encoding="utf-8", errors="replace")[-3000:] for path in errors if path.exists()
            )
            report.add({"kind": "failed", "exit_codes": codes, "log": said}, f"FAILED, exit codes {codes}\n{said}")
            return False
    return True


def _start_ranks(request: Request, alone: bool, errors: Sequence[Path]) -> list[subprocess.Popen[bytes]]:
    """Start one rank, or two that can reach each other."""
    sockets: Sequence[socket.socket | None] = (None,)
    if not alone:
        sockets = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    processes = []
    for dp_rank, end in enumerate(sockets):
        own = msgspec.structs.replace(request, dp_rank=dp_rank, peer=None if end is None else end.fileno())
        with errors[dp_rank].open("wb") as log:
            processes.append(
                subprocess.Popen(
                    [sys.executable, "-m", "tools.geometry_rank", msgspec.json.encode(own).decode()],
                    stdout=subprocess.PIPE if dp_rank == 0 else subprocess.DEVNULL,
                    stderr=log,
                    cwd=ROOT,
                    pass_fds=() if end is None else (end.fileno(),),
                )
            )
    for end in sockets:
        if end is not None:
            end.close()
    return processes


def _lines(process: subprocess.Popen[bytes]) -> Iterator[Row]:
    assert process.stdout is not None
    with process.stdout:
        for line in process.stdout:
            if line.startswith(b"{"):
                yield json.loads(line)
            else:  # a library that talks
                sys.stderr.write(line.decode(errors="replace"))


def _number(row: Row, key: str) -> float:
    value = row[key]
    assert isinstance(value, int | float)
    return float(value)


def _report_row(row: Row, report: Report, floors: Roofline) -> None:
    """Put a rank's row beside its floor."""
    match row["kind"]:
        case "decode":
            rows, context, drafts = int(_number(row, "rows")), int(_number(row, "context")), bool(row["drafts"])
            width = 1 + floors.gamma if drafts else 1
            floor = floors.decode((rows, rows), width, context, drafts=drafts)
            ms = _number(row, "ms")
            gained = SIMULATED_ACCEPTANCE if drafts else 1.0
            tokens_s = 2 * rows * gained / ms * 1e3
            more: Row = {
                **_floor(floor, ms),
                "output_tokens_per_s": round(tokens_s, 1),
                "simulated_acceptance": SIMULATED_ACCEPTANCE if drafts else None,
            }
            theirs = incumbent_ms(2 * rows if rows > 1 else 1, context, drafts=drafts)
            if theirs is not None:
                more["incumbent_ms"] = theirs
            what = "draft and verify" if drafts else "decode"
            simulated = f" (at a simulated acceptance of {SIMULATED_ACCEPTANCE})" if drafts else ""
            report.add(
                row | more,
                f"{what:16} {rows:3} rows a rank, tier {row['tier'] or 'none':>4}, context {context:5}: {ms:8.2f} ms, "
                f"floor {more['floor_ms']:>6} ms, "
                f"{more['times_floor']:>5} times; {tokens_s:8.0f} tokens/s of both ranks{simulated}{beside(theirs)}",
            )
        case "prefill":
            tokens, ms = int(_number(row, "tokens")), _number(row, "ms")
            more = {
                **_floor(floors.prefill((tokens, tokens)), ms),
                "prompt_tokens_per_s": round(2 * tokens / ms * 1e3, 1),
            }
            report.add(
                row | more,
                f"prefill of {tokens} tokens a rank: {ms:8.1f} ms, floor {more['floor_ms']} ms (fp8 "
                f"{more['fp8_floor_ms']}), {more['times_floor']} times; {more['prompt_tokens_per_s']} tokens/s of both "
                f"(incumbent {INCUMBENT_OTHER['prompt_tokens_per_s']})",
            )
        case "start":
            memory = row["memory"]
            assert isinstance(memory, dict)
            sizes = ", ".join(f"{name} {size / GIB:.1f}" for name, size in memory.items())
            report.add(row, f"start, seconds: {row['stages']}\nmemory of a rank, GiB: {sizes}")
        case "profile":
            report.add(row, profile_text(row))
        case "failed":
            report.add(row, f"failed: {row['error']}")
        case _:
            report.add(row, f"most held by torch: {_number(row, 'peak_bytes') / GIB:.1f} GiB")


def incumbent_ms(concurrency: int, context: int, *, drafts: bool) -> float | None:
    """The incumbent's step beside ours: contexts of its workload alone."""
    theirs = INCUMBENT.get(concurrency)
    if theirs is None or not PROMPT_TOKENS <= context <= PROMPT_TOKENS + OUTPUT_TOKENS:
        return None
    return theirs.verify_ms if drafts else theirs.step_ms


def beside(theirs: float | None) -> str:
    """The incumbent's figure as a line ends with it."""
    return "" if theirs is None else f"; incumbent {theirs} ms"


def _floor(floor: Floor, ms: float) -> Row:
    return {
        "floor_ms": round(floor.seconds * 1e3, 2),
        "fp8_floor_ms": round(floor.fp8_seconds * 1e3, 2),
        "floor_gb": round(floor.num_bytes / 1e9, 2),
        "floor_tflop": round(floor.flops / 1e12, 3),
        "times_floor": round(ms / (floor.seconds * 1e3), 2),
    }


def profile_text(row: Row) -> str:
    """Where a step's time goes, a line a part."""
    parts = row["parts"]
    assert isinstance(parts, dict)
    busy, wall = _number(row, "busy_ms"), _number(row, "wall_ms")
    lines = [f"{row['step']}: {wall:.2f} ms, kernels run in {busy:.2f} of them"]
    for part, spent in parts.items():
        lines.append(
            f"    {part:28} {spent['ms']:9.3f} ms {spent['ms'] / max(wall, 1e-9):6.1%} {spent['launches']:6} launches"
        )
    lines.append(f"    {'nothing runs':28} {max(0.0, wall - busy):9.3f} ms {max(0.0, 1 - busy / max(wall, 1e-9)):6.1%}")
    return "\n".join(lines)


@dataclass(frozen=True)
class Stream:
    """One answer: when it was asked for, and when its first and last events came, in seconds."""

    sent_s: float
    first_s: float
    last_s: float
    output_tokens: int


async def stream_one(port: int, model: str, prompt: list[int], output_tokens: int) -> Stream:
    """Stream one completion over a connection of its own. Raises RuntimeError for an answer that is cut short."""
    fields = {"model": model, "prompt": prompt, "max_tokens": output_tokens, "temperature": 0, "ignore_eos": True}
    body = json.dumps(fields | {"stream": True, "stream_options": {"include_usage": True}}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    sent_s = time.perf_counter()
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
    writer.write(f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body)
    first_s = last_s = 0.0
    count = 0
    try:
        async for line in reader:
            if line.startswith(b"data: {"):
                # An event of text is not decoded: with many streams the client would be slower than the server.
                if b'"usage":{' in line:
                    count = json.loads(line[6:])["usage"]["completion_tokens"]
                    continue
                if b'"error":' in line:
                    raise RuntimeError(f"the server answered {line.decode()}")
                last_s = time.perf_counter()
                first_s = first_s or last_s
    finally:
        writer.close()
    if count != output_tokens or not first_s:
        raise RuntimeError(f"a stream of {output_tokens} tokens ended after {count}")
    return Stream(sent_s, first_s, last_s, count)


async def stream_all(port: int, model: str, prompts: list[list[int]], concurrency: int, outputs: int) -> list[Stream]:
    """Keep so many streams open until every prompt has been answered."""
    room = asyncio.Semaphore(concurrency)

    async def one(prompt: list[int]) -> Stream:
        async with room:
            return await stream_one(port, model, prompt, outputs)

    return await asyncio.gather(*(one(prompt) for prompt in prompts))


@dataclass(frozen=True)
class Load:
    """What the server is measured under: streams at once, and tokens of each."""

    concurrency: tuple[int, ...]
    prompt_tokens: int
    output_tokens: int


def headline_row(streams: Sequence[Stream], concurrency: int, seconds: float) -> Row:
    """Reduce a round to its figures."""
    gaps = [1e3 * (one.last_s - one.first_s) / (one.output_tokens - 1) for one in streams]
    first = sorted(one.first_s - one.sent_s for one in streams)
    return {
        "kind": "headline",
        "concurrency": concurrency,
        "requests": len(streams),
        "seconds": round(seconds, 2),
        "output_tokens_per_s": round(sum(one.output_tokens for one in streams) / seconds, 1),
        "token_ms": round(statistics.median(gaps), 2),
        "ttft_p50_s": round(statistics.median(first), 3),
        "ttft_p99_s": round(first[max(0, -(-len(first) * 99 // 100) - 1)], 3),
    }


def run_headline(
    server: Server, model: ModelConfig, load: Load, drafts: bool, report: Report, is_time: Callable[[], bool]
) -> None:
    """Ask the running server; one row a concurrency."""
    name = str(json.loads(server.get("/v1/models"))["data"][0]["id"])
    draw, floors = random.Random(0), Roofline(model)

    def prompts(count: int) -> list[list[int]]:
        return [draw.choices(range(3, model.vocab_size), k=load.prompt_tokens) for _ in range(count)]

    asyncio.run(stream_all(server.port, name, prompts(2), 2, min(8, load.output_tokens)))  # nothing is cold any more
    for concurrency in load.concurrency:
        if not is_time():
            return
        asked = prompts(NUM_REQUESTS.get(concurrency, concurrency))
        before = drafted_steps(server)
        began = time.perf_counter()
        streams = asyncio.run(stream_all(server.port, name, asked, concurrency, load.output_tokens))
        row = headline_row(streams, concurrency, time.perf_counter() - began)
        tokens_a_step = mean_step(before, drafted_steps(server)) if drafts else 1.0
        step_ms = round(_number(row, "token_ms") * tokens_a_step, 2)
        context = load.prompt_tokens + load.output_tokens // 2
        rows, width = (-(-concurrency // 2), concurrency // 2), 1 + model.gamma if drafts else 1
        theirs = INCUMBENT.get(concurrency)
        step = incumbent_ms(concurrency, context, drafts=drafts)
        row |= {"drafts": drafts, "tokens_a_step": round(tokens_a_step, 3), "step_ms": step_ms, "incumbent_ms": step}
        row |= _floor(floors.decode(rows, width, context, drafts=drafts), step_ms)
        row["incumbent_ttft_s"] = theirs.ttft_s if theirs is not None else None
        name_of = f"C = {concurrency:3}{', drafts' if drafts else ''}"
        report.add(
            row,
            f"{name_of}: {row['output_tokens_per_s']:>8} output tokens/s, a step "
            f"{step_ms} ms (floor {row['floor_ms']}{beside(step)}), first token {row['ttft_p50_s']} s, p99 "
            f"{row['ttft_p99_s']} s{'' if theirs is None else f' (incumbent {theirs.ttft_s})'}",
        )


def drafted_steps(server: Server) -> tuple[float, float]:
    """Tokens that steps with drafts have given rows so far, and how many rows of steps there were."""
    time.sleep(METRICS_S)
    pattern = r"^dsparkd_accepted_per_step_(sum|count)\{[^}]*\} (\S+)$"
    found = re.findall(pattern, server.get("/metrics"), re.MULTILINE)
    tokens, count = (sum(float(value) for kind, value in found if kind == name) for name in ("sum", "count"))
    return tokens, count


def mean_step(before: tuple[float, float], after: tuple[float, float]) -> float:
    """Tokens a row got in a step between two readings."""
    count = after[1] - before[1]
    return (after[0] - before[0]) / count if count else 1.0


def server_tables(files: Path, arguments: argparse.Namespace, drafts: bool) -> dict[str, dict[str, object]]:
    """The server's configuration, on top of conf/dev.toml."""
    is_cuda = arguments.device == "cuda"
    pools: dict[str, object] = {}
    if arguments.shared_device:
        pools = {"device_bytes": SHARED_POOL_BYTES}
    elif is_cuda:
        pools = {"device_bytes": None, "device_fraction": 0.75}
    return {
        "engine": {
            "checkpoint": str(files),
            "device": arguments.device,
            "dtype": arguments.dtype,
            "weights": "random",
            "shared_device": arguments.shared_device,
            "max_context_tokens": 16384 if is_cuda else 2048,
        },
        "kv": pools,
        # A few more than half of the streams: a rank that the router gives one more would else keep it waiting.
        "scheduler": {"max_rows": MAX_ROWS if is_cuda else 16},
        "dspark": {"enabled": drafts},
        "decode_graph": {"enabled": False} if arguments.eager else {},
    }


def serve_headline(
    files: Path, arguments: argparse.Namespace, drafts: bool, report: Report, is_time: Callable[[], bool]
) -> bool:
    """Start the server, measure and stop it; whether that went well."""
    began = time.monotonic()
    try:
        with Server(server_tables(files, arguments, drafts)) as server:
            server.wait_ready(STARTUP_S)
            stages = stage_ends(server.events())
            start_s = round(time.monotonic() - began, 1)
            ranks = json.loads(server.get("/server_info"))["ranks"]
            memory = {"weights": ranks[0]["weight_bytes"], "pools": sum(ranks[0]["kv_bytes"].values())}
            row: Row = {
                "kind": "server_start",
                "drafts": drafts,
                "start_s": start_s,
                "stages": stages,
                "memory": memory,
            }
            report.add(
                row,
                f"server: {start_s} s to start (incumbent {INCUMBENT_OTHER['start_s']}, warm "
                f"{INCUMBENT_OTHER['warm_start_s']}), stages {stages}",
            )
            load = Load(arguments.concurrency, arguments.prompt_tokens, arguments.output_tokens)
            run_headline(server, load_model_config(files), load, drafts, report, is_time)
            server.stop()
    except (ServerFailed, RuntimeError, OSError) as error:
        report.add({"kind": "failed", "error": str(error)}, f"FAILED: {error}")
        return False
    return True


def stage_ends(events: Sequence[dict[str, object]]) -> dict[str, float]:
    """Seconds after the first event at which each stage of rank 0 ended, by the log."""
    stamps = {str(event["event"]): str(event["ts"]) for event in reversed(events)}
    begin = stamps.get("starting")
    ends: dict[str, float] = {}
    for event in events:
        if (
            event.get("event") == "start_progress"
            and event.get("child") == "rank 0"
            and event["done"] == event["total"]
        ):
            ends[str(event["stage"])] = _seconds_between(begin, str(event["ts"]))
        if event.get("event") == "listening":
            ends["listening"] = _seconds_between(begin, str(event["ts"]))
    return ends


def _seconds_between(begin: str | None, end: str) -> float:
    if begin is None:
        return 0.0
    return round((datetime.fromisoformat(end) - datetime.fromisoformat(begin)).total_seconds(), 1)


def machine() -> str:
    """The GPUs of this host, or its processor."""
    done = None
    with contextlib.suppress(OSError):
        done = subprocess.run(
            ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"], capture_output=True, text=True, check=False
        )
    names = done.stdout.split("\n")[:-1] if done is not None and done.returncode == 0 else []
    return f"{len(names)} x {names[0]}" if names else platform.processor() or platform.machine()


def numbers(text: str) -> tuple[int, ...]:
    """`1,8` -> (1, 8)."""
    return tuple(int(part) for part in text.split(",") if part)


def parse(argv: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tools.bench geometry", description=str(__doc__).splitlines()[0])
    parser.add_argument("--part", choices=("steps", "headline", "all"), default="all")
    parser.add_argument("--alone", action="store_true", help="one GPU computes what one of two does")
    parser.add_argument("--shared-device", action="store_true", help="headline: both ranks on one GPU, to try it out")
    parser.add_argument("--layers", type=int, help="the first so many layers alone")
    parser.add_argument("--rows", type=numbers, default=(1, 8, 32, 64), help="decode rows a rank")
    parser.add_argument("--contexts", type=numbers, default=(1024, 8192))
    parser.add_argument("--prefill", type=numbers, default=(8192,), help="prompt tokens of a chunk")
    parser.add_argument("--concurrency", type=numbers, default=(1, 16, 64, 128), help="of the headline rows")
    parser.add_argument("--speculation", choices=("off", "on", "both"), default=None, help="left out: both")
    parser.add_argument("--no-profile", action="store_true", help="steps: leave out where the time goes")
    parser.add_argument("--eager", action="store_true", help="without captured graphs")
    parser.add_argument("--rounds", type=int, default=9, help="timed steps of a kind")
    parser.add_argument("--seconds", type=float, default=480.0, help="begin nothing after so many")
    parser.add_argument("--files", type=Path, help="directory with config.json and tokenizer.json; the released ones")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--prompt-tokens", type=int, default=PROMPT_TOKENS, help="headline")
    parser.add_argument("--output-tokens", type=int, default=OUTPUT_TOKENS, help="headline")
    parser.add_argument("--out", type=Path, help="write the result there, after every figure")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of lines")
    return parser.parse_args(argv)


def main(argv: list[str]) -> int:
    """Measure; 0 when all that was begun ended well."""
    arguments = parse(argv)
    with tempfile.TemporaryDirectory(prefix="dsparkd-flash-") as directory:
        files = prepare_files(arguments, Path(directory))
        model = load_model_config(files)
        head: Row = {
            "bench": "geometry",
            "arguments": argv,
            "machine": machine(),
            "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "layers": model.num_hidden_layers,
            "weights": "random",
            "shared_device": arguments.shared_device,
            "alone": "one rank of two, its peer reflected: no transfers" if arguments.alone else False,
            "incumbent": INCUMBENT_OTHER,
        }
        report = Report(head, arguments.out, is_json=arguments.json)
        ok = measure(arguments, files, report)
        report.write()
        if arguments.json:
            print(json.dumps(report.as_json()))
        else:
            elapsed_s = report.as_json()["elapsed_s"]
            print(f"{head['machine']}, {model.num_hidden_layers} layers, random weights, {elapsed_s} s")
    return 0 if ok else 1


def measure(arguments: argparse.Namespace, files: Path, report: Report) -> bool:
    """Run the parts that were asked for, what matters most first: the time may not suffice for all."""
    began = time.monotonic()

    def left_s() -> float:
        return float(arguments.seconds) - (time.monotonic() - began)

    def serve(drafts: bool) -> bool:
        return left_s() <= 0 or serve_headline(files, arguments, drafts, report, lambda: left_s() > 0)

    serves = arguments.part != "steps" and not arguments.alone
    ok = True
    if serves:
        first, *others = SPECULATION.get(arguments.speculation, (False, True) if arguments.part == "all" else (False,))
        ok = serve(first)
    if arguments.part != "headline" and left_s() > 0:
        request = step_request(arguments, files, left_s())
        ok = run_steps(request, alone=arguments.alone, report=report, floors=Roofline(load_model_config(files))) and ok
    if serves:
        for drafts in others:
            ok = serve(drafts) and ok
    return ok


def prepare_files(arguments: argparse.Namespace, directory: Path) -> Path:
    """The geometry's directory: what was named, cut to its first layers where asked, or the released one."""
    if arguments.files is None:
        values = flash_values()
        write_files(directory, values if arguments.layers is None else first_layers(values, arguments.layers))
        return directory
    files: Path = arguments.files.resolve()
    if arguments.layers is None:
        return files
    values = first_layers(json.loads((files / "config.json").read_bytes()), arguments.layers)
    (directory / "config.json").write_text(json.dumps(values), encoding="utf-8")
    (directory / "tokenizer.json").write_bytes((files / "tokenizer.json").read_bytes())
    return directory


def step_request(arguments: argparse.Namespace, files: Path, seconds: float) -> Request:
    """What the ranks are asked."""
    speculation = SPECULATION.get(arguments.speculation, (False, True))
    return Request(
        files=str(files),
        device=arguments.device,
        dtype=arguments.dtype,
        dp_rank=0,
        peer=None,
        rows=arguments.rows,
        contexts=arguments.contexts,
        prefill_tokens=arguments.prefill,
        rounds=min(arguments.rounds, MOST_ROUNDS),
        speculation=speculation,
        profile=not arguments.no_profile,
        eager=arguments.eager,
        began_s=time.time(),
        seconds=seconds,
        device_bytes=None if arguments.device == "cuda" else 256 * MIB,
    )
