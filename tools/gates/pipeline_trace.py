"""Shows on one GPU that no step waits for a stream or the device, and that masks that come late change nothing.

    python -m tools.gates pipeline_trace [--graphs] [--json] [--out FILE] [--rows 8] [--steps 12]

The shipped checkpoint, both of its expert shards in one process; rows with a grammar and some without, all drafted for,
greedy and seeded. First a profile of three steps (D-07, D-21): on the tick thread no call that waits for a stream or
the device, no copy out of or into pageable memory, events waited for in `finish` alone, and each part in its place.
torch's own detector then names every line that synchronizes, if any is left. Last the same texts with a kernel of 20 ms
in front of each copy and of the filter in turn (D-18, D-19): every id must be the same, every text in its grammar.
With --graphs decode steps and drafts are replayed throughout, but for one run that is eager: the ids must be its.

It needs a CUDA device, and ends with 2 where there is none.
"""

from __future__ import annotations

import argparse
import itertools
import json
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

import torch
import xgrammar
from torch.profiler import ProfilerActivity, profile, record_function

from dsparkd.executor.draft import DraftDesk
from dsparkd.executor.executor import DTYPES, Executor
from dsparkd.executor.masks import Masker
from dsparkd.executor.plan import Plan, PlanRow, RowOutput, SlotStart, Speculation, StepKind
from dsparkd.executor.shapes import ShapeLimits, choose_tiers
from dsparkd.grammar.compiler import tokenizer_info
from dsparkd.grammar.matcher import Matcher, keep_lock_in_short_calls
from dsparkd.grammar.traversal import open_traversal
from dsparkd.grammar.vocabulary import make_vocabularies
from dsparkd.kv.geometry import PoolSizes
from dsparkd.kv.pool import KVPool
from dsparkd.messages import SamplingParams
from dsparkd.model.config import load_model_config
from dsparkd.model.weights import load_both_draft_shards, load_both_shards
from dsparkd.text.tokenizer import Tokenizer
from tools.harness import ensure_checkpoint

PAGE_TOKENS = 256
WARM_UP = 4
TRACED = 3
PROMPT = "The list has these entries: " + ", ".join(f"item {n} costs {7 * n % 31} coins" for n in range(40))
# Long sentences alone: no row may end before it has been looked at.
GRAMMAR = r'root ::= "[" item (", " item){40,200} "]"' + "\n" + r'item ::= "\"" [a-z ]{3,40} "\"" | [0-9]{1,6}'
CYCLES = 40_000_000  # of torch.cuda._sleep: about 20 ms

# Parts of a step as the profile names them, in the order in which a step has them.
PARTS = ("draft", "begin", "launch", "finish", "barrier", "walk", "choose", "emit", "consume")
SYNCHRONIZING = (
    "cudaDeviceSynchronize",
    "cudaStreamSynchronize",
    "cudaMemcpy",
    "cudaMemcpy2D",
    "cuCtxSynchronize",
    "cuStreamSynchronize",
)
WAITING = ("cudaEventSynchronize", "cuEventSynchronize")
SYNC_WARNING = "called a synchronizing CUDA operation"

Event = Mapping[str, object]
DType = Literal["float32", "bfloat16"]


@dataclass
class Text:
    """What a scheduler keeps of one request. place: its slot and its pages."""

    place: int
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    matcher: Matcher | None
    outputs: tuple[int, ...] = ()
    num_computed: int = 0
    has_ended: bool = False

    def row(self, pages: int) -> PlanRow:
        """Its next step: the whole prompt, or its anchor."""
        known = self.prompt_ids + self.outputs
        return PlanRow(
            request_id=str(self.place),
            slot=self.place,
            input_ids=known[self.num_computed :],
            start=self.num_computed,
            page_table=tuple(range(1 + (self.place - 1) * pages, 1 + self.place * pages)),
            num_logits=1,
            sampling=self.params,
            prompt_ids=self.prompt_ids,
            output_ids=self.outputs,
            matcher=self.matcher,
        )

    def take(self, output: RowOutput, eos_id: int) -> None:
        """Keep what a step gave, up to the end of the text."""
        if output.failure is not None:
            raise RuntimeError(f"row {self.place} failed: {output.failure}")
        ids = output.token_ids
        if eos_id in ids:
            ids = ids[: ids.index(eos_id) + 1]
            self.has_ended = True
        if self.matcher is not None:
            self.matcher.queue(ids)
        self.num_computed = len(self.prompt_ids) + len(self.outputs) + len(ids) - 1
        self.outputs += ids


