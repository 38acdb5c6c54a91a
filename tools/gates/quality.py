"""Gate `quality`: the shipped checkpoint, served by this server, answers the test split of every task as it must.

    python -m tools.gates quality [--full] [--device cpu|cuda] [--shared-device] [--dtype NAME]
                                  [--checkpoint DIR] [--tasks NAME ...] [--count N] [--model-only]
                                  [--failures FILE] [--json]

Temperature 0, over HTTP, on both ranks. Bare: 64 recall questions and 200 of each other task; --full: all of them, for
two GPUs, or one that both ranks share. A task fails below its needed share, on an answer that its length limit cut, and
on any refused request. The bare exam reads 445,000 prompt tokens, 236,000 of them recall's, and writes some 70,000. Two
cores read 2,100 tokens a second of prompts of 1k to 12k tokens and write 580 a second (measured beside other work): six
minutes.
--model-only decodes in one process on one device instead of serving: for a look between two slices of training.
"""

from __future__ import annotations

import argparse
import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from dsparkd.config import GIB
from dsparkd.text.encoding import ChatEncoding, PastCall, Prompt
from dsparkd.text.tokenizer import Tokenizer
from tools import exam
from tools.exam import Figures, Json, Question, Reply
from tools.harness import Server, Tables, ensure_checkpoint
from tools.train_nano.tasks import TASKS
from tools.train_nano.tasks.example import Answer
from tools.workload import Client

TIMEOUT_S = 900.0  # of one request, which may wait for all others
CONTEXT_TOKENS = 14_336

Answerer = Callable[[Sequence[Question]], list[Reply]]


def ask(base_url: str, model: str, question: Question, encoding: ChatEncoding) -> Reply:
    """Send one question and read the reply; a refusal or a prompt of other ids is an error."""
    body = exam.chat_body(exam.without_schema(question.example.chat, encoding), model)
    request = urllib.request.Request(
        base_url + "/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
            reply = read_reply(json.loads(response.read()))
    except urllib.error.HTTPError as error:
        text = error.read().decode(errors="replace")
        return Reply(Answer(None, ""), error=f"{error.code}: {text[:300]}")
    except (OSError, ValueError, KeyError) as error:
        return Reply(Answer(None, ""), error=repr(error)[:300])
    if reply.prompt_tokens != len(question.prompt.ids):
        why = f"the server's prompt has {reply.prompt_tokens} tokens instead of {len(question.prompt.ids)}"
        return Reply(reply.answer, reply.finish, reply.prompt_tokens, reply.output_tokens, why)
    return reply


def read_reply(body: dict[str, object]) -> Reply:
    """Read an answer of /v1/chat/completions. Raises KeyError for another one."""
    choices, usage = body["choices"], body["usage"]
    assert isinstance(choices, list)
    assert isinstance(usage, dict)
    message = choices[0]["message"]
    calls = tuple(
        PastCall(call["id"], call["function"]["name"], call["function"]["arguments"])
        for call in message.get("tool_calls") or ()
    )
    return Reply(
        answer=Answer(message.get("reasoning_content"), message["content"] or "", calls),
        finish=str(choices[0]["finish_reason"]),
        prompt_tokens=usage["prompt_tokens"],
        output_tokens=usage["completion_tokens"],
    )


class ServedModel:
    """Answers through a running server."""

    def __init__(self, base_url: str, encoding: ChatEncoding, concurrency: int) -> None:
        self._base_url = base_url
        self._encoding = encoding
        self._concurrency = concurrency
        with urllib.request.urlopen(base_url + "/v1/models", timeout=60) as response:
            self._model = str(json.loads(response.read())["data"][0]["id"])

    def answer(self, asked: Sequence[Question]) -> list[Reply]:
        """Ask all, that many at a time, the longest prompts first so that none of them is left alone at the end."""
        order = sorted(range(len(asked)), key=lambda index: -len(asked[index].prompt.ids))
        replies: dict[int, Reply] = {}
        with ThreadPoolExecutor(self._concurrency) as threads:

            def one(index: int) -> None:
                replies[index] = ask(self._base_url, self._model, asked[index], self._encoding)

            list(threads.map(one, order))
        return [replies[index] for index in range(len(asked))]


class LoopedModel:
    """Answers by decoding in this process."""

    def __init__(self, checkpoint: Path, encoding: ChatEncoding, device: str, dtype: str) -> None:
        import torch

        from tools.decode_loop import DecodeLoop

        self._tokenizer = Tokenizer.load(checkpoint)
        self._encoding = encoding
        cuda = device == "cuda"
        if not cuda:
            torch.set_num_threads(1)
        self._loop = DecodeLoop(
            checkpoint,
            torch.device(device),
            torch.float32 if dtype == "float32" else torch.bfloat16,
            max_rows=256 if cuda else 16,
            context_tokens=CONTEXT_TOKENS,
            chunk_tokens=8192 if cuda else 1024,
        )

    def answer(self, asked: Sequence[Question]) -> list[Reply]:
        """Decode all and parse what comes out as the server does."""
        outputs = self._loop.run([question.prompt.ids for question in asked], exam.MAX_TOKENS)
        return [self._reply(question, output) for question, output in zip(asked, outputs, strict=True)]

    def _reply(self, question: Question, output: list[int]) -> Reply:
        cut = len(output) == exam.MAX_TOKENS
        return Reply(
            answer=parse(
                self._encoding, self._tokenizer, question.prompt, output, calls=bool(question.example.chat.tools)
            ),
            finish="length" if cut else "stop",
            prompt_tokens=len(question.prompt.ids),
            output_tokens=len(output),
        )


def parse(encoding: ChatEncoding, tokenizer: Tokenizer, prompt: Prompt, output: list[int], *, calls: bool) -> Answer:
    """Turn output ids, EOS left out, into an answer."""
    shown = [token_id for token_id in output if not tokenizer.is_special(token_id)]
    text = b"".join(map(tokenizer.token_bytes, shown)).decode(errors="replace")
    parser = encoding.parser(prompt, parse_calls=calls)
    first, rest = parser.feed(text, output), parser.finish(cut=False)
    made = tuple(PastCall(call.call_id, call.name, call.arguments()) for call in parser.calls)
    return Answer(first.reasoning + rest.reasoning or None, first.content + rest.content, made)


def run_exam(
    answerer: Answerer, encoding: ChatEncoding, counts: dict[str, int], show: Callable[[Figures], None]
) -> tuple[list[Figures], list[Json]]:
    """Ask each task's questions, task by task; returns the rows and the wrong answers."""
    rows: list[Figures] = []
    wrong: list[Json] = []
    for task in TASKS:
        if task not in counts:
            continue
        asked = exam.questions(task, counts[task], encoding)
        began = time.perf_counter()
        replies = answerer(asked)
        rows.append(exam.figures(task, asked, replies, time.perf_counter() - began))
        wrong += exam.failures(asked, replies)
        show(rows[-1])
    return rows, wrong


def server_tables(checkpoint: Path, device: str, dtype: str, *, is_shared: bool) -> Tables:
    """Configuration of the served exam, on top of conf/dev.toml."""
    cuda = device == "cuda"
    return {
        "engine": {
            "checkpoint": str(checkpoint),
            "device": device,
            "shared_device": is_shared,
            "dtype": dtype,
            "max_context_tokens": CONTEXT_TOKENS,
        },
        "scheduler": {"max_rows": 128 if cuda else 32},
        "kv": {"device_bytes": (16 if cuda else 1) * GIB // (1 if cuda else 2)},
    }


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m tools.gates quality", description=str(__doc__).splitlines()[0])
    parser.add_argument("--full", action="store_true", help="every question instead of the stated subset")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--shared-device", action="store_true", help="cuda: both ranks on one GPU")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="default: float32 on cpu, bfloat16 on cuda")
    parser.add_argument("--checkpoint", type=Path, help="directory; the shipped checkpoint by default")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS), help="only these")
    parser.add_argument("--count", type=int, help="so many questions of each task, whatever the exam has")
    parser.add_argument(
        "--model-only", action="store_true", help="decode in one process on one device, without a server"
    )
    parser.add_argument("--failures", type=Path, help="write each wrong answer there, a JSON object a line")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    return parser.parse_args(argv)


