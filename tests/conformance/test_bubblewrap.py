"""The bubblewrap provider against the suite that every provider passes, and what is its own."""

from __future__ import annotations

import concurrent.futures.thread  # noqa: F401  # to be there for the stranger, who may not read our Python
import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import pytest
import uvloop

from conformance.providers import PROBES, WRITABLE, Bench, ProviderConformance, bench, children, python_root
from ficc.domain.plan import Limits
from ficc.executor import cgroups
from ficc.executor.cgroups import Mounts, Tree, read_mounts
from ficc.executor.providers import contract
from ficc.executor.providers.bubblewrap import Bubblewrap, arguments
from ficc.executor.providers.contract import Configuration, Exit
from support.executor import new_id

__all__ = ["bench", "python_root"]

pytestmark = [
    pytest.mark.sandboxes,
    pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed"),
    pytest.mark.timeout(300),
]

STRANGER = 12345


@pytest.fixture
def provider() -> Bubblewrap:
    made = Bubblewrap()
    made.configure(Configuration(accounts=os.geteuid() == 0))
    assert made.unenforceable() == {}
    return made


class TestBubblewrap(ProviderConformance):
    ADDED_VARIABLES: ClassVar = {"PWD": "/"}

    async def test_mounts(self, bench: Bench) -> None:
        """Nothing of the machine but the image, the inputs and six harmless devices."""
        box, _ = await bench.run("print(open('/proc/mounts').read())")
        mounts = {line.split()[1]: line.split() for line in box.text.splitlines() if line}
        devices = {f"/dev/{name}" for name in ("null", "zero", "full", "random", "urandom", "tty", "pts")}
        inputs = {"/inputs", "/inputs/payload.py"}
        assert set(mounts) == {"/", "/proc", "/dev", *devices, *inputs, *WRITABLE}
        for point, line in mounts.items():
            flags = set(line[3].split(","))
            assert "nosuid" in flags, point
            assert "rw" not in flags or point in {"/proc", *devices, *WRITABLE}, point
            assert "nodev" in flags or point in devices, point


@pytest.mark.root
def test_without_root(python_root: Path) -> None:
    """Unprivileged, payloads run under the executor's account, and everything else holds."""
    with delegated() as mounts:
        says = as_stranger(mounts, python_root)
    privileges = says["privileges.py"]
    assert privileges["capabilities"] == ["0" * 16] * 5
    assert (privileges["NoNewPrivs"], privileges["Seccomp"]) == ("1", "2")
    assert says["writable.py"] == {"directories": sorted(WRITABLE), "files": []}
    assert says["network.py"]["interfaces"] == ["lo"]
    assert says["storage.py"]["bytes"] <= 1 << 20
    assert set(says["system_calls.py"]["denied"].values()) == {1}
    assert says["uids"] == [STRANGER]
    assert says["killed"] is True


@contextmanager
def delegated() -> Iterator[Mounts]:
    """Groups of the stranger's own, as a system would delegate them."""
    own = read_mounts(Path("/proc/self/mountinfo").read_text(), Path("/proc/self/cgroup").read_text())
    name = f"ficc-delegated-{new_id()}"
    v1 = {controller: path / name for controller, path in own.v1.items()}
    v2 = own.v2 / name if own.v2 is not None and not v1 else None
    if own.v2 is not None and v2 is not None:
        (own.v2 / "cgroup.subtree_control").write_text("+cpu +memory +pids")
    groups = [*v1.values(), *([v2] if v2 else [])]
    for group in groups:
        group.mkdir()
        for path in (group, *group.iterdir()):
            os.chown(path, STRANGER, STRANGER)
    try:
        yield Mounts(v1, v2)
    finally:
        for group in groups:
            for path in sorted((p for p in group.rglob("*") if p.is_dir()), reverse=True):
                path.rmdir()
            group.rmdir()


