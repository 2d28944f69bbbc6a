"""Models: manifests, progress, uploads."""

from __future__ import annotations

import base64
import binascii
from typing import Annotated, Any

from fastapi import Path, Query, Request, Response

from ficc.controller.api import shapes
from ficc.controller.api.caller import Caller
from ficc.controller.api.parts import PLAIN_DECIMAL, IdPath, Ops, Paging, listed, router
from ficc.controller.api.strict import UploadRoute, check_content_type
from ficc.domain import upload
from ficc.domain.errors import invalid
from ficc.domain.manifest import FILES_MAX

routes = router("models")
uploads = router("models", UploadRoute)

Index = Annotated[int, PLAIN_DECIMAL, Path(ge=0, lt=FILES_MAX)]
Offset = Annotated[int, PLAIN_DECIMAL, Query(ge=0, le=2**53 - 1)]


@routes.get("/models", response_model=shapes.Page[shapes.Model])
async def list_models(actor: Caller, operations: Ops, page: Paging) -> dict[str, Any]:
    """Manifests and verified-file progress, newest first. Scope: models:read."""
    found, cursor = await operations.models.page(actor, page)
    return listed([view.as_json() for view in found], cursor)


@routes.get("/models/{model_id}", response_model=shapes.Model)
async def get_model(actor: Caller, operations: Ops, model_id: IdPath) -> dict[str, Any]:
    """One model. Scope: models:read."""
    return (await operations.models.get(actor, model_id)).as_json()


@routes.post(
    "/models",
    response_model=shapes.Model,
    status_code=201,
    responses={200: {"model": shapes.Model, "description": "The project has this manifest already."}},
)
async def register_model(
    actor: Caller, operations: Ops, manifest: shapes.Manifest, response: Response
) -> dict[str, Any]:
    """Register a manifest; an equal one of the project answers with its record. Scope: models:manage."""
    view, made = await operations.models.register(actor, manifest.model_dump(exclude_none=True))
    response.status_code = 201 if made else 200
    return view.as_json()


@routes.post("/models/{model_id}/acquire", response_model=shapes.Model, status_code=202)
async def acquire_model(actor: Caller, operations: Ops, model_id: IdPath) -> dict[str, Any]:
    """Fetch what is missing of a model from its sources, or go on with it. Scope: models:manage."""
    await operations.acquisitions.acquire(actor, model_id)
    return (await operations.models.view(actor, model_id)).as_json()


@routes.post("/models/{model_id}/pause", response_model=shapes.Model, status_code=202)
async def pause_model(actor: Caller, operations: Ops, model_id: IdPath) -> dict[str, Any]:
    """End a download after the write that is under way; every durable byte stays. Scope: models:manage."""
    await operations.acquisitions.pause(actor, model_id)
    return (await operations.models.view(actor, model_id)).as_json()


@routes.post("/models/hub-preview", response_model=shapes.HubPreview)
async def preview_hub(actor: Caller, operations: Ops, wanted: shapes.HubWanted) -> dict[str, Any]:
    """The models of a hub's repository as manifests, with what their headers say and the memory they need;
    nothing of their weights is read. Scope: models:manage."""
    return await operations.hub.preview(
        actor, wanted.repository, wanted.revision, wanted.filename, wanted.licence
    )


@routes.get("/hub/search", response_model=shapes.HubFound)
async def search_hub(
    actor: Caller, operations: Ops, q: Annotated[str, Query(min_length=1, max_length=96)]
) -> dict[str, Any]:
    """Repositories of the configured hub that hold GGUF files, most fetched first. Scope: models:manage."""
    return {"items": await operations.hub.search(actor, q)}


@uploads.post("/models/{model_id}/files/{index}", response_model=shapes.UploadAnswer)
async def upload_json(
    actor: Caller, operations: Ops, model_id: IdPath, index: Index, piece: shapes.UploadJson
) -> dict[str, Any]:
    """A piece at exactly the durable offset. Empty at the declared size: verify and publish what is there.
    Scope: models:manage."""
    data = canonical_base64(piece.data)
    return _answer(index, await operations.models.upload(actor, model_id, index, piece.offset, data))


@routes.post(
    "/models/{model_id}/files/{index}/bytes",
    response_model=shapes.UploadAnswer,
    openapi_extra={
        "requestBody": {
            "required": True,
            "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}},
        }
    },
)
async def upload_octets(
    actor: Caller, operations: Ops, model_id: IdPath, index: Index, offset: Offset, request: Request
) -> dict[str, Any]:
    """At most 16 MiB at exactly the durable offset; two such uploads at a time in the installation. What
    arrived of a body that breaks off stays. Scope: models:manage."""
    check_content_type(request, "application/octet-stream")
    length = request.headers.get("content-length")
    declared = None if length is None else int(length)
    record = await operations.models.upload_stream(actor, model_id, index, offset, declared, request.stream())
    return _answer(index, record)


@routes.post("/models/{model_id}/files/{index}/adopt", response_model=shapes.UploadAnswer)
async def adopt_file(
    actor: Caller, operations: Ops, model_id: IdPath, index: Index, adopt: shapes.Adopt
) -> dict[str, Any]:
    """Take a file that was put into the incoming directory on the controller's own machine; its bytes are
    hashed like any others. Scope: models:manage."""
    return _answer(index, await operations.models.adopt(actor, model_id, index, adopt.name))


@routes.delete("/models/{model_id}", response_model=shapes.ModelRemoved)
async def delete_model(
    actor: Caller,
    operations: Ops,
    model_id: IdPath,
    evict: Annotated[bool, Query(description="Also free bytes that nothing else needs.")] = False,
) -> dict[str, Any]:
    """Remove a model that no service refers to. Verified bytes stay the project's unless they are evicted, and
    bytes that others share stay in any case. Scope: models:manage."""
    return await operations.eviction.delete(actor, model_id, evict=evict)


@routes.get("/models/{model_id}/eviction", response_model=shapes.Eviction)
async def preview_eviction(actor: Caller, operations: Ops, model_id: IdPath) -> dict[str, Any]:
    """What removing the model with `evict=true` would free and keep, and what forbids it. Scope: models:read."""
    return (await operations.eviction.preview(actor, model_id)).as_json()


def canonical_base64(text: str) -> bytes:
    """The bytes of base64 in its one canonical form (RFC 4648, section 4: padded, no other characters, no
    stray bits). Raises Refused `invalid_request`."""
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        data = None
    if data is None or base64.b64encode(data).decode() != text:
        raise invalid("data is canonical base64: the standard alphabet, padded, without line breaks.", "data")
    return data


def _answer(index: int, record: upload.Record) -> dict[str, Any]:
    return {
        "index": index,
        "offset": record.offset,
        "bytes": record.bytes,
        "state": record.state.value,
    }
