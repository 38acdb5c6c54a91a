"""Every keyword of drafts 7 and 2020-12 and what becomes of it; docs/structured_output.md shows this table."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, NamedTuple

from dsparkd.grammar.key import INT64_MAX, INT64_MIN

Treatment = Literal["enforced", "rewritten", "narrower", "annotation", "refused"]

TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")


class Keyword(NamedTuple):
    """One keyword. value: returns what is wrong with a value, None if nothing. effect: the sentence of the table."""

    name: str
    treatment: Treatment
    value: Callable[[object], str | None]
    effect: str


def _is_int(value: object) -> bool:
    return (isinstance(value, int) and not isinstance(value, bool)) or (isinstance(value, float) and value.is_integer())


def _anything(value: object) -> str | None:
    del value
    return None


def _schema(value: object) -> str | None:
    return None if isinstance(value, dict | bool) else "expected a schema: an object, true or false"


def _schema_or_list(value: object) -> str | None:
    return _schemas(value) if isinstance(value, list) else _schema(value)


def _schemas(value: object) -> str | None:
    if not isinstance(value, list) or not value:
        return "expected a list of at least one schema"
    return None


def _schema_map(value: object) -> str | None:
    return None if isinstance(value, dict) else "expected an object whose members are schemas"


def _schema_or_names_map(value: object) -> str | None:
    if not isinstance(value, dict):
        return "expected an object"
    bad = next((item for item in value.values() if not isinstance(item, dict | bool) and _names(item)), None)
    return None if bad is None else "expected schemas or lists of names"


def _text(value: object) -> str | None:
    return None if isinstance(value, str) else "expected a string"


def _flag(value: object) -> str | None:
    return None if isinstance(value, bool) else "expected true or false"


def _count(value: object) -> str | None:
    return None if _is_int(value) and value >= 0 else "expected an integer of at least 0"  # type: ignore[operator]


def _number(value: object) -> str | None:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return "expected a number (draft 4's true and false are not)"
    if isinstance(value, int) and not INT64_MIN <= value <= INT64_MAX:
        return "integers beyond 64 bits cannot be enforced"
    return None


def _positive(value: object) -> str | None:
    wrong = _number(value)
    if wrong is None and not value > 0:  # type: ignore[operator]
        return "expected a number above 0"
    return wrong


def _names(value: object) -> str | None:
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        return "expected a list of names"
    return None


def _names_map(value: object) -> str | None:
    if not isinstance(value, dict) or any(map(_names, value.values())):
        return "expected an object whose members are lists of names"
    return None


def _type(value: object) -> str | None:
    names = value if isinstance(value, list) else [value]
    if not names or not all(isinstance(name, str) and name in TYPES for name in names):
        return f"expected one of {', '.join(TYPES)}, or a list of them"
    return None


def _enum(value: object) -> str | None:
    return None if isinstance(value, list) and value else "expected a list of at least one value"


def _literal_number(value: object) -> bool:
    """Whether a number in const or enum can be written without being rounded."""
    match value:
        case bool():
            return True
        case int():
            return INT64_MIN <= value <= INT64_MAX
        case float():
            return math.isfinite(value)
        case list():
            return all(map(_literal_number, value))
        case dict():
            return all(map(_literal_number, value.values()))
        case _:
            return True


def has_exact_numbers(value: object) -> bool:
    """Whether all numbers of a literal fit into 64 bits or a double."""
    return _literal_number(value)


KEYWORDS = {
    keyword.name: keyword
    for keyword in (
        Keyword(
            "type", "enforced", _type, "one type or several; without it, the type is the one of the other keywords"
        ),
        Keyword("enum", "rewritten", _enum, "values that the other keywords beside it exclude are removed"),
        Keyword("const", "rewritten", _anything, "an enum of one value"),
        Keyword("minimum", "enforced", _number, "for numbers at most 15 digits before the point and 6 behind it"),
        Keyword("maximum", "enforced", _number, "as minimum"),
        Keyword("exclusiveMinimum", "enforced", _number, "as minimum"),
        Keyword("exclusiveMaximum", "enforced", _number, "as minimum"),
        Keyword(
            "multipleOf",
            "rewritten",
            _positive,
            "integers: up to 1,024 without bounds, or any with bounds that leave at most 1,000 values; else refused",
        ),
        Keyword("minLength", "narrower", _count, "strings with bounds beyond minLength 3 have no escapes"),
        Keyword("maxLength", "narrower", _count, "as minLength"),
        Keyword("pattern", "rewritten", _text, "ECMA-262 without lookaround, back references and \\b; found anywhere"),
        Keyword("format", "rewritten", _text, "the formats listed below; others are annotations, with a warning"),
        Keyword("prefixItems", "enforced", _schemas, "items by position"),
        Keyword("items", "enforced", _schema_or_list, "a list of schemas, as in draft 7, becomes prefixItems"),
        Keyword("additionalItems", "rewritten", _schema, "becomes items beside a list of schemas"),
        Keyword("unevaluatedItems", "rewritten", _schema, "becomes items where every item in front is known"),
        Keyword("minItems", "enforced", _count, ""),
        Keyword("maxItems", "enforced", _count, ""),
        Keyword("properties", "enforced", _schema_map, "written in the order of the schema"),
        Keyword("required", "rewritten", _names, "a name that properties lacks is added behind them"),
        Keyword(
            "additionalProperties",
            "narrower",
            _schema,
            "absent beside properties or patternProperties, it counts as false; other keys do not begin like a listed "
            "one where the list is long",
        ),
        Keyword("unevaluatedProperties", "rewritten", _schema, "becomes additionalProperties after merging"),
        Keyword(
            "patternProperties",
            "narrower",
            _schema_map,
            "several must not overlap; beside them there are no other keys",
        ),
        Keyword("propertyNames", "narrower", _schema, "beside properties, only those are written"),
        Keyword("minProperties", "enforced", _count, "beside other keys at most 1 above the required ones"),
        Keyword("maxProperties", "enforced", _count, "beside at most 50 optional properties"),
        Keyword("anyOf", "rewritten", _schemas, "what stands beside it is merged into every branch"),
        Keyword("oneOf", "rewritten", _schemas, "as anyOf where the branches plainly exclude each other; else refused"),
        Keyword("allOf", "rewritten", _schemas, "merged; refused where two patterns or formats meet"),
        Keyword("$ref", "rewritten", _text, "every form that stays inside the schema, recursion too"),
        Keyword("$defs", "enforced", _schema_map, "reached through $ref"),
        Keyword("definitions", "enforced", _schema_map, "reached through $ref"),
        Keyword("$anchor", "rewritten", _text, "a name for $ref"),
        Keyword("$dynamicAnchor", "rewritten", _text, "a name for $ref"),
        Keyword("$id", "rewritten", _text, "a name for $ref, at the root or as #name; elsewhere refused"),
        Keyword("$schema", "annotation", _text, "chooses the draft: 2020-12, 2019-09, draft-07 or draft-06"),
        Keyword("$vocabulary", "annotation", _anything, ""),
        Keyword("$comment", "annotation", _anything, ""),
        Keyword("title", "annotation", _anything, ""),
        Keyword("description", "annotation", _anything, ""),
        Keyword("default", "annotation", _anything, ""),
        Keyword("examples", "annotation", _anything, ""),
        Keyword("example", "annotation", _anything, "OpenAPI's name of examples"),
        Keyword("deprecated", "annotation", _anything, ""),
        Keyword("readOnly", "annotation", _anything, ""),
        Keyword("writeOnly", "annotation", _anything, ""),
        Keyword("contentEncoding", "annotation", _anything, ""),
        Keyword("contentMediaType", "annotation", _anything, ""),
        Keyword("contentSchema", "annotation", _anything, ""),
        Keyword("not", "refused", _schema, ""),
        Keyword("if", "refused", _schema, "without then and else it has no effect and is accepted"),
        Keyword("then", "refused", _schema, "without if it has no effect and is accepted"),
        Keyword("else", "refused", _schema, "without if it has no effect and is accepted"),
        Keyword("contains", "refused", _schema, ""),
        Keyword("minContains", "refused", _count, "without contains it has no effect and is accepted"),
        Keyword("maxContains", "refused", _count, "without contains it has no effect and is accepted"),
        Keyword("uniqueItems", "refused", _flag, "false, or true beside maxItems of at most 1, is accepted"),
        Keyword("dependentRequired", "refused", _names_map, "an empty one is accepted"),
        Keyword("dependentSchemas", "refused", _schema_map, "an empty one is accepted"),
        Keyword("dependencies", "refused", _schema_or_names_map, "an empty one is accepted"),
        Keyword("$dynamicRef", "refused", _text, ""),
        Keyword("$recursiveRef", "refused", _text, ""),
        Keyword("$recursiveAnchor", "refused", _flag, "false is accepted"),
    )
}

# Keywords that assert something of one type only.
TYPED_KEYWORDS: dict[str, tuple[str, ...]] = {
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    "string": ("minLength", "maxLength", "pattern", "format"),
    "array": ("prefixItems", "items", "additionalItems", "unevaluatedItems", "minItems", "maxItems"),
    "object": (
        *("properties", "required", "additionalProperties", "unevaluatedProperties", "patternProperties"),
        *("propertyNames", "minProperties", "maxProperties"),
    ),
}


def has_no_effect(schema: dict[str, object], keyword: str) -> bool:
    """Whether a refused keyword says nothing here, so that it may stand."""
    value = schema[keyword]
    match keyword:
        case "if":
            return "then" not in schema and "else" not in schema
        case "then" | "else":
            return "if" not in schema
        case "minContains" | "maxContains":
            return "contains" not in schema
        case "uniqueItems":
            most = schema.get("maxItems")
            return value is False or (isinstance(most, int) and most <= 1)
        case "dependentRequired" | "dependentSchemas" | "dependencies":
            return value == {}
        case "$recursiveAnchor":
            return value is False
        case _:
            return False


_LABEL = "[A-Za-z0-9](?:[A-Za-z0-9-]{0,30}[A-Za-z0-9])?"
_BYTE = "(?:25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_IPV4 = f"{_BYTE}(?:\\.{_BYTE}){{3}}"
_H16 = "[0-9A-Fa-f]{1,4}"
_YEAR = "(?:[0-9]{3}[1-9]|[0-9]{2}[1-9][0-9]|[0-9][1-9][0-9]{2}|[1-9][0-9]{3})"
_LEAP_YEAR = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_DATE = (
    f"(?:{_YEAR}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    f"|02-(?:0[1-9]|1[0-9]|2[0-8]))|{_LEAP_YEAR}-02-29)"
)
_TIME = "(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\\.[0-9]{1,6})?(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
_HEX4 = "[0-9a-fA-F]{4}"
_DURATION_TIME = "T(?:[0-9]+H(?:[0-9]+M(?:[0-9]+S)?)?|[0-9]+M(?:[0-9]+S)?|[0-9]+S)"
_DURATION_DATE = "(?:[0-9]+Y(?:[0-9]+M(?:[0-9]+D)?)?|[0-9]+M(?:[0-9]+D)?|[0-9]+D)"
_IPV6 = "|".join(
    [f"{_H16}(?::{_H16}){{7}}", f"::(?:{_H16}(?::{_H16}){{0,6}})?"]
    + [f"{_H16}(?::{_H16}){{{left - 1}}}::(?:{_H16}(?::{_H16}){{0,{6 - left}}})?" for left in range(1, 7)]
    + [f"{_H16}(?::{_H16}){{6}}::"]
)

# What is generated for a format: all or part of what the format admits, never more.
FORMATS: dict[str, str] = {
    "date": f"^{_DATE}$",
    "time": f"^{_TIME}$",
    "date-time": f"^{_DATE}T{_TIME}$",
    "duration": f"^P(?:{_DURATION_DATE}(?:{_DURATION_TIME})?|{_DURATION_TIME}|[0-9]+W)$",
    "email": f"^[A-Za-z0-9_+-]+(?:\\.[A-Za-z0-9_+-]+)*@{_LABEL}(?:\\.{_LABEL}){{1,3}}$",
    "hostname": f"^{_LABEL}(?:\\.{_LABEL}){{0,3}}$",
    "ipv4": f"^{_IPV4}$",
    "ipv6": f"^(?:{_IPV6})$",
    "uuid": f"^{_HEX4}{_HEX4}-{_HEX4}-{_HEX4}-{_HEX4}-{_HEX4}{_HEX4}{_HEX4}$",
    "uri": "^[A-Za-z][A-Za-z0-9+.-]*://[A-Za-z0-9.-]+(?::[0-9]{1,5})?(?:/[A-Za-z0-9._~!$&'()*+,;=:@-]*)*"
    "(?:\\?[A-Za-z0-9._~!$&'()*+,;=:@/?-]*)?(?:#[A-Za-z0-9._~!$&'()*+,;=:@/?-]*)?$",
    "json-pointer": "^(?:/(?:[^~/]|~[01])*)*$",
}
