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
from tools.train_nano.tasks.fields import a_or_an, listed
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


class Request(NamedTuple):
    """A wish: the words for it, and the arguments in the order of the schema."""

    text: str
    arguments: dict[str, object]


class Made(NamedTuple):
    """A tool. deed: what it does; rivals: the things that it deals with. ask: draws a request that only it answers."""

    name: str
    description: str
    parameters: tuple[Parameter, ...]
    required: tuple[str, ...]
    deed: str
    rivals: frozenset[str]
    is_plain: bool
    ask: Callable[[Random], Request]

    def rivals_with(self, other: Made) -> bool:
        """Whether a request for one might mean the other; plain tools differ by verb and object."""
        if self.deed == other.deed or self.name == other.name:
            return True
        return self.is_plain != other.is_plain and bool(self.rivals & other.rivals)

    def declare(self) -> Tool:
        """Spell the declaration."""
        schema: dict[str, object] = {
            "type": "object",
            "properties": {parameter.key: parameter.schema for parameter in self.parameters},
        }
        if self.required:
            schema["required"] = list(self.required)
        return Tool(self.name, self.description, schema)


# Tools of a verb and an object


_STYLES: tuple[Callable[[str, str], str], ...] = (
    lambda verb, thing: f"{verb}_{thing}",
    lambda verb, thing: f"{verb}_{thing}",
    lambda verb, thing: f"{thing}_{verb}",
    lambda verb, thing: f"{verb}{thing.capitalize()}",
    lambda verb, thing: f"{verb}-{thing}",
)
_WISHES = (
    "{verb} the {thing}",
    "please {verb} the {thing}",
    "I want to {verb} {a_thing}",
    "can you {verb} {a_thing}",
    "I need you to {verb} the {thing}",
    "it is time to {verb} the {thing}",
    "would you {verb} {a_thing}",
    "{verb} {a_thing} for me",
)
_LINKS = (" ", " ", " set to ", " = ", ": ")


def _plain_tool(rng: Random, verb: str, thing: str) -> Made:
    chosen: dict[str, Parameter] = {}
    for _ in range(int(rng.random() * 5)):
        parameter = pick(rng, _PARAMETERS)
        chosen[parameter.key] = parameter
    parameters = tuple(chosen.values())
    required = tuple(key for key in chosen if rng.random() < 0.75)
    description = pick(
        rng,
        (
            f"{verb.capitalize()} {a_or_an(thing)}.",
            f"Use this to {verb} {a_or_an(thing)}.",
            f"{verb.capitalize()} the given {thing}.",
        ),
    )

    def ask(rng: Random) -> Request:
        return _plain_request(rng, verb, thing, [p for p in parameters if p.key in required or rng.random() < 0.5])

    name = pick(rng, _STYLES)(verb, thing)
    return Made(name, description, parameters, required, f"{verb} {thing}", frozenset((thing,)), True, ask)


def _plain_request(rng: Random, verb: str, thing: str, given: Sequence[Parameter]) -> Request:
    """Draw arguments and say them in any order."""
    arguments = {parameter.key: parameter.draw(rng) for parameter in given}
    wish = pick(rng, _WISHES).format(verb=verb, thing=thing, a_thing=a_or_an(thing))
    said = [_say(rng, parameter, arguments[parameter.key]) for parameter in given]
    rng.shuffle(said)
    if not said:
        return Request(wish, arguments)
    if rng.random() < 0.5:
        return Request(f"{wish} with {listed(said)}", arguments)
    return Request(f"{wish}: {', '.join(said)}", arguments)


def _say(rng: Random, parameter: Parameter, value: object) -> str:
    if isinstance(value, bool):
        return f"{parameter.label} {'yes' if value else 'no'}"
    return f"{parameter.label}{pick(rng, _LINKS)}{value}"


# Tools of daily life


class Slot(NamedTuple):
    """A parameter of a daily tool. keys: names that it may have."""

    keys: tuple[str, ...]
    schema: dict[str, object]
    draw: Callable[[Random], object]


class Daily(NamedTuple):
    """A tool with requests in natural words. A slot that every request names is required."""

    names: tuple[str, ...]
    description: str
    slots: dict[str, Slot]
    requests: tuple[str, ...]
    rivals: frozenset[str]


def _range(low: int, high: int) -> Callable[[Random], object]:
    return lambda rng: low + int(rng.random() * (high - low + 1))


def _one(options: Sequence[str]) -> Callable[[Random], object]:
    return lambda rng: pick(rng, options)


def _enum(keys: str, options: Sequence[str]) -> Slot:
    return Slot(words(keys), {"type": "string", "enum": list(options)}, _one(options))


def _string(keys: str, draw: Callable[[Random], object]) -> Slot:
    return Slot(words(keys), {"type": "string"}, draw)


