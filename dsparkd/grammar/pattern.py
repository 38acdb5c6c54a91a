"""Regular expressions of schemas: read as ECMA-262 means them, written again as the text that XGrammar is to match.

XGrammar takes a `pattern` for the raw text between the quotes and for the whole of it, and drops what it does not know;
the standard means the string's value and any part of it. So a pattern is parsed here and written out anew: searching
made explicit, and every character in the one spelling that JSON text has for it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NoReturn, assert_never

Ranges = tuple[tuple[int, int], ...]

MAX_CODE_POINT = 0x10FFFF
MAX_PATTERN_BYTES = 4096
MAX_OPEN_GROUPS = 32
# Positions that a pattern has once its counts are written out. XGrammar pays for each with a walk over the vocabulary.
MAX_POSITIONS = 2000
MAX_MATCH_STEPS = 50_000
_LONGEST = 1 << 31  # stands for "no limit" in lengths


class PatternError(Exception):
    """A pattern is malformed, or uses what cannot be enforced; the text says what and where."""


@dataclass(frozen=True, slots=True)
class Class:
    """One character out of sorted, disjoint ranges of code points."""

    ranges: Ranges


@dataclass(frozen=True, slots=True)
class Sequence_:
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


Node = Class | Sequence_ | Choice | Repeat | Anchor

EMPTY = Sequence_(())


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
_SURROGATE: Ranges = ((0xD800, 0xDFFF),)
# A string of JSON holds characters; a lone surrogate is none.
ANY: Ranges = complement(_SURROGATE)
ANY_TEXT = Repeat(Class(ANY), 0, None)

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
    return Sequence_(tuple(Class(((ord(character), ord(character)),)) for character in text))


def parse(pattern: str, *, is_own: bool = False) -> Node:
    """Read a pattern; one of our own writing is not held to the limits. Raises PatternError."""
    if not is_own and len(pattern.encode(errors="replace")) > MAX_PATTERN_BYTES:
        raise PatternError(f"it is longer than {MAX_PATTERN_BYTES} bytes")
    node = _Parser(pattern, MAX_POSITIONS if is_own else MAX_OPEN_GROUPS).parse()
    if not is_own and positions(node) > MAX_POSITIONS:
        raise PatternError(f"its repetitions written out have more than {MAX_POSITIONS} characters")
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
        return parts[0] if len(parts) == 1 else Sequence_(tuple(parts))

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
                if not (_is_one(low) and _is_one(high)):
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


def _is_one(ranges: Ranges) -> bool:
    return len(ranges) == 1 and ranges[0][0] == ranges[0][1]


def positions(node: Node) -> int:
    """Characters of the pattern with its repetitions written out."""
    match node:
        case Class():
            return 1
        case Sequence_(parts):
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
        case Sequence_(parts):
            return _searched_sequence(list(parts))
        case Anchor():
            return ANY_TEXT
        case _:
            return _searched_sequence([node])


def _searched_sequence(parts: list[Node]) -> Node:
    if len(parts) == 1 and isinstance(parts[0], Choice | Sequence_):
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
    return Sequence_((*([] if begins else [ANY_TEXT]), *parts, *([] if ends else [ANY_TEXT])))


def whole(node: Node) -> Node:
    """The pattern as one of whole texts, anchors at the ends or not. Raises PatternError."""
    match node:
        case Choice(branches):
            return Choice(tuple(map(whole, branches)))
        case Anchor():
            return EMPTY
    parts = list(node.parts) if isinstance(node, Sequence_) else [node]
    while parts and parts[0] == Anchor(at_end=False):
        del parts[0]
    while parts and parts[-1] == Anchor(at_end=True):
        del parts[-1]
    if any(map(_has_anchor, parts)):
        raise PatternError("^ or $ elsewhere than at the ends")
    return Sequence_(tuple(parts))


def _has_anchor(node: Node) -> bool:
    match node:
        case Anchor():
            return True
        case Sequence_(parts):
            return any(map(_has_anchor, parts))
        case Choice(branches):
            return any(map(_has_anchor, branches))
        case Repeat(part):
            return _has_anchor(part)
        case Class():
            return False
        case _:
            assert_never(node)


def lengths(node: Node) -> tuple[int, int | None]:
    """Fewest and most characters of a match of an anchor-free pattern; most None is without limit."""
    least, most = _lengths(node)
    return least, None if most >= _LONGEST else most


def _lengths(node: Node) -> tuple[int, int]:
    match node:
        case Class(ranges):
            return (1, 1) if ranges else (_LONGEST, 0)
        case Sequence_(parts):
            pairs = [_lengths(part) for part in parts]
            return min(_LONGEST, sum(low for low, _ in pairs)), min(_LONGEST, sum(high for _, high in pairs))
        case Choice(branches):
            pairs = [_lengths(branch) for branch in branches]
            return min(low for low, _ in pairs), max(high for _, high in pairs)
        case Repeat(part, least, most):
            low, high = _lengths(part)
            longest = high * (most if most is not None else _LONGEST)
            return min(_LONGEST, low * least), min(_LONGEST, longest)
        case Anchor():
            return 0, 0
        case _:
            assert_never(node)


def matches(node: Node, text: str) -> bool:
    """Whether an anchor-free pattern matches the whole text. Raises PatternError when that is too much work."""
    return len(text) in _Matching(text).ends(node, {0})


class _Matching:
    """Finds where matches end, all at once: no backtracking, and no more than MAX_MATCH_STEPS positions looked at."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._steps = 0

    def ends(self, node: Node, starts: set[int]) -> set[int]:
        """Where matches that begin at any of the starts can end."""
        self._steps += 1 + len(starts)
        if self._steps > MAX_MATCH_STEPS:
            raise PatternError("too much work for a text of this length")
        text = self._text
        match node:
            case Class(ranges):
                return {at + 1 for at in starts if at < len(text) and _holds(ranges, ord(text[at]))}
            case Sequence_(parts):
                for part in parts:
                    starts = self.ends(part, starts)
                return starts
            case Choice(branches):
                return set[int]().union(*(self.ends(branch, starts) for branch in branches))
            case Repeat(part, least, most):
                return self._repeated(part, least, most, starts)
            case Anchor():
                return starts
            case _:
                assert_never(node)

    def _repeated(self, part: Node, least: int, most: int | None, starts: set[int]) -> set[int]:
        for _ in range(least):
            following = self.ends(part, starts)
            if following == starts:
                break
            starts = following
        found = set(starts)
        count = least
        while starts and (most is None or count < most):
            starts = self.ends(part, starts) - found
            found |= starts
            count += 1
        return found


