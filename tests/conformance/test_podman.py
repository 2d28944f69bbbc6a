"""The podman provider against the suite that every provider passes, and what is its own."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import uvloop

from conformance.providers import LIMITS, WRITABLE, Bench, ProviderConformance, bench, python_root
from ficc.domain.plan import Limits
from ficc.executor import cgroups
from ficc.executor.providers import contract, seccomp
from ficc.executor.providers.contract import Configuration, LaunchFailed
from ficc.executor.providers.podman import arguments, monitor, probe, sandbox
from ficc.executor.providers.podman.provider import Podman
from support.executor import cgroups_named, is_alive

__all__ = ["bench", "python_root"]

pytestmark = [
    pytest.mark.slow,  # bubblewrap's suite is the quick one
    pytest.mark.root,
    pytest.mark.skipif(shutil.which("podman") is None, reason="podman is not installed"),
    pytest.mark.timeout(300),
]

ELSEWHERE = ("/run/crun", "/run/libpod", "/run/containers", "/var/lib/containers", "/etc/cni/net.d")
"""Where podman keeps what it keeps for root, when nobody says otherwise."""


def make_provider(directory: Path) -> Podman:
    made = Podman()
    made.configure(Configuration(accounts=True, directory=directory))
    assert made.unenforceable() == {}
    return made


@pytest.fixture(scope="module")
def provider() -> Iterator[Podman]:
    """With a state directory that is as private as an executor's. In the end podman knows no container."""
    with tempfile.TemporaryDirectory(prefix="ficc-podman-") as directory:
        made = make_provider(Path(directory))
        before = elsewhere()
        yield made
        assert uvloop.run(made.engine.containers()) == []
        assert list((made.engine.home / "pids").iterdir()) == []
        assert Path(directory).stat().st_mode & 0o777 == 0o700
        assert elsewhere() == before


def elsewhere() -> set[str]:
    """Everything that other uses of podman have on this machine, and groups that podman made."""
    found = {str(path) for place in ELSEWHERE for path in Path(place).rglob("*")}
    return found | set(cgroups_named("libpod"))


class TestPodman(ProviderConformance):
    ADDED_VARIABLES: ClassVar = {"HOME": "/tmp"}
    BLOCKED_SIGNALS = frozenset({signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU})
    JOINED_SHARE = 1 / 10
    ROOT_MONITORS = 1

    async def test_mounts(self, bench: Bench) -> None:
        """Nothing of the machine but the image, the inputs, six harmless devices and the sandbox's init."""
        box, _ = await bench.run("print(open('/proc/self/mountinfo').read())")
        mounts = {line.split()[4]: line.split()[5].split(",") for line in box.text.splitlines() if line}
        devices = {f"/dev/{name}" for name in ("null", "zero", "full", "random", "urandom", "tty", "pts")}
        ours = {"/", "/proc", "/dev", "/inputs", "/inputs/payload.py", arguments.INIT, *devices, *WRITABLE}
        podmans = {*arguments.OVER, "/etc/hostname", "/run/.containerenv"}
        hidden = {point for point in mounts if point.startswith("/proc/")}
        assert set(mounts) - hidden == ours | podmans
        assert {point for point, flags in mounts.items() if "rw" in flags} == {
            *("/proc", "/dev"),
            *devices,
            *WRITABLE,
        }
        for point in ("/", "/inputs", "/inputs/payload.py", *WRITABLE):
            assert {"nosuid", "nodev"} <= set(mounts[point]), point

    async def test_what_the_runtime_was_told_is_what_is_in_force(
        self, bench: Bench, provider: Podman
    ) -> None:
        async with bench.started("import time; time.sleep(60)") as box:
            told = provider.engine.configuration(box.launch.attempt_id)
            status = Path(f"/proc/{box.payload}/status").read_text().split("\n")
            assert told["process"]["noNewPrivileges"] is True
            assert "NoNewPrivs:\t1" in status
            assert told["process"]["capabilities"] == {}
            assert sandbox.calls(told["linux"]["seccomp"]) == sandbox.calls(seccomp.profile())
            assert "Seccomp:\t2" in status
            assert told["root"] == {"path": "/run/stage/root", "readonly": True}
            assert "cgroupsPath" not in told["linux"]
            assert "hooks" not in told
            kinds = {entry["type"] for entry in told["linux"]["namespaces"]}
            assert kinds == {"pid", "network", "ipc", "uts", "mount", "user"}  # the monitor's is the cgroups'
            asked = await provider.engine.ask(("inspect", box.launch.attempt_id))
            assert b"noNewPrivileges" in asked.output or b"no-new-privileges" in asked.output

    @pytest.mark.parametrize("link", ["etc", "inputs", "inputs/a", "run", "run/ficc", "tmp"])
    async def test_an_image_leads_nowhere_else(self, bench: Bench, link: str) -> None:
        """Its set-up is root's work: a link in an image may not turn that on the machine."""
        root, outside = bench.directory / "hostile", bench.directory / "outside"
        outside.mkdir()
        (outside / "ficc").mkdir()
        for point in ("dev", "etc", "inputs", "proc", "run/ficc", "sys", "tmp"):
            if not f"{point}/".startswith(f"{link}/"):
                (root / point).mkdir(parents=True)
        (root / link).parent.mkdir(parents=True, exist_ok=True)
        (root / link).symlink_to(outside)
        image = {path: path.lstat().st_mtime_ns for path in root.rglob("*")}
        launch, _ = bench.launch(image_root=root, inputs={"a/b": bench.directory / "outside.txt"})
        (bench.directory / "outside.txt").write_text("an input")
        launch.group.create(LIMITS)
        with contextlib.suppress(LaunchFailed):
            made = await bench.provider.make(launch)
            assert link in ("etc", "inputs/a"), "these are hidden, all others are refused"
            await asyncio.to_thread(launch.group.kill)
            await made.close()
        assert launch.group.kill()
        assert launch.group.remove()
        assert [path.name for path in outside.rglob("*")] == ["ficc"]
        assert {path: path.lstat().st_mtime_ns for path in root.rglob("*")} == image

    @pytest.mark.parametrize(
        ("change", "words"),
        [
            (lambda argv: without(argv, "--security-opt", "no-new-privileges"), "no_new_privs is 0, not 1"),
            (
                lambda argv: swapped(swapped(argv, "--cap-drop", "--cap-add"), "all", "chown"),
                "capabilities is 0*1, ",
            ),
            (lambda argv: without(argv, "--read-only"), "root is rw, not ro; writable are /, "),
            (lambda argv: swapped(argv, "seccomp=", "seccomp=unconfined"), "the policy for system calls"),
            (
                lambda argv: swapped(swapped(argv, "none", "host"), "--no-hosts", "--dns=none"),
                "interfaces is .*, not lo",
            ),
            (lambda argv: swapped(argv, "65534:65534", "0:0"), "host uid is"),
        ],
        ids=["new privileges", "capabilities", "root", "system calls", "network", "account"],
    )
    async def test_what_differs_is_refused(
        self,
        bench: Bench,
        monkeypatch: pytest.MonkeyPatch,
        change: Callable[[list[str]], list[str]],
        words: str,
    ) -> None:
        """A container that podman made otherwise than it was told never starts."""
        create = arguments.create

        def otherwise(*positional: Any, **named: Any) -> list[str]:
            return change(create(*positional, **named))

        monkeypatch.setattr(arguments, "create", otherwise)
        launch, output = bench.launch("print('ran')")
        launch.group.create(LIMITS)
        made = await bench.provider.make(launch)
        try:
            with pytest.raises(LaunchFailed, match=words):
                await made.check()
        finally:
            await asyncio.to_thread(launch.group.kill)
            await made.close()
            assert launch.group.remove()
        assert b"ran" not in output


