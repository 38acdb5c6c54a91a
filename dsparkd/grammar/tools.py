"""Tool calls as a structural tag: the model's call block, with each call's arguments held to its tool's schema.

The marker inside the block's tags is one control token, named by its id, so it can stand in tags and nowhere else.
A string argument is raw text, every other one is JSON.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from dsparkd.errors import GrammarError
from dsparkd.grammar import spelling
from dsparkd.grammar.inspection import Effort, Policy, SchemaWarning, escape
from dsparkd.grammar.key import canonical_tag, compact
from dsparkd.grammar.schema import check_shape
from dsparkd.grammar.shape import Anything, Objects, Ref, Shape, Strings, Suggested, Union, Values, resolved
from dsparkd.grammar.written import schema_document

MARKER = "｜DSML｜"
_BAR = MARKER[0]

# Text in which the marker's spelling does not occur: state i has read its first i characters.
FREE_TEXT = """root ::= s0
s0 ::= "" | [^｜] s0 | "｜" s1
s1 ::= "" | [^｜D] s0 | "｜" s1 | "D" s2
s2 ::= "" | [^｜S] s0 | "｜" s1 | "S" s3
s3 ::= "" | [^｜M] s0 | "｜" s1 | "M" s4
s4 ::= "" | [^｜L] s0 | "｜" s1 | "L" s5
s5 ::= "" | [^｜] s0
"""
# Any name that fits between the quotation marks of a tag.
_FREE_NAME = r"[\x20-\x21\x23-\x3b\x3d\x3f-\x7e\xa0-\ud7ff]{1,64}"
_NOT_STRING: dict[str, object] = {
    "anyOf": [
        *({"type": kind} for kind in ("null", "boolean", "number")),
        {"type": "array", "items": {}},
        {"type": "object", "additionalProperties": {}},
    ]
}

Format = dict[str, object]


class Tool(NamedTuple):
    """A tool's name and arguments. shape None: any arguments."""

    name: str
    shape: Objects | None


class ToolWriter:
    """Writes call blocks. marker_id: id of the marker token."""

    def __init__(self, marker_id: int, max_whitespace: int) -> None:
        self._marker_id = marker_id
        self._max_whitespace = max_whitespace

    def forced(self, tools: Sequence[Tool], *, is_single: bool) -> str:
        """An answer that is a call block with one call, or with one or more."""
        return canonical_tag(_tag(self._block(tools, is_single=is_single, opening=f"\n\n<{MARKER}")))

    def offered(self, tools: Sequence[Tool], *, is_single: bool) -> str:
        """An answer of free text, with a call block at its end or not."""
        block = self._block(tools, is_single=is_single, opening="")
        return canonical_tag(_tag({"type": "token_dispatch", "rules": [[self._marker_id, block]], "loop": False}))

    def answer_or_calls(self, tools: Sequence[Tool], schema: object, *, is_single: bool) -> str:
        """An answer that is either JSON of a schema or a call block."""
        block = self._block(tools, is_single=is_single, opening=f"\n\n<{MARKER}")
        return canonical_tag(_tag({"type": "or", "elements": [block, self._json(schema)]}))

    def _block(self, tools: Sequence[Tool], *, is_single: bool, opening: str) -> Format:
        calls: Format = {"type": "or", "elements": [self._call(tool) for tool in tools]}
        if not is_single:
            calls = {"type": "plus", "content": calls}
        return _sequence([*self._text(f"{opening}tool_calls>\n"), calls, *self._text(f"</{MARKER}tool_calls>")])

    def _call(self, tool: Tool) -> Format:
        parts = list(self._text(f'<{MARKER}invoke name="{tool.name}">\n'))
        if tool.shape is None:
            parts.append({"type": "star", "content": self._any_parameter()})
        else:
            for name, shape in tool.shape.members:
                parameter = self._parameter(name, shape)
                is_required = name in tool.shape.required
                parts.append(parameter if is_required else {"type": "optional", "content": parameter})
        return _sequence([*parts, *self._text(f"</{MARKER}invoke>\n")])

    def _any_parameter(self) -> Format:
        opening = list(self._text(f'<{MARKER}parameter name="'))
        closing = list(self._text(f"</{MARKER}parameter>\n"))
        values: list[Format] = [
            _sequence([_const('" string="true">'), _grammar(FREE_TEXT)]),
            _sequence([_const('" string="false">'), self._json(_NOT_STRING)]),
        ]
        name: Format = {"type": "regex", "pattern": _FREE_NAME}
        return _sequence([*opening, name, {"type": "or", "elements": values}, *closing])

    def _parameter(self, name: str, shape: Shape) -> Format:
        values: list[Format] = []
        for is_string, content in self._contents(shape):
            opening = _const(f'" string="{"true" if is_string else "false"}">')
            values.append(_sequence([opening, content]))
        opening_tag = self._text(f'<{MARKER}parameter name="{name}')
        return _sequence(
            [*opening_tag, {"type": "or", "elements": values}, *self._text(f"</{MARKER}parameter>\n")],
        )

    def _contents(self, shape: Shape) -> Iterator[tuple[bool, Format]]:
        """What may stand between a parameter's tags, and whether it is raw text."""
        plain: list[Shape] = []
        for branch in _alternatives(shape):
            match branch:
                case Anything():
                    yield True, _grammar(FREE_TEXT)
                    yield False, self._json(_NOT_STRING)
                case Strings():
                    yield True, _raw(branch)
                case Values(values):
                    yield from ((isinstance(value, str), _const(_literal(value))) for value in values)
                case _:
                    plain.append(branch)
        if plain:
            yield False, self._json(schema_document(plain[0] if len(plain) == 1 else Union(tuple(plain))))

    def _json(self, schema: object) -> Format:
        found: Format = {"type": "json_schema", "json_schema": schema}
        return found | ({"max_whitespace_cnt": self._max_whitespace} if self._max_whitespace else {})

    def _text(self, text: str) -> Iterator[Format]:
        """Fixed text; the marker in it by its id."""
        for index, part in enumerate(text.split(MARKER)):
            if index:
                yield {"type": "token", "token": self._marker_id}
            if part:
                yield _const(part)


