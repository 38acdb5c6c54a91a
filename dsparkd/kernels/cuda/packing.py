"""Rows as they travel between the ranks, taken apart: Triton form, for cuda. One launch where torch copies three times.

Letters: R rows, C words of a packed row, k experts a row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsparkd.kernels.cuda.launch import EARLY, follow
from dsparkd.kernels.tiles import count_tiles, power_of_two

BLOCK = 1024  # words of one program


def take_apart(rows: Tensor, top_k: int) -> tuple[Tensor, Tensor, Tensor]:
    """rows [R, C] float32, contiguous -> words [R, C - 2 k] and shares [R, k] float32, expert_ids [R, k] int32."""
    R, width = rows.shape
    words = width - 2 * top_k
    assert rows.is_contiguous()
    x, shares = rows.new_empty((R, words)), rows.new_empty((R, top_k))
    expert_ids = torch.empty((R, top_k), dtype=torch.int32, device=rows.device)
    if R:
        _take_apart[(R, count_tiles(words, BLOCK))](
            rows,
            x,
            shares,
            expert_ids,
            WORDS=words,
            TOP_K=top_k,
            BLOCK=BLOCK,
            BLOCK_K=power_of_two(top_k),
            num_warps=4,
            launch_pdl=EARLY,
        )
    return x, shares, expert_ids


@triton.jit  # type: ignore[untyped-decorator]
def _take_apart(  # type: ignore[no-untyped-def]
    rows,
    x,
    shares,
    expert_ids,
    WORDS: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Bits are copied; a float32 load and store leave those of an integer as they are."""
    follow()
    row = tl.program_id(0).to(tl.int64)
    own = rows + row * (WORDS + 2 * TOP_K)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + row * WORDS + c, tl.load(own + c, mask=c < WORDS), mask=c < WORDS)
    if tl.program_id(1) == 0:
        k = tl.arange(0, BLOCK_K)
        tl.store(shares + row * TOP_K + k, tl.load(own + WORDS + k, mask=k < TOP_K), mask=k < TOP_K)
        ids = tl.load(own + WORDS + TOP_K + k, mask=k < TOP_K).to(tl.int32, bitcast=True)
        tl.store(expert_ids + row * TOP_K + k, ids, mask=k < TOP_K)
