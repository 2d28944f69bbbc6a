"""A PostgreSQL of the tests' own: made in a temporary directory, reached over a unix socket only. It ends with
them, also when they are killed."""

from __future__ import annotations

import ctypes
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path

import psutil
import psycopg
import pytest

START_SECONDS = 60.0
STOP_SECONDS = 30.0
ROLE = "ficc"
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)


def binaries() -> Path | None:
    """Where the server's programs are: in PATH, else where Debian keeps them, the newest version first."""
    found = shutil.which("initdb")
    if found is not None:
        return Path(found).resolve().parent
    versions = Path("/usr/lib/postgresql").glob("*/bin/initdb")
    return max((path.parent for path in versions), key=lambda path: float(path.parent.name), default=None)


def require_binaries() -> Path:
    found = binaries()
    if found is None:
        if os.environ.get("CI"):
            pytest.fail("PostgreSQL is not installed: no initdb in PATH or below /usr/lib/postgresql")
        pytest.skip("PostgreSQL is not installed")
    return found


class Postgres:
    """A server. `start` and `stop` may alternate; `remove` ends it for good."""

    def __init__(self) -> None:
        self._binaries = require_binaries()
        self._account = _account()
        self.directory = Path(tempfile.mkdtemp(prefix="ficc-postgres-"))
        self.directory.chmod(0o711)  # other accounts come by on their way to the socket
        self._data, self.socket_directory = self.directory / "data", self.directory / "socket"
        for path in (self._data, self.socket_directory):
            path.mkdir()
            if self._account is not None:
                os.chown(path, self._account.pw_uid, self._account.pw_gid)
        self.socket_directory.chmod(0o755)
        self.log = self.directory / "log"
        self._process: subprocess.Popen[bytes] | None = None
        self._databases = 0
        initdb = [
            "initdb",
            "-D",
            self._data,
            "-U",
            ROLE,
            "-A",
            "trust",
            "-E",
            "UTF8",
            "--locale=C",
            "--no-sync",
        ]
        assert self._run(initdb).wait(START_SECONDS) == 0, self.log.read_text()

    def start(self) -> None:
        settings = {
            "listen_addresses": "",
            "unix_socket_directories": str(self.socket_directory),
            "fsync": "off",
            "full_page_writes": "off",
            "log_min_messages": "warning",
        }
        options = [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
        self._process = self._run(["postgres", "-D", self._data, *options])
        deadline = time.monotonic() + START_SECONDS
        while True:
            try:
                psycopg.connect(self._conninfo("postgres")).close()
                return
            except psycopg.OperationalError:
                assert self._process.poll() is None, f"PostgreSQL ended:\n{self.log.read_text()[-3000:]}"
                assert time.monotonic() < deadline, f"PostgreSQL is not up:\n{self.log.read_text()[-3000:]}"
            time.sleep(0.02)

    def stop(self) -> None:
        """Now, open connections or not."""
        if self._process is not None:
            self._process.send_signal(signal.SIGINT)
            self._process.wait(STOP_SECONDS)
            self._process = None

    def processes(self) -> list[psutil.Process]:
        """The server's, all of them."""
        assert self._process is not None
        parent = psutil.Process(self._process.pid)
        return [parent, *parent.children(recursive=True)]

    def remove(self) -> None:
        try:
            self.stop()
        finally:
            if self._process is not None:
                self._process.kill()
            shutil.rmtree(self.directory, ignore_errors=True)

    def create(self, template_url: str | None = None) -> str:
        """The URL of a fresh database: an empty one, or a copy of another that nobody is connected to."""
        self._databases += 1
        name = f"test_{self._databases}"
        template = "template1" if template_url is None else _name(template_url)
        with psycopg.connect(self._conninfo("postgres"), autocommit=True) as connection:
            quickly = " STRATEGY file_copy" if connection.info.server_version >= 15_00_00 else ""
            connection.execute(f"CREATE DATABASE {name} TEMPLATE {template}{quickly}".encode())
        return f"postgresql+psycopg://{ROLE}@/{name}?host={self.socket_directory}"

    def drop(self, url: str) -> None:
        name = _name(url)
        with psycopg.connect(self._conninfo("postgres"), autocommit=True) as connection:
            connection.execute(f"DROP DATABASE {name} WITH (FORCE)".encode())

    def _conninfo(self, database: str) -> str:
        return f"host={self.socket_directory} user={ROLE} dbname={database} connect_timeout=5"

    def _run(self, command: list[str | Path]) -> subprocess.Popen[bytes]:
        program, *arguments = command
        account = self._account
        with self.log.open("ab") as log:
            return subprocess.Popen(
                [self._binaries / program, *arguments],
                cwd=self._data,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C is the tests' to answer
                user=None if account is None else account.pw_uid,
                group=None if account is None else account.pw_gid,
                extra_groups=None if account is None else [],
                preexec_fn=_end_with_the_tests,
            )


def _name(url: str) -> str:
    return url.partition("?")[0].rpartition("/")[2]


def _account() -> pwd.struct_passwd | None:
    """Whom root runs the server as, which refuses to run as root."""
    if os.geteuid() != 0:
        return None
    for name in ("postgres", "nobody"):
        try:
            return pwd.getpwnam(name)
        except KeyError:
            continue
    return pytest.fail("there is no account to run PostgreSQL as")


def _end_with_the_tests() -> None:
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGINT)
