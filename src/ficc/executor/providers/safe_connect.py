"""Connecting to a socket that an untrusted payload made.

The payload owns its directory and may put a symlink where its socket should be, so the path is resolved
beneath a directory descriptor without following any link (openat2(2)), the result must be a socket, connections
go to that very file, and the peer of each must be in the sandbox (unix(7), SO_PEERCRED).
"""

from __future__ import annotations

import ctypes
import os
import socket
import stat
import struct
from collections.abc import Callable

_SYS_OPENAT2 = 437
_RESOLVE_NO_MAGICLINKS = 0x02
_RESOLVE_NO_SYMLINKS = 0x04
_RESOLVE_BENEATH = 0x08
_LIBC = ctypes.CDLL(None, use_errno=True)


def open_beneath(directory: int, path: str) -> int:
    """An O_PATH descriptor of `path` beneath `directory`, no link followed. Raises OSError."""
    how = struct.pack(
        "QQQ",
        os.O_PATH | os.O_CLOEXEC | os.O_NOFOLLOW,
        0,
        _RESOLVE_NO_SYMLINKS | _RESOLVE_NO_MAGICLINKS | _RESOLVE_BENEATH,
    )
    fd: int = _LIBC.syscall(
        _SYS_OPENAT2, directory, path.encode(), ctypes.create_string_buffer(how, len(how)), len(how)
    )
    if fd < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), path)
    return fd


class SocketFile:
    """The socket that a payload made at `path` beneath a directory. Once found it is held, and looked for again when
    nobody answers there: a payload may make another."""

    def __init__(self, directory: int, path: str) -> None:
        self._directory = directory
        self.path = path
        self._held = -1

    def connect(self, allowed: Callable[[int, int], bool]) -> socket.socket:
        """A connected, non-blocking stream socket. `allowed(pid, uid)` judges the peer, each time. Raises OSError,
        and BlockingIOError while the engine's backlog is full."""
        if self._held >= 0:
            try:
                return self._connected(allowed)
            except ConnectionRefusedError:
                pass
        self._held = self._find()
        return self._connected(allowed)

    def _find(self) -> int:
        fd = open_beneath(self._directory, self.path)
        if stat.S_ISSOCK(os.fstat(fd).st_mode):
            return fd
        os.close(fd)
        raise OSError(f"{self.path} in the sandbox is no socket")

    def _connected(self, allowed: Callable[[int, int], bool]) -> socket.socket:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
        try:
            sock.connect(f"/proc/self/fd/{self._held}")
            credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
            pid, uid, _ = struct.unpack("3i", credentials)
            if not allowed(pid, uid):
                raise OSError(f"the peer of {self.path} (pid {pid}, uid {uid}) is not of this sandbox")
        except BaseException as error:
            sock.close()
            if not isinstance(error, BlockingIOError):
                self.close()
            raise
        return sock

    def close(self) -> None:
        """Hold it no longer. Idempotent."""
        held, self._held = self._held, -1
        if held >= 0:
            os.close(held)
