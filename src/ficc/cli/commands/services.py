"""Services: preview, create, watch, control, tokens, logs."""

from __future__ import annotations

import asyncio
import json
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ficc.cli import connection, fit, log_view, output
from ficc.cli.commands.tokens import Out, secret_file, show_once
from ficc.cli.failure import usage
from ficc.cli.options import Json, Wait, Yes, confirm, group
from ficc.cli.specification import Wishes, build

if TYPE_CHECKING:
    from ficc.client.api import Api

app = group("Services: models that answer.")

POLL_SECONDS = 0.3
FOLLOW_SECONDS = 1.0
TOKEN_SECONDS = 30 * 86_400
CPU_HELP = "Thousandths of a core for each replica; by default half of the node's free cores, at least one."
SETTLED = frozenset({"ready", "degraded", "failed", "stopped"})


class Tries(StrEnum):
    ON_FAILURE = "on_failure"
    NEVER = "never"


Model = Annotated[str | None, typer.Option(help="A model's name or id.")]
Node = Annotated[list[str] | None, typer.Option(help="A node's name or id; may be given several times.")]
Replicas = Annotated[int, typer.Option(help="Replicas on each node.", min=1, max=64)]
RuntimeName = Annotated[str | None, typer.Option(help="A runtime image's name or digest.")]
Context = Annotated[int, typer.Option(help="Tokens per request.", min=1)]
Concurrency = Annotated[int, typer.Option(help="Simultaneous requests per replica.", min=1)]
Memory = Annotated[int | None, typer.Option("--memory-bytes", help="Memory limit of each replica.")]
Cpus = Annotated[int | None, typer.Option("--cpu-millis", help=CPU_HELP)]
Deadline = Annotated[int, typer.Option("--deadline-seconds", help="Of each request, waiting included.")]
Restart = Annotated[
    Tries | None, typer.Option(help="Whether a replica that failed is tried again, as it is by default.")
]
SpecFile = Annotated[Path | None, typer.Option("--spec", help="A specification as JSON.", exists=True)]


async def _specification(
    api: Api, alias: str, spec: Path | None, wishes: Wishes | None, restart: Tries | None
) -> dict[str, Any]:
    more = {} if restart is None else {"restart": restart.value}
    if spec is not None:
        document: dict[str, Any] = json.loads(spec.read_text())  # noqa: ASYNC240  # nothing else runs
        return {**document, "alias": alias, **more}
    if wishes is None:
        raise typer.BadParameter("give --model, or a whole specification with --spec")
    return {**await build(api, wishes), **more}


def _wishes(
    alias: str,
    model: str | None,
    node: list[str] | None,
    replicas: int,
    runtime: str | None,
    context: int,
    concurrency: int,
    memory: int | None,
    cpus: int | None,
    deadline: int,
) -> Wishes | None:
    if model is None:
        return None
    return Wishes(
        alias, model, tuple(node or ()), replicas, runtime, context, concurrency, memory, cpus, deadline
    )


@app.command()
def preview(
    alias: str,
    model: Model = None,
    node: Node = None,
    replicas: Replicas = 1,
    runtime: RuntimeName = None,
    context: Context = 2048,
    concurrency: Concurrency = 4,
    memory: Memory = None,
    cpus: Cpus = None,
    deadline: Deadline = 600,
    restart: Restart = None,
    spec: SpecFile = None,
    as_json: Json = False,
) -> None:
    """What a service would reserve and whether it fits; nothing is started."""
    wishes = _wishes(alias, model, node, replicas, runtime, context, concurrency, memory, cpus, deadline)

    async def work(api: Api) -> tuple[dict[str, Any], dict[str, str]]:
        document = await _specification(api, alias, spec, wishes, restart)
        found: dict[str, Any] = await api.call("POST", "/inference/preview", document)
        if not found["accepted"]:
            raise await fit.refusal(api, found)
        return found, {} if as_json else await fit.node_names(api)

    found, names = connection.with_api(work)
    if as_json:
        output.show_json(found)
    else:
        for line in fit.lines(found, names):
            print(line)


@app.command()
def create(
    alias: str,
    model: Model = None,
    node: Node = None,
    replicas: Replicas = 1,
    runtime: RuntimeName = None,
    context: Context = 2048,
    concurrency: Concurrency = 4,
    memory: Memory = None,
    cpus: Cpus = None,
    deadline: Deadline = 600,
    restart: Restart = None,
    spec: SpecFile = None,
    wait: Wait = True,
    as_json: Json = False,
) -> None:
    """Start a service: every replica, or nothing."""
    wishes = _wishes(alias, model, node, replicas, runtime, context, concurrency, memory, cpus, deadline)

    async def work(api: Api) -> dict[str, Any]:
        document = await _specification(api, alias, spec, wishes, restart)
        made = await fit.submit(api, "POST", "/inference", document)
        return await _watch(api, made) if wait else made

    _show_outcome(connection.with_api(work), as_json=as_json)


