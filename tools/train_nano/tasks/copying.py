"""Lists of made names that have to come back exactly.

Input and output have the same spacing before a name, so that a name is the same run of tokens in both.
"""

from __future__ import annotations

import json
from random import Random

from dsparkd.text.encoding import Turn
from tools.train_nano.tasks.example import Candidate, Example, Split, pick
from tools.train_nano.tasks.setting import draw_setting
from tools.train_nano.tasks.words import ADJECTIVES, CODE, COMMON, NOUNS, words

TEST_NAMES = 20

_SYLLABLES = words(
    "ba be bo da de do fa fe fi ga ge go ha he hi ja jo ka ke ki ko la le li lo ma me mi mo na ne no pa pe po ra re "
    "ri ro sa se si so ta te ti to va ve vi wa we ya yo za ze zu bar den fol gar hul jin kel lor mon nar pel quin ros "
    "sil tam vor wex yan zol ment tion ster lin ing ers ack ent ort und"
)
_EXTENSIONS = words("py rs txt json csv log md cfg tmp bin")

# Of the input and of the output; only pairs with the same spacing before a name.
_FORMATS = (
    ("lines", "lines"),
    ("lines", "json"),
    ("json", "lines"),
    ("json", "json"),
    ("commas", "commas"),
    ("bullets", "bullets"),
)
_WANTED = {
    "lines": ("one a line", "one per line", "each on its own line"),
    "json": ("as a JSON array", "as JSON array of strings"),
    "commas": ("separated by commas", "in one line with commas"),
    "bullets": ("as a list with dashes", "one per line with a dash before each"),
}
_REQUESTS = (
    "Copy these names exactly, {f}.",
    "Repeat the following names {f}.",
    "Write the names again {f}. Change nothing.",
    "Return this list {f}, character for character.",
    "Copy the identifiers below {f}.",
    "Please copy the list {f}.",
    "I need the same names {f}.",
)


def candidate(rng: Random, split: Split) -> Candidate:
    """Draw a list; in the test split always of TEST_NAMES names."""
    count = TEST_NAMES if split == "test" else 4 + int(rng.random() * 21)
    names = _names(rng, count)
    given, wanted = pick(rng, _FORMATS)

    def build() -> Example:
        setting = draw_setting(rng)
        phrase = pick(rng, _WANTED[wanted])
        request = pick(rng, _REQUESTS).format(f=phrase)
        text = _spell(given, names)
        message = f"{request}\n\n{text}" if rng.random() < 0.75 else f"{text}\n\n{request}"
        content = _spell(wanted, names)
        answer = setting.answer(f"I copy the names {phrase}.", content)
        return Example("copy", setting.chat([Turn("user", message)]), None, answer, content)

    return Candidate(f"{given}{wanted}:{' '.join(names)}", build)


def _spell(form: str, names: list[str]) -> str:
    match form:
        case "lines":
            return "\n".join(names)
        case "json":
            return json.dumps(names, ensure_ascii=False)
        case "commas":
            return ", ".join(names)
        case _:
            return "\n".join(f"- {name}" for name in names)


def _names(rng: Random, count: int) -> list[str]:
    """Draw distinct names; in one list of twelve some begin alike."""
    names: dict[str, None] = {}
    stem = _word(rng) if rng.random() < 0.08 else None
    kinds = [int(rng.random() * 11) for _ in range(1 + int(rng.random() * 4))]
    while len(names) < count:
        name = _name(rng, pick(rng, kinds))
        if stem is not None and rng.random() < 0.3:
            name = f"{stem}_{name}"
        names[name] = None
    return list(names)


def _name(rng: Random, kind: int) -> str:
    a, b = _word(rng), _word(rng)
    number = int(rng.random() * 1000)
    match kind:
        case 0:
            return f"{a}_{b}"
        case 1:
            return f"{a}-{number}"
        case 2:
            return f"{a.capitalize()}{b.capitalize()}"
        case 3:
            return f"{a}.{b}"
        case 4:
            return f"{a}{number}"
        case 5:
            return f"{a}_{number}.{pick(rng, _EXTENSIONS)}"
        case 6:
            return f"{a}{b.capitalize()}{number}"
        case 7:
            return f"{pick(rng, CODE)}_{pick(rng, COMMON)}"
        case 8:
            return f"{pick(rng, CODE)}{pick(rng, COMMON).capitalize()}"
        case 9:
            return f"{pick(rng, COMMON)}.{pick(rng, CODE)}_{number}"
        case _:
            return f"{pick(rng, ADJECTIVES)}-{pick(rng, NOUNS)}-{number}"


def _word(rng: Random) -> str:
    return "".join(pick(rng, _SYLLABLES) for _ in range(2 if rng.random() < 0.7 else 3))
