"""From a few flags to a full service specification, with defaults taken from the model and the node."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ficc.cli import connection

if TYPE_CHECKING:
    from ficc.client.api import Api

MEMORY_BYTES_MIN = 512 << 20
MEMORY_FACTOR = 2
MEMORY_EXTRA_BYTES = 512 << 20
PROCESSES = 64
STORAGE_BYTES = 64 << 20
ENGINES = {"gguf": ("llama_cpp", "/opt/engine/bin/llama-server")}
"""By a model's format: the engine that runs it, and where the images that we build have it."""
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
    """The specification. Raises LookupError for a model, node or runtime that is not there."""
    model = await connection.resolve(api, "/models", wishes.model, "manifest.name")
    nodes = [node async for node in api.every("/contributors")]
    chosen = [_node(nodes, given) for given in wishes.nodes] or [_roomiest(nodes)]
    engine, executable = ENGINES.get(model["manifest"]["format"], (None, None))
    if engine is None:
        raise LookupError(f"No engine of this release runs {model['manifest']['format']} models.")
    return {
        "alias": wishes.alias,
        "model_id": model["id"],
        "engine": engine,
        "runtime": _runtime(chosen[0], wishes.runtime),
        "executable": executable,
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


def _runtime(node: dict[str, Any], wanted: str | None) -> dict[str, Any]:
    for runtime in node["runtimes"]:  # newest first
        if wanted in (None, runtime["name"], runtime["image_digest"]) or runtime["name"].endswith(
            f"/{wanted}"
        ):
            return {member: runtime[member] for member in RUNTIME_MEMBERS}
    hint = (
        "build one there with `ficc runtime build llama-cpp`" if wanted is None else "see `ficc runtime list`"
    )
    raise LookupError(f"{node['name']} has no runtime{'' if wanted is None else f' {wanted!r}'}; {hint}.")


def _limits(wishes: Wishes, model: dict[str, Any], node: dict[str, Any]) -> dict[str, Any]:
    guess = max(MEMORY_BYTES_MIN, MEMORY_FACTOR * model["bytes_total"] + MEMORY_EXTRA_BYTES)
    return {
        "cpu_millis": wishes.cpu_millis or node["capacity"]["cpu_millis"],
        "memory_bytes": wishes.memory_bytes or guess,
        "processes": PROCESSES,
        "storage_bytes": STORAGE_BYTES,
    }
