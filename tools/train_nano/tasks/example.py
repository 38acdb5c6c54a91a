"""Owns what one training or test example is: a conversation, the answer to it, and what a gate compares."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Literal, NamedTuple, TypeVar

from dsparkd.text.encoding import Chat, Effort, PastCall, Tool, Turn

Task = Literal["arithmetic", "extraction", "recall", "copy", "tools", "chat"]
Split = Literal["train", "validation", "test"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Answer:
    """What the model should write. reasoning is None in chat mode; a thinking answer always has some."""

    reasoning: str | None
    content: str
    calls: tuple[PastCall, ...] = ()


@dataclass(frozen=True, slots=True)
class Example:
    """One conversation with its answer.

    schema: the JSON schema that the answer has to fit, wherever the conversation states it.
    expected: what `score.result` finds in a right answer.
    history_is_answer: the assistant turns of chat are answers of the same kind, so they may be trained on as well.
    """

    task: Task
    chat: Chat
    schema: object | None
    answer: Answer
    expected: str
    history_is_answer: bool = False


class Candidate(NamedTuple):
    """A template with its values before it is spelled out. combination decides the split that it belongs to."""

    combination: str
    build: Callable[[], Example]


class Setting(NamedTuple):
    """How a conversation is held: with or without thinking, with which effort, under which system prompt."""

    thinking: bool
    effort: Effort | None
    system: str | None

    def chat(
        self,
        turns: Sequence[Turn],
        tools: Sequence[Tool] = (),
        *,
        instructions: str | None = None,
        response_schema: object | None = None,
    ) -> Chat:
        """Make the conversation; instructions follow the system prompt."""
        system = "\n\n".join(text for text in (self.system, instructions) if text)
        first = [Turn("system", system)] if system else []
        return Chat([*first, *turns], tuple(tools), self.thinking, self.effort, response_schema)

    def answer(self, reasoning: str, content: str, calls: tuple[PastCall, ...] = ()) -> Answer:
        """Make the answer; without thinking, reasoning is left out."""
        return Answer(reasoning if self.thinking else None, content, calls)


_BUCKETS = 32
_TEST_BUCKETS = 2  # the first ones; then comes one for validation


def split_of(task: Task, combination: str) -> Split:
    """Return the one split that may hold a combination of template and values."""
    bucket = number_of(task, combination) % _BUCKETS
    if bucket < _TEST_BUCKETS:
        return "test"
    return "validation" if bucket == _TEST_BUCKETS else "train"


def pick(rng: Random, items: Sequence[T]) -> T:
    """Draw one item; cheaper than `Random.choice`, and the same in every version of Python."""
    return items[int(rng.random() * len(items))]


def number_of(*parts: object) -> int:
    """Hash parts to a number of 64 bits, the same in every process."""
    text = "\x1f".join(map(str, parts))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest())
