"""What a command prints: the result on standard output, everything else on standard error.

`--json` prints exactly the API's record; on failure standard output stays empty and standard error gets one
`{"error": …}` line. Progress is a bar on a terminal, and off one a plain line every ten seconds and at each
change of state.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.table import Table

PLAIN_SECONDS = 10.0

errors = Console(stderr=True, highlight=False, soft_wrap=True)
results = Console(highlight=False, soft_wrap=True)
_quiet = False


def be_quiet() -> None:
    """No progress and no hints from now on."""
    global _quiet
    _quiet = True


def say(text: str) -> None:
    """A hint or a step, for people."""
    if not _quiet:
        errors.print(text, markup=False)


def show_json(document: Any) -> None:
    print(json.dumps(document, ensure_ascii=False), flush=True)


def show_table(columns: Sequence[str], rows: Sequence[Sequence[Any]], nothing: str) -> None:
    """A table, or what to do when there is nothing yet."""
    if not rows:
        say(nothing)
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*("–" if cell is None else str(cell) for cell in row))
    results.print(table)


def show_error(message: str, code: str, *, as_json: bool, request_id: str | None = None, **more: Any) -> None:
    if as_json:
        document = {"error": {"code": code, "message": message, "request_id": request_id, **more}}
        print(json.dumps(document, ensure_ascii=False), file=sys.stderr)
        return
    errors.print(f"Error: {message} ({code})", style="red", markup=False)
    if request_id:
        errors.print(f"  request {request_id}", markup=False)


class Meter:
    """Progress of bytes. `phase` is said beside the numbers."""

    def __init__(self, what: str, total: int) -> None:
        self._what = what
        self._total = total
        self._began = time.monotonic()
        self._from: int | None = None
        self._said_at = 0.0
        self._phase = ""
        self._progress: Progress | None = None
        self._task: TaskID | None = None

    def __enter__(self) -> Meter:
        if errors.is_terminal and not errors.is_dumb_terminal and not _quiet:
            self._progress = Progress(
                TextColumn("{task.description}", markup=False),
                BarColumn(),
                TextColumn("{task.fields[numbers]}", markup=False),
                console=errors,
            )
            self._progress.start()
            self._task = self._progress.add_task(self._what, total=self._total, numbers="")
        return self

    def __exit__(self, *_: object) -> None:
        if self._progress is not None:
            self._progress.stop()

    def at(self, done: int, phase: str = "durable") -> None:
        """So many bytes are done."""
        if self._from is None:
            self._from = done
        numbers = self._numbers(done, phase)
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, completed=done, numbers=numbers)
        elif phase != self._phase or done == self._total or time.monotonic() - self._said_at > PLAIN_SECONDS:
            say(f"{self._what}  {numbers}")
            self._said_at = time.monotonic()
        self._phase = phase

    def _numbers(self, done: int, phase: str) -> str:
        elapsed = time.monotonic() - self._began
        moved = done - (self._from or 0)
        percent = 100 if not self._total else done * 100 // self._total
        text = f"{percent:3d} %  {size(done)} of {size(self._total)} {phase}"
        if moved and elapsed > 0.5:
            rate = moved / elapsed
            text += f"  {size(int(rate))}/s"
            if done < self._total:
                text += f"  {duration((self._total - done) / rate)} left"
        return text


def size(count: int) -> str:
    amount = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if amount < 1000:
            return f"{amount:.0f} {unit}" if unit in ("B", "kB") else f"{amount:.1f} {unit}"
        amount /= 1000
    return f"{amount:.1f} TB"


def duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"
