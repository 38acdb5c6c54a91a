"""One HTTP request from outside: its id, its key, the one error-to-status table, its metric and its log line."""

from __future__ import annotations

import asyncio
import re
import time
import uuid
from collections.abc import Awaitable, Callable, Coroutine
from typing import TypeVar

import orjson
from prometheus_async import aio
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from dsparkd import log, metrics
from dsparkd.errors import RequestError
from dsparkd.http.body import ClientLeft
from dsparkd.http.keys import ApiKeys

CLIENT_LEFT_STATUS = 499  # for the log only: nobody is there to get it
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")

T = TypeVar("T")
Handler = Callable[["Incoming"], Awaitable[Response]]

_ERROR_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
_REFUSAL_REASONS = {
    "body_too_large": "too_large",
    "batch_too_large": "too_large",
    "too_many_logprobs": "too_large",
    "context_length_exceeded": "too_large",
    "grammar_too_large": "too_large",
    "grammar_too_costly": "too_large",
    "queue_full": "queue_full",
    "invalid_dp_rank": "bad_rank",
    "conflicting_dp_rank": "bad_rank",
    "dp_rank_unavailable": "dead_rank",
    "duplicate_request_id": "duplicate",
    "draining": "draining",
    "shutting_down": "draining",
    "invalid_api_key": "unauthorized",
}


def json_response(value: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """Encode with orjson."""
    return Response(orjson.dumps(value), status, headers, media_type="application/json")


def error_object(error: RequestError) -> dict[str, object]:
    """The OpenAI error object."""
    kind = _ERROR_TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "server_error")
    return {"error": {"message": error.message, "type": kind, "param": error.param, "code": error.code}}


def error_response(error: RequestError) -> Response:
    """The one table from errors to responses. A connection whose body was not read to its end is closed."""
    headers: dict[str, str] = {}
    if error.retry_after_s is not None:
        headers["Retry-After"] = str(error.retry_after_s)
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if error.status in (408, 413, 415) or error.code in ("draining", "server_failed"):
        headers["Connection"] = "close"
    return json_response(error_object(error), error.status, headers)


class Incoming:
    """A request and what its log line will say. received_ns: CLOCK_MONOTONIC."""

    def __init__(self, request: Request, received_ns: int) -> None:
        self.request = request
        self.received_ns = received_ns
        self.request_id = uuid.uuid4().hex
        self.has_header_id = False
        self.status = CLIENT_LEFT_STATUS
        self.started = False
        self.fields: dict[str, object] = {}
        self._leaving: asyncio.Task[None] | None = None

    def read_request_id(self) -> None:
        """Take the client's X-Request-Id. Raises RequestError for one that must not be echoed."""
        given = self.request.headers.get("x-request-id")
        if given is None:
            return
        if not _REQUEST_ID.fullmatch(given):
            raise RequestError(
                "X-Request-Id: use 1 to 128 letters, digits and . _ : -",
                code="invalid_request_id",
                param="X-Request-Id",
            )
        self.request_id = given
        self.has_header_id = True

    def watch_client(self) -> asyncio.Task[None]:
        """Return the task that waits for the client's end, and drops what is left of its body until then.

        Somebody must: the HTTP server hands over a few parts of a body and waits until they are taken. It would keep
        the connection of a request that is answered without its body for ever.
        """
        if self._leaving is None:
            self._leaving = asyncio.ensure_future(_client_left(self.request.receive))
        return self._leaving

    async def while_connected(self, work: Coroutine[object, object, T]) -> T:
        """Run work, and cancel it when the client leaves. Raises ClientLeft then.

        The request's body must have been read: the next thing to receive is the client's end. One task waits for it
        through all calls, so it cannot get lost between two.
        """
        leaving = self.watch_client()
        working = asyncio.ensure_future(work)
        try:
            await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                raise ClientLeft
            return working.result()
        finally:
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)

    async def close(self) -> None:
        """Stop waiting for the client's end."""
        if self._leaving is not None:
            self._leaving.cancel()
            await asyncio.gather(self._leaving, return_exceptions=True)


