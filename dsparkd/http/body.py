"""Request bodies: read within bounds, then parsed strictly, so that no two readers can understand one differently."""

from __future__ import annotations

import asyncio
import functools
import json
import re
from typing import TypeVar

import msgspec
from starlette.requests import Request

from dsparkd.config import LimitsConfig
from dsparkd.errors import RequestError

MAX_NESTING = 64
MAX_QUOTED = 200  # characters of what a client sent, in a message or as a name
_ONE_KIND_OF_BRACKETS = bytes.maketrans(b"{}", b"[]")
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_ONE_KIND_OF_DIGITS = bytes.maketrans(b"123456789", b"0" * 9)
_LONG_DIGITS = b"0" * 309  # a shorter number is no larger than a double


class ClientLeft(Exception):
    """The client closed the connection; nobody is there to answer."""


async def read_body(request: Request, limits: LimitsConfig) -> bytes:
    """Return the whole body.

    Raises RequestError 413 for one that is too large, before reading it where its length is declared, 408 for one that
    comes too slowly, 415 for one that is compressed, and ClientLeft.
    """
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise RequestError("send the body without Content-Encoding", status=415, code="unsupported_encoding")
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared[:20]) > limits.max_body_bytes:
        raise _too_large(limits)
    parts: list[bytes] = []
    length = 0
    try:
        async with asyncio.timeout(limits.body_timeout_s):
            while True:
                message = await request.receive()
                if message["type"] == "http.disconnect":
                    raise ClientLeft
                part: bytes = message.get("body", b"")
                length += len(part)
                if length > limits.max_body_bytes:
                    raise _too_large(limits)
                parts.append(part)
                if not message.get("more_body", False):
                    return b"".join(parts)
    except TimeoutError:
        raise RequestError(
            f"the body did not arrive within {limits.body_timeout_s:g} s (limits.body_timeout_s); send it faster",
            status=408,
            code="body_timeout",
        ) from None


def _too_large(limits: LimitsConfig) -> RequestError:
    return RequestError(
        f"the body exceeds {limits.max_body_bytes} bytes (limits.max_body_bytes); send less",
        status=413,
        code="body_too_large",
    )


def parse_object(raw: bytes) -> dict[str, object]:
    """Read one JSON object: UTF-8, one value, nothing after it, no duplicate member, no number beyond a double.

    Strings hold no lone surrogate and no NUL. Raises RequestError with a code for each rule.
    """
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        raise RequestError(f"the body is not UTF-8 at byte {error.start}", code="invalid_utf8") from error
    if not text.strip():
        raise RequestError("the body is empty; send a JSON object", code="invalid_json")
    _require_shallow(raw)
    try:
        value = json.loads(
            text,
            object_pairs_hook=_unique_members,
            parse_constant=_refuse_constant,
            parse_float=_finite_float,
            # A call for each of a long list of ids costs too much where no integer can be beyond a double.
            parse_int=_finite_int if _LONG_DIGITS in raw.translate(_ONE_KIND_OF_DIGITS) else None,
        )
    except json.JSONDecodeError as error:
        raise RequestError(f"the body is not JSON: {error}", code="invalid_json") from error
    if b"\\u" in raw:  # raw bytes of neither pass the decoder, so only escapes can smuggle them in
        _require_plain_strings(value)
    if not isinstance(value, dict):
        raise RequestError("the body must be a JSON object", code="invalid_type")
    return value


def _require_shallow(raw: bytes) -> None:
    """Refuse what the recursion of readers could not take. Brackets in strings are skipped.

    In few calls, each of milliseconds: a regular expression that reads a long string of escapes holds Python's lock,
    and with it every stream, for a second.
    """
    if raw.count(b"[") + raw.count(b"{") <= MAX_NESTING:
        return
    # Without escapes each quotation mark begins or ends a string. The reader stops at one outside of any.
    outside = b"".join(raw.replace(rb"\\", b"").replace(rb"\"", b"").split(b'"')[::2])
    brackets = outside.translate(_ONE_KIND_OF_BRACKETS, _NO_BRACKETS)
    for _ in range(MAX_NESTING):
        brackets = brackets.replace(b"[]", b"")  # the innermost level
    if b"[]" in brackets or brackets.count(b"[") > MAX_NESTING:
        raise RequestError(f"the body nests deeper than {MAX_NESTING} levels", code="nesting_too_deep")