def without(argv: list[str], *gone: str) -> list[str]:
    at = next(at for at in range(len(argv)) if tuple(argv[at : at + len(gone)]) == gone)
    return argv[:at] + argv[at + len(gone) :]


def swapped(argv: list[str], start: str, to: str) -> list[str]:
    """The first argument that begins so, exchanged."""
    at = next(at for at in range(len(argv)) if argv[at].startswith(start))
    return [*argv[:at], to, *argv[at + 1 :]]


# What an executor that died left.


@pytest.mark.parametrize("state", ["running", "paused", "killed", "its monitor killed"])
async def test_leftovers_are_found_by_label_and_ended(bench: Bench, provider: Podman, state: str) -> None:
    """Another run of the executor finds the container, kills what lives of it, and podman knows it no more."""
    launch, output = bench.launch("import time; print('ran', flush=True); time.sleep(600)")
    launch.group.create(LIMITS)
    left = await provider.make(launch)
    if state != "paused":
        await left.start()
        async with asyncio.timeout(20):
            while b"ran" not in output:
                await asyncio.sleep(0.01)
    if state == "killed":
        assert await asyncio.to_thread(launch.group.kill)
    elif state == "its monitor killed":
        os.kill(provider.engine.pid(launch.attempt_id, "conmon"), signal.SIGKILL)
    assert [one.name for one in await provider.engine.containers()] == [launch.attempt_id]
    was = launch.group.processes()
    assert bool(was) == (state != "killed")

    next_run = make_provider(provider.engine.home.parent.parent)
    assert await next_run.recover() == (frozenset() if state == "killed" else {launch.attempt_id})
    assert not any(is_alive(pid) for pid in was)
    assert not next_run.engine.home.exists()
    assert await next_run.recover() == frozenset()

    provider.engine.prepare()
    assert await provider.engine.containers() == []
    await left.close()
    assert launch.group.kill()
    assert launch.group.remove()


async def test_settings_are_whole_at_every_moment(provider: Podman) -> None:
    """A sandbox is being made while the settings for another are looked after."""
    provider.engine.prepare()
    paths = [provider.engine.home / name for name in ("containers.conf", "seccomp.json", "conmon")]
    before = [path.stat().st_ino for path in paths]
    provider.engine.prepare()
    assert [path.stat().st_ino for path in paths] == before
    with paths[0].open() as file:
        paths[0].write_text("another release's")
        provider.engine.prepare()
        assert file.read() == "another release's"  # never emptied, but replaced
    assert "another" not in paths[0].read_text()


