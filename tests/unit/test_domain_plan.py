"""Plans: their canonical bytes, written here by hand, what no executor may launch, and fences."""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ficc.domain import ids
from ficc.domain import plan as module
from ficc.domain.errors import Refused
from ficc.domain.plan import Endpoint, Fence, Input, Limits, Plan, Runtime

NODE = "01arz3ndektsv4rrffq69g5fav"
A, B, C, D = "a" * 64, "b" * 64, "c" * 64, "d" * 64

JOB = Plan(
    node_id=NODE,
    runtime=Runtime("bubblewrap", A, "sha256:" + B),
    argv=("/bin/echo", "hé\n"),
    environment={"LANG": "C.UTF-8", "HOME": "/tmp"},
    limits=Limits(cpu_millis=1000, memory_bytes=1073741824),
)
REPLICA = replace(
    JOB,
    argv=("/opt/engine/bin/llama-server",),
    limits=Limits(2000, 2147483648, 0, 64, 1073741824, 4096, ("GPU-1", "GPU-0")),
    inputs=(Input("model-0", C, 98362432, "m.gguf"),),
    outputs=("out.txt",),
    sensitive=True,
    model_revision=D,
    endpoint=Endpoint(
        "unix", "/run/ficc/engine.sock", (("POST", "/v1/embeddings"),), 16777216, 4, ("model-0",)
    ),
)

# By hand: members sorted by name at every level, nothing spaced, UTF-8, absent members left out.

JOB_BYTES = (
    b'{"argv":["/bin/echo","h\xc3\xa9\\n"],'
    b'"environment":{"HOME":"/tmp","LANG":"C.UTF-8"},'
    b'"inputs":[],'
    b'"limits":{"cpu_millis":1000,"gpu_devices":[],"memory_bytes":1073741824,"processes":64,'
    b'"storage_bytes":67108864,"storage_inodes":1024,"swap_bytes":0},'
    b'"node_id":"01arz3ndektsv4rrffq69g5fav",'
    b'"outputs":[],'
    b'"plan_version":1,'
    b'"runtime":{"image_digest":"sha256:' + b"b" * 64 + b'","isolation":"shared-kernel","network":"none",'
    b'"package_digest":"' + b"a" * 64 + b'","provider":"bubblewrap"},'
    b'"sensitive":false}'
)
REVISION_BYTES = JOB_BYTES.replace(b'"node_id"', b'"model_revision":"' + b"d" * 64 + b'","node_id"')
REPLICA_BYTES = (
    b'{"argv":["/opt/engine/bin/llama-server"],'
    b'"endpoint":{"body_bytes_max":16777216,"concurrency":4,"path_or_port":"/run/ficc/engine.sock",'
    b'"routes":[["POST","/v1/embeddings"]],"transport":"unix","upload_input_ids":["model-0"]},'
    b'"environment":{"HOME":"/tmp","LANG":"C.UTF-8"},'
    b'"inputs":[{"bytes":98362432,"id":"model-0","name":"m.gguf","sha256":"' + b"c" * 64 + b'"}],'
    b'"limits":{"cpu_millis":2000,"gpu_devices":["GPU-1","GPU-0"],"memory_bytes":2147483648,"processes":64,'
    b'"storage_bytes":1073741824,"storage_inodes":4096,"swap_bytes":0},'
    b'"model_revision":"' + b"d" * 64 + b'",'
    b'"node_id":"01arz3ndektsv4rrffq69g5fav",'
    b'"outputs":["out.txt"],'
    b'"plan_version":1,'
    b'"runtime":{"image_digest":"sha256:' + b"b" * 64 + b'","isolation":"shared-kernel","network":"none",'
    b'"package_digest":"' + b"a" * 64 + b'","provider":"bubblewrap"},'
    b'"sensitive":true}'
)


# The digest.


@pytest.mark.parametrize(
    ("plan", "golden"),
    [(JOB, JOB_BYTES), (replace(JOB, model_revision=D), REVISION_BYTES), (REPLICA, REPLICA_BYTES)],
    ids=["neither", "model_revision", "both"],
)
def test_the_digest_is_the_hash_of_these_bytes(plan: Plan, golden: bytes) -> None:
    assert plan.digest == hashlib.sha256(golden).hexdigest()
    assert Plan.from_json(json.loads(golden)) == plan


