"""The marker that ties tests to statements, and an installation with a scripted engine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from contract.scripted import ScriptedInstallation
from contract.statements import BY_ID


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "contract(*ids): statements of the contract that the test holds")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for marker in item.iter_markers("contract"):
            unknown = set(marker.args) - set(BY_ID)
            if unknown:
                raise pytest.UsageError(f"{item.nodeid}: no statement {', '.join(sorted(unknown))}")


@pytest.fixture(scope="session")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedInstallation]:
    """Running, and shared: a test removes the services that it made, and ends no process."""
    with ScriptedInstallation(tmp_path_factory.mktemp("ficc")) as made:
        yield made
