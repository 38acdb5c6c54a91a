"""Attention of keys by index with a sink, and the rows around it: torch form, and C form for the cpu in float32.

One latent vector is key and value. Keys come per token, by index: from a ring as it was before the step, from the
step's own rows, and from pages. The torch form gathers them and reduces in fixed tiles (the window, then KEY_TILE
entries each, ascending): a tile that is hidden as a whole adds exact zeros, so a longer neighbour changes no bits. The
C form reduces exactly the keys that a token sees. The form for cuda is kernels/cuda/attention.py.

Ring and pages may be packed rows (kernels/packed.py): what is here called [*, d] of them is [*, B] then, uint8.

Letters: T tokens, n tokens of one block, H heads, d head width, W window, N entries, B rows, r rotary width, M rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from dsparkd.errors import FatalError
from dsparkd.kernels import packed
from dsparkd.kernels._cpu import ffi, lib
from dsparkd.kernels.indexer import Visible
from dsparkd.kernels.pointers import floats, integers
from dsparkd.kernels.rotary import Rotation, rotate_
from dsparkd.kernels.tiles import KEY_TILE


@dataclass(frozen=True, slots=True)
class WindowKeys:
    """A block's window keys: sources [n, W] into ring and chunk (see `gather`), oldest first, hidden before first [n].

    all_visible: that first is zero throughout.
    """

    ring: Tensor
    chunk: Tensor
    sources: Tensor
    first: Tensor
    all_visible: bool


@dataclass(frozen=True, slots=True)
class EntryKeys:
    """A block's compressed keys: token t sees rows slots[t, :counts[t]] of entries [*, d]; behind them slots are 0.

    slots [n, N] int64, N a multiple of KEY_TILE; counts [n] int64, of which on cuda no more than N count. rows [n]
    int64, where the kernel's own `see` made it: token t's slots are slots[rows[t]] of slots [B, N].
    """

    entries: Tensor
    slots: Tensor
    counts: Tensor
    rows: Tensor | None = None


@dataclass(frozen=True, slots=True)
class KeptKeys:
    """Where keys are stored as they are made: rows dst [K] int64 of ring [*, d], of tokens 0..K-1; -1 of padding, on
    cuda."""

    ring: Tensor
    dst: Tensor


class AttentionKernel(Protocol):
    """What `bind` returns."""

    def prepare(self, heads: int, width: int, rotary: int, like: Tensor, kept: Tensor | None = None) -> None:
        """Make ready for `attend` of these sizes at start, with keys like a tensor: no step waits for a compiler.

        kept: rows of ring and pages, where these are packed.
        """

    def gather(self, ring: Tensor, chunk: Tensor, sources: Tensor) -> Tensor:
        """Rows [M, w] by sources [M] int64: ring[source], or chunk[-1 - source] where that is negative."""

    def heads(
        self,
        query: Tensor,
        latent: Tensor,
        norms: Tensor,
        rotation: Rotation,
        eps: float,
        kept: KeptKeys | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Norm and rotate: query [T, H * d], latent [T, d], norms [H + 1, d] -> queries [T, H, d], keys [T, d].

        queries may lie in query's storage: the caller is done with query.
        """

    def see(self, entries: Tensor, visible: Visible) -> EntryKeys:
        """All entries that each token sees, of entries [*, d]."""

    def attend(
        self,
        queries: Tensor,
        window: WindowKeys,
        entries: EntryKeys | None,
        sink: Tensor,
        inverse: Rotation,
        output: Tensor,
    ) -> None:
        """Softmax with a sink over window and entries, rotated back, into output [n, H, d], contiguous.

        queries [n, H, d] carry the softmax scale; sink [H] float32 counts in the denominator alone.
        """


def bind(device: torch.device, dtype: torch.dtype) -> AttentionKernel:
    """Pick the form for a device and the keys' dtype, once."""
    if device.type == "cuda":
        from dsparkd.kernels.cuda.attention import TritonAttention  # a cpu start imports no triton

        return TritonAttention()
    return CpuAttention() if dtype == torch.float32 else TorchAttention()


