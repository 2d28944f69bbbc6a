"""Layouts and layers for tests, made with the standard library's `tarfile` and `json`: independent of the
code that is tested, and able to be wrong on purpose."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ficc.images.layout import Image, machine_architecture, open_layout
from ficc.images.limits import DEFAULT_LIMITS, ImageLimits
from ficc.images.store import MOUNT_POINTS

LAYER = "application/vnd.oci.image.layer.v1.tar"


class Bytes:
    """A stream over bytes that counts what was asked for at once."""

    def __init__(self, data: bytes) -> None:
        self._file = io.BytesIO(data)
        self.largest = 0

    def read(self, size: int) -> bytes:
        self.largest = max(self.largest, size)
        return self._file.read(size)

    def skip(self, size: int) -> None:
        self._file.seek(size, io.SEEK_CUR)


def member(
    name: str,
    data: bytes = b"",
    *,
    kind: bytes = tarfile.REGTYPE,
    target: str = "",
    mode: int = 0o644,
    mtime: int = 0,
) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.mode, info.mtime, info.size = kind, target, mode, mtime, len(data)
    return info, data


def folder(name: str, mode: int = 0o755) -> tuple[tarfile.TarInfo, bytes]:
    return member(name, kind=tarfile.DIRTYPE, mode=mode)


def link(name: str, target: str) -> tuple[tarfile.TarInfo, bytes]:
    return member(name, kind=tarfile.SYMTYPE, target=target, mode=0o777)


def hard_link(name: str, target: str) -> tuple[tarfile.TarInfo, bytes]:
    return member(name, kind=tarfile.LNKTYPE, target=target)


def layer(*members: tuple[tarfile.TarInfo, bytes], format: int = tarfile.PAX_FORMAT) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=format) as archive:
        for info, data in members:
            archive.addfile(info, io.BytesIO(data))
    return file.getvalue()


def base_layer(*members: tuple[tarfile.TarInfo, bytes], without: Sequence[str] = ()) -> bytes:
    """A layer with the mount points that the store asks for, and more."""
    points = [folder(point) for point in MOUNT_POINTS if point not in without]
    return layer(*points, *members)


def digest(data: bytes) -> str:
    return "sha256:" + hashlib.sha256(data).hexdigest()


def layout(
    target: Path,
    *layers: bytes,
    packed: bool = False,
    name: str | None = "tests/image",
    change_config: Callable[[dict[str, Any]], None] = lambda config: None,
    change_manifest: Callable[[dict[str, Any]], None] = lambda manifest: None,
    change_index: Callable[[dict[str, Any]], None] = lambda index: None,
) -> Path:
    """Writes a layout directory. The changes see the documents before they are hashed."""
    blobs = target / "blobs" / "sha256"
    blobs.mkdir(parents=True)

    def put(data: bytes, media_type: str) -> dict[str, Any]:
        (blobs / digest(data).removeprefix("sha256:")).write_bytes(data)
        return {"mediaType": media_type, "digest": digest(data), "size": len(data)}

    config: dict[str, Any] = {
        "architecture": machine_architecture(),
        "os": "linux",
        "config": {"Env": ["PATH=/usr/bin"], "Entrypoint": ["/usr/bin/engine"], "Labels": {"a": "b"}},
        "rootfs": {"type": "layers", "diff_ids": [digest(data) for data in layers]},
    }
    change_config(config)
    described = [
        put(gzip.compress(data, mtime=0), LAYER + "+gzip") if packed else put(data, LAYER) for data in layers
    ]
    manifest: dict[str, Any] = {
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "config": put(json.dumps(config).encode(), "application/vnd.oci.image.config.v1+json"),
        "layers": described,
    }
    change_manifest(manifest)
    entry = put(json.dumps(manifest).encode(), "application/vnd.oci.image.manifest.v1+json")
    if name is not None:
        entry["annotations"] = {"org.opencontainers.image.ref.name": name}
    index: dict[str, Any] = {"schemaVersion": 2, "manifests": [entry]}
    change_index(index)
    (target / "index.json").write_text(json.dumps(index))
    (target / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
    return target


def archive_of(source: Path, target: Path) -> Path:
    with tarfile.open(target, "w") as archive:
        archive.add(source, arcname=".")
    return target


def blob(source: Path, which: str) -> Path:
    """The file of the manifest, the config or the last layer of a layout."""
    manifest_digest = json.loads((source / "index.json").read_text())["manifests"][0]["digest"]
    blobs = source / "blobs" / "sha256"
    manifest = blobs / manifest_digest.removeprefix("sha256:")
    if which == "manifest":
        return manifest
    document = json.loads(manifest.read_text())
    described = document["config"] if which == "config" else document["layers"][-1]
    return blobs / described["digest"].removeprefix("sha256:")


def verified(path: Path, limits: ImageLimits = DEFAULT_LIMITS) -> Image:
    """The image of a layout, every byte that it refers to read and every digest compared; extracts nothing."""
    with open_layout(path, limits) as opened:
        for layer in opened.image.layers:
            opened.open_layer(layer).finish()
        return opened.image
