"""People and clients: what they ask for, at random, of controllers that may be gone when they answer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

from ficc.controller.operations.context import Page
from ficc.domain.errors import Refused
from ficc.inference.schema import Specification
from simulation.controllers import SECRET, Controller
from simulation.machine import CAPACITY
from simulation.sandboxes import IMAGE_DIGEST, PACKAGE_DIGEST

if TYPE_CHECKING:
    from simulation.world import World

PATIENCE_SECONDS = 30.0
DEADLINE_SECONDS = 15
LATE_SECONDS = 5.0
SERVICES_MAX = 3
EXPECTED = frozenset(
    {
        "action_not_allowed",
        "alias_taken",
        "attempt_not_released",
        "database_unavailable",
        "does_not_fit",
        "inference_unknown_outcome",
        "not_found",
        "preview_changed",
        "revision_conflict",
        "service_not_stopped",
    }
)
"""What an operator may be told. Anything else is a fault."""


class Lost(Exception):
    """No answer came."""


class Operator:
    def __init__(self, world: World) -> None:
        self.world = world
        self.aliases = 0
        self.requests = 0
        self.asked: list[str] = []

    # Asking a controller.

    async def ask(self, controller: Controller, work: Callable[[Any], Coroutine[Any, Any, Any]]) -> Any:
        """What the controller answers. Raises Refused, Lost."""
        world, real, process = self.world, controller.real, controller.process
        if real is None or process is None or not controller.up:
            raise Lost
        answer: asyncio.Future[Any] = world.loop.create_future()

        async def run() -> None:
            try:
                result = await work(real)
            except Exception as error:
                if not answer.done():
                    answer.set_exception(error)
            else:
                if not answer.done():
                    answer.set_result(result)

        process.run(run())
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                return await answer
        except TimeoutError:
            raise Lost from None

    def any_controller(self) -> Controller:
        up = [one for one in self.world.controllers if one.up] or self.world.controllers
        return self.world.chance.choice(up)

    # Managing.

    async def act(self) -> None:
        """One thing that an operator does."""
        world = self.world
        controller = self.any_controller()
        try:
            shown = await self.ask(controller, lambda real: self._page(real))
            if len(shown) < SERVICES_MAX and (not shown or world.chance.random() < 0.3):
                await self.create(controller)
            elif shown:
                await self.change(controller, world.chance.choice(shown))
        except Lost:
            pass
        except Refused as refused:
            if refused.code not in EXPECTED:
                world.violated(f"an operator was told {refused.code}: {refused.message}")

    async def _page(self, real: Any) -> list[dict[str, Any]]:
        views, _ = await real.services.page(self.actor(real), Page())
        return [view.as_json() for view in views]

    @staticmethod
    def actor(real: Any) -> Any:
        return real.authority.authenticate(SECRET)

    def specification(self, alias: str) -> Specification:
        chance = self.world.chance
        machines = [one for one in self.world.machines.values() if one.executor_id]
        placements = [
            {
                "node_id": chance.choice(machines).executor_id,
                "limits": {
                    "cpu_millis": CAPACITY.cpu_millis // chance.choice((1, 2, 4)),
                    "memory_bytes": 1 << 30,
                    "storage_bytes": 1 << 20,
                },
            }
            for _ in range(chance.choice((1, 2)))
        ]
        return Specification.model_validate(
            {
                "alias": alias,
                "model_id": self.world.scaffold.model,
                "engine": "llama_cpp",
                "runtime": {
                    "provider": "bubblewrap",
                    "package_digest": PACKAGE_DIGEST,
                    "image_digest": IMAGE_DIGEST,
                    "isolation": "shared-kernel",
                    "network": "none",
                },
                "executable": "/opt/engine/bin/llama-server",
                "context": 512,
                "concurrency": 2,
                "placements": placements,
                "deadline_seconds": DEADLINE_SECONDS,
            }
        )

    async def create(self, controller: Controller) -> None:
        if not any(one.executor_id for one in self.world.machines.values()):
            return
        self.aliases += 1
        specification = self.specification(f"service-{self.aliases}")
        self.world.trace(f"operator: create {specification.alias} on {controller.name}")

        async def work(real: Any) -> Any:
            planned = await real.services.preview(self.actor(real), specification)
            digest = planned.preview_digest if self.world.chance.random() < 0.5 else None
            return await real.services.create(self.actor(real), specification, digest)

        await self.ask(controller, work)

    async def change(self, controller: Controller, shown: dict[str, Any]) -> None:
        chance = self.world.chance
        ended = shown["state"] in ("stopped", "failed")
        action = chance.choice(
            ("start", "start", "replace", "remove")
            if ended
            else ("stop", "drain", "stop", "wait", "wait", "wait")
        )
        if chance.random() < 0.1:
            action = chance.choice(("start", "stop", "drain", "remove", "replace"))
        if action == "wait":
            return
        revision = shown["revision"] - (chance.random() < 0.1)
        both = chance.random() < 0.2
        tries = [
            self.control(one, shown["id"], action, revision) for one in ([controller, *self._second(both)])
        ]
        results = await asyncio.gather(*tries, return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException) and not isinstance(result, (Refused, Lost)):
                raise result
        done = [result for result in results if isinstance(result, int)]
        if len(done) > 1 and len(set(done)) > 1:
            self.world.violated(
                f"two {action} of {shown['id']} at revision {revision} both changed it: {done}"
            )
        for result in results:
            if isinstance(result, Refused):
                raise result

    def _second(self, both: bool) -> list[Controller]:
        return [self.any_controller()] if both else []

    async def control(self, controller: Controller, service_id: str, action: str, revision: int) -> int:
        """The revision after the action."""
        acknowledge = self.world.chance.random() < 0.5
        self.world.trace(
            f"operator: {action} {service_id[-6:]} at {revision} on {controller.name}"
            + (", acknowledging" if acknowledge and action in ("start", "replace") else "")
        )
        if acknowledge:
            self.world.invariants.acknowledged.add((service_id, revision))
        specification = self.specification(f"service-{service_id[-6:]}") if action == "replace" else None

        async def work(real: Any) -> Any:
            actor = self.actor(real)
            if specification is not None:
                return await real.services.replace(
                    actor, service_id, revision, specification, acknowledge_unknown=acknowledge
                )
            given = (acknowledge or None) if action == "start" else None
            return await real.services.control(actor, service_id, action, revision, given)

        view = await self.ask(controller, work)
        return -1 if view is None else int(view.service.record.revision)

    # Requesting.

    async def request(self) -> None:
        world = self.world
        routes = list(world.invariants.services)
        if not routes:
            return
        self.requests += 1
        key = f"request-{self.requests}"
        service_id = world.chance.choice(routes)
        controller = self.any_controller()
        began = world.loop.now
        body = json.dumps({"messages": [{"role": "user", "content": "."}], "user": key}).encode()

        async def work(real: Any) -> int:
            status, chunks = await real.gateway.invoke(
                service_id, "/v1/chat/completions", body, self.actor(real)
            )
            try:
                async for _ in chunks:
                    pass
            except Exception as error:
                if type(error).__name__ != "StreamAborted":
                    raise
            finally:
                await chunks.aclose()
            return int(status)

        leaves = world.chance.random() < 0.1
        try:
            async with asyncio.timeout(0.2 if leaves else None):
                status = await self.ask(controller, work)
        except (Lost, TimeoutError, Refused):
            return
        if status == 200 and not world.invariants.requests[key]:
            world.violated(f"{key} was answered, and no engine ever saw it")
        waited = world.loop.now - began
        if waited > DEADLINE_SECONDS + LATE_SECONDS and not leaves and not world.was_stopped(controller):
            world.violated(f"{key} waited {waited:.1f} s, past its deadline")