def _unique_members(pairs: list[tuple[str, object]]) -> dict[str, object]:
    members = dict(pairs)
    if len(members) != len(pairs):
        seen: set[str] = set()  # one pass: counting each name in a large object would take hours
        for name, _ in pairs:
            if name in seen:
                raise RequestError(
                    f"the member {name[:MAX_QUOTED]!r} occurs twice in one object", code="duplicate_member"
                )
            seen.add(name)
    return members


def _refuse_constant(name: str) -> object:
    raise RequestError(f"{name} is not a JSON number", code="invalid_json")


def _finite_float(digits: str) -> float:
    value = float(digits)
    if value in (float("inf"), float("-inf")):
        raise RequestError(f"the number {digits[:40]} is beyond a double", code="number_out_of_range")
    return value


def _finite_int(digits: str) -> int:
    _finite_float(digits)
    return int(digits)


def _require_plain_strings(value: object) -> None:
    """Nesting is bounded by now, so recursion is, too."""
    match value:
        case str():
            if "\0" in value:
                raise RequestError("a string holds NUL (\\u0000); remove it", code="nul_character")
            if not value.isascii() and any("\ud800" <= character <= "\udfff" for character in value):
                raise RequestError("a string holds a lone surrogate; send whole characters", code="lone_surrogate")
        case list():
            for item in value:
                _require_plain_strings(item)
        case dict():
            for name, item in value.items():
                _require_plain_strings(name)
                _require_plain_strings(item)


_PLACE = " - at `$"  # msgspec's word for where a mistake stands, at the end of its sentence
_FIELD = re.compile(r"^Object (?P<problem>contains unknown|missing required) field `(?P<name>[^`]*)`$")

_STEP = re.compile(r"\.(\w+)|(\[)")
_ARRAYS = (msgspec.inspect.ListType, msgspec.inspect.VarTupleType)

B = TypeVar("B", bound=msgspec.Struct)


def decode(value: dict[str, object], kind: type[B]) -> B:
    """Convert a parsed body. Raises RequestError that names the field and what is expected of it."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise _refusal(str(error), kind) from error


def _refusal(text: str, kind: type[msgspec.Struct]) -> RequestError:
    """Turn msgspec's sentence into an error object."""
    problem, _, path = text.removesuffix("`").rpartition(_PLACE) if _PLACE in text else (text, "", "")
    param = path.lstrip(".")
    field = _FIELD.match(problem)
    if field is not None:
        name = field["name"][:MAX_QUOTED]
        name = f"{param}.{name}" if param else name
        if field["problem"] == "contains unknown":
            return RequestError(f"unknown field {name!r}; remove it", code="unknown_field", param=name)
        return RequestError(f"the field {name!r} is missing", code="missing_field", param=name)
    code = "invalid_dp_rank" if param.startswith("routed_dp_rank") else "invalid_value"
    message = f"{param or 'the body'}: {problem[0].lower()}{problem[1 : 2 * MAX_QUOTED]}"
    if problem.startswith("Invalid") and (choices := _choices(kind, path)):
        message += f"; use {' or '.join(choices)}"
    return RequestError(message, code=code, param=param or None)


def _choices(kind: type[msgspec.Struct], path: str) -> list[str]:
    """Return the values, as JSON, that the field at msgspec's path may have; empty when its type lists none."""
    types = [_shape(kind)]
    tags: list[str | int | None] = []
    for member, _ in _STEP.findall(path):
        structs = [one for one in types if isinstance(one, msgspec.inspect.StructType)]
        tags = [one.tag for one in structs if member and one.tag_field == member]
        below = [field.type for one in structs for field in one.fields if field.encode_name == member]
        below += [one.item_type for one in types if isinstance(one, _ARRAYS) and not member]
        types = [
            part for one in below for part in (one.types if isinstance(one, msgspec.inspect.UnionType) else (one,))
        ]
    values = [value for one in types if isinstance(one, msgspec.inspect.LiteralType) for value in one.values]
    return list(dict.fromkeys(json.dumps(value) for value in (*tags, *values)))


@functools.cache  # taken apart once: it takes milliseconds, and a client can be refused a thousand times a second
def _shape(kind: type[msgspec.Struct]) -> msgspec.inspect.Type:
    return msgspec.inspect.type_info(kind)
