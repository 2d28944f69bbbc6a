"""The installation that the clients are tried on, and the marker of those that CI tries."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from clients.running import Outside, Runs
from contract.scripted import ScriptedInstallation


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "clients_ci: of a client that `make clients` tries without ALL=1")


@pytest.fixture(scope="session")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedInstallation]:
    with ScriptedInstallation(tmp_path_factory.mktemp("ficc")) as made:
        yield made


@pytest.fixture(scope="session")
def runs(scripted: ScriptedInstallation, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    """What became of each client's program, which runs when the first test asks; the results are kept."""
    with Outside() as outside:
        made = Runs(scripted, outside, tmp_path_factory.mktemp("clients"))
        yield made
        made.results.write()
