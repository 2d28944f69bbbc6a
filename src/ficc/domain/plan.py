"""The plan of an attempt: the immutable launch document, and its digest.

A plan says everything that decides what runs: node, runtime, command, limits, inputs, and, for a replica,
the model revision and the endpoint contract. It never holds an attempt, a generation, a service or a
lease: those are the fence. Absent optional members are left out of the canonical form, so that plans
written before they existed keep their digests.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from ficc.domain import canonical, ids
from ficc.domain.errors import invalid
from ficc.domain.manifest import SHA256, name_problem

PLAN_VERSION = 1
ARGUMENTS_MAX = 256
ARGUMENT_BYTES_MAX = 4096
ENVIRONMENT_MAX = 64
INPUTS_MAX = 4096
OUTPUTS_MAX = 64
ROUTES_MAX = 16
PATH_BYTES_MAX = 512
BODY_BYTES_MAX = 16 << 20
"""The largest inference body: what our adapters' endpoint contracts admit, so the most that a gateway takes."""
PLAN_BYTES_MAX = 4 << 20
"""Canonical bytes of a plan; the executor's protocol has room for it."""

PROCESSES_DEFAULT = 64
STORAGE_BYTES_DEFAULT = 64 << 20
STORAGE_INODES_DEFAULT = 1024

_PATH = re.compile(r"/[A-Za-z0-9._~/-]*")


@dataclass(frozen=True, slots=True)
class Limits:
    """What an attempt may use at most; also what it reserves on its node."""

    cpu_millis: int
    memory_bytes: int
    swap_bytes: int = 0
    processes: int = PROCESSES_DEFAULT
    storage_bytes: int = STORAGE_BYTES_DEFAULT
    storage_inodes: int = STORAGE_INODES_DEFAULT
    gpu_devices: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "gpu_devices": list(self.gpu_devices)}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Limits:
        return cls(**{**document, "gpu_devices": tuple(document.get("gpu_devices", ()))})


COUNTED = ("cpu_millis", "memory_bytes", "swap_bytes", "processes", "storage_bytes", "storage_inodes")
"""The members of Limits that add up."""

LEAST: Mapping[str, int] = {
    "cpu_millis": 10,  # the kernel's shortest quota: 1 ms of a period of 100 ms
    "memory_bytes": 16 << 20,
    "processes": 4,  # a sandbox takes two besides the payload
    "storage_bytes": 1 << 20,  # to a tmpfs, 0 means that nothing is bounded
    "storage_inodes": 16,
}
"""Below these no engine runs: a specification with less is refused, and so is a plan."""


