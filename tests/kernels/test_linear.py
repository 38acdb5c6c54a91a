"""Products with a weight: values against double precision, bits against other numbers of rows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dsparkd.errors import CapabilityError
from dsparkd.kernels import linear
from dsparkd.kernels.linear import CpuLinear, TorchLinear, bind, require_row_invariance
from dsparkd.kernels.weight import dense

# Widths that fill 64, 16 and 8 columns, and odd ends.
SHAPES = [(256, 344), (128, 1024), (1024, 24), (96, 40), (40, 509), (7, 1), (50, 66)]


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("form", [TorchLinear, CpuLinear])
@pytest.mark.parametrize(("inner", "outer"), SHAPES)
@pytest.mark.parametrize("rows", [0, 1, 16, 80])
def test_the_product_is_right(form: type[TorchLinear] | type[CpuLinear], inner: int, outer: int, rows: int) -> None:
    """Every column, also those that fill no vector."""
    x, operand = noise(rows, inner), noise(inner, outer, seed=1)
    got = form(operand)(x)
    assert got.shape == (rows, outer)
    assert torch.allclose(got.double(), x.double() @ operand.double(), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(("inner", "outer"), SHAPES)
def test_a_rows_bits_depend_on_the_row_alone_in_c(inner: int, outer: int) -> None:
    """Any number of rows, down to one."""
    x, kernel = noise(160, inner), CpuLinear(noise(inner, outer, seed=1))
    whole = kernel(x)
    for size in (1, 2, 3, 5, 16, 67):
        assert torch.equal(torch.cat([kernel(part) for part in x.split(size)]), whole), size


@pytest.mark.parametrize(("inner", "outer"), SHAPES[:5])
def test_a_rows_bits_do_not_depend_on_the_number_of_row_tiles_in_the_library(inner: int, outer: int) -> None:
    """Decision 8: rows are padded to sixteen, and from there on more rows change nothing; bmm relies on it too."""
    x, kernel = noise(160, inner), TorchLinear(noise(inner, outer, seed=1))
    whole = kernel(x)
    for size in (16, 32, 48, 80):
        assert torch.equal(torch.cat([kernel(part) for part in x.split(size)]), whole), size


def test_the_form_follows_the_weight() -> None:
    """float32 on the cpu runs in C."""
    assert isinstance(bind(dense(noise(4, 4))), CpuLinear)
    assert isinstance(bind(dense(noise(4, 4)), wide=True), CpuLinear)
    assert isinstance(bind(dense(noise(4, 4).bfloat16())), TorchLinear)


class Uneven(CpuLinear):
    """A build whose single rows are rounded differently."""

    def __call__(self, x: Tensor) -> Tensor:
        product = super().__call__(x)
        return product * (1 + 2**-23) if x.shape[0] == 1 else product


def test_a_build_whose_bits_depend_on_the_batch_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail closed: seen with a compiler that contracted multiply-adds in one copy of a tile and not in another."""
    require_row_invariance()
    monkeypatch.setattr(linear, "CpuLinear", Uneven)
    with pytest.raises(CapabilityError, match=r"rows do not depend on their number \(found at 1\)"):
        require_row_invariance()
