"""Second pass over a schema: what holds for one instance, merged into one shape.

A schema, its $ref, its allOf and one branch of its anyOf all speak of the same instance: they are a conjunction.
"""

from __future__ import annotations

from dsparkd.grammar.inspection import Conjunction, Element, Inspection, NeverError
from dsparkd.grammar.key import compact
from dsparkd.grammar.keywords import KEYWORDS, TYPED_KEYWORDS
from dsparkd.grammar.objects import ObjectMerge
from dsparkd.grammar.scalars import ScalarMerge
from dsparkd.grammar.shape import (
    Anything,
    Arrays,
    Entry,
    Productivity,
    Ref,
    Shape,
    Simple,
    Strings,
    Suggested,
    UndecidedError,
    Union,
    Values,
    admits,
    are_disjoint,
    have_distinct_values,
    resolved,
)

MAX_SHAPES = 3000  # merged shapes of one schema, so that branches under branches end in a refusal
MAX_MERGE_DEPTH = 70  # each is about ten calls deep
MAX_CHAIN = 100  # references that follow each other for one instance
MAX_COMPARED_BRANCHES = 40  # branches of a oneOf that are compared one by one

_ANNOTATIONS = frozenset(name for name, keyword in KEYWORDS.items() if keyword.treatment == "annotation")
_SILENT = _ANNOTATIONS | {"$defs", "definitions", "$anchor", "$dynamicAnchor", "$id"}


