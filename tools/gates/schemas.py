"""Gate `schemas`: 64 varied constraints over HTTP, each kept by every answer, and the right answer where there is one.

    python -m tools.gates schemas [--checkpoint DIR] [--json]

Each is sent to both ranks, streamed and whole, at temperature 0: the four answers are equal, end by themselves, parse,
and are instances by `jsonschema` (or match by `re`). Where the prompt determines the answer its canonical JSON is the
expected one, without exception: those are the first questions of the test split that the same checkpoint answers
rightly when no grammar holds it. What it gets wrong then is its exam's matter (`tools.gates quality`). A second server
over the same store shows that every place of a grammar answers: memory, in_flight, disk, local_compile, compile.
"""

from __future__ import annotations

import argparse
import json
import re
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path

import jsonschema  # type: ignore[import-untyped]

from dsparkd.text.encoding import ChatEncoding
from tools import exam
from tools.exam import Question
from tools.gates import quality
from tools.harness import Server, Tables, ensure_checkpoint
from tools.train_nano.tasks.example import Task
from tools.workload import Client

Json = dict[str, object]

NUM_EXTRACTIONS, NUM_CALLS = 34, 10
MAX_ASKED = 4  # times as many questions are asked until enough are answered rightly
CONCURRENCY = 16
TIMEOUT_S = 600.0
MAX_TOKENS = 1500
SOURCES = ("memory", "in_flight", "disk", "local_compile", "compile")
# Compiles have no claim to a processor that serves; on a machine that does other things, too, they take their time.
PATIENT: Tables = {"grammar": {"wait_timeout_s": 300.0, "probe_wall_s": 300.0, "probe_cpu_s": 10}}

Check = Callable[[Json], str]  # takes an answer's message; returns what is wrong with it, or nothing


@dataclass(frozen=True)
class Case:
    """One constraint: what is sent beside the stream and the rank, how an answer is judged, and the right answer."""

    name: str
    body: Json
    check: Check
    expected: str | None = None


@dataclass
class Line:
    """One case's result."""

    name: str
    faults: list[str] = field(default_factory=list)
    seconds: float = 0.0


# --- cases


def instance_of(schema: object) -> Check:
    """Judge content as an instance of a schema."""

    def check(message: Json) -> str:
        try:
            jsonschema.validate(json.loads(str(message["content"])), schema)
        except (ValueError, jsonschema.ValidationError) as error:
            return f"{str(error)[:200]} in {str(message['content'])[:200]!r}"
        return ""

    return check


def matching(pattern: str) -> Check:
    """Judge content by a regular expression for all of it."""
    return lambda message: "" if re.fullmatch(pattern, str(message["content"])) else f"{message['content']!r}"


def calling(tools: list[Json]) -> Check:
    """Judge calls by the schemas of the tools."""
    schemas = {str(_function(tool)["name"]): _function(tool)["parameters"] for tool in tools}

    def check(message: Json) -> str:
        calls = message.get("tool_calls")
        if not isinstance(calls, list) or not calls:
            return f"no call in {str(message)[:200]}"
        for call in calls:
            try:
                jsonschema.validate(json.loads(call["function"]["arguments"]), schemas[call["function"]["name"]])
            except (ValueError, KeyError, jsonschema.ValidationError) as error:
                return f"{str(error)[:200]} in {str(call)[:200]}"
        return ""

    return check


def _function(tool: Json) -> Json:
    function = tool["function"]
    assert isinstance(function, dict)
    return function


def _strict(schema: object, name: str = "answer") -> Json:
    return {"type": "json_schema", "json_schema": {"name": name, "schema": schema, "strict": True}}


class Known:
    """Questions that the served checkpoint answers rightly by itself; `asked`: how many it took to find them."""

    def __init__(self, base_url: str, model: str, encoding: ChatEncoding) -> None:
        self._base_url = base_url
        self._model = model
        self._encoding = encoding
        self.asked = 0

    def pick(self, task: Task, count: int, suits: Callable[[Question], bool]) -> list[Question]:
        """Return the first `count` that suit and are answered rightly. Raises AssertionError when there are too few."""
        suitable = [one for one in exam.questions(task, 2 * MAX_ASKED * count, self._encoding) if suits(one)]
        picked: list[Question] = []
        for batch in _batches(suitable[: MAX_ASKED * count], CONCURRENCY):
            with ThreadPoolExecutor(CONCURRENCY) as threads:
                right = list(threads.map(self._answers, batch))
            self.asked += len(batch)
            picked += [question for question, is_right in zip(batch, right, strict=True) if is_right]
            if len(picked) >= count:
                return picked[:count]
        raise AssertionError(
            f"of {self.asked} questions of {task} only {len(picked)} are answered rightly, not {count}"
        )

    def _answers(self, question: Question) -> bool:
        return exam.is_right(question, quality.ask(self._base_url, self._model, question, self._encoding))


