"""Intake: a request's bytes to routed items. Everything that can be refused without a rank is refused here.

Pure computation on one request, so it runs in the text threads, never on the loop.
"""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, assert_never

import msgspec

from dsparkd.config import LimitsConfig
from dsparkd.errors import RequestError
from dsparkd.grammar.key import read_json
from dsparkd.grammar.spec import SOURCES, Constraint, ConstraintOptions, parse_constraint
from dsparkd.http import openai
from dsparkd.http.body import decode, parse_object
from dsparkd.messages import SamplingParams, TokenizedRequest
from dsparkd.routing.router import MAX_PROMPT_LOGPROBS, Item
from dsparkd.text.encoding import Chat, ChatEncoding, Effort, PastCall, Prompt, Tool, Turn
from dsparkd.text.tokenizer import Tokenizer

COMPLETION_MAX_TOKENS = 16
# Default output limits of the model authors' conversion library: chat, thinking, thinking with max effort.
CHAT_MAX_TOKENS, THINKING_MAX_TOKENS, MAX_EFFORT_MAX_TOKENS = 8192, 65536, 131072
# 53 bits, because a client that reads JSON numbers as doubles must be able to send a drawn seed back.
DRAWN_SEED_BITS = 53
# Log-probabilities that a whole answer may hold, alternatives included: each takes 400 bytes until the last token is
# there, and 0.2 us of Python's lock to write. Beyond some seconds of that the ranks give this process up.
MAX_ANSWER_LOGPROBS = 4_000_000
# Prompt tokens of one API request, each choice's counted: up to 5 bytes each in a frame, and a frame has 256 MiB.
MAX_BATCH_TOKENS = 32_000_000

_EFFORTS: dict[str, Effort] = {
    "minimal": "low",
    "low": "low",
    "medium": "high",
    "high": "high",
    "xhigh": "xhigh",
    "max": "max",
}


@dataclass(frozen=True, slots=True)
class Envelope:
    """What is known of a request before its body is understood. received_ns: CLOCK_MONOTONIC."""

    request_id: str
    has_header_id: bool
    received_ns: int


@dataclass(frozen=True, slots=True)
class Work:
    """A validated request. Item `i` is choice `i % n` of prompt `i // n`."""

    request_id: str
    items: tuple[Item, ...]
    n: int
    stream: bool
    include_usage: bool
    constraint: Constraint | None = None
    grammar_param: str | None = None  # where the body asks for it


@dataclass(frozen=True, slots=True)
class ChatWork:
    """A chat. parse_calls: whether markup in the answer is a call of a declared tool."""

    work: Work
    prompt: Prompt
    parse_calls: bool


@dataclass(frozen=True, slots=True)
class CompletionWork:
    """Completions. echoes: the text of each prompt when it is to be given back."""

    work: Work
    echoes: tuple[str, ...] | None


class ChatFields(Protocol):
    """What decides a chat's prompt, in the bodies of chat and of /tokenize."""

    @property
    def tools(self) -> list[openai.ToolDefinition] | None: ...
    @property
    def tool_choice(self) -> str | openai.ToolChoice | None: ...
    @property
    def response_format(self) -> openai.JsonObject | None: ...
    @property
    def thinking(self) -> bool | openai.Thinking | None: ...
    @property
    def chat_template_kwargs(self) -> openai.TemplateFields | None: ...
    @property
    def reasoning_effort(self) -> str | None: ...


