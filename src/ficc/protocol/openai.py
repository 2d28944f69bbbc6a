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
from ficc.domain.usage import TOKENS_MAX, Tokens
from ficc.protocol import http_api, strict_json

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
EMBEDDINGS = "/v1/embeddings"
RERANK = "/v1/rerank"
CAPABILITY: Mapping[str, str] = {
    CHAT: "chat",
    COMPLETIONS: "completions",
    EMBEDDINGS: "embeddings",
    RERANK: "rerank",
}
"""Which capability of a model a path needs. `/v1/rerank` is Jina's and Cohere's, as llama.cpp and vLLM have it."""
STREAMED = frozenset({CHAT, COMPLETIONS})
"""The paths whose answers may be streams."""
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


# What an engine counted.

_USAGE = re.compile(rb'(?<!\\)"usage"\s{0,8}:\s{0,8}(\{[^{}]{0,512}(?:\{[^{}]{0,512}\}[^{}]{0,512}){0,4}\})')


def tokens(document: Any) -> Tokens | None:
    """What an answer, or an event of a stream, says of tokens: in OpenAI's `usage`, or in llama.cpp's `timings`,
    which end each of its streams (tools/server/README.md: of the prompt, `cache_n` came from the cache)."""
    if not isinstance(document, dict):
        return None
    usage = document.get("usage")
    if isinstance(usage, dict) and (prompt := _count(usage, "prompt_tokens")) is not None:
        completion = _count(usage, "completion_tokens")
        return Tokens(prompt, 0 if completion is None else completion)  # embeddings have a prompt only
    timings = document.get("timings")
    if isinstance(timings, dict):
        fresh, completion = _count(timings, "prompt_n"), _count(timings, "predicted_n")
        if fresh is not None and completion is not None:
            return Tokens(fresh + (_count(timings, "cache_n") or 0), completion)
    return None


def tokens_in_stream(tail: bytes | bytearray) -> Tokens | None:
    """What the last events of a stream say of tokens, from the bytes at its end."""
    for line in reversed(bytes(tail).splitlines()):
        if line.startswith(b"data:") and (b'"usage"' in line or b'"timings"' in line):
            try:
                found = tokens(json.loads(line[5:]))
            except (ValueError, RecursionError):
                continue
            if found is not None:
                return found
    return None


def tokens_in_document(part: bytes) -> Tokens | None:
    """What an answer that is too large to be read whole says of tokens, from its beginning or its end."""
    for found in _USAGE.finditer(part):
        try:
            counted = tokens({"usage": json.loads(found[1])})
        except ValueError:
            continue
        if counted is not None:
            return counted
    return None


def _count(members: Mapping[str, Any], name: str) -> int | None:
    value = members.get(name)
    return value if type(value) is int and 0 <= value <= TOKENS_MAX else None


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
