"""The drafter's blocks, where they begin and their rows: Triton form, for cuda. One launch where torch takes a dozen.

Letters: B blocks, G rows of a block, W window, S ids that a step has chosen.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from dsparkd.kernels.blocks import Anchors, BlockRows
from dsparkd.kernels.cuda.launch import EARLY, follow
from dsparkd.kernels.tiles import power_of_two


def go_on(known: Anchors, windows: Tensor, ids: Tensor, firsts: Tensor, limits: Tensor) -> Anchors:
    """See kernels/blocks.py."""
    B = known.ids.shape[0]
    assert windows.is_contiguous()
    moved = Anchors(known.ids.new_empty(B), known.positions.new_empty(B))
    if B:
        _go_on[(B,)](
            known.ids,
            known.positions,
            windows,
            ids,
            firsts,
            limits,
            moved.ids,
            moved.positions,
            G=windows.shape[1] - 1,
            num_warps=1,
            launch_pdl=EARLY,
        )
    return moved


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


@triton.jit  # type: ignore[untyped-decorator]
def _go_on(  # type: ignore[no-untyped-def]
    anchor_ids,  # [B]
    positions,  # [B]
    windows,  # [*, 1 + G]
    ids,  # [S]
    firsts,  # [B]
    limits,  # [B]
    moved_ids,  # [B]
    moved_positions,  # [B]
    G: tl.constexpr,
):
    follow()
    b = tl.program_id(0).to(tl.int64)
    anchor, position = tl.load(anchor_ids + b), tl.load(positions + b)
    limit = tl.load(limits + b)
    if limit >= 0:
        own = ids + tl.load(firsts + b)
        count = limit * 0
        for j in tl.static_range(G):
            # Nothing stands behind a draft that does not, so the number of those that do is the next one's place.
            stands = (count == j) & (limit > j)
            chosen = tl.load(own + j, mask=stands, other=-1)
            count += (chosen == tl.load(windows + b * (1 + G) + 1 + j, mask=stands, other=-2)).to(tl.int64)
        anchor = tl.load(own + count)
        position += count + 1
    tl.store(moved_ids + b, anchor)
    tl.store(moved_positions + b, position)


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