class Intake:
    """Immutable, so any thread may use it.

    grammars: how constraints are read; None where grammars are off. clock: CLOCK_MONOTONIC nanoseconds. draw_seed: a
    seed for a request that names none.
    """

    def __init__(
        self,
        model: str,
        limits: LimitsConfig,
        max_context_tokens: int,
        tokenizer: Tokenizer,
        encoding: ChatEncoding,
        *,
        grammars: ConstraintOptions | None = None,
        clock: Callable[[], int],
        draw_seed: Callable[[], int] = lambda: secrets.randbits(DRAWN_SEED_BITS),
    ) -> None:
        self.model = model
        self.max_context_tokens = max_context_tokens
        self.tokenizer = tokenizer
        self.encoding = encoding
        self._limits = limits
        self._grammars = grammars
        self._clock = clock
        self._draw_seed = draw_seed

    def chat(self, raw: bytes, envelope: Envelope) -> ChatWork:
        """Read a body of /v1/chat/completions. Raises RequestError."""
        value = parse_object(raw)
        openai.refuse_unsupported(value)
        constraint = self._constraint(value)
        body = decode(value, openai.ChatRequest)
        self.require_model(body.model)
        n = self._require_batch_size(1, body.n or 1)
        if body.top_logprobs is not None and not body.logprobs:
            raise RequestError("top_logprobs needs logprobs: true", param="top_logprobs")
        chat = chat_of(body.messages, body)
        rendered = self.encoding.render(chat)
        encoded_ns = self._clock()
        self._require_short_text(rendered.text, "messages")
        prompt = self.encoding.tokenize(rendered)
        max_tokens = _one_of("max_completion_tokens", body.max_completion_tokens, "max_tokens", body.max_tokens)
        sampling = self._sampling(
            body,
            num_prompt_tokens=len(prompt.ids),
            max_tokens=max_tokens or _default_max_tokens(chat),
            param="messages",
            top_logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        )
        work = self._work(
            body,
            envelope,
            [prompt.ids],
            [sampling],
            [body.routed_dp_rank],
            n,
            encoded_ns,
            starts_in_reasoning=prompt.starts_in_reasoning,
        )
        work = dataclasses.replace(work, constraint=constraint, grammar_param=_grammar_param(value))
        return ChatWork(work, prompt, parse_calls=bool(chat.tools))

    def completion(self, raw: bytes, envelope: Envelope) -> CompletionWork:
        """Read a body of /v1/completions. Raises RequestError."""
        value = parse_object(raw)
        openai.refuse_unsupported(value)
        # Fields of a chat are left to the next line, which knows none of them.
        constraint = self._constraint({name: value[name] for name in value if name not in openai.TOOL_FIELDS})
        body = decode(value, openai.CompletionRequest)
        self.require_model(body.model)
        prompts = prompts_of(body.prompt)
        n = self._require_batch_size(len(prompts), body.n or 1)
        ranks = _ranks(body, len(prompts))
        encoded_ns = self._clock()
        all_ids: list[list[int]] = []
        samplings: list[SamplingParams] = []
        is_batch = not isinstance(body.prompt, str) and not _is_id_list(body.prompt)
        for index, prompt in enumerate(prompts):
            param = f"prompt[{index}]" if is_batch else "prompt"
            ids = self._prompt_ids(prompt, param, add_bos=body.add_special_tokens is not False)
            all_ids.append(ids)
            samplings.append(
                self._sampling(
                    body,
                    num_prompt_tokens=len(ids),
                    max_tokens=body.max_tokens or COMPLETION_MAX_TOKENS,
                    param=param,
                    top_logprobs=body.logprobs,
                    prompt_logprobs=bool(body.echo) and body.logprobs is not None,
                )
            )
        if body.echo and body.logprobs is not None:
            _require_few_prompt_logprobs(sum(map(len, all_ids)) * n * (1 + body.logprobs))
        work = self._work(body, envelope, all_ids, samplings, ranks, n, encoded_ns)
        work = dataclasses.replace(work, constraint=constraint, grammar_param=_grammar_param(value))
        if not body.echo:
            return CompletionWork(work, None)
        hide_special = body.skip_special_tokens is not False
        echoes = tuple(
            prompt if isinstance(prompt, str) else self.text_of(prompt, hide_special=hide_special) for prompt in prompts
        )
        return CompletionWork(work, echoes)

    def tokenize(self, raw: bytes) -> list[int]:
        """Read a body of /tokenize and answer its ids. Raises RequestError."""
        body = decode(parse_object(raw), openai.TokenizeRequest)
        if body.model is not None:
            self.require_model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise RequestError("send exactly one of prompt and messages", param="prompt")
        if body.messages is not None:
            rendered = self.encoding.render(chat_of(body.messages, body))
            self._require_short_text(rendered.text, "messages")
            return self.encoding.tokenize(rendered).ids
        assert body.prompt is not None
        self._require_short_text(body.prompt, "prompt")
        return self.encoding.encode_text(body.prompt, add_bos=body.add_special_tokens is not False)

    def detokenize(self, raw: bytes) -> str:
        """Read a body of /detokenize and answer its text. Raises RequestError."""
        body = decode(parse_object(raw), openai.DetokenizeRequest)
        if body.model is not None:
            self.require_model(body.model)
        self._require_vocabulary(body.tokens, "tokens")
        return self.text_of(body.tokens, hide_special=bool(body.skip_special_tokens))

    def text_of(self, ids: Sequence[int], *, hide_special: bool) -> str:
        """Text of ids; bytes that are no UTF-8 become U+FFFD."""
        shown = (token_id for token_id in ids if not (hide_special and self.tokenizer.is_special(token_id)))
        return b"".join(map(self.tokenizer.token_bytes, shown)).decode(errors="replace")

    def _constraint(self, value: dict[str, object]) -> Constraint | None:
        """What the answer must match; None: anything. Raises RequestError."""
        if self._grammars is None:
            openai.refuse_grammars(value)
            return None
        return parse_constraint(value, self._grammars)

    def require_model(self, model: str) -> None:
        """Raise RequestError 404 for a model that is not served."""
        if model != self.model:
            raise RequestError(
                f"the model {model[:200]!r} is not served here; use {self.model!r}",
                status=404,
                code="model_not_found",
                param="model",
            )

    def _require_batch_size(self, num_prompts: int, n: int) -> int:
        if num_prompts * n > self._limits.max_batch_items:
            raise RequestError(
                f"{num_prompts} prompts with n = {n} make {num_prompts * n} items; send at most "
                f"{self._limits.max_batch_items} (limits.max_batch_items)",
                code="batch_too_large",
                param="n" if num_prompts == 1 else "prompt",
            )
        return n

    def _require_short_text(self, text: str, param: str) -> None:
        """Refuse before tokenizing what cannot fit however its tokens fall; the tokenizer would work on it for long."""
        fewest = len(text.encode()) // max(1, self.tokenizer.max_piece_bytes)
        if fewest >= self.max_context_tokens:
            raise self._too_long(f"at least {fewest}", param)

    def _too_long(self, tokens: str, param: str) -> RequestError:
        return RequestError(
            f"the prompt has {tokens} tokens, but prompt and answer together must fit into {self.max_context_tokens} "
            "(engine.max_context_tokens); shorten the prompt",
            code="context_length_exceeded",
            param=param,
        )

    def _require_vocabulary(self, ids: Sequence[int], param: str) -> None:
        for index, token_id in enumerate(ids):
            if not 0 <= token_id < self.tokenizer.vocab_size:
                raise RequestError(
                    f"{param}[{index}] = {token_id} is no token id; use 0..{self.tokenizer.vocab_size - 1}",
                    code="invalid_token_id",
                    param=f"{param}[{index}]",
                )

    def _prompt_ids(self, prompt: str | list[int], param: str, *, add_bos: bool) -> list[int]:
        if isinstance(prompt, str):
            self._require_short_text(prompt, param)
            return self.encoding.encode_text(prompt, add_bos=add_bos)
        self._require_vocabulary(prompt, param)
        return prompt

    def _sampling(
        self,
        body: openai.Generation,
        *,
        num_prompt_tokens: int,
        max_tokens: int,
        param: str,
        top_logprobs: int | None,
        prompt_logprobs: bool = False,
    ) -> SamplingParams:
        """Fill in defaults. max_tokens is lowered to what the context leaves; the answer then ends with "length"."""
        room = self.max_context_tokens - num_prompt_tokens
        if room < 1:
            raise self._too_long(str(num_prompt_tokens), param)
        max_tokens = min(max_tokens, room)
        min_tokens = body.min_tokens or 0
        if min_tokens > max_tokens:
            raise RequestError(
                f"min_tokens = {min_tokens} exceeds the {max_tokens} tokens that the answer may have; lower it",
                param="min_tokens",
            )
        stop = [body.stop] if isinstance(body.stop, str) else body.stop or []
        self._require_vocabulary(body.stop_token_ids or [], "stop_token_ids")
        return SamplingParams(
            max_tokens=max_tokens,
            seed=body.seed if body.seed is not None else self._draw_seed(),
            temperature=_or(body.temperature, 1.0) + 0.0,  # + 0.0 turns -0.0 into 0.0
            top_p=_or(body.top_p, 1.0),
            top_k=max(0, body.top_k or 0),
            min_p=_or(body.min_p, 0.0) + 0.0,
            repetition_penalty=_or(body.repetition_penalty, 1.0),
            presence_penalty=_or(body.presence_penalty, 0.0) + 0.0,
            frequency_penalty=_or(body.frequency_penalty, 0.0) + 0.0,
            logit_bias=self._logit_bias(body.logit_bias or {}),
            min_tokens=min_tokens,
            stop_ids=tuple(dict.fromkeys(body.stop_token_ids or ())),
            stop_strings=tuple(dict.fromkeys(stop)),
            include_stop=bool(body.include_stop_str_in_output),
            ignore_eos=bool(body.ignore_eos),
            top_logprobs=top_logprobs,
            prompt_logprobs=prompt_logprobs,
        )

    def _logit_bias(self, members: dict[str, float]) -> tuple[tuple[int, float], ...]:
        biases = []
        for name, bias in members.items():
            is_number = name.isascii() and name.isdecimal() and len(name) <= 10 and str(int(name)) == name
            if not is_number or int(name) >= self.tokenizer.vocab_size:
                raise RequestError(
                    f"logit_bias: {name[:40]!r} is no token id; use 0..{self.tokenizer.vocab_size - 1}, as text",
                    code="invalid_token_id",
                    param="logit_bias",
                )
            biases.append((int(name), bias))
        return tuple(sorted(biases))

    def _work(
        self,
        body: openai.Generation,
        envelope: Envelope,
        prompts: Sequence[Sequence[int]],
        samplings: Sequence[SamplingParams],
        ranks: Sequence[int | None],
        n: int,
        encoded_ns: int,
        starts_in_reasoning: bool = False,
    ) -> Work:
        _require_few_tokens(sum(map(len, prompts)) * n)
        if not body.stream:
            _require_few_answer_logprobs(sum(map(_num_answer_logprobs, samplings)) * n)
        request_id = _request_id(body, envelope)
        tokenized_ns = self._clock()
        count = len(prompts) * n
        items = []
        for index in range(count):
            prompt_index, choice = divmod(index, n)
            request = TokenizedRequest(
                request_id=request_id if count == 1 else f"{request_id}-{index}",
                prompt_ids=tuple(prompts[prompt_index]),
                sampling=samplings[prompt_index] if n == 1 else _for_choice(samplings[prompt_index], choice),
                skip_special_tokens=body.skip_special_tokens is not False,
                starts_in_reasoning=starts_in_reasoning,
                received_ns=envelope.received_ns,
                encoded_ns=encoded_ns,
                tokenized_ns=tokenized_ns,
                dispatched_ns=0,
            )
            items.append(Item(request, ranks[prompt_index]))
        options = body.stream_options
        if options is not None and not body.stream:
            raise RequestError("stream_options needs stream: true", param="stream_options")
        include_usage = options is not None and options.include_usage
        return Work(request_id, tuple(items), n, bool(body.stream), include_usage)


