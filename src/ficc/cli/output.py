"""What a command prints. Standard output is for the result alone, so that a pipe gets nothing else; hints, progress
and failures go to standard error.

With `--json` the result is the API's record as it came, and a failure one line, `{"error": …}`. Progress is a bar
where there is a terminal to draw it on; elsewhere it is a line now and then, and at each change of state.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from typing import Any

from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from ficc.domain.quantity import size as size  # the commands say output.size, as output.duration

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
    """A table, or what to do when there is nothing yet. A row is one line however narrow the terminal is: an id that
    was broken could not be copied."""
    if not rows:
        say(nothing)
        return
    cells = [list(columns), *(["–" if cell is None else str(cell) for cell in row] for row in rows)]
    widths = [max(map(cell_len, column)) for column in zip(*cells, strict=True)]
    for number, line in enumerate(cells):
        padded = (set_cell_size(cell, width) for cell, width in zip(line, widths, strict=True))
        results.print("  ".join(padded).rstrip(), style=None if number else "bold", markup=False)


def show_error(
    message: str,
    code: str,
    *,
    as_json: bool,
    request_id: str | None = None,
    hints: Sequence[str] = (),
    **more: Any,
) -> None:
    if as_json:
        document = {"error": {"code": code, "message": message, "request_id": request_id, **more}}
        print(json.dumps(document, ensure_ascii=False), file=sys.stderr)
        return
    first, *rest = message.splitlines() or [""]
    errors.print(f"Error: {first} ({code})", style="red", markup=False)
    for line in rest:
        errors.print(f"  {line}", markup=False)
    for hint in hints:
        errors.print(f"  {hint}", markup=False)
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
        self._shown: tuple[str, int] | None = None
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
        elif self._worth_a_line(done, phase):
            say(f"{self._what}  {numbers}")
            self._said_at = time.monotonic()
        self._shown = (phase, done)

    def _worth_a_line(self, done: int, phase: str) -> bool:
        """Off a terminal: each change of phase, the end, and every now and then where it stands."""
        if self._shown == (phase, done):
            return False
        late = time.monotonic() - self._said_at > PLAIN_SECONDS
        return self._shown is None or self._shown[0] != phase or done == self._total or late

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


def duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"
