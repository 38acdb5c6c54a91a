"""ModelConfig: every key of a released config is checked."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dsparkd.config import SpeculationConfig
from dsparkd.errors import EXIT_CONFIG, CheckpointError, ConfigError
from dsparkd.model.config import load_model_config, parse_model_config, verified_drafts
from tests.model.values import small_values

REQUIRED = sorted(
    small_values().keys()
    - {"architectures", "attention_dropout", "initializer_range", "num_nextn_predict_layers", "dspark_block_size"}
)


def test_a_released_config_parses_and_ratios_are_cut_to_the_layers() -> None:
    """The zeros behind the main layers describe draft stages."""
    config = parse_model_config(small_values())
    assert config.compress_ratios == (0, 4, 128, 4, 128, 0)
    assert config.dspark is not None
    assert config.gamma == config.dspark.block_size == 5
    assert config.rope_scaling is not None
    assert config.expert_dtype == "fp4"


@pytest.mark.parametrize("key", REQUIRED)
def test_a_missing_key_is_named(key: str) -> None:
    """C-01: a silent default would compute another model."""
    values = small_values()
    del values[key]
    with pytest.raises(CheckpointError, match=f"'{key}' is missing"):
        parse_model_config(values)


def test_the_confidence_heads_temperatures_default_to_one() -> None:
    """The released files hold none; ours are one number a draft position."""
    plain = parse_model_config(small_values()).dspark
    fitted = parse_model_config(small_values() | {"dspark_confidence_temperatures": [1, 2, 0.5, 1.25, 3]}).dspark
    assert plain is not None
    assert fitted is not None
    assert plain.confidence_temperatures == (1.0,) * 5
    assert fitted.confidence_temperatures == (1.0, 2.0, 0.5, 1.25, 3.0)


def test_without_dspark_keys_there_is_no_drafter_and_no_margin() -> None:
    """gamma sizes the rings."""
    values = {key: value for key, value in small_values().items() if not key.startswith("dspark")}
    config = parse_model_config(values)
    assert config.dspark is None
    assert config.kv_geometry(256, "float32").window_ring_rows == 128


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("made_up_key", 1),
        ("model_type", "deepseek_v3"),
        ("num_key_value_heads", 2),
        ("scoring_func", "softmax"),
        ("norm_topk_prob", 1),
        ("tie_word_embeddings", True),
        ("hidden_size", "64"),
        ("hidden_size", True),
        ("hidden_size", 0),
        ("hidden_size", 63),
        ("hc_eps", 0),
        ("hc_eps", float("inf")),
        ("compress_ratios", [0, 4, 128]),
        ("compress_ratios", [0, 4, 128, 4, 8, 0]),
        ("compress_ratios", [0, 4, 128, 4, 128, 0, 4]),
        ("rope_scaling", {"type": "linear", "factor": 2}),
        ("quantization_config", {"quant_method": "fp8"}),
        ("expert_dtype", "int4"),
        ("torch_dtype", "float16"),
        ("n_routed_experts", 7),
        ("num_experts_per_tok", 9),
        ("n_shared_experts", 2),
        ("o_groups", 3),
        ("eos_token_id", 10_000),
        ("dspark_target_layer_ids", [6]),
        ("dspark_noise_token_id", -1),
        ("dspark_noise_token_id", 192),
        ("dspark_block_size", 0),
        ("dspark_markov_rank", 0),
        ("dspark_target_layer_ids", []),
        ("dspark_confidence_temperatures", [1, 1, 1, 1]),
        ("dspark_confidence_temperatures", [1, 1, 1, 1, 0]),
        ("dspark_confidence_temperatures", [1, 1, 1, 1, True]),
        ("dspark_confidence_temperatures", 1.0),
    ],
)
def test_a_wrong_value_is_named(key: str, value: object) -> None:
    """C-01, D-03: what the forward pass does not compute is refused, not approximated."""
    with pytest.raises(CheckpointError, match=key):
        parse_model_config(small_values() | {key: value})


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b"\xff"])
def test_a_file_that_is_no_object_is_named(tmp_path: Path, content: bytes) -> None:
    """The error says which file."""
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        load_model_config(tmp_path)
    with pytest.raises(CheckpointError, match=r"config\.json.*set engine\.checkpoint"):
        load_model_config(tmp_path / "absent")


def test_a_file_gives_what_its_values_give(tmp_path: Path) -> None:
    """Reading adds nothing."""
    (tmp_path / "config.json").write_text(json.dumps(small_values()), encoding="utf-8")
    assert load_model_config(tmp_path) == parse_model_config(small_values())


@pytest.mark.parametrize(
    ("key", "value", "names"),
    [
        ("dspark_block_size", 0, ("dspark_block_size", "0")),
        ("dspark_noise_token_id", 4096, ("dspark_noise_token_id", "4096")),
        ("dspark_noise_token_id", -1, ("dspark_noise_token_id", "-1")),
        ("dspark_markov_rank", 0, ("dspark_markov_rank", "0")),
        ("dspark_target_layer_ids", [], ("dspark_target_layer_ids",)),
        ("dspark_target_layer_ids", [0, 99], ("dspark_target_layer_ids", "99")),
        # A window must fit into a page of 128 tokens, the shortest there is.
        ("dspark_block_size", 65, ("dspark_block_size", "65", "64")),
        ("dspark_block_size", 128, ("dspark_block_size", "128", "64")),
    ],
)
def test_d03_a_drafter_that_cannot_be_right_is_a_start_failure(key: str, value: object, names: tuple[str, ...]) -> None:
    """D-03: a row a block or more, a noise id in the vocabulary, a Markov rank, taps; the message names the value."""
    with pytest.raises(CheckpointError) as failure:
        parse_model_config(small_values() | {"vocab_size": 4096} | {key: value})
    assert all(name in str(failure.value) for name in names)


def test_d03_a_configuration_that_does_not_fit_the_drafter_names_both_values() -> None:
    """D-03: another gamma is a start failure, not a warning; so is a checkpoint without a drafter."""
    model = parse_model_config(small_values())
    for config, names in (
        (SpeculationConfig(enabled=True, gamma=4), ("dspark.gamma", "4", "5")),
        (SpeculationConfig(enabled=True, max_verify=6), ("dspark.max_verify", "6", "5")),
    ):
        with pytest.raises(ConfigError) as failure:
            verified_drafts(config, model)
        assert all(name in str(failure.value) for name in names)
        assert failure.value.exit_code == EXIT_CONFIG
    bare = parse_model_config({key: value for key, value in small_values().items() if not key.startswith("dspark")})
    with pytest.raises(ConfigError, match=r"dspark\.enabled"):
        verified_drafts(SpeculationConfig(enabled=True), bare)
    assert verified_drafts(SpeculationConfig(enabled=False, gamma=4), bare) == 0


@pytest.mark.parametrize(("max_verify", "expected"), [(None, 5), (0, 0), (3, 3), (5, 5)])
def test_the_width_of_verification_is_the_block_or_what_is_configured(max_verify: int | None, expected: int) -> None:
    """decisions.md 5: the drafter always drafts its block; max_verify bounds what is verified."""
    config = SpeculationConfig(enabled=True, gamma=5, max_verify=max_verify)
    assert verified_drafts(config, parse_model_config(small_values())) == expected
