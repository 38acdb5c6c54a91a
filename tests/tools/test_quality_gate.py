"""The quality gate against a server that knows the answers, and spoils some of them."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from dsparkd.http import openai
from dsparkd.http.body import decode, parse_object
from dsparkd.http.intake import chat_of
from dsparkd.text.encoding import Chat, ChatEncoding, Tool, Turn
from tools import exam
from tools.exam import Figures, Json, Question, Reply
from tools.gates import quality
from tools.gates.quality import ServedModel, parse, run_exam
from tools.nano_tokenizer import train_tokenizer
from tools.random_checkpoint import write_nano
from tools.train_nano.encode import Encoder
from tools.train_nano.tasks import TASKS

COUNT = 12
Spoil = Callable[[Json], int | None]  # changes a right answer's body; returns another status


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Encoder:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    train_tokenizer().save(str(path))
    return Encoder(path)


def right_body(question: Question) -> Json:
    """The body that a server with a perfect model sends."""
    answer = question.example.answer
    message: Json = {"role": "assistant", "content": answer.content or None, "reasoning_content": answer.reasoning}
    if answer.calls:
        message["tool_calls"] = [
            {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in answer.calls
        ]
    finish = "tool_calls" if answer.calls else "stop"
    usage = {"prompt_tokens": len(question.prompt.ids), "completion_tokens": 10}
    return {"choices": [{"message": message, "finish_reason": finish}], "usage": usage}


class KnowingServer(http.server.ThreadingHTTPServer):
    """Answers the requests whose prompt it knows: bodies by the prompt's text, spoiled by `spoil`."""

    def __init__(self, encoding: ChatEncoding, spoil: Spoil) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.spoil = spoil
        self.received: list[Json] = []
        self.bodies = {
            encoding.render(question.example.chat).text: right_body(question)
            for task in TASKS
            for question in exam.questions(task, COUNT, encoding)
        }
        self.encoding = encoding


class Handler(http.server.BaseHTTPRequestHandler):
    """Reads and renders what was asked as dsparkd does, and looks the answer up."""

    server: KnowingServer

    def do_GET(self) -> None:
        """Serve the model list."""
        self._answer(200, {"data": [{"id": "tiny"}]})

    def do_POST(self) -> None:
        """Serve one chat."""
        value = parse_object(self.rfile.read(int(self.headers["content-length"])))
        self.server.received.append(value)
        openai.refuse_unsupported(value)
        request = decode(value, openai.ChatRequest)
        chat = chat_of(request.messages, request)
        body = json.loads(json.dumps(self.server.bodies[self.server.encoding.render(chat).text]))
        status = self.server.spoil(body)
        self._answer(status or 200, body)

    def _answer(self, status: int, body: Json) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def log_message(self, format: str, *args: object) -> None:
        """Stay silent."""


@pytest.fixture
def hold(encoder: Encoder) -> Iterator[Callable[[Spoil], tuple[dict[str, Figures], list[Json], list[Json]]]]:
    """Hold an exam of COUNT questions a task: rows by task, wrong answers, and the requests."""
    servers: list[KnowingServer] = []

    def run(spoil: Spoil) -> tuple[dict[str, Figures], list[Json], list[Json]]:
        server = KnowingServer(encoder.encoding, spoil)
        servers.append(server)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        model = ServedModel(f"http://127.0.0.1:{server.server_address[1]}", encoder.encoding, concurrency=4)
        rows, wrong = run_exam(model.answer, encoder.encoding, dict.fromkeys(TASKS, COUNT), lambda _row: None)
        return {row.task: row for row in rows}, wrong, server.received

    yield run
    for server in servers:
        server.shutdown()
        server.server_close()


Hold = Callable[[Spoil], tuple[dict[str, Figures], list[Json], list[Json]]]


def nothing(_body: Json) -> None:
    """Spoil nothing."""


def test_right_answers_pass_every_task(hold: Hold) -> None:
    """The comparisons accept what the tasks expect, through HTTP and back."""
    rows, wrong, received = hold(nothing)

    assert list(rows) == list(TASKS)
    for row in rows.values():
        assert (row.right, row.asked, row.cut, row.errors) == (COUNT, COUNT, 0, 0), row
        assert row.ok
        assert row.output_tokens == 10 * COUNT
    assert wrong == []
    assert all(body["temperature"] == 0 and body["model"] == "tiny" for body in received)
    assert {body["thinking"]["type"] for body in received} == {"enabled", "disabled"}  # type: ignore[index]
    assert all("response_format" not in body for body in received)
    assert any("## Response Format" in json.dumps(body["messages"]) for body in received)


def message_of(body: Json) -> Json:
    choices = body["choices"]
    assert isinstance(choices, list)
    message: Json = choices[0]["message"]
    return message


def spoil_text(body: Json) -> None:
    """Change the last digit or letter of the content, or a call's name."""
    message = message_of(body)
    if message.get("tool_calls"):
        calls = message["tool_calls"]
        assert isinstance(calls, list)
        calls[0]["function"]["name"] += "_"
        return
    text = str(message["content"])
    at = max(index for index, character in enumerate(text) if character.isalnum())
    message["content"] = text[:at] + ("7" if text[at] != "7" else "8") + text[at + 1 :]


def test_one_changed_character_is_wrong_in_every_task(hold: Hold) -> None:
    """Exact means exact: every answer is spoiled at one place."""
    rows, wrong, _ = hold(spoil_text)

    for row in rows.values():
        assert (row.right, row.errors, row.cut) == (0, 0, 0), row
        assert not row.ok
    assert len(wrong) == COUNT * len(TASKS)
    assert all(one["got"] != one["expected"] and "content" in one for one in wrong)


