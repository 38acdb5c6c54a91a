"""A shard's experts, torch and C form, against a plain loop in double precision."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dsparkd.kernels.experts import CpuExperts, ExpertShard, TorchExperts, bind
from dsparkd.kernels.weight import dense


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def make_shard(width: int, expert_width: int, first: int = 3, count: int = 5, limit: float = 1.5) -> ExpertShard:
    w13 = tuple(dense(noise(2 * expert_width, width, seed=e) / width**0.5) for e in range(count))
    w2 = tuple(dense(noise(width, expert_width, seed=100 + e) / expert_width**0.5) for e in range(count))
    return ExpertShard(first, w13, w2, limit)


def make_choices(rows: int, top_k: int, num_experts: int = 10) -> tuple[Tensor, Tensor]:
    """Distinct ids ascending, the last rows padding (id num_experts), and shares."""
    draw = torch.rand((rows, num_experts), generator=torch.Generator().manual_seed(7))
    ids = draw.argsort(1)[:, :top_k].sort(1).values
    ids[rows - rows // 8 :] = num_experts
    return ids.int().contiguous(), noise(rows, top_k, seed=8).abs()


def reference(shard: ExpertShard, x: Tensor, ids: Tensor, shares: Tensor) -> Tensor:
    total = torch.zeros(x.shape, dtype=torch.float64)
    for r in range(x.shape[0]):
        for expert, share in zip(ids[r].tolist(), shares[r].double(), strict=True):
            e = expert - shard.first
            if 0 <= e < len(shard.w13):
                gate, up = (shard.w13[e].values.double() @ x[r].double()).chunk(2)
                hidden = torch.nn.functional.silu(gate.clamp(max=shard.limit)) * up.clamp(-shard.limit, shard.limit)
                total[r] += share * (shard.w2[e].values.double() @ hidden)
    return total


@pytest.mark.parametrize("form", [TorchExperts, CpuExperts])
@pytest.mark.parametrize(("width", "expert_width"), [(64, 32), (72, 40), (50, 18), (256, 128)])
@pytest.mark.parametrize("rows", [1, 3, 100])
def test_the_sum_follows_the_definition(
    form: type[TorchExperts] | type[CpuExperts], width: int, expert_width: int, rows: int
) -> None:
    """Clamps that bind, loads above and below a batch of rows, widths that fill no vector."""
    shard, x = make_shard(width, expert_width), noise(rows, width, seed=5)
    ids, shares = make_choices(rows, top_k=3)
    got = form(shard)(x, ids, shares)
    assert torch.allclose(got.double(), reference(shard, x, ids, shares), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("form", [TorchExperts, CpuExperts])
@pytest.mark.parametrize("width", [64, 72])
def test_a_rows_bits_do_not_depend_on_the_other_rows(form: type[TorchExperts] | type[CpuExperts], width: int) -> None:
    """However many rows an expert gets, each is computed by the same operations."""
    kernel, x = form(make_shard(width, 40)), noise(150, width, seed=5)
    ids, shares = make_choices(150, top_k=3)
    whole = kernel(x, ids, shares)
    for size in (1, 2, 3, 7, 50):
        parts = [kernel(*(part[at : at + size] for part in (x, ids, shares))) for at in range(0, 150, size)]
        assert torch.equal(torch.cat(parts), whole), size


@pytest.mark.parametrize("form", [TorchExperts, CpuExperts])
def test_rows_without_a_choice_on_the_shard_get_zeros(form: type[TorchExperts] | type[CpuExperts]) -> None:
    """Also when no row has one, and when there are no rows."""
    kernel = form(make_shard(64, 32))
    ids = torch.tensor([[0, 1, 9], [10, 10, 10]], dtype=torch.int32)
    assert not kernel(noise(2, 64), ids, torch.ones(2, 3)).any()
    empty = torch.empty((0, 3), dtype=torch.int32)
    assert kernel(torch.empty((0, 64)), empty, torch.empty((0, 3))).shape == (0, 64)


def test_the_form_follows_the_weights() -> None:
    """float32 on the cpu runs in C; bfloat16 runs in torch."""
    shard = make_shard(64, 32)
    assert isinstance(bind(shard), CpuExperts)
    w13, w2 = (tuple(dense(weight.values.bfloat16()) for weight in weights) for weights in (shard.w13, shard.w2))
    half = ExpertShard(shard.first, w13, w2, shard.limit)
    assert isinstance(bind(half), TorchExperts)
