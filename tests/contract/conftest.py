"""The marker that ties tests to statements, an installation with a scripted engine, and a service of the real one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from contract.scripted import ScriptedInstallation
from contract.statements import BY_ID
from support.http import Http, http_of
from support.installation import Installation


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


# The real engine with a real small model, for the tests of one module.


@pytest.fixture(scope="module")
def service(installation: Installation, model_file: Path) -> dict[str, Any]:
    """SmolLM2, for chat, completions and embeddings."""
    model = installation.add_model(model_file, "smollm2", ["chat", "completions", "embeddings"])
    made = http_of(installation)("POST", "/inference", installation.specification("assistant", model["id"]))
    found = installation.settled(made.ok(202)["id"], "ready", "failed")
    assert found["state"] == "ready", found["reason"]
    return found


@pytest.fixture(scope="module")
def http(installation: Installation, service: dict[str, Any]) -> Http:
    """Somebody with a token of the service."""
    token = http_of(installation)("POST", f"/inference/{service['id']}/tokens", {"lifetime": 3600}).ok(201)
    return Http(installation.origin, token["token"])


@pytest.fixture(scope="module")
def client(installation: Installation, service: dict[str, Any], http: Http) -> OpenAI:
    return OpenAI(base_url=f"{installation.origin}{service['endpoint']}", api_key=http.token, max_retries=0)


@pytest.fixture
def path(service: dict[str, Any]) -> str:
    return f"/inference/{service['id']}/v1"
