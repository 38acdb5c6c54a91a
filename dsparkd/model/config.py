"""ModelConfig: a checkpoint's config.json, every key checked. Imports no torch.

A key that is absent or unknown is an error that names it: a silent default would load the wrong model.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dsparkd.config import SpeculationConfig
from dsparkd.errors import CheckpointError, ConfigError
from dsparkd.kv.geometry import CSA_RATIO, HCA_RATIO, KVGeometry

# Present in released files, and without meaning for inference here.
UNUSED_KEYS = frozenset(
    {
        "architectures",  # identification; model_type is what is checked
        "attention_dropout",  # training
        "initializer_range",  # training
        "num_nextn_predict_layers",  # also 1 in DSpark checkpoints, which hold no NextN block: tensors decide
        "num_key_value_heads",  # checked below to be 1, then implied
        "pretraining_tp",
        "transformers_version",
        "use_cache",
        "ep_size",
        "seq_aux",
        "aux_loss_alpha",
        "n_group",  # V3 leftovers that V4 does not read
        "topk_group",
        "moe_layer_freq",
        "first_k_dense_replace",
    }
)


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """YaRN of the compressed layers' rotary base. Lengths in tokens, betas in rotations."""

    factor: float
    original_max_position_embeddings: int
    beta_fast: float
    beta_slow: float


@dataclass(frozen=True, slots=True)
class DSparkConfig:
    """The drafter's part: gamma rows a block, tapped main layers, rank of the bigram bias.

    confidence_temperatures: what divides the confidence logits, one a draft position.
    """

    block_size: int
    noise_token_id: int
    target_layer_ids: tuple[int, ...]
    markov_rank: int
    confidence_temperatures: tuple[float, ...]

    @property
    def num_stages(self) -> int:
        """Draft stages: the official files hold one a tapped layer."""
        return len(self.target_layer_ids)


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Geometry and numbers of one DeepSeek-V4 checkpoint; compress_ratios has one entry a main layer."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    head_dim: int
    qk_rope_head_dim: int
    q_lora_rank: int
    o_groups: int
    o_lora_rank: int
    sliding_window: int
    compress_ratios: tuple[int, ...]
    rope_theta: float
    compress_rope_theta: float
    rope_scaling: YarnScaling | None
    max_position_embeddings: int
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    hc_mult: int
    hc_sinkhorn_iters: int
    hc_eps: float
    n_routed_experts: int
    n_shared_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    num_hash_layers: int
    routed_scaling_factor: float
    swiglu_limit: float
    rms_norm_eps: float
    bos_token_id: int
    eos_token_id: int
    stored_dtype: Literal["bfloat16", "float32"]
    quantized: bool
    expert_dtype: Literal["fp4", "fp8"] | None
    dspark: DSparkConfig | None

    @property
    def gamma(self) -> int:
        """Rows of a draft block; 0 without a drafter."""
        return self.dspark.block_size if self.dspark is not None else 0

    def kv_geometry(
        self,
        page_tokens: int,
        dtype: Literal["bfloat16", "float32"],
        drafts: bool = False,
        kv_dtype: Literal["model", "fp8"] = "model",
    ) -> KVGeometry:
        """Sizes of the cached state under that page size and engine dtype. drafts: the drafter's keys are kept too.

        Raises ConfigError for a kv_dtype that the model's widths do not allow.
        """
        return KVGeometry(
            num_layers=self.num_hidden_layers,
            num_csa_layers=self.compress_ratios.count(CSA_RATIO),
            num_hca_layers=self.compress_ratios.count(HCA_RATIO),
            head_dim=self.head_dim,
            index_head_dim=self.index_head_dim,
            window=self.sliding_window,
            gamma=self.gamma,
            page_tokens=page_tokens,
            kv_bytes=4 if dtype == "float32" else 2,
            num_draft_stages=self.dspark.num_stages if drafts and self.dspark is not None else 0,
            rotary_dim=self.qk_rope_head_dim,
            is_packed=kv_dtype == "fp8",
        )


