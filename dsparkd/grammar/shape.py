"""What an instance may be, once a schema's conjunctions are merged: the form that is checked, compared and written.

Shapes mean what the standard means; `Objects.generated` and `Strings.written` may be less.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, assert_never

from dsparkd.grammar import matching, pattern
from dsparkd.grammar.matching import Spend, spend_freely

JsonType = Literal["null", "boolean", "integer", "number", "string", "array", "object"]


@dataclass(frozen=True, slots=True)
class Anything:
    """Any JSON value."""


@dataclass(frozen=True, slots=True)
class Values:
    """One of these JSON values."""

    values: tuple[object, ...]


@dataclass(frozen=True, slots=True)
class Simple:
    """null, or true or false."""

    kind: Literal["null", "boolean"]


@dataclass(frozen=True, slots=True)
class Integers:
    """Integers in closed bounds, multiples of `multiple`."""

    least: int | None = None
    most: int | None = None
    multiple: int = 1


@dataclass(frozen=True, slots=True)
class Numbers:
    """Numbers in bounds; None is without bound."""

    least: float | None = None
    most: float | None = None
    above: float | None = None
    below: float | None = None


@dataclass(frozen=True, slots=True)
class Strings:
    """Strings that match the anchor-free pattern, of least to most characters.

    written: pattern of what is generated, None for any string; it never admits more than the rest does.
    """

    node: pattern.Node | None = None
    least: int = 0
    most: int | None = None
    written: pattern.Node | None = None


@dataclass(frozen=True, slots=True)
class Arrays:
    """Arrays: prefix by position, then rest; rest None: nothing more."""

    prefix: tuple[Shape, ...]
    rest: Shape | None
    least: int = 0
    most: int | None = None


@dataclass(frozen=True, slots=True)
class Objects:
    """Objects: members by name in the order they are generated, then by key pattern, then others.

    others None: no other member. names: what every name must be. generated: what is written beside the members, by key
    pattern (None: any key); it never admits more than keyed, others and names do.
    """

    members: tuple[tuple[str, Shape], ...]
    required: frozenset[str]
    keyed: tuple[tuple[pattern.Node, Shape], ...] = ()
    others: Shape | None = None
    names: Shape | None = None
    generated: tuple[tuple[pattern.Node | None, Shape], ...] = ()
    forbidden: frozenset[str] = frozenset()
    least: int = 0
    most: int | None = None


@dataclass(frozen=True, slots=True)
class Union:
    """Any of these."""

    branches: tuple[Shape, ...]


@dataclass(frozen=True, slots=True)
class Suggested:
    """Values of the types that the keywords suggest; the standard also admits every value of any other type."""

    shape: Shape


@dataclass(slots=True, eq=False)
class Entry:
    """A shape that is referred to. shape None: not finished, or nothing satisfies it."""

    level: int
    shape: Shape | None = None
    uses: int = 0
    is_never: bool = False


@dataclass(frozen=True, slots=True)
class Ref:
    """The shape of an entry."""

    entry: Entry


Shape = Anything | Values | Simple | Integers | Numbers | Strings | Arrays | Objects | Union | Suggested | Ref


class UndecidedError(Exception):
    """A question about a shape that is still being made."""


def resolved(shape: Shape) -> Shape:
    """The shape behind references. Raises UndecidedError."""
    while isinstance(shape, Ref):
        if shape.entry.shape is None:
            raise UndecidedError
        shape = shape.entry.shape
    return shape


def type_of(value: object) -> JsonType:
    """The narrowest JSON type: 1.0 is an integer, as the standard has it."""
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "integer" if value.is_integer() else "number"
        case str():
            return "string"
        case list():
            return "array"
        case _:
            return "object"


def same_value(first: object, second: object) -> bool:
    """JSON equality: 1 and 1.0 are equal, 1 and true are not, members have no order."""
    match first, second:
        case (bool(), _) | (_, bool()):
            return first is second
        case (int() | float(), int() | float()):
            return first == second
        case list(), list():
            return len(first) == len(second) and all(map(same_value, first, second))
        case dict(), dict():
            return first.keys() == second.keys() and all(same_value(first[name], second[name]) for name in first)
        case _:
            return type(first) is type(second) and first == second


def admits(shape: Shape, value: object, spend: Spend = spend_freely) -> bool:
    """Whether the standard admits the value. Raises UndecidedError, and what spend raises."""
    spend(1)
    match shape:
        case Anything():
            return True
        case Ref():
            return admits(resolved(shape), value, spend)
        case Union(branches):
            return any(admits(branch, value, spend) for branch in branches)
        case Suggested(inner):
            kind = type_of(value)
            return ("number" if kind == "integer" else kind) not in _kinds(inner) or admits(inner, value, spend)
        case Values(values):
            spend(len(values) // 4)
            return any(same_value(value, one) for one in values)
        case Simple(kind):
            return type_of(value) == kind
        case Integers(least, most, multiple):
            if not isinstance(value, int | float) or type_of(value) != "integer":
                return False
            return (least is None or value >= least) and (most is None or value <= most) and int(value) % multiple == 0
        case Numbers():
            return isinstance(value, int | float) and not isinstance(value, bool) and _in_bounds(shape, value)
        case Strings(node, least, most):
            if not isinstance(value, str) or not least <= len(value) <= (len(value) if most is None else most):
                return False
            return node is None or _matches(node, value, spend)
        case Arrays():
            return isinstance(value, list) and _admits_array(shape, value, spend)
        case Objects():
            return isinstance(value, dict) and _admits_object(shape, value, spend)
        case _:
            assert_never(shape)


def _matches(node: pattern.Node, text: str, spend: Spend) -> bool:
    try:
        return matching.matches(node, text, spend)
    except pattern.PatternError as error:
        raise UndecidedError from error


def _in_bounds(shape: Numbers, value: float) -> bool:
    return (
        (shape.least is None or value >= shape.least)
        and (shape.most is None or value <= shape.most)
        and (shape.above is None or value > shape.above)
        and (shape.below is None or value < shape.below)
    )


def _admits_array(shape: Arrays, value: list[object], spend: Spend) -> bool:
    if len(value) < shape.least or (shape.most is not None and len(value) > shape.most):
        return False
    if not all(admits(below, item, spend) for below, item in zip(shape.prefix, value, strict=False)):
        return False
    rest = shape.rest
    return all(rest is not None and admits(rest, item, spend) for item in value[len(shape.prefix) :])


def _admits_object(shape: Objects, value: dict[str, object], spend: Spend) -> bool:
    if len(value) < shape.least or (shape.most is not None and len(value) > shape.most):
        return False
    if not shape.required <= value.keys() or not shape.forbidden.isdisjoint(value):
        return False
    members = dict(shape.members)
    for name, item in value.items():
        if shape.names is not None and not admits(shape.names, name, spend):
            return False
        keyed = [below for node, below in shape.keyed if _matches(node, name, spend)]
        if name in members:
            keyed = [members[name]]
        elif not keyed:
            if shape.others is None:
                return False
            keyed = [shape.others]
        if not all(admits(below, item, spend) for below in keyed):
            return False
    return True


_Kinds = frozenset[str]


def _kinds(shape: Shape) -> _Kinds:
    match shape:
        case Anything() | Suggested():
            return frozenset({"null", "boolean", "number", "string", "array", "object"})
        case Values(values):
            return frozenset("number" if type_of(value) == "integer" else type_of(value) for value in values)
        case Simple(kind):
            return frozenset({kind})
        case Integers() | Numbers():
            return frozenset({"number"})
        case Strings():
            return frozenset({"string"})
        case Arrays():
            return frozenset({"array"})
        case Objects():
            return frozenset({"object"})
        case Union(branches):
            return frozenset[str]().union(*map(_kinds, branches))
        case Ref():
            return _kinds(resolved(shape))
        case _:
            assert_never(shape)


def are_disjoint(first: Shape, second: Shape, depth: int = 0, spend: Spend = spend_freely) -> bool:
    """Whether it is plain that no value is in both. Raises UndecidedError, and what spend raises."""
    spend(1)
    first, second = resolved(first), resolved(second)
    if _kinds(first).isdisjoint(_kinds(second)):
        return True
    if depth > 8:
        return False
    match first, second:
        case Union(branches), other:
            return all(are_disjoint(branch, other, depth + 1, spend) for branch in branches)
        case other, Union(branches):
            return all(are_disjoint(other, branch, depth + 1, spend) for branch in branches)
        case Values(values), other:
            return not any(admits(other, value, spend) for value in values)
        case other, Values(values):
            return not any(admits(other, value, spend) for value in values)
        case (Integers() | Numbers(), Integers() | Numbers()):
            return _bounds(first)[1] < _bounds(second)[0] or _bounds(second)[1] < _bounds(first)[0]
        case Strings(), Strings():
            return _disjoint_strings(first, second)
        case Arrays(), Arrays():
            return _disjoint_arrays(first, second, depth, spend)
        case Objects(), Objects():
            return _disjoint_objects(first, second, depth, spend)
        case _:
            return False


def have_distinct_values(shapes: Sequence[Shape]) -> bool:
    """Whether each has values of its own, or all require a property for which each has. Raises UndecidedError."""
    found = [resolved(shape) for shape in shapes]
    if all(isinstance(shape, Values) for shape in found):
        return _are_distinct(found)
    objects = [shape for shape in found if isinstance(shape, Objects)]
    if len(objects) < len(found) or not objects:
        return False
    for name in frozenset.intersection(*(shape.required for shape in objects)):
        below = [resolved(member) for shape in objects for other, member in shape.members if other == name]
        if _are_distinct(below):
            return True
    return False


def _are_distinct(shapes: Sequence[Shape]) -> bool:
    """Whether all are lists of plain values and no value is in two of them."""
    seen: set[object] = set()
    for shape in shapes:
        if not isinstance(shape, Values):
            return False
        values = {(type_of(value) in ("integer", "number"), value) for value in shape.values if is_plain(value)}
        if len(values) < len(shape.values) or not seen.isdisjoint(values):
            return False
        seen |= values
    return True


def is_plain(value: object) -> bool:
    """Whether a value is a number, a string or null: its own equality is JSON's."""
    return value is None or isinstance(value, str | float) or type(value) is int


