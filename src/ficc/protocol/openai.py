"""The OpenAI-compatible shapes: what a request must be before it goes anywhere, and how an engine's own
errors are put into the one shape of errors.

Source: OpenAI's API reference. Unknown fields are the engine's business and pass untouched.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ficc.domain.errors import Refused
from ficc.protocol import http_api, strict_json

CHAT = "/v1/chat/completions"
EMBEDDINGS = "/v1/embeddings"
CAPABILITY: Mapping[str, str] = {CHAT: "chat", EMBEDDINGS: "embeddings"}
"""Which capability of a model a path needs."""
ERROR_BYTES_MAX = 64 << 10
"""How much of an engine's error answer is read."""


@dataclass(frozen=True, slots=True)
class Request:
    """A checked request. `model` is the name the client gave, if any; `body` is what the engine gets, with
    the alias in its place."""

    model: str | None
    stream: bool
    body: bytes


def read(data: bytes, alias: str, *, depth_max: int, values_max: int) -> Request:
    """Check an inference body and put the alias in it.

    Raises Refused `invalid_json` or `invalid_body` naming the place.
    """
    found = _members(data, depth_max, values_max)
    stream = found.get("stream")
    if stream is not None and not isinstance(stream, bool):
        raise Refused("invalid_body", "stream is true, false or null.", "stream")
    model = found.get("model")
    if model is not None and not isinstance(model, str):
        raise Refused("invalid_body", "model is a string.", "model")
    body = data if model == alias else found.with_member("model", alias).encode()
    return Request(model, bool(stream), body)


def peek_model(data: bytes, *, depth_max: int, values_max: int) -> str:
    """The model a body names, where it picks the service. Raises Refused."""
    model = _members(data, depth_max, values_max).get("model")
    if not isinstance(model, str):
        raise Refused("invalid_body", "model names the service by its alias.", "model")
    return model


def _members(data: bytes, depth_max: int, values_max: int) -> strict_json.Object:
    try:
        return strict_json.members(data, depth_max=depth_max, values_max=values_max)
    except strict_json.NotJson as error:
        raise Refused("invalid_json", f"The body cannot be taken: {error}.", error.place) from None


def model_list(names: Sequence[tuple[str, float]]) -> bytes:
    """The answer of GET /v1/models: each name with its creation time, seconds."""
    data = [
        {"id": name, "object": "model", "created": int(created), "owned_by": "ficc"}
        for name, created in names
    ]
    return json.dumps({"object": "list", "data": data}).encode()


_CODES: Mapping[int, str] = {404: "not_found", 413: "too_large", 422: "invalid_request", 429: "busy"}
"""The codes of an engine's 4xx answers; of all others it is `invalid_body`."""


def engine_error(status: int, body: bytes) -> tuple[int, dict[str, Any]]:
    """An engine's refusal as our status and error document. What the engine says to the caller stays; what
    has no shape is summed up."""
    message, param = _engine_words(body)
    if 400 <= status < 500:
        code = _CODES.get(status, "invalid_body")
        refused = Refused(code, message or f"The engine refused the request with status {status}.", param)
    else:
        refused = Refused("engine_error", message or f"The engine answered with status {status}.")
    return http_api.status_of(refused), http_api.error_document(refused)


def _engine_words(body: bytes) -> tuple[str | None, str | None]:
    """Message and param out of whatever an engine answered."""
    try:
        document = strict_json.parse(body)
    except strict_json.NotJson:
        return None, None
    inner = document.get("error", document) if isinstance(document, dict) else None
    if isinstance(inner, str):
        return inner, None
    if not isinstance(inner, dict):
        return None, None
    message, param = inner.get("message"), inner.get("param")
    return message if isinstance(message, str) else None, param if isinstance(param, str) else None