def test_json_counts_by_its_value_not_its_spaces(hold: Hold) -> None:
    """Extraction is compared as parsed JSON."""

    def spread(body: Json) -> None:
        message = message_of(body)
        text = str(message["content"] or "")
        if text.startswith("{"):
            message["content"] = json.dumps(json.loads(text), indent=3, ensure_ascii=True)

    rows, _, _ = hold(spread)
    assert rows["extraction"].right == COUNT


def test_an_answer_cut_by_length_fails_its_task_even_when_its_text_is_right(hold: Hold) -> None:
    """Zero answers may be cut."""

    def cut(body: Json) -> None:
        choices = body["choices"]
        assert isinstance(choices, list)
        choices[0]["finish_reason"] = "length"

    rows, wrong, _ = hold(cut)
    for row in rows.values():
        assert (row.right, row.cut) == (0, COUNT)
        assert not row.ok
    assert len(wrong) == COUNT * len(TASKS)


def test_refusals_and_other_prompts_are_errors(hold: Hold) -> None:
    """A server error counts, and so does a prompt of other ids than training saw."""
    rows, _, _ = hold(lambda _body: 500)
    assert all(row.errors == COUNT and not row.ok for row in rows.values())

    def longer(body: Json) -> None:
        usage = body["usage"]
        assert isinstance(usage, dict)
        usage["prompt_tokens"] += 1

    rows, wrong, _ = hold(longer)
    assert all(row.errors == COUNT and not row.ok for row in rows.values())
    assert "tokens instead of" in str(wrong[0]["error"])


@pytest.mark.parametrize(("right", "ok"), [(960, True), (959, False), (1000, True)])
def test_a_task_passes_from_its_needed_share_on(right: int, ok: bool) -> None:
    """One answer fewer fails."""
    row = Figures("arithmetic", 1000, right, 0.96, 0, 0, 1, 1, 1, 1.0)
    assert row.ok is ok
    assert not replace(row, cut=1).ok
    assert not replace(row, errors=1).ok
    assert not replace(row, asked=0, right=0).ok


def test_recall_is_asked_at_1k_to_12k_tokens_and_questions_repeat(encoder: Encoder) -> None:
    """The stated range, and the same questions in every run."""
    asked = exam.questions("recall", 6, encoder.encoding)
    assert all(1_000 <= len(question.prompt.ids) <= 12_288 for question in asked)
    assert [question.index for question in asked] == sorted({question.index for question in asked})
    assert asked == exam.questions("recall", 6, encoder.encoding)


def test_right_answers_are_far_from_the_length_limit(encoder: Encoder) -> None:
    """What is cut is a runaway, not a long right answer."""
    for task in TASKS:
        for question in exam.questions(task, 30, encoder.encoding):
            encoded = encoder.encode(question.example)
            assert encoded.ids[: encoded.num_prompt_ids] == question.prompt.ids
            assert 2 * (len(encoded.ids) - encoded.num_prompt_ids) < exam.MAX_TOKENS


def test_a_schema_is_spelled_out_without_changing_the_prompt(encoder: Encoder) -> None:
    """The request must not ask for a grammar, and the model must see what it was trained on."""
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    for turns in ([Turn("user", "Hi")], [Turn("system", "S."), Turn("user", "Hi")]):
        for thinking in (False, True):
            chat = Chat(turns, thinking=thinking, response_schema=schema)
            spelled = exam.without_schema(chat, encoder.encoding)
            assert spelled.response_schema is None
            assert encoder.encoding.render(spelled) == encoder.encoding.render(chat)
    tooled = Chat([Turn("user", "Hi")], (Tool("f", "d", {"type": "object"}),), response_schema=schema)
    with pytest.raises(ValueError, match="cannot be spelled out"):
        exam.without_schema(tooled, encoder.encoding)


def test_decoded_ids_are_read_as_the_server_reads_them(encoder: Encoder) -> None:
    """Without a server the same text gives the same answer: reasoning, content and calls."""
    seen = set()
    for task in TASKS:
        for question in exam.questions(task, 8, encoder.encoding):
            encoded = encoder.encode(question.example)
            output = encoded.ids[encoded.num_prompt_ids : -1]
            answer = parse(
                encoder.encoding, encoder.tokenizer, question.prompt, output, calls=bool(question.example.chat.tools)
            )
            assert exam.is_right(question, Reply(answer, "stop")), task
            seen.add((answer.reasoning is None, bool(answer.calls)))
    assert len(seen) == 4


def test_a_random_checkpoint_fails_and_its_failures_are_listed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole gate without a server: noise is wrong, and the file says how."""
    write_nano(tmp_path / "nano", seed=0)
    file = tmp_path / "failures"
    arguments = ["--checkpoint", str(tmp_path / "nano"), "--model-only", "--tasks", "chat", "--count", "2"]

    monkeypatch.setattr(exam, "MAX_TOKENS", 24)
    code = quality.main([*arguments, "--failures", str(file), "--json"])

    shown = json.loads(capsys.readouterr().out)
    assert code == 1
    assert not shown["ok"]
    assert (shown["served"], shown["ranks_used"]) == (False, None)
    row = shown["tasks"][0]
    assert (row["task"], row["asked"], row["right"], row["cut"], row["errors"], row["ok"]) == (
        "chat",
        2,
        0,
        2,
        0,
        False,
    )
    wrong = [json.loads(line) for line in file.read_text().splitlines()]
    assert [one["index"] for one in wrong] == [0, 1]
    assert all(one["finish"] == "length" and one["expected"] for one in wrong)
