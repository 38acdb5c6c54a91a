"""Hyper-connections against the formulas in double precision."""

from __future__ import annotations

import torch
from torch import Tensor

from dsparkd.kernels import hyper_connection as kernel


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def reference_weights(raw: Tensor, scale: Tensor, base: Tensor, iterations: int, eps: float) -> tuple[Tensor, ...]:
    """Steps 3 to 6 of the definition, S = 4, in double."""
    m = raw.double() * scale.double() + base.double()
    pre = torch.sigmoid(m[:, :4]) + eps
    post = 2 * torch.sigmoid(m[:, 4:8])
    comb = m[:, 8:].view(-1, 4, 4).softmax(2) + eps
    comb = comb / (comb.sum(1, keepdim=True) + eps)
    for _ in range(iterations - 1):
        comb = comb / (comb.sum(2, keepdim=True) + eps)
        comb = comb / (comb.sum(1, keepdim=True) + eps)
    return pre, post, comb


def test_mixing_weights_follow_the_definition() -> None:
    """Epsilon on pre and comb and not on post; columns are normalised last."""
    raw, scale, base = 2 * noise(33, 24), 1 + 0.3 * noise(24, seed=1), noise(24, seed=2)
    for iterations in (1, 2, 20):
        got = kernel.mixing_weights(raw, scale, base, 4, iterations, 1e-6)
        for ours, exact in zip(got, reference_weights(raw, scale, base, iterations, 1e-6), strict=True):
            assert torch.allclose(ours.double(), exact, rtol=1e-5, atol=1e-6)
    columns = kernel.mixing_weights(raw, scale, base, 4, 20, 1e-6)[2].sum(1)
    assert torch.allclose(columns, torch.ones_like(columns), atol=1e-5)


def test_expansion_takes_combs_first_index_as_the_source() -> None:
    """X'[k] = post_k o + sum_j comb[j, k] X[j]: the matrix is applied transposed."""
    output, streams = noise(5, 24), noise(5, 4, 24, seed=1)
    post, comb = noise(5, 4, seed=2), noise(5, 4, 4, seed=3)
    exact = torch.einsum("tk,td->tkd", post, output) + torch.einsum("tjk,tjd->tkd", comb, streams)
    assert torch.allclose(kernel.expand(output, streams, post, comb), exact, atol=1e-5)


def test_collapse_is_the_weighted_sum() -> None:
    """y = sum_s pre_s X[s]"""
    streams, pre = noise(5, 4, 24), noise(5, 4, seed=1)
    assert torch.allclose(kernel.collapse(streams, pre), torch.einsum("ts,tsd->td", pre, streams), atol=1e-5)


def test_bits_do_not_depend_on_the_batch() -> None:
    """A token's mixing weights and streams are its own."""
    raw, scale, base = noise(48, 24), 1 + 0.3 * noise(24, seed=1), noise(24, seed=2)
    output, streams = noise(48, 72, seed=3), noise(48, 4, 72, seed=4)

    def run(part: slice) -> Tensor:
        pre, post, comb = kernel.mixing_weights(raw[part], scale, base, 4, 20, 1e-6)
        collapsed = kernel.collapse(streams[part], pre)
        return torch.cat((kernel.expand(output[part], streams[part], post, comb).flatten(1), collapsed), 1)

    whole = run(slice(0, 48))
    for size in (1, 3, 16):
        assert torch.equal(torch.cat([run(slice(at, at + size)) for at in range(0, 48, size)]), whole)
