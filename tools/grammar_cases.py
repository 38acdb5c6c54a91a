"""Grammars that a client may send: the hostile ones that are known, and random ones, each from a seed of its own."""

from __future__ import annotations

import random
import string
from collections.abc import Callable

Json = dict[str, object]

# --- hostile texts: what broke the library, or kept it busy without end, when it was tried alone


def _nested(levels: int, keyword: str) -> object:
    schema: object = {"type": "string"}
    for _ in range(levels):
        schema = {keyword: {"a": schema}} if keyword == "properties" else {keyword: schema}
    return schema


def hostile() -> list[Json]:
    """The known ones, each as fields of a request."""
    optional = {f"p{number}": {"type": "integer"} for number in range(300)}
    chain = {f"d{number}": {"$ref": f"#/$defs/d{number + 1}"} for number in range(2000)}
    schemas: list[object] = [
        _nested(50, "items"),
        _nested(55, "properties"),
        _nested(55, "not"),
        {"pattern": "(" * 40 + "a" + ")" * 40},
        {"pattern": "^((a{0,30}){0,30}){0,30}$"},
        {"pattern": "^[a-z]{0,10000}[0-9a-z]{0,10000}$"},
        {"pattern": "^(ab|cd|ef){1,5000}$"},
        {"pattern": "^.{0,10000}$"},
        {"pattern": "(?=a)b"},
        {"properties": optional, "minProperties": 100, "maxProperties": 200},
        {"enum": [f"value {number}" for number in range(4999)]},
        {"enum": [f"value {number}" for number in range(20_000)]},
        {"const": "x" * 200_000},
        {"$ref": "#/$defs/d0", "$defs": chain | {"d2000": {"type": "null"}}},
        {"$ref": "#"},
        {"$ref": "http://example.com/schema.json"},
        {"anyOf": [{"$ref": "#"}]},
        {"anyOf": [{"pattern": f"^[a-z]{{0,20}}{number}"} for number in range(200)]},
        {"type": "string", "format": "email", "pattern": "^[a-z]+$"},
        {"items": {"anyOf": [{"properties": {f"k{number}": {"const": number}}} for number in range(300)]}},
        {"minimum": 1e308, "maximum": -1e308},
        {"type": "integer", "minimum": 2**63},
        {"minItems": 10**9, "items": {"type": "null"}},
        {"minLength": 10**6},
        *({keyword: wrong} for keyword in _KEYWORDS for wrong in _WRONG),
    ]
    ebnfs: list[object] = [
        "start ::= [a]",
        "root ::= root",
        'root ::= root root | "a"',
        "root ::= " + "(" * 33 + '"a"' + ")" * 33,
        'root ::= "' + "x" * 20_000 + '"',
        "\n".join(["root ::= r0", *(f"r{number} ::= r{number + 1}" for number in range(5000)), 'r5000 ::= "a"']),
        "root ::= [^\\x00-\\U0010ffff]",
        'root ::= "a" nobody',
        'root ::= "a"{1000000}',
        'root ::= (("a"*)*)* "b"',
        'root ::= "' + "\\",
        "root ::= \U0001f4a9",
    ]
    regexes: list[object] = [
        "(a*)*b",
        "(a|b)*a(a|b){200}",
        "((a{0,30}){0,30}){0,30}",
        "a{1000000000}",
        "(?<=a)b",
        "(a)\\1",
        "\\p{L}+",
        "[z-a]",
        "(",
        "a" * 5000,
        "(" * 40 + ")" * 40,
        "(([a-z]+) ?)+",
    ]
    tags: list[object] = [
        {"format": {"type": "token", "token": 1}},
        {"format": 5},
        {},
        {"format": {"type": "or", "elements": []}},
    ]
    texts = (("json_schema", schemas), ("ebnf", ebnfs), ("regex", regexes), ("structural_tag", tags))
    return [
        *({field: text} for field, known in texts for text in known),
        {"choice": []},
        {"choice": ["a"] * 6000},
        {"choice": ["x" * 20_000]},
        {"json_schema": '{"a": 1, "a": 2}'},
        {"json_schema": "[" * 400 + "]" * 400},
    ]


# --- random texts

_KEYWORDS = (
    *("type", "enum", "const", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "minLength"),
    *("maxLength", "pattern", "format", "prefixItems", "items", "minItems", "maxItems", "properties", "required"),
    *("additionalProperties", "patternProperties", "propertyNames", "minProperties", "maxProperties", "anyOf", "oneOf"),
    *("allOf", "$ref", "$defs", "not", "if", "uniqueItems", "contains", "dependentRequired", "x-other"),
)
_WRONG: tuple[object, ...] = (5, "x", [], {}, None, True)
_TYPES = ("object", "array", "string", "integer", "number", "boolean", "null")
_PIECES = (
    "a",
    "b",
    ".",
    "[a-z]",
    "[^x]",
    "\\d",
    "\\w",
    "\\s",
    "é",
    "🔵",
    "(a|b)",
    "(?:ab)",
    "^",
    "$",
    "|",
    "\\",
    "-",
    '"',
)
_SUFFIXES = ("", "", "", "*", "+", "?", "{2}", "{0,9}", "{3,}", "{9,3}")
_FORMATS = ("date", "time", "date-time", "email", "uuid", "ipv4", "uri", "nonsense")


