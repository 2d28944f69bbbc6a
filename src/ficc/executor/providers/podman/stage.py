"""Between the executor and podman: shows podman a machine on which everything that it keeps is the executor's.

Run as `python -I -S stage.py FD`, where FD holds one JSON document. In a mount namespace of its own, /run is
replaced: podman's directories, which the executor keeps in a private place, are at HOME; its OCI runtime's are
at the place that it insists on; and what a sandbox is made of is gathered below STAGE. So podman neither sees
nor touches what anybody else uses it for, needs no way through private directories, and leaves no mount behind.

The root of a sandbox is the extracted image below a layer of ours with the places that podman mounts on; the
image itself is never written, and no link in it leads out of it. Inputs and scratch space are mounted in the
root beforehand, since crun 1.8 binds nothing recursively in a user namespace.

`enter` instead enters the namespace that an earlier stage made. Then the commands are run, each once the one
before it succeeded; the last takes this program's place. Everything ends with the executor. Standard library
only. Exit status 125: something here failed, said on standard error.
"""

import contextlib
import json
import os
import signal
import stat
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[4]))  # isolated, Python looks only where its own library is
from ficc.executor.providers import linux, safe_connect

PLACE = "/run"  # every machine has it, and it is where container engines look for what is theirs
HOME = f"{PLACE}/podman"
RUNTIME = f"{PLACE}/crun"
STAGE = f"{PLACE}/stage"
PIDS = f"{HOME}/pids"
ROOT = f"{STAGE}/root"
SCRATCH = f"{STAGE}/scratch"
INPUTS = f"{STAGE}/inputs"
LAYER = f"{STAGE}/layer"
WORK = f"{STAGE}/work"
VOID = f"{STAGE}/void"
LAUNCH = f"{STAGE}/launch.json"
"""What `monitor` has to know."""
PLACE_OPTIONS = "size=16m,mode=0755"
DIRECTORIES = ("crun", "graph", "libpod", "networks", "pids", "run", "volumes")
"""What is kept below HOME."""
FILES = ("etc/hostname", "run/.containerenv", "run/podman-init")
"""Where podman mounts files. Made beforehand: the sandbox's root user may make none."""
POINTS = ("dev", "inputs", "proc", "run/ficc", "sys", "tmp")
"""The directories that every image has."""


def main() -> None:
    with open(int(sys.argv[1])) as file:
        spec = json.load(file)
    linux.set_parent_death_signal(signal.SIGKILL)
    if os.getppid() != spec["parent"]:
        raise OSError("the executor is gone")
    enter = spec["enter"]
    linux.close_all_but({0, 1, 2} if enter is None else {0, 1, 2, enter})
    if enter is None:
        linux.unshare(linux.CLONE_NEWNS, "a mount namespace")
        linux.make_mounts_private()
        _gather(spec["home"], spec["launch"])
    else:
        linux.enter(enter, linux.CLONE_NEWNS, "the sandbox's stage")
        os.close(enter)
    os.chdir("/")
    linux.default_signals()
    *first, last = spec["commands"]
    for command in first:
        status = _run(command, spec["environment"])
        if status != 0:
            sys.exit(status)
    os.execve(last[0], last, spec["environment"])  # noqa: S606  # no shell is the point


def _run(command: list[str], environment: dict[str, str]) -> int:
    """The exit status of a command that ends with this program."""
    ours = os.getpid()
    child = os.fork()
    if child == 0:
        with contextlib.suppress(OSError):
            linux.set_parent_death_signal(signal.SIGKILL)
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # only the last one is asked for words
            if os.getppid() == ours:
                os.execve(command[0], command, environment)  # noqa: S606
        os._exit(125)
    return abs(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))


