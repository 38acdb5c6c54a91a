"""Patterns written for XGrammar: as JSON text spells their strings, as plain text, or as EBNF rules."""

from __future__ import annotations

from typing import assert_never

from dsparkd.grammar.pattern import (
    ANY,
    JSON_PLAIN,
    MAX_CODE_POINT,
    MUST_ESCAPE,
    SURROGATE,
    Anchor,
    Chain,
    Choice,
    Class,
    Node,
    PatternError,
    Ranges,
    Repeat,
    complement,
    intersection,
    is_one,
    normalized,
)

# Each by the shortest spelling.
_SHORT_ESCAPES = {0x22: '"', 0x5C: "\\", 8: "b", 12: "f", 10: "n", 13: "r", 9: "t"}


def json_text(node: Node) -> str:
    """Write an anchor-free pattern of string values as a pattern of the JSON text between the quotes."""
    return _write(node, json=True, allowed=ANY)


def plain_text(node: Node, *, without: str = "") -> str:
    """Write an anchor-free pattern as it stands; characters of `without` are matched nowhere."""
    left_out = normalized((ord(character), ord(character)) for character in without)
    return _write(node, json=False, allowed=intersection(ANY, complement(left_out)))


def _write(node: Node, *, json: bool, allowed: Ranges) -> str:
    match node:
        case Class(ranges):
            return _write_class(intersection(ranges, allowed), json=json)
        case Chain(parts):
            return "".join(_write(part, json=json, allowed=allowed) for part in parts)
        case Choice(branches):
            return f"(?:{'|'.join(_write(branch, json=json, allowed=allowed) for branch in branches)})"
        case Repeat(part, least, most):
            text = _write(part, json=json, allowed=allowed)
            if not text or most == 0:
                return ""
            # A class may have become one escape, which is two characters or more.
            is_unit = isinstance(part, Class) and (len(text) == 1 or text[0] in "[(")
            return (text if is_unit else f"(?:{text})") + _count_text(least, most)
        case Anchor():
            raise AssertionError("anchors are gone before a pattern is written")
        case _:
            assert_never(node)


def _count_text(least: int, most: int | None) -> str:
    match least, most:
        case 0, None:
            return "*"
        case 1, None:
            return "+"
        case 0, 1:
            return "?"
        case 1, 1:
            return ""
        case _, None:
            return f"{{{least},}}"
        case _:
            return f"{{{least}}}" if least == most else f"{{{least},{most}}}"


def _write_class(ranges: Ranges, *, json: bool) -> str:
    if not ranges:
        raise PatternError("a class without any character that text can hold")
    if not json:
        return _write_set(ranges)
    plain = intersection(ranges, JSON_PLAIN)
    branches = [_write_set(plain)] if plain else []
    branches += _write_escapes(
        [code for low, high in intersection(ranges, MUST_ESCAPE) for code in range(low, high + 1)]
    )
    return branches[0] if len(branches) == 1 else f"(?:{'|'.join(branches)})"


def _write_escapes(codes: list[int]) -> list[str]:
    """Escapes of the codes, each in one spelling only, so that no two texts are one name."""
    short = normalized((ord(_SHORT_ESCAPES[code]),) * 2 for code in codes if code in _SHORT_ESCAPES)
    branches = ["\\\\" + _write_set(short)] if short else []
    for high in (0, 1):
        digits = normalized(
            (ord(f"{code & 15:x}"),) * 2 for code in codes if code >> 4 == high and code not in _SHORT_ESCAPES
        )
        if digits:
            branches.append(f"\\\\u00{high}{_write_set(digits)}")
    return branches


def _write_set(ranges: Ranges) -> str:
    if is_one(ranges) and chr(ranges[0][0]).isascii() and chr(ranges[0][0]).isalnum():
        return chr(ranges[0][0])
    items = (_write_code(low) + (f"-{_write_code(high)}" if high > low else "") for low, high in ranges)
    return f"[{''.join(items)}]"


def _write_code(code: int) -> str:
    if chr(code).isascii() and chr(code).isalnum():
        return chr(code)
    if code > 0xFFFF:
        return f"\\u{{{code:x}}}"
    return f"\\u{code:04x}"  # XGrammar's EBNF reads more digits than two after \\x


def ebnf(node: Node, name: str) -> tuple[str, list[str]]:
    """An anchor-free pattern as an EBNF expression and the rules that it needs; their names begin with `name`."""
    rules: list[str] = []

    def write(part: Node) -> str:
        match part:
            case Class(ranges):
                return _ebnf_class(ranges)
            case Chain(parts):
                return f"({' '.join(map(write, parts))})" if parts else '""'
            case Choice(branches):
                return f"({' | '.join(map(write, branches))})"
            case Repeat(repeated, least, most):
                index = len(rules)
                rules.append("")  # keeps the number
                rules[index] = f"{name}_{index} ::= {write(repeated)}"
                return f"{name}_{index}{{{least},{'' if most is None else most}}}"
            case Anchor():
                raise AssertionError("anchors are gone before a pattern is written")
            case _:
                assert_never(part)

    if isinstance(node, Chain) and node.parts:
        return " ".join(map(write, node.parts)), rules
    return write(node), rules


def _ebnf_class(ranges: Ranges) -> str:
    """XGrammar is far faster with a class of most characters when it is written by those that it lacks."""
    if ranges and ranges[-1][1] == MAX_CODE_POINT:
        lacking = complement(normalized([*ranges, *SURROGATE]))
        if lacking:
            return f"[^{''.join(_ebnf_range(low, high) for low, high in lacking)}]"
    return f"[{''.join(_ebnf_range(low, high) for low, high in ranges)}]"


def _ebnf_range(low: int, high: int) -> str:
    return f"\\U{low:08x}" + (f"-\\U{high:08x}" if high > low else "")
