"""The registry: built-in adapters and anyone's come through the same door, distributions installed for real."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ficc.domain.errors import Refused
from ficc.inference import registry
from ficc.inference.adapters.llama_cpp import LlamaCpp

JOB = "def job(self, specification, model_record, placement, immutable_input_references): return None"
Install = Callable[[str, str], None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Installs a distribution with one adapter, by its name and the body of its class."""

    def installed(name: str, body: str) -> None:
        (tmp_path / f"{name}_adapter.py").write_text(f"class Engine:\n    {body}\n")
        metadata = tmp_path / f"{name}_adapter-1.0.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}-adapter\nVersion: 1.0\n")
        (metadata / "entry_points.txt").write_text(f"[ficc.inference]\n{name} = {name}_adapter:Engine\n")

    monkeypatch.syspath_prepend(str(tmp_path))
    registry.adapter.cache_clear()
    yield installed
    registry.adapter.cache_clear()
    for path in tmp_path.glob("*.py"):
        sys.modules.pop(path.stem, None)


def refusal(engine: str) -> Refused:
    with pytest.raises(Refused) as caught:
        registry.adapter(engine)
    assert (caught.value.code, caught.value.param) == ("invalid_request", "engine")
    return caught.value


def test_the_built_in_adapter_is_an_entry_point() -> None:
    assert "llama_cpp" in registry.engines()
    assert isinstance(registry.adapter("llama_cpp"), LlamaCpp)


def test_an_engine_that_is_not_installed_is_refused_with_what_is() -> None:
    assert "llama_cpp" in refusal("no_such_engine").message


def test_anyones_adapter_is_found_and_made_once(install: Install) -> None:
    install("thirdparty", f"API_VERSION = 1\n    {JOB}")
    assert "thirdparty" in registry.engines()
    adapter = registry.adapter("thirdparty")
    assert adapter.API_VERSION == 1
    assert registry.adapter("thirdparty") is adapter


@pytest.mark.parametrize("body", [f"API_VERSION = 2\n    {JOB}", JOB, f"API_VERSION = '1'\n    {JOB}"])
def test_an_adapter_of_another_version_is_refused(install: Install, body: str) -> None:
    install("outdated", body)
    assert "this release takes 1" in refusal("outdated").message


def test_an_adapter_without_a_job_is_refused(install: Install) -> None:
    install("idle", "API_VERSION = 1")
    refusal("idle")
