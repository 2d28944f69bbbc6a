"""SIGKILL of the controller while its services answer: engines are untouched, and after a restart within the
lease they answer again without a new attempt."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from httpx2 import TransportError
from openai import APIConnectionError, OpenAI

from ficc.client.errors import ApiError
from support.installation import Installation

pytestmark = pytest.mark.timeout(240)

TTL_SECONDS = 10


@pytest.fixture
def installation(tmp_path: Path, images: Path) -> Iterator[Installation]:
    with Installation(
        tmp_path, images=images, settings={"FICC_LEASES_TTL_SECONDS": str(TTL_SECONDS)}
    ) as made:
        yield made


@pytest.fixture
def service(installation: Installation, model_file: Path) -> dict[str, Any]:
    model = installation.add_model(model_file, "smollm2")
    made = installation.call("POST", "/inference", installation.specification("assistant", model["id"]))
    return installation.settled(made["id"], "ready")


def attempt(installation: Installation, service: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = installation.call("GET", f"/inference/{service['id']}")["replicas"][0]
    return found


def second_attempt(installation: Installation, service: dict[str, Any]) -> dict[str, Any]:
    """The replica once its second attempt is ready; the first is what a fresh controller remembers."""

    def look() -> dict[str, Any] | None:
        found = attempt(installation, service)
        return found if found["attempt"] == 2 and found["state"] == "ready" else None

    found = installation.until(look, "a second attempt is ready", seconds=60)
    assert found is not None
    return found


def ask(installation: Installation, service: dict[str, Any], token: str) -> str:
    client = OpenAI(
        base_url=f"{installation.origin}{service['endpoint']}", api_key=token, max_retries=0, timeout=60
    )
    answer = client.chat.completions.create(
        model="assistant", messages=[{"role": "user", "content": "Say hi."}], max_tokens=4
    )
    return answer.choices[0].message.content or ""


def test_l3_killed_in_a_stream_and_restarted(installation: Installation, service: dict[str, Any]) -> None:
    token = installation.call("POST", f"/inference/{service['id']}/tokens", {"lifetime": 3600})["token"]
    before = attempt(installation, service)
    client = OpenAI(
        base_url=f"{installation.origin}{service['endpoint']}", api_key=token, max_retries=0, timeout=60
    )
    stream = client.chat.completions.create(
        model="assistant",
        messages=[{"role": "user", "content": "Tell a long story."}],
        max_tokens=400,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    next(iter(stream))
    installation.kill("controller", signal.SIGKILL)
    finish_reasons: list[str | None] = []
    with pytest.raises((APIConnectionError, TransportError)):  # it breaks: no finish reason, no [DONE]
        finish_reasons.extend(c.finish_reason for chunk in stream for c in chunk.choices)
    assert not any(finish_reasons)
    installation.start("controller")
    installation.node()
    assert ask(installation, service, token)
    after = attempt(installation, service)
    assert after["attempt_id"] == before["attempt_id"]
    assert after["state"] == "ready"
    assert installation.call("GET", f"/inference/{service['id']}")["revision"] == service["revision"]


def test_l3_an_orderly_restart_leaves_engines_alone(
    installation: Installation, service: dict[str, Any]
) -> None:
    before = attempt(installation, service)
    installation.kill("controller", signal.SIGTERM)
    installation.start("controller")
    installation.node()
    installation.until(lambda: attempt(installation, service)["state"] == "ready", "the replica is ready")
    assert attempt(installation, service)["attempt_id"] == before["attempt_id"]


def test_a_controller_that_stays_away_past_the_lease(
    installation: Installation, service: dict[str, Any]
) -> None:
    """The executor ends the engine by itself; the next controller tries again, in the same generation."""
    before = attempt(installation, service)
    installation.kill("controller", signal.SIGKILL)
    log = installation.logs["executor"]
    installation.until(
        lambda: f"attempt {before['attempt_id']} is released" in log.read_text(),
        "the executor ended the attempt",
        seconds=TTL_SECONDS + 15,
    )
    installation.start("controller")
    installation.node()
    after = second_attempt(installation, service)
    assert after["attempt_id"] != before["attempt_id"]
    assert after["generation"] == before["generation"]


def test_l4_an_executor_that_is_killed_and_comes_back(
    installation: Installation, service: dict[str, Any]
) -> None:
    before = attempt(installation, service)
    installation.kill("executor", signal.SIGKILL)
    installation.until(
        lambda: not installation.call("GET", "/contributors")["items"][0]["connected"],
        "the node is disconnected",
    )

    async def refused() -> str:
        async with installation.api() as api:
            with pytest.raises(ApiError) as caught:
                await api.call("POST", f"/inference/{service['id']}/v1/chat/completions", {"messages": [{}]})
            return caught.value.code

    assert asyncio.run(refused()) == "service_not_ready"
    installation.start("executor")
    installation.node()
    assert second_attempt(installation, service)["generation"] == before["generation"]


def test_desired_state_outlives_an_orderly_shutdown(
    installation: Installation, service: dict[str, Any]
) -> None:
    installation.stop()
    assert not [pid for pid in os.listdir("/proc") if pid.isdigit() and _belongs(pid, installation)]
    installation.start()
    installation.node()
    second_attempt(installation, service)
    again = installation.settled(service["id"], "ready")
    assert again["generation"] == service["generation"]
    assert again["desired"] == "running"


def _belongs(pid: str, installation: Installation) -> bool:
    try:
        environment = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False
    return f"FICC_STATE_DIRECTORY={installation.directory}".encode() in environment.split(b"\0")
