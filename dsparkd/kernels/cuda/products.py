"""How Triton kernels multiply tiles: the type of the operands, the precision of float32 ones, and where sums go."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


def operand(x: Tensor) -> tl.dtype:
    """Type that a kernel casts both operands of a product to, of tensors like x.

    The interpreter, which runs on the cpu, multiplies bfloat16 by its bit patterns; in float32 the products are the
    same.
    """
    return tl.bfloat16 if x.dtype == torch.bfloat16 and x.is_cuda else tl.float32


def precision(x: Tensor) -> str:
    """`input_precision` of those products: three tf32 products come to float32."""
    return "ieee" if x.dtype == torch.bfloat16 else "tf32x3"


@triton.jit
def store_tile(out, tile, row, column, start, height, num_rows, outputs):  # type: ignore[no-untyped-def]
    """A tile [rows, columns] to a row and column of out [num_rows, outputs]; start: of its first column in its group,
    which has `height` of them."""
    rows, columns = row + tl.arange(0, tile.shape[0]), tl.arange(0, tile.shape[1])
    places = out + rows.to(tl.int64)[:, None] * outputs + (column + columns)[None, :]
    mask = (rows < num_rows)[:, None] & (start + columns < height)[None, :]
    tl.store(places, tile.to(out.dtype.element_ty), mask=mask)


@triton.jit  # type: ignore[untyped-decorator]
def add_splits(  # type: ignore[no-untyped-def]
    parts, out, row, column, start, height, num_rows, outputs,
    SPLITS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The sum of a tile's splits, of parts [SPLITS, num_rows, outputs], in their order, to out; see store_tile."""
    rows, columns = row + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    places = parts + rows.to(tl.int64)[:, None] * outputs + (column + columns)[None, :]
    mask = (rows < num_rows)[:, None] & (start + columns < height)[None, :]
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for one in range(SPLITS):
        total += tl.load(places + one * num_rows.to(tl.int64) * outputs, mask=mask, other=0.0, cache_modifier=".cg")
    store_tile(out, total, row, column, start, height, num_rows, outputs)
