"""The service specification: what an operator asks for, as the management API takes it."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints

from ficc.domain import plan

ALIAS_PATTERN = r"^[a-z0-9][a-z0-9._-]{0,62}$"
ID_PATTERN = r"^[0-7][0-9a-hjkmnp-tv-z]{25}$"
PLACEMENTS_MAX = 64
CONTEXT_MAX = 1 << 24
CONCURRENCY_MAX = 1024
DEADLINE_SECONDS_MAX = 86_400
GPUS_MAX = 64
CPU_MILLIS_MIN = 10
MEMORY_BYTES_MIN = 16 << 20
STORAGE_BYTES_MIN = 1 << 20
_AMOUNT_MAX = 2**53 - 1


class Strict(BaseModel):
    """Unknown members are refused, and nothing is converted: "1" is no integer."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


Alias = Annotated[str, StringConstraints(pattern=ALIAS_PATTERN)]
Id = Annotated[str, StringConstraints(pattern=ID_PATTERN)]
Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
ImageDigest = Annotated[str, StringConstraints(pattern=r"^sha256:[0-9a-f]{64}$")]


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

    cpu_millis: Annotated[int, Field(ge=CPU_MILLIS_MIN, le=1_000_000)]
    memory_bytes: Annotated[int, Field(ge=MEMORY_BYTES_MIN, le=_AMOUNT_MAX)]
    swap_bytes: Annotated[int, Field(ge=0, le=_AMOUNT_MAX)] = 0
    processes: Annotated[int, Field(ge=4, le=65_536)] = 64
    storage_bytes: Annotated[int, Field(ge=STORAGE_BYTES_MIN, le=_AMOUNT_MAX)] = 64 << 20
    storage_inodes: Annotated[int, Field(ge=16, le=1 << 24)] = 1024
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


class Specification(Strict):
    """What a service runs.

    `context` is tokens per request, `concurrency` simultaneous requests per replica;
    `deadline_seconds` bounds a request including its time in the queue.
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

    def as_json(self) -> dict[str, Any]:
        return self.model_dump(mode="json")
