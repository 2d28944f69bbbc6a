"""The base of a Python image: packages of Debian or Ubuntu extracted into a directory, without root.

Packages are extracted and never configured: no maintainer script runs, so nothing on this machine changes
and root builds the same tree as anyone else. The suite says which Python it is: `python3-minimal` and
`libpython3-stdlib` depend on its own.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ficc.images.programs import build_failed, last_lines, run_bounded

PYTHON_PACKAGES = ("python3-minimal", "libpython3-stdlib")
BOOTSTRAP_SECONDS_MAX = 900
SUITE = re.compile(r"[a-z][a-z0-9.-]{0,62}")
PACKAGE = re.compile(r"[a-z0-9][a-z0-9+.-]{1,99}")

PACKAGE_LIST = "packages"  # of the root, while it is being made
MERGE_USR = 'for d in bin sbin lib lib64; do mkdir -p "$1/usr/$d" && ln -s "usr/$d" "$1/$d" || exit 1; done'
"""/bin and its like as links into /usr, as in an installed system. mmdebstrap's own hook for this installs
a package, which only root may."""
LIST_PACKAGES = f'cd "$1/var/cache/apt/archives" && ls *.deb > "$1/{PACKAGE_LIST}"'

DROPPED = (
    PACKAGE_LIST,
    "dev/*",
    "etc/alternatives",
    "etc/apt",
    "etc/cron.*",
    "etc/dpkg",
    "etc/fstab",
    "etc/hostname",
    "etc/logrotate.d",
    "etc/resolv.conf",
    "etc/rmt",
    "etc/systemd",
    "run",
    "tmp",
    "usr/bin/debconf*",
    "usr/bin/dpkg*",
    "usr/bin/py3*",
    "usr/bin/tar",
    "usr/bin/update-alternatives",
    "usr/lib/binfmt.d",
    "usr/lib/dpkg",
    "usr/lib/mime",
    "usr/lib/systemd",
    "usr/lib/tmpfiles.d",
    "usr/libexec/dpkg",
    "usr/sbin/dpkg*",
    "usr/sbin/rmt*",
    "usr/sbin/start-stop-daemon",
    "usr/sbin/tarcat",
    "usr/share/bash-completion",
    "usr/share/binfmts",
    "usr/share/bug",
    "usr/share/debconf",
    "usr/share/doc-base",
    "usr/share/dpkg",
    "usr/share/gcc",
    "usr/share/gdb",
    "usr/share/info",
    "usr/share/lintian",
    "usr/share/locale",
    "usr/share/man",
    "usr/share/menu",
    "usr/share/perl5",
    "usr/share/pixmaps",
    "usr/share/polkit-1",
    "usr/share/python3",
    "var",
    "**/__pycache__",
)
"""What no engine needs, and what differs from run to run. The licences (usr/share/doc/*/copyright) stay."""

DIRECTORY_MODE, PROGRAM_MODE, FILE_MODE = 0o755, 0o755, 0o644


@dataclass(frozen=True, slots=True)
class Base:
    python: str  # "3.11"
    packages: tuple[str, ...]  # "libc6_2.36-9+deb12u14_amd64", sorted


def machine_suite() -> str:
    """The suite of the system that this machine runs. Raises Refused (`build_failed`)."""
    try:
        system = platform.freedesktop_os_release()
    except OSError:
        system = {}
    if system.get("ID") in ("debian", "ubuntu") and system.get("VERSION_CODENAME"):
        return system["VERSION_CODENAME"]
    found = system.get("PRETTY_NAME") or "unknown"
    raise build_failed(
        f"this machine's system ({found}) is neither Debian nor Ubuntu: name the suite to build from, "
        "for example bookworm"
    )


def bootstrap(root: Path, *, suite: str, packages: Sequence[str], mirror: str | None = None) -> Base:
    """Fetches and extracts Python and `packages` with everything they depend on into `root`, which must
    not exist, and drops what an engine does not need.

    `mirror` is what mmdebstrap takes for one: a URL, or a line of a sources.list. Raises Refused
    (`build_failed`) whose message names the fix.
    """
    program = shutil.which("mmdebstrap")
    if program is None:
        raise build_failed("mmdebstrap is not installed: `apt-get install mmdebstrap`")
    if not SUITE.fullmatch(suite):
        raise build_failed(f"{suite[:80]!r} is not the name of a suite")
    if unusable := [name for name in packages if not PACKAGE.fullmatch(name)]:
        raise build_failed(f"{unusable[0][:80]!r} is not the name of a package")
    # mmdebstrap warns root off the other mode; the tree that comes out is the same.
    mode = ["--mode=root", "--skip=chroot/mount"] if os.geteuid() == 0 else ["--mode=chrootless"]
    command = [
        program,
        *mode,
        "--variant=extract",
        "--format=directory",
        f"--setup-hook={MERGE_USR}",
        f"--extract-hook={LIST_PACKAGES}",
        f"--include={','.join((*PYTHON_PACKAGES, *packages))}",
        "--",
        suite,
        str(root),
        *([mirror] if mirror else []),
    ]
    _run(command, suite)
    names = (root / PACKAGE_LIST).read_text().split()
    base = Base(_python_version(root), tuple(sorted(name.removesuffix(".deb") for name in names)))
    _drop(root)
    even_out_modes(root)
    return base


def even_out_modes(root: Path) -> None:
    """Makes permission bits independent of the umask: 0755 for directories and programs, else 0644."""
    root.chmod(DIRECTORY_MODE)
    for folder, folders, files in os.walk(root):
        for name in folders:
            path = Path(folder, name)
            if not path.is_symlink():
                path.chmod(DIRECTORY_MODE)
        for name in files:
            path = Path(folder, name)
            if not path.is_symlink():
                path.chmod(PROGRAM_MODE if path.stat().st_mode & 0o111 else FILE_MODE)


def _run(command: Sequence[str], suite: str) -> None:
    status, output = run_bounded(command, seconds_max=BOOTSTRAP_SECONDS_MAX, what="Fetching packages")
    if status != 0:
        raise build_failed(f"{_advice(output, suite)}\n{last_lines(output)}")


def _advice(output: str, suite: str) -> str:
    """What to do about a failure of mmdebstrap, from what it and apt say."""
    for pattern, advice in (
        (r"No space left on device", "the disk is full: free some space and try again"),
        (
            r"NO_PUBKEY|public key is not available|does not have .*keyring|is not signed",
            f"the keys of the archive of {suite} are missing: install debian-archive-keyring or ubuntu-keyring",
        ),
        (
            r"does not have a Release file|404 +Not Found",
            f"the mirror has no suite {suite}: name another suite or mirror",
        ),
        (
            r"Could not resolve|Temporary failure|Unable to connect|Could not connect|Connection refused"
            r"|Failed to fetch|timed out|Network is unreachable",
            "the package mirror cannot be reached: check the network, or name a mirror that can",
        ),
        (r"Unable to locate package", f"the suite {suite} lacks a package that the image needs"),
    ):
        if re.search(pattern, output):
            return advice
    return "mmdebstrap failed; its last lines:"


def _python_version(root: Path) -> str:
    target = os.readlink(root / "usr/bin/python3")
    found = re.fullmatch(r"python(3\.\d+)", target)
    if not found:
        raise build_failed(f"the suite's python3 is {target!r}, not a python3.X")
    return found[1]


def _drop(root: Path) -> None:
    for pattern in DROPPED:
        for path in list(root.glob(pattern)):
            _remove(path)
    for path in _documentation(root):
        _remove(path)


def _documentation(root: Path) -> Iterator[Path]:
    for package in list((root / "usr/share/doc").iterdir()):
        if not package.is_symlink():
            yield from (path for path in list(package.iterdir()) if path.name != "copyright")


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
