"""Gate `clients`: released clients work against a live server, and no generated request makes it answer 5xx.

    python -m tools.gates clients [--cases N] [--json]

The first server answers the openai SDK, litellm and plain httpx; the second has a short context, so that requests
generated from its own OpenAPI document (valid and broken ones) end quickly. After each: the scheduler is healthy, both
ranks answer, nothing is outstanding and no process was replaced.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import httpx
import openai
import requests
import schemathesis
from hypothesis import HealthCheck, given, seed, settings
from schemathesis import GenerationMode

from tools.harness import Server, ensure_checkpoint

FUZZ_CONTEXT_TOKENS = 96
CASE_TIMEOUT_S = 60
SHARES = {  # of all cases, by path; the rest goes to the endpoints without a body
    "/v1/chat/completions": 0.43,
    "/v1/completions": 0.36,
    "/tokenize": 0.11,
    "/detokenize": 0.08,
}
TOOL: Any = {
    "type": "function",
    "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}
USER: Any = [{"role": "user", "content": "Say something."}]
# The end token is passed over, so that an answer has as many tokens as were asked for, whatever the checkpoint says.
NO_THINKING: Any = {"thinking": {"type": "disabled"}, "ignore_eos": True}


@dataclass(frozen=True, slots=True)
class Line:
    """One check of the table."""

    check: str
    ok: bool
    seconds: float
    detail: str


def expect(truth: object, what: object) -> None:
    """Raise AssertionError unless truth; assert statements would vanish under -O."""
    if not truth:
        raise AssertionError(str(what))


class Clients:
    """Checks of released clients against one server."""

    def __init__(self, base_url: str, model: str) -> None:
        self._base_url = base_url
        self._model = model
        self._sdk = openai.OpenAI(base_url=f"{base_url}/v1", api_key="unused", max_retries=0)

    def checks(self) -> dict[str, Callable[[], str]]:
        """Name -> check; a check returns a detail for the table."""
        return {
            "openai: models": self.models,
            "openai: chat": self.chat,
            "openai: chat, reasoning": self.reasoning,
            "openai: chat, streamed": self.chat_streamed,
            "openai: chat, n = 3": self.choices,
            "openai: chat, logprobs": self.chat_logprobs,
            "openai: chat, stop": self.stop,
            "openai: chat, tools": self.tools,
            "openai: seed repeats": self.seed_repeats,
            "openai: batch of prompts": self.batch,
            "openai: completion, streamed": self.completion_streamed,
            "openai: completion, echo + logprobs": self.completion_logprobs,
            "openai: refusals": self.refusals,
            "openai: async, 16 at once": self.asynchronous,
            "openai: async, streamed": self.asynchronous_streamed,
            "litellm: chat": self.litellm_chat,
            "litellm: streamed": self.litellm_streamed,
            "httpx: server-sent events": self.plain_stream,
            "httpx: leaving aborts": self.plain_leave,
            "httpx: tokenize and back": self.plain_tokenize,
        }

    def models(self) -> str:
        """The list names the served model."""
        names = [model.id for model in self._sdk.models.list()]
        expect(names == [self._model], f"models {names}")
        return names[0]

    def _chat(self, **fields: Any) -> Any:
        fields = {"max_tokens": 8, "temperature": 0, "extra_body": NO_THINKING, "messages": USER, **fields}
        return self._sdk.chat.completions.create(model=self._model, **fields)

    def chat(self) -> str:
        """Text, reason, usage."""
        answer = self._chat()
        expect(answer.choices[0].message.content, "no content")
        expect(answer.choices[0].finish_reason == "length", answer.choices[0].finish_reason)
        expect(answer.usage.completion_tokens == 8, answer.usage)
        expect(answer.usage.prompt_tokens_details.cached_tokens >= 0, answer.usage)
        return f"{answer.usage.prompt_tokens} + {answer.usage.completion_tokens} tokens"

    def reasoning(self) -> str:
        """Thinking on: the text is in reasoning_content, and counted there."""
        answer = self._chat(extra_body={"thinking": {"type": "enabled"}, "ignore_eos": True}, reasoning_effort="high")
        message = answer.choices[0].message
        expect(message.model_extra.get("reasoning_content"), "no reasoning_content")
        counted = answer.usage.completion_tokens_details.reasoning_tokens
        expect(0 < counted <= answer.usage.completion_tokens, f"{counted} reasoning tokens")
        return f"{counted} reasoning tokens"

    def chat_streamed(self) -> str:
        """Deltas add up to the whole answer; usage comes last."""
        chunks = list(self._chat(stream=True, stream_options={"include_usage": True}))
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        whole = self._chat().choices[0].message.content
        expect(text == whole, f"{text!r} streamed, {whole!r} whole")
        expect(chunks[-1].usage.completion_tokens == 8, chunks[-1])
        return f"{len(chunks)} chunks"

    def choices(self) -> str:
        """Three different answers to one prompt."""
        answer = self._chat(n=3, temperature=2.0, seed=7)
        texts = {choice.message.content for choice in answer.choices}
        expect([choice.index for choice in answer.choices] == [0, 1, 2], "indices")
        expect(len(texts) == 3, f"{len(texts)} different texts")
        expect(answer.usage.completion_tokens == 24, answer.usage)
        return "3 different texts"

    def chat_logprobs(self) -> str:
        """One entry a token; greedy takes the most likely one."""
        content = self._chat(logprobs=True, top_logprobs=3).choices[0].logprobs.content
        expect(len(content) == 8, f"{len(content)} entries")
        for entry in content:
            expect(len(entry.top_logprobs) == 3, "alternatives")
            expect(entry.logprob == max(top.logprob for top in entry.top_logprobs), "greedy is not the best")
        return "8 entries of 3"

    def stop(self) -> str:
        """The text ends before the stop string."""
        whole = self._chat().choices[0].message.content
        word = whole[len(whole) // 2 :][:3]
        answer = self._chat(stop=[word]).choices[0]
        expect(answer.finish_reason == "stop", answer.finish_reason)
        expect(answer.message.content == whole[: whole.index(word)], f"{answer.message.content!r} of {whole!r}")
        expect(answer.model_extra["stop_reason"] == word, "stop_reason")
        return repr(word)

    def tools(self) -> str:
        """Declared tools and a history with a call and its result are accepted."""
        call = {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'}}
        history = [
            *USER,
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
        ]
        answer = self._chat(messages=history, tools=[TOOL], tool_choice="auto")
        message = answer.choices[0].message
        expect(message.content is not None or message.tool_calls, "neither content nor calls")
        return f"{answer.usage.prompt_tokens} prompt tokens"

    def seed_repeats(self) -> str:
        """The seed that an answer names gives the answer again."""
        first = self._chat(temperature=1.0).choices[0]
        again = self._chat(temperature=1.0, seed=first.model_extra["seed"]).choices[0]
        expect(first.message.content == again.message.content, "the texts differ")
        return f"seed {first.model_extra['seed']}"

    def batch(self) -> str:
        """A batch on one rank equals its prompts one by one."""
        prompts = [f"Number {number} is" for number in range(8)]
        create = self._sdk.completions.create
        fields: Any = {"model": self._model, "max_tokens": 6, "temperature": 0}
        together = create(prompt=prompts, extra_body={"routed_dp_rank": 1}, **fields)
        alone = [create(prompt=prompt, **fields).choices[0].text for prompt in prompts]
        expect([choice.text for choice in together.choices] == alone, "a batch's texts differ from single ones")
        return f"{len(prompts)} prompts"

    def completion_streamed(self) -> str:
        """Two prompts stream side by side."""
        chunks = list(
            self._sdk.completions.create(
                model=self._model, prompt=["a", "b"], max_tokens=6, stream=True, stream_options={"include_usage": True}
            )
        )
        ends = sorted(choice.index for chunk in chunks for choice in chunk.choices if choice.finish_reason)
        expect(ends == [0, 1], f"ends {ends}")
        expect(chunks[-1].usage is not None, "no usage")
        return f"{len(chunks)} chunks"

    def completion_logprobs(self) -> str:
        """Echoed prompts carry log-probabilities, the first token none."""
        answer = self._sdk.completions.create(
            model=self._model, prompt="Hello there", max_tokens=2, echo=True, logprobs=2, temperature=0
        )
        choice = answer.choices[0]
        expect(choice.text.startswith("Hello there"), choice.text)
        numbers: Any = choice.logprobs.token_logprobs if choice.logprobs else []
        expect(numbers and numbers[0] is None and all(number <= 0 for number in numbers[1:]), numbers)
        expect(answer.usage and len(numbers) == answer.usage.total_tokens, f"{len(numbers)} numbers")
        return f"{len(numbers)} numbers"

    def refusals(self) -> str:
        """Each refusal is the SDK's own exception with our code."""
        cases: list[tuple[type[openai.APIStatusError], str, dict[str, Any]]] = [
            (openai.NotFoundError, "model_not_found", {"model": "gpt-9"}),
            (openai.BadRequestError, "invalid_value", {"messages": []}),
            (openai.BadRequestError, "unsupported_tool_choice", {"tools": [TOOL], "tool_choice": "required"}),
            (openai.BadRequestError, "invalid_dp_rank", {"extra_body": {"routed_dp_rank": 2}}),
            (
                openai.BadRequestError,
                "context_length_exceeded",
                {"messages": [{"role": "user", "content": "a " * 40000}]},
            ),
        ]
        for kind, code, fields in cases:
            for stream in (False, True):
                try:
                    self._sdk.chat.completions.create(
                        **{"model": self._model, "messages": USER, "stream": stream, **fields}
                    )
                except kind as error:
                    expect(error.code == code, f"{error.code} instead of {code}")
                else:
                    raise AssertionError(f"no {code}")
        return f"{len(cases)} codes"

    def asynchronous(self) -> str:
        """Sixteen requests at once give what they give alone."""

        async def ask() -> list[str]:
            async with openai.AsyncOpenAI(base_url=f"{self._base_url}/v1", api_key="unused", max_retries=0) as sdk:
                answers = await asyncio.gather(
                    *(
                        sdk.completions.create(model=self._model, prompt=f"{n}:", max_tokens=6, temperature=0)
                        for n in range(16)
                    )
                )
            return [answer.choices[0].text for answer in answers]

        texts = asyncio.run(ask())
        alone = self._sdk.completions.create(model=self._model, prompt="7:", max_tokens=6, temperature=0)
        expect(texts[7] == alone.choices[0].text, "text under load differs")
        return "16 answers"

    def asynchronous_streamed(self) -> str:
        """An async stream ends by itself."""

        async def ask() -> int:
            async with openai.AsyncOpenAI(base_url=f"{self._base_url}/v1", api_key="unused", max_retries=0) as sdk:
                stream = await sdk.chat.completions.create(
                    model=self._model, messages=USER, max_tokens=6, stream=True, extra_body=NO_THINKING
                )
                return len([chunk async for chunk in stream])

        return f"{asyncio.run(ask())} chunks"

    def _litellm(self, **fields: Any) -> Any:
        # Without this the import asks the network for a price list.
        os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
        import litellm

        return litellm.completion(
            model=f"openai/{self._model}",
            api_base=f"{self._base_url}/v1",
            api_key="unused",
            messages=USER,
            max_tokens=8,
            temperature=0,
            extra_body=NO_THINKING,
            **fields,
        )

    def litellm_chat(self) -> str:
        """litellm gets the text that the SDK gets."""
        text = self._litellm().choices[0].message.content
        expect(text == self._chat().choices[0].message.content, f"{text!r}")
        return f"{len(text)} characters"

    def litellm_streamed(self) -> str:
        """litellm's stream adds up to the same text."""
        text = "".join(chunk.choices[0].delta.content or "" for chunk in self._litellm(stream=True))
        expect(text == self._chat().choices[0].message.content, f"{text!r}")
        return f"{len(text)} characters"

    def _body(self, **fields: Any) -> dict[str, Any]:
        return {"model": self._model, "prompt": "Once", "temperature": 0, **fields}

    def plain_stream(self) -> str:
        """Events as the standard has them, ended by [DONE]."""
        with httpx.stream(
            "POST", f"{self._base_url}/v1/completions", json=self._body(max_tokens=4, stream=True), timeout=60
        ) as answer:
            expect(answer.headers["content-type"].startswith("text/event-stream"), answer.headers)
            lines = [line for line in answer.iter_lines() if line]
        expect(all(line.startswith("data: ") for line in lines), lines)
        expect(lines[-1] == "data: [DONE]", lines[-1])
        return f"{len(lines)} events"

    def plain_leave(self) -> str:
        """A client that leaves after the first event: its request ends long before its limit."""
        body = self._body(max_tokens=4000, stream=True, ignore_eos=True)
        with httpx.stream("POST", f"{self._base_url}/v1/completions", json=body, timeout=60) as answer:
            next(answer.iter_lines())
        begun = time.monotonic()
        while outstanding(self._base_url) and time.monotonic() - begun < 20:
            time.sleep(0.02)
        expect(outstanding(self._base_url) == 0, "still running after 20 s")
        return f"gone after {time.monotonic() - begun:.2f} s"

    def plain_tokenize(self) -> str:
        """Ids of a text are the text again, and as a prompt they are what the text is."""
        text = "naïve 中文 😀 </think>"
        post = httpx.post
        ids = post(f"{self._base_url}/tokenize", json={"prompt": text}).json()["tokens"]
        back = post(f"{self._base_url}/detokenize", json={"tokens": ids, "skip_special_tokens": True}).json()
        expect(back["prompt"] == text, back)
        by_text, by_ids = (
            post(f"{self._base_url}/v1/completions", json=self._body(prompt=prompt, max_tokens=4), timeout=60).json()
            for prompt in (text, ids)
        )
        expect(by_text["choices"][0]["text"] == by_ids["choices"][0]["text"], "ids and text differ")
        return f"{len(ids)} ids"


