"""Rows that are kept, one launch each: Triton form, for cuda.

A place outside of its ring is no padding but a fault of the plan: the device stops there, before anything is written.

Letters: T tokens, K stored rows, w row width.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from dsparkd.kernels.cuda.launch import EARLY, follow
from dsparkd.kernels.tiles import count_tiles, power_of_two

BLOCK = 1024  # columns of one program


def store(ring: Tensor, dst: Tensor, rows: Tensor, src: Tensor) -> None:
    """See kernels/rows.py; what goes to -1 is padding of a captured shape, and is not stored."""
    width = rows.shape[1]
    assert ring.is_contiguous()
    assert rows.is_contiguous()
    if src.shape[0]:
        block = min(BLOCK, power_of_two(width))
        _store[(src.shape[0], count_tiles(width, block))](
            ring,
            dst,
            rows,
            src,
            ring.shape[0],
            rows.shape[0],
            WIDTH=width,
            BLOCK=block,
            launch_pdl=EARLY,
            sanitize_overflow=False,
        )


@triton.jit(debug=True, do_not_specialize=["num_kept", "num_rows"])  # type: ignore[untyped-decorator]
def _store(ring, dst, rows, src, num_kept, num_rows, WIDTH: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    follow()
    k = tl.program_id(0)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    place = tl.load(dst + k)
    source = tl.load(src + k)
    fits = (place < num_kept) & (source >= 0) & (source < num_rows)
    tl.device_assert((place < 0) | fits, "rows.store: a row is kept behind its ring, or is none of the step's")
    if (place >= 0) & fits:
        row = tl.load(rows + source * WIDTH + c, mask=c < WIDTH)
        tl.store(ring + place * WIDTH + c, row, mask=c < WIDTH)
