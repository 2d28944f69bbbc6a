"""The tables. Migrations in `migrations/` make them; a test holds the two together.

Times are seconds since 1970 as floats, ids are ULIDs, digests 64 hex characters. What changes carries a
`revision` or another guard, and every write that follows a read names it.
"""

from __future__ import annotations

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Column,
    Double,
    ForeignKey,
    Index,
    Integer,
    MetaData,
    String,
    Table,
    UniqueConstraint,
)

metadata = MetaData(
    naming_convention={
        "ix": "ix_%(column_0_label)s",
        "uq": "uq_%(table_name)s_%(column_0_name)s",
        "fk": "fk_%(table_name)s_%(column_0_name)s_%(referred_table_name)s",
        "pk": "pk_%(table_name)s",
    }
)

_ID = String(26)
_SHA256 = String(64)

installation = Table(
    "installation",
    metadata,
    Column("id", _ID, primary_key=True),
    Column("created_at", Double, nullable=False),
    Column("authority_version", BigInteger, nullable=False),  # rises with every change of who may do what
)

# Who may do what.

identities = Table(
    "identities",
    metadata,
    Column("id", _ID, primary_key=True),
    Column("name", String(256), nullable=False, unique=True),
    Column("created_at", Double, nullable=False),
    Column("disabled_at", Double),
)

projects = Table(
    "projects",
    metadata,
    Column("id", _ID, primary_key=True),
    Column("name", String(256), nullable=False, unique=True),
    Column("created_at", Double, nullable=False),
)

memberships = Table(
    "memberships",
    metadata,
    Column("project_id", _ID, ForeignKey("projects.id"), primary_key=True),
    Column("identity_id", _ID, ForeignKey("identities.id"), primary_key=True),
    Column("scopes", JSON, nullable=False),
)

tokens = Table(
    "tokens",
    metadata,
    Column("id", _ID, primary_key=True),
    Column("project_id", _ID, ForeignKey("projects.id"), nullable=False),
    Column("subject_id", _ID, ForeignKey("identities.id"), nullable=False),
    Column("service_id", _ID),  # set: a service token, which dies with its service
    Column("label", String(256), nullable=False),
    Column("prefix", String(16), nullable=False),  # of the secret, to recognise it by
    Column("secret_sha256", _SHA256, nullable=False, unique=True),
    Column("scopes", JSON, nullable=False),
    Column("created_at", Double, nullable=False),
    Column("expires_at", Double),
    Column("revoked_at", Double),
    Column("last_used_at", Double),
    Column("limits", JSON),  # of its own, in place of the installation's defaults
    Index("ix_tokens_project_id_id", "project_id", "id"),
    Index("ix_tokens_service_id", "service_id"),
)

sign_in_codes = Table(
    "sign_in_codes",
    metadata,
    Column("code_sha256", _SHA256, primary_key=True),
    Column("identity_id", _ID, ForeignKey("identities.id"), nullable=False),
    Column("project_id", _ID, ForeignKey("projects.id"), nullable=False),
    Column("expires_at", Double, nullable=False),
    Column("used_at", Double),
)

sessions = Table(
    "sessions",
    metadata,
    Column("id", _ID, primary_key=True),
    Column("secret_sha256", _SHA256, nullable=False, unique=True),
    Column("identity_id", _ID, ForeignKey("identities.id"), nullable=False),
    Column("project_id", _ID, ForeignKey("projects.id"), nullable=False),
    Column("created_at", Double, nullable=False),
    Column("expires_at", Double, nullable=False),
    Column("ended_at", Double),
)

# Models and content.

models = Table(
    "models",
    metadata,
    Column("id", _ID, primary_key=True),
    Column("project_id", _ID, ForeignKey("projects.id"), nullable=False),
    Column("revision", _SHA256, nullable=False),  # of the manifest
    Column("name", String(256), nullable=False),
    Column("manifest", JSON, nullable=False),
    Column("state", String(16), nullable=False),
    Column("fetching", Boolean, nullable=False),
    Column("error", JSON),
    Column("created_at", Double, nullable=False),
    UniqueConstraint("project_id", "revision"),
    Index("ix_models_project_id_id", "project_id", "id"),
    Index("ix_models_state", "state"),
)

