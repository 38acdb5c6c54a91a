"""The questions that the shipped checkpoint must answer, how an answer counts, and the table of a whole exam.

Questions are the tasks' test split, which no training example shares a template-and-values combination with. Answers
are compared as `tools.train_nano.tasks.score` reads them: values for values, parsed JSON, the call that was made.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from dsparkd.text.encoding import Chat, ChatEncoding, Prompt, Turn
from dsparkd.text.tokenizer import Tokenizer
from tools.train_nano.tasks import TASKS, draw
from tools.train_nano.tasks.example import Answer, Example, Task
from tools.train_nano.tasks.score import result

Json = dict[str, object]

MAX_TOKENS = 1024  # of one answer: several times the longest right one, so only a runaway is cut
RECALL_TOKENS = (1_000, 12_288)  # of a prompt


@dataclass(frozen=True, slots=True)
class Requirement:
    """How many questions of a task are asked in the smaller and in the full exam, and the share to be right."""

    subset: int
    full: int
    needed: float


REQUIREMENTS: dict[Task, Requirement] = {
    "arithmetic": Requirement(200, 1319, 0.96),
    "extraction": Requirement(200, 640, 0.97),
    "recall": Requirement(64, 512, 0.98),
    "copy": Requirement(200, 500, 0.99),
    "tools": Requirement(200, 256, 0.95),
    "chat": Requirement(200, 256, 0.95),
}
assert set(REQUIREMENTS) == set(TASKS)


@dataclass(frozen=True, slots=True)
class Question:
    """One example of the test split. prompt: the ids that the server must make of it."""

    index: int
    example: Example
    prompt: Prompt


@dataclass(frozen=True, slots=True)
class Reply:
    """What came back. error: why nothing did."""

    answer: Answer
    finish: str = ""
    prompt_tokens: int = 0
    output_tokens: int = 0
    error: str = ""


@dataclass(frozen=True, slots=True)
class Figures:
    """One task's row of the table. Rates are over the wall time in which the task's questions were answered."""

    task: str
    asked: int
    right: int
    needed: float
    cut: int
    errors: int
    prompt_tokens: int
    output_tokens: int
    longest_prompt: int
    seconds: float

    @property
    def ok(self) -> bool:
        """Whether enough were right, none was cut by length and none failed."""
        return self.asked > 0 and self.right >= self.needed * self.asked and not self.cut and not self.errors

    def row(self) -> str:
        """One line under HEADER."""
        mean = self.output_tokens / max(1, self.asked)
        return (
            f"{self.task:11} {self.asked:5} {self.right:5} {self.right / max(1, self.asked):7.2%} {self.needed:6.0%} "
            f"{self.cut:4} {self.errors:6} {mean:11.1f} {self.output_tokens / self.seconds:9.0f} "
            f"{self.prompt_tokens / self.seconds:9.0f} {self.longest_prompt:8} {self.seconds:7.1f}  "
            f"{'ok' if self.ok else 'FAIL'}"
        )


HEADER = (
    "task            n exact   share needed  cut errors mean output  output/s  prompt/s  longest       s\n"
    "                                                       tokens    tokens    tokens   prompt"
)


def load_encoding(checkpoint: Path) -> ChatEncoding:
    """Return the chat encoding of a checkpoint, as a server with the default effort has it."""
    return ChatEncoding(Tokenizer.load(checkpoint), "low")


def questions(task: Task, count: int, encoding: ChatEncoding) -> list[Question]:
    """Draw the first `count` questions of a task; recall prompts outside of RECALL_TOKENS are passed over."""
    found: list[Question] = []
    index = 0
    while len(found) < count:
        example = draw(task, "test", index)
        prompt = encoding.tokenize(encoding.render(example.chat))
        if task != "recall" or RECALL_TOKENS[0] <= len(prompt.ids) <= RECALL_TOKENS[1]:
            found.append(Question(index, example, prompt))
        index += 1
    return found


def is_right(question: Question, reply: Reply) -> bool:
    """Whether the reply ended by itself and holds what was expected."""
    return not reply.error and reply.finish != "length" and got(question, reply) == question.example.expected


def got(question: Question, reply: Reply) -> str | None:
    """Return what the task's comparison finds in the reply, None when it finds nothing to compare."""
    return result(question.example, reply.answer)


