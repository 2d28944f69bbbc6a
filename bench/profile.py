"""Where the CPU of a JSON request goes in controller and executor: sampled by py-spy under the load of `json`.

py-spy is no dependency of ficc: `.venv/bin/pip install py-spy` before, and root or CAP_SYS_PTRACE while it runs.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from bench.load import closed_loop
from bench.relay import table
from bench.setup import Bench

SECONDS = 20
SAMPLES_PER_SECOND = 500
CLIENTS = 32
REQUESTS_AT_ONCE = 1000
COSTED_REQUESTS = 5000
ROWS = 25
WAITING = frozenset({"PyThread_acquire_lock_timed", "PyThread_acquire_lock_timed_with_retries"})
"""Threads in these wait for work, or for the interpreter; py-spy cannot tell."""
WAITING_AT_LAST = frozenset({"epoll_pwait", "epoll_wait"})
OURS = "ficc/"
SHORT_FRAMES = 2
"""Of a function's path, as many parts as tell it from others."""


async def json_profile(bench: Bench) -> None:
    """What functions take by themselves, and ours with all that they call: in µs of CPU per request, by the cost of
    each process while nobody samples it."""
    program = shutil.which("py-spy", path=f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}")
    if program is None:
        raise SystemExit("Install py-spy first: .venv/bin/pip install py-spy")
    names = ("controller", "executor")
    outputs = {name: bench.directory / f"{name}.raw" for name in names}
    cost_us = {}
    for name in names:
        figures = await closed_loop(
            bench.relayed(),
            clients=CLIENTS,
            requests=COSTED_REQUESTS,
            watched=[bench.processes[name].pid],
            max_tokens=16,
        )
        cost_us[name] = figures.cpu_per_request_us
    samplers = [
        await asyncio.create_subprocess_exec(
            *(program, "record", "--pid", str(bench.processes[name].pid), "--native", "--format", "raw"),
            *("--rate", str(SAMPLES_PER_SECOND), "--duration", str(SECONDS), "--output", str(outputs[name])),
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
        )
        for name in names
    ]
    while any(sampler.returncode is None for sampler in samplers):
        await closed_loop(bench.relayed(), clients=CLIENTS, requests=REQUESTS_AT_ONCE, max_tokens=16)
    for name in names:
        if not outputs[name].exists():
            raise SystemExit(f"py-spy could not look into the {name}; it needs root or CAP_SYS_PTRACE")
        _print(name, cost_us[name], outputs[name].read_text().splitlines())


def _print(name: str, spent_us: float, lines: Iterable[str]) -> None:
    """From py-spy's raw format: frames of one stack, outermost first, and how often it was seen."""
    itself: Counter[str] = Counter()
    below: Counter[str] = Counter()
    for line in lines:
        stack, _, count = line.rpartition(" ")
        frames = stack.split(";")
        functions = [frame.partition(" (")[0] for frame in frames]
        if functions[-1] in WAITING_AT_LAST or not WAITING.isdisjoint(functions):
            continue
        itself[_short(frames[-1])] += int(count)
        for frame in {_short(frame) for frame in frames if OURS in frame}:
            below[frame] += int(count)
    samples = sum(itself.values())
    for title, counted in (("functions by themselves", itself), ("ours with all that they call", below)):
        rows: list[list[object]] = [
            [f"`{frame}`", f"{count / samples:.1%}", f"{count / samples * spent_us:.0f} µs"]
            for frame, count in counted.most_common(ROWS)
        ]
        columns = [f"{name}, {spent_us:.0f} µs a request", "share of CPU", "a request"]
        table(f"{name.capitalize()}: {title}", columns, rows)


def _short(frame: str) -> str:
    """`function (module.py)` of `function (long/way/to/module.py:12)`."""
    function, _, place = frame.partition(" (")
    path = place.removesuffix(")").partition(":")[0]
    return f"{function} ({'/'.join(path.split('/')[-SHORT_FRAMES:])})" if path else function
