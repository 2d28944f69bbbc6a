"""Where the controller's parts are put together, and nowhere else."""

from __future__ import annotations

import asyncio
import logging
import os
import random
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from starlette.requests import Request

from ficc.content.store import ContentStore
from ficc.controller.api.app import management_app
from ficc.controller.api.caller import Callers
from ficc.controller.api.parts import Operations
from ficc.controller.node_hub.hub import Hub
from ficc.controller.node_hub.local import LocalNode
from ficc.controller.operations.access import Access, FirstStart
from ficc.controller.operations.acquisitions import Acquisitions
from ficc.controller.operations.audit import AuditReads
from ficc.controller.operations.authority import Authority
from ficc.controller.operations.contents import Contents
from ficc.controller.operations.context import Context
from ficc.controller.operations.estimates import Estimates
from ficc.controller.operations.eviction import Eviction
from ficc.controller.operations.health import Health
from ficc.controller.operations.hub import HubPreviews
from ficc.controller.operations.losses import Losses
from ficc.controller.operations.metering import Metering, Retention
from ficc.controller.operations.models import Models
from ficc.controller.operations.nodes import NodeReads
from ficc.controller.operations.peaks import Peaks
from ficc.controller.operations.planning import Planning
from ficc.controller.operations.progress import Progress
from ficc.controller.operations.routes import RouteTable
from ficc.controller.operations.services import Services
from ficc.controller.operations.usage import Usage
from ficc.controller.operations.workloads import Workloads
from ficc.controller.reconcilers.attempts import AttemptSteps
from ficc.controller.reconcilers.leases import LeaseRenewer
from ficc.controller.reconcilers.reconciler import Reconciler
from ficc.controller.reconcilers.services import ServiceReconciler
from ficc.controller.reconcilers.sweeper import Sweeper
from ficc.controller.reconcilers.workloads import WorkloadReconciler
from ficc.controller.sources.addresses import Walls
from ficc.controller.sources.https import Https
from ficc.controller.sources.hub import Hub as ModelHub
from ficc.controller.store.database import Database
from ficc.gateway.app import GatewayApp, Send, is_inference
from ficc.gateway.intake import Receive, Scope
from ficc.gateway.limiter import Limiter
from ficc.gateway.relay import Gateway, Limits
from ficc.settings import Settings

RESTART_SECONDS = 1.0

log = logging.getLogger("ficc.controller")


class UnusableFile(Exception):
    """A file that a setting names cannot be read, or is not what it should be."""


@dataclass(frozen=True, slots=True)
class Inference:
    """The seam for code inside the controller: `controller.inference.gateway.invoke(…)`."""

    gateway: Gateway
    services: Services


