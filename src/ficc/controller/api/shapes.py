"""The shapes of requests and answers, from which the OpenAPI document is made."""

from __future__ import annotations

from typing import Annotated, Any, Generic, Literal, TypeVar, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints

from ficc.domain.limits import LIMIT_MAX
from ficc.domain.manifest import FILES_MAX, Capability
from ficc.inference.schema import Sha256, Specification, Strict

T = TypeVar("T")

Name = Annotated[str, StringConstraints(min_length=1, max_length=256)]
Bytes = Annotated[int, Field(ge=0, le=2**53 - 1)]
Revision = Annotated[int, Field(ge=0, le=2**53 - 1)]


def printable(text: str) -> str:
    if not text.isprintable():
        raise ValueError("Input should be printable characters")
    return text


class Answer(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Error(Answer):
    code: str
    message: str
    type: str
    param: str | None = None
    model_config = ConfigDict(extra="allow")


class ErrorAnswer(Answer):
    """Every error on every route. Some answers carry more beside `error` (an offset, a preview)."""

    error: Error
    model_config = ConfigDict(extra="allow")


class Page(Answer, Generic[T]):
    """Newest first. `next` is what to send as `after` for what follows, null at the end."""

    items: list[T]
    next: str | None


class ReasonShape(Answer):
    code: str
    message: str


# Models.


class Source(Strict):
    kind: Literal["hub"]
    repository: Name
    revision: Annotated[str, StringConstraints(min_length=40, max_length=40)]


class ManifestFile(Strict):
    name: Annotated[str, StringConstraints(min_length=1, max_length=1024)]
    bytes: Bytes
    sha256: Sha256
    url: Annotated[str, StringConstraints(max_length=2048)] | None = None


class Manifest(Strict):
    """A model: its files by name, size and digest. Immutable once registered; null equals absent."""

    name: Name
    format: Literal["gguf", "safetensors"]
    capabilities: Annotated[list[Capability], Field(max_length=len(get_args(Capability)))] | None = None
    licence: Name | None = None
    source: Source | None = None
    files: Annotated[list[ManifestFile], Field(min_length=1, max_length=FILES_MAX)]


class ModelFile(Answer):
    index: int
    name: str
    bytes: int
    sha256: str
    offset: int = Field(description="Durable bytes only.")
    state: Literal["missing", "partial", "verifying", "verified", "failed"]
    verified_bytes: int
    error: ReasonShape | None


class Model(Answer):
    id: str
    revision: str = Field(description="SHA-256 of the canonical manifest (RFC 8785).")
    manifest: dict[str, Any]
    state: Literal["registered", "acquiring", "pausing", "paused", "verifying", "ready", "failed"]
    error: ReasonShape | None
    files: list[ModelFile]
    bytes_total: int
    bytes_durable: int
    rate_bytes_per_second: int | None
    eta_seconds: int | None
    references: list[str]
    created_at: str


BASE64_PATTERN = "^([A-Za-z0-9+/]{4})*([A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?$"
"""For readers of the document; what is more to it than a pattern can say is checked with a better message."""


class UploadJson(Strict):
    """A piece of a file: canonical base64, at most 1 MiB once decoded."""

    offset: Bytes
    data: Annotated[str, Field(json_schema_extra={"contentEncoding": "base64", "pattern": BASE64_PATTERN})]


class UploadAnswer(Answer):
    index: int
    offset: int = Field(description="The new durable offset.")
    bytes: int
    state: Literal["missing", "partial", "verifying", "verified", "failed"]


class Adopt(Strict):
    """A file that was put into the controller's incoming directory, on its own machine."""

    name: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9._-]{1,128}$")]


class Removed(Answer):
    removed: Literal[True]


class ModelRemoved(Removed):
    bytes_freed: int = Field(description="Durable bytes that left the disk.")
    bytes_retained_shared: int = Field(
        description="Durable bytes that stay: others share them, or they were not to be evicted."
    )


class Eviction(Answer):
    allowed: bool
    reason: ReasonShape | None = Field(description="Why it would be refused.")
    bytes_freed: int
    bytes_retained_shared: int
    services: list[str] = Field(description="Services of the model, which hold it whatever their state.")
    attempts: list[str] = Field(description="Attempts that still read what would be freed.")
    busy: bool = Field(description="It is being downloaded, or somebody writes what would be freed.")


# Content.


class Content(Answer):
    """What the project has of one digest."""

    sha256: str
    state: Literal["blob", "partial"]
    bytes: int
    offset: int = Field(description="Durable bytes.")
    references: list[str] = Field(description="Models of this project that have it.")
    shared: bool = Field(description="Another project has the same bytes.")
    last_used_at: str | None = Field(
        description="When an attempt that reads it was last planned or released."
    )


