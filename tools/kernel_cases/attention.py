"""Attention of the three layer kinds, and the norm and rotation before it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from dsparkd.kernels.attention import EntryKeys, TorchAttention, WindowKeys
from dsparkd.kernels.cuda.attention import TritonAttention, norm_and_rotate
from dsparkd.kernels.indexer import Visible
from dsparkd.kernels.packed import pack, round_
from dsparkd.kernels.rotary import Rotation
from tools.kernel_cases import Case, Scale
from tools.kernel_cases.rows import DECODE, ONE, PREFILL, SMALL, Step, random_floats, random_rotation, random_values

REFERENCE_TOKENS = 128  # the reference gathers the keys of so many at once
CSA, HCA, SWA = "csa", "hca", "swa"
RATIOS = {CSA: 4, HCA: 128}


@dataclass(frozen=True, slots=True)
class Geometry:
    """Heads, head width, window, rotary width, entries that CSA layers choose."""

    heads: int
    width: int
    window: int
    rotary: int
    top_k: int


SMALL_GEOMETRY = Geometry(heads=8, width=64, window=32, rotary=16, top_k=64)
FLASH = Geometry(heads=64, width=512, window=128, rotary=64, top_k=512)


def cases(device: torch.device, scale: Scale) -> Iterator[Case]:
    """Every layer kind at every step."""
    small = scale is Scale.SMALL
    geometry = SMALL_GEOMETRY if small else FLASH
    for step in (SMALL,) if small else (ONE, DECODE, PREFILL):
        yield _heads(geometry, step, device)
        for kind in (SWA, CSA, HCA):
            yield _attention(geometry, kind, step, device)
            if step in (SMALL, DECODE):
                yield _attention(geometry, kind, step, device, packed=True)
    # Entries of more than one part, and of 16.
    yield _attention(geometry, HCA, Step(2, 2, 70_000) if small else Step(4, 6, 1 << 20), device)


def _attention(g: Geometry, kind: str, step: Step, device: torch.device, *, packed: bool = False) -> Case:
    n = step.num_tokens
    queries = random_values(device, n, g.heads, g.width, seed=1, scale=g.width**-0.5)
    ring = random_values(device, step.num_sequences * g.window + 1, g.width, seed=2)
    chunk = random_values(device, n, g.width, seed=3)
    sink, inverse = random_floats(device, g.heads, seed=4), random_rotation(device, n, g.rotary)
    sources = _sources(g, step).to(device)
    first = (g.window - 1 - step.positions()).clamp(min=0).to(device)
    keys, visible, chosen = _entries(g, kind, step, device)
    if packed:
        round_(chunk, g.rotary)
        ring, keys = pack(ring, g.rotary), pack(keys, g.rotary)
    key_bytes = ring.shape[1] * ring.itemsize

    def window(part: slice) -> WindowKeys:
        return WindowKeys(ring, chunk, sources[part], first[part], False)

    def entries(part: slice) -> EntryKeys | None:
        if chosen is not None:
            return EntryKeys(keys, chosen[part], visible.counts[part].clamp(max=g.top_k))
        if kind == SWA:
            return None
        return kernel.see(keys, Visible(visible.slots, visible.rows[part], visible.counts[part], visible.most))

    kernel, torch_form = TritonAttention(), TorchAttention()

    def run(part: slice) -> Tensor:
        output = torch.empty_like(queries[part])
        kernel.attend(queries[part], window(part), entries(part), sink, inverse.rows(part), output)
        return output

    def reference(part: slice) -> Tensor:
        outputs = []
        for start in range(part.start, part.stop, REFERENCE_TOKENS):
            few = slice(start, min(start + REFERENCE_TOKENS, part.stop))
            seen = entries(few)
            if seen is not None and seen.rows is not None:
                seen = torch_form.see(keys, Visible(seen.slots, seen.rows, seen.counts, visible.most))
            output = torch.empty(queries[few].shape, device=device)
            turn = inverse.rows(few)
            torch_form.attend(queries[few].float(), window(few), seen, sink, turn, output)
            outputs.append(output)
        return torch.cat(outputs)

    counts = visible.counts.clamp(max=g.top_k) if kind == CSA else visible.counts
    num_keys = int((g.window - first).sum() + (counts.sum() if kind != SWA else 0))
    used = _distinct(sources) + _used_entries(kind, visible, chosen)
    return Case(
        name=f"attention.{kind}{'_packed' if packed else ''}",
        shape=step.words,
        num_rows=n,
        run=run,
        reference=reference,
        tolerance=1e-2,
        floor_bytes=2 * 2 * queries.numel() + used * key_bytes,
        floor_flops=4 * num_keys * g.heads * g.width,
    )


def _sources(g: Geometry, step: Step) -> Tensor:
    """Window positions of each token: before its sequence's tokens from the ring, else from the step itself."""
    positions, sequences = step.positions(), step.sequences()
    wanted = positions[:, None] + torch.arange(1 - g.window, 1)
    start = step.context - step.width
    in_ring = torch.where(wanted < 0, 0, 1 + sequences[:, None] * g.window + wanted % g.window)
    in_chunk = -1 - (sequences[:, None] * step.width + wanted - start)
    return torch.where(wanted >= start, in_chunk, in_ring)