@app.command()
def replace(
    service: str,
    model: Model = None,
    node: Node = None,
    replicas: Replicas = 1,
    runtime: RuntimeName = None,
    context: Context = 2048,
    concurrency: Concurrency = 4,
    memory: Memory = None,
    cpus: Cpus = None,
    deadline: Deadline = 600,
    restart: Restart = None,
    spec: SpecFile = None,
    acknowledge_unknown: bool = False,
    wait: Wait = True,
    as_json: Json = False,
) -> None:
    """Start a stopped service's next generation under another specification. With nothing but
    `--runtime current`, its own specification under the node's current runtime."""

    async def work(api: Api) -> dict[str, Any]:
        found = await connection.resolve(api, "/inference", service, "alias")
        alias = found["alias"]
        if model is None and spec is None:
            document = await _with_runtime(api, found, None if runtime == "current" else runtime)
            document |= {} if restart is None else {"restart": restart.value}
        else:
            wishes = _wishes(
                alias, model, node, replicas, runtime, context, concurrency, memory, cpus, deadline
            )
            document = await _specification(api, alias, spec, wishes, restart)
        body: dict[str, Any] = {"revision": found["revision"], "spec": document}
        if acknowledge_unknown:
            body["acknowledge_unknown"] = True
        made = await fit.submit(api, "PUT", f"/inference/{found['id']}", body)
        return await _watch(api, made) if wait else made

    _show_outcome(connection.with_api(work), as_json=as_json)


async def _with_runtime(api: Api, found: dict[str, Any], runtime: str | None) -> dict[str, Any]:
    """A service's own specification under the runtime that its node offers now."""
    document = dict(found["spec"])
    first = document["placements"][0]
    wishes = Wishes(
        alias=found["alias"],
        model=document["model_id"],
        nodes=(first["node_id"],),
        replicas=1,
        runtime=runtime,
        context=document["context"],
        concurrency=document["concurrency"],
        memory_bytes=None,
        cpu_millis=None,
        deadline_seconds=document["deadline_seconds"],
    )
    document["runtime"] = (await build(api, wishes))["runtime"]
    return document


async def _watch(api: Api, service: dict[str, Any], until: frozenset[str] = SETTLED) -> dict[str, Any]:
    """Follow a service until it settles, saying each change."""
    said = None
    while True:
        now = _progress(service)
        if now != said:
            output.say(now)
            said = now
        if service["state"] in until:
            return service
        await asyncio.sleep(POLL_SECONDS)
        service = await api.call("GET", f"/inference/{service['id']}")


def _progress(service: dict[str, Any]) -> str:
    parts = []
    for replica in service["replicas"]:
        reason = replica["reason"]
        parts.append(replica["state"] + (f" ({_first_line(reason['message'])})" if reason else ""))
    text = f"{service['alias']}: {service['state']}" + (f"; replicas {', '.join(parts)}" if parts else "")
    if service["state"] == "draining":
        open_now = sum(replica["in_flight"] for replica in service["replicas"])
        text += f"; {open_now} in flight"
    return text


def _first_line(message: str) -> str:
    """Without what an engine said, where that follows elsewhere."""
    return message.partition("\n")[0]


