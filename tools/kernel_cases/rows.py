"""Tokens of a step as the memory-bound kernels see them: how many, how many of each sequence, at which context."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dsparkd.kernels.rotary import Rotation


@dataclass(frozen=True, slots=True)
class Step:
    """`num_sequences` sequences, each with `width` tokens that end at position `context` - 1."""

    num_sequences: int
    width: int
    context: int

    @property
    def num_tokens(self) -> int:
        """Tokens of the step."""
        return self.num_sequences * self.width

    @property
    def words(self) -> str:
        """For the table."""
        return f"{self.num_sequences} x {self.width} tokens at {self.context}"

    def positions(self) -> Tensor:
        """Position of each token, [n] int64, on the cpu."""
        return torch.arange(self.context - self.width, self.context).repeat(self.num_sequences)

    def sequences(self) -> Tensor:
        """Sequence of each token, [n] int64, on the cpu."""
        return torch.arange(self.num_sequences).repeat_interleave(self.width)


SMALL = Step(num_sequences=2, width=3, context=500)
ONE = Step(num_sequences=1, width=6, context=8192)
DECODE = Step(num_sequences=64, width=6, context=8192)
PREFILL = Step(num_sequences=1, width=8192, context=8192)


def random_values(device: torch.device, *shape: int, seed: int, scale: float = 1.0) -> Tensor:
    """Normal bfloat16."""
    return (torch.randn(shape, generator=torch.Generator(device).manual_seed(seed), device=device) * scale).bfloat16()


def random_floats(device: torch.device, *shape: int, seed: int) -> Tensor:
    """Standard normal float32."""
    return torch.randn(shape, generator=torch.Generator(device).manual_seed(seed), device=device)


def random_rotation(device: torch.device, num_tokens: int, rotary: int) -> Rotation:
    """Angles of any positions."""
    angles = 3 * random_floats(device, num_tokens, 1, rotary // 2, seed=1).repeat_interleave(2, 2)
    signs = torch.tensor([-1.0, 1.0], device=device).repeat(rotary // 2)
    return Rotation(angles.cos(), angles.sin() * signs)
