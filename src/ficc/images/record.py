"""What the store knows about an image that it holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class LayerRecord:
    digest: str
    diff_id: str

    def as_json(self) -> dict[str, str]:
        return {"digest": self.digest, "diff_id": self.diff_id}


@dataclass(frozen=True, slots=True)
class ImageRecord:
    image_digest: str  # of the OCI manifest: "sha256:" and 64 hex digits
    config_digest: str
    name: str  # as the image's annotations have it, or ""
    created_at: str  # when it was imported: RFC 3339, UTC, microseconds
    bytes: int  # of the regular files of the root
    entries: int  # files, links and directories of the root
    layers: tuple[LayerRecord, ...]
    environment: Mapping[str, str]
    entrypoint: tuple[str, ...]
    labels: Mapping[str, str]

    def as_json(self) -> dict[str, Any]:
        return {
            "image_digest": self.image_digest,
            "config_digest": self.config_digest,
            "name": self.name,
            "created_at": self.created_at,
            "bytes": self.bytes,
            "entries": self.entries,
            "layers": [layer.as_json() for layer in self.layers],
            "environment": dict(self.environment),
            "entrypoint": list(self.entrypoint),
            "labels": dict(self.labels),
        }

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> ImageRecord:
        """Raises KeyError or TypeError for what `as_json` did not write."""
        return cls(
            image_digest=document["image_digest"],
            config_digest=document["config_digest"],
            name=document["name"],
            created_at=document["created_at"],
            bytes=document["bytes"],
            entries=document["entries"],
            layers=tuple(LayerRecord(**layer) for layer in document["layers"]),
            environment=dict(document["environment"]),
            entrypoint=tuple(document["entrypoint"]),
            labels=dict(document["labels"]),
        )
