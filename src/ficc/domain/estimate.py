"""How much memory a replica needs, as far as the manifest alone tells.

Only the size of the files is known here, so the estimate is a floor: the weights and a fixed overhead of
the engine's own code and buffers. The cache and compute buffers grow with context and depend on the
model's header; they are absent (None), never guessed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

ENGINE_OVERHEAD_BYTES = 64 << 20
"""Resident memory of llama.cpp's server with a model of no size, rounded up."""


@dataclass(frozen=True, slots=True)
class Estimate:
    weights_bytes: int
    overhead_bytes: int
    kv_cache_bytes: int | None = None
    compute_bytes: int | None = None
    basis: str = "file_size"

    @property
    def total_bytes(self) -> int:
        return (
            self.weights_bytes + self.overhead_bytes + (self.kv_cache_bytes or 0) + (self.compute_bytes or 0)
        )

    def as_json(self) -> dict[str, Any]:
        return {
            "weights_bytes": self.weights_bytes,
            "kv_cache_bytes": self.kv_cache_bytes,
            "compute_bytes": self.compute_bytes,
            "overhead_bytes": self.overhead_bytes,
            "total_bytes": self.total_bytes,
            "basis": self.basis,
        }


def from_file_sizes(weights_bytes: int) -> Estimate:
    return Estimate(weights_bytes=weights_bytes, overhead_bytes=ENGINE_OVERHEAD_BYTES)
