"""The command line against a real installation: results, words, exit statuses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from support.installation import Installation

pytestmark = pytest.mark.timeout(240)

BIN = Path(sys.executable).parent


class Shell:
    """Runs `ficc` as a user of this installation would, off a terminal."""

    def __init__(self, directory: Path) -> None:
        self.environment = {**os.environ, "FICC_STATE_DIRECTORY": str(directory), "NO_COLOR": "1"}

    def __call__(self, *words: str, status: int = 0, stdin: str = "") -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [str(BIN / "ficc"), *words],
            env=self.environment,
            input=stdin,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == status, (
            f"ficc {' '.join(words)}: {done.returncode}\n{done.stdout}{done.stderr}"
        )
        return done

    def json(self, *words: str) -> Any:
        """The one JSON document that a command prints."""
        return json.loads(self(*words, "--json").stdout)


@pytest.fixture(scope="module")
def ficc(installation: Installation) -> Shell:
    return Shell(installation.directory)


def test_the_way_of_a_newcomer(ficc: Shell, model_file: Path, tmp_path: Path) -> None:
    assert ficc.json("node", "list")["items"][0]["connected"]
    added = ficc("model", "add", str(model_file), "--name", "smollm2")
    assert added.stdout.startswith("Ready  smollm2  ")
    assert "hashed" in added.stderr
    assert "verified" in added.stderr
    again = ficc.json("model", "add", str(model_file), "--name", "smollm2")
    assert again["state"] == "ready"
    assert ficc.json("model", "show", "smollm2")["id"] == again["id"]
    assert ficc.json("model", "show", again["id"][:20])["id"] == again["id"]

    options = (
        "--model",
        "smollm2",
        "--context",
        "512",
        "--memory-bytes",
        str(768 << 20),
        "--concurrency",
        "2",
    )
    runtime = ("--runtime", "llama-cpp")
    preview = ficc("service", "preview", "cli", *options, *runtime)
    assert preview.stdout.startswith("Fits on ")
    made = ficc("service", "create", "cli", *options, *runtime)
    assert made.stdout.startswith("Ready  cli  ")
    assert "cli: starting" in made.stderr
    service = ficc.json("service", "show", "cli")
    assert service["state"] == "ready"

    said = ficc("chat", "cli", "Say hi.", "--max-tokens", "8")
    assert said.stdout.strip()
    pieces = [
        json.loads(line)
        for line in ficc("chat", "cli", "Hi", "--max-tokens", "4", "--json").stdout.splitlines()
    ]
    assert all(set(piece) == {"content"} for piece in pieces)
    spoken = ficc("chat", "cli", "--max-tokens", "4", stdin="Hi\nAnd you?\n")
    assert len(spoken.stdout.splitlines()) >= 2

    secret = tmp_path / "token"
    token = ficc("service", "token", "cli", "--out", str(secret))
    assert not token.stdout
    assert secret.stat().st_mode & 0o777 == 0o600
    assert secret.read_text().startswith("ficc_")
    assert "/api/v1/inference/" in token.stderr
    listed = ficc.json("token", "list")["items"]
    assert secret.read_text().strip() not in json.dumps(listed)
    assert any(entry["service_id"] == service["id"] for entry in listed)

    assert "slot" in ficc("service", "logs", "cli").stdout
    too_large = ficc(
        "service", "preview", "big", *options[:4], "--memory-bytes", str(1 << 50), *runtime, status=1
    )
    assert "does_not_fit" in too_large.stdout

    assert ficc("service", "stop", "cli", status=2).stderr.startswith("Error: ")  # no terminal to ask on
    stopped = ficc("service", "stop", "cli", "--yes")
    assert stopped.stdout.startswith("Stopped  cli")
    refused = ficc("model", "remove", "smollm2", "--yes", status=1)
    assert "model_referenced" in refused.stderr
    restarted = ficc("service", "start", "cli")
    assert restarted.stdout.startswith("Ready  cli")
    ficc("service", "drain", "cli")
    replaced = ficc.json("service", "replace", "cli", *options[:2], "--context", "256", *runtime)
    assert (replaced["generation"], replaced["spec"]["context"]) == (3, 256)
    ficc("service", "stop", "cli", "--yes")
    current = ficc.json("service", "replace", "cli", "--runtime", "llama-cpp")
    assert (current["generation"], current["spec"]["context"]) == (4, 256)
    ficc("service", "stop", "cli", "--yes")
    assert ficc.json("service", "remove", "cli", "--yes") == {"removed": True}
    assert ficc.json("model", "remove", "smollm2", "--yes")["removed"]


def test_an_upload_over_http(ficc: Shell, tmp_path: Path) -> None:
    path = tmp_path / "plain.gguf"
    path.write_bytes(os.urandom(40 << 20))
    added = ficc.json("model", "add", str(path), "--upload")
    assert (added["state"], added["bytes_durable"]) == ("ready", 40 << 20)
    ficc("model", "remove", added["id"], "--yes")


def test_tokens(ficc: Shell, installation: Installation) -> None:
    made = ficc("token", "create", "reader", "--scope", "models:read", "--lifetime-seconds", "600")
    assert made.stdout.startswith("ficc_")
    assert "Shown once" in made.stderr
    other = Shell(installation.directory)
    other.environment |= {"FICC_URL": installation.origin, "FICC_TOKEN": made.stdout.strip()}
    assert other.json("model", "list") == ficc.json("model", "list")
    denied = json.loads(other("service", "list", "--json", status=1).stderr)["error"]
    assert denied["code"] == "denied"
    assert denied["request_id"]
    assert ficc.json("token", "revoke", "reader", "--yes") == {"removed": True}
    assert json.loads(other("model", "list", "--json", status=1).stderr)["error"]["code"] == "unauthenticated"
    unknown = ficc("token", "create", "x", "--scope", "models:eat", status=1)
    assert "invalid_request" in unknown.stderr


def test_open_prints_a_one_use_link(ficc: Shell, installation: Installation) -> None:
    link = ficc("open").stdout.strip()
    assert link.startswith(f"{installation.origin}/#code=")
    assert ficc.json("open")["code"] not in link


def test_images(ficc: Shell) -> None:
    images = ficc.json("runtime", "list")["items"]
    llama = next(image for image in images if image["name"] == "ficc/llama-cpp")
    assert ficc("runtime", "digest", "llama-cpp").stdout.strip().startswith("sha256:")
    assert ficc.json("runtime", "digest", llama["name"])["image_digest"].startswith("sha256:")
    assert "image_not_found" in ficc("runtime", "digest", "nothing", status=1).stderr


def test_doctor(ficc: Shell) -> None:
    report = ficc.json("doctor")
    assert report["ok"], report["checks"]
    assert {"bwrap", "mmdebstrap", "limits", "controller"} <= {check["check"] for check in report["checks"]}


@pytest.mark.parametrize(
    "words",
    [
        ("nonsense",),
        ("model", "nonsense"),
        ("model", "add"),
        ("model", "add", "/no/such/file.gguf"),
        ("service", "create"),
        ("service", "create", "x"),
        ("token", "create", "x"),
        ("runtime", "build", "nonsense"),
    ],
)
def test_wrong_usage_exits_with_2(ficc: Shell, words: tuple[str, ...]) -> None:
    done = ficc(*words, status=2)
    assert not done.stdout
    assert done.stderr
    assert "Traceback" not in done.stderr


def test_failures_keep_standard_output_empty(ficc: Shell) -> None:
    for words in (("model", "show", "nothing"), ("service", "show", "nothing"), ("chat", "nothing", "hi")):
        done = ficc(*words, status=1)
        assert not done.stdout
        assert done.stderr.startswith("Error: ")
    as_json = ficc("model", "show", "nothing", "--json", status=1)
    assert not as_json.stdout
    assert json.loads(as_json.stderr)["error"]["code"] == "not_found"


def test_without_a_controller(tmp_path: Path) -> None:
    ficc = Shell(tmp_path)
    done = ficc("model", "list", status=1)
    assert "ficc up" in done.stderr
    assert "Traceback" not in done.stderr
    ficc.environment["FICC_SERVER_LISTEN"] = "nonsense"
    assert "server.listen" in ficc("doctor", status=1).stderr


def test_quiet_says_nothing_beside_the_result(ficc: Shell) -> None:
    done = ficc("--quiet", "model", "list")
    assert not done.stderr
