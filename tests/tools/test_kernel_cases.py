"""The kernels gate: on small shapes under the interpreter it holds, and it sees each kind of fault."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tools.gates.kernels import check, parts
from tools.kernel_cases import Case, Scale, all_cases

CPU = torch.device("cpu")


def product(rows: int = 64) -> Case:
    """A case whose kernel is its reference: rows times a vector."""
    x = torch.arange(rows * 8, dtype=torch.float32).reshape(rows, 8)
    weight = torch.arange(8.0)

    def run(part: slice) -> Tensor:
        out = torch.empty(x[part].shape[0])
        out.copy_((x[part] * weight).sum(1))
        return out

    return Case("sum", "64 rows", rows, run, lambda part: x[part] @ weight, 1e-6, 0)


def test_a_kernel_that_is_right_passes() -> None:
    """And nothing is claimed of graphs on the cpu."""
    outcome = check(product(), CPU)
    assert outcome.ok
    assert outcome.captured is None


def test_a_value_that_was_never_written_is_found() -> None:
    """Memory that a kernel leaves alone holds NaN while the gate runs it."""
    case = product()

    def run(part: slice) -> Tensor:
        out = torch.empty(len(range(*part.indices(case.num_rows))))
        out[1:] = case.run(part)[1:]
        return out

    assert not check(replace(case, run=run), CPU).finite


def test_an_error_past_its_bound_is_found() -> None:
    """The bound is relative to the reference's largest magnitude."""
    case = product()
    assert check(replace(case, run=lambda part: case.run(part) * (1 + 9e-7)), CPU).ok
    assert not check(replace(case, run=lambda part: case.run(part) * (1 + 3e-6)), CPU).ok


def test_bits_that_depend_on_the_batch_or_on_the_run_are_found() -> None:
    """A last digit, for a single row or at every second call."""
    case = product()
    calls: list[int] = []

    def uneven(part: slice) -> Tensor:
        return case.run(part) * (1 + 2**-23 * (part.stop - part.start == 1))

    def moody(part: slice) -> Tensor:
        calls.append(1)
        return case.run(part) * (1 + 2**-23 * (len(calls) % 2))

    assert not check(replace(case, run=uneven), CPU).invariant
    assert not check(replace(case, run=moody), CPU).repeats


def test_rows_are_cut_at_whole_tiles() -> None:
    """Some kernels take whole row tiles only."""
    cuts = list(parts(replace(product(), row_tile=16)))
    assert cuts
    assert all(part.start % 16 == 0 and part.stop % 16 == 0 and part.stop <= 64 for part in cuts)


@pytest.mark.skipif("TRITON_INTERPRET" not in os.environ, reason="the GPU runs the kernels")
@pytest.mark.parametrize("family", ["experts", "linear", "feed_forward", "router"])
def test_weight_bound_kernels_hold_under_the_interpreter(family: str) -> None:
    """Values, poisoned outputs, repeats and batch-free bits, for every stored format."""
    outcomes = [check(case, CPU) for case in all_cases(CPU, Scale.SMALL, family)]
    assert outcomes
    assert all(outcome.ok for outcome in outcomes), outcomes


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["experts", "linear", "feed_forward", "router"])
def test_weight_bound_kernels_hold_on_the_device(family: str) -> None:
    """The same small shapes, compiled, with capture into a graph; the gate runs the real geometry."""
    device = torch.device("cuda")
    outcomes = [check(case, device) for case in all_cases(device, Scale.SMALL, family)]
    assert outcomes
    assert all(outcome.ok for outcome in outcomes), outcomes