class _Fields:
    """The keys of one JSON object, each read at most once; what stays unread is an error."""

    def __init__(self, values: dict[str, object], where: str) -> None:
        self._values = values
        self._where = where
        self._read: set[str] = set()

    def has(self, key: str) -> bool:
        return key in self._values

    def value(self, key: str) -> object:
        if key not in self._values:
            raise CheckpointError(f"{self._where}: key {key!r} is missing")
        self._read.add(key)
        return self._values[key]

    def integer(self, key: str, low: int = 1, high: int = 1 << 31) -> int:
        found = self.value(key)
        if isinstance(found, bool) or not isinstance(found, int) or not low <= found <= high:
            raise CheckpointError(f"{self._where}: {key} = {found!r}: expected an integer in {low}..{high}")
        return found

    def positive(self, key: str) -> float:
        found = self.value(key)
        if isinstance(found, bool) or not isinstance(found, int | float) or not 0 < found < math.inf:
            raise CheckpointError(f"{self._where}: {key} = {found!r}: expected a positive number")
        return float(found)

    def exactly(self, key: str, *expected: object) -> object:
        found = self.value(key)
        if not any(found == one and type(found) is type(one) for one in expected):
            choice = " or ".join(repr(one) for one in expected)
            raise CheckpointError(f"{self._where}: {key} = {found!r}: only {choice} is supported")
        return found

    def integers(self, key: str) -> tuple[int, ...]:
        found = self.value(key)
        if not isinstance(found, list) or not all(type(one) is int for one in found):
            raise CheckpointError(f"{self._where}: {key} = {found!r}: expected a list of integers")
        return tuple(found)

    def positives(self, key: str) -> tuple[float, ...]:
        found = self.value(key)
        if not isinstance(found, list) or not all(type(one) in (int, float) and 0 < one < math.inf for one in found):
            raise CheckpointError(f"{self._where}: {key} = {found!r}: expected a list of positive numbers")
        return tuple(map(float, found))

    def section(self, key: str) -> _Fields | None:
        """Return the fields of a nested object, None for null."""
        found = self.value(key)
        if found is None:
            return None
        if not isinstance(found, dict):
            raise CheckpointError(f"{self._where}: {key} = {found!r}: expected an object or null")
        return _Fields(found, f"{self._where}: {key}")

    def ignore(self, keys: frozenset[str]) -> None:
        self._read |= keys

    def finish(self) -> None:
        unknown = sorted(self._values.keys() - self._read)
        if unknown:
            raise CheckpointError(f"{self._where}: unknown key {', '.join(map(repr, unknown))}")


def load_model_config(directory: Path) -> ModelConfig:
    """Read DIRECTORY/config.json. Raises CheckpointError that names the file and the key."""
    path = directory / "config.json"
    try:
        values = json.loads(path.read_bytes())
    except OSError as error:
        remedy = "set engine.checkpoint to a directory in the official layout"
        raise CheckpointError(f"{path}: cannot be read ({error.strerror}); {remedy}") from error
    except ValueError as error:
        raise CheckpointError(f"{path}: not JSON ({error})") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{path}: expected a JSON object")
    return parse_model_config(values, str(path))


