"""Models: manifests, and how their bytes arrive, become durable and are proved."""

from __future__ import annotations

import base64
import signal
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from support.http import Answer, Http, http_of, projects_of
from support.installation import Installation
from support.rows import manifest_of, random_bytes, sha256

pytestmark = pytest.mark.timeout(240)

MIB = 1 << 20
JSON_BYTES_MAX = MIB
OCTETS_BYTES_MAX = 16 * MIB
STREAMS_MAX = 2


@pytest.fixture(scope="module")
def installation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installation]:
    """A controller: no executor is needed to hold models."""
    made = Installation(tmp_path_factory.mktemp("ficc"))
    try:
        made.start("controller")
        yield made
    finally:
        made.stop()


@pytest.fixture
def api(installation: Installation) -> Http:
    return http_of(installation)


def registered(api: Http, *contents: bytes, **members: Any) -> Any:
    """A model of its own."""
    manifest = manifest_of(*contents, **{"name": f"model {random_bytes(6).hex()}", **members})
    return api("POST", "/models", manifest).ok(201)


def file_of(api: Http, model: Any) -> Any:
    return api("GET", f"/models/{model['id']}").ok()["files"][0]


def base64_of(data: bytes) -> str:
    return base64.b64encode(data).decode()


def piece(api: Http, model: Any, offset: Any, data: bytes | str) -> Answer:
    text = data if isinstance(data, str) else base64_of(data)
    return api("POST", f"/models/{model['id']}/files/0", {"offset": offset, "data": text})


def octets(api: Http, model: Any, offset: int, data: Any) -> Answer:
    return api.octets(model["id"], 0, offset, data)


UPLOADS = [pytest.param(piece, id="json"), pytest.param(octets, id="octets")]
"""Both ways to bring a piece."""


# Manifests.


@pytest.mark.contract("C-M1", "C-M2")
def test_a_manifest_is_registered_and_shown_with_the_progress_of_its_files(api: Http) -> None:
    data = random_bytes(2000)
    manifest = manifest_of(data, b"other", name="shown", capabilities=["chat"], licence="apache-2.0")
    made = api("POST", "/models", manifest).ok(201)
    assert made["manifest"] == manifest
    assert (made["state"], made["bytes_total"], made["bytes_durable"]) == ("registered", 2005, 0)

    piece(api, made, 0, data[:1500]).ok()
    half = api("GET", f"/models/{made['id']}").ok()
    assert [(f["offset"], f["verified_bytes"], f["state"]) for f in half["files"]] == [
        (1500, 0, "partial"),
        (0, 0, "missing"),
    ]
    assert half["bytes_durable"] == 1500

    piece(api, made, 1500, data[1500:]).ok()
    whole = api("GET", f"/models/{made['id']}").ok()
    assert (whole["files"][0]["verified_bytes"], whole["files"][0]["state"]) == (2000, "verified")
    assert whole in api("GET", "/models").ok()["items"]


@pytest.mark.contract("C-M1")
def test_a_manifest_never_changes(api: Http) -> None:
    data = random_bytes(100)
    made = registered(api, data)
    for method in ("PUT", "PATCH", "POST"):
        assert api(method, f"/models/{made['id']}", {"name": "other"}).status == 405
    piece(api, made, 0, data).ok()
    found = api("GET", f"/models/{made['id']}").ok()
    assert (found["manifest"], found["revision"]) == (made["manifest"], made["revision"])


@pytest.mark.contract("C-M3")
def test_an_equal_manifest_is_the_same_model(api: Http) -> None:
    manifest = manifest_of(random_bytes(10), name="twice")
    first = api("POST", "/models", manifest).ok(201)
    assert api("POST", "/models", manifest).ok(200) == first
    reordered = dict(reversed([*manifest.items(), ("licence", None)]))  # and null equals absent
    assert api("POST", "/models", reordered).ok(200)["id"] == first["id"]
    other = api("POST", "/models", {**manifest, "name": "thrice"}).ok(201)
    assert other["id"] != first["id"]


@pytest.mark.contract("C-M3")
def test_an_equal_manifest_registered_by_many_at_once_is_one_model(api: Http) -> None:
    manifest = manifest_of(random_bytes(10), name="at once")
    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(lambda _: api("POST", "/models", manifest), range(8)))
    assert sorted(answer.status for answer in answers) == [200] * 7 + [201]
    assert len({answer.json["id"] for answer in answers}) == 1


