"""A family that ignores SIGTERM: children, orphans, sessions of their own. Ten processes with this one."""

import os
import signal
import time

signal.signal(signal.SIGTERM, signal.SIG_IGN)


def stay():
    print("alive", flush=True)
    time.sleep(600)
    os._exit(0)


for _ in range(3):
    if os.fork() == 0:
        stay()
for _ in range(3):
    middle = os.fork()
    if middle == 0:
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                stay()
            stay()
        os._exit(0)
    os.waitpid(middle, 0)
time.sleep(0.1)
print("ready", flush=True)
