"""Every answer has the shape that OpenAI's API gives it: with the real llama.cpp and a real small model."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from openai import OpenAI

from support import openai_shapes as shapes
from support.http import Http

pytestmark = pytest.mark.timeout(240)

CHAT: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Say hi."}],
    "max_tokens": 4,
    "temperature": 0,
}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 12}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
CALLING = {
    "messages": [{"role": "user", "content": "What is the weather in Oslo?"}],
    "tools": [WEATHER],
    "max_tokens": 4,
    "temperature": 0,
}
PERSON = {
    "type": "object",
    "properties": {"name": {"enum": ["Ada", "Bo"]}, "old": {"type": "boolean"}},
    "required": ["name", "old"],
    "additionalProperties": False,
}
STRUCTURED = {
    "messages": [{"role": "user", "content": "Describe a person."}],
    "response_format": {
        "type": "json_schema",
        "json_schema": {"name": "person", "strict": True, "schema": PERSON},
    },
    "max_tokens": 60,
    "temperature": 0,
}


@pytest.mark.contract("C-S8")
def test_a_chat_is_a_chat_completion(http: Http, path: str) -> None:
    found = shapes.chat(http("POST", f"{path}/chat/completions", CHAT).body)
    assert found.model == "assistant"
    assert found.usage is not None
    assert found.choices[0].finish_reason == "length"


@pytest.mark.contract("C-S9")
@pytest.mark.parametrize("usage", [False, True])
def test_a_stream_is_chunks_of_one_chat_completion(http: Http, path: str, usage: bool) -> None:
    body = {**CHAT, "stream": True, **({"stream_options": {"include_usage": True}} if usage else {})}
    chunks = shapes.chat_stream(http("POST", f"{path}/chat/completions", body).body, usage=usage)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert {chunk.model for chunk in chunks} == {"assistant"}


@pytest.mark.contract("C-S8", "C-S9")
def test_two_choices_are_two(http: Http, path: str) -> None:
    body = {**CHAT, "n": 2, "temperature": 1}
    shapes.chat(http("POST", f"{path}/chat/completions", body).body, choices=2)
    shapes.chat_stream(http("POST", f"{path}/chat/completions", {**body, "stream": True}).body, choices=2)


@pytest.mark.contract("C-S8", "C-S9")
@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_name_each_token_and_its_rivals(http: Http, path: str, stream: bool) -> None:
    body = {**CHAT, "logprobs": True, "top_logprobs": 2, "stream": stream}
    data = http("POST", f"{path}/chat/completions", body).body
    choices: list[Any] = (
        [choice for chunk in shapes.chat_stream(data) for choice in chunk.choices]
        if stream
        else shapes.chat(data).choices
    )
    tokens = [token for choice in choices if choice.logprobs for token in choice.logprobs.content or ()]
    assert len(tokens) == CHAT["max_tokens"]
    assert {len(token.top_logprobs) for token in tokens} == {2}
    assert all(token.logprob <= 0 and math.isfinite(token.logprob) for token in tokens)
    texts = [c.delta.content if stream else c.message.content for c in choices]
    assert "".join(token.token for token in tokens) == "".join(text or "" for text in texts)


@pytest.mark.contract("C-S8", "C-S9")
@pytest.mark.parametrize("stream", [False, True])
def test_a_schema_holds_the_answer(http: Http, path: str, client: OpenAI, stream: bool) -> None:
    data = http("POST", f"{path}/chat/completions", {**STRUCTURED, "stream": stream}).body
    text = (
        "".join(choice.delta.content or "" for one in shapes.chat_stream(data) for choice in one.choices)
        if stream
        else shapes.chat(data).choices[0].message.content
    )
    person = json.loads(text or "")
    assert set(person) == {"name", "old"}
    assert person["name"] in ("Ada", "Bo")
    assert isinstance(person["old"], bool)
    again = client.chat.completions.create(model="assistant", **STRUCTURED)  # type: ignore[call-overload]
    assert set(json.loads(again.choices[0].message.content)) == {"name", "old"}


@pytest.mark.contract("C-S8", "C-S9")
@pytest.mark.parametrize("choice", ["auto", "required", "none"])
@pytest.mark.parametrize("stream", [False, True])
def test_tools_are_taken_by_a_model_that_calls_none(http: Http, path: str, stream: bool, choice: str) -> None:
    """The template of this model knows no tools, so llama.cpp answers in words."""
    answer = http("POST", f"{path}/chat/completions", {**CALLING, "tool_choice": choice, "stream": stream})
    assert answer.status == 200, answer.body
    if stream:
        chunks = shapes.chat_stream(answer.body)
        assert "".join(one.delta.content or "" for chunk in chunks for one in chunk.choices)
    else:
        assert shapes.chat(answer.body).choices[0].message.content


@pytest.mark.contract("C-S8")
def test_members_that_the_engine_does_not_know_change_nothing(http: Http, path: str) -> None:
    plain = shapes.chat(http("POST", f"{path}/chat/completions", CHAT).body)
    more = {**CHAT, "user": "somebody", "store": False, "metadata": {"a": "b"}, "x_unknown": [{"y": None}]}
    found = shapes.chat(http("POST", f"{path}/chat/completions", more).body)
    assert found.choices[0].message.content == plain.choices[0].message.content


def test_completions_are_text_completions(http: Http, path: str) -> None:
    body = {"prompt": "One, two,", "max_tokens": 4, "temperature": 0}
    found = shapes.completion(http("POST", f"{path}/completions", body).body)
    chunks = shapes.completion_stream(http("POST", f"{path}/completions", {**body, "stream": True}).body)
    text = "".join(choice.text for chunk in chunks for choice in chunk.choices)
    assert text == found.choices[0].text


@pytest.mark.contract("C-S10")
def test_embeddings_are_a_list_in_either_encoding(http: Http, path: str) -> None:
    texts = ["the cat sat", "a dog ran"]
    answers = [
        http("POST", f"{path}/embeddings", {"input": texts, "encoding_format": encoding}).body
        for encoding in ("float", "base64")
    ]
    floats, packed = (shapes.embeddings(answer, count=2) for answer in answers)
    assert isinstance(json.loads(answers[1])["data"][0]["embedding"], str)
    for one, other in zip(floats, packed, strict=True):
        assert one == pytest.approx(other, abs=1e-4)


@pytest.mark.contract("C-S7")
def test_models_are_a_list_of_models(http: Http, path: str) -> None:
    for url in (path, "/openai/v1"):
        (only,) = shapes.models(http("GET", f"{url}/models").body)
        assert only == shapes.model(http("GET", f"{url}/models/assistant").body)
        assert only.id == "assistant"


@pytest.mark.parametrize(
    ("route", "body", "status"),
    [
        ("chat/completions", {"messages": "none"}, 400),
        ("chat/completions", {**CHAT, "model": "another"}, 404),
        ("chat/completions", {**CHAT, "response_format": {"type": "verse"}}, 400),
        ("embeddings", {}, 400),
        ("rerank", {"query": "a", "documents": ["b"]}, 400),
        ("audio/speech", {}, 404),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_errors_are_error_objects(
    http: Http, path: str, route: str, body: dict[str, Any], status: int, stream: bool
) -> None:
    answer = http("POST", f"{path}/{route}", {**body, "stream": stream})
    assert answer.status == status, answer.body
    assert shapes.error(answer.body).type in ("invalid_request_error", "not_found_error")
