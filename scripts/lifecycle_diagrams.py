"""Write docs/lifecycles.md: each lifecycle's table of transitions as a diagram, drawn from the code."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

from ficc.domain import acquisition, attempt, lease, service, upload, workload
from ficc.domain.lifecycle import diagram

PAGE = Path(__file__).resolve().parents[1] / "docs" / "lifecycles.md"

INTRODUCTION = """\
# Lifecycles

Six things here have a life of their own. Each is one module in `src/ficc/domain/` with one table of what may
follow what; an event that the table does not have is refused. This page is drawn from those tables: change a
table, run `python scripts/lifecycle_diagrams.py`, and commit the page with it. An arrow carries the events
that lead along it, by the names of their classes, whose docstrings say what each means.
"""


class Lifecycle(NamedTuple):
    title: str
    module: str
    begins: StrEnum
    table: Mapping[tuple[StrEnum, type], StrEnum]
    about: str


LIFECYCLES = (
    Lifecycle(
        "Acquisition",
        "acquisition",
        acquisition.Record().state,
        acquisition.TRANSITIONS,
        "How the bytes of a model come to be here and proved, whoever brings them. Only the worker that writes "
        "says `Settle`, so a model that is paused has nothing under way; uploads move it as much as a download.",
    ),
    Lifecycle(
        "Upload",
        "upload",
        upload.State.MISSING,
        upload.TRANSITIONS,
        "One file of a model in one project. Its offset counts durable bytes only, and falls only together with "
        "an error that says why.",
    ),
    Lifecycle(
        "Service",
        "service",
        service.Record().state,
        service.TRANSITIONS,
        "What an operator asks to keep running. `Start` and `Replace` begin the next generation, which fences off "
        "everything of the one before; what the replicas amount to moves it between `starting`, `ready` and "
        "`degraded`. One that failed comes back by itself only when a node that was given up says after all how "
        "its attempt ended, and it was an interruption.",
    ),
    Lifecycle(
        "Job",
        "workload",
        workload.Record().state,
        workload.TRANSITIONS,
        "A finite command on a node. Its outcome is its newest attempt's. `Expire` is its deadline; only an operator "
        "says `Retry`, since a command may have done half of its work.",
    ),
    Lifecycle(
        "Attempt",
        "attempt",
        attempt.Record().state,
        attempt.TRANSITIONS,
        "One try at running a replica or a job on a node. The intent to start is durable before anything starts, and "
        "whoever loses track of an attempt after that can only call its outcome `unknown`. Its reservation comes "
        "back with `CleanUp`, the proof that nothing of it is left.",
    ),
    Lifecycle(
        "Lease",
        "lease",
        lease.State.HELD,
        lease.TRANSITIONS,
        "An attempt's authority to run, for a time. A lease that lapsed is never renewed: its sandbox may be gone "
        "already.",
    ),
)


def render() -> str:
    """The whole page."""
    return INTRODUCTION + "".join(map(_section, LIFECYCLES))


def _section(lifecycle: Lifecycle) -> str:
    return (
        f"\n## {lifecycle.title}\n\n{lifecycle.about} It begins as `{lifecycle.begins}` "
        f"([`{lifecycle.module}.py`](../src/ficc/domain/{lifecycle.module}.py)).\n\n"
        f"```mermaid\n{diagram(lifecycle.table)}\n```\n"
    )


if __name__ == "__main__":
    PAGE.write_text(render())
