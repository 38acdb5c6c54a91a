"""A grammar of schema shapes: members of records, each with a schema, a value that fits it, and sentences that say it.

Scalars of every JSON type with bounds, patterns, enumerations and null; arrays of scalars, of objects and of arrays;
nested objects; maps with free keys; shared definitions; trees and chains by reference.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from itertools import pairwise
from random import Random
from typing import NamedTuple

from tools.train_nano.tasks.example import pick
from tools.train_nano.tasks.words import ADJECTIVES, CITIES, COLORS, COUNTRIES, ITEMS, NAMES, NOUNS, words

Schema = dict[str, object]

ABSENT = object()


class Field(NamedTuple):
    """One member of a record. value is ABSENT for an optional one that the text leaves out.

    label: what the text calls it. facts: sentences that give the value, to be kept in this order, side by side.
    shape: a short name of its kind, the same for two fields that differ in words and values only.
    """

    key: str
    label: str
    schema: Schema
    value: object
    facts: tuple[str, ...]
    shape: str


class Kind(NamedTuple):
    """What a scalar can be: its schema, one value, how the text says that value, more values."""

    schema: Schema
    draw: Callable[[], tuple[object, object]]  # value, and as it is said
    shape: str


def a_or_an(noun: str) -> str:
    """Put the article before a noun."""
    return f"an {noun}" if noun[0] in "aeio" else f"a {noun}"


def listed(items: Sequence[object]) -> str:
    """Join as "a, b and c"."""
    texts = [str(item) for item in items]
    return texts[0] if len(texts) == 1 else f"{', '.join(texts[:-1])} and {texts[-1]}"


_WORDINGS = (
    "The {l} is {v}.",
    "The {l} is {v}.",
    "Its {l} is {v}.",
    "As {l} we have {v}.",
    "The {l} was given as {v}.",
    "{L}: {v}.",
    "We noted {v} as the {l}.",
    "They say that the {l} is {v}.",
    "Under {l} it says {v}.",
    "For the {l} take {v}.",
    "The {l}, as far as we know, is {v}.",
    "They wrote {v} next to {l}.",
)
_UNKNOWN = (
    "The {l} is unknown.",
    "The {l} is not known.",
    "Nobody knows the {l}.",
    "There is no {l}.",
    "The {l} was not given.",
    "For the {l} we have nothing.",
)
COUNTRY_NAMES = tuple(country for country, _ in COUNTRIES if not country.startswith("the "))
THINGS = tuple(one for one, _ in ITEMS)
MATERIALS = words("wood steel glass paper stone cotton wool plastic copper leather rubber clay")
LANGUAGES = words("English French German Spanish Polish Italian Greek Dutch Danish Czech Turkish Japanese")
UNICODE = words(
    "東京 大阪 北京 Москва Київ Αθήνα Ñandú Crème Straße Grün naïve façade Größe 수원 ไทย Škoda Żółw عمان שלום 猫 犬 "
    "über"
)
_TEXTS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("name owner author manager buyer driver teacher guest inspector sender", NAMES),
    ("city origin destination birthplace location venue", CITIES),
    ("color paint frame_color", COLORS),
    ("country market", COUNTRY_NAMES),
    ("material surface", MATERIALS),
    ("language translation", LANGUAGES),
    ("content gift item part", THINGS),
    ("title nickname motto label brand", ()),  # made of two words
    ("sign mark original_name", UNICODE),
)
_TEXT_KEYS = tuple((key, values) for keys, values in _TEXTS for key in words(keys))

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
    ("page_count", 1, 700),
    ("distance_m", 1, 3000),
)
NUMBER_WORDS = words("zero one two three four five six seven eight nine ten eleven twelve")
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
    ("total_cost", 900),
)
_BOOLEANS = (  # key, said when true, said when false
    ("paid", "It is paid.", "It is not paid."),
    ("open", "It is open.", "It is not open."),
    ("new", "It is new.", "It is not new."),
    ("active", "It is active.", "It is no longer active."),
    ("fragile", "It is fragile.", "It is not fragile."),
    ("insured", "It is insured.", "It is not insured."),
    ("has_garden", "It has a garden.", "It has no garden."),
    ("has_wifi", "There is wifi.", "There is no wifi."),
    ("public", "It is public.", "It is not public."),
    ("verified", "It has been verified.", "It has not been verified."),
    ("urgent", "It is urgent.", "It is not urgent."),
    ("heated", "It is heated.", "It is not heated."),
    ("sold_out", "It is sold out.", "It is not sold out."),
    ("damaged", "It is damaged.", "It is not damaged."),
    ("is_rented", "It is rented.", "It is not rented."),
    ("has_roof", "It has a roof.", "It has no roof."),
)
_ENUMS: tuple[tuple[str, tuple[str, ...] | tuple[int, ...]], ...] = (
    ("status", ("open", "closed", "pending")),
    ("state", ("new", "used", "broken", "lost")),
    ("priority", ("low", "medium", "high")),
    ("size", ("S", "M", "L", "XL")),
    ("weekday", ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday")),
    ("season", ("spring", "summer", "autumn", "winter")),
    ("level", ("beginner", "advanced", "expert")),
    ("transport", ("car", "train", "ship", "plane")),
    ("form", ("round", "square", "oval")),
    ("unit", ("kg", "g", "lb")),
    ("role", ("admin", "editor", "reader")),
    ("currency", ("EUR", "USD", "JPY", "GBP")),
    ("stage", (1, 2, 3, 4)),
    ("größe", ("klein", "mittel", "groß")),
    ("état", ("neuf", "usé", "cassé")),
    ("都市", ("東京", "大阪", "京都")),
    ("色", ("赤", "青", "白", "黒")),
    ("mood", ("😀", "😐", "😡")),
    ("grade", ("α", "β", "γ")),
)
_MONTHS = words("January February March April May June July August September October November December")
_LETTERS = "ABCDEFGHKLMNPRSTUVWXYZ"
_ARRAY_TEXTS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("tags features", ADJECTIVES),
    ("colors", COLORS),
    ("languages", LANGUAGES),
    ("guests authors players", NAMES),
    ("stops cities", CITIES),
    ("parts tools", THINGS),
    ("keywords topics", NOUNS),
    ("signs", UNICODE),
)
_ARRAY_TEXT_KEYS = tuple((key, values) for keys, values in _ARRAY_TEXTS for key in words(keys))
_ARRAY_NUMBERS = (  # key, type, low, high
    ("readings", "number", 1, 90),
    ("weights", "number", 1, 40),
    ("prices", "number", 1, 300),
    ("scores", "integer", 0, 100),
    ("years", "integer", 1950, 2030),
    ("sizes", "integer", 1, 60),
    ("room_numbers", "integer", 1, 400),
)
_OBJECT_KEYS = words("address contact dimensions details seller warranty parent source package summary engine origin")
_OBJECTS_KEYS = words("items lines entries rows steps visits deliveries samples records offers")
_MAP_KEYS = words("scores votes ages points hours shares")
_PEOPLE_KEYS = words("buyer seller author editor sender receiver winner host")
_ORDINALS = ("first", "second", "third", "fourth")

_STYLES: tuple[Callable[[str], str], ...] = (
    lambda key: key,
    lambda key: key,
    lambda key: key.split("_")[0] + "".join(part.capitalize() for part in key.split("_")[1:]),
    lambda key: key.replace("_", "-"),
)


class FieldGrammar:
    """Draws fields of one schema. style of keys and shared definitions are the schema's; not shared.

    definitions: name -> schema of what fields refer to.
    """

    def __init__(self, rng: Random) -> None:
        self.definitions: dict[str, Schema] = {}
        self._rng = rng
        self._style = pick(rng, _STYLES)
        self._described = rng.random() < 0.08

    def record(self, count: int) -> list[Field]:
        """Draw so many members with a key each; at least one has a value."""
        fields: dict[str, Field] = {}
        while len(fields) < count:
            field = self._any()
            fields.setdefault(field.key, field)
        if all(field.value is ABSENT for field in fields.values()):
            return self.record(count)
        return list(fields.values())

    def scalar(self) -> Field:
        """Draw a member with a simple value, or null, or none."""
        draw = self._rng.random()
        if draw < 0.12:
            return self._boolean()
        return self._member(*self._named_kind())

    def object_schema(self, fields: Sequence[Field], optional: AbstractSet[str] = frozenset()) -> Schema:
        """Return the schema of an object with these members."""
        properties: Schema = {}
        for field in fields:
            schema = field.schema
            if self._described and "$ref" not in schema and "description" not in schema:
                schema = {**schema, "description": f"The {field.label}."}
            properties[field.key] = schema
        schema = {"type": "object", "properties": properties}
        required = [field.key for field in fields if field.key not in optional]
        if required:
            schema["required"] = required
        if self._rng.random() < 0.6:
            schema["additionalProperties"] = False
        return schema

    def _any(self) -> Field:
        draw = self._rng.random()
        for limit, make in (
            (0.7, self.scalar),
            (0.8, self._array),
            (0.88, self._object),
            (0.93, self._objects),
            (0.945, self._map),
            (0.96, self._matrix),
            (0.975, self._person),
            (0.99, self._tree),
        ):
            if draw < limit:
                return make()
        return self._chain()

    # Scalars

    def _named_kind(self) -> tuple[str, Kind]:
        """Draw the key of a scalar and what it can be; in one of five the key says nothing about that."""
        rng = self._rng
        draw = rng.random()
        if draw < 0.3:
            key, values = pick(rng, _TEXT_KEYS)
            kind = self._text(values)
        elif draw < 0.52:
            key, low, high = pick(rng, _INTEGERS)
            kind = self._integer(low, high)
        elif draw < 0.68:
            key, high = pick(rng, _NUMBERS)
            kind = self._number(high, signed=key == "temperature")
        elif draw < 0.85:
            key, options = pick(rng, _ENUMS)
            kind = self._enum(options)
        else:
            key, kind = self._pattern()
        if rng.random() < 0.2 and key.isascii():
            key = pick(rng, NOUNS) if rng.random() < 0.5 else f"{pick(rng, ADJECTIVES)}_{pick(rng, NOUNS)}"
        return key, kind

    def _member(self, name: str, kind: Kind) -> Field:
        """Draw a value; it may be null, or left out."""
        rng = self._rng
        key, label = self._style(name), name.replace("_", " ")
        value, said = kind.draw()
        draw = rng.random()
        if draw < 0.1:
            schema = self._nullable(kind.schema)
            if rng.random() < 0.6:
                return Field(key, label, schema, None, (pick(rng, _UNKNOWN).format(l=label),), f"{kind.shape}?")
            return Field(key, label, schema, value, (self._tell(label, said),), f"{kind.shape}?")
        if draw < 0.14:
            return Field(key, label, kind.schema, ABSENT, (), f"{kind.shape}-")
        return Field(key, label, kind.schema, value, (self._tell(label, said),), kind.shape)

    def _tell(self, label: str, said: object) -> str:
        return pick(self._rng, _WORDINGS).format(l=label, L=label[0].upper() + label[1:], v=said)

    def _nullable(self, schema: Schema) -> Schema:
        options = schema.get("enum")
        if isinstance(options, list):
            return {"enum": [*options, None]}
        if "type" in schema and self._rng.random() < 0.5:
            return {**schema, "type": [schema["type"], "null"]}
        return {"anyOf": [schema, {"type": "null"}]}

    def _text(self, values: Sequence[str]) -> Kind:
        rng = self._rng
        schema: Schema = {"type": "string"}
        shape = "s"
        if rng.random() < 0.12:
            schema["minLength"] = 1
            shape += "m"
        if rng.random() < 0.12:
            schema["maxLength"] = pick(rng, (20, 30, 40, 64))
            shape += "x"
        quoted = rng.random() < 0.2

        def draw() -> tuple[str, str]:
            value = pick(rng, values) if values else f"{pick(rng, ADJECTIVES)} {pick(rng, NOUNS)}"
            return value, f'"{value}"' if quoted else value

        return Kind(schema, draw, shape)

    def _integer(self, low: int, high: int) -> Kind:
        rng = self._rng
        schema: Schema = {"type": "integer"}
        shape = "i"
        draw = rng.random()
        if draw < 0.25:
            schema |= {"minimum": low, "maximum": high}
            shape = "ib"
        elif draw < 0.33:
            schema["minimum"] = low
            shape = "im"
        elif draw < 0.38:
            schema["exclusiveMinimum"] = low - 1
            shape = "ie"
        in_words = rng.random() < 0.3

        def draw_value() -> tuple[int, object]:
            value = low + int(rng.random() * (high - low + 1))
            return value, NUMBER_WORDS[value] if in_words and value <= 12 else value

        return Kind(schema, draw_value, shape)

    def _number(self, high: int, *, signed: bool) -> Kind:
        rng = self._rng
        schema: Schema = {"type": "number"}
        shape = "n"
        if not signed and rng.random() < 0.2:
            schema |= {"minimum": 0, "maximum": high}
            shape = "nb"
        places = pick(rng, (10, 10, 100))

        def draw() -> tuple[object, object]:
            value = (1 + int(rng.random() * (high * places - 1))) / places
            if signed and rng.random() < 0.3:
                value = -value
            number = int(value) if value == int(value) else value
            return number, number

        return Kind(schema, draw, shape)

    def _enum(self, options: Sequence[str | int]) -> Kind:
        rng = self._rng

        def draw() -> tuple[object, object]:
            value = pick(rng, options)
            return value, value

        if rng.random() < 0.08:
            value = pick(rng, options)
            return Kind({"const": value}, lambda: (value, value), "c")
        if rng.random() < 0.3:
            return Kind({"enum": list(options)}, draw, "E")
        return Kind({"type": "string" if isinstance(options[0], str) else "integer", "enum": list(options)}, draw, "e")

    def _pattern(self) -> tuple[str, Kind]:
        rng = self._rng
        number = int(rng.random() * 6)
        if number == 0:
            key = pick(rng, ("date", "start_date", "birthday", "due_date", "delivery_date"))
            return key, Kind({"type": "string", "pattern": r"^\d{4}-\d{2}-\d{2}$"}, self._date, "pd")
        if number == 1:
            key = pick(rng, ("date", "start_date", "end_date", "due_date"))
            return key, Kind({"type": "string", "format": "date"}, self._date, "fd")
        if number == 2:
            key = pick(rng, ("code", "reference", "serial"))
            schema: Schema = {"type": "string", "pattern": r"^[A-Z]{2}-\d{4}$"}
            return key, Kind(schema, lambda: self._same(f"{self._letters(2)}-{self._digits(4)}"), "pc")
        if number == 3:
            key = pick(rng, ("time", "opening_time", "arrival"))
            return key, Kind({"type": "string", "pattern": r"^\d{2}:\d{2}$"}, self._time, "pt")
        if number == 4:
            key = pick(rng, ("plate", "ticket_code", "batch_code"))
            schema = {"type": "string", "pattern": "^[A-Z]{3}[0-9]{3}$"}
            return key, Kind(schema, lambda: self._same(f"{self._letters(3)}{self._digits(3)}"), "pp")
        key = pick(rng, ("zip", "pin", "extension"))
        return key, Kind({"type": "string", "pattern": "^[0-9]{5}$"}, lambda: self._same(self._digits(5)), "pz")

    def _same(self, value: str) -> tuple[str, str]:
        return value, value

    def _letters(self, count: int) -> str:
        return "".join(pick(self._rng, _LETTERS) for _ in range(count))

    def _digits(self, count: int) -> str:
        return "".join(pick(self._rng, "0123456789") for _ in range(count))

    def _time(self) -> tuple[str, str]:
        return self._same(f"{int(self._rng.random() * 24):02}:{int(self._rng.random() * 60):02}")

    def _date(self) -> tuple[str, str]:
        rng = self._rng
        year, month, day = 1990 + int(rng.random() * 45), 1 + int(rng.random() * 12), 1 + int(rng.random() * 28)
        value = f"{year}-{month:02}-{day:02}"
        draw = rng.random()
        if draw < 0.6:
            return value, value
        if draw < 0.8:
            return value, f"{day} {_MONTHS[month - 1]} {year}"
        return value, f"{_MONTHS[month - 1]} {day}, {year}"

    def _boolean(self) -> Field:
        rng = self._rng
        name, yes, no = pick(rng, _BOOLEANS)
        label = name.removeprefix("is_").removeprefix("has_").replace("_", " ")
        value = rng.random() < 0.5
        if rng.random() < 0.3 and "_" not in name:
            fact = self._tell(label, "true" if value else "false")
        else:
            fact = yes if value else no
        return Field(self._style(name), label, {"type": "boolean"}, value, (fact,), "b")

    # Arrays, objects, maps

    def _array(self) -> Field:
        rng = self._rng
        if rng.random() < 0.6:
            name, values = pick(rng, _ARRAY_TEXT_KEYS)
            kind = Kind({"type": "string"}, lambda: self._same(pick(rng, values)), "s")
        else:
            name, type_, low, high = pick(rng, _ARRAY_NUMBERS)
            kind = self._plain_number(type_, low, high)
        key, label = self._style(name), name.replace("_", " ")
        count = pick(rng, (0, 1, 2, 2, 3, 3, 4, 5))
        items = list(dict.fromkeys(kind.draw()[0] for _ in range(count)))
        schema: Schema = {"type": "array", "items": kind.schema}
        shape = f"a{kind.shape}"
        draw = rng.random()
        if items and draw < 0.25:
            schema |= {"minItems": 1, "maxItems": pick(rng, (5, 6, 8, 10))}
            shape += "b"
        elif items and draw < 0.35:
            schema |= {"minItems": len(items), "maxItems": len(items)}
            shape += "="
        if rng.random() < 0.1:
            schema["uniqueItems"] = True
            shape += "u"
        return Field(key, label, schema, items, (self._tell_all(label, items),), shape)

    def _plain_number(self, type_: str, low: int, high: int) -> Kind:
        rng = self._rng

        def draw() -> tuple[object, object]:
            if type_ == "integer":
                value: object = low + int(rng.random() * (high - low + 1))
            else:
                value = (low * 10 + 1 + int(rng.random() * (high - low) * 10)) / 10
            return value, value

        return Kind({"type": type_}, draw, type_[0])

    def _tell_all(self, label: str, items: Sequence[object]) -> str:
        rng = self._rng
        if not items:
            return pick(rng, (f"There are no {label}.", f"No {label} are known.", f"The list of {label} is empty."))
        if len(items) == 1:
            return pick(rng, (f"The only one of the {label} is {items[0]}.", f"The {label}: {items[0]}."))
        wording = pick(
            rng, ("The {l} are {v}.", "As {l} we have {v}.", "The {l}: {v}.", "They gave {v} as {l}.", "Its {l}: {v}.")
        )
        return wording.format(l=label, v=listed(items))

    def _plain_members(self, count: int) -> list[tuple[str, Kind]]:
        kinds: dict[str, Kind] = {}
        while len(kinds) < count:
            name, kind = self._named_kind()
            kinds.setdefault(name, kind)
        return list(kinds.items())

    def _inner(self, members: Sequence[tuple[str, Kind]], nullable: AbstractSet[str]) -> tuple[list[Field], list[str]]:
        """Draw a value for each member of an inner object, and say it shortly: "the color red"."""
        fields = []
        said = []
        for name, kind in members:
            key, label = self._style(name), name.replace("_", " ")
            value, spoken = kind.draw()
            schema = kind.schema
            text = f"the {label} {spoken}"
            if name in nullable:
                schema = {"anyOf": [schema, {"type": "null"}]}
                if self._rng.random() < 0.5:
                    value, text = None, f"no {label}"
            fields.append(Field(key, label, schema, value, (), kind.shape + ("?" if name in nullable else "")))
            said.append(text)
        return fields, said

    def _object(self, depth: int = 0) -> Field:
        rng = self._rng
        name = pick(rng, _OBJECT_KEYS)
        key, label = self._style(name), name.replace("_", " ")
        members = self._plain_members(2 + int(rng.random() * 3))
        nullable = {name for name, _ in members if rng.random() < 0.08}
        fields, said = self._inner(members, nullable)
        facts: list[str]
        if rng.random() < 0.5:
            facts = [pick(rng, (f"The {label} has {listed(said)}.", f"In the {label} there are {listed(said)}."))]
        else:
            facts = [f"{pick(rng, (f'The {label} has', f'For the {label} we noted'))} {text}." for text in said]
        if depth < 2 and rng.random() < 0.25:
            inner = self._object(depth + 1)
            if inner.key != key and inner.key not in {field.key for field in fields}:
                fields.append(inner)
                facts += [f"Inside of the {label} there is the {inner.label}.", *inner.facts]
        value = {field.key: field.value for field in fields}
        shape = f"o({','.join(field.shape for field in fields)})"
        return Field(key, label, self.object_schema(fields), value, tuple(facts), shape)

    def _objects(self) -> Field:
        rng = self._rng
        name = pick(rng, _OBJECTS_KEYS)
        key, label = self._style(name), name.replace("_", " ")
        members = self._plain_members(1 + int(rng.random() * 3))
        nullable = {name for name, _ in members if rng.random() < 0.06}
        rows: list[dict[str, object]] = []
        facts = []
        fields: list[Field] = []
        for ordinal in _ORDINALS[: 1 + int(rng.random() * 3)]:
            fields, said = self._inner(members, nullable)
            rows.append({field.key: field.value for field in fields})
            facts.append(f"The {ordinal} of the {label} has {listed(said)}.")
        schema: Schema = {"type": "array", "items": self.object_schema(fields)}
        if rng.random() < 0.3:
            schema["minItems"] = 1
        if rng.random() < 0.1:
            schema["maxItems"] = 4
        return Field(key, label, schema, rows, tuple(facts), f"A({','.join(field.shape for field in fields)})")

    def _map(self) -> Field:
        rng = self._rng
        name = pick(rng, _MAP_KEYS)
        key, label = self._style(name), name.replace("_", " ")
        holders = list(dict.fromkeys(pick(rng, NAMES) for _ in range(1 + int(rng.random() * 4))))
        value = {holder: int(rng.random() * 100) for holder in holders}
        said = listed([f"{holder} has {number}" for holder, number in value.items()])
        schema: Schema = {"type": "object", "additionalProperties": {"type": "integer"}}
        return Field(key, label, schema, value, (f"In the {label}, {said}.",), "m")

    def _matrix(self) -> Field:
        rng = self._rng
        name = pick(rng, ("grid", "matrix", "table", "board"))
        width = 2 + int(rng.random() * 2)
        rows = [[int(rng.random() * 100) for _ in range(width)] for _ in range(1 + int(rng.random() * 3))]
        facts = [f"The {_ORDINALS[i]} row of the {name} is {listed(row)}." for i, row in enumerate(rows)]
        inner: Schema = {"type": "array", "items": {"type": "integer"}}
        if rng.random() < 0.5:
            inner |= {"minItems": width, "maxItems": width}
        return Field(self._style(name), name, {"type": "array", "items": inner}, rows, tuple(facts), "aai")

    # References

    def _person(self) -> Field:
        """A person by a shared definition."""
        rng = self._rng
        name = pick(rng, _PEOPLE_KEYS)
        self.definitions["person"] = {
            "type": "object",
            "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
            "required": ["name", "age"],
        }
        who, age = pick(rng, NAMES), 18 + int(rng.random() * 70)
        fact = pick(rng, (f"The {name} is {who}, {age} years old.", f"{who}, {age} years old, is the {name}."))
        return Field(self._style(name), name, {"$ref": "#/$defs/person"}, {"name": who, "age": age}, (fact,), "r")

    def _tree(self) -> Field:
        """A small tree of names."""
        rng = self._rng
        names = list(dict.fromkeys(pick(rng, NAMES) for _ in range(2 + int(rng.random() * 4))))
        children: dict[str, list[str]] = {names[0]: []}
        for name in names[1:]:
            children[pick(rng, tuple(children))].append(name)
            children[name] = []

        def grow(name: str) -> dict[str, object]:
            return {"name": name, "children": [grow(child) for child in children[name]]}

        self.definitions["node"] = {
            "type": "object",
            "properties": {
                "name": {"type": "string"},
                "children": {"type": "array", "items": {"$ref": "#/$defs/node"}},
            },
            "required": ["name", "children"],
        }
        key = pick(rng, ("tree", "root", "head", "chart"))
        facts = [f"The {key} begins with {names[0]}."]
        facts += [f"Below {name} stand {listed(below)}." for name, below in children.items() if below]
        facts.append(f"Nobody stands below {listed([name for name, below in children.items() if not below])}.")
        return Field(self._style(key), key, {"$ref": "#/$defs/node"}, grow(names[0]), tuple(facts), "T")

    def _chain(self) -> Field:
        """Names one behind the other: each holds the next, the last one null."""
        rng = self._rng
        names = list(dict.fromkeys(pick(rng, NAMES) for _ in range(2 + int(rng.random() * 3))))
        self.definitions["link"] = {
            "type": "object",
            "properties": {"name": {"type": "string"}, "next": {"anyOf": [{"$ref": "#/$defs/link"}, {"type": "null"}]}},
            "required": ["name", "next"],
        }
        value: dict[str, object] | None = None
        for name in reversed(names):
            value = {"name": name, "next": value}
        key = pick(rng, ("queue", "chain", "line", "route"))
        facts = [f"The {key} begins with {names[0]}."]
        facts += [f"After {before} comes {after}." for before, after in pairwise(names)]
        facts.append(f"Nobody comes after {names[-1]}.")
        return Field(self._style(key), key, {"$ref": "#/$defs/link"}, value, tuple(facts), "L")
