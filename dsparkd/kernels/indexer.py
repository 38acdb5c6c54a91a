"""The lightning indexer's choice of compressed entries: torch form, and C form for the cpu in float32.

The form for cuda is kernels/cuda/indexer.py. Scores are float32 and equal ones go to the lower entry: exact zeros are
common, wherever all heads are clipped.

Letters: n tokens, h heads, i width, B rows, E entries a row has at most, K entries kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from dsparkd.errors import FatalError
from dsparkd.kernels import packed
from dsparkd.kernels._cpu import lib
from dsparkd.kernels.pointers import floats, integers
from dsparkd.kernels.tiles import KEY_TILE


@dataclass(frozen=True, slots=True)
class Visible:
    """What each token sees: the first counts[t] of slots[rows[t]]; slots [B, E], rows and counts [n], int64.

    most: the largest of counts, known on the host.
    """

    slots: Tensor
    rows: Tensor
    counts: Tensor
    most: int

    def expand(self) -> tuple[Tensor, Tensor]:
        """Slots [n, width] and which of them are hidden, width the least multiple of KEY_TILE; hidden slots are 0."""
        width = -(-self.most // KEY_TILE) * KEY_TILE
        slots = self.slots[:, :width].index_select(0, self.rows)
        hidden = torch.arange(width, device=slots.device) >= self.counts[:, None]
        return slots.masked_fill_(hidden, 0), hidden


class IndexerKernel(Protocol):
    """What `bind` returns."""

    def prepare(self, heads: int, width: int, top_k: int, kept: Tensor | None = None) -> None:
        """Make ready for `choose` of these sizes at start: no step shall wait for a compiler.

        kept: rows of the pages, where these are packed.
        """

    def choose(self, query: Tensor, weights: Tensor, keys: Tensor, visible: Visible, top_k: int) -> Tensor:
        """Keep each token's best entries: slots [n, K] ascending by entry, zeros behind them.

        query [n, h, i] and keys [*, i], by slot, have one dtype, or keys are packed rows (packed.pack_index) and
        query is of packed.round_queries; weights [n, h] float32; K is the least multiple of
        KEY_TILE from top_k on, and visible.most above top_k.
        """


def bind(device: torch.device, dtype: torch.dtype) -> IndexerKernel:
    """Pick the form for a device and the keys' dtype, once."""
    if device.type == "cuda":
        from dsparkd.kernels.cuda.indexer import TritonIndexer  # a cpu start imports no triton

        return TritonIndexer(device, dtype)
    return CpuIndexer() if dtype == torch.float32 else TorchIndexer()


class TorchIndexer:
    """The reference, and the form for the cpu in bfloat16."""

    def prepare(self, heads: int, width: int, top_k: int, kept: Tensor | None = None) -> None:
        """Nothing is compiled."""

    def choose(self, query: Tensor, weights: Tensor, keys: Tensor, visible: Visible, top_k: int) -> Tensor:
        """See IndexerKernel."""
        slots, hidden = visible.expand()
        own_keys = keys.index_select(0, slots.view(-1))
        if packed.is_packed(keys):
            own_keys = packed.unpack_index(own_keys, query.shape[2], torch.float32)
        own_keys = own_keys.view(*slots.shape, -1).float()
        products = torch.bmm(query.float(), own_keys.transpose(1, 2)).relu_().mul_(weights[:, :, None])
        scores = products[:, 0].clone()
        for head in range(1, products.shape[1]):  # adds in a fixed order: the same bits in any batch
            scores.add_(products[:, head])
        scores.masked_fill_(hidden, -torch.inf)
        # The K-th best score is a value, whichever of its equals topk took. Everything above it stays, and of its
        # equals the first ones that there is room for.
        least = scores.topk(top_k, dim=1).values[:, -1:]
        above = scores > least
        equal = (scores == least) & ~hidden
        room = top_k - above.sum(1, keepdim=True)
        kept = above | (equal & (equal.cumsum(1) <= room))
        num_entries = slots.shape[1]
        index = torch.arange(num_entries, device=slots.device)
        width = -(-top_k // KEY_TILE) * KEY_TILE  # at most num_entries, itself a multiple above top_k
        order = torch.where(kept, index, num_entries).topk(width, dim=1, largest=False, sorted=True).values
        gone = order == num_entries
        return slots.gather(1, order.clamp_(max=num_entries - 1)).masked_fill_(gone, 0)


class CpuIndexer:
    """One C call; float32, one thread. Reads the keys where they lie."""

    def prepare(self, heads: int, width: int, top_k: int, kept: Tensor | None = None) -> None:
        """Nothing is compiled."""

    def choose(self, query: Tensor, weights: Tensor, keys: Tensor, visible: Visible, top_k: int) -> Tensor:
        """See IndexerKernel. The C form knows no packed rows."""
        if packed.is_packed(keys):
            return TorchIndexer().choose(query, weights, keys, visible, top_k)
        n, h, i = query.shape
        width = -(-top_k // KEY_TILE) * KEY_TILE
        chosen = torch.empty((n, width), dtype=torch.int64)
        failed = lib.dsparkd_choose(
            floats(query),
            floats(weights),
            floats(keys),
            integers(visible.slots),
            visible.slots.shape[1],
            integers(visible.rows),
            integers(visible.counts),
            n,
            h,
            i,
            top_k,
            integers(chosen),
            width,
        )
        if failed:
            raise FatalError("out of memory in the indexer of a forward pass")
        return chosen
