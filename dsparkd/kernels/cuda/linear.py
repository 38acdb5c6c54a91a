"""Product of rows with a weight, dense or packed: Triton form, for cuda.

Each element is one sum over the inputs, in one order whatever the number of rows; so a row's bits depend on that row
alone, which the library's products on cuda do not promise.

Letters: M rows, I inputs, O outputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsparkd.kernels.cuda.products import operand, precision
from dsparkd.kernels.cuda.tile import FORMAT_CODES, Tiles, codes_of, scales_of, weight_tile
from dsparkd.kernels.weight import Format, Weight

GROUP_TILES = 16  # blocks of outputs that are computed for all rows before the next: their weights stay in the cache


class TritonLinear:
    """Form for cuda. Implements LinearKernel; any number of rows. wide: the product is float32.

    groups: G products side by side: x is [M, G * I], and the g-th O / G outputs read the g-th I of its columns.
    choose: tiles by number of rows, format and dtype; they must not change a row's bits.
    """

    def __init__(
        self,
        weight: Weight,
        *,
        wide: bool = False,
        groups: int = 1,
        choose: Callable[[int, Format, torch.dtype], Tiles] | None = None,
    ) -> None:
        self._weight = weight
        self._groups = groups
        self._wide = wide
        self._choose = choose or choose_tiles

    def __call__(self, x: Tensor) -> Tensor:
        """See LinearKernel."""
        weight = self._weight
        M, (O, I) = x.shape[0], weight.shape  # noqa: E741
        out = torch.empty((M, O), dtype=torch.float32 if self._wide else x.dtype, device=x.device)
        if not M:
            return out
        tiles = self._choose(M, weight.format, x.dtype)
        if self._groups > 1:  # a tile's outputs read the same columns
            tiles = replace(tiles, outputs=math.gcd(tiles.outputs, O // self._groups))
        _linear_kernel[(triton.cdiv(M, tiles.rows) * triton.cdiv(O, tiles.outputs),)](
            x,
            codes_of(weight),
            scales_of(weight),
            out,
            M,
            O,
            INPUTS=I,
            GROUPS=self._groups,
            FORMAT=FORMAT_CODES[weight.format],
            OPERAND=operand(x),
            PRECISION=precision(x),
            EVEN=O % tiles.outputs == 0 and I % tiles.inputs == 0,
            GROUP=GROUP_TILES,
            BLOCK_M=tiles.rows,
            BLOCK_N=tiles.outputs,
            BLOCK_K=tiles.inputs,
            num_warps=tiles.warps,
            num_stages=tiles.stages,
        )
        return out


def choose_tiles(num_rows: int, form: Format, dtype: torch.dtype) -> Tiles:
    """Pick tile sizes for a number of rows."""
    if dtype == torch.float32:
        return Tiles(16, 32, 32, 4, 2)
    if num_rows <= 16:
        return Tiles(16, 64, 128, 4, 4)
    if num_rows <= 64:
        return Tiles(32, 64, 128, 4, 4)
    if num_rows <= 512:
        return Tiles(64, 64, 128, 4, 3)
    return Tiles(128, 128, 128 if form is Format.FP8 else 64, 8, 3)


@triton.jit(do_not_specialize=["num_rows"])  # type: ignore[untyped-decorator]
def _linear_kernel(  # type: ignore[no-untyped-def]
    x,
    values,
    scales,
    out,
    num_rows,
    outputs,
    INPUTS: tl.constexpr,
    GROUPS: tl.constexpr,
    FORMAT: tl.constexpr,
    OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
    EVEN: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """out [M, O] = x times the weight, one tile. The weight is the left operand: its many rows fill the matrix unit."""
    program = tl.program_id(0)
    num_tiles = tl.cdiv(num_rows, BLOCK_M)
    num_blocks = tl.cdiv(outputs, BLOCK_N)
    first = program // (GROUP * num_tiles) * GROUP
    size = tl.minimum(GROUP, num_blocks - first)
    rest = program - first * num_tiles
    block = first + rest % size
    column = block * BLOCK_N + tl.arange(0, BLOCK_N)
    row = (rest // size) * BLOCK_M + tl.arange(0, BLOCK_M)
    column_ok = column < outputs
    row_ok = row < num_rows
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    rows = row.to(tl.int64)
    inputs = x + rows[:, None] * (GROUPS * INPUTS) + block * BLOCK_N // (outputs // GROUPS) * INPUTS
    for k in range(0, INPUTS, BLOCK_K):
        index = k + tl.arange(0, BLOCK_K)
        mask = row_ok[:, None] if EVEN else row_ok[:, None] & (index[None, :] < INPUTS)
        part = tl.trans(tl.load(inputs + index[None, :], mask=mask, other=0.0)).to(OPERAND)
        weight = weight_tile(values, scales, column.to(tl.int64), column_ok, k, INPUTS, FORMAT, OPERAND, BLOCK_K, EVEN)
        total = tl.dot(weight, part, total, input_precision=PRECISION)
    places = out + rows[:, None] * outputs + column[None, :]
    tl.store(places, tl.trans(total).to(out.dtype.element_ty), mask=row_ok[:, None] & column_ok[None, :])
