"""The service specification: what an operator asks for, as the management API takes it."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints

from ficc.domain import plan, restart
from ficc.domain.canonical import INTEGER_MAX
from ficc.domain.plan import LEAST

ALIAS_PATTERN = r"^[a-z0-9][a-z0-9._-]{0,62}$"
ID_PATTERN = r"^[0-7][0-9a-hjkmnp-tv-z]{25}$"
SHA256_PATTERN = r"^[0-9a-f]{64}$"
IMAGE_DIGEST_PATTERN = r"^sha256:[0-9a-f]{64}$"
PATTERN_WORDS = {
    ALIAS_PATTERN: "an alias has 1 to 63 of a-z, 0-9, dot, hyphen and underscore, and begins with a letter or digit",
    ID_PATTERN: "an id has 26 of 0-9 and a-z; lists show them",
    SHA256_PATTERN: "a SHA-256 has 64 of 0-9 and a-f",
    IMAGE_DIGEST_PATTERN: "an image's digest is sha256: and 64 of 0-9 and a-f",
}
"""What is said of a value that breaks a pattern."""
PLACEMENTS_MAX = 64
CONTEXT_MAX = 1 << 24
CONCURRENCY_MAX = 1024
DEADLINE_SECONDS_MAX = 86_400
GPUS_MAX = 64


class Strict(BaseModel):
    """Unknown members are refused, and nothing is converted: "1" is no integer."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


Alias = Annotated[str, StringConstraints(pattern=ALIAS_PATTERN)]
Id = Annotated[str, StringConstraints(pattern=ID_PATTERN)]
Sha256 = Annotated[str, StringConstraints(pattern=SHA256_PATTERN)]
ImageDigest = Annotated[str, StringConstraints(pattern=IMAGE_DIGEST_PATTERN)]


class Runtime(Strict):
    """An immutable runtime: which provider, in which build, makes a sandbox from which image."""

    provider: Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9_-]{0,62}$")]
    package_digest: Sha256
    image_digest: ImageDigest
    isolation: Literal["shared-kernel"] = "shared-kernel"
    network: Literal["none"] = "none"

    def to_domain(self) -> plan.Runtime:
        return plan.Runtime(**self.model_dump())


def _each_once(names: list[str]) -> list[str]:
    if len(set(names)) != len(names):
        raise ValueError("a device is named twice")
    return names


class Limits(Strict):
    """What a replica may use, and reserves on its node."""

    cpu_millis: Annotated[int, Field(ge=LEAST["cpu_millis"], le=1_000_000)]
    memory_bytes: Annotated[int, Field(ge=LEAST["memory_bytes"], le=INTEGER_MAX)]
    swap_bytes: Annotated[int, Field(ge=0, le=INTEGER_MAX)] = 0
    processes: Annotated[int, Field(ge=LEAST["processes"], le=65_536)] = plan.PROCESSES_DEFAULT
    storage_bytes: Annotated[int, Field(ge=LEAST["storage_bytes"], le=INTEGER_MAX)] = (
        plan.STORAGE_BYTES_DEFAULT
    )
    storage_inodes: Annotated[int, Field(ge=LEAST["storage_inodes"], le=1 << 24)] = (
        plan.STORAGE_INODES_DEFAULT
    )
    gpu_devices: Annotated[
        list[Annotated[str, Field(min_length=1, max_length=128)]],
        Field(max_length=GPUS_MAX),
        AfterValidator(_each_once),
    ] = Field(default_factory=list)

    def to_domain(self) -> plan.Limits:
        return plan.Limits.from_json(self.model_dump())


class Placement(Strict):
    """One wanted replica and where it runs. A node may be named more than once."""

    node_id: Id
    limits: Limits


class Parallelism(Strict):
    tensor: Annotated[int, Field(ge=1, le=GPUS_MAX)] = 1
    pipeline: Annotated[int, Field(ge=1, le=GPUS_MAX)] = 1


class Backoff(Strict):
    """How a replica that failed is tried again; what is left out is the installation's `lifecycle.restart_…`."""

    delay_seconds: Annotated[int, Field(ge=1, le=restart.SECONDS_LIMIT)] | None = None
    factor: Annotated[int, Field(ge=1, le=restart.FACTOR_LIMIT)] | None = None
    delay_seconds_max: Annotated[int, Field(ge=1, le=restart.SECONDS_LIMIT)] | None = None
    failures_max: Annotated[int, Field(ge=1, le=restart.FAILURES_LIMIT)] | None = None
    stable_seconds: Annotated[int, Field(ge=1, le=restart.SECONDS_LIMIT)] | None = None


class OnFailure(Strict):
    on_failure: Backoff


class Specification(Strict):
    """What a service runs.

    `context` is tokens per request, `concurrency` simultaneous requests per replica;
    `deadline_seconds` bounds a request including its time in the queue. `restart` says whether a replica
    that failed is tried again; left out, it is "on_failure".
    """

    alias: Alias
    model_id: Id
    engine: Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9_]{0,62}$")]
    runtime: Runtime
    executable: Annotated[str, StringConstraints(pattern=r"^/[^\x00]{1,510}$")]
    context: Annotated[int, Field(ge=1, le=CONTEXT_MAX)]
    concurrency: Annotated[int, Field(ge=1, le=CONCURRENCY_MAX)]
    placements: Annotated[list[Placement], Field(min_length=1, max_length=PLACEMENTS_MAX)]
    gpu_layers: Annotated[int, Field(ge=0, le=65_535)] | Literal["all"] | None = None
    tensor_split: Annotated[
        list[Annotated[int, Field(ge=0, le=1_000_000)]] | None, Field(min_length=1, max_length=GPUS_MAX)
    ] = None
    parallelism: Parallelism | None = None
    deadline_seconds: Annotated[int, Field(ge=1, le=DEADLINE_SECONDS_MAX)] = 600
    restart: Literal["never", "on_failure"] | OnFailure | None = None

    def as_json(self) -> dict[str, Any]:
        return self.model_dump(mode="json")
