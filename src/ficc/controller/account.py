"""Going on under an account without rights, after root started the process.

The account must reach what the process still needs: Python, this package, the state directory. Where that
lies below a directory closed to others (root's home), the process gets a mount namespace of its own in which
the closed directory shows nothing else.
"""

from __future__ import annotations

import ctypes
import os
import stat
from collections.abc import Iterable
from pathlib import Path

_CLONE_NEWNS = 0x00020000
_MS_BIND = 0x1000
_MS_REC = 0x4000
_MS_PRIVATE = 0x40000
_LIBC = ctypes.CDLL(None, use_errno=True)


def become(uid: int, needed: Iterable[Path]) -> None:
    """Drop every right and go on as this uid (and gid). Raises OSError; then nothing was dropped."""
    paths = sorted({path.resolve() for path in needed})
    closed = {top for path in paths if (top := _closed_above(path)) is not None}
    if closed:
        _check(_LIBC.unshare(_CLONE_NEWNS), "unshare a mount namespace")
        _mount(None, Path("/"), None, _MS_REC | _MS_PRIVATE)
        for top in sorted(closed):
            _show_only(top, [path for path in paths if path.is_relative_to(top)])
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)


def _closed_above(path: Path) -> Path | None:
    """The topmost directory on the way to a path that other accounts cannot search."""
    for directory in reversed(path.parents):
        if not directory.stat().st_mode & stat.S_IXOTH:
            return directory
    return None


def _show_only(top: Path, paths: list[Path]) -> None:
    """Cover a directory by an empty one in which only these paths are found."""
    outermost = [path for path in paths if not any(path != o and path.is_relative_to(o) for o in paths)]
    opened = [(path, os.open(path, os.O_PATH | os.O_CLOEXEC)) for path in outermost]
    _mount("view", top, "tmpfs", 0, "size=1m,mode=0711")
    for path, fd in opened:
        for directory in (*reversed(path.parents), path):
            if directory.is_relative_to(top) and not directory.exists():
                directory.mkdir()
                directory.chmod(0o711)  # whatever the umask
        _mount(f"/proc/self/fd/{fd}", path, None, _MS_BIND | _MS_REC)
        os.close(fd)


def _mount(source: str | None, target: Path, kind: str | None, flags: int, options: str = "") -> None:
    result = _LIBC.mount(
        None if source is None else source.encode(),
        str(target).encode(),
        None if kind is None else kind.encode(),
        ctypes.c_ulong(flags),
        options.encode(),
    )
    _check(result, f"mount {target}")


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
