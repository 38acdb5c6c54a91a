"""Structured output of the real server over a random checkpoint: its weights know nothing, so every constraint that an
answer keeps was enforced."""

from __future__ import annotations

import json
import re
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from dsparkd.kv.geometry import PoolSizes
from dsparkd.model.config import load_model_config
from dsparkd.text.tokenizer import Tokenizer
from tools.harness import Server
from tools.keyword_table import DOCUMENT
from tools.random_checkpoint import write_nano

PATIENCE_S = 240.0  # compiles run when nothing else wants the processor
OVERRIDES: dict[str, dict[str, object]] = {
    "grammar": {
        "wait_timeout_s": PATIENCE_S,
        "probe_wall_s": PATIENCE_S,
        "probe_cpu_s": 20,
        "max_whitespace": 2,  # a model without sense fills what it may
    },
}
PLACE = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "kind": {"enum": ["stadt", "dörf", "村"]},
        "inhabitants": {"type": "integer", "minimum": 0, "maximum": 99999},
        "tags": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3},
        "mayor": {"anyOf": [{"type": "null"}, {"type": "string", "pattern": "^[A-Z][a-z]{1,6}$"}]},
    },
    "required": ["name", "kind", "inhabitants", "tags", "mayor"],
    "additionalProperties": False,
}
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 6},
                "days": {"type": "integer", "minimum": 1, "maximum": 9},
            },
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
USER = [{"role": "user", "content": "Tell me of a place"}]
FORMAT = {"type": "json_schema", "json_schema": {"name": "place", "strict": True, "schema": PLACE}}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("checkpoints") / "nano"
    write_nano(directory, seed=3)
    return directory


@pytest.fixture(scope="module")
def server(checkpoint: Path) -> Iterator[Server]:
    with Server({**OVERRIDES, "engine": {"checkpoint": str(checkpoint)}}) as running:
        yield running.wait_ready()


