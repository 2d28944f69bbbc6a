"""The specification: its example passes, every bound holds at its border, and nothing is converted."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from ficc.domain import plan
from ficc.inference.schema import Specification
from support.specifications import NODE, document, limits


def changed(way: str, value: Any) -> dict[str, Any]:
    """The example with one member, by its dotted way, changed; left out where the value is `...`."""
    made = document(parallelism={"tensor": 1, "pipeline": 1}, restart={"on_failure": {}})
    *parents, last = way.split(".")
    here: Any = made
    for parent in parents:
        here = here[int(parent)] if parent.isdigit() else here[parent]
    if value is ...:
        here.pop(last, None)
    else:
        here[last] = value
    return made


def accepts(made: dict[str, Any]) -> bool:
    try:
        Specification.model_validate(made)
    except ValidationError:
        return False
    return True


LIMITS = "placements.0.limits."
RESTART = "restart.on_failure."

BORDERS: list[tuple[str, list[Any], list[Any]]] = [
    # member, values that pass, values that do not
    (
        "alias",
        ["a", "0", "a.b_c-d", "x" * 63],
        ["", "A", "-a", ".a", "_a", "a b", "a/b", "é", "a\n", "x" * 64, None, 5, ...],
    ),
    (
        "model_id",
        ["0" * 26, "7" + "z" * 25],
        ["8" + "0" * 25, "0" * 25, "0" * 27, "0" * 25 + "u", "0" * 26 + "\n", ...],
    ),
    ("engine", ["llama_cpp", "a"], ["", "Llama", "a-b", "../x", "a" * 64, None, ...]),
    ("runtime.provider", ["podman", "a-b_c"], ["", "A", "1a", "../x", ...]),
    ("runtime.package_digest", ["0" * 64], ["A" * 64, "0" * 63, "0" * 65, "sha256:" + "0" * 64, ...]),
    (
        "runtime.image_digest",
        ["sha256:" + "0" * 64],
        ["0" * 64, "sha256:" + "0" * 63, "SHA256:" + "0" * 64, ...],
    ),
    ("runtime.isolation", ["shared-kernel", ...], ["vm", None]),
    ("runtime.network", ["none", ...], ["host", "bridge", None, ""]),
    ("executable", ["/x", "/" + "x" * 510], ["x", "/", "", "/a\x00b", "/" + "x" * 511, None, ...]),
    ("context", [1, 1 << 24], [0, -1, (1 << 24) + 1, 4096.0, "4096", True, None, ...]),
    ("concurrency", [1, 1024], [0, 1025, 1.0, "1", True, None, ...]),
    ("deadline_seconds", [1, 86_400, ...], [0, 86_401, 1.5, None]),
    ("gpu_layers", [None, 0, 65_535, "all", ...], [-1, 65_536, "ALL", "10", 1.0, True]),
    (
        "tensor_split",
        [None, [0], [1_000_000], [1] * 64, ...],
        [[], [1] * 65, [-1], [1_000_001], [0.5], ["1"], [True], 1, "1,1"],
    ),
    (
        "restart",
        [None, "never", "on_failure", {"on_failure": {}}, ...],
        ["always", "", {}, {"never": {}}, {"on_failure": None}, {"on_failure": {"tries": 1}}, True, 5],
    ),
    (RESTART + "delay_seconds", [1, 86_400, None], [0, 86_401, 1.5, "1"]),
    (RESTART + "factor", [1, 10, None], [0, 11, 1.5]),
    (RESTART + "delay_seconds_max", [1, 86_400, None], [0, 86_401, 1.5]),
    (RESTART + "failures_max", [1, 15, None], [0, 16, 1.5]),
    (RESTART + "stable_seconds", [1, 86_400, None], [0, 86_401, 1.5]),
    ("parallelism", [None, {}, ...], [1, [1, 1]]),
    ("parallelism.tensor", [1, 64, ...], [0, 65, 1.0, None]),
    ("parallelism.pipeline", [1, 64, ...], [0, 65, 1.0, None]),
    ("placements.0.node_id", ["0" * 26], ["node", None, ...]),
    (LIMITS + "cpu_millis", [10, 1_000_000], [9, 1_000_001, 10.0, None, ...]),
    (LIMITS + "memory_bytes", [16 << 20, 2**53 - 1], [(16 << 20) - 1, 2**53, "1", None, ...]),
    (LIMITS + "swap_bytes", [0, 2**53 - 1, ...], [-1, 2**53, None]),
    (LIMITS + "processes", [4, 65_536, ...], [3, 65_537, None]),
    (LIMITS + "storage_bytes", [1 << 20, 2**53 - 1, ...], [(1 << 20) - 1, 2**53, None]),
    (LIMITS + "storage_inodes", [16, 1 << 24, ...], [15, (1 << 24) + 1, None]),
    (
        LIMITS + "gpu_devices",
        [[], ["x"], ["x" * 128], [f"GPU-{n}" for n in range(64)], ...],
        [[""], ["x" * 129], [f"GPU-{n}" for n in range(65)], [0], "GPU-0", None, ["GPU-0", "GPU-0"]],
    ),
]


def test_the_example_of_the_interface_passes() -> None:
    made = document(gpu_layers=None, tensor_split=None, parallelism=None)
    assert Specification.model_validate(made).as_json() == {**made, "restart": None}


@pytest.mark.parametrize(("way", "within", "past"), BORDERS, ids=[border[0] for border in BORDERS])
def test_every_member_at_its_border_and_past_it(way: str, within: list[Any], past: list[Any]) -> None:
    assert [value for value in within if not accepts(changed(way, value))] == []
    assert [value for value in past if accepts(changed(way, value))] == []


@pytest.mark.parametrize("count", [1, 64])
def test_1_to_64_placements_and_a_node_more_than_once(count: int) -> None:
    placements = [{"node_id": NODE, "limits": limits()}] * count
    assert len(Specification.model_validate(document(placements=placements)).placements) == count


@pytest.mark.parametrize("placements", [[], [{"node_id": NODE, "limits": limits()}] * 65, None, {}])
def test_other_numbers_of_placements_are_refused(placements: Any) -> None:
    assert not accepts(document(placements=placements))


@pytest.mark.parametrize(
    "way", ["unknown", "runtime.unknown", "placements.0.unknown", LIMITS + "unknown", "parallelism.unknown"]
)
def test_unknown_members_are_refused_by_name(way: str) -> None:
    with pytest.raises(ValidationError) as caught:
        Specification.model_validate(changed(way, 1))
    (error,) = caught.value.errors()
    assert error["type"] == "extra_forbidden"
    assert ".".join(map(str, error["loc"])) == way


def test_a_specification_survives_being_stored() -> None:
    made = Specification.model_validate(
        document(gpu_layers="all", tensor_split=[3, 1], parallelism={"tensor": 2})
    )
    assert Specification.model_validate(made.as_json()) == made


def test_limits_and_runtime_become_the_plans() -> None:
    made = Specification.model_validate(document())
    assert made.runtime.to_domain() == plan.Runtime("bubblewrap", "a" * 64, "sha256:" + "b" * 64)
    assert made.placements[0].limits.to_domain() == plan.Limits(2000, 2147483648, 0, 64, 1073741824, 4096)


def test_what_a_client_leaves_out_is_what_a_plan_has_by_itself() -> None:
    """One set of defaults, wherever a limit is left out."""
    bare = {"cpu_millis": 10, "memory_bytes": 16 << 20}
    made = Specification.model_validate(document(placements=[{"node_id": NODE, "limits": bare}]))
    assert made.placements[0].limits.to_domain() == plan.Limits(10, 16 << 20)


def test_the_defaults_of_a_service() -> None:
    made = document()
    del made["deadline_seconds"]
    assert Specification.model_validate(made).as_json() == {
        **made,
        "deadline_seconds": 600,
        "gpu_layers": None,
        "tensor_split": None,
        "parallelism": None,
        "restart": None,
    }