@pytest.mark.contract("C-M3", "C-H4")
def test_an_equal_manifest_of_another_project_is_another_model(installation: Installation, api: Http) -> None:
    manifest = manifest_of(random_bytes(10), name="of two projects")
    stranger = projects_of(installation, "another")["another"]
    mine, theirs = api("POST", "/models", manifest).ok(201), stranger("POST", "/models", manifest).ok(201)
    assert mine["id"] != theirs["id"]
    assert mine["revision"] == theirs["revision"]


@pytest.mark.contract("C-M12")
def test_a_model_that_nothing_refers_to_is_removed(api: Http) -> None:
    data = random_bytes(100)
    made = registered(api, data)
    piece(api, made, 0, data).ok()
    assert api("DELETE", f"/models/{made['id']}").ok()["removed"] is True
    assert api("GET", f"/models/{made['id']}").code == "not_found"
    assert made["id"] not in [model["id"] for model in api("GET", "/models").ok()["items"]]


@pytest.mark.contract("C-M13")
def test_evicting_a_model_removes_its_content_from_the_disk(installation: Installation, api: Http) -> None:
    whole, begun = random_bytes(3000), random_bytes(50)
    made, unfinished = registered(api, whole), registered(api, begun)
    piece(api, made, 0, whole).ok()
    piece(api, unfinished, 0, begun[:20]).ok()
    assert stored(installation) >= {sha256(whole), sha256(begun)}
    for model, freed in ((made, 3000), (unfinished, 20)):
        removed = api("DELETE", f"/models/{model['id']}", evict="true").ok()
        assert removed == {"removed": True, "bytes_freed": freed, "bytes_retained_shared": 0}
        assert api("GET", f"/models/{model['id']}").code == "not_found"
    assert not stored(installation) & {sha256(whole), sha256(begun)}
    assert file_of(api, registered(api, whole))["offset"] == 0


@pytest.mark.contract("C-M13")
def test_evicting_a_model_leaves_what_another_model_or_another_project_shares(
    installation: Installation, api: Http
) -> None:
    stranger = projects_of(installation, "sharing")["sharing"]
    within, across, own = (random_bytes(count) for count in (400, 50, 6))
    made, other = registered(api, within, across, own), registered(api, within)
    theirs = registered(stranger, across)
    for index, data in enumerate((within, across, own)):
        api.octets(made["id"], index, 0, data).ok()
    piece(stranger, theirs, 0, across).ok()
    removed = api("DELETE", f"/models/{made['id']}", evict="true").ok()
    assert removed == {"removed": True, "bytes_freed": 6, "bytes_retained_shared": 450}
    assert api("GET", f"/models/{other['id']}").ok()["state"] == "ready"
    assert stranger("GET", f"/models/{theirs['id']}").ok()["state"] == "ready"
    assert stored(installation) & {sha256(d) for d in (within, across, own)} == {
        sha256(within),
        sha256(across),
    }


@pytest.mark.contract("C-M13")
def test_without_evict_content_stays_and_the_model_is_ready_when_it_is_back(
    installation: Installation, api: Http
) -> None:
    data = random_bytes(300)
    made = registered(api, data)
    piece(api, made, 0, data).ok()
    removed = api("DELETE", f"/models/{made['id']}").ok()
    assert removed == {"removed": True, "bytes_freed": 0, "bytes_retained_shared": 300}
    assert sha256(data) in stored(installation)
    assert registered(api, data)["state"] == "ready"


def stored(installation: Installation) -> set[str]:
    """Digests of which there is a file."""
    content = installation.directory / "content"
    return {path.name for path in content.rglob("*") if path.is_file()}


# JSON uploads.


@pytest.mark.contract("C-M6")
def test_a_json_upload_goes_on_at_the_durable_offset(api: Http) -> None:
    data = random_bytes(3000)
    made = registered(api, data)
    assert piece(api, made, 0, data[:1000]).ok() == {
        "index": 0,
        "offset": 1000,
        "bytes": 3000,
        "state": "partial",
    }
    for offset in (0, 999, 1001):
        answer = piece(api, made, offset, data[1000:])
        assert (answer.status, answer.code, answer.json["offset"]) == (409, "offset_mismatch", 1000)
    assert piece(api, made, 1000, data[1000:]).ok()["state"] == "verified"


@pytest.mark.contract("C-M6")
@pytest.mark.parametrize("text", ["YQ", "YQ=", "YR==", "YQ==\n", " YQ==", "-_8=", "Y Q==", "YQ==YQ==", "é"])
def test_base64_that_is_not_canonical_is_refused(api: Http, text: str) -> None:
    made = registered(api, random_bytes(64))
    answer = piece(api, made, 0, text)
    assert (answer.status, answer.code, answer.param) == (422, "invalid_request", "data")
    assert file_of(api, made)["offset"] == 0


