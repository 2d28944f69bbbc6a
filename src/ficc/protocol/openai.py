"""The OpenAI-compatible shapes: what a request must be before it goes anywhere, and how an engine's own
errors are put into the one shape of errors.

Source: OpenAI's API reference. Unknown fields are the engine's business and pass untouched.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

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
    """A checked request. `model` is the name the client gave, if any, and `place` where it stands in the body,
    or where it can be put."""

    model: str | None
    stream: bool
    place: strict_json.Place

    def addressed(self, data: bytes, alias: str) -> bytes:
        """The body that the engine gets: with the alias as its model."""
        return data if self.model == alias else self.place.filled(data, alias)


def read(data: bytes, *, depth_max: int, values_max: int) -> Request:
    """Check an inference body. Raises Refused `invalid_json` or `invalid_body` naming the place."""
    found = _members(data, depth_max, values_max)
    stream = found.get("stream")
    if stream is not None and not isinstance(stream, bool):
        raise Refused("invalid_body", "stream is true, false or null.", "stream")
    if found.get("messages") == []:  # engines answer it, with nonsense
        raise Refused("invalid_body", "messages is empty; send at least one message.", "messages")
    model = found.get("model")
    if model is not None and not isinstance(model, str):
        raise Refused("invalid_body", "model is a string.", "model")
    return Request(model, bool(stream), found.place("model"))


def _members(data: bytes, depth_max: int, values_max: int) -> strict_json.Object:
    try:
        return strict_json.members(data, depth_max=depth_max, values_max=values_max)
    except strict_json.NotJson as error:
        raise Refused("invalid_json", f"The body cannot be taken: {error}.", error.place) from None


def model(name: str, created: float) -> bytes:
    """The answer of GET /v1/models/NAME; the creation time in seconds."""
    return json.dumps(_model(name, created)).encode()


def model_list(names: Sequence[tuple[str, float]]) -> bytes:
    """The answer of GET /v1/models: each name with its creation time, seconds."""
    return json.dumps({"object": "list", "data": [_model(*one) for one in names]}).encode()


def _model(name: str, created: float) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": int(created), "owned_by": "ficc"}


_CODES: Mapping[int, str] = {
    404: "not_found",
    413: "too_large",
    422: "invalid_request",
    429: "engine_busy",  # and not `busy`: this engine saw the request
}
"""The codes of an engine's 4xx answers; of all others it is `invalid_body`."""


MESSAGE_CHARACTERS_MAX = 2000
"""How much of an engine's own words is repeated."""
_REFUSALS_WITH_STATUS_500 = re.compile(
    r"input \(\d+ tokens\) is (?:too large|larger than)|(?:image|audio|video) input is not supported\b"
)
"""How llama.cpp's messages begin where it refuses a request with the status of a fault of its own (tools/server,
server-context.cpp and server-common.cpp). Both are final answers, so no client sends such a request again."""


def engine_error(status: int, body: bytes) -> tuple[int, dict[str, Any]]:
    """An engine's refusal as our status and error document."""
    refused = engine_refusal(status, body)
    return http_api.status_of(refused), http_api.error_document(refused)


def engine_refusal(status: int, body: bytes) -> Refused:
    """An engine's refusal as ours. What the engine says to the caller stays; what has no shape is summed up."""
    return _refusal(status, _engine_words(body), f"The engine answered with status {status}.")


def engine_fault(text: bytes) -> Refused:
    """The same of a fault that an engine reports inside a stream, where the status is what its `code` says."""
    words = _engine_words(text[:ERROR_BYTES_MAX])
    return _refusal(words.status or 500, words, "The engine reported a fault of its own.")


class _Words(NamedTuple):
    message: str | None = None
    param: str | None = None
    status: int | None = None


def _refusal(status: int, words: _Words, otherwise: str) -> Refused:
    message = words.message
    if status == 500 and message is not None and _REFUSALS_WITH_STATUS_500.match(message):
        status = 400
    if 400 <= status < 500:
        otherwise = f"The engine refused the request with status {status}."
        return Refused(_CODES.get(status, "invalid_body"), message or otherwise, words.param)
    return Refused("engine_error", message or otherwise)


def _engine_words(body: bytes) -> _Words:
    """What can be used of whatever an engine answered."""
    try:
        document = strict_json.parse(body)
    except strict_json.NotJson:
        return _Words()
    inner = document.get("error", document) if isinstance(document, dict) else None
    if isinstance(inner, str):
        return _Words(inner[:MESSAGE_CHARACTERS_MAX])
    if not isinstance(inner, dict):
        return _Words()
    message, param, code = inner.get("message"), inner.get("param"), inner.get("code")
    return _Words(
        message[:MESSAGE_CHARACTERS_MAX] if isinstance(message, str) else None,
        param[:MESSAGE_CHARACTERS_MAX] if isinstance(param, str) else None,
        code if type(code) is int else None,
    )
