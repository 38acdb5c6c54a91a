"""What training keeps as float32 masters, as the official layout: rounded while training, and written as files.

A state is a mapping of official names without scales to tensors; the routed experts of one layer are stacked, as
`layers.N.ffn.experts.w1` and `.w3` [E, I, D] and `.w2` [E, D, I] (E experts, I inner width, D model width).
fake_quantise works on the last two dimensions, so more may be stacked in front of them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from enum import Enum
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from dsparkd.kernels.weight import decode_e8m0, decode_fp4, decode_fp8
from dsparkd.model.checkpoint import StoredDtype, TensorSpec, expected_tensors
from dsparkd.model.config import parse_model_config
from tools.number_formats import E4M3, encode_fp4, encode_fp8, round_bfloat16, round_fp4, round_fp8, round_groups

State = Mapping[str, Tensor]
Values = dict[str, object]

ENTRY_GROUP = 64  # columns under one scale of a cached entry


class Storage(Enum):
    """How the official layout stores a tensor."""

    FP4 = "fp4"
    FP8 = "fp8"
    BF16 = "bfloat16"
    F32 = "float32"
    I64 = "int64"


# Names may lack their prefix, as those of tensors that stack the layers do; every spelling is listed, so that a
# misspelt one is no bfloat16 tensor by accident.
# Endings, tried in order. torch.compile follows str.endswith, and no regular expressions.
_STORAGES = (
    (tuple(f".experts.{part}" for part in ("w1", "w2", "w3", "w1.weight", "w2.weight", "w3.weight")), Storage.FP4),
    ((".wq_a.weight", ".wq_b.weight", "attn.wkv.weight", ".wo_a.weight", ".wo_b.weight"), Storage.FP8),
    (tuple(f".shared_experts.{part}.weight" for part in ("w1", "w2", "w3")), Storage.FP8),
    (("main_proj.weight",), Storage.FP8),
    (("_fn", "_base", "_scale", "attn_sink", ".ape", "gate.bias"), Storage.F32),
    (("gate.tid2eid",), Storage.I64),
    (("embed.weight", "head.weight", "norm.weight", ".gate.weight", ".weights_proj.weight"), Storage.BF16),
    (("markov_w1.weight", "markov_w2.weight", "confidence_head.proj.weight"), Storage.BF16),
    (("compressor.wkv.weight", "compressor.wgate.weight"), Storage.BF16),
)
_STACKED = re.compile(r"^(.*\.ffn\.experts)\.(\d+)\.(w[123])\.weight$")


def storage(name: str) -> Storage:
    """Return how the tensor of a state's name is stored. Raises ValueError for no such name."""
    for endings, kind in _STORAGES:
        if name.endswith(endings):
            return kind
    raise ValueError(f"{name} is no tensor of the official layout")


def fake_quantise(name: str, tensor: Tensor) -> Tensor:
    """Return what an exported file will hold for the name, dequantised: float32 (int64 tables as they are).

    On the tensor's device, without a gradient: the caller adds the straight-through one. Raises ValueError for a name
    that is not the layout's.
    """
    values = tensor.detach()
    match storage(name):
        case Storage.FP4:
            return round_fp4(values.float())
        case Storage.FP8:
            return round_fp8(values.float())
        case Storage.BF16:
            return round_bfloat16(values.float())
        case Storage.F32:
            return values.float()
        case Storage.I64:
            return values


def fake_quantise_entry(entry: Tensor, rotary_dim: int = 64) -> Tensor:
    """Round cached window rows or compressed entries [..., d] as their packed form does: float32, without a gradient.

    The last rotary_dim columns become bfloat16, the others FP8 in groups of 64 with power-of-two scales.
    """
    values = entry.detach().float()
    plain = values.shape[-1] - rotary_dim
    packed = round_groups(values[..., :plain], ENTRY_GROUP, E4M3)
    return torch.cat((packed, round_bfloat16(values[..., plain:])), -1)


