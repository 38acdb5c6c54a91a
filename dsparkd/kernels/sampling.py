"""Filters over score rows and a stable top-k: pure tensor functions, each row's bits its own.

Ties go to the lower id everywhere (score descending, id ascending). Letters: B rows, V vocabulary, K kept.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

NEGATIVE_INFINITY = float("-inf")


def stable_topk(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the k best of each row, ties to the lower id: values [B, K] float32 and ids [B, K] int64.

    scores [B, V] float32, V < 2^31, no NaN. torch.topk promises no order among ties, so score and id become one key.
    """
    bits = (scores + 0.0).view(torch.int32)  # -0.0 + 0.0 is 0.0: equal scores get equal bits
    ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(torch.int64)  # integers in the order of the floats
    descending_ids = torch.arange(scores.shape[1] - 1, -1, -1, device=scores.device)
    ids = (ordered * 2**32 + descending_ids).topk(k).indices
    return scores.gather(1, ids), ids


def keep_top_k(scores: Tensor, k: Tensor, most: int) -> Tensor:
    """Mask all but the k[i] best of row i with minus infinity. scores [B, V] float32; k [B] int64 in 1..most <= V."""
    num_kept = k[:, None]
    best = scores.topk(most).values
    return _keep_best(scores, best.gather(1, num_kept - 1), num_kept)


def keep_top_p(scores: Tensor, top_p: Tensor) -> Tensor:
    """Mask all but the smallest best-first prefix of each row whose probability mass reaches top_p.

    scores [B, V] float32 with a row maximum of 0, top_p [B] float64 in (0, 1]. At least one id stays.
    """
    best = _sorted_scores(scores)
    mass = best.double().exp_().cumsum(dim=-1)  # [B, V], not normalized
    wanted = mass[:, -1:] * top_p[:, None]
    # top_p just below 1 may want more than the sum before its last term by less than a rounding: then all of it stays.
    num_kept = (mass < wanted).sum(dim=-1, keepdim=True).add_(1).clamp_(max=scores.shape[1])
    return _keep_best(scores, best.gather(1, num_kept - 1), num_kept)


def keep_min_p(scores: Tensor, min_p: Tensor) -> Tensor:
    """Mask ids less likely than min_p times the likeliest. scores [B, V] with row maximum 0; min_p [B] in [0, 1]."""
    return scores.masked_fill(scores < min_p.log().to(scores.dtype)[:, None], NEGATIVE_INFINITY)


def _sorted_scores(scores: Tensor) -> Tensor:
    """Each row of scores [B, V], greatest first; the order among equal values is nobody's business here."""
    if scores.device.type == "cpu":
        # numpy's vectorized sort takes a seventh of torch's time (6,016 float32 a row: 70 us against 480).
        return torch.from_numpy(np.sort(-scores.numpy(), axis=-1)).neg_()
    return scores.sort(dim=-1, descending=True).values


def _keep_best(scores: Tensor, threshold: Tensor, num_kept: Tensor) -> Tensor:
    """Keep what is above the threshold and, of its equals, the lowest ids up to num_kept in all; both [B, 1]."""
    above, equal = scores > threshold, scores == threshold
    room = num_kept - above.sum(dim=-1, keepdim=True)
    keep = above | (equal & (equal.cumsum(dim=-1, dtype=torch.int32) <= room))
    return scores.masked_fill(~keep, NEGATIVE_INFINITY)


def log_totals(logits: Tensor) -> Tensor:
    """Logarithm of the sum of each row's powers: logits [R, V] float32, contiguous -> [R], the same beside other rows.

    torch's sum over a row on cuda is cut by the number of rows.
    """
    if logits.is_cuda:
        from dsparkd.kernels.cuda import sampling as triton_sampling  # a cpu start imports no triton

        return triton_sampling.log_totals(logits)
    return logits.logsumexp(dim=-1)


def best(scores: Tensor, added: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Each row's greatest score [R] float32 and its id [R] int64, the lowest among equals.

    scores [R, V] float32, rows may lie apart; added [R, V] float32, contiguous, is first added in place. A row with NaN
    has no finite best: on cuda it counts as infinity.
    """
    if scores.is_cuda:
        from dsparkd.kernels.cuda import sampling as triton_sampling  # a cpu start imports no triton

        return triton_sampling.best(scores, added)
    if added is not None:
        scores += added
    found = scores.max(dim=-1)
    return found.values, found.indices