def post(server: Server, path: str, body: dict[str, Any]) -> tuple[int, Any]:
    request = urllib.request.Request(
        server.base_url + path, json.dumps({"model": "nano", **body}).encode(), {"content-type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
            raw = answer.read()
            if body.get("stream"):
                return answer.status, [
                    json.loads(line[6:]) for line in raw.decode().split("\n\n") if line.startswith("data: {")
                ]
            return answer.status, json.loads(raw)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def chat(server: Server, **body: Any) -> dict[str, Any]:
    status, answer = post(
        server, "/v1/chat/completions", {"messages": USER, "thinking": False, "max_tokens": 400, **body}
    )
    assert status == 200, answer
    return answer


def complete(server: Server, **body: Any) -> list[str]:
    status, answer = post(server, "/v1/completions", {"prompt": "Hello", "max_tokens": 200, **body})
    assert status == 200, answer
    assert {choice["finish_reason"] for choice in answer["choices"]} == {"stop"}, answer
    return [choice["text"] for choice in answer["choices"]]


def value(server: Server, name: str, **labels: str) -> float:
    wanted = {f'{label}="{text}"' for label, text in labels.items()}
    total = 0.0
    for line in server.get("/metrics").splitlines():
        if line.startswith(name + "{") and wanted <= set(line[len(name) + 1 :].split("}")[0].split(",")):
            total += float(line.rpartition(" ")[2])
    return total


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("temperature", [0, 1.0, 2.0])
def test_an_answer_is_an_instance_of_its_schema(server: Server, rank: int, temperature: float) -> None:
    """D-13, D-24: whatever the model would rather say, on both ranks, from the prefill's own token on."""
    answer = chat(server, response_format=FORMAT, routed_dp_rank=rank, temperature=temperature, n=2, seed=7)

    for choice in answer["choices"]:
        assert choice["finish_reason"] == "stop"
        place = json.loads(choice["message"]["content"])
        jsonschema.validate(place, PLACE)
        assert list(place) == list(PLACE["properties"])


@pytest.mark.parametrize("rank", [0, 1])
def test_a_stream_says_what_a_whole_answer_says(server: Server, rank: int) -> None:
    """A seed's text does not depend on how it is sent."""
    body = {"response_format": FORMAT, "routed_dp_rank": rank, "seed": 11, "temperature": 1.0}
    whole = chat(server, **body)["choices"][0]["message"]["content"]
    chunks = chat(server, **body, stream=True)

    assert "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks) == whole
    jsonschema.validate(json.loads(whole), PLACE)


def test_the_grammar_begins_behind_the_reasoning(server: Server, checkpoint: Path) -> None:
    """D-16: reasoning is free, cannot end the text, and what follows it is an instance."""
    bias = {str(Tokenizer.load(checkpoint).marker_id("</think>")): 6}
    answer = chat(
        server, thinking=True, response_format=FORMAT, logit_bias=bias, temperature=1.0, seed=5, max_tokens=2000
    )

    message = answer["choices"][0]["message"]
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0
    jsonschema.validate(json.loads(message["content"]), PLACE)


def test_every_kind_is_enforced(server: Server) -> None:
    """G-01's kinds, each by the names that docs/structured_output.md lists."""
    for field in ({"regex": "[0-9]{4}-[0-9]{2}"}, {"structured_outputs": {"regex": "[0-9]{4}-[0-9]{2}"}}):
        assert all(re.fullmatch("[0-9]{4}-[0-9]{2}", text) for text in complete(server, n=4, **field))
    for field in ({"choice": ["yes", "no"]}, {"guided_choice": ["yes", "no"]}):
        assert set(complete(server, n=4, **field)) <= {"yes", "no"}
    ebnf = 'root ::= number " + " number\nnumber ::= [1-9] [0-9]{0,3}\n'
    assert all(re.fullmatch(r"[1-9]\d{0,3} \+ [1-9]\d{0,3}", text) for text in complete(server, n=4, ebnf=ebnf))
    numbers = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 9}, "minItems": 2, "maxItems": 4}
    for text in complete(server, n=4, json_schema=json.dumps(numbers)):
        jsonschema.validate(json.loads(text), numbers)
    tag = {
        "format": {
            "type": "tag",
            "begin": "<n>",
            "content": {"type": "json_schema", "json_schema": {"type": "boolean"}},
            "end": "</n>",
        }
    }
    assert all(re.fullmatch(r"<n>\s*(true|false)\s*</n>", text) for text in complete(server, n=4, structural_tag=tag))


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "get_weather"}}], ids=["required", "named"]
)
def test_a_forced_call_has_arguments_of_its_schema(server: Server, choice: object, rank: int) -> None:
    """The marker of a call is one control token, which the mask lets through there and nowhere else."""
    answer = chat(
        server,
        tools=[TOOL],
        tool_choice=choice,
        parallel_tool_calls=False,
        routed_dp_rank=rank,
        temperature=1.0,
        seed=3,
    )

    (taken,) = answer["choices"]
    assert taken["finish_reason"] == "tool_calls"
    (call,) = taken["message"]["tool_calls"]
    assert call["function"]["name"] == "get_weather"
    jsonschema.validate(json.loads(call["function"]["arguments"]), TOOL["function"]["parameters"])  # type: ignore[index]


def test_the_documents_requests_work(server: Server) -> None:
    """An example that fails teaches the wrong thing."""
    for text in re.findall(r"```json\n(.*?)```", DOCUMENT.read_text(encoding="utf-8"), re.DOTALL):
        body = json.loads(text)
        status, answer = post(server, "/v1/chat/completions", {"thinking": False, "max_tokens": 24, **body})
        assert status == 200, (body, answer)
        assert answer["choices"][0]["finish_reason"] in ("stop", "length", "tool_calls")


@pytest.mark.parametrize("stream", [False, True])
def test_a_grammar_that_the_compiler_refuses_is_a_400(server: Server, stream: bool) -> None:
    """G-25: also for a stream, whose status line waits for the grammar; the place is named, no path of ours is."""
    for field, text in (("ebnf", "root ::= nobody"), ("ebnf", 'root ::= "a')):
        status, answer = post(server, "/v1/completions", {"prompt": "x", field: text, "stream": stream})
        assert (status, answer["error"]["code"], answer["error"]["param"]) == (400, "invalid_grammar", f"/{field}")
        assert "/" not in answer["error"]["message"].replace(f"/{field}", "")
        assert len(answer["error"]["message"]) <= 500


