"""A project of its own in a running installation, with callers and a service of the scripted engine."""

from __future__ import annotations

import http.client
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from contract.scripted import HERE, ScriptedInstallation
from ficc.domain.access import SCOPES
from support import rows
from support.http import Http, http_of, projects_of, with_rows

PATIENCE_SECONDS = 30.0


@dataclass(frozen=True)
class Caller:
    """Somebody with a token, and how to find them in the database."""

    identity_id: str
    token_id: str
    secret: str


class Tenant:
    """`http` is its manager, a member with every scope."""

    def __init__(self, installation: ScriptedInstallation, name: str, **spec: Any) -> None:
        self.installation = installation
        self.http = projects_of(installation, name)[name]
        self.project_id = str(self.http("GET", "/session").ok()["project"]["id"])
        self.manager = Caller("", "", str(self.http.token))
        self._callers = 0
        data = (HERE / "engine.py").read_bytes()
        model = self.http("POST", "/models", rows.manifest_of(data, capabilities=["chat"])).ok(201)
        self.http.octets(model["id"], 0, 0, data).ok()
        installation.until(
            lambda: self.http("GET", f"/models/{model['id']}").ok()["state"] == "ready", "the model is ready"
        )
        self.spec = {**installation.spec(name), "model_id": model["id"], **spec}
        self.service_id = str(self.http("POST", "/inference", self.spec).ok(202)["id"])
        self.settled("ready")

    def record(self) -> dict[str, Any]:
        found: dict[str, Any] = self.http("GET", f"/inference/{self.service_id}").ok()
        return found

    def settled(self, *states: str) -> dict[str, Any]:
        """The service in one of these states; at rest, with every attempt released."""

        def look() -> dict[str, Any] | None:
            found = self.record()
            done = found["state"] in ("ready", "degraded") or all(r["released"] for r in found["replicas"])
            return found if found["state"] in states and done else None

        found = self.installation.until(look, f"the service is {' or '.join(states)}", seconds=90)
        assert found is not None
        return found

    def control(self, action: str) -> None:
        while True:
            body = {"revision": self.record()["revision"]}
            answer = self.http("POST", f"/inference/{self.service_id}/control/{action}", body)
            if answer.status != 409 or answer.code != "revision_conflict":
                answer.ok(202)
                return

    def end(self) -> None:
        """Let the service hold nothing."""
        if self.record()["state"] not in ("stopped", "failed"):
            self.control("stop")
        self.settled("stopped", "failed")

    def caller(self, limits: Mapping[str, int] | None = None) -> Caller:
        """A further member of the project; one with limits has a token of the manager's."""
        if limits is not None:
            wanted = {"label": "limited", "scopes": ["inference:invoke"], "limits": limits}
            made = self.http("POST", "/tokens", wanted).ok(201)
            return Caller("", made["id"], made["token"])
        self._callers += 1
        name = f"{self._callers} of {self.project_id}"

        def work(tx: Any) -> tuple[str, str]:
            identity_id = rows.member(tx, self.project_id, name, SCOPES)
            return identity_id, rows.token(tx, self.project_id, identity_id, SCOPES)

        identity_id, secret = with_rows(self.installation, work)
        known = Http(self.installation.origin, secret)
        owner = http_of(self.installation)
        made = owner("POST", "/tokens", {"label": "for a moment", "scopes": ["audit:read"]}).ok(201)
        owner("DELETE", f"/tokens/{made['id']}").ok()  # a change of who may do what, so that it is known now
        self.installation.until(lambda: known("GET", "/session").status == 200, "the token is known")
        return Caller(identity_id, known("GET", "/session").ok()["session_id"], secret)

    def connect(self, caller: Caller) -> Connection:
        return Connection(self, caller)

    def ask(self, caller: Caller, request_id: str, **body: Any) -> Connection:
        """A connection on which a request was sent whose answer nobody has read yet."""
        connection = Connection(self, caller)
        connection.send(request_id, **body)
        return connection

    def answer(self, caller: Caller, request_id: str, **body: Any) -> http.client.HTTPResponse:
        """To a request on a connection of its own, read to its end."""
        connection = self.ask(caller, request_id, **body)
        found = connection.answer()
        found.read()
        connection.close()
        return found

    def in_flight(self) -> int:
        return sum(replica["in_flight"] for replica in self.record()["replicas"])

    def until_in_flight(self, count: int) -> None:
        self.installation.until(lambda: self.in_flight() == count, f"{count} requests are in flight")

    def seen(self) -> dict[str, dict[str, int]]:
        """By its id, how often the engine had a request, and how many of those are over."""
        asking = self.ask(self.manager, "report", do="report")
        answer = json.loads(asking.answer().read())
        asking.close()
        found: dict[str, dict[str, int]] = answer["seen"]
        return found

    def log(self) -> list[str]:
        """The ids of requests in the order in which the engine had them."""
        text = self.http("GET", f"/inference/{self.service_id}/logs", replica="0").ok()["text"]
        return [line.removeprefix("request ") for line in text.splitlines() if line.startswith("request ")]

    def records(self, count: int, prefix: str) -> dict[str, dict[str, Any]]:
        """The usage records of requests whose ids begin so, of which there are exactly so many."""

        def look() -> list[dict[str, Any]]:
            items = self.http("GET", "/usage", limit="200").ok()["items"]
            return [one for one in items if one["request_id"].startswith(prefix)]

        self.installation.until(lambda: len(look()) >= count, f"{count} requests are recorded")
        items = look()
        found = {one["request_id"]: one for one in items}
        assert len(found) == len(items) == count, items
        return found


class Connection:
    """Kept open between requests."""

    def __init__(self, tenant: Tenant, caller: Caller) -> None:
        self._tenant = tenant
        self._token = caller.secret
        self._http = http.client.HTTPConnection(
            "127.0.0.1", tenant.installation.port, timeout=PATIENCE_SECONDS
        )
        self._http.connect()
        self._http.auto_open = 0  # a lost connection is not made anew

    def send(self, request_id: str, **body: Any) -> None:
        headers = {
            "authorization": f"Bearer {self._token}",
            "content-type": "application/json",
            "x-request-id": request_id,
        }
        path = f"/api/v1/inference/{self._tenant.service_id}/v1/chat/completions"
        self._http.request("POST", path, json.dumps({"key": request_id, **body}), headers)

    def answer(self) -> http.client.HTTPResponse:
        return self._http.getresponse()

    def refusal(self) -> tuple[int, str]:
        """The status and the code of an answer that is an error."""
        found = self.answer()
        return found.status, str(json.loads(found.read())["error"]["code"])

    def close(self) -> None:
        self._http.close()