async def test_nothing_is_asked_of_what_an_earlier_boot_left(tmp_path: Path) -> None:
    """Its process ids are other processes' by now."""
    provider = make_provider(tmp_path)
    other = tmp_path / "podman" / "00000000-0000-0000-0000-000000000000"
    (other / "graph").mkdir(parents=True)
    assert await provider.recover() == frozenset()
    assert list((tmp_path / "podman").iterdir()) == []


async def test_podman_that_lost_its_state_is_no_obstacle(bench: Bench, provider: Podman) -> None:
    await bench.run("pass")
    for path in (provider.engine.home / "graph" / "libpod").iterdir():
        path.write_bytes(b"damaged") if path.is_file() else None
    assert await provider.recover() == frozenset()
    _, ended = await bench.run("raise SystemExit(3)")
    assert ended.status == 3


# Where it cannot be used.


def test_without_root_it_is_refused() -> None:
    """Rootless podman on cgroup v1 takes limits and ignores them."""
    made = Podman()
    made.configure(Configuration(accounts=False))
    assert set(made.unenforceable()) == set(Limits.__dataclass_fields__)
    assert (
        "run the executor as root, or choose the provider bubblewrap" in made.unenforceable()["memory_bytes"]
    )


@pytest.mark.parametrize(
    ("stand_ins", "words"),
    [
        ({}, "install podman crun conmon catatonit"),
        ({"podman": "exit 0", "crun": "", "conmon": ""}, "catatonit not installed; install catatonit"),
        (
            {"podman": "echo podman version 3.4.4"},
            "podman 4.3 or newer is needed; this is podman version 3.4.4",
        ),
        ({"podman": "[ $1 = --version ] && echo podman 4.9 || { echo 'no way' >&2; exit 1; }"}, "no way"),
    ],
    ids=["nothing", "no init", "old", "fails"],
)
def test_podman_that_does_not_work(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, stand_ins: dict[str, str], words: str
) -> None:
    if len(stand_ins) == 1:
        stand_ins |= dict.fromkeys(("crun", "conmon", "catatonit"), "")
    for name, script in stand_ins.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setattr(probe, "PLACES", ())
    monkeypatch.setenv("PATH", str(tmp_path))
    made = Podman()
    made.configure(Configuration(accounts=True))
    assert set(made.unenforceable()) == set(Limits.__dataclass_fields__)
    assert words in made.unenforceable()["memory_bytes"]


# Without a sandbox.


def test_options() -> None:
    argv = arguments.create(
        "/usr/bin/podman",
        "a1",
        uid=1000,
        gid=2000,
        processes=17,
        open_files_max=64,
        oom_score_adjustment=500,
        argv=("/bin/engine", "--flag"),
    )
    text = " ".join(argv)
    for wanted in (
        "--label ficc.attempt=a1 --pull never --network none",
        "--uidmap 0:1049576:1 --uidmap 65534:1000:1 --gidmap 0:1050576:1 --gidmap 65534:2000:1",
        "--user 65534:65534",
        "--cap-drop all --security-opt no-new-privileges",
        "--cgroups disabled",
        "--ulimit nproc=17:17",
        "--rootfs /run/stage/root /bin/engine --flag",
    ):
        assert wanted in text
    assert "--env" not in text


def test_what_conmon_would_run_is_left_out() -> None:
    argv = [
        "-c",
        "id",
        "--exit-command",
        "/usr/bin/podman",
        "--exit-command-arg",
        "--exit-command",
        "-b",
        "x",
    ]
    argv += ["--exit-command-arg=cleanup", "-l", "passthrough"]
    assert monitor._without_exit_command(argv) == ["-c", "id", "-b", "x", "-l", "passthrough"]


def test_the_policy_is_written_from_one_source() -> None:
    """The document says of every call what the program does, and has no call of its own."""
    document = seccomp.profile()
    assert document["defaultAction"] == "SCMP_ACT_ALLOW"
    denied = {name for entry in document["syscalls"] for name in entry["names"]}
    assert denied == {*seccomp.DENIED, "clone", "clone3", "socket", "socketpair"}
    assert len(document["syscalls"]) == len(list(seccomp.rules()))


def test_the_package_digest_is_of_all_that_isolates() -> None:
    """`test_bubblewrap.py` shows that every file of it counts."""
    package = Path(sandbox.__file__).parent
    modules = ("__init__", "arguments", "engine", "monitor", "probe", "provider", "sandbox", "stage")
    assert {name for name, _ in contract.shipped_files(package)} == {f"podman/{name}.py" for name in modules}
    shared = [package.parent / f"{name}.py" for name in contract.SHARED]
    files = contract.shipped_files(package, *shared, Path(cgroups.__file__))
    assert Podman().package_digest == contract.digest_of_files(files)