def test_what_is_narrower_is_listed(server: Server) -> None:
    """Nothing is enforced in part without a word: in the whole answer, and in a stream's first chunk."""
    schema = {"type": "object", "properties": {"a": {"type": "string", "minLength": 4, "maxLength": 9}}}
    body = {"json_schema": schema, "seed": 1}
    whole = chat(server, **body)
    chunks = chat(server, **body, stream=True)

    assert {warning["kind"] for warning in whole["warnings"]} == {"narrower"}
    assert all(warning["pointer"].startswith("/json_schema") for warning in whole["warnings"])
    assert chunks[0]["warnings"] == whole["warnings"]
    assert not any("warnings" in chunk for chunk in chunks[1:])
    assert "warnings" not in chat(server, choice=["yes"])


def test_answers_do_not_depend_on_how_they_were_computed(server: Server) -> None:
    """D-25 at k = 0: alone, among 15 others, behind a cached prefix and on the other rank: equal text."""
    long = [{"role": "user", "content": "Tell me of a place. " * 60}]
    body = {"messages": long, "response_format": FORMAT, "seed": 21, "temperature": 1.0}
    alone = chat(server, **body, routed_dp_rank=0)["choices"][0]["message"]["content"]
    again = chat(server, **body, routed_dp_rank=0)
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    assert again["choices"][0]["message"]["content"] == alone
    assert chat(server, **body, routed_dp_rank=1)["choices"][0]["message"]["content"] == alone

    others = [{"regex": "[a-z ]{60,90}"}, {"max_tokens": 60}, {"response_format": FORMAT}]
    with ThreadPoolExecutor(16) as threads:
        noise = [threads.submit(chat, server, seed=number, **others[number % 3]) for number in range(15)]
        among = threads.submit(chat, server, **body)
        assert among.result()["choices"][0]["message"]["content"] == alone
        for other in noise:
            other.result()


def test_logprobs_are_the_models_own(server: Server) -> None:
    """decisions.md 7: of the distribution before the mask, so a forced token may be an unlikely one."""
    answer = chat(server, choice=["zebra"], logprobs=True, top_logprobs=3, temperature=0)
    entries = answer["choices"][0]["logprobs"]["content"]

    assert answer["choices"][0]["message"]["content"] == "zebra"
    assert any(entry["logprob"] < entry["top_logprobs"][0]["logprob"] - 0.1 for entry in entries)
    assert all(entry["logprob"] > -50 for entry in entries)


def test_min_tokens_gives_way_to_the_end_of_a_closed_grammar(server: Server) -> None:
    """D-26: where nothing but the end may follow, the text ends."""
    assert complete(server, choice=["ab"], min_tokens=40, max_tokens=60) == ["ab"]
    (longer,) = complete(server, regex="[ab]{1,80}", min_tokens=20, max_tokens=120)
    assert len(longer) >= 10


def test_requests_are_counted_by_the_place_of_their_grammar(server: Server) -> None:
    """G-11, G-12: one compile serves those that ask at once, the next finds it in memory."""
    regex = "fresh-[0-9]{3}"
    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(lambda _: complete(server, regex=regex, routed_dp_rank=0), range(8)))
    assert all(re.fullmatch(regex, text) for (text,) in answers)
    complete(server, regex=regex, routed_dp_rank=0)
    complete(server, regex=regex, routed_dp_rank=1)
    deadline = time.monotonic() + 20
    name = "dsparkd_grammar_resolutions_total"
    while time.monotonic() < deadline:
        counts = {
            source: value(server, name, source=source)
            for source in ("memory", "in_flight", "compile", "disk", "local_compile")
        }
        if counts["memory"] >= 1 and counts["compile"] >= 1 and counts["disk"] + counts["local_compile"] >= 1:
            break
        time.sleep(0.2)
    assert counts["memory"] >= 1
    assert counts["compile"] >= 1
    assert counts["disk"] + counts["local_compile"] >= 1
    assert value(server, "dsparkd_mask_steps_total", outcome="masked") > 0


