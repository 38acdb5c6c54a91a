"""Attention of few tokens by several programs each, against one program each."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch

from dsparkd.kernels.cuda import attention, attention_few
from dsparkd.kernels.cuda.attention import TritonAttention
from dsparkd.kernels.cuda.attention_tile import Tile, is_wide
from tests.kernels.cuda.attention_case import COUNTS, LONG, PART, Case, N, columns_for
from tests.kernels.cuda.values import DTYPES
from tools.gates.kernels import poisoned_memory

CPU = torch.device("cpu")


def bits_of_both_ways(case: Case, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> tuple[torch.Tensor, ...]:
    """By the kernels for few tokens, and by the general one. Interpreted, narrow heads count as wide ones."""
    if device.type == "cpu":
        monkeypatch.setattr(attention, "is_wide", lambda *_: True)
    called: list[int] = []

    def noted(*arguments: object) -> None:
        called.append(1)
        attention_few.attend_few(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(attention, "attend_few", noted)
    with poisoned_memory():
        few = case.run(TritonAttention(), device)
        assert len(called) == 1
        monkeypatch.setattr(attention, "is_wide", lambda *_: False)
        general = case.run(TritonAttention(), device)
        assert len(called) == 1
    assert few.isfinite().all()
    return few, general


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "width"), [(8, 64), (5, 32), (70, 128)])
def test_few_tokens_have_the_bits_of_many(
    dtype: torch.dtype, heads: int, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fewer heads than a block, more than one block of them, windows that begin in a later tile."""
    few, general = bits_of_both_ways(Case(heads, width, dtype), CPU, monkeypatch)
    assert torch.equal(few, general)


@pytest.mark.gpu
@pytest.mark.parametrize(("heads", "width"), [(64, 512), (70, 256), (40, 512)])
@pytest.mark.parametrize("fewer", [0, N])
def test_few_tokens_have_the_bits_of_many_on_a_device(
    heads: int, width: int, fewer: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wide heads, whose products are a warp group's in each program; in both blocks of columns."""
    monkeypatch.setattr(attention_few, "FEWER_TOKENS", fewer)
    few, general = bits_of_both_ways(Case(heads, width, torch.bfloat16), torch.device("cuda"), monkeypatch)
    assert torch.equal(few, general)


@pytest.mark.gpu
def test_a_short_context_beside_long_ones_has_the_bits_of_few_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Among tokens of more than one part the kernel of parts serves it; alone, programs of a few keys and columns."""
    monkeypatch.setattr(attention, "PART", PART)
    case, device = Case(64, 512, torch.bfloat16, LONG), torch.device("cuda")
    whole = case.run(TritonAttention(), device)
    short = [t for t, count in enumerate(LONG) if count <= PART]
    for t in short:
        alone = case.run(TritonAttention(), device, slice(t, t + 1), columns=columns_for(LONG[t]))
        assert torch.equal(alone, whole[t : t + 1]), LONG[t]
    assert len(short) < N


@pytest.mark.parametrize(("keys", "columns"), [(16, 64), (32, 16)])
def test_how_the_work_is_cut_changes_no_bit(keys: int, columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits and columns do not depend on which others a program has."""
    monkeypatch.setattr(attention, "is_wide", lambda *_: True)
    case = Case(8, 64, torch.bfloat16)
    expected = case.run(TritonAttention(), CPU)
    monkeypatch.setattr(attention_few, "KEYS", keys)
    monkeypatch.setattr(attention_few, "COLUMNS", columns)
    assert torch.equal(case.run(TritonAttention(), CPU), expected)


def test_a_token_whose_window_is_hidden_still_sees_its_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first tile is the entries' own."""
    case = Case(8, 64, torch.bfloat16, [*COUNTS[:-1], 70])
    few, general = bits_of_both_ways(case, CPU, monkeypatch)
    assert few[-1].any()
    assert torch.equal(few, general)


@pytest.mark.parametrize("module", ["attention", "attention_few", "attention_many", "attention_tile"])
def test_no_sum_of_two_products_is_left_to_the_compiler(module: str) -> None:
    """It fuses one of the two, and of the same line another one in another kernel: the last bits then differ."""
    source = Path(attention_few.__file__).with_name(f"{module}.py").read_text(encoding="utf-8")
    kernels = [
        node
        for node in ast.parse(source).body
        if isinstance(node, ast.FunctionDef) and any("jit" in ast.unparse(each) for each in node.decorator_list)
    ]
    assert kernels
    for node in (node for kernel in kernels for node in ast.walk(kernel)):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub):
            sides = [isinstance(side, ast.BinOp) and isinstance(side.op, ast.Mult) for side in (node.left, node.right)]
            assert not all(sides), ast.unparse(node)


def test_heads_are_wide_where_every_way_has_the_same_bits() -> None:
    """Narrow heads and float32 have other products in a program of few columns; packed keys are not measured."""

    def wide(heads: int, width: int, dtype: torch.dtype, *, packed: bool = False) -> bool:
        return is_wide(dtype, width, Tile(heads, width, dtype, packed), packed)

    assert wide(64, 512, torch.bfloat16)
    assert wide(64, 256, torch.bfloat16)
    assert not wide(64, 512, torch.bfloat16, packed=True)
    assert not wide(64, 512, torch.float32)
    assert not wide(8, 512, torch.bfloat16)
    assert not wide(64, 128, torch.bfloat16)