def as_stranger(mounts: Mounts, image_root: Path) -> dict[str, Any]:
    """What payloads of an executor without rights say."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            if mounts.v2 is not None:
                (mounts.v2 / "cgroup.procs").write_text(str(os.getpid()))
            os.setgroups([])
            os.setresgid(STRANGER, STRANGER, STRANGER)
            os.setresuid(STRANGER, STRANGER, STRANGER)
            if not os.access(sys.executable, os.X_OK):
                sys.executable = "/usr/bin/python3"
            os.write(write, json.dumps(uvloop.run(probes(mounts, image_root))).encode())
            os._exit(0)
        finally:
            os._exit(1)
    os.close(write)
    with os.fdopen(read) as answer:
        said = answer.read()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    return dict(json.loads(said))


async def probes(mounts: Mounts, image_root: Path) -> dict[str, Any]:
    provider = Bubblewrap()
    provider.configure(Configuration(accounts=False))
    tree = Tree("tree", mounts)
    says: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as directory:
        bench = Bench(provider, tree, image_root, Path(directory))
        for name in ("privileges.py", "writable.py", "network.py", "storage.py", "system_calls.py"):
            box, ended = await bench.run((PROBES / name).read_text(), environment={"ABSTRACT": "x"})
            assert ended == Exit(0, None), box.text
            says[name] = box.says
        async with bench.started((PROBES / "tree.py").read_text() + "time.sleep(600)\n") as box:
            await box.until("ready")
            processes = box.launch.group.processes()
            says["uids"] = list({Path(f"/proc/{pid}").stat().st_uid for pid in processes})
            box.launch.group.kill()
            says["killed"] = (await box.wait()).signal == signal.SIGKILL
    tree.remove()
    return says


# Without a sandbox.


def test_options() -> None:
    options = arguments.options({"A": "1", "PATH": "/x"}, info_fd=3, block_fd=4, seccomp_fd=5)
    text = " ".join(options)
    for wanted in (
        "--unshare-user --unshare-pid --unshare-net --unshare-ipc --unshare-uts --unshare-cgroup",
        "--disable-userns",
        "--die-with-parent --new-session --cap-drop ALL --clearenv --setenv PATH /x --setenv A 1",
        "--info-fd 3 --block-fd 4 --seccomp 5",
    ):
        assert wanted in text
    # The root is made read-only after everything that mounts into it.
    last_mount = max(at for at, option in enumerate(options) if option in ("--bind", "--ro-bind", "--dev"))
    assert options.index("--remount-ro") > last_mount
    assert "--remount-ro /dev --remount-ro / --chdir /" in text


def test_trying_it_leaves_no_process() -> None:
    """Not even a zombie, of which an executor that adopts orphans would have one for each try."""
    before = children()
    for _ in range(3):
        made = Bubblewrap()
        made.configure(Configuration(accounts=os.geteuid() == 0))
        assert made.unenforceable() == {}
    assert children() <= before


def test_the_package_digest_is_of_all_that_isolates(tmp_path: Path) -> None:
    made = Bubblewrap()
    assert made.package_digest == Bubblewrap().package_digest
    package = Path(cgroups.__file__).parent
    names = {name for name, _ in contract.shipped_files(package / "providers" / "bubblewrap")}
    assert names == {f"bubblewrap/{name}.py" for name in ("__init__", "shim", "arguments", "probe")}
    copy = tmp_path / "executor"
    shutil.copytree(package, copy)
    providers = copy / "providers"

    def digest() -> str:
        shared = (*(providers / f"{name}.py" for name in contract.SHARED), copy / "cgroups.py")
        return contract.digest_of_files(contract.shipped_files(providers / "bubblewrap", *shared))

    assert digest() == made.package_digest
    for path in (providers / "linux.py", providers / "bubblewrap" / "shim.py", copy / "cgroups.py"):
        text = path.read_text()
        path.write_text(text + "\n")
        assert digest() != made.package_digest, path
        path.write_text(text)
    (providers / "bubblewrap" / "__pycache__").mkdir(exist_ok=True)
    (providers / "bubblewrap" / "__pycache__" / "x.pyc").touch()
    assert digest() == made.package_digest


@pytest.mark.parametrize(
    ("stand_in", "words"),
    [
        (None, "install the package bubblewrap"),
        ("echo 'bwrap: Unknown option --disable-userns' >&2; exit 1", "version 0.8 or newer is needed"),
        ("echo 'bwrap: No permissions to create new namespace' >&2; exit 1", "No permissions to create"),
        ("exit 3", "it ended with status 3"),
    ],
)
def test_bubblewrap_that_does_not_work(
    monkeypatch: pytest.MonkeyPatch, stand_in: str | None, words: str
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        if stand_in is not None:
            (Path(folder) / "bwrap").write_text(f"#!/bin/sh\n{stand_in}\n")
            (Path(folder) / "bwrap").chmod(0o755)
        monkeypatch.setenv("PATH", folder)
        made = Bubblewrap()
        made.configure(Configuration(accounts=os.geteuid() == 0))
    assert set(made.unenforceable()) == set(Limits.__dataclass_fields__)
    assert words in made.unenforceable()["memory_bytes"]
