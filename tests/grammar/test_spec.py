"""What of a request's body asks for a grammar, under which names, and how each refusal is worded."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys

import pytest
import xgrammar

from dsparkd.errors import GrammarError
from dsparkd.grammar.spec import SOURCES, Constraint, ConstraintOptions, parse_constraint
from tests.grammar.bytes_vocabulary import MARKER_ID, Language, make_compiler

OPTIONS = ConstraintOptions(marker_id=MARKER_ID, max_whitespace=2)
EXAMPLES: dict[str, object] = {
    "json_schema": {"type": "integer"},
    "json_object": True,
    "regex": "[0-9]+",
    "ebnf": 'root ::= "a" | digits\ndigits ::= [0-9]+\n',
    "choice": ["yes", "no"],
    "structural_tag": {"format": {"type": "const_string", "value": "7"}},
}


@pytest.fixture(scope="module")
def compiler() -> xgrammar.GrammarCompiler:
    return make_compiler()


def body(field: str, value: object) -> dict[str, object]:
    outer, _, inner = field.partition(".")
    return {outer: {inner: value}} if inner else {outer: value}


def parsed(request: dict[str, object]) -> Constraint:
    constraint = parse_constraint(request, OPTIONS)
    assert constraint is not None
    return constraint


def refusal(request: dict[str, object], options: ConstraintOptions = OPTIONS) -> tuple[str, str | None]:
    with pytest.raises(GrammarError) as caught:
        parse_constraint(request, options)
    assert caught.value.status == 400
    return caught.value.code, caught.value.param


@pytest.mark.parametrize("field", SOURCES)
def test_each_name_of_a_kind_gives_the_same_grammar(field: str, compiler: xgrammar.GrammarCompiler) -> None:
    """Clients of vLLM and of SGLang name one thing differently; equal grammars share one compile."""
    kind = SOURCES[field]

    grammar = parsed(body(field, EXAMPLES[kind])).grammar

    assert grammar == parsed({kind: EXAMPLES[kind]}).grammar
    assert Language(compiler, grammar).admits({"json_object": "{}", "choice": "no"}.get(kind, "7"))
    assert not Language(compiler, grammar).admits("x")


@pytest.mark.parametrize("kind", ["json_schema", "structural_tag"])
def test_json_text_is_as_good_as_an_object(kind: str) -> None:
    """SGLang's clients send both as strings."""
    assert parsed({kind: json.dumps(EXAMPLES[kind], indent=3)}) == parsed({kind: EXAMPLES[kind]})


@pytest.mark.parametrize(("first", "second"), list(itertools.combinations(EXAMPLES, 2)))
def test_g01_two_grammars_are_refused(first: str, second: str) -> None:
    """G-01: at most one kind a request; whichever would win, the client meant something else."""
    assert refusal({first: EXAMPLES[first], second: EXAMPLES[second]})[0] == "conflicting_grammars"


def test_g01_response_format_is_one_of_them() -> None:
    """G-01: a second name for the same thing is a second grammar."""
    request = {"response_format": {"type": "json_object"}, "guided_regex": "a"}

    assert refusal(request) == ("conflicting_grammars", "/response_format")


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        ({"response_format": {"type": "json_object"}}, "json_object"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "integer"}}}},
            "json_schema",
        ),
        ({"response_format": {"type": "structural_tag", **EXAMPLES["structural_tag"]}}, "structural_tag"),  # type: ignore[dict-item]
    ],
)
def test_response_format_is_read(request_: dict[str, object], field: str) -> None:
    """The field that OpenAI's clients use."""
    assert parsed(request_).grammar == parsed({field: EXAMPLES[field]}).grammar


@pytest.mark.parametrize(
    "request_",
    [
        {},
        {"response_format": {"type": "text"}},
        {"response_format": None, "regex": None, "json_object": False, "structured_outputs": None},
        {"structured_outputs": {"json": None, "disable_any_whitespace": True}},
        {"tools": [], "tool_choice": "auto"},
        {"tools": [{"type": "function", "function": {"name": "f"}}]},
        {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "none"},
    ],
)
def test_free_text_needs_no_grammar(request_: dict[str, object]) -> None:
    """Null asks for nothing, and tools that are not strict leave the model free."""
    assert parse_constraint(request_, OPTIONS) is None