@pytest.mark.contract("C-M6")
@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"data": "YQ=="}, "offset"),
        ({"offset": 0}, "data"),
        ({"offset": 0, "data": "YQ==", "more": 1}, "more"),
        ({"offset": "0", "data": "YQ=="}, "offset"),
        ({"offset": -1, "data": "YQ=="}, "offset"),
    ],
)
def test_a_json_upload_is_exactly_offset_and_data(api: Http, body: Any, param: str) -> None:
    made = registered(api, random_bytes(64))
    answer = api("POST", f"/models/{made['id']}/files/0", body)
    assert (answer.status, answer.code, answer.param) == (422, "invalid_request", param)


@pytest.mark.contract("C-M7")
def test_a_json_upload_of_1_mib_and_of_one_byte_more(api: Http) -> None:
    data = random_bytes(2 * MIB)
    made = registered(api, data)
    past = piece(api, made, 0, data[: JSON_BYTES_MAX + 1])
    assert (past.status, past.code) == (413, "too_large")
    assert file_of(api, made)["offset"] == 0
    assert piece(api, made, 0, data[:JSON_BYTES_MAX]).ok()["offset"] == JSON_BYTES_MAX


# Octet-stream uploads.


@pytest.mark.contract("C-M8")
def test_an_octet_stream_is_the_bytes_at_the_offset_of_its_query(api: Http) -> None:
    data = bytes(range(256)) * 10
    made = registered(api, data)
    assert octets(api, made, 0, data[:1000]).ok()["offset"] == 1000
    wrong = octets(api, made, 999, data[1000:])
    assert (wrong.status, wrong.code, wrong.json["offset"]) == (409, "offset_mismatch", 1000)
    assert octets(api, made, 1000, data[1000:]).ok()["state"] == "verified"


@pytest.mark.contract("C-M8")
@pytest.mark.parametrize("kind", ["application/json", "text/plain", "", "application/x-www-form-urlencoded"])
def test_an_octet_stream_has_its_type(api: Http, kind: str) -> None:
    made = registered(api, b"a" * 10)
    answer = api.octets(made["id"], 0, 0, b"a" * 10, {"content-type": kind})
    assert (answer.status, answer.code) == (415, "unsupported_media_type")


@pytest.mark.contract("C-M8")
def test_an_octet_stream_names_its_offset(api: Http) -> None:
    made = registered(api, b"a" * 10)
    headers = {"content-type": "application/octet-stream"}
    answer = api("POST", f"/models/{made['id']}/files/0/bytes", body=b"a", headers=headers)
    assert (answer.status, answer.code, answer.param) == (422, "invalid_request", "offset")


