"""Draws of tiny vocabularies through the sampler and both acceptance rules, against the distributions they must have.

One round of speculation is played for each of many seeds: a drafter that is somewhat wrong, a target under one sampling
rule, rows whose verify length is cut and rows whose masks end. Whatever a round emits at its j-th place, given what it
emitted before, must have the target's distribution: those counts are tested by chi-square, place by place.

Letters: N rounds (draws), K drafts, V vocabulary, C contexts (what can stand in front of a place).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import msgspec
import torch
from torch import Tensor

from dsparkd.executor import accept
from dsparkd.executor.sampler import Sampler, SampleRow
from dsparkd.kernels import noise
from dsparkd.messages import SamplingParams

V, K = 12, 2
EOS = 1
PROMPT = (5, 6, 7, 6)
ANCHOR, ANCHOR_POSITION = 3, 40
LEAST_EXPECTED = 5.0  # counts of a cell; rarer ones are put together
DRAWS = 100_000
CPU = torch.device("cpu")

Rule = Literal["coupled", "rejection"]
RULES: tuple[Rule, ...] = ("coupled", "rejection")


@dataclass(frozen=True, slots=True)
class Case:
    """One sampling rule. masked: a grammar forbids ids, and nothing is behind EOS. one_hot: drafts are argmaxes."""

    name: str
    sampling: SamplingParams = field(default_factory=lambda: rules())
    masked: bool = False
    one_hot: bool = False


def rules(temperature: float = 1.0, **values: object) -> SamplingParams:
    """Sampling parameters with a seed that `play` replaces."""
    return msgspec.structs.replace(SamplingParams(max_tokens=8, seed=0, temperature=temperature), **values)


CASES = (
    Case("plain"),
    Case("temperature 0.7", rules(0.7)),
    Case("top_p 0.8", rules(top_p=0.8)),
    Case("top_k 4", rules(1.3, top_k=4)),
    Case("min_p 0.1", rules(min_p=0.1)),
    Case("penalties", rules(presence_penalty=0.7, frequency_penalty=0.4, repetition_penalty=1.3)),
    Case("logit_bias", rules(logit_bias=((2, 1.5), (9, -2.0)))),
    Case("min_tokens", rules(min_tokens=3)),
    Case("mask", masked=True),
    Case("mask, top_p 0.9, penalties", rules(0.9, top_p=0.9, frequency_penalty=0.5), masked=True),
    Case("drafts by argmax", one_hot=True),
    Case("mask, drafts by argmax", masked=True, one_hot=True),
    Case("greedy", rules(0.0)),
)


@dataclass(frozen=True, slots=True)
class Result:
    """What N rounds came to. p_value: chance of a worse fit by luck. impossible: draws of what has no probability."""

    case: str
    rule: Rule
    draws: int
    chi_square: float
    degrees: int
    p_value: float
    impossible: int
    mean_length: float

    def line(self) -> str:
        """One line under HEADER."""
        return (
            f"{self.case:28} {self.rule:10} {self.draws:7} {self.chi_square:9.1f} {self.degrees:8} "
            f"{self.p_value:8.4f} {self.impossible:10} {self.mean_length:7.3f}"
        )


HEADER = "sampling rule                rule         draws  chi2      degrees  p        impossible  length"


class World:
    """The target's and the drafter's logits in every context, and the masks of a grammar. All of it fixed.

    device: where rounds are played, with the operations and kernels that serve there.
    """

    def __init__(self, device: torch.device = CPU) -> None:
        self.device = device
        generator = torch.Generator().manual_seed(6)
        bigram = torch.randn(V, V, generator=generator) * 1.5
        wrong = torch.randn(V, V, generator=generator) * 0.7
        # Contexts: no draft, one draft, two drafts in lexicographic order.
        self.contexts = [(), *((a,) for a in range(V)), *((a, b) for a in range(V) for b in range(V))]
        last = torch.tensor([context[-1] if context else ANCHOR for context in self.contexts])
        self.target = bigram[last] + 0.3 * torch.randn(len(self.contexts), V, generator=generator)
        self.drafter = bigram[last] + wrong[last]
        self.allowed = torch.rand(V, V, generator=generator) < 0.6
        self.allowed[:, EOS] = True
        self.allowed[ANCHOR, self.drafter[0].argmax()] = True  # or one_hot drafts would all be refused at once
        self.words = (self.allowed[last].int() << torch.arange(V)).sum(dim=1, keepdim=True, dtype=torch.int32)
        self.allowed = self.allowed[last]
        # Drawn and added up on the cpu, so that every device has the same ones.
        self.target, self.drafter = self.target.to(device), self.drafter.to(device)
        self.words, self.allowed = self.words.to(device), self.allowed.to(device)

    @staticmethod
    def context(drafts: Tensor, depth: int) -> Tensor:
        """Index of the context of the first `depth` of drafts [N, K]: [N] int64."""
        if depth == 0:
            return torch.zeros(drafts.shape[0], dtype=torch.int64, device=drafts.device)
        if depth == 1:
            return 1 + drafts[:, 0]
        return 1 + V + drafts[:, 0] * V + drafts[:, 1]


WORLD = World()


def play(case: Case, rule: Rule, draws: int = DRAWS, first_seed: int = 0, world: World = WORLD) -> Result:
    """Play that many rounds, each of which emits an id or more, and test all that they emit."""
    count = draws
    seeds = torch.arange(first_seed, first_seed + count, device=world.device)
    keys = accept.NoiseKeys(seeds, torch.zeros_like(seeds), torch.full_like(seeds, ANCHOR_POSITION))
    drafts, draft_probs = _draft(case, rule, keys, world)
    # A third of the rounds each: all drafts verified, one, none. The rounds' numbers decide, so no draft does.
    verify_lens = torch.arange(count, device=world.device) % (K + 1)
    block = accept.Block(drafts, verify_lens, _usable_rows(case, drafts, verify_lens, world))
    sampler = Sampler([True] * V, (EOS,), world.device)
    exact = sampler.distributions(
        world.target.clone(),
        [_row(case, c, c, c if case.masked else None, 0) for c in range(len(world.contexts))],
        _words(case, world),
    )
    if rule == "coupled":
        accepted = accept.accept_coupled(block, _choose(case, sampler, block, seeds, world))
    else:
        target_probs = torch.stack([exact[world.context(drafts, depth)] for depth in range(K + 1)], dim=1)
        accepted = accept.accept_rejection(block, draft_probs, target_probs, keys)
    return _judge(case, rule, accepted, exact)


def _draft(case: Case, rule: Rule, keys: accept.NoiseKeys, world: World) -> tuple[Tensor, Tensor]:
    """Draft as the drafter does under a rule: ids [N, K], and what they were drawn from [N, K, V]."""
    count = keys.seeds.shape[0]
    ids = torch.zeros((count, K), dtype=torch.int64, device=world.device)
    probs = torch.zeros((count, K, V), device=world.device)
    temperature = case.sampling.temperature
    for depth in range(K):
        scores = world.drafter[world.context(ids, depth)]
        if case.one_hot or temperature == 0:
            ids[:, depth] = scores.argmax(dim=-1)
            probs[:, depth] = accept.one_hot(ids[:, depth], V)
            continue
        stream = noise.SAMPLING if rule == "coupled" else noise.DRAFTS + depth
        gumbel = noise.gumbel(keys.seeds, keys.choices, keys.positions + depth + 1, V, stream)
        ids[:, depth] = (scores / temperature + gumbel).argmax(dim=-1)
        probs[:, depth] = accept.probabilities(scores / temperature)
    return ids, probs


def _usable_rows(case: Case, drafts: Tensor, verify_lens: Tensor, world: World) -> Tensor:
    """Rows that a walk along the drafts has masks for: none behind a refused id, none behind EOS. [N] int64."""
    rows = torch.ones(drafts.shape[0], dtype=torch.int64, device=world.device)
    if not case.masked:
        return rows + K
    open_ = torch.ones_like(rows, dtype=torch.bool)
    for depth in range(K):
        ids = drafts[:, depth]
        legal = world.allowed[world.context(drafts, depth)].gather(1, ids[:, None]).squeeze(1)
        open_ &= legal & (ids != EOS)
        rows += open_
    # In every seventh round the walk ran out of time behind its first row.
    rows[::7] = 1
    return torch.minimum(rows, verify_lens + 1)


def _words(case: Case, world: World) -> Tensor | None:
    return world.words if case.masked else None


def _row(case: Case, logits_row: int, context: int, mask_row: int | None, seed: int) -> SampleRow:
    outputs = (ANCHOR, *WORLD.contexts[context])
    sampling = msgspec.structs.replace(case.sampling, seed=seed)
    return SampleRow(logits_row, sampling, PROMPT, outputs, ANCHOR_POSITION + len(outputs), mask_row)


def _choose(case: Case, sampler: Sampler, block: accept.Block, seeds: Tensor, world: World) -> Tensor:
    """Let the target choose at every row that counts, as plain decoding would: [N, K+1] int64.

    Rows without a mask of their own are free to choose anything, and rows that the target has not seen repeat the
    draft: what a rule must not read would do it harm.
    """
    drafts = block.draft_ids
    ids = torch.cat((drafts, drafts[:, :1]), dim=1)
    live = torch.arange(len(seeds), device=world.device)
    for depth in range(K + 1):
        live = live[block.verify_lens[live] >= depth]
        contexts = world.context(drafts[live], depth)
        has_mask = (block.usable_rows[live] > depth) & case.masked
        keys = zip(contexts.tolist(), has_mask.tolist(), seeds[live].tolist(), strict=True)
        rows = [_row(case, i, c, c if masked else None, seed) for i, (c, masked, seed) in enumerate(keys)]
        chosen = sampler.choose(world.target[contexts], rows, words=_words(case, world)).token_ids
        ids[live, depth] = torch.tensor(chosen, device=world.device)
        if depth < K:
            live = live[ids[live, depth] == drafts[live, depth]]
    return ids


def _judge(case: Case, rule: Rule, accepted: accept.Accepted, exact: Tensor) -> Result:
    """Compare counts with probabilities, context by context, on the cpu."""
    exact, lens, ids = exact.cpu(), accepted.lens.cpu(), accepted.ids.cpu()
    counts = torch.zeros(len(WORLD.contexts), V, dtype=torch.float64)
    for depth in range(K + 1):
        here = lens >= depth
        # What comes behind an accepted draft has that draft in front of it.
        contexts = WORLD.context(ids[here].clamp(min=0), depth)
        cells = contexts * V + ids[here, depth]
        counts.view(-1).index_add_(0, cells, torch.ones(len(cells), dtype=torch.float64))
    total = counts.sum(dim=1, keepdim=True)
    impossible = int(counts[exact == 0].sum())
    chi_square, degrees = 0.0, 0
    for row, expected in zip(counts, exact.double() * total, strict=True):
        merged = _merge(row.tolist(), expected.tolist())
        chi_square += sum((seen - wanted) ** 2 / wanted for seen, wanted in merged)
        degrees += max(0, len(merged) - 1)
    p_value = _tail(chi_square, degrees)
    lengths = (lens + 1).double().mean()
    return Result(case.name, rule, int(total.sum()), chi_square, degrees, p_value, impossible, float(lengths))


def _merge(seen: Sequence[float], expected: Sequence[float]) -> list[tuple[float, float]]:
    """Pair counts with expectations; rare cells become one, which is left out where it stays rare."""
    cells = []
    rest_seen = rest_expected = 0.0
    for count, wanted in zip(seen, expected, strict=True):
        if wanted >= LEAST_EXPECTED:
            cells.append((count, wanted))
        else:
            rest_seen, rest_expected = rest_seen + count, rest_expected + wanted
    if rest_expected >= LEAST_EXPECTED:
        cells.append((rest_seen, rest_expected))
    return cells


def _tail(chi_square: float, degrees: int) -> float:
    """Chance that a chi-square variable exceeds a value."""
    if degrees == 0:
        return 1.0
    half = torch.tensor(degrees / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(half, torch.tensor(chi_square / 2, dtype=torch.float64)))
