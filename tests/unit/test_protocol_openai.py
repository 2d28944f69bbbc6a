"""Inference bodies: checked whole, passed on byte for byte but for the model's name; and whatever engines answer
when they refuse."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ficc.domain.errors import Refused
from ficc.protocol import http_api, openai
from ficc.protocol.openai import Request, engine_error

ALIAS = "assistant"


def read(data: bytes, *, depth_max: int = 64, values_max: int = 1000) -> Request:
    return openai.read(data, depth_max=depth_max, values_max=values_max)


def sent(data: bytes) -> bytes:
    """The body that the engine gets."""
    return read(data).addressed(data, ALIAS)


def refusal(data: bytes, **bounds: int) -> Refused:
    with pytest.raises(Refused) as caught:
        read(data, **bounds)
    assert http_api.status_of(caught.value) == 400
    return caught.value


# Requests.


def test_a_body_that_names_the_alias_is_not_touched() -> None:
    body = b'{ "model" : "assistant", "stream":true }'
    assert (read(body).model, read(body).stream) == ("assistant", True)
    assert sent(body) is body


@pytest.mark.parametrize(
    ("body", "model", "addressed"),
    [
        (b'{"messages":[{}]}', None, b'{"model": "assistant", "messages":[{}]}'),
        (b'{"model":null,"n":1}', None, b'{"model":"assistant","n":1}'),
        (b'{"n":1,"model":"smollm2"}', "smollm2", b'{"n":1,"model":"assistant"}'),
        (b'{"model":"","n":1}', "", b'{"model":"assistant","n":1}'),
        (b"{}", None, b'{"model": "assistant"}'),
        ('{"é":"😀","model":"ü","n":"é"}'.encode(), "ü", '{"é":"😀","model":"assistant","n":"é"}'.encode()),
    ],
)
def test_the_alias_is_put_in_and_the_clients_own_name_told(
    body: bytes, model: str | None, addressed: bytes
) -> None:
    assert (read(body).model, read(body).stream) == (model, False)
    assert sent(body) == addressed


def test_a_conversation_without_a_message_goes_to_no_engine() -> None:
    refused = refusal(b'{"messages": []}')
    assert (refused.code, refused.param) == ("invalid_body", "messages")


def test_g22_unknown_fields_reach_the_engine_byte_for_byte() -> None:
    kept = (
        b'"chat_template_kwargs" : {"enable_thinking":false ,"x":[1.50,1e2,-0,"\\u00e9\\/\xc3\xa9"]},\n'
        b'\t"logit_bias":{"50256":-100.0}, "seed":18446744073709551615,"stop":"data: \\n[DONE]","model2":"m"'
    )
    bodies = (b"{" + kept + b"}", b'{"model":"other",' + kept + b" }\n", b"{" + kept + b',"model":null}')
    for body in bodies:
        assert kept in sent(body)
        assert json.loads(sent(body)) == {**json.loads(body), "model": ALIAS}


@given(
    st.dictionaries(
        st.text(max_size=8),
        st.recursive(
            st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.text(max_size=8),
            lambda inner: (
                st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
            ),
            max_leaves=8,
        ),
        max_size=5,
    ),
    st.none() | st.text(max_size=10),
    st.none() | st.booleans(),
)
def test_g22_whatever_a_client_sends_arrives_with_the_alias_in_it(
    others: dict[str, Any], model: str | None, stream: bool | None
) -> None:
    body = {**others, "model": model, "stream": stream}
    data = json.dumps(body).encode()
    assert json.loads(sent(data)) == {**body, "model": ALIAS}
    assert (read(data).model, read(data).stream) == (model, bool(stream))


@pytest.mark.parametrize("stream", ["true", "false", "null"])
def test_g21_stream_is_a_boolean_or_null(stream: str) -> None:
    assert read(b'{"stream":%b}' % stream.encode()).stream == (stream == "true")


@pytest.mark.parametrize("stream", ['"false"', '"true"', "0", "1", "1.0", "0.0", "[]", "{}", '""'])
def test_g21_anything_else_is_refused(stream: str) -> None:
    refused = refusal(b'{"stream":%b}' % stream.encode())
    assert (refused.code, refused.param) == ("invalid_body", "stream")


@pytest.mark.parametrize("model", ["1", "true", "[]", "{}", '["assistant"]'])
def test_a_model_is_named_by_a_string(model: str) -> None:
    refused = refusal(b'{"model":%b}' % model.encode())
    assert (refused.code, refused.param) == ("invalid_body", "model")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b'{"messages":[{"content":"\\ud83d"}]}', "messages[0].content"),
        (b'{"temperature":NaN}', "byte 15"),
        (b'{"model":"a","model":"b"}', "model"),
        (b'{"tools":[{"x":{"name":1,"name":2}}]}', "name"),
        (b'{"a":' + b"[" * 500 + b"]" * 500 + b"}", "byte 68"),
        (b'{"seed":' + b"1" * 400 + b"}", "byte 8"),
        (b'{"temperature":1e999}', "1e999"),
        (b'{"a":1', "character 6"),
        (b"\xff", "byte 0"),
    ],
)
def test_g20_what_readers_disagree_on_is_refused_by_its_place(body: bytes, param: str) -> None:
    refused = refusal(body)
    assert (refused.code, refused.param) == ("invalid_json", param)
    assert param in refused.message
    json.dumps(http_api.error_document(refused), ensure_ascii=False).encode()


def test_a_body_is_an_object_within_its_bounds() -> None:
    assert refusal(b"[]").code == "invalid_json"
    many = refusal(b'{"a":[1,2]}', values_max=3)
    assert "more than 3 values" in many.message
    assert many.param == "byte 8"
    assert read(b'{"a":[1,2]}', values_max=4)
    assert "deeper than 1" in refusal(b'{"a":[1,2]}', depth_max=1).message


def test_each_path_needs_one_capability() -> None:
    assert openai.CAPABILITY == {
        "/v1/chat/completions": "chat",
        "/v1/completions": "completions",
        "/v1/embeddings": "embeddings",
        "/v1/rerank": "rerank",
    }


def test_the_list_of_models_has_openais_shape() -> None:
    assert json.loads(openai.model_list([("assistant", 1700000000.9)])) == {
        "object": "list",
        "data": [{"id": "assistant", "object": "model", "created": 1700000000, "owned_by": "ficc"}],
    }


# Engines' errors.

CONTEXT = "request (9000 tokens) exceeds the available context size (4096 tokens), try increasing it"
ENGINES: dict[str, tuple[int, Any, str, str | None]] = {
    # what the engine answered, and the message and param that stay
    "llama.cpp": (
        400,
        {
            "error": {
                "code": 400,
                "message": "Expected 'messages' to be an array",
                "type": "invalid_request_error",
            }
        },
        "Expected 'messages' to be an array",
        None,
    ),
    "llama.cpp, context": (
        400,
        {
            "error": {
                "code": 400,
                "message": CONTEXT,
                "type": "exceed_context_size_error",
                "n_prompt_tokens": 9000,
                "n_ctx": 4096,
            }
        },
        CONTEXT,
        None,
    ),
    "vLLM": (
        400,
        {
            "error": {
                "message": "max_tokens is too large",
                "type": "BadRequestError",
                "param": "max_tokens",
                "code": 400,
            }
        },
        "max_tokens is too large",
        "max_tokens",
    ),
    "vLLM, flat": (
        400,
        {"object": "error", "message": "Bad.", "type": "BadRequestError", "param": None, "code": 400},
        "Bad.",
        None,
    ),
    "vLLM, 401": (401, {"error": "Unauthorized"}, "Unauthorized", None),
    "Ollama": (
        400,
        {"error": {"message": "invalid options", "type": "api_error", "param": None, "code": None}},
        "invalid options",
        None,
    ),
    "Ollama, native": (400, {"error": "invalid model name"}, "invalid model name", None),
}


@pytest.mark.parametrize("engine", ENGINES)
def test_g19_an_engines_refusal_keeps_its_words_in_our_shape(engine: str) -> None:
    status, answer, message, param = ENGINES[engine]
    assert engine_error(status, json.dumps(answer).encode()) == (
        400,
        {
            "error": {
                "code": "invalid_body",
                "message": message,
                "type": "invalid_request_error",
                "param": param,
            }
        },
    )


SHAPELESS: list[bytes] = [
    b"",
    b"<html><body><h1>502 Bad Gateway</h1></body></html>",
    b"Internal Server Error",
    b'{"detail":"Not Found"}',
    b'{"error":{"message":5}}',
    b'{"error":null}',
    b'{"error":["x"]}',
    b"[]",
    b"5",
    b'"text"',
    b'{"error":{"message":"cut o',
    b"\xff\xfe\x00",
    b"[" * 60_000,
    b'{"error":{"message":"\\ud83d"}}',
    b'{"error":"a","error":"b"}',
]


@pytest.mark.parametrize("body", SHAPELESS, ids=lambda body: repr(body[:24]))
def test_g19_what_has_no_shape_is_summed_up(body: bytes) -> None:
    status, document = engine_error(400, body)
    assert (status, document["error"]["code"]) == (400, "invalid_body")
    assert document["error"]["message"] == "The engine refused the request with status 400."
    status, document = engine_error(500, body)
    assert (status, document["error"]["code"]) == (502, "engine_error")
    assert document["error"]["message"] == "The engine answered with status 500."


@pytest.mark.parametrize(
    ("answered", "status", "code"),
    [
        (400, 400, "invalid_body"),
        (401, 400, "invalid_body"),
        (403, 400, "invalid_body"),
        (404, 404, "not_found"),
        (408, 400, "invalid_body"),
        (409, 400, "invalid_body"),
        (413, 413, "too_large"),
        (415, 400, "invalid_body"),
        (422, 422, "invalid_request"),
        (429, 429, "engine_busy"),
        (500, 502, "engine_error"),
        (501, 502, "engine_error"),
        (503, 502, "engine_error"),
        (301, 502, "engine_error"),
    ],
)
def test_g19_every_status_has_a_code_that_is_answered_with_it(answered: int, status: int, code: str) -> None:
    """A client sees one meaning: the code, its status and its type are those of the table."""
    got, document = engine_error(answered, b'{"error":{"message":"m","type":"weird","param":"p"}}')
    error = document["error"]
    assert (got, error["code"], error["message"]) == (status, code, "m")
    assert (http_api.CODES[code].status, http_api.CODES[code].type) == (got, error["type"])
    assert error["param"] == ("p" if answered >= 400 and answered < 500 else None)


@given(st.integers(100, 599), st.binary(max_size=60))
def test_g19_whatever_an_engine_answers_becomes_an_error_of_ours(status: int, body: bytes) -> None:
    got, document = engine_error(status, body)
    assert 400 <= got < 600
    assert set(document) == {"error"}
    assert set(document["error"]) == {"code", "message", "type", "param"}
    assert http_api.json_bytes(document)


@pytest.mark.parametrize("status", [429, 500])
def test_g28_what_an_engine_saw_is_not_to_be_sent_twice(status: int) -> None:
    _, document = engine_error(status, b"")
    refused = Refused(document["error"]["code"], document["error"]["message"])
    assert (b"x-should-retry", b"false") in http_api.error_headers(refused)


LLAMA_500 = [
    "input (2003 tokens) is too large to process. increase the physical batch size (current batch size: 512)",
    "input (9000 tokens) is larger than the max context size (4096 tokens). skipping",
    "image input is not supported - hint: if this is unexpected, you may need to provide the mmproj",
    "audio input is not supported - hint: if this is unexpected, you may need to provide the mmproj",
]


@pytest.mark.parametrize("message", LLAMA_500)
def test_a_refusal_that_llama_cpp_calls_a_fault_of_its_own_is_the_callers(message: str) -> None:
    answer = {"error": {"code": 500, "message": message, "type": "server_error"}}
    for refused in (
        openai.engine_refusal(500, json.dumps(answer).encode()),
        openai.engine_fault(json.dumps(answer).encode()),
    ):
        assert (refused.code, refused.message) == ("invalid_body", message)


def test_other_words_with_the_status_of_a_fault_stay_a_fault() -> None:
    for message in ("failed to decode the batch", "The image input is not supported", "input is too large"):
        answer = json.dumps({"error": {"code": 500, "message": message}}).encode()
        assert openai.engine_refusal(500, answer).code == "engine_error"


def test_an_engines_words_are_repeated_within_bounds() -> None:
    refused = openai.engine_refusal(
        400, json.dumps({"error": {"message": "m" * 9000, "param": "p" * 9000}}).encode()
    )
    assert refused.message == "m" * openai.MESSAGE_CHARACTERS_MAX
    assert refused.param == "p" * openai.MESSAGE_CHARACTERS_MAX


@pytest.mark.parametrize(
    ("text", "code", "message"),
    [
        (b'{"error":{"message":"m","code":400}}', "invalid_body", "m"),
        (b'{"message":"m","code":429}', "engine_busy", "m"),
        (b'{"message":"m","code":"400"}', "engine_error", "m"),
        (b'{"message":"m","code":true}', "engine_error", "m"),
        (b"out of memory", "engine_error", "The engine reported a fault of its own."),
        (b"", "engine_error", "The engine reported a fault of its own."),
    ],
)
def test_g3_a_fault_inside_a_stream_is_told_in_our_shape(text: bytes, code: str, message: str) -> None:
    refused = openai.engine_fault(text)
    assert (refused.code, refused.message) == (code, message)


# What an engine counted.

LLAMA_CPP_LAST = (
    b'data: {"choices":[{"finish_reason":"length","index":0,"delta":{}}],"object":"chat.completion.chunk",'
    b'"timings":{"cache_n":5,"prompt_n":26,"prompt_ms":35.8,"predicted_n":4,"predicted_ms":2.1}}\n\n'
    b"data: [DONE]\n\n"
)


@pytest.mark.parametrize(
    ("document", "tokens"),
    [
        ({"usage": {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}}, (3, 4)),
        ({"usage": {"prompt_tokens": 3, "total_tokens": 3}}, (3, 0)),
        ({"usage": {"prompt_tokens": 0, "completion_tokens": 0}}, (0, 0)),
        ({"timings": {"prompt_n": 26, "cache_n": 5, "predicted_n": 4}}, (31, 4)),
        ({"timings": {"prompt_n": 26, "predicted_n": 4}}, (26, 4)),
        ({"usage": None, "timings": {"prompt_n": 1, "predicted_n": 2}}, (1, 2)),
        *(({"usage": usage}, None) for usage in (None, {}, [], "7", {"prompt_tokens": True})),
        *(({"usage": {"prompt_tokens": n}}, None) for n in (-1, 1.5, "3", 2**53)),
        ({"timings": {"prompt_n": 1}}, None),
        ([], None),
        (None, None),
    ],
)
def test_what_an_answer_says_of_tokens(document: Any, tokens: tuple[int, int] | None) -> None:
    assert openai.tokens(document) == tokens


@pytest.mark.parametrize(
    ("tail", "tokens"),
    [
        (LLAMA_CPP_LAST, (31, 4)),
        (LLAMA_CPP_LAST.replace(b"\n", b"\r\n"), (31, 4)),
        (b'data: {"usage":{"prompt_tokens":1,"completion_tokens":2},"choices":[]}\n\ndata: [DONE]\n\n', (1, 2)),
        (b'data: {"usage":{"prompt_tokens":1,"completion_tokens":2}}\n\ndata:{"usage":null}\n\n', (1, 2)),
        (b'{"usage":{"prompt_tokens":9,"completion_tokens":9}}\n\ndata: [DONE]\n\n', None),  # cut in front
        (b'data: {"usage":{"prompt_tokens":1,"comp', None),
        (b'data: {"choices":[{"delta":{"content":"\\"usage\\": 7"}}]}\n\n', None),
        (b"", None),
    ],
)  # fmt: skip
def test_what_the_end_of_a_stream_says_of_tokens(tail: bytes, tokens: tuple[int, int] | None) -> None:
    assert openai.tokens_in_stream(tail) == tokens
    assert openai.tokens_in_stream(bytearray(tail)) == tokens


@pytest.mark.parametrize(
    ("part", "tokens"),
    [
        (b'{"model":"a","usage":{"prompt_tokens":9,"total_tokens":9},"data":[{"embedding":[0.1', (9, 0)),
        (b'5]}],"usage": {"prompt_tokens":9,"x":{"y":1},"completion_tokens":2}}', (9, 2)),
        (b'{"text":"\\"usage\\":{\\"prompt_tokens\\":9}"', None),
        (b'{"usage":{"prompt_tokens":9', None),
    ],
)
def test_what_a_part_of_a_large_answer_says_of_tokens(part: bytes, tokens: tuple[int, int] | None) -> None:
    assert openai.tokens_in_document(part) == tokens
