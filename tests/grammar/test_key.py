"""Canonical texts and strict reading."""

from __future__ import annotations

import json
import random

import pytest
import xgrammar
from hypothesis import given, settings
from hypothesis import strategies as st

from dsparkd.errors import GrammarError
from dsparkd.grammar.key import MAX_BYTES, Scope, canonical_schema, canonical_tag, digest, read_json, require_plain
from dsparkd.grammar.schema import check_schema
from dsparkd.messages import Grammar
from tests.grammar.bytes_vocabulary import make_compiler
from tests.grammar.random_schemas import Draw

SCOPE = Scope(xgrammar_version="0.2.9", tokenizer_digest="ab" * 32, vocab_size=259)


def shuffled(schema: object, rng: random.Random) -> object:
    """Permute keywords of schemas, `required` and definitions; leave every other order alone."""
    if not isinstance(schema, dict):
        return [shuffled(item, rng) for item in schema] if isinstance(schema, list) else schema
    members = []
    for name, value in schema.items():
        if name == "required":
            value = rng.sample([*value, *value[:1]], len(value) + len(value[:1]))
        elif name in ("$defs", "definitions"):
            items = [(key, shuffled(item, rng)) for key, item in value.items()]
            value = dict(rng.sample(items, len(items)))
        elif name in ("properties", "patternProperties"):
            value = {key: shuffled(item, rng) for key, item in value.items()}
        elif name not in ("enum", "const"):
            value = shuffled(value, rng)
        members.append((name, value))
    return dict(rng.sample(members, len(members)))


@given(st.integers(0, 10_000))
@settings(max_examples=150, deadline=None)
def test_g03_canonical_text_is_a_fixed_point_that_spellings_share(seed: int) -> None:
    """G-03: one key for all spellings of one schema: white space, escapes, and members whose order says nothing."""
    rng = random.Random(seed)
    schema = Draw(seed).document()
    text = canonical_schema(schema)
    spelled = json.loads(
        json.dumps(shuffled(schema, rng), ensure_ascii=rng.random() < 0.5, indent=rng.choice([None, 2]))
    )

    assert canonical_schema(json.loads(text)) == text
    assert canonical_schema(spelled) == text


@given(st.integers(0, 10_000))
@settings(max_examples=150, deadline=None)
def test_g04_permuted_schemas_become_one_compiled_text(seed: int) -> None:
    """G-04: what is compiled depends on the canonical form alone, whichever spelling came first."""
    schema = Draw(seed).document()

    def compiled_text(spelled: object) -> str | None:
        try:
            return check_schema(spelled, "").text
        except GrammarError:  # of two faults, which one is found first may differ
            return None

    text = compiled_text(schema)

    assert compiled_text(shuffled(schema, random.Random(seed))) == text
    assert text is None or canonical_schema(json.loads(text)) == text


# Two schemas and whether XGrammar makes different grammars of them.
GOLDEN: dict[str, tuple[str, str, bool]] = {
    "keywords": ('{"type":"integer","minimum":1}', '{"minimum":1,"type":"integer"}', False),
    "required": (
        '{"type":"object","properties":{"a":{},"b":{}},"required":["a","b"]}',
        '{"type":"object","properties":{"a":{},"b":{}},"required":["b","a","a"]}',
        False,
    ),
    "definitions": (
        '{"$ref":"#/$defs/a","$defs":{"a":{"type":"null"},"b":{}}}',
        '{"$ref":"#/$defs/a","$defs":{"b":{},"a":{"type":"null"}}}',
        False,
    ),
    "properties": (
        '{"type":"object","properties":{"a":{},"b":{}}}',
        '{"type":"object","properties":{"b":{},"a":{}}}',
        True,
    ),
    "patternProperties": (
        '{"type":"object","patternProperties":{"a":{},"b":{}}}',
        '{"type":"object","patternProperties":{"b":{},"a":{}}}',
        True,
    ),
    "objects in const": ('{"const":{"a":1,"b":2}}', '{"const":{"b":2,"a":1}}', True),
    "enum": ('{"enum":[1,2]}', '{"enum":[2,1]}', True),
    "anyOf": ('{"anyOf":[{"const":1},{"const":2}]}', '{"anyOf":[{"const":2},{"const":1}]}', True),
    "annotations": ('{"type":"null","title":"t","default":1}', '{"type":"null"}', False),
    "a property named title": (
        '{"type":"object","properties":{"title":{}},"required":["title"]}',
        '{"type":"object","properties":{"titl":{}},"required":["titl"]}',
        True,
    ),
}