@dataclass(frozen=True, slots=True)
class Runtime:
    provider: str
    package_digest: str
    image_digest: str
    isolation: str = "shared-kernel"
    network: str = "none"

    def as_json(self) -> dict[str, str]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Input:
    """One read-only file of the sandbox, at /inputs/NAME. Only an admitted `id` can be uploaded to an
    engine."""

    id: str
    sha256: str
    bytes: int
    name: str

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The endpoint contract: what an attempt's socket accepts. `path_or_port` is a socket's path in the
    sandbox for "unix", a port number for "tcp"."""

    transport: Literal["unix", "tcp"]
    path_or_port: str | int
    routes: tuple[tuple[str, str], ...]
    body_bytes_max: int
    concurrency: int
    upload_input_ids: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        return {
            "transport": self.transport,
            "path_or_port": self.path_or_port,
            "routes": [list(route) for route in self.routes],
            "body_bytes_max": self.body_bytes_max,
            "concurrency": self.concurrency,
            "upload_input_ids": list(self.upload_input_ids),
        }

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Endpoint:
        routes = tuple((method, path) for method, path in document["routes"])
        uploads = tuple(document.get("upload_input_ids", ()))
        return cls(**{**document, "routes": routes, "upload_input_ids": uploads})


@dataclass(frozen=True, slots=True)
class Plan:
    node_id: str
    runtime: Runtime
    argv: tuple[str, ...]
    environment: Mapping[str, str]
    limits: Limits
    inputs: tuple[Input, ...] = ()
    outputs: tuple[str, ...] = ()
    sensitive: bool = False
    model_revision: str | None = None
    endpoint: Endpoint | None = None
    plan_version: int = field(default=PLAN_VERSION)

    def as_json(self) -> dict[str, Any]:
        document: dict[str, Any] = canonical.without_absent(
            {
                "plan_version": self.plan_version,
                "node_id": self.node_id,
                "runtime": self.runtime.as_json(),
                "argv": list(self.argv),
                "environment": dict(self.environment),
                "limits": self.limits.as_json(),
                "inputs": [entry.as_json() for entry in self.inputs],
                "outputs": list(self.outputs),
                "sensitive": self.sensitive,
                "model_revision": self.model_revision,
                "endpoint": None if self.endpoint is None else self.endpoint.as_json(),
            }
        )
        return document

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Plan:
        """The plan of a document, checked. Raises Refused `invalid_request` for one that is none."""
        try:
            unknown = set(document) - set(cls.__dataclass_fields__)
            if unknown:
                raise ValueError(f"unknown member {min(unknown)!r}")
            endpoint = document.get("endpoint")
            plan = cls(
                node_id=document["node_id"],
                runtime=Runtime(**document["runtime"]),
                argv=tuple(document["argv"]),
                environment=dict(document["environment"]),
                limits=Limits.from_json(document["limits"]),
                inputs=tuple(Input(**entry) for entry in document["inputs"]),
                outputs=tuple(document["outputs"]),
                sensitive=document["sensitive"],
                model_revision=document.get("model_revision"),
                endpoint=None if endpoint is None else Endpoint.from_json(endpoint),
                plan_version=document["plan_version"],
            )
            plan.check()
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise invalid(f"Not a plan of version {PLAN_VERSION}: {error}.", "plan") from error
        return plan

    @property
    def digest(self) -> str:
        return canonical.digest(self.as_json())

    def check(self) -> None:
        """Refuse what no executor may launch (bounds, NUL bytes, a path outside the sandbox)."""
        if not _amount(self.plan_version, PLAN_VERSION, PLAN_VERSION):
            raise invalid(f"This executor launches plans of version {PLAN_VERSION}.", "plan.plan_version")
        names = (self.node_id, *self.runtime.as_json().values(), *self.outputs)
        revision = "" if self.model_revision is None else self.model_revision
        if not all(map(_plain, (*names, revision))) or type(self.sensitive) is not bool:
            raise invalid("A member of the plan is not of its type.", "plan")
        _check_command(self.argv, self.environment)
        _check_limits(self.limits)
        _check_inputs(self.inputs)
        _check_outputs(self.outputs)
        if self.endpoint is not None:
            _check_endpoint(self.endpoint, self.inputs)
        # As many bytes as the canonical form has, in another order, and much faster to make.
        document = json.dumps(self.as_json(), ensure_ascii=False, separators=(",", ":"))
        if len(document.encode()) > PLAN_BYTES_MAX:
            raise invalid(f"A plan has at most {PLAN_BYTES_MAX} bytes; use shorter file names.", "plan")


def _check_command(argv: Sequence[str], environment: Mapping[str, str]) -> None:
    if not 1 <= len(argv) <= ARGUMENTS_MAX or not all(map(_plain, argv)):
        raise invalid(f"argv has 1 to {ARGUMENTS_MAX} plain arguments.", "plan.argv")
    if not argv[0].startswith("/"):
        raise invalid("argv[0] is an absolute path in the image.", "plan.argv")
    if len(environment) > ENVIRONMENT_MAX or not all(
        _plain(name) and name and "=" not in name and _plain(value) for name, value in environment.items()
    ):
        raise invalid(f"environment has at most {ENVIRONMENT_MAX} plain entries.", "plan.environment")


def _plain(text: object) -> bool:
    """Text that an argument vector can hold."""
    if not isinstance(text, str) or "\0" in text:
        return False
    try:
        return len(text.encode()) <= ARGUMENT_BYTES_MAX
    except UnicodeEncodeError:  # half a surrogate pair
        return False


def _amount(value: object, least: int = 0, most: int = canonical.INTEGER_MAX) -> bool:
    """A plain integer within its bounds; True is none."""
    return type(value) is int and least <= value <= most


def _check_limits(limits: Limits) -> None:
    for name in COUNTED:
        if not _amount(getattr(limits, name)):
            raise invalid(f"{name} is an integer from 0 to 2^53-1.", f"plan.limits.{name}")
    devices = limits.gpu_devices
    if not all(map(_plain, devices)) or len(set(devices)) != len(devices):
        raise invalid("gpu_devices are names, each once.", "plan.limits.gpu_devices")


def _check_inputs(inputs: Sequence[Input]) -> None:
    ids_, names = {entry.id for entry in inputs}, {entry.name for entry in inputs}
    if not len(ids_) == len(names) == len(inputs) <= INPUTS_MAX:
        raise invalid(f"inputs have distinct ids and names, and are at most {INPUTS_MAX}.", "plan.inputs")
    for entry in inputs:
        problem = name_problem(entry.name)
        if problem or not SHA256.fullmatch(entry.sha256) or not _amount(entry.bytes) or not _plain(entry.id):
            raise invalid(f"Input {entry.name!r}: {problem or 'no SHA-256, size or id.'}", "plan.inputs")


def _check_outputs(outputs: Sequence[str]) -> None:
    """An output is a file below the sandbox's /run/ficc, by its relative path there."""
    if len(set(outputs)) != len(outputs) or len(outputs) > OUTPUTS_MAX:
        raise invalid(f"outputs are distinct names, at most {OUTPUTS_MAX}.", "plan.outputs")
    for name in outputs:
        problem = name_problem(name)
        if problem:
            raise invalid(f"Output {name!r}: {problem}", "plan.outputs")


