"""What only the machine can show: an executor without root's rights in a delegated subtree of v2, and nothing
else there. Its name keeps it from every other run of the tests: `make cgroup-v2` asks for it."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ficc.domain.plan import Limits
from ficc.executor.cgroups import LEAF, Mounts, Tree, kill_directories, read_mounts
from support.executor import ExecutorProcess, Session, connected, has_delegated_group, leftovers, wait_for

pytestmark = pytest.mark.timeout(300)

FAMILIES = 4
CLAIMS = 10


def own_group() -> Path:
    found = read_mounts(Path("/proc/self/mountinfo").read_text(), Path("/proc/self/cgroup").read_text()).v2
    assert found is not None
    return found.parent if found.name == LEAF else found


def test_the_machine_is_what_it_is_to_be() -> None:
    """Else nothing else here shows anything."""
    mounts = read_mounts(Path("/proc/self/mountinfo").read_text(), Path("/proc/self/cgroup").read_text())
    assert mounts.v1 == {}
    assert mounts.v2 is not None
    assert os.geteuid() != 0
    assert os.getgroups() in ([], [os.getgid()])
    assert has_delegated_group()
    assert not os.access(own_group().parent / "cgroup.procs", os.W_OK)
    assert not os.access(own_group() / "memory.max", os.W_OK)


# An executor, from its start in the service's own group.


@pytest.fixture(scope="module")
def executor() -> Iterator[ExecutorProcess]:
    with ExecutorProcess.on_new_directory() as executor:
        yield executor


async def test_it_offers_all_limits(executor: ExecutorProcess) -> None:
    async with connected(executor) as session:
        snapshot = (await session.control.call("snapshot"))["snapshot"]
    assert snapshot["unenforceable"] == {}
    assert snapshot["accounts"] == "own"
    in_leaf = (own_group() / LEAF / "cgroup.procs").read_text().split()
    assert {str(executor.pid), str(executor.watchdog), str(os.getpid())} <= set(in_leaf)


async def test_an_engine_serves_until_it_is_stopped(executor: ExecutorProcess) -> None:
    async with connected(executor) as session:
        fence = await session.serving(session.replica())
        assert (await session.ask(fence, do="json")).status == 200
        group = own_group() / f"ficc-{executor.executor_id}" / fence.attempt_id
        assert (group / "pids.max").read_text().strip() == str(session.replica().limits.processes)
        assert (group / "memory.oom.group").read_text().strip() == "1"
        await session.stop(fence, 0)
        assert (await session.until(fence, "released"))["outcome"] == "cancelled"
        assert not group.exists()


async def test_out_of_memory_is_told(executor: ExecutorProcess) -> None:
    async with connected(executor) as session:
        status = await session.finished(session.plan("x = b'x' * (1 << 30)"))
    assert (status["outcome"], status["reason"]["code"]) == ("failed", "out_of_memory")


async def test_an_executor_that_is_killed_leaves_nothing(executor: ExecutorProcess) -> None:
    """Its watchdog ends what ran; the next one starts from the leaf, and serves."""
    async with connected(executor) as session:
        fence = await session.serving(session.replica())
    executor.kill(signal.SIGKILL)
    wait_for(lambda: leftovers_but_directories(fence.attempt_id) == [], "the engine is gone")
    executor.start()
    async with connected(executor) as session:
        assert (await session.until(fence, "released"))["start_intended"]
        await serve_once(session)


def leftovers_but_directories(name: str) -> list[str]:
    return [found for found in leftovers(name) if not found.startswith("/sys/fs/cgroup")]


async def serve_once(session: Session) -> None:
    fence = await session.serving(session.replica())
    await session.stop(fence, 0)
    await session.until(fence, "released")


# The claim.


def test_a_group_in_which_processes_fork_is_claimed() -> None:
    """Whoever was forked while the others moved is moved too: one that stays would keep the controllers from
    the group."""
    for number in range(CLAIMS):
        group = own_group() / f"claimed-{number}"
        group.mkdir()
        with forking_in(group):
            tree = Tree("tree", Mounts({}, group))
            assert tree.unenforceable == {}
            assert (group / "cgroup.procs").read_text() == ""
            tree.group("attempt").create(Limits(500, 64 << 20, processes=10))
        assert tree.group("attempt").remove()
        tree.remove()
        (group / LEAF).rmdir()
        group.rmdir()


@contextmanager
def forking_in(group: Path) -> Iterator[None]:
    """Families in this group of which there is always one that was born a moment ago."""
    for _ in range(FAMILIES):
        multiprocessing.Process(target=keep_forking, args=(group,)).start()
    wait_for(lambda: len((group / "cgroup.procs").read_text().split()) >= FAMILIES, "they fork")
    try:
        yield
    finally:
        assert kill_directories([group / LEAF, group])


def keep_forking(group: Path) -> None:
    """The child goes on, the parent ends."""
    (group / "cgroup.procs").write_text("0")
    while os.fork() == 0:
        pass
    os._exit(0)
