"""Reading an OCI image layout: index → one manifest → config → layers, every byte checked on the way.

The image's digest is the digest of its manifest. Each blob is read once, and its size and SHA-256 are
compared while it is read; a layer's uncompressed bytes are compared with the config's `diff_ids`. A
caller may use what a layer stream gives only after its `finish()` has returned.

Source: OCI Image Format Specification 1.1 (image-layout, manifest, config, layer, annotations).
"""

from __future__ import annotations

import hashlib
import json
import platform
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ficc.images.blobs import Inflated, Proven, Region, Source, open_source
from ficc.images.limits import DEFAULT_LIMITS, ImageLimits, refused

INDEX_TYPE = "application/vnd.oci.image.index.v1+json"
MANIFEST_TYPE = "application/vnd.oci.image.manifest.v1+json"
CONFIG_TYPE = "application/vnd.oci.image.config.v1+json"
TAR_LAYER_TYPE = "application/vnd.oci.image.layer.v1.tar"
GZIP_LAYER_TYPE = "application/vnd.oci.image.layer.v1.tar+gzip"
ZSTD_LAYER_TYPE = "application/vnd.oci.image.layer.v1.tar+zstd"
REF_NAME = "org.opencontainers.image.ref.name"
TITLE = "org.opencontainers.image.title"

LAYOUT_FILE = "oci-layout"
LAYOUT_VERSION = "1.0.0"
INDEX_FILE = "index.json"
NAME_CHARACTERS_MAX = 255

DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
ARCHITECTURES = {
    "x86_64": "amd64",
    "aarch64": "arm64",
    "armv7l": "arm",
    "ppc64le": "ppc64le",
    "riscv64": "riscv64",
    "s390x": "s390x",
}
"""The kernel's names for machines, and the ones that images use (Go's)."""


@dataclass(frozen=True, slots=True)
class Layer:
    digest: str  # of the blob as it is stored
    diff_id: str  # of the tar archive inside
    media_type: str
    bytes: int  # of the blob


@dataclass(frozen=True, slots=True)
class Image:
    """What the manifest and the config say."""

    image_digest: str
    config_digest: str
    name: str  # "" when no annotation names it
    layers: tuple[Layer, ...]
    environment: Mapping[str, str]
    entrypoint: tuple[str, ...]
    labels: Mapping[str, str]
    documents: Mapping[str, bytes]  # "manifest.json" and "config.json", exactly as read


@dataclass(frozen=True, slots=True)
class LayerStream:
    """The uncompressed tar archive of a layer."""

    unpacked: Proven
    packed: Proven

    def read(self, size: int) -> bytes:
        return self.unpacked.read(size)

    def skip(self, size: int) -> None:
        self.unpacked.skip(size)

    def finish(self) -> None:
        """Reads to the end. Raises Refused (`image_refused`) unless both digests are as declared."""
        self.unpacked.finish()
        self.packed.finish()


