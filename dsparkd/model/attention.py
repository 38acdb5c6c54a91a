"""Attention over a sliding window plus compressed entries, with sinks and a grouped output projection.

One latent head serves as key and value. Which keys a token sees follows from its position alone, and they are reduced
in one order, so that neither its neighbours nor the cut into chunks changes a token's bits.

Letters: T tokens, n tokens of one block, H heads, d head width, G output groups.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from dsparkd.kernels import attention as kernel
from dsparkd.kernels import packed
from dsparkd.kernels import rows as kept
from dsparkd.kernels.attention import EntryKeys, KeptKeys, WindowKeys
from dsparkd.kernels.beside import Beside, in_line
from dsparkd.kernels.indexer import Visible
from dsparkd.kernels.rotary import Rotation
from dsparkd.kernels.tiles import KEY_TILE
from dsparkd.kv.geometry import CSA_RATIO, HCA_RATIO
from dsparkd.kv.pool import KVPool
from dsparkd.model.compressor import Compressor
from dsparkd.model.config import ModelConfig
from dsparkd.model.indexer import Indexer, IndexQuery
from dsparkd.model.inputs import AttentionMetadata, CompressedMetadata, ForwardInputs
from dsparkd.model.layers import Linear, RotaryEmbedding, WeightSource, rms_norm


@dataclass(frozen=True, slots=True)
class Rotations:
    """RoPE of one step by one base: the tokens' rotation, both ways, and that of the entries that close, by span.

    The latter are made when the first layer of their kind asks.
    """

    rotary: RotaryEmbedding
    forward: Rotation
    inverse: Rotation
    _closing: dict[int, Rotation]

    @classmethod
    def of(cls, rotary: RotaryEmbedding, positions: Tensor) -> Rotations:
        """Compute the angles of positions [T] once for all layers of that base."""
        forward = rotary.at(positions)
        return cls(rotary, forward, forward.inverse(), {})

    def closing(self, metadata: CompressedMetadata) -> Rotation:
        """Return the rotation at the first tokens of the entries that close, of one compression ratio."""
        span = metadata.closing.shape[0] // metadata.num_closing
        if span not in self._closing:
            self._closing[span] = self.rotary.at(metadata.closing_positions)
        return self._closing[span]


@dataclass(frozen=True, slots=True)
class Projected:
    """Tokens' queries [T, H, d], which carry the softmax scale, their own keys [T, d], both rotated, and the low-rank
    residual [T, q_lora] that the queries were made of."""

    queries: Tensor
    keys: Tensor
    residual: Tensor


class Projections:
    """What lies around the softmax of a layer or draft stage; `name` is its prefix, for instance layers.3.attn."""

    def __init__(self, config: ModelConfig, source: WeightSource, name: str) -> None:
        self._eps = config.rms_norm_eps
        self._q_rank = config.q_lora_rank
        self._w_in = Linear(source.weight(f"{name}.wq_a"), source.weight(f"{name}.wkv"))
        self._q_norm = source.float32(f"{name}.q_norm.weight")
        self._wq_b = Linear(source.weight(f"{name}.wq_b"))
        kv_norm = source.float32(f"{name}.kv_norm.weight")
        # Queries have no norm weight; theirs carries the softmax scale instead. [H + 1, d]
        scale = torch.full_like(kv_norm, config.head_dim**-0.5)
        self._norms = torch.cat((scale.expand(config.num_attention_heads, -1), kv_norm[None]))
        self.sink = source.float32(f"{name}.attn_sink")
        self.kernel = kernel.bind(source.device, source.dtype)
        self._sizes = (config.num_attention_heads, config.head_dim, config.qk_rope_head_dim)
        self._like = torch.empty(0, dtype=source.dtype, device=source.device)
        self.prepare(None)
        self._wo_a = _grouped_linear(source, f"{name}.wo_a", config.o_groups)
        self._wo_b = Linear(source.weight(f"{name}.wo_b"))

    def prepare(self, kept: Tensor | None) -> None:
        """Compile at start for plain ring and pages, or for packed ones."""
        self.kernel.prepare(*self._sizes, self._like, kept)

    def project(self, x: Tensor, rotation: Rotation, kept: KeptKeys | None = None) -> Projected:
        """x [T, D], normed; T is a multiple of ROW_TILE on the cpu. kept: where keys are stored as they are made."""
        low = self._w_in(x)
        residual = rms_norm(low[:, : self._q_rank], self._q_norm, self._eps)
        queries, keys = self.kernel.heads(
            self._wq_b(residual), low[:, self._q_rank :], self._norms, rotation, self._eps, kept
        )
        return Projected(queries, keys, residual)

    def keys(self, x: Tensor, rotation: Rotation, kept: KeptKeys | None = None) -> Tensor:
        """x [T, D] of tokens that ask nothing -> their keys [T, d], rotated; T as in `project`.

        The product yields their low-rank queries too; a second copy of the weight would cost more than it saves.
        """
        latent, nothing = self._w_in(x)[:, self._q_rank :], x.new_empty((x.shape[0], 0))
        return self.kernel.heads(nothing, latent, self._norms[-1:], rotation, self._eps, kept)[1]

    def output(self, mixed: Tensor) -> Tensor:
        """mixed [T, H, d], rotated back -> [T, D]."""
        return self._wo_b(self._wo_a(mixed.flatten(1)))


def _grouped_linear(source: WeightSource, name: str, groups: int) -> Callable[[Tensor], Tensor]:
    """Bind G products side by side: x [T, G * I], contiguous -> [T, O], whose g-th part is the g-th of x times its."""
    if source.device.type == "cuda":
        from dsparkd.kernels.cuda.linear import TritonLinear  # a cpu start imports no triton

        grouped = TritonLinear(source.weight(name), groups=groups)
        grouped.compile()
        return grouped
    weight = source.linear(name)
    factors = weight.view(groups, weight.shape[0] // groups, -1).transpose(1, 2).contiguous()  # [G, I, O / G]

    def product(x: Tensor) -> Tensor:
        return torch.bmm(x.view(x.shape[0], groups, -1).transpose(0, 1), factors).transpose(0, 1).flatten(1)

    return product


class Attention:
    """One layer's attention; kind_index counts the layers of its kind, and addresses the pool.

    beside: runs the compressor beside the projections, and the store of the window beside the output.
    """

    def __init__(self, config: ModelConfig, source: WeightSource, layer: int, beside: Beside = in_line) -> None:
        name = f"layers.{layer}.attn"
        self._beside = beside
        self._rotary_width = config.qk_rope_head_dim
        self.ratio = config.compress_ratios[layer]
        self._layer = layer
        self._kind_index = config.compress_ratios[:layer].count(self.ratio)
        self._projections = Projections(config, source, name)
        self._compressor = Compressor(config, source, name, self.ratio) if self.ratio else None
        self._indexer = Indexer(config, source, f"{name}.indexer") if self.ratio == CSA_RATIO else None

    def prepare(self, pool: KVPool) -> None:
        """Compile at start for what the pool keeps, where its rows are packed."""
        ring = pool.window[self._layer]
        if not packed.is_packed(ring):
            return
        self._projections.prepare(ring)
        if self._compressor is not None:
            is_hca = self.ratio == HCA_RATIO
            self._compressor.prepare((pool.hca_entries[0],) if is_hca else (pool.csa_entries[0], pool.csa_keys[0]))
        if self._indexer is not None:
            self._indexer.prepare(pool.csa_keys[0])

    def forward(self, x: Tensor, inputs: ForwardInputs, rotations: Rotations, pool: KVPool) -> Tensor:
        """x [T, D], normed -> [T, D]; stores the chunk's state into the pool."""
        compressed = self._beside(lambda: self._compress(x, inputs, rotations, pool)) if self.ratio else None
        ring, store = pool.window[self._layer], inputs.attention.window_store
        # Packed rows have a kernel of their own, which follows when the step's queries have read them.
        early = KeptKeys(ring, store.dst) if store.early and not packed.is_packed(ring) else None
        projected = self._projections.project(x, rotations.forward, early)
        entries = None
        if compressed is not None:
            entries = self._entries(x, projected.residual, inputs, rotations, pool)
            compressed()  # entries come before any query gathers them
        mixed = self._attend(projected, entries, inputs, rotations.inverse, pool)
        if early is not None:
            return self._projections.output(mixed)
        # Only now: storing the chunk overwrites rows that its first tokens still needed.
        stored = self._beside(lambda: self._store(projected.keys, inputs, pool))
        output = self._projections.output(mixed)
        stored()
        return output

    def _compress(self, x: Tensor, inputs: ForwardInputs, rotations: Rotations, pool: KVPool) -> Tensor:
        """Store the chunk's rows and the entries that it closes; returns the rows."""
        assert self._compressor is not None
        metadata, ring, slots, keys = self._storage(inputs.attention, pool)
        rows = self._compressor.project(x)
        rotation = rotations.closing(metadata) if metadata.num_closing else None
        self._compressor.keep(rows, ring, metadata, rotation, (slots,) if keys is None else (slots, keys))
        return rows

    def _entries(
        self, x: Tensor, residual: Tensor, inputs: ForwardInputs, rotations: Rotations, pool: KVPool
    ) -> _Entries:
        """What queries read of the compressed branch, and what the indexer asks with."""
        metadata, _, slots, keys = self._storage(inputs.attention, pool)
        query = None
        if self._indexer is not None and max(metadata.block_counts) > self._indexer.topk:
            assert keys is not None
            query = self._indexer.query(residual, x, rotations.forward, is_packed=packed.is_packed(keys))
        return _Entries(metadata, slots, keys, query)

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
        self,
        projected: Projected,
        entries: _Entries | None,
        inputs: ForwardInputs,
        inverse: Rotation,
        pool: KVPool,
    ) -> Tensor:
        """The chunk's queries over window and entries -> [T, H, d] in their dtype, padding zero."""
        queries, keys, attend = projected.queries, projected.keys, self._projections.kernel.attend
        ring = pool.window[self._layer]
        if packed.is_packed(ring):  # read in this step as in any later one
            packed.round_(keys, self._rotary_width)
        output = torch.empty_like(queries)
        output[inputs.num_tokens :] = 0
        for b, block in enumerate(inputs.attention.blocks):
            part = slice(block.start, block.stop)
            window = WindowKeys(ring, keys, block.sources, block.first, block.all_visible)
            chosen = self._choose(entries, b, part) if entries is not None else None
            attend(queries[part], window, chosen, self._projections.sink, inverse.rows(part), output[part])
        return output

    def _store(self, keys: Tensor, inputs: ForwardInputs, pool: KVPool) -> Tensor:
        """Keep the chunk's keys [T, d] in the window's ring; returns them."""
        ring, store = pool.window[self._layer], inputs.attention.window_store
        if packed.is_packed(ring):
            packed.store(ring, store.dst, keys, store.src, self._rotary_width)
        else:
            kept.store(ring, store.dst, keys, store.src)
        return keys

    def _choose(self, entries: _Entries, b: int, part: slice) -> EntryKeys | None:
        """Compressed keys of one block: all that a token sees, or the indexer's choice. None when no token sees one."""
        metadata = entries.metadata
        counts = metadata.counts[part]
        visible = Visible(metadata.entry_slots, metadata.row_ids[part], counts, metadata.block_counts[b])
        if not visible.most:
            return None
        if self._indexer is None or visible.most <= self._indexer.topk:
            return self._projections.kernel.see(entries.entries, visible)
        assert entries.keys is not None
        assert entries.query is not None
        # Ahead of the choice, as the kernels want numbers before they wait for it. On cuda a row of slots bounds them.
        is_bounded = counts.is_cuda and self._indexer.topk % KEY_TILE == 0
        seen = counts if is_bounded else counts.clamp(max=self._indexer.topk)
        return EntryKeys(entries.entries, self._indexer.choose(entries.query, part, entries.keys, visible), seen)


@dataclass(frozen=True, slots=True)
class _Entries:
    """What a layer's queries read of its compressed branch; query only when entries are scored."""

    metadata: CompressedMetadata
    entries: Tensor
    keys: Tensor | None
    query: IndexQuery | None
