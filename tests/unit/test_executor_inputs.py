"""Bytes are hashed before an engine reads them, once for as long as their file stays as it was."""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ficc.content.store import ContentStore, hash_file
from ficc.domain.errors import Refused
from ficc.domain.plan import Input, Limits, Plan, Runtime
from ficc.executor import inputs as module
from ficc.executor.inputs import Inputs
from ficc.executor.ledger import Ledger

DATA = os.urandom(9 << 20)
SHA256 = hashlib.sha256(DATA).hexdigest()
PLAN = Plan(
    node_id="n",
    runtime=Runtime("bubblewrap", "a" * 64, "sha256:" + "b" * 64),
    argv=("/bin/engine",),
    environment={},
    limits=Limits(100, 64 << 20),
    inputs=(Input("i", SHA256, len(DATA), "model.gguf"),),
)


class Machine:
    """A content store, and executors one after another on one ledger. `read` names what was hashed."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.content = ContentStore(directory / "content")
        self.blob = self.content.blob(SHA256)
        self.read: list[Path] = []

    def put(self, data: bytes = DATA) -> None:
        self.blob.parent.mkdir(parents=True, exist_ok=True)
        self.blob.unlink(missing_ok=True)
        self.blob.write_bytes(data)
        self.blob.chmod(0o444)

    def verify(
        self, *, times: int = 1, plan: Plan = PLAN, unwanted: Callable[[], bool] = lambda: False
    ) -> list[dict[str, Path]]:
        """In a new executor: by so many attempts at once."""

        async def go() -> list[dict[str, Path]]:
            with closing(Ledger(self.directory / "ledger.sqlite")) as ledger:
                inputs = Inputs(self.content, ledger)
                return await asyncio.gather(*(inputs.verified(plan, unwanted) for _ in range(times)))

        return asyncio.run(go())

    def refusal(self, **how: Any) -> str:
        with pytest.raises(Refused) as caught:
            self.verify(**how)
        return caught.value.code


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine(tmp_path)

    def counted(path: Path, progress: Callable[[int], None]) -> Any:
        made.read.append(path)
        return hash_file(path, progress)

    monkeypatch.setattr(module, "hash_file", counted)
    made.put()
    return made


def test_it_is_read_once_whoever_starts_from_it_and_after_a_restart(machine: Machine) -> None:
    assert machine.verify(times=3) == [{"model.gguf": machine.blob}] * 3
    machine.verify()
    assert machine.read == [machine.blob]


def test_other_bytes_of_the_same_size_and_times_are_found(machine: Machine) -> None:
    machine.verify()
    times = machine.blob.stat()
    machine.blob.chmod(0o644)
    with machine.blob.open("r+b") as file:
        file.seek(len(DATA) // 2)
        file.write(bytes([DATA[len(DATA) // 2] ^ 1]))
    machine.blob.chmod(0o444)
    os.utime(machine.blob, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert machine.refusal() == "source_mismatch"
    assert machine.refusal() == "source_mismatch"  # and it stays so
    machine.put()
    machine.verify()


def test_a_file_that_only_looks_changed_is_read_again_and_taken(machine: Machine) -> None:
    machine.verify()
    os.utime(machine.blob)
    machine.verify()
    machine.verify()
    assert len(machine.read) == 2


@pytest.mark.parametrize(
    ("wrong", "code"),
    [
        (lambda blob: blob.unlink(), "model_not_ready"),
        (lambda blob: blob.chmod(0o644), "source_mismatch"),
        (lambda blob: os.truncate(blob, 5), "source_mismatch"),
        (lambda blob: (blob.rename(blob.with_suffix(".x")), blob.symlink_to(blob.with_suffix(".x"))),
         "source_mismatch"),
    ],
)  # fmt: skip
def test_what_is_no_blob_at_all(machine: Machine, wrong: Callable[[Path], Any], code: str) -> None:
    machine.verify()
    wrong(machine.blob)
    assert machine.refusal() == code


def test_a_file_that_is_written_while_it_is_read(machine: Machine) -> None:
    written = []

    def write() -> bool:
        if not written:
            written.append(machine.blob.chmod(0o444))  # its time of change moves
        return False

    assert machine.refusal(unwanted=write) == "source_mismatch"
    machine.verify()


def test_an_attempt_that_is_stopped_reads_no_further(machine: Machine) -> None:
    assert machine.refusal(unwanted=lambda: True) == "action_not_allowed"
    assert machine.verify() == [{"model.gguf": machine.blob}]


def test_an_empty_file(machine: Machine) -> None:
    sha256 = hashlib.sha256().hexdigest()
    path = machine.content.blob(sha256)
    path.parent.mkdir(parents=True)
    path.touch(0o444)
    plan = replace(PLAN, inputs=(Input("i", sha256, 0, "empty"),))
    assert machine.verify(plan=plan) == [{"empty": path}]
