"""The page of lifecycles is what the tables say."""

from __future__ import annotations

from types import ModuleType

import pytest

from ficc.domain import acquisition, attempt, lease, service, upload, workload
from support import scripts

SCRIPT = scripts.SCRIPTS / "lifecycle_diagrams.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return scripts.load("lifecycle_diagrams")


def test_the_committed_page_is_what_the_script_renders(script: ModuleType) -> None:
    assert script.PAGE.read_text() == script.render(), "run python scripts/lifecycle_diagrams.py"


def test_every_lifecycle_is_drawn_with_every_state(script: ModuleType) -> None:
    page = script.render()
    modules = (acquisition, attempt, lease, service, upload, workload)
    assert {lifecycle.module for lifecycle in script.LIFECYCLES} == {
        m.__name__.split(".")[-1] for m in modules
    }
    for lifecycle in script.LIFECYCLES:
        drawn = page.split(f"## {lifecycle.title}\n")[1].split("```")[1]
        for state in type(lifecycle.begins):
            assert f"    {state} --> " in drawn or f" --> {state}: " in drawn
