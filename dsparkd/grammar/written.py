"""Writes a shape as a schema, in the forms that the installed XGrammar was seen to be exact in."""

from __future__ import annotations

from dsparkd.grammar import matching, pattern, spelling
from dsparkd.grammar.shape import (
    Anything,
    Arrays,
    Entry,
    Integers,
    Numbers,
    Objects,
    Ref,
    Shape,
    Simple,
    Strings,
    Suggested,
    Union,
    Values,
)


def schema_document(shape: Shape) -> dict[str, object]:
    """The schema that XGrammar gets for a shape."""
    return Writer().document(shape)


class Writer:
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
            case Suggested(inner):
                return self.schema(inner)
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
        if shape.written is None:
            return {"type": "string"}
        bounded = matching.only_repeat(shape.written)
        if bounded is not None and bounded.part == pattern.Class(pattern.JSON_PLAIN):
            # XGrammar counts these far faster than any pattern; `compile` puts its class of characters right.
            bounds: dict[str, object] = {"minLength": bounded.least or None, "maxLength": bounded.most}
            return {"type": "string"} | _present(bounds)
        return {"type": "string", "pattern": spelling.json_text(shape.written)}

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
                keyed[spelling.json_text(node)] = self.schema(below)
        if keyed:
            schema["patternProperties"] = keyed
        if shape.least:
            schema["minProperties"] = shape.least
        if shape.most is not None:
            schema["maxProperties"] = shape.most
        return schema


def _present(members: dict[str, object]) -> dict[str, object]:
    return {name: value for name, value in members.items() if value is not None}
