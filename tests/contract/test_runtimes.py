"""Runtimes, plans and what an executor says of itself; and an executor from before endpoints existed."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from typing import Any

import pytest

from contract.background import Background, background
from contract.scripted import ScriptedInstallation
from ficc.client.executor import Control
from ficc.domain import placement
from ficc.domain.errors import Refused
from ficc.domain.estimate import from_file_sizes
from ficc.domain.placement import NOTHING, Node, Snapshot
from ficc.domain.plan import Endpoint, Fence, Limits, Plan, Runtime
from ficc.executor.server import Server
from ficc.settings import CONTROLLER_UID
from support.executor import PYTHON, Session, connected, new_id
from support.executor import ExecutorProcess as Executor

pytestmark = pytest.mark.timeout(240)

MEMBERS = {"provider", "package_digest", "image_digest", "isolation", "network"}


@pytest.fixture(scope="module")
def service(scripted: ScriptedInstallation) -> Iterator[dict[str, Any]]:
    made = scripted.service("bound")
    yield made
    scripted.remove(made["id"])


# Runtimes.


@pytest.mark.contract("C-R1")
def test_a_node_offers_runtimes_and_a_plan_holds_one(
    scripted: ScriptedInstallation, service: dict[str, Any]
) -> None:
    runtime = service["spec"]["runtime"]
    assert set(runtime) == MEMBERS
    offered = [{name: each[name] for name in MEMBERS} for each in scripted.node()["runtimes"]]
    assert runtime in offered
    assert scripted.plan_of(service)["runtime"] == runtime


@pytest.mark.contract("C-R1")
@pytest.mark.parametrize(
    ("member", "value", "problem"),
    [
        ("provider", "another", "runtime_changed"),
        ("package_digest", "0" * 64, "runtime_changed"),
        ("image_digest", "sha256:" + "0" * 64, "image_not_found"),
    ],
)
def test_a_runtime_that_differs_in_one_member_is_another(
    scripted: ScriptedInstallation, member: str, value: str, problem: str
) -> None:
    spec = scripted.spec("another")
    spec["runtime"][member] = value
    (replica,) = scripted.http("POST", "/inference/preview", spec).ok()["replicas"]
    assert [found["code"] for found in replica["problems"]] == [problem]
    assert scripted.http("POST", "/inference", spec).code == "does_not_fit"


@pytest.mark.contract("C-R1", "C-R2")
@pytest.mark.parametrize(
    ("member", "value"),
    [("isolation", "none"), ("network", "host"), ("network", "bridge"), ("network", ""), ("network", True)],
)
def test_no_service_asks_for_less_isolation_or_a_network(
    scripted: ScriptedInstallation, member: str, value: Any
) -> None:
    spec = scripted.spec("open")
    spec["runtime"][member] = value
    for path in ("/inference/preview", "/inference"):
        answer = scripted.http("POST", path, spec)
        assert (answer.status, answer.param) == (422, f"runtime.{member}")


@pytest.mark.contract("C-R2")
def test_every_plan_is_without_a_network_and_so_is_the_engine(
    scripted: ScriptedInstallation, service: dict[str, Any]
) -> None:
    """Of every service that this installation has, whichever test made it."""
    plans = scripted.plans().values()
    assert plans
    assert {plan["runtime"]["network"] for plan in plans} == {"none"}
    assert scripted.report(service["id"])["interfaces"] == ["lo"]


# Plans. The bytes are written here by hand: members sorted by name, nothing spaced, what is absent left out.


LEGACY = (
    b'{"argv":["/bin/true"],"environment":{"LANG":"C.UTF-8"},"inputs":[],'
    b'"limits":{"cpu_millis":500,"gpu_devices":[],"memory_bytes":134217728,"processes":32,'
    b'"storage_bytes":8388608,"storage_inodes":256,"swap_bytes":0},'
    b'"node_id":"01arz3ndektsv4rrffq69g5fav","outputs":[],"plan_version":1,'
    b'"runtime":{"image_digest":"sha256:bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb",'
    b'"isolation":"shared-kernel","network":"none",'
    b'"package_digest":"aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",'
    b'"provider":"bubblewrap"},"sensitive":false}'
)
LEGACY_DIGEST = "d5f8353a73c334b54cdf2c58b57e8dc12ccb3381d9b1a4f28d68317be15b5a58"
JOB = Plan(
    node_id="01arz3ndektsv4rrffq69g5fav",
    runtime=Runtime("bubblewrap", "a" * 64, "sha256:" + "b" * 64),
    argv=("/bin/true",),
    environment={"LANG": "C.UTF-8"},
    limits=Limits(500, 128 << 20, 0, 32, 8 << 20, 256),
)


@pytest.mark.contract("C-R4")
def test_a_plan_without_the_newer_members_has_the_digest_it_always_had() -> None:
    assert JOB.digest == hashlib.sha256(LEGACY).hexdigest() == LEGACY_DIGEST
    assert set(json.loads(LEGACY)) == set(JOB.as_json())


@pytest.mark.contract("C-R4")
@pytest.mark.parametrize("absent", [{}, {"model_revision": None}, {"endpoint": None}])
def test_a_plan_of_before_is_read_and_written_as_it_was(absent: dict[str, None]) -> None:
    plan = Plan.from_json({**json.loads(LEGACY), **absent})
    assert plan == JOB
    assert plan.digest == LEGACY_DIGEST


@pytest.mark.contract("C-R3", "C-R4")
def test_either_of_the_newer_members_is_part_of_the_digest() -> None:
    revised = replace(JOB, model_revision="d" * 64)
    text = LEGACY.replace(b'"node_id"', b'"model_revision":"' + b"d" * 64 + b'","node_id"')
    assert revised.digest == hashlib.sha256(text).hexdigest()
    endpoint = Endpoint("unix", "/run/ficc/e.sock", (("POST", "/v1/embeddings"),), 1024, 1)
    served = replace(JOB, endpoint=endpoint)
    text = LEGACY.replace(
        b'"environment"',
        b'"endpoint":{"body_bytes_max":1024,"concurrency":1,"path_or_port":"/run/ficc/e.sock",'
        b'"routes":[["POST","/v1/embeddings"]],"transport":"unix","upload_input_ids":[]},"environment"',
    )
    assert served.digest == hashlib.sha256(text).hexdigest()


@pytest.mark.contract("C-R3")
def test_a_replicas_plan_holds_its_model_revision_and_its_endpoint(
    scripted: ScriptedInstallation, service: dict[str, Any]
) -> None:
    (replica,) = service["replicas"]
    plan = Plan.from_json(scripted.plan_of(service))
    assert plan.digest == replica["plan_digest"]
    assert plan.model_revision == replica["model_revision"]
    assert plan.endpoint is not None
    assert plan.endpoint.routes == (("POST", "/v1/chat/completions"), ("POST", "/v1/embeddings"))


# On an executor.


@pytest.fixture(scope="module")
def executor() -> Iterator[Executor]:
    with Executor.on_new_directory() as executor:
        yield executor


@pytest.fixture
async def session(executor: Executor) -> AsyncIterator[Session]:
    async with connected(executor) as session:
        yield session
        await session.end_all()


@pytest.mark.root
@pytest.mark.contract("C-R4", "C-R7")
async def test_an_executor_runs_a_plan_of_before_under_its_digest(session: Session) -> None:
    document = json.loads(LEGACY)
    document |= {"argv": [PYTHON, "-IBc", "print('ran')"], "node_id": session.hello["executor_id"]}
    document["runtime"] = session.runtime.as_json()
    digest = hashlib.sha256(json.dumps(document, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
    fence = await session.run(Plan.from_json(document), fence=Fence(new_id(), 1, digest))
    assert (await session.until(fence, "released"))["outcome"] == "succeeded"
    assert "ran" in await session.output(fence)


@pytest.mark.root
@pytest.mark.contract("C-R3")
@pytest.mark.parametrize(
    "change", [{"concurrency": 65}, {"body_bytes_max": 2 << 20}, {"routes": (("POST", "/v1/x"),)}]
)
async def test_an_endpoint_contract_is_fixed_by_the_plans_digest(
    session: Session, change: dict[str, Any]
) -> None:
    plan = session.replica()
    assert plan.endpoint is not None
    other = replace(plan, endpoint=replace(plan.endpoint, **change))
    with pytest.raises(Refused, match="fenced"):
        await session.admit(other, Fence(new_id(), 1, plan.digest))


@pytest.mark.root
@pytest.mark.contract("C-R2")
@pytest.mark.parametrize("network", ["host", ""])
async def test_an_executor_launches_nothing_with_a_network(session: Session, network: str) -> None:
    plan = session.plan("pass", runtime={**session.runtime.as_json(), "network": network})
    with pytest.raises(Refused, match="runtime_changed"):
        await session.admit(plan)


@pytest.mark.contract("C-R5")
def test_a_snapshot_says_endpoint_version_1(scripted: ScriptedInstallation) -> None:
    assert snapshot_of(scripted)["endpoint_version"] == 1
    assert scripted.node()["endpoint_version"] == 1


def snapshot_of(installation: ScriptedInstallation) -> dict[str, Any]:
    """What its executor answers on its socket."""

    async def ask() -> dict[str, Any]:
        control = Control()
        await control.open(installation.executor_socket, "control")
        try:
            return dict((await control.call("snapshot"))["snapshot"])
        finally:
            control.close()

    return asyncio.run(ask())


# An executor of before.


class Older:
    """Speaks the executor's protocol for another installation, with the snapshot of an executor that had no
    endpoints: everything that the real one says but `endpoint_version`."""

    def __init__(
        self, installation: ScriptedInstallation, loop: Background, snapshot: dict[str, Any]
    ) -> None:
        self.snapshot = {**snapshot, "executor_id": new_id()}
        del self.snapshot["endpoint_version"]
        self.asked: list[str] = []
        self._loop = loop
        hello = {name: self.snapshot[name] for name in ("executor_id", "boot_id", "release")}
        self._server = Server(
            hello=hello,
            peers=frozenset({CONTROLLER_UID}),
            dispatch=self._dispatch,
            find_gate=self._find_gate,
            snapshot=lambda: {"snapshot": self.snapshot, "attempts": []},
        )
        installation.executor_socket.parent.mkdir(exist_ok=True)
        self._listener = loop.run(self._server.listen(str(installation.executor_socket)))

    async def _dispatch(self, operation: str, call: dict[str, Any]) -> dict[str, Any]:
        if operation != "renew":  # an empty one asks for a sign of life
            self.asked.append(operation)
        raise Refused("not_found", "This executor answers nothing.")

    def _find_gate(self, fence: Fence) -> Any:
        self.asked.append("open")
        raise Refused("attempt_unknown", "This executor has no endpoints.")

    def upgrade(self) -> None:
        """Says from now on what a newer one says."""
        self.snapshot["endpoint_version"] = 1
        self._loop.call(lambda: self._server.publish({"snapshot": self.snapshot}))

    def close(self) -> None:
        self._loop.call(self._listener.close)


@pytest.fixture(scope="module")
def older(
    scripted: ScriptedInstallation, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[ScriptedInstallation, Older]]:
    made = ScriptedInstallation(tmp_path_factory.mktemp("older"))
    with background() as loop:
        executor = Older(made, loop, snapshot_of(scripted))
        try:
            made.start("controller")
            yield made, executor
        finally:
            made.stop()
            executor.close()


@pytest.mark.contract("C-R6")
def test_an_older_executor_gets_no_inference(older: tuple[ScriptedInstallation, Older]) -> None:
    installation, executor = older
    node = installation.node()
    assert (node["connected"], node["endpoint_version"]) == (True, None)
    spec = installation.spec("older")
    (replica,) = installation.http("POST", "/inference/preview", spec).ok()["replicas"]
    assert [problem["code"] for problem in replica["problems"]] == ["endpoint_unsupported"]
    answer = installation.http("POST", "/inference", spec)
    assert (answer.status, answer.code) == (409, "does_not_fit")
    assert answer.json["error"]["problems"][0]["code"] == "endpoint_unsupported"
    assert installation.http("GET", "/inference").ok()["items"] == []
    assert executor.asked == []


@pytest.mark.contract("C-R7")
def test_an_older_executor_takes_jobs(older: tuple[ScriptedInstallation, Older]) -> None:
    _, executor = older
    snapshot = Snapshot.from_json(executor.snapshot)
    job = replace(JOB, node_id=executor.snapshot["executor_id"], runtime=snapshot.runtimes[0])
    node = Node(job.node_id, "older", True, snapshot, NOTHING)
    (verdict,) = placement.place([(job, from_file_sizes(0))], {node.id: node})
    assert verdict.fits, verdict.problems


@pytest.mark.contract("C-R6")
def test_nothing_else_stood_in_its_way(older: tuple[ScriptedInstallation, Older]) -> None:
    installation, executor = older
    executor.upgrade()
    installation.until(lambda: installation.node()["endpoint_version"] == 1, "the new snapshot is known")
    preview = installation.http("POST", "/inference/preview", installation.spec("newer")).ok()
    assert preview["accepted"], preview
