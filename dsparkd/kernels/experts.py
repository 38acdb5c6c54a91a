"""One shard's routed experts for a batch of rows: torch form, C form for the cpu in float32, Triton form for cuda.

A decode step gives each expert a few rows: then the time is that of reading the weights, and the C form reads them
once, for exactly the rows there are. It serves large loads too: which form runs must not depend on the batch. The
Triton form reads packed weights as they are stored, and nothing back to the host.

Letters: R rows, k experts a row, D width, I expert width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dsparkd.errors import FatalError
from dsparkd.kernels._cpu import ffi, lib
from dsparkd.kernels.crossing import Parting
from dsparkd.kernels.feed_forward import swiglu
from dsparkd.kernels.panels import in_panels
from dsparkd.kernels.pointers import floats, short_integers
from dsparkd.kernels.tiles import ROW_TILE
from dsparkd.kernels.weight import Weight, decode


@dataclass(frozen=True, slots=True)
class ExpertShard:
    """Experts first .. first + len(w13) - 1: w13[e] [2I, D], gate rows first; w2[e] [D, I].

    All w13 have one format, and all w2. limit clamps the gate from above and the up half on both sides.
    """

    first: int
    w13: tuple[Weight, ...]
    w2: tuple[Weight, ...]
    limit: float


class ExpertsKernel(Protocol):
    """What `bind` returns."""

    @property
    def takes_turned(self) -> bool:
        """Whether x comes with every 128 columns in the order of an FP4 weight's tile (cuda/tile.py)."""

    def __call__(self, x: Tensor, expert_ids: Tensor, shares: Tensor, parting: Parting | None = None) -> Tensor:
        """x [R, D], expert_ids [R, k] int32 ascending in a row, shares [R, k] float32 -> [R, D] float32.

        The sum, ascending by expert, of share * w2(silu(gate) * up) over the experts of the shard; others add nothing.
        parting: takes the peer's rows of it away, and leaves this rank's, [T, D]; on cuda only.
        """


def bind(shard: ExpertShard) -> ExpertsKernel:
    """Pick the form for the shard's device and dtype, once."""
    values = shard.w13[0].values
    if values.device.type == "cuda":
        from dsparkd.kernels.cuda.experts import TritonExperts  # a start on the cpu loads no compiler

        experts = TritonExperts(shard)
        experts.compile()
        return experts
    if values.dtype == torch.float32:
        return CpuExperts(shard)
    return TorchExperts(shard)


class CpuExperts:
    """One C call; float32, one thread."""

    takes_turned = False

    def __init__(self, shard: ExpertShard) -> None:
        self._first, self._count, self._limit = shard.first, len(shard.w13), shard.limit
        # Kept: they are the memory behind the pointers.
        self._panels = [in_panels(weight.values.t()) for weight in (*shard.w13, *shard.w2)]
        pointers = [floats(panels) for panels in self._panels]
        self._w13 = ffi.new("float *[]", pointers[: self._count])
        self._w2 = ffi.new("float *[]", pointers[self._count :])
        self._expert_width = shard.w2[0].shape[1]

    def __call__(self, x: Tensor, expert_ids: Tensor, shares: Tensor, parting: Parting | None = None) -> Tensor:
        """See ExpertsKernel."""
        assert parting is None
        R, D = x.shape
        total = torch.empty_like(x)
        failed = lib.dsparkd_experts(
            floats(x),
            short_integers(expert_ids),
            floats(shares),
            R,
            D,
            expert_ids.shape[1],
            self._first,
            self._count,
            self._w13,
            self._w2,
            self._expert_width,
            self._limit,
            floats(total),
        )
        if failed:
            raise FatalError("out of memory in the experts of a forward pass")
        return total


class TorchExperts:
    """The reference, and the form for bfloat16 on the cpu: one product an expert, over whole row tiles.

    dtype: of the dense weights that packed ones are decoded to.
    """

    takes_turned = False

    def __init__(self, shard: ExpertShard, dtype: torch.dtype = torch.bfloat16) -> None:
        self._first, self._limit = shard.first, shard.limit
        # As products of few rows read them fastest: w13[e] [D, 2I], w2[e] [I, D].
        self._w13, self._w2 = (
            [decode(weight, dtype).t().contiguous() for weight in weights] for weights in (shard.w13, shard.w2)
        )

    def __call__(self, x: Tensor, expert_ids: Tensor, shares: Tensor, parting: Parting | None = None) -> Tensor:
        """See ExpertsKernel."""
        assert parting is None
        device = x.device
        # A host read: the experts' loads decide which products run.
        tiles = _Tiles(expert_ids.cpu().numpy(), self._first, len(self._w13))
        if not tiles.num_rows:
            return torch.zeros(x.shape, dtype=torch.float32, device=device)
        inputs = x.index_select(0, torch.from_numpy(tiles.tokens).to(device))
        hidden = inputs.new_empty((tiles.num_rows, self._w13[0].shape[1]))
        for expert, part in tiles.parts:
            torch.mm(inputs[part], self._w13[expert], out=hidden[part])
        own_shares = shares.reshape(-1, 1).index_select(0, torch.from_numpy(tiles.choices).to(device))
        activated = swiglu(hidden, self._limit).mul_(own_shares).to(x.dtype)
        # One row more, of zeros, stands for every choice that the other shard serves.
        outputs = activated.new_empty((tiles.num_rows + 1, x.shape[1]))
        outputs[-1] = 0
        for expert, part in tiles.parts:
            torch.mm(activated[part], self._w2[expert], out=outputs[part])
        total: Tensor | None = None
        for choice in torch.from_numpy(tiles.places).to(device):  # k of [R]
            served = outputs.index_select(0, choice).float()
            total = served if total is None else total.add_(served)
        assert total is not None
        return total


class _Tiles:
    """Which rows each expert of a shard computes, in whole row tiles. Host arrays.

    num_rows: A, all tiles together. tokens [A]: row that each computes, some row for padding. choices [A]: index
    into the flattened [R, k] shares. places [k, R]: where a row's choices lie, ascending by expert, A for none.
    parts: expert and its slice of A.
    """

    def __init__(self, expert_ids: NDArray[np.int32], first: int, count: int) -> None:
        num_tokens, top_k = expert_ids.shape
        local = expert_ids.ravel() - first
        served = np.flatnonzero((local >= 0) & (local < count))
        served = served[np.argsort(local[served], kind="stable")]
        expert = local[served]
        loads = np.bincount(expert, minlength=count)
        padded = -(-loads // ROW_TILE) * ROW_TILE
        stops = np.cumsum(padded)
        starts = stops - padded
        place = np.arange(len(served)) + (starts - (np.cumsum(loads) - loads))[expert]
        self.num_rows = int(stops[-1])
        self.choices = np.zeros(self.num_rows, np.int64)
        self.choices[place] = served
        self.tokens = self.choices // top_k
        places = np.full(num_tokens * top_k, self.num_rows, np.int64)
        places[served] = place
        self.places = np.ascontiguousarray(places.reshape(num_tokens, top_k).T)
        self.parts = [(int(e), slice(int(starts[e]), int(stops[e]))) for e in np.flatnonzero(loads)]
