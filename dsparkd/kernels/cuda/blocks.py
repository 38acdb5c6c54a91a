"""The drafter's blocks laid out as rows: Triton form, for cuda. One launch where torch takes a dozen.

Letters: B blocks, G rows of a block, W window.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from dsparkd.kernels.blocks import BlockRows
from dsparkd.kernels.cuda.launch import EARLY, follow
from dsparkd.kernels.tiles import power_of_two


def lay_out(
    anchor_ids: Tensor, positions: Tensor, sources: Tensor, first: Tensor, gamma: int, noise_id: int
) -> BlockRows:
    """See kernels/blocks.py; without padding."""
    B, W = sources.shape
    assert all(part.is_contiguous() for part in (anchor_ids, positions, sources, first))
    count, width = B * gamma, W + gamma
    rows = BlockRows(
        anchor_ids.new_empty(count),
        positions.new_empty(count),
        sources.new_empty((count, width)),
        first.new_empty(count),
    )
    if B:
        _lay_out[(B, gamma)](
            anchor_ids,
            positions,
            sources,
            first,
            rows.input_ids,
            rows.positions,
            rows.sources,
            rows.first,
            noise_id,
            W=W,
            G=gamma,
            BLOCK=power_of_two(width),
            num_warps=1,
            launch_pdl=EARLY,
        )
    return rows


@triton.jit(do_not_specialize=["noise_id"])  # type: ignore[untyped-decorator]
def _lay_out(  # type: ignore[no-untyped-def]
    anchor_ids,  # [B]
    positions,  # [B]
    sources,  # [B, W]
    first,  # [B]
    row_ids,  # [B * G]
    row_positions,  # [B * G]
    row_sources,  # [B * G, W + G]
    row_first,  # [B * G]
    noise_id,
    W: tl.constexpr,
    G: tl.constexpr,
    BLOCK: tl.constexpr,
):
    follow()
    b, g = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = b * G + g
    tl.store(row_ids + row, tl.where(g == 0, tl.load(anchor_ids + b), noise_id))
    tl.store(row_positions + row, tl.load(positions + b) + g)
    tl.store(row_first + row, tl.load(first + b))
    k = tl.arange(0, BLOCK)
    kept = tl.load(sources + b * W + k, mask=k < W, other=0)
    own = -1 - (b * G + k - W)
    tl.store(row_sources + row * (W + G) + k, tl.where(k < W, kept, own), mask=k < W + G)
