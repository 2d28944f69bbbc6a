"""Who may call what: every route of the table with its scopes and without each of them, projects, browsers."""

from __future__ import annotations

import http.client
import http.cookies
import json
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from contract.scripted import ScriptedInstallation
from contract.table import OCTETS, TABLE, Row
from ficc.domain.access import SCOPES
from support.http import Answer, Http, projects_of
from support.rows import manifest_of, random_bytes

pytestmark = pytest.mark.timeout(240)


class Scene:
    """Makes what a row's request needs: a fresh model and specification, and one service in the right state."""

    def __init__(self, installation: ScriptedInstallation) -> None:
        self.installation = installation
        self.service_id = ""

    def request(self, row: Row, caller: Http) -> Answer:
        """The row's request, in a state in which it can succeed."""
        service_id = "" if row.service is None else self._service(row.service)
        return self._send(row, caller, service_id)

    def elsewhere(self, row: Row, caller: Http) -> Answer:
        """The row's request by somebody who needs no particular state to be refused."""
        return self._send(row, caller, self.some_service() if row.service else "")

    def _send(self, row: Row, caller: Http, service_id: str) -> Answer:
        path, _, query = row.path.partition("?")
        path = path.format(model=self.model() if "{model}" in path else "", service=service_id)
        named: dict[str, Any] = dict([query.split("=")]) if query else {}
        body = self._filled(row.body, service_id)
        if isinstance(body, bytes):
            return caller(row.method, path, body=body, headers={"content-type": OCTETS}, **named)
        return caller(row.method, path, body, **named)

    def _filled(self, template: Any, service_id: str) -> Any:
        match template:
            case "{manifest}":
                return manifest_of(random_bytes(8), name=f"model {random_bytes(6).hex()}")
            case "{spec}":
                return self.installation.spec(f"a{random_bytes(6).hex()}")
            case "{revision}":
                return self.installation.record(service_id)["revision"]
            case dict():
                return {name: self._filled(value, service_id) for name, value in template.items()}
            case _:
                return template

    def model(self) -> str:
        """A new one, whose bytes are missing and begin with those that the table's uploads bring."""
        name = f"model {random_bytes(6).hex()}"
        made = self.installation.http("POST", "/models", manifest_of(b"a" + random_bytes(8), name=name))
        return str(made.ok(201)["id"])

    def some_service(self) -> str:
        """One in whatever state: the last one, or another if that was removed."""
        if self.installation.http("GET", f"/inference/{self.service_id or '0' * 26}").status != 200:
            self.service_id = self.installation.service(f"scene-{random_bytes(4).hex()}")["id"]
        return self.service_id

    def _service(self, state: str) -> str:
        service_id = self.some_service()
        if state == "stopped":
            self.installation.stopped(service_id)
        elif self.installation.record(service_id)["state"] != "ready":
            if self.installation.record(service_id)["desired"] == "stopped":
                self.installation.stopped(service_id)
                self.installation.control(service_id, "start").ok(202)
            self.installation.settled(service_id, "ready")
        return service_id

    def clear(self) -> None:
        for service in self.installation.http("GET", "/inference").ok()["items"]:
            self.installation.remove(service["id"])


@pytest.fixture(scope="module")
def scene(scripted: ScriptedInstallation) -> Iterator[Scene]:
    made = Scene(scripted)
    yield made
    made.clear()


@pytest.fixture(scope="module")
def lacking(scripted: ScriptedInstallation) -> dict[str, Http]:
    """For each scope a caller with every other one."""
    return {scope: scripted.caller(*(s for s in SCOPES if s != scope)) for scope in SCOPES}


@pytest.fixture(scope="module")
def stranger(scripted: ScriptedInstallation) -> Http:
    """A member of another project, with every scope there."""
    return projects_of(scripted, "elsewhere")["elsewhere"]


def _case(row: Row) -> Any:
    return pytest.param(row, id=row.name, marks=pytest.mark.contract("C-H5", *row.held))


@pytest.mark.parametrize("row", [_case(row) for row in TABLE])
def test_a_route_takes_exactly_its_scopes(scene: Scene, row: Row) -> None:
    caller = scene.installation.caller(*row.scopes)
    assert scene.request(row, caller).status == row.status


@pytest.mark.parametrize("row", [_case(row) for row in TABLE])
def test_a_route_is_denied_without_any_one_of_them(scene: Scene, lacking: dict[str, Http], row: Row) -> None:
    for scope in row.scopes:
        answer = scene.elsewhere(row, lacking[scope])
        assert (answer.status, answer.code, answer.param) == (403, "denied", scope)


# Credentials.


@pytest.mark.contract("C-H3")
@pytest.mark.parametrize("row", [pytest.param(row, id=row.name) for row in TABLE])
def test_a_route_takes_no_caller_without_a_credential(scene: Scene, row: Row) -> None:
    for caller in (Http(scene.installation.origin), Http(scene.installation.origin, "ficc_unknown")):
        answer = scene.elsewhere(row, caller)
        assert (answer.status, answer.code) == (401, "unauthenticated")
        assert answer.headers["www-authenticate"] == "Bearer"