def test_the_digests_themselves() -> None:
    """Fixed for good: a change of either would orphan every plan that was ever made. From the bytes above by
    `sha256sum`."""
    assert JOB.digest == "7cfd5b4a2c15b5f9130b7a089ae86e26cc7a2249e2b631167bb3a71f3cb073a9"
    assert REPLICA.digest == "017d08bbdb7b9ecf84a38f37229653c9e38df24880bdf0724b5ce08e19df1b7c"


def test_null_equals_absent() -> None:
    nulls = {**json.loads(JOB_BYTES), "model_revision": None, "endpoint": None}
    assert Plan.from_json(nulls) == JOB
    assert Plan.from_json(nulls).digest == JOB.digest


def test_a_tcp_endpoint_names_a_port() -> None:
    assert REPLICA.endpoint is not None
    tcp = replace(REPLICA, endpoint=replace(REPLICA.endpoint, transport="tcp", path_or_port=8000))
    golden = REPLICA_BYTES.replace(b'"/run/ficc/engine.sock"', b"8000").replace(b'"unix"', b'"tcp"')
    assert tcp.digest == hashlib.sha256(golden).hexdigest()


@pytest.mark.parametrize(
    "name", ["argv", "node_id", "limits", "environment", "runtime", "sensitive", "outputs"]
)
def test_whatever_decides_what_runs_is_in_the_digest(name: str) -> None:
    others: dict[str, Any] = {
        "argv": ("/bin/true",),
        "node_id": "0" * 26,
        "limits": Limits(1001, 1073741824),
        "environment": {},
        "runtime": replace(JOB.runtime, network="host"),
        "sensitive": True,
        "outputs": ("x",),
    }
    assert replace(JOB, **{name: others[name]}).digest != JOB.digest


def test_what_fences_is_never_in_a_plan() -> None:
    names = set(json.loads(REPLICA_BYTES)) | set(JOB.as_json())
    assert not {
        name for name in names if any(w in name for w in ("attempt", "generation", "service", "lease"))
    }


# What is no plan.


def edited(**changes: Any) -> dict[str, Any]:
    """The replica's document with members changed, or dropped where the value is `...`."""
    document = json.loads(REPLICA_BYTES)
    for way, value in changes.items():
        *parents, last = way.split("__")
        here = document
        for parent in parents:
            here = here[int(parent)] if parent.isdigit() else here[parent]
        if value is ...:
            del here[last]
        else:
            here[last] = value
    return document


@pytest.mark.parametrize(
    "changes",
    [
        *(
            {name: ...}
            for name in ("argv", "node_id", "runtime", "limits", "inputs", "sensitive", "plan_version")
        ),
        *({"plan_version": version} for version in (0, 2, "1", 1.0, True)),
        *({"sensitive": value} for value in (0, "no", 1.5)),
        *({"argv": value} for value in ([], ["bin/x"], [""], ["/x", "a\0b"], ["/x", 1], ["/x", "\ud800"], 5)),
        *({"environment": value} for value in ({"": "x"}, {"A=B": "x"}, {"A": "\0"}, {"A": 1}, ["A"])),
        *({"outputs": value} for value in ([1.5], 7)),
        *({"unknown": 1}, {"limits__unknown": 1}, {"runtime__unknown": "x"}, {"endpoint__unknown": 1}),
        *({"limits__memory_bytes": value} for value in (-1, 2**53, 1.5, "1", True, None)),
        *({"limits__gpu_devices": value} for value in (["a", "a"], [1], ["\0"])),
        *({"runtime__provider": value} for value in (..., 1, None)),
        *({"inputs__0__sha256": value} for value in ("A" * 64, "c" * 63, ...)),
        *({"inputs__0__name": value} for value in ("../x", "/etc/passwd", "a\\b", "CON")),
        *({"inputs__0__bytes": value} for value in (-1, 1.0, "1")),
        {"inputs__0__id": 3},
        *({"endpoint__transport": value} for value in ("udp", "", None)),
        *(
            {"endpoint__path_or_port": value}
            for value in (
                "/run/ficc/../x",
                "/tmp/e.sock",
                "/run/ficc/",
                "/run/ficc",
                "/run/ficc/a b",
                8000,
                None,
            )
        ),
        {"endpoint__path_or_port": "/run/ficc/" + "x" * 503},
        *(
            {"endpoint__routes": value}
            for value in (
                [["POST"]],
                [["PUT", "/x"]],
                [["POST", "x"]],
                [["POST", "/x HTTP/1.1\r\nHost: evil"]],
                [["POST", "/x y"]],
                [["POST", "/" + "x" * 512]],
                [["POST", "/x"]] * 17,
            )
        ),
        {"endpoint__upload_input_ids": ["model-1"]},
        *({"endpoint__concurrency": value} for value in (0, -1, 1.5, True)),
        *({"endpoint__body_bytes_max": value} for value in (-1, 2.0)),
    ],
    ids=str,
)
def test_what_is_no_plan_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(Refused) as caught:
        Plan.from_json(edited(**changes))
    assert caught.value.code == "invalid_request"
    assert caught.value.param is not None
    assert caught.value.param.startswith("plan")


