"""Tool calls: the call block of the model, with arguments held to the tool's schema."""

from __future__ import annotations

import json

import pytest
import xgrammar

from dsparkd.errors import GrammarError
from dsparkd.grammar.spec import Constraint, ConstraintOptions, parse_constraint
from dsparkd.grammar.tools import FREE_TEXT, MARKER
from dsparkd.text.output import OutputParser
from tests.grammar.bytes_vocabulary import MARKER_ID, Language, make_compiler

OPTIONS = ConstraintOptions(marker_id=MARKER_ID)


@pytest.fixture(scope="module")
def compiler() -> xgrammar.GrammarCompiler:
    return make_compiler()


def tool(name: str, *, strict: bool | None = None, **keywords: object) -> dict[str, object]:
    return {
        "type": "function",
        "function": {"name": name, "strict": strict, "parameters": {"type": "object", **keywords}},
    }


def call(name: str, **arguments: object) -> str:
    """A call as the model writes it."""
    lines = [f'<{MARKER}invoke name="{name}">\n']
    for key, value in arguments.items():
        is_string = isinstance(value, str)
        text = value if is_string else json.dumps(value, ensure_ascii=False)
        string = str(is_string).lower()
        lines.append(f'<{MARKER}parameter name="{key}" string="{string}">{text}</{MARKER}parameter>\n')
    return "".join([*lines, f"</{MARKER}invoke>\n"])


def block(*calls: str) -> str:
    return f"\n\n<{MARKER}tool_calls>\n{''.join(calls)}</{MARKER}tool_calls>"


def constraint(**request: object) -> Constraint:
    found = parse_constraint(request, OPTIONS)
    assert found is not None
    return found


WEATHER = tool(
    "get_weather",
    properties={
        "city": {"type": "string"},
        "days": {"type": "integer", "minimum": 1},
        "unit": {"enum": ["c", "f", 0]},
        "note": {"type": ["string", "null"], "maxLength": 4},
        "where": {
            "type": "object",
            "properties": {"code": {"type": "string", "pattern": "^[a-z]+$"}},
            "required": ["code"],
        },
        "any": {},
    },
    required=["city"],
)
ADMITTED = [
    block(call("get_weather", city="Paris")),
    block(call("get_weather", city="", days=2, unit="c", note=None, where={"code": "ab"}, any=[1])),
    block(call("get_weather", city='a｜</ "b"\n<x>｜DSM', unit=0, note="abcd", any="text")),
    block(call("get_weather", city="Paris"), call("get_weather", city="Lyon")),
]
REFUSED = [
    "Paris",
    "",
    block(),
    block(call("get_weather", days=2)),
    block(call("get_weather", city="Paris", days=0)),
    block(call("get_weather", city="Paris", days="2")),
    block(call("get_weather", city=3)),
    block(call("get_weather", city="Paris", unit="k")),
    block(call("get_weather", city="Paris", note="abcde")),
    block(call("get_weather", city="Paris", where={"code": "AB"})),
    block(call("get_weather", city="Paris", other=1)),
    block(call("get_weather", days=2, city="Paris")),
    block(call("get_news", city="Paris")),
    block(call("get_weather", city="Paris")) + "\n",
    "text" + block(call("get_weather", city="Paris")),
]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
def test_forced_call_is_held_to_the_tools_schema(choice: object, compiler: xgrammar.GrammarCompiler) -> None:
    """A forced call whose arguments do not fit is worse than none: the client runs it."""
    found = constraint(tools=[WEATHER], tool_choice=choice)
    language = Language(compiler, found.grammar)

    # A named call is one call.
    admitted = ADMITTED if choice == "required" else ADMITTED[:-1]
    assert [text for text in admitted if not language.admits(text)] == []
    assert [text for text in REFUSED if language.admits(text)] == []
    assert found.calls_tools
    assert found.grammar.kind == "tool_calls"


