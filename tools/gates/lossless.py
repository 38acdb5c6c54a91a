"""Gate `lossless`: speculation changes no id, greedy or seeded, by any axis; and both acceptance rules are exact.

    python -m tools.gates lossless [--prompts 500] [--checkpoint DIR] [--skip-lengths] [--json]
        [--device cpu|cuda] [--dtype float32|bfloat16] [--shared-device] [--dense] [--kv-dtype model|fp8]

A base run without speculation answers prompts of the test split, two in five of them identifiers to copy, in turn
greedily, at temperature 0.7 and at 1.0, both with top_p 0.95 and a seed. Then one axis at a time is moved, with
speculation: 1 to gamma drafts verified, as many as pay, alone, 32 at once, the other rank, a prefix hit, grammars, a
retract. All copies and as many others as a fifth of the prompts take each axis; each id and each log-probability, all
digits of it, must be the base's, and counters prove that the axis was moved. Tiny vocabularies then test what both
acceptance rules emit by chi-square against the exact distributions, under every filter. What each rule accepts at three
temperatures is reported.

On cuda, where the time of a device is dear, by default fewer prompts and draws are taken and the least and the most
drafts verified, and accepted lengths are left out; what was taken is in the last line. Nothing may differ there either.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec
import torch

from dsparkd.executor import costs
from dsparkd.executor.costs import CostTable, Origin
from dsparkd.model.config import load_model_config
from dsparkd.text.encoding import ChatEncoding
from tools import acceptance_draws, exam
from tools.acceptance_draws import CASES, DRAWS, RULES, Result, World
from tools.gates.invariance import PAGE_TOKENS, tiny_pool
from tools.harness import Server, Tables, ensure_checkpoint, merge
from tools.placement import Placement, add_arguments, placement
from tools.train_nano.tasks import TASKS, draw
from tools.train_nano.tasks.example import Task
from tools.workload import Answer, Client, Item, num_differing

PROMPTS = 500
CUDA_PROMPTS = 60
CUDA_DRAWS = 8_000
MAX_TOKENS = 64
PROMPT_TOKENS = 2048  # of a recall prompt with its answer
MAX_CONTEXT = 2560
CONCURRENCY = 8
ALONE = 24
LEAST_P = 1e-3
TINY_CONTEXT = 1024
MAX_ROWS = 32
GROWING = 64
# Seconds that a plain step of one row takes, about; two ranks on one GPU replay no graphs.
PLAIN_S = {"cpu": 1e-2, "cuda": 1e-3}
PLAIN_SHARED_S = 3e-2
TEMPERATURES = (0.0, 0.7, 1.0)
SAMPLING: tuple[dict[str, object], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.7, "top_p": 0.95},
    {"temperature": 1.0, "top_p": 0.95},
)
GRAMMARS: tuple[dict[str, object], ...] = (
    {
        "json_schema": {
            "type": "object",
            "properties": {
                "name": {"type": "string", "maxLength": 40},
                "count": {"type": "integer", "minimum": 0, "maximum": 999},
                "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 3},
            },
            "required": ["name", "count", "tags"],
            "additionalProperties": False,
        }
    },
    {"regex": "[a-z_]{1,12}( = [0-9]{1,4})?(, [a-z]{2,8}){0,6}"},
    {"json_object": True},
)
COUNTER_S = 1.5  # a rank's counters reach the parent once a second

Prove = Callable[[list[Answer]], tuple[str, bool]]


@dataclass(frozen=True)
class Axis:
    """One way to compute prompts with speculation, compared with the base."""

    name: str
    requests: int
    differing_requests: int
    differing_ids: int
    differing_logprobs: int
    compared_ids: int
    accepted_drafts: int
    proof: str
    proven: bool
    seconds: float

    @property
    def ok(self) -> bool:
        """Every id and digit equal, and the axis really moved."""
        return self.proven and self.compared_ids > 0 and not (self.differing_ids or self.differing_logprobs)

    def line(self) -> str:
        """One line under HEADER."""
        verdict = "ok" if self.ok else "FAIL"
        return (
            f"{self.name:34} {self.requests:8} {self.differing_ids:5} {self.differing_logprobs:8} "
            f"{self.compared_ids:6} {self.accepted_drafts:8} {self.seconds:6.1f}  {self.proof:44} {verdict}"
        )


HEADER = "axis                               requests   ids logprobs     of accepted      s  proof"


@dataclass(frozen=True)
class Length:
    """Mean accepted length (accepted drafts and the token behind them) under one rule."""

    acceptance: str
    temperature: float
    steps: int
    mean: float


def prompts_of(count: int, encoding: ChatEncoding) -> list[Item]:
    """Prompts of the test split, their ids: two in five copies, the rest from all other tasks; sampling in turn."""
    others = [task for task in TASKS if task != "copy"]
    copies = count * 2 // 5
    asked: list[tuple[Task, int]] = [("copy", index) for index in range(copies)]
    asked += [(others[index % len(others)], index // len(others)) for index in range(count - copies)]
    items = []
    for index, (task, number) in enumerate(asked):
        example = draw(task, "test", number, PROMPT_TOKENS)
        ids = list(encoding.tokenize(encoding.render(example.chat)).ids)
        items.append(Item(ids, sampling(index), MAX_TOKENS))
    return items


def sampling(index: int) -> dict[str, object]:
    """The rules of prompt number index."""
    return SAMPLING[index % len(SAMPLING)] | {"seed": 1000 + index}


def growing(copies: Sequence[Item], seed: int) -> list[Item]:
    """Copies behind so much text that each answer needs a page more than its prompt."""
    generator = random.Random(seed)
    items = []
    for index in range(GROWING):
        item = copies[index % len(copies)]
        fill = (PAGE_TOKENS - generator.randint(1, MAX_TOKENS // 2) - len(item.prompt)) % PAGE_TOKENS
        prompt = [generator.randrange(3, 1000) for _ in range(fill)] + item.prompt
        items.append(Item(prompt, sampling(index) | {"ignore_eos": True}, MAX_TOKENS))
    return items


class Gate:
    """Runs base and axes; `report` hears of each axis."""

    def __init__(self, checkpoint: Path, placed: Placement, count: int, report: Callable[[Axis], None]) -> None:
        self._checkpoint = checkpoint
        self._placed = placed
        self._report = report
        config = load_model_config(checkpoint)
        self._gamma = config.gamma
        items = prompts_of(count, exam.load_encoding(checkpoint))
        copies = count * 2 // 5
        self._all = items
        self._some = items[: copies + max(1, count // 5)]
        self._alone = self._some[:: max(1, len(self._some) // ALONE)]
        self._held = [
            Item(item.prompt, item.rules | GRAMMARS[index % len(GRAMMARS)], item.max_tokens)
            for index, item in enumerate(self._some)
        ]
        self._growing = growing(items[: max(1, copies)], seed=2)
        self._bases: dict[int, list[Answer]] = {}

    def run(self) -> None:
        """Take the base, then every axis."""
        with self._server({"dspark": {"enabled": False}}) as server:
            client = Client(server.wait_ready().base_url)
            for name, items in (("", self._all), (", grammars", self._held), (", growing", self._growing)):
                self._take(f"off{name}", client, items, CONCURRENCY, lambda index: index % 2, _no_drafts)
        for items in (self._some, self._alone):  # parts of the base run
            numbers = {id(item): number for number, item in enumerate(self._all)}
            self._bases[id(items)] = [self._bases[id(self._all)][numbers[id(item)]] for item in items]
        for most in (1, self._gamma) if self._placed.on_cuda else range(1, self._gamma + 1):
            with self._server(self._speculation(most)) as server:
                client = Client(server.wait_ready().base_url)
                name = f"max_verify {most}"
                self._take(name, client, self._some, CONCURRENCY, lambda index: index % 2, _no_hits)
                if most == self._gamma:
                    self._axes(client)
        with tempfile.TemporaryDirectory(prefix="dsparkd-gate-") as directory:
            compact = {"dspark": {"verify": "compact", "cost_table": str(self._costs(Path(directory)))}}
            with self._server(merge(self._speculation(self._gamma), compact)) as server:
                client = Client(server.wait_ready().base_url)
                for name, items in (("compact", self._some), ("compact, grammars", self._held)):
                    self._take(name, client, items, 32, lambda index: index % 2, _left_out(client))
        # Fewer tokens than the other servers': the pool must hold one sequence of the length.
        pool = merge(tiny_pool(self._checkpoint, self._placed), {"engine": {"max_context_tokens": TINY_CONTEXT}})
        with self._server(merge(self._speculation(self._gamma), pool)) as server:
            client = Client(server.wait_ready().base_url)
            self._take("retract", client, self._growing, 32, lambda index: index % 2, _retractions(client))

    def _axes(self, client: Client) -> None:
        """What one server with speculation can show; all of max_verify gamma's prompts are cached by now."""
        some = self._some
        self._take("prefix hit", client, some, CONCURRENCY, lambda index: index % 2, _hits(some))
        self._take("other rank, 32 at once", client, some, 32, lambda index: 1 - index % 2, _anything)
        self._take("alone", client, self._alone, 1, lambda index: 0, _anything)
        self._take("grammars", client, self._held, 32, lambda index: index % 2, _anything)

    def lengths(self) -> list[Length]:
        """What each acceptance rule accepts of the copies and others at three temperatures."""
        found = []
        asked = {
            temperature: [
                Item(item.prompt, {"temperature": temperature, "seed": index}, MAX_TOKENS)
                for index, item in enumerate(self._alone)
            ]
            for temperature in TEMPERATURES
        }
        for acceptance in RULES:
            speculation = merge(self._speculation(self._gamma), {"dspark": {"acceptance": acceptance}})
            with self._server(speculation) as server:
                client = Client(server.wait_ready().base_url)
                for temperature in TEMPERATURES:
                    before = _accepted(client)
                    items = asked[temperature]
                    if temperature == 0:  # without chance both rules are one
                        name = f"greedy, {acceptance}"
                        self._take(name, client, items, CONCURRENCY, lambda index: index % 2, _anything)
                    else:
                        client.complete_all(items, CONCURRENCY, lambda index: index % 2)
                    tokens, steps = (now - then for now, then in zip(_accepted(client), before, strict=True))
                    found.append(Length(acceptance, temperature, int(steps), tokens / max(1.0, steps)))
        return found

    def _speculation(self, most: int) -> Tables:
        return {"dspark": {"enabled": True, "max_verify": most}}

    def _server(self, overrides: Tables) -> Server:
        engine = {"max_context_tokens": MAX_CONTEXT, "checkpoint": str(self._checkpoint), **self._placed.engine()}
        base: Tables = {
            "engine": engine,
            "kv": {"page_tokens": PAGE_TOKENS},
            "scheduler": {"chunk_tokens": 1024, "max_rows": MAX_ROWS},
        }
        return Server(merge(base, overrides))

    def _costs(self, directory: Path) -> Path:
        """A cost table by which likely drafts pay and others do not: a token costs as much as a fifth of a step.

        A plain step takes about what a real one does: planners hold the table beside the times of those.
        """
        plain_s = PLAIN_SHARED_S if self._placed.shares_device else PLAIN_S[self._placed.device]
        rows, widths = (1, MAX_ROWS), tuple(range(1, self._gamma + 2))
        table = CostTable(
            version=costs.VERSION,
            origin=Origin(
                machine="made up",
                device=self._placed.device,
                dtype=self._placed.dtype,
                checkpoint="any",
                measured="never",
            ),
            rows=rows,
            widths=widths,
            verify_s=tuple(tuple(plain_s * (1 + 0.2 * count * width) for width in widths) for count in rows),
            draft_s=(0.1 * plain_s, 0.1 * plain_s),
        )
        path = directory / "costs.json"
        path.write_bytes(msgspec.json.encode(table))
        return path

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
        accepted = _accepted_drafts(client)
        answers = client.complete_all(items, concurrency, dp_rank)
        seconds = round(time.perf_counter() - began, 1)
        time.sleep(COUNTER_S)
        accepted = _accepted_drafts(client) - accepted
        base = self._bases.setdefault(id(items), answers)
        proof, proven = prove(answers)
        pairs = list(zip(base, answers, strict=True))
        self._report(
            Axis(
                name=name,
                requests=len(items),
                differing_requests=sum(one.tokens != other.tokens for one, other in pairs),
                differing_ids=sum(num_differing(one.tokens, other.tokens) for one, other in pairs),
                differing_logprobs=sum(num_differing(one.logprobs, other.logprobs) for one, other in pairs),
                compared_ids=sum(len(answer.tokens) for answer in base),
                accepted_drafts=accepted,
                proof=proof,
                # An axis that drafted nothing compared plain decoding with itself.
                proven=proven and (accepted > 0) != name.startswith("off"),
                seconds=seconds,
            )
        )