@pytest.mark.parametrize("document", [[], "plan", 5, None, {}])
def test_another_document_is_no_plan(document: Any) -> None:
    with pytest.raises(Refused):
        Plan.from_json(document)


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5), st.lists))
def test_no_member_makes_reading_a_plan_fail_otherwise(value: Any) -> None:
    for name in json.loads(REPLICA_BYTES):
        with suppress(Refused):
            assert len(Plan.from_json({**json.loads(REPLICA_BYTES), name: value}).digest) == 64


@pytest.mark.parametrize("transport", ["tcp"])
@pytest.mark.parametrize(
    ("port", "fine"), [(1, True), (65535, True), (0, False), (65536, False), (True, False), ("80", False)]
)
def test_a_port_is_from_1_to_65535(transport: str, port: Any, fine: bool) -> None:
    document = edited(endpoint__transport=transport, endpoint__path_or_port=port)
    if fine:
        assert Plan.from_json(document).endpoint is not None
    else:
        with pytest.raises(Refused, match="65535"):
            Plan.from_json(document)


def test_the_longest_paths_of_an_endpoint_have_512_bytes() -> None:
    made = edited(
        endpoint__path_or_port="/run/ficc/" + "x" * 502,
        endpoint__routes=[["POST", "/" + "x" * 511], ["GET", "/"]],
    )
    assert Plan.from_json(made).endpoint is not None


def inputs(count: int) -> tuple[Input, ...]:
    return tuple(Input(f"model-{n}", A, 1, f"{n}.gguf") for n in range(count))


@pytest.mark.parametrize(
    ("within", "past"),
    [
        ({"argv": ("/x",) * 256}, {"argv": ("/x",) * 257}),
        ({"argv": ("/x", "é" * 2048)}, {"argv": ("/x", "é" * 2048 + "e")}),
        (
            {"environment": {f"A{n}": "" for n in range(64)}},
            {"environment": {f"A{n}": "" for n in range(65)}},
        ),
        ({"inputs": inputs(4096)}, {"inputs": inputs(4097)}),
    ],
    ids=["arguments", "argument", "environment", "inputs"],
)
def test_each_limit_and_one_past_it(within: dict[str, Any], past: dict[str, Any]) -> None:
    replace(JOB, **within).check()
    with pytest.raises(Refused):
        replace(JOB, **past).check()


def test_a_plan_is_at_most_4_mib() -> None:
    def plan(argument_bytes: int) -> Plan:
        files = tuple(Input(f"model-{n}", A, 1, f"{n:04}" + ("/" + "x" * 227) * 4) for n in range(4064))
        return replace(JOB, inputs=files, argv=("/x", "y" * argument_bytes))

    size = len(json.dumps(plan(0).as_json(), separators=(",", ":")).encode())
    room = module.PLAN_BYTES_MAX - size
    assert 0 < room < module.ARGUMENT_BYTES_MAX
    plan(room).check()
    with pytest.raises(Refused, match="shorter file names"):
        plan(room + 1).check()


