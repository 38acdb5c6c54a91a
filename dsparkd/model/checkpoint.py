"""Every tensor of an official checkpoint: name, stored dtype, shape. Imports no torch; weights.py reads by it."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import StrEnum

from dsparkd.kv.geometry import CSA_RATIO
from dsparkd.model.config import ModelConfig

FP8_BLOCK = 128  # rows and columns under one FP8 weight scale
FP4_GROUP = 32  # columns under one FP4 weight scale
# Names by how layers read them: in float32 whatever the model's dtype is, or with every stored bit (model.layers).
_WIDE = ("norm.weight", "markov_w1.weight", "confidence_head.proj.weight")
_EXACT = (
    "compressor.wkv.weight",
    "compressor.wgate.weight",
    "weights_proj.weight",
    "gate.weight",
    "head.weight",
    "markov_w2.weight",
)


class StoredDtype(StrEnum):
    """Dtypes as the safetensors header spells them."""

    BF16 = "BF16"
    F32 = "F32"
    I64 = "I64"
    I8 = "I8"
    F8_E4M3 = "F8_E4M3"
    F8_E8M0 = "F8_E8M0"


class Use(StrEnum):
    """Who reads a tensor."""

    TARGET = "target"  # every rank
    EXPERT = "expert"  # the rank that owns the expert
    DRAFT = "draft"  # mtp.*: every rank with a drafter; of its experts, the rank that owns them


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor as stored; expert is the routed expert's index for Use.EXPERT and draft experts, else None."""

    dtype: StoredDtype
    shape: tuple[int, ...]
    use: Use
    expert: int | None = None


def expected_tensors(config: ModelConfig) -> dict[str, TensorSpec]:
    """List the tensors of the main model and, with a DSpark config, of its draft stages."""
    table = _Table(config)
    V, D, S = config.vocab_size, config.hidden_size, config.hc_mult
    table.plain("embed.weight", V, D)
    table.plain("head.weight", V, D)
    table.plain("norm.weight", D)
    table.hyper_head("", S, D)
    for layer, ratio in enumerate(config.compress_ratios):
        table.block(f"layers.{layer}.", ratio, hashed=layer < config.num_hash_layers)
    if config.dspark is not None:
        table.use = Use.DRAFT
        stages = config.dspark.num_stages
        for stage in range(stages):
            table.block(f"mtp.{stage}.", 0, hashed=False)
        table.linear("mtp.0.main_proj", D, stages * D)
        table.plain("mtp.0.main_norm.weight", D)
        last = f"mtp.{stages - 1}."
        table.plain(last + "norm.weight", D)
        table.hyper_head(last, S, D)
        table.plain(last + "markov_head.markov_w1.weight", V, config.dspark.markov_rank)
        table.plain(last + "markov_head.markov_w2.weight", V, config.dspark.markov_rank)
        table.plain(last + "confidence_head.proj.weight", 1, D + config.dspark.markov_rank)
    return table.specs


def nextn_tensors(config: ModelConfig) -> dict[str, TensorSpec]:
    """List the tensors of the preview checkpoints' NextN block; recognised by mtp.0.e_proj, never loaded."""
    table = _Table(config)
    table.use = Use.DRAFT
    table.block("mtp.0.", 0, hashed=False)
    for name in ("enorm", "hnorm", "norm"):
        table.plain(f"mtp.0.{name}.weight", config.hidden_size)
    for name in ("e_proj", "h_proj"):
        table.linear(f"mtp.0.{name}", config.hidden_size, config.hidden_size)
    table.hyper_head("mtp.0.", config.hc_mult, config.hidden_size)
    return table.specs


