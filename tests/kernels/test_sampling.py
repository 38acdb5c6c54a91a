"""The row filters and the stable top-k against plain Python on lists."""

from __future__ import annotations

import math

import pytest
import torch

from dsparkd.kernels import sampling


def coarse_scores(rows: int, vocab: int, seed: int) -> torch.Tensor:
    """Scores with many ties: multiples of a half, so that the tie rule decides often. Row maximum 0."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randint(-12, 13, (rows, vocab), generator=generator).float() / 2
    return scores - scores.amax(dim=-1, keepdim=True)


def order(row: list[float]) -> list[int]:
    """Ids best first, ties to the lower id."""
    return sorted(range(len(row)), key=lambda i: (-row[i], i))


def kept(row: torch.Tensor) -> set[int]:
    """Ids that a filter left."""
    return set(torch.nonzero(row > -math.inf).flatten().tolist())


def test_stable_topk_orders_by_score_and_then_by_lower_id() -> None:
    """torch.topk promises no order among ties; alternatives and kept sets must not depend on its mood."""
    scores = coarse_scores(9, 301, 0)
    scores[0, :10] = torch.tensor([0.0, -0.0] * 5)  # equal scores with different bits
    scores[1, 5] = -math.inf

    values, ids = sampling.stable_topk(scores, 40)

    for row in range(9):
        assert ids[row].tolist() == order(scores[row].tolist())[:40]
    assert torch.equal(values, scores.gather(1, ids))


def test_top_k_keeps_exactly_k_ids_and_the_lower_of_equals() -> None:
    """Keeping every tie of the k-th would keep more than k."""
    scores = coarse_scores(4, 97, 1)

    got = sampling.keep_top_k(scores, torch.tensor([1, 7, 40, 97]), 97)

    for row, k in enumerate([1, 7, 40, 97]):
        assert kept(got[row]) == set(order(scores[row].tolist())[:k])


@pytest.mark.parametrize("vocab", [5, 97, 3000])
@pytest.mark.parametrize("top_p", [1e-6, 0.3, 0.9, 0.999999])
def test_top_p_keeps_the_smallest_best_first_prefix_that_reaches_the_mass(vocab: int, top_p: float) -> None:
    """One id fewer misses the mass, one more is not the smallest."""
    scores = coarse_scores(3, vocab, 2)
    scores[2] = scores[2] / 1000  # nearly flat
    scores[2] -= scores[2].max()

    got = sampling.keep_top_p(scores, torch.full((3,), top_p, dtype=torch.float64))

    for row in range(3):
        values = scores[row].tolist()
        weights = [math.exp(values[i]) for i in order(values)]
        total, mass, count = math.fsum(weights), 0.0, 0
        while count < vocab and mass < top_p * total * (1 - 1e-12):
            mass += weights[count]
            count += 1
        assert kept(got[row]) == set(order(values)[:count])


def test_top_p_of_a_row_does_not_depend_on_its_neighbours() -> None:
    """Bits: a flat row beside a peaked one keeps what it keeps alone."""
    scores = coarse_scores(2, 4000, 3)
    scores[1] = 0.0  # flat: nine tenths of it are 3,600 ids
    top_p = torch.tensor([0.9, 0.9], dtype=torch.float64)

    together = sampling.keep_top_p(scores, top_p)

    assert torch.equal(together[0], sampling.keep_top_p(scores[:1], top_p[:1])[0])
    assert kept(together[1]) == set(range(3600))


def test_min_p_keeps_ids_at_least_that_share_of_the_likeliest() -> None:
    """min_p compares probabilities, which scores whose maximum is 0 hold as logarithms."""
    scores = torch.tensor([[0.0, math.log(0.5), math.log(0.25), math.log(0.1)]])

    got = sampling.keep_min_p(scores.expand(3, 4), torch.tensor([0.2, 1.0, 0.0], dtype=torch.float64))

    assert [kept(row) for row in got] == [{0, 1, 2}, {0}, {0, 1, 2, 3}]
