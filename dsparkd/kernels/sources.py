"""Sources of rows by position (model/inputs.py), made on the device: torch form, Triton form for cuda.

Letters: n rows, span positions of each.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Origin:
    """Where rows of n sequences lie: slots [n] in a ring of so many rows, and with starts, offsets [n] the step's own
    from position `start` on, of which token `offset` is the first. int64."""

    ring: int
    slots: Tensor
    starts: Tensor | None = None
    offsets: Tensor | None = None


def sources(positions: Tensor, shift: int, span: int, origin: Origin) -> Tensor:
    """Sources [n, span] int64 of the positions from positions [n] + shift on."""
    if positions.is_cuda:
        from dsparkd.kernels.cuda.sources import sources as triton_sources  # a cpu start imports no triton

        return triton_sources(positions, shift, span, origin)
    wanted = positions[:, None] + torch.arange(shift, shift + span, device=positions.device)
    slots = origin.slots[:, None]
    in_ring = torch.where(wanted < 0, 0, slots * origin.ring + wanted.remainder(origin.ring))
    if origin.starts is None or origin.offsets is None:
        return in_ring
    starts = origin.starts[:, None]
    return torch.where(wanted >= starts, starts - origin.offsets[:, None] - wanted - 1, in_ring)
