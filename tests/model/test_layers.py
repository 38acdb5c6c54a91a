"""Shared layers: values against double precision, bits against other batch sizes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from dsparkd.kernels.rotary import rotate_
from dsparkd.kernels.router import sqrt_softplus
from dsparkd.model.config import YarnScaling
from dsparkd.model.layers import (
    Linear,
    RotaryEmbedding,
    WideLinear,
    inverse_rms,
    ordered_sum,
    rms_norm,
    rotary_frequencies,
    sigmoid,
)

CPU = torch.device("cpu")
FLASH_YARN = YarnScaling(factor=16, original_max_position_embeddings=65536, beta_fast=32, beta_slow=1)


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_yarn_leaves_fast_pairs_and_divides_slow_ones() -> None:
    """Flash: pairs 0..15 untouched, 25..31 divided by 16, a ramp between; magnitudes are not scaled."""
    plain = rotary_frequencies(64, 160000, None)
    scaled = rotary_frequencies(64, 160000, FLASH_YARN)
    assert torch.equal(scaled[:16], plain[:16])
    assert torch.allclose(scaled[25:], plain[25:] / 16)
    ratio = scaled[16:25] / plain[16:25]
    assert ((ratio > 1 / 16) & (ratio < 1)).all()
    assert (ratio.diff() < 0).all()


def test_rotation_turns_interleaved_pairs_by_position_times_frequency() -> None:
    """Complex multiplication of pairs (2i, 2i+1) of the last dims; the first dims stay."""
    x = noise(5, 3, 24)
    positions = torch.tensor([0, 1, 7, 1000, 16000])
    rotary = RotaryEmbedding(16, 10000, None, CPU)
    got = rotate_(x.clone(), rotary.at(positions))

    angles = positions.double()[:, None] * rotary_frequencies(16, 10000, None).double()
    turned = torch.view_as_complex(x[..., 8:].double().unflatten(-1, (8, 2))) * torch.polar(
        torch.ones_like(angles), angles
    ).unsqueeze(1)
    assert torch.equal(got[..., :8], x[..., :8])
    # Angles are float32 products, as trained: at 16,000 they are off by up to 1e-3.
    assert torch.allclose(got[..., 8:].double(), torch.view_as_real(turned).flatten(-2), atol=4e-3)
    assert torch.allclose(got[:3, :, 8:].double(), torch.view_as_real(turned)[:3].flatten(-2), atol=1e-5)


def test_the_inverse_rotation_undoes_it() -> None:
    """Values carry the key's rotation; the output removes the query's."""
    x = noise(4, 2, 16)
    rotation = RotaryEmbedding(16, 160000, FLASH_YARN, CPU).at(torch.tensor([0, 3, 500, 9000]))
    assert torch.allclose(rotate_(rotate_(x.clone(), rotation), rotation.inverse()), x, atol=1e-5)


@pytest.mark.parametrize(
    ("ours", "reference"),
    [
        (sigmoid, torch.sigmoid),
        (sqrt_softplus, lambda x: torch.nn.functional.softplus(x).sqrt()),
    ],
)
def test_activations_have_the_right_values(
    ours: Callable[[Tensor], Tensor], reference: Callable[[Tensor], Tensor]
) -> None:
    """Also far out, where a spelling with exp may overflow."""
    x = torch.cat((torch.linspace(-30, 30, 1001), torch.tensor([-90.0, 90.0, 0.0])))
    assert torch.allclose(ours(x).double(), reference(x.double()), rtol=2e-6, atol=1e-7)


def test_rms_norm_multiplies_the_weight_before_the_cast() -> None:
    """bfloat16 in and out, float32 between: one rounding."""
    x, weight = noise(16, 64).bfloat16(), 1 + 0.1 * noise(64, seed=1)
    exact = x.double() * (x.double().square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight.double()
    got = rms_norm(x, weight, 1e-6)
    assert got.dtype == torch.bfloat16
    assert (got.double() - exact).abs().max() <= exact.abs().max() / 256
    assert (got == exact.bfloat16()).float().mean() > 0.99


@pytest.mark.parametrize("count", [1, 2, 3, 7, 8, 24, 128])
def test_ordered_sum_is_the_sum(count: int) -> None:
    """Also where halving leaves an odd one."""
    x = noise(5, count, 6)
    assert torch.allclose(ordered_sum(x, 1).double(), x.double().sum(1), atol=1e-5)


BATCH_FREE: list[Callable[[Tensor], Tensor]] = [
    sigmoid,
    sqrt_softplus,
    lambda x: inverse_rms(x, 1e-6),
    lambda x: rms_norm(x, torch.ones(x.shape[1]), 1e-6),
    lambda x: ordered_sum(x[:, :, None] * x[:, None, :5], 1),
    lambda x: rotate_(x.clone()[:, None], RotaryEmbedding(8, 10000, None, CPU).at(torch.full((len(x),), 321)))[:, 0],
]


@pytest.mark.parametrize("function", BATCH_FREE)
@pytest.mark.parametrize("width", [11, 64, 200])
def test_a_rows_bits_do_not_depend_on_its_batch(function: Callable[[Tensor], Tensor], width: int) -> None:
    """The path invariance of the whole rests on this for every function used."""
    x = 3 * noise(48, width)
    whole = function(x)
    for size in (1, 5, 16, 31):
        assert torch.equal(torch.cat([function(part) for part in x.split(size)]), whole)


def test_a_linear_stacks_its_weights() -> None:
    """One product gives the outputs of several weights side by side."""
    first, second, x = noise(24, 40), noise(8, 40, seed=1), noise(16, 40, seed=2)
    assert torch.allclose(Linear(first, second)(x), torch.cat((x @ first.t(), x @ second.t()), 1), atol=1e-5)


def test_a_wide_linear_multiplies_in_float32_what_the_model_holds_in_bfloat16() -> None:
    """The product of a bfloat16 row is that of the same row in float32, to the bit."""
    weight, x = noise(24, 40), noise(16, 40, seed=2).bfloat16()
    got = WideLinear(weight)(x)
    assert got.dtype == torch.float32
    assert torch.equal(got, Linear(weight)(x.float()))
