"""Layouts that are right in every shape that tools write, and each way to be wrong, named."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import subprocess
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ficc.domain.errors import Refused
from ficc.images.layout import machine_architecture
from ficc.images.limits import ImageLimits
from support.oci_layouts import archive_of, base_layer, blob, digest, layer, layout, member, verified

LOWER = base_layer(member("etc/os-release", b"ID=tests\n"))
UPPER = layer(member("opt/engine/bin/engine", b"#!/bin/sh\n" * 5000, mode=0o755))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("archived", [False, True])
def test_a_layout_is_read_from_a_directory_and_from_an_archive(
    tmp_path: Path, packed: bool, archived: bool
) -> None:
    path = layout(tmp_path / "layout", LOWER, UPPER, packed=packed)
    expected = json.loads((path / "index.json").read_text())["manifests"][0]["digest"]
    if archived:
        path = archive_of(path, tmp_path / "image.tar")
    image = verified(path)
    assert image.image_digest == expected
    assert image.name == "tests/image"
    assert [one.diff_id for one in image.layers] == [digest(LOWER), digest(UPPER)]
    assert image.environment == {"PATH": "/usr/bin"}
    assert image.entrypoint == ("/usr/bin/engine",)
    assert image.labels == {"a": "b"}
    assert digest(image.documents["manifest.json"]) == image.image_digest
    assert digest(image.documents["config.json"]) == image.config_digest


def test_a_gzip_stream_of_several_members_is_one_layer(tmp_path: Path) -> None:
    packed = b"".join(gzip.compress(UPPER[at : at + 7000]) for at in range(0, len(UPPER), 7000))
    path = layout(tmp_path / "layout", UPPER, packed=True, change_manifest=_swap_layer(tmp_path, packed))
    assert [one.digest for one in verified(path).layers] == [digest(packed)]


@pytest.mark.parametrize(
    ("annotations", "name"),
    [
        ({"org.opencontainers.image.title": "title"}, "title"),
        ({"org.opencontainers.image.ref.name": "ref", "org.opencontainers.image.title": "title"}, "ref"),
        ({}, ""),
        (None, ""),
    ],
)
def test_the_name_is_the_manifests_when_the_index_has_none(
    tmp_path: Path, annotations: dict[str, str] | None, name: str
) -> None:
    path = layout(
        tmp_path / "layout", LOWER, name=None, change_manifest=lambda m: m.update(annotations=annotations)
    )
    assert verified(path).name == name


def test_members_that_other_tools_leave_out_or_null(tmp_path: Path) -> None:
    path = layout(tmp_path / "layout", LOWER, change_config=lambda c: c.update(config=None))
    image = verified(path)
    assert (image.environment, image.entrypoint, image.labels) == ({}, (), {})


@pytest.mark.skipif(shutil.which("skopeo") is None, reason="skopeo writes this archive")
def test_an_archive_that_skopeo_writes(tmp_path: Path) -> None:
    path = layout(tmp_path / "layout", LOWER, UPPER)
    archive = tmp_path / "image.tar"
    subprocess.run(
        ["skopeo", "copy", "--quiet", f"oci:{path}", f"oci-archive:{archive}:a/name:1"],
        check=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    image = verified(archive)
    assert image.name == "a/name:1"
    assert [one.diff_id for one in image.layers] == [digest(LOWER), digest(UPPER)]


Change = Callable[[dict[str, Any]], None]


def _set(**members: Any) -> Change:
    return lambda document: document.update(members)


def _in(key: str, **members: Any) -> Change:
    return lambda document: document[key].update(members)


def _layer(**members: Any) -> Change:
    return lambda manifest: manifest["layers"][0].update(members)


def _swap_layer(folder: Path, data: bytes) -> Change:
    """Puts other bytes where the layer was, rightly described."""

    def change(manifest: dict[str, Any]) -> None:
        (folder / "layout/blobs/sha256" / digest(data).removeprefix("sha256:")).write_bytes(data)
        manifest["layers"][0].update(digest=digest(data), size=len(data))

    return change


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (_set(architecture="pdp11"), f"is for linux/pdp11; this machine is linux/{machine_architecture()}"),
        (_set(os="plan9"), "is for plan9/"),
        (_set(rootfs={"type": "layers", "diff_ids": []}), "1 layers, the config 0 diff_ids"),
        (_set(rootfs={"type": "layers", "diff_ids": [digest(b"other")]}), "must be the same digest"),
        (_set(rootfs={"type": "layers", "diff_ids": ["md5:1"]}), "diff_id is not a sha256 digest"),
        (_set(rootfs=[]), "another type than the specification"),
        (_in("config", Env=["noequals"]), "not NAME=value"),
        (_in("config", Env=[1]), "not a string"),
        (_in("config", Entrypoint=["a\0b"]), "not a string"),
        (_in("config", Entrypoint="sh"), "another type than the specification"),
        (_in("config", Labels={"a": 1}), "Labels are not texts"),
    ],
)
def test_a_config_that_is_wrong(tmp_path: Path, change: Change, says: str) -> None:
    _refuses(layout(tmp_path / "layout", LOWER, change_config=change), says)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (_set(schemaVersion=1), "schema version 2"),
        (_set(mediaType="application/vnd.docker.distribution.manifest.v2+json"), "not an OCI image manifest"),
        (_set(layers=[]), "0 layers; 1 to"),
        (_set(config=None), "not a descriptor"),
        (_in("config", mediaType="application/vnd.oci.empty.v1+json"), "no image of a system"),
        (_in("config", size=3), "3 are declared"),
        (_in("config", digest="sha512:" + "0" * 128), "no sha256 digest"),
        (_in("config", digest="sha256:../../../../etc/passwd"), "no sha256 digest"),
        (_layer(size=-1), "no size"),
        (_layer(size=True), "no size"),
        (_layer(size=1), "more than the declared 1 bytes"),
        (_layer(size=1 << 30), "are declared"),
        (_layer(size=1 << 60), "at most"),
        (_layer(mediaType="application/vnd.oci.image.layer.v1.tar+zstd"), "zstd"),
        (_layer(mediaType="application/vnd.oci.image.layer.nondistributable.v1.tar"), "not read here"),
        (_layer(mediaType="application/vnd.oci.image.layer.v1.tar+gzip"), "not a gzip stream"),
        (_layer(mediaType=None), "no media type"),
        (_set(annotations={"org.opencontainers.image.ref.name": 1}), "not texts by name"),
    ],
)
def test_a_manifest_that_is_wrong(tmp_path: Path, change: Change, says: str) -> None:
    _refuses(layout(tmp_path / "layout", LOWER, change_manifest=change), says)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (_set(manifests=[]), "holds 0 manifests"),
        (lambda index: index["manifests"].append(index["manifests"][0]), "holds 2 manifests"),
        (_set(schemaVersion=None), "schema version 2"),
        (
            lambda index: index["manifests"][0].update(mediaType="application/vnd.oci.image.index.v1+json"),
            "several platforms",
        ),
        (lambda index: index["manifests"][0].update(mediaType="text/plain"), "media type 'text/plain'"),
        (
            lambda index: index["manifests"][0].update(digest=digest(b"gone")),
            "lacks the blob of the manifest",
        ),
        (
            lambda index: index["manifests"][0].update(
                annotations={"org.opencontainers.image.ref.name": "a\nb"}
            ),
            "not printable",
        ),
    ],
)
def test_an_index_that_is_wrong(tmp_path: Path, change: Change, says: str) -> None:
    _refuses(layout(tmp_path / "layout", LOWER, change_index=change), says)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("which", ["manifest", "config", "layer"])
def test_one_changed_byte_anywhere_is_noticed(tmp_path: Path, which: str, packed: bool) -> None:
    path = layout(tmp_path / "layout", LOWER, packed=packed)
    file = blob(path, which)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    _refuses(path, "hashes to sha256|is not a gzip stream|uncompressed")


def test_a_packed_layer_that_only_unpacks_to_the_same(tmp_path: Path) -> None:
    path = layout(tmp_path / "layout", LOWER, packed=True)
    file = blob(path, "layer")
    data = bytearray(file.read_bytes())
    data[4] ^= 1  # the time in the gzip header
    assert gzip.decompress(data) == LOWER
    file.write_bytes(data)
    _refuses(path, "hashes to sha256")


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("which", ["manifest", "config", "layer"])
@pytest.mark.parametrize("change", [lambda data: data[:-1], lambda data: data + b" "])
def test_a_byte_less_or_more_is_noticed(
    tmp_path: Path, which: str, packed: bool, change: Callable[[bytes], bytes]
) -> None:
    path = layout(tmp_path / "layout", LOWER, packed=packed)
    file = blob(path, which)
    file.write_bytes(change(file.read_bytes()))
    _refuses(path, "declared|gzip")


def test_a_packed_layer_with_another_archive_inside(tmp_path: Path) -> None:
    other = gzip.compress(layer(member("other")))
    path = layout(tmp_path / "layout", LOWER, packed=True, change_manifest=_swap_layer(tmp_path, other))
    _refuses(path, "uncompressed, hashes to")


def test_a_layer_that_inflates_beyond_the_limit(tmp_path: Path) -> None:
    bomb = bytes(64 << 20)
    path = layout(tmp_path / "layout", bomb, packed=True)
    _refuses(path, "uncompressed, has more than 1048576 bytes", ImageLimits(layer_bytes_max=1 << 20))


def test_documents_and_archives_are_bounded(tmp_path: Path) -> None:
    path = layout(tmp_path / "layout", LOWER, UPPER)
    _refuses(path, "at most 100 are read", ImageLimits(document_bytes_max=100))
    _refuses(path, "2 layers; 1 to 1", ImageLimits(layers_max=1))
    archive = archive_of(path, tmp_path / "image.tar")
    _refuses(archive, "more than 3 entries", ImageLimits(archive_entries_max=3))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "not JSON"),
        ("[]", "not a JSON object"),
        ('{"schemaVersion": 2, "schemaVersion": 2}', "names a member twice"),
        ("[" * 100_000, "not JSON"),
    ],
)
def test_an_index_that_is_no_document(tmp_path: Path, text: str, says: str) -> None:
    path = layout(tmp_path / "layout", LOWER)
    (path / "index.json").write_text(text)
    _refuses(path, says)


def test_what_is_no_layout(tmp_path: Path) -> None:
    _refuses(tmp_path / "nothing", "No such file")
    _refuses(tmp_path, "has no file oci-layout")
    path = layout(tmp_path / "layout", LOWER)
    (path / "oci-layout").write_text('{"imageLayoutVersion": "9"}')
    _refuses(path, "version '9'")
    (tmp_path / "text").write_text("hello")
    _refuses(tmp_path / "text", "neither a directory nor a tar archive")
    (tmp_path / "image.tar.gz").write_bytes(gzip.compress(b"hello"))
    _refuses(tmp_path / "image.tar.gz", "gunzip")
    os.mkfifo(tmp_path / "fifo")
    _refuses(tmp_path / "fifo", "neither a directory nor a file")
    docker = layer(member("manifest.json", b"[]"))
    (tmp_path / "docker.tar").write_bytes(docker)
    _refuses(tmp_path / "docker.tar", "docker archive")


def test_links_and_fifos_of_a_directory_are_not_followed(tmp_path: Path) -> None:
    path = layout(tmp_path / "layout", LOWER)
    file = blob(path, "layer")
    file.rename(tmp_path / "elsewhere")
    file.symlink_to(tmp_path / "elsewhere")
    _refuses(path, "cannot be opened")
    file.unlink()
    os.mkfifo(file)
    _refuses(path, "not a regular file")


def test_an_archive_that_holds_a_file_twice_or_not_at_all(tmp_path: Path) -> None:
    path = layout(tmp_path / "layout", LOWER)
    twice = archive_of(path, tmp_path / "twice.tar")
    with tarfile.open(twice, "a") as archive:
        archive.add(path / "index.json", arcname="./index.json")
    _refuses(twice, "index.json twice")
    whole = archive_of(path, tmp_path / "cut.tar").read_bytes()
    (tmp_path / "cut.tar").write_bytes(whole[: len(whole) // 2])
    _refuses(tmp_path / "cut.tar", "ends inside|lacks|has no")


def _refuses(path: Path, says: str, limits: ImageLimits | None = None) -> None:
    with pytest.raises(Refused, match=says) as caught:
        verified(path, limits or ImageLimits())
    assert caught.value.code == "image_refused"
