"""The ledger: what this executor admitted, intended and observed, durable before it is acted on or told.

A full disk is no reason to end what runs. Without room nothing is admitted and no start is intended; how an attempt
goes on and ends is kept in memory, told, and written as soon as there is room. If this process is killed before, the
next one finds an attempt whose end nobody wrote down, and says `unknown`.

One SQLite file, synchronous FULL, written from the event loop's thread: a write is a few hundred bytes.
"""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from ficc.domain import attempt
from ficc.domain.errors import Refused
from ficc.domain.plan import Fence, Plan
from ficc.executor import retention
from ficc.executor.retention import Released
from ficc.failpoints import failpoint
from ficc.identifiers import new_id

VERIFIED_KEPT = 10_000
"""Blobs whose files are remembered, the newest."""
RELEASED_KEPT = 1000
"""Released attempts that stay known, so that a late question about one has an answer."""
LOG_BYTES_KEPT = 512 << 20
"""How much their logs may take."""
REJECTED_KEPT = 1000
"""Refused admissions that stay known, the newest, so that one that is sent again has the same answer."""

_SCHEMA = """
CREATE TABLE IF NOT EXISTS identity (executor_id TEXT NOT NULL, machine TEXT) STRICT;
CREATE TABLE IF NOT EXISTS attempts (
    attempt_id TEXT PRIMARY KEY,
    generation INTEGER NOT NULL,
    plan_digest TEXT NOT NULL,
    plan TEXT NOT NULL,
    record TEXT NOT NULL,
    boot_id TEXT NOT NULL,
    account_number INTEGER NOT NULL,
    changed_at REAL NOT NULL
) STRICT;
CREATE TABLE IF NOT EXISTS rejections (
    attempt_id TEXT PRIMARY KEY,
    generation INTEGER NOT NULL,
    plan_digest TEXT NOT NULL,
    refusal TEXT NOT NULL
) STRICT;
CREATE TABLE IF NOT EXISTS verified_blobs (
    sha256 TEXT PRIMARY KEY,
    inode INTEGER NOT NULL,
    bytes INTEGER NOT NULL,
    mtime_ns INTEGER NOT NULL,
    ctime_ns INTEGER NOT NULL
) STRICT;
"""


@dataclass(frozen=True, slots=True)
class Identity:
    """What changes when a file does. The number of its device is left out: it is another after a reboot."""

    inode: int
    bytes: int
    mtime_ns: int
    ctime_ns: int


@dataclass(frozen=True, slots=True)
class Entry:
    """One attempt. `account_number` counts its host account up from the first; `boot_id` is of the boot that
    admitted it."""

    fence: Fence
    plan: Plan
    record: attempt.Record
    boot_id: str
    account_number: int

    @property
    def attempt_id(self) -> str:
        return self.fence.attempt_id

    def as_json(self) -> dict[str, object]:
        """What the executor tells of it."""
        return {
            "attempt_id": self.attempt_id,
            "generation": self.fence.generation,
            "plan_digest": self.fence.plan_digest,
            "boot_id": self.boot_id,
            **attempt.as_json(self.record),
        }


class OtherMachine(ValueError):
    """The ledger was made on another machine."""


