"""A request's constraint: which fields ask for one, how their values are read, and the grammar that comes out.

The same thing has several names among the servers that clients were written for; each is listed once, in SOURCES.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dsparkd.errors import GrammarError
from dsparkd.grammar import pattern, spelling
from dsparkd.grammar.inspection import MAX_ENUM_VALUES, MAX_LITERAL_BYTES, Effort, Policy, SchemaWarning
from dsparkd.grammar.key import MAX_BYTES, canonical_tag, compact, read_json, require_plain, require_text
from dsparkd.grammar.schema import Checked, check_schema
from dsparkd.grammar.tag import check_tag
from dsparkd.grammar.tools import Tool, ToolWriter, tool_shape
from dsparkd.messages import Grammar, GrammarKind

# Field of the body -> what its value is. One dot: a member of an object.
SOURCES: dict[str, str] = {
    "json_schema": "json_schema",
    "guided_json": "json_schema",
    "structured_outputs.json": "json_schema",
    "json_object": "json_object",
    "guided_json_object": "json_object",
    "structured_outputs.json_object": "json_object",
    "regex": "regex",
    "guided_regex": "regex",
    "structured_outputs.regex": "regex",
    "ebnf": "ebnf",
    "guided_grammar": "ebnf",
    "structured_outputs.grammar": "ebnf",
    "choice": "choice",
    "guided_choice": "choice",
    "structured_outputs.choice": "choice",
    "structural_tag": "structural_tag",
    "structured_outputs.structural_tag": "structural_tag",
}
_OBJECT = {"type": "object"}
# A word is taken whole, whether the sign of a rule follows or not, so that no byte is looked at again and again.
_EBNF_PARTS = re.compile(
    r"""(?P<literal>"[^"\\]*(?:\\.[^"\\]*)*"?|\[[^\]\\]*(?:\\.[^\]\\]*)*\]?)"""
    r"|#[^\n]*"
    r"|(?P<word>[\w.-]+)\s*(?P<sign>::=)?"
    r"|(?P<bracket>[()])",
    re.DOTALL,
)
_OUTPUT_OPTIONS = ("disable_any_whitespace", "disable_fallback", "disable_additional_properties")


@dataclass(frozen=True, slots=True)
class ConstraintOptions:
    """The operator's part. marker_id: id of the token in tool-call tags, None where the tokenizer has none."""

    unsupported: Policy = "refuse"
    any_whitespace: bool = True
    max_whitespace: int = 32
    marker_id: int | None = None


@dataclass(frozen=True, slots=True)
class Constraint:
    """What an answer must match, from the first token behind the reasoning.

    calls_tools: the answer may be, or must be, tool calls.
    """

    grammar: Grammar
    warnings: tuple[SchemaWarning, ...] = ()
    calls_tools: bool = False


@dataclass(frozen=True, slots=True)
class _Source:
    """A field that asks for a constraint. pointer: its JSON pointer."""

    pointer: str
    kind: str
    value: object
    strict: bool = False


def parse_constraint(body: Mapping[str, object], options: ConstraintOptions) -> Constraint | None:
    """Read what a parsed body asks for; None: free text. Pure, and under 100 ms for a refusal.

    Raises GrammarError: one refusal, with a code, and in param the JSON pointer of the offending place.
    """
    sources = _sources(body)
    if len(sources) > 1:
        names = " and ".join(source.pointer for source in sources)
        raise _error(f"{names} exclude each other; send one", "conflicting_grammars", sources[1].pointer)
    source = sources[0] if sources else None
    constraint = _from_tools(body, source, options)
    if constraint is None and source is not None:
        constraint = _from_source(source, options, any_whitespace=_any_whitespace(body, options))
    if constraint is not None and body.get("ignore_eos") is True:
        message = "ignore_eos contradicts a grammar, which ends the text; leave one out"
        raise _error(message, "ignore_eos_with_grammar", "/ignore_eos")
    return constraint


def _error(message: str, code: str, pointer: str) -> GrammarError:
    return GrammarError(message if message.startswith(pointer) else f"{pointer}: {message}", code=code, param=pointer)


