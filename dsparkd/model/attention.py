"""Attention over a sliding window plus compressed entries, with sinks and a grouped output projection.

One latent head serves as key and value. Keys are gathered per token and reduced in fixed tiles (the window, then
KEY_TILE entries each, ascending), so that neither a longer neighbour nor the cut into chunks changes a token's bits:
a tile that is hidden as a whole adds exact zeros behind the others.

Letters: T tokens, n tokens of one block, H heads, d head width, W window, N compressed keys, G output groups.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dsparkd.kernels.tiles import KEY_TILE
from dsparkd.kv.geometry import CSA_RATIO, HCA_RATIO
from dsparkd.kv.pool import KVPool
from dsparkd.model.compressor import Compressor, gather_rows
from dsparkd.model.config import ModelConfig
from dsparkd.model.indexer import Indexer
from dsparkd.model.inputs import AttentionMetadata, CompressedMetadata, ForwardInputs
from dsparkd.model.layers import (
    Linear,
    RotaryEmbedding,
    Rotation,
    WeightSource,
    inverse_rms,
    rms_norm,
    rotate_,
)


@dataclass(frozen=True, slots=True)
class Rotations:
    """RoPE of one step: the embedding of the layer's base, and the tokens' rotation by it, both ways."""

    rotary: RotaryEmbedding
    forward: Rotation
    inverse: Rotation

    @classmethod
    def of(cls, rotary: RotaryEmbedding, positions: Tensor) -> Rotations:
        """Compute the angles of positions [T] once for all layers of that base."""
        forward = rotary.at(positions)
        return cls(rotary, forward, forward.inverse())


class Attention:
    """One layer's attention; kind_index counts the layers of its kind, and addresses the pool."""

    def __init__(
        self, config: ModelConfig, source: WeightSource, layer: int, name: str | None = None, ratio: int | None = None
    ) -> None:
        name = f"layers.{layer}.attn" if name is None else name
        self.ratio = config.compress_ratios[layer] if ratio is None else ratio
        self._layer = layer
        self._kind_index = config.compress_ratios[:layer].count(self.ratio)
        self._heads, self._width = config.num_attention_heads, config.head_dim
        self._groups = config.o_groups
        self._eps = config.rms_norm_eps
        self._q_rank = config.q_lora_rank
        self._w_in = Linear(source.linear(f"{name}.wq_a"), source.linear(f"{name}.wkv"))
        self._q_norm = source.float32(f"{name}.q_norm.weight")
        self._wq_b = Linear(source.linear(f"{name}.wq_b"))
        kv_norm = source.float32(f"{name}.kv_norm.weight")
        # Queries have no norm weight; theirs carries the softmax scale instead. [H + 1, d]
        scale = torch.full_like(kv_norm, self._width**-0.5)
        self._norms = torch.cat((scale.expand(self._heads, -1), kv_norm[None]))
        self._sink = source.float32(f"{name}.attn_sink")[None, :, None]
        wo_a = source.linear(f"{name}.wo_a").view(self._groups, config.o_lora_rank, -1)  # [G, o_lora, H / G * d]
        self._wo_a = wo_a.transpose(1, 2).contiguous()
        self._wo_b = Linear(source.linear(f"{name}.wo_b"))
        self._compressor = Compressor(config, source, name, self.ratio) if self.ratio else None
        self._indexer = Indexer(config, source, f"{name}.indexer") if self.ratio == CSA_RATIO else None

    def forward(self, x: Tensor, inputs: ForwardInputs, rotations: Rotations, pool: KVPool) -> Tensor:
        """x [T, D], normed -> [T, D]; stores the chunk's state into the pool."""
        low = self._w_in(x)
        residual = rms_norm(low[:, : self._q_rank], self._q_norm, self._eps)
        heads = self._heads_of(residual, low[:, self._q_rank :], rotations.forward)  # [T, H + 1, d]
        query, keys = heads[:, : self._heads], heads[:, self._heads].contiguous()
        entries = _Entries.none()
        if self.ratio:
            entries = self._compress(x.float(), residual, inputs, rotations, pool)
        output = self._attend(query, keys, entries, inputs.attention, pool)
        rotate_(output, rotations.inverse)
        grouped = output.view(x.shape[0], self._groups, -1).transpose(0, 1)  # [G, T, H / G * d]
        return self._wo_b(torch.bmm(grouped, self._wo_a).transpose(0, 1).flatten(1))

    def _heads_of(self, residual: Tensor, latent: Tensor, rotation: Rotation) -> Tensor:
        """Queries and, as one more head, the window key: normed, scaled, rotated. [T, H + 1, d]"""
        query = self._wq_b(residual)
        heads = torch.cat((query, latent), 1).view(-1, self._heads + 1, self._width)
        heads32 = heads.float()
        heads32 = heads32 * inverse_rms(heads32, self._eps)
        return rotate_(heads32.mul_(self._norms).to(heads.dtype), rotation)

    def _compress(
        self, x32: Tensor, residual: Tensor, inputs: ForwardInputs, rotations: Rotations, pool: KVPool
    ) -> _Entries:
        """Store the chunk's rows and the entries that it closes; entries come before any query gathers them."""
        assert self._compressor is not None
        metadata, ring, slots, keys = self._storage(inputs.attention, pool)
        rows = self._compressor.project(x32, inputs.positions)
        if metadata.num_closing:
            entries, new_keys = self._compressor.close(rows, ring, metadata, rotations.rotary)
            slots.index_copy_(0, metadata.closing_dst, entries)
            if keys is not None and new_keys is not None:
                keys.index_copy_(0, metadata.closing_dst, new_keys)
        ring.index_copy_(0, metadata.store.dst, rows.index_select(0, metadata.store.src))
        query = weights = None
        if self._indexer is not None and max(metadata.block_counts) > self._indexer.topk:
            query, weights = self._indexer.query(residual, x32, rotations.forward)
        return _Entries(metadata, slots, keys, query, weights)

    def _storage(
        self, attention: AttentionMetadata, pool: KVPool
    ) -> tuple[CompressedMetadata, Tensor, Tensor, Tensor | None]:
        """This layer's metadata, compressor ring, entries and indexer keys."""
        k = self._kind_index
        if self.ratio == HCA_RATIO:
            assert attention.hca is not None
            return attention.hca, pool.hca_rows[k], pool.hca_entries[k], None
        assert attention.csa is not None
        return attention.csa, pool.csa_rows[k], pool.csa_entries[k], pool.csa_keys[k]

    def _attend(
        self, query: Tensor, keys: Tensor, entries: _Entries, attention: AttentionMetadata, pool: KVPool
    ) -> Tensor:
        """query [T, H, d], the chunk's window keys [T, d] -> [T, H, d] in their dtype."""
        ring = pool.window[self._layer]
        outputs = []
        for b, block in enumerate(attention.blocks):
            part = slice(block.start, block.stop)
            window_keys = gather_rows(ring, keys, block.keys).view(block.stop - block.start, -1, self._width)
            more_keys, hidden = self._select(entries, b, part)
            outputs.append(
                attend_tiles(query[part].float(), window_keys.float(), block.hidden, more_keys, hidden, self._sink)
            )
        # Only now: storing the chunk overwrites rows that its first tokens still needed.
        store = attention.window_store
        ring.index_copy_(0, store.dst, keys.index_select(0, store.src))
        output = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return output.to(query.dtype)

    def _select(self, entries: _Entries, b: int, part: slice) -> tuple[Tensor | None, Tensor | None]:
        """Compressed keys [n, N, d] float32 of one block and which of them are hidden [n, N]."""
        metadata = entries.metadata
        if metadata is None or not metadata.block_counts[b]:
            return None, None
        most = metadata.block_counts[b]
        width = -(-most // KEY_TILE) * KEY_TILE
        slots = metadata.entry_slots[:, :width].index_select(0, metadata.row_ids[part])
        hidden = torch.arange(width, device=slots.device) >= metadata.counts[part, None]
        slots.masked_fill_(hidden, 0)  # a row's entry that closes later in the chunk is another token's future
        if self._indexer is not None and most > self._indexer.topk:
            assert entries.keys is not None
            assert entries.query is not None
            assert entries.weights is not None
            keys = entries.keys.index_select(0, slots.view(-1)).view(*slots.shape, -1).float()
            slots, hidden = self._indexer.select(entries.query[part], entries.weights[part], keys, slots, hidden)
        rows = entries.slots.index_select(0, slots.view(-1)).view(*slots.shape, -1)
        return rows.float(), hidden


@dataclass(frozen=True, slots=True)
class _Entries:
    """What a layer's queries read of its compressed branch; query and weights only when entries are scored."""

    metadata: CompressedMetadata | None
    slots: Tensor
    keys: Tensor | None
    query: Tensor | None
    weights: Tensor | None

    @classmethod
    def none(cls) -> _Entries:
        """A sliding-window layer has none."""
        return cls(None, torch.empty(0), None, None, None)


def attend_tiles(
    query: Tensor,
    window: Tensor,
    window_hidden: Tensor | None,
    entries: Tensor | None,
    hidden: Tensor | None,
    sink: Tensor,
) -> Tensor:
    """Softmax with a sink over window [n, W, d] and entries [n, N, d], which are keys and values: [n, H, d] float32.

    query [n, H, d] carries the softmax scale; window_hidden [n, W], hidden [n, N] bool; sink [1, H, 1] counts in the
    denominator alone. N is a multiple of KEY_TILE.
    """
    logits = torch.bmm(query, window.transpose(1, 2))
    if window_hidden is not None:
        logits.masked_fill_(window_hidden[:, None], -torch.inf)
    # The window holds the token's own key, so the maximum is finite.
    top = torch.maximum(logits.amax(-1, keepdim=True), sink)
    if entries is None or hidden is None:
        shares = logits.sub_(top).exp_()
        total = shares.sum(-1, keepdim=True).add_((sink - top).exp_())
        return torch.bmm(shares, window).div_(total)
    more = torch.bmm(query, entries.transpose(1, 2)).masked_fill_(hidden[:, None], -torch.inf)
    top = torch.maximum(top, more.amax(-1, keepdim=True))
    shares = logits.sub_(top).exp_()
    more = more.sub_(top).exp_()
    total = shares.sum(-1, keepdim=True)
    output = torch.bmm(shares, window)
    tile_totals = more.view(*more.shape[:2], -1, KEY_TILE).sum(-1)
    for tile in range(tile_totals.shape[-1]):
        part = slice(tile * KEY_TILE, (tile + 1) * KEY_TILE)
        total.add_(tile_totals[..., tile : tile + 1])
        output.baddbmm_(more[..., part], entries[:, part])
    return output.div_(total.add_((sink - top).exp_()))
