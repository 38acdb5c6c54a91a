"""Hyper-connections, torch and C form, against the formulas in double precision."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dsparkd.errors import CapabilityError
from dsparkd.kernels.cuda.hyper_connection import TritonHyperConnection
from dsparkd.kernels.hyper_connection import (
    MAX_STREAMS,
    Collapsed,
    CpuHyperConnection,
    HyperConnectionKernel,
    Mixing,
    TorchHyperConnection,
    bind,
)

FORMS: list[HyperConnectionKernel] = [TorchHyperConnection(), CpuHyperConnection()]
EPS, NORM_EPS = 1e-6, 1e-5


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def make_mixing(streams: int, width: int, iterations: int = 20) -> Mixing:
    n = (2 + streams) * streams
    scale, base, norm = 1 + 0.3 * noise(n, seed=1), noise(n, seed=2), 1 + 0.2 * noise(width, seed=3)
    return Mixing(scale, base, norm, streams, iterations, EPS, NORM_EPS)


def reference(streams: Tensor, raw: Tensor, mixing: Mixing) -> tuple[Tensor, Tensor, Tensor]:
    """Steps 2 to 7 of the definition and the norm behind them, in double: input, post, comb."""
    S, X = mixing.num_streams, streams.double()
    m = raw.double() * (X.flatten(1).square().mean(1, keepdim=True) + NORM_EPS).rsqrt()
    m = m * mixing.scale.double() + mixing.base.double()
    pre, post = torch.sigmoid(m[:, :S]) + EPS, 2 * torch.sigmoid(m[:, S : 2 * S])
    comb = m[:, 2 * S :].view(-1, S, S).softmax(2) + EPS
    comb = comb / (comb.sum(1, keepdim=True) + EPS)
    for _ in range(mixing.iterations - 1):
        comb = comb / (comb.sum(2, keepdim=True) + EPS)
        comb = comb / (comb.sum(1, keepdim=True) + EPS)
    y = (pre[:, :, None] * X).sum(1)
    return y * (y.square().mean(1, keepdim=True) + NORM_EPS).rsqrt() * mixing.norm.double(), post, comb


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("streams", "width", "iterations"), [(4, 72, 20), (4, 64, 1), (2, 50, 2), (8, 16, 20)])
def test_a_collapse_follows_the_definition(
    form: HyperConnectionKernel, streams: int, width: int, iterations: int
) -> None:
    """Epsilon on pre and comb and not on post; columns normalised last; the norm's weight before the cast."""
    mixing = make_mixing(streams, width, iterations)
    x, raw = noise(33, streams, width, seed=4), 20 * noise(33, (2 + streams) * streams, seed=5)
    got = form.collapse(x, raw[None], mixing)
    for ours, exact in zip((got.input, got.post, got.comb), reference(x, raw, mixing), strict=True):
        assert torch.allclose(ours.double(), exact, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("form", FORMS)
def test_parts_of_the_product_are_added(form: HyperConnectionKernel) -> None:
    """In ascending order, so that the parts of a token give the same bits wherever they were made."""
    mixing, x, raw = make_mixing(4, 16), noise(16, 4, 16), noise(3, 16, 24, seed=5)
    got = form.collapse(x, raw, mixing)
    whole = form.collapse(x, ((raw[0] + raw[1]) + raw[2])[None], mixing)
    assert torch.equal(got.input, whole.input)
    assert torch.equal(got.comb, whole.comb)


@pytest.mark.parametrize("form", FORMS)
def test_gates_that_saturate_stay_finite(form: HyperConnectionKernel) -> None:
    """e^x is clipped and not infinite."""
    mixing = make_mixing(4, 16)
    got = form.collapse(noise(16, 4, 16), 1e4 * noise(1, 16, 24, seed=5), mixing)
    assert all(part.isfinite().all() for part in (got.input, got.post, got.comb))
    assert got.post.min() >= 0
    assert got.post.max() <= 2


@pytest.mark.parametrize("form", FORMS)
def test_an_expansion_takes_combs_first_index_as_the_source(form: HyperConnectionKernel) -> None:
    """X'[k] = post_k o + sum_j comb[j, k] X[j]: the matrix is applied transposed."""
    output, streams = noise(5, 24), noise(5, 4, 24, seed=1)
    post, comb = noise(5, 4, seed=2), noise(5, 4, 4, seed=3)
    exact = torch.einsum("tk,td->tkd", post, output) + torch.einsum("tjk,tjd->tkd", comb, streams)
    assert torch.allclose(form.expand(output, streams, Collapsed(output, post, comb)), exact, atol=1e-5)


@pytest.mark.parametrize("width", [64, 72, 256])
def test_bits_do_not_depend_on_the_batch(width: int) -> None:
    """A token's mixing weights and streams are its own, in the form that the cpu runs."""
    form, mixing = CpuHyperConnection(), make_mixing(4, width)
    output, streams, raw = noise(48, width, seed=3), noise(48, 4, width, seed=4), noise(48, 24, seed=5)

    def run(at: int, size: int) -> Tensor:
        part = slice(at, at + size)
        collapsed = form.collapse(streams[part], raw[None, part], mixing)
        return torch.cat((form.expand(output[part], streams[part], collapsed).flatten(1), collapsed.input), 1)

    whole = run(0, 48)
    for size in (1, 3, 16):
        assert torch.equal(torch.cat([run(at, size) for at in range(0, 48, size)]), whole)


def test_the_form_follows_device_and_dtype() -> None:
    """One decision, when the model is built."""
    assert isinstance(bind(torch.device("cpu"), torch.float32, 4), CpuHyperConnection)
    assert isinstance(bind(torch.device("cpu"), torch.bfloat16, 4), TorchHyperConnection)
    for dtype in (torch.float32, torch.bfloat16):
        assert isinstance(bind(torch.device("cuda"), dtype, 4), TritonHyperConnection)
    for num_streams in (1, 3):
        with pytest.raises(CapabilityError):
            bind(torch.device("cuda"), torch.bfloat16, num_streams)
    with pytest.raises(CapabilityError):
        bind(torch.device("cpu"), torch.float32, MAX_STREAMS + 1)