def random_schema(draw: random.Random, depth: int = 0) -> object:
    """A schema of plausible keywords, now and then with a value of a wrong kind."""
    if depth > 3 or draw.random() < 0.05:
        return draw.choice([True, False, {}, {"type": draw.choice(_TYPES)}])
    schema: Json = {}
    for keyword in draw.sample(_KEYWORDS, draw.randrange(1, 5)):
        schema[keyword] = random_value(draw) if draw.random() < 0.04 else _keyword_value(draw, keyword, depth)
    return schema


def _keyword_value(draw: random.Random, keyword: str, depth: int) -> object:
    match keyword:
        case "type":
            return draw.choice([draw.choice(_TYPES), draw.sample(_TYPES, 2)])
        case "enum":
            return [random_value(draw) for _ in range(draw.randrange(1, 6))]
        case "const":
            return random_value(draw)
        case "pattern":
            return random_regex(draw)
        case "format":
            return draw.choice(_FORMATS)
        case "required":
            return draw.sample("abcdef", draw.randrange(4))
        case "$ref":
            return draw.choice(["#", "#/$defs/a", "#/properties/a", "#/nothing", "other.json"])
        case "prefixItems" | "anyOf" | "oneOf" | "allOf":
            return [random_schema(draw, depth + 1) for _ in range(draw.randrange(1, 4))]
        case "properties" | "$defs":
            return {name: random_schema(draw, depth + 1) for name in draw.sample("abcdef", draw.randrange(4))}
        case "patternProperties":
            return {random_regex(draw): random_schema(draw, depth + 1)}
        case "dependentRequired":
            return {"a": ["b"]}
        case "uniqueItems":
            return draw.random() < 0.5
    if keyword in ("items", "additionalProperties", "propertyNames", "not", "if", "contains"):
        return random_schema(draw, depth + 1)
    return draw.choice([0, 1, 2, 5, 20, -3, 1.5, 1000])


def random_value(draw: random.Random) -> object:
    """A JSON value."""
    kinds: tuple[Callable[[], object], ...] = (
        lambda: draw.randrange(-99, 99),
        lambda: draw.random() * 100,
        lambda: "".join(draw.choices(string.printable + "éß漢🔵", k=draw.randrange(9))),
        lambda: draw.choice([True, False, None]),
        lambda: [draw.randrange(9)],
        lambda: {"a": draw.randrange(9), "b": None},
    )
    return draw.choice(kinds)()


def random_regex(draw: random.Random) -> str:
    """A regular expression, mostly a sound one."""
    return "".join(draw.choice(_PIECES) + draw.choice(_SUFFIXES) for _ in range(draw.randrange(1, 9)))


def random_ebnf(draw: random.Random) -> str:
    """A few rules that name each other."""
    names = ["root", "one", "two", "three"][: draw.randrange(1, 5)]
    atoms = ['"a"', '"é"', "[a-z]", "[^b]", '("x" | "y")', *names, "nobody"]
    lines = []
    for name in names:
        branches = []
        for _ in range(draw.randrange(1, 4)):
            branches.append(
                " ".join(
                    draw.choice(atoms[:-1] if draw.random() < 0.97 else atoms) + draw.choice(_SUFFIXES[:8])
                    for _ in range(draw.randrange(1, 4))
                )
            )
        lines.append(f"{name} ::= {' | '.join(branches)}")
    return "\n".join(lines) + "\n"


def random_text(draw: random.Random) -> str:
    """No grammar at all, as a rule."""
    return "".join(draw.choices(string.printable + "éß漢🔵\\[](){}|*+?", k=draw.randrange(1, 60)))


def make_case(number: int, known: list[Json]) -> Json:
    """The case of a number: the hostile ones first, then by chance, each from its own seed."""
    if number < len(known):
        return known[number]
    draw = random.Random(number)
    kind = draw.choice(["json_schema"] * 5 + ["response_format", "regex", "regex", "ebnf", "ebnf", "text", "tag"])
    match kind:
        case "json_schema":
            return {"json_schema": random_schema(draw)}
        case "response_format":
            inner = {"name": "x", "schema": random_schema(draw), "strict": draw.random() < 0.5}
            return {"response_format": {"type": "json_schema", "json_schema": inner}}
        case "regex":
            return {"regex": random_regex(draw)}
        case "ebnf":
            return {"ebnf": random_ebnf(draw)}
        case "text":
            return {draw.choice(["regex", "ebnf", "json_schema", "structural_tag"]): random_text(draw)}
        case _:
            content = {"type": "json_schema", "json_schema": random_schema(draw)}
            return {"structural_tag": {"format": {"type": "tag", "begin": "<a>", "content": content, "end": "</a>"}}}
