"""The Triton hyper-connections against the torch form, in both dtypes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dsparkd.kernels.cuda.hyper_connection import SPLITS, TritonHyperConnection, TritonProduct, collapse_last
from dsparkd.kernels.hyper_connection import Collapsed, Mixing, TorchHyperConnection, weighted_sum
from tests.kernels.cuda.values import DTYPES, close, noise

T = 35  # more than one block of the product


def make_mixing(streams: int, width: int, iterations: int, device: torch.device) -> Mixing:
    n = (2 + streams) * streams
    scale, base, norm = 1 + 0.3 * noise(n, seed=1), noise(n, seed=2), 1 + 0.2 * noise(width, seed=3)
    return Mixing(scale.to(device), base.to(device), norm.to(device), streams, iterations, 1e-6, 1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("streams", "width", "iterations"), [(4, 72, 20), (2, 50, 1), (8, 16, 3)])
def test_a_collapse_is_the_torch_forms(
    device: torch.device, dtype: torch.dtype, streams: int, width: int, iterations: int
) -> None:
    """Gates, Sinkhorn, weighted sum and norm; parts of the product are added."""
    x = noise(T, streams, width, seed=4).to(dtype)
    raw = 10 * noise(3, T, (2 + streams) * streams, seed=5)
    expected = TorchHyperConnection().collapse(x, raw, make_mixing(streams, width, iterations, torch.device("cpu")))
    got = TritonHyperConnection(streams).collapse(
        x.to(device), raw.to(device), make_mixing(streams, width, iterations, device)
    )
    assert got.input.dtype == dtype
    assert close(got.input.cpu(), expected.input)
    assert close(got.post.cpu(), expected.post)
    assert close(got.comb.cpu(), expected.comb)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("streams", "width"), [(4, 72), (2, 50)])
def test_the_last_collapse_weighs_by_sigmoids(
    device: torch.device, dtype: torch.dtype, streams: int, width: int
) -> None:
    """Neither norm nor mixing; and a row's bits are its own, whatever else is asked for logits."""
    x, raw = noise(T, streams, width, seed=4).to(dtype), noise(3, T, streams, seed=5)
    scale, base = noise(1, seed=1), noise(streams, seed=2)
    x64 = x.double()
    length = (x64.flatten(1).square().mean(1, keepdim=True) + 1e-5).rsqrt()
    gates = (raw.double().sum(0) * length * scale + base).sigmoid() + 1e-6
    there = [tensor.to(device) for tensor in (x, raw, scale, base)]
    got = collapse_last(*there, 1e-6, 1e-5)
    assert got.dtype == dtype
    assert close(got.cpu(), weighted_sum(x64, gates))
    alone = collapse_last(there[0][5:6], there[1][:, 5:6].contiguous(), *there[2:], 1e-6, 1e-5)
    assert torch.equal(alone, got[5:6])


def test_gates_that_saturate_stay_finite(device: torch.device) -> None:
    """e^x may be infinite on the way, and a row of the matrix all but one exponent."""
    raw = 1e4 * noise(1, T, 24, seed=5)
    got = TritonHyperConnection(4).collapse(noise(T, 4, 16).to(device), raw.to(device), make_mixing(4, 16, 20, device))
    assert all(part.isfinite().all() for part in (got.input, got.post, got.comb))
    assert got.post.min() >= 0
    assert got.post.max() <= 2


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [24, 1500])
def test_an_expansion_is_the_torch_forms(device: torch.device, dtype: torch.dtype, width: int) -> None:
    """The matrix is applied transposed; widths of less and more than one block."""
    output, streams = noise(T, width).to(dtype), noise(T, 4, width, seed=1).to(dtype)
    back = Collapsed(output, noise(T, 4, seed=2), noise(T, 4, 4, seed=3))
    there = Collapsed(output.to(device), back.post.to(device), back.comb.to(device))
    got = TritonHyperConnection(4).expand(there.input, streams.to(device), there)
    assert close(got.cpu(), TorchHyperConnection().expand(output, streams, back))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("streams", "width"), [(4, 600), (2, 50)])
def test_the_parts_of_a_product_come_to_float32(
    device: torch.device, dtype: torch.dtype, streams: int, width: int
) -> None:
    """Of bfloat16 streams, too: the matrix has float32's digits, and one bfloat16 of it would be off by 1e-3."""
    x, weight = noise(T, streams, width).to(dtype), noise((2 + streams) * streams, streams * width, seed=1)
    parts = TritonProduct(weight.to(device), dtype)(x.to(device))
    exact = x.double().flatten(1) @ weight.double().t()
    assert parts.shape == (SPLITS, T, weight.shape[0])
    assert ((parts.double().sum(0).cpu() - exact).abs() <= 2e-6 * exact.abs().max()).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_do_not_depend_on_the_batch(device: torch.device, dtype: torch.dtype) -> None:
    """A token's parts, weights and streams are its own, wherever in a block it lies."""
    form, mixing = TritonHyperConnection(4), make_mixing(4, 72, 2, device)
    product = TritonProduct(noise(24, 4 * 72, seed=6).to(device), dtype)
    output, streams = noise(T, 72, seed=3).to(dtype).to(device), noise(T, 4, 72, seed=4).to(dtype).to(device)

    def run(at: int, size: int) -> Tensor:
        part = slice(at, at + size)
        collapsed = form.collapse(streams[part], product(streams[part]), mixing)
        expanded = form.expand(output[part], streams[part], collapsed)
        return torch.cat((expanded.flatten(1).float(), collapsed.input.float(), collapsed.comb.flatten(1)), 1)

    whole = run(0, T)
    for at, size in ((0, 1), (5, 3), (20, 14), (T - 1, 1)):
        assert torch.equal(run(at, size), whole[at : at + size])
