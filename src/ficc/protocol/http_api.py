"""The HTTP shape of answers: error bodies, their codes and statuses, request ids.

Every error on every route is `{"error": {"code", "message", "type", "param"}}`, which OpenAI's SDKs
also understand. This module is the only one that maps a code to an HTTP status.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal

from ficc.domain.errors import Refused

ErrorType = Literal[
    "invalid_request_error",
    "authentication_error",
    "permission_error",
    "not_found_error",
    "conflict_error",
    "rate_limit_error",
    "server_error",
]


@dataclass(frozen=True, slots=True)
class Code:
    """How a code is answered, and whether an engine may have seen the request by then."""

    status: int
    type: ErrorType
    summary: str
    engine_may_have_seen_it: bool = False


CODES: Mapping[str, Code] = {
    # the request itself
    "invalid_json": Code(400, "invalid_request_error", "The body is not JSON as RFC 8259 has it."),
    "invalid_request": Code(422, "invalid_request_error", "A field is missing, unknown or out of bounds."),
    "invalid_body": Code(
        400, "invalid_request_error", "An inference body breaks a rule of the OpenAI shape."
    ),
    "bad_http": Code(400, "invalid_request_error", "The HTTP request is malformed or ambiguous."),
    "too_large": Code(413, "invalid_request_error", "The body is over the limit of its route."),
    "headers_too_large": Code(431, "invalid_request_error", "The request's headers are over the limit."),
    "connections_full": Code(503, "server_error", "The server has as many connections as it takes."),
    "request_timeout": Code(408, "invalid_request_error", "The request did not arrive in time."),
    "unsupported_media_type": Code(415, "invalid_request_error", "The route takes another type or coding."),
    "not_found": Code(404, "not_found_error", "There is no such object in this project."),
    "method_not_allowed": Code(405, "invalid_request_error", "The route has other methods."),
    # who asks
    "unauthenticated": Code(401, "authentication_error", "A credential is missing, unknown or expired."),
    "denied": Code(403, "permission_error", "The credential lacks the scope named in `param`."),
    "csrf_failed": Code(403, "permission_error", "A browser request without its token or from elsewhere."),
    "project_changed": Code(409, "conflict_error", "The window shows another project than the session."),
    "session_changed": Code(409, "conflict_error", "The window belongs to an earlier session."),
    # models
    "offset_mismatch": Code(409, "conflict_error", "The upload starts elsewhere than the durable offset."),
    "empty_upload": Code(422, "invalid_request_error", "An empty upload that finishes nothing."),
    "upload_busy": Code(429, "rate_limit_error", "Two octet-stream uploads are already active."),
    "source_mismatch": Code(422, "invalid_request_error", "The bytes hash to something else."),
    "source_unavailable": Code(502, "server_error", "The source does not answer, or answers with an error."),
    "source_refused": Code(
        422, "invalid_request_error", "The source's address, scheme, host or redirect is not permitted."
    ),
    "source_changed": Code(409, "conflict_error", "The source serves another file than at the start."),
    "range_unsupported": Code(502, "server_error", "The source cannot send a file from the middle."),
    "stalled": Code(504, "server_error", "The source stopped sending, again and again."),
    "quota_exceeded": Code(507, "server_error", "The project's share of the content store is used up."),
    "model_header_refused": Code(422, "invalid_request_error", "A model file's header is malformed."),
    "repository_not_found": Code(404, "not_found_error", "The hub has no such repository or revision."),
    "repository_gated": Code(403, "permission_error", "The hub wants terms accepted or a token first."),
    "hub_rate_limited": Code(429, "rate_limit_error", "The hub takes no more requests for a while."),
    "content_hash_missing": Code(422, "invalid_request_error", "The hub declares no digest for a file."),
    "model_referenced": Code(409, "conflict_error", "Services still refer to the model."),
    "model_busy": Code(409, "conflict_error", "The model is being written."),
    "model_not_ready": Code(409, "conflict_error", "Not every file of the model is verified."),
    "disk_full": Code(507, "server_error", "A disk that has to be written to has no room."),
    "content_unavailable": Code(503, "server_error", "The content store cannot be read or written."),
    # services
    "revision_conflict": Code(409, "conflict_error", "The object changed since that revision was read."),
    "alias_taken": Code(409, "conflict_error", "Another service of the project has this alias."),
    "does_not_fit": Code(409, "conflict_error", "A placement cannot be met; nothing was created."),
    "preview_changed": Code(409, "conflict_error", "The plan differs from the preview that was accepted."),
    "service_not_stopped": Code(409, "conflict_error", "The action needs a stopped or failed service."),
    "action_not_allowed": Code(409, "conflict_error", "The state of the object does not allow the action."),
    "attempt_not_released": Code(409, "conflict_error", "An earlier attempt has not been released."),
    "inference_unknown_outcome": Code(409, "conflict_error", "A replica ended unknown; acknowledge it."),
    # workloads
    "input_not_verified": Code(409, "conflict_error", "The project has no verified file of this digest."),
    "idempotency_conflict": Code(409, "conflict_error", "The key was used for another job."),
    "unknown_outcome": Code(409, "conflict_error", "The job's last attempt ended unknown; acknowledge it."),
    "lease_not_over": Code(409, "conflict_error", "The attempt's node may still run it."),
    "gpu_missing": Code(409, "conflict_error", "The node has no GPU of this name."),
    "runtime_changed": Code(409, "conflict_error", "The node has another build of the sandbox provider."),
    # runtime images
    "image_refused": Code(422, "invalid_request_error", "An image differs from what it says of itself."),
    "image_not_found": Code(404, "not_found_error", "No image of this name or digest was imported there."),
    "image_in_use": Code(409, "conflict_error", "A sandbox runs from the image."),
    "build_failed": Code(500, "server_error", "A runtime image could not be built."),
    # inference
    "capability_unavailable": Code(400, "invalid_request_error", "The model was not declared for this."),
    "model_not_found": Code(404, "not_found_error", "The body names a model that this URL does not serve."),
    "queue_full": Code(429, "rate_limit_error", "Every slot is taken and the queue is full."),
    "rate_limited": Code(429, "rate_limit_error", "The credential or its project asked for too much."),
    "bodies_full": Code(429, "rate_limit_error", "Too many request bodies are held at once."),
    "service_not_ready": Code(503, "server_error", "No replica of the service is ready."),
    "service_draining": Code(503, "server_error", "The service finishes what it has and takes no more."),
    "service_stopped": Code(503, "server_error", "The service was stopped.", True),
    "client_gone": Code(499, "invalid_request_error", "The client left before its answer was whole.", True),
    "peer_lost": Code(502, "server_error", "The connection to the replica broke.", True),
    "engine_error": Code(502, "server_error", "The engine failed or answered what it should not.", True),
    "deadline_exceeded": Code(504, "server_error", "The deadline of the service passed.", True),
    "fenced": Code(409, "conflict_error", "The replica is of an earlier attempt or generation.", True),
    "busy": Code(429, "rate_limit_error", "The replica has no free slot; the engine saw nothing."),
    "engine_busy": Code(429, "rate_limit_error", "The engine itself takes no more requests for now.", True),
    # the executor
    "lease_refused": Code(409, "conflict_error", "A lease cannot be granted or renewed as asked."),
    "attempt_unknown": Code(404, "not_found_error", "The executor knows no such attempt."),
    "limits_unenforceable": Code(409, "conflict_error", "This machine cannot enforce a limit of the plan."),
    # us
    "database_unavailable": Code(503, "server_error", "The database does not answer."),
    "executor_unavailable": Code(503, "server_error", "The executor does not answer."),
    "internal": Code(500, "server_error", "A fault of ours; the request id finds it in the logs."),
}

JSON_TYPE = b"application/json"
REQUEST_ID_CHARACTERS_MAX = 128


def error_document(refused: Refused) -> dict[str, Any]:
    """The body of an error answer."""
    code = CODES[refused.code]
    error = {
        "code": refused.code,
        "message": refused.message,
        "type": code.type,
        "param": refused.param,
        **refused.details,
    }
    return {"error": error, **refused.beside}


def json_bytes(document: Any) -> bytes:
    return json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode()


def error_body(refused: Refused) -> bytes:
    return json_bytes(error_document(refused))


def error_headers(refused: Refused, *, engine_saw_it: bool = False) -> list[tuple[bytes, bytes]]:
    """Headers besides content type and length: `Retry-After`, and `x-should-retry: false` once an
    engine may have seen the request, by the code or as the caller knows (OpenAI's SDKs obey it)."""
    headers: list[tuple[bytes, bytes]] = []
    if refused.retry_after_seconds is not None:
        headers.append((b"retry-after", b"%d" % refused.retry_after_seconds))
    if engine_saw_it or CODES[refused.code].engine_may_have_seen_it:
        headers.append((b"x-should-retry", b"false"))
    return headers


def status_of(refused: Refused) -> int:
    return CODES[refused.code].status


def rfc3339(seconds: float | None) -> str | None:
    """Seconds since 1970 as RFC 3339 has it, UTC, to the millisecond."""
    if seconds is None:
        return None
    moment = datetime.fromtimestamp(seconds, UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def usable_request_id(value: bytes) -> bool:
    """Whether a client's own `x-request-id` is kept: 1 to 128 printable ASCII characters."""
    return 0 < len(value) <= REQUEST_ID_CHARACTERS_MAX and all(0x21 <= byte <= 0x7E for byte in value)