def _batches(questions: list[Question], size: int) -> Iterator[list[Question]]:
    for start in range(0, len(questions), size):
        yield questions[start : start + size]


def extraction_cases(known: Known, model: str) -> list[Case]:
    """Facts in prose and a schema, which stands in the prompt's own place for it or in the operator's words."""
    cases: list[Case] = []
    # No grammar can count what an array has had, so those are refused.
    for question in known.pick(
        "extraction", NUM_EXTRACTIONS, lambda one: "uniqueItems" not in json.dumps(one.example.schema)
    ):
        chat, schema = question.example.chat, question.example.schema
        body = exam.chat_body(chat, model)
        if chat.response_schema is not None:
            body["response_format"] = _strict(chat.response_schema)
        else:
            body["json_schema"] = schema
        expected = question.example.expected
        cases.append(Case(f"extraction {question.index}", body, instance_of(schema), expected))
    return cases


def call_cases(known: Known, model: str) -> list[Case]:
    """A wish and tools, of which one must be called; half of them name it."""
    cases: list[Case] = []
    for question in known.pick("tools", NUM_CALLS, lambda one: len(one.example.answer.calls) == 1):
        answer = question.example.answer
        body = exam.chat_body(question.example.chat, model)
        tools = body["tools"]
        assert isinstance(tools, list)
        body["tool_choice"] = "required"
        body["parallel_tool_calls"] = False
        if len(cases) % 2:
            body["tool_choice"] = {"type": "function", "function": {"name": answer.calls[0].name}}
        cases.append(Case(f"call {question.index}", body, calling(tools), question.example.expected))
    return cases


_NAME = {"type": "string", "minLength": 1, "maxLength": 12}
_TREE = {
    "$ref": "#/$defs/node",
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "value": {"type": "integer", "minimum": 0, "maximum": 9},
                "left": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/leaf"}]},
                "right": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/leaf"}]},
            },
            "required": ["value", "left", "right"],
            "additionalProperties": False,
        },
        "leaf": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
    },
}
_RECURSIVE = {
    "type": "object",
    "properties": {"next": {"anyOf": [{"type": "null"}, {"$ref": "#"}]}, "id": {"type": "integer", "maximum": 99}},
    "required": ["id", "next"],
    "additionalProperties": False,
}


def _nested(levels: int) -> Json:
    schema: Json = {"enum": ["done", "nicht fertig", "未完成"]}
    for level in range(levels):
        schema = {
            "type": "object",
            "properties": {f"level{level}": schema},
            "required": [f"level{level}"],
            "additionalProperties": False,
        }
    return schema


_SHAPES: dict[str, object] = {
    "nested 8 deep": _nested(8),
    "recursive": _RECURSIVE,
    "definitions": _TREE,
    "array with bounds": {
        "type": "array",
        "items": {"type": "integer", "minimum": -5, "maximum": 5},
        "minItems": 3,
        "maxItems": 6,
    },
    "tuple": {"type": "array", "prefixItems": [_NAME, {"type": "boolean"}], "items": False, "minItems": 2},
    "draft 7 tuple": {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "type": "array",
        "items": [{"type": "null"}, {"const": 7}],
        "additionalItems": False,
        "minItems": 2,
    },
    "enum of unicode": {"enum": ["grün", "жёлтый", "赤", "🔵", 'quote"d', "back\\slash"]},
    "numeric ranges": {
        "type": "object",
        "properties": {
            "share": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
            "below": {"type": "integer", "exclusiveMaximum": -10, "minimum": -99},
            "even": {"type": "integer", "multipleOf": 2, "minimum": 0, "maximum": 20},
        },
        "required": ["share", "below", "even"],
        "additionalProperties": False,
    },
    "patterns": {
        "type": "object",
        "properties": {
            "plate": {"type": "string", "pattern": "^[A-Z]{1,3}-[0-9]{1,4}$"},
            "day": {"type": "string", "format": "date"},
        },
        "required": ["plate", "day"],
        "additionalProperties": False,
    },
    "nullable": {
        "type": "object",
        "properties": {"a": {"type": ["string", "null"], "maxLength": 5}},
        "required": ["a"],
    },
    "merged allOf": {
        "allOf": [
            {"type": "object", "properties": {"a": {"type": "integer", "minimum": 3}}, "required": ["a"]},
            {"properties": {"a": {"maximum": 8}, "b": {"type": "boolean"}}, "required": ["b"]},
        ]
    },
    "exclusive oneOf": {
        "oneOf": [{"type": "boolean"}, {"type": "integer", "minimum": 0, "maximum": 3}, {"type": "null"}]
    },
    "100 properties": {
        "type": "object",
        "properties": {f"p{number}": {"type": "boolean"} for number in range(100)},
        "required": [f"p{number}" for number in range(100)],
        "additionalProperties": False,
    },
}


