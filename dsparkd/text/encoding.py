"""Chat encoding: messages and tools to prompt ids, over the model authors' own renderer.

`deepseek_recipe` renders the text and says which ranges of it are genuine markers; only those become marker ids, so
a message that spells a marker stays text. Held against the model's worked examples by tests.
Two rules are added: an effort is always named, so that the configured default decides and not the library's; and an
empty continuation is no turn, because the library would end the prompt without any think tag.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, assert_never

import deepseek_recipe as recipe

from dsparkd.errors import RequestError
from dsparkd.text.output import THINK_END, OutputParser
from dsparkd.text.tokenizer import Tokenizer

Role = Literal["system", "user", "assistant", "tool", "latest_reminder"]
Effort = Literal["low", "high", "xhigh", "max"]

BOS = "<｜begin▁of▁sentence｜>"
EOS = "<｜end▁of▁sentence｜>"
THINK_START = "<think>"
# Every marker that a text-only prompt can hold; a tokenizer without one of them cannot serve chat.
_MARKERS = (BOS, EOS, "<｜User｜>", "<｜Assistant｜>", THINK_START, THINK_END, "｜DSML｜", "<｜latest_reminder｜>")


@dataclass(frozen=True, slots=True)
class PastCall:
    """A tool call in the history. arguments is JSON text as the client sent it back."""

    call_id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Turn:
    """One message. reasoning, calls and is_prefix belong to an assistant, call_id to a tool result."""

    role: Role
    content: str
    reasoning: str | None = None
    calls: tuple[PastCall, ...] = ()
    call_id: str | None = None
    is_prefix: bool = False


@dataclass(frozen=True, slots=True)
class Tool:
    """One function that the model may call. parameters is its JSON schema, key order kept."""

    name: str
    description: str | None
    parameters: object


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation to answer. response_schema: the JSON schema that the prompt tells the answer to fit."""

    turns: Sequence[Turn]
    tools: Sequence[Tool] = ()
    thinking: bool = True
    effort: Effort | None = None
    response_schema: object | None = None


@dataclass(frozen=True, slots=True)
class Rendered:
    """A conversation as text. markers: ascending (start, end) of the genuine markers in it."""

    text: str
    markers: list[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Prompt:
    """A conversation as ids."""

    ids: list[int]
    starts_in_reasoning: bool


class ChatEncoding:
    """Immutable, so any thread may use it. Raises CheckpointError when the tokenizer lacks a marker."""

    def __init__(self, tokenizer: Tokenizer, default_effort: Effort) -> None:
        self.bos_id = tokenizer.marker_id(BOS)
        self.think_end_id = tokenizer.marker_id(THINK_END)
        self._tokenizer = tokenizer
        self._default_effort = default_effort
        self._marker_ids = {marker: tokenizer.marker_id(marker) for marker in _MARKERS}
        self._renderer = recipe.DeepseekV4Encoding()

    def render(self, chat: Chat) -> Rendered:
        """Raises RequestError for a conversation that cannot be rendered."""
        try:
            conversation = recipe.Conversation(
                [_message(turn) for turn in chat.turns if not _is_empty_prefix(turn)],
                thinking_mode=chat.thinking,
                tools=_definitions(chat.tools),
                reasoning_effort=(chat.effort or self._default_effort) if chat.thinking else None,
                response_schema=chat.response_schema,
            )
            rendered = self._renderer.render_conversation(conversation)
        except recipe.ConversionError as error:
            raise RequestError(f"the messages cannot be rendered: {error}", param="messages") from error
        except OverflowError as error:  # the renderer holds integers of a schema in 64 bits
            param = "response_format" if _fits(chat.tools) else "tools"
            raise RequestError(
                f"{param}: a schema has an integer beyond 64 bits", code="number_out_of_range", param=param
            ) from error
        return Rendered(rendered.prompt, rendered.special_ranges)

    def tokenize(self, rendered: Rendered) -> Prompt:
        """Marker ranges become marker ids, everything else is plain text."""
        text = rendered.text
        ids: list[int] = []
        last_think = THINK_END
        position = 0
        for start, end in rendered.markers:
            ids += self._tokenizer.encode(text[position:start])
            marker = text[start:end]
            ids.append(self._marker_ids[marker])
            if marker in (THINK_START, THINK_END):
                last_think = marker
            position = end
        ids += self._tokenizer.encode(text[position:])
        return Prompt(ids, starts_in_reasoning=last_think == THINK_START)

    def encode_text(self, text: str, *, add_bos: bool) -> list[int]:
        """Tokenize text that is no chat."""
        ids = self._tokenizer.encode(text)
        return [self.bos_id, *ids] if add_bos else ids

    def parser(self, prompt: Prompt, *, parse_calls: bool, ends_by_id: bool = False) -> OutputParser:
        """Make the parser for one answer to the prompt; see OutputParser."""
        return OutputParser(
            starts_in_reasoning=prompt.starts_in_reasoning,
            parse_calls=parse_calls,
            think_end_id=self.think_end_id,
            ends_by_id=ends_by_id,
        )


def _is_empty_prefix(turn: Turn) -> bool:
    return turn.is_prefix and not turn.content and not turn.reasoning


def _definitions(tools: Sequence[Tool]) -> list[recipe.ToolDefinition]:
    return [recipe.ToolDefinition(tool.name, tool.description, tool.parameters) for tool in tools]


def _fits(tools: Sequence[Tool]) -> bool:
    """Whether the renderer can hold the tools' schemas."""
    try:
        _definitions(tools)
    except OverflowError:
        return False
    return True


def _message(turn: Turn) -> recipe.Message:
    match turn.role:
        case "system":
            return recipe.SystemMessage(turn.content)
        case "user":
            return recipe.UserMessage(turn.content)
        case "assistant":
            calls = [recipe.ToolCall(call.call_id, call.name, call.arguments) for call in turn.calls]
            return recipe.AssistantMessage(
                turn.content, reasoning_content=turn.reasoning, tool_calls=calls or None, prefix=turn.is_prefix
            )
        case "tool":
            return recipe.ToolMessage(turn.content, turn.call_id)
        case "latest_reminder":
            return recipe.LatestReminderMessage(turn.content)
        case _:
            assert_never(turn.role)