def outstanding(base_url: str) -> int:
    """Requests that have not ended."""
    count: int = httpx.get(f"{base_url}/server_info").json()["outstanding_requests"]
    return count


def healthy_after(server: Server, model: str, children: dict[str, int]) -> str:
    """Raise AssertionError unless the server is as it was."""
    expect(server.status("/health_scheduler") == 200, "/health_scheduler")
    for rank in (0, 1):
        body = {"model": model, "prompt": "a", "max_tokens": 2, "temperature": 0, "routed_dp_rank": rank}
        answer = httpx.post(f"{server.base_url}/v1/completions", json=body, timeout=60)
        expect(answer.status_code == 200, f"rank {rank}: {answer.text[:200]}")
    deadline = time.monotonic() + 20
    while outstanding(server.base_url) and time.monotonic() < deadline:
        time.sleep(0.05)
    expect(outstanding(server.base_url) == 0, "requests are left")
    expect(server.children() == children, "a process was replaced")
    failed = server.events("http_failed")
    expect(not failed, f"{len(failed)} unexpected errors in the log: {failed[:1]}")
    return "both ranks answer, nothing left"


def fuzz_document(base_url: str, model: str) -> dict[str, Any]:
    """The published document, narrowed so that a valid case names the served model and asks for little."""
    document: dict[str, Any] = copy.deepcopy(httpx.get(f"{base_url}/openapi.json").json())
    schemas = document["components"]["schemas"]
    for name in ("ChatRequest", "CompletionRequest", "TokenizeRequest", "DetokenizeRequest"):
        schemas[name]["properties"]["model"] = {"const": model}
    for name in ("ChatRequest", "CompletionRequest"):
        # Lists of numbers instead of ranges: JSON schema counts 1.0 as an integer, which is refused.
        schemas[name]["properties"]["max_tokens"] = {"enum": [1, 2, 3]}
        schemas[name]["properties"]["n"] = {"enum": [1, 2, 3]}
        schemas[name]["properties"]["routed_dp_rank"] = {"enum": [0, 1, None]}
        schemas[name]["required"] = [*schemas[name]["required"], "max_tokens"]
    ids = {"enum": list(range(3, 40))}
    schemas["DetokenizeRequest"]["properties"]["tokens"]["items"] = ids
    text, texts, one, many = schemas["CompletionRequest"]["properties"]["prompt"]["anyOf"]
    one["items"] = many["items"]["items"] = ids
    for kind in (text, texts["items"]):
        kind["pattern"] = "^[a-zA-Z ]+$"
    return document


