"""How tests bring bytes: models registered under names of their own, pieces, streams by hand, and what is on
disk of them."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sqlalchemy import create_engine, select

from ficc.controller.store import schema
from raw_http import Client
from support.http import Answer, Http, database_url_of
from support.installation import Installation
from support.rows import manifest_of, random_bytes, sha256


def base64_of(data: bytes) -> str:
    return base64.b64encode(data).decode()


def registered(api: Http, *contents: bytes, **members: Any) -> str:
    """The id of a new model; the name makes its manifest one of its own."""
    name = members.pop("name", None) or f"model {random_bytes(6).hex()}"
    return str(api("POST", "/models", manifest_of(*contents, name=name, **members)).ok(201)["id"])


def piece(api: Http, model_id: str, offset: Any, data: bytes | str, index: int = 0) -> Answer:
    text = data if isinstance(data, str) else base64_of(data)
    return api("POST", f"/models/{model_id}/files/{index}", {"offset": offset, "data": text})


def model_of(api: Http, model_id: str) -> Any:
    return api("GET", f"/models/{model_id}").ok()


def file_of(api: Http, model_id: str, index: int = 0) -> Any:
    return model_of(api, model_id)["files"][index]


def blobs(made: Installation) -> dict[str, Path]:
    return {path.name: path for path in (made.directory / "content" / "blobs").rglob("*") if path.is_file()}


def partials(made: Installation) -> list[str]:
    return [path.name for path in (made.directory / "content" / "partials").rglob("*") if path.is_file()]


def chunks(data: bytes, size: int = 100_000) -> Iterator[bytes]:
    for at in range(0, len(data), size):
        yield data[at : at + size]


class Stream:
    """An octet-stream upload by hand: its head is sent, its body as the test wants."""

    def __init__(self, api: Http, model_id: str, offset: int, declared: int | None) -> None:
        port = int(api.origin.rsplit(":", 1)[1])
        length = "transfer-encoding: chunked" if declared is None else f"content-length: {declared}"
        self.client = Client(port)
        self.client.send(
            f"POST /api/v1/models/{model_id}/files/0/bytes?offset={offset} HTTP/1.1\r\n"
            f"host: 127.0.0.1:{port}\r\nauthorization: Bearer {api.token}\r\n"
            f"content-type: application/octet-stream\r\n{length}\r\n\r\n".encode()
        )

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.client.socket.close()

    def send(self, data: bytes) -> None:
        self.client.send(data)

    def chunk(self, data: bytes) -> None:
        self.client.send(b"%x\r\n%b\r\n" % (len(data), data))

    def answer(self) -> tuple[int, Any]:
        found = self.client.answer("POST")
        return found.status, found.json

    def vanish(self) -> None:
        self.client.reset()


def durable(made: Installation, api: Http, model_id: str, offset: int) -> None:
    """Wait until this much of the file is durable."""
    made.until(lambda: file_of(api, model_id)["offset"] == offset, f"{offset} bytes are durable")


def claimed(made: Installation, data: bytes) -> None:
    """Wait until a stream writes the file."""
    digest, look = sha256(data), create_engine(database_url_of(made))
    query = select(schema.contents.c.claim_kind).where(schema.contents.c.sha256 == digest)

    def kind() -> bool:
        with look.connect() as connection:
            return connection.scalar(query) == "octets"

    made.until(kind, "a stream writes the file")
    look.dispose()


def idle(made: Installation, api: Http, model_id: str) -> None:
    """Wait until nobody writes the file any more: then an empty upload is refused for what it is."""
    made.until(lambda: piece(api, model_id, 0, b"").code == "empty_upload", "nobody writes the file")
