"""Structural tags of clients."""

from __future__ import annotations

import json

import pytest

from dsparkd.errors import GrammarError
from dsparkd.grammar.spec import ConstraintOptions, parse_constraint
from tests.grammar.bytes_vocabulary import Language, make_compiler

SCHEMA = {"type": "object", "properties": {"s": {"type": "string", "maxLength": 3}}, "required": ["s"]}


def const(text: str) -> dict[str, object]:
    return {"type": "const_string", "value": text}


def language(format_: dict[str, object]) -> Language:
    found = parse_constraint({"structural_tag": {"type": "structural_tag", "format": format_}}, ConstraintOptions())
    assert found is not None
    return Language(make_compiler(), found.grammar)


def tag(content: object) -> dict[str, object]:
    return {"type": "tag", "begin": "<f>", "content": content, "end": "</f>"}


@pytest.mark.parametrize(
    ("format_", "admitted", "refused"),
    [
        ({"type": "json_schema", "json_schema": SCHEMA}, ['{"s":"abc"}'], ['{"s":"abcd"}', '{"s":"a\tb"}']),
        (tag({"type": "json_schema", "json_schema": SCHEMA}), ['<f>{"s":"a"}</f>'], ['{"s":"a"}']),
        ({"type": "regex", "pattern": "^a{1,300}\\d$"}, ["a1", "a" * 300 + "2"], ["a", "a" * 301 + "2"]),
        ({"type": "grammar", "grammar": 'root ::= "x" root | "y"'}, ["xxy"], ["x"]),
        (
            {"type": "sequence", "elements": [const("a"), {"type": "optional", "content": const("b")}]},
            ["a", "ab"],
            ["b"],
        ),
        ({"type": "or", "elements": [const("a"), const("b")]}, ["a", "b"], ["ab"]),
        ({"type": "plus", "content": const("a")}, ["aa"], [""]),
        ({"type": "star", "content": const("a")}, ["", "aa"], ["b"]),
        ({"type": "repeat", "min": 1, "max": 2, "content": const("a")}, ["a", "aa"], ["", "aaa"]),
        ({"type": "any_text", "excludes": ["no"]}, ["yes"], ["a no b"]),
        (
            {"type": "triggered_tags", "triggers": ["<f"], "tags": [tag(const("1"))]},
            ["text <f>1</f> more", ""],
            ["text <f>2</f>"],
        ),
        (
            {"type": "tags_with_separator", "tags": [tag(const("1"))], "separator": ",", "at_least_one": True},
            ["<f>1</f>,<f>1</f>"],
            [""],
        ),
    ],
    ids=lambda value: value["type"] if isinstance(value, dict) else None,
)
def test_formats_mean_what_they_say(format_: dict[str, object], admitted: list[str], refused: list[str]) -> None:
    """Schemas and patterns inside go through the same checks as anywhere else."""
    found = language(format_)

    assert [text for text in admitted if not found.admits(text)] == []
    assert [text for text in refused if found.admits(text)] == []


def test_older_form_is_the_same_grammar() -> None:
    """Clients written for the first structural tags list structures and triggers."""
    older = {"structures": [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}], "triggers": ["<f"]}
    newer = {
        "format": {
            "type": "triggered_tags",
            "triggers": ["<f"],
            "tags": [tag({"type": "json_schema", "json_schema": SCHEMA})],
        }
    }

    first, second = (parse_constraint({"structural_tag": one}, ConstraintOptions()) for one in (older, newer))

    assert first is not None
    assert second is not None
    assert first.grammar == second.grammar


@pytest.mark.parametrize(
    ("value", "code", "pointer"),
    [
        (1, "invalid_structural_tag", ""),
        ({"format": {}}, "unsupported_format", "/format/type"),
        ({"format": {"type": "token", "token": 1}}, "unsupported_format", "/format/type"),
        ({"format": {"type": "token_dispatch", "rules": []}}, "unsupported_format", "/format/type"),
        ({"format": const("a") | {"x": 1}}, "unknown_field", "/format/x"),
        ({"format": {"type": "const_string"}}, "missing_field", "/format/value"),
        ({"format": {"type": "sequence", "elements": []}}, "invalid_structural_tag", "/format/elements"),
        ({"format": {"type": "plus", "content": 1}}, "invalid_structural_tag", "/format/content"),
        ({"format": {"type": "json_schema", "json_schema": {"type": 1}}}, "invalid_schema", "/format/json_schema/type"),
        (
            {"format": {"type": "json_schema", "json_schema": {}, "style": "qwen_xml"}},
            "unsupported_format",
            "/format/style",
        ),
        ({"format": {"type": "regex", "pattern": "(?=a)"}}, "invalid_grammar", "/format/pattern"),
        ({"format": {"type": "grammar", "grammar": 'x ::= "a"'}}, "invalid_grammar", "/format/grammar"),
        (
            {"format": {"type": "repeat", "min": 3, "max": 1, "content": const("a")}},
            "invalid_structural_tag",
            "/format/max",
        ),
        (
            {"format": {"type": "tags_with_separator", "tags": [const("a")], "separator": ","}},
            "invalid_structural_tag",
            "/format/tags/0",
        ),
        (
            {"structures": [{"begin": "a", "schema": {"type": 1}, "end": "b"}], "triggers": []},
            "invalid_schema",
            "/structures/0/schema/type",
        ),
    ],
)
def test_refusal_names_the_place(value: object, code: str, pointer: str) -> None:
    """Formats that name tokens would let control tokens into the text; the rest is malformed."""
    with pytest.raises(GrammarError) as caught:
        parse_constraint({"structural_tag": value}, ConstraintOptions())

    assert (caught.value.code, caught.value.param) == (code, "/structural_tag" + pointer)


def test_depth_is_limited() -> None:
    """XGrammar's time grows with the cube of the depth."""
    format_ = const("a")
    for _ in range(70):
        format_ = {"type": "plus", "content": format_}

    with pytest.raises(GrammarError) as caught:
        parse_constraint({"structural_tag": {"format": format_}}, ConstraintOptions())

    assert caught.value.code == "grammar_too_large"


def test_schemas_of_one_tag_count_together() -> None:
    """G-06, R16: a thousand schemas within the limits of one would keep a thread that reads bodies for minutes."""
    values = ["a" * 30 + str(number) for number in range(100)]
    heavy = {"type": "json_schema", "json_schema": {"enum": values, "pattern": "^(?:a?){40}[0-9]*$"}}
    assert language(heavy).admits(json.dumps(values[3]))

    with pytest.raises(GrammarError, match="too much work") as caught:
        language({"type": "sequence", "elements": [heavy] * 40})

    assert caught.value.code == "grammar_too_large"
