"""A linear's weight as a device holds it, dense or in the official small formats.

Letters: O outputs, I inputs, G columns under one scale.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor

FP8_GROUP = 128
FP4_GROUP = 32


class Format(StrEnum):
    """How values are stored. Scales are powers of two, so a value times its scale is exact in bfloat16, too."""

    DENSE = "dense"
    FP8 = "fp8"  # E4M3, a byte each
    FP4 = "fp4"  # E2M1, two a byte, the even column in the low half


# The largest scale code that kernels multiply by: 2 ** 7 and 2 ** 1; of weights, those of the releases are far below 1.
MAX_SCALES = {Format.FP8: 134, Format.FP4: 128}


@dataclass(frozen=True, slots=True)
class Weight:
    """values: DENSE [O, I] float; FP8 [O, I] uint8; FP4 [O, I / 2] uint8; contiguous.

    scales [O, ceil(I / G)] uint8, exponents biased by 127; None for DENSE. FP8 repeats those of a 128 x 128 block for
    each of its rows: a hundredth more memory, and weights of any height can be stacked.
    """

    format: Format
    values: Tensor
    scales: Tensor | None

    @property
    def shape(self) -> tuple[int, int]:
        """O and I."""
        outputs, width = self.values.shape
        return outputs, 2 * width if self.format is Format.FP4 else width

    @property
    def num_bytes(self) -> int:
        """Bytes of values and scales."""
        scales = 0 if self.scales is None else self.scales.numel()
        return self.values.numel() * self.values.itemsize + scales


# E2M1 by its 4 bits: sign, two of exponent, one of mantissa.
FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


def dense(values: Tensor) -> Weight:
    """values [O, I] float."""
    return Weight(Format.DENSE, values, None)


def stacked(weights: Sequence[Weight]) -> Weight:
    """Weights of one format and input width, their outputs one behind the other."""
    first = weights[0]
    if len(weights) == 1:
        return first
    assert all(one.format is first.format for one in weights)
    scales = None if first.scales is None else torch.cat([one.scales for one in weights if one.scales is not None])
    return Weight(first.format, torch.cat([one.values for one in weights]), scales)


def decode(weight: Weight, dtype: torch.dtype) -> Tensor:
    """Values times scales [O, I] in dtype; a dense weight as it is."""
    if weight.scales is None:
        return weight.values
    scales = decode_e8m0(weight.scales)
    if weight.format is Format.FP4:
        return decode_fp4(weight.values, scales).to(dtype)
    wide = scales.repeat_interleave(FP8_GROUP, 1)[:, : weight.values.shape[1]]
    return (weight.values.view(torch.float8_e4m3fn).float() * wide).to(dtype)


def decode_e8m0(codes: Tensor) -> Tensor:
    """Bytes b, uint8 of any shape -> 2 ** (b - 127) float32; 255 is NaN."""
    bits = codes.int() << 23
    bits = torch.where(codes == 0, 1 << 22, bits)  # 2 ** -127 is subnormal
    return torch.where(codes == 255, 0x7FC00000, bits).view(torch.float32)


def decode_fp8(weight: Tensor, scale: Tensor) -> Tensor:
    """weight [O, I] float8_e4m3fn, scale [ceil(O/128), ceil(I/128)] float32 -> [O, I] float32."""
    rows, columns = weight.shape
    tall = scale.repeat_interleave(FP8_GROUP, 0)[:rows]
    return weight.float() * tall.repeat_interleave(FP8_GROUP, 1)[:, :columns]


def decode_fp4(weight: Tensor, scale: Tensor) -> Tensor:
    """weight [O, I/2] int8, two codes a byte, even column low; scale [O, ceil(I/32)] float32 -> [O, I] float32."""
    codes = weight.view(torch.uint8)
    pairs = torch.stack((codes & 15, codes >> 4), -1).flatten(1)  # [O, I]
    values = torch.tensor(FP4_VALUES, device=weight.device)[pairs.long()]
    return values * scale.repeat_interleave(FP4_GROUP, 1)[:, : values.shape[1]]
