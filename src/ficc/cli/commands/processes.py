"""Commands that start processes, and what looks at the machine: up, serve, executor, open, doctor."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ficc import __version__
from ficc.cli import connection, output
from ficc.cli.failure import Failure
from ficc.cli.lifetime import Asked, alone, until_asked
from ficc.cli.options import Json
from ficc.client.errors import ApiError, Unreachable

if TYPE_CHECKING:
    from ficc.client.api import Api
    from ficc.images.record import ImageRecord
    from ficc.settings import Settings

START_SECONDS = 30.0
STOP_SECONDS = 30.0
RESTARTS_MAX = 5
"""Restarts of one process within RESTART_WINDOW_SECONDS after which `ficc up` gives up."""
RESTART_WINDOW_SECONDS = 60.0
POLL_SECONDS = 0.1

Listen = Annotated[str | None, typer.Option("--listen", help="HOST:PORT or unix:/path.")]
Lifeline = Annotated[
    bool, typer.Option("--lifeline", help="End when standard input ends, as it does with whoever holds it.")
]


def _settings(listen: str | None = None) -> Settings:
    """The settings, with a flag handed on to child processes by the environment."""
    if listen is not None:
        os.environ["FICC_SERVER_LISTEN"] = listen
    return connection.settings()


def serve(listen: Listen = None) -> None:
    """Run a controller: the API, the console and the gateway."""
    _settings(listen)
    os.execv(sys.executable, [sys.executable, "-m", "ficc.controller"])  # noqa: S606


def executor() -> None:
    """Run this machine's executor, which owns engines, limits and sockets."""
    _settings()
    os.execv(sys.executable, [sys.executable, "-m", "ficc.executor"])  # noqa: S606


def up(listen: Listen = None, lifeline: Lifeline = False) -> None:
    """Run a controller and an executor on this machine until Ctrl-C."""
    settings = _settings(listen)
    with alone(settings.state_directory), until_asked(lifeline=lifeline) as asked:
        family = Family(settings)
        try:
            if family.start(asked):
                asyncio.run(_greet(settings))
            while not asked.within(POLL_SECONDS):
                family.keep_up()
        finally:
            output.say("Stopping …")
            family.stop()


class Family:
    """The two processes of `ficc up`. One that ends unasked is started again, a bounded number of times."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._restarts: dict[str, list[float]] = {"executor": [], "controller": []}

    def start(self, asked: Asked) -> bool:
        """Start both and wait until the controller answers; False when we were asked to end before that.
        Raises Failure."""
        self._start("executor")
        self._start("controller")
        until = time.monotonic() + START_SECONDS
        while not (self._controller_serves() and self._settings.executor_socket.exists()):
            for name, process in self._processes.items():
                if process.poll() is not None:
                    status = process.returncode
                    raise Failure(
                        "not_started", f"The {name} ended with status {status}; what it said stands above."
                    )
            if time.monotonic() > until:
                raise Failure("not_started", f"Not ready within {START_SECONDS:.0f} s.")
            if asked.within(POLL_SECONDS):
                return False
        return True

    def _controller_serves(self) -> bool:
        """Whether the address that is written down is this controller's, and not of one that was killed."""
        try:
            address = json.loads(self._settings.address_file.read_text())
        except FileNotFoundError:
            return False
        return bool(address["pid"] == self._processes["controller"].pid)

    def _start(self, name: str) -> None:
        # A session of its own: Ctrl-C is for this process, which then ends them in order.
        self._processes[name] = subprocess.Popen(
            [sys.executable, "-m", f"ficc.{name}"], start_new_session=True, stdin=subprocess.DEVNULL
        )

    def keep_up(self) -> None:
        """Start again what ended. Raises Failure."""
        for name, process in list(self._processes.items()):
            if process.poll() is None:
                continue
            now = time.monotonic()
            recent = [at for at in self._restarts[name] if at > now - RESTART_WINDOW_SECONDS]
            if len(recent) >= RESTARTS_MAX:
                raise Failure(
                    "not_kept_up",
                    f"The {name} ended {RESTARTS_MAX} times within {RESTART_WINDOW_SECONDS:.0f} s.",
                )
            output.say(f"The {name} ended with status {process.returncode}; it is started again.")
            self._restarts[name] = [*recent, now]
            self._start(name)

    def stop(self) -> None:
        """The controller first, so that it plans nothing while the executor ends its attempts."""
        for name in ("controller", "executor"):
            process = self._processes.get(name)
            if process is None or process.poll() is not None:
                continue
            process.terminate()
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                output.say(f"The {name} did not end within {STOP_SECONDS:.0f} s and is killed.")
                process.kill()
                process.wait()


