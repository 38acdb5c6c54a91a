"""Answers of both generating endpoints, whole and streamed."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from dsparkd.messages import Admitted, Refused, TextDelta, TextLogprob, TokenizedRequest
from dsparkd.text.tokenizer import Tokenizer
from tests.http.conftest import MODEL, Served, error_of, events, say
from tests.routing.fakes import make_finish, metric, text_delta

THINKING_OFF = {"thinking": {"type": "disabled"}}
WEATHER = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}
CALL = (
    '\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name="get_weather">\n<｜DSML｜parameter name="city" string="true">'
    "Paris</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>"
)


async def test_chat_answer_has_the_shape_that_clients_read(server: Served) -> None:
    """Text, finish reason, usage, the drawn seed beside the choice (decision 3), and the request id in the header."""
    server.backend.script = say("Hello", " world", ids=(7, 8))
    response = await server.chat(**THINKING_OFF)
    assert response.status_code == 200
    body = response.json()
    sampling = server.requests[0].sampling
    assert body["object"] == "chat.completion"
    assert body["model"] == MODEL
    assert body["id"] == f"chatcmpl-{response.headers['x-request-id']}"
    assert body["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "Hello world"},
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": None,
            "seed": sampling.seed,
        }
    ]
    prompt_tokens = len(server.requests[0].prompt_ids)
    assert body["usage"] == {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": 4,
        "total_tokens": prompt_tokens + 4,
        "prompt_tokens_details": {"cached_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }


async def test_reasoning_is_split_off_and_counted(server: Served, tokenizer: Tokenizer) -> None:
    """Thinking is on by default; reasoning tokens never exceed all tokens (R21)."""
    end = tokenizer.marker_id("</think>")

    def script(request: TokenizedRequest) -> list[TextDelta]:
        return [
            text_delta(request.request_id, "let me", (7, 8)),
            text_delta(request.request_id, " see</think>It", (9, end, 10)),
            text_delta(request.request_id, " is", (11,), make_finish(output_tokens=6)),
        ]

    server.backend.script = script
    body = (await server.chat()).json()
    assert body["choices"][0]["message"] == {
        "role": "assistant",
        "content": "It is",
        "reasoning_content": "let me see",
    }
    assert body["usage"]["completion_tokens_details"] == {"reasoning_tokens": 3}
    streamed = events(await server.chat(stream=True))
    assert "".join(e["choices"][0]["delta"].get("reasoning_content", "") for e in streamed) == "let me see"
    assert "".join(e["choices"][0]["delta"].get("content", "") for e in streamed) == "It is"


async def test_streamed_chat_begins_with_the_role_and_ends_with_reason_usage_and_done(server: Served) -> None:
    """The order that the SDKs rely on; usage only when asked for, as the last chunk without choices."""
    streamed = events(await server.chat(stream=True, stream_options={"include_usage": True}, seed=5, **THINKING_OFF))
    assert streamed[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(e["choices"][0]["delta"].get("content", "") for e in streamed[:-1]) == "Hello world"
    last = streamed[-2]["choices"][0]
    assert (last["finish_reason"], last["seed"], last["delta"]) == ("stop", 5, {})
    assert all(e["choices"][0]["finish_reason"] is None for e in streamed[:-2])
    assert all(e["usage"] is None for e in streamed[:-1])
    assert streamed[-1]["choices"] == []
    assert streamed[-1]["usage"]["completion_tokens"] == 2
    assert len({e["id"] for e in streamed}) == 1
    without = events(await server.chat(stream=True, **THINKING_OFF))
    assert all("usage" not in e for e in without)


async def test_n_choices_share_a_seed_and_differ_in_their_number(server: Served) -> None:
    """Decision 3: the noise key is (seed, choice); the prompt counts once in usage."""
    body = (await server.chat(n=3, **THINKING_OFF)).json()
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    samplings = [request.sampling for request in sorted(server.requests, key=lambda r: r.request_id)]
    assert {sampling.seed for sampling in samplings} == {body["choices"][0]["seed"]}
    assert [sampling.choice for sampling in samplings] == [0, 1, 2]
    prompt_tokens = len(server.requests[0].prompt_ids)
    assert (body["usage"]["prompt_tokens"], body["usage"]["completion_tokens"]) == (prompt_tokens, 6)
    assert len({request.request_id for request in server.requests}) == 3


async def test_n_choices_stream_side_by_side(server: Served) -> None:
    """Each choice's deltas add up to its own text."""
    streamed = events(await server.chat(n=2, stream=True, **THINKING_OFF))
    for index in range(2):
        mine = [e["choices"][0] for e in streamed if e["choices"][0]["index"] == index]
        assert "".join(choice["delta"].get("content", "") for choice in mine) == "Hello world"
        assert mine[-1]["finish_reason"] == "stop"


