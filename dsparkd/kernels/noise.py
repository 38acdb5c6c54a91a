"""Gumbel noise that is a pure function of (seed, choice, position, vocabulary id): what makes sampling repeatable.

The generator is Philox4x32-10 (Salmon et al., 2011). Layout, the only copy of it:

    key      k0 = seed[31:0]     k1 = seed[62:32]
    counter  c0 = id // 4        c1 = position        c2 = choice        c3 = stream
    output   word id % 4 of the block is r, 32 bits

From r: v = (float32(r) + 0.5) * 2^-32, at most 1 - 2^-24, and G = -log(-log1p(-v)), all in float32. G is large where v
is near 0, and there float32(r) + 0.5 is exact, so the tail that decides a draw has full precision. Near 1 the sum would
round to 1 and G to minus infinity; the bound keeps G finite there, where no draw is ever won.

Streams are independent of each other: SAMPLING draws tokens, and coupled drafts; the others serve rejection acceptance,
which must not test a draft with what drew it. Draft i of a block is drawn in stream DRAFTS + i there: a position that
is drafted again, behind a later anchor, gets another draw.

Letters: B rows, V vocabulary, Q = ceil(V / 4) blocks a row.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

MASK32 = 0xFFFFFFFF
MULTIPLIER_0, MULTIPLIER_1 = 0xD2511F53, 0xCD9E8D57
WEYL_0, WEYL_1 = 0x9E3779B9, 0xBB67AE85
NUM_ROUNDS = 10
LARGEST_BELOW_ONE = 1.0 - 2.0**-24
SAMPLING, ACCEPTANCE, REPLACEMENT, DRAFTS = range(4)


def philox(counter: Sequence[Tensor], key: Sequence[Tensor]) -> Tensor:
    """Return the Philox4x32-10 blocks of counters under keys.

    counter: four, key: two int64 tensors of 32-bit words whose shapes broadcast. Returns [..., 4] int64.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(NUM_ROUNDS):
        # int64 wraps, but both halves of the 64-bit product come out right. Their spare high bits are masked off only
        # before the next product: half as many operations, and these are what a draw on the cpu costs.
        p0, p1 = c0 * MULTIPLIER_0, c2 * MULTIPLIER_1
        c0 = ((p1 >> 32) ^ c1 ^ k0) & MASK32
        c2 = ((p0 >> 32) ^ c3 ^ k1) & MASK32
        c1, c3 = p1, p0
        k0, k1 = (k0 + WEYL_0) & MASK32, (k1 + WEYL_1) & MASK32
    # After two rounds every word depends on every part, so all have the full shape.
    return torch.stack((c0, c1 & MASK32, c2, c3 & MASK32), dim=-1)


def random_words(seeds: Tensor, choices: Tensor, positions: Tensor, vocab_size: int, stream: int = SAMPLING) -> Tensor:
    """Return r of every vocabulary id for each row: [B, V] int64 in 0..2^32-1.

    seeds [B] int64 in 0..2^63-1; choices, positions [B] int64 in 0..2^32-1. The device is that of seeds.
    """
    num_blocks = -(-vocab_size // 4)
    blocks = torch.arange(num_blocks, device=seeds.device)
    counter = (blocks, positions[:, None], choices[:, None], torch.full_like(positions, stream)[:, None])
    words = philox(counter, ((seeds & MASK32)[:, None], (seeds >> 32)[:, None]))  # [B, Q, 4]
    return words.view(seeds.shape[0], 4 * num_blocks)[:, :vocab_size]


def gumbel_of_words(words: Tensor) -> Tensor:
    """Turn 32-bit words (int64) into Gumbel noise, float32, same shape; finite for every word."""
    uniform = words.to(torch.float32).add_(0.5).mul_(2.0**-32).clamp_(max=LARGEST_BELOW_ONE)
    return uniform.neg_().log1p_().neg_().log_().neg_()


def gumbel(seeds: Tensor, choices: Tensor, positions: Tensor, vocab_size: int, stream: int = SAMPLING) -> Tensor:
    """Return the Gumbel noise of each row: [B, V] float32. Arguments as for random_words."""
    if seeds.is_cuda:
        from dsparkd.kernels.cuda import noise as triton_noise  # a cpu start imports no triton

        return triton_noise.gumbel(seeds, choices, positions, vocab_size, stream)
    return gumbel_of_words(random_words(seeds, choices, positions, vocab_size, stream))
