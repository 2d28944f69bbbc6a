"""What the store reads, worked out anew only where the database answers something else than before.

Controllers look again after every commit and nearly always find what they found before; to make each statement and to
read its rows is most of what a seed costs. So the statements that a function of the store made are asked again as they
are, and where every row is what it was, so is the result. `doubted` works it out all the same, and compares.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from types import ModuleType
from typing import Any, TypeVar

from sqlalchemy import Connection, Engine, event

from ficc.controller.store import access, attempts, downloads, histories, models, nodes, services, workloads

T = TypeVar("T")

REMEMBERED: tuple[tuple[ModuleType, tuple[str, ...]], ...] = (
    (access, ("version",)),
    (attempts, ("current", "get", "held_on", "of_workloads", "unreleased")),
    (downloads, ("under_way",)),
    (histories, ("pasts",)),
    (models, ("blobs", "files", "get", "served")),
    (nodes, ("get", "reserved")),
    (services, ("get", "of_ids", "page", "unsettled")),
    (workloads, ("unsettled",)),
)
"""Functions of the store, by their modules: what they return follows from their arguments and the rows they read."""
_PLAIN = frozenset({str, int, float, bool, type(None)})


@dataclass(slots=True)
class _Known:
    result: Any
    questions: list[tuple[str, Any]]
    """Each statement with its parameters."""
    rows: list[list[Any]]
    changes: int
    """How much had been written when this was right."""


class Reads:
    """Of one database, which is written through one connection."""

    def __init__(self, writer: Engine, reader: Unhurried) -> None:
        self.doubted = False
        """Whether what is known is worked out again, and has to be the same."""
        self._reader = reader
        self._known: dict[Any, _Known] = {}
        self._questions: list[tuple[str, Any]] = []
        """What was asked since the function under way began."""
        self._writing: Any = None
        """The driver's connection that writes."""
        self._rollbacks = 0
        event.listen(writer, "connect", self._connected)
        event.listen(writer, "rollback", self._rolled_back)
        for engine in (writer, reader.engine):
            event.listen(engine, "after_cursor_execute", self._executed)

    def forget(self) -> None:
        """The database is another one from here on."""
        self._known.clear()
        self._writing = None

    def remembering(self, read: Callable[..., T]) -> Callable[..., T]:
        def remembered(connection: Any, *args: Any, **named: Any) -> T:
            asked = (read, key(args), key(tuple(named.items())))
            known = self._known.get(asked)
            changes = self._changes()
            if known is not None and known.changes != changes:
                rows = self._answers(connection, known.questions)
                if rows == known.rows:
                    known.changes = changes
                else:
                    known = None
            if known is None:
                self._questions.clear()
                result = read(connection, *args, **named)
                questions = self._questions.copy()
                known = _Known(result, questions, self._answers(connection, questions), changes)
                self._known[asked] = known
            elif self.doubted and known.result != read(connection, *args, **named):
                raise AssertionError(f"{read.__module__}.{read.__name__} is not what it was")
            return known.result  # type: ignore[no-any-return]

        return remembered

    def _answers(self, connection: Any, questions: list[tuple[str, Any]]) -> list[list[Any]]:
        raw = self._reader.driver if isinstance(connection, Transaction) else self._writing
        return [raw.execute(statement, parameters).fetchall() for statement, parameters in questions]

    def _changes(self) -> int:
        """Higher whenever the database may be another one."""
        return self._rollbacks + (0 if self._writing is None else self._writing.total_changes)

    def _connected(self, connection: sqlite3.Connection, _: object) -> None:
        self.forget()
        self._writing = connection

    def _rolled_back(self, _: object) -> None:
        self._rollbacks += 1

    def _executed(self, _: Any, __: Any, statement: str, parameters: Any, *___: Any) -> None:
        if not statement.startswith("BEGIN"):
            self._questions.append((statement, parameters))


class _Same:
    """Equal to itself alone, for as long as somebody has it."""

    __slots__ = ("one",)

    def __init__(self, one: object) -> None:
        self.one = one

    def __hash__(self) -> int:
        return id(self.one)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.one is self.one


class _Service:
    """Equal to the same service with the same members."""

    __slots__ = ("one",)

    def __init__(self, one: services.Service) -> None:
        self.one = one

    def __hash__(self) -> int:
        return hash(self.one.id)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Service) and (other.one is self.one or other.one == self.one)


def key(value: Any) -> Any:
    """Equal to those of values that say the same."""
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is tuple or kind is list:
        return tuple(map(key, value))
    if kind is set or kind is frozenset:
        return frozenset(value)
    return _Service(value) if kind is services.Service else _Same(value)


class Unhurried:
    """An engine of which one connection is kept, and which begins no transaction before something is asked."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def begin(self) -> Transaction:
        return Transaction(self)

    @cached_property
    def connection(self) -> Connection:
        return self.engine.connect()

    @cached_property
    def driver(self) -> Any:
        return self.connection.connection.driver_connection

    def dispose(self) -> None:
        if "connection" in self.__dict__:
            self.connection.close()
            self.__dict__ = {"engine": self.engine}
        self.engine.dispose()


class Transaction:
    """In the place of a connection. It begins with what is asked first, and where everything is known it is none."""

    def __init__(self, of: Unhurried) -> None:
        self._of = of
        self._begun: Any = None

    def __enter__(self) -> Transaction:
        return self

    def __exit__(self, *error: Any) -> Any:
        return None if self._begun is None else self._begun.__exit__(*error)

    def __getattr__(self, name: str) -> Any:
        if self._begun is None:
            self._begun = self._of.connection.begin()
            self._begun.__enter__()
        return getattr(self._of.connection, name)
