"""The way into a sandbox that was made: its writable directory and its network, held by what no process of it can
exchange behind our back."""

from __future__ import annotations

import os

from ficc.executor.providers import safe_files
from ficc.executor.providers.contract import Launch
from ficc.executor.providers.namespace_connect import NamespaceConnector
from ficc.executor.providers.processes import Peers
from ficc.executor.providers.safe_connect import SocketFile
from ficc.executor.providers.view import RUN


class Reach:
    """`directory` is a descriptor of RUN in the sandbox, -1 until `hold`."""

    def __init__(self, launch: Launch) -> None:
        self._endpoint = launch.plan.endpoint
        self._network: NamespaceConnector | None = None
        self._peers = Peers(launch.group, launch.uid)
        self._socket: SocketFile | None = None
        self.directory = -1

    def hold(self, init_pid: int) -> None:
        """Hold the directory as this process sees it. Raises OSError."""
        self.directory = os.open(
            f"/proc/{init_pid}/root{RUN}", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW
        )

    async def enter(self, init_pid: int) -> None:
        """Enter the network of this process, if the plan's endpoint is in there. Raises OSError."""
        if self._endpoint is not None and self._endpoint.transport == "tcp":
            self._network = await NamespaceConnector.enter(init_pid)

    def connect(self, path_or_port: str | int) -> int:
        """As `Sandbox.connect`."""
        if not isinstance(path_or_port, str):
            if self._network is None:
                raise OSError("the plan has no endpoint over TCP")
            return self._network.connect(path_or_port).detach()
        relative = path_or_port.removeprefix(f"{RUN}/")
        if self._socket is None or self._socket.path != relative:
            self._let_go()
            self._socket = SocketFile(self.directory, relative)
        return self._socket.connect(self._peers.allowed).detach()

    def _let_go(self) -> None:
        held, self._socket = self._socket, None
        if held is not None:
            held.close()

    def open_output(self, name: str) -> int:
        """As `Sandbox.open_output`."""
        return safe_files.open_regular(self.directory, name)

    async def close(self) -> None:
        self._peers.close()
        self._let_go()
        fd, self.directory = self.directory, -1
        if fd >= 0:
            os.close(fd)
        if self._network is not None:
            await self._network.close()
