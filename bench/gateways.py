"""Other people's gateways, each of one worker before the same engine: nginx, which only passes bytes on, and
LiteLLM's proxy, in an environment of its own. Neither is a dependency of ficc."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import psutil

from bench.load import Target
from bench.setup import CACHE

LITELLM_LOCK = Path(__file__).with_name("litellm.lock")
LITELLM_HOME = CACHE / "litellm"
START_SECONDS = 180
"""LiteLLM imports for a long time where two cores are shared."""
STOP_SECONDS = 10
LOOK_SECONDS = 0.1

_NGINX = """\
daemon off;
{user}
worker_processes 1;
pid {directory}/pid;
error_log {directory}/error.log warn;
events {{ worker_connections 4096; }}
http {{
    access_log off;
    keepalive_requests 1000000;
    client_body_temp_path {directory}/body;
    proxy_temp_path {directory}/proxy;
    fastcgi_temp_path {directory}/fastcgi;
    uwsgi_temp_path {directory}/uwsgi;
    scgi_temp_path {directory}/scgi;
    upstream engine {{
        server {engine};
        keepalive 64;
        keepalive_requests 1000000;
    }}
    server {{
        listen 127.0.0.1:{port};
        location / {{
            proxy_pass http://engine;
            proxy_http_version 1.1;
            proxy_set_header Connection "";
            proxy_buffering off;
            proxy_read_timeout 600s;
        }}
    }}
}}
"""


class Absent(Exception):
    """The gateway cannot be measured here, and why."""


@asynccontextmanager
async def nginx(engine: Target, directory: Path) -> AsyncIterator[tuple[Target, list[int]]]:
    """Where it answers, and its processes. Raises Absent."""
    program = shutil.which("nginx", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
    if program is None:
        raise Absent("not installed")
    directory.mkdir()
    port = _free_port()
    configuration = _NGINX.format(
        directory=directory,
        port=port,
        engine=f"{engine.host}:{engine.port}",
        user="user root;" if os.geteuid() == 0 else "",
    )
    (directory / "nginx.conf").write_text(configuration)
    command = [program, "-p", str(directory), "-c", "nginx.conf", "-e", str(directory / "error.log")]
    async with _running(command, directory, dict(os.environ)) as process:
        target = Target("127.0.0.1", port)
        await _answers(target, "/", process)
        yield target, _tree(process.pid)


@asynccontextmanager
async def litellm(engine: Target, directory: Path) -> AsyncIterator[tuple[Target, list[int]]]:
    """The same; its environment is made for the first run. Raises Absent."""
    await asyncio.to_thread(_install_litellm)
    directory.mkdir()
    port, key = _free_port(), f"sk-{secrets.token_hex(16)}"
    base = f"http://{engine.host}:{engine.port}/v1"
    parameters = {"model": "openai/bench", "api_base": base, "api_key": "none"}
    configuration = {
        "model_list": [{"model_name": "bench", "litellm_params": parameters}],
        "litellm_settings": {"telemetry": False},
        "general_settings": {"master_key": key},
    }
    (directory / "config.yaml").write_text(json.dumps(configuration))  # which is YAML too
    environment = {
        "PATH": os.environ.get("PATH", ""),
        "HOME": str(directory),
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "LITELLM_TELEMETRY": "False",
        "LITELLM_LOG": "ERROR",
    }
    command = [str(LITELLM_HOME / "bin" / "litellm"), "--config", "config.yaml", "--host", "127.0.0.1"]
    command += ["--port", str(port), "--num_workers", "1", "--telemetry", "False"]
    async with _running(command, directory, environment) as process:
        target = Target("127.0.0.1", port, token=key)
        await _answers(target, "/health/liveliness", process)
        yield target, _tree(process.pid)


def litellm_version() -> str:
    line = next(line for line in LITELLM_LOCK.read_text().splitlines() if line.startswith("litellm=="))
    return line.split()[0].removeprefix("litellm==")


def _install_litellm() -> None:
    """Make its environment, unless this lock is installed already."""
    made_of = hashlib.sha256(LITELLM_LOCK.read_bytes()).hexdigest()
    mark = LITELLM_HOME / "made-of"
    if mark.exists() and mark.read_text() == made_of:
        return
    shutil.rmtree(LITELLM_HOME, ignore_errors=True)
    print(f"making an environment for LiteLLM {litellm_version()} …", file=sys.stderr)
    pip = [str(LITELLM_HOME / "bin" / "python"), "-m", "pip", "install", "--quiet"]
    pip += ["--disable-pip-version-check", "--require-hashes", "--only-binary", ":all:"]
    try:
        subprocess.run([sys.executable, "-m", "venv", str(LITELLM_HOME)], check=True)
        subprocess.run([*pip, "-r", str(LITELLM_LOCK)], check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise Absent("its environment could not be made") from error
    mark.write_text(made_of)


@asynccontextmanager
async def _running(
    command: list[str], directory: Path, environment: dict[str, str]
) -> AsyncIterator[asyncio.subprocess.Process]:
    with (directory / "output").open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            *command, cwd=directory, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output
        )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            process.terminate()
        try:
            async with asyncio.timeout(STOP_SECONDS):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()


async def _answers(target: Target, path: str, process: asyncio.subprocess.Process) -> None:
    """Wait until something answers there. Raises Absent when it does not come up."""
    request = f"GET {path} HTTP/1.1\r\nHost: {target.host}\r\nConnection: close\r\n\r\n".encode()
    try:
        async with asyncio.timeout(START_SECONDS):
            while process.returncode is None:
                with suppress(OSError):
                    reader, writer = await asyncio.open_connection(target.host, target.port)
                    if path == "/":  # to connect is enough
                        writer.close()
                        return
                    writer.write(request)
                    status = await reader.readline()
                    writer.close()
                    if b" 200 " in status:
                        return
                await asyncio.sleep(LOOK_SECONDS)
    except TimeoutError:
        raise Absent(f"did not answer within {START_SECONDS} s") from None
    raise Absent(f"ended with status {process.returncode} before it answered")


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def _tree(pid: int) -> list[int]:
    process = psutil.Process(pid)
    return [pid, *(child.pid for child in process.children(recursive=True))]
