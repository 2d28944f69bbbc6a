"""The executor's ledger: durable before it is told, whole after a restart, bounded."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from ficc.domain import attempt, ids
from ficc.domain.attempt import Outcome, Record, State
from ficc.domain.errors import Reason, Refused
from ficc.domain.plan import Endpoint, Fence, Input, Limits, Plan, Runtime
from ficc.executor import ledger as module
from ficc.executor.ledger import Entry, Ledger, OtherMachine

PLAN = Plan(
    node_id=ids.make(1, bytes(10)),
    runtime=Runtime("bubblewrap", "a" * 64, "sha256:" + "b" * 64),
    argv=("/bin/engine", "--name", "ä"),
    environment={"A": "b"},
    limits=Limits(100, 64 << 20),
    inputs=(Input("i", "c" * 64, 5, "a/model.gguf"),),
    model_revision="d" * 64,
    endpoint=Endpoint("unix", "/run/ficc/e.sock", (("POST", "/v1"),), 10, 2),
)


def entry(number: int, account: int = 0, record: Record | None = None) -> Entry:
    fence = Fence(ids.make(number, bytes(10)), 2, PLAN.digest)
    return Entry(fence, PLAN, record or Record(State.ADMITTED), "boot", account)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.sqlite"


def test_identity_is_made_once(path: Path) -> None:
    first = Ledger(path)
    first.close()
    second = Ledger(path)
    assert first.executor_id == second.executor_id
    assert ids.is_id(first.executor_id)


def test_what_was_written_is_read_again(path: Path) -> None:
    ledger = Ledger(path)
    ledger.add(entry(1))
    ledger.add(entry(2, account=1))
    reason = Reason("lease_lapsed", "Späť")
    record = Record(State.STOPPING, True, None, reason, Outcome.FAILED)
    changed = ledger.record(entry(1).attempt_id, record)
    assert changed == ledger.get(entry(1).attempt_id)
    # Another connection sees it at once: nothing waits for `close`.
    again = Ledger(path)
    assert again.get(entry(1).attempt_id) == entry(1, record=record)
    assert again.entries() == ledger.entries()
    read = again.get(entry(2).attempt_id)
    assert read is not None
    assert read.plan.digest == PLAN.digest
    assert read.account_number == 1


def test_an_attempt_is_added_once(path: Path) -> None:
    ledger = Ledger(path)
    ledger.add(entry(1))
    with pytest.raises(sqlite3.IntegrityError):
        ledger.add(entry(1, account=5))
    assert ledger.get(entry(1).attempt_id) == entry(1)


def test_a_write_that_fails_changes_nothing(path: Path) -> None:
    ledger = Ledger(path)
    ledger.add(entry(1))
    ledger._db.execute("PRAGMA query_only = ON")  # as a disk does that is full
    with pytest.raises(sqlite3.OperationalError):
        ledger.record(entry(1).attempt_id, Record(State.STAGING))
    with pytest.raises(sqlite3.OperationalError):
        ledger.add(entry(2))
    assert ledger.entries() == [entry(1)]


def test_account_numbers(path: Path) -> None:
    """The lowest number that no held attempt has; those of released ones are used again."""
    ledger = Ledger(path)
    for number in range(3):
        assert ledger.free_account_number() == number
        ledger.add(entry(number, account=number))
    ledger.record(entry(1).attempt_id, Record(State.FINISHED, outcome=Outcome.FAILED))
    assert ledger.free_account_number() == 3
    ledger.record(entry(1).attempt_id, Record(State.RELEASED, outcome=Outcome.FAILED))
    assert ledger.free_account_number() == 1
    assert [held.account_number for held in ledger.holding()] == [0, 2]


def test_old_attempts_are_forgotten(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest released ones past a number, or past what their logs may take; never one that is held."""
    monkeypatch.setattr(module, "RELEASED_KEPT", 2)
    ledger = Ledger(path)
    for number in range(6):
        ledger.add(entry(number, account=number))
    sizes = {entry(number).attempt_id: 10 for number in range(6)}
    for number in (4, 0, 1, 2):
        ledger.record(entry(number).attempt_id, Record(State.RELEASED, outcome=Outcome.SUCCEEDED))
    assert sorted(ledger.forget_old(sizes.__getitem__)) == sorted(
        entry(number).attempt_id for number in (0, 4)
    )
    assert ledger.forget_old(sizes.__getitem__) == []
    monkeypatch.setattr(module, "LOG_BYTES_KEPT", 15)
    assert ledger.forget_old(sizes.__getitem__) == [entry(1).attempt_id]
    left = {entry(number).attempt_id for number in (2, 3, 5)}
    assert {known.attempt_id for known in ledger.entries()} == left
    assert {known.attempt_id for known in Ledger(path).entries()} == left


def test_what_is_told(path: Path) -> None:
    record = attempt.advance(Record(State.PREPARED), attempt.IntendStart())
    assert entry(1, record=record).as_json() == {
        "attempt_id": entry(1).attempt_id,
        "generation": 2,
        "plan_digest": PLAN.digest,
        "boot_id": "boot",
        "state": "starting",
        "start_intended": True,
        "outcome": None,
        "reason": None,
        "ending": None,
        "quarantine": None,
    }


def test_a_refusal_is_kept_and_read_again(path: Path) -> None:
    ledger = Ledger(path)
    refused = Refused("does_not_fit", "Does not fit: 2 wanted, 1 there.", "memory_bytes")
    ledger.reject(entry(1).fence, refused)
    for known in (ledger, Ledger(path)):
        found = known.rejection(entry(1).attempt_id)
        assert found is not None
        fence, again = found
        assert fence == entry(1).fence
        assert (again.code, again.message, again.param) == (refused.code, refused.message, refused.param)
        assert known.rejection(entry(2).attempt_id) is None
        assert known.get(entry(1).attempt_id) is None


def test_the_oldest_refusals_are_forgotten(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "REJECTED_KEPT", 2)
    ledger = Ledger(path)
    for number in (3, 1, 2):
        ledger.reject(entry(number).fence, Refused("fenced", str(number)))
    for known in (ledger, Ledger(path)):
        assert known.rejection(entry(3).attempt_id) is None
        assert known.rejection(entry(1).attempt_id) is not None
        assert known.rejection(entry(2).attempt_id) is not None


def test_a_ledger_belongs_to_the_machine_that_it_was_made_on(path: Path) -> None:
    made = Ledger(path, "a")
    made.close()
    with pytest.raises(OtherMachine, match="another machine"):
        Ledger(path, "b")
    assert Ledger(path, "a").executor_id == made.executor_id
    assert Ledger(path, None).executor_id == made.executor_id  # a machine that nothing tells from others


def test_a_ledger_of_no_machine_is_bound_to_the_first(path: Path) -> None:
    made = Ledger(path, None)
    made.close()
    Ledger(path, "a").close()
    with pytest.raises(OtherMachine):
        Ledger(path, "b")
