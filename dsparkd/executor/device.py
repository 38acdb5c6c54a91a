"""What a rank's GPU must be able to do and must have room for, proven before anything is loaded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch

from dsparkd.config import Config
from dsparkd.errors import CapabilityError
from dsparkd.kv.geometry import size_pool
from dsparkd.model.checkpoint import Use, expected_tensors, placed_bytes
from dsparkd.model.config import ModelConfig

FEATURE = 'engine.device = "cuda"'
LEAST_CAPABILITY = (9, 0)  # what the kernels' tiles were chosen for; newer ones have all of it


@dataclass(frozen=True, slots=True)
class Gpu:
    """One device as its driver describes it."""

    name: str
    capability: tuple[int, int]
    free_bytes: int


class Driver(Protocol):
    """What is asked of the CUDA driver."""

    def count(self) -> int:
        """Devices that this process may use."""

    def gpu(self, index: int) -> Gpu:
        """Describe one of them."""

    def can_reach(self, index: int, peer: int) -> bool:
        """Whether the first may read the second's memory."""


class TorchDriver:
    """The driver, by way of torch."""

    def count(self) -> int:
        """See Driver."""
        return torch.cuda.device_count()

    def gpu(self, index: int) -> Gpu:
        """See Driver."""
        free_bytes, _ = torch.cuda.mem_get_info(index)
        return Gpu(torch.cuda.get_device_name(index), torch.cuda.get_device_capability(index), free_bytes)

    def can_reach(self, index: int, peer: int) -> bool:
        """See Driver."""
        return torch.cuda.can_device_access_peer(index, peer)


def require_device(config: Config, model: ModelConfig, dp_rank: int, driver: Driver) -> None:
    """Raise CapabilityError, with what was found and what is needed, unless this rank's GPU will do; cpu always does.

    Raises ConfigError where what the weights leave is too little for the cache. Call before either rank has loaded.
    """
    if config.engine.device == "cpu":
        return
    shares = config.engine.shared_device
    needed = 1 if shares else config.engine.dp
    if (found := driver.count()) < needed:
        raise CapabilityError(FEATURE, f"{needed} CUDA devices (found {found})", "use a host that has them")
    index = 0 if shares else dp_rank
    gpu = driver.gpu(index)
    if gpu.capability < LEAST_CAPABILITY:
        raise CapabilityError(
            FEATURE,
            f"compute capability {_dotted(LEAST_CAPABILITY)} (device {index}, {gpu.name}, has "
            f"{_dotted(gpu.capability)})",
            "use a Hopper GPU or a newer one",
        )
    if not shares and not driver.can_reach(dp_rank, 1 - dp_rank):
        raise CapabilityError(
            FEATURE,
            f"peer access between 2 devices (the driver lets device {dp_rank} reach 0 others)",
            "use two GPUs of one NVLink or PCIe domain, and a driver that lets them read each other",
        )
    _require_memory(config, model, gpu, index)


@contextmanager
def room_for(what: str) -> Iterator[None]:
    """Turn a device that runs out of memory inside into CapabilityError: a start that fails so would fail again."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        # torch says how much was asked for, and how much was free.
        raise CapabilityError(
            FEATURE,
            f"device memory for {what} ({str(error).splitlines()[0]})",
            "leave more of it to activations: a smaller kv.device_fraction, kv.device_bytes or scheduler.chunk_tokens",
        ) from error


def _require_memory(config: Config, model: ModelConfig, gpu: Gpu, index: int) -> None:
    """Weights, and pools where they are given in bytes, have to fit; what activations take comes on top."""
    weights = _weight_bytes(config, model)
    geometry = model.kv_geometry(
        config.kv.page_tokens, config.engine.dtype, config.dspark.enabled, config.engine.kv_dtype
    )
    num_ranks = 2 if config.engine.shared_device else 1
    needed = num_ranks * (weights + (config.kv.device_bytes or 0))
    if needed > gpu.free_bytes:
        raise CapabilityError(
            FEATURE,
            f"{needed} bytes of free device memory: {num_ranks} times {weights} for weights and "
            f"{config.kv.device_bytes or 0} for kv pools (device {index}, {gpu.name}, has {gpu.free_bytes} bytes free)",
            "use a larger device, end what else runs on it, or set a smaller kv.device_bytes",
        )
    if config.kv.device_fraction is not None:
        size_pool(geometry, config, int((gpu.free_bytes - weights) * config.kv.device_fraction))


def _weight_bytes(config: Config, model: ModelConfig) -> int:
    """Bytes of one rank's parameters: of routed experts it has half."""
    engine, specs, total = config.engine, expected_tensors(model), 0
    is_packed = engine.device == "cuda" and engine.dtype == "bfloat16"
    for name, spec in specs.items():
        if spec.use is not Use.DRAFT or config.dspark.enabled:
            size = placed_bytes(specs, name, engine.dtype, is_packed=is_packed)
            total += size if spec.expert is None else size // 2
    return total


def _dotted(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))
