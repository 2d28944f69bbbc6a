"""Which system calls are denied. Arguments are such that, without a filter, most would succeed or fail
otherwise: with EFAULT, EBADF or EINVAL."""

import ctypes
import errno
import json
import mmap
import os
import platform
import signal
import threading

LIBC = ctypes.CDLL(None, use_errno=True)
NEWUSER = 0x10000000
MACHINE = platform.machine()
COLUMN = {"x86_64": 0, "aarch64": 1}[MACHINE]
NUMBERS = {  # x86-64, arm64
    "unshare": (272, 97, 0),
    "setns": (308, 268, -1, 0),
    "mount": (165, 40, 0, 0, 0, 0, 0),
    "umount2": (166, 39, 0, 0),
    "pivot_root": (155, 41, 0, 0),
    "chroot": (161, 51, 0),
    "ptrace": (101, 117, 0, 0, 0, 0),
    "process_vm_readv": (310, 270, os.getpid(), 0, 0, 0, 0, 0),
    "process_vm_writev": (311, 271, os.getpid(), 0, 0, 0, 0, 0),
    "pidfd_getfd": (438, 438, -1, 0, 0),
    "kcmp": (312, 272, os.getpid(), os.getpid(), 0, 0, 0),
    "bpf": (321, 280, -1, 0, 0),
    "perf_event_open": (298, 241, 0, 0, 0, 0, 0),
    "io_uring_setup": (425, 425, 1, 0),
    "io_uring_enter": (426, 426, -1, 0, 0, 0, 0, 0),
    "io_uring_register": (427, 427, -1, 0, 0, 0),
    "keyctl": (250, 219, 0, -3, 0),
    "add_key": (248, 217, 0, 0, 0, 0, 0),
    "request_key": (249, 218, 0, 0, 0, 0),
    "userfaultfd": (323, 282, 0xFFFFFFFF),
    "open_by_handle_at": (304, 265, -1, 0, 0),
    "name_to_handle_at": (303, 264, -1, 0, 0, 0, 0),
    "open_tree": (428, 428, -1, 0, 0),
    "move_mount": (429, 429, -1, 0, -1, 0, 0),
    "fsopen": (430, 430, 0, 0),
    "fsmount": (432, 432, -1, 0, 0),
    "fspick": (433, 433, -1, 0, 0),
    "mount_setattr": (442, 442, -1, 0, 0, 0, 0),
    "init_module": (175, 105, 0, 0, 0),
    "finit_module": (313, 273, -1, 0, 0),
    "kexec_load": (246, 104, 0, 0, 0, 0),
    "personality": (135, 92, 0xFFFFFFFF),
    "syslog": (103, 116, 10, 0, 0),
    "quotactl": (179, 60, 0, 0, 0, 0),
    "fanotify_init": (300, 262, 0, 0),
    "swapon": (167, 224, 0, 0),
    "acct": (163, 89, -1),
    "reboot": (169, 142, 0, 0, 0, 0),
    "settimeofday": (164, 170, -1, 0),
    "clone with CLONE_NEWUSER": (56, 220, NEWUSER | signal.SIGCHLD, 0, 0, 0, 0),
    "clone with CLONE_NEWNET": (56, 220, 0x40000000 | signal.SIGCHLD, 0, 0, 0, 0),
    "clone with CLONE_NEWNS": (56, 220, 0x00020000 | signal.SIGCHLD, 0, 0, 0, 0),
}
CLONE3 = 435


def call(number, *arguments):
    result = LIBC.syscall(*(ctypes.c_long(value) for value in (number, *arguments)))
    if result == 0 and number == NUMBERS["clone with CLONE_NEWUSER"][COLUMN]:
        os._exit(0)  # a child that should not be
    return ctypes.get_errno() if result < 0 else 0


def signal_of(attempt):
    """The signal that ends a child which tries this."""
    child = os.fork()
    if child == 0:
        attempt()
        os._exit(0)
    return os.WTERMSIG(os.waitpid(child, 0)[1])


def i386():
    """getpid by the 32-bit gate, which has other numbers and is another architecture to a filter."""
    code = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    code.write(b"\xb8\x14\x00\x00\x00\xcd\x80\xc3")
    ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(code)))()


ran = []
thread = threading.Thread(target=ran.append, args=(1,))
thread.start()
thread.join()
child = os.fork()
if child == 0:
    os._exit(5)
report = {
    "denied": {name: call(entry[COLUMN], *entry[2:]) for name, entry in NUMBERS.items()},
    "clone3": call(CLONE3, 0, 0),
    "threads work": ran == [1],
    "fork works": os.WEXITSTATUS(os.waitpid(child, 0)[1]) == 5,
}
if MACHINE == "x86_64":
    report["x32"] = signal_of(lambda: LIBC.syscall(ctypes.c_long(0x40000000 | 39)))
    report["i386"] = signal_of(i386)
assert errno.EPERM == 1
print(json.dumps(report))
