"""Rows that are kept: stores into rings.

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
