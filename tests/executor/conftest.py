"""A small checkpoint of every layer kind."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tools.random_checkpoint import nano_config, write_checkpoint

VOCAB = 320


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four layers, all kinds, unquantized, no drafter."""
    directory = tmp_path_factory.mktemp("checkpoint")
    values = {key: value for key, value in nano_config(VOCAB, 2).items() if not key.startswith("dspark")}
    values |= {
        "num_hidden_layers": 4,
        "compress_ratios": [0, 4, 128, 4],
        "hidden_size": 64,
        "num_attention_heads": 2,
        "head_dim": 32,
        "qk_rope_head_dim": 16,
        "q_lora_rank": 32,
        "o_lora_rank": 16,
        "index_head_dim": 32,
        "index_topk": 16,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "num_hash_layers": 1,
        "quantization_config": None,
        "expert_dtype": None,
    }
    write_checkpoint(directory, values, seed=3)
    alphabet = {chr(256 + i): i for i in range(256)}
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte) if byte in printable else chr(256 + hidden.index(byte)): byte for byte in range(256)}
    names = ["<bos>", "<eos>", "<pad>"]
    added = [{"id": 256 + i, "content": name, "special": True} for i, name in enumerate(names)]
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    whole = {
        "version": "1.0",
        "added_tokens": [entry | flags for entry in added],
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {"type": "BPE", "vocab": alphabet, "merges": []},
    }
    (directory / "tokenizer.json").write_text(json.dumps(whole))
    return directory