async def test_tool_calls_whole(server: Served) -> None:
    """DSML becomes tool_calls, the reason says so, and content is null as clients expect."""
    server.backend.script = say(CALL[:30], CALL[30:])
    choice = (await server.chat(tools=[WEATHER], **THINKING_OFF)).json()["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] is None
    (call,) = choice["message"]["tool_calls"]
    assert call["type"] == "function"
    assert call["function"] == {"name": "get_weather", "arguments": '{"city": "Paris"}'}
    assert call["id"].startswith("call_")


async def test_tool_calls_streamed(server: Served) -> None:
    """Id and name once, arguments as they grow, under one index."""
    server.backend.script = say("Look: ", *(CALL[at : at + 5] for at in range(0, len(CALL), 5)))
    streamed = events(await server.chat(tools=[WEATHER], stream=True, **THINKING_OFF))
    deltas = [e["choices"][0]["delta"] for e in streamed]
    calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
    assert "".join(delta.get("content", "") for delta in deltas) == "Look: "
    assert {call["index"] for call in calls} == {0}
    assert [call["function"]["name"] for call in calls if "id" in call] == ["get_weather"]
    assert "".join(call["function"]["arguments"] for call in calls) == '{"city": "Paris"}'
    assert streamed[-1]["choices"][0]["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("fields", [{}, {"tools": [WEATHER], "tool_choice": "none"}])
async def test_markup_without_a_callable_tool_is_text(server: Served, fields: dict[str, Any]) -> None:
    """Nobody can run the call: the words are the answer."""
    server.backend.script = say(CALL)
    choice = (await server.chat(**fields, **THINKING_OFF)).json()["choices"][0]
    assert choice["message"]["content"] == CALL
    assert choice["finish_reason"] == "stop"


async def test_length_and_abort_are_told_apart(server: Served) -> None:
    """Finish reasons stop, length, tool_calls, abort; a cut call is not ready to run."""
    server.backend.script = say(CALL[:-60], reason="length")
    choice = (await server.chat(tools=[WEATHER], **THINKING_OFF)).json()["choices"][0]
    assert choice["finish_reason"] == "length"
    server.backend.script = say(CALL, reason="abort")
    assert (await server.chat(tools=[WEATHER], **THINKING_OFF)).json()["choices"][0]["finish_reason"] == "abort"


@pytest.mark.parametrize(("matched", "named"), [("END", "END"), (5, 5), (1, None), (None, None)])
async def test_the_stop_that_ended_it_is_named(server: Served, matched: object, named: object) -> None:
    """Clients with several stops ask which one it was; the model's own end of text is none of them."""
    server.backend.script = say("a", matched=matched)
    fields = {"stop": ["END", "X"], "stop_token_ids": [5]}
    choice = (await server.chat(**fields, **THINKING_OFF)).json()["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", named)
    assert server.requests[0].sampling.stop_strings == ("END", "X")
    streamed = events(await server.complete(stream=True, **fields))
    assert streamed[-1]["choices"][0]["stop_reason"] == named


def logprob(text: str, token_id: int = 7, value: float | None = -0.5) -> TextLogprob:
    raw = text.encode()
    return TextLogprob(token_id, text, raw, value, ((token_id, text, raw, value or 0.0), (9, "b", b"b", -1.5)))


async def test_chat_logprobs(server: Served) -> None:
    """D-27: one entry a token with its bytes and alternatives; an impossible token has a finite number."""

    def script(request: TokenizedRequest) -> list[TextDelta]:
        entries = (logprob("é"), logprob("x", 8, float("-inf")))
        return [text_delta(request.request_id, "éx", (7, 8), make_finish(output_tokens=2), logprobs=entries)]

    server.backend.script = script
    content = (await server.chat(logprobs=True, top_logprobs=2, **THINKING_OFF)).json()["choices"][0]["logprobs"][
        "content"
    ]
    assert content[0] == {
        "token": "é",
        "logprob": -0.5,
        "bytes": [195, 169],
        "top_logprobs": [
            {"token": "é", "logprob": -0.5, "bytes": [195, 169]},
            {"token": "b", "logprob": -1.5, "bytes": [98]},
        ],
    }
    assert content[1]["logprob"] == -9999.0
    assert server.requests[0].sampling.top_logprobs == 2
    streamed = events(await server.chat(logprobs=True, stream=True, **THINKING_OFF))
    entries = [e for s in streamed for e in (s["choices"][0]["logprobs"] or {"content": []})["content"]]
    assert [e["token"] for e in entries] == ["é", "x"]
    assert server.requests[-1].sampling.top_logprobs == 0


async def test_completion_shape(server: Served) -> None:
    """Text completion with usage; BOS in front of text, as the model was trained."""
    body = (await server.complete(prompt="Hi")).json()
    assert body["object"] == "text_completion"
    assert body["choices"][0]["text"] == "Hello world"
    assert server.requests[0].prompt_ids[0] == 0
    assert server.requests[0].sampling.max_tokens == 16
    await server.complete(prompt="Hi", add_special_tokens=False)
    assert server.requests[1].prompt_ids == server.requests[0].prompt_ids[1:]


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ([5, 6, 7], [(5, 6, 7)]),
        ([[5], [6, 7]], [(5,), (6, 7)]),
    ],
)
async def test_token_ids_are_used_as_they_are(server: Served, prompt: object, expected: object) -> None:
    """No BOS, no change: whoever sends ids has decided."""
    await server.complete(prompt=prompt, routed_dp_rank=0)
    assert [request.prompt_ids for request in server.requests] == expected


