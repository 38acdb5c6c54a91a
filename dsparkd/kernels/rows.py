"""Rows that are kept: stores into rings, and the bias of a token's place in its window.

Letters: T tokens, K stored rows, w row width.
"""

from __future__ import annotations

from torch import Tensor


def store(ring: Tensor, dst: Tensor, rows: Tensor, src: Tensor) -> None:
    """ring[dst] = rows[src]: ring [*, w], rows [T, w], both contiguous and of one dtype; dst, src [K] int64, dst
    distinct."""
    if ring.is_cuda:
        from dsparkd.kernels.cuda import rows as triton_rows  # a cpu start imports no triton

        triton_rows.store(ring, dst, rows, src)
        return
    ring.index_copy_(0, dst, rows.index_select(0, src))


def add_by_phase(rows: Tensor, bias: Tensor, positions: Tensor) -> None:
    """Add bias[position mod period] to the second half of each row, in place.

    rows [T, w] float32, contiguous; bias [period, w / 2] float32; positions [T] int64.
    """
    if rows.is_cuda:
        from dsparkd.kernels.cuda import rows as triton_rows  # a cpu start imports no triton

        triton_rows.add_by_phase(rows, bias, positions)
        return
    half = rows[:, rows.shape[1] // 2 :]
    half += bias.index_select(0, positions % bias.shape[0])