def _sources(body: Mapping[str, object]) -> list[_Source]:
    found = []
    outputs = body.get("structured_outputs")
    if outputs is not None:
        _require_known_options(outputs)
    for field, kind in SOURCES.items():
        outer, _, inner = field.partition(".")
        value = body.get(outer)
        if inner:
            value = value.get(inner) if isinstance(value, dict) else None
        if value is not None and not (kind == "json_object" and value is False):
            found.append(_Source("/" + field.replace(".", "/"), kind, value))
    response_format = _response_format(body.get("response_format"))
    return found if response_format is None else [*found, response_format]


def _require_known_options(outputs: object) -> None:
    if not isinstance(outputs, dict):
        raise _error("expected an object", "invalid_type", "/structured_outputs")
    for name, value in outputs.items():
        if f"structured_outputs.{name}" in SOURCES or value is None:
            continue
        pointer = f"/structured_outputs/{name}"
        if name not in _OUTPUT_OPTIONS:
            raise _error("this option is not supported; remove it", "unknown_field", pointer)
        if not isinstance(value, bool):
            raise _error("expected true or false", "invalid_type", pointer)


def _any_whitespace(body: Mapping[str, object], options: ConstraintOptions) -> bool:
    outputs = body.get("structured_outputs")
    is_disabled = isinstance(outputs, dict) and outputs.get("disable_any_whitespace") is True
    return options.any_whitespace and not is_disabled


def _response_format(value: object) -> _Source | None:
    at = "/response_format"
    if value is None:
        return None
    if not isinstance(value, dict):
        raise _error("expected an object", "invalid_type", at)
    match value.get("type"):
        case "text":
            return None
        case "json_object":
            return _Source(at, "json_object", True)
        case "json_schema":
            inner = value.get("json_schema")
            if not isinstance(inner, dict):
                raise _error("expected an object with the schema", "invalid_type", f"{at}/json_schema")
            unknown = next((name for name in inner if name not in ("name", "description", "schema", "strict")), None)
            if unknown is not None:
                raise _error("unknown field; remove it", "unknown_field", f"{at}/json_schema/{unknown}")
            if "schema" not in inner:
                raise _error("the field is missing", "missing_field", f"{at}/json_schema/schema")
            strict = inner.get("strict")
            if strict is not None and not isinstance(strict, bool):
                raise _error("expected true or false", "invalid_type", f"{at}/json_schema/strict")
            return _Source(f"{at}/json_schema/schema", "json_schema", inner["schema"], strict is True)
        case "structural_tag":
            return _Source(at, "structural_tag", value)
        case _:
            message = 'expected "text", "json_object", "json_schema" or "structural_tag"'
            raise _error(message, "invalid_value", f"{at}/type")


def _from_source(source: _Source, options: ConstraintOptions, *, any_whitespace: bool) -> Constraint:
    match source.kind:
        case "json_schema" | "json_object":
            checked = _checked_schema(source, options)
            grammar = Grammar(
                kind="json_schema",
                text=checked.text,
                any_whitespace=any_whitespace,
                max_whitespace=options.max_whitespace,
            )
            return Constraint(grammar, checked.warnings)
        case "regex":
            return Constraint(_plain("regex", _regex(source)))
        case "ebnf":
            return Constraint(_plain("ebnf", _ebnf(source)))
        case "choice":
            return Constraint(_plain("choice", _choice(source)))
        case _:
            return _structural_tag(source, options)


def _plain(kind: GrammarKind, text: str) -> Grammar:
    """White space plays no part, so that two settings of it share a grammar."""
    return Grammar(kind=kind, text=text, any_whitespace=True, max_whitespace=0)


def _checked_schema(source: _Source, options: ConstraintOptions) -> Checked:
    if source.kind == "json_object":
        if source.value is not True:
            raise _error("expected true or false", "invalid_type", source.pointer)
        schema: object = _OBJECT
    else:
        schema = read_json(source.value, source.pointer) if isinstance(source.value, str) else source.value
    return check_schema(schema, source.pointer, policy=options.unsupported, strict=source.strict)