@pytest.mark.contract("C-H1")
def test_every_management_route_is_under_api_v1(scripted: ScriptedInstallation) -> None:
    document = scripted.http("GET", "/openapi.json").ok()
    assert {path[: len("/api/v1/")] for path in document["paths"]} == {"/api/v1/"}
    known = {(method.upper(), path) for path, methods in document["paths"].items() for method in methods}
    for row in TABLE:
        if row.is_management:
            path = row.path.partition("?")[0].format(model="{model_id}", service="{service_id}")
            path = path.replace("/files/0", "/files/{index}")
            for action in ("start", "drain", "stop", "remove"):
                path = path.replace(f"/control/{action}", "/control/{action}")
            assert (row.method, f"/api/v1{path}") in known


@pytest.mark.contract("C-H1")
@pytest.mark.parametrize("path", ["/models", "/inference", "/api/models", "/api/v2/models", "/v1/models"])
def test_there_is_nothing_of_it_elsewhere(scripted: ScriptedInstallation, path: str) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", scripted.port)
    with closing(connection):
        connection.request("GET", path, headers={"authorization": f"Bearer {scripted.token}"})
        assert connection.getresponse().status == 404


# Projects.


@pytest.mark.contract("C-H4")
@pytest.mark.parametrize("row", [pytest.param(row, id=row.name) for row in TABLE if "{" in row.path])
def test_what_belongs_to_another_project_is_not_found(scene: Scene, stranger: Http, row: Row) -> None:
    answer = scene.elsewhere(row, stranger)
    assert (answer.status, answer.code) == (404, "not_found")


@pytest.mark.contract("C-H4")
@pytest.mark.parametrize("path", ["/models", "/inference"])
def test_what_belongs_to_another_project_is_not_listed(scene: Scene, stranger: Http, path: str) -> None:
    scene.some_service()
    assert scene.installation.http("GET", path).ok()["items"]
    assert stranger("GET", path).ok()["items"] == []


@pytest.mark.contract("C-H4")
@pytest.mark.parametrize("path", ["/inference/preview", "/inference"])
def test_another_projects_model_serves_nothing_here(scene: Scene, stranger: Http, path: str) -> None:
    answer = stranger("POST", path, scene.installation.spec("borrowed"))
    assert (answer.status, answer.code, answer.param) == (404, "not_found", "model_id")


# Browsers.


class Browser:
    """A signed-in browser's calls: the cookie, and whatever headers a test wants."""

    def __init__(self, installation: ScriptedInstallation) -> None:
        self.origin = installation.origin
        code = installation.http("POST", "/session/codes").ok(201)["code"]
        answer = Http(self.origin)("POST", "/session", {"code": code}, headers={"origin": self.origin})
        self.csrf = answer.ok()["csrf"]
        self.cookies = http.cookies.SimpleCookie(answer.headers["set-cookie"])

    @property
    def cookie(self) -> http.cookies.Morsel[str]:
        (morsel,) = self.cookies.values()
        return morsel

    def __call__(self, method: str, path: str, json: Any = None, **headers: str) -> Answer:
        sent = {"cookie": f"{self.cookie.key}={self.cookie.value}", **headers}
        return Http(self.origin)(method, path, json, headers=sent)

    @property
    def proof(self) -> dict[str, str]:
        """What a page of ours sends with a mutation."""
        return {"origin": self.origin, "x-csrf-token": self.csrf}


@pytest.fixture(scope="module")
def browser(scripted: ScriptedInstallation) -> Browser:
    return Browser(scripted)


@pytest.mark.contract("C-H2")
def test_a_browser_reads_with_its_session(browser: Browser) -> None:
    assert browser("GET", "/models").status == 200
    assert browser("GET", "/inference").status == 200
    assert browser.cookie["httponly"]
    assert browser.cookie["samesite"].lower() == "strict"


@pytest.mark.contract("C-H2")
def test_a_browser_changes_something_with_its_csrf_token(browser: Browser) -> None:
    manifest = manifest_of(random_bytes(8), name="of a browser")
    assert browser("POST", "/models", manifest, **browser.proof).status == 201


@pytest.mark.contract("C-H2")
@pytest.mark.parametrize(
    "wrong", [{"x-csrf-token": ""}, {"x-csrf-token": "0" * 64}, {"origin": "http://evil.example"}]
)
@pytest.mark.parametrize(
    "row", [pytest.param(row, id=row.name) for row in TABLE if row.is_management and row.is_mutation]
)
def test_no_mutation_goes_without_it(scene: Scene, browser: Browser, row: Row, wrong: dict[str, str]) -> None:
    headers = {name: value for name, value in {**browser.proof, **wrong}.items() if value}
    path = row.path.partition("?")[0].format(model="0" * 26, service="0" * 26)
    answer = browser(row.method, path, {}, **headers)
    assert (answer.status, answer.code) == (403, "csrf_failed")


@pytest.mark.contract("C-H2")
def test_a_session_ends_when_the_browser_signs_out(scripted: ScriptedInstallation) -> None:
    browser = Browser(scripted)
    assert browser("DELETE", "/session", **browser.proof).status == 200
    assert browser("GET", "/models").status == 401


@pytest.mark.contract("C-H3")
def test_a_bearer_token_needs_no_csrf_token(scripted: ScriptedInstallation) -> None:
    manifest = manifest_of(random_bytes(8), name="of a client")
    assert scripted.http("POST", "/models", manifest).status == 201
    assert json.loads(scripted.http("GET", "/session").body)["csrf"] is None