class Prune(Strict):
    dry_run: bool = Field(description="Only say what would be removed.")


class Pruned(Answer):
    dry_run: bool
    count: int = Field(description="Contents that the project gave up.")
    bytes_freed: int
    bytes_retained_shared: int = Field(description="Of these, bytes that another project has.")


# Services.


class CreateService(Specification):
    """A specification, and optionally the digest of the preview that was accepted."""

    preview_digest: Sha256 | None = None


class ReplaceService(Strict):
    revision: Revision
    spec: Specification
    acknowledge_unknown: bool | None = None


class ControlService(Strict):
    revision: Revision
    acknowledge_unknown: bool | None = None


class CreateServiceToken(Strict):
    lifetime: Annotated[int, Field(ge=1, le=2**53 - 1, description="Seconds.")]


class DeviceMemory(Answer):
    device: str
    weights_bytes: int
    kv_cache_bytes: int
    compute_bytes: int
    overhead_bytes: int
    total_bytes: int


class Estimate(Answer):
    weights_bytes: int
    kv_cache_bytes: int | None
    compute_bytes: int | None
    overhead_bytes: int
    total_bytes: int
    basis: str = Field(description="file_size, metadata or measured: the weakest source that says so much.")
    margin_bytes: int = Field(description="How much more it may come to; not in the total.")
    measured_peak_bytes: int | None = Field(
        description="The most that an attempt with the same model, runtime image, context and concurrency took."
    )
    bases: dict[str, str] = Field(description="Of each term that is known.")
    devices: list[DeviceMemory] = Field(description="Each device's part; empty while nothing is known of it.")


class Amounts(Answer):
    """Resources, counted; zero where nothing is left."""

    cpu_millis: int
    memory_bytes: int
    swap_bytes: int
    processes: int
    storage_bytes: int
    storage_inodes: int
    gpu_devices: list[str]


class PlannedReplica(Answer):
    node_id: str
    plan_digest: str
    reservation: Amounts
    available: Amounts | None
    estimate: Estimate
    staging_bytes: int
    fits: bool
    problems: list[ReasonShape]


class Preview(Answer):
    accepted: bool
    preview_digest: str
    replicas: list[PlannedReplica]
    warnings: list[ReasonShape]


class Replica(Answer):
    workload_id: str
    node_id: str
    attempt_id: str
    attempt: int
    generation: int
    plan_digest: str
    model_revision: str | None
    state: Literal["queued", "staging", "preparing", "starting", "ready", "draining", "stopping", "finished"]
    since_at: str
    deadline_at: str | None
    reason: ReasonShape | None
    outcome: Literal["succeeded", "failed", "cancelled", "unknown"] | None
    released: bool
    ready_at: str | None
    in_flight: int
    error: ReasonShape | None


class Service(Answer):
    id: str
    alias: str
    project_id: str
    revision: int
    generation: int
    state: Literal["starting", "ready", "degraded", "draining", "stopping", "stopped", "failed"]
    desired: Literal["running", "stopped"]
    reason: ReasonShape | None
    spec: dict[str, Any]
    capabilities: list[str]
    replicas: list[Replica]
    created_at: str
    updated_at: str
    endpoint: str


class ServiceToken(Answer):
    id: str
    token: str = Field(description="Shown in this answer only.")
    expires_at: str | None
    base_url: str


class KeptLog(Answer):
    """An attempt at the replica whose log can be asked for."""

    attempt_id: str
    attempt: int
    generation: int
    outcome: Literal["succeeded", "failed", "cancelled", "unknown"] | None
    reason: ReasonShape | None
    since_at: str


class LogAnswer(Answer):
    attempt_id: str
    attempt: int
    generation: int
    text: str
    truncated: bool = Field(description="Older output was left out.")
    attempts: list[KeptLog] = Field(description="The five latest, the newest first.")


# Nodes.


class Node(Answer):
    id: str
    name: str
    mode: Literal["managed", "voluntary"]
    connected: bool
    snapshot_at: str | None
    capacity: Amounts
    reserved: Amounts
    available: Amounts
    unenforceable: dict[str, str] = Field(description="Limits this machine cannot enforce, with why.")
    quarantined: dict[str, str] = Field(
        description="Attempts that ended and cannot be cleaned up, by id: why, and what to do. They hold their "
        "reservation."
    )
    runtimes: list[dict[str, Any]]
    endpoint_version: int | None
    boot_id: str
    release: str
    accounts: Literal["dedicated", "own"]
    machine: dict[str, str]
    created_at: str


# Access.


class SignIn(Strict):
    code: Annotated[str, StringConstraints(min_length=1, max_length=256)]


