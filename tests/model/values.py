"""Values of the small configs that tests write and parse."""

from __future__ import annotations

from tools.random_checkpoint import Values, nano_config


def small_values(vocab_size: int = 192) -> Values:
    """The nano geometry, narrower: every layer kind twice, quantised storage, the drafter's tensors."""
    return nano_config(vocab_size=vocab_size, noise_token_id=7) | {
        "hidden_size": 64,
        "num_hidden_layers": 6,
        "compress_ratios": [0, 4, 128, 4, 128, 0, 0, 0, 0],
        "num_attention_heads": 8,
        "head_dim": 64,
        "qk_rope_head_dim": 32,
        "q_lora_rank": 32,
        "o_lora_rank": 32,
        "index_head_dim": 64,
        "index_topk": 16,
        "n_routed_experts": 8,
        "moe_intermediate_size": 64,
        "num_experts_per_tok": 3,
        "dspark_target_layer_ids": [3, 4, 5],
        "dspark_markov_rank": 16,
    }


def flash_values(dspark: bool) -> Values:
    """The released Flash config."""
    values = nano_config(vocab_size=129280, noise_token_id=128799) | {
        "hidden_size": 4096,
        "num_hidden_layers": 43,
        "num_attention_heads": 64,
        "head_dim": 512,
        "q_lora_rank": 1024,
        "o_groups": 8,
        "o_lora_rank": 1024,
        "compress_ratios": [0, 0, *[4, 128] * 20, 4, *[0] * (3 if dspark else 1)],
        "max_position_embeddings": 1048576,
        "index_n_heads": 64,
        "index_topk": 512,
        "n_routed_experts": 256,
        "num_experts_per_tok": 6,
        "moe_intermediate_size": 2048,
        "num_hash_layers": 3,
        "dspark_target_layer_ids": [40, 41, 42],
        "dspark_markov_rank": 256,
    }
    if not dspark:
        values = {key: value for key, value in values.items() if not key.startswith("dspark")}
    return values
