"""The ledger: what this executor admitted, intended and observed, durable before it is acted on or told.

One SQLite file, synchronous FULL, written from the event loop's thread: a write is a few hundred bytes.
"""

from __future__ import annotations

import json
import os
import sqlite3
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from ficc.domain import attempt, ids
from ficc.domain.plan import Fence, Plan

RELEASED_KEPT = 1000
"""Released attempts that stay known, so that a late question about one has an answer."""

_SCHEMA = """
CREATE TABLE IF NOT EXISTS identity (executor_id TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS attempts (
    attempt_id TEXT PRIMARY KEY,
    generation INTEGER NOT NULL,
    plan_digest TEXT NOT NULL,
    plan TEXT NOT NULL,
    record TEXT NOT NULL,
    boot_id TEXT NOT NULL,
    slot INTEGER NOT NULL,
    changed_at REAL NOT NULL
) STRICT;
"""


@dataclass(frozen=True, slots=True)
class Entry:
    """One attempt. `slot` numbers its host account; `boot_id` is of the boot that admitted it."""

    fence: Fence
    plan: Plan
    record: attempt.Record
    boot_id: str
    slot: int

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


class Ledger:
    def __init__(self, path: Path) -> None:
        self._db = sqlite3.connect(path, isolation_level=None)
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute("PRAGMA synchronous = FULL")
        self._db.executescript(_SCHEMA)
        self.executor_id = self._identity()
        self._entries = {entry.attempt_id: entry for entry in self._read()}

    def _identity(self) -> str:
        """Made once, for the life of the state directory."""
        row = self._db.execute("SELECT executor_id FROM identity").fetchone()
        if row is None:
            made = ids.make(time.time_ns() // 1_000_000, os.urandom(ids.RANDOM_BYTES))
            self._db.execute("INSERT INTO identity VALUES (?)", (made,))
            return made
        return str(row[0])

    def _read(self) -> Iterator[Entry]:
        rows = self._db.execute(
            "SELECT attempt_id, generation, plan_digest, plan, record, boot_id, slot FROM attempts"
        )
        for attempt_id, generation, digest, plan, record, boot_id, slot in rows:
            yield Entry(
                Fence(attempt_id, generation, digest),
                Plan.from_json(json.loads(plan)),
                attempt.from_json(json.loads(record)),
                boot_id,
                slot,
            )

    def entries(self) -> list[Entry]:
        return list(self._entries.values())

    def get(self, attempt_id: str) -> Entry | None:
        return self._entries.get(attempt_id)

    def holding(self) -> list[Entry]:
        """Attempts whose reservations are held: all that are not released."""
        return [e for e in self._entries.values() if e.record.state is not attempt.State.RELEASED]

    def free_slot(self) -> int:
        """The lowest account number that no unreleased attempt has."""
        taken = {entry.slot for entry in self.holding()}
        return next(slot for slot in range(len(taken) + 1) if slot not in taken)

    def add(self, entry: Entry) -> None:
        self._db.execute(
            "INSERT INTO attempts VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            (
                entry.attempt_id,
                entry.fence.generation,
                entry.fence.plan_digest,
                json.dumps(entry.plan.as_json()),
                json.dumps(attempt.as_json(entry.record)),
                entry.boot_id,
                entry.slot,
                time.time(),
            ),
        )
        self._entries[entry.attempt_id] = entry

    def record(self, attempt_id: str, record: attempt.Record) -> Entry:
        """Make the attempt's record durable."""
        self._db.execute(
            "UPDATE attempts SET record = ?, changed_at = ? WHERE attempt_id = ?",
            (json.dumps(attempt.as_json(record)), time.time(), attempt_id),
        )
        entry = replace(self._entries[attempt_id], record=record)
        self._entries[attempt_id] = entry
        return entry

    def forget_old(self) -> list[str]:
        """Drop the oldest released attempts past RELEASED_KEPT; their ids."""
        rows = self._db.execute("SELECT attempt_id FROM attempts ORDER BY changed_at DESC").fetchall()
        released = [
            attempt_id
            for (attempt_id,) in rows
            if self._entries[attempt_id].record.state is attempt.State.RELEASED
        ]
        old = released[RELEASED_KEPT:]
        self._db.executemany("DELETE FROM attempts WHERE attempt_id = ?", [(a,) for a in old])
        for attempt_id in old:
            del self._entries[attempt_id]
        return old

    def close(self) -> None:
        self._db.close()