async def test_marker_text_in_a_prompt_stays_text(server: Served, tokenizer: Tokenizer) -> None:
    """Also raw completions: only ids can name a marker."""
    await server.complete(prompt="<｜User｜>x</think>")
    assert not {tokenizer.marker_id("<｜User｜>"), tokenizer.marker_id("</think>")} & set(server.requests[0].prompt_ids)


async def test_a_batch_with_n_has_prompt_major_choices(server: Served) -> None:
    """Choice index = prompt * n + k, as the OpenAI API orders them; each prompt draws its own seed."""
    body = (await server.complete(prompt=["a", "b"], n=2, routed_dp_rank=1)).json()
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    requests = server.requests
    assert [request.sampling.choice for request in requests] == [0, 1, 0, 1]
    assert requests[0].prompt_ids == requests[1].prompt_ids != requests[2].prompt_ids
    seeds = [request.sampling.seed for request in requests]
    assert seeds[0] == seeds[1] != seeds[2] == seeds[3]
    assert [choice["seed"] for choice in body["choices"]] == seeds
    assert body["usage"]["prompt_tokens"] == len(requests[0].prompt_ids) + len(requests[2].prompt_ids)


async def test_echo_gives_the_prompt_back(server: Served) -> None:
    """Text as it was sent, ids as their text; streamed first."""
    assert (await server.complete(prompt="<think>Hi", echo=True)).json()["choices"][0]["text"] == "<think>HiHello world"
    ids = list(server.requests[0].prompt_ids)
    assert (await server.complete(prompt=ids, echo=True)).json()["choices"][0]["text"] == "<think>HiHello world"
    streamed = events(await server.complete(prompt="Hi", echo=True, stream=True))
    assert streamed[0]["choices"][0]["text"] == "Hi"
    assert "".join(e["choices"][0]["text"] for e in streamed) == "HiHello world"


