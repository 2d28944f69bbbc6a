"""The highest memory peak that was measured of a project's model under the settings that it depends on."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from sqlalchemy import Connection, insert, select, update

from ficc.controller.store import schema
from ficc.controller.store.attempts import Attempt
from ficc.controller.store.database import Transaction
from ficc.inference.schema import Specification

_p = schema.memory_peaks.c


@dataclass(frozen=True, slots=True)
class Settings:
    """What the memory of an engine depends on, beside the devices that it runs on."""

    model_revision: str
    image_digest: str
    context: int
    concurrency: int

    @classmethod
    def of(cls, model_revision: str, specification: Specification) -> Settings:
        return cls(
            model_revision,
            specification.runtime.image_digest,
            specification.context,
            specification.concurrency,
        )

    def conditions(self, project_id: str) -> tuple[Any, ...]:
        return (
            _p.project_id == project_id,
            _p.model_revision == self.model_revision,
            _p.image_digest == self.image_digest,
            _p.context == self.context,
            _p.concurrency == self.concurrency,
        )


def highest(connection: Connection, project_id: str, settings: Settings) -> int | None:
    """Bytes, or None while nothing was measured."""
    return connection.scalar(select(_p.peak_bytes).where(*settings.conditions(project_id)))


def note(tx: Transaction, of: Attempt, peak_bytes: int, now: float) -> None:
    """Take down what an attempt of a service took, if none took more. Without a service there is no model."""
    row = tx.execute(
        select(schema.services.c.project_id, schema.services.c.spec).where(
            schema.services.c.id == of.service_id, schema.services.c.generation == of.generation
        )
    ).one_or_none()
    if row is None:
        return
    settings = Settings.of(of.plan["model_revision"], Specification.model_validate(row.spec))
    conditions = settings.conditions(row.project_id)
    measured = {"peak_bytes": peak_bytes, "attempt_id": of.id, "measured_at": now}
    # The comparison belongs to the update: it is made again on what another writer left meanwhile.
    raised = tx.execute(
        update(schema.memory_peaks).where(*conditions, _p.peak_bytes < peak_bytes).values(**measured)
    )
    if raised.rowcount == 0 and highest(tx.connection, row.project_id, settings) is None:
        names = {"project_id": row.project_id, **asdict(settings)}
        tx.execute(insert(schema.memory_peaks).values(**names, **measured))
