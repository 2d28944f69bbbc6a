"""An executor over its socket: who may speak, what is admitted, how attempts begin and end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from ficc import clock
from ficc.client.executor import Control, fence_document
from ficc.domain.errors import Refused
from ficc.domain.plan import COUNTED, Endpoint, Fence, Plan
from ficc.executor import logs
from ficc.executor.attempts import QUARANTINE_SECONDS
from ficc.protocol import executor_wire as wire
from ficc.protocol.executor_wire import Kind
from ficc.settings import CONTROLLER_UID
from support.executor import (
    LIMITS,
    PATIENCE_SECONDS,
    ROUTE,
    SOCKET,
    ExecutorProcess,
    Session,
    cgroups_named,
    connected,
    new_id,
    wait_for,
)

pytestmark = [pytest.mark.root, pytest.mark.timeout(180)]

SLEEP = "import time; print('up', flush=True); time.sleep(600)"
STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); " + SLEEP


@pytest.fixture(scope="module")
def executor() -> Iterator[ExecutorProcess]:
    with ExecutorProcess.on_new_directory() as executor:
        yield executor


@pytest.fixture
async def session(executor: ExecutorProcess) -> AsyncIterator[Session]:
    """Connected; afterwards every attempt is ended, and the capacity must be whole again."""
    async with connected(executor) as session:
        yield session
        await session.end_all()
        snapshot = await session.control.call("snapshot")
        assert snapshot["attempts"] == []


# The connection.


def greet(executor: ExecutorProcess, document: Any, kind: Kind = Kind.HELLO) -> bytes:
    """What comes back for a first frame until the executor closes or half a second passed."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(executor.socket))
        connection.settimeout(0.5)
        connection.sendall(wire.encode(kind, 0, json.dumps(document).encode()))
        answer = b""
        with contextlib.suppress(TimeoutError):
            while more := connection.recv(65536):
                answer += more
            answer += b"closed"
        return answer


def test_hello(executor: ExecutorProcess) -> None:
    answer = greet(executor, {"versions": [7, 1], "role": "control"})
    (frame,) = wire.Decoder().feed(answer)
    assert frame.kind == Kind.HELLO
    assert frame.json["version"] == 1
    assert frame.json["executor_id"] == executor.executor_id
    assert frame.json["boot_id"] == clock.boot_id()
    assert frame.json["endpoint_version"] == 1


def test_hello_without_a_common_version(executor: ExecutorProcess) -> None:
    answer = greet(executor, {"versions": [2], "role": "control"})
    assert answer.endswith(b"closed")
    (frame,) = wire.Decoder().feed(answer.removesuffix(b"closed"))
    assert wire.refusal(frame).code == "invalid_request"


@pytest.mark.parametrize(
    ("document", "kind"),
    [
        ({"versions": [1], "role": "owner"}, Kind.HELLO),
        ({"versions": [1], "role": ["control"]}, Kind.HELLO),
        ([1, 2], Kind.HELLO),
        ({"op": "snapshot"}, Kind.CALL),
        ({}, Kind.EVENT),
    ],
)
def test_what_does_not_begin_a_connection(executor: ExecutorProcess, document: Any, kind: Kind) -> None:
    assert greet(executor, document, kind) == b"closed"


@pytest.mark.parametrize("versions", [None, 1, "1", {"1": 1}])
def test_versions_that_are_no_list(executor: ExecutorProcess, versions: Any) -> None:
    assert greet(executor, {"versions": versions, "role": "control"}).endswith(b"closed")


