"""Every refusal: a 4xx with the error object, decided before anything reaches a rank."""

from __future__ import annotations

import asyncio
import itertools
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.responses import Response

from dsparkd.config import LimitsConfig
from dsparkd.errors import RequestError
from dsparkd.http import intake
from dsparkd.http.body import MAX_NESTING, decode, parse_object
from dsparkd.http.endpoint import Endpoint, Incoming
from dsparkd.http.openai import ChatRequest
from dsparkd.messages import Admitted, Farewell
from tests.http.conftest import MODEL, Served, error_of, served
from tests.routing.fakes import make_config, metric

USER = [{"role": "user", "content": "Hi"}]
HUGE = 10**30
IMAGE = {"type": "image_url"}
STRICT = {"type": "function", "function": {"name": "f", "strict": True}}
PLAIN = {"type": "function", "function": {"name": "f"}}


def assert_nothing_sent(server: Served) -> None:
    assert server.requests == []
    assert server.backend.router.outstanding() == 0


@pytest.mark.parametrize(
    ("raw", "code"),
    [
        (b"", "invalid_json"),
        (b"   ", "invalid_json"),
        (b"{", "invalid_json"),
        (b"{} {}", "invalid_json"),
        (b"{}x", "invalid_json"),
        (b"\xef\xbb\xbf{}", "invalid_json"),
        (b"[]", "invalid_type"),
        (b'"x"', "invalid_type"),
        (b'{"model": NaN}', "invalid_json"),
        (b'{"model": -Infinity}', "invalid_json"),
        (b'{"model": 1e400}', "number_out_of_range"),
        (b'{"model": ' + b"9" * 5000 + b"}", "number_out_of_range"),
        (b'{"temperature": ' + b"9" * 400 + b', "model": "nano", "prompt": "a"}', "number_out_of_range"),
        (b'{"model": "a", "model": "b"}', "duplicate_member"),
        (b'{"a": [{"b": 1, "b": 1}]}', "duplicate_member"),
        (b'{"prompt": "\xff"}', "invalid_utf8"),
        (b'{"prompt": "\xed\xa0\xbd"}', "invalid_utf8"),
        (b'{"prompt": "\\ud83d"}', "lone_surrogate"),
        (b'{"prompt": "\\ude00\\ud83d"}', "lone_surrogate"),
        (b'{"\\ud83d": 1}', "lone_surrogate"),
        (b'{"prompt": "a\\u0000b"}', "nul_character"),
        (b'{"a": {"\\u0000": 1}}', "nul_character"),
        (b'{"prompt": "a\x00b"}', "invalid_json"),
        (b'{"a": ' + b"[" * 64 + b"]" * 64 + b"}", "nesting_too_deep"),
        (b"[" * 1_000_000, "nesting_too_deep"),
        (b'{"a":' * 1_000_000, "nesting_too_deep"),
    ],
)
async def test_g02_bodies_are_read_strictly(server: Served, raw: bytes, code: str) -> None:
    """G-02 as a check of the body, R25: one value, UTF-8, whole characters, each member once, bounded nesting."""
    for path in ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"):
        response = await server.client.post(path, content=raw)
        assert error_of(response, 400)["code"] == code
    assert_nothing_sent(server)


@pytest.mark.parametrize(
    "raw",
    [
        b'{"a": "\\ud83d\\ude00"}',
        b'{"a": "\\\\u0000 [[[ \\\\ud83d"}',
        b'{"a": "' + b"[" * 100 + b'"}',
        b'{"a": ' + b"[" * 63 + b"]" * 63 + b"}",
        b'{"a": 1e308, "b": -0, "c": 0.0}',
    ],
)
def test_g02_bodies_at_the_limit_are_read(raw: bytes) -> None:
    """G-02: pairs of surrogates, escaped backslashes, brackets in strings and 64 levels are legal."""
    assert parse_object(raw) == json.loads(raw)


def test_unclosed_strings_are_read_in_linear_time() -> None:
    """The nesting check passes over the bytes a few times; one that searches again from each quote would not end."""
    raw = b'{"a": "' + b'\\"' * 1_000_000
    with pytest.raises(RequestError, match="not JSON"):
        parse_object(raw)


def nested(levels: int, text: str) -> object:
    """Objects and lists in turn, each with a text beside what is inside."""
    value: object = text
    for level in range(levels):
        value = [text, value, text] if level % 2 else {"before": text, text: value, "z": text}
    return value