def _check_endpoint(endpoint: Endpoint, inputs: Sequence[Input]) -> None:
    target = endpoint.path_or_port
    match endpoint.transport:
        case "unix":
            if not isinstance(target, str) or not _below_run(target):
                raise invalid("A unix endpoint lies below /run/ficc.", "plan.endpoint.path_or_port")
        case "tcp":
            if not _amount(target, 1, 65535):
                raise invalid("A tcp endpoint is a port from 1 to 65535.", "plan.endpoint.path_or_port")
        case _:
            raise invalid("An endpoint's transport is unix or tcp.", "plan.endpoint.transport")
    routes = endpoint.routes
    if len(routes) > ROUTES_MAX or not all(_is_route(*route) for route in routes):
        raise invalid(
            f"An endpoint has at most {ROUTES_MAX} routes, each GET or POST and a plain absolute path.",
            "plan.endpoint.routes",
        )
    if not set(endpoint.upload_input_ids) <= {entry.id for entry in inputs}:
        raise invalid("Only admitted inputs can be uploaded.", "plan.endpoint.upload_input_ids")
    if not _amount(endpoint.concurrency, 1) or not _amount(endpoint.body_bytes_max):
        raise invalid("concurrency is at least 1, body_bytes_max at least 0.", "plan.endpoint")


def _below_run(path: str) -> bool:
    parts = path.split("/")
    return path.startswith("/run/ficc/") and parts[-1] != "" and ".." not in parts and _is_path(path)


def _is_path(path: str) -> bool:
    return len(path) <= PATH_BYTES_MAX and _PATH.fullmatch(path) is not None


def _is_route(method: str, path: str) -> bool:
    """A path is written into the engine's request line as it stands, so it has plain characters only."""
    return method in ("GET", "POST") and _is_path(path)


@dataclass(frozen=True, slots=True)
class Fence:
    """Which attempt of which generation under which plan: every message to an endpoint carries it."""

    attempt_id: str
    generation: int
    plan_digest: str

    BYTES = 16 + 8 + 32

    def pack(self) -> bytes:
        """56 bytes: attempt, generation (big endian), plan digest. Raises ValueError."""
        if not SHA256.fullmatch(self.plan_digest):
            raise ValueError(f"not a digest: {self.plan_digest[:80]!r}")
        return (
            ids.to_bytes(self.attempt_id)
            + self.generation.to_bytes(8, "big")
            + bytes.fromhex(self.plan_digest)
        )

    @classmethod
    def unpack(cls, raw: bytes) -> Fence:
        if len(raw) != cls.BYTES:
            raise ValueError(f"a fence has {cls.BYTES} bytes")
        return cls(ids.from_bytes(raw[:16]), int.from_bytes(raw[16:24], "big"), raw[24:].hex())
