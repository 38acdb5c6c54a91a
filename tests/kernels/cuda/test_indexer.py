"""The Triton indexer: the torch form's choice, from the same scores, and the scores themselves."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dsparkd.kernels.cuda.indexer import TritonIndexer, keep_best, score
from dsparkd.kernels.indexer import TorchIndexer, Visible
from tests.kernels.cuda.values import DTYPES, noise

COUNTS = [0, 1, 60, 64, 65, 500, 1024, 1100, 4150]  # of more than one block of scores, few or many at a time
HELD_COUNTS = [*COUNTS[:-1], 2048]  # and of as many as one program holds


def moved(visible: Visible, device: torch.device) -> Visible:
    return Visible(visible.slots.to(device), visible.rows.to(device), visible.counts.to(device), visible.most)


def random_visible(counts: list[int], pool: int = 9000) -> Visible:
    """Two rows of slots, all different."""
    width = -(-max(counts) // 64) * 64
    slots = 1 + torch.randperm(pool - 1, generator=torch.Generator().manual_seed(2))[: 2 * width].view(2, width)
    return Visible(slots, torch.arange(len(counts)) % 2, torch.tensor(counts), max(counts))


def expected_choice(scores: Tensor, visible: Visible, top_k: int) -> Tensor:
    """By a stable sort: score descending, entry ascending; slots ascending by entry, zeros behind."""
    chosen = torch.zeros((len(scores), -(-top_k // 64) * 64), dtype=torch.int64)
    for t, count in enumerate(visible.counts.tolist()):
        best = scores[t, :count].sort(descending=True, stable=True).indices[:top_k].sort().values
        chosen[t, : len(best)] = visible.slots[visible.rows[t], best]
    return chosen


@pytest.mark.parametrize("top_k", [1, 64, 300])
@pytest.mark.parametrize("kind", ["spread", "few", "zeros"])
@pytest.mark.parametrize(("counts", "many_scores"), [(COUNTS, 0), (COUNTS, 10**6), (HELD_COUNTS, 10**6)])
def test_the_choice_is_exact(
    device: torch.device,
    kind: str,
    top_k: int,
    counts: list[int],
    many_scores: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of any scores, signs included; equal ones go to the lower entry, and both zeros are equal."""
    monkeypatch.setattr("dsparkd.kernels.cuda.indexer.MANY_SCORES", many_scores)
    visible = random_visible(counts)
    scores = noise(len(counts), visible.most)
    if kind == "few":
        scores = (2 * scores).round() / 2
    elif kind == "zeros":
        scores = torch.where(scores > 1.5, scores, torch.where(scores > 0, 0.0, -0.0))
    hidden = torch.arange(visible.most) >= visible.counts[:, None]
    expected = expected_choice(scores, visible, top_k)
    chosen = torch.full(expected.shape, -1, dtype=torch.int64, device=device)
    keep_best(scores.masked_fill(hidden, torch.nan).to(device), moved(visible, device), top_k, chosen)
    assert torch.equal(chosen.cpu(), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "width"), [(5, 24), (16, 64)])
def test_scores_are_clipped_before_heads_are_weighed(
    device: torch.device, dtype: torch.dtype, heads: int, width: int
) -> None:
    """score = sum_h g_h max(0, q_h . k) over keys that lie anywhere; what nobody sees may hold anything."""
    visible = random_visible([0, 3, 64, 130, 600], pool=1500)
    n = len(visible.counts)
    query, weights, keys = (
        noise(n, heads, width).to(dtype),
        noise(n, heads, seed=1),
        noise(1500, width, seed=2).to(dtype),
    )
    shown = torch.arange(visible.slots.shape[1]) < visible.counts[:, None]
    unseen = torch.ones(1500, dtype=torch.bool)
    unseen[visible.slots[visible.rows][shown]] = False
    keys[unseen] = torch.nan
    scores = score(query.to(device), weights.to(device), keys.to(device), moved(visible, device)).cpu()
    for t, count in enumerate(visible.counts.tolist()):
        own = keys[visible.slots[visible.rows[t], :count]].double()
        exact = (weights[t].double()[:, None] * (query[t].double() @ own.t()).clamp(min=0)).sum(0)
        assert torch.allclose(scores[t, :count].double(), exact, atol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES)
def test_it_chooses_as_the_torch_form_and_alone_as_in_company(
    device: torch.device, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A token's scores are its own to the bit, so near ties fall the same way in any batch, and in any cut of it."""
    visible = random_visible([10, 20, 70, 130, 190], pool=600)
    n, top_k = len(visible.counts), 30
    query, weights, keys = noise(n, 8, 32).to(dtype), noise(n, 8, seed=1), noise(600, 32, seed=2).to(dtype)
    form = TritonIndexer(device, dtype)
    form.prepare(8, 32, top_k)
    arguments = [x.to(device) for x in (query, weights, keys)]
    whole = form.choose(*arguments, moved(visible, device), top_k)
    assert torch.equal(whole.cpu(), TorchIndexer().choose(query, weights, keys, visible, top_k))

    for t in (2, 4):
        one = slice(t, t + 1)
        alone = moved(Visible(visible.slots, visible.rows[one], visible.counts[one], int(visible.counts[t])), device)
        assert torch.equal(form.choose(arguments[0][one], arguments[1][one], arguments[2], alone, top_k), whole[one])
    monkeypatch.setattr("dsparkd.kernels.cuda.indexer.SCORE_BYTES", 2 * 4 * visible.most)
    assert torch.equal(form.choose(*arguments, moved(visible, device), top_k), whole)
