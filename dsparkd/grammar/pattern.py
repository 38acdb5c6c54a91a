"""Regular expressions of schemas, read as ECMA-262 means them.

XGrammar takes a `pattern` for the raw text between the quotes and for the whole of it, and drops what it does not know;
the standard means the string's value and any part of it. So a pattern is parsed here and written out anew: searching
made explicit, and every character in the one spelling that JSON text has for it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NoReturn, assert_never

Ranges = tuple[tuple[int, int], ...]

MAX_CODE_POINT = 0x10FFFF
MAX_PATTERN_BYTES = 4096
MAX_OPEN_GROUPS = 32
# Positions that a pattern has once its counts are written out. XGrammar pays for each with a walk over the vocabulary.
MAX_POSITIONS = 2000


class PatternError(Exception):
    """A pattern is malformed, or uses what cannot be enforced; the text says what it has, and where."""


@dataclass(frozen=True, slots=True)
class Class:
    """One character out of sorted, disjoint ranges of code points."""

    ranges: Ranges


@dataclass(frozen=True, slots=True)
class Chain:
    """One after the other; none is the empty string."""

    parts: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Choice:
    """One of these."""

    branches: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Repeat:
    """The part between least and most times; most None is without limit."""

    part: Node
    least: int
    most: int | None


@dataclass(frozen=True, slots=True)
class Anchor:
    """The beginning or the end of the string."""

    at_end: bool


Node = Class | Chain | Choice | Repeat | Anchor

EMPTY = Chain(())


def normalized(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """Sort ranges and join those that touch."""
    joined: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if joined and low <= joined[-1][1] + 1:
            joined[-1] = (joined[-1][0], max(joined[-1][1], high))
        else:
            joined.append((low, high))
    return tuple(joined)


def complement(ranges: Ranges) -> Ranges:
    """Every other code point."""
    result = []
    next_low = 0
    for low, high in ranges:
        if low > next_low:
            result.append((next_low, low - 1))
        next_low = high + 1
    if next_low <= MAX_CODE_POINT:
        result.append((next_low, MAX_CODE_POINT))
    return tuple(result)


@functools.lru_cache(maxsize=512)  # the same few classes meet the same few limits again and again
def intersection(first: Ranges, second: Ranges) -> Ranges:
    """Code points of both."""
    found = ((max(a, c), min(b, d)) for a, b in first for c, d in second)
    return normalized((low, high) for low, high in found if low <= high)


_DIGIT: Ranges = ((0x30, 0x39),)
_WORD: Ranges = ((0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A))
_SPACE = normalized(
    (code, code)
    for code in (
        *range(9, 14),
        0x20,
        0xA0,
        0x1680,
        *range(0x2000, 0x200B),
        0x2028,
        0x2029,
        0x202F,
        0x205F,
        0x3000,
        0xFEFF,
    )
)
_NEWLINE = normalized([(10, 10), (13, 13), (0x2028, 0x2029)])
SURROGATE: Ranges = ((0xD800, 0xDFFF),)
# A string of JSON holds characters; a lone surrogate is none.
ANY: Ranges = complement(SURROGATE)
ANY_TEXT = Repeat(Class(ANY), 0, None)
# What JSON text can only spell with a backslash, and all other characters.
MUST_ESCAPE = normalized([(0, 0x1F), (0x22, 0x22), (0x5C, 0x5C)])
JSON_PLAIN = intersection(ANY, complement(MUST_ESCAPE))

_SHORTHANDS = {
    "d": _DIGIT,
    "D": complement(_DIGIT),
    "w": _WORD,
    "W": complement(_WORD),
    "s": _SPACE,
    "S": complement(_SPACE),
}
_CONTROLS = {"t": 9, "n": 10, "v": 11, "f": 12, "r": 13, "0": 0}


def literal(text: str) -> Node:
    """The text itself."""
    return Chain(tuple(Class(((ord(character), ord(character)),)) for character in text))


def parse(pattern: str, *, is_own: bool = False) -> Node:
    """Read a pattern; one of our own writing is not held to the limits. Raises PatternError."""
    if not is_own and len(pattern.encode(errors="replace")) > MAX_PATTERN_BYTES:
        raise PatternError(f"more than {MAX_PATTERN_BYTES} bytes")
    node = _Parser(pattern, MAX_POSITIONS if is_own else MAX_OPEN_GROUPS).parse()
    if not is_own and positions(node) > MAX_POSITIONS:
        raise PatternError(f"more than {MAX_POSITIONS} characters with its repetitions written out")
    return node


class _Parser:
    """Recursive descent over one pattern; nesting is bounded by max_open."""

    def __init__(self, text: str, max_open: int) -> None:
        self._text = text
        self._max_open = max_open
        self._at = 0
        self._open = 0

    def parse(self) -> Node:
        node = self._choice()
        if self._at < len(self._text):
            self._refuse("an unmatched )")
        return node

    def _refuse(self, what: str) -> NoReturn:
        raise PatternError(f"{what} at character {self._at}")

    def _peek(self) -> str:
        return self._text[self._at : self._at + 1]

    def _take(self, text: str) -> bool:
        if self._text.startswith(text, self._at):
            self._at += len(text)
            return True
        return False

    def _choice(self) -> Node:
        branches = [self._sequence()]
        while self._take("|"):
            branches.append(self._sequence())
        return branches[0] if len(branches) == 1 else Choice(tuple(branches))

    def _sequence(self) -> Node:
        parts: list[Node] = []
        while self._peek() not in ("", "|", ")"):
            parts.append(self._repeated(self._atom()))
        return parts[0] if len(parts) == 1 else Chain(tuple(parts))

    def _repeated(self, part: Node) -> Node:
        bounds: tuple[int, int | None] | None
        if self._take("*"):
            bounds = (0, None)
        elif self._take("+"):
            bounds = (1, None)
        elif self._take("?"):
            bounds = (0, 1)
        elif self._peek() == "{":
            bounds = self._count()
        else:
            return part
        self._take("?")  # a lazy quantifier matches the same strings
        if self._peek() in ("*", "+", "?", "{"):
            self._refuse("a quantifier after a quantifier")
        if isinstance(part, Anchor):
            self._refuse("a quantifier after ^ or $")
        least, most = bounds
        if most is not None and most < least:
            self._refuse("a repetition whose bounds are in the wrong order")
        return Repeat(part, least, most)

    def _count(self) -> tuple[int, int | None]:
        end = self._text.find("}", self._at)
        least, comma, most = self._text[self._at + 1 : max(end, self._at + 1)].partition(",")
        digits = all(part.isascii() and part.isdigit() and len(part) <= 9 for part in (least, most or "0"))
        if end < 0 or not digits:
            self._refuse("a { that begins no repetition (write \\{)")
        self._at = end + 1
        if not comma:
            return int(least), int(least)
        return int(least), int(most) if most else None

    def _atom(self) -> Node:
        character = self._peek()
        self._at += 1
        match character:
            case "^":
                return Anchor(at_end=False)
            case "$":
                return Anchor(at_end=True)
            case ".":
                return Class(complement(_NEWLINE))
            case "(":
                return self._group()
            case "[":
                return self._set()
            case "\\":
                return Class(self._escape(in_set=False))
            case "*" | "+" | "?" | "{":
                self._at -= 1
                self._refuse(f"a {character} with nothing before it to repeat")
        return Class(((ord(character), ord(character)),))

    def _group(self) -> Node:
        self._open += 1
        if self._open > self._max_open:
            self._refuse(f"more than {self._max_open} open groups")
        if self._take("?") and not self._take(":"):
            named = self._take("<") and self._peek() not in ("=", "!")
            end = self._text.find(">", self._at)
            if not named or end < 0 or not self._text[self._at : end].isidentifier():
                self._refuse("a lookaround, a flag or another group that is no plain one")
            self._at = end + 1
        node = self._choice()
        if not self._take(")"):
            self._refuse("a group without its )")
        self._open -= 1
        return node

    def _set(self) -> Node:
        negated = self._take("^")
        ranges: list[tuple[int, int]] = []
        while not self._take("]"):
            low = self._member()
            if self._peek() == "-" and self._text[self._at + 1 : self._at + 2] not in ("]", ""):
                self._at += 1
                high = self._member()
                if not (is_one(low) and is_one(high)):
                    self._refuse("a range that ends in a class")
                if high[0][0] < low[0][0]:
                    self._refuse("a range whose ends are in the wrong order")
                ranges.append((low[0][0], high[0][0]))
            else:
                ranges += low
        found = normalized(ranges)
        return Class(complement(found) if negated else found)

    def _member(self) -> Ranges:
        character = self._peek()
        if not character:
            self._refuse("a [ without its ]")
        self._at += 1
        if character == "\\":
            return self._escape(in_set=True)
        return ((ord(character), ord(character)),)

    def _escape(self, *, in_set: bool) -> Ranges:
        character = self._peek()
        if not character:
            self._refuse("a \\ at the end")
        self._at += 1
        if character in _SHORTHANDS:
            return _SHORTHANDS[character]
        if in_set and character == "b":
            return ((8, 8),)
        if character in _CONTROLS and not (character == "0" and self._peek().isdigit()):
            return ((_CONTROLS[character], _CONTROLS[character]),)
        if character in ("x", "u"):
            code = self._hex(character)
        elif character == "c" and self._peek().isascii() and self._peek().isalpha():
            code = ord(self._peek()) % 32
            self._at += 1
        elif character.isalnum():
            self._refuse(f"\\{character}, a back reference or an unknown escape")
        else:
            code = ord(character)
        return ((code, code),)

    def _hex(self, kind: str) -> int:
        if kind == "u" and self._peek() == "{":
            end = self._text.find("}", self._at)
            digits = self._text[self._at + 1 : max(end, self._at + 1)]
            self._at = end + 1
        else:
            width = 2 if kind == "x" else 4
            digits = self._text[self._at : self._at + width]
            self._at += width
            if len(digits) < width:
                digits = ""
        try:
            code = int(digits, 16) if digits.isalnum() else -1
        except ValueError:
            code = -1
        if 0xD800 <= code <= 0xDBFF and self._text.startswith("\\u", self._at):
            self._at += 2
            code = 0x10000 + (code - 0xD800) * 0x400 + self._hex("u") - 0xDC00
        if not 0 <= code <= MAX_CODE_POINT:
            self._refuse(f"\\{kind} without its digits")
        return code


def is_one(ranges: Ranges) -> bool:
    return len(ranges) == 1 and ranges[0][0] == ranges[0][1]


def positions(node: Node) -> int:
    """Characters of the pattern with its repetitions written out."""
    match node:
        case Class():
            return 1
        case Chain(parts):
            return sum(map(positions, parts))
        case Choice(branches):
            return sum(map(positions, branches))
        case Repeat(part, least, most):
            return positions(part) * max(1, least + 1 if most is None else most)
        case Anchor():
            return 0
        case _:
            assert_never(node)


def searched(node: Node) -> Node:
    """The whole strings in which the pattern is found somewhere: no anchor is left. Raises PatternError."""
    match node:
        case Choice(branches):
            return Choice(tuple(map(searched, branches)))
        case Chain(parts):
            return _searched_sequence(list(parts))
        case Anchor():
            return ANY_TEXT
        case _:
            return _searched_sequence([node])


def _searched_sequence(parts: list[Node]) -> Node:
    if len(parts) == 1 and isinstance(parts[0], Choice | Chain):
        return searched(parts[0])
    begins = ends = False
    while parts and parts[0] == Anchor(at_end=False):
        begins = True
        del parts[0]
    while parts and parts[-1] == Anchor(at_end=True):
        ends = True
        del parts[-1]
    if any(map(_has_anchor, parts)):
        raise PatternError("^ or $ elsewhere than at the ends of an alternative")
    return Chain((*([] if begins else [ANY_TEXT]), *parts, *([] if ends else [ANY_TEXT])))


def whole(node: Node) -> Node:
    """The pattern as one of whole texts, anchors at the ends or not. Raises PatternError."""
    match node:
        case Choice(branches):
            return Choice(tuple(map(whole, branches)))
        case Anchor():
            return EMPTY
    parts = list(node.parts) if isinstance(node, Chain) else [node]
    while parts and parts[0] == Anchor(at_end=False):
        del parts[0]
    while parts and parts[-1] == Anchor(at_end=True):
        del parts[-1]
    if any(map(_has_anchor, parts)):
        raise PatternError("^ or $ elsewhere than at the ends")
    return Chain(tuple(parts))


def _has_anchor(node: Node) -> bool:
    match node:
        case Anchor():
            return True
        case Chain(parts):
            return any(map(_has_anchor, parts))
        case Choice(branches):
            return any(map(_has_anchor, branches))
        case Repeat(part):
            return _has_anchor(part)
        case Class():
            return False
        case _:
            assert_never(node)
