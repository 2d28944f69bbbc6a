"""How strictly the management API reads and whom it answers: every rule on every route of its OpenAPI
document, so that a new route is held to them without a test of its own (G19, G20). Nothing refused leaves a
trace."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import jsonschema_rs
import pytest

from ficc.controller.api.strict import BODY_BYTES_MAX, UPLOAD_JSON_BYTES_MAX
from ficc.controller.store import attempts, services, workloads
from ficc.controller.store.database import Transaction
from ficc.domain import attempt, service, workload
from ficc.domain.access import SCOPES
from ficc.identifiers import new_id
from support import rows
from support.http import Answer, Http, caller_with, database_url_of, http_of, projects_of, with_rows
from support.installation import Installation
from support.openapi import Operation, example, operations, places, resolved

ALL = operations()
WITH_CALLER = [one for one in ALL if one.needs_caller]
WITH_BODY = [one for one in ALL if one.body is not None]
OPEN = {"GET /api/v1/health", "POST /api/v1/session"}
"""What anybody may ask."""
UNSCOPED = {"GET /api/v1/session", "DELETE /api/v1/session", "GET /api/v1/projects"}
"""What every caller may ask, about itself."""

each = pytest.mark.parametrize("operation", ALL, ids=str)
each_with_caller = pytest.mark.parametrize("operation", WITH_CALLER, ids=str)
each_with_body = pytest.mark.parametrize("operation", WITH_BODY, ids=str)


class World:
    """An installation with an object of each kind in its owner's project, and callers of every sort."""

    def __init__(self, installation: Installation) -> None:
        self.installation = installation
        self.owner = http_of(installation)
        model = self.owner("POST", "/models", rows.manifest_of(b"weights")).ok(201)
        project_id = self.owner("GET", "/session").ok()["project"]["id"]
        token = self.owner("POST", "/tokens", {"label": "t", "scopes": ["audit:read"]}).ok(201)
        service_id = with_rows(installation, lambda tx: self._service(tx, project_id, model["id"]))
        workload_id = with_rows(installation, lambda tx: self._ended_job(tx, project_id))
        self.objects = {
            "model_id": model["id"],
            "service_id": service_id,
            "token_id": token["id"],
            "workload_id": workload_id,
        }
        """Path parameters that name an object of a project."""
        self.values = {**self.objects, "node_id": new_id(), "index": "0", "action": "stop"}
        self.without_scopes = caller_with(installation)
        self.of_service = caller_with(installation, "inference:invoke", service_id=service_id)
        self.other = projects_of(installation, "other")["other"]
        self.url = database_url_of(installation)
        self.rows = rows.everything(self.url)

    def _service(self, tx: Transaction, project_id: str, model_id: str) -> str:
        spec = {"alias": "a", "deadline_seconds": 60, "placements": []}
        record = service.Record(service.State.STOPPED, service.Desired.STOPPED, 1, 1)
        row = services.Service(new_id(), project_id, "a", model_id, record, spec, None, 1.0, 1.0)
        services.add(tx, row)
        return row.id

    def _ended_job(self, tx: Transaction, project_id: str) -> str:
        """One that no reconciler does anything about."""
        row = rows.job(tx, project_id)
        (one,) = attempts.of_workloads(tx.connection, [row.id])[row.id]
        gone = attempt.Record(attempt.State.RELEASED, False, attempt.Outcome.CANCELLED, workload.CANCELLED)
        attempts.put(tx, one, replace(one, record=gone))
        ended = workload.advance(row.record, workload.End(attempt.Outcome.CANCELLED, workload.CANCELLED))
        workloads.put_job(tx, row, replace(row, record=ended, revision=ended.revision))
        return row.id

    def send(self, operation: Operation, caller: Http, **changes: Any) -> Answer:
        """A request in order, but for the changes: `values` of the path, `document` or `body`, `headers`,
        `query`."""
        values = self.values | changes.pop("values", {})
        for name in operation.in_path:
            assert name in values, f"say in World.values what {{{name}}} is"
        query = operation.needed_query() | changes.pop("query", {})
        body, headers = changes.pop("body", None), changes.pop("headers", {})
        if operation.body is not None:
            document = changes.pop("document", None)
            if body is None:
                body = json.dumps(example(operation.body) if document is None else document)
            headers = {"content-type": "application/json", **headers}
        elif "requestBody" in operation.document:
            body, headers = b"x", {"content-type": "application/octet-stream", **headers}
        assert not changes, changes
        return caller(operation.method, operation.target(values), body=body, headers=headers, **query)


@pytest.fixture(scope="module")
def world(controllers: Callable[..., Installation]) -> World:
    return World(controllers("sqlite"))


@pytest.fixture(autouse=True)
def nothing_was_written(world: World) -> Iterator[None]:
    yield
    assert rows.everything(world.url) == world.rows


# Who asks.


def test_what_is_open_to_anybody_and_to_every_caller_is_known() -> None:
    assert {str(one) for one in ALL if not one.needs_caller} == OPEN
    assert {str(one) for one in WITH_CALLER if not one.names_scopes} == UNSCOPED


