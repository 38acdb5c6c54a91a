"""A paragraph of facts and a JSON schema; the answer is the record as canonical JSON.

Canonical is: members in the order of the schema's properties, separators ", " and ": ", text not escaped. It is the
style in which prompts show schemas, so a model sees one style only. Shapes come from a grammar: fields of every kind,
nested objects, arrays of all of these, trees by reference. A field that the text calls unknown is null where the
schema allows it; one that is optional and not mentioned is left out.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from random import Random
from typing import NamedTuple

from dsparkd.text.encoding import Turn
from tools.train_nano.tasks.example import Candidate, Example, pick
from tools.train_nano.tasks.setting import draw_setting
from tools.train_nano.tasks.words import ADJECTIVES, CITIES, COLORS, COUNTRIES, ITEMS, NAMES, NOUNS, words

Schema = dict[str, object]


class Field(NamedTuple):
    """One member of a record. value is ABSENT for an optional one that the text leaves out.

    facts: sentences that give the value, each to be kept whole, in this order.
    """

    key: str
    schema: Schema
    value: object
    facts: tuple[str, ...]
    shape: str


ABSENT = object()

_KINDS = words(
    "order customer book machine trip house product sensor event student plant ship shop game recipe film server "
    "parcel animal room project meeting vehicle tool account article hotel team invoice lesson"
)


def candidate(rng: Random) -> Candidate:
    """Draw a schema and a record that fits it."""
    kind = pick(rng, _KINDS)
    if rng.random() < 0.06:
        fields = [_tree(rng)]
    else:
        fields = _fields(rng, kind, 2 + int(rng.random() * 5), depth=0)
    record = {field.key: field.value for field in fields if field.value is not ABSENT}
    content = canonical(record)
    shape = ",".join(field.shape for field in fields)

    def build() -> Example:
        return _example(rng, kind, fields, content)

    return Candidate(f"{kind}:{shape}:{content}", build)


def canonical(value: object) -> str:
    """Spell a JSON value in the one way that answers have."""
    return json.dumps(value, ensure_ascii=False)


def _object_schema(rng: Random, fields: Sequence[Field], optional: frozenset[str]) -> Schema:
    schema: Schema = {"type": "object", "properties": {field.key: field.schema for field in fields}}
    schema["required"] = [field.key for field in fields if field.key not in optional]
    if rng.random() < 0.6:
        schema["additionalProperties"] = False
    return schema


_SCHEMA_ONLY_IN_SYSTEM = (
    "Reply with JSON that fits this schema:\n{schema}",
    "Answer only with a JSON object. Its schema is:\n{schema}",
    "Use this JSON schema for the answer:\n{schema}",
    "Extract the data as JSON. Schema:\n{schema}",
    "Output format: JSON with the schema\n{schema}",
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
)


def _example(rng: Random, kind: str, fields: Sequence[Field], content: str) -> Example:
    setting = draw_setting(rng)
    optional = frozenset(field.key for field in fields if field.value is ABSENT)
    spare = frozenset(field.key for field in fields if rng.random() < 0.03)
    schema = _object_schema(rng, fields, optional | spare)
    if rng.random() < 0.15:
        schema = {"title": kind, **schema}
    tree = [field for field in fields if field.shape == "tree"]
    if tree:
        schema["$defs"] = {"node": _NODE}
    text = _paragraph(rng, kind, fields)
    request = pick(rng, _REQUESTS).format(kind=kind)
    message = f"{text}\n\n{request}" if rng.random() < 0.7 else f"{request}\n\n{text}"
    turns = [Turn("user", message)]
    if rng.random() < 0.5:
        chat = setting.chat(turns, response_schema=schema)
    else:
        instructions = pick(rng, _SCHEMA_ONLY_IN_SYSTEM).format(schema=canonical(schema))
        chat = setting.chat(turns, instructions=instructions)
    keys = ", ".join(field.key for field in fields if field.value is not ABSENT)
    return Example("extraction", chat, schema, setting.answer(f"The fields are {keys}.", content), content)


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
)


def _paragraph(rng: Random, kind: str, fields: Sequence[Field]) -> str:
    groups = [field.facts for field in fields if field.facts]
    for _ in range(int(rng.random() * 3)):
        groups.append((_distraction(rng, kind, fields),))
    rng.shuffle(groups)
    article = f"an {kind}" if kind[0] in "aeiou" else f"a {kind}"
    start = pick(rng, _STARTS).format(kind=kind, a_kind=article)
    facts = [fact for group in groups for fact in group]
    if rng.random() < 0.15:
        return "\n".join(([start] if start else []) + [f"- {fact}" for fact in facts])
    return " ".join(([start] if start else []) + facts)


def _distraction(rng: Random, kind: str, fields: Sequence[Field]) -> str:
    if rng.random() < 0.4:
        return pick(rng, _NOISE).format(n=pick(rng, NAMES))
    taken = {field.key for field in fields}
    maker = pick(rng, _SCALARS)
    field = maker(rng)
    while not field.facts or field.key in taken:
        field = pick(rng, _SCALARS)(rng)
    fact = field.facts[0]
    return f"Of another {kind} we heard this: {fact}" if rng.random() < 0.5 else fact


# Scalars ------------------------------------------------------------------------------------------------------------


_WORDINGS = (
    "The {l} is {v}.",
    "The {l} is {v}.",
    "Its {l} is {v}.",
    "As {l} we have {v}.",
    "The {l} was given as {v}.",
    "{L}: {v}.",
    "We noted {v} as the {l}.",
    "They say that the {l} is {v}.",
)
_UNKNOWN = (
    "The {l} is unknown.",
    "The {l} is not known.",
    "Nobody knows the {l}.",
    "There is no {l}.",
    "The {l} was not given.",
)


def _tell(rng: Random, key: str, said: object) -> str:
    label = key.replace("_", " ")
    return pick(rng, _WORDINGS).format(l=label, L=label[0].upper() + label[1:], v=said)


def _scalar(rng: Random, key: str, schema: Schema, value: object, said: object, shape: str) -> Field:
    """Make a member that may be null or left out."""
    kind = rng.random()
    if kind < 0.1:
        if "enum" in schema:
            schema = {**schema, "enum": [*_options(schema), None]}
            del schema["type"]
        elif rng.random() < 0.5:
            schema = {**schema, "type": [schema["type"], "null"]}
        else:
            schema = {"anyOf": [schema, {"type": "null"}]}
        if rng.random() < 0.6:
            label = key.replace("_", " ")
            return Field(key, schema, None, (pick(rng, _UNKNOWN).format(l=label),), f"{shape}?")
        return Field(key, schema, value, (_tell(rng, key, said),), f"{shape}?")
    if kind < 0.14:
        return Field(key, schema, ABSENT, (), f"{shape}-")
    return Field(key, schema, value, (_tell(rng, key, said),), shape)


def _options(schema: Schema) -> list[object]:
    options = schema["enum"]
    assert isinstance(options, list)
    return options


_COUNTRY_NAMES = tuple(country for country, _ in COUNTRIES if not country.startswith("the "))
_THINGS = tuple(one for one, _ in ITEMS)
_MATERIALS = words("wood steel glass paper stone cotton wool plastic copper leather rubber clay")
_LANGUAGES = words("English French German Spanish Polish Italian Greek Dutch Danish Czech Turkish Japanese")
_UNICODE = words("東京 大阪 北京 Москва Київ Αθήνα Ñandú Crème Straße Grün naïve façade Größe 수원 ไทย Škoda Żółw")


def _title(rng: Random) -> str:
    return f"{pick(rng, ADJECTIVES)} {pick(rng, NOUNS)}"


_TEXTS: tuple[tuple[str, Callable[[Random], str]], ...] = (
    *((key, lambda rng: pick(rng, NAMES)) for key in words("name owner author manager buyer driver teacher guest")),
    *((key, lambda rng: pick(rng, CITIES)) for key in words("city origin destination birthplace location")),
    *((key, lambda rng: pick(rng, COLORS)) for key in words("color paint frame_color")),
    *((key, lambda rng: pick(rng, _COUNTRY_NAMES)) for key in words("country market")),
    *((key, lambda rng: pick(rng, _MATERIALS)) for key in words("material surface")),
    *((key, lambda rng: pick(rng, _LANGUAGES)) for key in words("language translation")),
    *((key, lambda rng: pick(rng, _THINGS)) for key in words("content gift item part")),
    *((key, _title) for key in words("title nickname motto label brand")),
    *((key, lambda rng: pick(rng, _UNICODE)) for key in words("sign mark original_name")),
)


def _text(rng: Random) -> Field:
    key, draw = pick(rng, _TEXTS)
    value = draw(rng)
    schema: Schema = {"type": "string"}
    shape = "s"
    if rng.random() < 0.12:
        schema["minLength"] = 1
        shape = "sl"
    if rng.random() < 0.12:
        schema["maxLength"] = pick(rng, (20, 30, 40, 64))
        shape = "sl"
    said = f'"{value}"' if rng.random() < 0.2 else value
    return _scalar(rng, key, schema, value, said, shape)


_INTEGERS = (  # key, low, high
    ("age", 1, 99),
    ("count", 1, 200),
    ("quantity", 1, 99),
    ("year", 1900, 2040),
    ("floor", 0, 40),
    ("pages", 10, 900),
    ("weight_kg", 1, 500),
    ("seats", 1, 300),
    ("stock", 0, 5000),
    ("rank", 1, 50),
    ("score", 0, 100),
    ("height_cm", 10, 250),
    ("rooms", 1, 20),
    ("minutes", 1, 240),
    ("batch", 1, 9999),
    ("members", 2, 80),
)
_NUMBER_WORDS = words("zero one two three four five six seven eight nine ten eleven twelve")


def _integer(rng: Random) -> Field:
    key, low, high = pick(rng, _INTEGERS)
    value = low + int(rng.random() * (high - low + 1))
    schema: Schema = {"type": "integer"}
    shape = "i"
    if rng.random() < 0.3:
        schema |= {"minimum": low, "maximum": high}
        shape = "ib"
    elif rng.random() < 0.1:
        schema["minimum"] = low
        shape = "im"
    said: object = _NUMBER_WORDS[value] if value <= 12 and rng.random() < 0.4 else value
    return _scalar(rng, key, schema, value, said, shape)


_NUMBERS = (  # key, high
    ("price", 500),
    ("rating", 5),
    ("length_m", 90),
    ("temperature", 40),
    ("distance_km", 800),
    ("width", 60),
    ("discount", 50),
    ("speed", 120),
    ("mass", 90),
    ("depth", 30),
    ("volume", 12),
    ("ratio", 1),
)


def _number(rng: Random) -> Field:
    key, high = pick(rng, _NUMBERS)
    places = pick(rng, (10, 10, 100))
    value = (1 + int(rng.random() * (high * places - 1))) / places
    schema: Schema = {"type": "number"}
    shape = "n"
    if rng.random() < 0.2:
        schema |= {"minimum": 0, "maximum": high}
        shape = "nb"
    number: object = int(value) if value == int(value) else value
    if key == "temperature" and rng.random() < 0.3 and shape == "n":
        number = -value if value != int(value) else -int(value)
    return _scalar(rng, key, schema, number, number, shape)


_BOOLEANS = (  # key, said when true, said when false
    ("paid", "It is paid.", "It is not paid."),
    ("open", "It is open.", "It is not open."),
    ("new", "It is new.", "It is not new."),
    ("active", "It is active.", "It is no longer active."),
    ("fragile", "It is fragile.", "It is not fragile."),
    ("insured", "It has an insurance.", "It has no insurance."),
    ("has_garden", "It has a garden.", "It has no garden."),
    ("has_wifi", "There is wifi.", "There is no wifi."),
    ("public", "It is public.", "It is not public."),
    ("verified", "It has been verified.", "It has not been verified."),
    ("urgent", "It is urgent.", "It is not urgent."),
    ("heated", "It is heated.", "It is not heated."),
    ("sold_out", "It is sold out.", "It is not sold out."),
    ("damaged", "It is damaged.", "It is not damaged."),
)


def _boolean(rng: Random) -> Field:
    key, yes, no = pick(rng, _BOOLEANS)
    value = rng.random() < 0.5
    if rng.random() < 0.3:
        fact = _tell(rng, key, "true" if value else "false")
    else:
        fact = yes if value else no
    return Field(key, {"type": "boolean"}, value, (fact,), "b")


_ENUMS = (
    ("status", ("open", "closed", "pending")),
    ("state", ("new", "used", "broken", "lost")),
    ("priority", ("low", "medium", "high")),
    ("size", ("S", "M", "L", "XL")),
    ("weekday", ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday")),
    ("season", ("spring", "summer", "autumn", "winter")),
    ("level", ("beginner", "advanced", "expert")),
    ("transport", ("car", "train", "ship", "plane")),
    ("shape", ("round", "square", "oval")),
    ("unit", ("kg", "g", "lb")),
    ("gender", ("female", "male", "diverse")),
    ("currency", ("EUR", "USD", "JPY", "GBP")),
    ("größe", ("klein", "mittel", "groß")),
    ("état", ("neuf", "usé", "cassé")),
    ("都市", ("東京", "大阪", "京都")),
    ("色", ("赤", "青", "白", "黒")),
    ("mood", ("😀", "😐", "😡")),
    ("grade", ("α", "β", "γ")),
)


def _enum(rng: Random) -> Field:
    key, options = pick(rng, _ENUMS)
    value = pick(rng, options)
    if rng.random() < 0.1:
        return Field(key, {"const": value}, value, (_tell(rng, key, value),), "c")
    return _scalar(rng, key, {"type": "string", "enum": list(options)}, value, value, "e")


_MONTHS = words("January February March April May June July August September October November December")


def _date(rng: Random) -> tuple[str, str]:
    """Draw a date: as the record has it, as the text says it."""
    year, month, day = 1990 + int(rng.random() * 45), 1 + int(rng.random() * 12), 1 + int(rng.random() * 28)
    value = f"{year}-{month:02}-{day:02}"
    kind = rng.random()
    if kind < 0.6:
        return value, value
    if kind < 0.8:
        return value, f"{day} {_MONTHS[month - 1]} {year}"
    return value, f"{_MONTHS[month - 1]} {day}, {year}"


_LETTERS = "ABCDEFGHKLMNPRSTUVWXYZ"


def _letters(rng: Random, count: int) -> str:
    return "".join(pick(rng, _LETTERS) for _ in range(count))


def _pattern(rng: Random) -> Field:
    kind = int(rng.random() * 5)
    if kind == 0:
        key = pick(rng, ("date", "start_date", "birthday", "due_date", "delivery_date"))
        value, said = _date(rng)
        schema: Schema = {"type": "string", "pattern": r"^\d{4}-\d{2}-\d{2}$"}
    elif kind == 1:
        key = pick(rng, ("date", "start_date", "end_date", "due_date"))
        value, said = _date(rng)
        schema = {"type": "string", "format": "date"}
    elif kind == 2:
        key = pick(rng, ("code", "reference", "serial"))
        value = said = f"{_letters(rng, 2)}-{1000 + int(rng.random() * 9000)}"
        schema = {"type": "string", "pattern": r"^[A-Z]{2}-\d{4}$"}
    elif kind == 3:
        key = pick(rng, ("time", "opening_time", "arrival"))
        value = said = f"{int(rng.random() * 24):02}:{int(rng.random() * 60):02}"
        schema = {"type": "string", "pattern": r"^\d{2}:\d{2}$"}
    else:
        key = pick(rng, ("plate", "ticket_code", "batch_code"))
        value = said = f"{_letters(rng, 3)}{100 + int(rng.random() * 900)}"
        schema = {"type": "string", "pattern": "^[A-Z]{3}[0-9]{3}$"}
    return _scalar(rng, key, schema, value, said, f"p{kind}")


_SCALARS: tuple[Callable[[Random], Field], ...] = (
    *(_text,) * 4,
    *(_integer,) * 3,
    *(_number,) * 2,
    *(_boolean,) * 2,
    *(_enum,) * 3,
    *(_pattern,) * 2,
)


# Arrays and objects -------------------------------------------------------------------------------------------------


def _listed(words: Sequence[object]) -> str:
    texts = [str(word) for word in words]
    return texts[0] if len(texts) == 1 else f"{', '.join(texts[:-1])} and {texts[-1]}"


_ARRAYS: tuple[tuple[str, str, Callable[[Random], object]], ...] = (
    ("tags", "string", lambda rng: pick(rng, ADJECTIVES)),
    ("colors", "string", lambda rng: pick(rng, COLORS)),
    ("languages", "string", lambda rng: pick(rng, _LANGUAGES)),
    ("guests", "string", lambda rng: pick(rng, NAMES)),
    ("authors", "string", lambda rng: pick(rng, NAMES)),
    ("stops", "string", lambda rng: pick(rng, CITIES)),
    ("parts", "string", lambda rng: pick(rng, _THINGS)),
    ("keywords", "string", lambda rng: pick(rng, NOUNS)),
    ("signs", "string", lambda rng: pick(rng, _UNICODE)),
    ("readings", "number", lambda rng: (1 + int(rng.random() * 900)) / 10),
    ("weights", "number", lambda rng: (1 + int(rng.random() * 400)) / 10),
    ("scores", "integer", lambda rng: int(rng.random() * 101)),
    ("years", "integer", lambda rng: 1950 + int(rng.random() * 80)),
    ("sizes", "integer", lambda rng: 1 + int(rng.random() * 60)),
)


def _array(rng: Random) -> Field:
    key, kind, draw = pick(rng, _ARRAYS)
    count = pick(rng, (0, 1, 2, 2, 3, 3, 4, 5))
    values = list(dict.fromkeys(draw(rng) for _ in range(count)))
    schema: Schema = {"type": "array", "items": {"type": kind}}
    shape = f"a{kind[0]}"
    if values and rng.random() < 0.3:
        schema |= {"minItems": 1, "maxItems": pick(rng, (5, 6, 8, 10))}
        shape += "b"
    if rng.random() < 0.1:
        schema["uniqueItems"] = True
    if not values:
        fact = pick(rng, (f"There are no {key}.", f"No {key} are known.", f"The list of {key} is empty."))
    elif len(values) == 1:
        fact = pick(rng, (f"The only one of the {key} is {values[0]}.", f"The {key}: {values[0]}."))
    else:
        fact = pick(rng, (f"The {key} are {{}}.", f"As {key} we have {{}}.", f"The {key}: {{}}.")).format(
            _listed(values)
        )
    return Field(key, schema, values, (fact,), shape)


_OBJECT_KEYS = words("address contact dimensions details seller warranty parent source package summary engine")
_OBJECTS_KEYS = words("items lines entries rows parts_list steps visits deliveries samples players")
_ORDINALS = ("first", "second", "third", "fourth")


def _plain_fields(rng: Random, count: int) -> list[Field]:
    """Scalars with a value and a key each, for use inside of other values."""
    fields: dict[str, Field] = {}
    while len(fields) < count:
        field = pick(rng, _SCALARS)(rng)
        if field.value is not ABSENT and field.shape != "b":
            fields.setdefault(field.key, field)
    return list(fields.values())


def _spoken(field: Field, value: object) -> str:
    label = field.key.replace("_", " ")
    return f"no {label}" if value is None else f"the {label} {value}"


def _object(rng: Random, depth: int) -> Field:
    key = pick(rng, _OBJECT_KEYS)
    fields = _plain_fields(rng, 2 + int(rng.random() * 3))
    value: dict[str, object] = {field.key: field.value for field in fields}
    schema = _object_schema(rng, fields, frozenset())
    label = key.replace("_", " ")
    said = [_spoken(field, field.value) for field in fields]
    if rng.random() < 0.5:
        facts: tuple[str, ...] = (f"The {label} has {_listed(said)}.",)
    else:
        facts = tuple(
            f"The {label} has {text}." if number == 0 or rng.random() < 0.5 else f"For the {label} we noted {text}."
            for number, text in enumerate(said)
        )
    shape = f"o({','.join(field.shape for field in fields)})"
    if depth == 0 and rng.random() < 0.2:
        inner = _object(rng, 1)
        if inner.key not in value and inner.key != key:
            properties = schema["properties"]
            assert isinstance(properties, dict)
            properties[inner.key] = inner.schema
            required = schema["required"]
            assert isinstance(required, list)
            required.append(inner.key)
            value[inner.key] = inner.value
            inner_label = inner.key.replace("_", " ")
            facts += (f"Inside of the {label} there is the {inner_label}.", *inner.facts)
            shape = f"{shape}+{inner.shape}"
    return Field(key, schema, value, facts, shape)


def _objects(rng: Random) -> Field:
    key = pick(rng, _OBJECTS_KEYS)
    label = key.replace("_", " ")
    count = 1 + int(rng.random() * 3)
    fields = _plain_fields(rng, 1 + int(rng.random() * 3))
    rows: list[dict[str, object]] = []
    facts = []
    for number in range(count):
        row: dict[str, object] = {field.key: _another(rng, field) for field in fields}
        rows.append(row)
        said = _listed([_spoken(field, row[field.key]) for field in fields])
        facts.append(f"The {_ORDINALS[number]} of the {label} has {said}.")
    schema: Schema = {"type": "array", "items": _object_schema(rng, fields, frozenset())}
    if rng.random() < 0.3:
        schema["minItems"] = 1
    return Field(key, schema, rows, tuple(facts), f"A({','.join(field.shape for field in fields)})")


_VALUES: dict[str, Callable[[Random], str]] = dict(_TEXTS)
_RANGES = {key: (low, high) for key, low, high in _INTEGERS}
_HIGHS = dict(_NUMBERS)


def _another(rng: Random, field: Field) -> object:
    """Draw one more value for a field."""
    key = field.key
    if field.value is None:
        return None
    if key in _VALUES:
        return _VALUES[key](rng)
    if key in _RANGES:
        low, high = _RANGES[key]
        return low + int(rng.random() * (high - low + 1))
    if key in _HIGHS:
        value = (1 + int(rng.random() * (_HIGHS[key] * 10 - 1))) / 10
        return int(value) if value == int(value) else value
    for name, options in _ENUMS:
        if name == key and "enum" in field.schema:
            return pick(rng, options)
    return field.value


_NODE: Schema = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "children": {"type": "array", "items": {"$ref": "#/$defs/node"}}},
    "required": ["name", "children"],
}


def _tree(rng: Random) -> Field:
    """A small tree of names."""
    names = list(dict.fromkeys(pick(rng, NAMES) for _ in range(2 + int(rng.random() * 5))))
    nodes: dict[str, list[str]] = {names[0]: []}
    for name in names[1:]:
        nodes[pick(rng, tuple(nodes))].append(name)
        nodes[name] = []

    def grow(name: str) -> dict[str, object]:
        return {"name": name, "children": [grow(child) for child in nodes[name]]}

    facts = [f"{name} stands above {_listed(children)}." for name, children in nodes.items() if children]
    leaves = [name for name, children in nodes.items() if not children]
    facts.append(f"Nobody stands below {_listed(leaves)}.")
    key = pick(rng, ("tree", "root", "head", "chart"))
    facts.insert(0, f"The {key} begins with {names[0]}.")
    return Field(key, {"$ref": "#/$defs/node"}, grow(names[0]), tuple(facts), "tree")


def _fields(rng: Random, kind: str, count: int, depth: int) -> list[Field]:
    fields: dict[str, Field] = {}
    while len(fields) < count:
        draw = rng.random()
        if draw < 0.7:
            field = pick(rng, _SCALARS)(rng)
        elif draw < 0.84:
            field = _array(rng)
        elif draw < 0.93:
            field = _object(rng, depth)
        else:
            field = _objects(rng)
        fields.setdefault(field.key, field)
    if all(field.value is ABSENT for field in fields.values()):
        return _fields(rng, kind, count, depth)
    return list(fields.values())
