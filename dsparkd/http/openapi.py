"""The published OpenAPI document, made from the request structs, so it cannot differ from what is accepted."""

from __future__ import annotations

import msgspec

import dsparkd
from dsparkd.config import LimitsConfig
from dsparkd.http import openai

Json = dict[str, object]

_BODIES: dict[str, tuple[type[msgspec.Struct], str]] = {
    "/v1/chat/completions": (openai.ChatRequest, "Answer a chat, whole or streamed."),
    "/v1/completions": (openai.CompletionRequest, "Continue texts or token ids, whole or streamed."),
    "/tokenize": (openai.TokenizeRequest, "Token ids of a text or a chat."),
    "/detokenize": (openai.DetokenizeRequest, "Text of token ids."),
}
_GETS = {
    "/v1/models": "The served model.",
    "/v1/models/{model}": "The served model by its id.",
    "/server_info": "Version, geometry and every path with its state.",
    "/health": "Whether the front end answers.",
    "/ready": "Whether new work is accepted.",
    "/health_scheduler": "Whether the ranks' loops move.",
    "/metrics": "Prometheus metrics.",
    "/openapi.json": "This document.",
}
_STREAMED = ("/v1/chat/completions", "/v1/completions")
_TEXT: Json = {"type": "string", "minLength": 1}
_IDS: Json = {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}}
# The struct can only say "text or list"; `intake.prompts_of` checks this.
_PROMPT: Json = {
    "anyOf": [
        _TEXT,
        {"type": "array", "minItems": 1, "items": _TEXT},
        _IDS,
        {"type": "array", "minItems": 1, "items": _IDS},
    ]
}
_ERROR: Json = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": "string"},
            },
        }
    },
}


def openapi_document(limits: LimitsConfig) -> Json:
    """Return the document of OpenAPI 3.1."""
    _, components = msgspec.json.schema_components(
        [body for body, _ in _BODIES.values()],
        schema_hook=_anything,
        ref_template="#/components/schemas/{name}",
    )
    components["CompletionRequest"]["properties"]["prompt"] = _PROMPT
    paths: Json = {path: {"post": _post(path, body, summary)} for path, (body, summary) in _BODIES.items()}
    paths |= {path: {"get": _get(path, summary)} for path, summary in _GETS.items()}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "dsparkd",
            "version": dsparkd.__version__,
            "description": f"Bodies hold at most {limits.max_body_bytes} bytes and {limits.max_batch_items} items.",
        },
        "paths": paths,
        "components": {
            "schemas": {**components, "Error": _ERROR},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"key": []}, {}],
    }


def _anything(kind: type) -> Json:
    if kind is not object:
        raise NotImplementedError  # what msgspec expects of a schema hook for any other type
    return {"description": "Any value."}


def _post(path: str, body: type[msgspec.Struct], summary: str) -> Json:
    content: Json = {"application/json": {"schema": {"type": "object"}}}
    if path in _STREAMED:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    schema = {"$ref": f"#/components/schemas/{body.__name__}"}
    return {
        "summary": summary,
        "requestBody": {"required": True, "content": {"application/json": {"schema": schema}}},
        "responses": _responses(content),
    }


def _get(path: str, summary: str) -> Json:
    media = "text/plain" if path == "/metrics" else "application/json"
    operation: Json = {"summary": summary, "responses": _responses({media: {"schema": {}}})}
    if "{model}" in path:
        operation["parameters"] = [{"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}]
    return operation


def _responses(content: Json) -> Json:
    error = {
        "description": "Refused.",
        "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}},
    }
    return {"200": {"description": "Done.", "content": content}, "default": error}