def export(state: State, values: Values, directory: Path) -> None:
    """Write config.json and model.safetensors in the official layout; the tokenizer's files are not touched.

    values: config.json's. Reading the files back gives fake_quantise of the state, bit for bit. Raises ValueError
    when the state lacks a tensor that values ask for, has one more, one of another shape, or one that is not finite.
    """
    config = parse_model_config(values)
    if not config.quantized or config.expert_dtype != "fp4":
        raise ValueError("only FP8 linears with FP4 experts are exported")
    left = dict(state)
    tensors: dict[str, Tensor] = {}
    specs = expected_tensors(config)
    for name, spec in specs.items():
        if name.endswith(".scale"):
            continue
        tensors |= _encode(name, _take(name, left, config.n_routed_experts), spec)
    for name in _stacked_names(specs):
        left.pop(name, None)
    if left:
        raise ValueError(f"the config has no place for {len(left)} tensors, {min(left)} first")
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    path = directory / "model.safetensors"
    save_file({name: tensors[name] for name in specs}, path, metadata={"format": "pt"})
    path.chmod(0o644)  # the library makes it the owner's alone, and a server often runs as somebody else


def read_state(directory: Path) -> dict[str, Tensor]:
    """Read what `export` wrote back as a state: float32 on the cpu, int64 tables."""
    state: dict[str, Tensor] = {}
    stacks: dict[str, dict[int, Tensor]] = {}
    stored = load_file(directory / "model.safetensors")
    for name in stored:
        if name.endswith(".scale"):
            continue
        tensor = _decode(stored[name], stored.get(name.removesuffix("weight") + "scale"))
        if found := _STACKED.match(name):
            stacks.setdefault(f"{found[1]}.{found[3]}", {})[int(found[2])] = tensor
        else:
            state[name] = tensor
    for name, parts in stacks.items():
        state[name] = torch.stack([parts[expert] for expert in range(len(parts))])
    return state


def without_drafter(values: Values) -> Values:
    """Return the config of the target alone, for a state without mtp.* tensors."""
    return {key: value for key, value in values.items() if not key.startswith("dspark_")}


def _decode(tensor: Tensor, scale: Tensor | None) -> Tensor:
    if scale is None:
        return tensor if tensor.dtype == torch.int64 else tensor.float()
    decode = decode_fp4 if tensor.dtype == torch.int8 else decode_fp8
    return decode(tensor, decode_e8m0(scale.view(torch.uint8)))


def _stacked_names(specs: Mapping[str, TensorSpec]) -> set[str]:
    found = (_STACKED.match(name) for name in specs)
    return {f"{match[1]}.{match[3]}" for match in found if match}


def _take(name: str, left: dict[str, Tensor], num_experts: int) -> Tensor:
    """Take a tensor out of the state, or look up one expert's part of a stack."""
    stacked = _STACKED.match(name)
    key = f"{stacked[1]}.{stacked[3]}" if stacked else name
    if key not in left:
        raise ValueError(f"the state has no {key}")
    if stacked is None:
        return left.pop(key)
    if left[key].shape[0] != num_experts:
        raise ValueError(f"{key} stacks {left[key].shape[0]} experts, the config has {num_experts}")
    return left[key][int(stacked[2])]


def _encode(name: str, tensor: Tensor, spec: TensorSpec) -> dict[str, Tensor]:
    """Encode one tensor and its scale; raises ValueError unless it fits the spec."""
    tensor = tensor.detach().cpu()
    shape = (*spec.shape[:-1], 2 * spec.shape[-1]) if spec.dtype is StoredDtype.I8 else spec.shape
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name} has shape {list(tensor.shape)}, the config says {list(shape)}")
    if not tensor.isfinite().all():
        raise ValueError(f"{name} has values that are not finite")
    scale_name = name.removesuffix("weight") + "scale"
    match spec.dtype:
        case StoredDtype.I64:
            return {name: tensor.long().contiguous()}
        case StoredDtype.I8:
            weight, scale = encode_fp4(tensor.float())
            return {name: weight, scale_name: scale}
        case StoredDtype.F8_E4M3:
            weight, scale = encode_fp8(tensor.float())
            return {name: weight, scale_name: scale}
        case StoredDtype.BF16:
            return {name: tensor.float().to(torch.bfloat16).contiguous()}
        case _:
            return {name: tensor.float().contiguous()}
