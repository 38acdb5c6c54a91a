"""How sure the drafter is of each draft: Triton form, for cuda. One program a draft, and one a block for its chances.

A sum's order follows from the widths alone, so a draft's bits are its own.

Letters: B blocks, G drafts of a block, D width, M Markov rank.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsparkd.kernels.cuda.launch import EARLY, constant, follow
from dsparkd.kernels.tiles import power_of_two


class TritonConfidence:
    """Form for cuda. Implements ConfidenceKernel."""

    def __init__(self, weight: Tensor) -> None:
        self._weight = weight.contiguous()

    def __call__(self, hidden: Tensor, markov: Tensor) -> Tensor:
        """See ConfidenceKernel."""
        (B, G, D), M = hidden.shape, markov.shape[2]
        assert hidden.is_contiguous()
        assert markov.is_contiguous()
        assert self._weight.numel() == D + M
        out = torch.empty((B, G), dtype=torch.float32, device=hidden.device)
        if B:
            _confidence[(B, G)](
                hidden,
                markov,
                self._weight,
                out,
                B,
                D=D,
                M=M,
                BLOCK_D=power_of_two(D),
                BLOCK_M=power_of_two(M),
                num_warps=8,
                launch_pdl=EARLY,
            )
        return out


def survival(logits: Tensor, temperatures: Tensor) -> Tensor:
    """See kernels/confidence.py."""
    B, G = logits.shape
    assert logits.is_contiguous()
    chances = torch.empty_like(logits)
    if B:
        _survival[(B,)](logits, temperatures, chances, G=G, num_warps=1, launch_pdl=EARLY)
    return chances


@triton.jit(do_not_specialize=["B"])  # type: ignore[untyped-decorator]
def _confidence(  # type: ignore[no-untyped-def]
    hidden,  # [B, G, D]
    markov,  # [G, B, M]
    weight,  # [D + M]
    out,  # [B, G]
    B,
    D: tl.constexpr,
    M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    c, m = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_M)
    first, second = constant(weight + c, c < D), constant(weight + D + m, m < M)
    follow()
    b, g = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = b * tl.num_programs(1) + g
    state = tl.load(hidden + row * D + c, mask=c < D, other=0.0).to(tl.float32)
    before = tl.load(markov + (g * B + b) * M + m, mask=m < M, other=0.0)
    total = tl.sum(state * first, 0) + tl.sum(before * second, 0)
    tl.store(out + row, total)


@triton.jit  # type: ignore[untyped-decorator]
def _survival(logits, temperatures, chances, G: tl.constexpr):  # type: ignore[no-untyped-def]
    follow()
    b = tl.program_id(0).to(tl.int64)
    product = tl.full([], 1.0, tl.float32)
    for g in tl.static_range(G):
        logit = tl.load(logits + b * G + g) / tl.load(temperatures + g)
        product *= 1.0 / (1.0 + tl.exp(-logit))
        tl.store(chances + b * G + g, product)