class Lab:
    """One rank's executor with drafter and grammars, both expert shards in this process."""

    def __init__(
        self, checkpoint: Path, device: torch.device, name: DType, rows: int, *, has_graphs: bool = False
    ) -> None:
        config = load_model_config(checkpoint)
        self.gamma, self.rows, self.eos_id = config.gamma, rows, config.eos_token_id
        self.tokenizer = Tokenizer.load(checkpoint)
        dtype = DTYPES[name]
        model, exchange = load_both_shards(checkpoint, config, dtype, device)
        drafter, draft_exchange = load_both_draft_shards(checkpoint, model)
        geometry = config.kv_geometry(PAGE_TOKENS, name, drafts=True)
        self.pages = 4
        pool = KVPool(geometry, PoolSizes(1 + rows * self.pages, 1 + rows, 1), dtype, device)
        self.info = tokenizer_info(make_vocabularies(self.tokenizer, config.vocab_size, (config.eos_token_id,)).plain)
        keep_lock_in_short_calls()
        self.traversal = open_traversal("native", 2, self.info)
        self.masker = Masker(self.traversal, rows, 1 + self.gamma, config.vocab_size, 0.5, 5.0)
        self._desk = DraftDesk(drafter, pool, draft_exchange)
        self.executor = Executor(0, model, 0, pool, exchange, self.tokenizer, self.masker, self._desk)
        self.has_graphs = self.replays = has_graphs
        if has_graphs:
            width = 1 + self.gamma
            tiers, limits = choose_tiers(rows * width), ShapeLimits(rows, self.pages, width)
            self.executor.capture(tiers, limits, lambda done, total: None)
        self.pipeline = self.executor._pipeline
        compiler = xgrammar.GrammarCompiler(self.info, max_threads=1, cache_enabled=False)
        self.compiled = compiler.compile_grammar(GRAMMAR)

    def texts(self) -> list[Text]:
        """Fresh requests, every fourth without a grammar, every second seeded, through their prefill."""
        ids = tuple(self.tokenizer.encode(PROMPT))
        texts = []
        for place in range(1, 1 + self.rows):
            params = SamplingParams(
                max_tokens=512,
                seed=place,
                temperature=0.8 if place % 2 else 0.0,
                top_p=0.95 if place % 3 else 1.0,
                top_k=40 if place % 5 == 0 else 0,
                repetition_penalty=1.1 if place % 4 == 1 else 1.0,
                min_tokens=4,
                top_logprobs=2 if place == 2 else None,
            )
            matcher = Matcher(self.compiled) if place % 4 else None
            texts.append(Text(place, ids[: 20 + 17 * place], params, matcher))
        self.step(texts, starts=tuple(SlotStart(text.place, None, 0) for text in texts))
        return texts

    def accept_by(self, rule: Literal["coupled", "rejection"]) -> None:
        """Draft for this rule of acceptance, and accept by it, from here on; graphs draft for the coupled one."""
        self.replays = self.has_graphs and rule == "coupled"
        self._desk.is_coupled = self.executor._is_coupled = rule == "coupled"

    def step(
        self,
        texts: Sequence[Text],
        starts: tuple[SlotStart, ...] = (),
        *,
        drafts: bool = False,
        is_compact: bool = False,
    ) -> None:
        """Run one step of those that go on. is_compact: with room for half of the drafts."""
        live = [text for text in texts if not text.has_ended]
        if not live:
            return
        rows = tuple(text.row(self.pages) for text in live)
        room = len(rows) * self.gamma // (2 if is_compact else 1)
        speculation = Speculation(self.gamma, (len(rows) + room, 0), is_compact) if drafts else None
        kind = StepKind.PREFILL if starts else StepKind.DECODE
        plan = Plan(kind, rows, starts, speculation=speculation, replays=self.replays)
        output = self.executor.step(plan, (plan.num_tokens, 0))
        for text, row in zip(live, output.rows, strict=True):
            text.take(row, self.eos_id)

    def follows(self, text: Text) -> bool:
        """Whether a text is the beginning of a sentence of its grammar, or all of one."""
        if text.matcher is None:
            return True
        oracle = Matcher(self.compiled)
        oracle.queue(text.outputs)
        return oracle.commit()


