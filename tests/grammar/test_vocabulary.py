"""What XGrammar is told of the tokens: control tokens are in no text, and every difference has its own digest."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import xgrammar

from dsparkd.grammar.compiler import tokenizer_info
from dsparkd.grammar.vocabulary import Vocabulary, make_vocabulary
from dsparkd.text.tokenizer import Tokenizer
from tests.grammar.grammars import allowed_ids
from tools.nano_tokenizer import MARKERS, NOISE_TOKEN, train_tokenizer

DSML = "｜DSML｜"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory: Path = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer().save(str(directory / "tokenizer.json"))
    return Tokenizer.load(directory)


def vocabulary_of(tokenizer: Tokenizer, *, padding: int = 64, nameable: tuple[str, ...] = ()) -> Vocabulary:
    return make_vocabulary(tokenizer, tokenizer.vocab_size + padding, (1,), nameable)


def compiler_of(vocabulary: Vocabulary) -> xgrammar.GrammarCompiler:
    return xgrammar.GrammarCompiler(tokenizer_info(vocabulary), max_threads=1, cache_enabled=False)


TEXTS = {
    "string of a schema": ('{"type": "string"}', "json_schema", '"'),
    "any JSON": ('{"type": "object"}', "json", '{"a": "'),
    "pattern": (r"[^x]*", "regex", ""),
    "rule": ("root ::= [^x]*", "ebnf", ""),
    "free text of a tag": ('{"type": "structural_tag", "format": {"type": "any_text"}}', "tag", ""),
}


@pytest.mark.parametrize("nameable", [(), (DSML,)], ids=["plain", "for tools"])
@pytest.mark.parametrize("where", TEXTS)
def test_no_control_token_is_ever_part_of_a_text(tokenizer: Tokenizer, where: str, nameable: tuple[str, ...]) -> None:
    """With the stock constructor 1,282 of 1,283 added tokens were allowed inside a JSON string."""
    text, kind, prefix = TEXTS[where]
    vocabulary = vocabulary_of(tokenizer, nameable=nameable)
    compiler = compiler_of(vocabulary)
    compiled = {
        "json_schema": compiler.compile_json_schema,
        "json": lambda _: compiler.compile_builtin_json_grammar(),
        "regex": compiler.compile_regex,
        "ebnf": compiler.compile_grammar,
        "tag": compiler.compile_structural_tag,
    }[kind](text)
    matcher = xgrammar.GrammarMatcher(compiled)
    assert matcher.accept_string(prefix)

    allowed = set(allowed_ids(matcher, vocabulary.vocab_size))

    assert len(allowed) > 100, "ordinary text is allowed"
    assert not allowed & (tokenizer.added_ids - {1})
    assert {tokenizer.marker_id(marker) for marker in (*MARKERS, NOISE_TOKEN)} <= tokenizer.added_ids
    for token_id in (tokenizer.marker_id("</think>"), tokenizer.marker_id(DSML)):
        assert not matcher.accept_token(token_id)


def test_a_marker_is_emitted_only_where_a_tag_names_its_token(tokenizer: Tokenizer) -> None:
    """A tool call's marker stands where the call's format has it, and not inside the arguments."""
    marker = tokenizer.marker_id(DSML)
    tag = {
        "type": "sequence",
        "elements": [
            {"type": "const_string", "value": "<"},
            {"type": "token", "token": marker},
            {"type": "json_schema", "json_schema": {"type": "string"}},
        ],
    }
    text = json.dumps({"type": "structural_tag", "format": tag})
    vocabulary = vocabulary_of(tokenizer, nameable=(DSML,))
    matcher = xgrammar.GrammarMatcher(compiler_of(vocabulary).compile_structural_tag(text))
    assert matcher.accept_string("<")
    assert allowed_ids(matcher, vocabulary.vocab_size) == [marker]
    assert matcher.accept_token(marker)
    assert matcher.accept_string('"')
    assert marker not in allowed_ids(matcher, vocabulary.vocab_size)


def test_ids_without_a_token_are_never_allowed(tokenizer: Tokenizer) -> None:
    """D-20: the model's logits are wider than the tokenizer."""
    vocabulary = vocabulary_of(tokenizer, padding=100)
    matcher = xgrammar.GrammarMatcher(compiler_of(vocabulary).compile_regex("[^x]*"))

    assert tokenizer_info(vocabulary).vocab_size == tokenizer.vocab_size + 100
    assert max(allowed_ids(matcher, vocabulary.vocab_size)) < tokenizer.vocab_size


def test_only_the_given_stop_ids_end_a_document(tokenizer: Tokenizer) -> None:
    """The stop ids are explicit; XGrammar guesses them from spellings otherwise."""
    vocabulary = make_vocabulary(tokenizer, tokenizer.vocab_size, (1, 2))
    matcher = xgrammar.GrammarMatcher(compiler_of(vocabulary).compile_regex("a"))
    assert matcher.accept_string("a")
    assert allowed_ids(matcher, vocabulary.vocab_size) == [1, 2]


def test_the_digest_tells_apart_what_xgrammar_does_not(tokenizer: Tokenizer) -> None:
    """G-30: entries, order, stop ids, size, nameable markers; XGrammar's own check takes two swapped tokens."""

    class Swapped:
        def __init__(self, inner: Tokenizer) -> None:
            self.vocab_size = inner.vocab_size
            self.added_ids = inner.added_ids
            self._inner = inner

        def token_bytes(self, token_id: int) -> bytes:
            return self._inner.token_bytes({300: 301, 301: 300}.get(token_id, token_id))

    swapped = make_vocabulary(Swapped(tokenizer), tokenizer.vocab_size + 64, (1,))  # type: ignore[arg-type]
    digests = {
        vocabulary_of(tokenizer).digest,
        vocabulary_of(tokenizer, padding=63).digest,
        vocabulary_of(tokenizer, nameable=(DSML,)).digest,
        make_vocabulary(tokenizer, tokenizer.vocab_size + 64, (1, 2)).digest,
        swapped.digest,
    }
    assert len(digests) == 5
    assert vocabulary_of(tokenizer).digest == vocabulary_of(tokenizer).digest
