"""Manifold-constrained hyper-connections: Sinkhorn mixing weights, collapse of streams, expansion back. Torch form.

Letters: T tokens, S streams, D width. All arithmetic is float32.
"""

from __future__ import annotations

import torch
from torch import Tensor


def mixing_weights(
    raw: Tensor, scale: Tensor, base: Tensor, streams: int, iterations: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Turn the normed products raw [T, (2 + S) * S] into pre [T, S], post [T, S] and comb [T, S, S].

    scale and base [(2 + S) * S]. comb's first index is the source stream; its rows, then its columns, are normalised
    `iterations` times, columns last.
    """
    S = streams
    weights = raw.mul(scale).add_(base)
    gates = weights[:, : 2 * S].neg().exp_().add_(1).reciprocal_()  # sigmoid, spelled so that bits fit any batch
    pre = gates[:, :S] + eps
    post = gates[:, S:] * 2
    comb = torch.softmax(weights[:, 2 * S :].reshape(-1, S, S), dim=-1).add_(eps)
    comb.div_(column_sums(comb).add_(eps))
    for _ in range(iterations - 1):
        comb.div_(row_sums(comb).add_(eps))
        comb.div_(column_sums(comb).add_(eps))
    return pre, post, comb


def column_sums(comb: Tensor) -> Tensor:
    """Sum over the source index of comb [T, S, S], [T, 1, S]; ascending adds give the same bits in any batch."""
    total = comb[:, 0:1].clone()
    for j in range(1, comb.shape[1]):
        total.add_(comb[:, j : j + 1])
    return total


def row_sums(comb: Tensor) -> Tensor:
    """Sum over the target index, [T, S, 1], in ascending order."""
    total = comb[:, :, 0:1].clone()
    for k in range(1, comb.shape[2]):
        total.add_(comb[:, :, k : k + 1])
    return total


def collapse(streams: Tensor, pre: Tensor) -> Tensor:
    """Weighted sum over the streams [T, S, D] by pre [T, S], float32 [T, D], in ascending order."""
    total = streams[:, 0] * pre[:, 0:1]
    for s in range(1, streams.shape[1]):
        total.add_(streams[:, s] * pre[:, s : s + 1])
    return total


def expand(output: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """post_k * output + sum_j comb[j, k] * streams[j]: [T, S, D] float32 from output [T, D], streams [T, S, D]."""
    return torch.baddbmm(post[:, :, None] * output[:, None, :], comb.transpose(1, 2), streams)
