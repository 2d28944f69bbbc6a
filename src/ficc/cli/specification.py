"""From a few flags to a full service specification, with defaults taken from the model and the node."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ficc.cli import connection
from ficc.domain.plan import LEAST

if TYPE_CHECKING:
    from ficc.client.api import Api

MEMORY_BYTES_MIN = 512 << 20
MEMORY_FACTOR = 2
MEMORY_EXTRA_BYTES = 512 << 20
CORE_MILLIS = 1000
ENGINES = {"gguf": "llama_cpp"}
"""By a model's format: the engine that runs it."""
RUNTIME_MEMBERS = ("provider", "package_digest", "image_digest", "isolation", "network")


@dataclass(frozen=True, slots=True)
class Wishes:
    """What was given on the command line; None: choose."""

    alias: str
    model: str
    nodes: tuple[str, ...]
    replicas: int
    runtime: str | None
    context: int
    concurrency: int
    memory_bytes: int | None
    cpu_millis: int | None
    deadline_seconds: int


async def build(api: Api, wishes: Wishes) -> dict[str, Any]:
    """The specification; what is left out has the API's defaults. Raises LookupError for a model, node or runtime
    that is not there."""
    from ficc.images.build import LLAMA_SERVER  # here, because loading it takes a small command's time

    model = await connection.resolve(api, "/models", wishes.model, "manifest.name")
    nodes = [node async for node in api.every("/contributors")]
    chosen = [_node(nodes, given) for given in wishes.nodes] or [_roomiest(nodes)]
    engine = ENGINES.get(model["manifest"]["format"])
    if engine is None:
        raise LookupError(f"No engine of this release runs {model['manifest']['format']} models.")
    return {
        "alias": wishes.alias,
        "model_id": model["id"],
        "engine": engine,
        "runtime": _runtime(chosen[0], wishes.runtime, engine),
        "executable": LLAMA_SERVER,
        "context": wishes.context,
        "concurrency": wishes.concurrency,
        "placements": [
            {"node_id": node["id"], "limits": _limits(wishes, model, node)}
            for node in chosen
            for _ in range(wishes.replicas)
        ],
        "deadline_seconds": wishes.deadline_seconds,
    }


def _node(nodes: list[dict[str, Any]], given: str) -> dict[str, Any]:
    for node in nodes:
        if given in (node["id"], node["name"]):
            return node
    raise LookupError(f"There is no node {given!r}; see `ficc node list`.")


def _roomiest(nodes: list[dict[str, Any]]) -> dict[str, Any]:
    connected = [node for node in nodes if node["connected"]]
    if not connected:
        raise LookupError("No node is connected; start `ficc up` or an executor.")
    return max(connected, key=lambda node: int(node["available"]["memory_bytes"]))


def _runtime(node: dict[str, Any], wanted: str | None, engine: str) -> dict[str, Any]:
    """The newest image of the wanted name or digest; without a wish, the newest that is named after the engine, and
    where none is, the newest of all."""
    runtimes = node["runtimes"]  # newest first
    names = [wanted] if wanted is not None else [engine.replace("_", "-"), None]
    for name in names:
        for runtime in runtimes:
            if name in (None, runtime["name"], runtime["image_digest"], runtime["name"].rpartition("/")[2]):
                return {member: runtime[member] for member in RUNTIME_MEMBERS}
    if wanted is not None:
        raise LookupError(f"{node['name']} has no runtime {wanted!r}; see `ficc runtime list`.")
    raise LookupError(f"{node['name']} has no runtime; build one there with `ficc runtime build llama-cpp`.")


def default_cpu_millis(free_millis: int, replicas: int) -> int:
    """For one of so many replicas on a node: together half of the free cores, whole ones and at least one, so that
    another service fits beside them; less where less is free. Where nothing is, the refusal says who has it."""
    share = max(CORE_MILLIS, free_millis // 2 // CORE_MILLIS * CORE_MILLIS)
    return max(LEAST["cpu_millis"], (min(share, free_millis) or CORE_MILLIS) // replicas)


def _limits(wishes: Wishes, model: dict[str, Any], node: dict[str, Any]) -> dict[str, Any]:
    guess = max(MEMORY_BYTES_MIN, MEMORY_FACTOR * model["bytes_total"] + MEMORY_EXTRA_BYTES)
    return {
        "cpu_millis": wishes.cpu_millis
        or default_cpu_millis(node["available"]["cpu_millis"], wishes.replicas),
        "memory_bytes": wishes.memory_bytes or guess,
    }
