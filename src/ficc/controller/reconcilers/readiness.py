"""Readiness: an engine is ready once it gives a real answer over its endpoint, not when a port is open. One that
takes its model over its own API is handed that first."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ficc.controller.operations.ports import NodeLink
from ficc.domain.errors import Refused
from ficc.domain.plan import Fence
from ficc.domain.quantity import size
from ficc.protocol import openai

PAUSE_SECONDS = 0.02
PAUSE_SECONDS_MAX = 0.5
PAUSE_GROWTH = 1.3
ANSWER_SECONDS = 300.0
"""How long one probe may take: a large model's first token on a slow machine."""
REFUSALS_MAX = 3
"""Answers that are neither success nor `still loading`, after which the engine is held to be unfit."""
LOADING = frozenset({429, 503})
UPLOAD_SECONDS = 3600.0
"""How long the upload of a model may take, which the attempt's own deadline cuts short."""


class ReadinessFailed(Exception):
    """The engine answers, but not as it has to; the text is its own."""


async def answers(link: NodeLink, fence: Fence, path: str, body: Mapping[str, Any]) -> None:
    """Ask until the engine answers 200. The caller bounds the whole by the attempt's deadline.

    Raises ReadinessFailed, and Refused when the attempt or its node is gone.
    """
    pause, refusals = PAUSE_SECONDS, 0
    request = json.dumps(body).encode()
    while True:
        status, answer = await _ask(link, fence, path, request)
        if status == 200:
            return
        if status not in LOADING:
            refusals += 1
            if refusals >= REFUSALS_MAX:
                _, document = openai.engine_error(status, answer)
                raise ReadinessFailed(f"The engine refuses its test request: {document['error']['message']}")
        await asyncio.sleep(pause)
        pause = min(pause * PAUSE_GROWTH, PAUSE_SECONDS_MAX)


async def hand_over(
    link: NodeLink, fence: Fence, model: str, input_ids: Sequence[str], tell: Callable[[str], None]
) -> None:
    """Have the engine take its model; `tell` is told how far that is. The caller bounds the whole by the attempt's
    deadline; to begin again is harmless.

    Raises ReadinessFailed, and Refused when the attempt or its node is gone.
    """

    def on_progress(news: Mapping[str, Any]) -> None:
        sent, total = size(news["bytes_sent"]), size(news["bytes"])
        tell(f"The engine is handed its model: {sent} of {total} ({news['input']}).")

    pause, refusals = PAUSE_SECONDS, 0
    while True:
        try:
            await link.upload(fence, model, input_ids, UPLOAD_SECONDS, on_progress)
            return
        except Refused as refused:
            if refused.code == "engine_error":
                refusals += 1
                if refusals >= REFUSALS_MAX:
                    raise ReadinessFailed(
                        f"The engine did not take its model: {refused.message}"
                    ) from refused
            elif refused.code not in ("service_not_ready", "busy"):  # else it may be starting
                raise
        await asyncio.sleep(pause)
        pause = min(pause * PAUSE_GROWTH, PAUSE_SECONDS_MAX)


async def _ask(link: NodeLink, fence: Fence, path: str, request: bytes) -> tuple[int, bytes]:
    """The status and body of one answer; 503 while there is no connection to be had."""
    try:
        stream = await link.open_stream(fence, path, request, ANSWER_SECONDS)
    except Refused as refused:
        if refused.code in ("service_not_ready", "busy"):
            return 503, b""
        raise
    try:
        piece = await stream.read()
        assert piece.head is not None
        status, answer = piece.head.status, bytes(piece.data)
        while not piece.end and len(answer) < openai.ERROR_BYTES_MAX:
            piece = await stream.read()
            answer += piece.data
        return status, answer
    except Refused as refused:
        if refused.code == "engine_error":  # it closed the connection: it may be starting, or ending
            return 503, b""
        raise
    finally:
        stream.close()
