"""Public request bodies, field by field as docs/api.md lists them. An unknown field is refused with its name.

Fields of type `object` are accepted and ignored: real clients send them, and leaving them out changes no answer.
Fields of type `None` may only be null, which asks for nothing.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from dsparkd.errors import RequestError
from dsparkd.grammar.spec import SOURCES
from dsparkd.messages import MAX_TOP_LOGPROBS

MAX_SEED = (1 << 63) - 1
MAX_INT = (1 << 31) - 1

# Python's "$" also matches before a final newline, which must reach neither a header nor a prompt.
_END = r"$(?!\n)"
RequestId = Annotated[str, Meta(pattern=r"^[A-Za-z0-9._:-]{1,128}" + _END)]
TokenId = Annotated[int, Meta(ge=0, le=MAX_INT)]
StopString = Annotated[str, Meta(min_length=1, max_length=1024)]
ToolName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.-]{1,128}" + _END)]
CalledName = Annotated[str, Meta(pattern=r'^[^"\n]{1,256}' + _END)]
Penalty = Annotated[float, Meta(ge=-2.0, le=2.0)]
Ignored = Annotated[object, Meta(description="Accepted and ignored.")]

# What these hold is read by dsparkd.grammar.spec, which names the place of a mistake.
JsonObject = dict[str, object]
SchemaValue = JsonObject | str | bool


class Body(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A JSON object that a client sends."""


class StreamOptions(Body, frozen=True, kw_only=True):
    """Options of a streamed answer."""

    include_usage: bool = False
    include_obfuscation: Ignored = None


class Generation(Body, frozen=True, kw_only=True):
    """Fields that both generating endpoints share."""

    model: str
    max_tokens: Annotated[int, Meta(ge=1, le=MAX_INT)] | None = None
    temperature: Annotated[float, Meta(ge=0.0, le=2.0)] | None = None
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=MAX_INT)] | None = None
    min_p: Annotated[float, Meta(ge=0.0, le=1.0)] | None = None
    seed: Annotated[int, Meta(ge=0, le=MAX_SEED)] | None = None
    n: Annotated[int, Meta(ge=1, le=128)] | None = None
    stop: StopString | Annotated[list[StopString], Meta(max_length=16)] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=64)] | None = None
    include_stop_str_in_output: bool | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(gt=0.0, le=10.0)] | None = None
    logit_bias: Annotated[dict[str, Annotated[float, Meta(ge=-100.0, le=100.0)]], Meta(max_length=1024)] | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=MAX_INT)] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: JsonObject | None = None
    json_schema: SchemaValue | None = None
    json_object: bool | None = None
    regex: str | None = None
    ebnf: str | None = None
    choice: list[str] | None = None
    structural_tag: JsonObject | str | None = None
    guided_json: SchemaValue | None = None
    guided_json_object: bool | None = None
    guided_regex: str | None = None
    guided_grammar: str | None = None
    guided_choice: list[str] | None = None
    structured_outputs: JsonObject | None = None
    routed_dp_rank: int | None = None
    request_id: RequestId | None = None
    user: Ignored = None
    metadata: Ignored = None
    store: Ignored = None
    service_tier: Ignored = None
    safety_identifier: Ignored = None
    prompt_cache_key: Ignored = None
    prompt_cache_retention: Ignored = None


class ContentPart(Body, frozen=True, kw_only=True):
    """A piece of a message; only text."""

    type: Literal["text"]
    text: str


Content = str | list[ContentPart]


class SystemMessage(Body, frozen=True, kw_only=True, tag_field="role", tag="system"):
    """An instruction of the operator."""

    content: Content
    name: Ignored = None


class DeveloperMessage(Body, frozen=True, kw_only=True, tag_field="role", tag="developer"):
    """The newer name of a system message."""

    content: Content
    name: Ignored = None


class UserMessage(Body, frozen=True, kw_only=True, tag_field="role", tag="user"):
    """What the user says."""

    content: Content
    name: Ignored = None


class LatestReminderMessage(Body, frozen=True, kw_only=True, tag_field="role", tag="latest_reminder"):
    """A reminder in the model's own format."""

    content: Content


class CalledFunction(Body, frozen=True, kw_only=True):
    """Name and JSON arguments of a past call."""

    name: CalledName
    arguments: str


class CalledTool(Body, frozen=True, kw_only=True):
    """A past call."""

    id: str
    function: CalledFunction
    type: Literal["function"] = "function"
    index: Ignored = None


class AssistantMessage(Body, frozen=True, kw_only=True, tag_field="role", tag="assistant"):
    """A past answer as the client got it, or with prefix the beginning of the one to come."""

    content: Content | None = None
    reasoning_content: str | None = None
    tool_calls: list[CalledTool] | None = None
    prefix: bool = False
    name: Ignored = None
    refusal: Ignored = None
    annotations: Ignored = None
    audio: Ignored = None
    function_call: Ignored = None
    provider_specific_fields: Ignored = None


