"""An executor whose state directory is damaged, emptied or full: it says so in a sentence, leaves nothing behind that
it no longer knows, and ends nothing that runs."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import sqlite3
import subprocess
from collections.abc import Iterator

import pytest

from ficc.domain.errors import Refused
from ficc.domain.plan import Fence
from support.executor import PATIENCE_SECONDS, ExecutorProcess, Session, connected, leftovers

pytestmark = [pytest.mark.root, pytest.mark.timeout(180)]

DISK_BYTES = 4 << 20


@pytest.fixture
def executor() -> Iterator[ExecutorProcess]:
    with ExecutorProcess.on_new_directory() as made:
        yield made


def start_refused(executor: ExecutorProcess) -> str:
    """What a start says that ends with status 1: one line that is no traceback."""
    (executor.directory / "log").write_text("")
    executor.process = executor.launch()
    assert executor.process.wait(PATIENCE_SECONDS) == 1
    (said,) = executor.log.splitlines()
    return said


def test_a_ledger_that_is_garbage_is_said_and_left_as_it_is(executor: ExecutorProcess) -> None:
    executor.kill()
    ledger, kept = executor.state / "ledger.sqlite", executor.state / "kept"
    for path in executor.state.glob("ledger.sqlite*"):
        path.rename(kept.with_name(f"kept{path.name.removeprefix('ledger.sqlite')}"))
    garbage = os.urandom(8192)
    ledger.write_bytes(garbage)
    assert "file is not a database" in start_refused(executor)
    assert ledger.read_bytes() == garbage
    for path in executor.state.glob("ledger.sqlite*"):
        path.unlink()
    for path in executor.state.glob("kept*"):
        path.rename(ledger.with_name(f"ledger.sqlite{path.name.removeprefix('kept')}"))
    executor.start()


def test_a_ledger_of_another_machine_is_refused_and_left_as_it_is(executor: ExecutorProcess) -> None:
    """Copied to or from elsewhere: an executor there would take what may still run here for gone."""
    executor.kill()
    ledger, own = executor.state / "ledger.sqlite", executor.executor_id

    def bind(machine: str | None) -> None:
        with contextlib.closing(sqlite3.connect(ledger)) as db, db:
            db.execute("UPDATE identity SET machine = ?", (machine,))

    bind("0" * 64)
    before = ledger.read_bytes()
    said = start_refused(executor)
    assert "it was made on another machine" in said
    assert "move it away, and the executor begins as another node" in said
    assert ledger.read_bytes() == before
    bind(None)
    executor.start()
    assert executor.executor_id == own


def test_without_its_ledger_it_is_another_and_its_old_control_groups_go(executor: ExecutorProcess) -> None:
    with ExecutorProcess.on_new_directory() as other:  # alive, with nothing to do
        old = executor.executor_id
        executor.kill()
        for path in executor.state.glob("ledger.sqlite*"):
            path.unlink()
        assert leftovers(old)
        executor.start()
        assert executor.executor_id != old
        assert leftovers(old) == []
        assert asyncio.run(_runs(other)) == "succeeded"


async def _runs(executor: ExecutorProcess) -> str:
    async with connected(executor) as session:
        return str((await session.finished(session.plan("pass")))["outcome"])


@pytest.fixture
def small_disk(executor: ExecutorProcess) -> Iterator[ExecutorProcess]:
    """The state directory on a disk that a test can fill."""
    executor.kill()
    state, kept = executor.state, executor.directory / "kept"
    shutil.copytree(state, kept, symlinks=True)
    options = f"size={DISK_BYTES},mode=700"
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(state)], check=True)
    try:
        shutil.copytree(kept, state, symlinks=True, dirs_exist_ok=True)
        executor.start()
        yield executor
        executor.end()
    finally:
        executor.clear()
        subprocess.run(["umount", str(state)], check=True)


def fill(executor: ExecutorProcess) -> None:
    """To the last byte, also of what SQLite could write over."""
    with (executor.state / "fill").open("ab", 0) as file, contextlib.suppress(OSError):
        for size in (65536, 1):
            with contextlib.suppress(OSError):
                while True:
                    file.write(bytes(size))
    assert shutil.disk_usage(executor.state).free == 0


async def refused_admissions(session: Session) -> str:
    """The code of the first; the log that SQLite has at hand may take some."""
    for _ in range(200):
        try:
            fence = await session.admit(session.plan("pass"))
        except Refused as refused:
            return refused.code
        await session.stop(fence)
        await session.until(fence, "released")
    raise AssertionError("a full disk took everything")


async def test_a_full_disk_ends_nothing_that_runs_and_admits_nothing(small_disk: ExecutorProcess) -> None:
    async with connected(small_disk) as session:
        running = [await session.serving(session.replica()) for _ in range(2)]
        prepared = await session.admit(session.plan("pass"))
        await session.until(prepared, "prepared")
        fill(small_disk)
        assert await refused_admissions(session) == "disk_full"
        with pytest.raises(Refused, match="disk_full"):
            await session.act("start", prepared)
        assert (await session.status(prepared))["state"] == "prepared"
        for fence in running:
            assert (await session.ask(fence, do="json")).status == 200
        await session.stop(running[0])
        ended = await session.until(running[0], "released")  # told, though it could not be written
        assert ended["outcome"] == "cancelled"
        assert leftovers(running[0].attempt_id) == []
        assert (await session.ask(running[1], do="json")).status == 200

        (small_disk.state / "fill").unlink()
        await session.act("start", prepared)
        assert (await session.until(prepared, "released"))["outcome"] == "succeeded"
    small_disk.kill()  # what was told is written by now
    small_disk.start()
    async with connected(small_disk) as session:
        assert await session.status(running[0]) == ended
        assert (await session.status(running[1]))["reason"]["code"] == "executor_restarted"


async def test_a_shutdown_on_a_full_disk_leaves_nothing(small_disk: ExecutorProcess) -> None:
    async with connected(small_disk) as session:
        fence: Fence = await session.serving(session.replica())
        fill(small_disk)
        assert await refused_admissions(session) == "disk_full"
    small_disk.end()
    assert leftovers(fence.attempt_id) == []
    (small_disk.state / "fill").unlink()
    small_disk.start()


async def test_what_a_full_disk_did_not_take_is_unknown_after_a_crash(small_disk: ExecutorProcess) -> None:
    """It was told, and the next executor has no word of it: it says no more than it can know."""
    async with connected(small_disk) as session:
        fence = await session.serving(session.replica())
        fill(small_disk)
        assert await refused_admissions(session) == "disk_full"
        await session.stop(fence)
        assert (await session.until(fence, "released"))["outcome"] == "cancelled"
    small_disk.kill()
    (small_disk.state / "fill").unlink()
    small_disk.start()
    async with connected(small_disk) as session:
        status = await session.until(fence, "released")
    assert (status["outcome"], status["reason"]["code"]) == ("unknown", "end_not_observed")
