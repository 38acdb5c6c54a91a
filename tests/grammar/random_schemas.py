"""Random schemas over every keyword that is enforced, and values that are likely to satisfy or just to miss them."""

from __future__ import annotations

import random
import re
from collections.abc import Callable

Schema = dict[str, object] | bool

PATTERNS = (
    *(
        "^[a-c]+$",
        "b",
        "^x_",
        "z$",
        "^(ab|c)*$",
        "^a.c$",
        '^"\\\\$',
        "^[^a-y]?z",
        "\\S",
        "^\\d{2,4}$",
        "^a|b$",
        "^$",
        ".",
    ),
    *("^[ab]{0,3}$", "^[A-Za-z_]+$"),
)
FORMATS = ("date", "time", "date-time", "ipv4", "ipv6", "uuid", "email", "hostname", "duration", "unheard-of")
TEXTS = ("", "a", "b", "ab", "abc", "x_1", "z", 'q"\\', "é", "😀", "a\nb", "\t", "12", "123", "a c", "cab", "aab", "xz")
NAMES = ("a", "ab", "b", "x_1", "é", 'q"', "zz")
LITERALS: tuple[object, ...] = (
    *(None, True, False, 0, 1, -1, 7, 1.0, 2.5, -0.5, 100, 10**15, "a", "ab", "é", 'q"\\\n', [], [1], {}),
    *({"b": 1, "a": [True]}, [{"a": "x"}], 0.1),
)


