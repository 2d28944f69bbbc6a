"""What the machine starts from: a kernel, its initial file system, and a disk with Debian's Python.

Everything comes from the packages of one suite, extracted and never installed, and from the locked wheels. The
result is kept under a key of what it follows from; package versions are not part of it, so that the machine is
made anew only when one of its sources changes (remove `.cache/machine` to fetch newer packages).
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from ficc.images import bootstrap
from support.model import CACHE

SUITE = "bookworm"
KERNEL = "linux-image-cloud-amd64"
PACKAGES = ("base-files", "bubblewrap", "busybox-static", "iproute2", "libc-bin", "libseccomp2", KERNEL)
MODULES = (
    "virtio_ring",
    "virtio",
    "virtio_pci_legacy_dev",
    "virtio_pci_modern_dev",
    "virtio_pci",
    "virtio_blk",
)
"""What the kernel needs to see its disks, in the order in which they are loaded. Those that a kernel has
built in are not there as files."""
LOCK = Path(__file__).parents[2] / "requirements" / "check.lock"
TOOLS = frozenset(
    {"grimp", "import-linter", "jsonschema-rs", "mypy", "openai", "ruff", "schemathesis", "xllamacpp"}
)
"""Locked packages, large ones, that the tests in the machine do not use."""
FIRST = Path(__file__).with_name("guest") / "find-disk"
SPARE_BYTES = 512 << 20
"""Room on the disk for what tests write."""


@dataclass(frozen=True, slots=True)
class Parts:
    kernel: Path
    initial: Path
    disk: Path


def parts() -> Parts:
    """Made, or found as they were made before."""
    folder = CACHE / "machine" / _key()
    if not folder.exists():
        shutil.rmtree(folder.parent, ignore_errors=True)
        folder.parent.mkdir(parents=True)
        with tempfile.TemporaryDirectory(prefix="building-", dir=folder.parent) as temporary:
            _make(Path(temporary))
            made = Path(temporary, "parts")
            made.rename(folder)
    return Parts(folder / "kernel", folder / "initial", folder / "disk")


def _key() -> str:
    sources = (Path(__file__), Path(bootstrap.__file__), FIRST, LOCK)
    return hashlib.sha256(b"\0".join(path.read_bytes() for path in sources)).hexdigest()[:16]


def _make(folder: Path) -> None:
    root, made = folder / "root", folder / "parts"
    made.mkdir()
    print(f"Fetching packages of {SUITE}", flush=True)
    base = bootstrap.bootstrap(root, suite=SUITE, packages=PACKAGES)
    print("Fetching wheels", flush=True)
    _install_wheels(root, base.python, folder)
    print("Making the disk", flush=True)
    (kernel,) = (root / "boot").glob("vmlinuz-*")
    shutil.copyfile(kernel, made / "kernel")
    (made / "initial").write_bytes(_initial_file_system(root, folder / "initial"))
    for unneeded in ("boot", "usr/lib/modules"):
        shutil.rmtree(root / unneeded)
    _configure(root)
    _make_disk(root, made / "disk")


def _install_wheels(root: Path, python: str, folder: Path) -> None:
    """For the suite's Python, which need not be this one."""
    entries = re.split(r"\n(?=[a-z])", LOCK.read_text())
    wanted = [entry for entry in entries if re.split(r"[=\[]", entry)[0] not in TOOLS]
    (folder / "lock").write_text("\n".join(wanted))
    pip = (sys.executable, "-m", "pip", "install", "-qq", "--disable-pip-version-check")
    _run(
        *(*pip, "--require-hashes", "--only-binary", ":all:", "--no-deps", "--no-compile"),
        *("--implementation", "cp", "--python-version", python),
        *("--target", str(root / "usr/local/lib" / f"python{python}" / "dist-packages")),
        *("-r", str(folder / "lock")),
    )


def _initial_file_system(root: Path, folder: Path) -> bytes:
    """A cpio archive: busybox, the modules, and the first program."""
    for name in ("bin", "dev", "disk", "modules"):
        (folder / name).mkdir(parents=True)
    busybox = shutil.copy(root / "usr/bin/busybox", folder / "bin")
    shutil.copy(FIRST, folder / "init")
    for number, name in enumerate(MODULES):
        for module in (root / "usr/lib/modules").rglob(f"{name}.ko"):
            shutil.copyfile(module, folder / "modules" / f"{number}-{name}.ko")
    names = "\n".join(str(path.relative_to(folder)) for path in sorted(folder.rglob("*")))
    return _run(busybox, "cpio", "-o", "-H", "newc", cwd=folder, given=names.encode())


def _configure(root: Path) -> None:
    """What no package did, as none was installed: the cache of libraries, and Python's byte code, which nobody
    can write in the machine."""
    sandbox = ("bwrap", "--bind", str(root), "/", "--dev", "/dev", "--proc", "/proc", "--unshare-net", "--")
    _run(*sandbox, "/usr/sbin/ldconfig")
    _run(*sandbox, "/usr/bin/python3", "-m", "compileall", "-q", "-j", "0", "/usr/lib", "/usr/local/lib")


def _make_disk(root: Path, disk: Path) -> None:
    """An ext4 file system whose files are root's, whoever makes it."""
    for name in ("dev", "home", "proc", "run", "source", "sys", "tmp", "var/tmp"):
        (root / name).mkdir(parents=True, exist_ok=True)
    (root / "usr/bin/sh").symlink_to("busybox")
    size = sum(path.lstat().st_size + 4096 for path in root.rglob("*")) * 5 // 4 + SPARE_BYTES
    with disk.open("wb") as file:
        file.truncate(size)
    as_root = () if os.geteuid() == 0 else ("unshare", "--map-root-user")
    _run(*as_root, "/sbin/mke2fs", "-q", "-F", "-t", "ext4", "-O", "^has_journal", "-d", str(root), str(disk))


def _run(*command: str, cwd: Path | None = None, given: bytes = b"") -> bytes:
    return subprocess.run(command, input=given, stdout=subprocess.PIPE, cwd=cwd, check=True).stdout
