"""System calls that Python lacks, for the small programs that run between an executor and a sandbox: those are
run as `python -I -S PROGRAM`, so this is the standard library only."""

import contextlib
import ctypes
import os
import signal

CLONE_NEWNS = 0x00020000
CLONE_NEWCGROUP = 0x02000000
CLONE_NEWUSER = 0x10000000
MS_RDONLY = 0x1
MS_NOSUID = 0x2
MS_NODEV = 0x4
MS_NOEXEC = 0x8
MS_REMOUNT = 0x20
MS_BIND = 0x1000
MS_REC = 0x4000
MS_PRIVATE = 0x40000
_PR_SET_PDEATHSIG = 1
_PR_SET_NO_NEW_PRIVS = 38

_RT_SIGACTION = 13 if os.uname().machine == "x86_64" else 134  # the table that newer architectures share
_LIBC = ctypes.CDLL(None, use_errno=True)


def unshare(flags: int, what: str) -> None:
    _check(_LIBC.unshare(flags), f"unshare {what}")


def enter(namespace: int, kind: int, what: str) -> None:
    """Enter the namespace that this descriptor is of."""
    _check(_LIBC.setns(namespace, kind), f"enter {what}")


def mount(source: str | None, target: str, kind: str | None, flags: int, options: str = "") -> None:
    arguments = [None if text is None else text.encode() for text in (source, target, kind)]
    result = _LIBC.mount(*arguments, ctypes.c_ulong(flags), options.encode())
    _check(result, f"mount {target}")


def make_mounts_private() -> None:
    mount(None, "/", None, MS_REC | MS_PRIVATE)


def set_no_new_privs() -> None:
    _check(_LIBC.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "set no_new_privs")


def set_parent_death_signal(number: int) -> None:
    """0: none. A change of account clears it, and it is not passed on to children."""
    _check(_LIBC.prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0), "set the parent-death signal")


def close_all_but(kept: set[int]) -> None:
    """Whatever the executor's own parents left open must not reach a payload."""
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in kept:
            with contextlib.suppress(OSError):  # the listing's own descriptor is closed already
                os.close(int(name))


def default_signals() -> None:
    """What is ignored stays ignored over an exec: SIGPIPE and SIGXFSZ of Python, and whatever the executor's
    parents ignored. glibc's posix_spawn leaves its own two signals ignored (make starts everything so), and
    its sigaction refuses to say anything of them, hence the system call."""
    action = (ctypes.c_ulong * 4)()  # SIG_DFL, no flags, no restorer, an empty mask
    for number in range(1, signal.NSIG):
        if number not in (signal.SIGKILL, signal.SIGSTOP):
            result = _LIBC.syscall(_RT_SIGACTION, number, action, None, ctypes.c_size_t(8))
            _check(result, f"reset signal {number}")


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
