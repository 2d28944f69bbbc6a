"""A controller that is killed loses the last moment's usage records and no others, and none is there twice."""

from __future__ import annotations

import time
from pathlib import Path

from ficc.controller.operations.metering import GROUP_SECONDS
from support.http import Http, http_of
from support.installation import Installation

NOBODY = "01arz3ndektsv4rrffq69g5fav"
REQUESTS = 40
PATIENCE_SECONDS = 20.0


def recorded(http: Http) -> list[str]:
    return [one["request_id"] for one in http("GET", "/usage", limit="200").ok()["items"]]


def ask(http: Http, name: str) -> None:
    http("POST", f"/inference/{NOBODY}/v1/embeddings", {}, headers={"x-request-id": name})


def test_what_was_written_survives_and_is_there_once(tmp_path: Path) -> None:
    installation = Installation(tmp_path)
    try:
        installation.start("controller")
        for number in range(REQUESTS):
            ask(http_of(installation), f"early-{number}")
        until = time.monotonic() + PATIENCE_SECONDS
        while len(recorded(http_of(installation))) < REQUESTS:
            assert time.monotonic() < until
            time.sleep(GROUP_SECONDS)
        ask(http_of(installation), "late")
        installation.kill("controller")
        installation.start("controller")
        found = recorded(http_of(installation))
        assert sorted(name for name in found if name != "late") == sorted(
            f"early-{n}" for n in range(REQUESTS)
        )
        assert found.count("late") <= 1
    finally:
        installation.stop()


def test_an_orderly_end_writes_everything(tmp_path: Path) -> None:
    installation = Installation(tmp_path)
    try:
        installation.start("controller")
        for number in range(REQUESTS):
            ask(http_of(installation), str(number))
        installation.stop()
        installation.start("controller")
        assert sorted(recorded(http_of(installation)), key=int) == [str(number) for number in range(REQUESTS)]
    finally:
        installation.stop()
