"""The router's Triton form beside the torch form."""

from __future__ import annotations

import pytest
import torch

from dsparkd.kernels.cuda.router import TritonRouter
from dsparkd.kernels.cuda.tile import turn
from dsparkd.kernels.router import RouterRule, TorchRouter, pack
from tests.kernels.cuda.values import DTYPES, NUMBER, Peers, arrive, noise
from tools.gates.kernels import poisoned_memory

TABLE = torch.stack([(torch.arange(50) * 3 + j * 5) % 11 for j in range(4)], 1)


@pytest.mark.parametrize("hashed", [False, True])
@pytest.mark.parametrize(("spread", "shift"), [(0.3, 0.0), (3.0, 0.0), (30.0, 0.0), (0.3, -4.0), (3.0, -1.0)])
def test_routes_are_those_of_the_torch_form(device: torch.device, hashed: bool, spread: float, shift: float) -> None:
    """Ids exactly, shares within rounding; logits far below zero and above twenty, too, and biases that leave scores
    below zero, all or some. A width that fills no tile."""
    bias = noise(11, seed=2) + shift
    rule = RouterRule(11, 4, 1.5, None if hashed else bias, TABLE if hashed else None)
    on_device = RouterRule(11, 4, 1.5, None if hashed else bias.to(device), TABLE.to(device) if hashed else None)
    logits, ids = noise(20, 11, seed=1) * spread, torch.arange(20) * 2
    expected = TorchRouter(rule)(logits, ids, torch.tensor([17]))
    got = TritonRouter(on_device)(logits.to(device), ids.to(device), torch.tensor([17], device=device))
    assert torch.equal(got.expert_ids.cpu(), expected.expert_ids)
    assert torch.allclose(got.shares.cpu()[:17], expected.shares[:17], rtol=2e-5, atol=1e-7)


def test_of_equal_scores_the_lower_experts_are_chosen(device: torch.device) -> None:
    """Stable, as the reference sorts."""
    rule = RouterRule(11, 4, 1.5, torch.zeros(11, device=device), None)
    logits = torch.tensor([[0.0] * 11, [1.0, 2.0, 2.0, 1.0, 2.0, 1.0, 1.0, 2.0, 2.0, 2.0, 1.0]], device=device)
    routes = TritonRouter(rule)(
        logits, torch.zeros(2, dtype=torch.int64, device=device), torch.tensor([2], device=device)
    )
    assert routes.expert_ids.tolist() == [[0, 1, 2, 3], [1, 2, 4, 7]]


def test_padding_that_holds_nan_names_no_expert(device: torch.device) -> None:
    """Padding rows are computed from whatever memory held."""
    rule = RouterRule(11, 4, 1.5, torch.zeros(11, device=device), None)
    logits = torch.full((3, 11), torch.nan, device=device)
    logits[0] = torch.arange(11)
    ids = torch.zeros(3, dtype=torch.int64, device=device)
    with poisoned_memory():  # an id that was not written would be one of what lay there
        routes = TritonRouter(rule)(logits, ids, torch.tensor([1], device=device))
    assert routes.expert_ids.tolist() == [[7, 8, 9, 10], [11] * 4, [11] * 4]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [40, 4096])
def test_rows_are_packed_with_the_same_routes(device: torch.device, dtype: torch.dtype, width: int) -> None:
    """One launch writes what a launch and three copies would, to the bit, padding included."""
    router = TritonRouter(RouterRule(11, 4, 1.5, noise(11, seed=2).to(device), None))
    x, logits = noise(20, width, seed=3).to(dtype).to(device), noise(20, 11, seed=1).to(device)
    ids, num_live = torch.zeros(20, dtype=torch.int64, device=device), torch.tensor([17], device=device)
    expected = pack(x, router(logits, ids, num_live)).view(torch.int32)
    rows = torch.full_like(expected, -1).view(torch.float32)
    router.pack(x, logits, ids, num_live, rows)
    assert torch.equal(rows.view(torch.int32), expected)
    router.pack(x[:0], logits[:0], ids[:0], num_live, rows[:0])


def test_rows_are_packed_in_the_order_that_the_experts_weights_have(device: torch.device) -> None:
    """FP4 experts take x turned: the launch that copies it turns it, and one of its own is saved."""
    router = TritonRouter(RouterRule(11, 4, 1.5, noise(11, seed=2).to(device), None), turns=True)
    x, logits = noise(5, 2304, seed=3).bfloat16().to(device), noise(5, 11, seed=1).to(device)
    ids, num_live = torch.zeros(5, dtype=torch.int64, device=device), torch.tensor([4], device=device)
    expected = pack(turn(x), router(logits, ids, num_live)).view(torch.int32)
    rows = torch.full_like(expected, -1).view(torch.float32)
    router.pack(x, logits, ids, num_live, rows)
    assert torch.equal(rows.view(torch.int32), expected)


@pytest.mark.parametrize(("hashed", "turns"), [(False, False), (True, True)])
@pytest.mark.parametrize(("tokens", "peers"), [(3, 3), (2, 4), (4, 1), (3, 0)])
def test_rows_cross_to_the_peer_while_they_are_packed(
    device: torch.device, hashed: bool, turns: bool, tokens: int, peers: int
) -> None:
    """The peer gets what lies here, to the bit, and its rows come to lie where they belong; whoever has more."""
    table, bias = (TABLE.to(device), None) if hashed else (None, noise(11, seed=2).to(device))
    router = TritonRouter(RouterRule(11, 4, 1.5, bias, table), turns)
    x, logits = noise(tokens, 2304, seed=3).bfloat16().to(device), noise(tokens, 11, seed=1).to(device)
    ids, num_live = torch.arange(tokens, device=device), torch.tensor([tokens - 1], device=device)
    expected = pack(turn(x) if turns else x, router(logits, ids, num_live))
    near = Peers(device, 5000)
    coming, wanted = noise(peers, expected.shape[1], seed=5).to(device), near.theirs.clone()
    arrive(near.box(near.ours, 0), coming, NUMBER)
    arrive(near.box(wanted, 0), expected, NUMBER)
    received = torch.empty_like(coming)
    near.words.begin_step()
    rows = torch.full_like(expected, torch.nan)
    router.pack(x, logits, ids, num_live, rows, near.words.cross(received))
    assert torch.equal(rows.view(torch.int32), expected.view(torch.int32))
    assert torch.equal(received, coming)
    assert torch.equal(near.theirs, wanted)
    assert not near.ours.any()
