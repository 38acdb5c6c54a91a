"""Structural tags of clients: the formats that may be sent, each checked, with schemas and patterns made exact."""

from __future__ import annotations

from typing import NoReturn

from dsparkd.errors import GrammarError
from dsparkd.grammar import pattern, spelling
from dsparkd.grammar.inspection import MAX_LITERAL_BYTES, Effort, Policy, SchemaWarning, escape
from dsparkd.grammar.key import MAX_DEPTH, read_json
from dsparkd.grammar.schema import check_schema

MAX_FORMATS = 1000

# Members of each format: name -> (whether it must be there, what it is).
_FORMATS: dict[str, dict[str, tuple[bool, str]]] = {
    "const_string": {"value": (True, "text")},
    "json_schema": {"json_schema": (True, "schema"), "style": (False, "style")},
    "any_text": {"excludes": (False, "texts")},
    "regex": {"pattern": (True, "pattern")},
    "grammar": {"grammar": (True, "ebnf"), "syntax": (False, "syntax")},
    "sequence": {"elements": (True, "formats")},
    "or": {"elements": (True, "formats")},
    "tag": {"begin": (True, "text"), "content": (True, "format"), "end": (True, "ends")},
    "triggered_tags": {
        "triggers": (True, "texts"),
        "tags": (True, "tags"),
        "at_least_one": (False, "flag"),
        "stop_after_first": (False, "flag"),
        "excludes": (False, "texts"),
    },
    "tags_with_separator": {
        "tags": (True, "tags"),
        "separator": (True, "text"),
        "at_least_one": (False, "flag"),
        "stop_after_first": (False, "flag"),
    },
    "optional": {"content": (True, "format")},
    "plus": {"content": (True, "format")},
    "star": {"content": (True, "format")},
    "repeat": {"min": (True, "count"), "max": (True, "count"), "content": (True, "format")},
}


def check_tag(
    value: object, pointer: str, *, policy: Policy, max_whitespace: int
) -> tuple[dict[str, object], tuple[SchemaWarning, ...]]:
    """Check a structural tag, or its older form with structures and triggers.

    Formats that name tokens are refused: they would let control tokens into the text. Raises GrammarError.
    """
    checker = _TagChecker(policy, max_whitespace)
    tag = checker.document(value, pointer)
    return tag, tuple(checker.warnings)


