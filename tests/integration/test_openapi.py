"""The OpenAPI document is what is committed, and what the server does: schemathesis holds one against the other."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, settings
from jsonschema_rs import Draft202012Validator
from schemathesis import checks
from schemathesis.specs.openapi import checks as openapi_checks

from ficc.controller.api.app import openapi_document
from support.http import Http
from support.openapi import operations

ROOT = Path(__file__).parents[2]
COMMITTED = ROOT / "docs" / "openapi.json"
EXAMPLES = 8

DOCUMENT = openapi_document()


def test_the_committed_document_is_the_served_one(api: Http) -> None:
    assert Http(api.origin)("GET", "/openapi.json").ok() == json.loads(COMMITTED.read_text())


def test_the_script_renders_what_is_committed() -> None:
    script = [sys.executable, str(ROOT / "scripts" / "openapi.py"), "--check"]
    done = subprocess.run(script, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_every_schema_is_one() -> None:
    for name, schema in DOCUMENT["components"]["schemas"].items():
        Draft202012Validator({**schema, "components": DOCUMENT["components"]})
        assert schema.get("type") == "object", name


def test_every_object_that_is_read_names_all_its_members() -> None:
    for operation in operations():
        schema = operation.body
        if schema is not None:
            assert schema["additionalProperties"] is False, operation


def test_every_route_says_how_it_refuses() -> None:
    for operation in operations():
        responses = operation.document["responses"]
        assert {"4XX", "5XX"} <= set(responses), operation
        assert "422" not in responses, operation  # the framework's own shape, which nobody sends
        assert operation.document["description"], operation


REFUSALS = ["400", "401", "403", "404", "405", "409", "413", "415", "422"]
SCHEMA = schemathesis.openapi.from_dict(
    DOCUMENT,
    config=schemathesis.Config.from_dict(
        {"checks": {"negative_data_rejection": {"expected-statuses": REFUSALS}}}
    ),
)
CHECKS = [
    checks.not_a_server_error,
    openapi_checks.status_code_conformance,
    openapi_checks.content_type_conformance,
    openapi_checks.response_headers_conformance,
    openapi_checks.response_schema_conformance,
    openapi_checks.negative_data_rejection,
    openapi_checks.missing_required_header,
    openapi_checks.unsupported_method,
    openapi_checks.allow_header_conformance,
    openapi_checks.ignored_auth,
    openapi_checks.use_after_free,
]


@pytest.fixture
def examined(api: Http) -> Callable[[Any], None]:
    def examine(case: Any) -> None:
        if case.operation.path == "/api/v1/session" and case.method == "DELETE":
            return  # it would revoke the very token that asks
        headers = {"authorization": f"Bearer {api.token}"}
        response = case.call(base_url=api.origin, headers=headers, timeout=30)
        case.validate_response(response, checks=CHECKS, headers=headers)
        if response.status_code >= 400:
            error = response.json()["error"]
            assert set(error) >= {"code", "message", "type", "param"}

    return examine


@SCHEMA.parametrize()
@settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
def test_the_server_does_what_the_document_says(case: Any, examined: Callable[[Any], None]) -> None:
    examined(case)
