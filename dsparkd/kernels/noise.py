"""Gumbel noise that is a pure function of (seed, choice, position, vocabulary id): what makes sampling repeatable.

The generator is Philox4x32-10 (Salmon et al., 2011). Layout, the only copy of it:

    key      k0 = seed[31:0]     k1 = seed[62:32]
    counter  c0 = id // 4        c1 = position        c2 = choice        c3 = 0 (one stream; others are free)
    output   word id % 4 of the block is r, 32 bits

From r: v = (float32(r) + 0.5) * 2^-32, at most 1 - 2^-24, and G = -log(-log1p(-v)), all in float32. G is large where v
is near 0, and there float32(r) + 0.5 is exact, so the tail that decides a draw has full precision. Near 1 the sum would
round to 1 and G to minus infinity; the bound keeps G finite there, where no draw is ever won.

Letters: B rows, V vocabulary, Q = ceil(V / 4) blocks a row.
"""

from __future__ import annotations

import torch
from torch import Tensor

MASK32 = 0xFFFFFFFF
MULTIPLIER_0, MULTIPLIER_1 = 0xD2511F53, 0xCD9E8D57
WEYL_0, WEYL_1 = 0x9E3779B9, 0xBB67AE85
NUM_ROUNDS = 10
LARGEST_BELOW_ONE = 1.0 - 2.0**-24


def philox(counter: Tensor, key: Tensor) -> Tensor:
    """Return the Philox4x32-10 blocks of counters under keys.

    counter [4, ...] and key [2, ...] hold 32-bit words in int64; their trailing shapes broadcast. Returns [4, ...].
    """
    # Even words are multiplied, odd words are mixed in; a product's halves change places with the other lane's.
    multipliers = torch.tensor([MULTIPLIER_1, MULTIPLIER_0], device=counter.device)
    weyl = torch.tensor([WEYL_0, WEYL_1], device=counter.device)
    lanes = (2,) + (1,) * (counter.dim() - 1)
    multipliers, weyl = multipliers.view(lanes), weyl.view(lanes)
    even, odd = counter[0::2], counter[1::2]
    for _ in range(NUM_ROUNDS):
        # int64 wraps, but both halves of the 64-bit product come out right: the shift's sign bits are masked off.
        product = even.flip(0) * multipliers
        even = (product >> 32).bitwise_and_(MASK32).bitwise_xor_(odd).bitwise_xor_(key)
        odd = product.bitwise_and_(MASK32)
        key = (key + weyl) & MASK32
    return torch.stack((even[0], odd[0], even[1], odd[1]))


def random_words(seeds: Tensor, choices: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    """Return r of every vocabulary id for each row: [B, V] int64 in 0..2^32-1.

    seeds [B] int64 in 0..2^63-1; choices, positions [B] int64 in 0..2^32-1. The device is that of seeds.
    """
    num_blocks = -(-vocab_size // 4)
    rows = seeds.shape[0]
    blocks = torch.arange(num_blocks, device=seeds.device).expand(rows, num_blocks)
    ones = torch.ones_like(blocks)
    counter = torch.stack((blocks, positions[:, None] * ones, choices[:, None] * ones, 0 * ones))  # [4, B, Q]
    key = torch.stack((seeds & MASK32, seeds >> 32))[:, :, None]  # [2, B, 1]
    words = philox(counter, key)  # [4, B, Q]
    return words.permute(1, 2, 0).reshape(rows, 4 * num_blocks)[:, :vocab_size]


def gumbel_of_words(words: Tensor) -> Tensor:
    """Turn 32-bit words (int64) into Gumbel noise, float32, same shape; finite for every word."""
    uniform = words.to(torch.float32).add_(0.5).mul_(2.0**-32).clamp_(max=LARGEST_BELOW_ONE)
    return uniform.neg_().log1p_().neg_().log_().neg_()


def gumbel(seeds: Tensor, choices: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    """Return the Gumbel noise of each row: [B, V] float32. Arguments as for random_words."""
    return gumbel_of_words(random_words(seeds, choices, positions, vocab_size))
