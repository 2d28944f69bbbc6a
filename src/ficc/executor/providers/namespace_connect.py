"""Connecting to a TCP port that an untrusted payload listens on, inside its own network namespace.

The network of a sandbox is a namespace of its own with a loopback interface and nothing else. A socket belongs for
ever to the namespace that it was made in, so a small helper enters that namespace once, gives up every right, and
does one thing: it makes sockets and passes them to the executor (unix(7), SCM_RIGHTS), which connects them to
127.0.0.1 itself. Whatever answers there is therefore in the sandbox, whatever the payload does. The helper reads
nothing that comes from a payload and ends with the executor's end of its socket.

Run as `python -I -S namespace_connect.py SOCKET NAMESPACE`, two descriptors. Standard library only.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import fcntl
import os
import select
import signal
import socket
import sys
from pathlib import Path
from typing import Self

ENTER_SECONDS = 10.0
"""How long the helper may take until it has entered."""
ANSWER_SECONDS = 1.0
"""How long it may take to make a socket. The event loop waits for it, and as a rule finds one made already."""
EXIT_SECONDS = 5.0
STOCK = 4
"""Sockets that are asked for in advance, so that no request waits for the helper to be scheduled."""
HANDSHAKE_MS = 2
"""Loopback shakes hands at once; what takes longer is a backlog that is full."""
LOOPBACK = "127.0.0.1"
NOBODY = 65534

_CLONE_NEWUSER = 0x10000000
_CLONE_NEWNET = 0x40000000
_NS_GET_USERNS = 0xB701
_PR_SET_DUMPABLE = 4
_PR_SET_NO_NEW_PRIVS = 38
_CAPABILITY_VERSION_3 = 0x20080522
_READY = b"ready"
_WANTED = b"s"


class NamespaceConnector:
    """Connections into the network namespace of one process."""

    def __init__(self, process: asyncio.subprocess.Process, sock: socket.socket) -> None:
        self._process = process
        self._sock = sock
        for _ in range(STOCK):
            sock.send(_WANTED)

    @classmethod
    async def enter(cls, pid: int) -> Self:
        """For the sandbox of this process, which must be known not to have ended. Raises OSError."""
        namespace = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        try:
            if os.path.samestat(os.fstat(namespace), os.stat("/proc/self/ns/net")):
                raise OSError("the sandbox has no network namespace of its own")
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs:
                process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-I", "-S", str(Path(__file__)), str(theirs.fileno()), str(namespace)),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=asyncio.subprocess.DEVNULL,
                    pass_fds=(theirs.fileno(), namespace),
                    cwd="/",
                    env={},
                )
        finally:
            os.close(namespace)
        try:
            ours.setblocking(False)
            async with asyncio.timeout(ENTER_SECONDS):
                said = await asyncio.get_running_loop().sock_recv(ours, 256)
            if said != _READY:
                why = said.decode("utf-8", "replace") or "the helper ended"
                raise OSError(f"the network namespace of the sandbox cannot be entered: {why}")
            ours.settimeout(ANSWER_SECONDS)
            return cls(process, ours)
        except BaseException:
            await asyncio.shield(_end(process, ours))
            raise

    def connect(self, port: int) -> socket.socket:
        """A connected, non-blocking TCP socket to this port of the sandbox's loopback interface. Raises OSError;
        BlockingIOError while the listener's backlog is full."""
        sock = self._made()
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            number = sock.connect_ex((LOOPBACK, port))
            if number == errno.EINPROGRESS:
                poll = select.poll()
                poll.register(sock, select.POLLOUT)
                if not poll.poll(HANDSHAKE_MS):
                    raise BlockingIOError(errno.EAGAIN, "its backlog is full")
                number = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if number:
                raise OSError(number, os.strerror(number))
            # Where nobody listens, TCP may connect a port to itself, RFC 9293 section 3.5.
            if sock.getsockname() == sock.getpeername():
                raise ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))
        except BaseException:
            sock.close()
            raise
        return sock

    def _made(self) -> socket.socket:
        """A socket of the namespace; another is asked for in its place."""
        try:
            self._sock.send(_WANTED)
            said, descriptors, _, _ = socket.recv_fds(self._sock, 64, 1, socket.MSG_CMSG_CLOEXEC)
        except TimeoutError as error:
            raise OSError("the helper in the sandbox's network does not answer") from error
        if not descriptors:
            number = int(said or errno.EPIPE)
            raise OSError(number, f"no socket in the sandbox's network: {os.strerror(number)}")
        sock = socket.socket(fileno=descriptors[0])
        sock.setblocking(False)
        return sock

    async def close(self) -> None:
        """End the helper: until then it keeps the namespace. Idempotent."""
        await _end(self._process, self._sock)


async def _end(process: asyncio.subprocess.Process, sock: socket.socket) -> None:
    sock.close()
    try:
        async with asyncio.timeout(EXIT_SECONDS):
            await process.wait()
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


# The helper.


def _enter(namespace: int, libc: ctypes.CDLL) -> None:
    """Enter it, and give up every right. Without root, the way leads through the user namespace that owns it: its
    maker has all rights there."""
    as_root = os.geteuid() == 0
    if not as_root:
        owner = fcntl.ioctl(namespace, _NS_GET_USERNS)
        _check(libc.setns(owner, _CLONE_NEWUSER))
        os.close(owner)
    _check(libc.setns(namespace, _CLONE_NEWNET))
    os.close(namespace)
    if as_root:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
    header, none = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0), (ctypes.c_uint32 * 6)()
    _check(libc.capset(header, none))
    _check(libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    _check(libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0))


def _check(result: int) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _serve(sock: socket.socket) -> None:
    """One socket for each packet, until the executor's end closes."""
    while sock.recv(16):
        try:
            with socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as made:
                socket.send_fds(sock, [_WANTED], [made.fileno()])
        except BrokenPipeError:
            return
        except OSError as error:
            sock.send(str(error.errno or errno.EIO).encode())


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # meant for the executor's process group
        signal.signal(number, signal.SIG_IGN)
    sock, namespace = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])
    with contextlib.suppress(ConnectionError):
        try:
            _enter(namespace, ctypes.CDLL(None, use_errno=True))
        except OSError as error:
            sock.send(str(error).encode())
            return
        sock.send(_READY)
        _serve(sock)


if __name__ == "__main__":
    main()
