"""`ficc usage` and the limits of `ficc token create`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from support.http import Http, http_of
from support.installation import Installation

FICC = str(Path(sys.executable).parent / "ficc")
NOBODY = "01arz3ndektsv4rrffq69g5fav"
PATIENCE_SECONDS = 10.0


def ficc(installation: Installation, *words: str, status: int = 0) -> str:
    environment = {
        **os.environ,
        "FICC_STATE_DIRECTORY": str(installation.directory),
        "FICC_URL": installation.origin,
        "FICC_TOKEN": installation.token,
        "NO_COLOR": "1",
    }
    done = subprocess.run(
        [FICC, *words], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == status, done
    return done.stdout + done.stderr


def test_sums_by_token_name_the_token(made: Installation) -> None:
    words = (
        "token",
        "create",
        "the limited one",
        "--scope",
        "inference:invoke",
        "--requests-per-minute",
        "7",
    )
    secret = json.loads(ficc(made, *words, "--json"))["token"]
    (token,) = [t for t in http_of(made)("GET", "/tokens").ok()["items"] if t["label"] == "the limited one"]
    assert token["limits"] == {"requests_per_minute": 7}
    for _ in range(2):
        Http(made.origin, secret)("POST", f"/inference/{NOBODY}/v1/embeddings", {})
    until = time.monotonic() + PATIENCE_SECONDS
    while "the limited one" not in (shown := ficc(made, "usage", "--by", "token")):
        assert time.monotonic() < until, shown
    (line,) = [line for line in shown.splitlines() if line.startswith("the limited one")]
    assert line.split()[3:] == ["2", "0", "2", "0", "0", "0", "0", "0"]
    by_day: dict[str, Any] = json.loads(ficc(made, "usage", "--json"))
    assert by_day["items"][0]["refused"] >= 2


def test_without_requests_there_is_nothing_to_sum(made: Installation) -> None:
    assert "No requests in that time" in ficc(made, "usage", "--from", "2001-01-01", "--to", "2001-01-02")
    assert "from" in ficc(made, "usage", "--from", "yesterday", status=1)