@each_with_caller
def test_without_a_credential_that_holds_nobody_is_answered(world: World, operation: Operation) -> None:
    nobody, unknown = Http(world.owner.origin), Http(world.owner.origin, "ficc_" + "x" * 43)
    answers = [world.send(operation, nobody), world.send(operation, unknown)]
    for header in ("Basic dTpw", "Bearer", "Bearer ", "bearer\t", str(world.owner.token)):
        answers.append(world.send(operation, nobody, headers={"authorization": header}))
    answers.append(world.send(operation, nobody, headers={"cookie": f"ficc_session={world.owner.token}"}))
    # Who is not known does not learn what is there, nor what is wrong with the rest of the request.
    answers.append(
        world.send(operation, nobody, values=dict.fromkeys(world.objects, new_id()), query={"x": "y"})
    )
    for answer in answers[:-2] + answers[-1:]:
        assert (answer.status, answer.code) == (401, "unauthenticated")
        assert answer.headers["www-authenticate"] == "Bearer"
    assert answers[-2].code == "unauthenticated" or answers[-2].code == "csrf_failed"


@each_with_caller
def test_a_service_token_can_ask_nothing_here(world: World, operation: Operation) -> None:
    assert world.send(operation, world.of_service).code == "denied"


@pytest.mark.parametrize("operation", [one for one in WITH_CALLER if one.names_scopes], ids=str)
def test_the_missing_scope_is_named(world: World, operation: Operation) -> None:
    answer = world.send(operation, world.without_scopes)
    assert (answer.status, answer.code) == (403, "denied")
    assert answer.param in SCOPES
    assert answer.param in answer.json["error"]["message"]


@pytest.mark.parametrize(
    "operation",
    [one for one in WITH_CALLER if {"model_id", "service_id", "token_id", "workload_id"} & set(one.in_path)],
    ids=str,
)
def test_an_object_of_another_project_is_not_there(world: World, operation: Operation) -> None:
    theirs = world.send(operation, world.other)
    assert (theirs.status, theirs.code) == (404, "not_found")
    absent = {name: new_id() for name in world.objects}
    nowhere = world.send(operation, world.other, values=absent)
    assert nowhere.code == "not_found"

    def message(answer: Answer, values: dict[str, str]) -> str:
        text = str(answer.json["error"]["message"])
        for value in values.values():
            text = text.replace(value, "ID")
        return text

    assert message(theirs, world.objects) == message(nowhere, absent)


@pytest.mark.parametrize("operation", [one for one in ALL if one.in_path], ids=str)
def test_what_is_no_id_is_not_found(world: World, operation: Operation) -> None:
    for name in set(operation.in_path) - {"index", "action"}:
        for text in (
            "x",
            "0" * 25,
            "0" * 27,
            "8" + "0" * 25,
            "%00",
            "..%2f",
            "%ff",
            "I" * 26,
            "é" * 26,
            "%20",
        ):
            escaped = text if "%" in text else text.encode().decode("latin-1")
            if not escaped.isascii():
                continue
            answer = world.send(operation, world.owner, values={name: escaped})
            assert answer.code == "not_found", text


# The query.


@each
def test_a_query_parameter_that_is_not_known_or_stands_twice_is_refused(
    world: World, operation: Operation
) -> None:
    answer = world.send(operation, world.owner, query={"colour": "red"})
    assert (answer.code, answer.param) == ("invalid_request", "colour")
    for name in operation.query:
        twice = f"{operation.target(world.values)}?{name}=1&{name}=1"
        kind = "application/json" if operation.body is not None else "application/octet-stream"
        answer = world.owner(operation.method, twice, body=b"{}", headers={"content-type": kind})
        assert (answer.code, answer.param) == ("invalid_request", name)


# The body.


@each_with_body
def test_a_member_that_is_not_known_is_named_wherever_it_stands(world: World, operation: Operation) -> None:
    assert operation.body is not None
    whole = example(operation.body, full=True)
    maps = {name for name, one in operation.body["properties"].items() if one.get("additionalProperties")}
    for at, _ in list(places(whole)):
        if at in maps:
            continue  # any name is one of its members
        changed = copy.deepcopy(whole)
        dict(places(changed))[at]["colour"] = "red"
        answer = world.send(operation, world.owner, document=changed)
        assert (answer.code, answer.param) == ("invalid_request", f"{at}.colour" if at else "colour")


@each_with_body
def test_a_member_of_another_type_is_named(world: World, operation: Operation) -> None:
    assert operation.body is not None
    whole = example(operation.body, full=True)
    tried = 0
    for name, schema in operation.body["properties"].items():
        validator = jsonschema_rs.validator_for(resolved(schema))
        for value in (None, True, 7, -7, 7.5, 2**53, "", "x", "1", [], [[]], {}, {"x": 1}):
            if validator.is_valid(value):
                continue
            answer = world.send(operation, world.owner, document={**whole, name: value})
            assert answer.code == "invalid_request", (name, value)
            assert str(answer.param).startswith(name), (name, value, answer.param)
            tried += 1
    assert tried > 3


