"""What the tests of Triton forms draw, and when they call two results the same."""

from __future__ import annotations

import torch
from torch import Tensor

DTYPES = [torch.float32, torch.bfloat16]


def noise(*shape: int, seed: int = 0) -> Tensor:
    """Standard normal float32 of a shape, on the cpu."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def close(got: Tensor, expected: Tensor) -> bool:
    """Within the rounding of sums in float32; in bfloat16 within two casts, which Triton's interpreter truncates."""
    bound = 3e-5 if got.dtype == torch.float32 else 2.0**-6
    return bool(((got.double() - expected.double()).abs() <= bound * (1 + expected.double().abs())).all())


def arrive(box: Tensor, words: Tensor, number: int) -> None:
    """Lay words into a box as a peer stores them: kernels.cuda.peer."""
    box[: words.numel()] = words.view(torch.int32).flatten().long() & 0xFFFFFFFF | number << 32
