"""Answers: text deltas to the public bodies of chat and completions, streamed or whole.

One object a request. `chunks` gives what a stream sends for the deltas of one wake-up, `body` what a whole answer says
at the end; both rest on the same state per choice.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import dsparkd
from dsparkd.errors import InvariantError, RequestError
from dsparkd.http.intake import ChatWork, CompletionWork, Work
from dsparkd.messages import Finish, TextDelta, TextLogprob
from dsparkd.text.encoding import ChatEncoding
from dsparkd.text.output import OutputDelta, OutputParser
from dsparkd.text.tokenizer import Tokenizer

Json = dict[str, object]
Arrived = Sequence[tuple[int, TextDelta]]
FINGERPRINT = f"dsparkd-{dsparkd.__version__}"
LOWEST_LOGPROB = -9999.0  # JSON has no -Infinity; other servers use this number


@dataclass(frozen=True, slots=True)
class Piece:
    """Everything new of one choice since the last wake-up."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TextLogprob, ...]
    prompt_logprobs: tuple[TextLogprob, ...]
    finish: Finish | None


def pieces_of(arrived: Arrived) -> list[Piece]:
    """Join the deltas of each choice. Raises RequestError for one that failed."""
    by_index: dict[int, list[TextDelta]] = {}
    for index, delta in arrived:
        by_index.setdefault(index, []).append(delta)
    return [_joined(index, deltas) for index, deltas in by_index.items()]


def _joined(index: int, deltas: Sequence[TextDelta]) -> Piece:
    finish = deltas[-1].finish
    if finish is not None and finish.reason == "error":
        message = f"the generation failed: {finish.error or 'no reason given'}"
        if finish.code is not None:
            raise RequestError(message, status=finish.status, code=finish.code)
        raise RequestError(message, status=500, code="generation_failed")
    return Piece(
        index,
        "".join(delta.text for delta in deltas),
        tuple(token_id for delta in deltas for token_id in delta.token_ids),
        tuple(entry for delta in deltas for entry in delta.logprobs or ()),
        tuple(entry for delta in deltas for entry in delta.prompt_logprobs or ()),
        finish,
    )


def _stop_reason(work: Work, piece: Piece) -> int | str | None:
    """The stop string or id of the client that ended a text; the model's own end is none."""
    matched = piece.finish.matched if piece.finish is not None else None
    if isinstance(matched, int) and matched not in work.items[piece.index].request.sampling.stop_ids:
        return None
    return matched