@pytest.mark.parametrize(
    "twice", [(Input("a", A, 1, "x"), Input("a", A, 1, "y")), (Input("a", A, 1, "x"), Input("b", B, 1, "x"))]
)
def test_inputs_never_cover_each_other(twice: tuple[Input, ...]) -> None:
    with pytest.raises(Refused, match="distinct ids and names"):
        replace(JOB, inputs=twice).check()


# Limits.


def test_limits_have_defaults_that_are_written_out() -> None:
    assert Limits.from_json({"cpu_millis": 10, "memory_bytes": 20}).as_json() == {
        "cpu_millis": 10,
        "memory_bytes": 20,
        "swap_bytes": 0,
        "processes": 64,
        "storage_bytes": 67108864,
        "storage_inodes": 1024,
        "gpu_devices": [],
    }


def test_everything_of_limits_but_devices_adds_up() -> None:
    assert set(module.COUNTED) | {"gpu_devices"} == set(Limits(0, 0).as_json())


# Outputs.


@pytest.mark.parametrize("outputs", [(), ("out.txt",), ("a/b/c", "a/b/d"), tuple(f"o{n}" for n in range(64))])
def test_outputs_are_relative_paths(outputs: tuple[str, ...]) -> None:
    replace(JOB, outputs=outputs).check()


@pytest.mark.parametrize(
    "outputs",
    [
        ("",),
        ("/etc/passwd",),
        ("../x",),
        ("a/../../x",),
        ("a//b",),
        ("x/",),
        ("a\nb",),
        ("x", "x"),
        tuple(f"o{n}" for n in range(65)),
    ],
    ids=str,
)
def test_what_is_no_output(outputs: tuple[str, ...]) -> None:
    with pytest.raises(Refused) as caught:
        replace(JOB, outputs=outputs).check()
    assert (caught.value.code, caught.value.param) == ("invalid_request", "plan.outputs")


def test_a_job_with_outputs_that_is_sensitive_has_this_digest() -> None:
    """By hand, from the bytes of the job above."""
    golden = JOB_BYTES.replace(b'"outputs":[]', b'"outputs":["a/b","c"]').replace(b"false", b"true")
    assert replace(JOB, outputs=("a/b", "c"), sensitive=True).digest == hashlib.sha256(golden).hexdigest()


# Fences.

FENCES = st.builds(
    Fence,
    st.binary(min_size=16, max_size=16).map(ids.from_bytes),
    st.integers(0, 2**64 - 1),
    st.binary(min_size=32, max_size=32).map(bytes.hex),
)


def test_a_fence_is_these_56_bytes() -> None:
    fence = Fence("0" * 25 + "1", 258, "ab" * 32)
    assert fence.pack() == bytes(15) + b"\x01" + bytes(6) + b"\x01\x02" + b"\xab" * 32
    assert Fence.BYTES == 56


@given(FENCES)
def test_a_fence_survives_its_bytes(fence: Fence) -> None:
    assert Fence.unpack(fence.pack()) == fence
    assert len(fence.pack()) == Fence.BYTES


@given(st.binary(min_size=56, max_size=56))
def test_any_56_bytes_are_one_fence(raw: bytes) -> None:
    assert Fence.unpack(raw).pack() == raw


@pytest.mark.parametrize("count", [0, 55, 57])
def test_other_lengths_are_no_fence(count: int) -> None:
    with pytest.raises(ValueError, match="56 bytes"):
        Fence.unpack(bytes(count))


@pytest.mark.parametrize(
    "fence",
    [
        Fence("0" * 26, 1, "ab"),
        Fence("0" * 26, 1, "AB" * 32),
        Fence("0" * 26, 1, "a " * 32),
        Fence("x", 1, A),
    ],
)
def test_a_malformed_fence_is_never_packed_into_something_else(fence: Fence) -> None:
    with pytest.raises(ValueError):
        fence.pack()