def _require_few_tokens(count: int) -> None:
    if count > MAX_BATCH_TOKENS:
        raise RequestError(
            f"the prompts of all choices have {count} tokens; send at most {MAX_BATCH_TOKENS} in one request",
            code="batch_too_large",
            param="n",
        )


def _require_few_prompt_logprobs(count: int) -> None:
    if count > MAX_PROMPT_LOGPROBS:
        raise RequestError(
            f"echo with logprobs makes {count} log-probabilities of prompt tokens and alternatives in one answer; "
            f"at most {MAX_PROMPT_LOGPROBS} fit: send fewer prompts, a smaller n or fewer logprobs",
            code="too_many_logprobs",
            param="logprobs",
        )


def _num_answer_logprobs(sampling: SamplingParams) -> int:
    return 0 if sampling.top_logprobs is None else sampling.max_tokens * (1 + sampling.top_logprobs)


def _require_few_answer_logprobs(count: int) -> None:
    if count > MAX_ANSWER_LOGPROBS:
        raise RequestError(
            f"the answer may have {count} log-probabilities of tokens and alternatives; a whole one holds at most "
            f"{MAX_ANSWER_LOGPROBS}: stream it, or send a smaller max_tokens, a smaller n or fewer logprobs",
            code="too_many_logprobs",
            param="logprobs",
        )


