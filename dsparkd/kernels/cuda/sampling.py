"""What sampling makes of logits: Triton form, for cuda.

Letters: R rows, V vocabulary.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsparkd.kernels.cuda.launch import EARLY, follow

BLOCK = 4096  # logits that a program adds side by side: it fixes the order of the sum


def log_totals(logits: Tensor) -> Tensor:
    """See kernels/sampling.py."""
    R, V = logits.shape
    totals = torch.empty(R, dtype=torch.float32, device=logits.device)
    assert logits.is_contiguous()
    if R:
        _log_totals[(R,)](logits, totals, V=V, BLOCK=BLOCK, num_warps=8, launch_pdl=EARLY)
    return totals


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
