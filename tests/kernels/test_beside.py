"""Branches beside each other: the same values as one behind the other, eager and replayed."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dsparkd.kernels import beside
from dsparkd.kernels.beside import Beside, SecondStream, in_line

LAYERS, WIDTH = 12, 512


def stack(x: Tensor, weights: list[Tensor], run: Beside) -> Tensor:
    """Layers of two branches that read one input; memory of one layer's branch is free for the next one's."""
    for weight in weights:
        branch = run(lambda x=x, weight=weight: torch.tanh(x @ weight))
        own = torch.sin(x @ weight.t())
        for _ in range(3):
            own = own + own.mean()
        x = own + branch()
    return x


def inputs(device: torch.device, seed: int) -> tuple[Tensor, list[Tensor]]:
    generator = torch.Generator(device).manual_seed(seed)
    x = torch.randn((256, WIDTH), generator=generator, device=device)
    scale = WIDTH**-0.5
    return x, [scale * torch.randn((WIDTH, WIDTH), generator=generator, device=device) for _ in range(LAYERS)]


def test_on_the_cpu_work_is_done_when_it_is_given() -> None:
    """There is no second stream; the order of launches is that of the code."""
    done: list[str] = []

    def work() -> Tensor:
        done.append("work")
        return torch.ones(1)

    join = beside.bind(torch.device("cpu"))(work)
    assert done == ["work"]
    assert join().item() == 1
    assert join().item() == 1
    assert done == ["work"]


@pytest.mark.gpu
@torch.inference_mode()
def test_branches_on_two_streams_give_the_bits_of_one() -> None:
    """A branch that began too early, or was read too early, would read memory of another layer."""
    device = torch.device("cuda", 0)
    run = SecondStream(device)
    for seed in range(20):
        x, weights = inputs(device, seed)
        assert torch.equal(stack(x, weights, run), stack(x, weights, in_line))


@pytest.mark.gpu
@torch.inference_mode()
def test_a_graph_holds_both_streams() -> None:
    """P-11: a branch that is not joined inside of the capture would end it."""
    device = torch.device("cuda", 0)
    run = SecondStream(device)
    x, weights = inputs(device, 0)
    stack(x, weights, run)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = stack(x, weights, run)
    for seed in range(1, 6):
        x.copy_(inputs(device, seed)[0])
        graph.replay()
        assert torch.equal(output, stack(x, weights, in_line))