@contextmanager
def named_parts(lab: Lab) -> Iterator[None]:
    """Name the parts of each step in the profile."""
    launch = (lab.executor.graphs, "verify", "launch") if lab.replays else (lab.executor, "_forward", "launch")
    places: tuple[tuple[object, str, str], ...] = (
        (lab.executor, "_draft", "draft"),
        (lab.pipeline, "begin", "begin"),
        launch,
        (lab.pipeline, "finish", "finish"),
        (lab.masker, "lay", "barrier"),
        (lab.masker, "run", "walk"),
        (lab.executor._sampler, "draw", "choose"),
        (lab.pipeline, "emit", "emit"),
        (lab.pipeline, "consume", "consume"),
    )
    for owner, name, part in places:
        setattr(owner, name, _named(getattr(owner, name), part))
    try:
        yield
    finally:
        for owner, name, _ in places:
            delattr(owner, name)


def _named(call: Callable[..., object], part: str) -> Callable[..., object]:
    def run(*arguments: object, **named: object) -> object:
        with record_function(part):
            return call(*arguments, **named)

    return run


@dataclass
class Verdict:
    """What a profile says. faults: what must not be; figures: medians of the parts in microseconds, and counts."""

    faults: list[str] = field(default_factory=list)
    figures: dict[str, float] = field(default_factory=dict)


