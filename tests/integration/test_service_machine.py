"""Services under whatever people do, in any order, at stale revisions, and two at the same moment (L8, L9): states stay
legal, one of two wins, no request waits past its deadline or reaches an engine twice, and in the end nothing is held.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    rule,
    run_state_machine_as_test,
)

from contract.scripted import ScriptedInstallation
from ficc.domain import service
from support.http import Answer, http_of

pytestmark = [pytest.mark.root, pytest.mark.slow, pytest.mark.timeout(600)]

SECONDS = 60.0
"""After which the machine takes no further step."""
DEADLINE_SECONDS = 5
ALIASES = ("one", "two", "three")
CONFLICTS = frozenset(
    {
        "action_not_allowed",
        "alias_taken",
        "attempt_not_released",
        "does_not_fit",
        "preview_changed",
        "revision_conflict",
        "service_not_stopped",
    }
)
"""What somebody may be told who acts on what changed meanwhile."""
UNANSWERED = frozenset(
    {
        "deadline_exceeded",
        "engine_error",
        "not_found",
        "peer_lost",
        "queue_full",
        "service_not_ready",
        "service_stopped",
    }
)
"""Why a request may end without its answer."""

which = st.integers(0, 2)


class ServiceMachine(RuleBasedStateMachine):
    installation: ClassVar[ScriptedInstallation]
    until: ClassVar[float]
    keys: ClassVar[Iterator[int]]

    def __init__(self) -> None:
        super().__init__()
        self.generations: dict[str, int] = {}

    # Reading.

    def services(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.installation.http("GET", "/inference").ok()["items"]
        return found

    def pick(self, number: int) -> dict[str, Any] | None:
        """One to act on; none once the time is over, so that what is left of the steps does nothing."""
        found = self.services() if self.goes_on() else []
        return found[number % len(found)] if found else None

    def goes_on(self) -> bool:
        return time.monotonic() < self.until

    # Managing.

    @rule(alias=st.sampled_from(ALIASES), replicas=st.sampled_from((1, 1, 2)), looks=st.booleans())
    def create(self, alias: str, replicas: int, looks: bool) -> None:
        if not self.goes_on():
            return
        spec = self.installation.spec(alias, replicas, deadline_seconds=DEADLINE_SECONDS)
        if looks:
            preview = self.installation.http("POST", "/inference/preview", spec).ok()
            spec["preview_digest"] = preview["preview_digest"]
        self.check(self.installation.http("POST", "/inference", spec))

    @rule(number=which, action=st.sampled_from(("start", "stop", "drain", "remove")), stale=st.booleans())
    def control(self, number: int, action: str, stale: bool) -> None:
        found = self.pick(number)
        if found is None:
            return
        answer = self.send(found["id"], action, found["revision"] - stale)
        self.check(answer)
        if stale:
            assert answer.code in ("revision_conflict", "not_found")

    @rule(number=which, action=st.sampled_from(("start", "stop", "drain")))
    def two_at_once(self, number: int, action: str) -> None:
        """L8: both saw the same revision; if both are told yes, the second changed nothing."""
        found = self.pick(number)
        if found is None:
            return
        with ThreadPoolExecutor(2) as both:
            answers = list(both.map(lambda _: self.send(found["id"], action, found["revision"]), range(2)))
        for answer in answers:
            self.check(answer)
        done = {answer.json["revision"] for answer in answers if answer.status == 202}
        assert len(done) <= 1
        if action == "start":
            assert sum(answer.status == 202 for answer in answers) <= 1

    @rule(number=which, replicas=st.sampled_from((1, 2)), stale=st.booleans())
    def replace(self, number: int, replicas: int, stale: bool) -> None:
        found = self.pick(number)
        if found is None:
            return
        spec = self.installation.spec(found["alias"], replicas, deadline_seconds=DEADLINE_SECONDS)
        body = {"revision": found["revision"] - stale, "spec": spec}
        answer = self.installation.http("PUT", f"/inference/{found['id']}", body)
        self.check(answer)
        if stale:
            assert answer.code in ("revision_conflict", "not_found")

    def send(self, service_id: str, action: str, revision: int) -> Answer:
        return self.installation.http(
            "POST", f"/inference/{service_id}/control/{action}", {"revision": revision}
        )

    def check(self, answer: Answer) -> None:
        if answer.status != 202:
            assert answer.code in CONFLICTS | {"not_found"}, answer.body

    # Using.

    @rule(number=which, do=st.sampled_from(("report", "hang")), bound=st.booleans())
    def request(self, number: int, do: str, bound: bool) -> None:
        found = self.pick(number)
        if found is None:
            return
        key = f"machine {next(self.keys)}"
        http = self.installation.http
        if bound:
            made = http("POST", f"/inference/{found['id']}/tokens", {"lifetime": 60})
            if made.status != 201:
                assert made.code == "not_found"
                return
            http = http_of(self.installation, made.json["token"])
        began = time.monotonic()
        answer = self.installation.chat(found["id"], http, do=do, key=key)
        waited = time.monotonic() - began
        if answer.status != 200:
            assert answer.code in UNANSWERED | ({"unauthenticated"} if bound else set()), answer.body
        assert waited < 4 * DEADLINE_SECONDS, "a request waits past its deadline"

    @rule(seconds=st.sampled_from((0.1, 1.0)))
    def wait(self, seconds: float) -> None:
        if self.goes_on():
            time.sleep(seconds)

    # What always holds.

    @invariant()
    def everything_is_legal(self) -> None:
        for found in self.services() if self.goes_on() else ():
            service.State(found["state"])
            assert found["generation"] >= self.generations.get(found["id"], 1)
            self.generations[found["id"]] = found["generation"]
            assert {one["generation"] for one in found["replicas"]} == {found["generation"]}
            assert all(one["outcome"] != "unknown" for one in found["replicas"])
            assert all(0 <= one["in_flight"] <= 2 for one in found["replicas"])

    def teardown(self) -> None:
        for found in self.services():
            rest = self.installation.stopped(found["id"])
            assert all(one["in_flight"] == 0 for one in rest["replicas"])
            self.installation.remove(found["id"])
        reserved = self.installation.call("GET", "/contributors")["items"][0]["reserved"]
        assert reserved["memory_bytes"] == 0


@pytest.fixture
def installation(tmp_path: Any) -> Iterator[ScriptedInstallation]:
    with ScriptedInstallation(tmp_path) as made:
        assert made.python
        assert made.model_id
        yield made


def test_l8_l9_services_under_everything_that_people_do(installation: ScriptedInstallation) -> None:
    ServiceMachine.installation = installation
    ServiceMachine.until = time.monotonic() + SECONDS
    ServiceMachine.keys = count()
    run_state_machine_as_test(
        ServiceMachine,
        settings=settings(
            max_examples=50,
            stateful_step_count=40,
            deadline=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        ),
    )
    logs = installation.directory / "executor" / "logs"
    asked = [
        line
        for log in logs.glob("*.log")
        for line in log.read_text().splitlines()
        if line.startswith("request ")
    ]
    assert asked
    assert len(asked) == len(set(asked)), "a request reached two engines"