class ToolMessage(Body, frozen=True, kw_only=True, tag_field="role", tag="tool"):
    """What a call returned."""

    content: Content
    tool_call_id: str | None = None
    name: Ignored = None


ChatMessage = SystemMessage | DeveloperMessage | UserMessage | LatestReminderMessage | AssistantMessage | ToolMessage


class Function(Body, frozen=True, kw_only=True):
    """A function that the model may call; parameters is a JSON schema."""

    name: ToolName
    description: str | None = None
    parameters: dict[str, object] | None = None
    strict: bool | None = None


class ToolDefinition(Body, frozen=True, kw_only=True):
    """A tool of a chat."""

    type: Literal["function"]
    function: Function


class ChosenFunction(Body, frozen=True, kw_only=True):
    """The name of a declared function."""

    name: str


class ToolChoice(Body, frozen=True, kw_only=True):
    """The tool that must be called."""

    type: Literal["function"]
    function: ChosenFunction


class Thinking(Body, frozen=True, kw_only=True):
    """Whether the model reasons before it answers."""

    type: Literal["enabled", "disabled"]


class TemplateFields(Body, frozen=True, kw_only=True):
    """Whether the model reasons, as clients of other servers say it."""

    thinking: bool | None = None
    enable_thinking: bool | None = None


ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


Messages = Annotated[list[ChatMessage], Meta(min_length=1, max_length=65536)]
Tools = Annotated[list[ToolDefinition], Meta(max_length=1024)]


class ChatRequest(Generation, frozen=True, kw_only=True):
    """Body of /v1/chat/completions."""

    messages: Messages
    tools: Tools | None = None
    tool_choice: Literal["auto", "none", "required"] | ToolChoice | None = None
    thinking: bool | Thinking | None = None
    chat_template_kwargs: TemplateFields | None = None
    reasoning_effort: ReasoningEffort | None = None
    max_completion_tokens: Annotated[int, Meta(ge=1, le=MAX_INT)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    parallel_tool_calls: bool | None = None
    functions: None = None
    function_call: None = None


class CompletionRequest(Generation, frozen=True, kw_only=True):
    """Body of /v1/completions."""

    prompt: str | list[object]  # one list type a union is what msgspec can check; `prompts_of` checks the items
    suffix: None = None
    best_of: None = None
    echo: bool | None = None
    logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    add_special_tokens: bool | None = None
    routed_dp_ranks: list[int | None] | None = None


class TokenizeRequest(Body, frozen=True, kw_only=True):
    """Body of /tokenize: a text, or a chat as /v1/chat/completions takes it."""

    model: str | None = None
    prompt: str | None = None
    add_special_tokens: bool | None = None
    messages: Messages | None = None
    tools: Tools | None = None
    tool_choice: Literal["auto", "none", "required"] | ToolChoice | None = None
    response_format: JsonObject | None = None
    thinking: bool | Thinking | None = None
    chat_template_kwargs: TemplateFields | None = None
    reasoning_effort: ReasoningEffort | None = None


class DetokenizeRequest(Body, frozen=True, kw_only=True):
    """Body of /detokenize."""

    tokens: list[TokenId]
    model: str | None = None
    skip_special_tokens: bool | None = None


TOOL_FIELDS = ("tools", "tool_choice", "parallel_tool_calls")
_GRAMMAR_FIELDS = frozenset(source.partition(".")[0] for source in SOURCES)

# Fields that clients know from elsewhere, with what to do instead.
_REFUSED = {
    "suffix": "infilling is not supported; leave suffix out",
    "best_of": "best_of is not supported; use n and choose yourself",
    "functions": "functions is the old name of tools; use tools",
    "function_call": "function_call is the old name of tool_choice; use tool_choice",
}


def refuse_unsupported(value: dict[str, object]) -> None:
    """Refuse what a well-formed request may ask for and this server cannot do, with a reason instead of a type error.

    Raises RequestError.
    """
    for field, remedy in _REFUSED.items():
        if value.get(field) is not None:
            raise RequestError(remedy, code="unsupported_field", param=field)


def refuse_grammars(value: dict[str, object]) -> None:
    """Where the operator switched grammars off, refuse each request that needs one. Raises RequestError."""
    named = [field for field in value if field in _GRAMMAR_FIELDS and value[field] is not None]
    response_format, choice = value.get("response_format"), value.get("tool_choice")
    if isinstance(response_format, dict) and response_format.get("type") != "text":
        named.append("response_format")
    if choice == "required" or isinstance(choice, dict):
        named.append("tool_choice")
    if value.get("parallel_tool_calls") is False:
        named.append("parallel_tool_calls")
    tools = value.get("tools")
    if isinstance(tools, list) and choice != "none" and any(map(_is_strict, tools)):
        named.append("tools")
    if named:
        raise RequestError(
            f"{named[0]} needs a grammar, and the operator switched those off (grammar.enabled); leave it out",
            code="unsupported_grammar",
            param=f"/{named[0]}",
        )


def _is_strict(tool: object) -> bool:
    function = tool.get("function") if isinstance(tool, dict) else None
    return isinstance(function, dict) and function.get("strict") is True
