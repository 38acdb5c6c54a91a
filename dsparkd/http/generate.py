"""Generating endpoints: read, submit, answer whole or as server-sent events.

The status line is sent only after every item was admitted, and a client that leaves takes exactly its items along:
both hold because all work after the body runs inside `Incoming.while_connected`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from typing import TypeVar

import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from dsparkd import metrics
from dsparkd.config import LimitsConfig
from dsparkd.errors import RequestError
from dsparkd.http.answers import Answers, ChatAnswers, CompletionAnswers, Json
from dsparkd.http.body import ClientLeft, read_body
from dsparkd.http.endpoint import Incoming, error_object, json_response
from dsparkd.http.intake import Envelope, Intake, Work
from dsparkd.routing.router import Router, Submission

T = TypeVar("T")


class Generate:
    """Handlers of the endpoints that read a body. threads: the small pool in which text is parsed and tokenized."""

    def __init__(
        self, limits: LimitsConfig, router: Router, intake: Intake, threads: Executor, tally: metrics.Tally
    ) -> None:
        self._limits = limits
        self._router = router
        self._intake = intake
        self._threads = threads
        self._tally = tally

    async def chat(self, incoming: Incoming) -> Response:
        """POST /v1/chat/completions."""
        raw = await read_body(incoming.request, self._limits)
        envelope = _envelope(incoming)

        async def answer() -> Response:
            chat = await self._in_thread(lambda: self._intake.chat(raw, envelope))
            answers = ChatAnswers(chat, self._intake.model, self._intake.encoding)
            return await self._answer(incoming, chat.work, answers)

        return await incoming.while_connected(answer())

    async def completion(self, incoming: Incoming) -> Response:
        """POST /v1/completions."""
        raw = await read_body(incoming.request, self._limits)
        envelope = _envelope(incoming)

        async def answer() -> Response:
            completion = await self._in_thread(lambda: self._intake.completion(raw, envelope))
            answers = CompletionAnswers(completion, self._intake.model, self._intake.tokenizer)
            return await self._answer(incoming, completion.work, answers)

        return await incoming.while_connected(answer())

    async def tokenize(self, incoming: Incoming) -> Response:
        """POST /tokenize."""
        raw = await read_body(incoming.request, self._limits)
        ids = await self._in_thread(lambda: self._intake.tokenize(raw))
        return json_response({"tokens": ids, "count": len(ids), "max_model_len": self._intake.max_context_tokens})

    async def detokenize(self, incoming: Incoming) -> Response:
        """POST /detokenize."""
        raw = await read_body(incoming.request, self._limits)
        return json_response({"prompt": await self._in_thread(lambda: self._intake.detokenize(raw))})

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    async def _answer(self, incoming: Incoming, work: Work, answers: Answers) -> Response:
        """Submit, wait for admission, then answer in the way that was asked for."""
        incoming.request_id = work.request_id
        submission = await self._router.submit(work.items, work.constraint.grammar if work.constraint else None)
        incoming.fields["items"] = len(work.items)
        incoming.fields["dp_ranks"] = sorted({handle.dp_rank for handle in submission.handles})
        admitted = False
        try:
            await self._admitted(submission, work)
            admitted = True
            if work.stream:
                # From here on the stream owns the submission.
                return EventStream(incoming, submission, work, answers, self._tally)
            while arrived := await submission.receive():
                answers.keep(arrived)
        finally:
            if not (admitted and work.stream):
                _note(incoming, answers)
                submission.abort()
        if work.items[0].request.sampling.top_logprobs is None:
            return json_response(answers.body())
        # A few hundred thousand log-probabilities take as many microseconds to write: not while every stream waits.
        return await self._in_thread(lambda: json_response(answers.body()))

    async def _admitted(self, submission: Submission, work: Work) -> None:
        """Wait for admission; a rank that refuses the grammar cannot know where in the body it stands."""
        try:
            await submission.admitted()
        except RequestError as error:
            if work.constraint is not None and error.status == 400 and error.param is None:
                raise RequestError(error.message, code=error.code, param=work.grammar_param) from error
            raise


class EventStream(Response):
    """A response of server-sent events over one submission."""

    media_type = "text/event-stream"

    def __init__(
        self, incoming: Incoming, submission: Submission, work: Work, answers: Answers, tally: metrics.Tally
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._incoming = incoming
        self._submission = submission
        self._work = work
        self._answers = answers
        self._tally = tally
        self._is_complete = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._tally.inc(metrics.HTTP_OPEN_STREAMS)
        try:
            await self._incoming.while_connected(self._write_while_read(send))
        except ClientLeft:
            # The HTTP server says "disconnect" after each response's last byte too; the client has it all then.
            if not self._is_complete:
                raise
        finally:
            self._tally.inc(metrics.HTTP_OPEN_STREAMS, by=-1)
            _note(self._incoming, self._answers)
            self._submission.abort()

    async def _write_while_read(self, send: Send) -> None:
        """Write to the end, unless more waits than the client may leave unread. Raises ClientLeft then."""
        writing = asyncio.ensure_future(self._write(send))
        overrun = asyncio.ensure_future(self._submission.overrun())
        try:
            await asyncio.wait((writing, overrun), return_when=asyncio.FIRST_COMPLETED)
            if not writing.done():
                self._incoming.fields["overrun"] = True
                raise ClientLeft
            writing.result()
        finally:
            for task in (writing, overrun):
                task.cancel()
            await asyncio.gather(writing, overrun, return_exceptions=True)

    async def _write(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        try:
            await _send_events(send, self._answers.opening())
            while arrived := await self._submission.receive():
                await _send_events(send, self._answers.chunks(arrived))
            if self._work.include_usage:
                await _send_events(send, [self._answers.usage_chunk()])
        except RequestError as error:
            # Too late for a status: the client reads the error as an event.
            self._incoming.fields["code"] = error.code
            await _send_events(send, [error_object(error)])
        self._is_complete = True
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False})


async def _send_events(send: Send, events: Sequence[Json]) -> None:
    """All events of one wake-up leave in one write."""
    if not events:
        return
    body = b"".join(b"data: " + orjson.dumps(event) + b"\n\n" for event in events)
    await send({"type": "http.response.body", "body": body, "more_body": True})


def _envelope(incoming: Incoming) -> Envelope:
    return Envelope(incoming.request_id, incoming.has_header_id, incoming.received_ns)


def _note(incoming: Incoming, answers: Answers) -> None:
    """What the log line says of the answer."""
    incoming.fields |= {
        "prompt_tokens": answers.usage.prompt_tokens,
        "output_tokens": answers.usage.completion_tokens,
        "finish": answers.finish_reasons(),
    }
