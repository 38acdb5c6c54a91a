"""The lightning indexer's choice, torch and C form."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dsparkd.kernels.cuda.indexer import TritonIndexer
from dsparkd.kernels.indexer import CpuIndexer, IndexerKernel, TorchIndexer, Visible, bind

FORMS: list[IndexerKernel] = [TorchIndexer(), CpuIndexer()]


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def choose(form: IndexerKernel, scores: Tensor, counts: list[int], top_k: int) -> list[list[int]]:
    """Choose with queries and keys that give exactly these scores, one row a token; entry e has slot 1000 t + e + 1."""
    n, num_entries = scores.shape
    slots = 1000 * torch.arange(n)[:, None] + torch.arange(num_entries) + 1
    keys = torch.full((1000 * n + 1, 1), torch.nan)  # what nobody sees must not matter
    keys[0] = 0
    for t, count in enumerate(counts):
        keys[slots[t, :count], 0] = scores[t, :count]
    slots = slots.masked_fill(torch.arange(num_entries) >= torch.tensor(counts)[:, None], 0)
    visible = Visible(slots, torch.arange(n), torch.tensor(counts), max(counts))
    chosen = form.choose(torch.ones(n, 1, 1), torch.ones(n, 1), keys, visible, top_k)
    assert chosen.shape == (n, -(-top_k // 64) * 64)
    for row, count in zip(chosen, counts, strict=True):  # real slots first, zeros behind them
        assert (row > 0).tolist() == [i < min(count, top_k) for i in range(chosen.shape[1])]
    return [[slot - 1000 * t - 1 for slot in row[row > 0].tolist()] for t, row in enumerate(chosen)]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("top_k", [1, 10, 64])
def test_the_best_are_kept_in_ascending_order(form: IndexerKernel, top_k: int) -> None:
    """Order by index makes the reduction that follows independent of the scores."""
    scores = noise(4, 128).abs()
    counts = [128, 65, 128, 100]
    for row, count, kept in zip(scores, counts, choose(form, scores, counts, top_k), strict=True):
        best = row[:count].sort(descending=True, stable=True).indices[:top_k]
        assert kept == sorted(best.tolist())


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("top_k", [1, 4, 63, 64, 65])
def test_equal_scores_go_to_the_lower_index(form: IndexerKernel, top_k: int) -> None:
    """Exact ties are common: every score is 0 where all heads are clipped."""
    scores = torch.zeros(1, 192)
    scores[0, [150, 20]] = 1.0
    kept = choose(form, scores, [180], top_k)[0]
    order = [20, 150, *(i for i in range(180) if i not in (20, 150))]
    assert kept == sorted(order[:top_k])


@pytest.mark.parametrize("form", FORMS)
def test_a_token_that_sees_few_keeps_all_of_them(form: IndexerKernel) -> None:
    """Entries after its own, and those of a longer row, are never chosen."""
    got = choose(form, noise(5, 128).abs(), [0, 1, 15, 16, 40], 16)
    assert got[:4] == [[], [0], list(range(15)), list(range(16))]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("heads", [2, 5, 16])
def test_products_are_clipped_before_heads_are_weighed(form: IndexerKernel, heads: int) -> None:
    """score = sum_h g_h max(0, q_h . k), in double; a negative weight on a clipped head costs nothing."""
    query, weights, keys = noise(3, heads, 24), noise(3, heads, seed=1), noise(200, 24, seed=2)
    slots = torch.randperm(199, generator=torch.Generator().manual_seed(3))[None, :128] + 1
    counts = torch.tensor([128, 90, 70])
    visible = Visible(slots, torch.zeros(3, dtype=torch.int64), counts, 128)
    chosen = form.choose(query, weights, keys, visible, 12)
    for t in range(3):
        own = keys[slots[0, : counts[t]]].double()
        scores = (weights[t].double()[:, None] * (query[t].double() @ own.t()).clamp(min=0)).sum(0)
        best = scores.sort(descending=True, stable=True).indices[:12].sort().values
        assert chosen[t, :12].tolist() == slots[0, best].tolist()


@pytest.mark.parametrize("form", FORMS)
def test_a_tokens_choice_does_not_depend_on_its_neighbours(form: IndexerKernel) -> None:
    """Near ties must fall the same way in any batch, so the scores' bits must be the same."""
    query, weights, keys = noise(40, 16, 32), noise(40, 16, seed=1), noise(300, 32, seed=2)
    slots = torch.arange(1, 257).repeat(2, 1)
    rows, counts = torch.arange(40) % 2, torch.arange(40) * 5 + 61
    top_k = 30
    whole = form.choose(query, weights, keys, Visible(slots, rows, counts, 256), top_k)
    for t in range(40):
        one = slice(t, t + 1)
        alone = form.choose(
            query[one], weights[one], keys, Visible(slots, rows[one], counts[one], int(counts[t])), top_k
        )
        assert torch.equal(alone, whole[one])


def test_the_form_follows_device_and_dtype() -> None:
    """One decision, when the model is built."""
    assert isinstance(bind(torch.device("cpu"), torch.float32), CpuIndexer)
    assert isinstance(bind(torch.device("cpu"), torch.bfloat16), TorchIndexer)
    for dtype in (torch.float32, torch.bfloat16):
        assert isinstance(bind(torch.device("cuda"), dtype), TritonIndexer)