@pytest.mark.parametrize("first_is_sent", [True, False])
async def test_echo_with_logprobs_covers_the_prompt(server: Served, first_is_sent: bool) -> None:
    """Decision 7: prompt entries first, the first of them without a number, offsets into the joined text."""

    def script(request: TokenizedRequest) -> list[TextDelta]:
        texts = ["A", "BC"]
        entries = tuple(logprob(text, token_id) for text, token_id in zip(texts, request.prompt_ids, strict=True))
        if first_is_sent:
            entries = (TextLogprob(request.prompt_ids[0], "A", b"A", None), *entries[1:])
        else:
            entries = entries[1:]
        return [
            text_delta(request.request_id, "", prompt_logprobs=entries),
            text_delta(request.request_id, "de", (7,), make_finish(), logprobs=(logprob("de"),)),
        ]

    server.backend.script = script
    prompt = [server_id("A"), server_id("B")]
    for stream in (False, True):
        response = await server.complete(prompt=prompt, echo=True, logprobs=2, max_tokens=1, stream=stream)
        assert server.requests[-1].sampling.prompt_logprobs
        if stream:
            choices = [e["choices"][0] for e in events(response)]
            parts = [choice["logprobs"] for choice in choices if choice["logprobs"]]
            merged = {name: [x for part in parts for x in part[name]] for name in parts[0]}
            text = "".join(choice["text"] for choice in choices)
        else:
            (choice,) = response.json()["choices"]
            merged, text = choice["logprobs"], choice["text"]
        assert text == "ABde"
        assert merged["tokens"] == ["A", "BC", "de"]
        assert merged["token_logprobs"] == [None, -0.5, -0.5]
        assert merged["top_logprobs"][0] is None
        assert merged["top_logprobs"][2] == {"de": -0.5, "b": -1.5}
        assert merged["text_offset"] == [0, 1, 3]


async def test_offsets_are_places_in_the_text_also_where_characters_are_split(server: Served) -> None:
    """R25: a token of half a character reads as U+FFFD by itself, and would move all offsets behind it."""
    pieces = [b"a", b"\xe4\xb8", b"\xad", b"b\xf0\x9f", b"\x98\x80c", b"d"]
    entries = tuple(TextLogprob(7, raw.decode(errors="replace"), raw, -0.5) for raw in pieces)
    text = b"".join(pieces).decode()
    server.backend.script = lambda request: [
        text_delta(request.request_id, text, (7,) * len(pieces), make_finish(), logprobs=entries)
    ]

    (choice,) = (await server.complete(logprobs=0)).json()["choices"]

    assert choice["text"] == text == "a中b😀cd"
    assert choice["logprobs"]["text_offset"] == [0, 1, 2, 2, 4, 5]
    assert text[5] == "d"


def server_id(character: str) -> int:
    """Id of one ASCII letter in the nano tokenizer: three specials, then the printable bytes in order."""
    return 3 + ord(character) - ord("!")


async def test_completion_streams_usage_and_reason(server: Served) -> None:
    """As chat does."""
    streamed = events(await server.complete(stream=True, stream_options={"include_usage": True}))
    assert streamed[-2]["choices"][0]["finish_reason"] == "stop"
    assert streamed[-1]["usage"]["completion_tokens"] == 2


async def test_a_stream_that_a_rank_refuses_is_a_json_error(server: Served) -> None:
    """Decision 15: the status line waits for admission, so a refusal by the rank is a 4xx also for streams."""
    server.backend.script = None
    for stream in (False, True):
        waiting = asyncio.ensure_future(server.chat(stream=stream))
        await server.backend.until(lambda stream=stream: len(server.requests) == 1 + stream)
        refusal = Refused(server.requests[-1].request_id, 429, "queue_full", None, "no room", 7)
        await next(rank for rank in server.backend.ranks if refusal.request_id in rank.request_ids).channel.send(
            refusal
        )
        response = await waiting
        assert error_of(response, 429)["code"] == "queue_full"
        assert response.headers["retry-after"] == "7"
        assert response.headers["content-type"] == "application/json"


async def test_the_status_line_waits_for_every_item(server: Served) -> None:
    """Decision 15: one admitted item of two is not enough to say 200."""
    server.backend.script = None
    waiting = asyncio.ensure_future(server.complete(prompt=["a", "b"], routed_dp_rank=0, stream=True))
    await server.backend.until(lambda: len(server.requests) == 2)
    first, second = (request.request_id for request in server.requests)
    channel = server.backend.ranks[0].channel
    await channel.send(Admitted(first, 1))
    await server.backend.say(text_delta(first, "x", finish=make_finish()))
    await channel.send(Refused(second, 400, "context_length_exceeded", None, "too long"))
    assert error_of(await waiting, 400)["code"] == "context_length_exceeded"


