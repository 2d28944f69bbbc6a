"""Whether a service fits, for people: what a preview says, and for one that does not fit, who holds what is missing
and what can be done about it."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ficc.cli.failure import Failure
from ficc.client.errors import ApiError
from ficc.domain.plan import COUNTED, LEAST
from ficc.domain.quantity import amount, size

if TYPE_CHECKING:
    from ficc.client.api import Api

FLAGS = {"cpu_millis": "--cpu-millis", "memory_bytes": "--memory-bytes"}
"""The limits that a flag sets."""
WORDS = {"cpu_millis": "", "memory_bytes": " of memory", "storage_bytes": " of storage"}


@dataclass(frozen=True, slots=True)
class Holder:
    """A service that holds something of what is missing."""

    alias: str
    state: str
    limits: Mapping[str, int]

    def __str__(self) -> str:
        held = ", ".join(_amount(name, count) for name, count in self.limits.items())
        return f"{self.alias} ({self.state}) holds {held}"


async def node_names(api: Api) -> dict[str, str]:
    """By id; without the scope to read nodes, none: then their ids have to do."""
    try:
        return {node["id"]: node["name"] async for node in api.every("/contributors")}
    except ApiError as error:
        if error.code != "denied":
            raise
        return {}


def lines(preview: Mapping[str, Any], names: Mapping[str, str]) -> Iterator[str]:
    """What an accepted preview says."""
    total: Counter[str] = Counter()
    for replica in preview["replicas"]:
        wanted, needed = replica["reservation"], replica["estimate"]
        total.update({name: wanted[name] for name in FLAGS})
        yield (
            f"Fits on {_named(replica['node_id'], names)}: reserves {_sum(wanted)}, "
            f"{size(replica['available']['memory_bytes'])} free; "
            f"the model needs {size(needed['total_bytes'])} ({needed['basis']})"
        )
    if len(preview["replicas"]) > 1:
        yield f"{len(preview['replicas'])} replicas reserve {_sum(total)} together"
    for warning in preview["warnings"]:
        yield f"{warning['message']} ({warning['code']})"


async def refusal(api: Api, preview: dict[str, Any], request_id: str | None = None) -> Failure:
    """The failure that a preview which was not accepted amounts to."""
    problems = [problem for replica in preview["replicas"] for problem in replica["problems"]]
    messages = dict.fromkeys(problem["message"] for problem in problems)
    short = _short(preview)
    holders = await _holders(api, short) if short else []
    return Failure(
        problems[0]["code"],
        " ".join(messages),
        hints=[*map(str, holders), *_advice(preview, short, holders)],
        more={
            "preview": preview,
            "holders": [{"alias": one.alias, "limits": dict(one.limits)} for one in holders],
        },
        request_id=request_id,
    )


async def submit(api: Api, method: str, path: str, body: Any) -> dict[str, Any]:
    """An operation that starts replicas. Raises Failure where they do not fit, as `refusal` has it."""
    try:
        made: dict[str, Any] = await api.call(method, path, body)
    except ApiError as error:
        if error.code != "does_not_fit":
            raise
        raise await refusal(api, error.beside["preview"], error.request_id) from None
    return made


def _short(preview: Mapping[str, Any]) -> dict[str, set[str]]:
    """By node: the limits of which it has too little."""
    short: dict[str, set[str]] = {}
    for replica in preview["replicas"]:
        room = replica["available"]
        if replica["fits"] or room is None:
            continue
        lacking = {name for name in COUNTED if replica["reservation"][name] > room[name]}
        if lacking:
            short.setdefault(replica["node_id"], set()).update(lacking)
    return short


async def _holders(api: Api, short: Mapping[str, set[str]]) -> list[Holder]:
    """The services that this caller may see and that hold some of it. Replica and placement go by their order."""
    holders = []
    try:
        async for service in api.every("/inference"):
            held: Counter[str] = Counter()
            for replica, placement in zip(service["replicas"], service["spec"]["placements"], strict=False):
                if not replica["released"]:
                    lacking = short.get(placement["node_id"], ())
                    held.update({name: placement["limits"].get(name, 0) for name in lacking})
            if any(held.values()):
                holders.append(Holder(service["alias"], service["state"], dict(sorted(held.items()))))
    except ApiError as error:  # without the scope to read services, the refusal itself has to do
        if error.code != "denied":
            raise
        return []
    return holders


def _advice(
    preview: Mapping[str, Any], short: Mapping[str, set[str]], holders: list[Holder]
) -> Iterator[str]:
    tries = []
    for name, flag in FLAGS.items():
        if not any(name in lacking for lacking in short.values()):
            continue
        left = _fair_share(preview, name)
        needed = preview["replicas"][0]["estimate"]["total_bytes"] if name == "memory_bytes" else LEAST[name]
        if left >= needed:
            tries.append(f"{flag} {left}")
    tries += [f"ficc service stop {shlex.quote(holder.alias)}" for holder in holders]
    if tries:
        yield "Try " + ", or ".join(tries)


def _fair_share(preview: Mapping[str, Any], name: str) -> int:
    """What each replica could have at most, so that all of them fit. The first of a node sees all its room."""
    first: dict[str, int] = {}
    counts: Counter[str] = Counter(replica["node_id"] for replica in preview["replicas"])
    for replica in preview["replicas"]:
        first.setdefault(replica["node_id"], (replica["available"] or {}).get(name, 0))
    return min(room // counts[node_id] for node_id, room in first.items())


def _sum(limits: Mapping[str, int]) -> str:
    return " and ".join(_amount(name, limits[name]) for name in FLAGS)


def _amount(name: str, count: int) -> str:
    return amount(name, count) + WORDS.get(name, f" {name}")


def _named(node_id: str, names: Mapping[str, str]) -> str:
    return names.get(node_id, node_id)