class Draw:
    """A seeded source of schemas."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)

    def document(self) -> dict[str, object]:
        """A whole schema, some with definitions that refer to each other."""
        schema = self.schema(3)
        while not isinstance(schema, dict):
            schema = self.schema(3)
        if self.rng.random() < 0.4:
            schema["$defs"] = {"one": self.schema(2), "two": self.schema(2)}
            if self.rng.random() < 0.5:
                schema.setdefault("properties", {"self": {"$ref": "#"}})
        return schema

    def schema(self, depth: int) -> Schema:
        """One subschema."""
        rng = self.rng
        if depth <= 0 or rng.random() < 0.08:
            return rng.choice([True, {}, {"type": "integer"}, {"type": "string"}, {"type": "boolean"}, {"const": 1}])
        kinds: list[Callable[[int], dict[str, object]]] = [
            *(self._integer, self._number, self._string, self._array, self._object, self._literals, self._several),
            *(self._object, self._object, self._branches, self._merged, self._reference, self._typeless),
        ]
        schema = rng.choice(kinds)(depth)
        if rng.random() < 0.1:
            schema["title"] = "t"
        return schema

    def _some(self, chance: float) -> bool:
        return self.rng.random() < chance

    def _integer(self, depth: int) -> dict[str, object]:
        del depth
        schema: dict[str, object] = {"type": "integer"}
        self._bounds(schema, [-1000, -11, -5, -1, 0, 1, 3, 9, 10, 42, 99, 100, 2**40, 0.5, 7.5])
        if self._some(0.2):
            schema["multipleOf"] = self.rng.choice([1, 2, 3, 7, 10, 0.5])
        return schema

    def _number(self, depth: int) -> dict[str, object]:
        del depth
        schema: dict[str, object] = {"type": "number"}
        self._bounds(schema, [-1000, -2.25, -1, -0.5, 0, 0.1, 0.25, 1, 1.5, 9.99, 10, 123.456, 1e6])
        return schema

    def _bounds(self, schema: dict[str, object], values: list[float]) -> None:
        rng = self.rng
        if self._some(0.5):
            schema[rng.choice(["minimum", "exclusiveMinimum"])] = rng.choice(values)
        if self._some(0.5):
            schema[rng.choice(["maximum", "exclusiveMaximum"])] = rng.choice(values)

    def _string(self, depth: int) -> dict[str, object]:
        del depth
        rng = self.rng
        schema: dict[str, object] = {"type": "string"}
        if self._some(0.4):
            schema["minLength"] = rng.choice([0, 1, 2, 3, 5])
        if self._some(0.3):
            schema["maxLength"] = rng.choice([0, 1, 3, 6, 40])
        if self._some(0.4):
            schema["pattern"] = rng.choice(PATTERNS)
        elif self._some(0.3):
            schema["format"] = rng.choice(FORMATS)
        return schema

    def _array(self, depth: int) -> dict[str, object]:
        rng = self.rng
        schema: dict[str, object] = {"type": "array"}
        if self._some(0.3):
            schema["prefixItems"] = [self.schema(depth - 1) for _ in range(rng.choice([1, 2]))]
        if self._some(0.7):
            schema["items"] = self.schema(depth - 1) if rng.random() < 0.9 else False
        if self._some(0.3):
            schema["minItems"] = rng.choice([0, 1, 2])
        if self._some(0.3):
            schema["maxItems"] = rng.choice([0, 1, 2, 3])
        return schema

    def _object(self, depth: int) -> dict[str, object]:
        rng = self.rng
        schema: dict[str, object] = {"type": "object"}
        names = rng.sample(NAMES, rng.choice([0, 1, 2, 3, 4]))
        if names:
            schema["properties"] = {name: self.schema(depth - 1) for name in names}
        if self._some(0.5):
            schema["required"] = rng.sample(NAMES, rng.choice([0, 1, 2])) if self._some(0.2) else names[:1]
        if self._some(0.5):
            schema["additionalProperties"] = rng.choice([False, False, True, self.schema(depth - 1)])
        if self._some(0.15):
            schema["patternProperties"] = {rng.choice(["^x_", "^[0-9]+$", ".*", "b"]): self.schema(depth - 1)}
        if self._some(0.1):
            schema["propertyNames"] = rng.choice(
                [{"pattern": "^[a-z]+$"}, {"enum": ["a", "ab", "new"]}, {"maxLength": 2}, {"minLength": 1}]
            )
        if self._some(0.15):
            schema["minProperties"] = rng.choice([0, 1, 2])
        if self._some(0.15):
            schema["maxProperties"] = rng.choice([0, 1, 2, 3])
        if self._some(0.05):
            schema["unevaluatedProperties"] = False
        return schema

    def _literals(self, depth: int) -> dict[str, object]:
        del depth
        rng = self.rng
        values = rng.sample(LITERALS, rng.choice([1, 2, 4]))
        schema: dict[str, object] = {"const": values[0]} if rng.random() < 0.4 else {"enum": values}
        if self._some(0.2):
            schema["type"] = rng.choice(["integer", "string", "number", "object", ["null", "boolean"]])
        if self._some(0.1):
            schema["minimum"] = 1
        return schema

    def _several(self, depth: int) -> dict[str, object]:
        schema = self.rng.choice([self._integer, self._string, self._array, self._object])(depth)
        schema["type"] = [schema["type"], self.rng.choice(["null", "boolean", "number", "string"])]
        return schema

    def _typeless(self, depth: int) -> dict[str, object]:
        schema = self.rng.choice([self._integer, self._string, self._array, self._object])(depth)
        del schema["type"]
        return schema

    def _branches(self, depth: int) -> dict[str, object]:
        rng = self.rng
        schema = rng.choice([self._object, self._string, self._integer, lambda _: {}])(depth) if self._some(0.4) else {}
        keyword = rng.choice(["anyOf", "anyOf", "oneOf"])
        return schema | {keyword: [self.schema(depth - 1) for _ in range(rng.choice([1, 2, 3]))]}

    def _merged(self, depth: int) -> dict[str, object]:
        rng = self.rng
        kind = rng.choice([self._object, self._object, self._string, self._integer, self._number, self._array])
        schema = kind(depth) if self._some(0.6) else {}
        parts: list[Schema] = [kind(depth - 1) for _ in range(rng.choice([1, 2]))]
        return schema | {"allOf": parts}

    def _reference(self, depth: int) -> dict[str, object]:
        rng = self.rng
        schema: dict[str, object] = {"$ref": rng.choice(["#/$defs/one", "#/$defs/two", "#"])}
        return schema | (self._object(depth - 1) if self._some(0.1) else {})


class Values:
    """Values for a schema: a guess at a valid one, and changes to it. `root` resolves references."""

    def __init__(self, root: Schema, rng: random.Random) -> None:
        self._root = root
        self._rng = rng

    def value(self, schema: object, depth: int = 0) -> object:
        """A value that tries to satisfy the schema."""
        rng = self._rng
        if not isinstance(schema, dict) or depth > 6:
            return rng.choice(LITERALS)
        if "const" in schema:
            return schema["const"]
        if "enum" in schema:
            return rng.choice(_list(schema["enum"]))
        if "$ref" in schema:
            return self.value(self._resolve(str(schema["$ref"])), depth + 1)
        for keyword in ("anyOf", "oneOf"):
            if keyword in schema:
                branch = rng.choice(_list(schema[keyword]))
                rest = {name: value for name, value in schema.items() if name != keyword}
                return self.value(rest | branch if isinstance(branch, dict) else rest, depth + 1)
        if "allOf" in schema:
            merged: dict[str, object] = {name: value for name, value in schema.items() if name != "allOf"}
            for part in _list(schema["allOf"]):
                merged = _merge(merged, part)
            return self.value(merged, depth + 1)
        return self._typed(schema, depth)

    def _resolve(self, reference: str) -> object:
        found: object = self._root
        for step in reference.split("/")[1:]:
            found = found.get(step, True) if isinstance(found, dict) else True
        return found

    def _typed(self, schema: dict[str, object], depth: int) -> object:
        rng = self._rng
        kinds = schema.get("type", rng.choice(["object", "string", "integer", "array"]))
        kind = rng.choice(kinds) if isinstance(kinds, list) else kinds
        match kind:
            case "object":
                return self._object(schema, depth)
            case "array":
                return self._array(schema, depth)
            case "string":
                return self._string(schema)
            case "integer" | "number":
                return self._number(schema, is_integer=kind == "integer")
            case "boolean":
                return rng.random() < 0.5
            case _:
                return None

    def _object(self, schema: dict[str, object], depth: int) -> dict[str, object]:
        rng = self._rng
        properties = _dict(schema.get("properties", {}))
        required = _list(schema.get("required", []))
        made: dict[str, object] = {}
        for name, below in properties.items():
            if name in required or rng.random() < 0.6:
                made[name] = self.value(below, depth + 1)
        for name in sorted(set(map(str, required)) - set(properties)):
            made[name] = self.value(schema.get("additionalProperties", True), depth + 1)
        patterns = _dict(schema.get("patternProperties", {}))
        if patterns and rng.random() < 0.7:
            name = rng.choice(["x_2", "12", "bb", "n"])
            below = next((below for key, below in patterns.items() if re.search(key, name)), True)
            made.setdefault(name, self.value(below, depth + 1))
        elif schema.get("additionalProperties", True) is not False and rng.random() < 0.4:
            made.setdefault(rng.choice(["new", "k", "abc"]), self.value(schema.get("additionalProperties"), depth + 1))
        return made

    def _array(self, schema: dict[str, object], depth: int) -> list[object]:
        rng = self._rng
        made = [self.value(below, depth + 1) for below in _list(schema.get("prefixItems", []))]
        least = schema.get("minItems", 0)
        for _ in range(max(rng.choice([0, 0, 1, 2]), (least if isinstance(least, int) else 0) - len(made))):
            made.append(self.value(schema.get("items", True), depth + 1))
        return made

    def _string(self, schema: dict[str, object]) -> str:
        fitting = [text for text in TEXTS if "pattern" not in schema or re.search(str(schema["pattern"]), text)]
        samples = {"date": "2024-02-29", "time": "10:00:00Z", "ipv4": "10.0.0.1", "ipv6": "::1", "duration": "P1DT2H"}
        if schema.get("format") in samples:
            return samples[str(schema["format"])]
        return self._rng.choice(fitting or list(TEXTS))

    def _number(self, schema: dict[str, object], *, is_integer: bool) -> float:
        rng = self._rng
        bounds = [
            value
            for name in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
            if isinstance(value := schema.get(name), int | float)
        ]
        base = rng.choice(bounds) if bounds else 0
        value = base + rng.choice([0, 1, -1, 2, -2, 10, 0.5, -0.25])
        return int(value) if is_integer else value

    def changed(self, value: object) -> object:
        """The value with one thing changed."""
        rng = self._rng
        if isinstance(value, dict) and value and rng.random() < 0.8:
            name = rng.choice(list(value))
            match rng.randrange(3):
                case 0:
                    return {key: item for key, item in value.items() if key != name}
                case 1:
                    return value | {rng.choice(["other", "ab", "x_9"]): rng.choice(LITERALS)}
                case _:
                    return value | {name: self.changed(value[name])}
        if isinstance(value, list) and rng.random() < 0.8:
            return [*value, rng.choice(LITERALS)] if rng.random() < 0.5 else value[:-1]
        if isinstance(value, int | float) and not isinstance(value, bool):
            return value + rng.choice([1, -1, 0.5, 100])
        if isinstance(value, str):
            return rng.choice([value + "a", value[1:], value + value, '"' + value])
        return rng.choice(LITERALS)


def _list(value: object) -> list[object]:
    assert isinstance(value, list)
    return value


def _dict(value: object) -> dict[str, object]:
    assert isinstance(value, dict)
    return value


def _merge(first: dict[str, object], second: object) -> dict[str, object]:
    if not isinstance(second, dict):
        return first
    merged = first | second
    for keyword in ("properties", "patternProperties"):
        if keyword in first and keyword in second:
            merged[keyword] = _dict(first[keyword]) | _dict(second[keyword])
    if "required" in first and "required" in second:
        merged["required"] = [*_list(first["required"]), *_list(second["required"])]
    return merged
