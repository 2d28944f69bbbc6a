"""The gateway's table never lags behind what this controller has told anybody."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import pytest

from ficc.controller.operations.context import Context
from ficc.controller.operations.ports import Nodes
from ficc.controller.operations.routes import SETTLE_SECONDS, RouteTable
from ficc.controller.store import services
from ficc.controller.store.database import Database, Transaction
from ficc.domain import service
from ficc.settings import Settings
from support import rows

State = service.State


@pytest.fixture
async def table(db: Database) -> AsyncIterator[RouteTable]:
    made = RouteTable(Context(Settings(), db), cast(Nodes, SimpleNamespace()), lambda: None)
    running = asyncio.create_task(made.run())
    yield made
    running.cancel()
    with suppress(asyncio.CancelledError):
        await running


async def added(db: Database) -> services.Service:
    def work(tx: Transaction) -> services.Service:
        project_id = rows.project(tx, "one")
        return rows.service_row(tx, project_id, rows.model(tx, project_id, b"weights").id, "assistant")

    return await db.write(work)


async def test_what_was_committed_is_routed_once_the_table_has_settled(
    db: Database, table: RouteTable
) -> None:
    row = await added(db)
    assert table.get(row.id) is None, "the commit is known, and the table is a moment behind"
    assert table.is_stale(row.id)
    await table.settle()
    assert not table.is_stale(row.id)
    found = table.get(row.id)
    assert found is not None
    assert table.by_alias(row.project_id, "assistant") == found

    ready = replace(row, record=replace(row.record, state=State.READY, revision=row.record.revision + 1))
    assert await db.write(lambda tx: services.put(tx, row, ready))
    await table.settle()
    found = table.get(row.id)
    assert found is not None
    assert found.state is State.READY


async def test_a_table_that_cannot_be_read_is_waited_for_a_bounded_time(
    db: Database, table: RouteTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    await table.settle()

    async def never(_: object) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(db, "read", never)
    await added(db)
    started = asyncio.get_running_loop().time()
    await table.settle()
    assert asyncio.get_running_loop().time() - started >= SETTLE_SECONDS * 0.9
