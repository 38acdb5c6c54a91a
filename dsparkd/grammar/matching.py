"""What patterns match: texts, lengths, what two have in common, and patterns of less."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import assert_never

from dsparkd.grammar.pattern import (
    ANY,
    ANY_TEXT,
    EMPTY,
    JSON_PLAIN,
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
    literal,
    normalized,
)

MAX_MATCH_STEPS = 50_000
Spend = Callable[[int], None]  # told of steps, about a microsecond each; raises what its owner likes when they are many
_LONGEST = 1 << 31  # stands for "no limit" in lengths


def lengths(node: Node) -> tuple[int, int | None]:
    """Fewest and most characters of a match of an anchor-free pattern; most None is without limit."""
    least, most = _lengths(node)
    return least, None if most >= _LONGEST else most


def _lengths(node: Node) -> tuple[int, int]:
    match node:
        case Class(ranges):
            return (1, 1) if ranges else (_LONGEST, 0)
        case Chain(parts):
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


def spend_freely(steps: int) -> None:
    """Bound nothing but each match by itself."""


def matches(node: Node, text: str, spend: Spend = spend_freely) -> bool:
    """Whether an anchor-free pattern matches the whole text. Raises PatternError when that is too much work."""
    matching = _Matching(text)
    try:
        return len(text) in matching.ends(node, {0})
    finally:
        spend(matching.steps)


class _Matching:
    """Finds where matches end, all at once: no backtracking, and no more than MAX_MATCH_STEPS positions looked at."""

    def __init__(self, text: str) -> None:
        self._text = text
        self.steps = 0

    def ends(self, node: Node, starts: set[int]) -> set[int]:
        """Where matches that begin at any of the starts can end."""
        self.steps += 1 + len(starts)
        if self.steps > MAX_MATCH_STEPS:
            raise PatternError("too much work for a text of this length")
        text = self._text
        match node:
            case Class(ranges):
                return {at + 1 for at in starts if at < len(text) and _holds(ranges, ord(text[at]))}
            case Chain(parts):
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
    parts = list(node.parts) if isinstance(node, Chain) else [node]
    while parts and len(found) < count:
        part = parts.pop(0)
        if isinstance(part, Chain):
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
    while isinstance(node, Chain) and len(node.parts) == 1:
        node = node.parts[0]
    if isinstance(node, Class):
        return Repeat(node, 1, 1)
    return node if isinstance(node, Repeat) and isinstance(node.part, Class) else None


def not_empty(node: Node) -> Node | None:
    """The pattern without the empty text, where it is a choice between it and longer ones."""
    if isinstance(node, Chain) and len(node.parts) == 1:
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
    parts: list[Node] = list(node.parts) if isinstance(node, Chain) else [node]
    for index, part in enumerate(parts):
        if isinstance(part, Repeat) and isinstance(part.part, Class):
            least = part.least + missing
            if part.most is None or part.most >= least:
                parts[index] = Repeat(part.part, least, part.most)
                return Chain(tuple(parts))
        below = _raised(part, missing) if isinstance(part, Chain) else None
        if below is not None:
            parts[index] = below
            return Chain(tuple(parts))
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
        case Chain(parts):
            return Chain(tuple(_with_cap(part, cap) for part in parts))
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
        case Chain(parts):
            pairs = [without_long_escapes(part, longest) for part in parts]
            return Chain(tuple(part for part, _ in pairs)), all(is_all for _, is_all in pairs)
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
        case Chain(parts):
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
    branches.append(Chain((Class(others), ANY_TEXT)))
    if depth > 0:
        for head in heads:
            below = {rest[1:] for rest in rests if rest[:1] == head}
            if depth > 1 or below == {""}:
                branches.append(Chain((literal(head), _outside(below, depth - 1))))
    return Choice(tuple(branches))
