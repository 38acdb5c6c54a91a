"""Streams of tapped layers, averaged for the drafter: Triton form, for cuda. One launch where torch takes six.

Letters: T tokens, S streams, D width, F width of all taps.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from dsparkd.kernels.cuda.launch import EARLY, follow
from dsparkd.kernels.tiles import count_tiles, power_of_two

BLOCK = 1024  # columns of one program


def average(streams: Tensor, features: Tensor) -> None:
    """streams [T, S, D], contiguous -> their mean into features [T, D], rows apart, of the same dtype: float32 inside,
    one cast."""
    T, S, D = streams.shape
    assert streams.is_contiguous()
    assert features.stride(1) == 1
    block = min(BLOCK, power_of_two(D))
    if T:
        _average[(T, count_tiles(D, block))](
            streams, features, features.stride(0), S=S, D=D, BLOCK=block, num_warps=4, launch_pdl=EARLY
        )


@triton.jit  # type: ignore[untyped-decorator]
def _average(streams, features, stride, S: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    follow()
    t = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for source in tl.static_range(S):
        total += tl.load(streams + (t * S + source) * D + c, mask=c < D, other=0.0).to(tl.float32)
    tl.store(features + t * stride + c, (total / S).to(features.dtype.element_ty), mask=c < D)