def _text(source: _Source) -> str:
    if not isinstance(source.value, str):
        raise _error("expected a string", "invalid_type", source.pointer)
    if not source.value:
        raise _error("it is empty", "invalid_grammar", source.pointer)
    require_text(source.value, source.pointer)
    return source.value


def _regex(source: _Source) -> str:
    """The expression written anew: to XGrammar a dot is a newline, too, and groups with names are errors."""
    text = _text(source)
    if len(text.encode()) > pattern.MAX_PATTERN_BYTES:
        raise _error(f"it is longer than {pattern.MAX_PATTERN_BYTES} bytes", "grammar_too_large", source.pointer)
    try:
        return spelling.plain_text(pattern.whole(pattern.parse(text)))
    except pattern.PatternError as error:
        raise _error(f"the regular expression has {error}", "invalid_grammar", source.pointer) from error


def _ebnf(source: _Source) -> str:
    text = _text(source)
    if len(text.encode()) > MAX_BYTES:
        raise _error(f"it is larger than {MAX_BYTES} bytes", "grammar_too_large", source.pointer)
    names, deepest, longest = _scan_ebnf(text)
    if "root" not in names:
        raise _error("no rule is named root", "invalid_grammar", source.pointer)
    if deepest > pattern.MAX_OPEN_GROUPS:
        message = f"more than {pattern.MAX_OPEN_GROUPS} open parentheses"
        raise _error(message, "grammar_too_large", source.pointer)
    if longest > MAX_LITERAL_BYTES:
        raise _error(f"a literal is longer than {MAX_LITERAL_BYTES} bytes", "grammar_too_large", source.pointer)
    return text


def _scan_ebnf(text: str) -> tuple[set[str], int, int]:
    """Names of rules, the deepest nesting of parentheses, the longest literal in bytes. XGrammar judges the rest."""
    names: set[str] = set()
    depth = deepest = longest = 0
    for part in _EBNF_PARTS.finditer(text):
        if part["sign"] is not None:
            names.add(part["word"])
        elif part["literal"] is not None:
            longest = max(longest, len(part["literal"].encode()))
        elif part["bracket"] is not None:
            depth += 1 if part["bracket"] == "(" else -1
            deepest = max(deepest, depth)
    return names, deepest, longest


def _choice(source: _Source) -> str:
    choices = source.value
    if not isinstance(choices, list) or not choices:
        raise _error("expected a list of at least one string", "invalid_type", source.pointer)
    if len(choices) > MAX_ENUM_VALUES:
        raise _error(f"more than {MAX_ENUM_VALUES} choices", "grammar_too_large", source.pointer)
    for index, choice in enumerate(choices):
        pointer = f"{source.pointer}/{index}"
        if not isinstance(choice, str):
            raise _error("expected a string", "invalid_type", pointer)
        require_text(choice, pointer)
        if len(choice.encode()) > MAX_LITERAL_BYTES:
            raise _error(f"it is longer than {MAX_LITERAL_BYTES} bytes", "grammar_too_large", pointer)
    text = compact(list(dict.fromkeys(choices)))
    if len(text.encode()) > MAX_BYTES:
        raise _error(f"it is larger than {MAX_BYTES} bytes", "grammar_too_large", source.pointer)
    return text


def _structural_tag(source: _Source, options: ConstraintOptions) -> Constraint:
    value = read_json(source.value, source.pointer) if isinstance(source.value, str) else source.value
    require_plain(value, source.pointer)
    tag, warnings = check_tag(value, source.pointer, policy=options.unsupported, max_whitespace=options.max_whitespace)
    text = canonical_tag(tag)
    if len(text.encode()) > 4 * MAX_BYTES:
        raise _error("it is too large", "grammar_too_large", source.pointer)
    return Constraint(_plain("structural_tag", text), warnings)


# Tool calls


