"""Between the executor and bubblewrap: joins the attempt's cgroups, gathers what the sandbox is made of,
drops to its account, and becomes bubblewrap.

Run as `python -I -S shim.py FD`, where FD holds one JSON document. All this happens *before* bubblewrap is
executed, so that a kill at any moment finds every process in the group. The image, the inputs and the
scratch space are mounted below STAGE in a mount namespace of their own: they vanish with the processes, and
the payload's account reaches them though it can reach none of the directories they come from. Standard
library only. Exit status 125: something here failed, said on standard error.
"""

import contextlib
import ctypes
import json
import os
import resource
import signal
import sys
from typing import Any

CLONE_NEWNS = 0x00020000
CLONE_NEWUSER = 0x10000000
MS_NOSUID = 0x2
MS_NODEV = 0x4
MS_NOEXEC = 0x8
MS_BIND = 0x1000
MS_REC = 0x4000
MS_PRIVATE = 0x40000
PR_SET_PDEATHSIG = 1
PR_SET_NO_NEW_PRIVS = 38

STAGE = "/run"  # every machine has it, and bubblewrap needs nothing of it
STAGE_OPTIONS = "size=4m,mode=0755"

_RT_SIGACTION = 13 if os.uname().machine == "x86_64" else 134  # the table that newer architectures share
_LIBC = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    with open(int(sys.argv[1])) as file:
        spec = json.load(file)
    _close_all_but({0, 1, 2, *spec["descriptors"]})
    for path in spec["join"]:
        with open(path, "w") as file:
            file.write("0")
    uid, gid = spec["uid"], spec["gid"]
    own_account = os.geteuid() == uid
    if own_account:
        _check(_LIBC.unshare(CLONE_NEWUSER | CLONE_NEWNS), "unshare a user namespace")
        _map_own_account(uid, gid)
    else:
        _check(_LIBC.unshare(CLONE_NEWNS), "unshare a mount namespace")
    _mount(None, "/", None, MS_REC | MS_PRIVATE)
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
    _check(_LIBC.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "set no_new_privs")
    # Last, because a change of account clears it; then make sure that the executor is still there.
    _check(_LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "set the parent-death signal")
    if os.getppid() != spec["parent"]:
        raise OSError("the executor is gone")
    _default_signals()
    os.execve(spec["argv"][0], spec["argv"], {})  # noqa: S606  # no shell is the point


def _close_all_but(kept: set[int]) -> None:
    """Whatever the executor's own parents left open must not reach a payload."""
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in kept:
            with contextlib.suppress(OSError):  # the listing's own descriptor is closed already
                os.close(int(name))


def _default_signals() -> None:
    """What is ignored stays ignored over an exec: SIGPIPE and SIGXFSZ of Python, and whatever the executor's
    parents ignored. glibc's posix_spawn leaves its own two signals ignored (make starts everything so), and
    its sigaction refuses to say anything of them, hence the system call."""
    action = (ctypes.c_ulong * 4)()  # SIG_DFL, no flags, no restorer, an empty mask
    for number in range(1, signal.NSIG):
        if number not in (signal.SIGKILL, signal.SIGSTOP):
            result = _LIBC.syscall(_RT_SIGACTION, number, action, None, ctypes.c_size_t(8))
            _check(result, f"reset signal {number}")


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
    _mount("stage", STAGE, "tmpfs", MS_NOSUID | MS_NODEV, STAGE_OPTIONS)
    for directory in ("root", "inputs", "scratch"):
        os.mkdir(f"{STAGE}/{directory}", 0o755)
    for name, fd in sources.items():
        target = f"{STAGE}/{name}"
        if name != "root":
            os.makedirs(os.path.dirname(target), mode=0o755, exist_ok=True)
            os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o444))
        _mount(f"/proc/self/fd/{fd}", target, None, MS_BIND)
        os.close(fd)
    scratch = spec["scratch"]
    options = f"size={scratch['bytes']},nr_inodes={scratch['inodes']},mode=0755"
    _mount("scratch", f"{STAGE}/scratch", "tmpfs", MS_NOSUID | MS_NODEV | MS_NOEXEC, options)
    for name in scratch["directories"]:
        path = f"{STAGE}/scratch/{name}"
        os.mkdir(path, 0o700)
        os.chown(path, uid, gid)


def _mount(source: str | None, target: str, kind: str | None, flags: int, options: str = "") -> None:
    arguments = [None if text is None else text.encode() for text in (source, target, kind)]
    result = _LIBC.mount(*arguments, ctypes.c_ulong(flags), options.encode())
    _check(result, f"mount {target}")


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


if __name__ == "__main__":
    try:
        main()
    except Exception as error:
        print(f"shim: {error}", file=sys.stderr)
        sys.exit(125)