class Controller:
    """One controller: an ASGI application, its background work, and the seams for code inside it."""

    def __init__(self, settings: Settings) -> None:
        """Raises UnusableFile."""
        self.settings = settings
        self.context = context = Context(settings, Database(settings.database_url))
        self.contents = Contents(
            context, ContentStore(settings.content_directory, settings.content.reserve_bytes)
        )
        self._look_again = asyncio.Event()
        self._peaks = Peaks(context)
        self.hub = Hub(
            context, on_change=self._look_again.set, on_join=self._wake_leases, on_peak=self._peaks.note
        )
        self.authority = Authority(context, self._recheck)
        self.routes = RouteTable(context, self.hub, self._recheck)
        self._metering = Metering(context)
        self.gateway = Gateway(
            routes=self.routes,
            authority=self.authority,
            limits=Limits(
                queue_max=settings.gateway.queue_max,
                queue_seconds=settings.gateway.queue_seconds,
                json_depth_max=settings.gateway.json_depth_max,
                json_values_max=settings.gateway.json_values_max,
                body_bytes_max=settings.gateway.body_bytes_max,
                body_bytes_total_max=settings.gateway.body_bytes_total_max,
                keep_alive_seconds=settings.gateway.keep_alive_seconds,
            ),
            meter=self._metering,
            limiter=Limiter(settings.limits.of_project),
            new_id=context.new_id,
            now=context.now,
        )
        self.access = Access(context, self.authority)
        walls = Walls.of(settings.acquisition)
        with _naming("acquisition.ca_file", settings.acquisition.ca_file):
            self._https = Https(walls)
        with _naming("hub.token_file", settings.hub.token_file):
            token = _token(settings.hub.token_file)
        hub = ModelHub(self._https, str(settings.hub.endpoint), token)
        self._acquisitions = Acquisitions(
            context, self.contents, self._https, walls, hub.credential, random.random
        )
        self._losses = Losses(context, self.contents.store)
        load = _GatewayLoad(self.gateway)
        planning = Planning(context, self.hub, Estimates(self.contents.store))
        progress = Progress()
        self.services = Services(context, self.hub, self.access, load, planning, self._losses, progress)
        self.inference = Inference(self.gateway, self.services)
        steps = AttemptSteps(context, self.hub, self._losses.examine, self._look_again.set, progress)
        self._reconciler = Reconciler(
            context,
            steps,
            [ServiceReconciler(context, steps, self.services, load), WorkloadReconciler(context, steps)],
            self._look_again,
        )
        self.workloads = Workloads(context, self.hub, planning, self._losses, steps.beliefs)
        self._leases = LeaseRenewer(context, self.hub)
        self._sweeper = Sweeper(self.contents.orphans, settings.content.sweep_seconds)
        self._local = LocalNode(self.hub, settings.executor_socket)
        self._tasks: list[asyncio.Task[None]] = []
        callers = Callers(settings, self.authority)
        self._management = management_app(
            Operations(
                health=Health(context),
                access=self.access,
                models=Models(context, self.contents, self._acquisitions.notes),
                acquisitions=self._acquisitions,
                hub=HubPreviews(hub),
                eviction=Eviction(context, self.contents),
                services=self.services,
                usage=Usage(context),
                nodes=NodeReads(context, self.hub),
                workloads=self.workloads,
                audit=AuditReads(context),
            ),
            callers,
        )
        self._inference_app = GatewayApp(
            gateway=self.gateway,
            routes=self.routes,
            authority=self.authority,
            browser=lambda scope: callers.browser(Request(scope)),
            allowed_origins=settings.server.allowed_origins,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The ASGI application."""
        app: Callable[[Any, Any, Any], Awaitable[None]] = self._management
        if scope["type"] == "http" and is_inference(scope["path"]):
            app = self._inference_app
        await app(scope, receive, send)

    def openapi(self) -> Mapping[str, Any]:
        return self._management.openapi()

    def _wake_leases(self) -> None:
        self._leases.wake()

    def _recheck(self) -> None:
        self.gateway.recheck()

    async def start(self, *, token_label: str | None = None) -> FirstStart:
        """Bring schema, content and memory up to date, then begin the background work."""
        await asyncio.to_thread(self.context.database.migrate)
        await asyncio.to_thread(self.contents.store.prepare)
        first = await self.access.first_start(token_label=token_label)
        await asyncio.to_thread(self.contents.store.claim, first.installation_id)
        await self.contents.recover(alone=self.context.database.is_sqlite)
        await self._losses.look()
        await self.authority.refresh()
        await self.routes.refresh()
        for name, work in (
            ("authority", self.authority.run),
            ("routes", self.routes.run),
            ("acquisitions", self._acquisitions.run),
            ("local node", self._local.run),
            ("leases", self._leases.run),
            ("memory peaks", self._peaks.run),
            ("metering", self._metering.run),
            ("retention of usage records", Retention(self.context).run),
            ("reconciler", self._reconciler.run),
            ("sweeper", self._sweeper.run),
        ):
            self._tasks.append(asyncio.create_task(_forever(name, work)))
        return first

    async def stop(self) -> None:
        """End the background work. Attempts go on: their leases decide."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._reconciler.close()
        await self._https.close()
        await self.contents.close()
        await self._metering.close()
        self.context.database.close()
        await self.gateway.close()


class _GatewayLoad:
    """The gateway's counts, as operations ask for them."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    def in_flight(self, service_id: str) -> Mapping[str, int]:
        return self._gateway.slots.in_flight(service_id)

    def total(self, service_id: str) -> int:
        return self._gateway.slots.total(service_id)


@contextmanager
def _naming(setting: str, file: Path | None) -> Iterator[None]:
    try:
        yield
    except (OSError, UnicodeDecodeError) as error:  # an SSLError is the first, too
        why = getattr(error, "strerror", None) or error
        raise UnusableFile(
            f"{setting} {file} cannot be used: {why}. The account {os.geteuid()} reads it."
        ) from None


def _token(file: Path | None) -> str | None:
    return None if file is None else file.read_text().strip() or None


async def _forever(name: str, work: Callable[[], Awaitable[None]]) -> None:
    """Background work that a fault of ours does not end: it is said, and begun again."""
    while True:
        try:
            await work()
        except Exception:
            log.exception("a fault in %s; it begins again", name)
            await asyncio.sleep(RESTART_SECONDS)