class Layout:
    """An opened layout, its manifest and config read and checked."""

    def __init__(self, source: Source, limits: ImageLimits) -> None:
        self._source = source
        self._limits = limits
        self.image = self._read_image()

    def open_layer(self, layer: Layer) -> LayerStream:
        what = f"layer {layer.digest}"
        packed = Proven(self._blob(layer.digest, what), what, _hex(layer.digest), size=layer.bytes)
        if layer.media_type == TAR_LAYER_TYPE:
            return LayerStream(packed, packed)
        unpacked = Proven(
            Inflated(packed, what),
            f"{what}, uncompressed,",
            _hex(layer.diff_id),
            bytes_max=self._limits.layer_bytes_max,
        )
        return LayerStream(unpacked, packed)

    def _read_image(self) -> Image:
        self._check_version()
        descriptor = self._one_manifest()
        manifest_bytes = self._document(descriptor, "the manifest")
        manifest = _object(manifest_bytes, "the manifest")
        if manifest.get("schemaVersion") != 2 or manifest.get("mediaType", MANIFEST_TYPE) != MANIFEST_TYPE:
            raise refused("the manifest is not an OCI image manifest of schema version 2")
        config_descriptor = _descriptor(manifest.get("config"), "the manifest's config")
        if config_descriptor.media_type != CONFIG_TYPE:
            raise refused(
                f"the config has the media type {config_descriptor.media_type!r}: this is no image of a system"
            )
        config_bytes = self._document(config_descriptor, "the config")
        config = _object(config_bytes, "the config")
        _check_platform(config)
        annotations = _texts(descriptor.annotations, "the index's annotations")
        annotations = _texts(manifest.get("annotations"), "the manifest's annotations") | annotations
        runtime = _part(config, "config", dict, "the config's config")
        return Image(
            image_digest=descriptor.digest,
            config_digest=config_descriptor.digest,
            name=_name(annotations),
            layers=self._layers(manifest, config),
            environment=_environment(_part(runtime, "Env", list, "the config's Env")),
            entrypoint=tuple(_strings(_part(runtime, "Entrypoint", list, "the config's Entrypoint"))),
            labels=_texts(runtime.get("Labels"), "the config's Labels"),
            documents={"manifest.json": manifest_bytes, "config.json": config_bytes},
        )

    def _check_version(self) -> None:
        region = self._source.region(LAYOUT_FILE)
        if region is None and self._source.region("manifest.json") is not None:
            raise refused("this is a docker archive; save the image with `--format oci-archive`")
        if region is None:
            raise refused(f"this is not an OCI image layout: it has no file {LAYOUT_FILE}")
        version = _object(self._whole(region, LAYOUT_FILE), LAYOUT_FILE).get("imageLayoutVersion")
        if version != LAYOUT_VERSION:
            raise refused(f"the layout has version {version!r}; {LAYOUT_VERSION} is read")

    def _one_manifest(self) -> Descriptor:
        region = self._source.region(INDEX_FILE)
        if region is None:
            raise refused(f"the layout has no {INDEX_FILE}")
        index = _object(self._whole(region, INDEX_FILE), INDEX_FILE)
        if index.get("schemaVersion") != 2:
            raise refused(f"{INDEX_FILE} does not have schema version 2")
        manifests = _part(index, "manifests", list, f"{INDEX_FILE}'s manifests")
        if len(manifests) != 1:
            raise refused(
                f"the layout holds {len(manifests)} manifests; copy the one wanted into a layout of its own"
            )
        descriptor = _descriptor(manifests[0], "the index's entry")
        if descriptor.media_type == INDEX_TYPE:
            raise refused(
                "the layout holds an index of several platforms; copy the image of this machine's platform"
            )
        if descriptor.media_type != MANIFEST_TYPE:
            raise refused(f"the manifest has the media type {descriptor.media_type!r}, not {MANIFEST_TYPE}")
        return descriptor

    def _layers(self, manifest: Mapping[str, Any], config: Mapping[str, Any]) -> tuple[Layer, ...]:
        listed = _part(manifest, "layers", list, "the manifest's layers")
        rootfs = _part(config, "rootfs", dict, "the config's rootfs")
        diff_ids = _part(rootfs, "diff_ids", list, "the config's diff_ids")
        if not 1 <= len(listed) <= self._limits.layers_max:
            raise refused(f"the image has {len(listed)} layers; 1 to {self._limits.layers_max} are taken")
        if len(listed) != len(diff_ids):
            raise refused(f"the manifest has {len(listed)} layers, the config {len(diff_ids)} diff_ids")
        return tuple(self._layer(item, diff_id) for item, diff_id in zip(listed, diff_ids, strict=True))

    def _layer(self, item: Any, diff_id: Any) -> Layer:
        descriptor = _descriptor(item, "a layer")
        what = f"layer {descriptor.digest}"
        if descriptor.media_type == ZSTD_LAYER_TYPE:
            raise refused(f"{what} is packed with zstd, which is not read here; pack it with gzip")
        if descriptor.media_type not in (TAR_LAYER_TYPE, GZIP_LAYER_TYPE):
            raise refused(f"{what} has the media type {descriptor.media_type!r}, which is not read here")
        if descriptor.size > self._limits.layer_bytes_max:
            raise refused(
                f"{what} has {descriptor.size} bytes; at most {self._limits.layer_bytes_max} are taken"
            )
        if not isinstance(diff_id, str) or not DIGEST.fullmatch(diff_id):
            raise refused(f"{what}: its diff_id is not a sha256 digest")
        if descriptor.media_type == TAR_LAYER_TYPE and diff_id != descriptor.digest:
            raise refused(f"{what} is not packed, so its diff_id must be the same digest, not {diff_id}")
        return Layer(descriptor.digest, diff_id, descriptor.media_type, descriptor.size)

    def _document(self, descriptor: Descriptor, what: str) -> bytes:
        region = self._blob(descriptor.digest, what)
        if region.size != descriptor.size:
            raise refused(f"{what} has {region.size} bytes; {descriptor.size} are declared")
        data = self._whole(region, what)
        actual = hashlib.sha256(data).hexdigest()
        if actual != _hex(descriptor.digest):
            raise refused(f"{what} hashes to sha256:{actual}; {descriptor.digest} is declared")
        return data

    def _blob(self, digest: str, what: str) -> Region:
        region = self._source.region(f"blobs/sha256/{_hex(digest)}")
        if region is None:
            raise refused(f"the layout lacks the blob of {what}: {digest}")
        return region

    def _whole(self, region: Region, what: str) -> bytes:
        if region.size > self._limits.document_bytes_max:
            raise refused(
                f"{what} has {region.size} bytes; at most {self._limits.document_bytes_max} are read"
            )
        return region.read(region.size)


