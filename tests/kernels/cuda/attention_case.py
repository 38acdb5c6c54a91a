"""Random queries and keys of a few tokens, for the tests of attention's kernels."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dsparkd.kernels.attention import EntryKeys, TorchAttention, WindowKeys
from dsparkd.kernels.cuda.attention import TritonAttention
from dsparkd.kernels.rotary import Rotation
from tests.kernels.cuda.values import noise

W, RING, POOL = 80, 200, 300  # window, rows of ring and pages
COUNTS = [0, 1, 64, 65, 130, 192, 0]
PART = 128  # entries of a part in these tests
LONG = [0, PART, PART + 1, 2 * PART, 1, 2 * PART + 70, 0]  # up to three parts, among tokens of one
FIRST = [79, 5, 0, 65, 0, 0, 80]  # the last token sees nothing: padding
N = len(COUNTS)


def rotation_of(tokens: int, rotary: int) -> Rotation:
    angles = noise(tokens, 1, rotary // 2, seed=7).repeat_interleave(2, 2)
    return Rotation(angles.cos(), angles.sin() * torch.tensor([-1.0, 1.0] * (rotary // 2)))


def columns_for(count: int) -> int:
    """Slots are laid out in whole tiles."""
    return -(-count // 64) * 64


class Case:
    """Random queries and keys of a few tokens; everything on the cpu until it is run."""

    def __init__(self, heads: int, width: int, dtype: torch.dtype, counts: Sequence[int] = COUNTS) -> None:
        draw = torch.Generator().manual_seed(1)
        self.queries = (noise(N, heads, width) * width**-0.5).to(dtype)
        self.sink = noise(heads, seed=3)
        self.ring, self.chunk = noise(RING, width, seed=4).to(dtype), noise(N, width, seed=5).to(dtype)
        self.sources = torch.randint(-N, RING, (N, W), generator=draw)
        self.entries = noise(POOL, width, seed=6).to(dtype)
        self.counts, self.first = torch.tensor(counts), torch.tensor(FIRST)
        self.columns = columns_for(max(counts))
        self.slots = torch.randint(1, POOL, (N, self.columns), generator=draw)
        self.slots[torch.arange(self.columns) >= self.counts[:, None]] = 0
        self.inverse = rotation_of(N, 8)

    def seen(
        self, device: torch.device, part: slice = slice(0, N), columns: int | None = None
    ) -> tuple[WindowKeys, EntryKeys | None]:
        """What some of the tokens see, on a device. columns: of the slots that are shown; None for all."""
        width = self.columns if columns is None else columns

        def moved(x: Tensor) -> Tensor:
            return x.contiguous().to(device)

        window = WindowKeys(
            moved(self.ring), moved(self.chunk), moved(self.sources[part]), moved(self.first[part]), False
        )
        if not width:
            return window, None
        return window, EntryKeys(moved(self.entries), moved(self.slots[part, :width]), moved(self.counts[part]))

    def run(
        self,
        form: TorchAttention | TritonAttention,
        device: torch.device,
        part: slice = slice(0, N),
        columns: int | None = None,
    ) -> Tensor:
        """columns: see `seen`."""
        window, entries = self.seen(device, part, columns)
        inverse = Rotation(*(x[part].contiguous().to(device) for x in (self.inverse.cos, self.inverse.sin)))
        queries = self.queries[part].contiguous().to(device)
        output = torch.full_like(queries, torch.nan)
        form.attend(queries, window, entries, self.sink.to(device), inverse, output)
        return output.cpu()
