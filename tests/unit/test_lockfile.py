"""One process per directory, for as long as it lives."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ficc import lockfile

HOLDER = """\
import sys
from pathlib import Path
from ficc import lockfile
fd = lockfile.hold(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


def test_the_second_is_told_who_the_first_is_and_a_killed_one_holds_nothing(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == b"held\n"
        for _ in range(2):  # who was refused took nothing away
            with pytest.raises(lockfile.Held) as caught:
                lockfile.hold(path)
            assert caught.value.pid == str(first.pid)
        first.kill()
        first.wait()
    os.close(lockfile.hold(path))


def test_a_lock_that_says_nothing_of_its_holder(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    fd = lockfile.hold(path)
    os.truncate(path, 0)
    with pytest.raises(lockfile.Held, match="unknown"):
        lockfile.hold(path)
    os.close(fd)
