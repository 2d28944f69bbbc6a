"""Content: what a project has bytes of, and the removal of what no model refers to."""

from __future__ import annotations

from typing import Any

from ficc.controller.api import shapes
from ficc.controller.api.caller import Caller
from ficc.controller.api.parts import Ops, Paging, listed, router

routes = router("content")


@routes.get("/content", response_model=shapes.Page[shapes.Content])
async def list_content(actor: Caller, operations: Ops, page: Paging) -> dict[str, Any]:
    """Blobs and partials of the project, newest first. Scope: models:manage."""
    items, cursor = await operations.eviction.page(actor, page)
    return listed(items, cursor)


@routes.post("/content/prune", response_model=shapes.Pruned)
async def prune_content(actor: Caller, operations: Ops, prune: shapes.Prune) -> dict[str, Any]:
    """Give up every content that no model of the project refers to; bytes that another project has stay for
    it. A dry run removes nothing. Scope: models:manage."""
    return (await operations.eviction.prune(actor, dry_run=prune.dry_run)).as_json()
