"""Rows that are kept: stores into rings."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from dsparkd.kernels.cuda import rows as kernel
from tools.kernel_cases import Case, Scale
from tools.kernel_cases.rows import random_floats

UNTOUCHED = 7.0  # what lies in a ring beside the stored rows


def cases(device: torch.device, scale: Scale) -> Iterator[Case]:
    """Keys of a window, and compressor rows of both kinds, at a decode step and at a prefill."""
    if scale is Scale.SMALL:
        yield _store(6, 40, torch.bfloat16, device)
        return
    for tokens in (384, 8192):
        yield _store(tokens, 512, torch.bfloat16, device)
        for width in (2560, 1024):
            yield _store(tokens, width, torch.float32, device)


def _store(tokens: int, width: int, dtype: torch.dtype, device: torch.device) -> Case:
    """Every second token from the end, to scattered places of a ring three times as long."""
    stored = tokens // 2
    rows = random_floats(device, tokens, width, seed=1).to(dtype)
    src = torch.arange(tokens - 1, tokens - 1 - 2 * stored, -2).to(device)
    dst = torch.randperm(3 * stored, generator=torch.Generator().manual_seed(2))[:stored].to(device)
    kept = torch.full((3 * stored, width), UNTOUCHED, dtype=dtype, device=device)

    def run(part: slice) -> Tensor:
        """Stored rows, and beside each how many others changed."""
        ring = torch.full((3 * stored, width), UNTOUCHED, dtype=dtype, device=device)
        kernel.store(ring, dst[part], rows, src[part])
        found = ring[dst[part]]
        ring.index_fill_(0, dst[part], UNTOUCHED)
        return torch.cat((found.float(), (ring != UNTOUCHED).sum().float().expand(len(found), 1)), 1)

    def reference(part: slice) -> Tensor:
        return torch.cat((rows[src[part]].float(), rows.new_zeros((part.stop - part.start, 1)).float()), 1)

    return Case(
        name="rows.store",
        shape=f"{stored} of {tokens} rows of {width * rows.itemsize} bytes",
        num_rows=stored,
        run=run,
        reference=reference,
        tolerance=0,
        floor_bytes=2 * stored * width * rows.itemsize,
        timed=lambda: kernel.store(kept, dst, rows, src),
    )
