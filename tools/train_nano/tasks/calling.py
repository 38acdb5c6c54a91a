"""Tool choice: one to eight declarations and a request; the answer is the fitting call, or a refusal.

Tools are generated from a verb, an object and parameters, so that names alone never repeat a lesson; the request names
every argument.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from random import Random
from typing import NamedTuple

from dsparkd.text.encoding import PastCall, Tool, Turn
from tools.train_nano.tasks.example import Candidate, Example, pick
from tools.train_nano.tasks.setting import draw_setting
from tools.train_nano.tasks.words import ADJECTIVES, CITIES, COLORS, NAMES, NOUNS, words

REFUSAL = "I'm sorry, none of the available tools can do that."

_VERBS = words(
    "create delete find update list send open close print copy move start stop check count export import archive "
    "rename share lock unlock book cancel order pay return repair clean paint pack sort measure translate record play "
    "save load merge split publish approve reject assign schedule track rate"
)
_OBJECTS = words(
    "invoice report user ticket order file folder photo song video lamp door window car bike train flight room table "
    "meeting event task note message letter parcel book chapter garden plant machine printer camera server backup "
    "contract payment account card map route trip hotel recipe meal game team lesson exam course sensor alarm timer "
    "heater fan robot drone"
)


class Parameter(NamedTuple):
    """A parameter of a tool. label is how a request speaks of it."""

    key: str
    label: str
    schema: dict[str, object]
    draw: Callable[[Random], object]


def _text(key: str, draw: Callable[[Random], object], description: str | None = None) -> Parameter:
    schema: dict[str, object] = {"type": "string"}
    if description:
        schema["description"] = description
    return Parameter(key, key.replace("_", " "), schema, draw)


def _whole(key: str, low: int, high: int) -> Parameter:
    return Parameter(
        key, key.replace("_", " "), {"type": "integer"}, lambda rng: low + int(rng.random() * (high - low + 1))
    )


def _decimal(key: str, high: int) -> Parameter:
    return Parameter(
        key, key.replace("_", " "), {"type": "number"}, lambda rng: (1 + int(rng.random() * high * 10)) / 10
    )


def _switch(key: str) -> Parameter:
    return Parameter(key, key.replace("_", " "), {"type": "boolean"}, lambda rng: rng.random() < 0.5)


def _choice(key: str, options: Sequence[str]) -> Parameter:
    return Parameter(
        key, key.replace("_", " "), {"type": "string", "enum": list(options)}, lambda rng: pick(rng, options)
    )


def _code(rng: Random) -> str:
    letters = "ABCDEFGHKLMNPRSTUVWXYZ"
    return f"{pick(rng, letters)}{pick(rng, letters)}-{100 + int(rng.random() * 900)}"


def _date(rng: Random) -> str:
    return f"20{20 + int(rng.random() * 12)}-{1 + int(rng.random() * 12):02}-{1 + int(rng.random() * 28):02}"


def _phrase(rng: Random) -> str:
    return f"{pick(rng, ADJECTIVES)} {pick(rng, NOUNS)}"


def _name(rng: Random) -> str:
    return pick(rng, NAMES)


def _city(rng: Random) -> str:
    return pick(rng, CITIES)


_PARAMETERS = (
    _text("name", _name),
    _text("owner", _name),
    _text("customer", _name, "Name of the customer."),
    _text("recipient", _name),
    _text("author", _name),
    _text("city", _city, "A city."),
    _text("location", _city),
    _text("place", _city),
    _text("destination", _city, "Where it goes."),
    _text("title", _phrase, "A short title."),
    _text("subject", _phrase),
    _text("label", _phrase),
    _text("topic", _phrase),
    _text("code", _code),
    _text("reference", _code, "Such as AB-123."),
    _text("date", _date, "As YYYY-MM-DD."),
    _text("day", _date),
    _whole("count", 1, 99),
    _whole("amount", 1, 999),
    _whole("quantity", 1, 50),
    _whole("minutes", 1, 120),
    _whole("days", 1, 30),
    _whole("level", 1, 10),
    _whole("year", 1950, 2040),
    _whole("limit", 5, 500),
    _whole("room_number", 1, 400),
    _decimal("price", 90),
    _decimal("weight", 40),
    _decimal("temperature", 40),
    _decimal("distance", 100),
    _decimal("speed", 120),
    _switch("urgent"),
    _switch("public"),
    _switch("repeat"),
    _switch("notify"),
    _switch("express"),
    _choice("color", COLORS[:6]),
    _choice("paint", COLORS[4:11]),
    _choice("priority", ("low", "medium", "high")),
    _choice("size", ("small", "medium", "large")),
    _choice("language", ("English", "French", "German", "Spanish", "Polish")),
    _choice("format", ("pdf", "csv", "json", "html")),
    _choice("mode", ("fast", "slow", "normal")),
    _choice("unit", ("metric", "imperial")),
    _choice("weekday", ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")),
)


class Made(NamedTuple):
    """A made tool and what it does."""

    name: str
    verb: str
    thing: str
    parameters: tuple[Parameter, ...]
    required: tuple[str, ...]


_STYLES: tuple[Callable[[str, str], str], ...] = (
    lambda verb, thing: f"{verb}_{thing}",
    lambda verb, thing: f"{verb}_{thing}",
    lambda verb, thing: f"{thing}_{verb}",
    lambda verb, thing: f"{verb}{thing.capitalize()}",
    lambda verb, thing: f"{verb}-{thing}",
)


def _article(thing: str) -> str:
    return f"an {thing}" if thing[0] in "aeio" else f"a {thing}"


def _make(rng: Random, verb: str, thing: str) -> Made:
    count = int(rng.random() * 5)
    chosen: dict[str, Parameter] = {}
    while len(chosen) < count:
        parameter = pick(rng, _PARAMETERS)
        chosen[parameter.key] = parameter
    required = tuple(key for key in chosen if rng.random() < 0.75)
    return Made(pick(rng, _STYLES)(verb, thing), verb, thing, tuple(chosen.values()), required)


def _declare(rng: Random, made: Made) -> Tool:
    description = pick(
        rng,
        (
            f"{made.verb.capitalize()} {_article(made.thing)}.",
            f"Use this to {made.verb} {_article(made.thing)}.",
            f"{made.verb.capitalize()} the given {made.thing}.",
        ),
    )
    schema: dict[str, object] = {
        "type": "object",
        "properties": {parameter.key: parameter.schema for parameter in made.parameters},
    }
    if made.required:
        schema["required"] = list(made.required)
    return Tool(made.name, description, schema)


def _tools(rng: Random, count: int, wanted: tuple[str, str]) -> list[Made]:
    """Draw tools of different names; some share the verb or the object of wanted, none is wanted."""
    verb, thing = wanted
    taken = {wanted}
    tools: list[Made] = []
    while len(tools) < count:
        kind = rng.random()
        other = (
            verb if kind < 0.25 else pick(rng, _VERBS),
            thing if 0.25 <= kind < 0.5 else pick(rng, _OBJECTS),
        )
        if other not in taken:
            taken.add(other)
            tools.append(_make(rng, *other))
    return tools


class Request(NamedTuple):
    """A wish: the arguments by key, and the words for them."""

    text: str
    arguments: dict[str, object]


_WITHOUT = (
    "{verb} the {thing}",
    "please {verb} the {thing}",
    "I want to {verb} {a_thing}",
    "can you {verb} {a_thing}",
    "I need you to {verb} the {thing}",
    "it is time to {verb} the {thing}",
)


def _request(rng: Random, made: Made) -> Request:
    """Draw arguments, in the order of the schema, and say them in any order."""
    given = [p for p in made.parameters if p.key in made.required or rng.random() < 0.5]
    arguments = {parameter.key: parameter.draw(rng) for parameter in given}
    wish = pick(rng, _WITHOUT).format(verb=made.verb, thing=made.thing, a_thing=_article(made.thing))
    said = [_say(rng, parameter, arguments[parameter.key]) for parameter in given]
    rng.shuffle(said)
    if not said:
        return Request(wish, arguments)
    kind = rng.random()
    if kind < 0.5:
        listed = " and ".join((", ".join(said[:-1]), said[-1])) if len(said) > 1 else said[0]
        return Request(f"{wish} with {listed}", arguments)
    return Request(f"{wish}: {', '.join(said)}", arguments)


def _say(rng: Random, parameter: Parameter, value: object) -> str:
    if isinstance(value, bool):
        return f"{parameter.label} {'yes' if value else 'no'}"
    link = pick(rng, (" ", " ", " set to ", " = ", ": "))
    return f"{parameter.label}{link}{value}"


def _sentence(text: str) -> str:
    mark = "?" if text.startswith("can you") and ":" not in text else "."
    return text[0].upper() + text[1:] + mark


def _canonical(name: str, arguments: dict[str, object]) -> str:
    return json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)


def _call(number: int, name: str, arguments: dict[str, object]) -> PastCall:
    return PastCall(f"call_{number}", name, json.dumps(arguments, ensure_ascii=False))


_RESULTS: tuple[Callable[[Random], str], ...] = (
    lambda rng: json.dumps({"status": pick(rng, ("ok", "done", "saved", "sent", "failed", "waiting"))}),
    lambda rng: json.dumps({"result": 1 + int(rng.random() * 9999)}),
    lambda rng: json.dumps({"value": (1 + int(rng.random() * 999)) / 10}),
    lambda rng: json.dumps({"id": _code(rng)}),
    lambda rng: json.dumps({"city": _city(rng), "date": _date(rng)}, ensure_ascii=False),
    lambda rng: json.dumps({"name": _name(rng), "count": 1 + int(rng.random() * 99)}, ensure_ascii=False),
)


def candidate(rng: Random) -> Candidate:
    """Draw tools and a request."""
    wanted = (pick(rng, _VERBS), pick(rng, _OBJECTS))
    made = _make(rng, *wanted)
    request = _request(rng, made)
    kind = rng.random()
    others = _tools(rng, int(rng.random() * 8), wanted)
    combination = f"{made.name}:{json.dumps(request.arguments)}"
    if kind < 0.12:
        others = others or _tools(rng, 1, wanted)
        return Candidate("none" + combination, lambda: _refusal(rng, request, others))
    if kind < 0.24 and others:
        return Candidate("two" + combination, lambda: _two_calls(rng, made, request, others))
    if kind < 0.36:
        return Candidate("result" + combination, lambda: _result(rng, made, request, others))
    return Candidate("one" + combination, lambda: _one_call(rng, made, request, others))


def _shuffled(rng: Random, tools: list[Made]) -> list[Tool]:
    rng.shuffle(tools)
    return [_declare(rng, made) for made in tools]


def _one_call(rng: Random, made: Made, request: Request, others: list[Made]) -> Example:
    setting = draw_setting(rng)
    tools = _shuffled(rng, [made, *others])
    answer = setting.answer(f"The tool {made.name} fits.", "", (_call(1, made.name, request.arguments),))
    chat = setting.chat([Turn("user", _sentence(request.text))], tools)
    return Example("tools", chat, None, answer, _canonical(made.name, request.arguments))


def _refusal(rng: Random, request: Request, others: list[Made]) -> Example:
    setting = draw_setting(rng)
    tools = _shuffled(rng, others)
    answer = setting.answer("No tool fits.", REFUSAL)
    return Example("tools", setting.chat([Turn("user", _sentence(request.text))], tools), None, answer, REFUSAL)


def _two_calls(rng: Random, made: Made, request: Request, others: list[Made]) -> Example:
    setting = draw_setting(rng)
    second = others[0]
    other = _request(rng, second)
    tools = _shuffled(rng, [made, *others])
    text = f"{_sentence(request.text)} {pick(rng, ('Then', 'After that,', 'Also,'))} {other.text}."
    calls = (_call(1, made.name, request.arguments), _call(2, second.name, other.arguments))
    answer = setting.answer(f"The tools {made.name} and {second.name} fit.", "", calls)
    expected = f"[{_canonical(made.name, request.arguments)}, {_canonical(second.name, other.arguments)}]"
    return Example("tools", setting.chat([Turn("user", text)], tools), None, answer, expected)


def _result(rng: Random, made: Made, request: Request, others: list[Made]) -> Example:
    """The call has been made; its result has come back."""
    setting = draw_setting(rng)
    tools = _shuffled(rng, [made, *others])
    result = pick(rng, _RESULTS)(rng)
    call = _call(1, made.name, request.arguments)
    reasoning = f"The tool {made.name} fits." if setting.thinking else None
    turns = [
        Turn("user", _sentence(request.text)),
        Turn("assistant", "", reasoning=reasoning, calls=(call,)),
        Turn("tool", result, call_id=call.call_id),
    ]
    content = f"The tool says: {result}"
    return Example("tools", setting.chat(turns, tools), None, setting.answer("The result is there.", content), content)
