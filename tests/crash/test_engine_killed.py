"""SIGKILL of an engine under its executor's eyes: what is shown and routed follows at once, and its log stays."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from contract.scripted import Open, ScriptedInstallation
from support.engine_answers import signal_engine

pytestmark = [pytest.mark.root, pytest.mark.timeout(180)]

FOLLOWED_SECONDS = 2.0
TOLERANCE_SECONDS = 3.0
"""What a busy machine may add."""


@pytest.fixture
def installation(tmp_path: Path) -> Iterator[ScriptedInstallation]:
    with ScriptedInstallation(tmp_path) as made:
        yield made


def test_l1_service_and_routes_follow_and_the_log_of_the_attempt_stays(
    installation: ScriptedInstallation,
) -> None:
    service = installation.service("two", replicas=2, restart="never")
    service_id, attempts = service["id"], [one["attempt_id"] for one in service["replicas"]]
    streams = [Open(installation, service_id, do="hang", stream=True, key=f"stream {n}") for n in range(2)]
    assert [stream.answer().status for stream in streams] == [200, 200]
    said = [installation.http("GET", f"/inference/{service_id}/logs", replica=str(n)).ok() for n in range(2)]
    assert all("request stream" in log["text"] for log in said)

    signal_engine(attempts[0], signal.SIGKILL)
    degraded = installation.settled(service_id, "degraded", seconds=FOLLOWED_SECONDS + TOLERANCE_SECONDS)
    ended = degraded["replicas"][0]
    assert (ended["attempt_id"], ended["outcome"]) == (attempts[0], "failed")
    assert ended["reason"]["code"] == "engine_killed"
    for _ in range(4):  # whoever asks now is answered by the other one
        assert installation.chat(service_id).status == 200
    kept = installation.http("GET", f"/inference/{service_id}/logs", replica="0").ok()
    assert kept["attempt_id"] == attempts[0]
    assert kept["text"].startswith(said[0]["text"])

    signal_engine(attempts[1], signal.SIGKILL)
    failed = installation.settled(service_id, "failed", seconds=FOLLOWED_SECONDS + TOLERANCE_SECONDS)
    assert failed["reason"]["code"] == "engine_killed"
    assert installation.chat(service_id).status == 503
    for n, log in enumerate(said):
        again = installation.http("GET", f"/inference/{service_id}/logs", replica=str(n)).ok()
        assert again["text"].startswith(log["text"])
    for stream in streams:
        stream.close()