@pytest.mark.parametrize("place", GOLDEN)
def test_o01_table_is_what_xgrammar_does(place: str) -> None:
    """O-01: a version that begins to mind an order fails here before it serves; equal grammars share a key."""
    first, second, differ = GOLDEN[place]
    compiler = make_compiler()

    one, other = (
        compiler.compile_grammar(xgrammar.Grammar.from_json_schema(text)).serialize_json() for text in (first, second)
    )

    assert (one != other) == differ
    assert (canonical_schema(json.loads(first)) != canonical_schema(json.loads(second))) == differ


def test_annotations_stay_where_a_reference_leads_through_them() -> None:
    """O-01: dropping them would leave the reference without its target."""
    schema = {"$ref": "#/default", "default": {"type": "null"}}

    assert json.loads(canonical_schema(schema)) == schema
    assert canonical_schema({"default": {"type": "null"}}) == "{}"


def test_tags_are_sorted_around_schemas_by_their_own_rules() -> None:
    """O-01: members of formats are sorted, strings and lists kept, and schemas inside keep the order of properties."""
    tag = {"format": {"type": "json_schema", "json_schema": {"properties": {"b": {}, "a": {}}, "title": "t"}}}

    assert canonical_tag(tag) == '{"format":{"json_schema":{"properties":{"b":{},"a":{}}},"type":"json_schema"}}'


def test_g05_options_are_part_of_the_key() -> None:
    """G-05: the same schema with other white space is another grammar; keys are compared whole, digests name files."""
    plain = Grammar(kind="json_schema", text="{}")
    fixed = Grammar(kind="json_schema", text="{}", any_whitespace=False)

    assert len({plain, fixed, Grammar(kind="json_schema", text="{}")}) == 2
    assert digest(plain, SCOPE) != digest(fixed, SCOPE)
    assert digest(plain, SCOPE) == digest(Grammar(kind="json_schema", text="{}"), SCOPE)
    assert digest(plain, SCOPE) != digest(Grammar(kind="ebnf", text="{}"), SCOPE)


BAD_JSON = {
    '{"a":1,"a":2}': "duplicate_member",
    '{"a":NaN}': "invalid_json",
    '{"a":-Infinity}': "invalid_json",
    "{} 1": "invalid_json",
    '{"a":1e400}': "number_out_of_range",
    '{"a":' + "9" * 400 + "}": "number_out_of_range",
    '{"a":"\\ud800"}': "lone_surrogate",
    '{"\\udc00":1}': "lone_surrogate",
    '{"a":"\\u0000"}': "nul_character",
    '{"a\\u0000":1}': "nul_character",
    "[" * 65 + "]" * 65: "grammar_too_large",
    "[" * 100_000: "grammar_too_large",
    '"' + "x" * MAX_BYTES + '"': "grammar_too_large",
    "": "invalid_json",
}


@pytest.mark.parametrize("text", BAD_JSON, ids=lambda text: text[:30])
def test_g02_json_is_read_strictly(text: str) -> None:
    """G-02: what two readers could understand differently never reaches XGrammar."""
    with pytest.raises(GrammarError) as caught:
        read_json(text, "/json_schema")

    assert (caught.value.code, caught.value.param) == (BAD_JSON[text], "/json_schema")


def test_brackets_inside_strings_are_no_nesting() -> None:
    """A pattern may hold hundreds of brackets."""
    text = json.dumps({"pattern": '\\"' + "[" * 500})

    assert read_json(text, "") == json.loads(text)


def test_plain_values_pass_and_bad_ones_are_named() -> None:
    """A schema that came inside the body has been parsed already, but by another reader."""
    require_plain({"a": ["é", 1, None]}, "")
    with pytest.raises(GrammarError, match="NUL"):
        require_plain({"a": ["\0"]}, "/x")