def test_what_is_generated_is_what_the_parser_reads(compiler: xgrammar.GrammarCompiler) -> None:
    """Two descriptions of one format must not drift apart: the parser takes the calls out again."""
    arguments = {"city": 'x｜</ "y"', "days": 2, "where": {"code": "ab"}}
    text = block(call("get_weather", **arguments), call("get_weather", city="b"))
    assert Language(compiler, constraint(tools=[WEATHER], tool_choice="required").grammar).admits(text)
    parser = OutputParser(starts_in_reasoning=False, parse_calls=True, think_end_id=-1)

    parser.feed(text)
    parser.finish(cut=False)

    assert [json.loads(made.arguments()) for made in parser.calls] == [arguments, {"city": "b"}]
    assert parser.called()


def test_only_the_marker_token_makes_tags(compiler: xgrammar.GrammarCompiler) -> None:
    """The marker is a control token: allowed where a tag has it, in no text, and its spelling is no way around."""
    language = Language(compiler, constraint(tools=[WEATHER], tool_choice="required").grammar)
    opening = ADMITTED[0].split("Paris", maxsplit=1)[0]

    assert language.allowed("\n\n<") == {MARKER_ID}
    assert not language.admits(ADMITTED[0].replace("Paris", f"a{MARKER}b"))
    free = compiler.compile_grammar(xgrammar.Grammar.from_ebnf(FREE_TEXT))
    assert xgrammar.GrammarMatcher(free).accept_string("｜DSML a ｜｜DSM｜DSM｜DSML")
    assert not xgrammar.GrammarMatcher(free).accept_string(f"a｜{MARKER}")
    assert not xgrammar.GrammarMatcher(free).accept_token(MARKER_ID)
    assert opening.endswith('string="true">')


def test_one_call_where_parallel_calls_are_off(compiler: xgrammar.GrammarCompiler) -> None:
    """parallel_tool_calls false: the block has one call."""
    language = Language(
        compiler, constraint(tools=[WEATHER], tool_choice="required", parallel_tool_calls=False).grammar
    )

    assert language.admits(ADMITTED[0])
    assert not language.admits(ADMITTED[3])


def test_one_of_several_tools_may_be_called_by_required(compiler: xgrammar.GrammarCompiler) -> None:
    """R19: a tool without arguments among others is nothing special; absent parameters mean none."""
    bare = {"type": "function", "function": {"name": "now"}}
    tools = [WEATHER, tool("ping", properties={}), bare, tool("free")]
    language = Language(compiler, constraint(tools=tools, tool_choice="required").grammar)

    assert language.admits(block(call("ping"), call("now"), call("get_weather", city="x"), call("free", a=1, b="c")))
    assert not language.admits(block(call("ping", a=1)))
    assert not language.admits(block(call("now", a=1)))


def test_strict_tools_are_held_to_their_schema_beside_free_text(compiler: xgrammar.GrammarCompiler) -> None:
    """With "auto" the model may talk, call, or both; a strict tool's arguments fit, another's are free."""
    strict = tool("get_weather", strict=True, properties={"city": {"type": "string"}}, required=["city"])
    language = Language(compiler, constraint(tools=[strict, tool("free", properties={"a": {}})]).grammar)

    def tokens(text: str) -> bool:
        matcher = xgrammar.GrammarMatcher(language._compiled)
        for index, part in enumerate(text.split(MARKER)):
            if index and not matcher.accept_token(MARKER_ID):
                return False
            if not all(matcher.accept_token(byte) for byte in part.encode()):
                return False
        return bool(matcher.accept_token(258))

    assert tokens("only text")
    assert tokens("text" + block(call("get_weather", city="x")))
    assert tokens(block(call("free", zzz=[1], a="b")))
    assert not tokens(block(call("get_weather", town="x")))
    assert not tokens(block(call("get_weather", city="x")) + "more")


def test_schema_and_tools_give_an_answer_or_a_call(compiler: xgrammar.GrammarCompiler) -> None:
    """With a response format the answer is JSON; the tools stay callable."""
    language = Language(compiler, constraint(tools=[WEATHER], response_format={"type": "json_object"}).grammar)

    assert language.admits('{"a": 1}')
    assert language.admits(block(call("get_weather", anything="x")))
    assert not language.admits("text")


