"""Numbers and strings of a conjunction: bounds, multiples, patterns, formats and lengths brought together."""

from __future__ import annotations

import math
from decimal import Decimal

from dsparkd.grammar import matching, pattern, spelling
from dsparkd.grammar.inspection import Conjunction, Inspection, NeverError
from dsparkd.grammar.key import INT64_MAX, INT64_MIN
from dsparkd.grammar.keywords import FORMATS
from dsparkd.grammar.shape import Integers, Numbers, Shape, Strings, Values

MAX_LISTED_MULTIPLES = 1000
MAX_MULTIPLE = 1024
MAX_NUMBER = 10**15
NUMBER_DECIMALS = 6
MAX_ESCAPED_COUNT = 3  # each costs XGrammar about 35 ms


class ScalarMerge:
    """What several schemas together say of one number or string."""

    def __init__(self, inspection: Inspection) -> None:
        self._inspection = inspection

    def number(self, elements: Conjunction, *, is_integer: bool) -> Shape:
        multiples = self._inspection.each(elements, "multipleOf")
        multiple = 1
        for at, value in multiples:
            assert isinstance(value, int | float)
            if float(value).is_integer():
                multiple = math.lcm(multiple, int(value))
                is_integer = True
            elif is_integer and (1 / value).is_integer():
                continue  # every integer is a multiple
            else:
                self._inspection.refuse(at, "multiples of a fraction cannot be enforced")
        least = max(self._inspection.numbers(elements, "minimum"), default=None)
        most = min(self._inspection.numbers(elements, "maximum"), default=None)
        above = max(self._inspection.numbers(elements, "exclusiveMinimum"), default=None)
        below = min(self._inspection.numbers(elements, "exclusiveMaximum"), default=None)
        if is_integer:
            return self._integers(elements, multiple, least, most, above, below)
        if least is not None and above is not None:
            least, above = (None, above) if above >= least else (least, None)
        if most is not None and below is not None:
            most, below = (None, below) if below <= most else (most, None)
        shape = Numbers(least, most, above, below)
        if shape == Numbers():
            return shape
        return self._bounded_numbers(shape, elements)

    def _integers(
        self,
        elements: Conjunction,
        multiple: int,
        least: float | None,
        most: float | None,
        above: float | None,
        below: float | None,
    ) -> Shape:
        lows = [math.ceil(least)] if least is not None else []
        lows += [math.floor(above) + 1] if above is not None else []
        highs = [math.floor(most)] if most is not None else []
        highs += [math.ceil(below) - 1] if below is not None else []
        low, high = max(lows, default=None), min(highs, default=None)
        at = self._inspection.first_place(
            elements, ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
        )
        if any(bound is not None and not INT64_MIN <= bound <= INT64_MAX for bound in (low, high)):
            self._inspection.fail(at, "integers beyond 64 bits cannot be enforced", code="number_out_of_range")
        if low is not None and high is not None and low > high:
            raise NeverError(at)
        if multiple == 1:
            return Integers(low, high)
        if low is not None and high is not None:
            first = -(-low // multiple) * multiple
            if (high - first) // multiple < MAX_LISTED_MULTIPLES:
                values = tuple(range(first, high + 1, multiple))
                if not values:
                    raise NeverError(at)
                return Values(values)
        elif low is None and high is None and multiple <= MAX_MULTIPLE:
            return Integers(multiple=multiple)
        self._inspection.refuse(
            self._inspection.first_place(elements, ("multipleOf",)),
            f"multipleOf can be enforced up to {MAX_MULTIPLE} without bounds, or within bounds that leave at most "
            f"{MAX_LISTED_MULTIPLES} values",
        )
        return Integers(low, high)

    def _bounded_numbers(self, shape: Numbers, elements: Conjunction) -> Shape:
        at = self._inspection.first_place(elements, ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum"))
        bounds = [bound for bound in (shape.least, shape.most, shape.above, shape.below) if bound is not None]
        for bound in bounds:
            exponent = Decimal(repr(bound)).normalize().as_tuple().exponent
            if abs(bound) > MAX_NUMBER or (isinstance(exponent, int) and exponent < -NUMBER_DECIMALS):
                self._inspection.refuse(
                    at, f"bounds of numbers can be enforced up to 1e15 and to {NUMBER_DECIMALS} digits behind the point"
                )
                return Numbers()
        reals = shape.least if shape.above is None else shape.above, shape.most if shape.below is None else shape.below
        if reals[0] is not None and reals[1] is not None:
            is_open = shape.above is not None or shape.below is not None
            if reals[0] > reals[1] or (reals[0] == reals[1] and is_open):
                raise NeverError(at)
        step = Decimal(1).scaleb(-NUMBER_DECIMALS)
        low = _inner(shape.least, shape.above, step)
        high = _inner(shape.most, shape.below, -step)
        if low is not None and high is not None and low > high:
            self._inspection.refuse(at, "the bounds leave no number to generate")
            return Numbers()
        self._inspection.warn(
            "narrower", at, f"at most {NUMBER_DECIMALS} digits behind the point are generated, and no exponent"
        )
        return shape

    def string(self, elements: Conjunction) -> Shape:
        least = self._inspection.largest(elements, "minLength")
        most = self._inspection.smallest(elements, "maxLength")
        if most is not None and most < least:
            raise NeverError(self._inspection.first_place(elements, ("minLength",)))
        nodes: dict[str, pattern.Node] = {}
        for at, value in self._inspection.each(elements, "pattern"):
            node = self._inspection.parsed(str(value), at)
            if node is not None:
                self._add_node(nodes, str(value), node, at)
        node = next(iter(nodes.values()), None)
        for at, value in self._inspection.each(elements, "format"):
            text = FORMATS.get(str(value))
            if text is None:
                self._inspection.warn("ignored", at, f"the format {str(value)[:100]!r} is an annotation")
            else:
                self._add_node(nodes, text, pattern.searched(pattern.parse(text)), at)
        written = next(iter(nodes.values()), None)
        if node is not None:
            self._require_possible(node, least, most, self._inspection.first_place(elements, ("pattern",)))
        return Strings(node, least, most, self._written(written, least, most, elements))

    def _add_node(self, nodes: dict[str, pattern.Node], text: str, node: pattern.Node, at: str) -> None:
        if nodes and text not in nodes:
            self._inspection.refuse(at, "two patterns or formats for one string cannot be enforced together")
            return
        nodes[text] = node

    def _require_possible(self, node: pattern.Node, least: int, most: int | None, at: str) -> None:
        shortest, longest = matching.lengths(node)
        if (most is not None and shortest > most) or (longest is not None and longest < least):
            raise NeverError(at)

    def _written(
        self, node: pattern.Node | None, least: int, most: int | None, elements: Conjunction
    ) -> pattern.Node | None:
        """The pattern of the strings that are generated; None: any string."""
        if node is None and least == 0 and most is None:
            return None
        bounds_at = self._inspection.first_place(elements, ("maxLength", "minLength", "pattern", "format"))
        cut = matching.within(node or pattern.ANY_TEXT, least, most)
        if cut is None:
            self._inspection.refuse(bounds_at, "these length bounds cannot be enforced beside its pattern or format")
            cut = node or pattern.ANY_TEXT, True
        found, is_all = cut
        if not is_all:
            self._inspection.warn(
                "narrower", bounds_at, "its repetitions are bounded so that every match keeps to the length"
            )
        found, is_all = matching.without_long_escapes(found, MAX_ESCAPED_COUNT)
        if not is_all:
            self._inspection.warn("narrower", bounds_at, "strings with such bounds are generated without escapes")
        try:
            spelling.json_text(found)
        except pattern.PatternError:
            raise NeverError(bounds_at) from None
        return found


def _inner(closed: float | None, open_: float | None, step: Decimal) -> Decimal | None:
    """The first number inside a bound that can be written."""
    if open_ is not None:
        return Decimal(repr(open_)) + step
    return None if closed is None else Decimal(repr(closed))
