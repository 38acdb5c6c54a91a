"""A paragraph of facts and a JSON schema; the answer is the record as canonical JSON.

Canonical is: members in the order of the schema's properties, separators ", " and ": ", text not escaped. It is the
style in which prompts show schemas and call arguments, so a model sees one style only. A field that the text calls
unknown is null where the schema allows it; one that is optional and not mentioned is left out.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from random import Random

from dsparkd.text.encoding import Turn
from tools.train_nano.tasks.example import Candidate, Example, pick
from tools.train_nano.tasks.fields import ABSENT, Field, FieldGrammar, Schema, a_or_an
from tools.train_nano.tasks.setting import draw_setting
from tools.train_nano.tasks.words import NAMES, words

_KINDS = words(
    "order customer book machine trip house product sensor event student plant ship shop game recipe film server "
    "parcel animal room project meeting vehicle tool account article hotel team invoice lesson song bridge camera "
    "factory garden museum library flight painting device letter contract company ticket lamp boat"
)
_SCHEMA_ONLY_IN_SYSTEM = (
    "Reply with JSON that fits this schema:\n{schema}",
    "Answer only with a JSON object. Its schema is:\n{schema}",
    "Use this JSON schema for the answer:\n{schema}",
    "Extract the data as JSON. Schema:\n{schema}",
    "Output format: JSON with the schema\n{schema}",
    "Every answer is JSON. It has to be valid under this schema:\n{schema}",
    "Schema of your answers:\n{schema}\nAnswer with JSON alone.",
)
_REQUESTS = (
    "Extract the {kind} as JSON.",
    "Write the {kind} as JSON.",
    "Give me the data of the {kind}.",
    "Fill in the record of the {kind}.",
    "Turn this into a record.",
    "What is the record?",
    "JSON, please.",
    "Return the record.",
    "Extract the facts.",
    "Make a record of it.",
    "Read this and fill in the fields.",
)
_STARTS = (
    "This is about {a_kind}.",
    "Here are some notes about {a_kind}.",
    "We know the following about the {kind}.",
    "The {kind} was checked today.",
    "Details of the {kind} follow.",
    "",
    "",
)
_NOISE = (
    "Nothing else was said.",
    "It was a long day.",
    "{n} wrote this down.",
    "The weather was fine.",
    "Please keep this note.",
    "{n} asked about it twice.",
    "All of this was checked by {n}.",
    "{n} and {m} talked for an hour.",
    "More may follow later.",
)
_OF_ANOTHER = (
    "Of another {kind} we heard this: {fact}",
    "Do not mix this up with another {kind}, of which they say: {fact}",
    "About a second {kind}, not this one: {fact}",
)
# A fact that begins so can stand behind "and": the word is no name.
_LOWERED = ("The ", "It ", "Its ", "As ", "We ", "They ", "For ", "There ", "Under ", "Nobody ")


def canonical(value: object) -> str:
    """Spell a JSON value in the one way that answers have."""
    return json.dumps(value, ensure_ascii=False)


def candidate(rng: Random) -> Candidate:
    """Draw a schema and a record that fits it."""
    kind = pick(rng, _KINDS)
    grammar = FieldGrammar(rng)
    fields = grammar.record(1 + int(rng.random() * 6))
    content = canonical({field.key: field.value for field in fields if field.value is not ABSENT})
    shape = ",".join(field.shape for field in fields)

    def build() -> Example:
        return _example(rng, kind, grammar, fields, content)

    return Candidate(f"{kind}:{shape}:{content}", build)


def _example(rng: Random, kind: str, grammar: FieldGrammar, fields: Sequence[Field], content: str) -> Example:
    setting = draw_setting(rng)
    text = _paragraph(rng, kind, grammar, fields)
    schema = _whole_schema(rng, kind, grammar, fields)
    request = pick(rng, _REQUESTS).format(kind=kind)
    message = f"{text}\n\n{request}" if rng.random() < 0.7 else f"{request}\n\n{text}"
    turns = [Turn("user", message)]
    if rng.random() < 0.5:
        chat = setting.chat(turns, response_schema=schema)
    else:
        instructions = pick(rng, _SCHEMA_ONLY_IN_SYSTEM).replace("{schema}", canonical(schema))
        chat = setting.chat(turns, instructions=instructions)
    # Quoted as in the schema and the answer, so that a key is the same run of tokens in all three.
    keys = ", ".join(f'"{field.key}"' for field in fields if field.value is not ABSENT)
    return Example("extraction", chat, schema, setting.answer(f"The fields are {keys}.", content), content)


def _whole_schema(rng: Random, kind: str, grammar: FieldGrammar, fields: Sequence[Field]) -> Schema:
    # Members that the text leaves out are optional; now and then one that it gives is optional, too.
    optional = {field.key for field in fields if field.value is ABSENT or rng.random() < 0.03}
    schema = grammar.object_schema(fields, optional)
    if rng.random() < 0.1:
        schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}
    if rng.random() < 0.15:
        schema = {"title": kind, **schema}
    if grammar.definitions:
        schema["$defs"] = dict(grammar.definitions)
    return schema


def _paragraph(rng: Random, kind: str, grammar: FieldGrammar, fields: Sequence[Field]) -> str:
    groups = [list(field.facts) for field in fields if field.facts]
    if rng.random() < 0.4:
        rng.shuffle(groups)
        groups = _joined(rng, groups)
    # They come after the joining: behind one of them, a fact of the record would look like one of the other thing.
    for _ in range(int(rng.random() * 3)):
        groups.append([_distraction(rng, kind, grammar, fields)])
    rng.shuffle(groups)
    start = pick(rng, _STARTS).format(kind=kind, a_kind=a_or_an(kind))
    facts = [fact for group in groups for fact in group]
    if rng.random() < 0.15:
        return "\n".join(([start] if start else []) + [f"- {fact}" for fact in facts])
    return " ".join(([start] if start else []) + facts)


def _joined(rng: Random, groups: Sequence[list[str]]) -> list[list[str]]:
    """Make one sentence of some neighbours."""
    joined: list[list[str]] = []
    for group in groups:
        fact = group[0]
        before = joined[-1] if joined else []
        if len(group) == len(before) == 1 and fact.startswith(_LOWERED) and rng.random() < 0.5:
            before[0] = f"{before[0][:-1]}, and {fact[0].lower()}{fact[1:]}"
        else:
            joined.append(list(group))
    return joined


def _distraction(rng: Random, kind: str, grammar: FieldGrammar, fields: Sequence[Field]) -> str:
    """A sentence that gives nothing: small talk, a fact that was not asked for, a fact about something else."""
    draw = rng.random()
    if draw < 0.4:
        return pick(rng, _NOISE).format(n=pick(rng, NAMES), m=pick(rng, NAMES))
    taken = {field.key for field in fields}
    while True:
        field = grammar.scalar()
        if not field.facts:
            continue
        fact = field.facts[0]
        if draw < 0.7:
            return pick(rng, _OF_ANOTHER).format(kind=kind, fact=fact)
        if field.key not in taken:
            return fact