def _int(keys: str, low: int, high: int) -> Slot:
    return Slot(words(keys), {"type": "integer"}, _range(low, high))


def _true(rng: Random) -> bool:
    return True


def _clock(rng: Random) -> str:
    return f"{int(rng.random() * 24):02}:{int(rng.random() * 60):02}"


_CURRENCIES = ("EUR", "USD", "GBP", "JPY", "CHF")
_TONGUES = ("French", "German", "Spanish", "Italian", "Polish")
_DISHES = ("pizza", "soup", "salad", "pasta", "curry", "cake", "bread")
_GENRES = ("jazz", "rock", "pop", "folk", "classical")

_DAILY = (
    Daily(
        words("get_weather weather_lookup fetchWeather weather-now"),
        "Get the weather of a city.",
        {"city": _string("city location place", _city), "days": _int("days num_days", 2, 10)},
        (
            "What is the weather in {city}?",
            "Tell me the weather in {city} for the next {days} days.",
            "How will the weather be in {city}?",
            "I need a {days} day forecast for {city}.",
        ),
        frozenset(),
    ),
    Daily(
        words("convert_currency currency_convert exchangeMoney"),
        "Convert an amount of money.",
        {
            "amount": _int("amount value", 1, 900),
            "source": _enum("from source from_currency", _CURRENCIES),
            "target": _enum("to target to_currency", _CURRENCIES),
        },
        (
            "How much are {amount} {source} in {target}?",
            "Convert {amount} {source} to {target}.",
            "I have {amount} {source}. What is that in {target}?",
        ),
        frozenset(("payment", "account")),
    ),
    Daily(
        words("set_timer start_countdown timerSet"),
        "Start a timer.",
        {"minutes": _int("minutes duration length", 1, 90), "label": _string("label title", _phrase)},
        (
            "Set a timer for {minutes} minutes.",
            "Wake me in {minutes} minutes.",
            "Start a timer of {minutes} minutes called {label}.",
        ),
        frozenset(("timer", "alarm")),
    ),
    Daily(
        words("send_mail mail_send sendEmail"),
        "Send an e-mail.",
        {"to": _string("to recipient", _name), "subject": _string("subject title", _phrase)},
        (
            "Write a mail to {to} about {subject}.",
            "Send {to} an e-mail with the subject {subject}.",
            "Please mail {to}; the subject is {subject}.",
        ),
        frozenset(("message", "letter")),
    ),
    Daily(
        words("play_music music_player playMusic"),
        "Play music.",
        {"genre": _enum("genre style kind", _GENRES), "volume": _int("volume level", 1, 10)},
        (
            "Play some {genre}.",
            "I would like to hear {genre} at volume {volume}.",
            "Put on {genre} music, volume {volume}.",
            "Let me hear {genre}.",
        ),
        frozenset(("song", "video", "game")),
    ),
    Daily(
        words("search_flights flight_search findFlights"),
        "Search flights between two cities.",
        {
            "origin": _string("origin from departure", _city),
            "destination": _string("destination to arrival", _city),
            "date": _string("date day", _date),
        },
        (
            "Find a flight from {origin} to {destination} on {date}.",
            "I want to fly from {origin} to {destination} on {date}.",
            "Which flights go to {destination} from {origin} on {date}?",
        ),
        frozenset(("flight", "trip", "route", "train")),
    ),
    Daily(
        words("reserve_table table_booking bookRestaurant"),
        "Reserve a table in a restaurant.",
        {
            "guests": _int("guests people seats", 2, 12),
            "time": _string("time at", _clock),
            "city": _string("city location", _city),
        },
        (
            "Reserve a table for {guests} at {time}.",
            "We are {guests} people and want to eat in {city} at {time}.",
            "A table for {guests} in {city} at {time}, please.",
        ),
        frozenset(("table", "meal", "room")),
    ),
    Daily(
        words("translate_text text_translate translateWord"),
        "Translate a text.",
        {"text": _string("text phrase input", _phrase), "language": _enum("language target to", _TONGUES)},
        (
            "Translate {text} into {language}.",
            "What is {text} in {language}?",
            "How do you say {text} in {language}?",
        ),
        frozenset(words("letter message book chapter file note lesson recipe task report contract")),
    ),
    Daily(
        words("add_reminder reminder_create remindMe"),
        "Add a reminder.",
        {"text": _string("text what content", _phrase), "date": _string("date day when", _date)},
        (
            "Remind me of {text} on {date}.",
            "On {date} I have to think of {text}.",
            "Do not let me forget {text} on {date}.",
        ),
        frozenset(("task", "note", "event", "meeting", "alarm")),
    ),
    Daily(
        words("set_light light_control switchLight"),
        "Change the light of a room.",
        {
            "room": _enum("room where", ("kitchen", "bedroom", "office", "bathroom", "hall")),
            "color": _enum("color light_color", COLORS[:6]),
            "brightness": _int("brightness percent level", 5, 100),
        },
        (
            "Make the light in the {room} {color}.",
            "Set the {room} light to {brightness} percent.",
            "Light in the {room}: {color}, {brightness} percent.",
            "Switch on the light in the {room}.",
        ),
        frozenset(("lamp", "room")),
    ),
    Daily(
        words("set_temperature heating_control setHeating"),
        "Set the temperature of the heating.",
        {"degrees": _int("degrees temperature value", 14, 28)},
        ("Make it {degrees} degrees warm.", "Heat the house to {degrees} degrees.", "Set the heating to {degrees}."),
        frozenset(("heater", "fan")),
    ),
    Daily(
        words("find_recipe recipe_search searchRecipes"),
        "Find a recipe.",
        {"dish": _enum("dish meal food", _DISHES), "minutes": _int("max_minutes minutes time_limit", 10, 90)},
        (
            "How do I cook {dish}?",
            "I want to make {dish}.",
            "Show me how to make {dish} in {minutes} minutes.",
            "A recipe for {dish} that takes {minutes} minutes, please.",
        ),
        frozenset(("recipe", "meal")),
    ),
    Daily(
        words("track_package package_status whereIsParcel"),
        "Say where a package is.",
        {"code": _string("code tracking_code number", _code)},
        ("Where is my package {code}?", "Has the package {code} arrived?", "What is the status of package {code}?"),
        frozenset(("parcel", "order", "letter")),
    ),
    Daily(
        words("world_clock time_in_city getTime"),
        "Tell the time in a city.",
        {"city": _string("city place location", _city)},
        ("What time is it in {city}?", "How late is it in {city} now?", "Tell me the time in {city}."),
        frozenset(),
    ),
    Daily(
        words("phone_call call_contact makeCall"),
        "Call somebody on the phone.",
        {"contact": _string("contact name person", _name)},
        ("Call {contact}.", "I need to speak to {contact} on the phone.", "Give {contact} a ring."),
        frozenset(),
    ),
    Daily(
        words("stock_price quote_lookup getQuote"),
        "Get the price of a share.",
        {"symbol": _string("symbol ticker", lambda rng: _code(rng)[:2])},
        ("What is a share of {symbol} worth?", "How does the share {symbol} stand?", "Give me the price of {symbol}."),
        frozenset(),
    ),
    Daily(
        words("rent_bike bike_rental rentBike"),
        "Rent a bike.",
        {"hours": _int("hours duration", 1, 12), "electric": Slot(("electric", "e_bike"), {"type": "boolean"}, _true)},
        (
            "I need a bike for {hours} hours.",
            "Rent me a bike for {hours} hours.",
            "An electric bike for {hours} hours, please.<electric>",
        ),
        frozenset(("bike", "car")),
    ),
    Daily(
        words("news_search latest_news getNews"),
        "Search the news.",
        {"topic": _enum("topic subject about", ("sports", "science", "politics", "music", "travel"))},
        ("What is new in {topic}?", "Show me the news about {topic}.", "Any news on {topic}?"),
        frozenset(),
    ),
    Daily(
        words("roll_dice throw_dice rollDice"),
        "Roll dice.",
        {"count": _int("count dice number", 1, 6), "sides": _int("sides faces", 4, 20)},
        ("Roll {count} dice with {sides} sides.", "Throw {count} dice of {sides} sides each."),
        frozenset(("game",)),
    ),
    Daily(
        words("measure_distance distance_between getDistance"),
        "Measure the distance of two cities.",
        {
            "start": _string("start from origin", _city),
            "end": _string("end to target", _city),
            "unit": _enum("unit measure", ("km", "miles")),
        },
        (
            "How far is it from {start} to {end}?",
            "How many {unit} are between {start} and {end}?",
            "Give me the distance from {start} to {end} in {unit}.",
        ),
        frozenset(("map", "route", "trip")),
    ),
)


