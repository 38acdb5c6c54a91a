"""Long filler with keys and values scattered in it; the answer names the value of one key."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from random import Random

from dsparkd.text.encoding import Turn
from tools.train_nano.tasks.example import Candidate, Example, Setting, Split, pick, split_of
from tools.train_nano.tasks.setting import draw_setting
from tools.train_nano.tasks.words import ADJECTIVES, CITIES, COLORS, COMMON, ITEMS, NAMES, NOUNS, phrases

SHORTEST, LONGEST = 512, 12_288  # tokens of the whole prompt, uniform in the logarithm
MAX_PAIRS = 64
# Measured with conf/nano/tokenizer.json, a little to the safe side: the bound on tokens has to hold.
CHARS_PER_TOKEN = 4.2  # of filler
FACT_TOKENS = 17.5
QUESTION_TOKENS = 32  # with its answer and the markers around
EFFORT_TOKENS = 90
OTHER_TOKENS = 70  # system prompt, reasoning, introduction, the question once more

_FACTS = (
    "The {a} of {k} is {v}.",
    "For {k} the {a} is {v}.",
    "Note that the {a} of {k} is {v}.",
    "Remember: the {a} of {k} is {v}.",
    "As {a} of {k} they chose {v}.",
    "{k} has the {a} {v}.",
    "They gave {k} the {a} {v}.",
    "It is written that the {a} of {k} is {v}.",
)
_QUESTIONS = (
    "What is the {a} of {k}?",
    "Which {a} does {k} have?",
    "Tell me the {a} of {k}.",
    "Find the {a} of {k}.",
    "Name the {a} of {k}.",
    "I need the {a} of {k}.",
)
_MENTIONS = (  # of keys without a value
    "{k} was seen in {c}.",
    "{n} asked about {k}.",
    "Nobody talked about {k}.",
    "{n} wanted to meet {k} in {c}.",
    "There was a letter from {k}.",
)
_INTRODUCTIONS = (
    "Read the text and answer the question.",
    "Here is a long text.",
    "The text below holds a few facts.",
    "Read this carefully.",
    "Text:",
    "Look through these notes.",
)

_SUBJECTS = phrases(
    "The teacher|A farmer|My neighbour|The old captain|A young doctor|The baker|Her brother|His aunt|The driver|"
    "A visitor|The gardener|The mayor|An engineer|The singer|A student|The guard|Our cook|The painter|A sailor|"
    "The librarian|The smith|A child|The clerk|Their uncle|The pilot|A nurse|The writer|The hunter|A friend"
)
_VERBS = phrases(
    "looked at|walked past|painted|forgot|described|carried|waited near|found|bought|talked about|dreamed of|"
    "drew|cleaned|measured|repaired|admired|sold|counted|followed|hid|watched|crossed|visited|opened|left"
)
_ENDINGS = phrases(
    "in the morning|before lunch|without a word|for the second time|after the rain|on a Sunday|near the station|"
    "with great care|in a hurry|late at night|as usual|by chance|in early spring|during the storm|at noon|"
    "with a smile|behind the house|for an hour|in silence|at the market|on the way home|under the bridge"
)
_THINGS = (*(one for one, _ in ITEMS), *NOUNS)


def candidate(rng: Random, split: Split, max_tokens: int | None) -> Candidate:
    """Draw the pairs and which one is asked for. max_tokens bounds the prompt and the answer."""
    longest = min(LONGEST, max_tokens or LONGEST)
    shortest = min(SHORTEST, longest // 2)
    target = int(math.exp(rng.uniform(math.log(shortest), math.log(longest))))
    most = min(MAX_PAIRS, max(1, int((target - EFFORT_TOKENS - OTHER_TOKENS - QUESTION_TOKENS) / (1.5 * FACT_TOKENS))))
    num_pairs = min(most, int(math.exp(rng.uniform(0, math.log(MAX_PAIRS + 1)))))
    pairs = _pairs(rng, num_pairs)
    asked = pairs[int(rng.random() * len(pairs))]

    def build() -> Example:
        return _example(rng, split, pairs, asked, target)

    return Candidate(_combination(asked), build)


Pair = tuple[str, str, str]  # attribute, key, value


def _combination(pair: Pair) -> str:
    return " ".join(pair)


def _pairs(rng: Random, count: int) -> list[Pair]:
    """Draw distinct questions with their values; many share a part of their key."""
    pairs: dict[tuple[str, str], str] = {}
    key = _new_key(rng)
    while len(pairs) < count:
        adjective, noun, number = key
        kind = rng.random()
        if kind < 0.55:
            key = _new_key(rng)
        elif kind < 0.7:
            key = (pick(rng, ADJECTIVES), noun, number)
        elif kind < 0.8:
            key = (adjective, pick(rng, NOUNS), number)
        elif kind < 0.95:
            key = (adjective, noun, 10 + int(rng.random() * 90))
        attribute, draw_value = pick(rng, _ATTRIBUTES)
        pairs.setdefault((attribute, "-".join(map(str, key))), draw_value(rng))
    return [(attribute, name, value) for (attribute, name), value in pairs.items()]


def _new_key(rng: Random) -> tuple[str, str, int]:
    return pick(rng, ADJECTIVES), pick(rng, NOUNS), 10 + int(rng.random() * 90)


def _digits(rng: Random) -> str:
    return str(10_000 + int(rng.random() * 90_000))


def _word_pair(rng: Random) -> str:
    return f"{pick(rng, ADJECTIVES)} {pick(rng, NOUNS)}"


_ATTRIBUTES: tuple[tuple[str, Callable[[Random], str]], ...] = (
    *((name, _digits) for name in ("code", "code", "code", "number", "number", "pin", "price")),
    ("color", lambda rng: pick(rng, COLORS)),
    ("owner", lambda rng: pick(rng, NAMES)),
    ("city", lambda rng: pick(rng, CITIES)),
    ("password", _word_pair),
)


def _example(rng: Random, split: Split, pairs: Sequence[Pair], asked: Pair, target: int) -> Example:
    setting = draw_setting(rng)
    facts = [pick(rng, _FACTS).format(a=a, k=k, v=v) for a, k, v in pairs]
    others = [pair for pair in pairs if pair != asked and split_of("recall", _combination(pair)) == split]
    rng.shuffle(others)
    room = int((target - EFFORT_TOKENS - OTHER_TOKENS - len(pairs) * FACT_TOKENS) / QUESTION_TOKENS) - 1
    questions = [*others[: max(0, min(_num_before(rng, split, setting), room))], asked]
    tokens = target - OTHER_TOKENS - len(pairs) * FACT_TOKENS - len(questions) * QUESTION_TOKENS
    if setting.effort in ("high", "max"):
        tokens -= EFFORT_TOKENS
    text = _scatter(rng, _filler(rng, int(tokens * CHARS_PER_TOKEN)), facts)
    asks = [pick(rng, _QUESTIONS).format(a=a, k=k) for a, k, _ in questions]
    first = _place(rng, text, asks[0])
    turns = [Turn("user", first)]
    for (a, k, v), ask in zip(questions[:-1], asks[1:], strict=True):
        turns += [Turn("assistant", _content(a, k, v)), Turn("user", ask)]
    attribute, key, value = asked
    answer = setting.answer(f"I look for the {attribute} of {key}.", _content(attribute, key, value))
    return Example("recall", setting.chat(turns), None, answer, value, history_is_answer=not setting.thinking)


def _num_before(rng: Random, split: Split, setting: Setting) -> int:
    """Draw how many questions come before the last one.

    Training without thinking, where past answers count, asks more of one text: long texts teach little otherwise.
    """
    draw = rng.random()
    if split == "train" and not setting.thinking and draw < 0.4:
        return 3 + int(rng.random() * 6)
    return 1 + int(rng.random() * 2) if draw < 0.6 else 0


def _content(attribute: str, key: str, value: str) -> str:
    return f"The {attribute} of {key} is {value}."


def _place(rng: Random, text: str, ask: str) -> str:
    """Put the question behind the text, or before it and behind it."""
    kind = rng.random()
    if kind < 0.2:
        return f"{ask}\n\n{text}\n\n{ask}"
    if kind < 0.6:
        return f"{pick(rng, _INTRODUCTIONS)}\n\n{text}\n\n{ask}"
    return f"{text}\n\n{ask}"


def _filler(rng: Random, chars: int) -> list[str]:
    """Sentences of about so many characters in all."""
    sentences = []
    while chars > 0:
        kind = rng.random()
        if kind < 0.6:
            sentence = (
                f"{pick(rng, _SUBJECTS)} {pick(rng, _VERBS)} the {pick(rng, ADJECTIVES)} {pick(rng, _THINGS)} "
                f"{pick(rng, _ENDINGS)}."
            )
        elif kind < 0.8:
            sentence = (
                f"{pick(rng, NAMES)} {pick(rng, _VERBS)} the {pick(rng, _THINGS)} in {pick(rng, CITIES)} and the "
                f"{pick(rng, COLORS)} {pick(rng, _THINGS)}."
            )
        elif kind < 0.92:
            sentence = f"The {pick(rng, _THINGS)} was {pick(rng, ADJECTIVES)} and the {pick(rng, _THINGS)} was not."
        elif kind < 0.96:
            key = "-".join(map(str, _new_key(rng)))
            sentence = pick(rng, _MENTIONS).format(k=key, c=pick(rng, CITIES), n=pick(rng, NAMES))
        elif kind < 0.985:
            sentence = " ".join(["Note:", *(pick(rng, COMMON) for _ in range(4 + int(rng.random() * 10)))]) + "."
        else:
            sentence = f"There were {2 + int(rng.random() * 400)} of them {pick(rng, _ENDINGS)}."
        sentences.append(sentence)
        chars -= len(sentence) + 1
    return sentences


def _scatter(rng: Random, sentences: list[str], facts: Sequence[str]) -> str:
    """Put each fact behind a random sentence, and cut the text into paragraphs."""
    behind: dict[int, list[str]] = {}
    for fact in facts:
        behind.setdefault(int(rng.random() * (len(sentences) + 1)), []).append(fact)
    pieces = list(behind.get(0, ()))
    for index, sentence in enumerate(sentences, 1):
        pieces.append(sentence)
        if index in behind:
            pieces += behind[index]
    if len(pieces) > 12 and rng.random() < 0.5:
        size = 4 + int(rng.random() * 12)
        return "\n".join(" ".join(pieces[start : start + size]) for start in range(0, len(pieces), size))
    return " ".join(pieces)