REFUSALS: list[tuple[dict[str, object], str, str]] = [
    ({"response_format": 1}, "invalid_type", "/response_format"),
    ({"response_format": {"type": "xml"}}, "invalid_value", "/response_format/type"),
    ({"response_format": {"type": "json_schema"}}, "invalid_type", "/response_format/json_schema"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {}}},
        "missing_field",
        "/response_format/json_schema/schema",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "strict": 1}}},
        "invalid_type",
        "/response_format/json_schema/strict",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "stric": True}}},
        "unknown_field",
        "/response_format/json_schema/stric",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"properties": {"foo": "bar"}}}}},
        "invalid_schema",
        "/response_format/json_schema/schema/properties/foo",
    ),
    ({"json_schema": '{"a":1,"a":2}'}, "duplicate_member", "/json_schema"),
    ({"json_schema": "{"}, "invalid_json", "/json_schema"),
    ({"json_schema": {"const": "\0"}}, "nul_character", "/json_schema"),
    ({"json_object": 1}, "invalid_type", "/json_object"),
    ({"regex": 1}, "invalid_type", "/regex"),
    ({"regex": ""}, "invalid_grammar", "/regex"),
    ({"regex": "["}, "invalid_grammar", "/regex"),
    ({"regex": "(?=a)b"}, "invalid_grammar", "/regex"),
    ({"regex": "a$b"}, "invalid_grammar", "/regex"),
    ({"regex": "a" * 4097}, "grammar_too_large", "/regex"),
    ({"regex": "\ud800"}, "lone_surrogate", "/regex"),
    ({"ebnf": 'start ::= "a"'}, "invalid_grammar", "/ebnf"),
    ({"ebnf": "root ::= " + "(" * 33 + '"a"' + ")" * 33}, "grammar_too_large", "/ebnf"),
    ({"ebnf": 'root ::= "' + "a" * 16_400 + '"'}, "grammar_too_large", "/ebnf"),
    ({"ebnf": 'root ::= "a"\n' + "#" * 262_144}, "grammar_too_large", "/ebnf"),
    ({"choice": []}, "invalid_type", "/choice"),
    ({"choice": "yes"}, "invalid_type", "/choice"),
    ({"choice": ["a", 1]}, "invalid_type", "/choice/1"),
    ({"guided_choice": ["a"] * 5001}, "grammar_too_large", "/guided_choice"),
    ({"structured_outputs": []}, "invalid_type", "/structured_outputs"),
    ({"structured_outputs": {"jsn": {}}}, "unknown_field", "/structured_outputs/jsn"),
    (
        {"structured_outputs": {"disable_any_whitespace": 1}},
        "invalid_type",
        "/structured_outputs/disable_any_whitespace",
    ),
    ({"regex": "a", "ignore_eos": True}, "ignore_eos_with_grammar", "/ignore_eos"),
    ({"tool_choice": "required"}, "missing_field", "/tools"),
    ({"tool_choice": "always", "tools": []}, "invalid_value", "/tool_choice"),
]


@pytest.mark.parametrize(("request_", "code", "pointer"), REFUSALS, ids=[f"{one[1]} {one[2]}" for one in REFUSALS])
def test_refusal_has_a_code_and_the_place(request_: dict[str, object], code: str, pointer: str) -> None:
    """G-02, G-06, D-26: one error object a refusal; nothing of it reaches a rank."""
    assert refusal(request_) == (code, pointer)


