"""The Triton hyper-connections against the torch form, in both dtypes."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from torch import Tensor

from dsparkd.kernels.cuda import hyper_connection
from dsparkd.kernels.cuda.hyper_connection import (
    FEW_TOKENS,
    PART_COLUMNS,
    TritonHyperConnection,
    TritonProduct,
    advance,
    collapse_last,
    compile_last,
)
from dsparkd.kernels.feed_forward import Summands
from dsparkd.kernels.hyper_connection import Collapsed, Mixing, TorchHyperConnection, weighted_sum
from tests.kernels.cuda.values import DTYPES, close, noise

T = 35  # more than one block of the product


def make_mixing(streams: int, width: int, iterations: int, device: torch.device) -> Mixing:
    n = (2 + streams) * streams
    scale, base, norm = 1 + 0.3 * noise(n, seed=1), noise(n, seed=2), 1 + 0.2 * noise(width, seed=3)
    return Mixing(scale.to(device), base.to(device), norm.to(device), streams, iterations, 1e-6, 1e-5)


def with_squares(raw: Tensor, x: Tensor) -> Tensor:
    """Parts of a product [P, T, O] -> with the column of the streams' squares, of one piece each, [1, P, T, O + 1]."""
    squares = x.float().square().sum((1, 2))
    column = torch.stack([squares * share for share in (0.5, 0.25, 0.25)]) if len(raw) == 3 else squares[None]
    return torch.cat((raw, column[:, :, None]), 2)[None]


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
        x.to(device), with_squares(raw, x).to(device), make_mixing(streams, width, iterations, device)
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
    there = [tensor.to(device) for tensor in (x, with_squares(raw, x), scale, base)]
    got = collapse_last(*there, 1e-6, 1e-5)
    assert got.dtype == dtype
    assert close(got.cpu(), weighted_sum(x64, gates))
    alone = collapse_last(there[0][5:6], there[1][:, :, 5:6].contiguous(), *there[2:], 1e-6, 1e-5)
    assert torch.equal(alone, got[5:6])