def _holds(ranges: Ranges, code: int) -> bool:
    return any(low <= code <= high for low, high in ranges)


def first_classes(node: Node, count: int = 16) -> list[Ranges]:
    """Classes of the leading characters that every match has, as far as the pattern is a plain sequence there."""
    found: list[Ranges] = []
    parts = list(node.parts) if isinstance(node, Sequence_) else [node]
    while parts and len(found) < count:
        part = parts.pop(0)
        if isinstance(part, Sequence_):
            parts = [*part.parts, *parts]
        elif isinstance(part, Class):
            found.append(part.ranges)
        elif isinstance(part, Repeat) and part.least > 0 and isinstance(part.part, Class):
            found.append(part.part.ranges)
            if part.least > 1:
                parts = [Repeat(part.part, part.least - 1, part.most), *parts]
            elif part.most != 1:
                break
        else:
            break
    return found


def are_disjoint(first: Node, second: Node) -> bool:
    """Whether it is plain that no text matches both."""
    pairs = zip(first_classes(first), first_classes(second), strict=False)
    if any(not intersection(a, b) for a, b in pairs):
        return True
    (least_a, most_a), (least_b, most_b) = lengths(first), lengths(second)
    return (most_a is not None and most_a < least_b) or (most_b is not None and most_b < least_a)