@pytest.mark.parametrize(
    ("text", "admitted", "refused"),
    [
        ("^.$", ["a", "é"], ["\n", "\u2028", ""]),
        ("^\\S+$", ["ab"], ["", " ", "\u3000"]),
        ("a|^b$", ["a", "b"], ["ab", "c"]),
        ("(?<year>[0-9]{4})-[^-]*", ["2024-x", "2024-"], ["2024--"]),
        ("[\\s\\S]{1,100}", ["\n", "a" * 100], ["", "a" * 101]),
    ],
)
def test_regular_expression_is_read_as_ecma_262(
    text: str, admitted: list[str], refused: list[str], compiler: xgrammar.GrammarCompiler
) -> None:
    """XGrammar's own reading differs: a dot takes newlines, and most groups with names are refused."""
    language = Language(compiler, parsed({"regex": text}).grammar)

    assert [one for one in admitted if not language.admits(one)] == []
    assert [one for one in refused if language.admits(one)] == []


def test_root_rule_may_stand_anywhere_and_literals_may_hold_anything() -> None:
    """Only a rule's name counts, not the same word in a literal, a class or a comment."""
    assert parsed({"ebnf": '# root ::= x\nx ::= "root ::= (((" [(] \nroot ::= x'}).grammar.kind == "ebnf"
    assert refusal({"ebnf": '# root ::= "a"\nx ::= "root ::= y"'}) == ("invalid_grammar", "/ebnf")


@pytest.mark.parametrize("between", ["", " ", "\t", "\n", " \n\t "])
def test_white_space_in_front_of_a_rules_sign_is_any(between: str, compiler: xgrammar.GrammarCompiler) -> None:
    """XGrammar reads all of these, so none may be refused as a grammar without a root."""
    text = f'part{between}::= "a"\nroot{between}::= part part'
    assert Language(compiler, parsed({"ebnf": text}).grammar).admits("aa")


def test_an_unended_literal_is_counted_to_the_end() -> None:
    """A grammar of one long literal is too large, whether its end is there or not, and escaped ends are none."""
    for text in ('root ::= "' + '\\"' * 8_200, "root ::= [" + "\\]" * 8_200 + "]"):
        assert refusal({"ebnf": text}) == ("grammar_too_large", "/ebnf")


def test_choices_are_literal(compiler: xgrammar.GrammarCompiler) -> None:
    """R12: quotation marks, newlines, control characters and Chinese are choices like any other."""
    choices = ['a\n"b\\', "在线", "😀", "\x01\x7f", "[x]", ""]
    language = Language(compiler, parsed({"choice": choices}).grammar)

    assert [choice for choice in choices if not language.admits(choice)] == []
    assert not language.admits("[")


def test_white_space_is_the_operators_and_may_be_fixed_by_the_client(compiler: xgrammar.GrammarCompiler) -> None:
    """R18: with unlimited white space a model may fill its budget with it; 0 is no limit."""
    schema = {"type": "array", "items": {"type": "integer"}}
    limited = Language(compiler, parsed({"json_schema": schema}).grammar)
    fixed = Language(compiler, parsed({"structured_outputs": {"json": schema, "disable_any_whitespace": True}}).grammar)
    free_constraint = parse_constraint({"json_schema": schema}, ConstraintOptions(max_whitespace=0))
    assert free_constraint is not None
    free = Language(compiler, free_constraint.grammar)

    assert (limited.admits("[1,  2]"), limited.admits("[1,   2]")) == (True, False)
    assert (fixed.admits("[1, 2]"), fixed.admits("[1,2]")) == (True, False)
    assert free.admits("[1," + " " * 200 + "2]")


def test_equal_texts_of_plain_kinds_share_a_grammar_whatever_the_white_space_policy() -> None:
    """It plays no part in them, so changing it must not compile them anew."""
    other = parse_constraint({"regex": "a+"}, ConstraintOptions(any_whitespace=False, max_whitespace=7))

    assert other is not None
    assert other.grammar == parsed({"regex": "a+"}).grammar


def test_the_parent_can_import_this_without_torch() -> None:
    """XGrammar's import loads torch: 3.5 s and 300 MB in a process that needs neither."""
    script = "import sys, dsparkd.grammar.spec; sys.exit(any(name in sys.modules for name in ('torch', 'xgrammar')))"

    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