@given(st.text(st.sampled_from('[]{}"\\\né😀')), st.integers(60, 70))
def test_only_brackets_outside_of_strings_count_as_levels(text: str, levels: int) -> None:
    """R25 and G-02: whatever brackets, quotation marks and backslashes the strings hold, escaped in either way."""
    for is_ascii in (True, False):
        raw = json.dumps({"a": nested(levels - 1, text)}, ensure_ascii=is_ascii).encode()
        if levels <= MAX_NESTING:
            assert parse_object(raw) == json.loads(raw)
        else:
            with pytest.raises(RequestError, match="nests deeper"):
                parse_object(raw)


@pytest.mark.parametrize("fields", [{"x" * 100_000: 1}, {"reasoning_effort": "x" * 100_000}])
async def test_a_refusal_does_not_send_a_long_mistake_back(server: Served, fields: dict[str, Any]) -> None:
    """A body of megabytes would come back in the message, and in the field's name, too."""
    response = await server.chat(**fields)
    assert error_of(response, 400)["message"].count("x" * 100) > 0
    assert len(response.content) < 2000


def test_a_repeated_member_is_found_in_linear_time() -> None:
    """Each member is looked at once; counting each name in the rest of a large object would take hours."""
    members = b",".join(b'"%d":0' % number for number in range(300_000))
    with pytest.raises(RequestError, match="'x' occurs twice"):
        parse_object(b"{" + members + b',"x":1,"x":2}')


@pytest.mark.parametrize("raw", [b'{"a":[1' + b"9" * 309 + b"]}", b'{"a":-' + b"9" * 400 + b"}"])
def test_an_integer_beyond_a_double_is_found_wherever_its_digits_begin(raw: bytes) -> None:
    """Only where there are that many digits in a row is each integer looked at."""
    with pytest.raises(RequestError, match="beyond a double"):
        parse_object(raw)


@pytest.mark.parametrize(
    ("fields", "choices"),
    [
        ({"thinking": {"type": "on"}}, '"disabled" or "enabled"'),
        ({"tools": [{"type": "code", "function": {"name": "f"}}]}, '"function"'),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, '"text"'),
        (
            {"messages": [{"role": "bot"}]},
            '"system" or "developer" or "user" or "latest_reminder" or "assistant" or "tool"',
        ),
    ],
)
def test_g02_a_refused_choice_names_those_that_there_are(fields: dict[str, Any], choices: str) -> None:
    """G-02: a refusal says what to send instead, at any depth."""
    with pytest.raises(RequestError) as refused:
        decode({"model": MODEL, "messages": [{"role": "user", "content": "a"}], **fields}, ChatRequest)
    assert refused.value.message.endswith(f"; use {choices}")