def only_repeat(node: Node) -> Repeat | None:
    """The pattern as the repetition of one class, if it is nothing else."""
    while isinstance(node, Sequence_) and len(node.parts) == 1:
        node = node.parts[0]
    if isinstance(node, Class):
        return Repeat(node, 1, 1)
    return node if isinstance(node, Repeat) and isinstance(node.part, Class) else None


def not_empty(node: Node) -> Node | None:
    """The pattern without the empty text, where it is a choice between it and longer ones."""
    if isinstance(node, Sequence_) and len(node.parts) == 1:
        return not_empty(node.parts[0])
    if isinstance(node, Choice):
        longer = tuple(branch for branch in node.branches if lengths(branch) != (0, 0))
        return Choice(longer) if longer and all(lengths(branch)[0] > 0 for branch in longer) else None
    if isinstance(node, Repeat) and node.least == 0 and lengths(node.part)[0] > 0:
        return Repeat(node.part, 1, node.most)
    return None


def within(node: Node, least: int, most: int | None) -> tuple[Node, bool] | None:
    """The pattern cut to texts of some lengths, and whether it has all of them; None when no cut is found.

    Repetitions are given bounds that keep the whole within the lengths.
    """
    shortest, longest = lengths(node)
    if shortest >= least and (most is None or (longest is not None and longest <= most)):
        return node, True
    repeated = only_repeat(node)
    if repeated is not None:
        ends = [bound for bound in (repeated.most, most) if bound is not None]
        return Repeat(repeated.part, max(repeated.least, least), min(ends, default=None)), True
    if (least, most) == (1, None) and (trimmed := not_empty(node)) is not None:
        return trimmed, True
    if least > shortest:
        raised = _raised(node, least - shortest)
        if raised is None:
            return None
        node = raised
    if most is not None:
        capped = _capped(node, most)
        if capped is None:
            return None
        node = capped
    return node, False


def _raised(node: Node, missing: int) -> Node | None:
    """The pattern with one repetition of a class made longer."""
    parts: list[Node] = list(node.parts) if isinstance(node, Sequence_) else [node]
    for index, part in enumerate(parts):
        if isinstance(part, Repeat) and isinstance(part.part, Class):
            least = part.least + missing
            if part.most is None or part.most >= least:
                parts[index] = Repeat(part.part, least, part.most)
                return Sequence_(tuple(parts))
        below = _raised(part, missing) if isinstance(part, Sequence_) else None
        if below is not None:
            parts[index] = below
            return Sequence_(tuple(parts))
    return None


def _capped(node: Node, most: int) -> Node | None:
    """The pattern with repetitions of at most as many times as the length allows."""
    low, high = -1, most
    while low < high:
        middle = (low + high + 1) // 2
        longest = lengths(_with_cap(node, middle))[1]
        low, high = (middle, high) if longest is not None and longest <= most else (low, middle - 1)
    return _with_cap(node, low) if low >= 0 else None


def _with_cap(node: Node, cap: int) -> Node:
    match node:
        case Repeat(part, least, most):
            return Repeat(_with_cap(part, cap), least, max(least, cap if most is None else min(most, cap)))
        case Sequence_(parts):
            return Sequence_(tuple(_with_cap(part, cap) for part in parts))
        case Choice(branches):
            return Choice(tuple(_with_cap(branch, cap) for branch in branches))
        case _:
            return node


def without_long_escapes(node: Node, longest: int) -> tuple[Node, bool]:
    """The pattern with only plain characters in classes that repeat more than `longest` times, and whether all is left.

    XGrammar is fast in counting characters, and slow in counting what may be a character or an escape.
    """
    match node:
        case Repeat(Class(ranges), least, most) if max(least, most or 0) > longest:
            plain = intersection(ranges, JSON_PLAIN)
            return (Repeat(Class(plain), least, most), plain == ranges) if plain else (node, True)
        case Repeat(part, least, most):
            found, is_all = without_long_escapes(part, longest)
            return Repeat(found, least, most), is_all
        case Sequence_(parts):
            pairs = [without_long_escapes(part, longest) for part in parts]
            return Sequence_(tuple(part for part, _ in pairs)), all(is_all for _, is_all in pairs)
        case Choice(branches):
            pairs = [without_long_escapes(branch, longest) for branch in branches]
            return Choice(tuple(branch for branch, _ in pairs)), all(is_all for _, is_all in pairs)
        case _:
            return node, True


