"""A client of the management API and the inference routes, for the command line and for tests."""

from __future__ import annotations

import errno
import json
import os
import socket
from collections.abc import AsyncIterator, Mapping
from types import TracebackType
from typing import Any

import aiohttp

from ficc.client.errors import ApiError, Unreachable

CONNECT_SECONDS = 10
ANSWER_SECONDS = 120
LINE_BYTES_MAX = 8 << 20


class Api:
    """Use as an async context manager. `origin` is http(s)://host:port or unix:/path."""

    def __init__(self, origin: str, token: str | None) -> None:
        self.origin = origin
        self._token = token
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Api:
        connector: aiohttp.BaseConnector
        base = self.origin
        if self.origin.startswith("unix:"):
            connector, base = aiohttp.UnixConnector(self.origin.removeprefix("unix:")), "http://localhost"
        else:
            connector = aiohttp.TCPConnector()
        headers = {} if self._token is None else {"Authorization": f"Bearer {self._token}"}
        self._session = aiohttp.ClientSession(
            base,
            connector=connector,
            headers=headers,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS, sock_read=ANSWER_SECONDS),
            read_bufsize=LINE_BYTES_MAX,
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._session is not None:
            await self._session.close()

    async def call(
        self, method: str, path: str, body: Any = None, *, query: Mapping[str, str] | None = None
    ) -> Any:
        """The JSON answer of a management route. Raises ApiError, Unreachable."""
        return await self._call(method, path, query, json=body)

    async def upload(self, model_id: str, index: int, offset: int, data: bytes) -> dict[str, Any]:
        """One octet-stream piece. Raises ApiError, Unreachable."""
        answer = await self._call(
            "POST",
            f"/models/{model_id}/files/{index}/bytes",
            {"offset": str(offset)},
            data=data,
            headers={"Content-Type": "application/octet-stream"},
        )
        assert isinstance(answer, dict)
        return answer

    async def _call(self, method: str, path: str, query: Mapping[str, str] | None, **arguments: Any) -> Any:
        assert self._session is not None
        try:
            async with self._session.request(
                method,
                "/api/v1" + path,
                params=query,
                **{k: v for k, v in arguments.items() if v is not None},
            ) as response:
                return await _document(response)
        except aiohttp.ClientError as error:
            raise self._unreachable(error) from error

    async def every(self, path: str) -> AsyncIterator[dict[str, Any]]:
        """Every object of a list, newest first, page by page."""
        after: str | None = None
        while True:
            query = {"limit": "200"} | ({} if after is None else {"after": after})
            page = await self.call("GET", path, query=query)
            for item in page["items"]:
                yield item
            after = page["next"]
            if after is None:
                return

    async def chat(
        self, service_id: str, messages: list[dict[str, str]], **options: Any
    ) -> AsyncIterator[str]:
        """The pieces of a streamed chat answer. Raises ApiError also for an error inside the stream."""
        assert self._session is not None
        body = {"messages": messages, "stream": True, **options}
        try:
            async with self._session.post(
                f"/api/v1/inference/{service_id}/v1/chat/completions", json=body
            ) as response:
                if response.status != 200:
                    await _document(response)
                async for line in response.content:
                    if not line.startswith(b"data:"):
                        continue
                    data = line.removeprefix(b"data:").strip()
                    if data == b"[DONE]":
                        return
                    event = json.loads(data)
                    if "error" in event:
                        raise ApiError(200, event, response.headers.get("x-request-id"))
                    for choice in event.get("choices", []):
                        if text := choice.get("delta", {}).get("content"):
                            yield text
        except aiohttp.ClientError as error:
            raise self._unreachable(error) from error

    def _unreachable(self, error: aiohttp.ClientError) -> Unreachable:
        why = _plainly(error)
        return Unreachable(f"No controller answers at {self.origin}: {why}. Is `ficc up` running there?")


def _plainly(error: aiohttp.ClientError) -> str:
    """What the system says, without what the library wraps around it."""
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        return f"its certificate is not trusted ({error.certificate_error})"
    if isinstance(error, aiohttp.ClientConnectorError):
        cause, number = error.os_error, error.os_error.errno
        if isinstance(cause, socket.gaierror) or number is None or number not in errno.errorcode:
            return str(cause.strerror or cause)
        return os.strerror(number)
    return str(error) or type(error).__name__


async def _document(response: aiohttp.ClientResponse) -> Any:
    data = await response.read()
    try:
        document = json.loads(data) if data else None
    except ValueError:
        document = {
            "error": {"code": "unknown", "message": f"The server answered {response.status} without JSON."}
        }
    if response.status >= 400:
        raise ApiError(response.status, document or {}, response.headers.get("x-request-id"))
    return document
