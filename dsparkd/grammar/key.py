"""Canonical keys: one text for all spellings of a grammar, and JSON read so that nothing has two meanings.

What is compiled is the canonical text, never the client's bytes. XGrammar emits members in the order of `properties`,
so that order is kept; where it does not look at an order, the members are sorted.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping

import msgspec

from dsparkd.errors import GrammarError
from dsparkd.messages import Grammar

MAX_BYTES = 262_144
MAX_DEPTH = 64
INT64_MIN, INT64_MAX = -(1 << 63), (1 << 63) - 1

# Their values are schemas, lists of schemas, or maps from names to schemas: there, keywords have no order.
SCHEMA_KEYWORDS = frozenset(
    {
        *("items", "additionalItems", "contains", "additionalProperties", "propertyNames", "unevaluatedItems"),
        *("unevaluatedProperties", "not", "if", "then", "else"),
    }
)
SCHEMA_LIST_KEYWORDS = frozenset({"anyOf", "oneOf", "allOf", "prefixItems", "items"})
ORDERED_MAP_KEYWORDS = frozenset({"properties", "patternProperties"})
SORTED_MAP_KEYWORDS = frozenset({"$defs", "definitions"})
DROPPED_KEYWORDS = frozenset(
    {
        *("title", "description", "default", "examples", "$comment", "$schema", "deprecated", "readOnly"),
        *("writeOnly",),
    }
)


class Scope(msgspec.Struct, frozen=True, kw_only=True):
    """What a compiled grammar also depends on, once per process. tokenizer_digest covers ids, order and stop ids."""

    xgrammar_version: str
    tokenizer_digest: str
    vocab_size: int


def digest(grammar: Grammar, scope: Scope) -> str:
    """64 hex digits that name a grammar in files and logs. Look-ups compare the grammar itself."""
    hashed = hashlib.sha256(msgspec.msgpack.encode(scope))
    hashed.update(msgspec.msgpack.encode(grammar))
    return hashed.hexdigest()


def read_json(text: str, pointer: str) -> object:
    """Read one JSON value strictly: no duplicate member, NUL, lone surrogate or number beyond a double.

    pointer: where in the request the text stands. Raises GrammarError with a code for each rule.
    """
    if len(text) > MAX_BYTES or len(text.encode(errors="replace")) > MAX_BYTES:
        raise GrammarError(f"it is larger than {MAX_BYTES} bytes", code="grammar_too_large", param=pointer)
    if text.count("[") + text.count("{") > MAX_DEPTH:
        _require_shallow(text, pointer)

    def unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
        members = dict(pairs)
        if len(members) != len(pairs):
            seen: set[str] = set()
            twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
            raise GrammarError(f"{twice[:200]!r} occurs twice in one object", code="duplicate_member", param=pointer)
        return members

    def refuse(name: str) -> object:
        raise GrammarError(f"{name} is no JSON number", code="invalid_json", param=pointer)

    def finite(digits: str) -> float:
        value = float(digits)
        if value in (float("inf"), float("-inf")):
            raise GrammarError(f"{digits[:40]} is beyond a double", code="number_out_of_range", param=pointer)
        return value

    def whole(digits: str) -> int:
        finite(digits)
        return int(digits)

    try:
        value: object = json.loads(
            text, object_pairs_hook=unique, parse_constant=refuse, parse_float=finite, parse_int=whole
        )
    except json.JSONDecodeError as error:
        raise GrammarError(f"it is not JSON: {error}", code="invalid_json", param=pointer) from error
    require_plain(value, pointer)
    return value


def _require_shallow(text: str, pointer: str) -> None:
    """Refuse what the recursion of readers could not take. Brackets in strings are skipped."""
    depth = 0
    in_string = is_escaped = False
    for character in text:
        if in_string:
            in_string = is_escaped or character != '"'
            is_escaped = character == "\\" and not is_escaped
        elif character == '"':
            in_string = True
        elif character in "[{":
            depth += 1
            if depth > MAX_DEPTH:
                raise GrammarError(f"it nests deeper than {MAX_DEPTH} levels", code="grammar_too_large", param=pointer)
        elif character in "]}":
            depth -= 1


def require_plain(value: object, pointer: str) -> None:
    """Refuse NUL and lone surrogates in any string or name, and nesting beyond MAX_DEPTH. Raises GrammarError."""

    def check(found: object, depth: int) -> None:
        if depth > MAX_DEPTH:
            raise GrammarError(f"it nests deeper than {MAX_DEPTH} levels", code="grammar_too_large", param=pointer)
        match found:
            case str():
                require_text(found, pointer)
            case list():
                for item in found:
                    check(item, depth + 1)
            case dict():
                for name, item in found.items():
                    require_text(name, pointer)
                    check(item, depth + 1)

    check(value, 0)


def require_text(text: str, pointer: str) -> None:
    """Refuse NUL and lone surrogates. Raises GrammarError."""
    if "\0" in text:
        raise GrammarError("a string holds NUL; remove it", code="nul_character", param=pointer)
    if not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text):
        raise GrammarError(
            "a string holds a lone surrogate; send whole characters", code="lone_surrogate", param=pointer
        )


def canonical_schema(schema: object) -> str:
    """Return the one text of a schema: compact, minimal escapes, members ordered as XGrammar's reading allows.

    A fixed point: the canonical text of a canonical text is itself.
    """
    return compact(_ordered(schema, keeps_annotations=_points_into_annotation(schema)))


def canonical_tag(tag: object) -> str:
    """Return the one text of a structural tag: members sorted, strings and arrays kept, schemas by their own rules."""
    return compact(_ordered_tag(tag))


def compact(value: object) -> str:
    """Write JSON without white space, members as they come, escaping only what must be escaped."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def _ordered_tag(value: object) -> object:
    match value:
        case dict():
            return {
                name: _ordered(item, keeps_annotations=_points_into_annotation(item))
                if name == "json_schema"
                else _ordered_tag(item)
                for name, item in sorted(value.items())
            }
        case list():
            return [_ordered_tag(item) for item in value]
        case _:
            return value