def _daily_tool(rng: Random, daily: Daily) -> Made:
    keys = {slot: pick(rng, kind.keys) for slot, kind in daily.slots.items()}
    if len(set(keys.values())) < len(keys):
        return _daily_tool(rng, daily)
    parameters = tuple(Parameter(keys[slot], slot, kind.schema, kind.draw) for slot, kind in daily.slots.items())
    required = tuple(keys[slot] for slot in daily.slots if all(_names(text, slot) for text in daily.requests))

    def ask(rng: Random) -> Request:
        text = pick(rng, daily.requests)
        values = {slot: kind.draw(rng) for slot, kind in daily.slots.items() if _names(text, slot)}
        if len(set(map(str, values.values()))) < len(values):
            return ask(rng)
        said = text.split("<")[0].format(**values)
        return Request(said, {keys[slot]: value for slot, value in values.items()})

    deed = daily.description
    return Made(pick(rng, daily.names), deed, parameters, required, deed, daily.rivals, False, ask)


def _names(request: str, slot: str) -> bool:
    return f"{{{slot}}}" in request or f"<{slot}>" in request


# Examples


def _draw_tool(rng: Random) -> Made:
    if rng.random() < 0.35:
        return _daily_tool(rng, pick(rng, _DAILY))
    return _plain_tool(rng, pick(rng, _VERBS), pick(rng, _OBJECTS))