@pytest.mark.contract("C-M9")
@pytest.mark.parametrize("chunked", [False, True], ids=["content-length", "chunked"])
def test_an_octet_stream_of_16_mib_and_of_one_byte_more(api: Http, chunked: bool) -> None:
    data = random_bytes(8) * (OCTETS_BYTES_MAX // 8) + b"more"
    made = registered(api, data)

    def body(length: int) -> Any:
        whole = memoryview(data)[:length]
        return iter([whole[at : at + MIB] for at in range(0, length, MIB)]) if chunked else whole

    past = octets(api, made, 0, body(OCTETS_BYTES_MAX + 1))
    assert (past.status, past.code) == (413, "too_large")
    assert file_of(api, made)["offset"] == 0
    assert octets(api, made, 0, body(OCTETS_BYTES_MAX)).ok()["offset"] == OCTETS_BYTES_MAX


class Slow:
    """An octet-stream upload that is active: its body is asked for, and sent only by `finish`."""

    def __init__(self, api: Http, model: Any, data: bytes) -> None:
        self._data = data
        self._socket = socket.create_connection(("127.0.0.1", int(api.origin.rsplit(":", 1)[1])), 30)
        self._socket.sendall(
            f"POST /api/v1/models/{model['id']}/files/0/bytes?offset=0 HTTP/1.1\r\nhost: localhost\r\n"
            f"authorization: Bearer {api.token}\r\ncontent-type: application/octet-stream\r\n"
            f"content-length: {len(data)}\r\nexpect: 100-continue\r\n\r\n".encode()
        )
        assert self._status() == 100

    def _status(self) -> int:
        return int(self._socket.recv(65536).split()[1])

    def finish(self) -> int:
        with self._socket:
            self._socket.sendall(self._data)
            return self._status()


@pytest.mark.contract("C-M10")
def test_two_octet_streams_at_once_and_one_more(api: Http) -> None:
    contents = [random_bytes(100) for _ in range(STREAMS_MAX + 1)]
    models = [registered(api, data) for data in contents]
    active = [Slow(api, model, data) for model, data in zip(models[:STREAMS_MAX], contents, strict=False)]
    third, data = models[STREAMS_MAX], contents[STREAMS_MAX]
    busy = octets(api, third, 0, data)
    assert (busy.status, busy.code) == (429, "upload_busy")
    assert int(busy.headers["retry-after"]) > 0
    assert active[0].finish() == 200
    assert octets(api, third, 0, data).ok()["state"] == "verified"
    assert active[1].finish() == 200


# Empty uploads.


@pytest.fixture
def full_partial(installation: Installation, api: Http) -> Any:
    """A model whose every byte is there and unverified: its blob could not be published, and then the
    controller was killed."""
    data = random_bytes(300_000)
    model = registered(api, data)
    blobs = installation.directory / "content" / "blobs"
    blobs.chmod(0o500)
    try:
        assert octets(api, model, 0, data).code == "content_unavailable"
        installation.kill("controller", signal.SIGKILL)
    finally:
        blobs.chmod(0o700)
    installation.start("controller")
    file = file_of(http_of(installation), model)
    assert (file["offset"], file["state"]) == (len(data), "partial")
    return {**model, "data": data}


@pytest.mark.contract("C-M14")
@pytest.mark.parametrize("upload", UPLOADS)
def test_an_empty_upload_at_the_declared_size_verifies_and_publishes(
    installation: Installation, full_partial: Any, upload: Any
) -> None:
    api, size = http_of(installation), len(full_partial["data"])
    assert upload(api, full_partial, size, b"").ok() == {
        "index": 0,
        "offset": size,
        "bytes": size,
        "state": "verified",
    }
    assert api("GET", f"/models/{full_partial['id']}").ok()["state"] == "ready"
    digest = sha256(full_partial["data"])
    blob = installation.directory / "content" / "blobs" / digest[:2] / digest
    assert blob.read_bytes() == full_partial["data"]


@pytest.mark.contract("C-M14")
def test_it_publishes_nothing_that_hashes_to_something_else(
    installation: Installation, full_partial: Any
) -> None:
    api, size = http_of(installation), len(full_partial["data"])
    (partial,) = (installation.directory / "content" / "partials").rglob(sha256(full_partial["data"]))
    partial.write_bytes(b"?" * size)
    answer = piece(api, full_partial, size, b"")
    assert (answer.status, answer.code) == (422, "source_mismatch")
    assert file_of(api, full_partial)["verified_bytes"] == 0


@pytest.mark.contract("C-M16")
@pytest.mark.parametrize("upload", UPLOADS)
def test_every_other_empty_upload_is_refused(api: Http, upload: Any) -> None:
    data = random_bytes(1000)
    made = registered(api, data)
    piece(api, made, 0, data[:600]).ok()
    for offset in (0, 599, 600, 601, 999, 1000, 1001):
        answer = upload(api, made, offset, b"")
        assert (answer.status, answer.code, answer.json["offset"]) == (422, "empty_upload", 600)
    assert (file_of(api, made)["offset"], file_of(api, made)["state"]) == (600, "partial")


LARGE_BYTES = 96 * MIB


@pytest.mark.contract("C-M15")
def test_other_requests_are_answered_while_a_file_is_verified(installation: Installation, api: Http) -> None:
    """Somebody is told that a part of the file has been hashed, while the upload that finishes it is open."""
    block = random_bytes(8) * (OCTETS_BYTES_MAX // 8)
    model = registered(api, block * (LARGE_BYTES // len(block)))
    for offset in range(0, LARGE_BYTES - len(block), len(block)):
        octets(api, model, offset, block).ok()
    installation.kill("controller", signal.SIGKILL)  # so that it has to be hashed from the first byte
    installation.start("controller")
    api = http_of(installation)
    hashed: set[int] = set()
    done = threading.Event()

    def watch() -> None:
        while not done.is_set():
            file = file_of(api, model)
            if file["state"] == "verifying":
                hashed.add(file["verified_bytes"])

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        assert octets(api, model, LARGE_BYTES - len(block), block).ok()["state"] == "verified"
    finally:
        done.set()
        watcher.join()
    assert [count for count in hashed if 0 < count < LARGE_BYTES], hashed