def _grammar_param(value: dict[str, object]) -> str | None:
    """JSON pointer of the field that asks for the grammar: of what the compiler refuses, it names no smaller place."""
    for field in SOURCES:
        outer, _, inner = field.partition(".")
        found = value.get(outer)
        if inner:
            found = found.get(inner) if isinstance(found, dict) else None
        if found is not None:
            return "/" + field.replace(".", "/")
    response_format = value.get("response_format")
    if isinstance(response_format, dict) and response_format.get("type") != "text":
        return "/response_format"
    return "/tools" if value.get("tools") else None


def _or(value: float | None, default: float) -> float:
    return default if value is None else value


def _for_choice(sampling: SamplingParams, choice: int) -> SamplingParams:
    return msgspec.structs.replace(sampling, choice=choice)


def _one_of(first_name: str, first: int | None, second_name: str, second: int | None) -> int | None:
    """Two spellings of one field: whichever is given, if they agree."""
    if first is not None and second is not None and first != second:
        raise RequestError(f"{first_name} and {second_name} differ; send one", param=first_name)
    return first if first is not None else second


def _request_id(body: openai.Generation, envelope: Envelope) -> str:
    if body.request_id is None:
        return envelope.request_id
    if envelope.has_header_id and envelope.request_id != body.request_id:
        raise RequestError("request_id and the X-Request-Id header differ; send one", param="request_id")
    return body.request_id


