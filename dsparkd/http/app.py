"""The HTTP application: every route in one table, with who may call it and what its log line is worth."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from starlette.applications import Starlette
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from dsparkd.config import Config, GrammarConfig
from dsparkd.errors import RequestError
from dsparkd.grammar.spec import ConstraintOptions
from dsparkd.grammar.tools import MARKER
from dsparkd.http.connection import mend_connections
from dsparkd.http.endpoint import Endpoint, Handler, Incoming, json_response
from dsparkd.http.generate import Generate
from dsparkd.http.intake import Intake
from dsparkd.http.keys import ApiKeys
from dsparkd.http.openapi import openapi_document
from dsparkd.http.ops import Ops
from dsparkd.metrics import Registry
from dsparkd.routing.router import Router
from dsparkd.text.encoding import ChatEncoding
from dsparkd.text.tokenizer import Tokenizer

# Tokenizing releases the GIL; two threads keep a long prompt from holding up short ones.
TEXT_THREADS = 2


def build_app(config: Config, router: Router, registry: Registry) -> Starlette:
    """Make the ASGI application. Raises StartError when the tokenizer or the key file cannot be used."""
    mend_connections()
    checkpoint = Path(config.engine.checkpoint)
    tokenizer = Tokenizer.load(checkpoint)
    encoding = ChatEncoding(tokenizer, config.text.default_effort)
    intake = Intake(
        checkpoint.name,
        config.limits,
        config.engine.max_context_tokens,
        tokenizer,
        encoding,
        grammars=_constraint_options(config.grammar, tokenizer),
        clock=time.monotonic_ns,
    )
    keys = ApiKeys.load(config.server)
    threads = ThreadPoolExecutor(TEXT_THREADS, thread_name_prefix="text")
    generate = Generate(config.limits, router, intake, threads, registry.tally)
    ops = Ops(config, router, registry, intake, created_s=int(time.time()))
    document = json_response(openapi_document(config.limits))

    async def openapi(incoming: Incoming) -> Response:
        return document

    def endpoint(
        route: str, method: str, handler: Handler, *, open_to_all: bool = False, quiet: bool = False
    ) -> Endpoint:
        methods = ("GET", "HEAD") if method == "GET" else (method,)
        required = None if open_to_all else keys
        return Endpoint(route, methods, handler, keys=required, tally=registry.tally, quiet=quiet)

    models = "/v1/models"
    routes = [
        ("/v1/chat/completions", endpoint("/v1/chat/completions", "POST", generate.chat)),
        ("/v1/completions", endpoint("/v1/completions", "POST", generate.completion)),
        (models, endpoint(models, "GET", ops.models)),
        (f"{models}/{{model}}", endpoint(models, "GET", ops.model)),
        ("/tokenize", endpoint("/tokenize", "POST", generate.tokenize)),
        ("/detokenize", endpoint("/detokenize", "POST", generate.detokenize)),
        ("/server_info", endpoint("/server_info", "GET", ops.server_info)),
        ("/openapi.json", endpoint("/openapi.json", "GET", openapi, open_to_all=True)),
        ("/health", endpoint("/health", "GET", ops.health, open_to_all=True, quiet=True)),
        ("/ready", endpoint("/ready", "GET", ops.ready, open_to_all=True, quiet=True)),
        (
            "/health_scheduler",
            endpoint("/health_scheduler", "GET", ops.health_scheduler, open_to_all=True, quiet=True),
        ),
        ("/metrics", endpoint("/metrics", "GET", ops.metrics, open_to_all=True, quiet=True)),
    ]

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        threads.shutdown(wait=False, cancel_futures=True)

    app = Starlette(routes=[Route(path, handler) for path, handler in routes], lifespan=lifespan)
    app.router.redirect_slashes = False
    # Paths that do not exist get the same error object, metric and log line as everything else.
    every_method = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
    not_found = Endpoint("other", every_method, _not_found, keys=None, tally=registry.tally)
    default = app.router.not_found

    async def route_not_found(scope: Scope, receive: Receive, send: Send) -> None:
        await (not_found if scope["type"] == "http" else default)(scope, receive, send)

    app.router.default = route_not_found
    return app


def _constraint_options(grammar: GrammarConfig, tokenizer: Tokenizer) -> ConstraintOptions | None:
    if not grammar.enabled:
        return None
    return ConstraintOptions(
        unsupported=grammar.unsupported,
        any_whitespace=grammar.any_whitespace,
        max_whitespace=grammar.max_whitespace,
        marker_id=tokenizer.marker_id(MARKER),
    )


async def _not_found(incoming: Incoming) -> Response:
    path = incoming.request.url.path
    raise RequestError(f"{path[:200]!r} is no endpoint; see /openapi.json", status=404, code="not_found")
