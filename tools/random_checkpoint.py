"""Write a seeded random checkpoint in the official layout.

    python -m tools.random_checkpoint --out DIR [--seed N]

The weights mean nothing, but every part of the forward pass is exercised: norms around 1, sinks, biases, gate
offsets, hyper-connection bases and scales, distinct hash experts.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from dsparkd.model.checkpoint import StoredDtype, TensorSpec, expected_tensors, nextn_tensors
from dsparkd.model.config import ModelConfig, parse_model_config
from tools.nano_tokenizer import FIRST_SPECIAL, NOISE_TOKEN, train_tokenizer
from tools.number_formats import encode_fp4, encode_fp8

Values = dict[str, object]


def nano_config(vocab_size: int, noise_token_id: int) -> Values:
    """The released file's keys with the numbers of the nano geometry."""
    return {
        "architectures": ["DeepseekV4ForCausalLM"],
        "model_type": "deepseek_v4",
        "vocab_size": vocab_size,
        "hidden_size": 256,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 1,
        "head_dim": 128,
        "qk_rope_head_dim": 64,
        "q_lora_rank": 128,
        "o_groups": 2,
        "o_lora_rank": 64,
        "sliding_window": 128,
        "compress_ratios": [0, 0, 4, 128, 4, 128, 4, 128, 0, 0, 0],
        "rope_theta": 10000,
        "compress_rope_theta": 160000,
        "rope_scaling": {
            "type": "yarn",
            "factor": 16,
            "original_max_position_embeddings": 65536,
            "beta_fast": 32,
            "beta_slow": 1,
        },
        "max_position_embeddings": 16384,
        "index_n_heads": 16,
        "index_head_dim": 128,
        "index_topk": 64,
        "hc_mult": 4,
        "hc_sinkhorn_iters": 20,
        "hc_eps": 1e-6,
        "n_routed_experts": 16,
        "n_shared_experts": 1,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 128,
        "num_hash_layers": 2,
        "scoring_func": "sqrtsoftplus",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
        "swiglu_limit": 10.0,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "torch_dtype": "bfloat16",
        "quantization_config": {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
            "scale_fmt": "ue8m0",
        },
        "expert_dtype": "fp4",
        "num_nextn_predict_layers": 1,
        "dspark_block_size": 5,
        "dspark_noise_token_id": noise_token_id,
        "dspark_target_layer_ids": [5, 6, 7],
        "dspark_markov_rank": 64,
    }


def write_checkpoint(
    directory: Path, values: Values, seed: int, num_shards: int = 1, nextn: bool = False
) -> ModelConfig:
    """Write config.json and the weights of any geometry; returns the parsed config.

    num_shards > 1 adds the index file. nextn adds the preview releases' draft block to a config without DSpark.
    """
    config = parse_model_config(values)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    specs = expected_tensors(config) | (nextn_tensors(config) if nextn else {})
    tensors = random_tensors(specs, config, seed)
    if num_shards == 1:
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
        return config
    weight_map: dict[str, str] = {}
    for shard in range(num_shards):
        file_name = f"model-{shard + 1:05d}-of-{num_shards:05d}.safetensors"
        part = {name: tensors[name] for name in list(tensors)[shard::num_shards]}
        weight_map |= dict.fromkeys(part, file_name)
        save_file(part, directory / file_name, metadata={"format": "pt"})
    total = sum(tensor.numel() * tensor.itemsize for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return config


def random_tensors(specs: dict[str, TensorSpec], config: ModelConfig, seed: int) -> dict[str, Tensor]:
    """Draw every tensor, in the order of the table, as it is stored."""
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    for name, spec in specs.items():
        if name in tensors:  # a scale, written with its weight
            continue
        if spec.dtype is StoredDtype.I64:
            tensors[name] = _distinct_experts(spec.shape, config.n_routed_experts, generator)
            continue
        fp4 = spec.dtype is StoredDtype.I8
        shape = (spec.shape[0], 2 * spec.shape[1]) if fp4 else spec.shape
        values = _draw(name, shape, config, generator)
        if fp4:
            tensors[name], tensors[_scale_name(name)] = encode_fp4(values)
        elif spec.dtype is StoredDtype.F8_E4M3:
            tensors[name], tensors[_scale_name(name)] = encode_fp8(values)
        else:
            tensors[name] = values.to(torch.bfloat16 if spec.dtype is StoredDtype.BF16 else torch.float32)
    return tensors


def _scale_name(weight_name: str) -> str:
    return weight_name.removesuffix("weight") + "scale"


def _draw(name: str, shape: tuple[int, ...], config: ModelConfig, generator: torch.Generator) -> Tensor:
    """Random values of one tensor: magnitudes that keep every activation around 1 and the logits at 1 to 2."""
    noise = torch.randn(shape, generator=generator)
    leaf = name.removesuffix(".weight").rpartition(".")[2]
    if leaf.endswith("norm"):
        return 1 + 0.2 * noise
    if leaf.endswith("_scale"):
        return 1 + 0.2 * noise
    if leaf.endswith("_base") or leaf == "ape" or leaf == "attn_sink":
        return 0.5 * noise
    if leaf == "bias":
        return 0.2 * noise
    if leaf == "embed":
        return noise
    if leaf == "head":
        return 1.5 / math.sqrt(shape[-1]) * noise
    if leaf in ("markov_w1", "markov_w2"):
        return 0.3 * noise
    gain = 2.0 if leaf in ("wo_b", "w2") else 1.0
    return gain / math.sqrt(shape[-1]) * noise


def _distinct_experts(shape: tuple[int, ...], num_experts: int, generator: torch.Generator) -> Tensor:
    """[V, k] int64: k different experts a token id."""
    return torch.rand((shape[0], num_experts), generator=generator).argsort(1)[:, : shape[1]].contiguous()


def write_nano(directory: Path, seed: int) -> ModelConfig:
    """Write the nano checkpoint: config.json, model.safetensors, tokenizer.json, tokenizer_config.json."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = train_tokenizer()
    tokenizer.save(str(directory / "tokenizer.json"))
    names = dict(zip(("bos_token", "eos_token", "pad_token"), FIRST_SPECIAL, strict=True))
    settings = names | {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    noise_token_id = tokenizer.token_to_id(NOISE_TOKEN)
    assert noise_token_id is not None
    return write_checkpoint(directory, nano_config(tokenizer.get_vocab_size(), noise_token_id), seed)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, required=True, help="directory to write")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    began = time.perf_counter()
    config = write_nano(arguments.out, arguments.seed)
    size = sum(path.stat().st_size for path in arguments.out.iterdir())
    print(
        f"{arguments.out}: {config.num_hidden_layers} layers, vocabulary {config.vocab_size}, "
        f"{size / 1e6:.1f} MB, {time.perf_counter() - began:.1f} s"
    )


if __name__ == "__main__":
    main()
