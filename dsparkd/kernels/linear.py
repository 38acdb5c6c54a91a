"""Product of rows with a weight: the library's, a C form for the cpu in float32, a Triton form for cuda.

The C form computes each element as one chain of multiply-adds, so a row's bits depend on nothing but the row, and at
the widths and few rows of a decode step it is faster than the library. The Triton form reads packed weights as they are
stored and adds in one order, whatever the number of rows; the library's products on cuda do not.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from dsparkd.errors import CapabilityError
from dsparkd.kernels._cpu import lib
from dsparkd.kernels.panels import in_panels
from dsparkd.kernels.pointers import floats
from dsparkd.kernels.weight import Weight


class LinearKernel(Protocol):
    """What `bind` returns."""

    def __call__(self, x: Tensor) -> Tensor:
        """x [M, I] contiguous -> [M, O]; M is a multiple of ROW_TILE.

        x is in the weight's dtype, bfloat16 for a packed one; so is the product, unless float32 was asked for.
        """


def bind(weight: Weight, *, wide: bool = False) -> LinearKernel:
    """Pick the form for a weight [O, I], once. wide: the product is float32, whatever the weight's dtype."""
    if weight.values.device.type == "cuda":
        from dsparkd.kernels.cuda.linear import TritonLinear  # a start on the cpu loads no compiler

        product = TritonLinear(weight, wide=wide)
        product.compile()
        return product
    # As products of few rows read it fastest.
    operand = weight.values.t().contiguous()
    if operand.dtype == torch.float32:
        return CpuLinear(operand)
    assert not wide, "on the cpu, weights of products in float32 are float32"
    return TorchLinear(operand)


class TorchLinear:
    """The reference, and the form for bfloat16 on the cpu; operand [I, O], contiguous."""

    def __init__(self, operand: Tensor) -> None:
        self._operand = operand

    def __call__(self, x: Tensor) -> Tensor:
        """See LinearKernel."""
        return torch.mm(x, self._operand)


class CpuLinear:
    """One C call; float32, one thread; operand [I, O]."""

    def __init__(self, operand: Tensor) -> None:
        self._panels = in_panels(operand)  # kept: it is the memory behind the pointer
        self._weight = floats(self._panels)
        self._inner, self._outer = operand.shape

    def __call__(self, x: Tensor) -> Tensor:
        """See LinearKernel."""
        num_rows, inner = x.shape
        assert inner == self._inner
        out = x.new_empty((num_rows, self._outer))
        lib.dsparkd_multiply(floats(x), self._weight, num_rows, inner, self._outer, floats(out))
        return out


def require_row_invariance() -> None:
    """Raise CapabilityError unless this build of the C form gives a row the same bits beside any other rows.

    The tiles of four, two and one row are one source, but a compiler may contract multiply-adds in one and not in
    another; the server would then answer differently under load, so the proof stands before the first request.
    """
    noise = torch.Generator().manual_seed(0)
    kernel = CpuLinear(torch.randn((67, 64 + 16 + 5), generator=noise))  # every panel: wide, narrow, filled up
    x = torch.randn((11, 67), generator=noise)
    whole = kernel(x)
    for size in (1, 2, 3, 4, 7):
        if not torch.equal(torch.cat([kernel(x[first : first + size]) for first in range(0, len(x), size)]), whole):
            raise CapabilityError(
                feature='engine.device = "cpu"',
                missing=f"a build of dsparkd/kernels/cpu.c whose rows do not depend on their number (found at {size})",
                remedy="rebuild it with another gcc, or with -ffp-contract=off in dsparkd/kernels/build.py",
            )