class Usage:
    """Token counts of a request; a prompt counts once, however many choices it has."""

    def __init__(self, n: int) -> None:
        self.completion_tokens = 0
        self.reasoning_tokens = 0
        self._n = n
        self._prompts: dict[int, tuple[int, int]] = {}

    def add(self, index: int, finish: Finish, reasoning_tokens: int = 0) -> None:
        """Count an ended choice. Its prompt's cached tokens are those of the choice that found fewest."""
        self.completion_tokens += finish.output_tokens
        self.reasoning_tokens += min(reasoning_tokens, finish.output_tokens)
        cached = min(finish.cached_tokens, self._prompts.get(index // self._n, (0, finish.cached_tokens))[1])
        self._prompts[index // self._n] = (finish.prompt_tokens, cached)

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(prompt for prompt, _ in self._prompts.values())

    def body(self) -> Json:
        """The public object."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(cached for _, cached in self._prompts.values())},
            "completion_tokens_details": {"reasoning_tokens": self.reasoning_tokens},
        }


class Answers(Protocol):
    """What the generating endpoints need of either kind of answer."""

    usage: Usage

    def opening(self) -> list[Json]:
        """Chunks that a stream begins with."""
        ...

    def chunks(self, arrived: Arrived) -> list[Json]:
        """Chunks for what has arrived. Raises RequestError for a choice that failed."""
        ...

    def usage_chunk(self) -> Json:
        """The last chunk of a stream that was asked for usage."""
        ...

    def keep(self, arrived: Arrived) -> None:
        """Add to the whole answer. Raises RequestError for a choice that failed."""
        ...

    def body(self) -> Json:
        """The whole answer."""
        ...

    def finish_reasons(self) -> list[str | None]:
        """Of each choice, for the log."""
        ...


@dataclass(slots=True)
class _ChatChoice:
    parser: OutputParser
    seed: int
    reasoning: str = ""
    content: str = ""
    logprobs: list[Json] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class ChatAnswers:
    """Answers of /v1/chat/completions."""

    def __init__(self, chat: ChatWork, model: str, encoding: ChatEncoding) -> None:
        self.usage = Usage(chat.work.n)
        self._work = chat.work
        self._warnings = _warnings_of(chat.work)
        self._head = _head(f"chatcmpl-{chat.work.request_id}", model)
        self._choices = [
            _ChatChoice(
                encoding.parser(chat.prompt, parse_calls=chat.parse_calls, ends_by_id=chat.work.constraint is not None),
                item.request.sampling.seed,
            )
            for item in chat.work.items
        ]
        self._wants_logprobs = chat.work.items[0].request.sampling.top_logprobs is not None

    def opening(self) -> list[Json]:
        """The role comes first, once for each choice."""
        return [self._chunk(index, {"role": "assistant", "content": ""}, None) for index in range(len(self._choices))]

    def chunks(self, arrived: Arrived) -> list[Json]:
        """One chunk for each choice with something new, and one for its end."""
        chunks = []
        for piece in pieces_of(arrived):
            delta = self._take(piece)
            logprobs = self._logprobs(piece)
            if delta or (logprobs is not None and piece.logprobs):
                chunks.append(self._chunk(piece.index, _delta_body(delta), logprobs))
            if piece.finish is not None:
                chunks.append(self._chunk(piece.index, {}, None))
        return chunks

    def usage_chunk(self) -> Json:
        """Usage without choices, as the OpenAI API has it."""
        return {**self._head, "object": "chat.completion.chunk", "choices": [], "usage": self.usage.body()}

    def keep(self, arrived: Arrived) -> None:
        """Collect each choice."""
        for piece in pieces_of(arrived):
            choice = self._choices[piece.index]
            delta = self._take(piece)
            choice.reasoning += delta.reasoning
            choice.content += delta.content
            choice.logprobs += [_chat_logprob(entry) for entry in piece.logprobs]

    def body(self) -> Json:
        """The whole answer."""
        choices: list[Json] = [
            {
                "index": index,
                "message": _message_body(choice),
                "logprobs": {"content": choice.logprobs, "refusal": None} if self._wants_logprobs else None,
                "finish_reason": choice.finish_reason,
                "stop_reason": choice.stop_reason,
                "seed": choice.seed,
            }
            for index, choice in enumerate(self._choices)
        ]
        return _whole(self._head, "chat.completion", choices, self.usage, self._warnings)

    def finish_reasons(self) -> list[str | None]:
        """Of each choice."""
        return [choice.finish_reason for choice in self._choices]

    def _take(self, piece: Piece) -> OutputDelta:
        """Parse new text; at the end, give out what was held back and note how it ended."""
        choice = self._choices[piece.index]
        delta = choice.parser.feed(piece.text, piece.token_ids)
        finish = piece.finish
        if finish is None:
            return delta
        rest = choice.parser.finish(cut=finish.reason != "stop")
        called = choice.parser.called() and finish.reason != "abort"
        choice.finish_reason = "tool_calls" if called else finish.reason
        choice.stop_reason = _stop_reason(self._work, piece)
        self.usage.add(piece.index, finish, choice.parser.reasoning_tokens)
        return OutputDelta(delta.reasoning + rest.reasoning, delta.content + rest.content, delta.calls + rest.calls)

    def _logprobs(self, piece: Piece) -> Json | None:
        if not self._wants_logprobs:
            return None
        return {"content": [_chat_logprob(entry) for entry in piece.logprobs], "refusal": None}

    def _chunk(self, index: int, delta: Json, logprobs: Json | None) -> Json:
        choice = self._choices[index]
        body: Json = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": None}
        if not delta:
            body |= {
                "finish_reason": choice.finish_reason,
                "stop_reason": choice.stop_reason,
                "seed": choice.seed,
            }
        return _chunk(self._head, "chat.completion.chunk", body, self._work.include_usage, self._take_warnings())

    def _take_warnings(self) -> list[Json]:
        """They go with a stream's first chunk."""
        warnings, self._warnings = self._warnings, []
        return warnings


def _delta_body(delta: OutputDelta) -> Json:
    body: Json = {}
    if delta.reasoning:
        body["reasoning_content"] = delta.reasoning
    if delta.content or not delta:
        body["content"] = delta.content
    if delta.calls:
        body["tool_calls"] = [
            {"index": call.index, "function": {"arguments": call.arguments}}
            if call.name is None
            else {
                "index": call.index,
                "id": call.call_id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in delta.calls
        ]
    return body


def _message_body(choice: _ChatChoice) -> Json:
    calls = choice.parser.calls
    body: Json = {"role": "assistant", "content": choice.content if choice.content or not calls else None}
    if choice.reasoning:
        body["reasoning_content"] = choice.reasoning
    if calls:
        body["tool_calls"] = [
            {
                "id": call.call_id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments()},
            }
            for call in calls
        ]
    return body


def _chat_logprob(entry: TextLogprob) -> Json:
    return {
        "token": entry.token,
        "logprob": _finite(entry.logprob),
        "bytes": list(entry.raw),
        "top_logprobs": [
            {"token": token, "logprob": _finite(logprob), "bytes": list(raw)} for _, token, raw, logprob in entry.top
        ],
    }


@dataclass(slots=True)
class _TextChoice:
    seed: int
    text: str = ""
    num_chars: int = 0  # characters given out, as text_offset counts them
    num_prompt_entries: int = 0
    logprobs: list[tuple[TextLogprob, int]] = field(default_factory=list)  # with their offsets
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class CompletionAnswers:
    """Answers of /v1/completions."""

    def __init__(self, completion: CompletionWork, model: str, tokenizer: Tokenizer) -> None:
        self.usage = Usage(completion.work.n)
        self._work = completion.work
        self._warnings = _warnings_of(completion.work)
        self._echoes = completion.echoes
        self._head = _head(f"cmpl-{completion.work.request_id}", model)
        self._tokenizer = tokenizer
        self._choices = [_TextChoice(item.request.sampling.seed) for item in completion.work.items]
        first = completion.work.items[0].request.sampling
        self._wants_logprobs = first.top_logprobs is not None
        self._wants_prompt_logprobs = first.prompt_logprobs

    def opening(self) -> list[Json]:
        """The echoed prompts, unless they wait for their log-probabilities."""
        if self._echoes is None or self._wants_prompt_logprobs:
            return []
        return [self._chunk(index, self._echo(index), None) for index in range(len(self._choices))]

    def chunks(self, arrived: Arrived) -> list[Json]:
        """One chunk for each choice with something new, and one for its end."""
        chunks = []
        for piece in pieces_of(arrived):
            text, entries = self._take(piece)
            if text or entries:
                chunks.append(self._chunk(piece.index, text, _text_logprobs(entries) if self._wants_logprobs else None))
            if piece.finish is not None:
                chunks.append(self._chunk(piece.index, "", None, ended=True))
        return chunks

    def usage_chunk(self) -> Json:
        """Usage without choices, as the OpenAI API has it."""
        return {**self._head, "object": "text_completion", "choices": [], "usage": self.usage.body()}

    def keep(self, arrived: Arrived) -> None:
        """Collect each choice."""
        for piece in pieces_of(arrived):
            text, entries = self._take(piece)
            choice = self._choices[piece.index]
            choice.text += text
            choice.logprobs += entries

    def body(self) -> Json:
        """The whole answer."""
        choices: list[Json] = []
        for index, choice in enumerate(self._choices):
            text = choice.text
            if self._echoes is not None and not self._wants_prompt_logprobs:
                text = self._echo(index) + text
            choices.append(
                {
                    "index": index,
                    "text": text,
                    "logprobs": _text_logprobs(choice.logprobs) if self._wants_logprobs else None,
                    "finish_reason": choice.finish_reason,
                    "stop_reason": choice.stop_reason,
                    "seed": choice.seed,
                }
            )
        return _whole(self._head, "text_completion", choices, self.usage, self._warnings)

    def finish_reasons(self) -> list[str | None]:
        """Of each choice."""
        return [choice.finish_reason for choice in self._choices]

    def _echo(self, index: int) -> str:
        if self._echoes is None:
            raise InvariantError("no echo was asked for")
        return self._echoes[index // self._work.n]

    def _take(self, piece: Piece) -> tuple[str, list[tuple[TextLogprob, int]]]:
        """New text of a choice and its log-probabilities, each with its place in the text."""
        choice = self._choices[piece.index]
        entries: list[tuple[TextLogprob, int]] = []
        text = ""
        if self._wants_prompt_logprobs and piece.prompt_logprobs:
            text += self._take_prompt(piece, choice, entries)
        for entry in piece.logprobs:
            self._place(choice, entry, entries)
        text += piece.text
        if piece.finish is not None:
            choice.finish_reason = piece.finish.reason
            choice.stop_reason = _stop_reason(self._work, piece)
            self.usage.add(piece.index, piece.finish)
        return text, entries

    def _take_prompt(self, piece: Piece, choice: _TextChoice, entries: list[tuple[TextLogprob, int]]) -> str:
        """The prompt's entries; its text comes with the first of them. Nothing predicts the first token."""
        first = choice.num_prompt_entries == 0
        if first and piece.prompt_logprobs[0].logprob is not None:
            token_id = self._work.items[piece.index].request.prompt_ids[0]
            raw = self._tokenizer.token_bytes(token_id)
            self._place(choice, TextLogprob(token_id, raw.decode(errors="replace"), raw, None), entries)
        choice.num_prompt_entries += len(piece.prompt_logprobs)
        for entry in piece.prompt_logprobs:
            self._place(choice, entry, entries)
        return self._echo(piece.index) if first else ""

    def _place(self, choice: _TextChoice, entry: TextLogprob, entries: list[tuple[TextLogprob, int]]) -> None:
        entries.append((entry, choice.num_chars))
        if not self._tokenizer.is_special(entry.token_id):
            choice.num_chars += _num_characters(entry.raw)

    def _chunk(self, index: int, text: str, logprobs: Json | None, *, ended: bool = False) -> Json:
        choice = self._choices[index]
        body: Json = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": None}
        if ended:
            body |= {
                "finish_reason": choice.finish_reason,
                "stop_reason": choice.stop_reason,
                "seed": choice.seed,
            }
        return _chunk(self._head, "text_completion", body, self._work.include_usage, self._take_warnings())

    def _take_warnings(self) -> list[Json]:
        """They go with a stream's first chunk."""
        warnings, self._warnings = self._warnings, []
        return warnings


def _num_characters(raw: bytes) -> int:
    """Characters that begin in a token's bytes; one that is spread over tokens counts with the first of them."""
    return sum(byte & 0xC0 != 0x80 for byte in raw)


def _text_logprobs(entries: Sequence[tuple[TextLogprob, int]]) -> Json:
    tops: list[Json | None] = []
    for entry, _ in entries:
        top: Json = {token: _finite(logprob) for _, token, _, logprob in reversed(entry.top)}
        if entry.logprob is not None:
            top.setdefault(entry.token, _finite(entry.logprob))
        tops.append(top if entry.logprob is not None else None)
    return {
        "tokens": [entry.token for entry, _ in entries],
        "token_logprobs": [None if entry.logprob is None else _finite(entry.logprob) for entry, _ in entries],
        "top_logprobs": tops,
        "text_offset": [offset for _, offset in entries],
    }


def _finite(logprob: float | None) -> float:
    return LOWEST_LOGPROB if logprob is None else max(logprob, LOWEST_LOGPROB)


def _head(answer_id: str, model: str) -> Json:
    return {"id": answer_id, "created": int(time.time()), "model": model, "system_fingerprint": FINGERPRINT}


def _warnings_of(work: Work) -> list[Json]:
    """What of the request's schema is enforced in part."""
    found = work.constraint.warnings if work.constraint is not None else ()
    return [{"kind": warning.kind, "pointer": warning.pointer, "message": warning.message} for warning in found]


def _whole(head: Json, kind: str, choices: list[Json], usage: Usage, warnings: list[Json]) -> Json:
    body: Json = {**head, "object": kind, "choices": choices, "usage": usage.body()}
    return body | ({"warnings": warnings} if warnings else {})


def _chunk(head: Json, kind: str, choice: Json, include_usage: bool, warnings: list[Json]) -> Json:
    chunk: Json = {**head, "object": kind, "choices": [choice]}
    if include_usage:
        chunk["usage"] = None
    if warnings:
        chunk["warnings"] = warnings
    return chunk
