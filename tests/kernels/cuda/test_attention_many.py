"""The Gluon kernel for many tokens of wide heads against the Triton ones; it runs on a device alone."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from dsparkd.kernels.attention import TorchAttention
from dsparkd.kernels.cuda import attention, attention_many
from dsparkd.kernels.cuda.attention import TritonAttention
from tests.kernels.cuda.attention_case import COUNTS, Case, N
from tests.kernels.cuda.values import close
from tools.gates.kernels import poisoned_memory


@pytest.mark.gpu
@pytest.mark.parametrize(("heads", "width"), [(64, 512), (70, 256), (40, 512)])
@pytest.mark.parametrize(("counts", "columns"), [(COUNTS, None), ([*COUNTS[:-1], 70], None), (COUNTS, 0)])
@pytest.mark.parametrize("num_programs", [2, 2 * N])
def test_it_has_the_bits_of_few_tokens(
    heads: int,
    width: int,
    counts: list[int],
    columns: int | None,
    num_programs: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And those of the general kernel: whole and half blocks of heads, tokens that see nothing, contexts without
    entries; several tokens of a program, and one."""
    device, case = torch.device("cuda"), Case(heads, width, torch.bfloat16, counts)
    called: list[int] = []

    def noted(*arguments: object) -> None:
        called.append(1)
        attention_many.attend_many(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(attention, "attend_many", noted)
    with poisoned_memory():
        few = case.run(TritonAttention(), device, columns=columns)
        assert not called
        monkeypatch.setattr(attention, "FEW_TOKENS", 0)
        form = TritonAttention()
        form._processors = num_programs
        many = case.run(form, device, columns=columns)
        assert len(called) == 1
        monkeypatch.setattr(attention, "is_wide", lambda *_: False)
        general = case.run(TritonAttention(), device, columns=columns)
        assert len(called) == 1
    assert torch.equal(few, many)
    assert torch.equal(general, many)
    seen = slice(0, N - 1)
    assert close(many[seen], case.run(TorchAttention(), torch.device("cpu"), seen, columns=columns))


COMPILE = """
from triton.backends.compiler import GPUTarget
from triton.compiler import compile
from triton.experimental.gluon._runtime import GluonASTSource
from dsparkd.kernels.cuda.attention_many import _attend_wide as kernel

values = {"H": 64, "D": 512, "R": 64, "BLOCK_H": 64, "BLOCK_K": 64, "SUMS": 16}
types = dict.fromkeys(("queries", "ring", "chunk", "entries", "output"), "*bf16")
types |= dict.fromkeys(("sources", "first", "slots", "rows", "counts"), "*i64")
types |= dict.fromkeys(("sink", "cos", "sin"), "*fp32")
types |= dict.fromkeys(("n", "W", "slot_stride", "E", "by_rows"), "i32")
names = kernel.arg_names
aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if types.get(name, "i32") != "i32"}
constants = {(names.index(name),): value for name, value in values.items()}
source = GluonASTSource(kernel, {name: types.get(name, "constexpr") for name in names}, constants, aligned)
made = compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 8})
code = made.asm["ptx"]
print(made.metadata.shared, code.count("cp.async.cg.shared.global"), code.count("wgmma.mma_async"))
"""


def test_it_compiles_without_a_device() -> None:
    """Gluon is not interpreted, so names that a new Triton drops would be missed only where there is a device. Copies
    are of 16 bytes, the memory suffices, and no product is computed twice."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = [sys.executable, "-W", "ignore", "-c", COMPILE]
    result = subprocess.run(run, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-2000:]
    shared, copies, products = map(int, result.stdout.split())
    assert shared <= 227 << 10
    assert copies == 4 * 16  # queries and the first tile, the next tile, the next queries
    assert products == 512 // 16 + 2 * 64 // 16  # logits; numerator and denominator