def refusal(options: ConstraintOptions = OPTIONS, **request: object) -> tuple[str, str | None]:
    with pytest.raises(GrammarError) as caught:
        parse_constraint(request, options)
    return caught.value.code, caught.value.param


@pytest.mark.parametrize(
    ("broken", "code", "pointer"),
    [
        (tool("f", properties={"a": {"type": "strnig"}}), "invalid_schema", "/properties/a/type"),
        (tool("f", properties={"a": {"not": {}}}), "unsupported_schema", "/properties/a/not"),
        (tool("f", properties={'a"b': {}}), "unsupported_schema", '/properties/a"b'),
        (tool("f", properties={"a": {"const": MARKER}}), "unsupported_schema", "/properties/a"),
        (tool("f", anyOf=[{"required": ["a"]}, {"required": ["b"]}]), "unsupported_schema", ""),
        (tool("f", properties={"a": {}, "b": {}}, minProperties=1), "unsupported_schema", ""),
        (tool("f", additionalProperties={"type": "integer"}), "unsupported_schema", ""),
        (tool("f", type="array"), "unsupported_schema", ""),
    ],
)
def test_tool_that_cannot_be_enforced_is_named(broken: dict[str, object], code: str, pointer: str) -> None:
    """R19: among sixty tools that the client did not write, the refusal says which and where."""
    with pytest.raises(GrammarError, match="tool f:") as caught:
        parse_constraint({"tools": [WEATHER, broken], "tool_choice": "required"}, OPTIONS)

    assert (caught.value.code, caught.value.param) == (code, "/tools/1/function/parameters" + pointer)


HEAVY = {"enum": ["a" * 30 + str(number) for number in range(100)], "pattern": "^(?:a?){40}[0-9]*$"}
LARGE = {"description": "x" * 250_000}


@pytest.mark.parametrize("argument", [HEAVY, LARGE])
def test_what_one_tool_may_have_many_may_not_have_together(argument: dict[str, object]) -> None:
    """G-06, R16: a thousand tools within the limits of one would keep a thread that reads bodies for minutes."""
    tools = [tool(f"f{number}", properties={"a": argument}, required=["a"]) for number in range(40)]

    assert parse_constraint({"tools": tools[:1], "tool_choice": "required"}, OPTIONS) is not None
    code, pointer = refusal(tools=tools, tool_choice="required")

    assert code == "grammar_too_large"
    assert pointer is not None
    assert pointer.startswith("/tools/")


def test_policy_report_frees_the_arguments_of_a_tool_and_says_so(compiler: xgrammar.GrammarCompiler) -> None:
    """R19: the other way that an operator may choose; the response then lists it."""
    broken = tool("f", anyOf=[{"required": ["a"]}, {"required": ["b"]}])
    options = ConstraintOptions(unsupported="report", marker_id=MARKER_ID)

    found = parse_constraint({"tools": [broken], "tool_choice": "required"}, options)

    assert found is not None
    assert [warning.kind for warning in found.warnings] == ["unsupported"]
    assert Language(compiler, found.grammar).admits(block(call("f", c=1)))


def test_tool_choice_that_cannot_be_met_is_refused() -> None:
    """A name that no tool has, a grammar beside a forced call, and a tokenizer without the marker."""
    named = {"type": "function", "function": {"name": "gone"}}

    assert refusal(tools=[WEATHER], tool_choice=named) == ("unknown_tool", "/tool_choice/function/name")
    assert refusal(tools=[WEATHER], tool_choice={"type": "function"}) == ("invalid_value", "/tool_choice")
    assert refusal(tools=[WEATHER], tool_choice="required", regex="a") == ("conflicting_grammars", "/regex")
    assert refusal(tools=[tool("f", strict=True)], regex="a") == ("conflicting_grammars", "/regex")
    assert refusal(tools=[{"type": "function"}], tool_choice="required") == ("invalid_type", "/tools/0/function")
    assert refusal(ConstraintOptions(), tools=[WEATHER], tool_choice="required") == (
        "unsupported_tool_choice",
        "/tool_choice",
    )
