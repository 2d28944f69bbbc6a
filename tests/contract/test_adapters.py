"""Engine adapters: one that was installed as a distribution of its own beside the built-in one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from contract.scripted import LIMITS, ScriptedInstallation
from ficc.inference import registry
from ficc.inference.adapters.llama_cpp import LlamaCpp
from support import specifications

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def service(scripted: ScriptedInstallation) -> Iterator[dict[str, Any]]:
    made = scripted.service("adapted", concurrency=3)
    yield made
    scripted.remove(made["id"])


# Installed adapters.


@pytest.mark.contract("C-D1")
def test_an_entry_point_adds_an_engine(scripted: ScriptedInstallation, service: dict[str, Any]) -> None:
    assert service["spec"]["engine"] == "scripted"
    assert scripted.chat(service["id"], messages=[{}]).ok()["model"] == "adapted"


@pytest.mark.contract("C-D1")
def test_without_an_entry_point_there_is_no_such_engine(scripted: ScriptedInstallation) -> None:
    answer = scripted.http("POST", "/inference/preview", scripted.spec("none", engine="not_installed"))
    assert (answer.status, answer.code, answer.param) == (422, "invalid_request", "engine")
    assert "scripted" in answer.json["error"]["message"]  # what there is, is said


@pytest.mark.contract("C-D2")
@pytest.mark.parametrize("engine", ["of_another_version", "without_a_version"])
@pytest.mark.parametrize("path", ["/inference/preview", "/inference"])
def test_an_adapter_without_this_api_version_is_refused(
    scripted: ScriptedInstallation, engine: str, path: str
) -> None:
    answer = scripted.http("POST", path, scripted.spec("outdated", engine=engine))
    assert (answer.status, answer.code, answer.param) == (422, "invalid_request", "engine")
    assert "1" in answer.json["error"]["message"]


@pytest.mark.contract("C-D3")
def test_job_is_called_with_these_four_and_what_it_returns_is_run(
    scripted: ScriptedInstallation, service: dict[str, Any]
) -> None:
    """The adapter hands its arguments to the engine, and the engine tells of them."""
    call = scripted.report(service["id"])["call"]
    assert call["positional"] == ["Specification", "ModelRecord", "Placement", "tuple"]
    assert call["named"] == []
    assert call["specification"] == service["spec"]
    model = scripted.http("GET", f"/models/{service['spec']['model_id']}").ok()
    assert call["model"] == [model["id"], model["revision"], model["manifest"]["name"]]
    assert call["placement"] == service["spec"]["placements"][0]
    (file,) = model["files"]
    assert call["inputs"] == [{"id": "model-0", **{name: file[name] for name in ("name", "bytes", "sha256")}}]


@pytest.mark.contract("C-D4")
def test_the_adapter_decides_command_endpoint_and_inputs_of_the_plan(
    scripted: ScriptedInstallation, service: dict[str, Any]
) -> None:
    plan = scripted.plan_of(service)
    assert plan["argv"] == ["/usr/bin/python3", "-IB", "/inputs/engine.gguf", "/run/ficc/engine.sock"]
    assert plan["endpoint"]["concurrency"] == 3
    assert {name: plan["limits"][name] for name in LIMITS} == LIMITS
    assert plan["model_revision"] == service["replicas"][0]["model_revision"]


@pytest.mark.contract("C-D4", "C-D6")
def test_the_built_in_adapter_turns_options_into_its_engines_flags() -> None:
    specification = specifications.specification(context=1000, concurrency=3)
    record = specifications.record(specifications.gguf(["chat"]))
    adapter = registry.adapter("llama_cpp")
    assert isinstance(adapter, LlamaCpp)
    job = adapter.job(specification, record, specification.placements[0], ())
    flags = dict(zip(job.argv[1:], job.argv[2:], strict=False))
    assert flags["--ctx-size"] == "3000"
    assert flags["--parallel"] == "3"
    assert flags["--alias"] == specification.alias
    assert flags["--model"] == "/inputs/tiny.gguf"
    assert job.model_revision == record.revision


# Who owns processes.


@pytest.mark.contract("C-D5")
def test_the_engine_is_a_process_of_the_executor(
    scripted: ScriptedInstallation, service: dict[str, Any]
) -> None:
    def engines(name: str) -> list[str]:
        processes = psutil.Process(scripted.processes[name].pid).children(recursive=True)
        return [" ".join(p.cmdline()) for p in processes if "/inputs/engine.gguf" in p.cmdline()]

    assert engines("executor")
    assert not engines("controller")


WATCHED = """
import json, sys
sys.path.insert(0, sys.argv[1])
from ficc.inference import registry
from support import specifications

adapter = registry.adapter("llama_cpp")
specification = specifications.specification()
record = specifications.record(specifications.gguf(["chat", "embeddings"]))
happened = []
sys.addaudithook(lambda event, arguments: happened.append(event))
job = adapter.job(specification, record, specification.placements[0], ())
job.plan(specification.placements[0].node_id, specification.runtime.to_domain())
print(json.dumps(sorted(set(happened))))
"""
AUDITED = ("socket.", "subprocess.", "os.", "open", "urllib.", "http.", "shutil.", "pty.", "ctypes.")


@pytest.mark.contract("C-D5", "C-D10")
def test_making_a_job_starts_nothing_opens_nothing_and_calls_nobody() -> None:
    """By the interpreter's own audit events (PEP 578)."""
    command = [sys.executable, "-c", WATCHED, str(Path(__file__).parents[1])]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    assert [event for event in json.loads(done.stdout) if event.startswith(AUDITED)] == []


# Images.


@pytest.mark.contract("C-D9")
@pytest.mark.parametrize("engine", ["llama_cpp", "scripted"])
def test_an_image_that_is_not_installed_is_refused(scripted: ScriptedInstallation, engine: str) -> None:
    spec = scripted.spec("imageless", engine=engine)
    spec["runtime"]["image_digest"] = "sha256:" + "0" * 64
    preview = scripted.http("POST", "/inference/preview", spec).ok()
    assert [p["code"] for p in preview["replicas"][0]["problems"]] == ["image_not_found"]
    answer = scripted.http("POST", "/inference", spec)
    assert (answer.status, answer.code) == (409, "does_not_fit")


@pytest.mark.contract("C-D10")
def test_choosing_an_engine_brings_no_image(scripted: ScriptedInstallation) -> None:
    """This installation has no image with llama.cpp in it, and has none after that engine was asked for."""
    images = os.path.realpath(scripted.directory / "executor" / "images")
    before = sorted(os.listdir(images)), scripted.node()["runtimes"]
    assert not [runtime for runtime in before[1] if "llama" in runtime["name"]]
    spec = scripted.spec("downloads", engine="llama_cpp", executable="/opt/engine/bin/llama-server")
    made = scripted.http("POST", "/inference", spec).ok(202)
    failed = scripted.settled(made["id"], "failed", "ready")
    assert failed["state"] == "failed"  # the executable is not in the image that was named
    assert failed["reason"]["code"] in ("launch_failed", "engine_exited")
    scripted.remove(made["id"])
    assert (sorted(os.listdir(images)), scripted.node()["runtimes"]) == before