class Merger:
    """Merges one inspected schema. Not reused."""

    def __init__(self, inspection: Inspection) -> None:
        self._inspection = inspection
        self._scalars = ScalarMerge(inspection)
        self._entries: dict[Conjunction, Entry] = {}
        self._num_shapes = 0
        self._depth = 0

    def root(self) -> Shape:
        """The shape of the whole schema. Raises GrammarError."""
        try:
            shape = self.lower((Element(""),), 0)
        except NeverError as error:
            self._inspection.fail(error.at, "nothing satisfies this", code="unsatisfiable_schema")
        if Productivity(list(self._entries.values())).unproductive():
            self._inspection.fail("", "it asks for an endless instance", code="unsatisfiable_schema")
        return shape

    def lower(self, conjunction: Conjunction, level: int) -> Shape:
        """Make the shape of a conjunction. level counts steps into the instance: a cycle without one has no meaning.

        Raises NeverError when nothing satisfies it.
        """
        self._depth += 1
        if self._depth > MAX_MERGE_DEPTH:
            self._inspection.fail(
                conjunction[0].at, "it nests too deeply once references are followed", code="grammar_too_large"
            )
        try:
            return self._lower_flat(*self._flatten(conjunction), level)
        finally:
            self._depth -= 1

    def _lower_flat(self, elements: Conjunction, has_reference: bool, level: int) -> Shape:
        if not has_reference:
            return self._shape_of(elements, level)
        entry = self._entries.get(elements)
        if entry is None:
            entry = self._entries[elements] = Entry(level)
            try:
                entry.shape = self._shape_of(elements, level)
            except NeverError:
                entry.is_never = True
                raise
        elif entry.is_never:
            raise NeverError(elements[0].at if elements else "")
        elif entry.shape is None and entry.level == level:
            self._inspection.fail(
                elements[0].at if elements else "", "it refers to itself without end", code="schema_cycle"
            )
        entry.uses += 1
        return Ref(entry)

    def _flatten(self, conjunction: Conjunction) -> tuple[Conjunction, bool]:
        """Follow $ref and allOf. Returns what asserts something, and whether a reference was followed."""
        found: dict[Element, None] = {}
        done: set[Element] = set()
        has_reference = False

        def visit(element: Element, trail: tuple[str, ...]) -> None:
            nonlocal has_reference
            if element.at in trail:
                self._inspection.fail(element.at, "it refers to itself without end", code="schema_cycle")
            schema = self._inspection.schemas[element.at]
            if isinstance(schema, bool):
                if not schema:
                    raise NeverError(element.at)
                return
            if element in done:
                return
            done.add(element)
            trail = (*trail, element.at)
            if len(trail) > MAX_CHAIN:
                self._inspection.fail(
                    element.at, "its references form a chain that is too long", code="grammar_too_large"
                )
            reference = schema.get("$ref")
            asserts = self._asserts(schema, element.skipped)
            if isinstance(reference, str) and self._inspection.draft == "7":
                if asserts or "allOf" in schema:
                    self._inspection.warn("ignored", element.at, "draft 7 ignores what stands beside $ref")
                has_reference = True
                visit(Element(self._inspection.target(reference, element.at)), trail)
                return
            if asserts:
                found[element] = None
            if isinstance(reference, str):
                has_reference = True
                visit(Element(self._inspection.target(reference, element.at)), trail)
            members = schema.get("allOf")
            if isinstance(members, list):
                for index in range(len(members)):
                    visit(Element(f"{element.at}/allOf/{index}"), trail)

        for element in conjunction:
            visit(element, ())
        return tuple(found), has_reference

    def _asserts(self, schema: dict[str, object], skipped: frozenset[str]) -> bool:
        return any(
            name in KEYWORDS
            and KEYWORDS[name].treatment != "refused"
            and name not in _SILENT
            and name not in skipped
            and name not in ("$ref", "allOf")
            for name in schema
        )

    def _shape_of(self, elements: Conjunction, level: int) -> Shape:
        self._num_shapes += 1
        if self._num_shapes > MAX_SHAPES:
            self._inspection.fail("", "merging its branches makes it too large", code="grammar_too_large")
        for index, element in enumerate(elements):
            schema = self._inspection.schema_at(element)
            for keyword in ("anyOf", "oneOf"):
                if keyword in schema and keyword not in element.skipped:
                    rest = Element(element.at, element.skipped | {keyword})
                    return self._branches((*elements[:index], rest, *elements[index + 1 :]), element.at, keyword, level)
        return self._plain(elements, level)

    def _branches(self, rest: Conjunction, at: str, keyword: str, level: int) -> Shape:
        """Merge the rest into each branch; branches that nothing satisfies are left out."""
        branches = self._inspection.schemas[at]
        assert isinstance(branches, dict)
        members = branches[keyword]
        assert isinstance(members, list)
        shapes: list[Shape] = []
        for index in range(len(members)):
            try:
                shapes.append(self.lower((*rest, Element(f"{at}/{keyword}/{index}")), level))
            except NeverError:
                continue
        if keyword == "oneOf":
            self._require_disjoint(shapes, f"{at}/oneOf")
        return _union(shapes, f"{at}/{keyword}")

    def _require_disjoint(self, shapes: list[Shape], at: str) -> None:
        try:
            if have_distinct_values(shapes):
                return
            if len(shapes) > MAX_COMPARED_BRANCHES:
                raise UndecidedError
            overlapping = any(
                not are_disjoint(one, other, spend=self._inspection.spend)
                for index, one in enumerate(shapes)
                for other in shapes[:index]
            )
        except UndecidedError:
            overlapping = True
        if overlapping:
            self._inspection.refuse(
                at, "its branches do not plainly exclude each other; use anyOf, or a const in each branch"
            )

    def _plain(self, elements: Conjunction, level: int) -> Shape:
        """A conjunction without branches."""
        literals: list[list[object]] = []
        for element in elements:
            schema = self._inspection.schema_at(element)
            if "const" in schema:
                literals.append([schema["const"]])
            listed = schema.get("enum")
            if isinstance(listed, list):
                literals.append(listed)
        if not literals:
            return self._typed(elements, level)
        others = [Values(tuple(one)) for one in literals[1:]]
        others_beside: list[Shape] = [*others, self._typed(elements, level)]
        spend = self._inspection.spend
        try:
            values = [value for value in literals[0] if all(admits(shape, value, spend) for shape in others_beside)]
        except UndecidedError:
            place = self._inspection.first_place(elements, ("enum", "const"))
            self._inspection.refuse(place, "an enum whose values cannot be compared with what stands beside it")
            values = literals[0]
        unique: dict[str, object] = {compact(value): value for value in values}
        if not unique:
            raise NeverError(self._inspection.first_place(elements, ("enum", "const")))
        return Values(tuple(unique.values()))

    def _typed(self, elements: Conjunction, level: int) -> Shape:
        types = self._declared_types(elements)
        if types is not None:
            return self._of_types(types, elements, level)
        types = [
            name
            for name, keywords in TYPED_KEYWORDS.items()
            if any(keyword in self._inspection.schema_at(element) for element in elements for keyword in keywords)
        ]
        if not types:
            return Anything()
        try:
            shape = self._of_types(types, elements, level)
        except NeverError:  # then any value of another type will do
            others = [name for name in ("null", "boolean", "number", "string", "array", "object") if name not in types]
            return self._of_types(others, elements, level)
        if not any({"enum", "const"} & self._inspection.schema_at(element).keys() for element in elements):
            message = f"without type, only {' or '.join(types)} is generated, as its keywords suggest"
            self._inspection.warn("narrower", elements[0].at, message)
        return Suggested(shape)

    def _of_types(self, types: list[str], elements: Conjunction, level: int) -> Shape:
        shapes: list[Shape] = []
        for name in types:
            try:
                shapes.append(self._of_type(name, elements, level))
            except NeverError:
                if len(types) == 1:
                    raise
        return _union(shapes, elements[0].at)

    def _declared_types(self, elements: Conjunction) -> list[str] | None:
        """Types that all elements name, in the order of the first list; None when none names any."""
        declared: list[str] | None = None
        for element in elements:
            value = self._inspection.schema_at(element).get("type")
            if value is None:
                continue
            names = [str(name) for name in value] if isinstance(value, list) else [str(value)]
            names = [name for name in dict.fromkeys(names) if name != "integer" or "number" not in names]
            declared = names if declared is None else _common_types(declared, names)
        return declared

    def _of_type(self, name: str, elements: Conjunction, level: int) -> Shape:
        match name:
            case "null" | "boolean":
                return Simple("null" if name == "null" else "boolean")
            case "integer" | "number":
                return self._scalars.number(elements, is_integer=name == "integer")
            case "string":
                return self._scalars.string(elements)
            case "array":
                return self._array(elements, level)
            case _:
                return ObjectMerge(self._inspection, self, elements, level).shape()

    def _array(self, elements: Conjunction, level: int) -> Shape:
        least, most = self._inspection.largest(elements, "minItems"), self._inspection.smallest(elements, "maxItems")
        longest = max([self._prefix_length(element) for element in elements], default=0)
        if most is not None:
            longest = min(longest, most)
        prefix: list[Shape] = []
        for index in range(longest):
            try:
                prefix.append(self.lower(self._items_at(elements, index), level + 1))
            except NeverError:
                most = index  # no item can stand here, so the array ends before
                break
        rest: Shape | None = None
        if most is None or most > len(prefix):
            try:
                rest = self.lower(self._items_at(elements, None), level + 1)
            except NeverError:
                most = len(prefix)
        if rest is None and (most is None or most > len(prefix)):
            most = len(prefix)
        if most is not None and most < least:
            raise NeverError(self._inspection.first_place(elements, ("minItems",)))
        return Arrays(tuple(prefix), rest, least, most)

    def _prefix_length(self, element: Element) -> int:
        schema = self._inspection.schema_at(element)
        listed = schema.get("items")
        tuple_ = schema.get("prefixItems")
        if isinstance(tuple_, list) and self._inspection.draft == "7":
            self._inspection.fail(
                f"{element.at}/prefixItems", "draft 7 has no prefixItems; use a list in items", code="invalid_schema"
            )
        if isinstance(listed, list):
            if self._inspection.draft == "2020-12" or tuple_ is not None:
                self._inspection.fail(
                    f"{element.at}/items", "expected a schema; a list of schemas is prefixItems since 2020-12"
                )
            return len(listed)
        return len(tuple_) if isinstance(tuple_, list) else 0

    def _items_at(self, elements: Conjunction, index: int | None) -> Conjunction:
        """What holds for the item at an index; None: behind every prefix."""
        found = []
        for element in elements:
            schema, at = self._inspection.schema_at(element), element.at
            listed = schema.get("items")
            keyword, rest = ("items", "additionalItems") if isinstance(listed, list) else ("prefixItems", "items")
            if index is not None and index < self._prefix_length(element):
                found.append(Element(f"{at}/{keyword}/{index}"))
            elif rest in schema:
                found.append(Element(f"{at}/{rest}"))
            elif "unevaluatedItems" in schema and index is None:
                if len(elements) > 1:
                    self._inspection.refuse(
                        f"{at}/unevaluatedItems", "unevaluatedItems beside other schemas cannot be enforced"
                    )
                    continue
                found.append(Element(f"{at}/unevaluatedItems"))
        return tuple(found)

    def property_names(self, elements: Conjunction, level: int) -> Shape:
        """What a name may be: the strings of a conjunction."""
        shape = self.lower(elements, level)
        shape = resolved(shape)
        if isinstance(shape, Suggested):
            shape = resolved(shape.shape)
        match shape:
            case Strings():
                return shape
            case Values(values):
                names = tuple(value for value in values if isinstance(value, str))
                return Values(names)
            case Anything():
                return Strings()
            case _:
                self._inspection.refuse(elements[0].at, "names can be limited by pattern, length or enum alone")
                return Strings()


def _union(shapes: list[Shape], at: str) -> Shape:
    """Raises NeverError for none."""
    flat: list[Shape] = []
    for shape in shapes:
        flat += shape.branches if isinstance(shape, Union) else [shape]
    if not flat:
        raise NeverError(at)
    return flat[0] if len(flat) == 1 else Union(tuple(flat))


def _common_types(first: list[str], second: list[str]) -> list[str]:
    common = [name for name in first if name in second or (name == "integer" and "number" in second)]
    return common + (["integer"] if "number" in first and "integer" in second and "integer" not in common else [])