class _TagChecker:
    def __init__(self, policy: Policy, max_whitespace: int) -> None:
        self.warnings: list[SchemaWarning] = []
        self._policy = policy
        self._max_whitespace = max_whitespace
        self._num_formats = 0
        self._effort = Effort()

    def document(self, value: object, pointer: str) -> dict[str, object]:
        if not isinstance(value, dict):
            _fail(pointer, "expected an object")
        if value.get("type", "structural_tag") != "structural_tag":
            _fail(f"{pointer}/type", 'expected "structural_tag"')
        if "structures" in value:
            format_ = self._older(value, pointer)
        else:
            _require_members(value, ("type", "format"), pointer)
            format_ = self._format(value.get("format"), f"{pointer}/format", 0)
        return {"type": "structural_tag", "format": format_}

    def _older(self, value: dict[str, object], pointer: str) -> dict[str, object]:
        _require_members(value, ("type", "structures", "triggers"), pointer)
        structures = value["structures"]
        if not isinstance(structures, list) or not structures:
            _fail(f"{pointer}/structures", "expected a list of at least one structure")
        tags: list[object] = []
        for index, structure in enumerate(structures):
            at = f"{pointer}/structures/{index}"
            if not isinstance(structure, dict):
                _fail(at, "expected an object")
            _require_members(structure, ("begin", "schema", "end"), at)
            schema = self._schema(structure.get("schema"), f"{at}/schema")
            begin = _checked_text(structure.get("begin"), f"{at}/begin")
            end = _checked_text(structure.get("end"), f"{at}/end")
            tags.append({"type": "tag", "begin": begin, "content": schema, "end": end})
        triggers = self._member("texts", value.get("triggers"), f"{pointer}/triggers", 0)
        return {"type": "triggered_tags", "tags": tags, "triggers": triggers}

    def _format(self, value: object, at: str, depth: int) -> dict[str, object]:
        self._num_formats += 1
        if depth > MAX_DEPTH or self._num_formats > MAX_FORMATS:
            _fail(at, f"more than {MAX_FORMATS} formats or {MAX_DEPTH} levels", code="grammar_too_large")
        if not isinstance(value, dict):
            _fail(at, "expected a format: an object")
        kind = value.get("type")
        members = _FORMATS.get(kind) if isinstance(kind, str) else None
        if members is None:
            _fail(f"{at}/type", f"expected one of {', '.join(_FORMATS)}", code="unsupported_format")
        _require_members(value, ("type", *members), at)
        if kind == "json_schema":
            self._member("style", value.get("style", "json"), f"{at}/style", depth)
            return self._schema(value.get("json_schema"), f"{at}/json_schema")
        checked: dict[str, object] = {"type": kind}
        for name, (is_required, what) in members.items():
            if name in value:
                checked[name] = self._member(what, value[name], f"{at}/{name}", depth)
            elif is_required:
                _fail(f"{at}/{name}", "the field is missing", code="missing_field")
        if kind == "repeat":
            _require_order(checked, at)
        return checked

    def _member(self, what: str, value: object, at: str, depth: int) -> object:
        match what:
            case "text":
                return _checked_text(value, at)
            case "texts" | "ends":
                if what == "ends" and isinstance(value, str):
                    return _checked_text(value, at)
                if not isinstance(value, list) or not (value or what == "texts"):
                    _fail(at, "expected a list of strings")
                return [_checked_text(item, f"{at}/{index}") for index, item in enumerate(value)]
            case "flag":
                if not isinstance(value, bool):
                    _fail(at, "expected true or false")
                return value
            case "count":
                if not isinstance(value, int) or isinstance(value, bool) or not -1 <= value <= 10_000:
                    _fail(at, "expected an integer in 0..10000, or for max -1")
                return value
            case "format":
                return self._format(value, at, depth + 1)
            case "formats" | "tags":
                return self._formats(value, at, depth, only_tags=what == "tags")
            case "pattern":
                return self._pattern(value, at)
            case "ebnf":
                text = _checked_text(value, at)
                if "root" not in text:
                    _fail(at, "no rule is named root", code="invalid_grammar")
                return text
            case _:
                wanted = "json" if what == "style" else "ebnf"
                if value != wanted:
                    _fail(at, f'expected "{wanted}"', code="unsupported_format")
                return value

    def _formats(self, value: object, at: str, depth: int, *, only_tags: bool) -> list[dict[str, object]]:
        if not isinstance(value, list) or not value:
            _fail(at, "expected a list of at least one format")
        found = [self._format(item, f"{at}/{index}", depth + 1) for index, item in enumerate(value)]
        for index, item in enumerate(found):
            if only_tags and item["type"] != "tag":
                _fail(f"{at}/{index}", "expected a tag")
        return found

    def _pattern(self, value: object, at: str) -> str:
        text = _checked_text(value, at)
        try:
            return spelling.plain_text(pattern.whole(pattern.parse(text)))
        except pattern.PatternError as error:
            _fail(at, f"the regular expression has {error}", code="invalid_grammar")

    def _schema(self, value: object, at: str) -> dict[str, object]:
        schema = read_json(value, at) if isinstance(value, str) else value
        checked = check_schema(schema, at, policy=self._policy, effort=self._effort)
        self.warnings += checked.warnings
        found: dict[str, object] = {"type": "json_schema", "json_schema": checked.document}
        return found | ({"max_whitespace_cnt": self._max_whitespace} if self._max_whitespace else {})


def _require_members(value: dict[str, object], allowed: tuple[str, ...], at: str) -> None:
    for name in value:
        if name not in allowed:
            _fail(f"{at}/{escape(name)}", "this member is not supported; remove it", code="unknown_field")


def _require_order(checked: dict[str, object], at: str) -> None:
    least, most = checked["min"], checked["max"]
    assert isinstance(least, int)
    assert isinstance(most, int)
    if least < 0 or (most != -1 and most < least):
        _fail(f"{at}/max", "expected min of at least 0 and max of at least min, or -1")


def _checked_text(value: object, at: str) -> str:
    if not isinstance(value, str):
        _fail(at, "expected a string")
    if len(value.encode()) > MAX_LITERAL_BYTES:
        _fail(at, f"it is longer than {MAX_LITERAL_BYTES} bytes", code="grammar_too_large")
    return value


def _fail(at: str, message: str, *, code: str = "invalid_structural_tag") -> NoReturn:
    raise GrammarError(f"{at}: {message}", code=code, param=at)
