"""A small specification and model, for tests that change one thing of it."""

from __future__ import annotations

from typing import Any

from ficc.domain.manifest import Manifest, manifest
from ficc.inference.contract import ModelRecord
from ficc.inference.schema import Specification

NODE = "01arz3ndektsv4rrffq69g5fav"
MODEL = "01arz3ndektsv4rrffq69g5fax"


def document(**changes: Any) -> dict[str, Any]:
    """What a client sends to create a service."""
    return {
        "alias": "assistant",
        "model_id": MODEL,
        "engine": "llama_cpp",
        "runtime": {
            "provider": "bubblewrap",
            "package_digest": "a" * 64,
            "image_digest": "sha256:" + "b" * 64,
            "isolation": "shared-kernel",
            "network": "none",
        },
        "executable": "/opt/engine/bin/llama-server",
        "context": 4096,
        "concurrency": 4,
        "placements": [{"node_id": NODE, "limits": limits()}],
        "deadline_seconds": 600,
        **changes,
    }


def limits(**changes: Any) -> dict[str, Any]:
    return {
        "cpu_millis": 2000,
        "memory_bytes": 2147483648,
        "swap_bytes": 0,
        "processes": 64,
        "storage_bytes": 1073741824,
        "storage_inodes": 4096,
        "gpu_devices": [],
        **changes,
    }


def specification(gpus: int = 0, **changes: Any) -> Specification:
    devices = [f"GPU-{index}" for index in range(gpus)]
    placements = [{"node_id": NODE, "limits": limits(gpu_devices=devices)}]
    return Specification.model_validate(document(placements=placements, **changes))


def gguf(capabilities: list[str] | None = None, *names: str, **changes: Any) -> Manifest:
    files = [
        {"name": name, "bytes": 10 + index, "sha256": f"{index:064x}"}
        for index, name in enumerate(names or ("tiny.gguf",))
    ]
    return manifest(
        {"name": "tiny", "format": "gguf", "files": files, "capabilities": capabilities, **changes}
    )


def record(made: Manifest) -> ModelRecord:
    return ModelRecord(MODEL, made.revision, made)
