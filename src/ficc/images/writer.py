"""A directory tree as an OCI image layout, the same bytes for the same tree.

One uncompressed tar layer: names sorted, times 0, owner and group 0, no names of accounts, no extended
attributes; JSON with sorted members and no blanks; no date in the config. So the digest depends on names,
kinds, permission bits, contents and links of the tree and on the arguments, and on nothing else.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from ficc.images.layout import (
    CONFIG_TYPE,
    INDEX_FILE,
    INDEX_TYPE,
    LAYOUT_FILE,
    LAYOUT_VERSION,
    MANIFEST_TYPE,
    REF_NAME,
    TAR_LAYER_TYPE,
    machine_architecture,
)
from ficc.images.limits import CHUNK_BYTES, refused
from ficc.images.tar import END, Kind, header, padding, shown


def write_layout(
    tree: Path,
    layout: Path,
    *,
    name: str,
    entrypoint: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    labels: Mapping[str, str] | None = None,
    architecture: str | None = None,
) -> str:
    """Writes the layout directory, which must not exist, and answers the image digest.

    The caller may lose a half-written layout to a crash; nothing reads one without checking it. Raises
    Refused (`image_refused`) for a device, fifo or socket in the tree, or a name that is not UTF-8.
    """
    blobs = layout / "blobs" / "sha256"
    blobs.mkdir(parents=True)
    layer = _write_layer(tree, blobs)
    config = {
        "architecture": architecture or machine_architecture(),
        "os": "linux",
        "config": {
            "Env": [f"{key}={value}" for key, value in sorted((environment or {}).items())],
            "Entrypoint": list(entrypoint),
            "Labels": dict(labels or {}),
        },
        "rootfs": {"type": "layers", "diff_ids": [layer["digest"]]},
    }
    manifest = {
        "schemaVersion": 2,
        "mediaType": MANIFEST_TYPE,
        "config": _write_document(config, CONFIG_TYPE, blobs),
        "layers": [layer],
        "annotations": {REF_NAME: name},
    }
    described = _write_document(manifest, MANIFEST_TYPE, blobs) | {"annotations": {REF_NAME: name}}
    index = {"schemaVersion": 2, "mediaType": INDEX_TYPE, "manifests": [described]}
    (layout / INDEX_FILE).write_bytes(_json(index))
    (layout / LAYOUT_FILE).write_bytes(_json({"imageLayoutVersion": LAYOUT_VERSION}))
    return str(described["digest"])


def _write_document(document: Mapping[str, Any], media_type: str, blobs: Path) -> dict[str, Any]:
    data = _json(document)
    digest = hashlib.sha256(data).hexdigest()
    (blobs / digest).write_bytes(data)
    return {"mediaType": media_type, "digest": f"sha256:{digest}", "size": len(data)}


def _write_layer(tree: Path, blobs: Path) -> dict[str, Any]:
    unnamed = blobs / "layer"
    with unnamed.open("xb") as file:
        archive = _Hashed(file)
        names_of: dict[tuple[int, int], bytes] = {}
        for path, entry in _sorted_entries(tree):
            _write_entry(archive, path, entry, names_of)
        archive.write(END)
    digest = archive.sha256.hexdigest()
    unnamed.rename(blobs / digest)
    return {"mediaType": TAR_LAYER_TYPE, "digest": f"sha256:{digest}", "size": archive.size}


@dataclass(slots=True)
class _Hashed:
    file: BinaryIO
    sha256: hashlib._Hash = field(default_factory=hashlib.sha256)
    size: int = 0

    def write(self, data: bytes) -> None:
        self.file.write(data)
        self.sha256.update(data)
        self.size += len(data)


def _sorted_entries(folder: Path, above: bytes = b"") -> Iterator[tuple[bytes, os.DirEntry[bytes]]]:
    """Every entry below, a directory before what is in it, siblings in the order of their bytes."""
    with os.scandir(os.fsencode(folder)) as found:
        entries = sorted(found, key=lambda entry: entry.name)
    for entry in entries:
        path = above + entry.name
        yield path, entry
        if entry.is_dir(follow_symlinks=False):
            yield from _sorted_entries(Path(os.fsdecode(entry.path)), path + b"/")


def _write_entry(
    archive: _Hashed, path: bytes, entry: os.DirEntry[bytes], names_of: dict[tuple[int, int], bytes]
) -> None:
    about = entry.stat(follow_symlinks=False)
    mode = stat.S_IMODE(about.st_mode)
    if stat.S_ISDIR(about.st_mode):
        archive.write(header(path + b"/", Kind.DIRECTORY, mode=mode))
    elif stat.S_ISLNK(about.st_mode):
        archive.write(header(path, Kind.SYMLINK, mode=0o777, target=os.readlink(entry.path)))
    elif not stat.S_ISREG(about.st_mode):
        raise refused(f"{shown(path)} is a device, a fifo or a socket; an image may hold none")
    elif (earlier := names_of.setdefault((about.st_dev, about.st_ino), path)) != path:
        archive.write(header(path, Kind.HARD_LINK, mode=mode, target=earlier))
    else:
        _write_file(archive, path, entry.path, mode)


def _write_file(archive: _Hashed, path: bytes, source: bytes, mode: int) -> None:
    with open(source, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        archive.write(header(path, Kind.FILE, mode=mode, size=size))
        left = size
        while left and (data := file.read(min(left, CHUNK_BYTES))):
            archive.write(data)
            left -= len(data)
        if left or file.read(1):
            raise refused(f"{shown(path)} changed while it was read")
        archive.write(padding(size))


def _json(document: Mapping[str, Any]) -> bytes:
    return json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