BOTH: list[tuple[dict[str, Any], str, str]] = [
    ({"model": None}, "invalid_value", "model"),
    ({"max_tokens": 0}, "invalid_value", "max_tokens"),
    ({"max_tokens": -1}, "invalid_value", "max_tokens"),
    ({"max_tokens": 1.0}, "invalid_value", "max_tokens"),
    ({"max_tokens": True}, "invalid_value", "max_tokens"),
    ({"max_tokens": "5"}, "invalid_value", "max_tokens"),
    ({"max_tokens": HUGE}, "invalid_value", "max_tokens"),
    ({"temperature": -0.1}, "invalid_value", "temperature"),
    ({"temperature": 1e308}, "invalid_value", "temperature"),
    ({"temperature": "hot"}, "invalid_value", "temperature"),
    ({"temperature": [1]}, "invalid_value", "temperature"),
    ({"top_p": 0}, "invalid_value", "top_p"),
    ({"top_p": 1.01}, "invalid_value", "top_p"),
    ({"top_k": -2}, "invalid_value", "top_k"),
    ({"top_k": HUGE}, "invalid_value", "top_k"),
    ({"min_p": -1}, "invalid_value", "min_p"),
    ({"seed": -1}, "invalid_value", "seed"),
    ({"seed": 1 << 63}, "invalid_value", "seed"),
    ({"seed": 1.5}, "invalid_value", "seed"),
    ({"n": 0}, "invalid_value", "n"),
    ({"n": 129}, "invalid_value", "n"),
    ({"n": HUGE}, "invalid_value", "n"),
    ({"stop": ""}, "invalid_value", "stop"),
    ({"stop": [""]}, "invalid_value", "stop[0]"),
    ({"stop": ["a"] * 17}, "invalid_value", "stop"),
    ({"stop": [1]}, "invalid_value", "stop[0]"),
    ({"stop": "a" * 1025}, "invalid_value", "stop"),
    ({"stop_token_ids": [-1]}, "invalid_value", "stop_token_ids[0]"),
    ({"stop_token_ids": [10**6]}, "invalid_token_id", "stop_token_ids[0]"),
    ({"stop_token_ids": [1] * 65}, "invalid_value", "stop_token_ids"),
    ({"presence_penalty": 2.1}, "invalid_value", "presence_penalty"),
    ({"frequency_penalty": -2.1}, "invalid_value", "frequency_penalty"),
    ({"repetition_penalty": 0}, "invalid_value", "repetition_penalty"),
    ({"logit_bias": {"x": 1}}, "invalid_token_id", "logit_bias"),
    ({"logit_bias": {"01": 1}}, "invalid_token_id", "logit_bias"),
    ({"logit_bias": {"-1": 1}}, "invalid_token_id", "logit_bias"),
    ({"logit_bias": {"٣": 1}}, "invalid_token_id", "logit_bias"),
    ({"logit_bias": {"9999999": 1}}, "invalid_token_id", "logit_bias"),
    ({"logit_bias": {"5": 101}}, "invalid_value", "logit_bias[...]"),
    ({"logit_bias": [1]}, "invalid_value", "logit_bias"),
    ({"min_tokens": 9, "max_tokens": 8}, "invalid_value", "min_tokens"),
    ({"min_tokens": -1}, "invalid_value", "min_tokens"),
    ({"ignore_eos": "yes"}, "invalid_value", "ignore_eos"),
    ({"stream": 1}, "invalid_value", "stream"),
    ({"stream_options": {"include_usage": True}}, "invalid_value", "stream_options"),
    ({"stream": True, "stream_options": {"x": 1}}, "unknown_field", "stream_options.x"),
    ({"request_id": "a b"}, "invalid_value", "request_id"),
    ({"request_id": "a\n"}, "invalid_value", "request_id"),
    ({"request_id": ""}, "invalid_value", "request_id"),
    ({"request_id": "x" * 129}, "invalid_value", "request_id"),
    ({"no_such_field": 1}, "unknown_field", "no_such_field"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {}}},
        "missing_field",
        "/response_format/json_schema/schema",
    ),
    ({"response_format": {}}, "invalid_value", "/response_format/type"),
    ({"response_format": 5}, "invalid_type", "/response_format"),
    ({"regex": "a(?=b)"}, "invalid_grammar", "/regex"),
    ({"ebnf": 'start ::= "a"'}, "invalid_grammar", "/ebnf"),
    ({"json_schema": {"properties": {"a": {"not": {}}}}}, "unsupported_schema", "/json_schema/properties/a/not"),
    ({"json_schema": '{"a": 1, "a": 2}'}, "duplicate_member", "/json_schema"),
    ({"guided_choice": ["a", 5]}, "invalid_type", "/guided_choice/1"),
    ({"structured_outputs": {"regexp": "a"}}, "unknown_field", "/structured_outputs/regexp"),
]

