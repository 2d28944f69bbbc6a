"""A plain client: one request, one connection, the answer as it came. And callers that tests need."""

from __future__ import annotations

import asyncio
import http.client
import json as jsonlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode, urlsplit

from ficc.controller.store.database import Database, Transaction
from ficc.protocol.http_api import CODES
from support import rows
from support.installation import Installation

PATIENCE_SECONDS = 60.0
Body = bytes | str | Iterable[bytes] | None


@dataclass(frozen=True)
class Answer:
    status: int
    headers: http.client.HTTPMessage
    body: bytes

    @property
    def json(self) -> Any:
        return jsonlib.loads(self.body)

    @property
    def code(self) -> str:
        """The error's code, once this is known to be the one shape of errors, in every respect."""
        assert self.headers["content-type"] == "application/json", self.body
        error = self.json["error"]
        assert set(error) >= {"code", "message", "type", "param"}, error
        assert isinstance(error["message"], str)
        assert error["message"], error
        assert error["param"] is None or isinstance(error["param"], str)
        known = CODES[error["code"]]
        assert (self.status, error["type"]) == (known.status, known.type), error
        assert "detail" not in self.json
        return str(error["code"])

    @property
    def param(self) -> str | None:
        found: str | None = self.json["error"]["param"]
        return found

    def ok(self, status: int = 200) -> Any:
        """The document of an answer that has this status."""
        assert self.status == status, (self.status, self.body)
        return self.json


@dataclass(frozen=True)
class Http:
    """Calls the management API as somebody. Every answer is checked for what all have in common."""

    origin: str
    token: str | None = None

    def __call__(
        self,
        method: str,
        path: str,
        json: Any = None,
        *,
        body: Body = None,
        headers: Mapping[str, str] | None = None,
        **query: str,
    ) -> Answer:
        sent = {} if self.token is None else {"authorization": f"Bearer {self.token}"}
        if json is not None:
            body = jsonlib.dumps(json)
            sent["content-type"] = "application/json"
        sent |= {name.lower(): value for name, value in (headers or {}).items()}
        target = "/api/v1" + path + (f"?{urlencode(query)}" if query else "")
        where = urlsplit(self.origin)
        connection = http.client.HTTPConnection(str(where.hostname), where.port, timeout=PATIENCE_SECONDS)
        try:
            connection.request(method, target, body, sent)
            response = connection.getresponse()
            answer = Answer(response.status, response.headers, response.read())
        finally:
            connection.close()
        assert answer.headers["x-request-id"]
        if answer.status >= 400:
            assert answer.code
        return answer

    def octets(
        self, model_id: str, index: int, offset: int, body: Body, headers: Mapping[str, str] | None = None
    ) -> Answer:
        """An octet-stream upload; an iterable body goes in chunks."""
        sent = {"content-type": "application/octet-stream", **(headers or {})}
        path = f"/models/{model_id}/files/{index}/bytes"
        return self("POST", path, body=body, headers=sent, offset=str(offset))


def http_of(installation: Installation, token: str | None = None) -> Http:
    """Its owner's, or a token's."""
    return Http(installation.origin, installation.token if token is None else token)


def with_rows(installation: Installation, work: Callable[[Transaction], Any]) -> Any:
    """Write rows into a running installation's database, as another controller would."""
    database = Database(database_url_of(installation))
    try:
        return asyncio.run(database.write(work))
    finally:
        database.close()


def database_url_of(installation: Installation) -> str:
    file = installation.directory / "controller" / "ficc.sqlite"
    return installation.environment.get("FICC_DATABASE_URL") or f"sqlite:///{file}"


def projects_of(installation: Installation, *names: str) -> dict[str, Http]:
    """Further projects by name, each with the token of its member with every scope."""

    def work(tx: Transaction) -> dict[str, str]:
        made = {}
        for name in names:
            project_id = rows.project(tx, name)
            made[name] = rows.token(tx, project_id, rows.member(tx, project_id, f"member of {name}"))
        return made

    secrets = with_rows(installation, work)
    return {name: known(installation, secret) for name, secret in secrets.items()}


def caller_with(installation: Installation, *scopes: str, service_id: str | None = None) -> Http:
    """A token of the owner with these scopes only."""
    owner = http_of(installation)("GET", "/session").ok()
    project_id, subject_id = owner["project"]["id"], owner["principal"]["id"]
    secret = with_rows(
        installation, lambda tx: rows.token(tx, project_id, subject_id, scopes, service_id=service_id)
    )
    return known(installation, secret)


def known(installation: Installation, token: str) -> Http:
    """The caller of a token that was written into the database, once the controller has heard of it: at its
    next change of who may do what, which is made here."""
    owner, found = http_of(installation), http_of(installation, token)
    made = owner("POST", "/tokens", {"label": "for a moment", "scopes": ["audit:read"]}).ok(201)
    owner("DELETE", f"/tokens/{made['id']}").ok()
    installation.until(lambda: found("GET", "/session").status != 401, "the token is known")
    return found
