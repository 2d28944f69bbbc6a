"""What ends requests from outside: a credential, a membership, a project or a service that is gone, a service that was
replaced, a node that is lost.

Each ends a stream that is open, a document that the engine is still making, a request that waits in the queue, and what
comes next on a connection that was kept open; and nothing is left of them. How long each took is printed (`pytest -s`);
`BOUND_SECONDS` is what is promised, so a machine that is busy fails no test.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from sqlalchemy import delete, update

from contract.scripted import ScriptedInstallation
from ficc.controller.operations import authority, routes
from ficc.controller.store import access, schema
from ficc.controller.store import services as service_rows
from ficc.controller.store.database import Transaction
from ficc.domain.access import SCOPES
from support.http import with_rows
from support.tenant import Caller, Connection, Tenant

pytestmark = pytest.mark.timeout(240)

BOUND_SECONDS = 2.0
READING_SECONDS = 0.5
"""Of the bound, for reading what changed and for ending what it ends."""
CONCURRENCY = 2


@pytest.fixture(scope="module")
def installation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedInstallation]:
    with ScriptedInstallation(tmp_path_factory.mktemp("authority")) as made:
        yield made


@pytest.fixture(scope="module")
def shared(installation: ScriptedInstallation) -> Tenant:
    """A service that outlives what is done to its callers."""
    return Tenant(installation, "shared", concurrency=CONCURRENCY)


def test_what_another_controller_changes_is_read_often_enough() -> None:
    """Otherwise a stream could outlive its credential by more than what is promised."""
    for seconds in (authority.REFRESH_SECONDS, routes.REFRESH_SECONDS):
        assert seconds <= BOUND_SECONDS - READING_SECONDS


# Four requests, and what is to become of them.


@dataclass
class Held:
    """Of one caller: a stream and a document, which take every slot, a request that waits, and a connection on which
    nothing is asked for the moment."""

    tenant: Tenant
    name: str
    stream: Connection
    body: Any
    document: Connection
    waiting: Connection
    idle: Connection

    def end(self, change: Callable[[], Any], code: str, status: int, waiting: tuple[int, str]) -> None:
        """Let something end them, in this way."""
        began = time.monotonic()
        change()
        rest = self.body.read().decode()
        print(f"{self.name}: the stream ended after {time.monotonic() - began:.2f} s")
        events = rest.strip().split("\n\n")
        assert json.loads(events[-1].removeprefix("data: "))["error"]["code"] == code
        assert "[DONE]" not in rest
        assert '"finish_reason": "stop"' not in rest
        answer = self.document.answer()
        assert (answer.status, json.loads(answer.read())["error"]["code"]) == (status, code)
        assert answer.headers["x-should-retry"] == "false"
        assert self.waiting.refusal() == waiting

    def recorded(self, code: str, waiting: str, outcomes: Collection[str] = ("refused",)) -> None:
        """Each of them once, as what it was ended by. `outcomes`: of the request that waited, which may be on its way
        to an engine where something else ended those before it a moment earlier."""
        records = self.tenant.records(4, self.name)
        assert records[f"{self.name}-waiting"]["queue_ms"] > 0
        assert records[f"{self.name}-stream"]["tokens"] == "partial"
        assert records[f"{self.name}-waiting"].pop("outcome") in outcomes
        assert {name.rpartition("-")[2]: (r.get("outcome"), r["code"]) for name, r in records.items()} == {
            "first": ("completed", None),
            "stream": ("failed", code),
            "document": ("failed", code),
            "waiting": (None, waiting),
        }

    def refuse_the_next(self, *refusals: tuple[int, str]) -> None:
        """On the connection that was kept open."""
        self.idle.send(f"next-of-{self.name}")
        assert self.idle.refusal() in refusals
        for one in (self.stream, self.document, self.waiting, self.idle):
            one.close()


def hold(tenant: Tenant, caller: Caller, name: str) -> Held:
    idle = tenant.ask(caller, f"{name}-first")
    answer = idle.answer()
    assert (answer.status, len(answer.read()) > 0) == (200, True)
    stream = tenant.ask(caller, f"{name}-stream", do="hang", stream=True)
    body = stream.answer()
    assert b"hello" in body.readline()
    document = tenant.ask(caller, f"{name}-document", do="hang")
    tenant.until_in_flight(CONCURRENCY)
    waiting = tenant.ask(caller, f"{name}-waiting")
    time.sleep(0.3)  # for it to be in the queue; its record tells whether it was
    return Held(tenant, name, stream, body, document, waiting, idle)


def nothing_is_left(tenant: Tenant, name: str) -> None:
    """No slot is taken here or at the executor, and the engine sees that its requests are over."""
    tenant.until_in_flight(0)

    def closed() -> bool:
        seen = tenant.seen()
        assert f"{name}-waiting" not in seen
        ended = [seen[f"{name}-{one}"] for one in ("stream", "document")]
        assert [one["times"] for one in ended] == [1, 1]
        return all(one["closed"] == 1 for one in ended)

    tenant.installation.until(closed, "the engine's connections are closed")
    again = [
        tenant.ask(tenant.manager, f"again-{number}", do="hang", stream=True) for number in range(CONCURRENCY)
    ]
    for connection in again:
        assert b"hello" in connection.answer().readline()
        connection.close()
    tenant.until_in_flight(0)


# Credentials.


def revoke(tenant: Tenant, caller: Caller) -> None:
    tenant.http("DELETE", f"/tokens/{caller.token_id}").ok()


def sign_out(tenant: Tenant, caller: Caller) -> None:
    """The token revokes itself."""
    type(tenant.http)(tenant.http.origin, caller.secret)("DELETE", "/session")


def change(tenant: Tenant, work: Callable[[Transaction], Any]) -> None:
    """Rows, as another controller would: this one hears of it only by reading."""

    def changed(tx: Transaction) -> None:
        work(tx)
        access.raise_version(tx)

    with_rows(tenant.installation, changed)


def remove_from_project(tenant: Tenant, caller: Caller) -> None:
    m = schema.memberships.c
    mine = delete(schema.memberships).where(m.identity_id == caller.identity_id)
    change(tenant, lambda tx: tx.execute(mine))


def take_the_scope(tenant: Tenant, caller: Caller) -> None:
    left = [scope for scope in SCOPES if scope != "inference:invoke"]
    change(tenant, lambda tx: access.set_membership(tx, tenant.project_id, caller.identity_id, left))


def disable(tenant: Tenant, caller: Caller) -> None:
    off = update(schema.identities).where(schema.identities.c.id == caller.identity_id)
    change(tenant, lambda tx: tx.execute(off.values(disabled_at=time.time())))


def let_expire(tenant: Tenant, caller: Caller) -> None:
    soon = update(schema.tokens).where(schema.tokens.c.id == caller.token_id)
    change(tenant, lambda tx: tx.execute(soon.values(expires_at=time.time() + 2)))


CREDENTIALS: dict[str, tuple[Callable[[Tenant, Caller], None], int, str]] = {
    "revoked": (revoke, 401, "unauthenticated"),
    "signed-out": (sign_out, 401, "unauthenticated"),
    "expired": (let_expire, 401, "unauthenticated"),
    "identity-disabled": (disable, 401, "unauthenticated"),
    "membership-removed": (remove_from_project, 401, "unauthenticated"),
    "scope-taken": (take_the_scope, 403, "denied"),
}


@pytest.mark.parametrize("name", CREDENTIALS)
def test_a_credential_that_is_gone_ends_what_it_began(shared: Tenant, name: str) -> None:
    work, status, code = CREDENTIALS[name]
    caller = shared.caller()
    held = hold(shared, caller, name)
    held.end(lambda: work(shared, caller), code, status, (status, code))
    held.recorded(code, code)
    held.refuse_the_next((status, code))
    nothing_is_left(shared, name)


def test_a_revoked_credential_ends_a_stream_that_nobody_reads(shared: Tenant) -> None:
    """Its client cannot be told, so the connection is broken, and its slot is free."""
    caller = shared.caller()
    unread = shared.ask(caller, "unread", do="pour", stream=True)
    shared.until_in_flight(1)
    time.sleep(1.0)  # until every buffer on its way is full
    revoke(shared, caller)
    shared.until_in_flight(0)
    assert shared.records(1, "unread")["unread"]["code"] == "unauthenticated"
    unread.close()


def test_a_removed_project_ends_what_was_asked_of_it(installation: ScriptedInstallation) -> None:
    """Nobody is its member any more, which is what its removal comes to."""
    tenant = Tenant(installation, "removed", concurrency=CONCURRENCY)
    caller, manager = tenant.caller(), tenant.http("GET", "/session").ok()["principal"]["id"]
    held = hold(tenant, caller, "project")
    everybody = delete(schema.memberships).where(schema.memberships.c.project_id == tenant.project_id)
    refused = (401, "unauthenticated")
    held.end(lambda: change(tenant, lambda tx: tx.execute(everybody)), refused[1], refused[0], refused)
    held.refuse_the_next(refused)
    assert tenant.http("GET", "/session").code == "unauthenticated"
    change(tenant, lambda tx: access.set_membership(tx, tenant.project_id, manager, SCOPES))
    installation.until(lambda: tenant.http("GET", "/session").status == 200, "the manager is back")
    held.recorded(refused[1], refused[1])
    nothing_is_left(tenant, "project")
    tenant.end()


# Services.

STOPPED = (503, "service_stopped")


def test_a_stopped_service_ends_its_requests_and_the_next_generation_knows_nothing_of_them(
    installation: ScriptedInstallation,
) -> None:
    tenant = Tenant(installation, "stopped", concurrency=CONCURRENCY)
    caller = tenant.caller()
    held = hold(tenant, caller, "stop")
    held.end(lambda: tenant.control("stop"), STOPPED[1], STOPPED[0], STOPPED)
    held.recorded(STOPPED[1], STOPPED[1])
    held.idle.send("while-stopped")
    assert held.idle.refusal() == STOPPED
    before = tenant.settled("stopped")
    assert tenant.in_flight() == 0
    replacement = {"revision": before["revision"], "spec": {**tenant.spec, "context": 256}}
    tenant.http("PUT", f"/inference/{tenant.service_id}", replacement).ok(202)
    assert tenant.settled("ready")["generation"] == before["generation"] + 1
    held.idle.send("of-the-next-generation")
    answer = held.idle.answer()
    assert (answer.status, len(answer.read()) > 0) == (200, True)
    assert answer.headers["x-ficc-generation"] == str(before["generation"] + 1)
    assert set(tenant.seen()) == {"of-the-next-generation", "report"}
    tenant.control("stop")
    tenant.settled("stopped")
    tenant.control("remove")
    held.refuse_the_next((404, "not_found"))


def test_a_generation_that_another_controller_began_ends_requests_of_the_one_before(
    installation: ScriptedInstallation,
) -> None:
    tenant = Tenant(installation, "replaced", concurrency=CONCURRENCY)
    caller = tenant.caller()
    held = hold(tenant, caller, "generation")

    def of_generation(number: int) -> Callable[[], Any]:
        rows = update(schema.services).where(schema.services.c.id == tenant.service_id)
        return lambda: with_rows(installation, lambda tx: tx.execute(rows.values(generation=number)))

    generation = tenant.record()["generation"]
    held.end(of_generation(generation + 1), STOPPED[1], STOPPED[0], STOPPED)
    held.recorded(STOPPED[1], STOPPED[1], {"refused", "failed"})
    of_generation(generation)()
    held.idle.close()
    tenant.end()


def test_a_service_that_another_controller_removed_ends_its_requests(
    installation: ScriptedInstallation,
) -> None:
    tenant = Tenant(installation, "taken", concurrency=CONCURRENCY)
    caller = tenant.caller()
    held = hold(tenant, caller, "removal")
    held.end(
        lambda: with_rows(installation, lambda tx: service_rows.remove(tx, tenant.service_id)),
        *reversed(STOPPED),
        STOPPED,
    )
    held.recorded(STOPPED[1], STOPPED[1])
    held.refuse_the_next((404, "not_found"))


# Nodes, last, since the services above are the same node's.


def test_a_lost_node_ends_its_requests(installation: ScriptedInstallation) -> None:
    tenant = Tenant(installation, "lost", concurrency=CONCURRENCY)
    caller = tenant.caller()
    held = hold(tenant, caller, "node")
    held.end(lambda: installation.kill("executor"), "peer_lost", 502, (503, "service_not_ready"))
    held.recorded("peer_lost", "service_not_ready")
    held.refuse_the_next((503, "service_not_ready"))
    assert tenant.in_flight() == 0
    installation.start("executor")
    installation.until(
        lambda: tenant.answer(tenant.manager, "again").status == 200, "the service answers again"
    )
    assert not [one for one in tenant.seen() if one.startswith("node")]
    tenant.end()


# The other database.


def test_a_membership_that_was_removed_in_postgresql_ends_what_it_allowed(
    tmp_path_factory: pytest.TempPathFactory, database_settings: Callable[[str], dict[str, str]]
) -> None:
    settings = database_settings("postgresql")
    with ScriptedInstallation(tmp_path_factory.mktemp("authority-postgresql"), settings=settings) as made:
        tenant = Tenant(made, "postgresql", concurrency=CONCURRENCY)
        caller = tenant.caller()
        held = hold(tenant, caller, "membership")
        refused = (401, "unauthenticated")
        held.end(lambda: remove_from_project(tenant, caller), refused[1], refused[0], refused)
        held.recorded(refused[1], refused[1])
        held.refuse_the_next(refused)
        nothing_is_left(tenant, "membership")