class Ledger:
    """`machine` tells this machine from others; None where nothing does. A ledger belongs to the machine that it was
    made on: a copy elsewhere would take what runs here for gone with an earlier boot, and prove a cleanup that nobody
    did."""

    def __init__(self, path: Path, machine: str | None = None) -> None:
        self._db = sqlite3.connect(path, isolation_level=None)
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute("PRAGMA synchronous = FULL")
        self._db.executescript(_SCHEMA)
        self.executor_id = self._identity(machine)
        self._entries = {entry.attempt_id: entry for entry in self._read()}
        self._unwritten: set[str] = set()
        self._rejections = {entry[0].attempt_id: entry for entry in self._read_rejections()}

    def _identity(self, machine: str | None) -> str:
        """Made once, for the life of the state directory on this machine. Raises OtherMachine."""
        row = self._db.execute("SELECT executor_id, machine FROM identity").fetchone()
        if row is None:
            made = new_id()
            self._db.execute("INSERT INTO identity VALUES (?, ?)", (made, machine))
            return made
        executor_id, bound_to = row
        if bound_to is None and machine is not None:
            self._db.execute("UPDATE identity SET machine = ?", (machine,))
        elif None not in (bound_to, machine) and bound_to != machine:
            raise OtherMachine(
                "it was made on another machine (or /etc/machine-id has changed), and what it holds may still run there"
            )
        return str(executor_id)

    def _read(self) -> Iterator[Entry]:
        rows = self._db.execute(
            "SELECT attempt_id, generation, plan_digest, plan, record, boot_id, account_number FROM attempts"
        )
        for attempt_id, generation, digest, plan, record, boot_id, account_number in rows:
            yield Entry(
                Fence(attempt_id, generation, digest),
                Plan.from_json(json.loads(plan)),
                attempt.from_json(json.loads(record)),
                boot_id,
                account_number,
            )

    def entries(self) -> list[Entry]:
        return list(self._entries.values())

    def get(self, attempt_id: str) -> Entry | None:
        return self._entries.get(attempt_id)

    def holding(self) -> list[Entry]:
        """Attempts whose reservations are held: all that are not released."""
        return [e for e in self._entries.values() if e.record.state is not attempt.State.RELEASED]

    def free_account_number(self) -> int:
        """The lowest that no unreleased attempt has."""
        taken = {entry.account_number for entry in self.holding()}
        return next(number for number in range(len(taken) + 1) if number not in taken)

    def add(self, entry: Entry) -> None:
        """Raises Refused `disk_full`."""
        written = self._write(
            "INSERT INTO attempts VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            entry.attempt_id,
            entry.fence.generation,
            entry.fence.plan_digest,
            json.dumps(entry.plan.as_json()),
            json.dumps(attempt.as_json(entry.record)),
            entry.boot_id,
            entry.account_number,
            time.time(),
        )
        if not written:
            raise _full()
        self._entries[entry.attempt_id] = entry

    def record(self, attempt_id: str, record: attempt.Record) -> Entry:
        """Take down the attempt's record, durably but for a full disk. Raises Refused `disk_full` for what
        must never happen without."""
        before = self._entries[attempt_id]
        entry = replace(before, record=record)
        failpoint("executor.before_write")
        if not self._write_record(entry):
            if record.start_intended and not before.record.start_intended:
                raise _full()
            self._unwritten.add(attempt_id)
        self._entries[attempt_id] = entry
        failpoint("executor.written")
        self.catch_up()
        return entry

    # Admissions that were refused.

    def reject(self, fence: Fence, refused: Refused) -> None:
        """Take down that an attempt was refused, durably but for a full disk."""
        self._rejections[fence.attempt_id] = fence, refused
        self._write(
            "INSERT OR REPLACE INTO rejections VALUES (?, ?, ?, ?)",
            fence.attempt_id,
            fence.generation,
            fence.plan_digest,
            json.dumps([refused.code, refused.message, refused.param]),
        )
        while len(self._rejections) > REJECTED_KEPT:
            oldest = next(iter(self._rejections))
            del self._rejections[oldest]
            self._write("DELETE FROM rejections WHERE attempt_id = ?", oldest)

    def rejection(self, attempt_id: str) -> tuple[Fence, Refused] | None:
        """Under which fence the attempt was refused, and with which words."""
        return self._rejections.get(attempt_id)

    def _read_rejections(self) -> Iterator[tuple[Fence, Refused]]:
        rows = self._db.execute(
            "SELECT attempt_id, generation, plan_digest, refusal FROM rejections ORDER BY rowid"
        )
        for attempt_id, generation, digest, refusal in rows:
            yield Fence(attempt_id, generation, digest), Refused(*json.loads(refusal))

    def catch_up(self) -> None:
        """Write what a full disk did not take."""
        for attempt_id in list(self._unwritten):
            if not self._write_record(self._entries[attempt_id]):
                return

    def _write_record(self, entry: Entry) -> bool:
        written = self._write(
            "UPDATE attempts SET record = ?, changed_at = ? WHERE attempt_id = ?",
            json.dumps(attempt.as_json(entry.record)),
            time.time(),
            entry.attempt_id,
        )
        if written:
            self._unwritten.discard(entry.attempt_id)
        return written

    def _write(self, statement: str, *values: str | int | float) -> bool:
        """Whether there was room. Raises sqlite3.Error for any other fault."""
        try:
            self._db.execute(statement, values)
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode != sqlite3.SQLITE_FULL:
                raise
            return False
        return True

    # Blobs whose bytes were found right.

    def verified(self, sha256: str) -> Identity | None:
        """The file whose bytes had this digest."""
        row = self._db.execute(
            "SELECT inode, bytes, mtime_ns, ctime_ns FROM verified_blobs WHERE sha256 = ?", (sha256,)
        ).fetchone()
        return None if row is None else Identity(*row)

    def remember(self, sha256: str, identity: Identity) -> None:
        """On a full disk it is forgotten, and the file read once more."""
        row = (identity.inode, identity.bytes, identity.mtime_ns, identity.ctime_ns)
        self._write("INSERT OR REPLACE INTO verified_blobs VALUES (?, ?, ?, ?, ?)", sha256, *row)
        self._write(
            "DELETE FROM verified_blobs WHERE rowid <= (SELECT max(rowid) FROM verified_blobs) - ?",
            VERIFIED_KEPT,
        )

    def forget_old(self, log_bytes: Callable[[str], int]) -> list[str]:
        """Drop released attempts past RELEASED_KEPT and LOG_BYTES_KEPT; their ids."""
        rows = self._db.execute("SELECT attempt_id FROM attempts ORDER BY changed_at DESC").fetchall()
        entries = [self._entries[attempt_id] for (attempt_id,) in rows]
        released = [
            Released(entry.attempt_id, entry.fence.plan_digest, log_bytes(entry.attempt_id))
            for entry in entries
            if entry.record.state is attempt.State.RELEASED
        ]
        old = retention.surplus(released, RELEASED_KEPT, LOG_BYTES_KEPT)
        old = [a for a in old if self._write("DELETE FROM attempts WHERE attempt_id = ?", a)]
        for attempt_id in old:
            del self._entries[attempt_id]
            self._unwritten.discard(attempt_id)
        return old

    def close(self) -> None:
        self.catch_up()
        self._db.close()


def _full() -> Refused:
    return Refused(
        "disk_full",
        "The disk that the executor keeps its ledger on is full: it admits and starts nothing until there is room. "
        "What runs goes on.",
        retry_after_seconds=10,
    )
