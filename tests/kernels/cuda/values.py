"""What the tests of Triton forms draw, and when they call two results the same."""

from __future__ import annotations

import torch
from torch import Tensor

from dsparkd.kernels.cuda.peer import STEP, PeerWords, memory_size

NUMBER = 1 + STEP  # of the first exchange of the first step
DTYPES = [torch.float32, torch.bfloat16]


def noise(*shape: int, seed: int = 0) -> Tensor:
    """Standard normal float32 of a shape, on the cpu."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def close(got: Tensor, expected: Tensor) -> bool:
    """Within the rounding of sums in float32; in bfloat16 within two casts, which Triton's interpreter truncates."""
    bound = 3e-5 if got.dtype == torch.float32 else 2.0**-6
    return bool(((got.double() - expected.double()).abs() <= bound * (1 + expected.double().abs())).all())


class Peers:
    """One rank's exchanges and both memories, of which a test plays the peer. few, many: words that they hold."""

    def __init__(self, device: torch.device, few: int, many: int = 64, timeout_s: float = 2e-4) -> None:
        self.ours, self.theirs = torch.zeros((2, memory_size(few, many)), dtype=torch.int64, device=device)
        self.few = few
        self.words = PeerWords(self.ours, self.theirs, few, many, timeout_s)

    def box(self, memory: Tensor, index: int) -> Tensor:
        """Where the exchange with that index in a step finds few words."""
        return memory[index % 2 * self.few :][: self.few]


def arrive(box: Tensor, words: Tensor, number: int) -> None:
    """Lay few words into a box as a peer stores them: kernels.cuda.peer."""
    box[: words.numel()] = words.view(torch.int32).flatten().long() & 0xFFFFFFFF | number << 32