def fuzz(base_url: str, model: str, cases: int) -> tuple[Counter[int], list[str]]:
    """Send at least `cases` generated requests, half of them broken; return statuses and what was wrong."""
    schema = schemathesis.openapi.from_dict(fuzz_document(base_url, model))
    operations: list[Any] = [result.ok() for result in schema.get_all_operations()]  # type: ignore[union-attr]
    num_plain = sum(operation.path not in SHARES for operation in operations)
    rest = 1 - sum(SHARES.values())
    statuses: Counter[int] = Counter()
    wrong: list[str] = []
    session = requests.Session()

    def send(case: Any) -> None:
        try:
            arguments = case.as_transport_kwargs(base_url=base_url)
            answer = session.request(timeout=CASE_TIMEOUT_S, **arguments)
        except requests.exceptions.InvalidURL:
            return  # never left this process
        except requests.exceptions.RequestException as error:
            wrong.append(f"{case.method} {case.path}: {error}")
            return
        statuses[answer.status_code] += 1
        if answer.status_code >= 500:
            wrong.append(f"{case.method} {case.path} {case.body!r:.500}: {answer.status_code} {answer.text[:200]}")
        elif answer.status_code >= 400 and case.method != "HEAD" and not is_error_object(answer.text):
            wrong.append(
                f"{case.method} {case.path}: {answer.status_code} without an error object: {answer.text[:200]}"
            )

    for operation in operations:
        share = SHARES.get(operation.path, rest / num_plain)
        modes = [GenerationMode.POSITIVE, GenerationMode.NEGATIVE] if operation.body else [GenerationMode.POSITIVE]
        for mode in modes:
            count = max(1, -(-int(cases * share) // len(modes)))
            # Cases that repeat are skipped by hypothesis, so rounds with other seeds fill up the number.
            for round_number in range(8):
                sent = sum(statuses.values())
                run_cases(operation.as_strategy(generation_mode=mode), send, count, round_number)
                count -= sum(statuses.values()) - sent
                if count <= 0:
                    break
    return statuses, wrong


def run_cases(strategy: Any, send: Callable[[Any], None], count: int, round_number: int) -> None:
    """Draw and send `count` cases at most; the same ones in every run of the gate."""

    @seed(round_number)
    @settings(max_examples=count, database=None, deadline=None, suppress_health_check=list(HealthCheck))
    @given(case=strategy)
    def each(case: Any) -> None:
        send(case)

    each()


def is_error_object(text: str) -> bool:
    """Whether a refusal has the documented shape."""
    try:
        return set(json.loads(text)["error"]) == {"message", "type", "param", "code"}
    except (ValueError, KeyError, TypeError):
        return False


def run_check(name: str, check: Callable[[], str]) -> Line:
    """Run one check; whatever it raises is its verdict."""
    begun = time.monotonic()
    try:
        detail, ok = check(), True
    except Exception as error:  # noqa: BLE001  a client library may raise anything; the gate reports it
        detail, ok = f"{type(error).__name__}: {error}"[:300], False
    return Line(name, ok, round(time.monotonic() - begun, 2), detail)


def check_clients() -> list[Line]:
    """Start a server as `make serve` does, and use it with every client."""
    with Server() as server:
        server.wait_ready()
        children = server.children()
        model = httpx.get(f"{server.base_url}/v1/models").json()["data"][0]["id"]
        lines = [run_check(name, check) for name, check in Clients(server.base_url, model).checks().items()]
        lines.append(run_check("healthy after", lambda: healthy_after(server, model, children)))
    return lines


def check_fuzz(cases: int) -> list[Line]:
    """Start a server with a short context, and fuzz it."""
    with Server({"engine": {"max_context_tokens": FUZZ_CONTEXT_TOKENS}}) as server:
        server.wait_ready()
        children = server.children()
        model = httpx.get(f"{server.base_url}/v1/models").json()["data"][0]["id"]

        def verdict() -> str:
            statuses, wrong = fuzz(server.base_url, model, cases)
            total = sum(statuses.values())
            expect(not wrong, f"{len(wrong)} wrong of {total}: {wrong[:3]}")
            expect(total >= cases, f"only {total} cases were sent: {dict(statuses)}")
            expect(statuses[200] >= cases // 20, f"hardly any case was valid: {dict(statuses)}")
            return f"{total} cases: " + ", ".join(f"{status}: {count}" for status, count in sorted(statuses.items()))

        lines = [run_check("fuzz of /openapi.json", verdict)]
        lines.append(run_check("healthy after fuzz", lambda: healthy_after(server, model, children)))
    return lines


def main(argv: list[str]) -> int:
    """Run the gate; 0 only if every line holds."""
    parser = argparse.ArgumentParser(prog="tools.gates clients", description=__doc__)
    parser.add_argument("--cases", type=int, default=2000, help="generated requests (default 2000)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args(argv)
    begun = time.monotonic()
    ensure_checkpoint()
    lines = check_clients() + check_fuzz(arguments.cases)
    ok = all(line.ok for line in lines)
    seconds = round(time.monotonic() - begun, 1)
    if arguments.json:
        print(json.dumps({"gate": "clients", "ok": ok, "seconds": seconds, "lines": [asdict(line) for line in lines]}))
        return 0 if ok else 1
    for line in lines:
        print(f"{'ok' if line.ok else 'FAIL':<5}{line.check:<38}{line.seconds:>8.2f} s  {line.detail}")
    print(f"{'ok' if ok else 'FAIL'}: {len(lines)} lines in {seconds} s")
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
