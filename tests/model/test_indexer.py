"""The lightning indexer's choice."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dsparkd.model.config import parse_model_config
from dsparkd.model.indexer import Indexer
from tests.model.values import small_values


class RandomSource:
    """A WeightSource of random tensors; shapes are asked for by the test."""

    dtype = torch.float32
    device = torch.device("cpu")

    def __init__(self, shapes: dict[str, tuple[int, ...]]) -> None:
        self._shapes = shapes

    def linear(self, name: str) -> Tensor:
        return self.float32(f"{name}.weight")

    def float32(self, name: str) -> Tensor:
        return torch.randn(self._shapes[name], generator=torch.Generator().manual_seed(len(name)))

    def integer(self, name: str) -> Tensor:
        raise NotImplementedError(name)


def make_indexer(topk: int) -> Indexer:
    config = parse_model_config(small_values() | {"index_topk": topk})
    source = RandomSource({"i.wq_b.weight": (16 * 64, 32), "i.weights_proj.weight": (16, 64)})
    return Indexer(config, source, "i")


def choose(indexer: Indexer, scores: Tensor, counts: list[int]) -> list[list[int]]:
    """Run select with keys and queries that give exactly these scores: one head, one channel."""
    n, num_entries = scores.shape
    hidden = torch.arange(num_entries) >= torch.tensor(counts)[:, None]
    slots = (1000 + torch.arange(num_entries)).expand(n, -1).masked_fill(hidden, 0)
    query, weights = torch.ones(n, 1, 1), torch.ones(n, 1)
    kept = indexer.select(query, weights, scores[:, :, None], slots, hidden)
    assert kept.shape[1] % 64 == 0
    for row, count in zip(kept, counts, strict=True):  # real slots first, zeros behind them
        assert (row > 0).tolist() == [i < min(count, indexer.topk) for i in range(kept.shape[1])]
    return [[slot - 1000 for slot in row[row > 0].tolist()] for row in kept]


def test_the_best_are_kept_in_ascending_order() -> None:
    """Order by index makes the reduction that follows independent of the scores."""
    scores = torch.rand(3, 128, generator=torch.Generator().manual_seed(1))
    got = choose(make_indexer(10), scores, [128, 128, 70])
    for row, count, kept in zip(scores, (128, 128, 70), got, strict=True):
        best = row[:count].sort(descending=True, stable=True).indices[:10]
        assert kept == sorted(best.tolist())


@pytest.mark.parametrize("topk", [1, 4, 63, 64, 65])
def test_equal_scores_go_to_the_lower_index(topk: int) -> None:
    """Exact ties are common: every score is 0 where all heads are clipped."""
    scores = torch.zeros(1, 192)
    scores[0, [150, 20]] = 1.0
    kept = choose(make_indexer(topk), scores, [180])[0]
    order = [20, 150, *(i for i in range(180) if i not in (20, 150))]
    assert kept == sorted(order[:topk])


def test_a_token_that_sees_few_keeps_all_of_them() -> None:
    """Entries after it, and those of other rows' width, are never chosen."""
    scores = torch.rand(4, 128, generator=torch.Generator().manual_seed(2))
    got = choose(make_indexer(16), scores, [0, 1, 15, 16])
    assert got == [[], [0], list(range(15)), list(range(16))]


def test_negative_products_are_clipped_before_heads_are_weighed() -> None:
    """score = sum_h g_h max(0, q_h . k): a negative weight on a clipped head costs nothing."""
    indexer = make_indexer(1)
    query = torch.tensor([[[1.0], [-1.0]]])
    weights = torch.tensor([[1.0, -5.0]])
    keys = torch.zeros(1, 128, 1)
    keys[0, 3], keys[0, 9] = 2.0, -4.0  # scores 2 and -20; all others 0
    slots = torch.arange(128).expand(1, -1)
    kept = indexer.select(query, weights, keys, slots, torch.zeros(1, 128, dtype=torch.bool))
    assert kept[0, :2].tolist() == [3, 0]
