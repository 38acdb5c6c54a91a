"""From canonical texts to XGrammar: what is put right in its reading, and that nothing else is touched."""

from __future__ import annotations

import json

import pytest
import xgrammar

from dsparkd.grammar.compile import compile_grammar, source_grammar
from dsparkd.messages import Grammar
from tests.grammar.bytes_vocabulary import Language, make_compiler


def schema_grammar(schema: object) -> Grammar:
    return Grammar(kind="json_schema", text=json.dumps(schema, ensure_ascii=False))


BOUNDED = {"type": "string", "minLength": 1, "maxLength": 3}
# Texts that look like the rules that are rewritten.
LOOKALIKES = [
    'root_0 ::= Regex("a", json_string=true)',
    '\nroot_0 ::= Regex("a", json_string=true)\n',
    'x ::= (([^"\\\r\n]))',
    '\nx ::= (([^\\"\\\\\\r\\n]))\n',
    '"\\"" root_0 "\\""',
    '\\"\\"" root_1 "\\""',
    '" root_0 "',
]


@pytest.mark.parametrize("text", LOOKALIKES)
def test_literals_are_left_alone_whatever_they_look_like(text: str) -> None:
    """The grammar's own text is edited, and a client's literal is part of it."""
    schema = {
        "type": "object",
        "properties": {text: {"enum": [text]}, "s": BOUNDED, "p": {"type": "string", "pattern": "[a-z]{1,200}"}},
        "required": [text, "s", "p"],
        "additionalProperties": False,
    }
    language = Language(make_compiler(), schema_grammar(schema))

    assert language.admits_json({text: text, "s": "é", "p": "a" * 200})
    assert not language.admits_json({text: text + "x", "s": "é", "p": "a"})
    assert not language.admits_json({text: text, "s": "aaaa", "p": "a"})
    assert not language.admits_json({text: text, "s": "a", "p": "a" * 201})


def test_bounded_strings_have_no_raw_control_characters() -> None:
    """A raw tab or escape character is no JSON; XGrammar by itself admits both here, which this test also shows."""
    language = Language(make_compiler(), schema_grammar(BOUNDED))
    stock = make_compiler().compile_grammar(xgrammar.Grammar.from_json_schema(json.dumps(BOUNDED)))

    assert [text for text in ('"\t"', '"\x1b"', '"\n"', '"a\x00"') if language.admits(text)] == []
    assert language.admits('"é\x7f"')
    assert xgrammar.GrammarMatcher(stock).accept_string('"\t"')


def test_a_grammar_without_anything_to_put_right_is_xgrammars_own() -> None:
    """Reading back is needed for patterns and length bounds alone."""
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}

    stock = xgrammar.Grammar.from_json_schema(json.dumps(schema), strict_mode=False, max_whitespace_cnt=32)

    assert str(source_grammar(schema_grammar(schema))) == str(stock)


def test_result_does_not_depend_on_the_number_of_threads() -> None:
    """G-04: equal keys give equal grammars, byte for byte."""
    grammar = schema_grammar({"type": "array", "items": BOUNDED, "maxItems": 4})
    compilers = [make_compiler(max_threads) for max_threads in (1, 2)]

    first, second = (compile_grammar(compiler, grammar).serialize_json() for compiler in compilers)

    assert first == second


def test_regex_keeps_its_meaning_when_a_long_count_becomes_a_rule() -> None:
    """The kind "regex" is taken byte for byte; only how XGrammar counts is changed."""
    language = Language(make_compiler(), Grammar(kind="regex", text=r'^[\w"\\]{2,300}(?:-\d+)?$'))

    assert language.admits('a"\\_' * 75 + "-12")
    assert not language.admits("a" * 301)
    assert not language.admits("a-12")
    assert Language(make_compiler(), Grammar(kind="regex", text="(?:a\n\t){1,300}b?")).admits("a\n\t" * 300)


def test_ebnf_of_a_client_inside_a_tag_keeps_its_own_rules() -> None:
    """What is put right is XGrammar's writing; a client's rule that looks the same means what it says."""
    text = 'root ::= any tail\nany ::= [^"\\\\\\r\\n]\ntail ::= Regex("(?=b)c")'
    tag = {"type": "structural_tag", "format": {"type": "grammar", "grammar": text}}

    language = Language(make_compiler(), Grammar(kind="structural_tag", text=json.dumps(tag)))

    assert language.admits("\tc")
    assert not language.admits('"c')


@pytest.mark.parametrize("kind", ["regex", "ebnf", "json_schema", "structural_tag"])
def test_what_xgrammar_refuses_is_an_error(kind: str) -> None:
    """The caller turns it into a 400 with the library's words (G-25)."""
    with pytest.raises(RuntimeError):
        source_grammar(Grammar(kind=kind, text="("))  # type: ignore[arg-type]
