"""The executor's end of its watchdog, with a real watchdog process."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from ficc.executor import guard
from ficc.executor.guard import Watchdog


async def test_a_watchdog_that_starts_slowly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine its interpreter takes its time. Orders are answered at once only from when it is there."""
    slow = tmp_path / "python"
    slow.write_text(f'#!/bin/sh\nsleep 2\nexec {sys.executable} "$@"\n')
    slow.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(slow))
    monkeypatch.setattr(guard, "ANSWER_SECONDS", 1.0)
    lock = os.open(tmp_path / "lock", os.O_CREAT | os.O_RDWR)
    try:
        watchdog = await Watchdog.start(tmp_path, lock)
        try:
            await watchdog.disarm("nothing")
        finally:
            await watchdog.close()
    finally:
        os.close(lock)
