"""Output parser: reasoning, answer and DSML calls, whole and in pieces."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsparkd.text.output import OutputDelta, OutputParser

THINK_END_ID = 128822


def make(*, reasoning: bool = True, tools: bool = True) -> OutputParser:
    numbers = itertools.count()
    return OutputParser(
        starts_in_reasoning=reasoning,
        parse_calls=tools,
        think_end_id=THINK_END_ID,
        new_call_id=lambda: f"call_{next(numbers)}",
    )


class Parsed:
    """The sum of all deltas, as a streaming client adds them up."""

    def __init__(self, parser: OutputParser, pieces: list[str], *, cut: bool = False) -> None:
        self.reasoning = self.content = ""
        self.names: list[str] = []
        self.arguments: list[str] = []
        for piece in pieces:
            self._add(parser.feed(piece))
        self._add(parser.finish(cut=cut))
        self.called = parser.called()
        self.final = [call.arguments() for call in parser.calls]

    def _add(self, delta: OutputDelta) -> None:
        self.reasoning += delta.reasoning
        self.content += delta.content
        for call in delta.calls:
            if call.name is not None:
                assert call.index == len(self.names)
                self.names.append(call.name)
                self.arguments.append("")
            self.arguments[call.index] += call.arguments


def parse(text: str, *, reasoning: bool = True, tools: bool = True, cut: bool = False) -> Parsed:
    return Parsed(make(reasoning=reasoning, tools=tools), [text], cut=cut)


def block(*invokes: str) -> str:
    return "\n\n<｜DSML｜tool_calls>\n" + "".join(invokes) + "</｜DSML｜tool_calls>"


def invoke(name: str, *parameters: str) -> str:
    return f'<｜DSML｜invoke name="{name}">\n' + "".join(parameters) + "</｜DSML｜invoke>\n"


def parameter(name: str, value: str, *, string: bool) -> str:
    flag = "true" if string else "false"
    return f'<｜DSML｜parameter name="{name}" string="{flag}">{value}</｜DSML｜parameter>\n'


EXAMPLE_D = "need</think>Let me check." + block(
    invoke("get_weather", parameter("city", "Paris\n", string=True), parameter("days", "2", string=False))
)


def test_example_d_with_a_call() -> None:
    """Model page 6.6 D: separator removed, newline inside the string kept."""
    got = parse(EXAMPLE_D)
    assert (got.reasoning, got.content, got.names, got.called) == ("need", "Let me check.", ["get_weather"], True)
    assert got.arguments == ['{"city": "Paris\\n", "days": 2}'] == got.final


def test_example_d_only_thoughts() -> None:
    """Model page 6.6 D: without `</think>` all of it is reasoning."""
    got = parse("only thoughts")
    assert (got.reasoning, got.content, got.called) == ("only thoughts", "", False)


def test_example_d_signs_that_are_no_tags() -> None:
    """Model page 6.6 D: beginnings of tags that never become one are text."""
    got = parse("x</think>a <b> < ｜ <｜ z")
    assert (got.reasoning, got.content) == ("x", "a <b> < ｜ <｜ z")


TEXTS = [
    EXAMPLE_D,
    "x</think>a <b> < ｜ <｜ z",
    "\n\nr\n</think>\n\nanswer\n\n",
    "r</think>a<think>b</think>c",
    "r</think>answer" + block(invoke("f"), invoke("g", parameter("a", 'q"\\\t\x01é😀', string=True))) + " dropped",
    "r</think>\n\n\n\n" + block(invoke("f", parameter("a", "{oops", string=False))),
    "r</think>abc\n\n<｜DSML｜tool_c",
    "r</think>abc\n\n<｜DSML｜tool_calls>\n",
    "r</think>abc\n\n<｜DSML｜tool_calls></｜DSML｜tool_calls>",
    "r</think>\n\n<｜DSML｜tool_calls>\nhello" + invoke("f") + "between" + invoke("g"),
    'r</think>\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name="f">\n{"a": [1, {"b": null}]}\n</｜DSML｜invoke>',
    'r</think><｜DSML｜tool_calls><｜DSML｜invoke name="f"/></｜DSML｜tool_calls>',
    "r</think>" + invoke("bare", parameter("a", "1", string=False)),
    'r</think>\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name="f">\n<｜DSML｜parameter name="a" string="true">ab</｜DS',
    'r</think>\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke>\n<｜DSML｜oops name="x">\n<｜DSML｜parameter name="p">1',
    '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="f">\n</｜DSML｜invoke></think>ok',
    'r</think>a\n\n<｜DSML｜invoke name="unfinished',
]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("tools", [True, False])
@pytest.mark.parametrize("reasoning", [True, False])
def test_pieces_add_up_to_the_whole(text: str, tools: bool, reasoning: bool) -> None:
    """R25's kind: wherever the stream is cut, its deltas concatenate to what the whole text gives."""
    whole = vars(parse(text, tools=tools, reasoning=reasoning))
    for size in (1, 2, 3, 7):
        pieces = [text[at : at + size] for at in range(0, len(text), size)]
        assert vars(Parsed(make(reasoning=reasoning, tools=tools), pieces)) == whole