CHAT: list[tuple[dict[str, Any], str, str]] = [
    ({"messages": []}, "invalid_value", "messages"),
    ({"messages": "Hi"}, "invalid_value", "messages"),
    ({"messages": None}, "invalid_value", "messages"),
    ({"messages": [5]}, "invalid_value", "messages[0]"),
    ({"messages": [{}]}, "missing_field", "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "missing_field", "messages[0].content"),
    ({"messages": [{"role": "user", "content": None}]}, "invalid_value", "messages[0].content"),
    ({"messages": [{"role": "wizard", "content": "x"}]}, "invalid_value", "messages[0].role"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "invalid_value",
        "messages[0].content[0].type",
    ),
    ({"messages": [{"role": "user", "content": "x", "wings": 2}]}, "unknown_field", "messages[0].wings"),
    (
        {"messages": [{"role": "assistant", "content": "x", "prefix": True}, *USER]},
        "invalid_value",
        "messages[0].prefix",
    ),
    ({"top_logprobs": 2}, "invalid_value", "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "invalid_value", "top_logprobs"),
    ({"logprobs": 2}, "invalid_value", "logprobs"),
    ({"max_tokens": 3, "max_completion_tokens": 4}, "invalid_value", "max_completion_tokens"),
    ({"tools": [{"type": "function", "function": {"name": 'a"b'}}]}, "invalid_value", "tools[0].function.name"),
    ({"tools": [{"type": "function", "function": {"name": "a\n"}}]}, "invalid_value", "tools[0].function.name"),
    (
        {"tools": [{"type": "function", "function": {"name": "f", "strict": "yes"}}]},
        "invalid_value",
        "tools[0].function.strict",
    ),
    ({"tool_choice": "required"}, "missing_field", "/tools"),
    ({"tool_choice": "always"}, "invalid_value", "/tool_choice"),
    ({"tools": [STRICT], "regex": "a"}, "conflicting_grammars", "/regex"),
    ({"tools": [{"type": "code"}]}, "invalid_value", "tools[0].type"),
    (
        {"tools": [STRICT], "tool_choice": {"type": "function", "function": {"name": "g"}}},
        "unknown_tool",
        "/tool_choice/function/name",
    ),
    ({"functions": []}, "unsupported_field", "functions"),
    ({"function_call": "auto"}, "unsupported_field", "function_call"),
    ({"reasoning_effort": "heroic"}, "invalid_value", "reasoning_effort"),
    ({"thinking": True, "chat_template_kwargs": {"enable_thinking": False}}, "invalid_value", "thinking"),
    ({"thinking": {"type": "maybe"}}, "invalid_value", "thinking.type"),
]

COMPLETION: list[tuple[dict[str, Any], str, str]] = [
    ({"prompt": ""}, "empty_prompt", "prompt"),
    ({"prompt": [""]}, "empty_prompt", "prompt[0]"),
    ({"prompt": []}, "empty_prompt", "prompt"),
    ({"prompt": [[]]}, "empty_prompt", "prompt[0]"),
    ({"prompt": ["a", ""]}, "empty_prompt", "prompt[1]"),
    ({"prompt": None}, "invalid_value", "prompt"),
    ({"prompt": 5}, "invalid_value", "prompt"),
    ({"prompt": {"a": 1}}, "invalid_value", "prompt"),
    ({"prompt": ["a", 5]}, "invalid_value", "prompt[1]"),
    ({"prompt": ["a", [5]]}, "invalid_value", "prompt[1]"),
    ({"prompt": [[5], [5.0]]}, "invalid_value", "prompt[1]"),
    ({"prompt": [True, False]}, "invalid_value", "prompt[0]"),
    ({"prompt": [[True]]}, "invalid_value", "prompt[0]"),
    ({"prompt": [-1]}, "invalid_token_id", "prompt[0]"),
    ({"prompt": [5, 10**6]}, "invalid_token_id", "prompt[1]"),
    ({"prompt": [5, 5.0]}, "invalid_value", "prompt[1]"),
    ({"prompt": [5, "a"]}, "invalid_value", "prompt[1]"),
    ({"prompt": [[5], [HUGE]]}, "invalid_token_id", "prompt[1][0]"),
    ({"logprobs": True}, "invalid_value", "logprobs"),
    ({"logprobs": 21}, "invalid_value", "logprobs"),
    ({"suffix": "x"}, "unsupported_field", "suffix"),
    ({"tool_choice": "required"}, "unknown_field", "tool_choice"),
    ({"best_of": 2}, "unsupported_field", "best_of"),
    ({"prompt": ["a", "b"], "routed_dp_ranks": [0]}, "invalid_value", "routed_dp_ranks"),
    ({"routed_dp_ranks": ["0"]}, "invalid_dp_rank", "routed_dp_ranks[0]"),
    ({"routed_dp_ranks": [True]}, "invalid_dp_rank", "routed_dp_ranks[0]"),
]


@pytest.mark.parametrize(("fields", "code", "param"), BOTH + CHAT)
async def test_chat_fields(server: Served, fields: dict[str, Any], code: str, param: str) -> None:
    """Wrong types, absurd numbers, unknown and unsupported fields (R24, D-27): 400 that names the field."""
    error = error_of(await server.chat(**fields), 400)
    assert (error["code"], error["param"]) == (code, param)
    assert error["type"] == "invalid_request_error"
    assert_nothing_sent(server)


@pytest.mark.parametrize(("fields", "code", "param"), BOTH + COMPLETION)
async def test_completion_fields(server: Served, fields: dict[str, Any], code: str, param: str) -> None:
    """R24: empty prompts in every form; and the same checks as chat."""
    error = error_of(await server.complete(**fields), 400)
    assert (error["code"], error["param"]) == (code, param)
    assert_nothing_sent(server)


@pytest.mark.parametrize(
    ("path", "body", "status", "code"),
    [
        ("/tokenize", {}, 400, "invalid_value"),
        ("/tokenize", {"prompt": "a", "messages": USER}, 400, "invalid_value"),
        ("/tokenize", {"prompt": 5}, 400, "invalid_value"),
        ("/tokenize", {"prompt": "a", "model": "x"}, 404, "model_not_found"),
        ("/detokenize", {}, 400, "missing_field"),
        ("/detokenize", {"tokens": "a"}, 400, "invalid_value"),
        ("/detokenize", {"tokens": [10**6]}, 400, "invalid_token_id"),
        ("/detokenize", {"tokens": [-1]}, 400, "invalid_value"),
        ("/detokenize", {"tokens": [True]}, 400, "invalid_value"),
        ("/detokenize", {"tokens": [1], "model": "x"}, 404, "model_not_found"),
        ("/v1/chat/completions", {"model": "gpt-9", "messages": USER}, 404, "model_not_found"),
        ("/v1/completions", {"model": "gpt-9", "prompt": "a"}, 404, "model_not_found"),
        ("/v1/completions", {"prompt": "a"}, 400, "missing_field"),
    ],
)
async def test_other_bodies(server: Served, path: str, body: object, status: int, code: str) -> None:
    """Unknown models are 404 everywhere; the text endpoints check as the others do."""
    assert error_of(await server.client.post(path, json=body), status)["code"] == code
    assert_nothing_sent(server)


ASKING: dict[str, object] = {
    "json_schema": {"type": "object"},
    "json_object": True,
    "regex": "a",
    "ebnf": 'root ::= "a"',
    "choice": ["a"],
    "structural_tag": {"format": {"type": "const_string", "value": "a"}},
    "response_format": {"type": "json_object"},
}


@pytest.mark.parametrize(("first", "second"), list(itertools.combinations(ASKING, 2)))
async def test_g01_two_grammars_are_400(server: Served, first: str, second: str) -> None:
    """G-01: all pairs."""
    error = error_of(await server.complete(**{first: ASKING[first], second: ASKING[second]}), 400)
    assert (error["code"], error["param"]) == ("conflicting_grammars", f"/{second}")
    assert_nothing_sent(server)


@pytest.mark.parametrize("field", ASKING)
async def test_switched_off_grammars_are_refused_by_name(checkpoint: Path, field: str) -> None:
    """What an operator switched off is never dropped in silence."""
    config = make_config(str(checkpoint))
    config = msgspec.structs.replace(config, grammar=msgspec.structs.replace(config.grammar, enabled=False))
    async with served(config) as server:
        for answer in (server.complete(**{field: ASKING[field]}), server.chat(**{field: ASKING[field]})):
            error = error_of(await answer, 400)
            assert (error["code"], error["param"]) == ("unsupported_grammar", f"/{field}")
        assert error_of(await server.chat(tools=[STRICT]), 400)["param"] == "/tools"
        assert error_of(await server.chat(tools=[PLAIN], tool_choice="required"), 400)["param"] == "/tool_choice"
        assert_nothing_sent(server)
        assert (await server.chat(tools=[STRICT], tool_choice="none")).status_code == 200


async def test_d26_ignore_eos_with_a_grammar_is_400(server: Served) -> None:
    """D-26: the contradiction is named before anything else is said about the grammar."""
    error = error_of(await server.chat(regex="a", ignore_eos=True), 400)
    assert (error["code"], error["param"]) == ("ignore_eos_with_grammar", "/ignore_eos")


@pytest.mark.parametrize("max_tokens", [1, 64])
@pytest.mark.parametrize("over", range(-8, 2))
async def test_r23_prompts_around_the_context_limit(checkpoint: Path, over: int, max_tokens: int) -> None:
    """R23: L-8 .. L+1: at least one token must fit; over it 400 with both numbers, below it a shorter answer."""
    limit = 100
    async with served(make_config(str(checkpoint), max_context_tokens=limit)) as server:
        response = await server.complete(prompt=[5] * (limit + over), max_tokens=max_tokens)
        if over < 0:
            assert response.status_code == 200
            assert server.requests[0].sampling.max_tokens == min(max_tokens, -over)
        else:
            error = error_of(response, 400)
            assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")
            assert str(limit + over) in error["message"]
            assert str(limit) in error["message"]
            assert_nothing_sent(server)


async def test_r23_long_texts_are_refused_before_they_are_tokenized(server: Served) -> None:
    """A text that cannot fit, however its tokens fall, costs no tokenizing."""
    text = "a" * 1_000_000
    for response in (
        await server.complete(prompt=text),
        await server.chat(messages=[{"role": "user", "content": text}]),
        await server.client.post("/tokenize", json={"prompt": text}),
    ):
        error = error_of(response, 400)
        assert error["code"] == "context_length_exceeded"
        assert "at least" in error["message"]
        assert "4096" in error["message"]
    assert metric(server.backend.registry, "dsparkd_refusals_total", reason="too_large") == 3


@pytest.mark.parametrize("rank", [-1, 2, True, "0", 1.0, HUGE])
async def test_r03_bad_ranks_are_400(server: Served, rank: object) -> None:
    """R-03, R28: out of range, a boolean, a string, a float; the server still serves."""
    for response in (await server.chat(routed_dp_rank=rank), await server.complete(routed_dp_ranks=[rank])):
        assert error_of(response, 400)["code"] == "invalid_dp_rank"
    assert_nothing_sent(server)
    assert metric(server.backend.registry, "dsparkd_refusals_total", reason="bad_rank") == 2
    assert (await server.chat(routed_dp_rank=None)).status_code == 200


async def test_r03_a_dead_rank_is_503_with_retry_after(server: Served) -> None:
    """R-03: in range but not ready."""
    await server.backend.ranks[1].channel.send(Farewell("rank1"))

    for _ in range(200):  # until the farewell has been read
        if (await server.chat(routed_dp_rank=1)).status_code == 503:
            break
    response = await server.chat(routed_dp_rank=1)
    assert error_of(response, 503)["code"] == "dp_rank_unavailable"
    assert response.headers["retry-after"] == "1"
    assert (await server.chat()).status_code == 200


@pytest.mark.parametrize(
    ("batch", "each", "expected"),
    [
        (0, None, [3, 0]),
        (None, [1, 1, 1], [0, 3]),
        (None, [0, 1, 0], [2, 1]),
        (1, [1, None, 1], [0, 3]),
        (1, [None, None, None], [0, 3]),
        (0, [0, 0, 1], None),
    ],
)
async def test_r02_ranks_of_batch_and_items(
    server: Served, batch: int | None, each: list[int | None] | None, expected: list[int] | None
) -> None:
    """R-02: a batch's rank counts for all its items; one that an item contradicts is 400."""
    response = await server.complete(prompt=["a", "b", "c"], routed_dp_rank=batch, routed_dp_ranks=each)
    if expected is None:
        error = error_of(response, 400)
        assert (error["code"], error["param"]) == ("conflicting_dp_rank", "routed_dp_ranks[2]")
        assert_nothing_sent(server)
        return
    assert [len(rank.request_ids) for rank in server.backend.ranks] == expected
    assert all(len(rank.batches) <= 1 for rank in server.backend.ranks)


async def test_r01_one_bad_item_refuses_the_batch(server: Served) -> None:
    """R-01: 63 good prompts and one bad: 400 that names index 17, and no rank heard of any."""
    prompts: list[object] = [[5]] * 64
    prompts[17] = [10**6]
    error = error_of(await server.complete(prompt=prompts), 400)
    assert error["param"] == "prompt[17][0]"
    assert_nothing_sent(server)
    assert metric(server.backend.registry, "dsparkd_load_requests", dp_rank="0", source="speculative") == 0


async def test_r07_batch_and_queue_limits(checkpoint: Path) -> None:
    """R-07: too many items is 400, a full queue 429 with Retry-After; nothing is split."""
    limits = LimitsConfig(max_batch_items=4, queue_items=4)
    async with served(make_config(str(checkpoint), limits=limits)) as server:
        error = error_of(await server.complete(prompt=["a"] * 5), 400)
        assert (error["code"], error["param"]) == ("batch_too_large", "prompt")
        assert error_of(await server.complete(n=5), 400)["param"] == "n"
        server.backend.script = None
        waiting = asyncio.ensure_future(server.complete(prompt=["a"] * 2, routed_dp_rank=0))
        await server.backend.until(lambda: len(server.requests) == 2)
        response = await server.complete(prompt=["a"] * 3, routed_dp_rank=0)
        assert error_of(response, 429)["type"] == "rate_limit_error"
        assert response.headers["retry-after"] == "1"
        assert len(server.requests) == 2
        waiting.cancel()


async def test_a_request_holds_a_bounded_number_of_prompt_tokens(
    server: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """n copies of a long prompt travel in one frame; one that a channel refuses as absurd would end the server."""
    monkeypatch.setattr(intake, "MAX_BATCH_TOKENS", 12)

    error = error_of(await server.complete(prompt=[[5, 6, 7, 8], [9]], n=3), 400)

    assert (error["code"], error["param"]) == ("batch_too_large", "n")
    assert_nothing_sent(server)
    assert (await server.complete(prompt=[[5, 6, 7], [9]], n=3)).status_code == 200


async def test_an_answer_holds_a_bounded_number_of_prompt_log_probabilities(
    server: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Thousands of prompt tokens times n times alternatives would fill this process's memory, and take it down."""
    monkeypatch.setattr(intake, "MAX_PROMPT_LOGPROBS", 5 * 3 * 2)
    asked = {"prompt": [5, 6, 7, 8, 9], "n": 3, "echo": True}

    error = error_of(await server.complete(**asked, logprobs=2), 400)

    assert (error["code"], error["param"]) == ("too_many_logprobs", "logprobs")
    assert_nothing_sent(server)
    assert (await server.complete(**asked, logprobs=1)).status_code == 200
    assert (await server.complete(**(asked | {"echo": False}), logprobs=2)).status_code == 200


async def test_a_whole_answer_holds_a_bounded_number_of_log_probabilities(
    server: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are kept until the last token and written at once, while no stream and no rank is heard."""
    monkeypatch.setattr(intake, "MAX_ANSWER_LOGPROBS", 10 * 2 * 3)
    chat: dict[str, Any] = {"logprobs": True, "top_logprobs": 2, "max_tokens": 10}

    for answer in (
        await server.chat(**chat, n=3),
        await server.complete(prompt=["a", "b", "c"], logprobs=2, max_tokens=10),
    ):
        error = error_of(answer, 400)
        assert (error["code"], error["param"]) == ("too_many_logprobs", "logprobs")
    assert_nothing_sent(server)
    for fields in ({"n": 2}, {"n": 3, "stream": True}, {"n": 3, "top_logprobs": 1}, {"n": 3, "max_tokens": 6}):
        assert (await server.chat(**(chat | fields))).status_code == 200
    assert (await server.chat(n=3, max_tokens=100)).status_code == 200


async def test_r14_a_live_id_is_409(server: Served) -> None:
    """R-14: while a request of that id runs; afterwards it may come again."""
    script, server.backend.script = server.backend.script, None
    waiting = asyncio.ensure_future(server.complete(request_id="same"))
    await server.backend.until(lambda: len(server.requests) == 1)
    error = error_of(await server.complete(request_id="same"), 409)
    assert error["code"] == "duplicate_request_id"
    assert metric(server.backend.registry, "dsparkd_refusals_total", reason="duplicate") == 1
    waiting.cancel()
    await server.backend.until(lambda: server.backend.router.outstanding() == 0)
    rank = next(rank for rank in server.backend.ranks if rank.batches)
    await rank.channel.send(Admitted("same", 1))
    await asyncio.sleep(0.01)
    server.backend.script = script
    assert (await server.complete(request_id="same")).status_code == 200


async def test_request_id_headers_that_must_not_be_echoed_are_400(server: Served) -> None:
    """A header value goes into a response header and a log line: only harmless characters."""
    for value in ("a b", "ä", "x" * 129, ""):
        response = await server.client.get("/v1/models", headers={"X-Request-Id": value.encode()})
        assert error_of(response, 400)["code"] == "invalid_request_id"
    response = await server.client.post(
        "/v1/completions",
        json={"model": MODEL, "prompt": "a", "request_id": "one"},
        headers={"X-Request-Id": "two"},
    )
    assert error_of(response, 400)["param"] == "request_id"


async def test_draining_refuses_and_closes(server: Served) -> None:
    """L-33: new work is 503 with Connection: close as soon as the stop has begun."""
    server.backend.router.begin_drain()
    for path, body in (("/v1/completions", {"model": MODEL, "prompt": "a"}),):
        response = await server.client.post(path, json=body)
        assert error_of(response, 503)["code"] == "draining"
        assert response.headers["connection"] == "close"
    assert metric(server.backend.registry, "dsparkd_refusals_total", reason="draining") == 1


async def test_bodies_beyond_the_limit_are_413(checkpoint: Path) -> None:
    """Refused by the declared length before a byte is read, and while reading when none is declared."""
    limits = LimitsConfig(max_body_bytes=1000)
    async with served(make_config(str(checkpoint), limits=limits)) as server:
        read = []

        async def parts():  # type: ignore[no-untyped-def]
            for _ in range(100):
                read.append(1)
                yield b"x" * 100

        declared = await server.client.post("/tokenize", content=b"x" * 1001)
        undeclared = await server.client.post("/tokenize", content=parts())
        for response in (declared, undeclared):
            assert error_of(response, 413)["code"] == "body_too_large"
            assert response.headers["connection"] == "close"
        assert len(read) < 15
        fits = await server.client.post("/tokenize", content=b'{"prompt": "a"}'.ljust(1000))
        assert fits.status_code == 200


async def test_compressed_bodies_are_415(server: Served) -> None:
    """A compressed body would pass the size limit and grow behind it."""
    response = await server.client.post("/tokenize", content=b"{}", headers={"Content-Encoding": "gzip"})
    assert error_of(response, 415)["code"] == "unsupported_encoding"
    plain = {"Content-Encoding": "Identity"}  # in any case, says HTTP
    assert (await server.client.post("/tokenize", json={"prompt": "a"}, headers=plain)).status_code == 200


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/v1/chat/completions", 405, "method_not_allowed"),
        ("POST", "/health", 405, "method_not_allowed"),
        ("DELETE", "/v1/models/nano", 405, "method_not_allowed"),
        ("GET", "/nope", 404, "not_found"),
        ("POST", "/v1/chat/completions/", 404, "not_found"),
        ("GET", "/v1/models/gpt-9", 404, "model_not_found"),
    ],
)
async def test_wrong_paths_and_methods(server: Served, method: str, path: str, status: int, code: str) -> None:
    """The same error object for what is no endpoint; the methods that work are named."""
    response = await server.client.request(method, path)
    assert error_of(response, status)["code"] == code
    if status == 405:
        assert response.headers["allow"]


async def test_m01_nothing_a_client_sends_becomes_a_label(server: Served) -> None:
    """M-01: paths, models and codes of refusals add no series beyond the closed sets."""
    for number in range(20):
        await server.client.get(f"/nope/{number}")
        await server.chat(model=f"m{number}")
    text = server.backend.registry.render().decode()
    assert "nope" not in text
    assert 'route="other",status="4xx"} 20.0' in text
    assert 'refusals_total{reason="invalid"} 40.0' in text


async def test_an_unexpected_error_is_500_and_the_next_request_works(
    server: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The http table catches what nobody expected: one request ends with 500, the server lives."""

    async def broken(items: object) -> None:
        raise ZeroDivisionError

    with monkeypatch.context() as patch:
        patch.setattr(server.backend.router, "submit", broken)
        error = error_of(await server.chat(), 500)
    assert error["code"] == "internal_error"
    assert "ZeroDivision" not in error["message"]
    assert (await server.chat()).status_code == 200


async def test_a_request_that_the_servers_end_overtakes_reads_why(server: Served) -> None:
    """L-38: a connection accepted at the last moment is cancelled; it must not see the HTTP library's bare 500."""

    async def wait(incoming: Incoming) -> Response:
        await asyncio.Event().wait()
        raise AssertionError

    sent: list[dict[str, Any]] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        await asyncio.Event().wait()

    endpoint = Endpoint("/v1/models", ("GET",), wait, keys=None, tally=server.backend.registry.tally)
    scope = {"type": "http", "method": "GET", "path": "/v1/models", "headers": [], "query_string": b""}
    task = asyncio.create_task(endpoint(scope, receive, send))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task

    assert sent[0]["status"] == 503
    assert json.loads(sent[1]["body"])["error"]["code"] == "draining"
    assert not sent[1].get("more_body")
