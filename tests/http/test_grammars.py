"""Constraints on their way through the front end: to the rank, into the prompt, and back as warnings and refusals."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from dsparkd.messages import Grammar, Refused
from dsparkd.text.tokenizer import Tokenizer
from tests.http.conftest import Served, error_of, events, say

SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"type": "null"}}, "required": ["b"]}
STRICT_SCHEMA = SCHEMA | {"additionalProperties": False}
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": STRICT_SCHEMA, "strict": True}}
TOOL = {"type": "function", "function": {"name": "f", "strict": True, "parameters": STRICT_SCHEMA}}


def grammars(server: Served) -> list[Grammar | None]:
    return [batch.grammar for rank in server.backend.ranks for batch in rank.batches]


def text_of(tokenizer: Tokenizer, ids: tuple[int, ...]) -> str:
    return b"".join(map(tokenizer.token_bytes, ids)).decode()


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({"response_format": FORMAT}, "json_schema"),
        ({"response_format": {"type": "json_object"}}, "json_schema"),
        ({"json_schema": SCHEMA}, "json_schema"),
        ({"json_schema": json.dumps(SCHEMA)}, "json_schema"),
        ({"json_object": True}, "json_schema"),
        ({"guided_json": SCHEMA}, "json_schema"),
        ({"structured_outputs": {"json": SCHEMA}}, "json_schema"),
        ({"regex": "a+"}, "regex"),
        ({"guided_regex": "a+"}, "regex"),
        ({"ebnf": 'root ::= "a"'}, "ebnf"),
        ({"guided_grammar": 'root ::= "a"'}, "ebnf"),
        ({"choice": ["a", "b"]}, "choice"),
        ({"guided_choice": ["a", "b"]}, "choice"),
        ({"structural_tag": {"format": {"type": "const_string", "value": "a"}}}, "structural_tag"),
        ({"tools": [TOOL]}, "tool_calls"),
        ({"tools": [TOOL], "tool_choice": "required"}, "tool_calls"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_calls"),
        ({"tools": [TOOL], "tool_choice": "none"}, None),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"json_object": False}, None),
        ({}, None),
    ],
)
async def test_what_a_request_asks_for_reaches_its_rank(
    server: Served, fields: dict[str, Any], kind: str | None
) -> None:
    """G-01: every field that asks for a constraint becomes one grammar of the batch; nothing else does."""
    assert (await server.chat(**fields)).status_code == 200
    (grammar,) = grammars(server)
    assert (grammar.kind if grammar is not None else None) == kind


async def test_all_choices_and_prompts_of_a_request_share_one_grammar(server: Served) -> None:
    """G-12: the text crosses once a frame, however many items; each rank that has some gets it."""
    response = await server.complete(prompt=["a", "b"], n=3, regex="a+", routed_dp_ranks=[0, 1])
    assert response.status_code == 200
    assert [(len(batch.requests), batch.grammar) for rank in server.backend.ranks for batch in rank.batches] == [
        (3, Grammar(kind="regex", text="a+", max_whitespace=0)),
        (3, Grammar(kind="regex", text="a+", max_whitespace=0)),
    ]


@pytest.mark.parametrize("thinking", [True, False])
async def test_d16_the_rank_is_told_whether_reasoning_comes_first(server: Served, thinking: bool) -> None:
    """D-16: the grammar begins behind it, so the rank must know that the prompt opened it."""
    await server.chat(response_format=FORMAT, thinking=thinking)
    assert [request.starts_in_reasoning for request in server.requests] == [thinking]
    await server.complete(regex="a")
    assert not server.requests[-1].starts_in_reasoning


async def test_the_prompt_tells_the_model_of_the_response_formats_schema(server: Served, tokenizer: Tokenizer) -> None:
    """It belongs to the model's own format; /tokenize shows the same prompt. Other fields leave prompts alone."""
    await server.chat(response_format=FORMAT, thinking=False)
    await server.chat(json_schema=STRICT_SCHEMA, thinking=False)
    await server.chat(thinking=False)
    told, silent, plain = (request.prompt_ids for request in server.requests)
    assert json.dumps(STRICT_SCHEMA["required"]) in text_of(tokenizer, told)
    assert silent == plain
    body = {"messages": [{"role": "user", "content": "Hi"}], "response_format": FORMAT, "thinking": False}
    assert (await server.client.post("/tokenize", json=body)).json()["tokens"] == list(told)


@pytest.mark.parametrize("path", ["chat", "complete"])
async def test_warnings_stand_in_the_answer_and_in_a_streams_first_chunk(server: Served, path: str) -> None:
    """decisions.md 23: what is narrower is listed with its place; an answer without any has no such member."""
    ask = getattr(server, path)
    schema = {"type": "string", "minLength": 4, "maxLength": 9}
    whole = (await ask(json_schema=schema)).json()
    (warning,) = whole["warnings"]
    assert (warning["kind"], warning["pointer"].startswith("/json_schema")) == ("narrower", True)
    assert warning["message"]
    chunks = events(await ask(json_schema=schema, stream=True))
    assert chunks[0]["warnings"] == whole["warnings"]
    assert not any("warnings" in chunk for chunk in chunks[1:])
    assert "warnings" not in (await ask(regex="a")).json()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"ebnf": 'root ::= "a"'}, "/ebnf"),
        ({"structured_outputs": {"grammar": 'root ::= "a"'}}, "/structured_outputs/grammar"),
        ({"response_format": FORMAT}, "/response_format"),
        ({"tools": [TOOL], "tool_choice": "required"}, "/tools"),
    ],
)
async def test_g25_a_refusal_by_the_compiler_names_the_field(
    server: Served, fields: dict[str, Any], param: str
) -> None:
    """G-25: the rank cannot know where in the body the grammar stands. Other statuses blame nothing of the request."""
    for status, named in ((400, param), (504, None)):
        server.backend.script = None
        before = len(server.requests)
        waiting = asyncio.ensure_future(server.chat(**fields))
        await server.backend.until(lambda before=before: len(server.requests) > before)
        request_id = server.requests[-1].request_id
        rank = next(rank for rank in server.backend.ranks if request_id in rank.request_ids)
        await rank.channel.send(Refused(request_id, status, "some_code", None, "it is so"))
        error = error_of(await waiting, status)
        assert (error["code"], error["param"], error["message"]) == ("some_code", named, "it is so")
        server.backend.script = say("ok")


@pytest.mark.parametrize(
    ("status", "code"), [(400, "grammar_dead_end"), (504, "grammar_traversal_timeout"), (500, "grammar_violation")]
)
async def test_d11_a_row_that_its_grammar_ends_says_so_with_its_own_status(
    server: Served, status: int, code: str
) -> None:
    """D-11, D-17: while no byte was sent the status is the failure's own; a stream gets it as an event."""
    server.backend.script = say("x", reason="error", error="so it ended", status=status, code=code)
    error = error_of(await server.chat(regex="a"), status)
    assert error["code"] == code
    assert "so it ended" in error["message"]
    assert events(await server.chat(regex="a", stream=True))[-1]["error"]["code"] == code


async def test_a_forced_call_is_parsed_as_one(server: Served) -> None:
    """The block begins with two newlines, which are layout and no content."""
    block = (
        '\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name="f">\n<｜DSML｜parameter name="b" string="false">'
        "7</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>"
    )
    server.backend.script = say(block)
    (choice,) = (await server.chat(tools=[TOOL], tool_choice="required", thinking=False)).json()["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] is None
    (call,) = choice["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"b": 7}
