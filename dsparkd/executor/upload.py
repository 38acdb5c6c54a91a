"""Upload: small host arrays to the rank's device, without the host waiting for anything."""

from __future__ import annotations

from collections.abc import Collection
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Number = TypeVar("Number", np.int64, np.float32, np.float64)


def upload(values: NDArray[Number], device: torch.device) -> Tensor:
    """values on the device, behind what the current stream holds; on the cpu the tensor may share their memory."""
    host = torch.from_numpy(np.ascontiguousarray(values))
    if device.type == "cpu":
        return host
    if not host.numel():
        return torch.empty(host.shape, dtype=host.dtype, device=device)
    # Out of pageable memory the host would wait. torch keeps the pinned block until the copy is done, then reuses it.
    return host.pin_memory().to(device, non_blocking=True)


def upload_ids(ids: Collection[int], device: torch.device) -> Tensor:
    """Ids or indices as int64 on the device."""
    return upload(np.fromiter(ids, np.int64, len(ids)), device)
