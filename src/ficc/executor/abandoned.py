"""Subtrees of control groups whose executors are gone for good: one that lost its ledger begins again under another
name, and would leave its old subtree for ever.

An executor that lives holds a lock on its subtree's first directory. Only what nobody holds, and nothing runs in, is
removed; the kernel lets go of the lock however its holder ends.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from ficc.domain.ids import is_id
from ficc.executor.cgroups import Tree, processes

PREFIX = "ficc-"
"""Of a subtree's name; its executor's id follows."""
TRIES_MAX = 10


def hold(tree: Tree) -> int | None:
    """Be known as alive for as long as the descriptor that this returns is open; None where there is no subtree,
    or no locks."""
    for _ in range(TRIES_MAX):
        if not tree.bases:
            return None
        fd = _lock(tree.bases[0], wait=True)
        if fd is not None:
            if _is(fd, tree.bases[0]):
                return fd
            os.close(fd)
        tree.claim()  # somebody took it for abandoned just before it was held
    return None


def remove_abandoned(tree: Tree) -> list[str]:
    """Remove such subtrees beside this one; their names."""
    found = {path.name for base in tree.bases for path in base.parent.glob(f"{PREFIX}*")}
    names = sorted(name for name in found - {tree.name} if is_id(name.removeprefix(PREFIX)))
    return [name for name in names if _remove([base.with_name(name) for base in tree.bases])]


def _remove(bases: list[Path]) -> bool:
    """Whether the subtree was abandoned, and is gone."""
    try:
        bases[0].mkdir(exist_ok=True)  # of some only other directories are left: it is what has to be held
        fd = _lock(bases[0], wait=False)
    except OSError:
        return False
    if fd is None:
        return False
    try:
        there = [base for base in reversed(bases) if base.exists()]
        groups = [path for base in there for path in base.iterdir() if path.is_dir()]
        if not _is(fd, bases[0]) or any(map(processes, [*groups, *there])):
            return False
        for path in [*groups, *there]:  # the one that is held comes last
            path.rmdir()
    except OSError:  # not ours to remove, or no longer empty
        return False
    finally:
        os.close(fd)
    return True


def _is(fd: int, directory: Path) -> bool:
    """Whether a descriptor is of the directory that has this name now."""
    try:
        return os.fstat(fd).st_ino == directory.stat().st_ino
    except FileNotFoundError:
        return False


def _lock(directory: Path, *, wait: bool) -> int | None:
    """A descriptor that holds the lock on a directory; None when there is none, or another one holds it."""
    try:
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError:
        os.close(fd)
        return None
    return fd
