"""The shipped tokenizer."""

from __future__ import annotations

import json

import pytest
from tokenizers import Tokenizer as Library

from dsparkd.text.encoding import ChatEncoding
from dsparkd.text.tokenizer import Tokenizer
from tools.nano_tokenizer import FIRST_SPECIAL, MARKERS, NOISE_TOKEN
from tools.train_nano.tasks.words import ADJECTIVES, CITIES, COLORS, NAMES, NOUNS
from tools.train_nano.tokenizer import DEFAULT_PATH, VOCAB_SIZE, train_tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(DEFAULT_PATH.parent)


def test_it_has_the_vocabulary_and_markers_of_the_model(tokenizer: Tokenizer) -> None:
    """4,096 ids; BOS, EOS and padding are 0, 1 and 2; chat can be encoded; the noise id is one that text never has."""
    assert tokenizer.vocab_size == VOCAB_SIZE
    assert [tokenizer.marker_id(text) for text in FIRST_SPECIAL] == [0, 1, 2]
    assert len({tokenizer.marker_id(text) for text in (*FIRST_SPECIAL, NOISE_TOKEN, *MARKERS)}) == 4 + len(MARKERS)
    assert tokenizer.is_special(tokenizer.marker_id(NOISE_TOKEN))
    assert not tokenizer.is_special(tokenizer.marker_id("</think>"))
    ChatEncoding(tokenizer, "low")


def test_digits_stand_alone(tokenizer: Tokenizer) -> None:
    """A number is its digits, whatever stands before it."""
    for text in ("1234567", " 12", "x12", "-3.05", "2024-03-07"):
        pieces = [tokenizer.token_bytes(token_id) for token_id in tokenizer.encode(text)]
        assert all(len(piece) == 1 for piece in pieces if any(48 <= byte <= 57 for byte in piece)), pieces
    assert not any(
        len(tokenizer.token_bytes(token_id)) > 1 and any(48 <= byte <= 57 for byte in tokenizer.token_bytes(token_id))
        for token_id in range(VOCAB_SIZE)
        if token_id not in {tokenizer.marker_id(text) for text in (NOISE_TOKEN, *MARKERS)}
    )


@pytest.mark.parametrize("text", ["Grüße, 東京!", "a\n\n  b\t", "😀", '{"a": [1, 2.5]}', "def f(x):\n    return x\n"])
def test_any_text_survives_a_round_trip(tokenizer: Tokenizer, text: str) -> None:
    """Every byte is in the vocabulary."""
    ids = tokenizer.encode(text)
    assert b"".join(map(tokenizer.token_bytes, ids)).decode() == text


def test_values_are_one_token_in_a_record_and_in_a_text(tokenizer: Tokenizer) -> None:
    """Then an answer copies a word instead of spelling it anew."""
    for word in (*NAMES, *CITIES, *COLORS, *ADJECTIVES, *NOUNS):
        assert len(tokenizer.encode(word)) == 1, word
        assert len(tokenizer.encode(f" {word}")) == 1, word


def test_the_library_encodes_alike(tokenizer: Tokenizer) -> None:
    """The file works outside of this project, too."""
    library = Library.from_file(str(DEFAULT_PATH))
    text = "Convert 815 GBP to CHF, please."
    assert library.encode(text, add_special_tokens=False).ids == tokenizer.encode(text)
    assert library.encode("<think>a</think>", add_special_tokens=False).ids[0] == tokenizer.marker_id("<think>")


def test_training_again_gives_the_same_file() -> None:
    """The file is a product of this source; a hundredth of the corpus is enough to see it."""
    once = train_tokenizer(0.01).to_str()
    assert once == train_tokenizer(0.01).to_str()
    shipped = json.loads(DEFAULT_PATH.read_text())
    for part in ("pre_tokenizer", "decoder", "normalizer", "post_processor", "added_tokens"):
        assert json.loads(once)[part] == shipped[part], part
