"""Target model: block, stack, head, and the features that the draft reads.

Letters: T padded tokens, L padded logit rows, S streams, D width, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dsparkd.kernels import beside
from dsparkd.kernels.beside import Beside
from dsparkd.kv.pool import KVPool
from dsparkd.model.attention import Attention, Rotations
from dsparkd.model.config import ModelConfig
from dsparkd.model.hyper_connection import HyperConnection, HyperHead, Residual
from dsparkd.model.inputs import ForwardInputs
from dsparkd.model.layers import WeightSource, WideLinear, compressed_rotary, main_rotary, ordered_sum, rms_norm
from dsparkd.model.moe import ExpertExchange, MoE


@dataclass(frozen=True, slots=True)
class ForwardOutputs:
    """logits [num_logits, V] float32 in plan order; taps [T, layers * D] in the model's dtype, when asked for."""

    logits: Tensor
    taps: Tensor | None


class Block:
    """One layer: attention, then experts, each inside its own hyper-connection."""

    def __init__(self, config: ModelConfig, source: WeightSource, layer: int, rank: int, beside: Beside) -> None:
        prefix = f"layers.{layer}"
        self.entry = HyperConnection(config, source, prefix, "attn")
        self.attention = Attention(config, source, layer, beside)
        self._experts_connection = HyperConnection(config, source, prefix, "ffn")
        self.moe = MoE(config, source, f"{prefix}.ffn", layer < config.num_hash_layers, rank, beside)

    def forward(
        self,
        residual: Residual,
        inputs: ForwardInputs,
        rotations: Rotations,
        pool: KVPool,
        exchange: ExpertExchange,
        following: Block | None,
    ) -> Residual:
        """Streams [T, S, D] -> those for the following layer."""
        collapsed = self.entry.collapse(residual)
        mixed = self.attention.forward(collapsed.input, inputs, rotations, pool)
        residual = self.entry.expand(mixed, residual, collapsed, self._experts_connection)
        collapsed = self._experts_connection.collapse(residual)
        output = self.moe.forward(collapsed.input, inputs.input_ids, inputs.num_live, exchange)
        return self._experts_connection.expand(
            output, residual, collapsed, None if following is None else following.entry
        )


class Transformer:
    """The main model with one rank's expert shard. Stateless between steps: state lives in the pool."""

    def __init__(self, config: ModelConfig, source: WeightSource, rank: int, device: torch.device) -> None:
        self.config = config
        self.dtype = source.dtype
        self.device = device
        self.embedding = source.linear("embed")
        self.beside = beside.bind(device)
        self.blocks = [Block(config, source, layer, rank, self.beside) for layer in range(config.num_hidden_layers)]
        self._head_connection = HyperHead(config, source, "")
        self._norm = source.float32("norm.weight")
        self.head = WideLinear(source.exact("head.weight"))
        self._main_rotary = main_rotary(config, device)
        self._compressed_rotary = compressed_rotary(config, device)

    def prepare(self, pool: KVPool) -> None:
        """Compile for the pool's rows at start: no step waits for a compiler."""
        for block in self.blocks:
            block.attention.prepare(pool)

    @torch.inference_mode()
    def forward(
        self, inputs: ForwardInputs, pool: KVPool, exchange: ExpertExchange, taps: tuple[int, ...] = ()
    ) -> ForwardOutputs:
        """Run one step. The caller has announced both ranks' counts with exchange.begin_step.

        taps: layers whose output streams are wanted, averaged over the streams, side by side in this order.
        A rank without tokens takes part with its experts and returns zero logits.
        """
        if not inputs.num_padded_tokens:
            for block in self.blocks:
                block.moe.assist(exchange, self.device)
            return ForwardOutputs(torch.empty((0, self.config.vocab_size), device=self.device), None)
        main = Rotations.of(self._main_rotary, inputs.positions)
        compressed = Rotations.of(self._compressed_rotary, inputs.positions)
        embedded = self.embedding.index_select(0, inputs.input_ids)
        residual = Residual(embedded[:, None].repeat(1, self.config.hc_mult, 1))  # [T, S, D]
        width = self.config.hidden_size
        features = residual.streams.new_empty((len(embedded), len(taps) * width)) if taps else None
        for layer, (block, following) in enumerate(zip(self.blocks, [*self.blocks[1:], None], strict=True)):
            rotations = compressed if block.attention.ratio else main
            residual = block.forward(residual, inputs, rotations, pool, exchange, following)
            if features is not None and layer in taps:
                place = taps.index(layer) * width
                _average(residual.streams, features[:, place : place + width])
        return ForwardOutputs(self._logits(residual.streams, inputs), features)

    def _logits(self, streams: Tensor, inputs: ForwardInputs) -> Tensor:
        """Project the rows that need it: [num_logits, V] float32."""
        if not inputs.num_logits:
            return torch.empty((0, self.config.vocab_size), device=self.device)
        if inputs.logit_rows is not None:
            streams = streams.index_select(0, inputs.logit_rows)
        hidden = self._head_connection.collapse(streams)
        hidden = rms_norm(hidden, self._norm, self.config.rms_norm_eps)
        return self.head(hidden)[: inputs.num_logits]


def _average(streams: Tensor, features: Tensor) -> None:
    """Write the mean of streams [T, S, D] into features [T, D], maybe columns of more: float32 inside, one cast."""
    if streams.is_cuda:
        from dsparkd.kernels.cuda import taps  # a cpu start imports no triton

        taps.average(streams, features)
        return
    features.copy_(ordered_sum(streams.float(), 1) / streams.shape[1])
