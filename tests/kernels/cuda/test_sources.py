"""Sources by position, Triton and torch form."""

from __future__ import annotations

import pytest
import torch

from dsparkd.kernels.cuda.sources import sources
from dsparkd.kernels.sources import Origin
from dsparkd.kernels.sources import sources as torch_sources

POSITIONS = torch.tensor([0, 3, 130, 4095, 1_000_003])
SLOTS = torch.tensor([0, 5, 2, 1, 64])
STARTS = torch.tensor([0, 3, 128, 1 << 40, 1_000_000])
OFFSETS = torch.tensor([4, 0, 9, 0, 31])


@pytest.mark.parametrize(("shift", "span", "ring"), [(-127, 128, 132), (-4, 8, 12), (0, 128, 132), (-20, 20, 26)])
def test_sources_are_those_of_the_torch_form(device: torch.device, shift: int, span: int, ring: int) -> None:
    """Before the first position, in the ring, in the step's own rows; without own rows, too."""
    for starts, offsets in ((STARTS, OFFSETS), (None, None)):
        expected = torch_sources(POSITIONS, shift, span, Origin(ring, SLOTS, starts, offsets))
        own = None if starts is None else starts.to(device), None if offsets is None else offsets.to(device)
        got = sources(POSITIONS.to(device), shift, span, Origin(ring, SLOTS.to(device), *own))
        assert torch.equal(got.cpu(), expected)
    assert sources(POSITIONS[:0].to(device), shift, span, Origin(ring, SLOTS[:0].to(device))).shape == (0, span)
