"""The shape of errors, their codes, and the small texts of HTTP."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import ficc
from ficc.domain.errors import Refused
from ficc.protocol import http_api
from ficc.protocol.http_api import CODES

TYPES = {
    "invalid_request_error",
    "authentication_error",
    "permission_error",
    "not_found_error",
    "conflict_error",
    "rate_limit_error",
    "server_error",
}


# Codes.


@pytest.mark.parametrize("code", CODES)
def test_a_code_is_snake_case_with_a_status_and_a_type_that_belong_together(code: str) -> None:
    entry = CODES[code]
    assert code == code.lower()
    assert code.replace("_", "").isalpha()
    assert entry.type in TYPES
    assert entry.summary.endswith(".")
    expected = {
        401: "authentication_error",
        403: "permission_error",
        404: "not_found_error",
        409: "conflict_error",
        429: "rate_limit_error",
    }.get(entry.status, "server_error" if entry.status >= 500 else "invalid_request_error")
    assert entry.type == expected


def refused_codes() -> list[tuple[str, str]]:
    """Every code that the sources refuse with, and where."""
    found = []
    root = Path(ficc.__file__).parent
    for path in sorted(root.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Refused":
                code = node.args[0] if node.args else None
                if isinstance(code, ast.Constant):
                    found.append((str(code.value), f"{path.relative_to(root)}:{node.lineno}"))
    return found


def test_every_code_that_is_refused_with_has_a_status() -> None:
    found = refused_codes()
    assert len(found) > 50
    assert [where for code, where in found if code not in CODES] == []


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("unauthenticated", 401),
        ("denied", 403),
        ("invalid_request", 422),
        ("too_large", 413),
        ("offset_mismatch", 409),
        ("empty_upload", 422),
        ("upload_busy", 429),
        ("revision_conflict", 409),
        ("preview_changed", 409),
        ("service_not_stopped", 409),
        ("inference_unknown_outcome", 409),
        ("attempt_not_released", 409),
        ("model_referenced", 409),
        ("model_busy", 409),
        ("capability_unavailable", 400),
        ("model_not_found", 404),
        ("queue_full", 429),
        ("service_not_ready", 503),
        ("service_draining", 503),
        ("peer_lost", 502),
        ("deadline_exceeded", 504),
        ("fenced", 409),
        ("engine_error", 502),
    ],
)
def test_the_interfaces_own_statuses(code: str, status: int) -> None:
    assert CODES[code].status == status


def test_g28_what_an_engine_may_have_seen_is_not_to_be_retried() -> None:
    seen = {code for code, entry in CODES.items() if entry.engine_may_have_seen_it}
    assert seen == {
        "client_gone",
        "peer_lost",
        "deadline_exceeded",
        "fenced",
        "engine_busy",
        "engine_error",
        "service_stopped",
    }
    for code in CODES:
        headers = dict(http_api.error_headers(Refused(code, ".")))
        assert headers.get(b"x-should-retry") == (b"false" if code in seen else None)


# Bodies.


def test_g19_an_error_is_one_object_of_four_members() -> None:
    refused = Refused("denied", "This needs the scope jobs:execute.", "jobs:execute")
    assert http_api.error_document(refused) == {
        "error": {
            "code": "denied",
            "message": "This needs the scope jobs:execute.",
            "type": "permission_error",
            "param": "jobs:execute",
        }
    }
    assert http_api.status_of(refused) == 403


def test_details_stand_in_the_error_and_the_rest_beside_it() -> None:
    refused = Refused("offset_mismatch", "m", details={"expected": "a"}, beside={"offset": 7})
    document = json.loads(http_api.error_body(refused))
    assert document["error"]["expected"] == "a"
    assert document["error"]["param"] is None
    assert document["offset"] == 7


def test_a_time_to_come_back_is_a_header() -> None:
    assert http_api.error_headers(Refused("queue_full", "m", retry_after_seconds=3)) == [
        (b"retry-after", b"3")
    ]
    assert http_api.error_headers(Refused("queue_full", "m")) == []


def test_json_is_utf_8_without_spaces() -> None:
    assert http_api.json_bytes({"é": [1, None]}) == '{"é":[1,null]}'.encode()


# Times and request ids.


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, None),
        (0, "1970-01-01T00:00:00.000Z"),
        (1700000000.1234, "2023-11-14T22:13:20.123Z"),
        (1709164800, "2024-02-29T00:00:00.000Z"),
        (2**33, "2242-03-16T12:56:32.000Z"),
    ],
)
def test_times_are_rfc_3339_in_utc(seconds: float | None, text: str | None) -> None:
    assert http_api.rfc3339(seconds) == text


@pytest.mark.parametrize("value", [b"a", b"x" * 128, b"~!", b"req-1_2.3:4/5"])
def test_a_clients_request_id_is_kept(value: bytes) -> None:
    assert http_api.usable_request_id(value)


@pytest.mark.parametrize("value", [b"", b"x" * 129, b"a b", b"a\x7f", b"a\n", b"\xc3\xa9", b"\x00"])
def test_another_one_is_replaced(value: bytes) -> None:
    assert not http_api.usable_request_id(value)


@given(st.binary(max_size=140))
def test_a_usable_request_id_is_safe_in_a_header_and_a_log(value: bytes) -> None:
    if http_api.usable_request_id(value):
        text = value.decode("ascii")
        assert text.isprintable()
        assert text.split() == [text]