@pytest.mark.parametrize(("uid", "welcome"), [(12345, False), (CONTROLLER_UID, True), (0, True)])
def test_peers_are_known_by_their_account(executor: ExecutorProcess, uid: int, welcome: bool) -> None:
    script = (
        "import os, socket, sys\n"
        "os.setgroups([]); os.setresgid(*[int(sys.argv[2])] * 3); os.setresuid(*[int(sys.argv[2])] * 3)\n"
        "s = socket.socket(socket.AF_UNIX); s.settimeout(10); s.connect(sys.argv[1])\n"
        "try: s.sendall(bytes.fromhex(sys.argv[3])); print(len(s.recv(1000)))\n"
        "except ConnectionError: print(0)\n"
    )
    hello = wire.encode_json(Kind.HELLO, 0, {"versions": [1], "role": "control"})
    call = wire.encode_json(Kind.CALL, 1, {"op": "snapshot"})
    arguments = [str(executor.socket), str(uid), (hello + call).hex()]
    answer = subprocess.run([sys.executable, "-Ic", script, *arguments], capture_output=True, text=True)
    assert answer.stderr == ""
    assert (int(answer.stdout) > 0) is welcome


async def test_no_executor() -> None:
    with pytest.raises(Refused, match=r"No executor answers at /nowhere/x: .*No such file"):
        await Control().open(Path("/nowhere/x"), "control")


async def test_snapshot(session: Session, executor: ExecutorProcess) -> None:
    answer = await session.control.call("snapshot")
    snapshot = answer["snapshot"]
    assert snapshot["endpoint_version"] == 1
    assert snapshot["executor_id"] == executor.executor_id
    assert snapshot["accounts"] == "dedicated"
    assert snapshot["unenforceable"] == {}
    assert set(snapshot["capacity"]) == set(snapshot["free"]) == {*COUNTED, "gpu_devices"}
    assert 0 < snapshot["free"]["memory_bytes"] <= snapshot["capacity"]["memory_bytes"]
    assert session.runtime.network == "none"
    assert answer["attempts"] == []


async def test_measurements_come_by_themselves(session: Session) -> None:
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not any("snapshot" in event for event in session.events):
            await asyncio.sleep(0.05)


@pytest.mark.parametrize(
    "call",
    [
        {"op": "no-such"},
        {},
        {"op": "status"},
        {"op": "status", "attempt_id": ["x"]},
        {"op": "admit"},
        {"op": "start", "fence": None},
        {"op": "start", "fence": {"attempt_id": "x", "generation": "1e400", "plan_digest": ""}},
        {"op": "start", "fence": {"attempt_id": "../../../tmp/x", "generation": 1, "plan_digest": ""}},
        {"op": "renew", "leases": [{}]},
        {"op": "renew", "leases": 5},
        {"op": "stop", "fence": {}, "reason": {}},
    ],
)
async def test_malformed_calls(session: Session, call: dict[str, Any]) -> None:
    """Each is answered, and the connection goes on."""
    operation = call.pop("op", "")
    with pytest.raises(Refused) as refused:
        await session.control.call(operation, **call)
    assert refused.value.code in ("invalid_request", "not_found")
    assert await session.control.call("snapshot")


@pytest.mark.parametrize("text", ["[1]", "{", "[" * 50_000 + "]" * 50_000, '{"op": 1e999}', '"snapshot"'])
async def test_calls_that_are_no_object(executor: ExecutorProcess, text: str) -> None:
    reader, writer = await asyncio.open_unix_connection(executor.socket)
    writer.write(wire.encode_json(Kind.HELLO, 0, {"versions": [1], "role": "control"}))
    writer.write(wire.encode(Kind.CALL, 1, text.encode()))
    writer.write(wire.encode_json(Kind.CALL, 2, {"op": "snapshot"}))
    decoder, frames = wire.Decoder(), []
    async with asyncio.timeout(PATIENCE_SECONDS):
        while len(frames) < 3:
            frames += decoder.feed(await reader.read(65536))
    writer.close()
    answers = {frame.stream: frame for frame in frames[1:]}
    assert answers[1].kind == Kind.FAILURE
    assert answers[2].kind == Kind.RESULT


# Admission.


