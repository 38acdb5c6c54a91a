"""The nano checkpoint and its tokenizer."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer

from dsparkd.model.config import ModelConfig
from tools.nano_tokenizer import FIRST_SPECIAL, MARKERS, NOISE_TOKEN, VOCAB_SIZE
from tools.random_checkpoint import write_nano


@pytest.fixture(scope="module")
def nano(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ModelConfig]:
    directory = tmp_path_factory.mktemp("nano")
    return directory, write_nano(directory, seed=0)


def load_tokenizer(directory: Path) -> Tokenizer:
    return Tokenizer.from_file(str(directory / "tokenizer.json"))


def test_the_same_seed_gives_the_same_bytes(nano: tuple[Path, ModelConfig], tmp_path: Path) -> None:
    """Two hosts that write it must serve the same model."""
    write_nano(tmp_path, seed=0)
    for name in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / name).read_bytes() == (nano[0] / name).read_bytes(), name


def test_another_seed_gives_other_weights(nano: tuple[Path, ModelConfig], tmp_path: Path) -> None:
    """The seed is not ignored."""
    write_nano(tmp_path, seed=1)
    assert (tmp_path / "model.safetensors").read_bytes() != (nano[0] / "model.safetensors").read_bytes()


def test_the_config_has_the_nano_geometry(nano: tuple[Path, ModelConfig]) -> None:
    """Eight layers of all kinds, a drafter, and a vocabulary that the tokenizer fills."""
    config = nano[1]
    assert config.compress_ratios == (0, 0, 4, 128, 4, 128, 4, 128)
    assert config.vocab_size == VOCAB_SIZE == load_tokenizer(nano[0]).get_vocab_size()
    assert config.dspark is not None
    assert load_tokenizer(nano[0]).token_to_id(NOISE_TOKEN) == config.dspark.noise_token_id


def test_special_ids_and_flags_are_the_releases(nano: tuple[Path, ModelConfig]) -> None:
    """BOS, EOS, PAD are 0, 1, 2 and vanish when decoded; markers are one token and stay, for the output parser."""
    tokenizer = load_tokenizer(nano[0])
    assert [tokenizer.token_to_id(text) for text in FIRST_SPECIAL] == [0, 1, 2]
    for text in MARKERS:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert ids == [tokenizer.token_to_id(text)], text
        assert tokenizer.decode(ids, skip_special_tokens=True) == text
    for text in (*FIRST_SPECIAL, NOISE_TOKEN):
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert len(ids) == 1
        assert tokenizer.decode(ids, skip_special_tokens=True) == ""


@pytest.mark.parametrize(
    "text",
    [
        "Hello, world!\n\n  tabs\tand 12345 digits",
        "žluťoučký kůň 日本語 テスト 🙂",
        '{"a": [1, 2.5e-3, "\\u00e9"]}',
        " ",
    ],
)
def test_any_text_survives_a_round_trip(nano: tuple[Path, ModelConfig], text: str) -> None:
    """Byte-level: nothing is unknown, nothing is normalised."""
    tokenizer = load_tokenizer(nano[0])
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False).ids, skip_special_tokens=False) == text


def test_digits_are_cut_in_threes(nano: tuple[Path, ModelConfig]) -> None:
    """The first of the released splits."""
    pieces = load_tokenizer(nano[0]).encode("1234567", add_special_tokens=False).tokens
    assert "".join(pieces) == "1234567"
    assert all(len(piece) <= 3 for piece in pieces)
