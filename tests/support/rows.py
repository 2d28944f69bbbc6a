"""Rows that tests need, written by the store's own functions."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from sqlalchemy import Engine, create_engine, inspect, text

from ficc.controller.operations.authority import digest
from ficc.controller.store import access, attempts, models, nodes, services, workloads
from ficc.controller.store.database import Transaction
from ficc.domain import acquisition, service, workload
from ficc.domain.access import SCOPES
from ficc.domain.manifest import File, Manifest
from ficc.identifiers import new_id

NODE_LIMITS = {
    "cpu_millis": 1000,
    "memory_bytes": 64 << 20,
    "swap_bytes": 0,
    "processes": 16,
    "storage_bytes": 1 << 20,
    "storage_inodes": 64,
    "gpu_devices": [],
}


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def manifest_of(*contents: bytes, name: str = "model", **members: Any) -> dict[str, Any]:
    """The manifest of files with these bytes."""
    files = [
        {"name": f"{index}.gguf", "bytes": len(data), "sha256": sha256(data)}
        for index, data in enumerate(contents)
    ]
    return {"name": name, "format": "gguf", "files": files, **members}


def random_bytes(count: int) -> bytes:
    return os.urandom(count)


def project(tx: Transaction, name: str) -> str:
    project_id = new_id()
    access.add_project(tx, project_id, name, time.time())
    return project_id


def member(tx: Transaction, project_id: str, name: str, scopes: Sequence[str] = SCOPES) -> str:
    """A new identity that is a member of a project."""
    identity_id = new_id()
    access.add_identity(tx, identity_id, name, time.time())
    access.set_membership(tx, project_id, identity_id, scopes)
    return identity_id


def token(
    tx: Transaction,
    project_id: str,
    subject_id: str,
    scopes: Sequence[str] = SCOPES,
    service_id: str | None = None,
    expires_at: float | None = None,
) -> str:
    """The secret of a new token."""
    secret = f"ficc_{new_id()}{new_id()}"
    access.add_token(
        tx,
        id=new_id(),
        project_id=project_id,
        subject_id=subject_id,
        service_id=service_id,
        label="of a test",
        prefix=secret[:12],
        secret_sha256=digest(secret),
        scopes=list(scopes),
        created_at=time.time(),
        expires_at=expires_at,
    )
    return secret


def model(tx: Transaction, project_id: str, *contents: bytes, name: str = "model") -> models.Model:
    files = tuple(File(f"{index}.gguf", len(data), sha256(data)) for index, data in enumerate(contents))
    manifest = Manifest(name, "gguf", files)
    row = models.Model(new_id(), project_id, manifest.revision, manifest, acquisition.Record(), time.time())
    models.add(tx, row)
    return row


def service_row(
    tx: Transaction,
    project_id: str,
    model_id: str,
    alias: str,
    state: service.State = service.State.STARTING,
    generation: int = 1,
) -> services.Service:
    record = service.Record(state=state, desired=service.Desired.RUNNING, generation=generation, revision=1)
    now = time.time()
    spec = {"alias": alias, "deadline_seconds": 60}
    row = services.Service(new_id(), project_id, alias, model_id, record, spec, None, now, now)
    services.add(tx, row)
    return row


def attempt(
    tx: Transaction, of: services.Service, replica: int = 0, limits: Mapping[str, Any] = NODE_LIMITS
) -> attempts.Attempt:
    """A planned attempt at a replica of a service, on a node named after nobody."""
    workload_id, attempt_id = new_id(), new_id()
    plan = {"limits": dict(limits)}
    attempts.add_workload(
        tx,
        id=workload_id,
        project_id=of.project_id,
        service_id=of.id,
        generation=of.record.generation,
        replica=replica,
        node_id=NODE_ID,
        plan=plan,
        plan_digest=sha256(json.dumps(plan).encode()),
        readiness=None,
        created_at=time.time(),
    )
    attempts.add(tx, attempt_id=attempt_id, workload_id=workload_id, now=time.time())
    found = attempts.get(tx.connection, attempt_id)
    assert found is not None
    return found


def job(tx: Transaction, project_id: str, **changes: Any) -> workloads.Workload:
    """A job with its first attempt planned, on a node named after nobody."""
    plan = {
        "plan_version": 1,
        "node_id": NODE_ID,
        "runtime": {
            "provider": "bubblewrap",
            "package_digest": "a" * 64,
            "image_digest": "sha256:" + "b" * 64,
            "isolation": "shared-kernel",
            "network": "none",
        },
        "argv": ["/bin/true"],
        "environment": {},
        "limits": NODE_LIMITS,
        "inputs": [],
        "outputs": [],
        "sensitive": False,
    }
    row = workloads.Workload(
        id=new_id(),
        project_id=project_id,
        node_id=NODE_ID,
        plan_digest=sha256(json.dumps(plan).encode()),
        revision=0,
        sensitive=False,
        model_revision=None,
        service_id=None,
        generation=1,
        replica=0,
        record=workload.Record(),
        deadline_seconds=60,
        deadline_at=time.time() + 60,
        idempotency_key=None,
        request_digest=sha256(b""),
        created_at=time.time(),
    )
    row = replace(row, **changes)
    workloads.add_job(tx, row, plan)
    attempts.add(tx, attempt_id=new_id(), workload_id=row.id, now=time.time())
    return row


NODE_ID = new_id()


def node(tx: Transaction, node_id: str = NODE_ID) -> str:
    nodes.put_snapshot(tx, node_id, name="here", mode="managed", snapshot={"boot_id": "one"}, now=time.time())
    return node_id


# Looking at a whole database.

MOVING = {"tokens": {"last_used_at"}, "nodes": {"snapshot", "snapshot_at"}}
"""Columns that change by themselves."""


def everything(url: str) -> dict[str, list[tuple[Any, ...]]]:
    """Every row of every table, in order."""
    engine = create_engine(url)
    try:
        return {table: _rows(engine, table) for table in sorted(inspect(engine).get_table_names())}
    finally:
        engine.dispose()


def _rows(engine: Engine, table: str) -> list[tuple[Any, ...]]:
    columns = [
        c["name"] for c in inspect(engine).get_columns(table) if c["name"] not in MOVING.get(table, ())
    ]
    quoted = ", ".join(f'"{column}"' for column in columns)
    with engine.connect() as connection:
        found = connection.execute(text(f'SELECT {quoted} FROM "{table}"')).all()
    return sorted((tuple(row) for row in found), key=repr)


def schema_of(url: str) -> dict[str, Any]:
    """Tables with their columns, indexes and keys, as the database itself describes them."""
    engine = create_engine(url)
    try:
        look = inspect(engine)
        return {
            table: {
                "columns": [{**c, "type": str(c["type"])} for c in look.get_columns(table)],
                "indexes": sorted(look.get_indexes(table), key=lambda index: str(index["name"])),
                "unique": sorted(look.get_unique_constraints(table), key=lambda key: str(key["name"])),
                "foreign": sorted(look.get_foreign_keys(table), key=lambda key: str(key["name"])),
                "primary": look.get_pk_constraint(table),
            }
            for table in sorted(look.get_table_names())
        }
    finally:
        engine.dispose()
