"""DSpark drafter: context keys of the target's taps, block forward, Markov head, confidence head (model.md 5.2 to 5.6).

A block is gamma rows: its anchor, the last token that is known, and noise. All rows see the same keys, the context
before the anchor and the whole block; row i drafts the token behind it. The drafter holds no state: context keys are
rows of rings that the caller keeps, one ring a stage.

Letters: T padded tokens, B blocks, G rows of a block (gamma), K stages, W window, R ring rows, S streams, D width,
H heads, d head width, M Markov rank, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dsparkd.errors import CheckpointError
from dsparkd.kernels import blocks, confidence, noise, sampling
from dsparkd.kernels.attention import KeptKeys, WindowKeys
from dsparkd.kernels.beside import Beside
from dsparkd.kernels.confidence import survival
from dsparkd.kernels.tiles import ROW_TILE
from dsparkd.model.attention import Projections, Rotations
from dsparkd.model.config import DSparkConfig, ModelConfig
from dsparkd.model.hyper_connection import HyperConnection, HyperHead, Residual
from dsparkd.model.layers import Linear, WeightSource, WideLinear, main_rotary, rms_norm
from dsparkd.model.moe import ExpertExchange, MoE
from dsparkd.model.transformer import Transformer


@dataclass(frozen=True, slots=True)
class DraftInputs:
    """One rank's blocks of one step, on the model's device.

    anchor_ids, positions [B] int64: each block's anchor. rings [K, R, d]: context keys. sources [B, W] int64: ring row
    of each of the W positions before the anchor, oldest first; of the oldest, first [B] int64 have no key, and their
    source is a row of finite values. all_visible: that first is zero throughout. num_live_blocks [1] int64: blocks from
    there on are padding of a captured shape; None where none is.
    """

    anchor_ids: Tensor
    positions: Tensor
    rings: Tensor
    sources: Tensor
    first: Tensor
    all_visible: bool
    num_live_blocks: Tensor | None = None

    @property
    def num_blocks(self) -> int:
        """B."""
        return self.anchor_ids.shape[0]


@dataclass(frozen=True, slots=True)
class DraftSampling:
    """How blocks draw: temperatures [B] float32, 0 for a greedy block; seeds, choices [B] int64 of kernels/noise.py.

    is_coupled: with the noise of plain decoding, else with a stream of its own for each draft of a block.
    """

    temperatures: Tensor
    seeds: Tensor
    choices: Tensor
    is_coupled: bool = True


@dataclass(frozen=True, slots=True)
class Drafts:
    """ids [B, G] int64, the drafted tokens; logits [B, G, V] float32 that they were chosen by, before temperature.

    confidence [B, G] float32: logits of the chance that a draft is accepted when those before it are; it depends on
    those before it, not on the draft itself. `survival` turns it into chances.
    """

    ids: Tensor
    logits: Tensor
    confidence: Tensor


class Stage:
    """One draft stage: attention over context and block, then experts, each inside its own hyper-connection."""

    def __init__(self, config: ModelConfig, source: WeightSource, stage: int, rank: int, beside: Beside) -> None:
        prefix = f"mtp.{stage}"
        self.entry = HyperConnection(config, source, prefix, "attn")
        self.projections = Projections(config, source, f"{prefix}.attn")
        self._experts_connection = HyperConnection(config, source, prefix, "ffn")
        self.moe = MoE(config, source, f"{prefix}.ffn", hashed=False, rank=rank, beside=beside)

    def forward(
        self, residual: Residual, rows: _Rows, ring: Tensor, exchange: ExpertExchange, following: Stage | None
    ) -> Residual:
        """Streams [T, S, D], ring [R, d] -> those for the following stage."""
        collapsed = self.entry.collapse(residual)
        mixed = self._attend(collapsed.input, rows, ring)
        residual = self.entry.expand(mixed, residual, collapsed, self._experts_connection)
        collapsed = self._experts_connection.collapse(residual)
        output = self.moe.forward(collapsed.input, rows.input_ids, rows.num_live, exchange)
        return self._experts_connection.expand(
            output, residual, collapsed, None if following is None else following.entry
        )

    def _attend(self, x: Tensor, rows: _Rows, ring: Tensor) -> Tensor:
        """x [T, D], normed -> [T, D]."""
        projected = self.projections.project(x, rows.rotations.forward)
        real = slice(0, rows.num_tokens)
        window = WindowKeys(ring, projected.keys, rows.sources, rows.first, rows.all_visible)
        mixed = torch.empty_like(projected.queries)
        mixed[rows.num_tokens :] = 0
        self.projections.kernel.attend(
            projected.queries[real], window, None, self.projections.sink, rows.rotations.inverse.rows(real), mixed[real]
        )
        return self.projections.output(mixed)


class Drafter:
    """The draft stages and heads with one rank's expert shards; embedding and vocabulary head are the target's."""

    def __init__(self, config: ModelConfig, source: WeightSource, rank: int, target: Transformer) -> None:
        self.dspark = require_dspark(config)
        self.config = config
        self.dtype = source.dtype
        self.device = source.device
        self._embedding, self._head = target.embedding, target.head
        self._main_proj = Linear(source.weight("mtp.0.main_proj"))
        self._main_norm = source.float32("mtp.0.main_norm.weight")
        self.stages = [Stage(config, source, stage, rank, target.beside) for stage in range(self.dspark.num_stages)]
        last = f"mtp.{self.dspark.num_stages - 1}."
        self._head_connection = HyperHead(config, source, last)
        self._norm = source.float32(f"{last}norm.weight")
        self._markov_in = source.float32(f"{last}markov_head.markov_w1.weight")  # [V, M]
        self._markov_out = WideLinear(source.exact(f"{last}markov_head.markov_w2.weight"))  # M -> V
        self._confidence = confidence.bind(source.float32(f"{last}confidence_head.proj.weight"))  # D + M -> 1
        self._temperatures = torch.tensor(self.dspark.confidence_temperatures, device=self.device)
        self._rotary = main_rotary(config, self.device)

    @torch.inference_mode()
    def context_keys(self, taps: Tensor, positions: Tensor) -> Tensor:
        """taps [T, layers * D] of tokens at positions [T] -> what the rings hold of them, [K, T, d].

        T is a multiple of ROW_TILE. The keys of a token depend on its taps and position alone.
        """
        return torch.stack(self._context_keys(taps, positions, [None] * len(self.stages)))

    @torch.inference_mode()
    def keep_context(self, taps: Tensor, positions: Tensor, rings: Tensor, dst: Tensor) -> None:
        """Store the first tokens' context keys in rows dst [K] of rings [stages, R, d]; -1 of padding, on cuda."""
        self._context_keys(taps, positions, [KeptKeys(ring, dst) for ring in rings])

    def _context_keys(self, taps: Tensor, positions: Tensor, kept: Sequence[KeptKeys | None]) -> list[Tensor]:
        fused = rms_norm(self._main_proj(taps), self._main_norm, self.config.rms_norm_eps)
        rotation = self._rotary.at(positions)
        return [stage.projections.keys(fused, rotation, each) for stage, each in zip(self.stages, kept, strict=True)]

    @torch.inference_mode()
    def draft(self, inputs: DraftInputs, exchange: ExpertExchange, sampling: DraftSampling | None = None) -> Drafts:
        """Draft one block for each anchor. The caller has announced both ranks' `num_padded_rows` to the exchange.

        sampling: None when every block is greedy. A rank without blocks takes part with its experts.
        """
        B, G, V = inputs.num_blocks, self.config.gamma, self.config.vocab_size
        if not B:
            for stage in self.stages:
                stage.moe.assist(exchange, self.device)
            nothing = torch.empty((0, G), device=self.device)
            return Drafts(nothing.long(), torch.empty((0, G, V), device=self.device), nothing)
        hidden, logits = self._block(inputs, exchange)
        return self._choose(hidden.view(B, G, -1), logits.view(B, G, V), inputs, sampling)

    def num_padded_rows(self, num_blocks: int) -> int:
        """T of that many blocks: what this rank announces in ExpertExchange.begin_step."""
        return self._padded(num_blocks * self.config.gamma)

    def survival(self, confidence: Tensor) -> Tensor:
        """Drafts.confidence [B, G] -> the chance that a draft and all before it are accepted, [B, G] float32."""
        return survival(confidence, self._temperatures)

    def _block(self, inputs: DraftInputs, exchange: ExpertExchange) -> tuple[Tensor, Tensor]:
        """All rows of all blocks: the last hidden state before its norm [B * G, D], and base logits [B * G, V]."""
        rows = self._lay_out(inputs)
        embedded = self._embedding.index_select(0, rows.input_ids)
        residual = Residual(embedded[:, None].repeat(1, self.config.hc_mult, 1))  # [T, S, D]
        for stage, ring, following in zip(self.stages, inputs.rings, [*self.stages[1:], None], strict=True):
            residual = stage.forward(residual, rows, ring, exchange, following)
        hidden = self._head_connection.collapse(residual.streams)
        normed = rms_norm(hidden, self._norm, self.config.rms_norm_eps)
        return hidden[: rows.num_tokens], self._head(normed)[: rows.num_tokens]

    def _lay_out(self, inputs: DraftInputs) -> _Rows:
        """Flatten the blocks, one behind the other, and pad with noise at position 0."""
        B, G = inputs.num_blocks, self.config.gamma
        rows = blocks.lay_out(
            inputs.anchor_ids,
            inputs.positions,
            inputs.sources,
            inputs.first,
            G,
            self.dspark.noise_token_id,
            self.num_padded_rows(B),
        )
        live = inputs.num_live_blocks
        return _Rows(
            num_tokens=B * G,
            num_live=torch.full((1,), B * G, device=self.device) if live is None else live * G,
            input_ids=rows.input_ids,
            rotations=Rotations.of(self._rotary, rows.positions),
            sources=rows.sources,
            first=rows.first,
            all_visible=inputs.all_visible,
        )

    def _padded(self, count: int) -> int:
        """Rows of a product: the kernels of a device take any number."""
        return count if self.device.type == "cuda" else -(-count // ROW_TILE) * ROW_TILE

    def _choose(self, hidden: Tensor, logits: Tensor, inputs: DraftInputs, drawing: DraftSampling | None) -> Drafts:
        """Choose draft by draft: each adds its predecessor's bigram bias to its row of base logits, in place."""
        B, G = inputs.num_blocks, self.config.gamma
        padding = self._padded(B) - B
        before, chosen = [], []
        previous = inputs.anchor_ids
        for i in range(G):
            markov = self._markov_in.index_select(0, previous)
            before.append(markov)
            rows = torch.nn.functional.pad(markov, (0, 0, 0, padding)) if padding else markov
            biases = self._markov_out(rows)[:B]
            previous = _best(logits[:, i], biases, inputs.positions, i, drawing)
            chosen.append(previous)
        # All at once: one by one they would wait for their weights as often.
        return Drafts(torch.stack(chosen, 1), logits, self._confidence(hidden, torch.stack(before)))


def require_dspark(config: ModelConfig) -> DSparkConfig:
    """Return the drafter's part of the config. Raises CheckpointError when the checkpoint has no drafter."""
    if config.dspark is None:
        raise CheckpointError("config.json: key 'dspark_block_size' is missing: the checkpoint has no drafter")
    return config.dspark


@dataclass(frozen=True, slots=True)
class _Rows:
    """Blocks laid out as T tokens; what WindowKeys wants of the first num_tokens. Those from num_live [1] on are
    padding, or blocks of padding."""

    num_tokens: int
    num_live: Tensor
    input_ids: Tensor
    rotations: Rotations
    sources: Tensor
    first: Tensor
    all_visible: bool


def _best(logits: Tensor, biases: Tensor, anchors: Tensor, i: int, drawing: DraftSampling | None) -> Tensor:
    """Draw draft i behind anchors at positions [B]: argmax, or argmax of log-probability plus noise; ids [B].

    logits [B, V] are added to by biases in place. Coupled: plain decoding draws its token at the draft's position with
    the same noise, so the two mostly agree.
    """
    top, best = sampling.best(logits, biases)
    if drawing is None:
        return best
    greedy = drawing.temperatures == 0
    scores = logits - top[:, None]
    scores /= torch.where(greedy, 1.0, drawing.temperatures)[:, None]
    stream = noise.SAMPLING if drawing.is_coupled else noise.DRAFTS + i
    scores += noise.gumbel(drawing.seeds, drawing.choices, anchors + i + 1, logits.shape[1], stream)
    return torch.where(greedy, best, sampling.best(scores)[1])
