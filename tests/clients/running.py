"""One client's program against a running installation, and what it said of each step."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from clients.environments import FOLDER, Client
from contract.scripted import ScriptedInstallation

MODEL = "one"
UNKNOWN_MODEL = "nobody"
WRONG_TOKEN = "ficc_of-nobody"  # it opens nothing
USAGE = {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3}
BASE_URLS = {"service": "/api/v1/inference/{}/v1", "project": "/api/v1/openai/v1"}
RESULTS = FOLDER / "results.json"
PROGRAM_SECONDS = 120.0
LEFT_SECONDS = 10.0
OFFLINE = {
    "LANGCHAIN_TRACING_V2": "false",
    "LANGSMITH_TRACING": "false",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "LITELLM_TELEMETRY": "False",
    "NODE_USE_ENV_PROXY": "1",
}
"""What keeps the clients from asking others, and has Node ask a proxy as the others do by themselves."""


class Outside:
    """The proxy for everything but loopback: it takes note of what is asked, and refuses it."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._asked: list[str] = []
        self._thread = threading.Thread(target=self._listen, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()

    @property
    def environment(self) -> dict[str, str]:
        url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        names = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")
        found = {name: url for upper in names for name in (upper, upper.lower())}
        return {**found, "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}

    def asked(self) -> list[str]:
        """The first lines of what was asked since the last call."""
        found, self._asked = self._asked, []
        return found

    def _listen(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return  # closed
            with connection:
                connection.settimeout(1)
                line = "a connection"
                try:
                    line = connection.recv(4096).partition(b"\r\n")[0].decode("latin-1")
                    connection.sendall(b"HTTP/1.1 403 No\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
                except OSError:
                    pass  # it left, or says nothing
                self._asked.append(line)


@dataclass
class Run:
    """`steps`: what the program said of each; `left`: whether the engine was let go by the step `abort`."""

    steps: dict[str, dict[str, Any]] = field(default_factory=dict)
    left: bool = False
    asked_outside: list[str] = field(default_factory=list)
    returncode: int | None = None
    errors: str = ""

    def step(self, name: str) -> dict[str, Any]:
        assert name in self.steps, (
            f"nothing was said of it; the program ended with {self.returncode}:\n{self.errors}"
        )
        return self.steps[name]


class Results:
    """Which steps of which client went well, by its base URL: what this session found, and else what others did."""

    def __init__(self) -> None:
        self._found: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}

    @contextmanager
    def judging(self, client: Client, url: str, step: str) -> Iterator[None]:
        """A step that went well, unless this raises."""
        if self._found.get(client.name, {}).get("version") != client.version:
            self._found[client.name] = {"version": client.version, "passed": {}}
        passed = self._found[client.name]["passed"].setdefault(url, {})
        passed[step] = False
        yield
        passed[step] = True

    def write(self) -> None:
        RESULTS.parent.mkdir(parents=True, exist_ok=True)
        RESULTS.write_text(json.dumps(self._found, indent=1, sort_keys=True) + "\n")


class Runs:
    """Each client's program is run once for each base URL."""

    def __init__(self, installation: ScriptedInstallation, outside: Outside, directory: Path) -> None:
        self.installation = installation
        self.results = Results()
        self._outside = outside
        self._directory = directory
        self._made: dict[tuple[str, str], Run] = {}

    @cached_property
    def service_id(self) -> str:
        return str(self.installation.service(MODEL)["id"])

    def path(self, url: str) -> str:
        return BASE_URLS[url].format(self.service_id)

    def of(self, client: Client, url: str) -> Run:
        key = (client.name, url)
        if key not in self._made:
            self._made[key] = self._run(client, url)
        return self._made[key]

    def _run(self, client: Client, url: str) -> Run:
        command, key, run = client.command(), f"{client.name} {url}", Run()
        home = self._directory / key.replace(" ", "-")
        home.mkdir()
        self._outside.asked()
        with (home / "errors").open("w+") as errors:
            process = subprocess.Popen(
                command,
                env=self._environment(url, key, home),
                cwd=home,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
            limit = threading.Timer(PROGRAM_SECONDS, process.kill)
            limit.start()
            try:
                self._follow(process, run, key)
            finally:
                limit.cancel()
                process.kill()
                process.wait()
            errors.seek(0)
            run.errors = errors.read()[-4000:]
        run.asked_outside = self._outside.asked()
        return run

    def _follow(self, process: subprocess.Popen[str], run: Run, key: str) -> None:
        """Until the program ends. It waits behind its last step, so that its end is not what lets the engine go."""
        assert process.stdin is not None
        assert process.stdout is not None
        for line in process.stdout:
            found = json.loads(line)
            run.steps[found.pop("step")] = found
            if "abort" in run.steps and "raised" not in run.steps["abort"]:
                run.left = self._is_left(key)
                process.stdin.close()
        run.returncode = process.wait()

    def _is_left(self, key: str) -> bool:
        """Whether the engine's one request of this key is over, and nothing is in flight."""

        def look() -> bool:
            record = self.installation.record(self.service_id)
            in_flight = any(replica["in_flight"] for replica in record["replicas"])
            return not in_flight and self.installation.seen(self.service_id, key) == {"times": 1, "closed": 1}

        try:
            return self.installation.until(look, f"{key}: nothing is in flight", seconds=LEFT_SECONDS)
        except AssertionError:
            return False

    def _environment(self, url: str, key: str, home: Path) -> Mapping[str, str]:
        told = {
            "base_url": self.installation.origin + self.path(url),
            "token": self.installation.token,
            "model": MODEL,
            "wrong_token": WRONG_TOKEN,
            "unknown_model": UNKNOWN_MODEL,
            "hi": json.dumps({"usage": USAGE}),
            "hang": json.dumps({"do": "hang", "key": key}),
        }
        return {
            "PATH": os.environ["PATH"],
            "HOME": str(home),
            "LLM_USER_PATH": str(home / "llm"),
            "CLIENT_TEST": json.dumps(told),
            **OFFLINE,
            **self._outside.environment,
        }
