"""Runtime images made on this machine: a recipe in, an image of the store out.

    bootstrap (packages of the suite) → wheels → files → mount points → layout → store

The same recipe and the same package versions give the same image digest, whoever builds and whenever. A
recipe that was built before is answered from the store; `rebuild` fetches the suite's newer packages.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.resources
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from ficc.domain.errors import Refused
from ficc.images import wheels
from ficc.images.bootstrap import bootstrap, even_out_modes, machine_suite
from ficc.images.layout import machine_architecture
from ficc.images.programs import build_failed
from ficc.images.record import ImageRecord
from ficc.images.store import MOUNT_POINTS, ImageStore
from ficc.images.wheels import Wheel
from ficc.images.writer import write_layout

RECIPE_VERSION = 1
"""To be raised when the same recipe is to give another tree."""

BUILD_PREFIX = "image-build-"
ENGINE_FOLDER = "opt/engine"
LIBRARY_FOLDER = f"{ENGINE_FOLDER}/lib"
LLAMA_SERVER = "/opt/engine/bin/llama-server"

ENVIRONMENT = {
    "LANG": "C.UTF-8",
    "PATH": "/usr/bin",
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONPATH": f"/{LIBRARY_FOLDER}",
}
SYSTEM_FILES = {
    "etc/passwd": b"root:x:0:0::/:/usr/sbin/nologin\nnobody:x:65534:65534::/tmp:/usr/sbin/nologin\n",
    "etc/group": b"root:x:0:\nnogroup:x:65534:\n",
    "etc/hosts": b"127.0.0.1 localhost\n::1 localhost\n",
}
"""Accounts and names that libraries ask for."""

XLLAMACPP = Wheel(
    name="xllamacpp",
    version="2026.10.11549",
    abi="abi3",
    platforms=("manylinux2014", "manylinux_2_17"),
    sha256={
        "amd64": "c54e7d13520ecc989c63dc99d55de3065e2f343a91f43f053d16b5e62077c261",
        "arm64": "e2a3e79e775515de4ad197e667f874070446ef9ac9cf2044bc9866bc4c72289e",
    },
)


@dataclass(frozen=True, slots=True)
class ImageFile:
    path: str  # in the image, without the leading slash
    content: bytes
    executable: bool = False


@dataclass(frozen=True, slots=True)
class Recipe:
    """A Python image of the machine's architecture."""

    name: str
    entrypoint: tuple[str, ...]
    files: tuple[ImageFile, ...]
    packages: tuple[str, ...] = ()  # besides Python
    wheels: tuple[Wheel, ...] = ()  # unpacked to /opt/engine/lib, without their dependencies
    environment: Mapping[str, str] = field(default_factory=lambda: dict(ENVIRONMENT))
    labels: Mapping[str, str] = field(default_factory=dict)
    suite: str | None = None  # None: the suite of this machine's system
    mirror: str | None = None  # None: the one that mmdebstrap knows for the suite

    def digest(self, suite: str) -> str:
        """Of everything that the image follows from, package versions apart."""
        document = {
            "version": RECIPE_VERSION,
            "architecture": machine_architecture(),
            "suite": suite,
            "mirror": self.mirror,
            "name": self.name,
            "entrypoint": self.entrypoint,
            "packages": self.packages,
            "wheels": [(wheel.name, wheel.version, wheel.pinned()) for wheel in self.wheels],
            "files": [
                (file.path, file.executable, hashlib.sha256(file.content).hexdigest()) for file in self.files
            ],
            "environment": dict(self.environment),
            "labels": dict(self.labels),
        }
        return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()


def llama_cpp_recipe(*, suite: str | None = None, mirror: str | None = None) -> Recipe:
    launcher = importlib.resources.files("ficc.images").joinpath("llama_server.py").read_bytes()
    return Recipe(
        name="ficc/llama-cpp",
        entrypoint=(LLAMA_SERVER,),
        files=(ImageFile(LLAMA_SERVER.removeprefix("/"), launcher, executable=True),),
        packages=("libgomp1", "libstdc++6"),
        wheels=(XLLAMACPP,),
        labels={"ficc.engine": "llama_cpp", "org.opencontainers.image.version": XLLAMACPP.version},
        suite=suite,
        mirror=mirror,
    )


