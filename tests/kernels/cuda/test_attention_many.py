"""The Gluon kernel for many tokens of wide heads against the Triton ones; it runs on a device alone."""

from __future__ import annotations

import pytest
import torch

from dsparkd.kernels.attention import TorchAttention
from dsparkd.kernels.cuda import attention, attention_many
from dsparkd.kernels.cuda.attention import TritonAttention
from dsparkd.kernels.cuda.attention_tile import Tile, keys_of
from dsparkd.kernels.packed import pack
from tests.kernels.cuda.attention_case import COUNTS, Case, N
from tests.kernels.cuda.values import close
from tools.gates.kernels import poisoned_memory


@pytest.mark.gpu
@pytest.mark.parametrize(("heads", "width"), [(64, 512), (70, 256), (40, 512)])
@pytest.mark.parametrize("counts", [COUNTS, [*COUNTS[:-1], 70], [0] * N])
@pytest.mark.parametrize("columns", [None, 0])
def test_it_has_the_bits_of_few_tokens(
    heads: int, width: int, counts: list[int], columns: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole and half blocks of heads, tokens that see nothing, contexts without entries."""
    device, case = torch.device("cuda"), Case(heads, width, torch.bfloat16, counts)
    if columns is None and not case.columns:
        pytest.skip("there are no entries")
    called: list[int] = []

    def noted(*arguments: object) -> None:
        called.append(1)
        attention_many.attend_many(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(attention, "attend_many", noted)
    with poisoned_memory():
        few = case.run(TritonAttention(), device, columns=columns)
        assert not called
        monkeypatch.setattr(attention, "FEW_TOKENS", 0)
        many = case.run(TritonAttention(), device, columns=columns)
    assert called
    assert torch.equal(few, many)
    seen = slice(0, N - 1)
    assert close(many[seen], case.run(TorchAttention(), torch.device("cpu"), seen, columns=columns))


def test_it_serves_wide_heads_over_plain_keys_where_kernels_are_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Interpreted, packed, narrow or in float32: the general kernel."""

    def serves(heads: int, width: int, dtype: torch.dtype, *, packed: bool = False) -> bool:
        case = Case(heads, width, dtype)
        if packed:
            case.ring = pack(case.ring, 64)
        window, entries = case.seen(torch.device("cpu"))
        tile = Tile(heads, width, dtype, packed)
        return attention_many.is_wide(case.queries, keys_of(window, entries, width, 64), tile)

    monkeypatch.setattr(attention_many, "IS_COMPILED", True)
    assert serves(64, 512, torch.bfloat16)
    assert serves(64, 256, torch.bfloat16)
    assert not serves(64, 512, torch.bfloat16, packed=True)
    assert not serves(64, 512, torch.float32)
    assert not serves(8, 512, torch.bfloat16)
    assert not serves(64, 128, torch.bfloat16)
    monkeypatch.setattr(attention_many, "IS_COMPILED", False)
    assert not serves(64, 512, torch.bfloat16)