async def _client_left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class _HandlerTimer:
    """What prometheus_async reports a handler's seconds to."""

    def __init__(self, route: str, tally: metrics.Tally) -> None:
        self._route = route
        self._tally = tally

    def observe(self, seconds: float) -> None:
        self._tally.observe(metrics.HTTP_HANDLER_SECONDS, self._route, value=seconds)


class Endpoint:
    """An ASGI application around one handler; the third place that catches everything, so that each request ends.

    quiet: log at level debug, for probes, which would fill the log.
    """

    def __init__(
        self,
        route: str,
        methods: tuple[str, ...],
        handler: Handler,
        *,
        keys: ApiKeys | None,
        tally: metrics.Tally,
        quiet: bool = False,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._route = route
        self._methods = methods
        self._handler = aio.time(_HandlerTimer(route, tally))(handler)
        self._keys = keys
        self._tally = tally
        self._quiet = quiet
        self._clock = clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        incoming = Incoming(Request(scope, receive), self._clock())

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                incoming.status = message["status"]
                incoming.started = True
                incoming.watch_client()
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", incoming.request_id.encode())]
            await send(message)

        try:
            try:
                response = await self._respond(incoming)
            except RequestError as error:
                response = self._refuse(incoming, error)
            await response(scope, receive, send_with_id)
        except ClientLeft:
            incoming.fields["client_left"] = True
        except asyncio.CancelledError:
            # The server's end overtook a connection that it had just accepted. Left to itself, the HTTP library would
            # answer with a 500 without a body.
            if not incoming.started:
                await error_response(_stopping(incoming))(scope, receive, send_with_id)
            raise
        except Exception:  # noqa: BLE001  a bug in one request must not end the others, nor leave this one open
            log.get().exception("http_failed", request_id=incoming.request_id, route=self._route)
            if not incoming.started:
                failure = RequestError("internal error; see the server's log", status=500, code="internal_error")
                await error_response(failure)(scope, receive, send_with_id)
        finally:
            await incoming.close()
            self._record(incoming)

    async def _respond(self, incoming: Incoming) -> Response:
        incoming.read_request_id()
        method = incoming.request.method
        if method not in self._methods:
            allowed = ", ".join(self._methods)
            message = f"{method} is not allowed here; use {allowed}"
            error = RequestError(message, status=405, code="method_not_allowed")
            response = self._refuse(incoming, error)
            response.headers["Allow"] = allowed
            return response
        if self._keys is not None and not self._keys.accept(incoming.request.headers.get("authorization", "")):
            raise RequestError(
                "no valid API key; send one in the Authorization header as Bearer",
                status=401,
                code="invalid_api_key",
            )
        return await self._handler(incoming)

    def _refuse(self, incoming: Incoming, error: RequestError) -> Response:
        incoming.fields["code"] = error.code
        if error.status < 500 or error.status == 503:
            self._tally.inc(metrics.REFUSALS, _REFUSAL_REASONS.get(error.code, "invalid"))
        return error_response(error)

    def _record(self, incoming: Incoming) -> None:
        """Count and log; a client that left counts as 4xx."""
        self._tally.inc(metrics.HTTP_REQUESTS, self._route, f"{incoming.status // 100}xx")
        fields: dict[str, object] = {
            "request_id": incoming.request_id,
            "route": self._route,
            "status": incoming.status,
            "duration_s": round((self._clock() - incoming.received_ns) / 1e9, 6),
            **incoming.fields,
        }
        if self._quiet:
            log.get().debug("http_request", **fields)
        else:
            log.get().info("http_request", **fields)


def _stopping(incoming: Incoming) -> RequestError:
    incoming.fields["code"] = "draining"
    return RequestError("the server is stopping; try another one", status=503, code="draining", retry_after_s=5)
