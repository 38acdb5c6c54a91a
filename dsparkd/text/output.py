"""Output parser: the model's text, as it streams, into reasoning, answer and tool calls.

The library that renders prompts has a parser too; it drops text (half a tag at the end, newlines at the start of the
answer), takes calls out of reasoning and passes on arguments that are no JSON, so this one replaces it.
No text is lost except what follows the call block: what fits nowhere is answer text. The only part that is held back
is one that may still become a tag. Of one prompt's choice; not shared.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

THINK_END = "</think>"
SEPARATOR = "\n\n"
_OPEN = "<｜DSML｜"
_CLOSE = "</｜DSML｜"
_VALUE_END = "</｜DSML｜parameter>"
_TAG = re.compile(r'<(/?)｜DSML｜(tool_calls|invoke|parameter)((?:\s+[a-z_]+="[^"]*")*)\s*(/?)>')
_ATTRIBUTE = re.compile(r'([a-z_]+)="([^"]*)"')
_MAX_TAG_CHARS = 4096  # a longer "tag" is text, so that hold-back stays bounded

Stage = Literal["reasoning", "content", "calls", "invoke", "value", "after"]


@dataclass(frozen=True, slots=True)
class CallDelta:
    """New part of one tool call. call_id and name are set on its first delta only; arguments is JSON text."""

    index: int
    call_id: str | None
    name: str | None
    arguments: str


@dataclass(slots=True)
class OutputDelta:
    """What one piece of model output adds."""

    reasoning: str = ""
    content: str = ""
    calls: list[CallDelta] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.reasoning or self.content or self.calls)


@dataclass(slots=True)
class ToolCall:
    """A call so far. values holds the JSON text of each parameter; of two with one name the last one counts."""

    call_id: str
    name: str
    values: dict[str, str] = field(default_factory=dict)
    body: str | None = None  # the whole arguments, when the model wrote a JSON object instead of parameters
    complete: bool = False

    def arguments(self) -> str:
        """JSON object of the arguments."""
        if self.body is not None:
            return self.body
        return "{" + ", ".join(f"{_quote(name)}: {value}" for name, value in self.values.items()) + "}"


@dataclass(frozen=True, slots=True)
class _Tag:
    text: str
    closing: bool
    kind: str
    attributes: dict[str, str]
    self_closing: bool


def _new_call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


class OutputParser:
    """State machine over one choice's text.

    starts_in_reasoning: the prompt ended with `<think>`. parse_calls: tools were declared and may be called; without
    it, markup is text. think_end_id: id of `</think>`, by which reasoning tokens are counted exactly. ends_by_id: they
    go on until that id has come, whatever ordinary tokens spell: a grammar begins behind the id alone.
    """

    def __init__(
        self,
        *,
        starts_in_reasoning: bool,
        parse_calls: bool,
        think_end_id: int,
        ends_by_id: bool = False,
        new_call_id: Callable[[], str] = _new_call_id,
    ) -> None:
        self.calls: list[ToolCall] = []
        self.reasoning_tokens = 0
        self._stage: Stage = "reasoning" if starts_in_reasoning else "content"
        self._parse_calls = parse_calls
        self._think_end_id = think_end_id
        self._counting = starts_in_reasoning
        self._may_end = not ends_by_id
        self._new_call_id = new_call_id
        self._buffer = ""  # read but not yet given out
        self._opening = ""  # the block's opening, until a call shows that it was one
        self._in_stray_text = False
        self._parameter = ""
        self._is_string = False
        self._out = OutputDelta()

    def feed(self, text: str, token_ids: Sequence[int] = ()) -> OutputDelta:
        """Take more text and the ids that came with it; return what is certain now."""
        self._out = OutputDelta()
        self._buffer += text
        self._may_end = self._may_end or self._think_end_id in token_ids
        while self._advance():
            pass
        self._count(token_ids)
        return self._out

    def finish(self, *, cut: bool) -> OutputDelta:
        """Give out what is held back; close what is open. cut: the output ended by length or abort, not by itself."""
        self._out = OutputDelta()
        match self._stage:
            case "reasoning":
                self._out.reasoning += self._buffer
            case "content":
                self._out.content += self._buffer
            case "calls":
                self._out.content += ("" if self.calls else self._opening) + self._buffer
            case "invoke":
                self._take_body(self._buffer)
                self._end_call(complete=not cut)
            case "value":
                self._end_value(self._buffer)
                self._end_call(complete=not cut)
            case "after":
                pass
        self._buffer = ""
        self._stage = "after"
        return self._out

    def called(self) -> bool:
        """Whether the output is tool calls that a client may run: at least one, and none cut short."""
        return bool(self.calls) and all(call.complete for call in self.calls)

    def _count(self, token_ids: Sequence[int]) -> None:
        """Count ids before `</think>`; text that spells it with ordinary tokens ends reasoning as well."""
        if not self._counting:
            return
        if self._think_end_id in token_ids:
            self.reasoning_tokens += list(token_ids).index(self._think_end_id)
            self._counting = False
            return
        self.reasoning_tokens += len(token_ids)
        self._counting = self._stage == "reasoning"

    def _advance(self) -> bool:
        """Make one move; False when more text is needed."""
        match self._stage:
            case "reasoning":
                return self._read_reasoning()
            case "content":
                return self._read_content()
            case "calls":
                return self._read_calls()
            case "invoke":
                return self._read_invoke()
            case "value":
                return self._read_value()
            case "after":
                self._buffer = ""
                return False

    def _read_reasoning(self) -> bool:
        before, found, rest = self._buffer.partition(THINK_END)
        if found and not self._may_end:
            self._out.reasoning += before + found
            self._buffer = rest
            return True
        if found:
            self._out.reasoning += before
            self._buffer = rest
            self._stage = "content"
            return True
        sure = _sure_chars(self._buffer, (THINK_END,))
        self._out.reasoning += self._buffer[:sure]
        self._buffer = self._buffer[sure:]
        return False

    def _read_content(self) -> bool:
        if not self._parse_calls:
            self._give_content(len(self._buffer))
            return False
        start = self._buffer.find(_OPEN)
        if start < 0:
            self._give_content(_sure_chars(self._buffer, (SEPARATOR + _OPEN, _OPEN)))
            return False
        separator = len(SEPARATOR) if self._buffer.endswith(SEPARATOR, 0, start) else 0
        tag = _read_tag(self._buffer[start:])
        if tag == "incomplete":
            self._give_content(start - separator)
            return False
        if tag == "text" or tag.closing or tag.kind == "parameter":
            self._give_content(start + 1)
            return True
        self._give_content(start - separator)
        if tag.kind == "tool_calls":
            self._opening = SEPARATOR[:separator] + tag.text
            self._buffer = self._buffer[len(self._opening) :]
        self._stage = "calls"
        return True

    def _give_content(self, count: int) -> None:
        self._out.content += self._buffer[:count]
        self._buffer = self._buffer[count:]

    def _read_calls(self) -> bool:
        """Between invokes: white space is layout, anything else that is no tag of this place is answer text."""
        blank = 0 if self._in_stray_text else len(self._buffer) - len(self._buffer.lstrip())
        if not self._buffer[blank:]:
            return False
        tag = _read_tag(self._buffer[blank:])
        if tag == "incomplete":
            return False
        if tag == "text":
            end = self._buffer.find("<", blank + 1)
            self._give_stray_text(len(self._buffer) if end < 0 else end)
            return True
        end = blank + len(tag.text)
        self._in_stray_text = False
        if tag.kind == "invoke" and not tag.closing and tag.attributes.get("name"):
            self._buffer = self._buffer[end:]
            self._begin_call(tag)
        elif tag.kind == "tool_calls" and self.calls:
            self._buffer = self._buffer[end:]
            self._stage = "after" if tag.closing else "calls"
        else:
            self._give_stray_text(end)
            self._in_stray_text = False
            self._stage = "after" if tag.kind == "tool_calls" and tag.closing else "calls"
        return True

    def _give_stray_text(self, count: int) -> None:
        """Text of the block that is no call; before the first call, the block's opening turns out to be text, too."""
        if not self.calls:
            self._out.content += self._opening
            self._opening = ""
        self._give_content(count)
        self._in_stray_text = True

    def _begin_call(self, tag: _Tag) -> None:
        call = ToolCall(self._new_call_id(), tag.attributes["name"])
        self.calls.append(call)
        self._out.calls.append(CallDelta(len(self.calls) - 1, call.call_id, call.name, ""))
        self._stage = "invoke"
        if tag.self_closing:
            self._end_call(complete=True)

    def _give_arguments(self, text: str) -> None:
        if text:
            self._out.calls.append(CallDelta(len(self.calls) - 1, None, None, text))

    def _end_call(self, *, complete: bool) -> None:
        call = self.calls[-1]
        if call.body is None:
            self._give_arguments("}" if call.values else "{}")
        call.complete = complete
        self._stage = "calls"

    def _read_invoke(self) -> bool:
        """Inside an invoke: parameters, or a JSON object in their place."""
        start = min((at for at in (self._buffer.find(_OPEN), self._buffer.find(_CLOSE)) if at >= 0), default=-1)
        if start < 0:
            return False
        tag = _read_tag(self._buffer[start:])
        if tag == "incomplete":
            return False
        if tag == "text":
            self._give_content(start + 1)
            return True
        self._take_body(self._buffer[:start])
        if tag.kind == "parameter" and not tag.closing and tag.attributes.get("name"):
            self._buffer = self._buffer[start + len(tag.text) :]
            self._begin_value(tag)
        elif tag.kind == "invoke" and tag.closing:
            self._buffer = self._buffer[start + len(tag.text) :]
            self._end_call(complete=True)
        elif tag.kind == "parameter":
            self._buffer = self._buffer[start:]
            self._give_content(len(tag.text))
        else:
            # The next call or the end of the block: this invoke's closing tag was forgotten.
            self._buffer = self._buffer[start:]
            self._end_call(complete=True)
        return True

    def _take_body(self, text: str) -> None:
        """Use text between tags as the arguments if it is a JSON object and stands alone; else it is answer text."""
        call = self.calls[-1]
        if not text.strip():
            return
        if call.values or call.body is not None or not isinstance(_json_value(text), dict):
            self._out.content += text
            return
        call.body = text.strip()
        self._give_arguments(call.body)

    def _begin_value(self, tag: _Tag) -> None:
        call = self.calls[-1]
        if call.body is not None:
            # Parameters after a whole JSON object contradict it: what was given out stays, these become text.
            self._out.content += tag.text
            return
        self._parameter = tag.attributes["name"]
        self._is_string = tag.attributes.get("string") == "true"
        self._give_arguments((", " if call.values else "{") + _quote(self._parameter) + ": " + '"' * self._is_string)
        call.values.pop(self._parameter, None)
        call.values[self._parameter] = '"' * self._is_string
        self._stage = "value"
        if tag.self_closing:
            self._end_value("")

    def _read_value(self) -> bool:
        value, found, rest = self._buffer.partition(_VALUE_END)
        if found:
            self._buffer = rest
            self._end_value(value)
            return True
        if self._is_string:
            sure = _sure_chars(self._buffer, (_VALUE_END,))
            self._give_value(_quote(self._buffer[:sure])[1:-1])
            self._buffer = self._buffer[sure:]
        return False

    def _end_value(self, rest: str) -> None:
        """Close the value. One that should be JSON and is not becomes a JSON string."""
        if self._is_string:
            self._give_value(_quote(rest)[1:])
        else:
            self._give_value(rest.strip() if _is_json(rest) else _quote(rest))
        self._stage = "invoke"

    def _give_value(self, text: str) -> None:
        self.calls[-1].values[self._parameter] += text
        self._give_arguments(text)


