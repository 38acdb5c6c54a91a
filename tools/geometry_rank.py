"""One rank of the geometry bench: the real executor, and plans that are made up instead of scheduled.

    python -m tools.geometry_rank REQUEST          REQUEST: a Request as JSON; one JSON object a line comes out

Sequences are not prefilled: their pages and rings hold noise, and a step is timed at any context at once. With a peer
both ranks run the same steps over the process groups of the server. Alone, a rank computes what one of two does, its
peer's tokens being its own with experts reflected, so each shard's load is that of as many independent tokens; only
the transfers between the two are missing, which every figure says.
"""

from __future__ import annotations

import heapq
import itertools
import json
import os
import random
import re
import socket
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor

from dsparkd.config import (
    Config,
    DecodeGraphConfig,
    EngineConfig,
    Hardware,
    KVConfig,
    SchedulerConfig,
    SpeculationConfig,
    resolve,
)
from dsparkd.errors import DsparkdError
from dsparkd.executor.collectives import RankGroups
from dsparkd.executor.device import TorchDriver, require_device
from dsparkd.executor.executor import Executor, Landing, rank_device
from dsparkd.executor.plan import Plan, PlanRow, SlotStart, Speculation, StepKind
from dsparkd.kv.pool import KVPool
from dsparkd.messages import SamplingParams
from dsparkd.model.config import ModelConfig, load_model_config
from dsparkd.model.moe import ExpertExchange
from dsparkd.rank import WARM_UP_PASSES, capture_graphs, warm_up, warm_up_plans

GREEDY = SamplingParams(max_tokens=64, seed=1, temperature=0.0)
WARM_STEPS = 2
PROFILED_STEPS = 3
MOST_ROUNDS = 20
ROOM_TOKENS = 6 * (2 * (WARM_STEPS + 1 + MOST_ROUNDS) + PROFILED_STEPS)  # that a row may gain while it is timed
TOP_KERNELS = 14
TIMEOUT_S = 300.0
KERNELS = Path(__file__).resolve().parent.parent / "dsparkd" / "kernels" / "cuda"
FOREIGN = {"nccl": "exchange", "Memcpy": "copies", "Memset": "copies", "memcpy": "copies"}  # by how names begin
OTHER = "other (torch's own kernels)"


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """What to measure. peer: descriptor of the socket to the other rank, None when alone. began_s: wall clock.

    rows: of each rank. rounds: timed steps of a kind. seconds: after which no further kind is begun.
    """

    files: str
    device: str
    dtype: str
    dp_rank: int
    peer: int | None
    rows: tuple[int, ...]
    contexts: tuple[int, ...]
    prefill_tokens: tuple[int, ...]
    rounds: int
    speculation: tuple[bool, ...]
    profile: bool
    eager: bool
    began_s: float
    seconds: float
    device_fraction: float | None = 0.75
    device_bytes: int | None = None


class Reflected:
    """ExpertExchange of a rank alone: the peer's tokens are this rank's own, each expert taken for its mirror image.

    What this shard computes for them is as much as the other shard would for this rank's tokens.
    """

    def __init__(self, config: ModelConfig) -> None:
        self._num_experts = config.n_routed_experts
        self._top_k = config.num_experts_per_tok
        self._counts = (0, 0)

    def begin_step(self, counts: tuple[int, int]) -> None:
        """See model.moe.ExpertExchange."""
        assert counts[0] == counts[1], "alone, both ranks have the same rows"
        self._counts = counts

    def room(self, width: int, device: torch.device) -> Tensor:
        """See model.moe.ExpertExchange."""
        return torch.empty((self._counts[0], width), dtype=torch.float32, device=device)

    def crossing(self) -> None:
        """See model.moe.ExpertExchange."""

    def parting(self, width: int, device: torch.device) -> None:
        """See model.moe.ExpertExchange."""

    def gather(self, rows: Tensor) -> Tensor:
        """See model.moe.ExpertExchange."""
        k = self._top_k
        ids = rows[:, -k:].contiguous().view(torch.int32).flip(1)  # ascending again once they are reflected
        ids = torch.where(ids < self._num_experts, self._num_experts - 1 - ids, ids)
        shares = rows[:, -2 * k : -k].flip(1)
        mirrored = torch.cat((rows[:, : -2 * k], shares, ids.view(torch.float32)), 1)
        return torch.cat((rows, mirrored))

    def combine(self, partial: Tensor) -> Sequence[Tensor]:
        """See model.moe.ExpertExchange."""
        return torch.split(partial, list(self._counts))