def _show_outcome(service: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        output.show_json(service)
    else:
        print(f"{service['state'].capitalize()}  {service['alias']}  {service['id']}")
    if service["state"] == "failed":
        reason = service["reason"] or {"code": "failed", "message": "The service failed."}
        if not as_json:
            output.show_error(reason["message"], reason["code"], as_json=False)
        raise typer.Exit(1)
    if service["state"] == "ready":
        output.say(f"Next   ficc chat {service['alias']} · ficc service token {service['alias']}")


@app.command("list")
def list_services(as_json: Json = False) -> None:
    """Services of the project, newest first."""

    async def work(api: Api) -> list[dict[str, Any]]:
        return [service async for service in api.every("/inference")]

    services = connection.with_api(work)
    if as_json:
        output.show_json({"items": services, "next": None})
        return
    rows = [
        [s["alias"], s["id"], s["state"], s["generation"], len(s["replicas"]), ", ".join(s["capabilities"])]
        for s in services
    ]
    output.show_table(
        ["ALIAS", "ID", "STATE", "GENERATION", "REPLICAS", "CAPABILITIES"],
        rows,
        "No services yet: ficc service create ALIAS --model NAME",
    )


@app.command()
def show(service: str, as_json: Json = False) -> None:
    """One service with its replicas."""

    async def work(api: Api) -> tuple[dict[str, Any], dict[str, str]]:
        found = await connection.resolve(api, "/inference", service, "alias")
        return found, {} if as_json else await fit.node_names(api)

    found, names = connection.with_api(work)
    if as_json:
        output.show_json(found)
        return
    print(f"{found['alias']}  {found['id']}  {found['state']} (wanted: {found['desired']})")
    print(f"generation {found['generation']}  revision {found['revision']}")
    if found["reason"]:
        print(f"{found['reason']['code']}: {found['reason']['message']}")
    for number, replica in enumerate(found["replicas"], 1):
        node = names.get(replica["node_id"], replica["node_id"])
        print(f"  replica {number} on {node}: {replica['state']}, {replica['in_flight']} in flight")
        print(f"    plan {replica['plan_digest']}  model {replica['model_revision']}")
        if replica["reason"]:
            message = replica["reason"]["message"]
            if found["reason"]:  # it has said all of it
                message = _first_line(message)
            print(f"    {replica['reason']['code']}: {message}")


def _control(service: str, action: str, *, wait: bool, as_json: bool, **more: Any) -> None:
    async def work(api: Api) -> dict[str, Any]:
        found = await connection.resolve(api, "/inference", service, "alias")
        body = {"revision": found["revision"], **more}
        after = await fit.submit(api, "POST", f"/inference/{found['id']}/control/{action}", body)
        if action == "remove" or not wait:
            return after
        return await _watch(api, after, SETTLED if action == "start" else frozenset({"stopped", "failed"}))

    after = connection.with_api(work)
    if action == "remove":
        if as_json:
            output.show_json(after)
        else:
            output.say("Removed.")
    else:
        _show_outcome(after, as_json=as_json)


@app.command()
def start(service: str, acknowledge_unknown: bool = False, wait: Wait = True, as_json: Json = False) -> None:
    """Start the next generation of a stopped service. Nothing is replayed."""
    more = {"acknowledge_unknown": True} if acknowledge_unknown else {}
    _control(service, "start", wait=wait, as_json=as_json, **more)


@app.command()
def drain(service: str, wait: Wait = True, as_json: Json = False) -> None:
    """Take no new requests, finish the open ones, then stop."""
    _control(service, "drain", wait=wait, as_json=as_json)


@app.command()
def stop(service: str, wait: Wait = True, yes: Yes = False, as_json: Json = False) -> None:
    """Stop now; open requests end with an error."""
    confirm(f"Stop {service} now? Requests in flight end with an error; `drain` lets them finish.", yes)
    _control(service, "stop", wait=wait, as_json=as_json)


@app.command()
def remove(service: str, yes: Yes = False, as_json: Json = False) -> None:
    """Remove a stopped service and its tokens."""
    confirm(f"Remove {service} and its tokens?", yes)
    _control(service, "remove", wait=False, as_json=as_json)


@app.command()
def token(
    service: str,
    lifetime_seconds: Annotated[int, typer.Option(help="Thirty days by default.")] = TOKEN_SECONDS,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Make a credential that can call this one service. It is shown once."""

    async def work(api: Api) -> dict[str, Any]:
        found = await connection.resolve(api, "/inference", service, "alias")
        made: dict[str, Any] = await api.call(
            "POST", f"/inference/{found['id']}/tokens", {"lifetime": lifetime_seconds}
        )
        return made

    with secret_file(out) as file:
        made = connection.with_api(work)
        show_once(made, file, as_json=as_json)
    output.say(f"Base URL  {made['base_url']}")


@app.command()
def logs(
    service: str,
    replica: Annotated[int, typer.Option(help="Which replica, from 1, as `show` counts them.", min=1)] = 1,
    attempt: Annotated[
        int | None, typer.Option(help="One of the five latest; by default the newest.", min=1)
    ] = None,
    generation: Annotated[
        int | None, typer.Option(help="Of the attempt; by default the current one.", min=1)
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on with what is said from now on.")
    ] = False,
    as_json: Json = False,
) -> None:
    """The newest part of the log of a replica's newest attempt, or of one of the four before it."""
    if follow and (attempt is not None or generation is not None or as_json):
        raise typer.BadParameter("--follow is of the newest attempt, and no JSON")

    async def work(api: Api) -> dict[str, Any]:
        found = await connection.resolve(api, "/inference", service, "alias")
        if replica > len(found["replicas"]) > 0:
            raise usage(f"{found['alias']} has {len(found['replicas'])} replica(s), counted from 1.")
        wanted = {"replica": replica - 1, "attempt": attempt, "generation": generation}
        query = {name: str(value) for name, value in wanted.items() if value is not None}
        path = f"/inference/{found['id']}/logs"
        log: dict[str, Any] = await api.call("GET", path, query=query)
        if not as_json:
            log_view.show(log)
        while follow:
            await asyncio.sleep(FOLLOW_SECONDS)
            log = log_view.show_more(log, await api.call("GET", path, query=query))
        return log

    log = connection.with_api(work)
    if as_json:
        output.show_json(log)
