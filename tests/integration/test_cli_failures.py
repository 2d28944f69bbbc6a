"""What goes wrong around a command: one line that says what and what to do, the right status, no traceback."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.installation import Installation

pytestmark = pytest.mark.timeout(240)

FICC = str(Path(sys.executable).parent / "ficc")


class Shell:
    """Runs `ficc` with an environment, off a terminal."""

    def __init__(self, directory: Path, **environment: str) -> None:
        self.environment = {
            **os.environ,
            "FICC_STATE_DIRECTORY": str(directory),
            "NO_COLOR": "1",
            **environment,
        }

    def __call__(self, *words: str, status: int, **environment: str) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [FICC, *words],
            env={**self.environment, **environment},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == status, f"{words}: {done.returncode}\n{done.stdout}{done.stderr}"
        return done

    def fails(self, *words: str, status: int, **environment: str) -> str:
        """The one line that a failing command says."""
        done = self(*words, status=status, **environment)
        assert not done.stdout
        assert len(done.stderr.splitlines()) == 1, done.stderr
        assert done.stderr.startswith("Error: ")
        return done.stderr


@pytest.fixture(scope="module")
def controller(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installation]:
    """A controller alone: nothing here needs an engine."""
    made = Installation(tmp_path_factory.mktemp("controller"))
    made.start("controller")
    yield made
    made.stop()


@pytest.fixture
def ficc(controller: Installation) -> Shell:
    return Shell(controller.directory)


# Files for secrets.


def ids_of_tokens(ficc: Shell) -> list[str]:
    return [one["id"] for one in json.loads(ficc("token", "list", "--json", status=0).stdout)["items"]]


@pytest.mark.parametrize("kind", ["exists", "directory", "nowhere"])
def test_a_secret_without_a_place_is_never_made(ficc: Shell, tmp_path: Path, kind: str) -> None:
    out = {"exists": tmp_path / "token", "directory": tmp_path, "nowhere": tmp_path / "no" / "token"}[kind]
    if kind == "exists":
        out.write_text("another's")
    before = ids_of_tokens(ficc)
    command = ("token", "create", "lost", "--scope", "models:read", "--out", str(out))
    assert str(out) in ficc.fails(*command, status=2)
    assert ids_of_tokens(ficc) == before
    assert kind != "exists" or out.read_text() == "another's"


def test_a_secret_that_was_not_made_leaves_no_file(ficc: Shell, tmp_path: Path) -> None:
    out = tmp_path / "token"
    said = ficc.fails("service", "token", "nobody", "--out", str(out), status=1)
    assert "among the services" in said
    assert not out.exists()
    ficc("token", "create", "made", "--scope", "models:read", "--out", str(out), status=0)
    assert out.read_text().startswith("ficc_")
    assert out.stat().st_mode & 0o777 == 0o600


# The environment.


@pytest.mark.parametrize(
    "url", ["foo", "ftp://host", "http://", "http://host:port", "http://host/path", "unix:x"]
)
def test_an_address_that_is_none(ficc: Shell, url: str) -> None:
    assert f"FICC_URL={url}" in ficc.fails("model", "list", status=2, FICC_URL=url)


def test_an_address_where_nobody_answers(ficc: Shell) -> None:
    said = ficc.fails("model", "list", status=1, FICC_URL="http://127.0.0.1:1")
    assert "http://127.0.0.1:1: Connection refused." in said


@pytest.mark.parametrize("kind", ["missing", "directory", "binary"])
def test_a_token_file_that_cannot_be_read(ficc: Shell, tmp_path: Path, kind: str) -> None:
    file = tmp_path if kind == "directory" else tmp_path / "token"
    if kind == "binary":
        file.write_bytes(b"\xff\xfe")
    assert f"FICC_TOKEN_FILE={file}" in ficc.fails("model", "list", status=2, FICC_TOKEN_FILE=str(file))


def test_settings_that_are_wrong_are_named_in_plain_words(tmp_path: Path) -> None:
    ficc = Shell(tmp_path)
    said = ficc.fails("up", status=2, FICC_SERVER_LISTEN="nonsense")
    assert said.startswith("Error: server.listen (FICC_SERVER_LISTEN): listen is HOST:PORT, ")
    assert "there is no such setting" in ficc.fails("up", status=2, FICC_SERVER_LISTENS="x")
    (tmp_path / "ficc.toml").write_text("[server")
    assert "ficc.toml" in ficc.fails("doctor", status=2)
    assert "ficc.toml" in ficc.fails("serve", status=2)


def test_a_state_directory_that_cannot_be_one(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    said = Shell(tmp_path / "file" / "state").fails("up", status=1)
    assert str(tmp_path / "file" / "state") in said


@pytest.mark.parametrize(("flag", "environment"), [(("--debug",), {}), ((), {"FICC_DEBUG": "1"})])
def test_a_traceback_is_for_those_who_ask(
    ficc: Shell, flag: tuple[str, ...], environment: dict[str, str]
) -> None:
    said = ficc("model", "list", *flag, status=2, FICC_URL="foo", **environment).stderr
    assert "Traceback" in said
    assert said.splitlines()[-1].startswith("Error: FICC_URL=foo")


def test_the_state_directory_by_a_flag_before_and_behind(controller: Installation, tmp_path: Path) -> None:
    elsewhere = Shell(tmp_path)
    flag = f"--state-directory={controller.directory}"
    for words in (
        (flag, "model", "list", "--json"),
        ("model", "list", "--json", "--state-directory", str(controller.directory)),
    ):
        assert json.loads(elsewhere(*words, status=0).stdout) == {"items": [], "next": None}
    assert "No controller runs" in elsewhere.fails("model", "list", status=1)


# What was typed.


def test_a_capability_is_checked_before_anything_is_read(ficc: Shell, tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(bytes(1 << 20))
    said = ficc.fails("model", "add", str(file), "--capability", "vision", status=2)
    assert "'vision' is not one of 'chat', 'completions', 'embeddings', 'rerank'" in said


@pytest.mark.parametrize("words", [("x", ""), ("x", "hi", "--max-tokens", "0")])
def test_a_question_that_is_none(ficc: Shell, words: tuple[str, ...]) -> None:
    ficc.fails("chat", *words, status=2)


def test_an_alias_that_is_none_is_refused_in_words(ficc: Shell, tmp_path: Path) -> None:
    spec = tmp_path / "spec.json"
    spec.write_text("{}")
    said = ficc("service", "preview", "Bad Alias", "--spec", str(spec), status=1).stderr
    assert "alias: an alias has 1 to 63 of a-z" in said


def test_a_route_that_is_none_is_named(controller: Installation) -> None:
    async def work(api: object) -> str:
        with pytest.raises(Exception, match="There is no route /api/v1/nonsense; ") as caught:
            await api.call("GET", "/nonsense")  # type: ignore[attr-defined]
        return str(caught.value)

    assert "openapi.json" in controller.run(work)


def test_names_are_quoted_where_they_are_to_be_pasted(ficc: Shell, tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(os.urandom(1000))
    said = ficc("model", "add", str(file), "--name", "a model", "--upload", status=0).stderr
    assert "--model 'a model'" in said
