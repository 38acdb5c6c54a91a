"""Objects of a conjunction: members, patterns of keys, other keys, and what of them can be generated."""

from __future__ import annotations

from typing import Protocol

from dsparkd.grammar import matching, pattern
from dsparkd.grammar.inspection import Conjunction, Element, Inspection, NeverError, as_list, escape
from dsparkd.grammar.shape import Anything, Objects, Shape, Strings, UndecidedError, Values, admits

MAX_COUNTED_OPTIONAL = 50  # optional properties beside minProperties or maxProperties: XGrammar's cost is their product
MAX_KEY_PATTERNS = 40
MAX_KEY_NODES = 32  # states of the pattern of "any other key"; each costs XGrammar about 20 ms
NAMES_OF_ITSELF = "propertyNames refers to a schema around it"

Generated = tuple[tuple[pattern.Node | None, Shape], ...]


class Lowering(Protocol):
    """Makes shapes of conjunctions; level counts the steps into the instance. Both raise NeverError."""

    def lower(self, conjunction: Conjunction, level: int) -> Shape: ...
    def property_names(self, elements: Conjunction, level: int) -> Shape: ...


class ObjectMerge:
    """What several schemas together say of one object."""

    def __init__(self, inspection: Inspection, lowering: Lowering, elements: Conjunction, level: int) -> None:
        self._inspection = inspection
        self._lowering = lowering
        self._elements = elements
        self._level = level
        self._others = {element.at: self._others_of(element) for element in elements}
        self._patterns: dict[str, list[tuple[pattern.Node, str]]] = {}
        for element in elements:
            found = []
            for text in self._map(element, "patternProperties"):
                at = f"{element.at}/patternProperties/{escape(text)}"
                node = inspection.parsed(text, at)
                if node is not None:
                    found.append((node, at))
            self._patterns[element.at] = found

    def _map(self, element: Element, keyword: str) -> dict[str, object]:
        value = self._inspection.schema_at(element).get(keyword)
        return value if isinstance(value, dict) else {}

    def _others_of(self, element: Element) -> str | None:
        """Place of what an element says of properties that it does not name; None when it says nothing."""
        schema = self._inspection.schema_at(element)
        if "additionalProperties" in schema:
            return f"{element.at}/additionalProperties"
        if "unevaluatedProperties" not in schema:
            return None
        within = self._inspection.in_place(element.at)
        if any(other.at not in within for other in self._elements):
            self._inspection.refuse(f"{element.at}/unevaluatedProperties", "beside other schemas it cannot be enforced")
            return None
        if any("additionalProperties" in self._inspection.schema_at(other) for other in self._elements):
            return None  # which evaluates every property
        return f"{element.at}/unevaluatedProperties"

    def shape(self) -> Shape:
        inspection = self._inspection
        least = inspection.largest(self._elements, "minProperties")
        most = inspection.smallest(self._elements, "maxProperties")
        required = {str(name) for _, names in inspection.each(self._elements, "required") for name in as_list(names)}
        names_shape = self._names_shape()
        keyed = [pair for found in self._patterns.values() for pair in found]
        listed = list(dict.fromkeys(name for element in self._elements for name in self._map(element, "properties")))
        if isinstance(names_shape, Values) and not keyed:
            listed += [str(name) for name in names_shape.values if str(name) not in listed]
        listed += sorted(required - set(listed))
        members, forbidden = self._members(listed, required, names_shape)
        others = self._lowered_others()
        shape = Objects(
            members=tuple(members.items()),
            required=frozenset(required),
            keyed=tuple((node, self._keyed_shape(at)) for node, at in keyed),
            others=others,
            names=names_shape,
            forbidden=frozenset(forbidden),
            least=least,
            most=most,
        )
        return self._counted(shape, self._generated(shape, bool(listed)))

    def _members(
        self, listed: list[str], required: set[str], names: Shape | None
    ) -> tuple[dict[str, Shape], list[str]]:
        members: dict[str, Shape] = {}
        forbidden = []
        for name in listed:
            try:
                if names is not None and not admits(names, name, self._inspection.spend):
                    raise NeverError(self._inspection.first_place(self._elements, ("propertyNames",)))
                members[name] = self._lowering.lower(self._holding_for(name), self._level + 1)
            except UndecidedError:
                self._inspection.refuse(self._elements[0].at, NAMES_OF_ITSELF)
            except NeverError:
                if name in required:
                    raise
                forbidden.append(name)
        return members, forbidden

    def _matches(self, node: pattern.Node, name: str) -> bool:
        try:
            return matching.matches(node, name, self._inspection.spend)
        except pattern.PatternError as error:
            at = self._inspection.first_place(self._elements, ("patternProperties", "propertyNames"))
            self._inspection.fail(at, f"a pattern is {error}", code="grammar_too_large")

    def _holding_for(self, name: str) -> Conjunction:
        """Everything that the elements say of one property."""
        found = []
        for element in self._elements:
            places = [f"{element.at}/properties/{escape(name)}"] if name in self._map(element, "properties") else []
            places += [at for node, at in self._patterns[element.at] if self._matches(node, name)]
            others = self._others[element.at]
            if not places and others is not None and not self._is_evaluated(element, name):
                places = [others]
            found += [Element(at) for at in places]
        return tuple(found)

    def _is_evaluated(self, element: Element, name: str) -> bool:
        """Whether unevaluatedProperties of the outermost schema spares a property that another element names."""
        if "additionalProperties" in self._inspection.schema_at(element):
            return False
        others = [other for other in self._elements if other != element]
        return any(
            name in self._map(other, "properties")
            or any(self._matches(node, name) for node, _ in self._patterns[other.at])
            or self._others[other.at] is not None
            for other in others
        )

    def _names_shape(self) -> Shape | None:
        elements = tuple(Element(at) for at, _ in self._inspection.each(self._elements, "propertyNames"))
        if not elements:
            return None
        try:
            shape = self._lowering.property_names(elements, self._level + 1)
        except UndecidedError:
            self._inspection.refuse(elements[0].at, NAMES_OF_ITSELF)
            return None
        except NeverError:
            return Values(())
        return None if shape in (Anything(), Strings()) else shape

    def _lowered_others(self) -> Shape | None:
        elements = tuple(Element(at) for at in self._others.values() if at is not None)
        try:
            return self._lowering.lower(elements, self._level + 1)
        except NeverError:
            return None

    def _keyed_shape(self, at: str) -> Shape:
        """What holds under a key pattern; what other elements say of keys they do not name holds as well."""
        found = [Element(at)]
        for element in self._elements:
            others = self._others[element.at]
            if others is not None and not at.startswith(f"{element.at}/patternProperties/"):
                found.append(Element(others))
        try:
            return self._lowering.lower(tuple(found), self._level + 1)
        except NeverError:
            return Values(())

    def _generated(self, shape: Objects, has_listed: bool) -> Generated:
        """What is written beside the members."""
        names = [*dict(shape.members), *shape.forbidden]
        if shape.most is not None and shape.most <= len(shape.required):
            return ()
        if shape.keyed:
            return self._generated_keyed(shape, names)
        if shape.names is not None:
            return self._generated_named(shape, names)
        if shape.others is None:
            return ()
        is_said = any(at is not None for at in self._others.values())
        at = next(
            (at for at in self._others.values() if at is not None), self._elements[0].at if self._elements else ""
        )
        if not is_said and (names or has_listed or self._inspection.each(self._elements, "properties")):
            if not self._inspection.strict:
                self._inspection.warn(
                    "narrower", at, "without additionalProperties, only the listed ones are generated"
                )
            return ()
        if not names:
            return ((None, shape.others),)
        node, is_complete = matching.excluding(names, MAX_KEY_NODES)
        if not is_complete:
            self._inspection.warn("narrower", at, "other properties do not begin like a listed one")
        return ((node, shape.others),)

    def _generated_keyed(self, shape: Objects, names: list[str]) -> Generated:
        at = next(at for found in self._patterns.values() for _, at in found).rpartition("/")[0]
        if shape.names is not None:
            self._inspection.refuse(at, "patternProperties beside propertyNames cannot be enforced")
        if shape.others is not None:
            self._inspection.warn(
                "narrower", at, "keys that match no pattern are not generated, except the listed ones"
            )
        nodes = [node for node, _ in shape.keyed]
        if len(nodes) > MAX_KEY_PATTERNS:
            self._inspection.fail(at, f"more than {MAX_KEY_PATTERNS} patterns", code="grammar_too_large")
        overlapping = any(
            not matching.are_disjoint(one, other) for index, one in enumerate(nodes) for other in nodes[:index]
        )
        if overlapping:
            self._inspection.refuse(at, "its patterns do not plainly exclude each other")
        generated: list[tuple[pattern.Node | None, Shape]] = []
        for node, below in shape.keyed:
            if below == Values(()):
                continue
            if any(self._matches(node, name) for name in names):
                if node == pattern.searched(pattern.EMPTY):
                    node, _ = matching.excluding(names, MAX_KEY_NODES)
                else:
                    self._inspection.warn(
                        "narrower", at, "a pattern that a listed name matches generates no other keys"
                    )
                    continue
            generated.append((node, below))
        return tuple(generated)

    def _generated_named(self, shape: Objects, names: list[str]) -> Generated:
        if not isinstance(shape.names, Strings) or shape.others is None:
            return ()  # listed names are members already
        node = shape.names.written or pattern.ANY_TEXT
        if any(self._matches(node, name) for name in names):
            at = self._inspection.first_place(self._elements, ("propertyNames",))
            self._inspection.warn("narrower", at, "beside properties that it admits, only those are generated")
            return ()
        return ((node, shape.others),)

    def _counted(self, shape: Objects, generated: Generated) -> Objects:
        """Apply minProperties and maxProperties."""
        inspection = self._inspection
        num_required, num_members = len(shape.required), len(shape.members)
        at = inspection.first_place(self._elements, ("minProperties", "maxProperties"))
        if shape.most is not None and shape.most < max(num_required, shape.least):
            raise NeverError(at)
        if shape.least > num_members and not generated:
            if shape.others is None and not shape.keyed:
                raise NeverError(at)
            inspection.refuse(at, "minProperties beyond the listed properties cannot be enforced here")
        least = shape.least if shape.least > num_required else 0
        most = shape.most if generated or (shape.most is not None and shape.most < num_members) else None
        if (least or most is not None) and num_members - num_required > MAX_COUNTED_OPTIONAL:
            inspection.fail(
                at,
                f"minProperties or maxProperties beside more than {MAX_COUNTED_OPTIONAL} optional properties",
                code="grammar_too_large",
            )
        # The same key twice is one property, so more than one cannot be counted on.
        if least > num_required + 1 and generated:
            inspection.refuse(
                at, "minProperties beside unlisted keys can be enforced up to one above the required ones"
            )
            least = 0
        members, required = shape.members, shape.required
        return Objects(
            members=members,
            required=required,
            keyed=shape.keyed,
            others=shape.others,
            names=shape.names,
            generated=generated,
            forbidden=shape.forbidden,
            least=shape.least if least else 0,
            most=most,
        )
