"""The schema checker with the compiled grammar behind it: what is admitted, what is refused, and with which pointer."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path
from typing import Literal

import jsonschema
import pytest
import xgrammar

from dsparkd.errors import GrammarError
from dsparkd.grammar.inspection import MAX_ENUM_VALUES, MAX_LITERAL_BYTES, MAX_PROPERTIES
from dsparkd.grammar.keywords import FORMATS, KEYWORDS
from dsparkd.grammar.schema import Checked, check_schema
from dsparkd.messages import Grammar
from tests.grammar.bytes_vocabulary import Language, make_compiler
from tests.grammar.random_schemas import Draw, Schema, Values

SUITE = Path(__file__).with_name("suite")
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


@pytest.fixture(scope="module")
def compiler() -> xgrammar.GrammarCompiler:
    return make_compiler()


def language(compiler: xgrammar.GrammarCompiler, checked: Checked) -> Language:
    return Language(compiler, Grammar(kind="json_schema", text=checked.text, max_whitespace=2))


def objects(**keywords: object) -> dict[str, object]:
    return {"type": "object", **keywords}


def strings(**keywords: object) -> dict[str, object]:
    return {"type": "string", **keywords}


# Schema, texts that it must admit, texts that it must not. Each names what XGrammar by itself gets wrong.
EXACT: dict[str, tuple[Schema, list[str], list[str]]] = {
    "an unanchored pattern is found anywhere": (strings(pattern="bc"), ['"abcd"', '"bc"', '"\\nbc"'], ['"b"', '"cb"']),
    "escapes match as the characters they stand for": (
        strings(pattern="^a.\\\\$"),
        ['"a\\"\\\\"', '"ab\\\\"'],
        ['"a"\\\\"', '"ab\\"'],
    ),
    "an alternative keeps its own anchors": (strings(pattern="^a|b$"), ['"axx"', '"xxb"'], ['"xa"', '"bx"']),
    "a string of at least one character may be an escape": (strings(minLength=1), ['"\\""', '"a"'], ['""']),
    "a raw tab is no JSON": (strings(maxLength=5), ['"a b"'], ['"a\tb"', '"abcdef"']),
    "characters are counted, not bytes": (strings(maxLength=2), ['"😀é"'], ['"aaa"']),
    "length follows from a pattern": (strings(pattern="^[a-z]{2}$", minLength=1, maxLength=9), ['"ab"'], ['"a"']),
    "length bounds a repeated class": (strings(pattern="^[a-z]+$", maxLength=3), ['"abc"'], ['"abcd"', '"1"']),
    "a long bound is exact": (
        strings(minLength=100, maxLength=300),
        ['"' + "é" * 100 + '"', '"' + "a" * 300 + '"'],
        ['"' + "a" * 99 + '"', '"' + "a" * 301 + '"'],
    ),
    "an unlisted key is no listed one in other letters": (
        objects(properties={"a": {"type": "integer"}}, additionalProperties=True),
        ['{"a":1,"b":"x"}', '{"ab":1}', '{"":null}'],
        ['{"a":1,"\\u0061":"x"}', '{"a":1,"a":2}', '{"a":"x"}'],
    ),
    "typed additional properties stand beside listed ones": (
        objects(properties={"a": {"type": "integer"}}, additionalProperties={"type": "string"}),
        ['{"a":1,"b":"x"}'],
        ['{"a":1,"b":2}'],
    ),
    "pattern properties stand beside listed ones": (
        objects(properties={"name": strings()}, patternProperties={"^x_": {"type": "integer"}}),
        ['{"name":"q","x_1":3}', '{"x_":1}'],
        ['{"name":"q","x_1":"3"}'],
    ),
    "a required name that is not listed is required": (
        objects(properties={"a": {}}, required=["z"]),
        ['{"z":1}', '{"a":1,"z":null}'],
        ["{}", '{"a":1}'],
    ),
    "without properties any object will do": (objects(), ["{}", '{"a":[1]}'], ["[]"]),
    "an array without items takes any": ({"type": "array"}, ["[]", '[1,"a"]'], ["{}"]),
    "draft 7 tuples are prefixItems": (
        {"type": "array", "items": [{"type": "integer"}, strings()], "additionalItems": False},
        ["[]", "[1]", '[1,"a"]'],
        ['["a"]', '[1,"a",2]'],
    ),
    "maxItems below the prefix cuts it": (
        {"type": "array", "prefixItems": [{"type": "integer"}, strings()], "maxItems": 1},
        ["[1]"],
        ['[1,"a"]'],
    ),
    "allOf is merged": (
        {
            "allOf": [
                objects(properties={"a": {"minimum": 3}}),
                {"properties": {"a": {"type": "integer", "maximum": 5}}},
            ]
        },
        ['{"a":4}'],
        ['{"a":2}', '{"a":6}', '{"a":"x"}', "3"],
    ),
    "what stands beside anyOf holds in each branch": (
        {"type": "integer", "minimum": 0, "anyOf": [{"maximum": 5}, {"const": 9}]},
        ["3", "9"],
        ["7", "-1"],
    ),
    "what stands beside $ref holds": (
        {"$ref": "#/$defs/n", "minimum": 5, "$defs": {"n": {"type": "integer"}}},
        ["7"],
        ["3", '"a"'],
    ),
    "an enum keeps only what the type admits": ({"enum": [1, "a", None], "type": ["string", "null"]}, ['"a"'], ["1"]),
    "what a keyword says of strings leaves the numbers of an enum alone": (
        {"enum": [7, "a", "ab"], "minLength": 2},
        ["7", '"ab"'],
        ['"a"'],
    ),
    "oneOf with a discriminator is exact": (
        {
            "oneOf": [
                objects(properties={"kind": {"const": "a"}, "n": {"type": "integer"}}, required=["kind", "n"]),
                objects(properties={"kind": {"const": "b"}}, required=["kind"]),
            ]
        },
        ['{"kind":"a","n":1}', '{"kind":"b"}'],
        ['{"kind":"a"}', '{"kind":"b","n":"x"}'],
    ),
    "multiples within bounds are listed": (
        {"type": "integer", "multipleOf": 7, "minimum": -20, "maximum": 6000},
        ["-14", "994", "5999"],
        ["995", "-21", "6001"],
    ),
    "fractional bounds of integers are moved inwards": (
        {"type": "integer", "minimum": 2.5, "exclusiveMaximum": 7.5},
        ["3", "7"],
        ["2", "8"],
    ),
    "numbers end at their bounds": (
        {"type": "number", "exclusiveMinimum": 0, "maximum": 1.5},
        ["0.1", "1.5", "0.000001"],
        ["0", "1.51", "-1"],
    ),
    "an anchor names a schema": ({"$ref": "#x", "$defs": {"a": {"$anchor": "x", "type": "integer"}}}, ["1"], ['"a"']),
    "a pointer is decoded": ({"$ref": "#/$defs/a~1%20b", "$defs": {"a/ b": {"type": "integer"}}}, ["1"], ['"a"']),
    "recursion goes on": (
        objects(properties={"v": {"type": "integer"}, "c": {"type": "array", "items": {"$ref": "#"}}}, required=["v"]),
        ['{"v":1,"c":[{"v":2,"c":[]}]}'],
        ['{"v":1,"c":[{}]}'],
    ),
    "unevaluatedProperties sees what its own allOf names": (
        {"allOf": [objects(properties={"a": {}})], "unevaluatedProperties": False, "properties": {"b": {}}},
        ['{"b":1,"a":2}', "{}"],
        ['{"c":1}'],
    ),
    "a forbidden property is left out": (objects(properties={"a": False, "b": {}}), ['{"b":1}'], ['{"a":1}']),
    "a branch that nothing satisfies is left out": ({"anyOf": [False, {"type": "null"}]}, ["null"], ["1"]),
    "a date has a day that exists": (strings(format="date"), ['"2024-02-29"'], ['"2023-02-29"', '"2024-04-31"']),
    "names may be limited": (
        objects(propertyNames={"pattern": "^[a-z]+$"}, additionalProperties={"type": "integer"}),
        ['{"ab":1}', "{}"],
        ['{"A":1}', '{"ab":"x"}'],
    ),
    "one property of several at least": (
        objects(properties={"a": {}, "b": {}}, minProperties=1),
        ['{"a":1}', '{"b":1}'],
        ["{}"],
    ),
    "a name that asks for escapes is written with them": (
        objects(properties={'q"\\\né': {}}, required=['q"\\\né']),
        ['{"q\\"\\\\\\né":1}'],
        ['{"q":1}'],
    ),
}


@pytest.mark.parametrize("claim", EXACT)
def test_grammar_means_what_the_schema_means(claim: str, compiler: xgrammar.GrammarCompiler) -> None:
    """Each is a case in which XGrammar alone drops, loosens or misreads the keyword."""
    schema, admitted, refused = EXACT[claim]

    admits = language(compiler, check_schema(schema, "")).admits

    assert [text for text in admitted if not admits(text)] == []
    assert [text for text in refused if admits(text)] == []


# Schema, code, pointer.
REFUSED: list[tuple[object, str, str]] = [
    (objects(properties={"foo": "bar"}), "invalid_schema", "/properties/foo"),
    ({"type": "strnig"}, "invalid_schema", "/type"),
    (None, "invalid_schema", ""),
    ([], "invalid_schema", ""),
    ("x", "invalid_schema", ""),
    ({"enum": []}, "invalid_schema", "/enum"),
    ({"type": "integer", "minimum": 5, "maximum": 1}, "unsatisfiable_schema", "/minimum"),
    (False, "unsatisfiable_schema", ""),
    (
        objects(properties={"a": {"enum": [1], "type": "string"}}, required=["a"]),
        "unsatisfiable_schema",
        "/properties/a/enum",
    ),
    (objects(properties={"n": {"$ref": "#"}}, required=["n"]), "unsatisfiable_schema", ""),
    ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}, "schema_cycle", "/$defs/a"),
    ({"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}, {}]}}}, "schema_cycle", "/$defs/a"),
    ({"propertyNames": {"$ref": "#"}}, "unsupported_schema", "/propertyNames"),
    (objects(minProperties=1, propertyNames={"anyOf": [{"$ref": "#"}]}), "unsupported_schema", "/propertyNames"),
    ({"$ref": "#/$defs/gone"}, "unresolved_ref", "/$ref"),
    ({"anyOf": [True, {"items": {"$ref": "#nowhere"}}]}, "unresolved_ref", "/anyOf/1/items/$ref"),
    ({"$ref": "https://example.com/x.json"}, "unsupported_ref", "/$ref"),
    ({"not": {"type": "null"}}, "unsupported_schema", "/not"),
    ({"items": {"if": {}, "then": False}}, "unsupported_schema", "/items/if"),
    ({"type": "array", "uniqueItems": True}, "unsupported_schema", "/uniqueItems"),
    ({"type": "array", "contains": {"const": 1}}, "unsupported_schema", "/contains"),
    (objects(dependentRequired={"a": ["b"]}), "unsupported_schema", "/dependentRequired"),
    ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "unsupported_schema", "/oneOf"),
    ({"oneOf": [{"const": 1}, {"enum": [2, 1.0]}]}, "unsupported_schema", "/oneOf"),
    ({"oneOf": [{"minimum": 1}, {"type": "integer"}]}, "unsupported_schema", "/oneOf"),
    ({"oneOf": [objects(properties={"a": {}}, required=["a"]), objects()]}, "unsupported_schema", "/oneOf"),
    ({"allOf": [strings(pattern="^a"), strings(pattern="b$")]}, "unsupported_schema", "/allOf/1/pattern"),
    (strings(pattern="(?=a)b"), "unsupported_schema", "/pattern"),
    (strings(pattern="["), "unsupported_schema", "/pattern"),
    (strings(pattern="(a)\\1"), "unsupported_schema", "/pattern"),
    (strings(pattern="\\bword"), "unsupported_schema", "/pattern"),
    ({"type": "number", "multipleOf": 0.01}, "unsupported_schema", "/multipleOf"),
    ({"type": "integer", "multipleOf": 3, "minimum": 0}, "unsupported_schema", "/multipleOf"),
    ({"type": "number", "minimum": 1e300}, "unsupported_schema", "/minimum"),
    ({"type": "number", "minimum": 0.0000001}, "unsupported_schema", "/minimum"),
    (objects(minProperties=2), "unsupported_schema", "/minProperties"),
    (objects(patternProperties={"a": {}, "b": {}}), "unsupported_schema", "/patternProperties"),
    (
        {"allOf": [objects(properties={"a": {}}, unevaluatedProperties=False), objects(additionalProperties=True)]},
        "unsupported_schema",
        "/allOf/0/unevaluatedProperties",
    ),
    ({"properties": {"a": {"$id": "http://x/y", "$ref": "#/z"}}}, "unsupported_schema", "/properties/a/$id"),
    ({"$schema": "http://json-schema.org/draft-04/schema#"}, "unsupported_schema", "/$schema"),
    ({"exclusiveMinimum": True}, "invalid_schema", "/exclusiveMinimum"),
    ({"minimum": 2**63}, "number_out_of_range", "/minimum"),
    ({"const": {"a": [2**63]}}, "number_out_of_range", "/const"),
    ({"enum": [0, -(2**63) - 1]}, "number_out_of_range", "/enum/1"),
    ({"type": "integer", "exclusiveMinimum": 2**63 - 1}, "number_out_of_range", "/exclusiveMinimum"),
    ({"properties": {"a~b/c": {"type": 1}}}, "invalid_schema", "/properties/a~0b~1c/type"),
    ({"$schema": "https://json-schema.org/draft/2020-12/schema", "items": [{}]}, "invalid_schema", "/items"),
    ({"$schema": "http://json-schema.org/draft-07/schema#", "prefixItems": [{}]}, "invalid_schema", "/prefixItems"),
]


@pytest.mark.parametrize(("schema", "code", "pointer"), REFUSED, ids=[json.dumps(one[0])[:60] for one in REFUSED])
def test_refusal_names_code_and_place(schema: object, code: str, pointer: str) -> None:
    """A client with sixty tools must find the one place that is wrong; nothing of it reaches XGrammar."""
    with pytest.raises(GrammarError) as caught:
        check_schema(schema, "/at")

    assert (caught.value.code, caught.value.param, caught.value.status) == (code, "/at" + pointer, 400)
    assert ("/at" + pointer) in caught.value.message


@pytest.mark.parametrize("name", KEYWORDS)
def test_wrong_type_of_every_keyword_is_refused_with_its_place(name: str) -> None:
    """XGrammar takes some wrong values for absent ones, so the answer would not be held to anything."""
    keyword = KEYWORDS[name]
    wrong = next((value for value in (5, "x", [], {"a": 1}, None, -1, 0.5) if keyword.value(value) is not None), None)
    if wrong is None and all(keyword.value(value) is None for value in (5, None, [])):
        assert keyword.treatment == "annotation" or name == "const"  # any value is right
        return

    with pytest.raises(GrammarError) as caught:
        check_schema({"properties": {"p": {name: wrong}}}, "")

    assert (caught.value.code, caught.value.param) == ("invalid_schema", f"/properties/p/{name}")


def at_limit(count: int) -> dict[str, tuple[object, str | None]]:
    """Schemas `count` over their limits (0: at them), with the pointer of the refusal."""
    nested: object = {}
    for _ in range(64 + count):
        nested = {"items": nested}
    return {
        "levels": (nested, None),
        "properties": (objects(properties={f"p{i}": {} for i in range(MAX_PROPERTIES + count)}), "/properties"),
        "enum": ({"enum": list(range(MAX_ENUM_VALUES + count))}, "/enum"),
        "pattern": (strings(pattern="^" + "a" * 1900 + "$") | ({"pattern": "a" * 4097} if count else {}), "/pattern"),
        "groups": (strings(pattern="(" * (32 + count) + ")" * (32 + count)), "/pattern"),
        "literal": ({"const": "x" * (MAX_LITERAL_BYTES - 2 + count)}, "/const"),
        "optional": (
            objects(properties={f"p{i}": {} for i in range(50 + count)}, maxProperties=3),
            "/maxProperties",
        ),
        "bytes": ({"description": "x" * (262_144 - 18 + count)}, ""),
    }


@pytest.mark.parametrize("name", at_limit(0))
def test_g06_limits_hold_at_their_edge(name: str) -> None:
    """G-06: at the limit accepted, one over refused: XGrammar needs minutes or gigabytes beyond."""
    check_schema(at_limit(0)[name][0], "")
    schema, pointer = at_limit(1)[name]

    with pytest.raises(GrammarError) as caught:
        check_schema(schema, "")

    assert caught.value.code in ("grammar_too_large", "unsupported_schema")
    assert pointer is None or caught.value.param == pointer


PRODUCTS: dict[str, dict[str, object]] = {
    "values by patterns": {
        "enum": [f"ab{number:04}" for number in range(MAX_ENUM_VALUES)],
        "anyOf": [{"pattern": f"^a.*{number}$"} for number in range(40)],
    },
    "values by values": {
        "allOf": [{"enum": [f"{number + shift:036}" for number in range(MAX_ENUM_VALUES // 2)]} for shift in (0, 1)]
    },
    "values by branches": {
        "enum": [f"ab{number:04}" for number in range(MAX_ENUM_VALUES)],
        "anyOf": [{"minLength": number} for number in range(100)],
    },
    "branches by branches": {
        "oneOf": [
            *({"enum": [f"{branch} {number}" for number in range(240)]} for branch in range(20)),
            *({"type": "string", "pattern": f"^b(?:a?b?)*{branch}$"} for branch in range(20)),
        ]
    },
    "names by patterns": {
        "properties": {"name" * 20 + str(number): {} for number in range(900)},
        "patternProperties": {"^(?:(?:n?a?m?e?[0-9]?){20}){10}$": {}},
    },
}


@pytest.mark.parametrize("name", PRODUCTS)
@pytest.mark.parametrize("policy", ["refuse", "report"])
def test_g06_what_multiplies_within_the_limits_is_bounded_too(name: str, policy: Literal["refuse", "report"]) -> None:
    """G-06, R16: each took seconds, and two threads read the bodies of all requests."""
    with pytest.raises(GrammarError, match="too much work") as caught:
        check_schema(PRODUCTS[name], "/at", policy=policy)

    assert (caught.value.code, caught.value.param) == ("grammar_too_large", "/at")


@pytest.mark.parametrize(
    "schema",
    [
        {
            "$defs": {**{f"a{i}": {"allOf": [{"$ref": f"#/$defs/a{i + 1}"}] * 2} for i in range(40)}, "a40": {}},
            "$ref": "#/$defs/a0",
        },
        {
            "$defs": {**{f"a{i}": {"anyOf": [{"$ref": f"#/$defs/a{i + 1}"}] * 2} for i in range(40)}, "a40": {}},
            "$ref": "#/$defs/a0",
        },
        {"type": "integer", "allOf": [{"anyOf": [{"minimum": i}, {"maximum": i}]} for i in range(16)]},
        {"$defs": {**{f"a{i}": {"$ref": f"#/$defs/a{i + 1}"} for i in range(4000)}, "a4000": {}}, "$ref": "#/$defs/a0"},
        {"oneOf": [strings(pattern=f"^x{i}-[a-z]*") for i in range(300)]},
        strings(pattern="^(a|b|ab|ba|aab)*c$", enum=["ab" * 7000]),
        objects(properties={"n" * 200 + str(i): {} for i in range(900)}, additionalProperties=True),
        objects(properties={f"p{i}": {} for i in range(100)}, anyOf=[{"required": [f"p{i}"]} for i in range(100)]),
    ],
    ids=lambda schema: json.dumps(schema)[:40],
)
def test_work_of_the_checker_is_bounded(schema: object) -> None:
    """Merging, comparing and matching grow with products and powers of what was sent; each is cut off by a count.

    Without the counts these take hours; with them, 0.1 s.
    """
    try:
        outcome = check_schema(schema, "").text[:1]
    except GrammarError as error:
        outcome = error.code

    assert outcome in ("{", "grammar_too_large", "unsupported_schema")


def test_warnings_tell_what_is_narrower_and_what_is_ignored() -> None:
    """Nothing is dropped silently: what does not mean here what it seems to mean is listed with its place."""
    schema = objects(
        properties={"s": strings(maxLength=99), "f": strings(format="int32", nullable=True), "t": {"minimum": 1}},
        patternProperties={"^x": {}},
    )

    warnings = check_schema(schema, "/at").warnings

    assert sorted((warning.kind, warning.pointer) for warning in warnings) == [
        ("ignored", "/at/properties/f/format"),
        ("ignored", "/at/properties/f/nullable"),
        ("narrower", "/at/patternProperties"),
        ("narrower", "/at/properties/s/maxLength"),
        ("narrower", "/at/properties/t"),
        ("narrower", "/at/properties/t/minimum"),
    ]


def test_policy_report_lets_through_what_cannot_be_enforced_and_says_so(compiler: xgrammar.GrammarCompiler) -> None:
    """The operator may prefer a loose answer with a warning to a refusal, but never one without."""
    schema = objects(properties={"a": {"type": "integer", "not": {"const": 1}}}, required=["a"])

    checked = check_schema(schema, "/at", policy="report")

    assert [(warning.kind, warning.pointer) for warning in checked.warnings if warning.kind == "unsupported"] == [
        ("unsupported", "/at/properties/a/not")
    ]
    assert language(compiler, checked).admits('{"a":1}')
    with pytest.raises(GrammarError):
        check_schema({"type": "strnig"}, "", policy="report")


def test_strict_closes_objects_without_a_warning() -> None:
    """Who asks for strict has asked for closed objects; others are told that unlisted properties are not generated."""
    schema = objects(properties={"a": {}})

    assert check_schema(schema, "", strict=True).warnings == ()
    assert [warning.kind for warning in check_schema(schema, "").warnings] == ["narrower"]


def test_order_of_properties_is_the_order_of_the_answer(compiler: xgrammar.GrammarCompiler) -> None:
    """O-01: sorting them would change what is generated."""
    schema = objects(properties={"b": {}, "a": {}}, required=["a", "b"])

    admits = language(compiler, check_schema(schema, "")).admits

    assert admits('{"b":1,"a":2}')
    assert not admits('{"a":2,"b":1}')


@pytest.mark.parametrize("seed", range(12))
def test_grammar_admits_only_valid_documents(seed: int, compiler: xgrammar.GrammarCompiler) -> None:
    """Decision 23's two obligations, over random schemas, with jsonschema as the judge.

    Whatever the grammar admits is valid: documents written by walking it, and values made to satisfy or just to miss
    the schema. Where no warning says "narrower", valid values in the schema's order are admitted.
    """
    counted: Counter[str] = Counter()
    for number in range(seed * 40, seed * 40 + 40):
        schema = Draw(number).document()
        try:
            checked = check_schema(schema, "")
        except GrammarError:
            counted["refused"] += 1
            continue
        counted["checked"] += 1
        validator = jsonschema.Draft202012Validator(schema)
        grammar = language(compiler, checked)
        rng = random.Random(number)
        for text in filter(None, (grammar.sample(rng, 300) for _ in range(4))):
            if REPLACEMENT not in text:
                assert validator.is_valid(json.loads(text)), (number, schema, text)
                counted["written"] += 1
        is_narrower = any(warning.kind == "narrower" for warning in checked.warnings)
        is_complete = not is_narrower and '"format"' not in json.dumps(schema)  # which asserts nothing by the standard
        values = Values(schema, rng)
        guesses = [values.value(schema) for _ in range(6)]
        for value in [*guesses, *map(values.changed, guesses)]:
            is_valid, is_admitted = validator.is_valid(value), grammar.admits_json(value)
            assert is_valid or not is_admitted, (number, schema, value)
            assert is_admitted or not is_valid or not is_complete, (number, schema, value)
            counted["admitted" if is_admitted else "not admitted"] += 1
    assert counted["checked"] > 20, counted
    assert counted["written"] > 40, counted
    assert counted["admitted"] > 40, counted
    assert counted["not admitted"] > 40, counted


@pytest.mark.parametrize("draft", ["draft7", "draft2020-12"])
def test_public_suite_is_never_answered_wrongly(draft: str, compiler: xgrammar.GrammarCompiler) -> None:
    """Invalid instances of the JSON-Schema-Test-Suite are not admitted; valid ones are, unless a warning said so.

    Spelling apart: an object in const is written in the schema's order.
    """
    groups = json.loads((SUITE / f"{draft}.json").read_text())
    counted: Counter[str] = Counter()
    for name, cases in groups.items():
        for case in cases:
            schema = case["schema"]
            if draft == "draft7" and isinstance(schema, dict):
                schema = {"$schema": "http://json-schema.org/draft-07/schema#", **schema}
            try:
                checked = check_schema(schema, "")
            except GrammarError:
                counted["refused"] += 1
                continue
            counted["compiled"] += 1
            grammar = language(compiler, checked)
            is_exact = not checked.warnings and not name.startswith("format")
            for test in case["tests"]:
                is_admitted = grammar.admits_json(test["data"])
                assert test["valid"] or not is_admitted, (name, case["description"], test["description"])
                is_reordered = "different property order" in test["description"]
                assert is_admitted or not test["valid"] or not is_exact or is_reordered, (name, case, test)
                counted["admitted" if is_admitted else "not admitted"] += 1
    assert counted["compiled"] > 150, counted
    assert counted["admitted"] > 250, counted


@pytest.mark.parametrize("name", FORMATS)
def test_formats_generate_only_what_they_are(name: str, compiler: xgrammar.GrammarCompiler) -> None:
    """XGrammar's dates include 30 February and its e-mail addresses have no dots, so formats are patterns of ours."""
    grammar = language(compiler, check_schema(strings(format=name), ""))
    rng = random.Random(7)
    checker = jsonschema.Draft202012Validator.FORMAT_CHECKER

    texts = [json.loads(text) for text in (grammar.sample(rng, 200) for _ in range(60)) if text]

    assert len(texts) > 10
    if name in checker.checkers:
        assert [text for text in texts if not checker.conforms(text, name)] == []