def _accepted_drafts(client: Client) -> int:
    return int(client.counter("dsparkd_draft_tokens_total", 'fate="accepted"'))


def _accepted(client: Client) -> tuple[float, float]:
    """Tokens of verify steps, and these steps' rows, so far."""
    time.sleep(COUNTER_S)
    return client.counter("dsparkd_accepted_per_step_sum"), client.counter("dsparkd_accepted_per_step_count")


def _no_drafts(answers: list[Answer]) -> tuple[str, bool]:
    return f"{sum(answer.finish == 'length' for answer in answers)} answers cut", True


def _anything(answers: list[Answer]) -> tuple[str, bool]:
    return f"cached tokens: {sum(answer.cached_tokens for answer in answers)}", True


def _no_hits(answers: list[Answer]) -> tuple[str, bool]:
    """Prompts may share a page of instructions, so some are hits; most must not be."""
    hits = sum(answer.cached_tokens > 0 for answer in answers)
    return f"{hits} prompts were cached in part", hits * 2 <= len(answers)


def _hits(items: Sequence[Item]) -> Prove:
    """Every prompt of more than a page must have found it."""

    def prove(answers: list[Answer]) -> tuple[str, bool]:
        long = [answer for item, answer in zip(items, answers, strict=True) if len(item.prompt) > PAGE_TOKENS]
        hits = sum(answer.cached_tokens > 0 for answer in long)
        return f"{hits} of {len(long)} prompts of more than a page hit", hits == len(long) > 0

    return prove


