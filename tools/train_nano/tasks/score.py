"""Reads out of an answer what is compared with an example's `expected`."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import assert_never

from dsparkd.text.encoding import PastCall
from tools.train_nano.tasks.example import Answer, Example

_NUMBER = re.compile(r"Answer: (-?\d+)")
_VALUE = re.compile(r"The \w+ of \S+ is (.+)\.")


def result(example: Example, answer: Answer) -> str | None:
    """Return the last line's number, canonical JSON, the value, the calls, or the content as it is; None: unreadable.

    Reasoning does not count. JSON is compared without its white space, but with the order of its members.
    """
    content = answer.content
    match example.task:
        case "arithmetic":
            return _group(_NUMBER, content.rsplit("\n", 1)[-1])
        case "extraction":
            return _json(content)
        case "recall":
            return _group(_VALUE, content)
        case "tools":
            return _calls(answer.calls) if answer.calls else content
        case "copy" | "chat":
            return content
        case _:
            assert_never(example.task)


def _group(pattern: re.Pattern[str], text: str) -> str | None:
    found = pattern.fullmatch(text)
    return found[1] if found else None


def _json(text: str) -> str | None:
    try:
        return json.dumps(json.loads(text), ensure_ascii=False)
    except ValueError:
        return None


def _calls(calls: Sequence[PastCall]) -> str | None:
    """Spell one call as an object, several as an array."""
    try:
        spelled = [{"name": call.name, "arguments": json.loads(call.arguments)} for call in calls]
    except ValueError:
        return None
    return json.dumps(spelled[0] if len(spelled) == 1 else spelled, ensure_ascii=False)