def _others(rng: Random, count: int, wanted: Made) -> list[Made]:
    """Draw tools of which none does what another one or wanted does; some share the verb or the object of wanted."""
    verb, _, thing = wanted.deed.partition(" ")
    tools: list[Made] = [wanted]
    while len(tools) <= count:
        draw = rng.random()
        if wanted.is_plain and draw < 0.2:
            other = _plain_tool(rng, verb, pick(rng, _OBJECTS))
        elif wanted.is_plain and draw < 0.4:
            other = _plain_tool(rng, pick(rng, _VERBS), thing)
        else:
            other = _draw_tool(rng)
        if not any(other.rivals_with(tool) for tool in tools):
            tools.append(other)
    return tools[1:]


def _sentence(text: str) -> str:
    if text[-1] in ".?":
        return text
    mark = "?" if text.startswith(("can you", "would you")) and ":" not in text else "."
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
    made = _draw_tool(rng)
    request = made.ask(rng)
    others = _others(rng, int(rng.random() * 8), made)
    combination = _combination(made, request)
    kind = rng.random()
    if kind < 0.14:
        others = others or _others(rng, 1, made)
        return Candidate(f"none {combination}", lambda: _refusal(rng, request, others))
    if kind < 0.26 and others:
        second = others[0].ask(rng)
        combination += _combination(others[0], second)
        return Candidate(f"two {combination}", lambda: _two_calls(rng, made, request, second, others))
    if kind < 0.38:
        return Candidate(f"result {combination}", lambda: _result(rng, made, request, others))
    return Candidate(f"one {combination}", lambda: _one_call(rng, made, request, others))


def _combination(made: Made, request: Request) -> str:
    """What is asked for, whatever the tool and its parameters are called."""
    return f"{made.deed}:{json.dumps(list(request.arguments.values()))}"


def _shuffled(rng: Random, tools: Sequence[Made]) -> list[Tool]:
    order = list(tools)
    rng.shuffle(order)
    return [made.declare() for made in order]


def _one_call(rng: Random, made: Made, request: Request, others: Sequence[Made]) -> Example:
    setting = draw_setting(rng)
    tools = _shuffled(rng, [made, *others])
    answer = setting.answer(f'The tool "{made.name}" fits.', "", (_call(1, made.name, request.arguments),))
    chat = setting.chat([Turn("user", _sentence(request.text))], tools)
    return Example("tools", chat, None, answer, _canonical(made.name, request.arguments))


def _refusal(rng: Random, request: Request, others: Sequence[Made]) -> Example:
    setting = draw_setting(rng)
    tools = _shuffled(rng, others)
    answer = setting.answer("No tool fits.", REFUSAL)
    return Example("tools", setting.chat([Turn("user", _sentence(request.text))], tools), None, answer, REFUSAL)


def _two_calls(rng: Random, made: Made, request: Request, second: Request, others: Sequence[Made]) -> Example:
    setting = draw_setting(rng)
    other = others[0]
    tools = _shuffled(rng, [made, *others])
    text = f"{_sentence(request.text)} {pick(rng, _THEN)} {_sentence(second.text)}"
    calls = (_call(1, made.name, request.arguments), _call(2, other.name, second.arguments))
    answer = setting.answer(f'The tools "{made.name}" and "{other.name}" fit.', "", calls)
    expected = f"[{_canonical(made.name, request.arguments)}, {_canonical(other.name, second.arguments)}]"
    return Example("tools", setting.chat([Turn("user", text)], tools), None, answer, expected)


_THEN = ("Then:", "And:", "After that:", "Also:", "Second:")


def _result(rng: Random, made: Made, request: Request, others: Sequence[Made]) -> Example:
    """The call has been made; its result has come back."""
    setting = draw_setting(rng)
    tools = _shuffled(rng, [made, *others])
    result = pick(rng, _RESULTS)(rng)
    call = _call(1, made.name, request.arguments)
    reasoning = f'The tool "{made.name}" fits.' if setting.thinking else None
    turns = [
        Turn("user", _sentence(request.text)),
        Turn("assistant", "", reasoning=reasoning, calls=(call,)),
        Turn("tool", result, call_id=call.call_id),
    ]
    content = f"The tool says: {result}"
    return Example("tools", setting.chat(turns, tools), None, setting.answer("The result is there.", content), content)