class Bench:
    """A rank after its start, and the sequences that it is asked about.

    tier: that the last step ran on; None: eager.
    """

    def __init__(self, request: Request, executor: Executor, groups: RankGroups | None) -> None:
        self._request = request
        self._executor = executor
        self._groups = groups
        self._gamma = executor.model_config.gamma
        self._draw = random.Random(request.dp_rank)
        self._landing: Landing | None = None
        self.tier: int | None = None

    def land(self) -> None:
        """Wait for the step that was launched ahead, if there is one."""
        landing, self._landing = self._landing, None
        if landing is not None:
            self.tier = landing().tier

    def meet(self) -> None:
        """Wait for the peer, so that no step of what follows does."""
        if self._groups is not None:
            self._groups.barrier(TIMEOUT_S)

    def decode(self, num_rows: int, context: int, *, drafts: bool) -> Callable[[], None]:
        """A step of so many rows behind a context.

        Without drafts every step has new ids, so that each is another sample of the routers' choices; it is launched
        before the one before it has landed, as the server does on cuda. With drafts a row goes on from what the step
        before it gave, as there: blocks may have been drafted behind that step.
        """
        plans = itertools.cycle([Plan(StepKind.DECODE, self._rows(num_rows, context), replays=True) for _ in range(8)])
        total = num_rows * (1 + self._gamma)
        speculation = Speculation(self._gamma, (total, total))
        rows = next(plans).rows

        def run() -> None:
            launched = self._executor.launch(next(plans), (num_rows, num_rows))
            self.land()
            self._landing = launched

        def run_drafted() -> None:
            nonlocal rows
            self.land()
            plan = Plan(StepKind.DECODE, rows, speculation=speculation, replays=True)
            output = self._executor.step(plan, (num_rows, num_rows))
            self.tier = output.tier
            rows = tuple(_behind(row, done.token_ids) for row, done in zip(rows, output.rows, strict=True))

        return run_drafted if drafts else run

    def prefill(self, num_tokens: int) -> Callable[[], None]:
        """A chunk from position 0."""

        def run() -> None:
            self.land()
            row = self._row(1, 0, num_tokens)
            plan = Plan(StepKind.PREFILL, (row,), (SlotStart(1, None, 0),))
            self._executor.step(plan, (num_tokens, num_tokens))

        return run

    def fits(self, num_rows: int, context: int) -> bool:
        """Whether the pool has pages for so many rows."""
        sizes = self._executor.sizes
        return num_rows < sizes.num_slots and num_rows * self._pages(context + 1) < sizes.num_pages

    def is_time(self) -> bool:
        """Whether another kind of step may begin; both ranks give the same answer."""
        is_early = time.time() - self._request.began_s < self._request.seconds
        if self._groups is None:
            return is_early
        return all(word[0] for word in self._groups.gather([int(is_early)]))

    def times(self, run: Callable[[], None]) -> list[float]:
        """Seconds of each timed step, from the results before it to its own on the host."""
        for _ in range(WARM_STEPS):
            run()
        self.meet()
        if self._groups is not None:
            run()  # what was launched ahead has ended meanwhile
        seconds = []
        for _ in range(self._request.rounds):
            begun = time.perf_counter()
            run()
            seconds.append(time.perf_counter() - begun)
        self.land()
        return seconds

    def _pages(self, num_tokens: int) -> int:
        # Rows with drafts grow meanwhile.
        return -(-(num_tokens + self._gamma + ROOM_TOKENS) // 256)

    def _rows(self, num_rows: int, context: int) -> tuple[PlanRow, ...]:
        return tuple(self._row(1 + index, context, 1) for index in range(num_rows))

    def _row(self, slot: int, start: int, num_tokens: int) -> PlanRow:
        count = self._pages(start + num_tokens)
        vocab_size = self._executor.model_config.vocab_size
        ids = tuple(self._draw.choices(range(3, vocab_size), k=num_tokens))
        return PlanRow(
            request_id=str(slot),
            slot=slot,
            input_ids=ids,
            start=start,
            page_table=tuple(range(1 + (slot - 1) * count, 1 + slot * count)),
            num_logits=1,
            sampling=GREEDY,
            prompt_ids=ids,
            output_ids=(),
        )


def _behind(row: PlanRow, token_ids: Sequence[int]) -> PlanRow:
    """The next step's row: its anchor is the last id of this one."""
    return replace(row, start=row.start + len(token_ids), input_ids=(token_ids[-1],))


def measure(request: Request) -> None:
    """Start as a rank does, then time every kind of step that was asked for."""
    stages: dict[str, float] = {}

    def tell(stage: str, done: int, total: int) -> None:
        if done >= total:
            stages.setdefault(stage, round(time.time() - request.began_s, 2))

    tell("imports", 1, 1)
    config = config_of(request)
    model = load_model_config(Path(request.files))
    if request.peer is not None:
        require_device(config, model, request.dp_rank, TorchDriver())
    device = rank_device(config, request.dp_rank)
    groups, exchange = open_exchange(request, model, device)
    tell("groups", 1, 1)
    with_drafts = config.dspark.enabled
    executor = Executor.build(config, request.dp_rank, exchange, tell)
    max_drafts = model.gamma if with_drafts else 0
    plans = warm_up_plans(config, executor.sizes.num_pages, max_drafts)
    warm_up(executor, plans, WARM_UP_PASSES[config.engine.device], time.monotonic_ns)
    tell("warm_up", 1, 1)
    capture_graphs(config, executor, max_drafts, model.gamma, tell)
    fill(executor._pool)
    say("start", stages=stages, **memory_of(executor, device))
    bench = Bench(request, executor, groups)
    for num_tokens in request.prefill_tokens:
        if not bench.is_time():
            break
        run = bench.prefill(num_tokens)
        say("prefill", tokens=num_tokens, **timed(bench.times(run)))
        fill(executor._pool)
    for drafts in request.speculation:
        for context in request.contexts:
            for num_rows in request.rows:
                if not bench.fits(num_rows, context) or not bench.is_time():
                    continue
                run = bench.decode(num_rows, context, drafts=drafts)
                times = timed(bench.times(run))
                say("decode", rows=num_rows, context=context, drafts=drafts, tier=bench.tier, **times)
    if request.profile:
        profile_all(request, bench, device)
        bench.land()
    say("end", peak_bytes=peak_bytes(device))
    executor.close()
    if groups is not None:
        groups.barrier(TIMEOUT_S)
        groups.close()


def config_of(request: Request) -> Config:
    """The server's configuration with random weights, and room for the longest context that is asked about."""
    is_cuda = request.device == "cuda"
    longest = max([*request.prefill_tokens, *(context + ROOM_TOKENS for context in request.contexts)])
    config = Config(
        engine=EngineConfig(
            checkpoint=request.files,
            device="cuda" if is_cuda else "cpu",
            dtype="float32" if request.dtype == "float32" else "bfloat16",
            weights="random",
            max_context_tokens=longest + 256,
        ),
        kv=KVConfig(
            device_bytes=request.device_bytes,
            device_fraction=None if request.device_bytes is not None else request.device_fraction,
        ),
        scheduler=SchedulerConfig(max_rows=max(request.rows)),
        dspark=SpeculationConfig(enabled=any(request.speculation)),
        decode_graph=DecodeGraphConfig(enabled=False if request.eager else None),
    )
    return resolve(config, Hardware(num_cuda_devices=2))


def open_exchange(
    request: Request, model: ModelConfig, device: torch.device
) -> tuple[RankGroups | None, ExpertExchange]:
    """The groups and exchange of two ranks, or what stands for them."""
    if request.peer is None:
        return None, Reflected(model)
    peer = socket.socket(fileno=request.peer)
    groups = RankGroups.open(
        request.dp_rank, peer, device, startup_timeout_s=TIMEOUT_S, timeout_s=TIMEOUT_S, shares_device=False
    )
    return groups, groups.expert_exchange()


def fill(pool: KVPool) -> None:
    """Put noise where sequences keep their state: equal scores would make the choice of entries another problem."""
    g, sizes = pool.geometry, pool.sizes
    for tensor, null_rows in (
        (pool.window, g.window_ring_rows),
        (pool.draft_keys, g.draft_ring_rows),
        (pool.csa_entries, g.csa_entries_per_page),
        (pool.csa_keys, g.csa_entries_per_page),
        (pool.hca_entries, g.hca_entries_per_page),
        (pool.csa_rows, g.csa_ring_rows),
        (pool.hca_rows, g.hca_ring_rows),
    ):
        for layer in tensor:
            layer[null_rows:].normal_()
    assert sizes.num_slots > 1


def memory_of(executor: Executor, device: torch.device) -> dict[str, object]:
    """What this rank's device memory holds, in bytes."""
    held: dict[str, object] = {"weights": executor.weight_bytes, "pools": sum(executor.kv_bytes.values())}
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        held |= {"free": free, "total": total, "reserved_by_torch": torch.cuda.memory_reserved(device)}
        held["peak_allocated"] = torch.cuda.max_memory_allocated(device)
    graphs = executor.graphs
    held["graphs"] = sum(graphs.num_bytes.values()) if graphs is not None else 0
    return {"memory": held}


def peak_bytes(device: torch.device) -> int:
    """The most that torch has held at once."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0


def profile_all(request: Request, bench: Bench, device: torch.device) -> None:
    """Where the time of each kind of step goes."""
    context = min(request.contexts)
    kinds: list[tuple[str, Callable[[], None]]] = []
    for drafts in request.speculation:
        for num_rows in sorted({min(request.rows), max(request.rows)}):
            name = f"{'draft and verify' if drafts else 'decode'}, {num_rows} rows, context {context}"
            kinds.append((name, bench.decode(num_rows, context, drafts=drafts)))
    kinds += [(f"prefill, {count} tokens", bench.prefill(count)) for count in request.prefill_tokens[:1]]
    for name, run in kinds:
        if bench.is_time():
            wall_s = statistics.median(bench.times(run))
            say("profile", step=name, wall_ms=round(wall_s * 1e3, 3), **profiled(run, device, bench.meet))


def profiled(run: Callable[[], None], device: torch.device, meet: Callable[[], None]) -> dict[str, object]:
    """Run a step a few times under the profiler: milliseconds a step by part and by kernel, and of all together.

    On the cpu operators take the place of kernels. meet: waits for the peer, whose profiler may take longer to begin.
    """
    is_cuda = device.type == "cuda"
    activity = torch.profiler.ProfilerActivity.CUDA if is_cuda else torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[activity]) as profiler:
        meet()
        for _ in range(PROFILED_STEPS):
            run()
        if is_cuda:
            torch.cuda.synchronize()
    calls: dict[str, int] = defaultdict(int)
    spans: list[Span] = []
    for event in profiler.events():
        if is_cuda and event.device_type.name != "CUDA":
            continue
        calls[event.name] += 1
        if is_cuda:
            spans.append(Span(float(event.time_range.start), float(event.time_range.end), event.name))
        else:
            spans.append(Span(0.0, float(event.self_cpu_time_total), event.name))
    spent: Mapping[str, float] = own_times(spans) if is_cuda else summed(spans)
    parts: dict[str, float] = defaultdict(float)
    part_calls: dict[str, int] = defaultdict(int)
    modules = kernel_modules()
    for name, us in spent.items():
        part = part_of(name, modules)
        parts[part] += us
        part_calls[part] += calls[name]
    return {
        "busy_ms": _ms(sum(spent.values())),
        "parts": {
            part: {"ms": _ms(us), "launches": part_calls[part] // PROFILED_STEPS}
            for part, us in sorted(parts.items(), key=lambda item: -item[1])
        },
        "kernels": {
            name[:80]: {"ms": _ms(us), "launches": calls[name] // PROFILED_STEPS}
            for name, us in sorted(spent.items(), key=lambda item: -item[1])[:TOP_KERNELS]
        },
    }


def _ms(us: float) -> float:
    """Milliseconds of one step, of what all profiled ones took."""
    return round(us / PROFILED_STEPS / 1e3, 3)


def part_of(name: str, modules: Mapping[str, str]) -> str:
    """What a kernel belongs to: a module of the project's kernels, or what it is by its name."""
    if name in modules:
        return modules[name]
    return next((part for beginning, part in FOREIGN.items() if name.startswith(beginning)), OTHER)


def kernel_modules() -> dict[str, str]:
    """Module of each function that Triton may compile: its kernels are named after their functions."""
    return {
        function: path.stem
        for path in sorted(KERNELS.glob("*.py"))
        for function in re.findall(r"^def (\w+)", path.read_text(encoding="utf-8"), re.MULTILINE)
    }


class Span(NamedTuple):
    """When a kernel ran, in microseconds."""

    start: float
    end: float
    name: str


def own_times(spans: Sequence[Span]) -> dict[str, float]:
    """Time by name, each moment counted once: that of several kernels which ends first has it.

    A kernel that is launched early is there while it waits for the one before it, and that one ends first.
    """
    own: dict[str, float] = defaultdict(float)
    running: list[tuple[float, str]] = []  # a heap by end
    now = float("-inf")

    def go_on(until: float) -> None:
        nonlocal now
        while running and now < until:
            end, name = running[0]
            if end <= until:
                heapq.heappop(running)
            own[name] += max(0.0, min(end, until) - now)
            now = max(now, min(end, until))

    for span in sorted(spans):
        go_on(span.start)
        now = max(now, span.start)
        heapq.heappush(running, (span.end, span.name))
    go_on(float("inf"))
    return own


def summed(spans: Sequence[Span]) -> dict[str, float]:
    """Time by name, all of it."""
    total: dict[str, float] = defaultdict(float)
    for span in spans:
        total[span.name] += span.end - span.start
    return total


def timed(seconds: Sequence[float]) -> dict[str, object]:
    """Median and extremes, in milliseconds."""
    return {
        "ms": round(statistics.median(seconds) * 1e3, 3),
        "least_ms": round(min(seconds) * 1e3, 3),
        "most_ms": round(max(seconds) * 1e3, 3),
    }


def say(kind: str, **fields: object) -> None:
    """Write one line of result."""
    sys.stdout.write(json.dumps({"kind": kind, **fields}) + "\n")
    sys.stdout.flush()


def main() -> int:
    """Measure what the request says; a failure is the last line."""
    request = msgspec.json.decode(sys.argv[1], type=Request)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    try:
        measure(request)
    except DsparkdError as error:
        say("failed", error=f"{type(error).__name__}: {error}")
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