def _ordered(schema: object, *, keeps_annotations: bool) -> object:
    """Order a schema's keywords. Nothing outside of schema position is touched."""
    if not isinstance(schema, dict):
        return schema

    def below(item: object) -> object:
        return _ordered(item, keeps_annotations=keeps_annotations)

    ordered: dict[str, object] = {}
    for name, value in sorted(schema.items()):
        if name in DROPPED_KEYWORDS and not keeps_annotations:
            continue
        ordered[name] = _ordered_value(name, value, below)
    return ordered


def _ordered_value(name: str, value: object, below: Callable[[object], object]) -> object:
    if isinstance(value, list) and name in SCHEMA_LIST_KEYWORDS:
        return [below(item) for item in value]
    if name in SCHEMA_KEYWORDS:
        return below(value)
    if isinstance(value, Mapping) and name in ORDERED_MAP_KEYWORDS:
        return {member: below(item) for member, item in value.items()}
    if isinstance(value, Mapping) and name in SORTED_MAP_KEYWORDS:
        return {member: below(item) for member, item in sorted(value.items())}
    if name == "required" and isinstance(value, list) and all(isinstance(item, str) for item in value):
        return sorted(set(value))
    return value


def _points_into_annotation(schema: object) -> bool:
    """Whether a $ref goes through a member that would be dropped."""
    found = False

    def look(value: object) -> None:
        nonlocal found
        match value:
            case dict():
                reference = value.get("$ref")
                if isinstance(reference, str) and not DROPPED_KEYWORDS.isdisjoint(reference.split("/")):
                    found = True
                for item in value.values():
                    look(item)
            case list():
                for item in value:
                    look(item)

    look(schema)
    return found
