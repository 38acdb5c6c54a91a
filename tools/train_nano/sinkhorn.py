"""Sinkhorn normalisation of hyper-connection matrices (model.md 3.2) with its gradient.

On a GPU one Triton kernel a direction: 39 normalisations of a 4x4 matrix a token would otherwise be hundreds of
launches. The forward kernel keeps every divisor, and the backward walks them in reverse: a normalised matrix times its
divisor is the matrix before it, so nothing else is stored.

Letters: N tokens, S streams.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 64


def sinkhorn(logits: Tensor, iterations: int, eps: float) -> Tensor:
    """logits [N, S, S] float32 -> doubly stochastic [N, S, S] float32; softmax over the last dimension comes first."""
    if logits.is_cuda:
        result: Tensor = _Sinkhorn.apply(logits, iterations, eps)  # type: ignore[no-untyped-call]
        return result
    return sinkhorn_reference(logits, iterations, eps)


def sinkhorn_reference(logits: Tensor, iterations: int, eps: float) -> Tensor:
    """The formula, step by step, under autograd."""
    comb = torch.softmax(logits, -1) + eps
    comb = comb / (comb.sum(1, keepdim=True) + eps)
    for _ in range(iterations - 1):
        comb = comb / (comb.sum(2, keepdim=True) + eps)
        comb = comb / (comb.sum(1, keepdim=True) + eps)
    return comb


class _Sinkhorn(torch.autograd.Function):
    """Both kernels; float32, contiguous."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, logits: Tensor, iterations: int, eps: float) -> Tensor:
        N, S, _ = logits.shape
        logits = logits.contiguous()
        comb = torch.empty_like(logits)
        divisors = logits.new_empty((2 * iterations - 1, N, S))
        grid = (triton.cdiv(N, BLOCK),)
        _forward_kernel[grid](logits, comb, divisors, N, iterations, eps, S, BLOCK)
        ctx.save_for_backward(logits, comb, divisors)
        ctx.iterations = iterations  # type: ignore[attr-defined]
        return comb

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> tuple[Tensor, None, None]:
        logits, comb, divisors = ctx.saved_tensors  # type: ignore[attr-defined]
        N, S, _ = logits.shape
        result = torch.empty_like(logits)
        grid = (triton.cdiv(N, BLOCK),)
        iterations: int = ctx.iterations  # type: ignore[attr-defined]
        _backward_kernel[grid](logits, comb, divisors, grad.contiguous(), result, N, iterations, S, BLOCK)
        return result, None, None


@triton.jit  # type: ignore[untyped-decorator]
def _forward_kernel(logits, comb, divisors, N, iterations, eps, S: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    s = tl.arange(0, S)
    live = n < N
    matrix = n[:, None, None] * (S * S) + s[None, :, None] * S + s[None, None, :]
    vector = n[:, None] * S + s[None, :]
    x = tl.load(logits + matrix, mask=live[:, None, None], other=0.0)
    x = tl.exp(x - tl.max(x, 2)[:, :, None])
    x = x / tl.sum(x, 2)[:, :, None] + eps
    d = tl.sum(x, 1) + eps
    x = x / d[:, None, :]
    tl.store(divisors + vector, d, mask=live[:, None])
    for i in range(1, iterations):
        d = tl.sum(x, 2) + eps
        x = x / d[:, :, None]
        tl.store(divisors + (2 * i - 1) * N * S + vector, d, mask=live[:, None])
        d = tl.sum(x, 1) + eps
        x = x / d[:, None, :]
        tl.store(divisors + 2 * i * N * S + vector, d, mask=live[:, None])
    tl.store(comb + matrix, x, mask=live[:, None, None])


@triton.jit  # type: ignore[untyped-decorator]
def _backward_kernel(logits, comb, divisors, grad, result, N, iterations, S: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    s = tl.arange(0, S)
    live = n < N
    matrix = n[:, None, None] * (S * S) + s[None, :, None] * S + s[None, None, :]
    vector = n[:, None] * S + s[None, :]
    x = tl.load(comb + matrix, mask=live[:, None, None], other=0.0)
    g = tl.load(grad + matrix, mask=live[:, None, None], other=0.0)
    # y = x / (sum x + eps) gives dx = (dy - sum(dy * y)) / divisor, over the same dimension.
    for k in range(iterations - 1):
        i = iterations - 1 - k
        d = tl.load(divisors + 2 * i * N * S + vector, mask=live[:, None], other=1.0)
        g = (g - tl.sum(g * x, 1)[:, None, :]) / d[:, None, :]
        x = x * d[:, None, :]
        d = tl.load(divisors + (2 * i - 1) * N * S + vector, mask=live[:, None], other=1.0)
        g = (g - tl.sum(g * x, 2)[:, :, None]) / d[:, :, None]
        x = x * d[:, :, None]
    d = tl.load(divisors + vector, mask=live[:, None], other=1.0)
    g = (g - tl.sum(g * x, 1)[:, None, :]) / d[:, None, :]
    x = tl.load(logits + matrix, mask=live[:, None, None], other=0.0)
    x = tl.exp(x - tl.max(x, 2)[:, :, None])
    x = x / tl.sum(x, 2)[:, :, None]
    g = x * (g - tl.sum(g * x, 2)[:, :, None])
    tl.store(result + matrix, g, mask=live[:, None, None])