def prompts_of(prompt: str | list[object]) -> list[str | list[int]]:
    """Read text, a list of texts, ids, or a list of id lists. Raises RequestError naming the bad item."""
    if isinstance(prompt, str):
        items: list[object] = [prompt]
    elif _is_id_list(prompt):
        stray = next((index for index, item in enumerate(prompt) if not _is_int(item)), None)
        if stray is not None:
            param = f"prompt[{stray}]"
            raise RequestError(f"{param}: expected a token id, as the first one is", param=param)
        items = [prompt]
    else:
        items = prompt
    if not items:
        raise RequestError("the prompt is empty; send text or token ids", code="empty_prompt", param="prompt")
    kind = type(items[0])
    prompts: list[str | list[int]] = []
    for index, item in enumerate(items):
        param = "prompt" if isinstance(prompt, str) else f"prompt[{index}]"
        if item == "" or item == []:
            raise RequestError(f"{param} is empty; send text or token ids", code="empty_prompt", param=param)
        if type(item) is not kind:
            raise RequestError(f"{param}: a batch is all texts or all id lists", param=param)
        if isinstance(item, str):
            prompts.append(item)
        elif isinstance(item, list) and all(_is_int(token_id) for token_id in item):
            prompts.append([int(token_id) for token_id in item])
        else:
            raise RequestError(f"{param}: expected text or a list of token ids", param=param)
    return prompts


def _is_id_list(prompt: str | list[object]) -> bool:
    """Whether the prompt is one list of ids, and not a batch."""
    return isinstance(prompt, list) and bool(prompt) and _is_int(prompt[0])


def _is_int(value: object) -> bool:
    return type(value) is int  # not isinstance: a boolean is no id


