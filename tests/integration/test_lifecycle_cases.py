"""Cases of services, nodes and leases that operators of other systems reported, from end to end: real controller, real
executor, engines in sandboxes."""

from __future__ import annotations

import asyncio
import mmap
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import pytest

from contract.scripted import LIMITS, Open, ScriptedInstallation
from ficc.client.api import Api
from ficc.client.errors import ApiError
from support.engine_answers import signal_engine
from support.executor import leftovers

pytestmark = [pytest.mark.root, pytest.mark.timeout(180)]

HUNGRY_BYTES = 1 << 30
PATCH = """\
import sys
if "ficc.controller" in sys.orig_argv:
    import ficc.controller.reconcilers.reconciler as reconciler
    reconciler.TICK_SECONDS = 3600.0
"""


@pytest.fixture(scope="module")
def installation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedInstallation]:
    """Its controller looks again only when it is told of something, or once an hour."""
    directory = tmp_path_factory.mktemp("cases")
    patch = directory / "patch"
    patch.mkdir()
    (patch / "sitecustomize.py").write_text(PATCH)
    for path in (patch, *patch.iterdir()):
        path.chmod(0o755)
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("PYTHONPATH", str(patch), prepend=os.pathsep)
        with ScriptedInstallation(directory) as made:
            yield made


def test_l1_a_killed_engine_is_known_by_event_and_not_by_looking(installation: ScriptedInstallation) -> None:
    """The controller's own look comes once an hour here: all that it does, it does because it was told."""
    service = installation.service("two", replicas=2)
    stream = Open(installation, service["id"], do="hang", stream=True)
    assert stream.answer().status == 200
    first, second = (one["attempt_id"] for one in service["replicas"])
    signal_engine(first, signal.SIGKILL)
    degraded = installation.settled(service["id"], "degraded")
    ended, other = degraded["replicas"]
    assert (ended["attempt"], ended["outcome"]) in ((1, "failed"), (2, None))  # or it is tried again already
    assert (other["attempt_id"], other["state"]) == (second, "ready")
    assert [installation.chat(service["id"]).status for _ in range(4)] == [200] * 4
    log = installation.http("GET", f"/inference/{service['id']}/logs", replica="0", attempt="1").ok()
    assert log["attempt_id"] == first
    stream.close()
    installation.remove(service["id"])


def test_l8_of_actions_at_the_same_moment_one_wins(installation: ScriptedInstallation) -> None:
    """Eight callers, one revision: one of them acts, the others are told that it is not theirs any more."""
    service = installation.service("one")

    async def act(api: Api, action: str) -> tuple[int, str]:
        body = {"revision": service["revision"]}
        try:
            await api.call("POST", f"/inference/{service['id']}/control/{action}", body)
        except ApiError as error:
            return error.status, error.code
        return 202, ""

    async def together(api: Api) -> list[tuple[int, str]]:
        return await asyncio.gather(*(act(api, action) for action in ["stop", "drain"] * 4))

    answers = sorted(installation.run(together))
    assert answers == [(202, ""), *[(409, "revision_conflict")] * 7]
    installation.remove(service["id"])


def test_l11_a_gpu_that_is_not_there_is_refused(installation: ScriptedInstallation) -> None:
    """By the name of the device, in the preview and on submission; nothing is created and nothing runs on the CPU."""
    node_id = installation.node()["id"]
    placement = {"node_id": node_id, "limits": {**LIMITS, "gpu_devices": ["GPU-gone"]}}
    spec = installation.spec("gpu", placements=[placement])
    preview = installation.http("POST", "/inference/preview", spec).ok()
    problems = preview["replicas"][0]["problems"]
    missing = [one for one in problems if one["code"] == "gpu_missing"]
    assert "GPU-gone" in missing[0]["message"]
    refused = installation.http("POST", "/inference", spec)
    assert (refused.status, refused.code) == (409, "does_not_fit")
    assert "GPU-gone" in refused.json["error"]["message"]
    assert installation.http("GET", "/inference").ok()["items"] == []


