"""First pass over a schema: every keyword of every subschema is looked at, used or not; and where $ref leads.

Places are JSON pointers inside the schema; refusals and warnings carry the place in the request.
"""

from __future__ import annotations

import urllib.parse
from typing import Literal, NamedTuple, NoReturn

from dsparkd.errors import GrammarError
from dsparkd.grammar import pattern
from dsparkd.grammar.key import (
    MAX_BYTES,
    MAX_DEPTH,
    SCHEMA_KEYWORDS,
    SCHEMA_LIST_KEYWORDS,
    compact,
    require_plain,
)
from dsparkd.grammar.keywords import KEYWORDS, has_exact_numbers, has_no_effect

MAX_PROPERTIES = 1000
MAX_ENUM_VALUES = 5000
MAX_LITERAL_BYTES = 16_384
MAX_WARNINGS = 64
MAX_STEPS = 400_000  # in which values and names are compared with what stands beside them; a fraction of a second

Policy = Literal["refuse", "report"]

_DRAFTS = {
    "json-schema.org/draft/2020-12/schema": "2020-12",
    "json-schema.org/draft/2019-09/schema": "2019-09",
    "json-schema.org/draft-07/schema": "7",
    "json-schema.org/draft-06/schema": "7",
}


class SchemaWarning(NamedTuple):
    """Something of a schema that is not enforced as written. pointer: into the request body.

    kind: "narrower" what is generated satisfies the schema, but less than it allows; "ignored" a keyword or format that
    asserts nothing here; "unsupported" what would have been refused, let through by grammar.unsupported = "report".
    """

    kind: Literal["narrower", "ignored", "unsupported"]
    pointer: str
    message: str


class NeverError(Exception):
    """Nothing satisfies what stands at a place."""

    def __init__(self, at: str) -> None:
        super().__init__(at)
        self.at = at


class Element(NamedTuple):
    """A subschema that holds here, without those of its anyOf and oneOf that are being dealt with."""

    at: str
    skipped: frozenset[str] = frozenset()


Conjunction = tuple[Element, ...]


def escape(name: str) -> str:
    """One step of a JSON pointer."""
    return name.replace("~", "~0").replace("/", "~1")


def as_list(value: object) -> list[object]:
    return value if isinstance(value, list) else []