def figures(task: Task, asked: Sequence[Question], replies: Sequence[Reply], seconds: float) -> Figures:
    """Count one task's replies."""
    return Figures(
        task=task,
        asked=len(asked),
        right=sum(is_right(question, reply) for question, reply in zip(asked, replies, strict=True)),
        needed=REQUIREMENTS[task].needed,
        cut=sum(reply.finish == "length" for reply in replies),
        errors=sum(bool(reply.error) for reply in replies),
        prompt_tokens=sum(reply.prompt_tokens for reply in replies),
        output_tokens=sum(reply.output_tokens for reply in replies),
        longest_prompt=max((reply.prompt_tokens for reply in replies), default=0),
        seconds=seconds,
    )


def failures(asked: Sequence[Question], replies: Sequence[Reply]) -> list[Json]:
    """Describe every wrong reply: which question, what was expected, what was found, and the reply itself."""
    return [
        {
            "task": question.example.task,
            "index": question.index,
            "expected": question.example.expected,
            "got": None if reply.error else got(question, reply),
            "thinking": question.example.chat.thinking,
            "prompt_tokens": len(question.prompt.ids),
            "finish": reply.finish,
            "error": reply.error,
            "reasoning": reply.answer.reasoning,
            "content": reply.answer.content,
            "calls": [{"name": call.name, "arguments": call.arguments} for call in reply.answer.calls],
        }
        for question, reply in zip(asked, replies, strict=True)
        if not is_right(question, reply)
    ]


def without_schema(chat: Chat, encoding: ChatEncoding) -> Chat:
    """Return the same prompt with its response schema spelled out in the system turn.

    A request that names a schema would be held to it by a grammar, and what is asked is what the model does alone.
    Raises ValueError when the two would not be rendered alike.
    """
    if chat.response_schema is None:
        return chat
    whole = encoding.render(chat)
    plain = encoding.render(replace(chat, response_schema=None))
    system = chat.turns[0].content if chat.turns[0].role == "system" else ""
    turns = chat.turns[1:] if chat.turns[0].role == "system" else chat.turns
    # The schema's text is what the prompt has more, and it stands behind the system text.
    start = _common_prefix(whole.text, plain.text)
    added = whole.text[start : start + len(whole.text) - len(plain.text)]
    spelled = replace(chat, turns=[Turn("system", system + added), *turns], response_schema=None)
    if encoding.render(spelled) != whole:
        raise ValueError("the response schema cannot be spelled out in the system turn")
    return spelled


def _common_prefix(one: str, other: str) -> int:
    for index, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return index
    return min(len(one), len(other))


def chat_body(chat: Chat, model: str) -> Json:
    """Return a greedy request's body for /v1/chat/completions."""
    body: Json = {
        "model": model,
        "messages": [_message(turn) for turn in chat.turns],
        "thinking": {"type": "enabled" if chat.thinking else "disabled"},
        "temperature": 0,
        "max_tokens": MAX_TOKENS,
    }
    if chat.effort is not None and chat.thinking:
        body["reasoning_effort"] = chat.effort
    if chat.tools:
        body["tools"] = [
            {
                "type": "function",
                "function": {"name": tool.name, "description": tool.description, "parameters": tool.parameters},
            }
            for tool in chat.tools
        ]
    return body


def _message(turn: Turn) -> Json:
    message: Json = {"role": turn.role, "content": turn.content}
    if turn.reasoning is not None:
        message["reasoning_content"] = turn.reasoning
    if turn.calls:
        message["tool_calls"] = [
            {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in turn.calls
        ]
    if turn.call_id is not None:
        message["tool_call_id"] = turn.call_id
    return message


def report(rows: Sequence[Figures], facts: Json) -> str:
    """Return the exam as one JSON object."""
    tasks = [asdict(row) | {"ok": row.ok} for row in rows]
    return json.dumps({"ok": all(row.ok for row in rows)} | facts | {"tasks": tasks})
