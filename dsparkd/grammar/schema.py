"""Schema checker: a JSON schema to a text that XGrammar enforces as the standard means it, or a refusal.

Three passes. `_inspect` looks at every keyword of every subschema, used or not. `_lower` merges what holds for one
instance (a schema, its $ref, its allOf, one branch of its anyOf) into one shape. `_Writer` writes shapes in the few
forms in which the installed XGrammar was seen to be exact: what it ignores, loosens or misreads never reaches it.
"""

from __future__ import annotations

import math
import urllib.parse
from dataclasses import dataclass
from decimal import Decimal
from typing import Literal, NamedTuple, NoReturn

from dsparkd.errors import GrammarError
from dsparkd.grammar import pattern
from dsparkd.grammar.key import (
    INT64_MAX,
    INT64_MIN,
    MAX_BYTES,
    MAX_DEPTH,
    SCHEMA_KEYWORDS,
    SCHEMA_LIST_KEYWORDS,
    canonical_schema,
    compact,
    require_plain,
)
from dsparkd.grammar.keywords import FORMATS, KEYWORDS, TYPED_KEYWORDS, has_exact_numbers, has_no_effect
from dsparkd.grammar.shape import (
    Anything,
    Arrays,
    Entry,
    Integers,
    Numbers,
    Objects,
    Productivity,
    Ref,
    Shape,
    Simple,
    Strings,
    UndecidedError,
    Union,
    Values,
    admits,
    are_disjoint,
    resolved,
)

MAX_PROPERTIES = 1000
MAX_ENUM_VALUES = 5000
MAX_LITERAL_BYTES = 16_384
MAX_SHAPES = 20_000  # merged shapes of one schema, so that branches under branches end in a refusal
MAX_COUNTED_OPTIONAL = 50  # optional properties beside minProperties or maxProperties: XGrammar's cost is their product
MAX_LISTED_MULTIPLES = 1000
MAX_MULTIPLE = 1024
MAX_KEY_NODES = 32  # states of the pattern of "any other key"; each costs XGrammar about 20 ms
MAX_EXACT_MIN_LENGTH = 3
MAX_NUMBER = 10**15
NUMBER_DECIMALS = 6
MAX_WARNINGS = 64

Policy = Literal["refuse", "report"]

_DRAFTS = {
    "json-schema.org/draft/2020-12/schema": "2020-12",
    "json-schema.org/draft/2019-09/schema": "2019-09",
    "json-schema.org/draft-07/schema": "7",
    "json-schema.org/draft-06/schema": "7",
}
_ANNOTATIONS = frozenset(name for name, keyword in KEYWORDS.items() if keyword.treatment == "annotation")
_SILENT = _ANNOTATIONS | {"$defs", "definitions", "$anchor", "$dynamicAnchor", "$id"}


class Warning_(NamedTuple):
    """Something of a schema that is not enforced as written. pointer: into the request body.

    kind: "narrower" what is generated satisfies the schema, but less than it allows; "ignored" a keyword or format that
    asserts nothing here; "unsupported" what would have been refused, let through by grammar.unsupported = "report".
    """

    kind: Literal["narrower", "ignored", "unsupported"]
    pointer: str
    message: str


@dataclass(frozen=True, slots=True)
class Checked:
    """What XGrammar gets for a schema: its canonical text, and the same as a value."""

    text: str
    document: dict[str, object]
    warnings: tuple[Warning_, ...]


class _NeverError(Exception):
    """Nothing satisfies this."""


class _Element(NamedTuple):
    """A subschema that holds here, without those of its anyOf and oneOf that are being dealt with."""

    at: str
    skipped: frozenset[str] = frozenset()


_Conjunction = tuple[_Element, ...]


def check_schema(schema: object, pointer: str, *, policy: Policy = "refuse", strict: bool = False) -> Checked:
    """Check a schema and write the text that XGrammar compiles.

    pointer: JSON pointer of the schema in the request. strict: the client asked for closed objects, so closing one that
    says nothing of other properties is no warning. Raises GrammarError.
    """
    checker = Checker(schema, pointer, policy=policy, strict=strict)
    document = schema_document(checker.shape())
    text = canonical_schema(document)
    if len(text.encode()) > 4 * MAX_BYTES:
        raise GrammarError(
            "the schema is too large once its references are merged", code="grammar_too_large", param=pointer
        )
    return Checked(text, document, checker.warnings())


def escape(name: str) -> str:
    """One step of a JSON pointer."""
    return name.replace("~", "~0").replace("/", "~1")