def build_llama_cpp(
    store: ImageStore,
    *,
    work_dir: Path,
    cache_dir: Path,
    progress: Callable[[str], None],
    suite: str | None = None,
    mirror: str | None = None,
    wheel: Path | None = None,
    rebuild: bool = False,
) -> ImageRecord:
    """The image of the llama.cpp engine. `wheel` is a file of the pinned wheel, for a machine that
    reaches no package index. Raises as `build_python_image`."""
    return build_python_image(
        store,
        llama_cpp_recipe(suite=suite, mirror=mirror),
        work_dir=work_dir,
        cache_dir=cache_dir,
        progress=progress,
        wheel_files={XLLAMACPP.name: wheel} if wheel else {},
        rebuild=rebuild,
    )


def build_python_image(
    store: ImageStore,
    recipe: Recipe,
    *,
    work_dir: Path,
    cache_dir: Path,
    progress: Callable[[str], None],
    wheel_files: Mapping[str, Path] | None = None,
    rebuild: bool = False,
) -> ImageRecord:
    """Builds the recipe's image in `work_dir` and imports it; or answers the one built before.

    `work_dir` is the same for every build on the machine: builds wait for each other there. `cache_dir` keeps
    wheels and what was built. `wheel_files` are files of pinned wheels, by the wheel's name, which are then not
    fetched. `progress` gets one line for each step. Raises Refused: `build_failed` whose message names the fix,
    `image_refused`, `disk_full`.
    """
    given = wheel_files or {}
    for wheel in recipe.wheels:
        if wheel.name in given:
            wheels.check(wheel, given[wheel.name])
    suite = recipe.suite or machine_suite()
    built = cache_dir / "built" / recipe.digest(suite)
    if not rebuild and (record := _built_before(store, built)):
        return record
    with _building(work_dir) as folder:
        if not rebuild and (record := _built_before(store, built)):  # by whom we waited for
            return record
        layout = _make_layout(recipe, suite, folder, cache_dir, progress, given)
        progress("Checking and importing the image")
        record = store.import_layout(layout)
        _remember(built, record.image_digest)
    progress(f"Built {record.name} {record.image_digest}")
    return record


def _make_layout(
    recipe: Recipe,
    suite: str,
    folder: Path,
    cache_dir: Path,
    progress: Callable[[str], None],
    wheel_files: Mapping[str, Path],
) -> Path:
    root, layout = folder / "root", folder / "layout"
    progress(f"Fetching packages of {suite}")
    base = bootstrap(root, suite=suite, packages=recipe.packages, mirror=recipe.mirror)
    for wheel in recipe.wheels:
        given = wheel_files.get(wheel.name)
        if given is None:
            progress(f"Fetching {wheel.name} {wheel.version}")
            given = wheels.fetch(wheel, python=base.python, cache=cache_dir / "wheels")
        wheels.check(wheel, given)
        wheels.unpack(given, root / LIBRARY_FOLDER)
    for path, content in SYSTEM_FILES.items():
        _place(root, ImageFile(path, content))
    for file in recipe.files:
        _place(root, file)
    for point in MOUNT_POINTS:
        (root / point).mkdir(parents=True, exist_ok=True)
    even_out_modes(root)
    progress("Packing the image")
    write_layout(
        root,
        layout,
        name=recipe.name,
        entrypoint=recipe.entrypoint,
        environment=recipe.environment,
        labels={**recipe.labels, "ficc.suite": suite, "ficc.packages": " ".join(base.packages)},
    )
    return layout


def _place(root: Path, file: ImageFile) -> None:
    inside = PurePosixPath(file.path)
    if inside.is_absolute() or ".." in inside.parts:
        raise build_failed(f"{file.path!r} is not a path inside the image")
    path = root / inside
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_symlink() or not path.parent.resolve().is_relative_to(root.resolve()):
        raise build_failed(f"{file.path!r} leads through a symbolic link of the base")
    path.write_bytes(file.content)
    path.chmod(0o755 if file.executable else 0o644)


def _built_before(store: ImageStore, built: Path) -> ImageRecord | None:
    try:
        return store.get(built.read_text().strip())
    except (FileNotFoundError, Refused):
        return None


def _remember(built: Path, digest: str) -> None:
    built.parent.mkdir(parents=True, exist_ok=True)
    unfinished = built.with_suffix(".new")
    unfinished.write_text(digest + "\n")
    os.replace(unfinished, built)


@contextmanager
def _building(work_dir: Path) -> Iterator[Path]:
    """A directory for one build. Builds wait for each other, and clear what a killed one left."""
    work_dir.mkdir(parents=True, exist_ok=True)
    with (work_dir / "images.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for left in work_dir.glob(f"{BUILD_PREFIX}*"):
            shutil.rmtree(left)
        with tempfile.TemporaryDirectory(dir=work_dir, prefix=BUILD_PREFIX) as folder:
            yield Path(folder)
