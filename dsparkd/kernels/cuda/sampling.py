"""What sampling makes of logits: Triton form, for cuda.

Letters: R rows, V vocabulary, P parts of a row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsparkd.kernels.cuda.launch import EARLY, follow
from dsparkd.kernels.tiles import count_tiles, power_of_two

BLOCK = 4096  # logits that a program adds side by side: it fixes the order of the sum
PART = 2048  # scores that one program looks for the best among


def log_totals(logits: Tensor) -> Tensor:
    """See kernels/sampling.py."""
    R, V = logits.shape
    totals = torch.empty(R, dtype=torch.float32, device=logits.device)
    assert logits.is_contiguous()
    if R:
        _log_totals[(R,)](logits, totals, V=V, BLOCK=BLOCK, num_warps=8, launch_pdl=EARLY)
    return totals


def best(scores: Tensor, added: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """See kernels/sampling.py. One program a row would take longer to read a vocabulary than all other programs."""
    R, V = scores.shape
    assert scores.stride(1) == 1
    assert added is None or added.is_contiguous()
    P = count_tiles(V, PART)
    tops = torch.empty((R, P), dtype=torch.float32, device=scores.device)
    places = torch.empty((R, P), dtype=torch.int32, device=scores.device)
    values = torch.empty(R, dtype=torch.float32, device=scores.device)
    ids = torch.empty(R, dtype=torch.int64, device=scores.device)
    if R:
        _best_of_parts[(R, P)](
            scores,
            scores.stride(0),
            scores if added is None else added,
            tops,
            places,
            V=V,
            ADD=added is not None,
            BLOCK=PART,
            num_warps=4,
            launch_pdl=EARLY,
        )
        _best_of_all[(R,)](tops, places, values, ids, P=P, BLOCK=power_of_two(P), num_warps=1, launch_pdl=EARLY)
    return values, ids


@triton.jit  # type: ignore[untyped-decorator]
def _best_of_parts(scores, stride, added, tops, places, V: tl.constexpr, ADD: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Best score of one part and its place, the lowest of equals. ADD: scores + added, which takes their place."""
    follow()
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    c = part * BLOCK + tl.arange(0, BLOCK)
    own = scores + row * stride + c
    x = tl.load(own, mask=c < V, other=float("-inf"))
    if ADD:
        x += tl.load(added + row * V + c, mask=c < V, other=0.0)
        tl.store(own, x, mask=c < V)
    x = tl.where(x != x, float("inf"), x)
    top = tl.max(x, 0)
    place = row * tl.num_programs(1) + part
    tl.store(tops + place, top)
    tl.store(places + place, tl.min(tl.where((x == top) & (c < V), c, V), 0))


@triton.jit  # type: ignore[untyped-decorator]
def _best_of_all(tops, places, values, ids, P: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    follow()
    row = tl.program_id(0).to(tl.int64)
    p = tl.arange(0, BLOCK)
    x = tl.load(tops + row * P + p, mask=p < P, other=float("-inf"))
    place = tl.load(places + row * P + p, mask=p < P, other=0x7FFFFFFF)
    top = tl.max(x, 0)
    tl.store(values + row, top)
    tl.store(ids + row, tl.min(tl.where(x == top, place, 0x7FFFFFFF), 0).to(tl.int64))


@triton.jit  # type: ignore[untyped-decorator]
def _log_totals(logits, totals, V: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """One program a row: its maximum, then the sum of powers below it."""
    follow()
    row = logits + tl.program_id(0).to(tl.int64) * V
    top = tl.full([BLOCK], float("-inf"), tl.float32)
    for start in range(0, V, BLOCK):
        c = start + tl.arange(0, BLOCK)
        top = tl.maximum(top, tl.load(row + c, mask=c < V, other=float("-inf")))
    peak = tl.max(top, 0)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, V, BLOCK):
        c = start + tl.arange(0, BLOCK)
        total += tl.exp(tl.load(row + c, mask=c < V, other=float("-inf")) - peak)
    tl.store(totals + tl.program_id(0), peak + tl.log(tl.sum(total, 0)))
