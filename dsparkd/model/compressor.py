"""CSA (ratio 4, overlapping, with indexer keys) and HCA (ratio 128) key-value compression.

Every token gives one float32 row: values, then gates, of every channel. An entry is the gate-softmax mean of its
window's values, channel by channel, with a bias on the gates by a token's place in its window; a CSA entry also mixes
in the A halves of the window before. The indexer's small compressor has the same windows, so its channels lie beside
the main ones and both are mixed at once.

Letters: T tokens, N closing entries, c channels (d main + i indexer), d head width, i indexer width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dsparkd.kernels import attention, packed
from dsparkd.kernels.rotary import Rotation, rotate_
from dsparkd.kernels.rows import store
from dsparkd.kv.geometry import CSA_RATIO
from dsparkd.model.config import ModelConfig
from dsparkd.model.inputs import CompressedMetadata
from dsparkd.model.layers import WeightSource, WideLinear, ordered_sum, rms_norm


class Compressor:
    """One layer's compressor; `name` is the official prefix of the attention, for instance layers.2.attn."""

    def __init__(self, config: ModelConfig, source: WeightSource, name: str, ratio: int) -> None:
        self._ratio = ratio
        self._overlap = ratio == CSA_RATIO
        self._width = config.head_dim
        self._eps = config.rms_norm_eps
        self._dtype = source.dtype
        self._is_fused = source.device.type == "cuda"
        self._kernel = attention.bind(source.device, torch.float32)
        self._norm = source.float32(f"{name}.compressor.norm.weight")
        names = [f"{name}.compressor"]
        if self._overlap:
            names.append(f"{name}.indexer.compressor")
            self._key_norm = source.float32(f"{name}.indexer.compressor.norm.weight")
        halves = 2 if self._overlap else 1
        values, gates = ([source.exact(f"{part}.{kind}.weight") for part in names] for kind in ("wkv", "wgate"))
        apes = [source.float32(f"{part}.ape") for part in names]
        # [values | gates], each [A main, A index, B main, B index] (CSA) or [main] (HCA)
        self._project = WideLinear(
            *(part.chunk(halves)[half] for group in (values, gates) for half in range(halves) for part in group)
        )
        # Of the gates, likewise: [ratio, halves * c].
        self._bias = torch.cat([part.chunk(halves, 1)[half] for half in range(halves) for part in apes], 1)
        self._rotary_width = config.qk_rope_head_dim
        self.prepare(None)

    def prepare(self, pages: tuple[Tensor, ...] | None) -> None:
        """Compile at start for plain rows, or for those of packed pages."""
        if self._is_fused:
            from dsparkd.kernels.cuda.compressor import prepare  # a cpu start imports no triton

            key_norm = self._key_norm if self._overlap else None
            span = 2 * self._ratio if self._overlap else self._ratio
            prepare(self._norm, key_norm, span, self._rotary_width, self._dtype, pages)

    def project(self, x: Tensor) -> Tensor:
        """x [T, D] -> rows [T, 2 * halves * c] float32: values, and gates without their bias."""
        return self._project(x)

    def keep(
        self,
        rows: Tensor,
        ring: Tensor,
        metadata: CompressedMetadata,
        rotation: Rotation | None,
        pages: tuple[Tensor, ...],
    ) -> None:
        """Mix the entries that close in this step, store them, and store the step's rows.

        pages: entries and, for CSA, indexer keys. rotation: at metadata.closing_positions, None where nothing closes.
        """
        kept = metadata.store
        if self._is_fused and rotation is not None:
            self._close_fused(rows, ring, metadata, rotation, pages)
        elif kept.early:
            store(ring, kept.dst, rows, kept.src)
        if not self._is_fused and rotation is not None:
            self._close(rows, ring, metadata, rotation, pages)
        if not kept.early:
            store(ring, kept.dst, rows, kept.src)

    def _close(
        self, rows: Tensor, ring: Tensor, metadata: CompressedMetadata, rotation: Rotation, pages: tuple[Tensor, ...]
    ) -> None:
        mixed = self._mix(rows, ring, metadata)
        entries = rms_norm(mixed[:, : self._width], self._norm, self._eps)
        rotate_(entries[:, None], rotation)
        rotary = rotation.cos.shape[-1]
        pages[0].index_copy_(
            0, metadata.closing_dst, packed.pack(entries, rotary) if packed.is_packed(pages[0]) else entries
        )
        if self._overlap:
            keys = rms_norm(mixed[:, self._width :], self._key_norm, self._eps)
            rotate_(keys[:, None], rotation)
            pages[1].index_copy_(
                0, metadata.closing_dst, packed.pack_index(keys) if packed.is_packed(pages[1]) else keys
            )

    def _close_fused(
        self, rows: Tensor, ring: Tensor, metadata: CompressedMetadata, rotation: Rotation, pages: tuple[Tensor, ...]
    ) -> None:
        """Do all of it in one kernel, and store the rows, too, where that may be early."""
        from dsparkd.kernels.cuda.compressor import Closing, Part, Rows, close_entries  # a cpu start imports no triton

        kept = metadata.store
        made_of = Rows(rows, ring, self._bias, kept.dst if kept.early else None)
        closing = Closing(metadata.closing, metadata.closing_dst, rotation)
        keys = Part(self._key_norm, pages[1], self._dtype) if self._overlap else None
        close_entries(made_of, closing, self._eps, Part(self._norm, pages[0], self._dtype), keys)

    def _mix(self, rows: Tensor, ring: Tensor, metadata: CompressedMetadata) -> Tensor:
        """Mean of each closing window's values by the softmax of its gates: [N, c] in the model's dtype."""
        spans = self._kernel.gather(ring, rows, metadata.closing)  # [N * span, w]
        if self._overlap:
            halves = spans.view(metadata.num_closing, 2 * CSA_RATIO, 2, 2, -1)  # [N, 8, value | gate, A | B, c]
            spans = torch.cat((halves[:, :CSA_RATIO, :, 0], halves[:, CSA_RATIO:, :, 1]), 1)  # [N, 8, 2, c]
            if metadata.first is not None:
                spans[metadata.first, :CSA_RATIO, 1] = -torch.inf
            bias = self._bias.view(CSA_RATIO, 2, -1).transpose(0, 1).flatten(0, 1)  # [8, c]
        else:
            spans = spans.view(metadata.num_closing, self._ratio, 2, -1)  # [N, 128, 2, c]
            bias = self._bias
        values, gates = spans[:, :, 0], spans[:, :, 1] + bias
        shares = (gates - gates.amax(1, keepdim=True)).exp_()
        return ordered_sum(shares * values, 1).div_(ordered_sum(shares, 1)).to(self._dtype)  # cast before the norm