def shape_cases(model: str) -> list[Case]:
    """Constraints whose answer nothing determines: what comes must be of their form all the same."""
    asked: Json = {
        "model": model,
        "messages": [{"role": "user", "content": "Return the record. The name is Munich and the grade is γ."}],
        "thinking": {"type": "disabled"},
        "temperature": 0,
        "max_tokens": MAX_TOKENS,
        "structured_outputs": {"disable_any_whitespace": True},
    }
    cases = [
        Case(name, asked | {"response_format": _strict(schema)}, instance_of(schema))
        for name, schema in _SHAPES.items()
    ]
    free = {name: value for name, value in asked.items() if name != "structured_outputs"}
    tag: Json = {
        "format": {
            "type": "tag",
            "begin": "<search>",
            "content": {
                "type": "json_schema",
                "json_schema": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
            },
            "end": "</search>",
        }
    }
    options: Json = {
        "type": "sequence",
        "elements": [{"type": "const_string", "value": "answer: "}, {"type": "regex", "pattern": "yes|no|[0-9]{1,3}"}],
    }
    return [
        *cases,
        Case(
            "regex",
            free | {"regex": r"[A-Z][a-z]{2,9}( [A-Z][a-z]{2,9}){0,2}"},
            matching(r"[A-Z][a-z]{2,9}( [A-Z][a-z]{2,9}){0,2}"),
        ),
        Case(
            "ebnf",
            free | {"ebnf": 'root ::= n ("+" n){1,3}\nn ::= [1-9] [0-9]{0,2}\n'},
            matching(r"[1-9]\d{0,2}(\+[1-9]\d{0,2}){1,3}"),
        ),
        Case("choice", free | {"choice": ["Munich", "γ", "neither"]}, matching("Munich|γ|neither")),
        Case("structural tag", free | {"structural_tag": tag}, matching(r"<search>\s*\[[\s\S]*\]\s*</search>")),
        Case(
            "structural tag, sequence",
            free | {"structural_tag": {"format": options}},
            matching(r"answer: (yes|no|\d{1,3})"),
        ),
        Case("json_object", free | {"response_format": {"type": "json_object"}}, instance_of({"type": "object"})),
        Case(
            "thinking first",
            free | {"thinking": {"type": "enabled"}, "response_format": _strict(_SHAPES["nullable"])},
            instance_of(_SHAPES["nullable"]),
        ),
    ]


# --- asking