async def test_a_failure_after_the_status_line_is_an_event(server: Served) -> None:
    """L-38: a client in the middle of a stream reads why it ends."""

    def script(request: TokenizedRequest) -> list[TextDelta]:
        return [text_delta(request.request_id, "Hel", (7,))]

    server.backend.script = script
    waiting = asyncio.ensure_future(server.chat(stream=True, **THINKING_OFF))
    await server.backend.until(lambda: len(server.requests) == 1)
    await asyncio.sleep(0.02)
    server.backend.router.fail_all("rank 1 ended unexpectedly")
    streamed = events(await waiting)
    assert "".join(e["choices"][0]["delta"].get("content", "") for e in streamed[:-1]) == "Hel"
    assert streamed[-1]["error"]["code"] == "server_failed"
    assert "rank 1" in streamed[-1]["error"]["message"]


async def test_a_generation_that_fails_is_500_for_its_own_client_only(server: Served) -> None:
    """A rank's error on one request: 500 with a code, and the next request works."""
    server.backend.script = say("x", reason="error", error="logits are not finite")
    error = error_of(await server.chat(), 500)
    assert error["code"] == "generation_failed"
    assert error["type"] == "server_error"
    assert "not finite" in error["message"]
    server.backend.script = say("ok")
    assert (await server.chat()).status_code == 200


async def test_request_ids_are_echoed_from_header_or_body(server: Served) -> None:
    """A client's own id is in the response header and in the rank's log; none means a drawn one."""
    response = await server.client.post(
        "/v1/completions", json={"model": MODEL, "prompt": "a"}, headers={"X-Request-Id": "abc.1"}
    )
    assert response.headers["x-request-id"] == "abc.1"
    response = await server.complete(request_id="def_2")
    assert response.headers["x-request-id"] == "def_2"
    assert {request.request_id for request in server.requests} == {"abc.1", "def_2"}
    drawn = (await server.complete()).headers["x-request-id"]
    assert len(drawn) == 32


async def test_r09_every_item_has_its_own_stamps(server: Served) -> None:
    """R-09: received, encoded, tokenized, dispatched: non-zero and never decreasing."""
    await server.complete(prompt=["a"] * 64, routed_dp_rank=0)
    assert len(server.requests) == 64
    for request in server.requests:
        stamps = [request.received_ns, request.encoded_ns, request.tokenized_ns, request.dispatched_ns]
        assert stamps == sorted(stamps)
        assert stamps[0] > 0


async def test_sampling_fields_reach_the_rank(server: Served) -> None:
    """Every field of the public body that shapes a token, by name."""
    await server.complete(
        max_tokens=5,
        temperature=0.5,
        top_p=0.9,
        top_k=40,
        min_p=0.1,
        seed=(1 << 63) - 1,
        stop="END",
        stop_token_ids=[5, 5, 6],
        include_stop_str_in_output=True,
        presence_penalty=1.0,
        frequency_penalty=-1.0,
        repetition_penalty=1.5,
        logit_bias={"9": -100, "8": 3},
        min_tokens=2,
        ignore_eos=True,
        skip_special_tokens=False,
        logprobs=3,
    )
    (request,) = server.requests
    s = request.sampling
    assert (s.max_tokens, s.temperature, s.top_p, s.top_k, s.min_p) == (5, 0.5, 0.9, 40, 0.1)
    assert (s.seed, s.stop_strings, s.stop_ids, s.include_stop) == ((1 << 63) - 1, ("END",), (5, 6), True)
    assert (s.presence_penalty, s.frequency_penalty, s.repetition_penalty) == (1.0, -1.0, 1.5)
    assert (s.logit_bias, s.min_tokens, s.ignore_eos, s.top_logprobs) == (((8, 3.0), (9, -100.0)), 2, True, 3)
    assert not request.skip_special_tokens