def _from_tools(body: Mapping[str, object], source: _Source | None, options: ConstraintOptions) -> Constraint | None:
    """A forced call, or calls of strict tools beside free text; None when tools ask for no grammar."""
    choice = body.get("tool_choice")
    definitions = body.get("tools")
    is_forced = choice == "required" or isinstance(choice, dict)
    is_single = body.get("parallel_tool_calls") is False
    if choice is not None and not is_forced and choice not in ("auto", "none"):
        raise _error('expected "none", "auto", "required" or a function', "invalid_value", "/tool_choice")
    listed = definitions if isinstance(definitions, list) else []
    if choice == "none" or (not is_forced and not listed):
        return None
    if is_forced and not listed:
        raise _error("a forced call needs tools", "missing_field", "/tools")
    wanted = _named_tool(choice, listed) if isinstance(choice, dict) else None
    if is_forced and source is not None:
        message = f"{source.pointer} and a forced tool call exclude each other; send one"
        raise _error(message, "conflicting_grammars", source.pointer)
    if not is_forced and not is_single and source is None and not any(map(_is_strict, listed)):
        return None
    if options.marker_id is None:
        raise _error("the tokenizer has no tool-call marker", "unsupported_tool_choice", "/tool_choice")
    chosen = list(enumerate(listed)) if wanted is None else [(wanted, listed[wanted])]
    tools: list[Tool] = []
    warnings: list[SchemaWarning] = []
    effort = Effort()
    for index, definition in chosen:
        tool, found = _tool(definition, f"/tools/{index}", options, effort, is_enforced=is_forced)
        tools.append(tool)
        warnings += found
    writer = ToolWriter(options.marker_id, options.max_whitespace)
    if is_forced:
        text = writer.forced(tools, is_single=is_single or wanted is not None)
    elif source is None:
        text = writer.offered(tools, is_single=is_single)
    elif source.kind in ("json_schema", "json_object"):
        checked = _checked_schema(source, options)
        warnings += checked.warnings
        text = writer.answer_or_calls(tools, checked.document, is_single=is_single)
    else:
        message = 'beside tools the answer can be JSON only; set tool_choice to "none"'
        raise _error(message, "conflicting_grammars", source.pointer)
    if len(text.encode()) > 4 * MAX_BYTES:
        raise _error("the tools' schemas are too large together", "grammar_too_large", "/tools")
    return Constraint(_plain("tool_calls", text), tuple(warnings), calls_tools=True)


def _named_tool(choice: dict[str, object], listed: Sequence[object]) -> int:
    function = choice.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    if choice.get("type") != "function" or not isinstance(name, str):
        message = 'expected {"type": "function", "function": {"name": ...}}'
        raise _error(message, "invalid_value", "/tool_choice")
    for index, definition in enumerate(listed):
        if _function(definition, f"/tools/{index}").get("name") == name:
            return index
    raise _error(f"no tool is named {name[:200]!r}", "unknown_tool", "/tool_choice/function/name")


def _function(definition: object, pointer: str) -> dict[str, object]:
    function = definition.get("function") if isinstance(definition, dict) else None
    if not isinstance(function, dict):
        raise _error("expected an object", "invalid_type", f"{pointer}/function")
    return function


def _is_strict(definition: object) -> bool:
    function = definition.get("function") if isinstance(definition, dict) else None
    return isinstance(function, dict) and function.get("strict") is True


def _tool(
    definition: object, pointer: str, options: ConstraintOptions, effort: Effort, *, is_enforced: bool
) -> tuple[Tool, tuple[SchemaWarning, ...]]:
    """A tool whose arguments are held to its schema where the call is forced or the tool is strict."""
    function = _function(definition, pointer)
    name = function.get("name")
    if not isinstance(name, str) or not name or '"' in name or "\n" in name or len(name) > 256:
        raise _error("expected a name", "invalid_value", f"{pointer}/function/name")
    if not (is_enforced or function.get("strict") is True):
        return Tool(name, None), ()
    parameters = function.get("parameters")
    if parameters is None:
        parameters = {"type": "object", "properties": {}}
    place = f"{pointer}/function/parameters"
    try:
        shape, warnings = tool_shape(parameters, place, policy=options.unsupported, effort=effort)
    except GrammarError as error:
        if options.unsupported == "report" and error.code == "unsupported_schema":
            return Tool(name, None), (SchemaWarning("unsupported", place, f"tool {name}: {error.message}"),)
        raise GrammarError(f"tool {name}: {error.message}", code=error.code, param=error.param) from error
    return Tool(name, shape), warnings
