"""The listing row of the performance budget: many models and services in the database."""

from __future__ import annotations

import asyncio
import json
import sqlite3
import time

from bench.load import median_ms
from bench.relay import table
from bench.setup import Bench

MODELS = 10_000
SERVICES = 1_000
READS = 20


async def lists(bench: Bench) -> None:
    """The first page of each list, with few and with many objects."""
    few = await _first_pages(bench)
    await asyncio.to_thread(_fill, bench)
    many = await _first_pages(bench)
    rows: list[list[object]] = [
        [name, f"{few[name]:.1f} ms", f"{many[name]:.1f} ms"] for name in ("/models", "/inference")
    ]
    columns = ["first page", "few", f"{MODELS:,} models, {SERVICES:,} services"]
    table("Lists", columns, rows)


async def _first_pages(bench: Bench) -> dict[str, float]:
    took: dict[str, float] = {}
    async with bench.api() as api:
        for path in ("/models", "/inference"):
            times = []
            for _ in range(READS):
                began = time.perf_counter()
                await api.call("GET", path)
                times.append(time.perf_counter() - began)
            took[path] = median_ms(times)
    return took


def _fill(bench: Bench) -> None:
    """Copies of the one model and the one service, straight into the database, stopped and released."""
    database = sqlite3.connect(bench.state / "controller" / "ficc.sqlite", timeout=30)
    with database:
        database.row_factory = sqlite3.Row
        model = dict(database.execute("SELECT * FROM models LIMIT 1").fetchone())
        content = dict(database.execute("SELECT * FROM contents WHERE state = 'verified' LIMIT 1").fetchone())
        service = dict(database.execute("SELECT * FROM services LIMIT 1").fetchone())
        manifest = json.loads(model["manifest"])
        for number in range(MODELS):
            copy_id = f"0{number:025d}"
            manifest["name"] = f"copy-{number}"
            row = model | {"id": copy_id, "revision": f"{number:064d}", "manifest": json.dumps(manifest)}
            _insert(database, "models", row)
            file = {
                "model_id": copy_id,
                "index": 0,
                "project_id": model["project_id"],
                "sha256": content["sha256"],
            }
            _insert(database, "model_files", file)
        for number in range(SERVICES):
            row = service | {
                "id": f"0{number:025d}",
                "alias": f"copy-{number}",
                "state": "stopped",
                "desired": "stopped",
            }
            _insert(database, "services", row)
    database.close()


def _insert(database: sqlite3.Connection, table_name: str, row: dict[str, object]) -> None:
    columns = ", ".join(f'"{name}"' for name in row)
    marks = ", ".join("?" for _ in row)
    database.execute(f"INSERT INTO {table_name} ({columns}) VALUES ({marks})", list(row.values()))
