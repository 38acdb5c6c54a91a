"""Intake: whatever arrives, the outcome is a validated request or a RequestError."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsparkd.config import LimitsConfig
from dsparkd.errors import RequestError
from dsparkd.http.body import parse_object
from dsparkd.http.intake import ChatWork, CompletionWork, Envelope, Intake
from dsparkd.http.openapi import openapi_document
from dsparkd.text.encoding import ChatEncoding
from dsparkd.text.tokenizer import Tokenizer

ENVELOPE = Envelope("id", has_header_id=False, received_ns=1)
SCHEMAS: Any = openapi_document(LimitsConfig())["components"]
CHAT_FIELDS = sorted(SCHEMAS["schemas"]["ChatRequest"]["properties"])
COMPLETION_FIELDS = sorted(SCHEMAS["schemas"]["CompletionRequest"]["properties"])
T = TypeVar("T")


@pytest.fixture(scope="module")
def intake(checkpoint: Path) -> Intake:
    tokenizer = Tokenizer.load(checkpoint)
    encoding = ChatEncoding(tokenizer, "low")
    return Intake("nano", LimitsConfig(), 4096, tokenizer, encoding, clock=lambda: 2, draw_seed=lambda: 77)


def outcome(work: Callable[[], T]) -> T | RequestError:
    """What came out: a result or the one exception that may."""
    try:
        return work()
    except RequestError as error:
        return error


def assert_sound(result: ChatWork | CompletionWork | RequestError) -> None:
    """A refusal is a 4xx; what is taken fits the context."""
    if isinstance(result, RequestError):
        assert 400 <= result.status < 500
        return
    for item in result.work.items:
        assert item.request.prompt_ids
        assert 1 <= item.request.sampling.max_tokens <= 4096 - len(item.request.prompt_ids)
        assert item.request.sampling.min_tokens <= item.request.sampling.max_tokens


@settings(max_examples=300, deadline=None)
@given(raw=st.binary(max_size=60) | st.text(max_size=60).map(str.encode))
def test_any_bytes_are_read_or_refused(raw: bytes) -> None:
    """G-02: nothing but an object or a RequestError, and what is read is what a strict reader reads."""
    result = outcome(lambda: parse_object(raw))
    assert isinstance(result, RequestError) or result == json.loads(raw)


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=300, deadline=None)
@given(fields=st.dictionaries(st.sampled_from(CHAT_FIELDS), _json, max_size=2))
def test_any_value_in_any_chat_field_is_taken_or_refused(intake: Intake, fields: dict[str, object]) -> None:
    """A client's value must not reach a rank, or the log, as an exception."""
    body = {"model": "nano", "messages": [{"role": "user", "content": "x"}], **fields}
    assert_sound(outcome(lambda: intake.chat(json.dumps(body).encode(), ENVELOPE)))


@settings(max_examples=300, deadline=None)
@given(fields=st.dictionaries(st.sampled_from(COMPLETION_FIELDS), _json, max_size=2))
def test_any_value_in_any_completion_field_is_taken_or_refused(intake: Intake, fields: dict[str, object]) -> None:
    """As for chats."""
    body = {"model": "nano", "prompt": "x", **fields}
    assert_sound(outcome(lambda: intake.completion(json.dumps(body).encode(), ENVELOPE)))


@settings(max_examples=200, deadline=None)
@given(parameters=st.dictionaries(st.text(max_size=5), _json, max_size=3), content=st.text(max_size=20))
def test_any_tool_schema_and_content_is_rendered_or_refused(
    intake: Intake, parameters: dict[str, object], content: str
) -> None:
    """Agent clients send schemas that they did not write; the renderer is a native library."""
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    call = {"id": "c", "function": {"name": "f", "arguments": content}}
    messages = [
        {"role": "user", "content": content},
        {"role": "assistant", "content": content, "reasoning_content": content, "tool_calls": [call]},
        {"role": "tool", "content": content, "tool_call_id": "c"},
    ]
    body = {"model": "nano", "messages": messages, "tools": [tool]}
    assert_sound(outcome(lambda: intake.chat(json.dumps(body).encode(), ENVELOPE)))


def test_a_drawn_seed_is_each_prompts_own_and_shared_by_its_choices(checkpoint: Path) -> None:
    """Decision 3: a batch item without a seed draws one."""
    tokenizer = Tokenizer.load(checkpoint)
    seeds = iter(range(100))
    intake = Intake(
        "nano",
        LimitsConfig(),
        4096,
        tokenizer,
        ChatEncoding(tokenizer, "low"),
        clock=lambda: 2,
        draw_seed=lambda: next(seeds),
    )
    body = {"model": "nano", "prompt": ["a", "b"], "n": 2}
    work = intake.completion(json.dumps(body).encode(), ENVELOPE).work
    drawn = [(item.request.sampling.seed, item.request.sampling.choice) for item in work.items]
    assert drawn == [(0, 0), (0, 1), (1, 0), (1, 1)]