def _left_out(client: Client) -> Prove:
    """Steps were compact, and not every draft was verified."""

    def prove(answers: list[Answer]) -> tuple[str, bool]:
        steps = int(client.counter("dsparkd_verify_steps_total", 'layout="compact"'))
        count = int(client.counter("dsparkd_draft_tokens_total", 'fate="not_verified"'))
        return f"{steps} compact steps, {count} drafts left out", steps > 0 and count > 0

    return prove


def _retractions(client: Client) -> Prove:
    def prove(answers: list[Answer]) -> tuple[str, bool]:
        count = int(client.counter("dsparkd_retractions_total"))
        return f"retractions: {count}", count > 0

    return prove


def fits(result: Result) -> bool:
    """Whether draws have the distribution that they must have."""
    return result.impossible == 0 and result.p_value > LEAST_P


def main(argv: list[str]) -> int:
    """Take every axis and test the distributions; 0 when nothing differs and everything fits."""
    parser = argparse.ArgumentParser(prog="python -m tools.gates lossless", description=str(__doc__).splitlines()[0])
    parser.add_argument("--prompts", type=int, help=f"of the base run ({PROMPTS}, on cuda {CUDA_PROMPTS})")
    parser.add_argument("--draws", type=int, help=f"of each distribution ({DRAWS}, on cuda {CUDA_DRAWS})")
    parser.add_argument("--checkpoint", type=Path, help="directory; the shipped checkpoint by default")
    parser.add_argument("--skip-lengths", action="store_true", help="do not compare what the two rules accept")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    add_arguments(parser)
    arguments = parser.parse_args(argv)
    placed = placement(arguments)
    num_prompts = arguments.prompts or (CUDA_PROMPTS if placed.on_cuda else PROMPTS)
    num_draws = arguments.draws or (CUDA_DRAWS if placed.on_cuda else DRAWS)
    torch.set_num_threads(1)
    began = time.perf_counter()
    checkpoint = (arguments.checkpoint or ensure_checkpoint()).resolve()
    axes: list[Axis] = []

    def say(line: str) -> None:
        if not arguments.json:
            print(line, flush=True)

    def report(axis: Axis) -> None:
        axes.append(axis)
        say(axis.line())

    say(HEADER)
    with placed.checkpoint(checkpoint) as directory:
        gate = Gate(directory, placed, num_prompts, report)
        gate.run()
        lengths = [] if arguments.skip_lengths or placed.on_cuda else gate.lengths()
    say(acceptance_draws.HEADER)
    results = []
    world = World(torch.device(placed.device))
    for case in CASES:
        for rule in RULES:
            results.append(acceptance_draws.play(case, rule, num_draws, world=world))
            say(results[-1].line())
    for length in lengths:
        say(
            f"{length.acceptance:10} temperature {length.temperature}: {length.mean:.2f} tokens in {length.steps} steps"
        )
    ok = all(axis.ok for axis in axes) and all(fits(result) for result in results)
    elapsed = round(time.perf_counter() - began, 1)
    if arguments.json:
        facts = {"ok": ok, "elapsed_s": elapsed, "checkpoint": checkpoint.name, "placed": str(placed)}
        facts |= {"prompts": num_prompts, "draws": num_draws}
        parts = {"axes": axes, "distributions": results, "lengths": lengths}
        print(json.dumps(facts | {name: [asdict(each) for each in part] for name, part in parts.items()}))  # type: ignore[attr-defined]
    else:
        verdict = "ok" if ok else "FAIL"
        tests = f"{len(results)} tests of {num_draws} rounds"
        print(f"{verdict}: {placed}: {num_prompts} prompts, {len(axes)} runs, {tests}, {elapsed} s")
    return 0 if ok else 1