def test_a_client_that_leaves_during_the_compile_takes_nothing_along(server: Server) -> None:
    """G-19: the others that wait for the same grammar get it."""
    slow = {"json_schema": {"enum": [f"value number {number}" for number in range(1500)]}, "max_tokens": 60}
    with ThreadPoolExecutor(2) as threads:
        staying = threads.submit(complete, server, routed_dp_rank=0, **slow)
        leaving = urllib.request.Request(
            server.base_url + "/v1/completions",
            json.dumps({"model": "nano", "prompt": "x", "routed_dp_rank": 0, **slow}).encode(),
            {"content-type": "application/json"},
        )
        with pytest.raises(TimeoutError):
            urllib.request.urlopen(leaving, timeout=0.05)
        (text,) = staying.result()
    assert re.fullmatch(r'"value number \d+"', text.strip())
    assert complete(server, choice=["still here"]) == ["still here"]


def test_the_stock_traversal_gives_the_same_answers(server: Server, checkpoint: Path) -> None:
    """D-01: `per_matcher` is a configured control; and a restart finds the grammars on disk."""
    body = {"response_format": FORMAT, "seed": 31, "temperature": 1.0, "routed_dp_rank": 0}
    expected = chat(server, **body)["choices"][0]["message"]["content"]
    overrides: dict[str, dict[str, object]] = {
        "engine": {"checkpoint": str(checkpoint)},
        "grammar": {**OVERRIDES["grammar"], "traversal": "per_matcher"},
        "grammar.store": {"directory": str(server.directory / "grammar")},
    }
    with Server(overrides) as control:
        control.wait_ready()
        assert chat(control, **body)["choices"][0]["message"]["content"] == expected
        deadline = time.monotonic() + 20
        found = 0.0
        while not found and time.monotonic() < deadline:
            name = "dsparkd_grammar_resolutions_total"
            found = value(control, name, source="disk") + value(control, name, source="local_compile")
            time.sleep(0.1)
        assert found == 1
        assert control.stop() == 0


def test_a_retracted_answer_goes_on_where_its_grammar_was(server: Server, checkpoint: Path) -> None:
    """D-12, path invariance: rows are put back for want of pages inside their answers; the texts are equal."""
    geometry = load_model_config(checkpoint).kv_geometry(256, "float32", drafts=True)
    sizes = PoolSizes(num_pages=8, num_slots=9, num_snapshots=2, num_inner_slots=4)
    rest = 8 * geometry.page_bytes + 2 * geometry.snapshot_bytes
    overrides: dict[str, dict[str, object]] = {
        "grammar": OVERRIDES["grammar"],
        "engine": {"checkpoint": str(checkpoint), "max_context_tokens": 1024},
        "kv": {
            "device_bytes": sizes.device_bytes(geometry),
            "snapshot_share": (2 * geometry.snapshot_bytes + 1) / rest,
        },
        "scheduler": {"max_rows": 8, "chunk_tokens": 4 * 256},
    }
    # Each prompt ends so close to a page's end that its answer needs one more page than the pool has for all.
    bodies = [
        {
            "prompt": [3 + (number * 7 + place) % 200 for place in range(250 + number % 4)],
            "regex": "([a-z]{3}[0-9]{3}-){3}",
            "seed": number,
            "routed_dp_rank": 0,
        }
        for number in range(12)
    ]
    expected = [complete(server, **body) for body in bodies]
    with Server(overrides) as tight:
        tight.wait_ready()
        with ThreadPoolExecutor(12) as threads:
            answers = list(threads.map(lambda body: complete(tight, **body), bodies))
        time.sleep(1.5)  # counters come once a second
        assert value(tight, "dsparkd_retractions_total") > 0
    assert answers == expected
    assert all(re.fullmatch("([a-z]{3}[0-9]{3}-){3}", text) for (text,) in expected)
