"""Uploads over HTTP, on a real controller: how bytes arrive, and what is kept of them."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from ficc.domain import upload
from support.http import Answer, Http, http_of
from support.installation import Installation
from support.rows import random_bytes, sha256
from support.uploads import (
    Stream,
    blobs,
    chunks,
    claimed,
    durable,
    file_of,
    idle,
    model_of,
    partials,
    piece,
    registered,
)

BODY_IDLE_SECONDS = 1.0
MIB = 1 << 20


@pytest.fixture(scope="module")
def controller_settings() -> dict[str, str]:
    return {"FICC_SERVER_BODY_IDLE_SECONDS": str(BODY_IDLE_SECONDS)}


# Uploading as JSON.


def test_json_pieces_make_a_verified_file_and_a_ready_model(either: Installation) -> None:
    api = http_of(either)
    data = random_bytes(3000)
    model_id = registered(api, data, b"second")
    assert piece(api, model_id, 0, data[:1000]).ok() == {
        "index": 0,
        "offset": 1000,
        "bytes": 3000,
        "state": "partial",
    }
    assert file_of(api, model_id)["offset"] == 1000
    assert piece(api, model_id, 1000, data[1000:]).ok()["state"] == "verified"
    model = model_of(api, model_id)
    assert [file["state"] for file in model["files"]] == ["verified", "missing"]
    assert (model["state"], model["bytes_durable"]) == ("registered", 3000)
    assert piece(api, model_id, 0, b"second", index=1).ok()["state"] == "verified"
    model = model_of(api, model_id)
    assert (model["state"], model["bytes_durable"], model["bytes_total"]) == ("ready", 3006, 3006)
    assert [file["verified_bytes"] for file in model["files"]] == [3000, 6]
    blob = blobs(either)[sha256(data)]
    assert blob.read_bytes() == data
    assert blob.stat().st_mode & 0o777 == 0o444


@pytest.mark.parametrize(
    "text",
    [
        "d2Vp\nZ2h0cw==",
        "d2VpZ2h0cw==\n",
        " d2VpZ2h0cw==",
        "d2VpZ2h0cw",  # no padding
        "d2VpZ2h0cw=",
        "d2VpZ2h0cw===",
        "d2VpZ2h0cx==",  # stray bits
        "_-8_",  # the alphabet of URLs
        "d2Vp=Z2h0cw==",
        "d2VpZ2h0cw==d2Vp",
        "*",
        "ä",
    ],
)
def test_base64_has_one_form(api: Http, text: str) -> None:
    model_id = registered(api, random_bytes(7))
    answer = piece(api, model_id, 0, text)
    assert (answer.code, answer.param) == ("invalid_request", "data")
    assert file_of(api, model_id)["offset"] == 0


def test_a_json_piece_is_at_most_one_mebibyte_once_decoded(api: Http) -> None:
    data = random_bytes(MIB + 1)
    model_id = registered(api, data)
    assert piece(api, model_id, 0, data).code == "too_large"
    assert file_of(api, model_id)["offset"] == 0
    assert piece(api, model_id, 0, data[:MIB]).ok()["offset"] == MIB
    assert piece(api, model_id, MIB, data[MIB:]).ok()["state"] == "verified"
    huge = b'{"offset": 0, "data": "' + b"A" * (3 * MIB) + b'"}'
    answer = api(
        "POST", f"/models/{model_id}/files/0", body=huge, headers={"content-type": "application/json"}
    )
    assert answer.code == "too_large"


@pytest.mark.parametrize("offset", [-1, 1.0, "0", None, True, 2**53, 10**30])
def test_an_offset_is_an_exact_number(api: Http, offset: Any) -> None:
    model_id = registered(api, random_bytes(7))
    assert piece(api, model_id, offset, b"w").status in (400, 422)
    for text in ("-1", "1.0", "", "+0", "0_0", "٣", str(2**53)):
        answer = api(
            "POST",
            f"/models/{model_id}/files/0/bytes",
            body=b"w",
            headers={"content-type": "application/octet-stream"},
            offset=text,
        )
        assert (answer.code, answer.param) == ("invalid_request", "offset")
    assert file_of(api, model_id)["offset"] == 0


def test_a_file_that_the_model_does_not_have_is_not_found(api: Http) -> None:
    model_id = registered(api, b"weights")
    assert piece(api, model_id, 0, b"w", index=1).code == "not_found"
    assert api.octets(model_id, 1, 0, b"w").code == "not_found"
    for index in ("-1", "4096", "0x0", "first"):
        answer = api("POST", f"/models/{model_id}/files/{index}", {"offset": 0, "data": ""})
        assert (answer.code, answer.param) == ("invalid_request", "index")


# Uploading as an octet stream (A17).


def test_an_octet_stream_is_taken_up_to_sixteen_mebibytes(either: Installation) -> None:
    api = http_of(either)
    data = random_bytes(upload.OCTET_STREAM_BYTES_MAX + 100)
    model_id = registered(api, data)
    most = upload.OCTET_STREAM_BYTES_MAX
    assert api.octets(model_id, 0, 0, data[: most + 1]).code == "too_large"
    assert api.octets(model_id, 0, 0, chunks(data[: most + 1])).code == "too_large"
    assert file_of(api, model_id)["offset"] == 0
    assert api.octets(model_id, 0, 0, chunks(data[:most])).ok() == {
        "index": 0,
        "offset": most,
        "bytes": len(data),
        "state": "partial",
    }
    assert api.octets(model_id, 0, most, data[most:]).ok()["state"] == "verified"
    assert blobs(either)[sha256(data)].read_bytes() == data
    assert sha256(data) not in partials(either)


def test_another_content_type_is_refused(api: Http) -> None:
    model_id = registered(api, random_bytes(7))
    for kind in ("application/json", "text/plain", ""):
        answer = api.octets(model_id, 0, 0, b"weights", {"content-type": kind})
        assert (answer.code, answer.param) == ("unsupported_media_type", "content-type")
    assert file_of(api, model_id)["offset"] == 0


def test_two_streams_are_active_and_a_third_is_told_to_come_again(made: Installation, api: Http) -> None:
    data = [random_bytes(2000) for _ in range(4)]
    ids = [registered(api, one) for one in data]
    with Stream(api, ids[0], 0, 2000) as first, Stream(api, ids[1], 0, 2000) as second:
        first.send(data[0][:1000])
        second.send(data[1][:1000])
        claimed(made, data[0])
        claimed(made, data[1])
        answer = api.octets(ids[2], 0, 0, data[2])
        assert (answer.status, answer.code) == (429, "upload_busy")
        assert int(answer.headers["retry-after"]) >= 1
        assert piece(api, ids[2], 0, data[2][:5]).ok()["offset"] == 5  # pieces have no such bound
        first.send(data[0][1000:])
        assert first.answer()[1]["state"] == "verified"
        assert api.octets(ids[2], 0, 5, data[2][5:]).ok()["state"] == "verified"
        time.sleep(0.1)
        second.vanish()
    idle(made, api, ids[1])
    offset = file_of(api, ids[1])["offset"]
    assert offset in (0, 1000)  # what was taken is kept
    with Stream(api, ids[1], offset, 2000 - offset) as again, Stream(api, ids[3], 0, 2000) as more:
        again.send(data[1][offset:-1])  # both slots are free
        more.send(data[3][:-1])
        claimed(made, data[1])
        claimed(made, data[3])
        again.send(data[1][-1:])
        more.send(data[3][-1:])
        assert again.answer()[1]["state"] == more.answer()[1]["state"] == "verified"


def test_a_stream_that_stops_coming_is_ended_and_its_slot_is_free(made: Installation, api: Http) -> None:
    data = random_bytes(5000)
    model_id = registered(api, data)
    with Stream(api, model_id, 0, 5000) as stream:
        stream.send(data[:1234])
        began = time.monotonic()
        status, document = stream.answer()
        assert (status, document["error"]["code"]) == (408, "request_timeout")
        assert time.monotonic() - began < BODY_IDLE_SECONDS + 10
    durable(made, api, model_id, 1234)
    idle(made, api, model_id)
    assert api.octets(model_id, 0, 1234, data[1234:]).ok()["state"] == "verified"


@pytest.mark.parametrize("declared", [True, False])
@pytest.mark.parametrize("sent", [1, MIB, 2 * MIB + 77])
def test_a_body_that_is_cut_off_leaves_a_prefix_that_goes_on(
    made: Installation, api: Http, declared: bool, sent: int
) -> None:
    data = random_bytes(3 * MIB)
    model_id = registered(api, data)
    with Stream(api, model_id, 0, len(data) if declared else None) as stream:
        if declared:
            stream.send(data[:sent])
        else:
            stream.chunk(data[:sent])
        claimed(made, data)
        time.sleep(0.2)
        stream.vanish()
    idle(made, api, model_id)
    offset = file_of(api, model_id)["offset"]
    # What is on its way through buffers when the connection breaks may be lost; what was taken is kept.
    assert max(0, sent - MIB // 2) <= offset <= sent
    assert api.octets(model_id, 0, offset, data[offset:]).ok()["state"] == "verified"


def test_a_body_that_is_cut_off_past_the_declared_size_leaves_nothing(made: Installation, api: Http) -> None:
    data = random_bytes(100)
    model_id = registered(api, data)
    for count in (101, 500):
        with Stream(api, model_id, 0, None) as stream:
            stream.chunk(data + b"x" * (count - 100))
            status, document = stream.answer()
            assert (status, document["offset"]) == (422, 0)
            stream.vanish()
        idle(made, api, model_id)
        assert file_of(api, model_id)["offset"] == 0
    assert api.octets(model_id, 0, 0, data).ok()["state"] == "verified"


def test_a_stream_that_cannot_be_taken_is_refused_before_its_body_comes(
    made: Installation, api: Http
) -> None:
    data = random_bytes(1000)
    model_id = registered(api, data)
    piece(api, model_id, 0, data[:400]).ok()
    for offset, declared, code in (
        (0, 1000, "offset_mismatch"),
        (500, None, "offset_mismatch"),
        (400, 601, "invalid_request"),
        (400, upload.OCTET_STREAM_BYTES_MAX + 1, "too_large"),
        (400, 0, "empty_upload"),
    ):
        with Stream(api, model_id, offset, declared) as stream:
            status, document = stream.answer()
            assert (status >= 400, document["error"]["code"]) == (True, code)
            assert document.get("offset", 400) == 400
    assert file_of(api, model_id)["offset"] == 400


# Offsets (A16, A19).


def test_a_wrong_offset_is_answered_with_the_durable_one(either: Installation) -> None:
    api = http_of(either)
    data = random_bytes(100)
    model_id = registered(api, data)
    piece(api, model_id, 0, data[:40]).ok()
    for offset in (0, 39, 41, 100, 2**53 - 1):
        for answer in (piece(api, model_id, offset, data[:10]), api.octets(model_id, 0, offset, data[:10])):
            assert (answer.status, answer.code, answer.json["offset"]) == (409, "offset_mismatch", 40)
    assert file_of(api, model_id)["offset"] == 40
    assert piece(api, model_id, 40, data[40:]).ok()["state"] == "verified"
    answer = piece(api, model_id, 0, data[:10])
    assert (answer.code, answer.json["offset"]) == ("offset_mismatch", 100)


@pytest.mark.parametrize("kind", ["json", "octets", "mixed"])
def test_of_uploads_at_one_offset_one_wins_and_the_others_learn_the_offset(
    either: Installation, kind: str
) -> None:
    api = http_of(either)
    data = random_bytes(200_000)
    model_id = registered(api, data)
    half = 100_000

    def send(number: int) -> Answer:
        if kind == "json" or (kind == "mixed" and number % 2):
            return piece(api, model_id, 0, data[:half])
        return api.octets(model_id, 0, 0, data[:half])

    with ThreadPoolExecutor(4) as threads:
        answers = list(threads.map(send, range(4)))
    won = [answer for answer in answers if answer.status == 200]
    assert len(won) == 1
    assert won[0].json["offset"] == half
    for answer in answers:
        if answer.status != 200 and answer.code != "upload_busy":
            assert (answer.status, answer.json["offset"]) == (409, half)
    assert api.octets(model_id, 0, half, data[half:]).ok()["state"] == "verified"


def test_the_offset_never_goes_back_and_counts_what_is_durable(api: Http) -> None:
    data = random_bytes(4 * MIB)
    model_id = registered(api, data)
    seen: list[tuple[int, int]] = []
    over = threading.Event()

    def watch() -> None:
        while not over.is_set():
            model = model_of(api, model_id)
            seen.append((model["files"][0]["offset"], model["bytes_durable"]))

    thread = threading.Thread(target=watch)
    thread.start()
    for at in range(0, len(data), 300_000):
        assert api.octets(model_id, 0, at, data[at : at + 300_000]).ok()["offset"] == min(
            at + 300_000, len(data)
        )
    over.set()
    thread.join()
    offsets = [offset for offset, _ in seen]
    assert offsets == sorted(offsets)
    assert len(set(offsets)) > 2
    assert all(offset == total for offset, total in seen)


def test_the_rate_and_the_time_left_are_shown_while_bytes_come(api: Http) -> None:
    data = random_bytes(MIB)
    model_id = registered(api, data)
    piece(api, model_id, 0, data[: MIB // 2]).ok()
    model = model_of(api, model_id)
    assert model["rate_bytes_per_second"] > 0
    assert model["eta_seconds"] >= 0