async def test_a_refusal_stands(session: Session) -> None:
    """Whoever lost it and asks again has the same answer, though the reason has gone, and nothing ever runs."""
    capacity = (await session.control.call("snapshot"))["snapshot"]["capacity"]
    large = replace(LIMITS, memory_bytes=capacity["memory_bytes"])
    holder = await session.admit(session.plan(SLEEP))
    plan = session.plan(SLEEP, limits=large)
    fence = Fence(new_id(), 1, plan.digest)
    with pytest.raises(Refused, match="does_not_fit") as first:
        await session.admit(plan, fence)
    await session.stop(holder, 0)
    await session.until(holder, "released")
    with pytest.raises(Refused) as again:
        await session.admit(plan, fence)
    assert (again.value.code, again.value.message, again.value.param) == (
        *(first.value.code, first.value.message),
        first.value.param,
    )
    with pytest.raises(Refused, match="fenced: The attempt was refused under another"):
        await session.admit(plan, replace(fence, generation=2))
    answer = await session.control.call("status", attempt_id=fence.attempt_id)
    assert answer["attempt"] is None
    admitted = await session.admit(plan)  # another attempt is judged anew
    await session.stop(admitted, 0)
    await session.until(admitted, "released")


async def test_admission_is_idempotent(session: Session) -> None:
    plan = session.plan(SLEEP)
    fence = Fence(new_id(), 3, plan.digest)
    await asyncio.gather(*(session.admit(plan, fence) for _ in range(5)))
    status = await session.until(fence, "prepared")
    assert status["generation"] == 3
    assert status["plan_digest"] == plan.digest
    await session.admit(plan, fence)
    assert [e["attempt"]["state"] for e in session.events if "attempt" in e] == [
        "admitted",
        "staging",
        "prepared",
    ]


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"node_id": "01hv0000000000000000000000"}, "fenced"),
        ({"runtime": {"image_digest": "sha256:" + "0" * 64}}, "image_not_found"),
        ({"runtime": {"package_digest": "0" * 64}}, "runtime_changed"),
        ({"runtime": {"provider": "podman"}}, "runtime_changed"),
        ({"runtime": {"isolation": "virtual-machine"}}, "runtime_changed"),
        ({"runtime": {"network": "host"}}, "runtime_changed"),
        ({"outputs": ["../result"]}, "invalid_request"),
        ({"outputs": ["result", "result"]}, "invalid_request"),
        ({"limits": {"storage_bytes": 0}}, "invalid_request"),
        ({"limits": {"storage_inodes": 0}}, "invalid_request"),
        ({"limits": {"cpu_millis": 9}}, "invalid_request"),
        ({"limits": {"memory_bytes": 4096}}, "invalid_request"),
        ({"limits": {"processes": 3}}, "invalid_request"),
        ({"limits": {"memory_bytes": -1}}, "invalid_request"),
        ({"limits": {"memory_bytes": 1e9}}, "invalid_request"),
        ({"limits": {"memory_bytes": 2**53 - 1}}, "does_not_fit"),
        ({"limits": {"gpu_devices": ["GPU-1"]}}, "gpu_missing"),
        ({"argv": []}, "invalid_request"),
        ({"plan_version": 2}, "invalid_request"),
    ],
    ids=str,
)
async def test_plans_that_are_not_admitted(session: Session, changes: dict[str, Any], code: str) -> None:
    document = session.plan(SLEEP).as_json()
    for name, value in changes.items():
        document[name] = {**document[name], **value} if isinstance(value, dict) else value
    try:
        digest = Plan.from_json(document).digest
    except Refused:
        digest = "0" * 64
    fence, lease = Fence(new_id(), 1, digest), asdict(session.renewal(1))
    with pytest.raises(Refused) as refused:
        await session.control.call("admit", fence=fence_document(fence), plan=document, lease=lease)
    assert refused.value.code == code
    assert (await session.control.call("status", attempt_id=fence.attempt_id))["attempt"] is None


async def test_a_digest_of_another_plan(session: Session) -> None:
    fence = Fence(new_id(), 1, session.plan("pass").digest)
    with pytest.raises(Refused, match="fenced"):
        await session.admit(session.plan(SLEEP), fence)


