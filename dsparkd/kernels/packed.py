"""Cached rows in the official encoding: torch form. The form for cuda is kernels/cuda/packed.py.

A packed row is bytes, uint8, as kernels/row_layout.py lays them out. Packing what was unpacked gives the same values
again: so a token's keys may be rounded once, read in the step that makes them, and packed later.

Letters: N rows, d head width, r rotary width, i indexer width, B bytes of a row.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from dsparkd.kernels.row_layout import GROUP, INDEX_GROUP, index_key_bytes, key_bytes, num_scales, scales_at
from dsparkd.kernels.weight import decode_e8m0, decode_fp4

LEAST_FP8 = 1e-4  # magnitude below which a group's scale shrinks no further
LEAST_FP4 = 6 * 2.0**-126
FP8_MAX = 448.0
# A scale is the least power of two by which the largest magnitude fits: 448 is 1.75 * 2 ** 8, and 6 is 1.5 * 2 ** 2.
FP8_STEP = (8, 0x600000)
FP4_STEP = (2, 0x400000)


def is_packed(rows: Tensor) -> bool:
    """Whether cached rows are bytes of this encoding, not values."""
    return rows.dtype == torch.uint8


def pack(keys: Tensor, rotary: int) -> Tensor:
    """keys [N, d], float -> [N, B]."""
    num_rows, width = keys.shape
    plain = width - rotary
    groups = num_scales(width, rotary)
    values = functional.pad(keys[:, :plain].float(), (0, groups * GROUP - plain)).view(num_rows, groups, GROUP)
    scales = _scale_codes(values.abs().amax(-1), LEAST_FP8, FP8_STEP)
    codes = (values * _reciprocal(scales)[..., None]).clamp_(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    rows = keys.new_zeros((num_rows, key_bytes(width, rotary)), dtype=torch.uint8)
    begin = scales_at(width, rotary)
    rows[:, :plain] = codes.view(torch.uint8).view(num_rows, -1)[:, :plain]
    rows[:, plain:begin] = keys[:, plain:].bfloat16().contiguous().view(torch.uint8).view(num_rows, -1)
    rows[:, begin : begin + groups] = scales
    return rows


def unpack(rows: Tensor, width: int, rotary: int, dtype: torch.dtype) -> Tensor:
    """rows [N, B] -> keys [N, d] in dtype; exact in bfloat16, too."""
    num_rows, plain, begin = rows.shape[0], width - rotary, scales_at(width, rotary)
    scales = decode_e8m0(rows[:, begin : begin + num_scales(width, rotary)]).repeat_interleave(GROUP, 1)[:, :plain]
    codes = rows[:, :plain].contiguous().view(torch.float8_e4m3fn).float()
    tail = rows[:, plain:begin].contiguous().view(torch.bfloat16).view(num_rows, rotary)
    return torch.cat(((codes * scales).to(dtype), tail.to(dtype)), 1)


def round_(keys: Tensor, rotary: int) -> None:
    """Replace keys [N, d], contiguous, by what packing keeps of them."""
    if keys.is_cuda:
        from dsparkd.kernels.cuda import packed as triton_packed  # a cpu start imports no triton

        triton_packed.round_(keys, rotary)
        return
    keys.copy_(unpack(pack(keys, rotary), keys.shape[1], rotary, keys.dtype))


def store(ring: Tensor, dst: Tensor, keys: Tensor, src: Tensor, rotary: int) -> None:
    """ring[dst] = keys[src], packed: ring [*, B] uint8, keys [T, d], both contiguous; dst, src [K] int64, dst
    distinct."""
    if ring.is_cuda:
        from dsparkd.kernels.cuda import packed as triton_packed  # a cpu start imports no triton

        triton_packed.store(ring, dst, keys, src, rotary)
        return
    ring.index_copy_(0, dst, pack(keys.index_select(0, src), rotary))


def pack_index(keys: Tensor) -> Tensor:
    """Indexer keys [N, i], float -> [N, B]: turned by the Hadamard matrix, then FP4."""
    num_rows, width = keys.shape
    codes, scales = _fp4(hadamard(keys.float()))
    rows = keys.new_zeros((num_rows, index_key_bytes(width)), dtype=torch.uint8)
    rows[:, : width // 2] = codes[:, ::2] | (codes[:, 1::2] << 4)
    rows[:, width // 2 : width // 2 + width // INDEX_GROUP] = scales
    return rows


def unpack_index(rows: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    """rows [N, B] -> [N, i] in dtype, turned as they are."""
    scales = decode_e8m0(rows[:, width // 2 : width // 2 + width // INDEX_GROUP])
    return decode_fp4(rows[:, : width // 2], scales).to(dtype)


def round_queries(queries: Tensor) -> Tensor:
    """Turn indexer queries [T, h, i], contiguous, as the keys are turned, and round them to FP4, in their dtype."""
    if queries.is_cuda:
        from dsparkd.kernels.cuda.packed import round_queries as on_device  # a cpu start imports no triton

        return on_device(queries)
    rows = queries.view(-1, queries.shape[-1])
    return unpack_index(pack_index(rows), rows.shape[1], queries.dtype).view(queries.shape)


def hadamard(rows: Tensor) -> Tensor:
    """rows [N, i] float32, i a power of two -> rows times the Sylvester matrix, orthonormal; sums in one order."""
    num_rows, width = rows.shape
    half = 1
    while half < width:
        first, second = rows.view(num_rows, -1, 2, half).unbind(2)
        rows = torch.stack((first + second, first - second), 2).view(num_rows, width)
        half *= 2
    return rows.mul(width**-0.5)


def _fp4(rows: Tensor) -> tuple[Tensor, Tensor]:
    """rows [N, i] float32 -> codes [N, i] and scale codes [N, i / INDEX_GROUP], uint8; ties go to even codes."""
    groups = rows.view(rows.shape[0], -1, INDEX_GROUP)
    scales = _scale_codes(groups.abs().amax(-1), LEAST_FP4, FP4_STEP)
    values = groups * _reciprocal(scales)[..., None]
    size = values.abs()
    codes = torch.zeros_like(size, dtype=torch.uint8)
    for bound, includes in ((0.25, 0), (0.75, 1), (1.25, 0), (1.75, 1), (2.5, 0), (3.5, 1), (5.0, 0)):
        codes += (size >= bound) if includes else (size > bound)
    return (codes + 8 * (values < 0)).view(rows.shape), scales


def _scale_codes(largest: Tensor, least: float, step: tuple[int, int]) -> Tensor:
    """Magnitudes, float32 -> exponents biased by 127, uint8."""
    exponent, mantissa = step
    bits = largest.clamp(min=least).view(torch.int32)
    return ((bits >> 23) - exponent + ((bits & 0x7FFFFF) > mantissa)).to(torch.uint8)


def _reciprocal(scales: Tensor) -> Tensor:
    """1 over the scales of these codes, exact."""
    return ((254 - scales.int()) << 23).view(torch.float32)
