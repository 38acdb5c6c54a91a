"""Attention of few tokens by several programs each, against one program each."""

from __future__ import annotations

import pytest
import torch

from dsparkd.kernels.cuda import attention, attention_few
from dsparkd.kernels.cuda.attention import TritonAttention
from dsparkd.kernels.packed import pack, round_
from tests.kernels.cuda.attention_case import COUNTS, Case
from tests.kernels.cuda.values import DTYPES
from tools.gates.kernels import poisoned_memory


def bits_of_both_ways(case: Case, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> tuple[torch.Tensor, ...]:
    with poisoned_memory():
        few = case.run(TritonAttention(), device)
        monkeypatch.setattr(attention, "FEW_TOKENS", 0)
        return few, case.run(TritonAttention(), device)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "width"), [(8, 64), (5, 72), (70, 128)])
def test_few_tokens_have_the_bits_of_many(
    device: torch.device, dtype: torch.dtype, heads: int, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Columns that fill no block, more than one block of heads, windows that begin in a later tile."""
    few, many = bits_of_both_ways(Case(heads, width, dtype), device, monkeypatch)
    assert few.isfinite().all()
    assert torch.equal(few, many)


def test_few_tokens_over_packed_keys_have_the_bits_of_many(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are unpacked once and laid down in the queries' dtype, which holds every packed value."""
    case = Case(8, 128, torch.bfloat16)
    round_(case.chunk, 8)
    case.ring, case.entries = pack(case.ring, 8), pack(case.entries, 8)
    few, many = bits_of_both_ways(case, device, monkeypatch)
    assert few.isfinite().all()
    assert torch.equal(few, many)


@pytest.mark.parametrize(("keys", "columns"), [(16, 64), (32, 16)])
def test_how_the_work_is_cut_changes_no_bit(
    device: torch.device, keys: int, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logits and columns do not depend on which others a program has."""
    case = Case(8, 64, torch.bfloat16)
    expected = case.run(TritonAttention(), device)
    monkeypatch.setattr(attention_few, "KEYS", keys)
    monkeypatch.setattr(attention_few, "COLUMNS", columns)
    assert torch.equal(case.run(TritonAttention(), device), expected)


def test_a_context_that_begins_behind_the_window_has_keys_of_entries_alone(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A token of which the window hides all still sees its entries."""
    case = Case(8, 64, torch.bfloat16, [*COUNTS[:-1], 70])
    few, many = bits_of_both_ways(case, device, monkeypatch)
    assert few[-1].any()
    assert torch.equal(few, many)