_fragments = st.sampled_from(
    [
        "<｜DSML｜",
        "</｜DSML｜",
        "<｜DSML｜tool_calls>",
        "</｜DSML｜tool_calls>",
        '<｜DSML｜invoke name="f">',
        "</｜DSML｜invoke>",
        '<｜DSML｜parameter name="a" string="true">',
        '<｜DSML｜parameter name="b" string="false">',
        "</｜DSML｜parameter>",
        "</think>",
        "<think>",
        "\n\n",
        "\n",
        "<",
        '"',
        ">",
        "x",
        "1",
        '{"k": 1}',
    ]
)


@settings(max_examples=400, deadline=None)
@given(fragments=st.lists(_fragments, max_size=14), size=st.integers(1, 5), cut=st.booleans())
def test_any_markup_parses_alike_in_pieces_and_gives_json(fragments: list[str], size: int, cut: bool) -> None:
    """Whatever the model writes: no exception, the same sum for any cut, and arguments that are a JSON object."""
    text = "".join(fragments)
    whole = parse(text, cut=cut)
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    assert vars(Parsed(make(), pieces, cut=cut)) == vars(whole)
    for arguments in [*whole.arguments, *whole.final]:
        assert isinstance(json.loads(arguments), dict)
    if "</｜DSML｜tool_calls>" not in text:  # what follows the block is the only text that may go
        kept = whole.reasoning + whole.content + "".join(whole.arguments)
        assert all(kept.count(letter) >= text.count(letter) for letter in "x1")


def test_literal_think_tags_in_the_answer_are_text() -> None:
    """Model page 6.5: after the first `</think>` the words are the answer's own."""
    got = parse("a<think>b</think>c<think>d</think>e")
    assert (got.reasoning, got.content) == ("a<think>b", "c<think>d</think>e")


def test_d16_before_a_grammar_only_the_marker_itself_ends_the_reasoning() -> None:
    """D-16: spelled with ordinary tokens it is a thought, or text that no grammar holds would be the answer."""
    end = 99
    parser = OutputParser(starts_in_reasoning=True, parse_calls=False, think_end_id=end, ends_by_id=True)
    deltas = [
        parser.feed("I write </think>", (1, 2)),
        parser.feed(" and go on", (3,)),
        parser.feed("</think>", (end,)),
        parser.feed('{"a": "</think>"}', (4,)),
        parser.finish(cut=False),
    ]
    assert "".join(delta.reasoning for delta in deltas) == "I write </think> and go on"
    assert "".join(delta.content for delta in deltas) == '{"a": "</think>"}'
    assert parser.reasoning_tokens == 3


def test_no_newline_is_lost_around_the_answer() -> None:
    """The library strips newlines at the start; a client that joins deltas would miss them."""
    got = parse("\n\nr\n</think>\n\na\n\n")
    assert (got.reasoning, got.content) == ("\n\nr\n", "\n\na\n\n")


def test_only_the_separator_before_the_block_is_removed() -> None:
    """Model page 6.5.2: exactly one empty line, and its absence is tolerated."""
    assert parse("r</think>a\n\n\n" + block(invoke("f"))).content == "a\n\n\n"
    assert parse("r</think>a" + block(invoke("f")).lstrip()).content == "a"


def test_markup_inside_reasoning_is_no_call() -> None:
    """R27: with thinking on, tool markup counts only after the end of thinking."""
    text = block(invoke("f"))
    got = parse(text + "</think>ok")
    assert (got.reasoning, got.content, got.names, got.called) == (text, "ok", [], False)


