"""Gate `logits`: the shipped checkpoint computes in our model what it computes in transformers, on real prompts.

    python -m tools.gates logits [--checkpoint DIR] [--per-task N] [--json]

The first questions of every task's test split with their right answers, and a recall question of more than 4,096
tokens. Reference: transformers in float32, eager, in one pass; loaded by its own conversion of the official layout and
by ours (tools/oracle.py), which must give the same tensors bit for bit. Ours: dsparkd's reader and model in float32.
An error is the largest difference over the largest logit.

Where two compressed entries, or two experts, score alike but for rounding, the two sides may keep different ones, and
logits then differ by more than rounding. So transformers computes with our choice, and each choice is held against its
own scores: by how much the worst that we keep scores below the last one that it keeps, over the row's largest score.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import DeepseekV4ForCausalLM
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4TopKRouter

from dsparkd.kernels.crossing import Crossing
from dsparkd.kernels.indexer import Visible
from dsparkd.kernels.router import Routes
from dsparkd.kv.geometry import CSA_RATIO, PoolSizes
from dsparkd.model.indexer import Indexer, IndexQuery
from dsparkd.model.moe import MoE
from tools.harness import ensure_checkpoint
from tools.oracle import Engine, load_by_transformers, load_oracle, oracle_logits, relative_error
from tools.train_nano.encode import Encoder
from tools.train_nano.tasks import TASKS, draw

TOLERANCE = 1e-3
CHOICE_TOLERANCE = 1e-4
LONG_TOKENS = (4_096, 5_120)  # of the long recall question; beyond, transformers' dense masks take gigabytes
SHORT_TOKENS = 3_000


@dataclass(frozen=True, slots=True)
class Case:
    """One text's error.

    same_token: positions at which both find the same token likeliest. other_entries: rows, over all layers with an
    indexer, where the two sides keep other entries. other_experts: the same of layers with a learned router.
    shortfall: the largest of both, as the module says.
    """

    task: str
    index: int
    tokens: int
    error: float
    same_token: int
    other_entries: int
    other_experts: int
    shortfall: float
    seconds: float

    @property
    def ok(self) -> bool:
        """Whether both are within their tolerance."""
        return self.error <= TOLERANCE and self.shortfall <= CHOICE_TOLERANCE


class Recorder:
    """Remembers what one indexer of ours chose in a pass: entries [n, K], -1 for none, by each block's first token.

    Only for a sequence alone in one pass, whose pages are numbered from 1 on.
    """

    def __init__(self, indexer: Indexer, page_entries: int) -> None:
        self.chosen: dict[int, Tensor] = {}
        self._choose = indexer.choose
        self._page_entries = page_entries
        vars(indexer)["choose"] = self.choose

    def choose(self, query: IndexQuery, part: slice, keys: Tensor, visible: Visible) -> Tensor:
        """See Indexer."""
        slots = self._choose(query, part, keys, visible)
        # Slots count from the null page on, whose first one stands for none.
        self.chosen[part.start] = torch.where(slots == 0, -1, slots - self._page_entries)
        return slots


class ChoiceHook:
    """Gives one indexer of transformers our choice in place of its own, and compares the two."""

    def __init__(self, theirs: torch.nn.Module, ours: Recorder) -> None:
        self.other_entries = 0
        self.shortfall = 0.0
        self._ours = ours
        self._scores = torch.empty(0)
        scorer = theirs.get_submodule("scorer")
        scorer.register_forward_hook(self._keep_scores)
        theirs.register_forward_hook(self._replace)

    def _keep_scores(self, _module: torch.nn.Module, _inputs: object, output: Tensor) -> None:
        self._scores = output[0]  # [T, E]

    def _replace(self, _module: torch.nn.Module, _inputs: object, output: Tensor) -> Tensor:
        """output [1, T, K]: entries, -1 for none."""
        self.other_entries, self.shortfall = 0, 0.0
        replaced = output.clone()
        for start, chosen in self._ours.chosen.items():
            part = slice(start, start + len(chosen))
            replaced[0, part] = self._compare(output[0, part], chosen, self._scores[part], start)
        self._ours.chosen.clear()
        return replaced

    def _compare(self, theirs: Tensor, ours: Tensor, scores: Tensor, start: int) -> Tensor:
        """theirs [n, K], ours [n, K'], scores [n, E] of n tokens from `start` on -> ours [n, K], -1 last."""
        counts = (torch.arange(start, start + len(ours)) + 1) // CSA_RATIO
        kept = (ours >= 0).sum(1)
        if not torch.equal(kept, counts.clamp(max=theirs.shape[1])) or (ours >= counts[:, None]).any():
            self.shortfall = float("inf")
        largest = scores.abs().amax(1)
        their_last = scores.gather(1, theirs.clamp(min=0)).masked_fill(theirs < 0, torch.inf).amin(1)
        our_last = scores.gather(1, ours.clamp(min=0)).masked_fill(ours < 0, torch.inf).amin(1)
        short = ((their_last - our_last) / largest).nan_to_num(nan=0.0)  # a row that sees no entry has two infinities
        self.shortfall = max(self.shortfall, float(short.max()))
        ours_sorted = ours.sort(1, descending=True).values[:, : theirs.shape[1]]
        differing = (ours_sorted != theirs.sort(1, descending=True).values).any(1)
        self.other_entries += int(differing.sum())
        return ours_sorted


class RouteRecorder:
    """In place of one router of ours: remembers the experts that it chose in a pass, [T, k], padding included."""

    def __init__(self, moe: MoE) -> None:
        self.expert_ids = torch.empty(0)
        self._route = moe._route
        vars(moe)["_route"] = self

    def __call__(self, logits: Tensor, input_ids: Tensor, num_live: Tensor) -> Routes:
        """See RouterKernel."""
        routes = self._route(logits, input_ids, num_live)
        self.expert_ids = routes.expert_ids.long()
        return routes

    def pack(
        self,
        x: Tensor,
        logits: Tensor,
        input_ids: Tensor,
        num_live: Tensor,
        rows: Tensor,
        crossing: Crossing | None = None,
    ) -> None:
        """See RouterKernel."""
        self(logits, input_ids, num_live)
        self._route.pack(x, logits, input_ids, num_live, rows, crossing)


class RouteHook:
    """Gives one learned router of transformers our choice in place of its own, and compares the two."""

    def __init__(self, theirs: DeepseekV4TopKRouter, ours: RouteRecorder) -> None:
        self.other_experts = 0
        self.shortfall = 0.0
        self._ours = ours
        theirs.register_forward_hook(self._replace)

    def _replace(
        self, theirs: DeepseekV4TopKRouter, _inputs: object, output: tuple[Tensor, Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """output: logits [T, E], shares [T, k] and experts [T, k]."""
        logits, _, indices = output
        ours = self._ours.expert_ids[: len(indices)]
        scores = theirs.score_fn(logits)
        ranked = scores + theirs.e_score_correction_bias
        short = ranked.gather(1, indices).amin(1) - ranked.gather(1, ours).amin(1)
        distinct = (ours.sort(1).values.diff(dim=1) > 0).all()
        self.shortfall = float((short / ranked.abs().amax(1)).max()) if distinct else float("inf")
        self.other_experts = int((ours.sort(1).values != indices.sort(1).values).any(1).sum())
        shares = scores.gather(1, ours)
        return logits, shares / shares.sum(1, keepdim=True) * theirs.routed_scaling_factor, ours


def texts(encoder: Encoder, per_task: int) -> Iterator[tuple[str, int, list[int]]]:
    """Task, index and ids of what is compared: `per_task` short texts of each task, then the long one."""
    for task in TASKS:
        found = 0
        index = 0
        while found < per_task:
            ids = encoder.encode(draw(task, "test", index)).ids
            if len(ids) <= SHORT_TOKENS:
                yield task, index, ids
                found += 1
            index += 1
    index = 0
    while not LONG_TOKENS[0] < len(ids := encoder.encode(draw("recall", "test", index)).ids) <= LONG_TOKENS[1]:
        index += 1
    yield "recall", index, ids


def num_differing(ours: DeepseekV4ForCausalLM, theirs: DeepseekV4ForCausalLM) -> int:
    """Parameters and buffers that the two conversions do not give alike, bit for bit."""
    one, other = ({**dict(model.named_buffers()), **model.state_dict()} for model in (ours, theirs))
    names = one.keys() | other.keys()
    return sum(not (name in one and name in other and torch.equal(one[name], other[name])) for name in names)


class Pair:
    """The two models, joined at their indexers and learned routers."""

    def __init__(self, checkpoint: Path) -> None:
        self.oracle = load_oracle(checkpoint)
        self._engine = Engine(checkpoint, sizes=PoolSizes(1 + -(-max(LONG_TOKENS[1], SHORT_TOKENS) // 256), 2, 1))
        self._hooks: list[ChoiceHook] = []
        self._route_hooks: list[RouteHook] = []
        for layer, block in enumerate(self._engine.model.blocks):
            indexer = block.attention._indexer
            if indexer is not None:
                recorder = Recorder(indexer, self._engine.geometry.csa_entries_per_page)
                theirs = self.oracle.model.layers[layer].self_attn.compressor.indexer
                self._hooks.append(ChoiceHook(theirs, recorder))
            router = self.oracle.model.layers[layer].mlp.gate
            if isinstance(router, DeepseekV4TopKRouter):
                self._route_hooks.append(RouteHook(router, RouteRecorder(block.moe)))

    def compare(self, task: str, index: int, ids: list[int]) -> Case:
        """Run one text through both, ours first."""
        began = time.perf_counter()
        logits = self._engine.logits(ids, [len(ids)])
        reference = oracle_logits(self.oracle, ids)
        return Case(
            task=task,
            index=index,
            tokens=len(ids),
            error=relative_error(logits, reference),
            same_token=int((logits.argmax(-1) == reference.argmax(-1)).sum()),
            other_entries=sum(hook.other_entries for hook in self._hooks),
            other_experts=sum(hook.other_experts for hook in self._route_hooks),
            shortfall=max(hook.shortfall for hooks in (self._hooks, self._route_hooks) for hook in hooks),
            seconds=round(time.perf_counter() - began, 1),
        )


def main(argv: list[str]) -> int:
    """Compare; 0 when every error is within TOLERANCE and both conversions agree."""
    parser = argparse.ArgumentParser(prog="python -m tools.gates logits", description=str(__doc__).splitlines()[0])
    parser.add_argument("--checkpoint", type=Path, help="directory; the shipped checkpoint by default")
    parser.add_argument("--per-task", type=int, default=4, help="short texts of each task (default 4)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    began = time.perf_counter()
    checkpoint = (arguments.checkpoint or ensure_checkpoint()).resolve()
    pair = Pair(checkpoint)
    differing = num_differing(pair.oracle, load_by_transformers(checkpoint))
    cases: list[Case] = []
    if not arguments.json:
        print(f"transformers' own conversion and ours: {differing} tensors differ")
        print("task       index tokens    error  same token  other entries  experts  shortfall     s", flush=True)
    for task, index, ids in texts(Encoder(checkpoint / "tokenizer.json"), arguments.per_task):
        case = pair.compare(task, index, ids)
        cases.append(case)
        if not arguments.json:
            print(
                f"{task:10} {index:5} {case.tokens:6} {case.error:8.1e} {case.same_token / case.tokens:11.2%} "
                f"{case.other_entries:14} {case.other_experts:8} {case.shortfall:10.1e} {case.seconds:5.1f}  "
                f"{'ok' if case.ok else 'FAIL'}",
                flush=True,
            )
    elapsed = round(time.perf_counter() - began, 1)
    worst = max(case.error for case in cases)
    ok = all(case.ok for case in cases) and differing == 0
    if arguments.json:
        facts = {"ok": ok, "checkpoint": checkpoint.name, "tolerance": TOLERANCE, "worst": worst}
        table = [asdict(case) for case in cases]
        print(json.dumps(facts | {"differing_tensors": differing, "elapsed_s": elapsed, "cases": table}))
    else:
        print(f"{'ok' if ok else 'FAIL'}: worst {worst:.1e}, tolerance {TOLERANCE:.0e}, {elapsed:.0f} s")
    return 0 if ok else 1
