"""The bounds of an image, and how a breach of them or of the format is said.

Every number that an image declares is compared with one of these before anything of that size is read,
kept or written.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ficc.domain.errors import Refused

MIB = 1 << 20
GIB = 1 << 30

CHUNK_BYTES = 1 << 18
"""What is read, inflated or written at a time."""


@dataclass(frozen=True, slots=True)
class ImageLimits:
    document_bytes_max: int = 4 * MIB  # index, manifest and config, each
    archive_entries_max: int = 10_000  # members of a tar archive of a layout
    layers_max: int = 128
    layer_bytes_max: int = 32 * GIB  # one layer, packed and unpacked, each
    files_bytes_max: int = 64 * GIB  # all regular files of all layers
    entries_max: int = 1_000_000  # tar entries of all layers
    path_bytes_max: int = 4096  # of an entry and of the target of a link
    depth_max: int = 100  # directories above an entry, symbolic links followed
    links_followed_max: int = 40  # symbolic links on the way to one entry


DEFAULT_LIMITS = ImageLimits()


def refused(message: str, **details: Any) -> Refused:
    """An image that cannot be taken; the message names what differs."""
    return Refused("image_refused", message, details=details)
