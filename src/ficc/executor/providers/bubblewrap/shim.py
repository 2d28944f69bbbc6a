"""Between the executor and bubblewrap: joins the attempt's cgroups, gathers what the sandbox is made of,
drops to its account, and becomes bubblewrap.

Run as `python -I -S shim.py FD`, where FD holds one JSON document. All this happens *before* bubblewrap is
executed, so that a kill at any moment finds every process in the group. The image, the inputs and the
scratch space are mounted below STAGE in a mount namespace of their own: they vanish with the processes, and
the payload's account reaches them though it can reach none of the directories they come from. Standard
library only. Exit status 125: something here failed, said on standard error.
"""

import json
import os
import resource
import signal
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[4]))  # isolated, Python looks only where its own library is
from ficc.executor.providers import linux

STAGE = "/run"  # every machine has it, and bubblewrap needs nothing of it
STAGE_OPTIONS = "size=4m,mode=0755"


def main() -> None:
    with open(int(sys.argv[1])) as file:
        spec = json.load(file)
    linux.close_all_but({0, 1, 2, *spec["descriptors"]})
    for path in spec["join"]:
        with open(path, "w") as file:
            file.write("0")
    uid, gid = spec["uid"], spec["gid"]
    own_account = os.geteuid() == uid
    if own_account:
        linux.unshare(linux.CLONE_NEWUSER | linux.CLONE_NEWNS, "a user namespace")
        _map_own_account(uid, gid)
    else:
        linux.unshare(linux.CLONE_NEWNS, "a mount namespace")
    linux.make_mounts_private()
    _gather(spec, uid, gid)
    for number, value in spec["rlimits"]:
        _, hard = resource.getrlimit(number)
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(number, (value, value))
    with open("/proc/self/oom_score_adj", "w") as file:
        file.write(str(spec["oom_score_adj"]))
    if not own_account:
        os.setgroups([])
        os.setresgid(gid, gid, gid)
        os.setresuid(uid, uid, uid)
    linux.set_no_new_privs()
    # Last, because a change of account clears it; then make sure that the executor is still there.
    linux.set_parent_death_signal(signal.SIGKILL)
    if os.getppid() != spec["parent"]:
        raise OSError("the executor is gone")
    linux.default_signals()
    os.execve(spec["argv"][0], spec["argv"], {})  # noqa: S606  # no shell is the point


def _map_own_account(uid: int, gid: int) -> None:
    for path, text in (
        ("/proc/self/setgroups", "deny"),
        ("/proc/self/uid_map", f"{uid} {uid} 1"),
        ("/proc/self/gid_map", f"{gid} {gid} 1"),
    ):
        with open(path, "w") as file:
            file.write(text)


def _gather(spec: dict[str, Any], uid: int, gid: int) -> None:
    """STAGE/root is the image, STAGE/inputs the inputs by name, STAGE/scratch all that can be written: one
    tmpfs, bounded in bytes and inodes. Sources are opened first: one may lie below STAGE itself."""
    sources = {"root": os.open(spec["image_root"], os.O_PATH | os.O_DIRECTORY)}
    for name, path in spec["inputs"]:
        sources[f"inputs/{name}"] = os.open(path, os.O_PATH | os.O_NOFOLLOW)
    linux.mount("stage", STAGE, "tmpfs", linux.MS_NOSUID | linux.MS_NODEV, STAGE_OPTIONS)
    for directory in ("root", "inputs", "scratch"):
        os.mkdir(f"{STAGE}/{directory}", 0o755)
    for name, fd in sources.items():
        target = f"{STAGE}/{name}"
        if name != "root":
            os.makedirs(os.path.dirname(target), mode=0o755, exist_ok=True)
            os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o444))
        linux.mount(f"/proc/self/fd/{fd}", target, None, linux.MS_BIND)
        os.close(fd)
    scratch = spec["scratch"]
    options = f"size={scratch['bytes']},nr_inodes={scratch['inodes']},mode=0755"
    linux.mount(
        "scratch", f"{STAGE}/scratch", "tmpfs", linux.MS_NOSUID | linux.MS_NODEV | linux.MS_NOEXEC, options
    )
    for name in scratch["directories"]:
        path = f"{STAGE}/scratch/{name}"
        os.mkdir(path, 0o700)
        os.chown(path, uid, gid)


if __name__ == "__main__":
    try:
        main()
    except Exception as error:
        print(f"shim: {error}", file=sys.stderr)
        sys.exit(125)
