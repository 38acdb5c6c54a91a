"""Work beside other work: on cuda a second stream, that another branch of the same layer may run meanwhile.

A branch begins behind what was launched before it and ends before what uses it, also inside of a captured graph. Its
memory is used again by the next branch, which begins behind everything that read the last one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

Branch = Callable[[], Tensor]


class Beside(Protocol):
    """What `bind` returns."""

    def __call__(self, work: Branch) -> Branch:
        """Launch work, and return what gives its result, to be called before anything else is begun beside.

        Whatever work reads must be kept until then.
        """


def bind(device: torch.device) -> Beside:
    """Pick the form for a device, once; all layers share it."""
    return SecondStream(device) if device.type == "cuda" else in_line


def in_line(work: Branch) -> Branch:
    """The form for the cpu: work is done at once."""
    result = work()
    return lambda: result


class SecondStream:
    """The form for cuda. Owned by the thread that runs the forward pass."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def __call__(self, work: Branch) -> Branch:
        """See Beside."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            result = work()

        def join() -> Tensor:
            torch.cuda.current_stream().wait_stream(self._stream)
            return result

        return join