@pytest.mark.parametrize("attempt_id", ["", "x", "../x", "01HV0000000000000000000000", "8" + 25 * "0"])
async def test_an_attempt_id_that_is_none(session: Session, attempt_id: str) -> None:
    plan = session.plan(SLEEP)
    with pytest.raises(Refused, match="invalid_request"):
        await session.admit(plan, Fence(attempt_id, 1, plan.digest))


@pytest.mark.parametrize(
    "lease",
    [
        {"boot_id": "another"},
        {"ttl_seconds": 4},
        {"ttl_seconds": 3601},
        {"sent_ns": clock.now_ns() + 10**15},
    ],
    ids=["boot", "too short", "too long", "sent later"],
)
async def test_a_lease_that_is_not_granted(session: Session, lease: dict[str, Any]) -> None:
    """And then nothing is reserved: the same attempt may be admitted with a right one."""
    plan = session.plan(SLEEP)
    fence = Fence(new_id(), 1, plan.digest)
    with pytest.raises(Refused, match="lease_refused"):
        await session.admit(plan, fence, **lease)
    await session.admit(plan, fence)
    await session.until(fence, "prepared")


@pytest.mark.parametrize("name", COUNTED)
async def test_capacity_is_given_to_the_last_unit(session: Session, name: str) -> None:
    capacity = (await session.control.call("snapshot"))["snapshot"]["capacity"][name]
    if name == "swap_bytes" and not capacity:
        with pytest.raises(Refused, match=r"1 B wanted, 0 B available \(swap_bytes\)"):
            await session.admit(session.plan(SLEEP, limits=replace(LIMITS, swap_bytes=1)))
        return
    least = getattr(LIMITS, name) or 4096
    await session.admit(session.plan(SLEEP, limits=replace(LIMITS, **{name: capacity - least})))
    over = replace(LIMITS, **{name: least + 1})
    with pytest.raises(Refused) as refused:
        await session.admit(session.plan(SLEEP, limits=over))
    assert (refused.value.code, refused.value.param) == ("does_not_fit", name)
    assert f"({name})" in refused.value.message
    await session.admit(session.plan(SLEEP, limits=replace(LIMITS, **{name: least})))


