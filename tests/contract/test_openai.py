"""The compatible routes, with the real llama.cpp and a real small model in a real sandbox."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from openai import OpenAI

from contract.scripted import ScriptedInstallation
from support.http import Answer, Http, http_of
from support.installation import Installation

pytestmark = pytest.mark.timeout(240)

PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
IMAGE = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PIXEL}"}}
CHAT = {"messages": [{"role": "user", "content": "Say hi."}], "max_tokens": 4, "temperature": 0}


def events(answer: Answer) -> list[str]:
    assert answer.status == 200
    blocks = answer.body.decode().strip().split("\n\n")
    assert all(block.startswith("data: ") for block in blocks)
    return [block.removeprefix("data: ") for block in blocks]


@pytest.mark.contract("C-S7")
def test_the_selected_model_is_the_one_model(http: Http, path: str, client: OpenAI) -> None:
    (only,) = http("GET", f"{path}/models").ok()["data"]
    assert (only["id"], only["object"]) == ("assistant", "model")
    assert [model.id for model in client.models.list()] == ["assistant"]
    assert client.models.retrieve("assistant") == next(iter(client.models.list()))
    unknown = http("GET", f"{path}/models/nobody")
    assert (unknown.status, unknown.code) == (404, "model_not_found")
    assert http("POST", f"{path}/models/assistant", {}).code == "method_not_allowed"


def test_the_projects_url_has_each_model_too(http: Http, installation: Installation) -> None:
    client = OpenAI(base_url=f"{installation.origin}/api/v1/openai/v1", api_key=http.token, max_retries=0)
    assert client.models.retrieve("assistant") == next(iter(client.models.list()))
    assert http("GET", "/openai/v1/models/nobody").code == "model_not_found"


@pytest.mark.contract("C-S8")
def test_chat_answers_in_json(http: Http, path: str, client: OpenAI) -> None:
    answer = http("POST", f"{path}/chat/completions", CHAT)
    document = answer.ok()
    assert answer.headers["content-type"].startswith("application/json")
    assert (document["object"], document["model"]) == ("chat.completion", "assistant")
    message = document["choices"][0]["message"]
    assert message["role"] == "assistant"
    assert message["content"]
    same = client.chat.completions.create(model="assistant", **CHAT)  # type: ignore[call-overload]
    assert same.choices[0].message.content == message["content"]
    assert same.usage.completion_tokens == document["usage"]["completion_tokens"] <= CHAT["max_tokens"]


@pytest.mark.contract("C-S9")
def test_chat_streams_events(http: Http, path: str, client: OpenAI) -> None:
    answer = http("POST", f"{path}/chat/completions", {**CHAT, "stream": True})
    assert answer.headers["content-type"].startswith("text/event-stream")
    *chunks, last = events(answer)
    assert last == "[DONE]"
    parsed = [json.loads(chunk) for chunk in chunks]
    assert {chunk["object"] for chunk in parsed} == {"chat.completion.chunk"}
    choices = [choice for chunk in parsed for choice in chunk["choices"]]
    text = "".join(choice["delta"].get("content") or "" for choice in choices)
    assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == ["length"]
    stream = client.chat.completions.create(model="assistant", stream=True, **CHAT)  # type: ignore[call-overload]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices) == text


@pytest.mark.contract("C-S8", "C-S9")
@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_the_engine_refuses_is_a_plain_error(http: Http, path: str, stream: bool) -> None:
    answer = http("POST", f"{path}/chat/completions", {"messages": "none", "stream": stream})
    assert (answer.status, answer.code) == (400, "invalid_body")


@pytest.mark.contract("C-S8")
def test_g23_the_newer_name_of_the_limit_of_tokens_is_known_too(client: OpenAI) -> None:
    messages = [{"role": "user", "content": "Count to one hundred."}]
    answer = client.chat.completions.create(  # type: ignore[call-overload]
        model="assistant", messages=messages, max_completion_tokens=3
    )
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 3


@pytest.mark.contract("C-S9")
def test_g8_usage_is_shown_in_a_stream_that_asks_for_it(client: OpenAI) -> None:
    usage = {"stream_options": {"include_usage": True}}
    stream = client.chat.completions.create(  # type: ignore[call-overload]
        model="assistant", stream=True, **CHAT, **usage
    )
    last = list(stream)[-1]
    assert last.choices == []
    assert 0 < last.usage.completion_tokens <= CHAT["max_tokens"]


@pytest.mark.contract("C-S8", "C-S9", "C-S10")
@pytest.mark.parametrize(
    ("route", "body", "words"),
    [
        ("chat/completions", {"messages": [{"role": "user", "content": [IMAGE]}]}, "image input"),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": [IMAGE]}], "stream": True},
            "image input",
        ),
        ("embeddings", {"input": "word " * 700}, "tokens"),
    ],
    ids=["image", "image, stream", "long input"],
)
def test_what_the_engine_cannot_take_is_the_callers_fault(
    http: Http, path: str, route: str, body: dict[str, Any], words: str
) -> None:
    """llama.cpp answers these with the status of a fault of its own."""
    answer = http("POST", f"{path}/{route}", body)
    assert (answer.status, answer.code) == (400, "invalid_body")
    assert words in answer.json["error"]["message"]


@pytest.mark.contract("C-S10")
def test_embeddings_answer_in_json(http: Http, path: str, client: OpenAI) -> None:
    texts = ["the cat sat", "a dog ran"]
    document = http("POST", f"{path}/embeddings", {"input": texts}).ok()
    assert (document["object"], document["model"]) == ("list", "assistant")
    assert [entry["index"] for entry in document["data"]] == [0, 1]
    assert {len(entry["embedding"]) for entry in document["data"]} == {576}
    same = client.embeddings.create(model="assistant", input=texts, encoding_format="float")
    assert [len(entry.embedding) for entry in same.data] == [576, 576]


def test_completions_answer_in_json_and_in_events(http: Http, path: str, client: OpenAI) -> None:
    body = {"prompt": "One, two,", "max_tokens": 4, "temperature": 0}
    document = http("POST", f"{path}/completions", body).ok()
    assert (document["object"], document["model"]) == ("text_completion", "assistant")
    assert document["usage"]["completion_tokens"] == 4
    stream = client.completions.create(model="assistant", stream=True, **body)  # type: ignore[call-overload]
    text = "".join(chunk.choices[0].text for chunk in stream if chunk.choices)
    assert text == document["choices"][0]["text"]


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("chat/completions", CHAT),
        ("chat/completions", {**CHAT, "stream": True}),
        ("chat/completions", {**CHAT, "stream": True, "stream_options": {"include_usage": True}}),
        ("completions", {"prompt": "One, two,", "max_tokens": 4, "stream": True}),
        ("embeddings", {"input": ["the cat sat"]}),
    ],
    ids=["chat", "chat stream", "chat stream with usage", "completion stream", "embeddings"],
)
def test_g8_tokens_are_recorded_whether_or_not_the_client_asks_for_them(
    installation: Installation,
    http: Http,
    service: dict[str, Any],
    path: str,
    route: str,
    body: dict[str, Any],
) -> None:
    answer = http("POST", f"{path}/{route}", body)
    if route == "chat/completions":  # llama.cpp tells it in streams of completions anyhow
        asked_for = not body.get("stream") or "stream_options" in body
        assert (b'"usage"' in answer.body) == asked_for
    owner = http_of(installation)
    found: list[dict[str, Any]] = []

    def recorded() -> bool:
        items = owner("GET", f"/inference/{service['id']}/usage").ok()["items"]
        found[:] = [one for one in items if one["request_id"] == answer.headers["x-request-id"]]
        return bool(found)

    installation.until(recorded, "it is recorded", seconds=20)
    (record,) = found
    assert (record["outcome"], record["tokens"]) == ("completed", "counted")
    assert record["prompt_tokens"] > 0
    assert record["completion_tokens"] == (0 if route == "embeddings" else 4)
    assert record["credential"] == "service_token"


@pytest.fixture(scope="module", params=["chat", "completions", "embeddings", "rerank"])
def limited(scripted: ScriptedInstallation, request: pytest.FixtureRequest) -> Iterator[tuple[str, str]]:
    """A service whose model has one capability only."""
    model_id = scripted.model(f"only {request.param}", [request.param])["id"]
    service = scripted.service(f"only-{request.param}", model_id=model_id)
    assert service["capabilities"] == [request.param]
    yield service["id"], request.param
    scripted.remove(service["id"])


@pytest.mark.contract("C-S10")
def test_a_capability_that_the_model_lacks_is_refused(
    scripted: ScriptedInstallation, limited: tuple[str, str]
) -> None:
    service_id, capability = limited
    routes: dict[str, tuple[str, dict[str, Any]]] = {
        "chat": ("chat/completions", CHAT),
        "completions": ("completions", {"prompt": "Hi"}),
        "embeddings": ("embeddings", {"input": "Hi"}),
        "rerank": ("rerank", {"query": "Hi", "documents": ["Ho"]}),
    }
    for name, (route, body) in routes.items():
        answer = scripted.http("POST", f"/inference/{service_id}/v1/{route}", {**body, "key": name})
        if name == capability:
            assert answer.status == 200
        else:
            assert (answer.status, answer.code) == (400, "capability_unavailable")
    assert scripted.times(service_id, capability) == 1
    assert [scripted.times(service_id, other) for other in {*routes} - {capability}] == [0, 0, 0]


@pytest.mark.contract("C-D6", "C-D5")
def test_the_built_in_engine_is_llama_cpp(installation: Installation, service: dict[str, Any]) -> None:
    assert service["spec"]["engine"] == "llama_cpp"
    log = http_of(installation)("GET", f"/inference/{service['id']}/logs").ok()["text"]
    assert "llama" in log
