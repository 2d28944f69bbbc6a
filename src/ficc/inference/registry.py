"""The installed adapters, by the name of their entry point."""

from __future__ import annotations

from functools import cache
from importlib.metadata import entry_points

from ficc.domain.errors import Refused
from ficc.inference.contract import API_VERSION, Adapter

GROUP = "ficc.inference"


def engines() -> tuple[str, ...]:
    """The names of the installed adapters."""
    return tuple(sorted(entry.name for entry in entry_points(group=GROUP)))


@cache
def adapter(engine: str) -> Adapter:
    """The adapter of an engine. Raises Refused `invalid_request` for one that is not installed or of
    another version."""
    for entry in entry_points(group=GROUP, name=engine):
        candidate = entry.load()()
        version = getattr(candidate, "API_VERSION", None)
        if version != API_VERSION or not isinstance(candidate, Adapter):
            raise Refused(
                "invalid_request",
                f"The adapter {engine} has API version {version}; this release takes {API_VERSION}.",
                "engine",
            )
        return candidate
    raise Refused(
        "invalid_request",
        f"No adapter named {engine} is installed; installed are {', '.join(engines())}.",
        "engine",
    )
