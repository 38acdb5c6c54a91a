"""How Triton kernels multiply tiles: the type of the operands, and the precision of float32 ones."""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor


def operand(x: Tensor) -> tl.dtype:
    """Type that a kernel casts both operands of a product to, of tensors like x.

    The interpreter, which runs on the cpu, multiplies bfloat16 by its bit patterns; in float32 the products are the
    same.
    """
    return tl.bfloat16 if x.dtype == torch.bfloat16 and x.is_cuda else tl.float32


def precision(x: Tensor) -> str:
    """`input_precision` of those products: three tf32 products come to float32."""
    return "ieee" if x.dtype == torch.bfloat16 else "tf32x3"
