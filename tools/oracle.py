"""The independent implementation in transformers, loaded with a checkpoint of ours, and a one-process engine beside it.

The reader here shares nothing with dsparkd.model.weights: it decodes files by the formulas, in numpy, and renames
tensors by the published name map.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Literal, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM, FineGrainedFP8Config

from dsparkd.executor.plan import Plan, PlanRow, StepKind
from dsparkd.executor.staging import Stager
from dsparkd.kv.geometry import PoolSizes
from dsparkd.kv.pool import KVPool
from dsparkd.model.config import ModelConfig, load_model_config
from dsparkd.model.transformer import ForwardOutputs
from dsparkd.model.weights import load_both_shards

CPU = torch.device("cpu")

Floats = NDArray[np.float32]


class Engine:
    """One process that runs steps of a checkpoint over a pool: both expert shards, cpu unless told otherwise."""

    def __init__(
        self,
        directory: Path,
        dtype: torch.dtype = torch.float32,
        page_tokens: int = 256,
        sizes: PoolSizes | None = None,
        device: torch.device = CPU,
        kv_dtype: Literal["model", "fp8"] = "model",
    ) -> None:
        self.config: ModelConfig = load_model_config(directory)
        self.model, self.exchange = load_both_shards(directory, self.config, dtype, device)
        name: Literal["bfloat16", "float32"] = "float32" if dtype == torch.float32 else "bfloat16"
        self.geometry = self.config.kv_geometry(page_tokens, name, kv_dtype=kv_dtype)
        self.pool = KVPool(self.geometry, sizes or PoolSizes(32, 6, 4), dtype, device)
        self._stager = Stager(self.geometry, self.config.index_topk, device)

    def step(self, rows: list[PlanRow], taps: tuple[int, ...] = ()) -> ForwardOutputs:
        """Run one step of these rows."""
        inputs = self._stager.stage(Plan(StepKind.MIXED, tuple(rows)))
        self.exchange.begin_step((inputs.num_padded_tokens, 0))
        return self.model.forward(inputs, self.pool, self.exchange, taps)

    def logits(self, ids: list[int], chunks: list[int], slot: int = 1, pages: tuple[int, ...] = ()) -> Tensor:
        """Run one sequence from position 0 in chunks of these lengths: [len(ids), V] float32."""
        pages = pages or tuple(range(1, 1 + self.geometry.num_pages_for(len(ids))))
        outputs, start = [], 0
        for length in chunks:
            part = ids[start : start + length]
            outputs.append(self.step([plan_row(part, start, slot, pages)]).logits)
            start += length
        if start != len(ids):
            raise ValueError(f"chunks of {start} tokens do not cover {len(ids)}")
        return torch.cat(outputs)


def plan_row(
    ids: list[int], start: int, slot: int, pages: tuple[int, ...], num_logits: int | None = None, name: str = "r"
) -> PlanRow:
    """A row that samples nothing; every token's logits unless told otherwise."""
    return PlanRow(
        request_id=name,
        slot=slot,
        input_ids=tuple(ids),
        start=start,
        page_table=pages,
        num_logits=len(ids) if num_logits is None else num_logits,
        sampling=None,
        prompt_ids=(),
        output_ids=(),
    )


def load_oracle(directory: Path) -> DeepseekV4ForCausalLM:
    """Build transformers' model in float32 from a checkpoint in the official layout, quantised or not."""
    values = json.loads((directory / "config.json").read_bytes())
    # Both only describe storage. Left in, transformers would look for quantised modules.
    for key in ("quantization_config", "expert_dtype", "torch_dtype"):
        values.pop(key, None)
    scaling = values.pop("rope_scaling")
    if scaling is not None:
        values["rope_parameters"] = scaling
    config = DeepseekV4Config(**values)
    config._attn_implementation = "eager"
    model: DeepseekV4ForCausalLM = DeepseekV4ForCausalLM(config)  # float32, torch's default
    model.train(False)
    state = rename({name: torch.from_numpy(array) for name, array in read_official(directory).items()}, config)
    inverse_frequencies = {name for name, _ in model.named_buffers() if name.endswith("inv_freq")}
    missing, unexpected = model.load_state_dict(state, strict=False)
    if set(missing) - inverse_frequencies or unexpected:
        raise ValueError(f"name map is incomplete: missing {missing[:3]}, unexpected {unexpected[:3]}")
    return model


