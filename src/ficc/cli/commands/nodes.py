"""Nodes: the machines that carry services."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ficc.cli import connection, output
from ficc.cli.options import Json, group
from ficc.domain.quantity import amount

if TYPE_CHECKING:
    from ficc.client.api import Api

app = group("Machines: what each has and offers.")


@app.command("list")
def list_nodes(as_json: Json = False) -> None:
    """Every node, with what is available on it."""

    async def work(api: Api) -> list[dict[str, Any]]:
        return [node async for node in api.every("/contributors")]

    nodes = connection.with_api(work)
    if as_json:
        output.show_json({"items": nodes, "next": None})
        return
    rows = [
        [
            node["name"],
            node["id"],
            "connected" if node["connected"] else "not connected",
            f"{node['available']['cpu_millis'] / 1000:g} of {node['capacity']['cpu_millis'] / 1000:g}",
            f"{output.size(node['available']['memory_bytes'])} of {output.size(node['capacity']['memory_bytes'])}",
            ", ".join(runtime["name"] for runtime in node["runtimes"]) or "none",
        ]
        for node in nodes
    ]
    output.show_table(
        ["NAME", "ID", "LINK", "CORES FREE", "MEMORY FREE", "RUNTIMES"],
        rows,
        "No nodes yet: start `ficc up`.",
    )


@app.command()
def show(node: str, as_json: Json = False) -> None:
    """One node in full."""
    found = connection.with_api(lambda api: connection.resolve(api, "/contributors", node, "name"))
    if as_json:
        output.show_json(found)
        return
    for name in (
        "name",
        "id",
        "connected",
        "accounts",
        "boot_id",
        "release",
        "endpoint_version",
        "snapshot_at",
    ):
        print(f"{name}: {found[name]}")
    devices = found["available"].pop("gpu_devices")
    for limit, count in found["available"].items():
        print(f"available {limit}: {amount(limit, count)} of {amount(limit, found['capacity'][limit])}")
    print(f"available gpu_devices: {', '.join(devices) or 'none'}")
    for limit, why in found["unenforceable"].items():
        print(f"cannot enforce {limit}: {why}")
    for runtime in found["runtimes"]:
        print(f"runtime {runtime['name']}: {runtime['provider']} {runtime['image_digest']}")