def _gather(home: str, launch: dict[str, Any] | None) -> None:
    """Sources are opened first: one may lie below PLACE itself."""
    kept = os.open(home, os.O_PATH | os.O_DIRECTORY)
    image = -1 if launch is None else os.open(launch["image_root"], os.O_PATH | os.O_DIRECTORY)
    inputs = {name: _open_file(path) for name, path in ([] if launch is None else launch["inputs"])}
    linux.mount("stage", PLACE, "tmpfs", linux.MS_NOSUID | linux.MS_NODEV, PLACE_OPTIONS)
    for directory in (HOME, RUNTIME, STAGE):
        os.mkdir(directory, 0o755)
    linux.mount(f"/proc/self/fd/{kept}", HOME, None, linux.MS_BIND)
    linux.mount(f"{HOME}/crun", RUNTIME, None, linux.MS_BIND)
    os.close(kept)
    if launch is None:
        return
    root = _make_root(image)
    _bind_inputs(inputs, _place(root, "inputs"))
    _make_scratch(launch["scratch"], launch["uid"], launch["gid"], root)
    _say_what_is_missing(launch["program"])
    with open(LAUNCH, "w", opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
        json.dump({**launch["monitor"], "podman": os.getpid()}, file)


def _open_file(path: str) -> int:
    fd = os.open(path, os.O_PATH | os.O_NOFOLLOW)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        raise OSError(f"{path} is no regular file")
    return fd


def _make_root(image: int) -> int:
    """A descriptor of ROOT: the image, below a layer with what podman needs to find there."""
    for directory in (ROOT, INPUTS, LAYER, WORK, f"{VOID}/fs/cgroup"):
        os.makedirs(directory, 0o755)
    for point in FILES:
        _make_file(f"{LAYER}/{point}")
    options = f"lowerdir=/proc/self/fd/{image},upperdir={LAYER},workdir={WORK}"
    linux.mount("root", ROOT, "overlay", linux.MS_NOSUID | linux.MS_NODEV, options)
    os.close(image)
    root = os.open(ROOT, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    for point in POINTS:
        _place(root, point)
    return root


def _make_file(path: str) -> None:
    os.makedirs(os.path.dirname(path), 0o755, exist_ok=True)
    os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o444))


def _place(root: int, point: str) -> str:
    """A directory of the root, by a descriptor that lasts as long as this program: no link was followed."""
    try:
        fd = safe_connect.open_beneath(root, point)
    except OSError as error:
        raise OSError(error.errno, f"/{point} of the image: {error.strerror}") from error
    if not stat.S_ISDIR(os.fstat(fd).st_mode):
        raise OSError(f"/{point} of the image is no directory")
    return f"/proc/self/fd/{fd}"


def _bind_inputs(inputs: dict[str, int], place: str) -> None:
    read_only = linux.MS_NOSUID | linux.MS_NODEV | linux.MS_NOEXEC | linux.MS_RDONLY
    for name, fd in inputs.items():
        target = f"{INPUTS}/{name}"
        _make_file(target)
        linux.mount(f"/proc/self/fd/{fd}", target, None, linux.MS_BIND)
        linux.mount(None, target, None, linux.MS_REMOUNT | linux.MS_BIND | read_only)
        os.close(fd)
    linux.mount(INPUTS, place, None, linux.MS_BIND | linux.MS_REC)
    linux.mount(None, f"{ROOT}/inputs", None, linux.MS_REMOUNT | linux.MS_BIND | read_only)


def _make_scratch(scratch: dict[str, Any], uid: int, gid: int, root: int) -> None:
    """All that can be written: one tmpfs, bounded in bytes and inodes."""
    os.mkdir(SCRATCH, 0o755)
    options = f"size={scratch['bytes']},nr_inodes={scratch['inodes']},mode=0755"
    flags = linux.MS_NOSUID | linux.MS_NODEV | linux.MS_NOEXEC
    linux.mount("scratch", SCRATCH, "tmpfs", flags, options)
    for name, target in scratch["directories"].items():
        path = f"{SCRATCH}/{name}"
        os.mkdir(path, 0o700)
        os.chown(path, uid, gid)
        if not target.startswith("/dev/"):  # which is podman's to make
            linux.mount(path, _place(root, target.lstrip("/")), None, linux.MS_BIND)


def _say_what_is_missing(program: str) -> None:
    """Whether the image has the payload's program. The sandbox's init does not name what it could not run."""
    child = os.fork() if "/" in program else -1
    if child == 0:
        os.chroot(ROOT)
        os.chdir("/")
        if not os.path.exists(program):
            print(f"{program}: No such file or directory", file=sys.stderr, flush=True)
        os._exit(0)
    if child > 0:
        os.waitpid(child, 0)


if __name__ == "__main__":
    try:
        main()
    except Exception as error:
        print(f"stage: {error}", file=sys.stderr)
        sys.exit(125)
