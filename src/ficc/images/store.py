"""The images of this machine: imported once, named by digest, extracted, ready to be bound read-only.

    ROOT/lock                      held while the store changes
    ROOT/incoming/…                an import that is going on, or what a killed one left
    ROOT/images/<64 hex>/record.json, manifest.json, config.json, root/

Invariants:
- An image appears in `images/` by one rename, after its files have reached the disk: whoever kills the
  importing process at any moment leaves the whole image, or nothing that is listed.
- What lies in `incoming/` belongs to the holder of the lock; the next holder sweeps it.
- An image is immutable, and a second import of it changes nothing.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import shutil
import stat
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from ficc.domain.errors import Refused, invalid
from ficc.images.extract import NO_ROOM, Extraction
from ficc.images.layout import DIGEST, Image, Layout, open_layout
from ficc.images.limits import DEFAULT_LIMITS, ImageLimits, refused
from ficc.images.record import ImageRecord, LayerRecord

MOUNT_POINTS = ("proc", "sys", "dev", "run/ficc", "inputs", "tmp")
"""Where a sandbox mounts something. The root is read-only then, so the image must bring the directories."""

RECORD_FILE = "record.json"
DIRECTORY_MODE = 0o755  # sandboxes run under other accounts and must reach the root


Records = list[ImageRecord]


class ImageStore:
    """Several processes may share one; changes wait for each other, reading waits for nobody."""

    def __init__(
        self,
        root: Path,
        *,
        limits: ImageLimits = DEFAULT_LIMITS,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._root = root
        self._limits = limits
        self._now = now
        self._images = root / "images"
        self._incoming = root / "incoming"

    def import_layout(self, path: Path) -> ImageRecord:
        """Takes the image of a layout (a directory or a tar archive) into the store.

        An image that is there already is returned as it is, under the name it came with first. Raises
        Refused: `image_refused` naming what is wrong, `disk_full`.
        """
        with self._changing(), open_layout(path, self._limits) as layout:
            known = self._read(layout.image.image_digest)
            if known is not None:
                return known
            unfinished = self._incoming / uuid.uuid4().hex
            try:
                record = self._extract(layout, unfinished)
                self._publish(unfinished, layout.image.image_digest)
            except OSError as failure:
                if failure.errno not in NO_ROOM:
                    raise
                raise Refused("disk_full", f"{self._root} has no room for the image; free some") from failure
            finally:
                _remove_tree(unfinished)
            return record

    def list(self) -> Records:
        """Newest first."""
        try:
            names = os.listdir(self._images)
        except FileNotFoundError:
            return []
        found = (self._read(f"sha256:{name}") for name in names)
        records = [record for record in found if record is not None]
        return sorted(records, key=lambda record: (record.created_at, record.image_digest), reverse=True)

    def get(self, digest: str) -> ImageRecord:
        """Raises Refused: `invalid_request` for what is no digest, `image_not_found`."""
        record = self._read(_checked(digest))
        if record is None:
            raise _not_found(digest)
        return record

    def root_of(self, digest: str) -> Path:
        """The root file system of an image, to be bound read-only. Raises as `get`."""
        return self._folder(self.get(digest).image_digest) / "root"

    def remove(self, digest: str) -> None:
        """Takes the image out of the store and deletes its files. A sandbox that still uses the root
        keeps only what it has open, so ask whoever runs sandboxes first. Raises as `get`."""
        with self._changing():
            self.get(digest)
            leaving = self._incoming / uuid.uuid4().hex
            os.rename(self._folder(digest), leaving)
            _remove_tree(leaving)

    def _extract(self, layout: Layout, target: Path) -> ImageRecord:
        image = layout.image
        root = target / "root"
        _make_folder(target)
        _make_folder(root)
        descriptor = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            extraction = Extraction(descriptor, self._limits)
            for layer in image.layers:
                stream = layout.open_layer(layer)
                extraction.apply(stream)
                stream.finish()
            _check_mount_points(root)
        finally:
            os.close(descriptor)
        record = self._record(image, root)
        document = json.dumps(record.as_json(), indent=2, ensure_ascii=False).encode()
        for name, data in {**image.documents, RECORD_FILE: document}.items():
            (target / name).write_bytes(data)
            (target / name).chmod(0o644)
        return record

    def _record(self, image: Image, root: Path) -> ImageRecord:
        size, entries = _measure(root)
        return ImageRecord(
            image_digest=image.image_digest,
            config_digest=image.config_digest,
            name=image.name,
            created_at=self._now().astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
            bytes=size,
            entries=entries,
            layers=tuple(LayerRecord(layer.digest, layer.diff_id) for layer in image.layers),
            environment=image.environment,
            entrypoint=image.entrypoint,
            labels=image.labels,
        )

    def _publish(self, unfinished: Path, digest: str) -> None:
        _sync_file_system(unfinished)
        folder = self._folder(digest)
        if folder.exists():  # but without a readable record: not an image
            os.rename(folder, self._incoming / uuid.uuid4().hex)
        os.rename(unfinished, folder)
        _sync_file_system(self._images)

    def _read(self, digest: str) -> ImageRecord | None:
        if not DIGEST.fullmatch(digest):
            return None
        try:
            record = ImageRecord.from_json(json.loads((self._folder(digest) / RECORD_FILE).read_bytes()))
        except (FileNotFoundError, NotADirectoryError, KeyError, TypeError, ValueError):
            return None
        return record if record.image_digest == digest else None

    def _folder(self, digest: str) -> Path:
        return self._images / digest.removeprefix("sha256:")

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Holds the lock, and sweeps what a killed holder left."""
        for folder in (self._root, self._images):
            _make_folder(folder)
        self._incoming.mkdir(mode=0o700, exist_ok=True)
        descriptor = os.open(self._root / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            for left in self._incoming.iterdir():
                _remove_tree(left)
            yield
        finally:
            os.close(descriptor)


def _checked(digest: str) -> str:
    if not DIGEST.fullmatch(digest):
        raise invalid(f"{digest[:80]!r} is not an image digest: sha256: and 64 hex digits", "image_digest")
    return digest


def _not_found(digest: str) -> Refused:
    return Refused(
        "image_not_found",
        f"The image {digest} is not in this machine's store; build or import it there (`ficc runtime list`).",
    )


def _check_mount_points(root: Path) -> None:
    missing = [point for point in MOUNT_POINTS if not _is_plain_directory(root, point)]
    if missing:
        named = ", ".join(f"/{point}" for point in missing)
        raise refused(
            f"the image lacks the directories that a sandbox mounts over: {named}; add them to the image"
        )


def _is_plain_directory(root: Path, path: str) -> bool:
    """Whether it is a directory, reached without a symbolic link."""
    place = root
    for part in path.split("/"):
        place = place / part
        try:
            if not stat.S_ISDIR(place.lstat().st_mode):
                return False
        except FileNotFoundError:
            return False
    return True


def _measure(root: Path) -> tuple[int, int]:
    """Bytes of regular files, a file with several names counted once, and the number of entries."""
    size = entries = 0
    linked: set[int] = set()
    for _, folders, files, descriptor in os.fwalk(root, follow_symlinks=False):
        entries += len(folders) + len(files)
        for name in files:
            about = os.stat(name, dir_fd=descriptor, follow_symlinks=False)
            if stat.S_ISREG(about.st_mode) and about.st_ino not in linked:
                size += about.st_size
                if about.st_nlink > 1:
                    linked.add(about.st_ino)
    return size, entries


def _make_folder(path: Path) -> None:
    path.mkdir(parents=True, exist_ok=True)
    path.chmod(DIRECTORY_MODE)


def _remove_tree(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _sync_file_system(path: Path) -> None:
    """Waits until everything written to the file system of `path` is on the disk: one call instead of
    one for each of thousands of files."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if ctypes.CDLL(None, use_errno=True).syncfs(descriptor) != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), str(path))
    finally:
        os.close(descriptor)