def _entries(g: Geometry, kind: str, step: Step, device: torch.device) -> tuple[Tensor, Visible, Tensor | None]:
    """Entries of all sequences in scattered slots, what each token sees, and for CSA which of it each chose."""
    ratio = RATIOS.get(kind, step.context)
    per_sequence = -(-step.context // ratio // 64) * 64
    total = step.num_sequences * per_sequence
    keys = random_values(device, total + 1, g.width, seed=5)
    order = 1 + torch.randperm(total, generator=torch.Generator().manual_seed(6))
    counts = (step.positions() + 1) // ratio
    visible = Visible(
        order.view(step.num_sequences, -1).to(device), step.sequences().to(device), counts.to(device), int(counts.max())
    )
    if kind != CSA:
        return keys, visible, None
    # Tokens of one sequence mostly choose alike: those that are verified together share a choice.
    draws = torch.rand((step.num_sequences, per_sequence), generator=torch.Generator().manual_seed(7)).to(device)
    chosen = torch.zeros((step.num_tokens, g.top_k), dtype=torch.int64, device=device)
    entry = torch.arange(per_sequence, device=device)
    for start in range(0, step.num_tokens, 1024):
        few = slice(start, min(start + 1024, step.num_tokens))
        scores = draws[visible.rows[few]].masked_fill(entry >= visible.counts[few, None], -1)
        width = min(g.top_k, per_sequence)
        best = scores.topk(width, dim=1).indices
        # Hidden ones, which a token of few entries chose too, go behind the others.
        best = torch.where(best < visible.counts[few, None], best, per_sequence).sort(1).values
        slots = visible.slots[visible.rows[few]].gather(1, best.clamp(max=per_sequence - 1))
        chosen[few, :width] = slots.masked_fill(best == per_sequence, 0)
    return keys, visible, chosen


def _used_entries(kind: str, visible: Visible, chosen: Tensor | None) -> int:
    """How many different entries the step reads."""
    if kind == SWA:
        return 0
    return visible.slots.numel() if chosen is None else _distinct(chosen)


def _distinct(numbers: Tensor) -> int:
    """How many different ones there are."""
    lowest = int(numbers.min())
    seen = torch.zeros(int(numbers.max()) - lowest + 1, dtype=torch.bool, device=numbers.device)
    seen[(numbers - lowest).view(-1)] = True
    return int(seen.sum())


def _heads(g: Geometry, step: Step, device: torch.device) -> Case:
    n = step.num_tokens
    query = random_values(device, n, g.heads * g.width, seed=1)
    wide = random_values(device, n, g.width + 128, seed=2)
    norms, rotation = (
        1 + 0.2 * random_floats(device, g.heads + 1, g.width, seed=3),
        random_rotation(device, n, g.rotary),
    )

    def run(part: slice) -> Tensor:
        rows = query[part]
        queries, keys = rows.new_empty((rows.shape[0], g.heads, g.width)), rows.new_empty((rows.shape[0], g.width))
        norm_and_rotate(rows, wide[part, 128:], norms, rotation.rows(part), 1e-6, queries, keys)
        return torch.cat((queries, keys[:, None]), 1)

    def reference(part: slice) -> Tensor:
        turn = Rotation(rotation.cos[part], rotation.sin[part])
        queries, keys = TorchAttention().heads(query[part].float(), wide[part, 128:].float(), norms, turn, 1e-6)
        return torch.cat((queries, keys[:, None]), 1)

    made, made_keys = torch.empty_like(query).view(n, g.heads, g.width), query.new_empty((n, g.width))

    return Case(
        name="attention.heads",
        shape=step.words,
        num_rows=n,
        run=run,
        reference=reference,
        tolerance=1e-2,
        floor_bytes=4 * n * (g.heads + 1) * g.width,
        timed=lambda: norm_and_rotate(query, wide[:, 128:], norms, rotation, 1e-6, made, made_keys),
    )
