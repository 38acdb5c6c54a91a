"""Gumbel noise of whole rows: Triton form, for cuda. One launch where torch's integers take a hundred.

Letters: B rows, V vocabulary, Q blocks of four words.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsparkd.kernels.cuda.launch import EARLY, follow
from dsparkd.kernels.tiles import count_tiles

BLOCKS = 256  # blocks of four words that one program makes


def gumbel(seeds: Tensor, choices: Tensor, positions: Tensor, vocab_size: int, stream: int) -> Tensor:
    """See kernels/noise.py. Rows of keys may lie apart, as columns of one tensor do."""
    rows = seeds.shape[0]
    out = torch.empty((rows, vocab_size), dtype=torch.float32, device=seeds.device)
    if rows:
        grid = (rows, count_tiles(vocab_size, 4 * BLOCKS))
        _gumbel[grid](
            seeds,
            seeds.stride(0),
            choices,
            choices.stride(0),
            positions,
            positions.stride(0),
            out,
            stream,
            V=vocab_size,
            BLOCKS=BLOCKS,
            num_warps=4,
            launch_pdl=EARLY,
        )
    return out


@triton.jit(do_not_specialize=["stream", "seed_stride", "choice_stride", "position_stride"])  # type: ignore[untyped-decorator]
def _gumbel(  # type: ignore[no-untyped-def]
    seeds,
    seed_stride,
    choices,
    choice_stride,
    positions,
    position_stride,
    out,
    stream,
    V: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Counter (block, position, choice, stream) under the row's seed, as noise.random_words has it."""
    follow()
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    zero = block * 0
    position = (zero + tl.load(positions + row * position_stride)).to(tl.uint32)
    choice = (zero + tl.load(choices + row * choice_stride)).to(tl.uint32)
    seed = tl.load(seeds + row * seed_stride)
    a, b, c, d = tl.philox(seed, block.to(tl.uint32), position, choice, (zero + stream).to(tl.uint32))
    words = tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), [4 * BLOCKS])  # a, b, c, d of each block in turn
    # Words lie in float32's 24 bits only up to rounding: past the largest number below one the logarithm ends.
    uniform = tl.minimum((words.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.999999940395355224609375)
    # ln(1 - u) without losing a small u's digits: what the difference rounds away is made up for by the ratio.
    whole = 1.0 - uniform
    rounded = tl.where(whole == 1.0, -1.0, whole - 1.0)
    survived = tl.where(whole == 1.0, uniform, tl.log(whole) * (uniform / rounded))
    column = tl.program_id(1) * 4 * BLOCKS + tl.arange(0, 4 * BLOCKS)
    tl.store(out + row * V + column, -tl.log(survived), mask=column < V)
