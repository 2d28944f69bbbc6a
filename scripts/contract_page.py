"""Render docs/contract.md: each statement of the inference contract, its tests, and whether it is held. With
--check, say instead whether that page is up to date.

The tests are those of tests/contract, as pytest collects them. A statement is held if it has tests and all of them
are expected to pass; CI runs them. A statement that this release covers must have a test, and one that is left for
later must have none.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "contract.md"
FOLDER = "tests/contract"
sys.path.insert(0, str(ROOT / "tests"))

from contract.statements import SECTIONS, STATEMENTS, Statement  # noqa: E402  # from the tests beside us

INTRODUCTION = """\
# The inference contract and its tests

What the contract asks for, statement by statement in our own words, with the tests that hold us to it. They run
against real processes: a controller over HTTP, an executor, an engine in a sandbox. The states are computed from the
tests, so a statement is *held* only while it has tests and none of them is expected to fail. `make docs` writes this
page, and a test fails when it is out of date.
"""


@dataclass
class Tests:
    """What claims one statement: tests by file and name, and why any of them is expected to fail."""

    names: list[tuple[str, str]] = field(default_factory=list)
    failing: list[str] = field(default_factory=list)

    def add(self, file: str, name: str, reasons: Iterable[str]) -> None:
        if (file, name) not in self.names:
            self.names.append((file, name))
        self.failing += [reason for reason in reasons if reason not in self.failing]


class Collector:
    """A pytest plugin that notes which test claims which statement."""

    def __init__(self) -> None:
        self.found: dict[str, Tests] = {}

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        for item in session.items:
            name = getattr(item, "originalname", item.name)
            reasons = [str(marker.kwargs.get("reason", "")) for marker in item.iter_markers("xfail")]
            for marker in item.iter_markers("contract"):
                for statement_id in marker.args:
                    self.found.setdefault(statement_id, Tests()).add(item.path.name, name, reasons)


def collected() -> Mapping[str, Tests]:
    """By statement. Raises SystemExit with pytest's words if the tests cannot be collected."""
    collector, said = Collector(), io.StringIO()
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # half of the time would go into plugins
    plugins = ["-p", "no:cacheprovider", "-p", "pytest_asyncio.plugin", "-p", "pytest_timeout"]
    arguments = ["--collect-only", "-q", *plugins, "--rootdir", str(ROOT), str(ROOT / FOLDER)]
    with contextlib.redirect_stdout(said):
        status = pytest.main(arguments, plugins=[collector])
    if status != pytest.ExitCode.OK:
        raise SystemExit(said.getvalue())
    return collector.found


def problems(statements: Sequence[Statement], found: Mapping[str, Tests]) -> list[str]:
    """What keeps the page from being true."""
    return [
        *(f"{s.id} has no test in {FOLDER}" for s in statements if s.later is None and s.id not in found),
        *(f"{s.id} is left for later and has a test" for s in statements if s.later and s.id in found),
        *(f"{name}: there is no such statement" for name in sorted(set(found) - {s.id for s in statements})),
    ]


def render(statements: Sequence[Statement], found: Mapping[str, Tests]) -> str:
    """The whole page."""
    states = [_state(statement, found.get(statement.id, Tests())) for statement in statements]
    held, later = states.count("held"), sum(statement.later is not None for statement in statements)
    summary = f"Of {len(states)} statements {held} are held, {later} are left for later releases"
    if broken := len(states) - held - later:
        summary += f" and {broken} not held"
    lines = [INTRODUCTION, f"{summary}."]
    for title in SECTIONS.values():
        lines += ["", f"## {title}", "", "| | statement | tests | state |", "|---|---|---|---|"]
        for statement, state in zip(statements, states, strict=True):
            if statement.section == title:
                tests = "<br>".join(_link(*name) for name in found.get(statement.id, Tests()).names)
                lines.append(f"| {statement.id} | {statement.text} | {tests} | {state} |")
    return "\n".join(lines) + "\n"


def _state(statement: Statement, tests: Tests) -> str:
    if statement.later is not None:
        return f"not yet (later: {statement.later})"
    return f"**not held**: {'; '.join(tests.failing)}" if tests.failing else "held"


def _link(file: str, name: str) -> str:
    return f"[{file}](../{FOLDER}/{file})::`{name}`"


def main() -> None:
    found = collected()
    if wrong := problems(STATEMENTS, found):
        raise SystemExit("\n".join(wrong))
    text = render(STATEMENTS, found)
    if "--check" not in sys.argv[1:]:
        PAGE.write_text(text)
    elif not PAGE.exists() or PAGE.read_text() != text:
        raise SystemExit(f"{PAGE} is out of date; run `make docs` and commit what it writes.")


if __name__ == "__main__":
    main()