model_files = Table(
    "model_files",
    metadata,
    Column("model_id", _ID, ForeignKey("models.id"), primary_key=True),
    Column("index", Integer, primary_key=True),
    Column("project_id", _ID, nullable=False),
    Column("sha256", _SHA256, nullable=False),
    Index("ix_model_files_project_id_sha256", "project_id", "sha256"),
    Index("ix_model_files_sha256", "sha256"),
)

contents = Table(  # one file's bytes as one project has them, complete or on their way
    "contents",
    metadata,
    Column("project_id", _ID, ForeignKey("projects.id"), primary_key=True),
    Column("sha256", _SHA256, primary_key=True),
    Column("id", _ID, nullable=False),  # the order in which contents came to be
    Column("bytes", BigInteger, nullable=False),
    Column("offset", BigInteger, nullable=False),
    Column("state", String(16), nullable=False),
    Column("error", JSON),
    Column(
        "source", JSON
    ),  # url and entity tag that the partial's bytes came with, to continue the same file
    Column("claim_token", _ID),  # the one writer, until the claim expires
    Column("claim_kind", String(16)),
    Column("claim_expires_at", Double),
    Column("last_used_at", Double),  # when an attempt that reads it was last planned or released
    Index("ix_contents_claim_expires_at", "claim_expires_at"),
    Index("ix_contents_project_id_id", "project_id", "id"),
    Index("ix_contents_sha256", "sha256"),
)

blobs = Table(
    "blobs",
    metadata,
    Column("sha256", _SHA256, primary_key=True),
    Column("bytes", BigInteger, nullable=False),
    Column("created_at", Double, nullable=False),
)

memory_peaks = Table(  # the most that an attempt at a model took under settings that memory depends on
    "memory_peaks",
    metadata,
    Column("project_id", _ID, ForeignKey("projects.id"), primary_key=True),
    Column("model_revision", _SHA256, primary_key=True),
    Column("image_digest", String(71), primary_key=True),
    Column("context", BigInteger, primary_key=True),
    Column("concurrency", Integer, primary_key=True),
    Column("peak_bytes", BigInteger, nullable=False),
    Column("attempt_id", _ID, nullable=False),
    Column("measured_at", Double, nullable=False),
)

# Nodes, services and what carries them.

nodes = Table(
    "nodes",
    metadata,
    Column("id", _ID, primary_key=True),  # of its executor
    Column("name", String(256), nullable=False),
    Column("mode", String(16), nullable=False),  # managed or voluntary
    Column("boot_id", String(64)),
    Column("snapshot", JSON),
    Column("snapshot_at", Double),
    Column("created_at", Double, nullable=False),
)

services = Table(
    "services",
    metadata,
    Column("id", _ID, primary_key=True),
    Column("project_id", _ID, ForeignKey("projects.id"), nullable=False),
    Column("alias", String(63), nullable=False),
    Column("model_id", _ID, ForeignKey("models.id"), nullable=False),
    Column("revision", BigInteger, nullable=False),
    Column("generation", BigInteger, nullable=False),
    Column("state", String(16), nullable=False),
    Column("desired", String(16), nullable=False),
    Column("reason", JSON),
    Column("spec", JSON, nullable=False),
    Column("drain_until", Double),
    Column("created_at", Double, nullable=False),
    Column("updated_at", Double, nullable=False),
    UniqueConstraint("project_id", "alias"),
    Index("ix_services_project_id_id", "project_id", "id"),
    Index("ix_services_model_id", "model_id"),
    Index("ix_services_state", "state"),
)

workloads = Table(  # what runs on a node; a replica is one with a service
    "workloads",
    metadata,
    Column("id", _ID, primary_key=True),
    Column("project_id", _ID, ForeignKey("projects.id"), nullable=False),
    Column("service_id", _ID, ForeignKey("services.id")),
    Column("generation", BigInteger, nullable=False),
    Column("replica", Integer, nullable=False),
    Column("node_id", _ID, nullable=False),
    Column("plan", JSON, nullable=False),
    Column("plan_digest", _SHA256, nullable=False),
    Column("readiness", JSON),  # path and body of the request that shows that the engine answers
    Column("revision", BigInteger, nullable=False),
    # Of a job, which is a workload without a service.
    Column("state", String(16)),
    Column("outcome", String(16)),
    Column("reason", JSON),
    Column("deadline_seconds", Integer),
    Column("deadline_at", Double),  # of what was asked for last: the submission, or a retry
    Column("idempotency_key", String(128)),
    Column("request_digest", _SHA256),  # of what was asked for under that key
    Column("created_at", Double, nullable=False),
    UniqueConstraint("service_id", "generation", "replica", name="uq_workloads_replica"),
    UniqueConstraint("project_id", "idempotency_key", name="uq_workloads_idempotency_key"),
    Index("ix_workloads_project_id_id", "project_id", "id"),
    Index("ix_workloads_state", "state"),
)

