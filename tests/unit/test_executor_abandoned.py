"""Which subtrees of control groups are abandoned: on directories that stand in for the kernel's."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from ficc.executor.abandoned import PREFIX, hold, remove_abandoned
from ficc.executor.cgroups import Mounts, Tree
from ficc.identifiers import new_id


@pytest.fixture
def mounts(tmp_path: Path) -> Mounts:
    """As on a hybrid machine: a v2 hierarchy that limits nothing, and four of v1."""
    v1 = {name: tmp_path / name for name in ("cpu", "memory", "pids", "freezer")}
    for directory in (*v1.values(), tmp_path / "unified"):
        directory.mkdir()
    (tmp_path / "unified" / "cgroup.controllers").write_text("")
    return Mounts(v1, tmp_path / "unified")


def tree(mounts: Mounts) -> Tree:
    return Tree(f"{PREFIX}{new_id()}", mounts)


def exists(found: Tree) -> list[bool]:
    return [base.exists() for base in found.bases]


def test_what_nobody_holds_is_removed_with_its_groups_and_what_somebody_holds_stays(mounts: Mounts) -> None:
    ours, alive, gone = (tree(mounts) for _ in range(3))
    fds = [hold(ours), hold(alive)]
    for base in gone.bases:
        (base / new_id()).mkdir()
    assert remove_abandoned(ours) == [gone.name]
    assert (exists(ours), exists(alive), exists(gone)) == ([True] * 5, [True] * 5, [False] * 5)
    for fd in fds:
        assert fd is not None
        os.close(fd)
    assert remove_abandoned(tree(mounts)) == sorted([ours.name, alive.name])


def test_where_something_runs_nothing_is_touched(mounts: Mounts) -> None:
    busy = tree(mounts)
    group = busy.bases[2] / new_id()
    group.mkdir()
    (group / "cgroup.procs").write_text(f"{os.getpid()}\n")
    assert remove_abandoned(tree(mounts)) == []
    assert exists(busy) == [True] * 5


def test_what_is_not_named_as_an_executor_is_nobodys(mounts: Mounts, tmp_path: Path) -> None:
    for name in ("ficc-processes", "ficc-check-77", "ficc", "else"):
        (tmp_path / "unified" / name).mkdir()
    assert remove_abandoned(tree(mounts)) == []
    assert len(list((tmp_path / "unified").glob("ficc*"))) == 4


def test_rests_in_some_hierarchies(mounts: Mounts) -> None:
    gone = tree(mounts)
    gone.bases[0].rmdir()
    assert remove_abandoned(tree(mounts)) == [gone.name]
    assert exists(gone) == [False] * 5


def test_two_that_begin_at_the_same_moment_never_take_each_other_away(mounts: Mounts) -> None:
    """Each makes its subtree, holds it and looks for abandoned ones; whoever holds one has it."""

    def begin() -> None:
        mine = tree(mounts)
        fd = hold(mine)
        remove_abandoned(mine)
        assert fd is not None
        kept.append(exists(mine) == [True] * 5)
        fds.append(fd)

    kept: list[bool] = []
    fds: list[int] = []
    threads = [threading.Thread(target=begin) for _ in range(24)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert kept == [True] * len(threads)
    for fd in fds:
        os.close(fd)
