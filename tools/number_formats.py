"""The small number formats of the official layout: rounding to them, and encoding as files hold them.

Rounding works on the bits of float32 values and multiplies by powers of two alone, so that every device, and a compiled
graph, gives the same bits: a division may be approximated there, and a pair of casts may be left out.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from dsparkd.model.checkpoint import FP4_GROUP, FP8_BLOCK


@dataclass(frozen=True, slots=True)
class SmallFloat:
    """A sign, few bits of exponent and mantissa. The largest value is (1 + top_fraction / 2 ** 23) * 2 ** top_exponent.

    min_exponent: of the least normal value. floor: the largest magnitude under one scale counts as at least this.
    """

    mantissa_bits: int
    min_exponent: int
    top_exponent: int
    top_fraction: int
    floor: float


E4M3 = SmallFloat(mantissa_bits=3, min_exponent=-6, top_exponent=8, top_fraction=0x600000, floor=1e-4)  # 448
E2M1 = SmallFloat(mantissa_bits=1, min_exponent=0, top_exponent=2, top_fraction=0x400000, floor=6 * 2.0**-126)  # 6


def power_of_two(exponent: Tensor) -> Tensor:
    """exponent int32 in -126..127 -> 2 ** exponent float32."""
    return ((exponent + 127) << 23).view(torch.float32)


def scale_exponent(amax: Tensor, to: SmallFloat) -> Tensor:
    """amax float32, the largest magnitude under a scale -> the least e, int32, with amax / 2 ** e in the format."""
    bits = amax.clamp(min=to.floor).view(torch.int32)
    return (bits >> 23) - 127 - to.top_exponent + ((bits & 0x7FFFFF) > to.top_fraction).int()


def round_to(values: Tensor, to: SmallFloat) -> Tensor:
    """values float32, scaled into the format's range -> the nearest of its values, half-way ones to the even code."""
    exponent = (((values.view(torch.int32) >> 23) & 255) - 127).clamp(min=to.min_exponent)
    step = exponent - to.mantissa_bits
    return (values * power_of_two(-step)).round() * power_of_two(step)


def round_bfloat16(values: Tensor) -> Tensor:
    """values float32, finite -> the nearest bfloat16 values, half-way ones to the even one, as float32."""
    bits = values.view(torch.int32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000).view(torch.float32)


def round_groups(values: Tensor, size: int, to: SmallFloat) -> Tensor:
    """values [..., n] float32 -> themselves in the format, one scale a group of `size` columns, the last one cut."""
    grouped = _groups(values, size)
    exponent = scale_exponent(grouped.abs().amax(-1, keepdim=True), to)
    rounded = round_to(grouped * power_of_two(-exponent), to) * power_of_two(exponent)
    return rounded.flatten(-2)[..., : values.shape[-1]]


def round_fp4(values: Tensor) -> Tensor:
    """values [..., O, I] float32 -> what FP4 weights with scales of 32 columns hold of them."""
    return round_groups(values, FP4_GROUP, E2M1)


def round_fp8(values: Tensor) -> Tensor:
    """values [..., O, I] float32 -> what FP8 weights with scales of 128 x 128 blocks hold of them."""
    blocks = _blocks(values)
    exponent = scale_exponent(blocks.abs().amax((-3, -1), keepdim=True), E4M3)
    rounded = round_to(blocks * power_of_two(-exponent), E4M3) * power_of_two(exponent)
    return _from_blocks(rounded, values)


def encode_fp8(values: Tensor) -> tuple[Tensor, Tensor]:
    """[..., O, I] float32 -> float8_e4m3fn of that shape and e8m0 scales of 128 x 128 blocks, the last ones cut."""
    blocks = _blocks(values)
    exponent = scale_exponent(blocks.abs().amax((-3, -1), keepdim=True), E4M3)
    rounded = round_to(blocks * power_of_two(-exponent), E4M3)
    weight = _from_blocks(rounded, values).to(torch.float8_e4m3fn).contiguous()
    return weight, _e8m0(exponent.squeeze(-1).squeeze(-2))


def encode_fp4(values: Tensor) -> tuple[Tensor, Tensor]:
    """[..., O, I] float32 -> int8 [..., O, I / 2], two E2M1 codes a byte, and e8m0 scales of groups of 32 columns."""
    grouped = _groups(values, FP4_GROUP)
    exponent = scale_exponent(grouped.abs().amax(-1, keepdim=True), E2M1)
    rounded = round_to(grouped * power_of_two(-exponent), E2M1).flatten(-2)[..., : values.shape[-1]]
    size = rounded.abs()
    code = torch.where(size < 2, 2 * size, torch.where(size < 4, size + 2, size / 2 + 4)).to(torch.uint8)
    code += 8 * torch.signbit(rounded).to(torch.uint8)
    packed = code[..., 0::2] | (code[..., 1::2] << 4)
    return packed.view(torch.int8).contiguous(), _e8m0(exponent.squeeze(-1))


def _e8m0(exponent: Tensor) -> Tensor:
    return (exponent + 127).to(torch.uint8).view(torch.float8_e8m0fnu).contiguous()


def _groups(values: Tensor, size: int) -> Tensor:
    """[..., n] -> [..., groups, size], filled with zeros."""
    filled = pad(values, (0, -values.shape[-1] % size))
    return filled.reshape(*values.shape[:-1], -1, size)


def _blocks(values: Tensor) -> Tensor:
    """[..., O, I] -> [..., block rows, 128, block columns, 128], filled with zeros."""
    rows, columns = values.shape[-2:]
    filled = pad(values, (0, -columns % FP8_BLOCK, 0, -rows % FP8_BLOCK))
    tall, wide = filled.shape[-2] // FP8_BLOCK, filled.shape[-1] // FP8_BLOCK
    return filled.reshape(*values.shape[:-2], tall, FP8_BLOCK, wide, FP8_BLOCK)


def _from_blocks(blocks: Tensor, like: Tensor) -> Tensor:
    """Undo _blocks."""
    rows, columns = like.shape[-2:]
    return blocks.flatten(-2).flatten(-3, -2)[..., :rows, :columns]
