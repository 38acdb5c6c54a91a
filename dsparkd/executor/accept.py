"""Acceptance: how many drafts of each block stand, and the token behind them (model.md 5.9).

Both rules are pure functions of one row's inputs and its noise key: no operation reduces over rows, so neighbours
cannot move a bit. No host sync.

- Coupled: the target's rows have chosen their tokens as plain decoding does, with the noise of their positions; a draft
  stands while it is that token. What is emitted is what plain decoding emits, wherever the block was cut.
- Rejection: what is emitted has plain decoding's distribution, but not its tokens.

Letters: N blocks, K drafts of a block, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dsparkd.kernels import noise

NO_TOKEN = -1


@dataclass(frozen=True, slots=True)
class Block:
    """Drafts and how far each block may be read.

    draft_ids [N, K] int64; draft j + 1 is judged by row j of the target, row 0 being the anchor's. verify_lens [N]
    int64 in 0..K: drafts that the target has seen. usable_rows [N] int64 in 0..K+1: target rows whose mask is known;
    a block with none fails elsewhere, and what comes out for it means nothing.
    """

    draft_ids: Tensor
    verify_lens: Tensor
    usable_rows: Tensor

    @property
    def limits(self) -> Tensor:
        """Most drafts that can stand in front of the last token, [N] int64: one row is needed behind each of them."""
        return torch.minimum(self.verify_lens, self.usable_rows - 1).clamp_(min=0)


@dataclass(frozen=True, slots=True)
class NoiseKeys:
    """seeds, choices, positions [N] int64 of kernels/noise.py; positions are those of the anchors."""

    seeds: Tensor
    choices: Tensor
    positions: Tensor


@dataclass(frozen=True, slots=True)
class Accepted:
    """lens [N] int64: drafts that stand. ids [N, K+1] int64: these, then the last token; behind it NO_TOKEN."""

    lens: Tensor
    ids: Tensor


def accept_coupled(block: Block, target_ids: Tensor) -> Accepted:
    """Keep drafts while they are what the target chose. target_ids [N, K+1] int64, row j's choice in column j."""
    # Past verify_lens both hold padding: an equal pair there is chance, not agreement; `limits` stops before it.
    agree = block.draft_ids == target_ids[:, :-1]
    lens = _leading(agree, block.limits)
    return Accepted(lens, target_ids.masked_fill(_columns(target_ids) > lens[:, None], NO_TOKEN))


def accept_rejection(block: Block, draft_probs: Tensor, target_probs: Tensor, keys: NoiseKeys) -> Accepted:
    """Accept draft d of row j with chance min(1, p_j(d) / q_j(d)), else replace it from max(p_j - q_j, 0).

    draft_probs [N, K, V] float32: the distributions that the drafts were drawn from, one-hot for drafts that were not
    drawn. target_probs [N, K+1, V] float32: what plain decoding would draw from, all rules applied; one-hot for a
    greedy request. What verify_lens are may depend on nothing that was known only after a draft behind them was drawn.
    """
    ids, count = block.draft_ids, block.draft_ids.shape[1]
    p = target_probs[:, :count].gather(2, ids[:, :, None]).squeeze(2)  # [N, K]
    q = draft_probs.gather(2, ids[:, :, None]).squeeze(2)
    passes = _uniforms(keys, count) * q < p  # in float64: a draft with p = q > 0 always passes
    lens = _leading(passes, block.limits)
    # The draft on the last readable row is judged like any other, though nothing can follow it: rows behind an id that
    # ends the grammar are not readable, and to draw anew in its place would count that id twice. Only a draft that the
    # target never saw is no part of this.
    is_judged = lens < block.verify_lens
    at = lens[:, None]
    stands = is_judged & _padded(passes).gather(1, at).squeeze(1)
    drawn = _draw(_weights(ids, draft_probs, target_probs, lens, is_judged), keys, lens)
    last = torch.where(stands, _padded(ids).gather(1, at).squeeze(1), drawn)
    ids = _padded(ids).scatter(1, at, last[:, None])
    return Accepted(lens, ids.masked_fill(_columns(ids) > at, NO_TOKEN))


def one_hot(ids: Tensor, vocab_size: int) -> Tensor:
    """Return the distribution that holds nothing but ids [...]: [..., V] float32."""
    probs = torch.zeros((*ids.shape, vocab_size), dtype=torch.float32, device=ids.device)
    return probs.scatter_(-1, ids[..., None], 1.0)


def probabilities(scores: Tensor) -> Tensor:
    """Turn scores [..., V] float32, filtered and divided by temperature, into probabilities."""
    return scores.softmax(dim=-1)


def _leading(good: Tensor, limits: Tensor) -> Tensor:
    """Count the leading True of good [N, K], at most limits [N]."""
    live = _columns(good) < limits[:, None]
    return (good & live).long().cumprod(dim=1).sum(dim=1)


def _columns(values: Tensor) -> Tensor:
    return torch.arange(values.shape[1], device=values.device)


def _padded(values: Tensor) -> Tensor:
    """Add a column of zeros: the row behind the last draft has none."""
    return torch.nn.functional.pad(values, (0, 1))


def _uniforms(keys: NoiseKeys, count: int) -> Tensor:
    """Uniform numbers in [0, 1) for the `count` positions behind each anchor: [N, count] float64."""
    positions = keys.positions[:, None] + torch.arange(1, count + 1, device=keys.positions.device)
    seeds, choices = (key[:, None].expand(positions.shape).reshape(-1) for key in (keys.seeds, keys.choices))
    words = noise.random_words(seeds, choices, positions.reshape(-1), 1, noise.ACCEPTANCE)
    return words.view(positions.shape).double() * 2.0**-32


def _weights(draft_ids: Tensor, draft_probs: Tensor, target_probs: Tensor, lens: Tensor, is_judged: Tensor) -> Tensor:
    """What the token behind the drafts that stand is drawn from, not normalized: [N, V] float32."""
    rows = torch.arange(lens.shape[0], device=lens.device)
    p = target_probs[rows, lens]
    if not draft_probs.shape[1]:
        return p
    q = draft_probs[rows, lens.clamp(max=draft_probs.shape[1] - 1)]
    rest = (p - q).clamp_(min=0)
    # Rounding may leave nothing where the two are all but equal; what was refused must not come back all the same, or
    # it would read as accepted.
    draft = draft_ids.gather(1, lens.clamp(max=draft_probs.shape[1] - 1)[:, None])
    rest = torch.where((rest.amax(dim=-1) > 0)[:, None], rest, p.scatter(1, draft, 0.0))
    return torch.where(is_judged[:, None], rest, p)


def _draw(weights: Tensor, keys: NoiseKeys, lens: Tensor) -> Tensor:
    """Draw one id a row [N] int64, with the noise of the position behind the drafts that stand."""
    positions = keys.positions + lens + 1
    gumbel = noise.gumbel(keys.seeds, keys.choices, positions, weights.shape[1], noise.REPLACEMENT)
    return (weights.log() + gumbel).max(dim=-1).indices