class TorchAttention:
    """The reference, and the form for the cpu in bfloat16."""

    def prepare(self, heads: int, width: int, rotary: int, like: Tensor, kept: Tensor | None = None) -> None:
        """Nothing is compiled."""

    def gather(self, ring: Tensor, chunk: Tensor, sources: Tensor) -> Tensor:
        """See AttentionKernel."""
        old = ring.index_select(0, sources.clamp(min=0))
        new = chunk.index_select(0, (-1 - sources).clamp_(min=0))
        return torch.where(sources[:, None] >= 0, old, new)

    def heads(
        self,
        query: Tensor,
        latent: Tensor,
        norms: Tensor,
        rotation: Rotation,
        eps: float,
        kept: KeptKeys | None = None,
    ) -> tuple[Tensor, Tensor]:
        """See AttentionKernel."""
        num_heads = norms.shape[0] - 1
        heads = torch.cat((query, latent), 1).view(query.shape[0], num_heads + 1, -1).float()
        normed = (heads * heads.square().mean(-1, keepdim=True).add_(eps).rsqrt_()).mul_(norms)
        rotated = rotate_(normed.to(query.dtype), rotation)
        keys = rotated[:, num_heads].contiguous()
        _keep(keys, kept)
        return rotated[:, :num_heads], keys

    def see(self, entries: Tensor, visible: Visible) -> EntryKeys:
        """See AttentionKernel."""
        return EntryKeys(entries, visible.expand()[0], visible.counts)

    def attend(
        self,
        queries: Tensor,
        window: WindowKeys,
        entries: EntryKeys | None,
        sink: Tensor,
        inverse: Rotation,
        output: Tensor,
    ) -> None:
        """See AttentionKernel."""
        n, W = window.sources.shape
        query = queries.float()
        keys = self._gather_keys(window, inverse.cos.shape[-1]).view(n, W, -1).float()
        logits = torch.bmm(query, keys.transpose(1, 2))
        if not window.all_visible:
            hidden = torch.arange(W, device=query.device) < window.first[:, None]
            logits.masked_fill_(hidden[:, None], -torch.inf)
        # The window holds the token's own key, so the maximum is finite.
        sinks = sink[None, :, None]
        top = torch.maximum(logits.amax(-1, keepdim=True), sinks)
        more_logits = None
        if entries is not None:
            more_keys = entries.entries.index_select(0, entries.slots.view(-1))
            if packed.is_packed(more_keys):
                more_keys = packed.unpack(more_keys, keys.shape[2], inverse.cos.shape[-1], torch.float32)
            more_keys = more_keys.view(n, -1, keys.shape[2]).float()
            hidden = torch.arange(entries.slots.shape[1], device=query.device) >= entries.counts[:, None]
            more_logits = torch.bmm(query, more_keys.transpose(1, 2)).masked_fill_(hidden[:, None], -torch.inf)
            top = torch.maximum(top, more_logits.amax(-1, keepdim=True))
        shares = logits.sub_(top).exp_()
        total = shares.sum(-1, keepdim=True)
        mixed = torch.bmm(shares, keys)
        if more_logits is not None:
            more_shares = more_logits.sub_(top).exp_()
            tile_totals = more_shares.view(*more_shares.shape[:2], -1, KEY_TILE).sum(-1)
            for tile in range(tile_totals.shape[-1]):
                part = slice(tile * KEY_TILE, (tile + 1) * KEY_TILE)
                total.add_(tile_totals[..., tile : tile + 1])
                mixed.baddbmm_(more_shares[..., part], more_keys[:, part])
        output.copy_(mixed.div_(total.add_((sinks - top).exp_())))
        rotate_(output, inverse)

    def _gather_keys(self, window: WindowKeys, rotary: int) -> Tensor:
        """Keys [n * W, d] of a block's windows."""
        chunk, sources = window.chunk, window.sources.view(-1)
        if not packed.is_packed(window.ring):
            return self.gather(window.ring, chunk, sources)
        old = packed.unpack(window.ring.index_select(0, sources.clamp(min=0)), chunk.shape[1], rotary, chunk.dtype)
        new = chunk.index_select(0, (-1 - sources).clamp_(min=0))
        return torch.where(sources[:, None] >= 0, old, new)


class CpuAttention:
    """One C call each; float32, one thread."""

    def prepare(self, heads: int, width: int, rotary: int, like: Tensor, kept: Tensor | None = None) -> None:
        """Nothing is compiled."""

    def gather(self, ring: Tensor, chunk: Tensor, sources: Tensor) -> Tensor:
        """See AttentionKernel."""
        rows = chunk.new_empty((sources.shape[0], chunk.shape[1]))
        lib.dsparkd_gather(
            floats(ring), floats(chunk), integers(sources), sources.shape[0], chunk.shape[1], floats(rows)
        )
        return rows

    def heads(
        self,
        query: Tensor,
        latent: Tensor,
        norms: Tensor,
        rotation: Rotation,
        eps: float,
        kept: KeptKeys | None = None,
    ) -> tuple[Tensor, Tensor]:
        """See AttentionKernel."""
        T, H, d = query.shape[0], norms.shape[0] - 1, norms.shape[1]
        queries, keys = query.new_empty((T, H, d)), query.new_empty((T, d))
        assert latent.stride(1) == 1
        lib.dsparkd_heads(
            floats(query),
            ffi.cast("float *", latent.data_ptr()),
            latent.stride(0),
            floats(norms),
            floats(rotation.cos),
            floats(rotation.sin),
            T,
            H,
            d,
            rotation.cos.shape[-1],
            eps,
            floats(queries),
            floats(keys),
        )
        _keep(keys, kept)
        return queries, keys

    def see(self, entries: Tensor, visible: Visible) -> EntryKeys:
        """See AttentionKernel."""
        return EntryKeys(entries, visible.expand()[0], visible.counts)

    def attend(
        self,
        queries: Tensor,
        window: WindowKeys,
        entries: EntryKeys | None,
        sink: Tensor,
        inverse: Rotation,
        output: Tensor,
    ) -> None:
        """See AttentionKernel. The C form knows no packed rows."""
        if packed.is_packed(window.ring):
            TorchAttention().attend(queries, window, entries, sink, inverse, output)
            return
        n, H, d = queries.shape
        # Without entries their pointers are not read; the window's stand in.
        rows = window.chunk if entries is None else entries.entries
        slots = window.sources if entries is None else entries.slots
        counts = window.first if entries is None else entries.counts
        failed = lib.dsparkd_attend(
            floats(queries),
            floats(window.ring),
            floats(window.chunk),
            integers(window.sources),
            integers(window.first),
            window.sources.shape[1],
            floats(rows),
            integers(slots),
            0 if entries is None else slots.shape[1],
            integers(counts),
            floats(sink),
            floats(inverse.cos),
            floats(inverse.sin),
            n,
            H,
            d,
            inverse.cos.shape[-1],
            floats(output),
        )
        if failed:
            raise FatalError("out of memory in the attention of a forward pass")


def _keep(keys: Tensor, kept: KeptKeys | None) -> None:
    """Store keys [T, d] where they are kept."""
    if kept is not None:
        kept.ring.index_copy_(0, kept.dst, keys[: kept.dst.shape[0]])
