"""Values of the small configs that tests write and parse."""

from __future__ import annotations

from tools.flash_files import flash_values
from tools.random_checkpoint import Values, nano_config

__all__ = ["flash_values", "small_values"]


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