class Party(Answer):
    id: str
    name: str | None


class Session(Answer):
    principal: Party
    project: Party
    scopes: list[str]
    session_id: str
    csrf: str | None = Field(description="To be sent as X-CSRF-Token; only for a browser's session.")
    expires_at: str | None


class Code(Answer):
    code: str = Field(description="One use, ten minutes.")
    url: str


class Project(Answer):
    id: str
    name: str
    scopes: list[str]
    created_at: str


Limit = Annotated[int, Field(ge=0, le=LIMIT_MAX)]


class TokenLimits(Strict):
    """0: no limit; left out: the installation's default."""

    requests_per_minute: Limit | None = None
    tokens_per_minute: Limit | None = None
    concurrency: Limit | None = None


class CreateToken(Strict):
    label: Annotated[Name, AfterValidator(printable)]
    scopes: Annotated[list[str], Field(min_length=1, max_length=64)]
    lifetime_seconds: Annotated[int, Field(ge=1, le=2**53 - 1)] | None = None
    limits: TokenLimits | None = None


class CreatedToken(Answer):
    id: str
    token: str = Field(description="Shown in this answer only.")
    expires_at: str | None


class Token(Answer):
    id: str
    label: str
    prefix: str
    scopes: list[str]
    service_id: str | None
    created_at: str
    expires_at: str | None
    last_used_at: str | None
    limits: dict[str, int] = Field(description="Those that differ from the installation's defaults.")


class Health(Answer):
    status: Literal["ok"]
    version: str


class HubWanted(Strict):
    """Which models of a hub's repository to look at."""

    repository: Annotated[str, StringConstraints(min_length=3, max_length=193)]
    revision: Annotated[str, StringConstraints(min_length=1, max_length=255)] = "main"
    filename: Annotated[str, StringConstraints(min_length=1, max_length=1024)] | None = None
    licence: Name | None = None


class HubManifest(Answer):
    manifest: dict[str, Any] = Field(description="What POST /models takes.")
    gguf: dict[str, Any] | None = Field(description="What the header says; null where it was not read.")
    estimate: Estimate


class HubLicence(Answer):
    declared: str | None
    hub: str | None


class HubPreview(Answer):
    repository: str = Field(description="As the hub calls it now.")
    requested_revision: str
    commit: str
    licence: HubLicence
    manifests: list[HubManifest]
    projectors: list[str] = Field(description="Files that belong to a model and are none of their own.")
    incomplete: list[str] = Field(description="Shards that the repository lacks.")
    bytes_read: int = Field(description="Of model files, all of it headers.")


class HubRepository(Answer):
    repository: str
    downloads: int | None
    gated: bool


class HubFound(Answer):
    items: list[HubRepository]


# Usage.


class UsageRecord(Answer):
    """One inference request of a caller who was known."""

    id: str
    request_id: str = Field(description="As in x-request-id; a client may send the same one twice.")
    service_id: str | None = Field(description="null for a request that named no service of the project.")
    alias: str | None
    credential: Literal["token", "service_token", "session"]
    credential_id: str
    subject_id: str
    path: str
    outcome: Literal["completed", "refused", "failed", "client_gone"]
    code: str | None = Field(description="Of the error that ended it.")
    status: int
    requests: int = Field(description="1; more where a flood of like refusals is kept as one record.")
    started_at: str
    queue_ms: float
    first_byte_ms: float | None
    total_ms: float
    tokens: Literal["counted", "partial", "unknown", "none"] = Field(
        description="counted: by the engine. partial: of an answer that broke off. unknown: the engine did not "
        "tell. none: no engine computed anything."
    )
    prompt_tokens: int | None = Field(description="null: not known.")
    completion_tokens: int | None
    model_revision: str | None
    plan_digest: str | None
    generation: int | None
    attempt_id: str | None


class UsageSum(Answer):
    """Of the requests of one day, one credential or one service; what is known of their tokens."""

    requests: int
    completed: int
    refused: int
    failed: int
    client_gone: int
    prompt_tokens: int
    completion_tokens: int
    uncounted_requests: int = Field(description="Requests whose tokens are partial or unknown.")


class UsageOfDay(UsageSum):
    day: str = Field(description="UTC.")


class UsageOfToken(UsageSum):
    credential: Literal["token", "service_token", "session"]
    credential_id: str
    label: str | None = Field(description="null for a session.")
    subject_id: str


class UsageOfService(UsageSum):
    service_id: str | None
    alias: str | None


class UsagePage(Answer):
    """Records newest first, or sums, as `group_by` asks."""

    items: list[UsageRecord] | list[UsageOfDay] | list[UsageOfToken] | list[UsageOfService]
    next: str | None
