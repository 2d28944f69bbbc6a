"""Fixtures that many tests share, and how strict a run in CI is."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from support.executor import has_delegated_group
from support.installation import Installation, llama_images
from support.model import smollm2
from support.source import Source

settings.register_profile(
    "here", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("here")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that need root, or control groups of their own, are skipped without; everything else runs."""
    if os.geteuid() != 0:
        delegated = has_delegated_group()
        for item in items:
            if item.get_closest_marker("root"):
                item.add_marker(pytest.mark.skip(reason="needs root"))
            elif item.get_closest_marker("sandboxes") and not delegated:
                item.add_marker(pytest.mark.skip(reason="needs root, or a delegated control group"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """In CI a skipped test is a failure: what it needs was to be installed."""
    report = yield
    if os.environ.get("CI") and report.skipped and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = f"skipped in CI: {report.longrepr}"
    return report


@pytest.fixture(scope="session")
def model_file() -> Path:
    """SmolLM2-135M-Instruct, GGUF."""
    return smollm2()


@pytest.fixture(scope="session")
def images() -> Path:
    """A directory of imported images that holds the real engine's."""
    return llama_images()


@pytest.fixture(scope="module")
def installation(tmp_path_factory: pytest.TempPathFactory, images: Path) -> Iterator[Installation]:
    """A running installation for the tests of one module."""
    with Installation(tmp_path_factory.mktemp("ficc"), images=images) as made:
        yield made


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Source]:
    """A scripted HTTPS source for the tests of one module."""
    with Source(tmp_path_factory.mktemp("source")) as made:
        yield made
