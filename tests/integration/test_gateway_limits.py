"""Limits of tokens and of projects, and turns in the queue, from a client to the engine of a running installation.

Every test has a project of its own, and with it that project's whole allowance.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from http.client import HTTPResponse
from typing import Any

import pytest

from contract.scripted import ScriptedInstallation
from support.tenant import Connection, Tenant

pytestmark = pytest.mark.timeout(240)

REQUESTS_PER_MINUTE, TOKENS_PER_MINUTE, CONCURRENCY = 20, 2000, 6
"""Of a project, whose every token may have less."""
QUEUE_MAX = 3
HEAD = "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"


@pytest.fixture(scope="module")
def installation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedInstallation]:
    settings = {
        "FICC_LIMITS_PROJECT_REQUESTS_PER_MINUTE": str(REQUESTS_PER_MINUTE),
        "FICC_LIMITS_PROJECT_TOKENS_PER_MINUTE": str(TOKENS_PER_MINUTE),
        "FICC_LIMITS_PROJECT_CONCURRENCY": str(CONCURRENCY),
        "FICC_GATEWAY_QUEUE_MAX": str(QUEUE_MAX),
    }
    with ScriptedInstallation(tmp_path_factory.mktemp("limits"), settings=settings) as made:
        yield made


@pytest.fixture
def tenant(installation: ScriptedInstallation, request: pytest.FixtureRequest) -> Iterator[Tenant]:
    """With a service that has a slot for every request its project may have open."""
    made = Tenant(
        installation, request.node.name.removeprefix("test_").replace("_", "-"), concurrency=CONCURRENCY + 1
    )
    yield made
    made.end()


def taking(tokens: int) -> dict[str, Any]:
    """What lets the engine say that it took so many."""
    document = json.dumps({"usage": {"prompt_tokens": tokens - 1, "completion_tokens": 1}})
    return {"do": "raw", "pieces": [f"{HEAD}Content-Length: {len(document)}\r\n\r\n", document]}


def is_limited(answer: HTTPResponse, least: int, most: int) -> None:
    """Refused, with a time to come back between these seconds."""
    assert answer.status == 429
    assert least <= int(answer.headers["retry-after"]) <= most
    assert "x-should-retry" not in answer.headers  # no engine saw it, so a client may send it again


def codes(tenant: Tenant, count: int, prefix: str) -> dict[str, str | None]:
    return {name: record["code"] for name, record in tenant.records(count, prefix).items()}


# A token's.


def test_a_tokens_requests(tenant: Tenant) -> None:
    caller, other = tenant.caller({"requests_per_minute": 2}), tenant.caller({"requests_per_minute": 2})
    assert [tenant.answer(caller, f"ok-{number}").status for number in range(2)] == [200, 200]
    refused = tenant.answer(caller, "over")
    is_limited(refused, 20, 30)
    assert refused.headers["x-ratelimit-remaining-requests"] == "0"
    assert tenant.answer(other, "another").status == 200
    assert codes(tenant, 1, "over") == {"over": "rate_limited"}
    assert set(tenant.seen()) == {"ok-0", "ok-1", "another", "report"}


def test_a_tokens_tokens(tenant: Tenant) -> None:
    caller, other = tenant.caller({"tokens_per_minute": 100}), tenant.caller({"tokens_per_minute": 100})
    assert tenant.answer(caller, "much", **taking(150)).status == 200
    refused = tenant.answer(caller, "over")
    is_limited(refused, 20, 31)
    assert refused.headers["x-ratelimit-remaining-tokens"] == "0"
    assert tenant.answer(other, "another").status == 200


def test_a_tokens_concurrency(tenant: Tenant) -> None:
    caller = tenant.caller({"concurrency": 1})
    first = tenant.ask(caller, "first", do="hang", stream=True)
    assert b"hello" in first.answer().readline()
    is_limited(tenant.answer(caller, "second"), 1, 1)
    first.close()
    tenant.until_in_flight(0)
    assert tenant.answer(caller, "third").status == 200


def test_what_is_refused_costs_nothing(tenant: Tenant) -> None:
    """Neither the token nor its project: refused by a check of the body, of the model, and of the limit itself."""
    caller = tenant.caller({"requests_per_minute": 1})
    unlimited = tenant.caller({})
    for number in range(REQUESTS_PER_MINUTE):
        assert tenant.answer(caller, f"body-{number}", stream="yes").status == 400
        assert tenant.answer(caller, f"model-{number}", model="other").status == 404
    assert tenant.answer(caller, "one").status == 200
    for number in range(REQUESTS_PER_MINUTE):
        is_limited(tenant.answer(caller, f"limit-{number}"), 1, 60)
    left = tenant.answer(unlimited, "two").headers["x-ratelimit-remaining-requests"]
    assert int(left) >= REQUESTS_PER_MINUTE - 2


# A project's, over all its tokens.


def test_a_projects_requests(tenant: Tenant) -> None:
    callers = [tenant.caller({}) for _ in range(3)]
    began = time.monotonic()
    statuses = []
    while 429 not in statuses:
        last = tenant.answer(callers[len(statuses) % 3], f"sent-{len(statuses)}")
        statuses.append(last.status)
    minutes = (time.monotonic() - began) / 60
    is_limited(last, 1, 60 // REQUESTS_PER_MINUTE)
    assert last.headers["x-ratelimit-limit-requests"] == str(REQUESTS_PER_MINUTE)
    assert REQUESTS_PER_MINUTE <= statuses.count(200) <= REQUESTS_PER_MINUTE * (1 + minutes) + 1
    assert set(statuses[:-1]) == {200}


def test_a_projects_tokens(tenant: Tenant) -> None:
    first, second = tenant.caller({}), tenant.caller({})
    assert tenant.answer(first, "much", **taking(TOKENS_PER_MINUTE * 2)).status == 200
    refused = tenant.answer(second, "over")
    is_limited(refused, 50, 61)
    assert refused.headers["x-ratelimit-limit-tokens"] == str(TOKENS_PER_MINUTE)


def test_a_projects_concurrency(tenant: Tenant) -> None:
    callers = [tenant.caller({}) for _ in range(2)]
    opened = []
    for number in range(CONCURRENCY):
        opened.append(tenant.ask(callers[number % 2], f"open-{number}", do="hang", stream=True))
        assert b"hello" in opened[-1].answer().readline()
    is_limited(tenant.answer(callers[0], "over"), 1, 1)
    opened.pop().close()
    tenant.until_in_flight(CONCURRENCY - 1)
    assert tenant.answer(callers[1], "another").status == 200
    for connection in opened:
        connection.close()


def test_another_project_has_its_own(installation: ScriptedInstallation, tenant: Tenant) -> None:
    other = Tenant(installation, "beside", concurrency=1)
    tenant.answer(tenant.caller({}), "much", **taking(TOKENS_PER_MINUTE * 2))
    assert tenant.answer(tenant.caller({}), "over").status == 429
    assert other.answer(other.caller({}), "theirs").status == 200
    other.end()


# Turns.


def test_callers_take_turns_in_the_queue_and_nobody_fills_it_for_others(
    installation: ScriptedInstallation,
) -> None:
    """G18: of one who has a whole queue the last gives way to another's first, and that refusal costs nothing."""
    tenant = Tenant(installation, "turns", concurrency=1)
    many, few = tenant.caller({"requests_per_minute": 4}), tenant.caller({})
    holding = tenant.ask(many, "hold", do="hang", stream=True)
    assert b"hello" in holding.answer().readline()
    waiting: dict[str, Connection] = {}
    for caller, name in ((many, "many-1"), (many, "many-2"), (many, "many-3"), (few, "few-1")):
        waiting[name] = tenant.ask(caller, name)
        time.sleep(0.3)  # so that they stand in the queue in this order
    answer = waiting.pop("many-3").answer()
    assert (answer.status, json.loads(answer.read())["error"]["code"]) == (429, "queue_full")
    assert int(answer.headers["retry-after"]) >= 1
    holding.close()
    for connection in waiting.values():
        assert connection.answer().status == 200
    installation.until(lambda: len(tenant.log()) >= 4, "the engine's log has them")
    assert tenant.log() == ["hold", "many-1", "few-1", "many-2"]
    assert tenant.answer(many, "the-fourth").status == 200
    assert tenant.answer(many, "over").status == 429
    tenant.end()