class Effort:
    """What all schemas of a request take together: their bytes, and steps of comparing, whose number is a product."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self.num_steps = 0


class Inspection:
    """One schema as it was sent, checked keyword by keyword. Not reused.

    schemas: every subschema by its place. pointer: where the schema is in the request. effort: shared with the
    request's other schemas.
    """

    def __init__(
        self, root: object, pointer: str, *, policy: Policy, strict: bool, effort: Effort | None = None
    ) -> None:
        self.schemas: dict[str, dict[str, object] | bool] = {}
        self.draft = "any"
        self.strict = strict
        self._root = root
        self._pointer = pointer
        self._policy = policy
        self._warnings: dict[SchemaWarning, None] = {}
        self._names: dict[str, str] = {}  # $anchor and $id -> place
        self._num_properties = 0
        self._num_values = 0
        self._effort = Effort() if effort is None else effort

    def run(self) -> None:
        """Look at everything. Raises GrammarError."""
        if not isinstance(self._root, dict | bool):
            self.fail("", "expected a schema: an object, true or false")
        require_plain(self._root, self._pointer)
        num_bytes = len(compact(self._root).encode())
        if num_bytes > MAX_BYTES:
            self.fail("", f"it is larger than {MAX_BYTES} bytes", code="grammar_too_large")
        self._effort.num_bytes += num_bytes
        if self._effort.num_bytes > 4 * MAX_BYTES:
            self.fail("", "the request's schemas are too large together", code="grammar_too_large")
        self.draft = self._find_draft()
        self._inspect(self._root, "", 0)
        self._resolve_all()

    def warnings(self) -> tuple[SchemaWarning, ...]:
        """What is not enforced as written, the first MAX_WARNINGS of it."""
        return tuple(self._warnings)[:MAX_WARNINGS]

    def fail(self, at: str, message: str, *, code: str = "invalid_schema") -> NoReturn:
        place = self._pointer + at
        raise GrammarError(f"{place or 'the schema'}: {message}", code=code, param=place)

    def spend(self, steps: int) -> None:
        """Count steps of comparing. Raises GrammarError when they are too many."""
        self._effort.num_steps += steps
        if self._effort.num_steps > MAX_STEPS:
            message = "comparing its values and names with what stands beside them is too much work; list fewer of them"
            self.fail("", message, code="grammar_too_large")

    def refuse(self, at: str, message: str) -> None:
        """Refuse what cannot be enforced, or under the policy "report" leave it out and say so."""
        if self._policy == "refuse":
            self.fail(at, message, code="unsupported_schema")
        self.warn("unsupported", at, message)

    def warn(self, kind: Literal["narrower", "ignored", "unsupported"], at: str, message: str) -> None:
        self._warnings[SchemaWarning(kind, self._pointer + at, message)] = None

    def _find_draft(self) -> str:
        if not isinstance(self._root, dict) or "$schema" not in self._root:
            return "any"
        named = self._root["$schema"]
        if not isinstance(named, str):
            self.fail("/$schema", "expected a string")
        draft = _DRAFTS.get(named.removeprefix("https://").removeprefix("http://").rstrip("#"))
        if draft is None:
            self.refuse("/$schema", f"the draft {named[:200]!r} is not known; use 2020-12 or draft-07")
        return draft or "any"

    def _inspect(self, schema: object, at: str, depth: int) -> None:
        if depth > MAX_DEPTH:
            self.fail(at, f"it nests deeper than {MAX_DEPTH} levels", code="grammar_too_large")
        if not isinstance(schema, dict | bool):
            self.fail(at, "expected a schema: an object, true or false")
        self.schemas[at] = schema
        if isinstance(schema, bool):
            return
        for name, value in schema.items():
            here = f"{at}/{escape(name)}"
            keyword = KEYWORDS.get(name)
            if keyword is None:
                if not name.startswith("x-"):
                    self.warn("ignored", here, f"the keyword {name[:100]!r} is not known")
                continue
            wrong = keyword.value(value)
            if wrong is not None:
                out_of_range = "64 bits" in wrong
                self.fail(here, wrong, code="number_out_of_range" if out_of_range else "invalid_schema")
            self._inspect_value(name, value, here, depth)
        for name in schema:
            keyword = KEYWORDS.get(name)
            if keyword is not None and keyword.treatment == "refused" and not has_no_effect(schema, name):
                self.refuse(f"{at}/{escape(name)}", f"{name} cannot be enforced")

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
                        self.fail(at, f"more than {MAX_PROPERTIES} properties", code="grammar_too_large")
                for member, item in value.items():
                    self._inspect_name(member, at)
                    if name == "patternProperties":
                        self.parsed(member, f"{at}/{escape(member)}")
                    self._inspect(item, f"{at}/{escape(member)}", depth + 1)
            case _:
                self._inspect_plain(name, value, at)

    def _inspect_name(self, name: str, at: str) -> None:
        if len(name.encode()) > MAX_LITERAL_BYTES:
            self.fail(at, f"a name is longer than {MAX_LITERAL_BYTES} bytes", code="grammar_too_large")

    def _inspect_plain(self, name: str, value: object, at: str) -> None:
        match name, value:
            case "enum", list():
                self._num_values += len(value)
                if self._num_values > MAX_ENUM_VALUES:
                    self.fail(at, f"more than {MAX_ENUM_VALUES} enum values", code="grammar_too_large")
                for index, item in enumerate(value):
                    self._inspect_literal(item, f"{at}/{index}")
            case "const", _:
                self._inspect_literal(value, at)
            case "required", list():
                self._num_properties += len(value)
                if self._num_properties > 2 * MAX_PROPERTIES:
                    self.fail(at, f"more than {MAX_PROPERTIES} required properties", code="grammar_too_large")
                for item in value:
                    self._inspect_name(str(item), at)
            case "pattern", str():
                self.parsed(value, at)
            case "$anchor", str():
                self._names[f"#{value}"] = at.rpartition("/")[0]
            case "$dynamicAnchor", str():
                self._names[f"#{value}"] = at.rpartition("/")[0]
            case "$id", str():
                if at != "/$id" and not value.startswith("#"):
                    self.refuse(at, "$id below the root would move the meaning of every $ref; leave it out")
                else:
                    self._names[value.rstrip("#") if at == "/$id" else value] = at.rpartition("/")[0]

    def _inspect_literal(self, value: object, at: str) -> None:
        if not has_exact_numbers(value):
            self.fail(at, "integers beyond 64 bits cannot be enforced", code="number_out_of_range")
        if len(compact(value).encode()) > MAX_LITERAL_BYTES:
            self.fail(at, f"a value is longer than {MAX_LITERAL_BYTES} bytes", code="grammar_too_large")

    def parsed(self, text: str, at: str) -> pattern.Node | None:
        """The whole strings that a pattern is found in; None when it cannot be enforced and may be left out."""
        try:
            return pattern.searched(pattern.parse(text))
        except pattern.PatternError as error:
            self.refuse(at, f"the pattern has {error}")
            return None

    def _resolve_all(self) -> None:
        """Refuse a $ref to nothing even where nothing leads to it. Targets found so are looked at, too."""
        checked: set[str] = set()
        while waiting := [at for at in self.schemas if at not in checked]:
            for at in waiting:
                checked.add(at)
                schema = self.schemas[at]
                reference = schema.get("$ref") if isinstance(schema, dict) else None
                if isinstance(reference, str):
                    self.target(reference, at)

    def target(self, reference: str, at: str) -> str:
        """Pointer inside the schema that a $ref means."""
        place = f"{at}/$ref"
        if reference in self._names:
            return self._names[reference]
        base, hash_, fragment = reference.partition("#")
        if base and base not in self._names:
            self.fail(place, f"{reference[:200]!r} is outside of the schema; put it into $defs", code="unsupported_ref")
        start = self._names[base] if base else ""
        if hash_ and fragment and not fragment.startswith("/"):
            self.fail(place, f"{reference[:200]!r} names nothing in the schema", code="unresolved_ref")
        steps = [step.replace("~1", "/").replace("~0", "~") for step in urllib.parse.unquote(fragment).split("/")[1:]]
        target = start + "".join(f"/{escape(step)}" for step in steps)
        if target not in self.schemas:
            self._inspect_target(steps, start, target, place, reference)
        return target

    def _inspect_target(self, steps: list[str], start: str, target: str, place: str, reference: str) -> None:
        """A target outside of schema position: it becomes one by being referred to."""
        value: object = self.schemas[start]
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
                self.fail(place, f"{reference[:200]!r} names nothing in the schema", code="unresolved_ref")
        self._inspect(value, target, 0)

    def in_place(self, at: str) -> set[str]:
        """Subschemas that look at the same instance as the one at a place, because it says so."""
        found: set[str] = set()
        waiting = [at]
        while waiting:
            here = waiting.pop()
            schema = self.schemas[here]
            if here in found or isinstance(schema, bool):
                continue
            found.add(here)
            for keyword in ("allOf", "anyOf", "oneOf"):
                waiting += [f"{here}/{keyword}/{index}" for index in range(len(as_list(schema.get(keyword))))]
            reference = schema.get("$ref")
            if isinstance(reference, str):
                waiting.append(self.target(reference, here))
        return found

    def schema_at(self, element: Element) -> dict[str, object]:
        schema = self.schemas[element.at]
        assert isinstance(schema, dict)  # _flatten leaves true and false out
        return schema

    def each(self, elements: Conjunction, keyword: str) -> list[tuple[str, object]]:
        """Places and values of a keyword."""
        return [
            (f"{element.at}/{escape(keyword)}", self.schema_at(element)[keyword])
            for element in elements
            if keyword in self.schema_at(element)
        ]

    def numbers(self, elements: Conjunction, keyword: str) -> list[float]:
        return [value for _, value in self.each(elements, keyword) if isinstance(value, int | float)]

    def largest(self, elements: Conjunction, keyword: str) -> int:
        return max([int(value) for value in self.numbers(elements, keyword)], default=0)

    def smallest(self, elements: Conjunction, keyword: str) -> int | None:
        return min([int(value) for value in self.numbers(elements, keyword)], default=None)

    def first_place(self, elements: Conjunction, keywords: tuple[str, ...]) -> str:
        places = [at for keyword in keywords for at, _ in self.each(elements, keyword)]
        return places[0] if places else (elements[0].at if elements else "")