def longest_count(node: Node) -> int:
    """The largest count of a repetition."""
    match node:
        case Repeat(part, least, most):
            return max(least, most or 0, longest_count(part))
        case Sequence_(parts):
            return max(map(longest_count, parts), default=0)
        case Choice(branches):
            return max(map(longest_count, branches))
        case _:
            return 0


def excluding(names: Sequence[str], max_nodes: int) -> tuple[Node, bool]:
    """A pattern of texts that are none of the names, and whether it has all of them.

    It follows the names' characters as far as max_nodes allow; below, every text that begins like a name is left out.
    """
    longest = max((len(name) for name in names), default=0)
    depth, nodes = min(1, longest), 1
    while depth < longest:
        nodes += len({name[:depth] for name in names if len(name) >= depth})
        if nodes > max_nodes:
            break
        depth += 1
    return _outside(set(names), depth), all(len(name) <= depth for name in names)


def _outside(rests: set[str], depth: int) -> Node:
    heads = sorted({rest[0] for rest in rests if rest})
    others = intersection(ANY, complement(normalized((ord(head), ord(head)) for head in heads)))
    branches: list[Node] = [] if "" in rests else [EMPTY]
    branches.append(Sequence_((Class(others), ANY_TEXT)))
    if depth > 0:
        for head in heads:
            below = {rest[1:] for rest in rests if rest[:1] == head}
            if depth > 1 or below == {""}:
                branches.append(Sequence_((literal(head), _outside(below, depth - 1))))
    return Choice(tuple(branches))


def ebnf(node: Node, name: str) -> tuple[str, list[str]]:
    """An anchor-free pattern as an EBNF expression and the rules that it needs; their names begin with `name`."""
    rules: list[str] = []

    def write(part: Node) -> str:
        match part:
            case Class(ranges):
                return _ebnf_class(ranges)
            case Sequence_(parts):
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

    if isinstance(node, Sequence_) and node.parts:
        return " ".join(map(write, node.parts)), rules
    return write(node), rules


def _ebnf_class(ranges: Ranges) -> str:
    """XGrammar is far faster with a class of most characters when it is written by those that it lacks."""
    if ranges and ranges[-1][1] == MAX_CODE_POINT:
        lacking = complement(normalized([*ranges, *_SURROGATE]))
        if lacking:
            return f"[^{''.join(_ebnf_range(low, high) for low, high in lacking)}]"
    return f"[{''.join(_ebnf_range(low, high) for low, high in ranges)}]"


def _ebnf_range(low: int, high: int) -> str:
    return f"\\U{low:08x}" + (f"-\\U{high:08x}" if high > low else "")


# Characters that JSON text can only spell with a backslash, each by the shortest spelling.
_SHORT_ESCAPES = {0x22: '"', 0x5C: "\\", 8: "b", 12: "f", 10: "n", 13: "r", 9: "t"}
_MUST_ESCAPE = normalized([(0, 0x1F), (0x22, 0x22), (0x5C, 0x5C)])
JSON_PLAIN = intersection(ANY, complement(_MUST_ESCAPE))


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
        case Sequence_(parts):
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
        [code for low, high in intersection(ranges, _MUST_ESCAPE) for code in range(low, high + 1)]
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
    if _is_one(ranges) and chr(ranges[0][0]).isascii() and chr(ranges[0][0]).isalnum():
        return chr(ranges[0][0])
    items = (_write_code(low) + (f"-{_write_code(high)}" if high > low else "") for low, high in ranges)
    return f"[{''.join(items)}]"


def _write_code(code: int) -> str:
    if chr(code).isascii() and chr(code).isalnum():
        return chr(code)
    if code > 0xFFFF:
        return f"\\u{{{code:x}}}"
    return f"\\u{code:04x}"  # XGrammar's EBNF reads more digits than two after \\x