class Checker:
    """One schema's check. Not reused."""

    def __init__(self, schema: object, pointer: str, *, policy: Policy, strict: bool) -> None:
        self._root = schema
        self._pointer = pointer
        self._policy = policy
        self._strict = strict
        self._warnings: dict[Warning_, None] = {}
        self._schemas: dict[str, dict[str, object] | bool] = {}
        self._names: dict[str, str] = {}  # $anchor and $id -> pointer
        self._entries: dict[_Conjunction, Entry] = {}
        self._num_properties = 0
        self._num_values = 0
        self._num_shapes = 0
        self._draft = "any"

    def shape(self) -> Shape:
        """Run all passes. Raises GrammarError."""
        if not isinstance(self._root, dict | bool):
            self._fail("", "expected a schema: an object, true or false", code="invalid_schema")
        require_plain(self._root, self._pointer)
        if len(compact(self._root).encode()) > MAX_BYTES:
            self._fail("", f"it is larger than {MAX_BYTES} bytes", code="grammar_too_large")
        self._draft = self._find_draft()
        self._inspect(self._root, "", 0)
        try:
            shape = self._lower((_Element(""),), 0)
        except _NeverError:
            self._fail("", "nothing satisfies this schema", code="unsatisfiable_schema")
        if Productivity(list(self._entries.values())).unproductive():
            self._fail("", "it asks for an endless instance", code="unsatisfiable_schema")
        return shape

    def warnings(self) -> tuple[Warning_, ...]:
        """What is not enforced as written, the first MAX_WARNINGS of it."""
        return tuple(self._warnings)[:MAX_WARNINGS]

    # Refusals and warnings

    def _fail(self, at: str, message: str, *, code: str = "invalid_schema") -> NoReturn:
        place = self._pointer + at
        raise GrammarError(f"{place or 'the schema'}: {message}", code=code, param=place)

    def _refuse(self, at: str, message: str) -> None:
        """Refuse what cannot be enforced, or under the policy "report" leave it out and say so."""
        if self._policy == "refuse":
            self._fail(at, message, code="unsupported_schema")
        self._warn("unsupported", at, message)

    def _warn(self, kind: Literal["narrower", "ignored", "unsupported"], at: str, message: str) -> None:
        self._warnings[Warning_(kind, self._pointer + at, message)] = None

    # First pass: every keyword of every subschema

    def _find_draft(self) -> str:
        if not isinstance(self._root, dict) or "$schema" not in self._root:
            return "any"
        named = self._root["$schema"]
        if not isinstance(named, str):
            self._fail("/$schema", "expected a string")
        draft = _DRAFTS.get(named.removeprefix("https://").removeprefix("http://").rstrip("#"))
        if draft is None:
            self._refuse("/$schema", f"the draft {named[:200]!r} is not known; use 2020-12 or draft-07")
        return draft or "any"

    def _inspect(self, schema: object, at: str, depth: int) -> None:
        if depth > MAX_DEPTH:
            self._fail(at, f"it nests deeper than {MAX_DEPTH} levels", code="grammar_too_large")
        if not isinstance(schema, dict | bool):
            self._fail(at, "expected a schema: an object, true or false")
        self._schemas[at] = schema
        if isinstance(schema, bool):
            return
        for name, value in schema.items():
            here = f"{at}/{escape(name)}"
            keyword = KEYWORDS.get(name)
            if keyword is None:
                if not name.startswith("x-"):
                    self._warn("ignored", here, f"the keyword {name[:100]!r} is not known")
                continue
            wrong = keyword.value(value)
            if wrong is not None:
                out_of_range = "64 bits" in wrong
                self._fail(here, wrong, code="number_out_of_range" if out_of_range else "invalid_schema")
            self._inspect_value(name, value, here, depth)
        for name in schema:
            keyword = KEYWORDS.get(name)
            if keyword is not None and keyword.treatment == "refused" and not has_no_effect(schema, name):
                self._refuse(f"{at}/{escape(name)}", f"{name} cannot be enforced")

    def _inspect_value(self, name: str, value: object, at: str, depth: int) -> None:
        match value:
            case list() if name in SCHEMA_LIST_KEYWORDS:
                for index, item in enumerate(value):
                    self._inspect(item, f"{at}/{index}", depth + 1)
            case _ if name in SCHEMA_KEYWORDS:
                self._inspect(value, at, depth + 1)
            case dict() if name in ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas"):
                if name == "properties":
                    self._num_properties += len(value)
                    if self._num_properties > MAX_PROPERTIES:
                        self._fail(at, f"more than {MAX_PROPERTIES} properties", code="grammar_too_large")
                for member, item in value.items():
                    self._inspect_name(member, at)
                    if name == "patternProperties":
                        self._parsed(member, f"{at}/{escape(member)}")
                    self._inspect(item, f"{at}/{escape(member)}", depth + 1)
            case _:
                self._inspect_plain(name, value, at)

    def _inspect_name(self, name: str, at: str) -> None:
        if len(name.encode()) > MAX_LITERAL_BYTES:
            self._fail(at, f"a name is longer than {MAX_LITERAL_BYTES} bytes", code="grammar_too_large")

    def _inspect_plain(self, name: str, value: object, at: str) -> None:
        match name, value:
            case "enum", list():
                self._num_values += len(value)
                if self._num_values > MAX_ENUM_VALUES:
                    self._fail(at, f"more than {MAX_ENUM_VALUES} enum values", code="grammar_too_large")
                for index, item in enumerate(value):
                    self._inspect_literal(item, f"{at}/{index}")
            case "const", _:
                self._inspect_literal(value, at)
            case "required", list():
                self._num_properties += len(value)
                if self._num_properties > 2 * MAX_PROPERTIES:
                    self._fail(at, f"more than {MAX_PROPERTIES} required properties", code="grammar_too_large")
                for item in value:
                    self._inspect_name(str(item), at)
            case "pattern", str():
                self._parsed(value, at)
            case "$anchor", str():
                self._names[f"#{value}"] = at.rpartition("/")[0]
            case "$dynamicAnchor", str():
                self._names[f"#{value}"] = at.rpartition("/")[0]
            case "$id", str():
                if at != "/$id" and not value.startswith("#"):
                    self._refuse(at, "$id below the root would move the meaning of every $ref; leave it out")
                else:
                    self._names[value.rstrip("#") if at == "/$id" else value] = at.rpartition("/")[0]

    def _inspect_literal(self, value: object, at: str) -> None:
        if not has_exact_numbers(value):
            self._fail(at, "integers beyond 64 bits cannot be enforced", code="number_out_of_range")
        if len(compact(value).encode()) > MAX_LITERAL_BYTES:
            self._fail(at, f"a value is longer than {MAX_LITERAL_BYTES} bytes", code="grammar_too_large")

    def _parsed(self, text: str, at: str) -> pattern.Node | None:
        """The whole strings that a pattern is found in; None when it cannot be enforced and may be left out."""
        try:
            return pattern.searched(pattern.parse(text))
        except pattern.PatternError as error:
            self._refuse(at, f"the pattern has {error}")
            return None

    # Second pass: what holds for one instance, as one shape

    def _schema(self, element: _Element) -> dict[str, object]:
        schema = self._schemas[element.at]
        assert isinstance(schema, dict)  # _flatten leaves true and false out
        return schema

    def _lower(self, conjunction: _Conjunction, level: int) -> Shape:
        """Make the shape of a conjunction. level counts steps into the instance: a cycle without one has no meaning.

        Raises _NeverError when nothing satisfies it.
        """
        elements, has_reference = self._flatten(conjunction)
        if not has_reference:
            return self._shape_of(elements, level)
        entry = self._entries.get(elements)
        if entry is None:
            entry = self._entries[elements] = Entry(level)
            try:
                entry.shape = self._shape_of(elements, level)
            except _NeverError:
                entry.is_never = True
                raise
        elif entry.is_never:
            raise _NeverError
        elif entry.shape is None and entry.level == level:
            self._fail(elements[0].at if elements else "", "it refers to itself without end", code="schema_cycle")
        entry.uses += 1
        return Ref(entry)

    def _flatten(self, conjunction: _Conjunction) -> tuple[_Conjunction, bool]:
        """Follow $ref and allOf. Returns what asserts something, and whether a reference was followed."""
        found: dict[_Element, None] = {}
        has_reference = False

        def visit(element: _Element, trail: tuple[str, ...]) -> None:
            nonlocal has_reference
            if element.at in trail:
                self._fail(element.at, "it refers to itself without end", code="schema_cycle")
            schema = self._schemas[element.at]
            if isinstance(schema, bool):
                if not schema:
                    raise _NeverError
                return
            trail = (*trail, element.at)
            if len(trail) > MAX_SHAPES // 20:
                self._fail(element.at, "its references form a chain that is too long", code="grammar_too_large")
            reference = schema.get("$ref")
            asserts = self._asserts(schema, element.skipped)
            if isinstance(reference, str) and self._draft == "7":
                if asserts or "allOf" in schema:
                    self._warn("ignored", element.at, "draft 7 ignores what stands beside $ref")
                has_reference = True
                visit(_Element(self._target(reference, element.at)), trail)
                return
            if asserts:
                found[element] = None
            if isinstance(reference, str):
                has_reference = True
                visit(_Element(self._target(reference, element.at)), trail)
            members = schema.get("allOf")
            if isinstance(members, list):
                for index in range(len(members)):
                    visit(_Element(f"{element.at}/allOf/{index}"), trail)

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

    def _target(self, reference: str, at: str) -> str:
        """Pointer inside the schema that a $ref means."""
        place = f"{at}/$ref"
        if reference in self._names:
            return self._names[reference]
        base, hash_, fragment = reference.partition("#")
        if base and base not in self._names:
            self._fail(
                place, f"{reference[:200]!r} is outside of the schema; put it into $defs", code="unsupported_ref"
            )
        start = self._names[base] if base else ""
        if hash_ and fragment and not fragment.startswith("/"):
            self._fail(place, f"{reference[:200]!r} names nothing in the schema", code="unresolved_ref")
        steps = [step.replace("~1", "/").replace("~0", "~") for step in urllib.parse.unquote(fragment).split("/")[1:]]
        target = start + "".join(f"/{escape(step)}" for step in steps)
        if target not in self._schemas:
            self._inspect_target(steps, start, target, place, reference)
        return target

    def _inspect_target(self, steps: list[str], start: str, target: str, place: str, reference: str) -> None:
        """A target outside of schema position: it becomes one by being referred to."""
        value: object = self._schemas[start]
        for step in steps:
            if isinstance(value, dict) and step in value:
                value = value[step]
            elif (
                isinstance(value, list)
                and step.isascii()
                and step.isdigit()
                and len(step) < 6
                and int(step) < len(value)
            ):
                value = value[int(step)]
            else:
                self._fail(place, f"{reference[:200]!r} names nothing in the schema", code="unresolved_ref")
        self._inspect(value, target, 0)

    def _in_place(self, at: str) -> set[str]:
        """Subschemas that look at the same instance as the one at a place, because it says so."""
        found: set[str] = set()
        waiting = [at]
        while waiting:
            here = waiting.pop()
            schema = self._schemas[here]
            if here in found or isinstance(schema, bool):
                continue
            found.add(here)
            for keyword in ("allOf", "anyOf", "oneOf"):
                waiting += [f"{here}/{keyword}/{index}" for index in range(len(_as_list(schema.get(keyword))))]
            reference = schema.get("$ref")
            if isinstance(reference, str):
                waiting.append(self._target(reference, here))
        return found

    def _shape_of(self, elements: _Conjunction, level: int) -> Shape:
        self._num_shapes += 1
        if self._num_shapes > MAX_SHAPES:
            self._fail("", "merging its branches makes it too large", code="grammar_too_large")
        for index, element in enumerate(elements):
            schema = self._schema(element)
            for keyword in ("anyOf", "oneOf"):
                if keyword in schema and keyword not in element.skipped:
                    rest = _Element(element.at, element.skipped | {keyword})
                    return self._branches((*elements[:index], rest, *elements[index + 1 :]), element.at, keyword, level)
        return self._plain(elements, level)

    def _branches(self, rest: _Conjunction, at: str, keyword: str, level: int) -> Shape:
        """Merge the rest into each branch; branches that nothing satisfies are left out."""
        branches = self._schemas[at]
        assert isinstance(branches, dict)
        members = branches[keyword]
        assert isinstance(members, list)
        shapes: list[Shape] = []
        for index in range(len(members)):
            try:
                shapes.append(self._lower((*rest, _Element(f"{at}/{keyword}/{index}")), level))
            except _NeverError:
                continue
        if keyword == "oneOf":
            self._require_disjoint(shapes, f"{at}/oneOf")
        return _union(shapes)

    def _require_disjoint(self, shapes: list[Shape], at: str) -> None:
        try:
            overlapping = any(
                not are_disjoint(one, other) for index, one in enumerate(shapes) for other in shapes[:index]
            )
        except UndecidedError:
            overlapping = True
        if overlapping:
            self._refuse(at, "its branches do not plainly exclude each other; use anyOf, or a const in each branch")

    def _plain(self, elements: _Conjunction, level: int) -> Shape:
        """A conjunction without branches."""
        literals: list[list[object]] = []
        for element in elements:
            schema = self._schema(element)
            if "const" in schema:
                literals.append([schema["const"]])
            listed = schema.get("enum")
            if isinstance(listed, list):
                literals.append(listed)
        if not literals:
            return self._typed(elements, level)
        others = [Values(tuple(one)) for one in literals[1:]]
        others_beside: list[Shape] = [*others, self._typed(elements, level)]
        try:
            values = [value for value in literals[0] if all(admits(shape, value) for shape in others_beside)]
        except UndecidedError:
            self._refuse(elements[0].at, "an enum beside a reference to a schema around it")
            values = literals[0]
        unique: dict[str, object] = {compact(value): value for value in values}
        if not unique:
            raise _NeverError
        return Values(tuple(unique.values()))

    def _typed(self, elements: _Conjunction, level: int) -> Shape:
        types = self._types(elements)
        if types is None:
            return Anything()
        shapes: list[Shape] = []
        for name in types:
            try:
                shapes.append(self._of_type(name, elements, level))
            except _NeverError:
                continue
        return _union(shapes)

    def _types(self, elements: _Conjunction) -> list[str] | None:
        """Types that all elements admit, in the order of the first list; None when nothing limits them."""
        declared: list[str] | None = None
        for element in elements:
            value = self._schema(element).get("type")
            if value is None:
                continue
            names = [str(name) for name in value] if isinstance(value, list) else [str(value)]
            names = [name for name in dict.fromkeys(names) if name != "integer" or "number" not in names]
            declared = names if declared is None else _common_types(declared, names)
        if declared is not None:
            return declared
        inferred = [
            name
            for name, keywords in TYPED_KEYWORDS.items()
            if any(keyword in self._schema(element) for element in elements for keyword in keywords)
        ]
        for element in elements:
            if inferred and not {"enum", "const"} & self._schema(element).keys():
                message = f"without type, only {' or '.join(inferred)} is generated, as its keywords suggest"
                self._warn("narrower", element.at, message)
                break
        return inferred or None

    def _of_type(self, name: str, elements: _Conjunction, level: int) -> Shape:
        match name:
            case "null" | "boolean":
                return Simple("null" if name == "null" else "boolean")
            case "integer" | "number":
                return self._number(elements, is_integer=name == "integer")
            case "string":
                return self._string(elements)
            case "array":
                return self._array(elements, level)
            case _:
                return self._object(elements, level)

    def _each(self, elements: _Conjunction, keyword: str) -> list[tuple[str, object]]:
        """Places and values of a keyword."""
        return [
            (f"{element.at}/{escape(keyword)}", self._schema(element)[keyword])
            for element in elements
            if keyword in self._schema(element)
        ]

    def _numbers(self, elements: _Conjunction, keyword: str) -> list[float]:
        return [value for _, value in self._each(elements, keyword) if isinstance(value, int | float)]

    def _largest(self, elements: _Conjunction, keyword: str) -> int:
        return max([int(value) for value in self._numbers(elements, keyword)], default=0)

    def _smallest(self, elements: _Conjunction, keyword: str) -> int | None:
        return min([int(value) for value in self._numbers(elements, keyword)], default=None)

    def _number(self, elements: _Conjunction, *, is_integer: bool) -> Shape:
        multiples = self._each(elements, "multipleOf")
        multiple = 1
        for at, value in multiples:
            assert isinstance(value, int | float)
            if float(value).is_integer():
                multiple = math.lcm(multiple, int(value))
                is_integer = True
            elif is_integer and (1 / value).is_integer():
                continue  # every integer is a multiple
            else:
                self._refuse(at, "multiples of a fraction cannot be enforced")
        least = max(self._numbers(elements, "minimum"), default=None)
        most = min(self._numbers(elements, "maximum"), default=None)
        above = max(self._numbers(elements, "exclusiveMinimum"), default=None)
        below = min(self._numbers(elements, "exclusiveMaximum"), default=None)
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
        elements: _Conjunction,
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
        at = self._first_place(elements, ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"))
        if any(bound is not None and not INT64_MIN <= bound <= INT64_MAX for bound in (low, high)):
            self._fail(at, "integers beyond 64 bits cannot be enforced", code="number_out_of_range")
        if low is not None and high is not None and low > high:
            raise _NeverError
        if multiple == 1:
            return Integers(low, high)
        if low is not None and high is not None:
            first = -(-low // multiple) * multiple
            if (high - first) // multiple < MAX_LISTED_MULTIPLES:
                values = tuple(range(first, high + 1, multiple))
                if not values:
                    raise _NeverError
                return Values(values)
        elif low is None and high is None and multiple <= MAX_MULTIPLE:
            return Integers(multiple=multiple)
        self._refuse(
            self._first_place(elements, ("multipleOf",)),
            f"multipleOf can be enforced up to {MAX_MULTIPLE} without bounds, or within bounds that leave at most "
            f"{MAX_LISTED_MULTIPLES} values",
        )
        return Integers(low, high)

    def _bounded_numbers(self, shape: Numbers, elements: _Conjunction) -> Shape:
        at = self._first_place(elements, ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum"))
        bounds = [bound for bound in (shape.least, shape.most, shape.above, shape.below) if bound is not None]
        for bound in bounds:
            exponent = Decimal(repr(bound)).normalize().as_tuple().exponent
            if abs(bound) > MAX_NUMBER or (isinstance(exponent, int) and exponent < -NUMBER_DECIMALS):
                self._refuse(
                    at, f"bounds of numbers can be enforced up to 1e15 and to {NUMBER_DECIMALS} digits behind the point"
                )
                return Numbers()
        step = Decimal(1).scaleb(-NUMBER_DECIMALS)
        low = _inner(shape.least, shape.above, step)
        high = _inner(shape.most, shape.below, -step)
        if low is not None and high is not None and low > high:
            if shape.above is None and shape.below is None:
                raise _NeverError
            self._refuse(at, "the bounds leave no number to generate")
            return Numbers()
        self._warn("narrower", at, f"at most {NUMBER_DECIMALS} digits behind the point are generated, and no exponent")
        return shape

    def _first_place(self, elements: _Conjunction, keywords: tuple[str, ...]) -> str:
        places = [at for keyword in keywords for at, _ in self._each(elements, keyword)]
        return places[0] if places else (elements[0].at if elements else "")

    def _string(self, elements: _Conjunction) -> Shape:
        least = self._largest(elements, "minLength")
        most = self._smallest(elements, "maxLength")
        if most is not None and most < least:
            raise _NeverError
        nodes: dict[str, pattern.Node] = {}
        for at, value in self._each(elements, "pattern"):
            node = self._parsed(str(value), at)
            if node is not None:
                self._add_node(nodes, str(value), node, at)
        for at, value in self._each(elements, "format"):
            if str(value) not in FORMATS:
                self._warn("ignored", at, f"the format {str(value)[:100]!r} is an annotation")
                continue
            self._add_node(nodes, FORMATS[str(value)], pattern.searched(pattern.parse(FORMATS[str(value)])), at)
        node = next(iter(nodes.values()), None)
        length_at = self._first_place(elements, ("maxLength", "minLength"))
        if node is None:
            if most is not None or least > MAX_EXACT_MIN_LENGTH:
                self._warn("narrower", length_at, "strings with such bounds are generated without escapes")
            return Strings(None, least, most)
        return self._patterned(node, least, most, length_at)

    def _add_node(self, nodes: dict[str, pattern.Node], text: str, node: pattern.Node, at: str) -> None:
        if nodes and text not in nodes:
            self._refuse(at, "two patterns or formats for one string cannot be enforced together")
            return
        nodes[text] = node

    def _patterned(self, node: pattern.Node, least: int, most: int | None, at: str) -> Shape:
        """A pattern beside length bounds: the bounds must follow from it, or be its own counts."""
        shortest, longest = pattern.lengths(node)
        try:
            pattern.json_text(node)
        except pattern.PatternError:
            raise _NeverError from None
        if most is not None and shortest > most:
            raise _NeverError
        if longest is not None and longest < least:
            raise _NeverError
        if least <= shortest and (most is None or (longest is not None and longest <= most)):
            return Strings(node)
        repeated = pattern.only_repeat(node)
        if repeated is not None:
            ends = [bound for bound in (repeated.most, most) if bound is not None]
            return Strings(pattern.Repeat(repeated.part, max(repeated.least, least), min(ends, default=None)))
        if (least, most) == (1, None):
            trimmed = pattern.not_empty(node)
            if trimmed is not None:
                return Strings(trimmed)
        self._refuse(at, "length bounds beside a pattern or format can be enforced only where they follow from it")
        return Strings(node)

    def _array(self, elements: _Conjunction, level: int) -> Shape:
        least, most = self._largest(elements, "minItems"), self._smallest(elements, "maxItems")
        longest = max([self._prefix_length(element) for element in elements], default=0)
        if most is not None:
            longest = min(longest, most)
        prefix: list[Shape] = []
        for index in range(longest):
            try:
                prefix.append(self._lower(self._items_at(elements, index), level + 1))
            except _NeverError:
                most = index  # no item can stand here, so the array ends before
                break
        rest: Shape | None = None
        if most is None or most > len(prefix):
            try:
                rest = self._lower(self._items_at(elements, None), level + 1)
            except _NeverError:
                most = len(prefix)
        if rest is None and (most is None or most > len(prefix)):
            most = len(prefix)
        if most is not None and most < least:
            raise _NeverError
        return Arrays(tuple(prefix), rest, least, most)

    def _prefix_length(self, element: _Element) -> int:
        schema = self._schema(element)
        listed = schema.get("items")
        tuple_ = schema.get("prefixItems")
        if isinstance(tuple_, list) and self._draft == "7":
            self._fail(
                f"{element.at}/prefixItems", "draft 7 has no prefixItems; use a list in items", code="invalid_schema"
            )
        if isinstance(listed, list):
            if self._draft == "2020-12" or tuple_ is not None:
                self._fail(f"{element.at}/items", "expected a schema; a list of schemas is prefixItems since 2020-12")
            return len(listed)
        return len(tuple_) if isinstance(tuple_, list) else 0

    def _items_at(self, elements: _Conjunction, index: int | None) -> _Conjunction:
        """What holds for the item at an index; None: behind every prefix."""
        found = []
        for element in elements:
            schema, at = self._schema(element), element.at
            listed = schema.get("items")
            keyword, rest = ("items", "additionalItems") if isinstance(listed, list) else ("prefixItems", "items")
            if index is not None and index < self._prefix_length(element):
                found.append(_Element(f"{at}/{keyword}/{index}"))
            elif rest in schema:
                found.append(_Element(f"{at}/{rest}"))
            elif "unevaluatedItems" in schema and index is None:
                if len(elements) > 1:
                    self._refuse(f"{at}/unevaluatedItems", "unevaluatedItems beside other schemas cannot be enforced")
                    continue
                found.append(_Element(f"{at}/unevaluatedItems"))
        return tuple(found)

    def _property_names(self, elements: _Conjunction, level: int) -> Shape:
        """What a name may be: the strings of a conjunction."""
        shape = self._lower(elements, level)
        if isinstance(shape, Ref):
            shape = resolved(shape)
        match shape:
            case Strings():
                return shape
            case Values(values):
                names = tuple(value for value in values if isinstance(value, str))
                return Values(names)
            case Anything():
                return Strings()
            case _:
                self._refuse(elements[0].at, "names can be limited by pattern, length or enum alone")
                return Strings()

    def _object(self, elements: _Conjunction, level: int) -> Shape:
        return _ObjectMerge(self, elements, level).shape()


class _ObjectMerge:
    """What several schemas together say of one object."""

    def __init__(self, checker: Checker, elements: _Conjunction, level: int) -> None:
        self._checker = checker
        self._elements = elements
        self._level = level
        self._others = {element.at: self._others_of(element) for element in elements}
        self._patterns: dict[str, list[tuple[pattern.Node, str]]] = {}
        for element in elements:
            found = []
            for text in self._map(element, "patternProperties"):
                at = f"{element.at}/patternProperties/{escape(text)}"
                node = checker._parsed(text, at)
                if node is not None:
                    found.append((node, at))
            self._patterns[element.at] = found

    def _map(self, element: _Element, keyword: str) -> dict[str, object]:
        value = self._checker._schema(element).get(keyword)
        return value if isinstance(value, dict) else {}

    def _others_of(self, element: _Element) -> str | None:
        """Place of what an element says of properties that it does not name; None when it says nothing."""
        schema = self._checker._schema(element)
        if "additionalProperties" in schema:
            return f"{element.at}/additionalProperties"
        if "unevaluatedProperties" not in schema:
            return None
        within = self._checker._in_place(element.at)
        if any(other.at not in within for other in self._elements):
            self._checker._refuse(f"{element.at}/unevaluatedProperties", "beside other schemas it cannot be enforced")
            return None
        return f"{element.at}/unevaluatedProperties"

    def shape(self) -> Shape:
        checker = self._checker
        least = checker._largest(self._elements, "minProperties")
        most = checker._smallest(self._elements, "maxProperties")
        required = {str(name) for _, names in checker._each(self._elements, "required") for name in _as_list(names)}
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
                if names is not None and not admits(names, name):
                    raise _NeverError
                members[name] = self._checker._lower(self._holding_for(name), self._level + 1)
            except UndecidedError:
                self._checker._refuse(self._elements[0].at, "propertyNames refers to a schema around it")
            except _NeverError:
                if name in required:
                    raise
                forbidden.append(name)
        return members, forbidden

    def _holding_for(self, name: str) -> _Conjunction:
        """Everything that the elements say of one property."""
        found = []
        for element in self._elements:
            places = [f"{element.at}/properties/{escape(name)}"] if name in self._map(element, "properties") else []
            places += [at for node, at in self._patterns[element.at] if pattern.matches(node, name)]
            others = self._others[element.at]
            if not places and others is not None and not self._is_evaluated(element, name):
                places = [others]
            found += [_Element(at) for at in places]
        return tuple(found)

    def _is_evaluated(self, element: _Element, name: str) -> bool:
        """Whether unevaluatedProperties of the outermost schema spares a property that another element names."""
        if "additionalProperties" in self._checker._schema(element):
            return False
        others = [other for other in self._elements if other != element]
        return any(
            name in self._map(other, "properties")
            or any(pattern.matches(node, name) for node, _ in self._patterns[other.at])
            or self._others[other.at] is not None
            for other in others
        )

    def _names_shape(self) -> Shape | None:
        elements = tuple(_Element(at) for at, _ in self._checker._each(self._elements, "propertyNames"))
        if not elements:
            return None
        shape = self._checker._property_names(elements, self._level + 1)
        return None if shape in (Anything(), Strings()) else shape

    def _lowered_others(self) -> Shape | None:
        elements = tuple(_Element(at) for at in self._others.values() if at is not None)
        try:
            return self._checker._lower(elements, self._level + 1)
        except _NeverError:
            return None

    def _keyed_shape(self, at: str) -> Shape:
        """What holds under a key pattern; what other elements say of keys they do not name holds as well."""
        found = [_Element(at)]
        for element in self._elements:
            others = self._others[element.at]
            if others is not None and not at.startswith(f"{element.at}/patternProperties/"):
                found.append(_Element(others))
        try:
            return self._checker._lower(tuple(found), self._level + 1)
        except _NeverError:
            return Values(())

    def _generated(self, shape: Objects, has_listed: bool) -> tuple[tuple[pattern.Node | None, Shape], ...]:
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
        if not is_said and (names or has_listed or self._checker._each(self._elements, "properties")):
            if not self._checker._strict:
                self._checker._warn("narrower", at, "without additionalProperties, only the listed ones are generated")
            return ()
        if not names:
            return ((None, shape.others),)
        node, is_complete = pattern.excluding(names, MAX_KEY_NODES)
        if not is_complete:
            self._checker._warn("narrower", at, "other properties do not begin like a listed one")
        return ((node, shape.others),)

    def _generated_keyed(self, shape: Objects, names: list[str]) -> tuple[tuple[pattern.Node | None, Shape], ...]:
        at = next(at for found in self._patterns.values() for _, at in found).rpartition("/")[0]
        if shape.names is not None:
            self._checker._refuse(at, "patternProperties beside propertyNames cannot be enforced")
        if shape.others is not None:
            self._checker._warn("narrower", at, "keys that match no pattern are not generated, except the listed ones")
        nodes = [node for node, _ in shape.keyed]
        overlapping = any(
            not pattern.are_disjoint(one, other) for index, one in enumerate(nodes) for other in nodes[:index]
        )
        if overlapping:
            self._checker._refuse(at, "its patterns do not plainly exclude each other")
        generated: list[tuple[pattern.Node | None, Shape]] = []
        for node, below in shape.keyed:
            if below == Values(()):
                continue
            if any(pattern.matches(node, name) for name in names):
                if node == pattern.searched(pattern.EMPTY):
                    node, _ = pattern.excluding(names, MAX_KEY_NODES)
                else:
                    self._checker._warn("narrower", at, "a pattern that a listed name matches generates no other keys")
                    continue
            generated.append((node, below))
        return tuple(generated)

    def _generated_named(self, shape: Objects, names: list[str]) -> tuple[tuple[pattern.Node | None, Shape], ...]:
        if not isinstance(shape.names, Strings) or shape.others is None:
            return ()  # listed names are members already
        node = shape.names.node
        if node is None:
            node = pattern.Repeat(pattern.Class(pattern.ANY), shape.names.least, shape.names.most)
        if any(pattern.matches(node, name) for name in names):
            at = self._checker._first_place(self._elements, ("propertyNames",))
            self._checker._warn("narrower", at, "beside properties that it admits, only those are generated")
            return ()
        return ((node, shape.others),)

    def _counted(self, shape: Objects, generated: tuple[tuple[pattern.Node | None, Shape], ...]) -> Objects:
        """Apply minProperties and maxProperties."""
        checker = self._checker
        num_required, num_members = len(shape.required), len(shape.members)
        if shape.most is not None and shape.most < max(num_required, shape.least):
            raise _NeverError
        if shape.least > num_members and not generated:
            if shape.others is None and not shape.keyed:
                raise _NeverError
            at = checker._first_place(self._elements, ("minProperties",))
            checker._refuse(at, "minProperties beyond the listed properties cannot be enforced here")
        least = shape.least if shape.least > num_required else 0
        most = shape.most if generated or (shape.most is not None and shape.most < num_members) else None
        at = checker._first_place(self._elements, ("minProperties", "maxProperties"))
        if (least or most is not None) and num_members - num_required > MAX_COUNTED_OPTIONAL:
            checker._fail(
                at,
                f"minProperties or maxProperties beside more than {MAX_COUNTED_OPTIONAL} optional properties",
                code="grammar_too_large",
            )
        # The same key twice is one property, so more than one cannot be counted on.
        if least > num_required + 1 and generated:
            checker._refuse(at, "minProperties beside unlisted keys can be enforced up to one above the required ones")
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


def _as_list(value: object) -> list[object]:
    return value if isinstance(value, list) else []


def _union(shapes: list[Shape]) -> Shape:
    """Raises _NeverError for none."""
    flat: list[Shape] = []
    for shape in shapes:
        flat += shape.branches if isinstance(shape, Union) else [shape]
    if not flat:
        raise _NeverError
    return flat[0] if len(flat) == 1 else Union(tuple(flat))


def _common_types(first: list[str], second: list[str]) -> list[str]:
    common = [name for name in first if name in second or (name == "integer" and "number" in second)]
    return common + (["integer"] if "number" in first and "integer" in second and "integer" not in common else [])


def _inner(closed: float | None, open_: float | None, step: Decimal) -> Decimal | None:
    """The first number inside a bound that can be written."""
    if open_ is not None:
        return Decimal(repr(open_)) + step
    return None if closed is None else Decimal(repr(closed))


class _Writer:
    """Writes a shape as a schema of the forms that XGrammar is exact in."""

    def __init__(self) -> None:
        self._names: dict[int, str] = {}
        self._definitions: dict[str, object] = {}

    def document(self, shape: Shape) -> dict[str, object]:
        schema = self.schema(shape)
        return schema | ({"$defs": self._definitions} if self._definitions else {})

    def schema(self, shape: Shape) -> dict[str, object]:
        match shape:
            case Anything():
                return {}
            case Values(values):
                return {"enum": list(values)}
            case Simple(kind):
                return {"type": kind}
            case Integers(least, most, multiple):
                bounds: dict[str, object] = {"minimum": least, "maximum": most}
                bounds["multipleOf"] = multiple if multiple > 1 else None
                return {"type": "integer"} | _present(bounds)
            case Numbers(least_, most_, above, below):
                named = {"minimum": least_, "maximum": most_, "exclusiveMinimum": above, "exclusiveMaximum": below}
                return {"type": "number"} | _present(dict(named))
            case Strings():
                return self._string(shape)
            case Arrays():
                return self._array(shape)
            case Objects():
                return self._object(shape)
            case Union(branches):
                return {"anyOf": [self.schema(branch) for branch in branches]}
            case Ref(entry):
                return self._reference(entry)

    def _reference(self, entry: Entry) -> dict[str, object]:
        assert entry.shape is not None
        if entry.uses == 1 and id(entry) not in self._names:
            return self.schema(entry.shape)
        name = self._names.get(id(entry))
        if name is None:
            name = self._names[id(entry)] = f"d{len(self._names)}"
            self._definitions[name] = {}  # before its members, so that names follow the order of first use
            self._definitions[name] = self.schema(entry.shape)
        return {"$ref": f"#/$defs/{name}"}

    def _string(self, shape: Strings) -> dict[str, object]:
        if shape.node is not None:
            return {"type": "string", "pattern": pattern.json_text(shape.node)}
        if shape.most is None and shape.least == 0:
            return {"type": "string"}
        return {"type": "string", "pattern": pattern.json_text(bounded_text(shape.least, shape.most))}

    def _array(self, shape: Arrays) -> dict[str, object]:
        schema: dict[str, object] = {"type": "array"}
        if shape.prefix:
            schema["prefixItems"] = [self.schema(item) for item in shape.prefix]
        schema["items"] = False if shape.rest is None else self.schema(shape.rest)
        most = shape.most if shape.rest is not None else None
        if shape.least:
            schema["minItems"] = shape.least
        if most is not None:
            schema["maxItems"] = most
        return schema

    def _object(self, shape: Objects) -> dict[str, object]:
        schema: dict[str, object] = {"type": "object", "additionalProperties": False}
        members = {name: self.schema(below) for name, below in shape.members}
        if members:
            schema["properties"] = members
        if shape.required:
            schema["required"] = sorted(shape.required)
        keyed: dict[str, object] = {}
        for node, below in shape.generated:
            if node is None:
                schema["additionalProperties"] = self.schema(below)
            else:
                keyed[pattern.json_text(node)] = self.schema(below)
        if keyed:
            schema["patternProperties"] = keyed
        if shape.least:
            schema["minProperties"] = shape.least
        if shape.most is not None:
            schema["maxProperties"] = shape.most
        return schema


def _present(members: dict[str, object]) -> dict[str, object]:
    return {name: value for name, value in members.items() if value is not None}


def bounded_text(least: int, most: int | None) -> pattern.Node:
    """Strings of a length: with escapes where XGrammar can count them cheaply, else of plain characters alone."""
    if most is None and least <= MAX_EXACT_MIN_LENGTH:
        return pattern.Repeat(pattern.Class(pattern.ANY), least, None)
    return pattern.Repeat(pattern.Class(pattern.JSON_PLAIN), least, most)


def schema_document(shape: Shape) -> dict[str, object]:
    """The schema that XGrammar gets for a shape."""
    return _Writer().document(shape)