async def _greet(settings: Settings) -> None:
    """What a person needs next, in a few lines."""
    async with connection.find() as api:
        code = await api.call("POST", "/session/codes")
        nodes = [node async for node in api.every("/contributors")]
    output.say(f"ficc {__version__} on {settings.state_directory}. {_who_can_connect(settings)}")
    for node in nodes:
        if unenforceable := node["unenforceable"]:
            output.say(f"This machine cannot enforce {', '.join(unenforceable)}; `ficc doctor` says why.")
    output.say(f"Console  {code['url']}   (one use, ten minutes; another: ficc open)")
    if not _images(settings):
        output.say("Next     ficc runtime build llama-cpp")
    else:
        output.say("Next     ficc model add FILE.gguf")


def _who_can_connect(settings: Settings) -> str:
    if settings.server.only_local:
        return "Only this machine can connect."
    return f"Other machines can connect, at {settings.server.listen}."


def open_console(as_json: Json = False) -> None:
    """Print a fresh one-use link to the console."""
    code = connection.with_api(lambda api: api.call("POST", "/session/codes"))
    if as_json:
        output.show_json(code)
    else:
        print(code["url"])
        output.say("One use, ten minutes.")


def doctor(as_json: Json = False) -> None:
    """Check this machine: what is missing for sandboxes, with the fix, and what is in force."""
    settings = connection.settings()
    checks = [*_machine_checks(settings.executor.provider), *_installation_checks(settings)]
    if as_json:
        output.show_json({"ok": all(check["ok"] for check in checks), "checks": checks})
    else:
        for check in checks:
            print(f"{'ok  ' if check['ok'] else 'FAIL'}  {check['check']}: {check['finding']}")
        print("\nIn force:")
        print(json.dumps(settings.model_dump(mode="json"), indent=2))
    if not all(check["ok"] for check in checks):
        raise typer.Exit(1)


def _machine_checks(provider: str) -> list[dict[str, Any]]:
    checks = []
    sandboxes = "bwrap" if provider == "bubblewrap" else provider
    for program, why in ((sandboxes, "runs the sandboxes"), ("mmdebstrap", "builds runtime images")):
        path = shutil.which(program)
        package = "bubblewrap" if program == "bwrap" else program
        finding = path or f"not found; it {why}. Install the package {package}."
        checks.append({"check": program, "ok": path is not None, "finding": finding})
    found = subprocess.run(
        [sys.executable, "-m", "ficc.executor", "--check"], capture_output=True, text=True, check=False
    )
    if found.returncode:
        return [*checks, {"check": "executor", "ok": False, "finding": found.stderr.strip()[-500:]}]
    report = json.loads(found.stdout)
    for limit, why in report["unenforceable"].items():
        checks.append({"check": limit, "ok": False, "finding": why})
    if not report["unenforceable"]:
        checks.append({"check": "limits", "ok": True, "finding": f"all enforceable ({report['cgroups']})"})
    checks.append(
        {"check": "accounts", "ok": True, "finding": f"payloads run under {report['accounts']} accounts"}
    )
    return checks


def _installation_checks(settings: Settings) -> list[dict[str, Any]]:
    images = _images(settings)
    checks = [
        {
            "check": "runtime images",
            "ok": bool(images),
            "finding": ", ".join(image.name for image in images)
            or "none yet; build one with `ficc runtime build llama-cpp`.",
        }
    ]
    try:
        health = connection.with_api(lambda api: api.call("GET", "/health"))
        checks.append({"check": "controller", "ok": True, "finding": f"answers, release {health['version']}"})
        nodes = connection.with_api(_nodes)
        for node in nodes:
            state = "connected" if node["connected"] else "not connected"
            checks.append({"check": f"node {node['name']}", "ok": node["connected"], "finding": state})
    except (Unreachable, ApiError) as error:
        checks.append({"check": "controller", "ok": False, "finding": str(error)})
    return checks


def _images(settings: Settings) -> list[ImageRecord]:
    """The images of this machine's executor, as far as this account may look."""
    from ficc.images.store import ImageStore

    readable = os.access(settings.images_directory, os.R_OK)
    return ImageStore(settings.images_directory).list() if readable else []


async def _nodes(api: Api) -> list[dict[str, Any]]:
    return [node async for node in api.every("/contributors")]