def test_l18_an_engine_that_resists_is_gone_before_its_release(installation: ScriptedInstallation) -> None:
    """Every process of it, though what it forked ignores SIGTERM and left its session."""
    service = installation.service("one")
    (attempt_id,) = (one["attempt_id"] for one in service["replicas"])
    script = (
        "import os, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "[os.fork() or os.setsid() for _ in range(3)]; time.sleep(600)"
    )
    stream = Open(installation, service["id"], do="fork", script=script, stream=True)
    installation.until(lambda: len(processes(attempt_id)) >= 8, "it has forked")
    installation.control(service["id"], "stop").ok(202)

    def released() -> bool:
        record = installation.record(service["id"])["replicas"][0]
        if not record["released"]:
            return False
        assert leftovers(attempt_id) == []
        return True

    installation.until(released, "it is released")
    stream.close()
    installation.remove(service["id"])


def processes(attempt_id: str) -> list[str]:
    return [found for found in leftovers(attempt_id) if found.startswith("/proc/")]


@contextmanager
def hungry() -> Iterator[None]:
    """Another program of this machine that takes memory."""
    taken = mmap.mmap(-1, HUNGRY_BYTES)
    try:
        for at in range(0, HUNGRY_BYTES, mmap.PAGESIZE):
            taken[at] = 1
        yield
    finally:
        taken.close()


def available(installation: ScriptedInstallation) -> int:
    """Of memory, once it was measured anew."""
    return int(installation.node()["available"]["memory_bytes"])


def test_l12_memory_that_others_took_is_not_given_away(installation: ScriptedInstallation) -> None:
    """Preview, submission and start refuse what fitted a moment ago, with the numbers."""
    wanted = available(installation) - HUNGRY_BYTES // 2
    placement = {"node_id": installation.node()["id"], "limits": {**LIMITS, "memory_bytes": wanted}}
    spec = installation.spec("large", placements=[placement])
    assert installation.http("POST", "/inference/preview", spec).ok()["accepted"]
    made = installation.http("POST", "/inference", spec).ok(202)
    stopped = installation.stopped(made["id"])
    installation.until(lambda: available(installation) > wanted, "it is free again")
    with hungry():
        installation.until(lambda: available(installation) < wanted, "it was measured")
        preview = installation.http("POST", "/inference/preview", {**spec, "alias": "other"}).ok()
        assert not preview["accepted"]
        (problem,) = preview["replicas"][0]["problems"]
        assert problem["code"] == "does_not_fit"
        assert "wanted" in problem["message"]
        assert "available (memory_bytes)" in problem["message"]
        assert preview["replicas"][0]["available"]["memory_bytes"] < wanted
        refused = installation.http("POST", "/inference", {**spec, "alias": "other"})
        assert (refused.status, refused.code) == (409, "does_not_fit")
        started = installation.control(made["id"], "start")
        assert (started.status, started.code) == (409, "does_not_fit")
        assert "available (memory_bytes)" in started.json["error"]["message"]
        after = installation.record(made["id"])
        assert (after["state"], after["generation"]) == (stopped["state"], stopped["generation"])
    installation.until(lambda: available(installation) > wanted, "it is free again")
    installation.control(made["id"], "start").ok(202)
    installation.remove(made["id"])


def test_l13_an_executor_accepts_nothing_from_a_network(installation: ScriptedInstallation) -> None:
    """It and its watchdog hold no TCP or UDP socket at all, with an engine at work; they listen under one name."""
    service = installation.service("one")
    stream = Open(installation, service["id"], do="hang", stream=True)
    assert stream.answer().status == 200
    executor = psutil.Process(installation.processes["executor"].pid)
    family = [executor, *(one for one in executor.children() if "ficc.executor.watchdog" in one.cmdline())]
    assert len(family) == 2
    for process in family:
        assert process.net_connections(kind="inet") == []
    listening = {one.laddr for one in executor.net_connections(kind="unix") if one.laddr}
    assert listening == {f"{installation.executor_socket}.new"}  # bound so, and renamed once it listened
    stream.close()
    installation.remove(service["id"])
