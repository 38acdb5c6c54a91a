"""Rows that are kept, one launch each: Triton form, for cuda.

Letters: T tokens, K stored rows, w row width.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from dsparkd.kernels.cuda.launch import EARLY, follow

BLOCK = 1024  # columns of one program


def store(ring: Tensor, dst: Tensor, rows: Tensor, src: Tensor) -> None:
    """See kernels/rows.py; what goes to -1 is padding of a captured shape, and is not stored."""
    width = rows.shape[1]
    assert ring.is_contiguous()
    assert rows.is_contiguous()
    if src.shape[0]:
        block = min(BLOCK, triton.next_power_of_2(width))
        _store[(src.shape[0], triton.cdiv(width, block))](
            ring, dst, rows, src, WIDTH=width, BLOCK=block, launch_pdl=EARLY
        )


def add_by_phase(rows: Tensor, bias: Tensor, positions: Tensor) -> None:
    """See kernels/rows.py."""
    T, width = rows.shape
    period, half = bias.shape
    assert rows.is_contiguous()
    assert width == 2 * half
    block = min(BLOCK, triton.next_power_of_2(half))
    _add_by_phase[(T, triton.cdiv(half, block))](
        rows, bias, positions, PERIOD=period, HALF=half, BLOCK=block, launch_pdl=EARLY
    )


@triton.jit  # type: ignore[untyped-decorator]
def _store(ring, dst, rows, src, WIDTH: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    follow()
    k = tl.program_id(0)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    place = tl.load(dst + k)
    if place >= 0:
        row = tl.load(rows + tl.load(src + k) * WIDTH + c, mask=c < WIDTH)
        tl.store(ring + place * WIDTH + c, row, mask=c < WIDTH)


@triton.jit  # type: ignore[untyped-decorator]
def _add_by_phase(rows, bias, positions, PERIOD: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    follow()
    t = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    own = rows + (2 * t + 1) * HALF + c
    phase = tl.load(positions + t) % PERIOD
    total = tl.load(own, mask=c < HALF) + tl.load(bias + phase * HALF + c, mask=c < HALF)
    tl.store(own, total, mask=c < HALF)