def parse_model_config(values: dict[str, object], where: str = "config.json") -> ModelConfig:
    """Check every key of a released config and return the model's. Raises CheckpointError."""
    fields = _Fields(values, where)
    fields.exactly("model_type", "deepseek_v4")
    fields.exactly("num_key_value_heads", 1)
    fields.exactly("scoring_func", "sqrtsoftplus")
    fields.exactly("topk_method", "noaux_tc")
    fields.exactly("norm_topk_prob", True)
    fields.exactly("hidden_act", "silu")
    fields.exactly("tie_word_embeddings", False)
    fields.exactly("attention_bias", False)
    num_layers = fields.integer("num_hidden_layers")
    quantized = _parse_quantization(fields)
    vocab_size = fields.integer("vocab_size")
    config = ModelConfig(
        vocab_size=vocab_size,
        hidden_size=fields.integer("hidden_size"),
        num_hidden_layers=num_layers,
        num_attention_heads=fields.integer("num_attention_heads"),
        head_dim=fields.integer("head_dim"),
        qk_rope_head_dim=fields.integer("qk_rope_head_dim", low=2),
        q_lora_rank=fields.integer("q_lora_rank"),
        o_groups=fields.integer("o_groups"),
        o_lora_rank=fields.integer("o_lora_rank"),
        sliding_window=fields.integer("sliding_window"),
        compress_ratios=_parse_ratios(fields.integers("compress_ratios"), num_layers, where),
        rope_theta=fields.positive("rope_theta"),
        compress_rope_theta=fields.positive("compress_rope_theta"),
        rope_scaling=_parse_yarn(fields.section("rope_scaling")),
        max_position_embeddings=fields.integer("max_position_embeddings"),
        index_n_heads=fields.integer("index_n_heads"),
        index_head_dim=fields.integer("index_head_dim"),
        index_topk=fields.integer("index_topk"),
        hc_mult=fields.integer("hc_mult"),
        hc_sinkhorn_iters=fields.integer("hc_sinkhorn_iters"),
        hc_eps=fields.positive("hc_eps"),
        n_routed_experts=fields.integer("n_routed_experts", low=2),
        n_shared_experts=fields.integer("n_shared_experts", high=1),
        num_experts_per_tok=fields.integer("num_experts_per_tok"),
        moe_intermediate_size=fields.integer("moe_intermediate_size"),
        num_hash_layers=fields.integer("num_hash_layers", low=0),
        routed_scaling_factor=fields.positive("routed_scaling_factor"),
        swiglu_limit=fields.positive("swiglu_limit"),
        rms_norm_eps=fields.positive("rms_norm_eps"),
        bos_token_id=fields.integer("bos_token_id", low=0, high=vocab_size - 1),
        eos_token_id=fields.integer("eos_token_id", low=0, high=vocab_size - 1),
        stored_dtype="bfloat16" if fields.exactly("torch_dtype", "bfloat16", "float32") == "bfloat16" else "float32",
        quantized=quantized,
        expert_dtype=_parse_expert_dtype(fields, quantized),
        dspark=_parse_dspark(fields, num_layers, vocab_size, where),
    )
    fields.ignore(UNUSED_KEYS)
    fields.finish()
    _check_shapes(config, where)
    return config


def verified_drafts(config: SpeculationConfig, model: ModelConfig) -> int:
    """Drafts of a row that a step verifies at most, 0 where nothing is drafted.

    Raises ConfigError, with both values, where the configuration and the checkpoint's drafter do not fit (D-03).
    """
    if not config.enabled:
        return 0
    if not model.gamma:
        raise ConfigError(
            "dspark.enabled", True, "the checkpoint has no drafter (dspark_block_size is missing); use false"
        )
    if config.gamma is not None and config.gamma != model.gamma:
        remedy = f"the checkpoint's drafter was made for {model.gamma} (dspark_block_size); use that, or leave it out"
        raise ConfigError("dspark.gamma", config.gamma, remedy)
    if config.max_verify is None:
        return model.gamma
    if config.max_verify > model.gamma:
        raise ConfigError(
            "dspark.max_verify", config.max_verify, f"the checkpoint drafts {model.gamma}; use at most that"
        )
    return config.max_verify


def _parse_ratios(found: tuple[int, ...], num_layers: int, where: str) -> tuple[int, ...]:
    """Keep the main layers' ratios; the zeros behind them describe draft stages."""
    ratios, tail = found[:num_layers], found[num_layers:]
    if len(ratios) < num_layers or any(ratio not in (0, CSA_RATIO, HCA_RATIO) for ratio in ratios):
        raise CheckpointError(
            f"{where}: compress_ratios = {list(found)}: expected {num_layers} of 0, {CSA_RATIO} or {HCA_RATIO}"
        )
    if any(tail):
        raise CheckpointError(f"{where}: compress_ratios = {list(found)}: draft stages behind the layers must be 0")
    return ratios