def wanted_names(specs: Mapping[str, TensorSpec], part: Use, ranks: Collection[int], per_rank: int) -> set[str]:
    """Name the tensors that these ranks load for the target (Use.TARGET) or the drafter (Use.DRAFT).

    per_rank: routed experts that one rank owns.
    """
    return {
        name
        for name, spec in specs.items()
        if (spec.use is Use.DRAFT) == (part is Use.DRAFT) and (spec.expert is None or spec.expert // per_rank in ranks)
    }


def stored_bytes(spec: TensorSpec) -> int:
    """Bytes that a tensor takes in its file."""
    sizes = {StoredDtype.BF16: 2, StoredDtype.F32: 4, StoredDtype.I64: 8}
    return math.prod(spec.shape) * sizes.get(spec.dtype, 1)


def placed_bytes(specs: Mapping[str, TensorSpec], name: str, dtype: str, *, is_packed: bool) -> int:
    """Bytes that the tensor NAME takes on its device once it is loaded.

    dtype: engine.dtype. is_packed: small formats stay as they are stored, as on cuda in bfloat16; else they are
    dequantised, and their scales gone.
    """
    spec = specs[name]
    count = math.prod(spec.shape)
    width = 4 if dtype == "float32" else 2
    match spec.dtype:
        case StoredDtype.I64:
            return count * 8
        case StoredDtype.I8:
            return count if is_packed else 2 * count * width  # two FP4 numbers a byte
        case StoredDtype.F8_E4M3:
            return count if is_packed else count * width
        case StoredDtype.F8_E8M0:
            weight = specs[name.removesuffix("scale") + "weight"]
            if not is_packed:
                return 0
            # The scale of an FP8 block is kept once for each of its rows.
            return count if weight.dtype is StoredDtype.I8 else weight.shape[0] * spec.shape[1]
        case StoredDtype.BF16 | StoredDtype.F32:
            if not name.endswith(".weight") or name.endswith(_WIDE):
                return count * 4
            if name.endswith(_EXACT):
                return count * (2 if is_packed and spec.dtype is StoredDtype.BF16 else 4)
            return count * width


class _Table:
    """Collects specs under the config's storage rules."""

    def __init__(self, config: ModelConfig) -> None:
        self.specs: dict[str, TensorSpec] = {}
        self.use = Use.TARGET
        self._config = config
        self._plain = StoredDtype.BF16 if config.stored_dtype == "bfloat16" else StoredDtype.F32

    def add(self, name: str, dtype: StoredDtype, *shape: int, expert: int | None = None) -> None:
        use = Use.EXPERT if expert is not None and self.use is Use.TARGET else self.use
        self.specs[name] = TensorSpec(dtype, shape, use, expert)

    def plain(self, name: str, *shape: int) -> None:
        """A tensor that the release keeps in bfloat16."""
        self.add(name, self._plain, *shape)

    def linear(self, name: str, out_width: int, in_width: int, expert: int | None = None) -> None:
        """A weight and, when quantised, its block scales."""
        kind = self._config.expert_dtype if expert is not None else "fp8" if self._config.quantized else None
        if kind is None:
            self.add(f"{name}.weight", self._plain, out_width, in_width, expert=expert)
        elif kind == "fp8":
            scale = (-(-out_width // FP8_BLOCK), -(-in_width // FP8_BLOCK))
            self.add(f"{name}.weight", StoredDtype.F8_E4M3, out_width, in_width, expert=expert)
            self.add(f"{name}.scale", StoredDtype.F8_E8M0, *scale, expert=expert)
        else:
            self.add(f"{name}.weight", StoredDtype.I8, out_width, in_width // 2, expert=expert)
            self.add(f"{name}.scale", StoredDtype.F8_E8M0, out_width, -(-in_width // FP4_GROUP), expert=expert)

    def hyper_head(self, prefix: str, streams: int, width: int) -> None:
        self.add(prefix + "hc_head_fn", StoredDtype.F32, streams, streams * width)
        self.add(prefix + "hc_head_base", StoredDtype.F32, streams)
        self.add(prefix + "hc_head_scale", StoredDtype.F32, 1)

    def block(self, prefix: str, ratio: int, hashed: bool) -> None:
        """One transformer block: norms, hyper-connections, attention, experts."""
        config = self._config
        D, S = config.hidden_size, config.hc_mult
        for part in ("attn", "ffn"):
            self.plain(f"{prefix}{part}_norm.weight", D)
            self.add(f"{prefix}hc_{part}_fn", StoredDtype.F32, (2 + S) * S, S * D)
            self.add(f"{prefix}hc_{part}_base", StoredDtype.F32, (2 + S) * S)
            self.add(f"{prefix}hc_{part}_scale", StoredDtype.F32, 3)
        self._attention(prefix + "attn.", ratio)
        self._experts(prefix + "ffn.", hashed)

    def _attention(self, prefix: str, ratio: int) -> None:
        config = self._config
        D, H, d = config.hidden_size, config.num_attention_heads, config.head_dim
        self.linear(prefix + "wq_a", config.q_lora_rank, D)
        self.plain(prefix + "q_norm.weight", config.q_lora_rank)
        self.linear(prefix + "wq_b", H * d, config.q_lora_rank)
        self.linear(prefix + "wkv", d, D)
        self.plain(prefix + "kv_norm.weight", d)
        self.add(prefix + "attn_sink", StoredDtype.F32, H)
        self.linear(prefix + "wo_a", config.o_groups * config.o_lora_rank, H // config.o_groups * d)
        self.linear(prefix + "wo_b", D, config.o_groups * config.o_lora_rank)
        if ratio:
            self._compressor(prefix + "compressor.", ratio, d)
        if ratio == CSA_RATIO:
            self.linear(prefix + "indexer.wq_b", config.index_n_heads * config.index_head_dim, config.q_lora_rank)
            self.plain(prefix + "indexer.weights_proj.weight", config.index_n_heads, D)
            self._compressor(prefix + "indexer.compressor.", ratio, config.index_head_dim)

    def _compressor(self, prefix: str, ratio: int, width: int) -> None:
        row = 2 * width if ratio == CSA_RATIO else width  # CSA rows carry an A half and a B half
        self.plain(prefix + "wkv.weight", row, self._config.hidden_size)
        self.plain(prefix + "wgate.weight", row, self._config.hidden_size)
        self.add(prefix + "ape", StoredDtype.F32, ratio, row)
        self.plain(prefix + "norm.weight", width)

    def _experts(self, prefix: str, hashed: bool) -> None:
        config = self._config
        D, E, I = config.hidden_size, config.n_routed_experts, config.moe_intermediate_size  # noqa: E741
        self.plain(prefix + "gate.weight", E, D)
        if hashed:
            self.add(prefix + "gate.tid2eid", StoredDtype.I64, config.vocab_size, config.num_experts_per_tok)
        else:
            self.add(prefix + "gate.bias", StoredDtype.F32, E)
        for expert in range(E):
            for name, shape in (("w1", (I, D)), ("w2", (D, I)), ("w3", (I, D))):
                self.linear(f"{prefix}experts.{expert}.{name}", *shape, expert=expert)
        for name, shape in (("w1", (I, D)), ("w2", (D, I)), ("w3", (I, D))):
            self.linear(f"{prefix}shared_experts.{name}", *shape)