def load_by_transformers(directory: Path) -> DeepseekV4ForCausalLM:
    """Build the same model by transformers' own conversion of the official layout, dequantised to float32.

    It reads FP8 and FP4 and needs the package accelerate for that. Raises ValueError when it leaves a tensor out.
    """
    loaded: object = DeepseekV4ForCausalLM.from_pretrained(
        directory,
        quantization_config=FineGrainedFP8Config(dequantize=True),
        dtype=torch.float32,
        attn_implementation="eager",
        output_loading_info=True,
        local_files_only=True,
    )
    model, info = cast(tuple[DeepseekV4ForCausalLM, dict[str, list[str]]], loaded)
    wrong = {kind: sorted(names)[:3] for kind, names in info.items() if names}
    if wrong:
        raise ValueError(f"transformers could not load {directory}: {wrong}")
    model.train(False)
    return model


def rename(official: dict[str, Tensor], config: DeepseekV4Config) -> dict[str, Tensor]:
    """Map official names to transformers'; experts are stacked, draft tensors dropped."""
    renamed: dict[str, Tensor] = {}
    for name, tensor in official.items():
        if name in _WHOLE_NAMES:
            renamed[_WHOLE_NAMES[name]] = tensor
        elif name.startswith("layers.") and ".ffn.experts." not in name:
            _, index, rest = name.split(".", 2)
            renamed[f"model.layers.{index}.{_rename_in_layer(rest)}"] = tensor
    for layer in range(config.num_hidden_layers):
        experts = [f"layers.{layer}.ffn.experts.{e}" for e in range(config.n_routed_experts)]
        gate_up = [torch.cat((official[f"{e}.w1.weight"], official[f"{e}.w3.weight"])) for e in experts]
        prefix = f"model.layers.{layer}.mlp.experts"
        renamed[f"{prefix}.gate_up_proj"] = torch.stack(gate_up)
        renamed[f"{prefix}.down_proj"] = torch.stack([official[f"{e}.w2.weight"] for e in experts])
    return renamed


_WHOLE_NAMES = {
    "embed.weight": "model.embed_tokens.weight",
    "head.weight": "lm_head.weight",
    "norm.weight": "model.norm.weight",
    "hc_head_fn": "model.hc_head.hc_fn",
    "hc_head_base": "model.hc_head.hc_base",
    "hc_head_scale": "model.hc_head.hc_scale",
}

# Longest first: indexer.compressor.wkv must not be taken for compressor.wkv.
_LAYER_NAMES = (
    ("attn.indexer.compressor.wkv.", "self_attn.compressor.indexer.kv_proj."),
    ("attn.indexer.compressor.wgate.", "self_attn.compressor.indexer.gate_proj."),
    ("attn.indexer.compressor.ape", "self_attn.compressor.indexer.position_bias"),
    ("attn.indexer.compressor.norm.", "self_attn.compressor.indexer.kv_norm."),
    ("attn.indexer.wq_b.", "self_attn.compressor.indexer.q_b_proj."),
    ("attn.indexer.weights_proj.", "self_attn.compressor.indexer.scorer.weights_proj."),
    ("attn.compressor.wkv.", "self_attn.compressor.kv_proj."),
    ("attn.compressor.wgate.", "self_attn.compressor.gate_proj."),
    ("attn.compressor.ape", "self_attn.compressor.position_bias"),
    ("attn.compressor.norm.", "self_attn.compressor.kv_norm."),
    ("attn.wq_a.", "self_attn.q_a_proj."),
    ("attn.q_norm.", "self_attn.q_a_norm."),
    ("attn.wq_b.", "self_attn.q_b_proj."),
    ("attn.wkv.", "self_attn.kv_proj."),
    ("attn.kv_norm.", "self_attn.kv_norm."),
    ("attn.wo_a.", "self_attn.o_a_proj."),
    ("attn.wo_b.", "self_attn.o_b_proj."),
    ("attn.attn_sink", "self_attn.sinks"),
    ("attn_norm.", "input_layernorm."),
    ("ffn_norm.", "post_attention_layernorm."),
    ("hc_attn_", "attn_hc."),
    ("hc_ffn_", "ffn_hc."),
    ("ffn.gate.bias", "mlp.gate.e_score_correction_bias"),
    ("ffn.gate.", "mlp.gate."),
    ("ffn.shared_experts.w1.", "mlp.shared_experts.gate_proj."),
    ("ffn.shared_experts.w3.", "mlp.shared_experts.up_proj."),
    ("ffn.shared_experts.w2.", "mlp.shared_experts.down_proj."),
)
# Longest first on the other side, where mlp.gate. is a beginning of the bias' name.
_BACK = sorted(_LAYER_NAMES, key=lambda pair: -len(pair[1]))


def _rename_in_layer(name: str) -> str:
    for official, theirs in _LAYER_NAMES:
        if name.startswith(official):
            return theirs + name.removeprefix(official)
    raise ValueError(f"no name for {name}")