def _sure_chars(text: str, tags: tuple[str, ...]) -> int:
    """How many leading characters cannot belong to a tag that is still to come."""
    longest = max(len(tag) for tag in tags) - 1
    for start in range(max(0, len(text) - longest), len(text)):
        if any(tag.startswith(text[start:]) for tag in tags):
            return start
    return len(text)


def _read_tag(text: str) -> _Tag | Literal["incomplete", "text"]:
    """Read the tag that text begins with; "incomplete" while it may still become one."""
    for prefix in (_OPEN, _CLOSE):
        if prefix.startswith(text):
            return "incomplete"
    if not text.startswith((_OPEN, _CLOSE)):
        return "text"
    found = _TAG.match(text)
    if found is not None:
        closing, kind, attributes, self_closing = found.groups()
        return _Tag(found[0], bool(closing), kind, dict(_ATTRIBUTE.findall(attributes)), bool(self_closing))
    # A ">" outside of quotes ends any tag.
    ended = any(">" in outside for outside in text[:_MAX_TAG_CHARS].split('"')[::2])
    return "text" if ended or len(text) > _MAX_TAG_CHARS else "incomplete"


def _quote(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _is_json(text: str) -> bool:
    return _json_value(text) is not _NOT_JSON


_NOT_JSON = object()


def _refuse_constant(name: str) -> object:
    raise ValueError(name)


def _json_value(text: str) -> object:
    """Parse strict JSON, or return _NOT_JSON."""
    try:
        value: object = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return _NOT_JSON
    return value