def _bounds(shape: Integers | Numbers) -> tuple[float, float]:
    """Bounds with open ones moved inwards by the least step, so that touching open bounds do not overlap."""
    if isinstance(shape, Integers):
        low = -math.inf if shape.least is None else shape.least
        return low, math.inf if shape.most is None else shape.most
    low = max(
        -math.inf if shape.least is None else shape.least,
        -math.inf if shape.above is None else math.nextafter(shape.above, math.inf),
    )
    high = min(
        math.inf if shape.most is None else shape.most,
        math.inf if shape.below is None else math.nextafter(shape.below, -math.inf),
    )
    return low, high


def _disjoint_strings(first: Strings, second: Strings) -> bool:
    if first.most is not None and first.most < second.least:
        return True
    if second.most is not None and second.most < first.least:
        return True
    return first.node is not None and second.node is not None and matching.are_disjoint(first.node, second.node)


def _disjoint_arrays(first: Arrays, second: Arrays, depth: int, spend: Spend) -> bool:
    if first.most is not None and first.most < second.least:
        return True
    if second.most is not None and second.most < first.least:
        return True
    for index in range(min(first.least, second.least, 16)):
        a = first.prefix[index] if index < len(first.prefix) else first.rest
        b = second.prefix[index] if index < len(second.prefix) else second.rest
        if a is None or b is None or are_disjoint(a, b, depth + 1, spend):
            return True
    return False