attempts = Table(  # the controller's mirror of the executors' ledgers
    "attempts",
    metadata,
    Column("id", _ID, primary_key=True),
    Column("workload_id", _ID, ForeignKey("workloads.id"), nullable=False),
    Column("service_id", _ID),
    Column("node_id", _ID, nullable=False),
    Column("number", Integer, nullable=False),
    Column("generation", BigInteger, nullable=False),
    Column("plan_digest", _SHA256, nullable=False),
    Column("state", String(16), nullable=False),
    Column("record", JSON, nullable=False),
    Column("released", Boolean, nullable=False),
    Column("ready_at", Double),
    Column("since_at", Double, nullable=False),
    Column("deadline_at", Double),
    Column("boot_id", String(64)),
    Column("lease_sequence", BigInteger, nullable=False),
    # When every lease that was granted is held to be over: CLOCK_BOOTTIME of the controller that wrote it, in
    # the boot that it names; and the longest time to live that was granted.
    Column("lease_over_ns", BigInteger),
    Column("lease_over_boot_id", String(64)),
    Column("lease_ttl_seconds", Integer),
    Column("created_at", Double, nullable=False),
    UniqueConstraint("workload_id", "number"),
    Index("ix_attempts_service_id_generation", "service_id", "generation"),
    Index("ix_attempts_node_id_released", "node_id", "released"),
    Index("ix_attempts_released", "released"),
)

audit = (
    Table(  # what operators did that the rules alone would not do; written with the deed, and never changed
        "audit",
        metadata,
        Column("id", _ID, primary_key=True),
        Column("project_id", _ID, ForeignKey("projects.id"), nullable=False),
        Column("at", Double, nullable=False),
        Column("subject_id", _ID, nullable=False),
        Column("authority_kind", String(16), nullable=False),
        Column("authority_id", _ID, nullable=False),
        Column("action", String(64), nullable=False),
        Column("object_kind", String(32), nullable=False),
        Column("object_id", _ID, nullable=False),
        Column("request_id", String(128), nullable=False),
        Column("outcome", String(32), nullable=False),
        Column("details", JSON, nullable=False),
        Index("ix_audit_project_id_id", "project_id", "id"),
    )
)

usage_records = Table(  # one inference request each; it refers to nothing, since it outlives what it tells of
    "usage_records",
    metadata,
    Column(
        "id", _ID, primary_key=True
    ),  # of the invocation: when it began, so all ranges of time are ranges of it
    Column("request_id", String(128), nullable=False),
    Column("project_id", _ID, nullable=False),
    Column("service_id", _ID),
    Column("alias", String(63)),
    Column("authority_kind", String(16), nullable=False),
    Column("authority_id", _ID, nullable=False),
    Column("subject_id", _ID, nullable=False),
    Column("path", String(64), nullable=False),
    Column("outcome", String(16), nullable=False),
    Column("code", String(64)),
    Column("status", Integer, nullable=False),
    Column("day", Integer, nullable=False),
    Column("started_at", Double, nullable=False),
    Column("queue_ms", Double, nullable=False),
    Column("first_byte_ms", Double),
    Column("total_ms", Double, nullable=False),
    Column("tokens", String(16), nullable=False),
    Column("prompt_tokens", BigInteger),
    Column("completion_tokens", BigInteger),
    Column("model_revision", _SHA256),
    Column("plan_digest", _SHA256),
    Column("generation", BigInteger),
    Column("attempt_id", _ID),
    Column("requests", BigInteger, nullable=False),
    Index("ix_usage_records_project_id_id", "project_id", "id"),
    Index("ix_usage_records_service_id_id", "service_id", "id"),
)