class Asker:
    """Sends requests to one server."""

    def __init__(self, base_url: str) -> None:
        self._base_url = base_url

    def ask(self, case: Case, rank: int, stream: bool) -> tuple[Json, str]:
        """Return an answer's message and why it ended. Raises AssertionError for a refusal."""
        body = case.body | {"routed_dp_rank": rank, "stream": stream}
        request = urllib.request.Request(
            self._base_url + "/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
                raw: bytes = answer.read()
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{error.code}: {error.read()[:300]!r}") from error
        if not stream:
            choice = json.loads(raw)["choices"][0]
            return choice["message"], str(choice["finish_reason"])
        return _joined([json.loads(line[6:]) for line in raw.decode().split("\n\n") if line.startswith("data: {")])


def _joined(chunks: list[Json]) -> tuple[Json, str]:
    """A stream's chunks as the whole answer's message."""
    content, calls, finish = "", list[Json](), ""
    for chunk in chunks:
        if "error" in chunk:
            raise AssertionError(str(chunk)[:300])
        choices = chunk["choices"]
        assert isinstance(choices, list)
        delta = choices[0]["delta"]
        content += delta.get("content") or ""
        for part in delta.get("tool_calls") or ():
            if "id" in part:
                calls.append({"function": {"name": part["function"]["name"], "arguments": ""}})
            function = _function(calls[part["index"]])
            function["arguments"] = str(function["arguments"]) + part["function"]["arguments"]
        finish = choices[0]["finish_reason"] or finish
    return {"content": content, "tool_calls": calls}, finish


def spelled(message: Json) -> str | None:
    """An answer as the examples spell theirs: canonical JSON, or its one call."""
    calls = message.get("tool_calls")
    if isinstance(calls, list) and calls:
        call = calls[0]["function"]
        return json.dumps({"name": call["name"], "arguments": json.loads(call["arguments"])}, ensure_ascii=False)
    try:
        return json.dumps(json.loads(str(message["content"])), ensure_ascii=False)
    except ValueError:
        return None


def run_case(asker: Asker, case: Case) -> Line:
    """Ask four ways and compare."""
    line = Line(case.name)
    begun = time.monotonic()
    texts = set()
    for rank in (0, 1):
        for stream in (False, True):
            way = f"rank {rank}, {'streamed' if stream else 'whole'}"
            try:
                message, finish = asker.ask(case, rank, stream)
            except (AssertionError, OSError) as error:
                line.faults.append(f"{way}: {error}")
                continue
            wrong = case.check(message)
            if finish not in ("stop", "tool_calls"):
                line.faults.append(f"{way}: ended with {finish}")
            elif wrong:
                line.faults.append(f"{way}: {wrong}")
            else:
                texts.add(spelled(message) if message.get("tool_calls") else str(message["content"]))
                if case.expected is not None and spelled(message) != case.expected:
                    line.faults.append(f"{way}: {spelled(message)} instead of {case.expected}"[:600])
    if len(texts) > 1:
        line.faults.append(f"{len(texts)} different answers: {sorted(map(str, texts))}"[:400])
    line.seconds = round(time.monotonic() - begun, 2)
    return line


def sources(base_url: str) -> dict[str, float]:
    """Look-ups of both ranks by the place that answered."""
    client = Client(base_url)
    name = "dsparkd_grammar_resolutions_total"
    return {source: client.counter(name, f'source="{source}"') for source in SOURCES}


def run(checkpoint: Path) -> tuple[list[Line], dict[str, float], int]:
    """Ask everything, start again over the same store, and ask once more; the last number is of Known."""
    model = checkpoint.name
    overrides: Tables = {**PATIENT, "engine": {"checkpoint": str(checkpoint)}}
    with Server(overrides) as server:
        server.wait_ready()
        known = Known(server.base_url, model, exam.load_encoding(checkpoint))
        cases = [*extraction_cases(known, model), *call_cases(known, model), *shape_cases(model)]
        asker = Asker(server.base_url)
        with ThreadPoolExecutor(CONCURRENCY) as threads:
            lines = list(threads.map(lambda case: run_case(asker, case), cases))
            # Eight that ask at once for what nobody has seen: one compiles, the others wait for it.
            fresh = Case(
                "fresh", cases[-3].body | {"regex": "fresh [0-9]{5}", "structural_tag": None}, matching(r"fresh \d{5}")
            )
            lines += threads.map(lambda _: _once(asker, fresh), range(8))
        time.sleep(2.5)  # counters come once a second
        seen = sources(server.base_url)
        if server.stop() != 0:
            lines.append(Line("stop", ["the server did not stop with 0"]))
        store = server.directory / "grammar"
        with Server({**overrides, "grammar.store": {"directory": str(store)}}) as again:
            again.wait_ready()
            asker = Asker(again.base_url)
            with ThreadPoolExecutor(CONCURRENCY) as threads:
                repeated = list(threads.map(lambda case: _once(asker, case), cases))
            lines += [line for line in repeated if line.faults]
            time.sleep(2.5)
            warm = sources(again.base_url)
            if warm["compile"]:
                lines.append(Line("restart", [f"{warm['compile']:g} grammars were compiled as new ones"]))
            if again.stop() != 0:
                lines.append(Line("stop", ["the second server did not stop with 0"]))
    return lines, {source: seen[source] + warm[source] for source in SOURCES}, known.asked


def _once(asker: Asker, case: Case) -> Line:
    line = Line(f"{case.name}, again")
    try:
        message, _ = asker.ask(case, 0, False)
        wrong = case.check(message)
        line.faults += [wrong] if wrong else []
    except (AssertionError, OSError) as error:
        line.faults.append(str(error))
    return line


def main(argv: list[str]) -> int:
    """Run the gate and return its exit code."""
    parser = argparse.ArgumentParser(prog="tools.gates schemas", description=__doc__.splitlines()[0])
    parser.add_argument("--checkpoint", type=Path)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(argv)
    begun = time.monotonic()
    lines, seen, num_asked = run((options.checkpoint or ensure_checkpoint()).resolve())
    faulty = [line for line in lines if line.faults]
    missing = [source for source, count in seen.items() if not count]
    num_determined = NUM_EXTRACTIONS + NUM_CALLS
    ok = not faulty and not missing
    elapsed_s = round(time.monotonic() - begun, 1)
    if options.json:
        facts = {"ok": ok, "cases": len(lines), "determined": num_determined, "asked": num_asked, "sources": seen}
        print(json.dumps(facts | {"faulty": [asdict(line) for line in faulty], "elapsed_s": elapsed_s}))
        return 0 if ok else 1
    for line in faulty:
        print(f"FAIL {line.name}: {'; '.join(line.faults)}")
    print(f"{len(lines)} lines, {len(faulty)} faulty; {num_determined} have one right answer ({num_asked} were tried)")
    print("look-ups: " + ", ".join(f"{source} {count:g}" for source, count in seen.items()))
    print(f"{'ok' if ok else 'FAIL'} in {elapsed_s} s")
    return 0 if ok else 1