def _disjoint_objects(first: Objects, second: Objects, depth: int, spend: Spend) -> bool:
    for one, other in ((first, second), (second, first)):
        members = dict(other.members)
        for name in one.required:
            if name in other.forbidden or (name not in members and other.others is None and not other.keyed):
                return True
            if (
                name in members
                and name in other.required
                and are_disjoint(dict(one.members)[name], members[name], depth + 1, spend)
            ):
                return True
    return False


def children(shape: Shape) -> Iterator[Shape]:
    """Shapes directly inside; not through references."""
    match shape:
        case Union(branches):
            yield from branches
        case Suggested(inner):
            yield inner
        case Arrays(prefix, rest):
            yield from prefix
            if rest is not None:
                yield rest
        case Objects(members, _, keyed, others):
            yield from (below for _, below in members)
            yield from (below for _, below in keyed)
            if others is not None:
                yield others
            yield from (below for _, below in shape.generated)
        case _:
            return


@dataclass(slots=True)
class Productivity:
    """Which entries some finite instance satisfies."""

    entries: list[Entry]
    productive: set[int] = field(default_factory=set)

    def unproductive(self) -> list[Entry]:
        """Entries that ask for an endless instance."""
        changed = True
        while changed:
            changed = False
            for entry in self.entries:
                if id(entry) not in self.productive and entry.shape is not None and self._is_finite(entry.shape):
                    self.productive.add(id(entry))
                    changed = True
        return [entry for entry in self.entries if id(entry) not in self.productive]

    def _is_finite(self, shape: Shape) -> bool:
        match shape:
            case Ref(entry):
                return id(entry) in self.productive
            case Union(branches):
                return any(map(self._is_finite, branches))
            case Suggested(inner):
                return self._is_finite(inner)
            case Arrays(prefix, rest, least):
                needed = [*prefix[:least], *([rest] if rest is not None and least > len(prefix) else [])]
                return all(map(self._is_finite, needed))
            case Objects(members, required):
                return all(self._is_finite(below) for name, below in members if name in required)
            case _:
                return True