def main(argv: list[str]) -> int:
    """Hold the exam; 0 when every task passes."""
    arguments = parse_arguments(argv)
    began = time.perf_counter()
    checkpoint = (arguments.checkpoint or ensure_checkpoint()).resolve()
    dtype = arguments.dtype or ("float32" if arguments.device == "cpu" else "bfloat16")
    encoding = exam.load_encoding(checkpoint)
    required = {task: exam.REQUIREMENTS[task] for task in arguments.tasks}
    counts = {task: arguments.count or (one.full if arguments.full else one.subset) for task, one in required.items()}

    def show(row: Figures) -> None:
        if not arguments.json:
            print(row.row(), flush=True)

    if not arguments.json:
        print(exam.HEADER, flush=True)
    ranks_used = None
    if arguments.model_only:
        model = LoopedModel(checkpoint, encoding, arguments.device, dtype)
        rows, wrong = run_exam(model.answer, encoding, counts, show)
    else:
        tables = server_tables(checkpoint, arguments.device, dtype, is_shared=arguments.shared_device)
        with Server(tables) as server:
            base_url = server.wait_ready(300).base_url
            served = ServedModel(base_url, encoding, concurrency=256 if arguments.device == "cuda" else 32)
            rows, wrong = run_exam(served.answer, encoding, counts, show)
            time.sleep(1.5)  # a rank's counters reach the parent once a second
            client = Client(base_url)
            ranks_used = sum(client.counter("dsparkd_output_tokens_total", f'dp_rank="{rank}"') > 0 for rank in (0, 1))
            server.stop()
    if arguments.failures:
        lines = [json.dumps(one, ensure_ascii=False) + "\n" for one in wrong]
        arguments.failures.write_text("".join(lines), encoding="utf-8")
    elapsed = round(time.perf_counter() - began, 1)
    ok = all(row.ok for row in rows) and ranks_used in (None, 2)
    facts: Json = {
        "ok": ok,
        "elapsed_s": elapsed,
        "checkpoint": checkpoint.name,
        "device": arguments.device,
        "dtype": dtype,
        "served": not arguments.model_only,
        "ranks_used": ranks_used,
    }
    if arguments.json:
        print(exam.report(rows, facts))
    else:
        how = "decoded in one process" if arguments.model_only else f"served, {ranks_used} ranks used"
        print(f"{'ok' if ok else 'FAIL'}: {checkpoint.name}, {arguments.device} {dtype}, {how}, {elapsed:.0f} s")
    return 0 if ok else 1