@contextmanager
def open_layout(path: Path, limits: ImageLimits = DEFAULT_LIMITS) -> Iterator[Layout]:
    """A layout at `path`, a directory or a tar archive of one. Raises Refused (`image_refused`) with
    what differs from the specification, from the digests or from this machine."""
    source = open_source(path, limits)
    try:
        yield Layout(source, limits)
    finally:
        source.close()


def machine_architecture() -> str:
    """This machine's architecture as images name it."""
    machine = platform.machine()
    return ARCHITECTURES.get(machine, machine)


@dataclass(frozen=True, slots=True)
class Descriptor:
    media_type: str
    digest: str
    size: int
    annotations: Any


def _descriptor(value: Any, what: str) -> Descriptor:
    if not isinstance(value, dict):
        raise refused(f"{what} is not a descriptor")
    media_type, digest, size = value.get("mediaType"), value.get("digest"), value.get("size")
    if not isinstance(media_type, str):
        raise refused(f"{what} has no media type")
    if not isinstance(digest, str) or not DIGEST.fullmatch(digest):
        raise refused(f"{what} has no sha256 digest: {str(digest)[:80]!r}")
    if type(size) is not int or size < 0:
        raise refused(f"{what} has no size")
    return Descriptor(media_type, digest, size, value.get("annotations"))


def _object(data: bytes, what: str) -> dict[str, Any]:
    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        members = dict(pairs)
        if len(members) != len(pairs):
            raise refused(f"{what} names a member twice")
        return members

    try:
        value = json.loads(data, object_pairs_hook=once)
    except (ValueError, RecursionError):
        raise refused(f"{what} is not JSON") from None
    if not isinstance(value, dict):
        raise refused(f"{what} is not a JSON object")
    return value


def _part(document: Mapping[str, Any], key: str, kind: type, what: str) -> Any:
    """A member that may be absent or null (Go writes both), then empty."""
    value = document.get(key)
    if value is None:
        return kind()
    if not isinstance(value, kind):
        raise refused(f"{what} has another type than the specification gives it")
    return value


def _strings(values: list[Any]) -> list[str]:
    if not all(isinstance(value, str) and "\0" not in value for value in values):
        raise refused("the config lists something that is not a string")
    return values


def _texts(value: Any, what: str) -> dict[str, str]:
    if value is None:
        return {}
    if not isinstance(value, dict) or not all(isinstance(text, str) for text in value.values()):
        raise refused(f"{what} are not texts by name")
    return dict(value)


def _environment(items: list[Any]) -> dict[str, str]:
    environment: dict[str, str] = {}
    for item in _strings(items):
        name, equals, value = item.partition("=")
        if not name or not equals:
            raise refused(f"the config's Env has an entry that is not NAME=value: {item[:80]!r}")
        environment[name] = value
    return environment


def _name(annotations: Mapping[str, str]) -> str:
    name = annotations.get(REF_NAME) or annotations.get(TITLE) or ""
    if len(name) > NAME_CHARACTERS_MAX or not name.isprintable():
        raise refused(f"the image's name is not printable text of at most {NAME_CHARACTERS_MAX} characters")
    return name


def _check_platform(config: Mapping[str, Any]) -> None:
    found = f"{config.get('os')}/{config.get('architecture')}"
    wanted = f"linux/{machine_architecture()}"
    if found != wanted:
        raise refused(f"the image is for {found}; this machine is {wanted}", expected=wanted, actual=found)


def _hex(digest: str) -> str:
    return digest.removeprefix("sha256:")
