"""What lies between a feed-forward layer's products: Triton form, for cuda; one launch.

Letters: T tokens, D width, I expert width.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from dsparkd.kernels.cuda.launch import EARLY, follow
from dsparkd.kernels.tiles import count_tiles

COLUMNS = 1024  # of one program


class TritonFeedForward:
    """Form for cuda. Implements FeedForwardKernel."""

    def activate(self, hidden: Tensor, limit: float) -> Tensor:
        """See FeedForwardKernel."""
        T, I = hidden.shape[0], hidden.shape[1] // 2  # noqa: E741
        out = hidden.new_empty((T, I))
        if T:
            _activate[(T, count_tiles(I, COLUMNS))](hidden, out, limit, WIDTH=I, BLOCK=COLUMNS, launch_pdl=EARLY)
        return out


@triton.jit(do_not_specialize=["limit"])  # type: ignore[untyped-decorator]
def _activate(hidden, out, limit, WIDTH: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    follow()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < WIDTH
    gate = tl.load(hidden + row * (2 * WIDTH) + column, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(hidden + row * (2 * WIDTH) + WIDTH + column, mask=mask, other=0.0).to(tl.float32)
    gate = tl.minimum(gate, limit)
    up = tl.minimum(tl.maximum(up, -limit), limit)
    tl.store(out + row * WIDTH + column, (gate / (1.0 + tl.exp(-gate)) * up).to(out.dtype.element_ty), mask=mask)