def test_gates_that_saturate_stay_finite(device: torch.device) -> None:
    """e^x may be infinite on the way, and a row of the matrix all but one exponent."""
    x = noise(T, 4, 16)
    raw = with_squares(1e4 * noise(1, T, 24, seed=5), x)
    got = TritonHyperConnection(4).collapse(x.to(device), raw.to(device), make_mixing(4, 16, 20, device))
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
@pytest.mark.parametrize(("streams", "width", "num_tokens", "pieces"), [(4, 600, T, 4), (2, 50, FEW_TOKENS + 3, 1)])
def test_the_parts_of_a_product_come_to_float32(
    device: torch.device, dtype: torch.dtype, streams: int, width: int, num_tokens: int, pieces: int
) -> None:
    """Of bfloat16 streams, too: the matrix has float32's digits, and one bfloat16 of it would be off by 1e-3."""
    x, weight = noise(num_tokens, streams, width).to(dtype), noise((2 + streams) * streams, streams * width, seed=1)
    parts = TritonProduct(weight.to(device), dtype)(x.to(device))
    exact = x.double().flatten(1) @ weight.double().t()
    assert parts.shape == (pieces, -(-width // PART_COLUMNS), num_tokens, weight.shape[0] + 1)
    total = parts.double().sum((0, 1)).cpu()
    assert ((total[:, :-1] - exact).abs() <= 2e-6 * exact.abs().max()).all()
    assert torch.allclose(total[:, -1], x.double().square().sum((1, 2)), rtol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [72, 600])
def test_an_advance_is_a_sum_an_expansion_and_a_product(device: torch.device, dtype: torch.dtype, width: int) -> None:
    """What three launches would give. The sums are exact in bfloat16, which Triton's interpreter truncates."""
    streams = noise(T, 4, width, seed=1).to(dtype).to(device)
    first, second, shared = (
        (8 * noise(T, width, seed=seed)).round().clamp(-32, 32).to(device) / 8 for seed in (0, 4, 5)
    )
    shared = shared.to(dtype)
    summands = Summands((first, second), shared)
    back = Collapsed(shared, noise(T, 4, seed=2).to(device), noise(T, 4, 4, seed=3).to(device))
    product = TritonProduct(noise(24, 4 * width, seed=6).to(device), dtype)
    expanded, parts = advance(summands, streams, back, product)
    assert close(expanded, TritonHyperConnection(4).expand(summands.total(), streams, back))
    assert parts is not None
    assert torch.allclose(parts, product(expanded), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_do_not_depend_on_the_batch(device: torch.device, dtype: torch.dtype) -> None:
    """A token's parts, weights and streams are its own, wherever in a block it lies; also where so many come along that
    no stream has programs of its own."""
    form, mixing = TritonHyperConnection(4), make_mixing(4, 72, 2, device)
    product = TritonProduct(noise(24, 4 * 72, seed=6).to(device), dtype)
    num_tokens = FEW_TOKENS + 7
    output = noise(num_tokens, 72, seed=3).to(dtype).to(device)
    streams = noise(num_tokens, 4, 72, seed=4).to(dtype).to(device)

    def run(at: int, size: int) -> Tensor:
        part = slice(at, at + size)
        collapsed = form.collapse(streams[part], product(streams[part]), mixing)
        expanded, parts = advance(output[part], streams[part], collapsed, product)
        assert parts is not None
        own = torch.cat((expanded.flatten(1), collapsed.input, collapsed.comb.flatten(1), collapsed.post), 1)
        return torch.cat((own, in_order(parts).transpose(0, 1).flatten(1)), 1)

    whole = run(0, num_tokens)
    for at, size in ((0, 1), (5, 3), (20, 14), (num_tokens - 1, 1), (3, FEW_TOKENS)):
        assert torch.equal(run(at, size), whole[at : at + size])


def test_few_and_many_tokens_are_compiled_for_at_start(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both forms of each launch that a layer or the head makes: the first short prompt must not wait for a compiler."""
    sizes: list[tuple[str, bool, int]] = []
    launch = hyper_connection._launch

    def watch(output: Tensor | Summands | None, streams: Tensor, *rest: object) -> None:
        sizes.append((type(output).__name__, rest[1] is not None, len(streams)))
        launch(output, streams, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(hyper_connection, "_launch", watch)
    product = TritonProduct(noise(24, 4 * 72, seed=6).to(device), torch.float32)
    TritonHyperConnection(4).compile(product, make_mixing(4, 72, 2, device), torch.float32)
    kinds = {("NoneType", True), ("Tensor", True), ("Summands", True), ("Summands", False)}
    assert set(sizes) == {(*kind, T) for kind in kinds for T in (16, FEW_TOKENS + 16)}
    compile_last(
        TritonProduct(noise(4, 4 * 72).to(device), torch.float32),
        noise(1).to(device),
        noise(4).to(device),
        torch.float32,
    )


def in_order(pieces: Tensor) -> Tensor:
    """Sum over the first dimension, in ascending order."""
    total = pieces[0]
    for piece in pieces[1:]:
        total = total + piece
    return total


def test_nothing_new_is_compiled_for_any_number_of_tokens() -> None:
    """One token, or no multiple of sixteen, is another kernel unless Triton is told not to look."""
    marked = "[[param.name for param in kernel.params if param.do_not_specialize] for kernel in kernels]"
    source = "from dsparkd.kernels.cuda import hyper_connection as own"
    code = f"{source}; kernels = own._advance, own._collapse, own._collapse_last; print({marked})"
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = [sys.executable, "-W", "ignore", "-c", code]
    result = subprocess.run(run, env=environment, capture_output=True, text=True, check=False)
    assert result.stdout.strip() == "[['T'], ['T'], ['T']]", result.stderr[-2000:]


def test_pieces_of_a_part_are_added_in_order(device: torch.device) -> None:
    """Few tokens' streams have programs of their own, and their collapse adds what one program adds else."""
    form, mixing = TritonHyperConnection(4), make_mixing(4, 72, 2, device)
    pieces = 100 * noise(4, 3, T, 25, seed=1).abs().to(device)
    streams = noise(T, 4, 72, seed=4).to(device)
    apart, together = (form.collapse(streams, raw, mixing) for raw in (pieces, in_order(pieces)[None]))
    assert torch.equal(apart.input, together.input)
    assert torch.equal(apart.comb, together.comb)
    assert torch.equal(apart.post, together.post)
    assert not torch.equal(form.collapse(streams, pieces.flip(0), mixing).comb, apart.comb)