def tool_shape(
    parameters: object, pointer: str, *, policy: Policy, effort: Effort | None = None
) -> tuple[Objects | None, tuple[SchemaWarning, ...]]:
    """Check a tool's parameters; None shape: any arguments. effort: of the tools so far. Raises GrammarError."""
    found, checked = check_shape(parameters, pointer, policy=policy, strict=True, effort=effort)
    shape, warnings = resolved(found), list(checked)
    if isinstance(shape, Suggested):
        shape = resolved(shape.shape)
    if isinstance(shape, Anything):
        return None, tuple(warnings)
    if not isinstance(shape, Objects) or shape.least or shape.most is not None:
        raise GrammarError(
            f"{pointer}: arguments can be enforced for one object schema without branches and property counts",
            code="unsupported_schema",
            param=pointer,
        )
    if shape.generated:
        if shape == Objects((), frozenset(), others=Anything(), generated=((None, Anything()),)):
            return None, tuple(warnings)
        if not shape.members:
            raise GrammarError(
                f"{pointer}: arguments can be enforced where their names are listed",
                code="unsupported_schema",
                param=pointer,
            )
        warnings.append(SchemaWarning("narrower", pointer, "only the listed arguments are generated"))
    for name, below in shape.members:
        place = f"{pointer}/properties/{escape(name)}"
        if not name or '"' in name or "\n" in name or MARKER in name or len(name) > 256:
            raise GrammarError(f"{place}: the name does not fit into a call", code="unsupported_schema", param=place)
        for branch in _alternatives(below):
            if isinstance(branch, Values) and any(isinstance(one, str) and MARKER in one for one in branch.values):
                raise GrammarError(
                    f"{place}: a value holds a marker of the call format", code="unsupported_schema", param=place
                )
    return shape, tuple(warnings)


def _alternatives(shape: Shape) -> Iterator[Shape]:
    if isinstance(shape, Ref):
        yield from _alternatives(resolved(shape))
    elif isinstance(shape, Suggested):
        yield from _alternatives(shape.shape)
    elif isinstance(shape, Union):
        for branch in shape.branches:
            yield from _alternatives(branch)
    else:
        yield shape


def _literal(value: object) -> str:
    return value if isinstance(value, str) else compact(value)


def _raw(shape: Strings) -> Format:
    """Raw text of a string argument. Where the schema limits it, the marker's first character is left out."""
    if shape.written is None:
        return _grammar(FREE_TEXT)
    return {"type": "regex", "pattern": spelling.plain_text(shape.written, without=_BAR)}


def _grammar(text: str) -> Format:
    return {"type": "grammar", "grammar": text}


def _const(text: str) -> Format:
    return {"type": "const_string", "value": text}


def _sequence(elements: list[Format]) -> Format:
    return {"type": "sequence", "elements": elements}


def _tag(format_: Format) -> dict[str, object]:
    return {"type": "structural_tag", "format": format_}