def judge(events: Sequence[Event], num_steps: int) -> Verdict:
    """Look through a profile's events, as torch writes them for chrome, for waits of the tick thread and for order."""
    verdict = Verdict()
    spans = {part: _spans(events, part) for part in ("step", *PARTS)}
    if len(spans["step"]) != num_steps:
        verdict.faults.append(f"{len(spans['step'])} steps in the profile, not {num_steps}")
        return verdict
    calls = [event for event in events if event.get("cat") in ("cuda_runtime", "cuda_driver")]
    if not calls:
        verdict.faults.append("no call of the CUDA runtime in the profile")
        return verdict
    pageable = {
        _correlation(event): str(event["name"])
        for event in events
        if event.get("cat") == "gpu_memcpy" and "Pageable" in str(event["name"])
    }
    waits = copies = own_calls = 0
    for begun, ended, tick in spans["step"]:
        own = {part: [s for s in spans[part] if begun <= s[0] and s[1] <= ended] for part in PARTS}
        verdict.faults += _misplaced(own, tick)
        for call in calls:
            at, name = _time(call), str(call["name"]).partition("_")[0]  # some carry the version of their interface
            if call.get("tid") != tick or not begun <= at <= ended:
                continue
            own_calls += 1
            where = next((p for p in reversed(PARTS) if any(s <= at <= e for s, e, _ in own[p])), "step")
            if name in SYNCHRONIZING:
                verdict.faults.append(f"{name} in {where}")
            if name in WAITING:
                waits += 1
                if where not in ("finish", "barrier"):
                    verdict.faults.append(f"{name} in {where}")
            if _correlation(call) in pageable:
                verdict.faults.append(f"{pageable[_correlation(call)]} in {where}")
            copies += name.startswith("cudaMemcpyAsync")
    if not own_calls:
        verdict.faults.append("no call of the CUDA runtime on the tick thread in the profile")
    for part in ("step", *PARTS):
        lengths = sorted(end - begin for begin, end, _ in spans[part])
        verdict.figures[f"{part}_us"] = round(lengths[len(lengths) // 2], 1) if lengths else 0.0
    verdict.figures["event_waits_a_step"] = round(waits / num_steps, 2)
    verdict.figures["copies_a_step"] = round(copies / num_steps, 1)
    verdict.figures["device_busy_beside_walk_us"] = round(_busy_beside(events, spans["walk"]) / num_steps, 1)
    return verdict


def _misplaced(own: Mapping[str, Sequence[tuple[float, float, object]]], tick: object) -> list[str]:
    """What of D-07's order a step does not keep: begin, launch, barrier, walk, choose, emit, on one thread."""
    faults = [f"{len(own[part])} times {part} in a step" for part in PARTS if len(own[part]) != 1]
    if faults:
        return faults
    order = [own[part][0] for part in ("begin", "launch", "barrier", "walk", "choose", "emit", "consume")]
    if any(earlier[1] > later[0] for earlier, later in itertools.pairwise(order)):
        faults.append("begin, launch, barrier, walk, choose, emit, consume are out of order")
    outer, inner = own["finish"][0], (own["barrier"][0], own["walk"][0])
    if any(not (outer[0] <= span[0] and span[1] <= outer[1]) for span in inner):
        faults.append("barrier and walk are not in finish")
    if any(span[0][2] != tick for span in own.values()):
        faults.append("a part of the step is on another thread")
    return faults


def _spans(events: Sequence[Event], name: str) -> list[tuple[float, float, object]]:
    """Begin, end and thread of what the host ran under a name."""
    found = [event for event in events if event.get("name") == name and event.get("cat") == "user_annotation"]
    return sorted(
        ((_time(event), _time(event) + _number(event, "dur"), event.get("tid")) for event in found),
        key=lambda span: span[0],
    )


def _busy_beside(events: Sequence[Event], walks: Sequence[tuple[float, float, object]]) -> float:
    """Microseconds that kernels ran on the device while the host walked."""
    total = 0.0
    for event in events:
        if event.get("cat") == "kernel":
            begin, end = _time(event), _time(event) + _number(event, "dur")
            total += sum(max(0.0, min(end, walk[1]) - max(begin, walk[0])) for walk in walks)
    return total


def _time(event: Event) -> float:
    return _number(event, "ts")


def _number(event: Event, key: str) -> float:
    value = event.get(key, 0.0)
    return float(value) if isinstance(value, int | float) else 0.0


def _correlation(event: Event) -> object:
    arguments = event.get("args")
    return arguments.get("correlation") if isinstance(arguments, dict) else None


def trace(lab: Lab, texts: Sequence[Text]) -> Verdict:
    """Profile some steps of texts that have been warmed up."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler, named_parts(lab):
        for _ in range(TRACED):
            with record_function("step"):
                lab.step(texts, drafts=True)
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    return judge(events, TRACED)


def synchronizing_lines(lab: Lab) -> Counter[str]:
    """Lines of Python whose call synchronizes, by torch's own detector, in each kind of step."""
    found: Counter[str] = Counter()
    texts = lab.texts()
    kinds: dict[str, Callable[[], object]] = {
        "prefill": lab.texts,
        "decode": lambda: lab.step(texts),
        "drafts": lambda: lab.step(texts, drafts=True),
        "compact": lambda: lab.step(texts, drafts=True, is_compact=True),
        "rejection": lambda: lab.step(texts, drafts=True),
    }
    for kind, run in kinds.items():
        if kind != "prefill":
            texts = lab.texts()
        lab.accept_by("rejection" if kind == "rejection" else "coupled")
        run()  # kernels are compiled and memory is taken
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                run()
            finally:
                torch.cuda.set_sync_debug_mode("default")
        lines = [f"{_short(each.filename)}:{each.lineno}" for each in caught if SYNC_WARNING in str(each.message)]
        found.update(f"{line} ({kind})" for line in lines)
    lab.accept_by("coupled")
    return found


def _short(name: str) -> str:
    parts = Path(name).parts
    return "/".join(parts[parts.index("dsparkd") :]) if "dsparkd" in parts else name


@dataclass(frozen=True)
class Run:
    """Texts under one delay against those without: ids that differ, and texts that left their grammar."""

    delay: str
    texts: int
    ids: int
    differing: int
    illegal: int
    seconds: float

    @property
    def ok(self) -> bool:
        """Whether the delay changed nothing."""
        return not self.differing and not self.illegal and self.ids > 0


@contextmanager
def delayed(lab: Lab, delay: str, sleep: Callable[[], object]) -> Iterator[None]:
    """Put `sleep` in front of one of a step's consumers: copies on their streams, the filter on the step's own."""
    owners: dict[str, tuple[object, str, object]] = {
        "ids": (lab.pipeline, "begin", getattr(lab.pipeline, "copy_stream", None)),
        "masks": (lab.pipeline, "finish", getattr(lab.pipeline, "copy_stream", None)),
        "filter": (lab.executor._sampler, "draw", None),
        "results": (lab.pipeline, "emit", getattr(lab.pipeline, "results_stream", None)),
    }
    if delay not in owners:
        yield
        return
    owner, name, stream = owners[delay]
    call = getattr(owner, name)

    def run(*arguments: object, **named: object) -> object:
        with torch.cuda.stream(stream) if isinstance(stream, torch.cuda.Stream) else nullcontext():
            sleep()
        return call(*arguments, **named)

    setattr(owner, name, run)
    try:
        yield
    finally:
        delattr(owner, name)


def compare(lab: Lab, steps: int, sleep: Callable[[], object]) -> list[Run]:
    """The same requests without and with each delay; with graphs, eager first."""
    base: list[tuple[int, ...]] = []
    runs = []
    for delay in (*(("eager",) if lab.has_graphs else ()), "none", "none again", "ids", "masks", "filter", "results"):
        begun = time.monotonic()
        lab.replays = lab.has_graphs and delay != "eager"
        with delayed(lab, delay, sleep):
            texts = lab.texts()
            for _ in range(steps):
                lab.step(texts, drafts=True)
        outputs = [text.outputs for text in texts]
        base = base or outputs
        differing = sum(_num_differing(one, other) for one, other in zip(base, outputs, strict=True))
        illegal = sum(not lab.follows(text) for text in texts)
        total, seconds = sum(map(len, outputs)), round(time.monotonic() - begun, 2)
        runs.append(Run(delay, len(texts), total, differing, illegal, seconds))
    return runs


def _num_differing(one: Sequence[int], other: Sequence[int]) -> int:
    return sum(a != b for a, b in zip(one, other, strict=False)) + abs(len(one) - len(other))


def main(argv: list[str]) -> int:
    """Trace and compare; 0 when nothing synchronizes and no delay changes anything, 2 without a CUDA device."""
    parser = argparse.ArgumentParser(prog="python -m tools.gates pipeline_trace", description="waits and late masks")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--graphs", action="store_true", help="replay decode steps and drafts")
    parser.add_argument("--steps", type=int, default=12, help="steps of each run with a delay")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument("--out", type=Path, help="write the JSON object here, too")
    arguments = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("pipeline_trace needs a CUDA device, and this machine has none: nothing was shown")
        return 2
    begun = time.monotonic()
    device = torch.device("cuda", 0)
    lab = Lab(ensure_checkpoint(), device, "bfloat16", arguments.rows, has_graphs=arguments.graphs)
    for _ in range(2):
        texts = lab.texts()
        for _ in range(WARM_UP):
            lab.step(texts, drafts=True)
    verdict = trace(lab, texts)
    lines = synchronizing_lines(lab)
    runs = compare(lab, arguments.steps, lambda: torch.cuda._sleep(CYCLES))  # type: ignore[no-untyped-call]
    lab.executor.close()
    ok = not verdict.faults and not lines and all(run.ok for run in runs)
    report = {
        "ok": ok,
        "elapsed_s": round(time.monotonic() - begun, 1),
        "device": torch.cuda.get_device_name(device),
        "torch": torch.__version__,
        "graphs": lab.has_graphs,
        "faults": dict(Counter(verdict.faults)),
        "synchronizing_lines": dict(lines),
        "figures": verdict.figures,
        "runs": [asdict(run) | {"ok": run.ok} for run in runs],
    }
    if arguments.out is not None:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report) if arguments.json else render(report, runs))
    return 0 if ok else 1


def render(report: Mapping[str, object], runs: Sequence[Run]) -> str:
    """A short table: what is at fault first, then figures and runs."""
    lines = []
    for key, title in (("faults", "fault"), ("synchronizing_lines", "synchronizes")):
        found = report[key]
        assert isinstance(found, dict)
        lines += [f"{title}: {count:4} x {what}" for what, count in sorted(found.items())]
    figures = report["figures"]
    assert isinstance(figures, dict)
    lines.append("  ".join(f"{name} {value:g}" for name, value in figures.items()))
    lines.append("delay       texts   ids  differing  illegal      s")
    for run in runs:
        lines.append(
            f"{run.delay:10} {run.texts:6} {run.ids:5} {run.differing:10} {run.illegal:8} {run.seconds:6.2f}"
            f"  {'ok' if run.ok else 'FAIL'}"
        )
    lines.append(f"{'ok' if report['ok'] else 'FAIL'}: {report['device']}, {report['elapsed_s']} s")
    return "\n".join(lines)
