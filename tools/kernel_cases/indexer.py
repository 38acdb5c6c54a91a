"""The lightning indexer: scores, and the choice by given scores."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from dsparkd.kernels.cuda.indexer import keep_best, score
from dsparkd.kernels.indexer import Visible
from tools.kernel_cases import Case, Scale
from tools.kernel_cases.rows import DECODE, ONE, PREFILL, SMALL, Step, random_floats, random_values

RATIO = 4
REFERENCE_TOKENS = 64  # the reference makes the products of so many at once
LONG = Step(num_sequences=4, width=6, context=131072)


@dataclass(frozen=True, slots=True)
class Geometry:
    """Heads, width, entries kept."""

    heads: int
    width: int
    top_k: int


SMALL_GEOMETRY = Geometry(heads=8, width=32, top_k=64)
FLASH = Geometry(heads=64, width=128, top_k=512)


def cases(device: torch.device, scale: Scale) -> Iterator[Case]:
    """Both parts at every step. Each token sees all entries of its sequence, so that every score is written."""
    small = scale is Scale.SMALL
    for step in (SMALL,) if small else (ONE, DECODE, LONG, PREFILL):
        yield from _cases(SMALL_GEOMETRY if small else FLASH, step, device)


def _cases(g: Geometry, step: Step, device: torch.device) -> Iterator[Case]:
    n, most = step.num_tokens, step.context // RATIO
    num_entries = step.num_sequences * most
    order = 1 + torch.randperm(num_entries, generator=torch.Generator().manual_seed(1))
    slots, rows = order.view(step.num_sequences, most).to(device), step.sequences().to(device)
    counts = torch.full((n,), most, device=device)
    query, keys = (
        random_values(device, n, g.heads, g.width, seed=2),
        random_values(device, num_entries + 1, g.width, seed=3),
    )
    weights = random_floats(device, n, g.heads, seed=4) * (g.heads * g.width) ** -0.5
    given = random_floats(device, n, most, seed=5)

    def visible(part: slice) -> Visible:
        return Visible(slots, rows[part], counts[part], most)

    def reference_scores(part: slice) -> Tensor:
        outputs = []
        for start in range(part.start, part.stop, REFERENCE_TOKENS):
            few = slice(start, min(start + REFERENCE_TOKENS, part.stop))
            outputs += [
                (weights[t, None] @ (query[t].float() @ keys[slots[rows[t]]].float().t()).relu())[0]
                for t in range(few.start, few.stop)
            ]
        return torch.stack(outputs)

    def choose(part: slice) -> Tensor:
        chosen = torch.empty((part.stop - part.start, g.top_k), dtype=torch.int64, device=device)
        keep_best(given[part], visible(part), g.top_k, chosen)
        return chosen

    def reference_choice(part: slice) -> Tensor:
        best = given[part].sort(dim=1, descending=True, stable=True).indices[:, : g.top_k].sort(1).values
        return slots[rows[part]].gather(1, best)

    yield Case(
        name="indexer.score",
        shape=step.words,
        num_rows=n,
        run=lambda part: score(query[part], weights[part], keys, visible(part)),
        reference=reference_scores,
        tolerance=1e-5,
        floor_bytes=2 * keys.numel() + 2 * query.numel() + 4 * n * most,
        floor_flops=2 * n * most * g.heads * g.width,
    )
    yield Case(
        name="indexer.choice",
        shape=step.words,
        num_rows=n,
        run=choose,
        reference=reference_choice,
        tolerance=0,
        floor_bytes=4 * n * most + 8 * n * g.top_k,
    )
