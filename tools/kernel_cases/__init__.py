"""Kernels and their references on random inputs, for the gate that compares them and the bench that times them.

Each family is a module here with `cases(device, scale)`; it draws its inputs when it is asked, one case at a time,
since those of the real geometry fill gigabytes.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol, cast

import torch
from torch import Tensor

FAMILIES = (
    "linear",
    "attention",
    "experts",
    "feed_forward",
    "hyper_connection",
    "indexer",
    "compressor",
    "kept_rows",
    "packed",
)


class Scale(StrEnum):
    """Shapes: small ones for Triton's interpreter, or the released Flash geometry."""

    SMALL = "small"
    FLASH = "flash"


@dataclass(frozen=True, slots=True)
class Case:
    """One kernel at one shape.

    name: of the kernel, for instance experts.fp4. shape: words for the table. num_rows: how many rows a run may have.
    run, reference: a slice of the rows -> a tensor that has these rows in its first dimension, the same values apart
    from rounding; run may be captured into a CUDA graph. row_tile: rows are cut at multiples of it.
    tolerance: largest difference over the reference's largest magnitude.
    floor_bytes: what a run over all rows has to move to and from memory. floor_flops: its operations.
    timed: what the bench times where run does more than the kernel. untimed: another case times the same call.
    rival: the same work by torch's own kernels as far as it has them, timed beside; rival_name: which.
    """

    name: str
    shape: str
    num_rows: int
    run: Callable[[slice], Tensor]
    reference: Callable[[slice], Tensor]
    tolerance: float
    floor_bytes: int
    floor_flops: int = 0
    row_tile: int = 1
    timed: Callable[[], object] | None = None
    untimed: bool = False
    rival: Callable[[], object] | None = None
    rival_name: str = ""


class Family(Protocol):
    """What a module of this package offers."""

    def cases(self, device: torch.device, scale: Scale) -> Iterator[Case]: ...


def all_cases(device: torch.device, scale: Scale, only: str = "") -> Iterator[Case]:
    """Yield the cases of every family whose names begin with `only`, one at a time."""
    for name in FAMILIES:
        family = cast(Family, importlib.import_module(f"tools.kernel_cases.{name}"))
        for case in family.cases(device, scale):
            if case.name.startswith(only):
                yield case