@each_with_body
def test_a_member_that_is_missing_is_named(world: World, operation: Operation) -> None:
    assert operation.body is not None
    for name in operation.body.get("required", ()):
        document = example(operation.body)
        del document[name]
        answer = world.send(operation, world.owner, document=document)
        assert (answer.code, answer.param) == ("invalid_request", name)


def broken(text: str) -> dict[str, bytes]:
    """Bodies that are no JSON as RFC 8259 has it, from one that is."""
    name = next(iter(json.loads(text)))
    inside = text[1:]
    return {
        "empty": b"",
        "cut off": text[:-1].encode(),
        "followed by something": text.encode() + b" x",
        "two values": text.encode() * 2,
        "a comma too many": (text[:-1] + ",}").encode(),
        "single quotes": b"{'a': 1}",
        "a member twice": f'{{"{name}": 1, {inside}'.encode(),
        "a member twice inside": f'{{"a": {{"b": 1, "b": 1}}, {inside}'.encode(),
        "NaN": f'{{"a": NaN, {inside}'.encode(),
        "Infinity": f'{{"a": -Infinity, {inside}'.encode(),
        "a number that nobody can hold": f'{{"a": 1e999, {inside}'.encode(),
        "an integer of 400 digits": f'{{"a": {"7" * 400}, {inside}'.encode(),
        "half a surrogate pair": f'{{"a": "\\ud83d", {inside}'.encode(),
        "not UTF-8": b'{"a": "\xff", ' + inside.encode(),
        "UTF-16": text.encode("utf-16"),
        "a byte order mark": b"\xef\xbb\xbf" + text.encode(),
        "a control character": f'{{"a": "\x00", {inside}'.encode(),
        "nested 3000 deep": f'{{"a": {"[" * 3000}{"]" * 3000}, {inside}'.encode(),
        "no end of nesting": b"[" * 100_000,
    }


@each_with_body
def test_a_body_that_is_no_strict_json_is_refused(world: World, operation: Operation) -> None:
    assert operation.body is not None
    document = example(operation.body) or example(operation.body, full=True)
    for what, body in broken(json.dumps(document)).items():
        answer = world.send(operation, world.owner, body=body)
        assert (answer.status, answer.code) == (400, "invalid_json"), what
        assert len(answer.body) < 2000, what


@each_with_body
def test_a_body_that_is_no_object_is_refused(world: World, operation: Operation) -> None:
    for body in (b"[]", b"null", b'"x"', b"7", b"[{}]"):
        assert world.send(operation, world.owner, body=body).code == "invalid_request", body


@each_with_body
def test_a_body_over_the_limit_is_refused_whether_it_says_so_or_not(
    world: World, operation: Operation
) -> None:
    assert operation.body is not None
    upload = operation.path.endswith("/files/{index}")
    limit = UPLOAD_JSON_BYTES_MAX if upload else BODY_BYTES_MAX
    body = json.dumps(example(operation.body)).encode()
    body = body[:1] + b" " * (limit + 1 - len(body)) + body[1:]
    for sent in (body, iter([body[:1000], body[1000:]])):
        answer = world.send(operation, world.owner, body=sent)
        assert (answer.status, answer.code) == (413, "too_large")


@each_with_body
def test_a_body_of_another_content_type_is_refused(world: World, operation: Operation) -> None:
    for kind in (
        "text/plain",
        "application/x-www-form-urlencoded",
        "application/jsonp",
        "multipart/form-data",
        "",
    ):
        answer = world.send(operation, world.owner, headers={"content-type": kind})
        assert (answer.code, answer.param) == ("unsupported_media_type", "content-type")


# Routes.


@pytest.mark.parametrize("path", sorted({one.path for one in ALL}))
def test_other_methods_are_told_which_there_are_and_other_paths_that_there_is_nothing(
    world: World, path: str
) -> None:
    target = next(one for one in ALL if one.path == path).target(world.values)
    here = {one.method for one in ALL if one.takes(target)}
    for method in {"GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"} - here:
        answer = world.owner(method, target, body=b"")
        assert (answer.status, answer.code) == (405, "method_not_allowed"), method
        assert set(answer.headers["allow"].split(", ")) == {one.method for one in ALL if one.path == path}
    for other in (target + "/", target + "/nothing", target + ";x", "/" + target):
        answer = world.owner("GET", other)
        assert answer.code in ("not_found", "method_not_allowed")
        assert "location" not in answer.headers


def test_there_is_nothing_beside_the_routes(world: World) -> None:
    for path in ("", "/", "/nothing", "/openapi.json/", "/docs", "/../v1/models", "/models/../models"):
        for method in ("GET", "POST", "DELETE"):
            assert world.owner(method, path, body=b"").code == "not_found"


def test_the_document_lists_every_scope_by_its_name() -> None:
    described = " ".join(one.document["description"] for one in ALL)
    for scope in ("models:read", "models:manage", "tokens:manage", "contributors:read", "inference:manage"):
        assert scope in described


def test_an_authority_of_the_other_project_is_really_one(world: World) -> None:
    """The answers above are not found because of the project, not because the caller may nothing."""
    assert world.other("GET", "/models").ok()["items"] == []
    assert set(world.other("GET", "/session").ok()["scopes"]) == set(SCOPES)
