"""Sources of rows by position: Triton form, for cuda. One launch where torch takes a dozen.

Letters: n rows, span positions of each.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsparkd.kernels.cuda.launch import EARLY, follow
from dsparkd.kernels.sources import Origin
from dsparkd.kernels.tiles import power_of_two


def sources(positions: Tensor, shift: int, span: int, origin: Origin) -> Tensor:
    """See kernels/sources.py."""
    assert positions.is_contiguous()
    assert origin.slots.is_contiguous()
    n = positions.shape[0]
    out = torch.empty((n, span), dtype=torch.int64, device=positions.device)
    has_own = origin.starts is not None
    if n:
        _sources[(n,)](
            positions,
            origin.slots,
            origin.slots if origin.starts is None else origin.starts,
            origin.slots if origin.offsets is None else origin.offsets,
            out,
            shift,
            RING=origin.ring,
            SPAN=span,
            HAS_OWN=has_own,
            BLOCK=power_of_two(span),
            num_warps=1,
            launch_pdl=EARLY,
        )
    return out


@triton.jit(do_not_specialize=["shift"])  # type: ignore[untyped-decorator]
def _sources(  # type: ignore[no-untyped-def]
    positions,
    slots,
    starts,
    offsets,
    out,
    shift,
    RING: tl.constexpr,
    SPAN: tl.constexpr,
    HAS_OWN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    follow()
    n = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK)
    wanted = tl.load(positions + n) + shift + k
    # Below 0 the remainder would be negative, and is not used.
    source = tl.where(wanted < 0, 0, tl.load(slots + n) * RING + tl.maximum(wanted, 0) % RING)
    if HAS_OWN:
        start = tl.load(starts + n)
        source = tl.where(wanted >= start, start - tl.load(offsets + n) - wanted - 1, source)
    tl.store(out + n * SPAN + k, source, mask=k < SPAN)
