"""RMSNorm, angles and rotation of rows, one launch each: Triton form, for cuda.

Letters: T tokens, n width, h heads, d head width, r rotary width.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsparkd.kernels.cuda.attention_tile import rotate_pairs
from dsparkd.kernels.cuda.launch import EARLY, constant, follow
from dsparkd.kernels.rotary import Rotation
from dsparkd.kernels.tiles import count_tiles, power_of_two

SQUARES = 4096  # of a row that are added side by side: it fixes the order of the sum
ROTATE_ROWS = 8  # heads that one program rotates
ANGLE_TOKENS = 8  # of one program


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [T, n], rows apart, weight [n] float32 -> [T, n] contiguous in x's dtype; float32 inside, one cast."""
    T, width = x.shape
    out = x.new_empty((T, width))
    block = power_of_two(width)
    _rms_norm[(T,)](
        x, x.stride(0), weight, out, eps, WIDTH=width, BLOCK=block, num_warps=8 if block > 2048 else 4, launch_pdl=EARLY
    )
    return out


def inverse_rms(x: Tensor, eps: float) -> Tensor:
    """x [T, n] float32, contiguous -> (mean of squares + eps) ** -1/2, [T, 1]; torch's mean is cut by T."""
    T, width = x.shape
    assert x.is_contiguous()
    out = x.new_empty((T, 1))
    if T:
        _inverse_rms[(T,)](
            x, out, eps, WIDTH=width, BLOCK=min(SQUARES, power_of_two(width)), num_warps=8, launch_pdl=EARLY
        )
    return out


def angles(positions: Tensor, frequencies: Tensor, signs: Tensor) -> Rotation:
    """Angles of positions [T] int64 by frequencies [r] float32, the sines by their signs [r]: a step's first launch
    in place of five."""
    assert positions.is_contiguous()
    T, rotary = positions.shape[0], frequencies.shape[0]
    cos, sin = (torch.empty((T, 1, rotary), dtype=torch.float32, device=positions.device) for _ in range(2))
    if T:
        _angles[(count_tiles(T, ANGLE_TOKENS),)](
            positions,
            frequencies,
            signs,
            cos,
            sin,
            T,
            R=rotary,
            BLOCK_T=ANGLE_TOKENS,
            BLOCK_R=power_of_two(rotary),
            num_warps=4,
            launch_pdl=EARLY,
        )
    return Rotation(cos, sin)


def rotate_(x: Tensor, rotation: Rotation) -> Tensor:
    """Rotate interleaved pairs of the last r of d dims of x [T, h, d] in place, contiguous; float32 inside."""
    T, heads, width = x.shape
    assert x.is_contiguous()
    rotary = rotation.cos.shape[-1]
    rows = min(ROTATE_ROWS, power_of_two(heads))
    _rotate[(T, count_tiles(heads, rows))](
        x,
        rotation.cos,
        rotation.sin,
        H=heads,
        D=width,
        R=rotary,
        BLOCK_H=rows,
        BLOCK_R=power_of_two(rotary),
        num_warps=1,
        launch_pdl=EARLY,
    )
    return x


@triton.jit  # type: ignore[untyped-decorator]
def _rms_norm(x, stride, weight, out, eps, WIDTH: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    c = tl.arange(0, BLOCK)
    factor = constant(weight + c, c < WIDTH)
    follow()
    t = tl.program_id(0).to(tl.int64)
    row = tl.load(x + t * stride + c, mask=c < WIDTH, other=0.0).to(tl.float32)
    row = row * tl.rsqrt(tl.sum(row * row, 0) / WIDTH + eps) * factor
    tl.store(out + t * WIDTH + c, row.to(out.dtype.element_ty), mask=c < WIDTH)


@triton.jit(do_not_specialize=["T"])  # type: ignore[untyped-decorator]  # any number of entries may close in a step
def _angles(positions, frequencies, signs, cos, sin, T, R: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_R: tl.constexpr):  # type: ignore[no-untyped-def]
    c = tl.arange(0, BLOCK_R)
    frequency, sign = constant(frequencies + c, c < R), constant(signs + c, c < R)
    follow()
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    angle = tl.load(positions + t, mask=t < T, other=0).to(tl.float32)[:, None] * frequency[None, :]
    places = t.to(tl.int64)[:, None] * R + c[None, :]
    mask = (t < T)[:, None] & (c < R)[None, :]
    tl.store(cos + places, tl.cos(angle), mask=mask)
    tl.store(sin + places, tl.sin(angle) * sign[None, :], mask=mask)


@triton.jit  # type: ignore[untyped-decorator]
def _rotate(  # type: ignore[no-untyped-def]
    x,  # [T, H, D]
    cos,  # [T, 1, r]
    sin,  # [T, 1, r]
    H: tl.constexpr,
    D: tl.constexpr,
    R: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    follow()
    t = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    c = tl.arange(0, BLOCK_R)
    places = x + (t * H + h)[:, None] * D + D - R + c[None, :]
    real = (h < H)[:, None] & (c < R)[None, :]
    tail = tl.load(places, mask=real, other=0.0).to(tl.float32)
    tail = rotate_pairs(tail, cos, sin, t, R, R, BLOCK_H, BLOCK_R)
    tl.store(places, tail.to(x.dtype.element_ty), mask=real)


@triton.jit  # type: ignore[untyped-decorator]
def _inverse_rms(x, out, eps, WIDTH: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    follow()
    t = tl.program_id(0).to(tl.int64)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, WIDTH, BLOCK):
        c = start + tl.arange(0, BLOCK)
        value = tl.load(x + t * WIDTH + c, mask=c < WIDTH, other=0.0)
        total += value * value
    tl.store(out + t, tl.rsqrt(tl.sum(total, 0) / WIDTH + eps))
