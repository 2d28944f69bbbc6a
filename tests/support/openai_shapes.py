"""What the documents of OpenAI's API must look like, as far as its clients rely on it.

A document that came from an engine may have members of the engine's own; its known members are held to their types
without any conversion. What this project writes itself (lists of models, errors) has the known members and no other.
"""

from __future__ import annotations

import base64
import json
import struct
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue, TypeAdapter

Text = Annotated[str, Field(min_length=1)]
Count = Annotated[int, Field(ge=0)]
Seconds = Annotated[int, Field(gt=0)]
FinishReason = Literal["stop", "length", "tool_calls", "content_filter", "function_call"]


class Theirs(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow", frozen=True)


class Ours(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


# Tokens.


class Usage(Theirs):
    prompt_tokens: Count
    total_tokens: Count
    completion_tokens: Count = 0
    prompt_tokens_details: dict[str, JsonValue] | None = None

    def check(self) -> None:
        assert self.total_tokens == self.prompt_tokens + self.completion_tokens, self


class TopLogprob(Theirs):
    token: str
    logprob: float
    bytes: list[Annotated[int, Field(ge=0, le=255)]] | None


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class Logprobs(Theirs):
    content: list[TokenLogprob] | None


# Chat.


class Function(Theirs):
    name: Text
    arguments: str


class ToolCall(Theirs):
    id: Text
    type: Literal["function"]
    function: Function


class Message(Theirs):
    role: Literal["assistant"]
    content: str | None
    refusal: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(min_length=1)] | None = None


class Choice(Theirs):
    index: Count
    message: Message
    finish_reason: FinishReason
    logprobs: Logprobs | None = None


class ChatCompletion(Theirs):
    id: Text
    object: Literal["chat.completion"]
    created: Seconds
    model: Text
    choices: Annotated[list[Choice], Field(min_length=1)]
    usage: Usage | None = None


class FunctionDelta(Theirs):
    name: str | None = None
    arguments: str | None = None


class ToolCallDelta(Theirs):
    index: Count
    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionDelta | None = None


class Delta(Theirs):
    role: Literal["assistant"] | None = None
    content: str | None = None
    tool_calls: list[ToolCallDelta] | None = None


class ChunkChoice(Theirs):
    index: Count
    delta: Delta
    finish_reason: FinishReason | None
    logprobs: Logprobs | None = None


class ChatCompletionChunk(Theirs):
    id: Text
    object: Literal["chat.completion.chunk"]
    created: Seconds
    model: Text
    choices: list[ChunkChoice]
    usage: Usage | None = None


# Completions.


class CompletionChoice(Theirs):
    index: Count
    text: str
    finish_reason: Literal["stop", "length", "content_filter"] | None
    logprobs: dict[str, JsonValue] | None = None


class Completion(Theirs):
    id: Text
    object: Literal["text_completion"]
    created: Seconds
    model: Text
    choices: list[CompletionChoice]
    usage: Usage | None = None


# Embeddings.


class Embedding(Theirs):
    object: Literal["embedding"]
    index: Count
    embedding: Annotated[list[float], Field(min_length=1)] | Text


class Embeddings(Theirs):
    object: Literal["list"]
    model: Text
    data: list[Embedding]
    usage: Usage | None = None


# Models and errors.


class Model(Ours):
    id: Text
    object: Literal["model"]
    created: Seconds
    owned_by: Text


class Models(Ours):
    object: Literal["list"]
    data: list[Model]


class Error(Theirs):
    message: Text
    type: Literal[
        "invalid_request_error",
        "authentication_error",
        "permission_error",
        "not_found_error",
        "conflict_error",
        "rate_limit_error",
        "server_error",
    ]
    param: str | None = Field()
    code: Text


class Errors(Ours):
    error: Error


# Whole answers.


def _read(shape: Any, data: bytes | str) -> Any:
    """Strictly, from what came over the wire."""
    return TypeAdapter(shape).validate_json(data)


def chat(data: bytes, *, choices: int = 1) -> ChatCompletion:
    """A document of so many choices, each once."""
    found: ChatCompletion = _read(ChatCompletion, data)
    assert sorted(choice.index for choice in found.choices) == list(range(choices))
    for choice in found.choices:
        assert (choice.finish_reason == "tool_calls") == bool(choice.message.tool_calls), choice
    if found.usage is not None:
        found.usage.check()
    return found


def events(data: bytes) -> list[str]:
    """The data of a stream's events, which ended with `[DONE]` and nothing behind it."""
    *found, rest = data.decode().split("\n\n")
    assert rest == ""
    assert all(one.startswith("data: ") and "\n" not in one for one in found), found
    *told, last = [one.removeprefix("data: ") for one in found]
    assert last == "[DONE]"
    return told


def chat_stream(data: bytes, *, choices: int = 1, usage: bool = False) -> list[ChatCompletionChunk]:
    """A stream of one answer: one id and model, each choice finished once and silent from then on; where usage was
    asked for, it comes last, in an event without choices, and else nowhere."""
    chunks: list[ChatCompletionChunk] = [_read(ChatCompletionChunk, one) for one in events(data)]
    assert len({(chunk.id, chunk.model) for chunk in chunks}) == 1
    times = [
        chunk.created for chunk in chunks
    ]  # OpenAI's are all the same, llama.cpp's are when each was made
    assert times == sorted(times)
    if usage:
        *chunks_of_choices, last = chunks
        assert last.choices == []
        assert last.usage is not None
        last.usage.check()
    else:
        chunks_of_choices = chunks
    assert all(chunk.usage is None for chunk in chunks_of_choices)
    assert all(chunk.choices for chunk in chunks_of_choices)
    finished: set[int] = set()
    for choice in (choice for chunk in chunks_of_choices for choice in chunk.choices):
        assert choice.index not in finished, f"choice {choice.index} goes on behind its end"
        if choice.finish_reason is not None:
            finished.add(choice.index)
    assert finished == set(range(choices))
    return chunks


def completion(data: bytes, *, choices: int = 1) -> Completion:
    found: Completion = _read(Completion, data)
    assert sorted(choice.index for choice in found.choices) == list(range(choices))
    assert all(choice.finish_reason is not None for choice in found.choices)
    if found.usage is not None:
        found.usage.check()
    return found


def completion_stream(data: bytes) -> list[Completion]:
    chunks: list[Completion] = [_read(Completion, one) for one in events(data)]
    assert len({chunk.id for chunk in chunks}) == 1
    ends = [choice.finish_reason for chunk in chunks for choice in chunk.choices if choice.finish_reason]
    assert len(ends) == 1
    return chunks


def embeddings(data: bytes, *, count: int) -> list[tuple[float, ...]]:
    """The vectors in the order of the inputs, all of one length, whichever way they are written."""
    found: Embeddings = _read(Embeddings, data)
    assert [one.index for one in found.data] == list(range(count))
    vectors = [_vector(one.embedding) for one in found.data]
    assert len({len(vector) for vector in vectors}) == 1
    return vectors


def _vector(written: list[float] | str) -> tuple[float, ...]:
    if isinstance(written, list):
        return tuple(written)
    packed = base64.b64decode(written, validate=True)
    assert len(packed) % 4 == 0
    return struct.unpack(f"<{len(packed) // 4}f", packed)


def models(data: bytes) -> list[Model]:
    found: Models = _read(Models, data)
    return found.data


def model(data: bytes) -> Model:
    found: Model = _read(Model, data)
    return found


def error(data: bytes) -> Error:
    """An error's document, in which `param` is written even where it is null."""
    found: Errors = _read(Errors, data)
    assert "param" in json.loads(data)["error"]
    return found.error
