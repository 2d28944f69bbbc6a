"""The command line against a real installation: results, words, exit statuses."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from support.installation import Installation
from support.oci_layouts import base_layer, layout, member

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
    both = ficc("service", "preview", "both", "--model", "smollm2", "--replicas", "2", *runtime).stdout
    node = ficc.json("node", "list")["items"][0]["name"]
    assert both.count(f"Fits on {node}: ") == 2
    assert "\n2 replicas reserve " in both
    assert f"replica 1 on {node}: ready, 0 in flight" in ficc("service", "show", "cli").stdout
    assert "1 replica" in ficc("service", "logs", "cli", "--replica", "2", status=2).stderr
    service = ficc.json("service", "show", "cli")
    assert service["state"] == "ready"
    image = service["spec"]["runtime"]["image_digest"]
    assert "image_in_use" in ficc("runtime", "remove", image, "--yes", status=1).stderr

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
    first = ficc("service", "logs", "cli", "--attempt", "1")
    assert "slot" in first.stdout
    assert first.stderr.startswith("Attempt 1 of generation 1")
    assert "not_found" in ficc("service", "logs", "cli", "--attempt", "2", status=1).stderr
    too_large = ficc(
        "service", "preview", "big", *options[:4], "--memory-bytes", str(1 << 50), *runtime, status=1
    )
    assert not too_large.stdout
    assert too_large.stderr.startswith("Error: Does not fit on ")
    assert "does_not_fit" in too_large.stderr

    assert ficc("service", "stop", "cli", status=2).stderr.startswith("Error: ")  # no terminal to ask on
    stopped = ficc("service", "stop", "cli", "--yes")
    assert stopped.stdout.startswith("Stopped  cli")
    refused = ficc("model", "remove", "smollm2", "--yes", status=1)
    assert "model_referenced" in refused.stderr
    restarted = ficc("service", "start", "cli")
    assert restarted.stdout.startswith("Ready  cli")
    assert "draining" in (drained := ficc("service", "drain", "cli").stderr)
    assert "0 in flight" in drained
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


@pytest.fixture
def scratch(tmp_path: Path) -> Shell:
    """A state directory of its own, in which nothing runs."""
    return Shell(tmp_path)


def test_an_image_is_removed(scratch: Shell, tmp_path: Path) -> None:
    record = scratch.json("runtime", "import", str(layout(tmp_path / "layout", base_layer(member("a")))))
    asked = scratch("runtime", "remove", record["image_digest"], status=2)
    assert "--yes" in asked.stderr
    removed = scratch.json("runtime", "remove", record["image_digest"], "--yes")
    assert removed == {
        "removed": True,
        "image_digest": record["image_digest"],
        "bytes_freed": record["bytes"],
    }
    assert scratch.json("runtime", "list")["items"] == []
    again = scratch("runtime", "remove", record["image_digest"], "--yes", status=1)
    assert "image_not_found" in again.stderr


def test_a_build_works_in_one_place_and_takes_no_other_wheel(scratch: Shell, tmp_path: Path) -> None:
    left = tmp_path / "build" / "image-build-left"
    left.mkdir(parents=True)
    scratch.environment["PATH"] = "/nowhere"
    wheel = tmp_path / "other.whl"
    wheel.write_bytes(b"another")
    refused = scratch("runtime", "build", "llama-cpp", "--wheel", str(wheel), status=1)
    assert f"sha256 {hashlib.sha256(b'another').hexdigest()}, expected " in refused.stderr
    assert left.exists()
    scratch("runtime", "build", "llama-cpp", "--suite", "bookworm", status=1)
    assert [path.name for path in left.parent.iterdir()] == ["images.lock"]


def test_doctor(ficc: Shell) -> None:
    report = ficc.json("doctor")
    assert report["ok"], report["checks"]
    assert {"bwrap", "mmdebstrap", "limits", "controller"} <= {check["check"] for check in report["checks"]}


def test_doctor_shows_no_password(scratch: Shell) -> None:
    scratch.environment["FICC_DATABASE_URL"] = "postgresql+psycopg://me:canary@db/ficc"
    done = scratch("doctor", status=1)  # nothing runs there
    assert "postgresql+psycopg://me:***@db/ficc" in done.stdout
    assert "canary" not in done.stdout + done.stderr


def test_a_whole_id_is_asked_for_and_not_searched_for(ficc: Shell, installation: Installation) -> None:
    node = installation.node()
    assert ficc.json("node", "show", node["id"])["id"] == node["id"]
    token = installation.call("POST", "/tokens", {"label": "by id", "scopes": ["models:read"]})
    assert ficc.json("token", "revoke", token["id"], "--yes") == {"removed": True}  # tokens are only listed
    nobody = ficc("service", "show", token["id"], status=1)
    assert "There is none called" in nobody.stderr


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
    assert "server.listen (FICC_SERVER_LISTEN)" in ficc("doctor", status=2).stderr


def test_quiet_says_nothing_beside_the_result(ficc: Shell) -> None:
    done = ficc("--quiet", "model", "list")
    assert not done.stderr