def test_markup_without_tools_is_text() -> None:
    """Nobody declared a tool, so nobody can run a call: the words are the answer."""
    got = parse("x" + block(invoke("f")), reasoning=False, tools=False)
    assert got.content == "x" + block(invoke("f"))
    assert got.names == []


def test_half_an_opening_at_the_end_is_text() -> None:
    """Nothing is lost silently: an output that stops inside a tag gives its characters out."""
    assert parse("r</think>abc\n\n<｜DSML｜tool_c").content == "abc\n\n<｜DSML｜tool_c"
    assert parse("r</think>abc\n\n<｜DSML｜tool_calls>\n").content == "abc\n\n<｜DSML｜tool_calls>\n"


def test_invalid_json_becomes_a_json_string() -> None:
    """Model page 6.5: fall back to a string, so that arguments are always an object."""
    values = ["{oops", "NaN", "1 2", "", "nul", "[" * 5000]
    for value in values:
        got = parse("r</think>" + block(invoke("f", parameter("a", value, string=False))))
        assert json.loads(got.arguments[0]) == {"a": value}


def test_valid_json_keeps_its_spelling() -> None:
    """Numbers beyond a double and key order are the client's to read, not ours to round."""
    value = '{"z": 123456789012345678901234567890, "a": [1.50, true, null, "é"]}'
    got = parse("r</think>" + block(invoke("f", parameter("a", value, string=False))))
    assert got.arguments == [f'{{"a": {value}}}']


def test_of_two_equal_names_the_last_counts() -> None:
    """Model page 6.5; a stream has given the first one out already, and JSON readers take the last."""
    got = parse("r</think>" + block(invoke("f", *(parameter("a", value, string=False) for value in "12"))))
    assert got.final == ['{"a": 2}']
    assert json.loads(got.arguments[0]) == {"a": 2}


def test_forgotten_closings_at_the_end_still_yield_the_call() -> None:
    """Model page 6.5: lenient on structure when the model ended by itself, never when it was cut off."""
    text = 'r</think>\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name="f">\n<｜DSML｜parameter name="a" string="true">abc'
    got = parse(text)
    assert (got.arguments, got.called) == (['{"a": "abc"}'], True)
    assert not parse(text, cut=True).called


def test_a_call_cut_short_is_not_ready_to_run() -> None:
    """Half of a second call must not be run because the first was whole: the reason stays "length"."""
    text = "r</think>" + block(invoke("f"), invoke("g", parameter("a", "rm -rf /tmp/x", string=True)))
    assert parse(text, cut=True).called
    assert not parse(text[: text.index("/tmp/x")], cut=True).called


def test_names_come_when_the_invoke_opens_and_strings_as_they_grow() -> None:
    """Agents show progress while a long file is written: its text must not wait for the closing tag."""
    parser = make(reasoning=False)
    opened = parser.feed('\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name="write">')
    assert [(call.index, call.call_id, call.name) for call in opened.calls] == [(0, "call_0", "write")]
    parser.feed('\n<｜DSML｜parameter name="text" string="true">')
    assert [call.arguments for call in parser.feed("one\n").calls] == ["one\\n"]
    assert [call.arguments for call in parser.feed("two</｜DS").calls] == ["two"]


def test_reasoning_tokens_never_exceed_all_tokens() -> None:
    """R21: counted by id where the marker is one, and inside a block of several tokens."""
    parser = make()
    parser.feed("a b", [5, 6])
    parser.feed("c</think>d", [7, THINK_END_ID, 8, 9])
    parser.feed("e", [10])
    assert parser.reasoning_tokens == 3
    without_thinking = make(reasoning=False)
    without_thinking.feed("abc", [1, 2, 3])
    assert without_thinking.reasoning_tokens == 0
    spelled = make()
    spelled.feed("a</think>b", [1, 2, 3])
    spelled.feed("c", [4])
    assert spelled.reasoning_tokens == 3


def test_hold_back_is_bounded() -> None:
    """A quotation mark that is never closed must not keep the rest of the answer from the client."""
    parser = make(reasoning=False)
    parser.feed('a<｜DSML｜invoke name="')
    assert len(parser.feed("x" * 5000).content) > 5000