def _parse_yarn(fields: _Fields | None) -> YarnScaling | None:
    if fields is None:
        return None
    fields.exactly("rope_type" if fields.has("rope_type") else "type", "yarn")
    yarn = YarnScaling(
        factor=fields.positive("factor"),
        original_max_position_embeddings=fields.integer("original_max_position_embeddings"),
        beta_fast=fields.positive("beta_fast"),
        beta_slow=fields.positive("beta_slow"),
    )
    fields.ignore(frozenset({"type", "rope_type"}))  # some files name it twice
    fields.finish()
    return yarn


def _parse_quantization(fields: _Fields) -> bool:
    section = fields.section("quantization_config")
    if section is None:
        return False
    section.exactly("quant_method", "fp8")
    section.exactly("fmt", "e4m3")
    section.exactly("activation_scheme", "dynamic")
    section.exactly("weight_block_size", [128, 128])
    section.exactly("scale_fmt", "ue8m0")
    section.finish()
    return True


def _parse_expert_dtype(fields: _Fields, quantized: bool) -> Literal["fp4", "fp8"] | None:
    if not quantized:
        fields.exactly("expert_dtype", None)
        return None
    return "fp4" if fields.exactly("expert_dtype", "fp4", "fp8") == "fp4" else "fp8"


def _parse_dspark(fields: _Fields, num_layers: int, vocab_size: int, where: str) -> DSparkConfig | None:
    if not fields.has("dspark_block_size"):
        return None
    layer_ids = fields.integers("dspark_target_layer_ids")
    if not layer_ids or any(not 0 <= layer < num_layers for layer in layer_ids):
        raise CheckpointError(
            f"{where}: dspark_target_layer_ids = {list(layer_ids)}: expected layers below {num_layers}"
        )
    block_size = fields.integer("dspark_block_size", high=64)
    return DSparkConfig(
        block_size=block_size,
        noise_token_id=fields.integer("dspark_noise_token_id", low=0, high=vocab_size - 1),
        target_layer_ids=layer_ids,
        markov_rank=fields.integer("dspark_markov_rank"),
        confidence_temperatures=_parse_temperatures(fields, block_size, where),
    )


def _parse_temperatures(fields: _Fields, block_size: int, where: str) -> tuple[float, ...]:
    """Read the calibration of the confidence head: the one key that a file may lack, as the released ones do."""
    key = "dspark_confidence_temperatures"
    if not fields.has(key):
        return (1.0,) * block_size
    found = fields.positives(key)
    if len(found) != block_size:
        raise CheckpointError(
            f"{where}: {key} holds {len(found)} numbers, dspark_block_size is {block_size}: fit them to this block"
        )
    return found


def _check_shapes(config: ModelConfig, where: str) -> None:
    """Refuse sizes that do not divide as the forward pass divides them."""
    checks = (
        ("num_attention_heads", config.num_attention_heads % config.o_groups == 0, "a multiple of o_groups"),
        ("qk_rope_head_dim", config.qk_rope_head_dim % 2 == 0, "even"),
        ("head_dim", config.head_dim >= config.qk_rope_head_dim, "at least qk_rope_head_dim"),
        ("index_head_dim", config.index_head_dim >= config.qk_rope_head_dim, "at least qk_rope_head_dim"),
        ("hidden_size", config.hidden_size % 2 == 0, "even"),
        ("n_routed_experts", config.n_routed_experts % 2 == 0, "even: two ranks share the experts"),
        ("num_experts_per_tok", config.num_experts_per_tok <= config.n_routed_experts, "at most n_routed_experts"),
        ("moe_intermediate_size", config.moe_intermediate_size % 2 == 0, "even: two FP4 codes fill a byte"),
    )
    for key, ok, rule in checks:
        if not ok:
            raise CheckpointError(f"{where}: {key} = {getattr(config, key)}: must be {rule}")
