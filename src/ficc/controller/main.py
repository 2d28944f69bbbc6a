"""The controller process: binds, drops its privileges, serves until a signal."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import uvicorn
import uvloop
from sqlalchemy.exc import DBAPIError

import ficc
from ficc import lockfile, logs
from ficc.controller import account
from ficc.controller.bootstrap import Controller, UnusableFile
from ficc.controller.edge import EdgeLimits, edge_protocol
from ficc.controller.store.database import UnknownSchema
from ficc.domain.errors import Refused
from ficc.process import freeze_garbage_collector, raise_open_files
from ficc.settings import Settings, load, parse_listen, without_secrets

BACKLOG = 4096
SHUTDOWN_SECONDS = 5
LOCK_FILE = "controller.lock"
OWNER_TOKEN_LABEL = "command line on the controller's machine"  # noqa: S105  # a label

PACKAGE = Path(ficc.__file__).parent

log = logging.getLogger("ficc.controller")


class _Server(uvicorn.Server):
    """Uvicorn without its signal handlers: the process has its own."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def run(settings: Settings) -> None:
    """The whole life of a controller process."""
    logs.configure(settings.log, "controller")
    raise_open_files()
    os.umask(0o077)
    _prepare_directories(settings)
    _hold(settings)
    sock = _bind(settings)
    _drop_privileges(settings)
    uvloop.run(_serve(settings, sock))


async def _serve(settings: Settings, sock: socket.socket) -> None:
    try:
        controller = Controller(settings)
    except UnusableFile as error:
        raise SystemExit(f"controller: {error}") from None
    label = OWNER_TOKEN_LABEL if not settings.owner_token_file.exists() else None
    try:
        first = await controller.start(token_label=label)
    except (Refused, UnknownSchema) as error:
        await controller.stop()
        raise SystemExit(f"controller: {_why_not_started(settings, error)}") from None
    if first.token is not None:
        _write_private(settings.owner_token_file, first.token + "\n")
    server = _Server(
        uvicorn.Config(
            controller,
            http=edge_protocol(
                EdgeLimits(
                    header_seconds=settings.server.header_seconds,
                    body_idle_seconds=settings.server.body_idle_seconds,
                    write_stall_seconds=settings.server.write_stall_seconds,
                )
            ),
            limit_concurrency=settings.server.connections_max,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            backlog=BACKLOG,
            timeout_graceful_shutdown=SHUTDOWN_SECONDS,
            ssl_certfile=settings.server.tls_cert,
            ssl_keyfile=settings.server.tls_key,
        )
    )

    def end() -> None:
        server.should_exit = True

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, end)
    freeze_garbage_collector()
    sock.listen(BACKLOG)  # whoever reads the address is not refused
    origin = _origin(settings, sock)
    _write_private(settings.address_file, json.dumps({"origin": origin, "pid": os.getpid()}))
    log.info("controller serves at %s", origin)
    try:
        await server.serve(sockets=[sock])
    finally:
        settings.address_file.unlink(missing_ok=True)
        await controller.stop()


def _hold(settings: Settings) -> None:
    """Be the only controller of a state directory, until this process ends. Raises SystemExit; then nothing
    of the other one was touched."""
    directory = settings.controller_directory
    try:
        lockfile.hold(directory / LOCK_FILE)
    except lockfile.Held as held:
        raise SystemExit(f"controller: another controller (pid {held.pid}) runs on {directory}.") from None
    except OSError as error:
        raise SystemExit(f"controller: {directory} cannot be used: {error.strerror}.") from None


def _why_not_started(settings: Settings, error: Refused | UnknownSchema) -> str:
    """In a sentence that says what is in the way."""
    fault = error.__cause__
    if isinstance(error, Refused) and isinstance(fault, DBAPIError):
        return f"the database {without_secrets(settings.database_url)} cannot be used: {fault.orig}."
    return error.message if isinstance(error, Refused) else str(error)


def _bind(settings: Settings) -> socket.socket:
    """The listening socket. Raises SystemExit for an address that needs TLS, or is taken."""
    listen = parse_listen(settings.server.listen)
    if isinstance(listen, Path):
        listen.unlink(missing_ok=True)
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.bind(str(listen))
        return sock
    host, port = listen
    if not settings.server.only_local and settings.server.tls_cert is None:
        raise SystemExit(
            f"controller: {settings.server.listen} is reachable from other machines, so it needs TLS: set "
            "server.tls_cert and server.tls_key, or listen on unix:/path behind a proxy that has it."
        )
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
    except OSError as error:
        raise SystemExit(
            f"controller: cannot listen on {settings.server.listen}: {error.strerror}. Choose another address "
            "with --listen HOST:PORT or FICC_SERVER_LISTEN."
        ) from None
    return sock


def _origin(settings: Settings, sock: socket.socket) -> str:
    """How clients on this machine reach the socket."""
    if sock.family == socket.AF_UNIX:
        return f"unix:{sock.getsockname()}"
    host, port = sock.getsockname()[:2]
    scheme = "https" if settings.server.tls_cert else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def _prepare_directories(settings: Settings) -> None:
    try:
        settings.state_directory.mkdir(parents=True, exist_ok=True)
        if os.geteuid() == 0:
            settings.state_directory.chmod(0o711)
        for directory in (settings.controller_directory, settings.content_directory):
            directory.mkdir(mode=0o700, exist_ok=True)
            if os.geteuid() == 0:
                os.chown(directory, settings.controller_uid, settings.controller_uid)
    except OSError as error:
        raise SystemExit(f"controller: {error.filename} cannot be used: {error.strerror}.") from None


def _drop_privileges(settings: Settings) -> None:
    """Only the executor keeps rights; a controller that root started goes on under its own account."""
    if os.geteuid() != 0:
        return
    needed = [Path(sys.prefix), Path(sys.base_prefix), PACKAGE, settings.state_directory]
    needed += [settings.controller_directory, settings.content_directory, settings.executor_socket.parent]
    files = (
        settings.server.tls_cert,
        settings.server.tls_key,
        settings.acquisition.ca_file,
        settings.hub.token_file,
    )
    needed += [file.parent for file in files if file is not None]
    try:
        account.become(settings.controller_uid, needed)
    except OSError as error:
        raise SystemExit(
            f"controller: cannot go on under its own account: {error.strerror}. Install ficc and keep its state "
            "where other accounts may search every directory above it."
        ) from None


def _write_private(path: Path, text: str) -> None:
    """Write a file that only this account reads, whole or not at all."""
    unfinished = path.with_suffix(".new")
    fd = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)


def main() -> None:
    try:
        run(load(*(Path(argument) for argument in sys.argv[1:2])))
    except KeyboardInterrupt:
        raise SystemExit(130) from None
