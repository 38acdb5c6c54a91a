"""How sure the drafter is of each draft: a linear of a block's hidden states and of what each draft follows, and the
chances that come of it.

Letters: B blocks, G drafts of a block, D width, M Markov rank.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from dsparkd.kernels import linear
from dsparkd.kernels.tiles import ROW_TILE, count_tiles
from dsparkd.kernels.weight import dense


class ConfidenceKernel(Protocol):
    """What `bind` returns."""

    def __call__(self, hidden: Tensor, markov: Tensor) -> Tensor:
        """hidden [B, G, D], contiguous, markov [G, B, M] float32, contiguous -> logits [B, G] float32."""


def bind(weight: Tensor) -> ConfidenceKernel:
    """Pick the form for a weight [1, D + M] float32, once."""
    if weight.is_cuda:
        from dsparkd.kernels.cuda.confidence import TritonConfidence  # a cpu start imports no triton

        return TritonConfidence(weight)
    return TorchConfidence(weight)


class TorchConfidence:
    """The reference, and the form for the cpu: one product of all rows, in whole row tiles."""

    def __init__(self, weight: Tensor) -> None:
        self._product = linear.bind(dense(weight))

    def __call__(self, hidden: Tensor, markov: Tensor) -> Tensor:
        """See ConfidenceKernel."""
        (B, G, D), M = hidden.shape, markov.shape[2]
        rows = markov.new_zeros((count_tiles(B * G, ROW_TILE) * ROW_TILE, D + M))
        rows[: B * G, :D] = hidden.view(B * G, D)
        rows[: B * G, D:] = markov.transpose(0, 1).reshape(B * G, M)
        return self._product(rows)[: B * G, 0].view(B, G)


def survival(logits: Tensor, temperatures: Tensor) -> Tensor:
    """Confidence logits [B, G] by temperatures [G] -> products of the chances so far, [B, G] float32."""
    if logits.is_cuda:
        from dsparkd.kernels.cuda import confidence as triton_confidence  # a cpu start imports no triton

        return triton_confidence.survival(logits, temperatures)
    chances = (logits / temperatures).neg_().exp_().add_(1).reciprocal_()  # as torch's sigmoid does not: row by row
    for i in range(1, chances.shape[1]):  # cumprod may multiply in an order that depends on the number of blocks
        chances[:, i] *= chances[:, i - 1]
    return chances