def _ranks(body: openai.CompletionRequest, num_prompts: int) -> list[int | None]:
    """Rank of each prompt: the batch's counts for all of them, an item's own must not contradict it."""
    if body.routed_dp_ranks is None:
        return [body.routed_dp_rank] * num_prompts
    if len(body.routed_dp_ranks) != num_prompts:
        raise RequestError(
            f"routed_dp_ranks has {len(body.routed_dp_ranks)} entries for {num_prompts} prompts; send one each",
            param="routed_dp_ranks",
        )
    if body.routed_dp_rank is None:
        return list(body.routed_dp_ranks)
    for index, rank in enumerate(body.routed_dp_ranks):
        if rank is not None and rank != body.routed_dp_rank:
            raise RequestError(
                f"routed_dp_ranks[{index}] = {rank} contradicts routed_dp_rank = {body.routed_dp_rank}; send one",
                code="conflicting_dp_rank",
                param=f"routed_dp_ranks[{index}]",
            )
    return [body.routed_dp_rank] * num_prompts


def chat_of(messages: Sequence[openai.ChatMessage], fields: ChatFields) -> Chat:
    """Turn a body's messages and switches into a conversation. Raises RequestError."""
    thinking = _thinking(fields)
    tools = fields.tools or [] if fields.tool_choice != "none" else []
    for index, message in enumerate(messages[:-1]):
        if isinstance(message, openai.AssistantMessage) and message.prefix:
            param = f"messages[{index}].prefix"
            raise RequestError(f"{param}: only the last message may be continued", param=param)
    return Chat(
        turns=[_turn(message) for message in messages],
        tools=[Tool(tool.function.name, tool.function.description, tool.function.parameters) for tool in tools],
        thinking=thinking,
        effort=_EFFORTS.get(fields.reasoning_effort or ""),
        response_schema=_response_schema(fields.response_format),
    )


def _response_schema(response_format: openai.JsonObject | None) -> object | None:
    """The schema that the prompt tells of: that of `response_format`, which belongs to the model's own format."""
    inner = (response_format or {}).get("json_schema")
    schema = inner.get("schema") if isinstance(inner, dict) else None
    return read_json(schema, "/response_format/json_schema/schema") if isinstance(schema, str) else schema


def _thinking(fields: ChatFields) -> bool:
    """Whether the model reasons: on unless a client says otherwise, in any of the usual ways."""
    template = fields.chat_template_kwargs or openai.TemplateFields()
    switch = fields.thinking
    said = [
        switch.type == "enabled" if isinstance(switch, openai.Thinking) else switch,
        template.thinking,
        template.enable_thinking,
    ]
    given = {value for value in said if value is not None}
    if len(given) > 1:
        raise RequestError("thinking is switched on and off in one request; send one", param="thinking")
    return given.pop() if given else fields.reasoning_effort != "none"


def _turn(message: openai.ChatMessage) -> Turn:
    match message:
        case openai.SystemMessage() | openai.DeveloperMessage():
            return Turn("system", _text(message.content))
        case openai.UserMessage():
            return Turn("user", _text(message.content))
        case openai.LatestReminderMessage():
            return Turn("latest_reminder", _text(message.content))
        case openai.ToolMessage():
            return Turn("tool", _text(message.content), call_id=message.tool_call_id)
        case openai.AssistantMessage():
            calls = message.tool_calls or []
            return Turn(
                "assistant",
                _text(message.content or ""),
                reasoning=message.reasoning_content,
                calls=tuple(PastCall(call.id, call.function.name, call.function.arguments) for call in calls),
                is_prefix=message.prefix,
            )
        case _:
            assert_never(message)


def _text(content: openai.Content) -> str:
    """Parts of one message are joined by an empty line, as the model authors' conversion library does."""
    return content if isinstance(content, str) else "\n\n".join(part.text for part in content)


def _default_max_tokens(chat: Chat) -> int:
    if not chat.thinking:
        return CHAT_MAX_TOKENS
    return MAX_EFFORT_MAX_TOKENS if chat.effort == "max" else THINKING_MAX_TOKENS