async def test_concurrent_admissions_never_reserve_too_much(session: Session) -> None:
    capacity = (await session.control.call("snapshot"))["snapshot"]["capacity"]["memory_bytes"]
    plan = session.plan(SLEEP, limits=replace(LIMITS, cpu_millis=10, memory_bytes=capacity // 4))
    async with connected(session.executor) as other:
        admissions = [s.admit(plan) for _ in range(8) for s in (session, other)]
        results = await asyncio.gather(*admissions, return_exceptions=True)
    refused = [r for r in results if isinstance(r, Refused)]
    assert len(results) - len(refused) == 4
    assert {r.code for r in refused} == {"does_not_fit"}


# Staging.


@pytest.mark.parametrize(
    ("spoil", "code"),
    [
        ("missing", "model_not_ready"),
        ("size", "source_mismatch"),
        ("writable", "source_mismatch"),
        ("link", "source_mismatch"),
        ("directory", "source_mismatch"),
        ("fifo", "source_mismatch"),
    ],
)
async def test_content_that_is_not_as_it_was(session: Session, spoil: str, code: str) -> None:
    content = session.executor.input("model.gguf", os.urandom(100))
    path = session.executor.blob(content.sha256)
    if spoil == "size":
        content = replace(content, bytes=101)
    elif spoil == "writable":
        path.chmod(0o644)
    else:
        kept = path.rename(path.with_suffix(".kept"))
        if spoil == "link":
            path.symlink_to(kept)
        elif spoil == "directory":
            path.mkdir()
        elif spoil == "fifo":
            os.mkfifo(path, 0o444)
    fence = await session.admit(session.plan(SLEEP, inputs=[content]))
    status = await session.until(fence, "released")
    assert (status["outcome"], status["reason"]["code"]) == ("failed", code)
    assert "model.gguf" in status["reason"]["message"]
    assert not status["start_intended"]


async def test_content_that_goes_between_staging_and_start(session: Session) -> None:
    content = session.executor.input("model.gguf", os.urandom(100))
    fence = await session.admit(session.plan(SLEEP, inputs=[content]))
    await session.until(fence, "prepared")
    session.executor.blob(content.sha256).unlink()
    await session.act("start", fence)
    status = await session.until(fence, "released")
    assert (status["outcome"], status["reason"]["code"]) == ("failed", "launch_failed")
    assert "model.gguf is not on this machine" in status["reason"]["message"]


# Start and stop.


async def test_a_job(session: Session) -> None:
    fence = await session.run(session.plan("print('hello')"))
    status = await session.until(fence, "released")
    assert (status["outcome"], status["reason"]["code"]) == ("succeeded", "exited")
    assert await session.output(fence) == "hello\n"
    states = [e["attempt"]["state"] for e in session.events if "attempt" in e]
    assert states == ["admitted", "staging", "prepared", "starting", "running", "finished", "released"]


async def test_start_before_it_is_prepared(session: Session) -> None:
    plan = session.plan(SLEEP)
    fence = Fence(new_id(), 1, plan.digest)
    admitting = asyncio.create_task(session.admit(plan, fence))
    await asyncio.sleep(0)  # sent, not answered
    with pytest.raises(Refused, match=r"action_not_allowed.*still being staged"):
        await session.act("start", fence)
    await admitting
    await session.until(fence, "prepared")


async def test_start_happens_once(session: Session) -> None:
    """L7: whoever lost the answer to `start` may ask again; nothing starts twice."""
    fence = await session.admit(session.plan("print('ran')"))
    await session.until(fence, "prepared")
    answers = await asyncio.gather(*(session.act("start", fence) for _ in range(5)))
    assert {answer["state"] for answer in answers} == {"starting"}
    await session.until(fence, "released")
    assert (await session.act("start", fence))["state"] == "released"
    assert await session.output(fence) == "ran\n"


@pytest.mark.parametrize(
    "state", ["admitted", "staging", "prepared", "starting", "running", "stopping", "released"]
)
async def test_stop_in_every_state(session: Session, state: str) -> None:
    many = [
        replace(session.executor.input("x", b"x"), id=new_id(), name=f"{number:04}") for number in range(1500)
    ]
    plan = session.plan(STUBBORN, inputs=many if state == "staging" else ())
    fence = Fence(new_id(), 1, plan.digest)
    admitting = asyncio.create_task(session.admit(plan, fence))
    await asyncio.sleep(0)
    if state != "admitted":
        await admitting
    if state == "staging":
        await session.until(fence, "staging")
    elif state != "admitted":
        await session.until(fence, "prepared")
    if state in ("starting", "running", "stopping"):
        await session.act("start", fence)
    if state in ("running", "stopping"):
        await session.until(fence, "running")
    if state in ("stopping", "released"):
        await session.stop(fence, 600)
    if state == "released":
        await session.until(fence, "released")
    began = time.monotonic()
    answer = await session.stop(fence, 0)
    assert answer["state"] in ("stopping", "finished", "released")
    await admitting
    status = await session.until(fence, "released")
    assert time.monotonic() - began < 10
    assert (status["outcome"], status["reason"]["code"]) == ("cancelled", "stopped")
    assert status["start_intended"] is (state in ("starting", "running", "stopping"))
    assert (await session.stop(fence))["state"] == "released"


async def test_the_grace_is_kept(session: Session) -> None:
    fence = await session.run(session.plan(STUBBORN))
    await session.until(fence, "running")
    while "up" not in await session.output(fence):
        await asyncio.sleep(0.01)
    began = time.monotonic()
    await session.stop(fence, 0.7)
    await session.until(fence, "released")
    assert 0.6 < time.monotonic() - began < 10


async def test_the_first_cause_of_a_stop_stands(session: Session) -> None:
    fence = await session.run(session.plan(STUBBORN))
    await session.until(fence, "running")
    await session.stop(fence, 60, reason={"code": "first", "message": "A"}, outcome="failed")
    await session.stop(fence, 0, reason={"code": "second", "message": "B"})
    status = await session.until(fence, "released")
    assert (status["outcome"], status["reason"]["code"]) == ("failed", "first")


@pytest.mark.parametrize(
    "changes",
    [
        {"grace_seconds": -1},
        {"grace_seconds": float("nan")},
        {"outcome": "succeeded"},
        {"outcome": "unknown"},
    ],
    ids=str,
)
async def test_stops_that_are_none(session: Session, changes: dict[str, Any]) -> None:
    fence = await session.run(session.plan(SLEEP))
    await session.until(fence, "running")
    with pytest.raises(Refused, match="invalid_request"):
        await session.stop(fence, **changes)
    assert (await session.status(fence))["state"] == "running"


async def test_release_waits_for_proof(session: Session) -> None:
    """What cannot be removed holds its reservation; once it can, the attempt is released."""
    fence = await session.run(session.plan(SLEEP))
    await session.until(fence, "running")
    group = Path(cgroups_named(fence.attempt_id)[0])
    (group / "keeper").mkdir()
    await session.stop(fence, 0)
    await session.until(fence, "finished")
    await asyncio.sleep(0.3)
    assert (await session.status(fence))["state"] == "finished"
    held = (await session.control.call("snapshot"))["attempts"]
    assert [attempt["attempt_id"] for attempt in held] == [fence.attempt_id]
    (group / "keeper").rmdir()
    await session.until(fence, "released")


async def test_what_cannot_be_removed_is_said_with_what_to_do(
    session: Session, executor: ExecutorProcess
) -> None:
    """Quarantined: in the attempt's report, in the snapshot and in the log, until it is gone."""
    fence = await session.run(session.plan(SLEEP))
    await session.until(fence, "running")
    group = Path(cgroups_named(fence.attempt_id)[0])
    (group / "keeper").mkdir()
    try:
        await session.stop(fence, 0)
        async with asyncio.timeout(PATIENCE_SECONDS + QUARANTINE_SECONDS):
            while (status := await session.status(fence))["quarantine"] is None:
                await asyncio.sleep(0.1)
        assert (status["state"], status["outcome"], status["reason"]["code"]) == (
            *("finished", "cancelled"),
            "stopped",
        )
        assert status["quarantine"]["code"] == "quarantined"
        message = status["quarantine"]["message"]
        assert str(group) in message
        assert "have to be moved away" in message
        told = [event["attempt"] for event in session.events if "attempt" in event]
        assert told[-1] == status
        snapshot = (await session.control.call("snapshot"))["snapshot"]
        assert snapshot["quarantined"] == {fence.attempt_id: message}
        assert fence.attempt_id in executor.log
        limits = replace(LIMITS, memory_bytes=snapshot["capacity"]["memory_bytes"])
        with pytest.raises(Refused, match="does_not_fit"):  # its reservation is held
            await session.admit(session.plan(SLEEP, limits=limits))
    finally:
        (group / "keeper").rmdir()
    status = await session.until(fence, "released")
    assert status["quarantine"] is None
    assert (await session.control.call("snapshot"))["snapshot"]["quarantined"] == {}


# Reasons and logs.


@pytest.mark.parametrize(
    ("script", "code", "words"),
    [
        ("print('no such model'); raise SystemExit(3)", "engine_exited", ["status 3", "no such model"]),
        ("x = b'x' * (1 << 30)", "out_of_memory", ["memory limit of 134.2 MB"]),
        ("import os; os._exit(137)", "engine_killed", ["signal 9, or exited with status 137"]),
        ("import os; os.kill(os.getpid(), 11)", "engine_killed", ["signal 11"]),
        ("import os; os._exit(255)", "engine_exited", ["status 255"]),
        (
            "import os, time\nfor _ in range(99):\n if os.fork() == 0: time.sleep(99)",
            "engine_exited",
            ["limit of 32 processes", "BlockingIOError"],
        ),
    ],
)
async def test_reasons(session: Session, script: str, code: str, words: list[str]) -> None:
    """L10 for one attempt: the engine's own last lines are in the reason."""
    status = await session.finished(session.plan(script))
    assert (status["outcome"], status["reason"]["code"]) == ("failed", code)
    for word in words:
        assert word in status["reason"]["message"]


async def test_a_replica_that_exits_has_failed(session: Session) -> None:
    status = await session.finished(
        session.plan("pass", endpoint=Endpoint("unix", SOCKET, (("POST", ROUTE),), 1000, 1))
    )
    assert (status["outcome"], status["reason"]["code"]) == ("failed", "engine_exited")


async def test_an_executable_that_is_not_there(session: Session) -> None:
    status = await session.finished(session.plan(argv=("/opt/engine/bin/nothing",)))
    assert status["outcome"] == "failed"
    assert "/opt/engine/bin/nothing: No such file or directory" in status["reason"]["message"]


async def test_too_little_memory_for_a_sandbox(session: Session) -> None:
    """Either it can be made, or the reason says why not."""
    limits = replace(LIMITS, memory_bytes=16 << 20)
    status = await session.finished(session.plan("x = b'x' * (1 << 30)", limits=limits))
    assert status["outcome"] == "failed"
    assert "memory limit of 16.8 MB" in status["reason"]["message"]


async def test_log_of_a_talkative_engine(session: Session, executor: ExecutorProcess) -> None:
    """L17: bounded on disk, the newest kept, readable after the end."""
    before = psutil.Process(executor.pid).memory_info().rss
    script = "for n in range(1000000): print(f'line {n:08}')"
    fence = await session.run(session.plan(script))
    status = await session.until(fence, "released")
    assert status["outcome"] == "succeeded"
    answer = await session.act("log", fence)
    assert answer["truncated"] is True
    assert len(answer["text"]) <= logs.TAIL_BYTES_MAX
    assert answer["text"].endswith("line 00999998\nline 00999999\n")
    on_disk = sum(path.stat().st_size for path in (executor.state / "logs").glob(f"{fence.attempt_id}*"))
    assert on_disk <= 2 * logs.SEGMENT_BYTES_MAX
    assert psutil.Process(executor.pid).memory_info().rss - before < 8 << 20


async def test_log_of_bytes_that_are_no_text(session: Session) -> None:
    script = (
        "import sys\nfor _ in range(300): sys.stdout.buffer.write(bytes(range(256)) * 4)\nraise SystemExit(1)"
    )
    fence = await session.run(session.plan(script))
    status = await session.until(fence, "released")
    assert "\0" not in status["reason"]["message"]
    answer = await session.act("log", fence)
    assert answer["truncated"] is True
    assert len(answer["text"]) > 60_000


async def test_an_attempt_without_a_log(session: Session) -> None:
    fence = await session.admit(session.plan(SLEEP))
    assert await session.act("log", fence) == {"text": "", "truncated": False}


# Fences.


@pytest.mark.parametrize("operation", ["start", "stop", "log", "renew", "admit"])
@pytest.mark.parametrize("change", [{"generation": 1}, {"generation": 3}, {"plan_digest": "0" * 64}], ids=str)
async def test_every_action_is_fenced(session: Session, operation: str, change: dict[str, Any]) -> None:
    plan = session.plan(SLEEP)
    fence = await session.admit(plan, Fence(new_id(), 2, plan.digest))
    await session.until(fence, "prepared")
    other = replace(fence, **change)
    actions = {
        "stop": lambda: session.stop(other),
        "admit": lambda: session.admit(plan, other),
        "renew": lambda: session.renew(other, session.renewal(2)),
    }
    if operation == "renew":
        assert (await actions["renew"]())["refused"]["code"] == "fenced"
    else:
        with pytest.raises(Refused, match="fenced"):
            await actions.get(operation, lambda: session.act(operation, other))()
    assert (await session.status(fence))["state"] == "prepared"


@pytest.mark.parametrize("operation", ["start", "stop", "log", "renew"])
async def test_actions_on_an_attempt_that_is_not_known(session: Session, operation: str) -> None:
    fence = Fence(new_id(), 1, "0" * 64)
    if operation == "renew":
        assert (await session.renew(fence, session.renewal(2)))["refused"]["code"] == "attempt_unknown"
        return
    with pytest.raises(Refused, match="attempt_unknown"):
        await (session.stop(fence) if operation == "stop" else session.act(operation, fence))


# Bounds.


async def test_a_subscriber_that_does_not_read_is_let_go(session: Session, executor: ExecutorProcess) -> None:
    """And costs a bounded amount of memory until then."""
    fence = await session.run(session.plan("print('x' * 200000)"))
    await session.until(fence, "released")
    before = psutil.Process(executor.pid).memory_info().rss
    with socket.socket(socket.AF_UNIX) as deaf:
        deaf.connect(str(executor.socket))
        deaf.sendall(wire.encode_json(Kind.HELLO, 0, {"versions": [1], "role": "control"}))
        deaf.sendall(wire.encode_json(Kind.CALL, 1, {"op": "subscribe"}))
        call = {"op": "log", "fence": fence_document(fence)}
        for number in range(200):
            deaf.sendall(wire.encode_json(Kind.CALL, 2 + number, call))
        wait_for(lambda: "does not read its events" in executor.log, "the connection is closed")
        assert psutil.Process(executor.pid).memory_info().rss - before < 64 << 20
    assert await session.control.call("snapshot")


async def test_a_flood_of_calls_is_cut_off(session: Session, executor: ExecutorProcess) -> None:
    with socket.socket(socket.AF_UNIX) as flood:
        flood.settimeout(PATIENCE_SECONDS)
        flood.connect(str(executor.socket))
        calls = b"".join(wire.encode_json(Kind.CALL, n, {"op": "snapshot"}) for n in range(2000))
        with contextlib.suppress(ConnectionError):
            flood.sendall(wire.encode_json(Kind.HELLO, 0, {"versions": [1], "role": "control"}) + calls)
            while flood.recv(1 << 20):
                pass
    assert "too many unanswered calls" in executor.log
    assert await session.control.call("snapshot")


async def test_nothing_is_left_of_many_attempts(session: Session, executor: ExecutorProcess) -> None:
    """No descriptor, task's child or zombie, file or cgroup of them; the account is used again."""
    process = psutil.Process(executor.pid)
    await session.finished(session.plan("pass"))
    before = process.num_fds()
    plans = [session.plan("pass"), session.plan(argv=("/nothing",)), session.plan("raise SystemExit(1)")]
    for _ in range(4):
        await asyncio.gather(*(session.finished(plan) for plan in plans))
    assert process.num_fds() <= before
    assert [child.pid for child in process.children()] == [executor.watchdog]
    assert list((executor.state / "verdicts").iterdir()) == []
    fence = await session.run(session.plan(SLEEP))
    await session.until(fence, "running")
    group = Path(cgroups_named(fence.attempt_id)[0])
    pids = (group / "cgroup.procs").read_text().split()
    assert {Path(f"/proc/{pid}").stat().st_uid for pid in pids} == {CONTROLLER_UID + 1}


def test_the_watchdog_has_only_what_it_needs(executor: ExecutorProcess) -> None:
    names = [os.readlink(path) for path in Path(f"/proc/{executor.watchdog}/fd").iterdir()]
    allowed = ("socket:", "anon_inode:[timerfd]", "/dev/null", str(executor.directory))
    assert [name for name in names if not name.startswith(allowed)] == []


async def test_inputs_are_bound(session: Session) -> None:
    content = session.executor.input("a/b/model.gguf", b"weights")
    script = "import os; f = '/inputs/a/b/model.gguf'; print(open(f).read(), os.stat(f).st_ino)"
    fence = await session.run(session.plan(script, inputs=[content]))
    await session.until(fence, "released")
    inode = session.executor.blob(content.sha256).stat().st_ino
    assert await session.output(fence) == f"weights {inode}\n"
