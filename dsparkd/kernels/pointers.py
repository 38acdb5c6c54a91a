"""Addresses of tensors for the C kernels. The tensor must outlive the call that gets its address."""

from __future__ import annotations

import torch
from torch import Tensor

from dsparkd.kernels._cpu import ffi


def floats(tensor: Tensor) -> object:
    """Pointer to a contiguous float32 tensor's elements."""
    assert tensor.is_contiguous()
    assert tensor.dtype == torch.float32
    return ffi.cast("float *", tensor.data_ptr())


def integers(tensor: Tensor) -> object:
    """Pointer to a contiguous int64 tensor's elements."""
    assert tensor.is_contiguous()
    assert tensor.dtype == torch.int64
    return ffi.cast("int64_t *", tensor.data_ptr())


def short_integers(tensor: Tensor) -> object:
    """Pointer to a contiguous int32 tensor's elements."""
    assert tensor.is_contiguous()
    assert tensor.dtype == torch.int32
    return ffi.cast("int32_t *", tensor.data_ptr())
