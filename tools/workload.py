"""The prompts that gates and benches share, and a client that sends them and reads what came out, token by token."""

from __future__ import annotations

import json
import random
import re
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

# Around every border of the model's state: windows of 128 tokens, pages of 256, and the ring's end.
BORDER_LENGTHS = (
    1,
    2,
    3,
    5,
    63,
    64,
    127,
    128,
    129,
    200,
    244,
    250,
    254,
    255,
    256,
    257,
    383,
    384,
    500,
    508,
    511,
    512,
    513,
)
# Each row of sampling rules at least twice among 64 prompts, greedy as often as all others together.
RULES: tuple[dict[str, object], ...] = (
    {"temperature": 1.0},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 1.3, "top_k": 20},
    {"temperature": 0.9, "min_p": 0.02, "repetition_penalty": 1.2},
    {"temperature": 1.0, "presence_penalty": 0.8, "frequency_penalty": 0.4},
    {"temperature": 0.8, "top_p": 0.95, "top_k": 100, "logit_bias": {"50": 3.0, "60": -5.0}},
    {"temperature": 1.0, "min_tokens": 8, "stop_token_ids": [70, 71, 72]},
)


@dataclass(frozen=True)
class Item:
    """One prompt (token ids) and its sampling rules, as a completion request's fields."""

    prompt: list[int]
    rules: dict[str, object]
    max_tokens: int


@dataclass(frozen=True)
class Answer:
    """What one item gave: the text of each token and its log-probability, all digits of it.

    margins: by how much each position's likeliest token leads the second; empty unless alternatives were asked for.
    """

    tokens: tuple[str, ...]
    logprobs: tuple[float, ...]
    text: str
    finish: str
    margins: tuple[float, ...]
    cached_tokens: int = field(compare=False)


def mixed_items(count: int, vocab_size: int, max_tokens: int, seed: int, *, greedy: bool = False) -> list[Item]:
    """Distinct prompts of plain ids, greedy and seeded in turn, or greedy alone.

    Three in four go on past an end token, so that as many tokens are compared whatever the checkpoint says.
    """
    draw = random.Random(seed)
    items = []
    for index in range(count):
        lengths = BORDER_LENGTHS if index % 3 else (draw.randint(4, 900),)
        prompt = [draw.randrange(3, vocab_size) for _ in range(lengths[index % len(lengths)])]
        rules: dict[str, object] = {"temperature": 0.0}
        if index % 2 and not greedy:
            rules = RULES[index // 2 % len(RULES)] | {"seed": 1000 + index}
        if index % 4 != 3:
            rules = rules | {"ignore_eos": True}
        items.append(Item(prompt, rules, max_tokens))
    return items


def growing_items(count: int, vocab_size: int, max_tokens: int, seed: int, page_tokens: int) -> list[Item]:
    """Like mixed_items, but every prompt ends so close to its first page's end that its output needs one page more.

    All need it for as long, and some steps after their start, so that as many as are let in want it at the same time.
    """
    draw = random.Random(seed)
    items = []
    for item in mixed_items(count, vocab_size, max_tokens, seed):
        length = page_tokens - draw.randint(max_tokens // 4, max_tokens // 2)
        rules = item.rules | {"ignore_eos": True}  # who ends early needs no further page
        items.append(Item([draw.randrange(3, vocab_size) for _ in range(length)], rules, max_tokens))
    return items


class Client:
    """Sends completions to one server and reads its counters."""

    def __init__(self, base_url: str, timeout_s: float = 300) -> None:
        self._base_url = base_url
        self._timeout_s = timeout_s
        self._model = str(json.loads(self._get("/v1/models"))["data"][0]["id"])

    def _get(self, path: str) -> str:
        with urllib.request.urlopen(self._base_url + path, timeout=self._timeout_s) as answer:
            body: bytes = answer.read()
        return body.decode()

    def complete(self, item: Item, dp_rank: int | None = None, alternatives: int = 0) -> Answer:
        """Send one item, to one rank if named. Raises OSError for a refusal."""
        fields = {"model": self._model, "prompt": item.prompt, "max_tokens": item.max_tokens, "logprobs": alternatives}
        if dp_rank is not None:
            fields["routed_dp_rank"] = dp_rank
        request = urllib.request.Request(
            self._base_url + "/v1/completions",
            json.dumps(fields | item.rules).encode(),
            {"content-type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=self._timeout_s) as answer:
            body = json.loads(answer.read())
        choice, usage = body["choices"][0], body["usage"]
        listed = [sorted(entry.values()) for entry in choice["logprobs"]["top_logprobs"] or ()]
        return Answer(
            tokens=tuple(choice["logprobs"]["tokens"]),
            logprobs=tuple(choice["logprobs"]["token_logprobs"]),
            text=choice["text"],
            finish=choice["finish_reason"],
            margins=tuple(values[-1] - values[-2] for values in listed if len(values) > 1),
            cached_tokens=usage["prompt_tokens_details"]["cached_tokens"],
        )

    def complete_all(
        self,
        items: Sequence[Item],
        concurrency: int,
        dp_rank: Callable[[int], int | None] = lambda index: None,
        alternatives: int = 0,
    ) -> list[Answer]:
        """Send all, that many at a time, each to the rank that dp_rank names for its index."""
        with ThreadPoolExecutor(concurrency) as threads:
            ranks = [dp_rank(index) for index in range(len(items))]
            return list(
                threads.map(lambda pair: self.complete(pair[0], pair[1], alternatives), zip(items, ranks, strict=True))
            )

    def counter(self, name: str, label: str = "") -> float:
        """Sum of a metric family over its series, or over those with a label such as `dp_rank="0"`."""
        pattern = re.compile(rf"^{name}(?:\{{([^}}]*)\}})? (\S+)$", re.MULTILINE)
        return sum(float(value) for labels, value in pattern.findall(self._get("/metrics")) if label in labels)


def num_differing(base: Sequence[object], other: Sequence[object]) -> int:
    """Positions at which two runs differ; one that ends earlier differs in all that it lacks."""
    return sum(a != b for a, b in zip(base, other, strict=False)) + abs(len(base) - len(other))