async def test_defaults_are_the_models_own(server: Served) -> None:
    """Null means the default; top_k -1 and 0 are off; -0.0 is 0.0."""
    await server.complete(temperature=None, top_p=None, top_k=-1, min_p=-0.0, seed=None, n=None, stop=None)
    sampling = server.requests[0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (1.0, 1.0, 0, 0.0)
    assert str(sampling.min_p) == "0.0"
    assert 0 <= sampling.seed < 1 << 53


@pytest.mark.parametrize(
    ("fields", "thinks"),
    [
        ({}, True),
        ({"thinking": {"type": "enabled"}}, True),
        ({"thinking": {"type": "disabled"}}, False),
        ({"thinking": False}, False),
        ({"chat_template_kwargs": {"thinking": False}}, False),
        ({"chat_template_kwargs": {"enable_thinking": False}}, False),
        ({"chat_template_kwargs": {"enable_thinking": True}, "reasoning_effort": "none"}, True),
        ({"reasoning_effort": "none"}, False),
        ({"reasoning_effort": "high"}, True),
    ],
)
async def test_thinking_is_switched_in_every_usual_way(
    server: Served, tokenizer: Tokenizer, fields: dict[str, Any], thinks: bool
) -> None:
    """The prompt ends with the tag that starts or forbids reasoning."""
    await server.chat(**fields)
    last = tokenizer.marker_id("<think>" if thinks else "</think>")
    assert server.requests[0].prompt_ids[-1] == last


async def test_effort_changes_the_prompt(server: Served) -> None:
    """July rule: low has no prefix, high has one, max a longer one; medium counts as high, minimal as low."""
    lengths = {}
    for effort in ("minimal", "low", "medium", "high", "max"):
        await server.chat(reasoning_effort=effort, routed_dp_rank=0)
        lengths[effort] = len(server.requests[-1].prompt_ids)
    await server.chat(routed_dp_rank=0)
    assert lengths["minimal"] == lengths["low"] == len(server.requests[-1].prompt_ids)
    assert lengths["low"] < lengths["high"] == lengths["medium"] < lengths["max"]


async def test_developer_is_system_and_parts_are_joined(server: Served) -> None:
    """Decision 20, and the conversion library's rule for content parts."""
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    for messages in (
        [{"role": "system", "content": "a\n\nb"}, {"role": "user", "content": "a\n\nb"}],
        [{"role": "developer", "content": parts}, {"role": "user", "content": parts}],
    ):
        await server.chat(messages=messages, routed_dp_rank=0)
    assert server.requests[0].prompt_ids == server.requests[1].prompt_ids


async def test_an_answer_can_be_sent_back_as_history(server: Served) -> None:
    """What the SDKs make of our answer comes back with null members; it must be accepted."""
    server.backend.script = say(CALL)
    message = (await server.chat(tools=[WEATHER], **THINKING_OFF)).json()["choices"][0]["message"]
    history = [
        {"role": "user", "content": "Hi", "name": "bob"},
        {**message, "refusal": None, "annotations": None, "audio": None, "function_call": None},
        {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "sunny"},
    ]
    response = await server.chat(messages=history, tools=[WEATHER], **THINKING_OFF)
    assert response.status_code == 200, response.text


async def test_harmless_fields_are_ignored(server: Served) -> None:
    """The documented list that real clients send."""
    response = await server.chat(
        user="u",
        metadata={"a": "b"},
        store=False,
        service_tier="auto",
        safety_identifier="s",
        prompt_cache_key="k",
        prompt_cache_retention="24h",
        parallel_tool_calls=True,
        response_format={"type": "text"},
        regex=None,
    )
    assert response.status_code == 200, response.text


async def test_default_output_limits_fit_the_context(server: Served) -> None:
    """Without max_tokens the answer may fill what the context leaves, at most the model authors' limits."""
    await server.chat(routed_dp_rank=0)
    request = server.requests[0]
    assert request.sampling.max_tokens == 4096 - len(request.prompt_ids)
    await server.chat(max_completion_tokens=7, routed_dp_rank=0)
    assert server.requests[1].sampling.max_tokens == 7


async def test_open_streams_are_counted_while_open(server: Served) -> None:
    """M-02: the gauge goes up and down with the connections."""
    server.backend.script = None
    waiting = asyncio.ensure_future(server.chat(stream=True))
    await server.backend.until(lambda: len(server.requests) == 1)
    request_id = server.requests[0].request_id
    await server.backend.say(text_delta(request_id, "x"))
    rank = next(rank for rank in server.backend.ranks if rank.batches)
    await rank.channel.send(Admitted(request_id, 1))
    await server.backend.until(lambda: metric(server.backend.registry, "dsparkd_http_open_streams") == 1)
    await server.backend.say(text_delta(request_id, "", finish=make_finish()))
    await waiting
    assert metric(server.backend.registry, "dsparkd_http_open_streams") == 0
    counted = metric(server.backend.registry, "dsparkd_http_requests_total", route="/v1/chat/completions", status="2xx")
    assert counted == 1