def rename_back(theirs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Undo `rename`: transformers' names to official ones, a tensor an expert."""
    whole = {their: ours for ours, their in _WHOLE_NAMES.items()}
    official: dict[str, Tensor] = {}
    for name, tensor in theirs.items():
        if name in whole:
            official[whole[name]] = tensor
            continue
        _, _, layer, rest = name.split(".", 3)
        if rest == "mlp.experts.gate_up_proj":
            for expert, both in enumerate(tensor):
                gate, up = both.chunk(2)
                official[f"layers.{layer}.ffn.experts.{expert}.w1.weight"] = gate
                official[f"layers.{layer}.ffn.experts.{expert}.w3.weight"] = up
        elif rest == "mlp.experts.down_proj":
            for expert, down in enumerate(tensor):
                official[f"layers.{layer}.ffn.experts.{expert}.w2.weight"] = down
        else:
            ours, their = next(pair for pair in _BACK if rest.startswith(pair[1]))
            official[f"layers.{layer}.{ours}{rest.removeprefix(their)}"] = tensor
    return official


def read_official(directory: Path) -> dict[str, NDArray[np.generic]]:
    """Every tensor of the files as float32 (int64 for tables), scales applied and left out."""
    stored: dict[str, tuple[str, NDArray[np.generic]]] = {}
    for path in sorted(directory.glob("*.safetensors")):
        stored |= _read_file(path)
    decoded: dict[str, NDArray[np.generic]] = {}
    for name, (dtype, array) in stored.items():
        if name.endswith(".scale"):
            continue
        scale_name = name.removesuffix("weight") + "scale"
        if scale_name not in stored:
            decoded[name] = array
            continue
        scale = np.ldexp(np.float32(1), stored[scale_name][1].astype(np.int32) - 127)
        decoded[name] = _e2m1(array, scale) if dtype == "I8" else _e4m3(array, scale)
    return decoded


def _read_file(path: Path) -> dict[str, tuple[str, NDArray[np.generic]]]:
    """Parse one safetensors file: 8 bytes of header length, JSON, data. Small formats stay raw bytes."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header.pop("__metadata__", None)
    tensors = {}
    for name, info in header.items():
        begin, end = info["data_offsets"]
        raw = np.frombuffer(data, np.uint8, end - begin, 8 + length + begin)
        dtype, shape = info["dtype"], info["shape"]
        array: NDArray[np.generic]
        if dtype == "BF16":
            array = (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
        else:
            array = raw.view({"F32": np.float32, "I64": np.int64}.get(dtype, np.uint8))
        tensors[name] = (dtype, array.reshape(shape).copy())
    return tensors


def _e4m3(codes: NDArray[np.generic], scale: Floats) -> Floats:
    """Bytes s eeee mmm [O, I] by blocks of 128 x 128."""
    bits = codes.astype(np.int32)
    exponent, mantissa = (bits >> 3) & 15, (bits & 7).astype(np.float32)
    magnitude = np.where(exponent == 0, mantissa * 2.0**-9, np.ldexp(1 + mantissa / 8, exponent - 7))
    rows, columns = np.indices(codes.shape)
    signed = np.where(bits & 128, -magnitude, magnitude).astype(np.float32)
    return np.asarray(signed * scale[rows // 128, columns // 128], np.float32)


def _e2m1(packed: NDArray[np.generic], scale: Floats) -> Floats:
    """Nibbles s ee m, low one first [O, I / 2], by groups of 32 columns."""
    raw = packed.astype(np.int32)
    codes = np.empty((raw.shape[0], raw.shape[1] * 2), np.int32)
    codes[:, 0::2], codes[:, 1::2] = raw & 15, raw >> 4
    exponent, mantissa = (codes >> 1) & 3, (codes & 1).astype(np.float32)
    magnitude = np.where(exponent == 0, mantissa / 2, np.ldexp(1 + mantissa / 2, exponent - 1))
    signed = np.where(codes & 8, -magnitude, magnitude).astype(np.float32)
    rows, columns = np.indices(codes.shape)
    return np.asarray(signed * scale[rows, columns // 32], np.float32)


@torch.inference_mode()
def oracle_logits(model: DeepseekV4ForCausalLM, ids: list[int], chunks: list[int] | None = None) -> Tensor:
    """transformers' logits [len(ids), V]: in one pass, or over its own cache in chunks of these lengths."""
    tokens = torch.tensor([ids])
    if chunks is None:
        return torch.as_tensor(model(tokens, use_cache=False).logits[0])
    outputs, cache = [], None
    start = 0
    for length in chunks:
        result = model(tokens[:, start : start + length], cache=cache, use_cache=True)
        cache = result.cache
        outputs.append(result.logits[0])
        start += length
    return torch.cat(outputs)


def relative_error(ours: Tensor, theirs: Tensor) -> float:
    """Largest difference over the largest magnitude of the reference; infinite when anything is not finite."""
    error = ((ours - theirs).abs().max() / theirs.abs().max()).item()
    return error if math.isfinite(error) else math.inf
