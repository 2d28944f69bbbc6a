"""The model routes over HTTP, on a real controller: what is registered and removed, and who has which bytes."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import update

from ficc.cli import files
from ficc.controller.store import schema
from support.http import Http, http_of, projects_of, with_rows
from support.installation import Installation
from support.rows import manifest_of, random_bytes, sha256
from support.uploads import Stream, blobs, claimed, file_of, model_of, partials, piece, registered

Start = Callable[..., Installation]


@pytest.fixture(scope="module")
def other(controllers: Start) -> Http:
    """Somebody of another project."""
    return projects_of(controllers("sqlite"), "other")["other"]


# Registering (A12, A13, A14).


def test_a_manifest_is_registered_once_and_shown_as_it_was_given(either: Installation) -> None:
    api = http_of(either)
    document = manifest_of(b"one", b"two", name="m", capabilities=["chat"], licence="apache-2.0")
    document["files"][0]["url"] = "https://example.org/one.gguf"
    first = api("POST", "/models", document).ok(201)
    assert first["manifest"] == document
    assert {
        name: value for name, value in first.items() if name not in ("id", "revision", "created_at", "files")
    } == {
        "manifest": document,
        "state": "registered",
        "error": None,
        "bytes_total": 6,
        "bytes_durable": 0,
        "rate_bytes_per_second": None,
        "eta_seconds": None,
        "references": [],
    }
    assert first["files"][1] == {
        "index": 1,
        "name": "1.gguf",
        "bytes": 3,
        "sha256": sha256(b"two"),
        "offset": 0,
        "state": "missing",
        "verified_bytes": 0,
        "error": None,
    }
    assert len(first["revision"]) == 64
    assert api("POST", "/models", document).ok(200) == first
    with_nulls = {**document, "source": None, "files": [{"url": None, **file} for file in document["files"]]}
    assert api("POST", "/models", with_nulls).ok(200) == first  # null equals absent
    turned = {**document, "files": document["files"][::-1]}
    assert api("POST", "/models", turned).ok(201)["id"] != first["id"]  # the order is part of it
    assert model_of(api, first["id"]) == first


def test_the_same_manifest_in_another_project_is_another_record(api: Http, other: Http) -> None:
    document = manifest_of(random_bytes(20))
    mine, theirs = (caller("POST", "/models", document).ok(201) for caller in (api, other))
    assert mine["id"] != theirs["id"]
    assert mine["revision"] == theirs["revision"]
    for caller, foreign in ((api, theirs), (other, mine)):
        for answer in (
            caller("GET", f"/models/{foreign['id']}"),
            caller("DELETE", f"/models/{foreign['id']}"),
            piece(caller, foreign["id"], 0, b"x"),
            caller.octets(foreign["id"], 0, 0, b"x"),
            caller("POST", f"/models/{foreign['id']}/files/0/adopt", {"name": "x"}),
        ):
            assert answer.code == "not_found"


def test_models_are_listed_page_by_page_newest_first(controllers: Start) -> None:
    api = projects_of(controllers("sqlite"), "lists")["lists"]
    ids = [registered(api, b"%d" % n) for n in range(5)]
    seen, query = [], {"limit": "2"}
    while True:
        page = api("GET", "/models", **query).ok()
        seen += [model["id"] for model in page["items"]]
        if page["next"] is None:
            break
        query["after"] = page["next"]
    assert seen == ids[::-1]
    for name, value in (("limit", "0"), ("limit", "201"), ("limit", "1_0"), ("limit", "2.0"), ("after", "x")):
        answer = api("GET", "/models", **{name: value})
        assert (answer.code, answer.param) == ("invalid_request", name)


def wrong(**members: Any) -> dict[str, Any]:
    return {**manifest_of(b"x"), **members}


def wrong_file(**members: Any) -> dict[str, Any]:
    document = manifest_of(b"x", b"y")
    document["files"][1].update(members)
    return document


def named(*names: str, format: str = "gguf") -> dict[str, Any]:
    document = manifest_of(*(name.encode() for name in names), format=format)
    for file, name in zip(document["files"], names, strict=True):
        file["name"] = name
    return document


DIGEST = sha256(b"y")
SHARDS = [f"m-0000{n}-of-00003.gguf" for n in (3, 1, 2)]


@pytest.mark.parametrize(
    ("document", "param"),
    [
        (wrong(format="onnx"), "format"),
        (wrong(format=None), "format"),
        (wrong(name=""), "name"),
        (wrong(name="a\nb"), "name"),
        (wrong(name=7), "name"),
        (wrong(files=[]), "files"),
        (wrong(files={}), "files"),
        (wrong(files=[{"name": f"{n}.gguf", "bytes": 0, "sha256": DIGEST} for n in range(4097)]), "files"),
        (wrong(capabilities=["chat", "chat"]), "capabilities"),
        (wrong(capabilities=["vision"]), "capabilities[0]"),
        (wrong(licence=""), "licence"),
        (wrong(source={"kind": "hub", "repository": "a/b", "revision": "main"}), "source.revision"),
        (wrong(source={"kind": "hub", "repository": "a/b", "revision": "A" * 40}), "source.revision"),
        (wrong(source={"kind": "git", "repository": "a/b", "revision": "a" * 40}), "source.kind"),
        (wrong(colour="red"), "colour"),
        (wrong_file(colour="red"), "files[1].colour"),
        (wrong_file(bytes=-1), "files[1].bytes"),
        (wrong_file(bytes=2**53), "files[1].bytes"),
        (wrong_file(bytes=1.0), "files[1].bytes"),
        (wrong_file(bytes="1"), "files[1].bytes"),
        (wrong_file(bytes=True), "files[1].bytes"),
        (wrong_file(sha256=DIGEST.upper()), "files[1].sha256"),
        (wrong_file(sha256=f"sha256:{DIGEST}"), "files[1].sha256"),
        (wrong_file(sha256=DIGEST[:40]), "files[1].sha256"),
        (wrong_file(sha256=DIGEST + "\n"), "files[1].sha256"),
        (wrong_file(sha256=sha256(b"x"), bytes=2), "files[1].bytes"),
        (wrong_file(url="http://example.org/y"), "files[1].url"),
        (wrong_file(url="https://user:secret@example.org/y"), "files[1].url"),
        (wrong_file(url="https://example.org/y?signature=secret"), "files[1].url"),
        (named("fine.gguf", "../x.gguf"), "files[1].name"),
        (named("fine.gguf", "/etc/x.gguf"), "files[1].name"),
        (named("fine.gguf", "a\\b.gguf"), "files[1].name"),
        (named("fine.gguf", "CON"), "files[1].name"),
        (named("fine.gguf", "x."), "files[1].name"),
        (named("fine.gguf", "a:b"), "files[1].name"),
        (named("Weights.gguf", "weights.GGUF"), "files[1].name"),
        (named("caf\u00e9.gguf", "cafe\u0301.gguf"), "files[1].name"),
        (named("a.gguf", "a.gguf/b.gguf"), "files[1].name"),
        (named("weights.bin"), "files"),
        (named(*SHARDS[:2]), "files"),
    ],
)
def test_a_manifest_that_breaks_a_rule_is_refused_where_it_does(
    api: Http, document: dict[str, Any], param: str
) -> None:
    before = api("GET", "/models", limit="1").ok()
    answer = api("POST", "/models", document)
    assert (answer.code, answer.param) == ("invalid_request", param)
    assert api("GET", "/models", limit="1").ok() == before


def test_shards_may_stand_in_any_order_and_the_missing_one_is_named(api: Http) -> None:
    assert SHARDS[2] in api("POST", "/models", named(*SHARDS[:2])).json["error"]["message"]
    api("POST", "/models", named(*SHARDS)).ok(201)


def test_a_digest_has_one_size_within_a_project(api: Http, other: Http) -> None:
    data = random_bytes(30)
    registered(api, data)
    lying = manifest_of(data, name="lying")
    lying["files"][0]["bytes"] = 29
    answer = api("POST", "/models", lying)
    assert (answer.code, answer.param) == ("invalid_request", "files[0].bytes")
    assert "30 bytes" in answer.json["error"]["message"]
    other("POST", "/models", lying).ok(201)  # says nothing of what others have


def test_the_largest_manifest_is_taken_in_no_more_than_moments(api: Http) -> None:
    entries = [
        {"name": f"d/{n}.gguf", "bytes": 5, "sha256": sha256(b"%d" % n)} for n in range(10_000, 14_096)
    ]
    began = time.monotonic()
    model = api("POST", "/models", {"name": "many", "format": "gguf", "files": entries}).ok(201)
    assert time.monotonic() - began < 20  # it once took minutes: files times files
    assert len(model["files"]) == 4096
    began = time.monotonic()
    assert piece(api, model["id"], 0, b"14095", index=4095).ok()["state"] == "verified"
    assert time.monotonic() - began < 10


# Deleting without eviction.


def test_a_deleted_model_leaves_its_bytes_and_is_ready_at_once_when_it_is_back(either: Installation) -> None:
    api = http_of(either)
    data, begun = random_bytes(4000), random_bytes(50)
    document = manifest_of(data, begun, data, name=random_bytes(4).hex())
    document["files"][2]["name"] = "again.gguf"
    model_id = api("POST", "/models", document).ok(201)["id"]
    piece(api, model_id, 0, data).ok()
    piece(api, model_id, 0, begun[:10], index=1).ok()
    assert sha256(begun) in partials(either)
    removed = api("DELETE", f"/models/{model_id}").ok()
    assert removed == {"removed": True, "bytes_freed": 10, "bytes_retained_shared": 4000}
    for answer in (
        api("GET", f"/models/{model_id}"),
        api("DELETE", f"/models/{model_id}"),
        piece(api, model_id, 0, b"x"),
    ):
        assert answer.code == "not_found"
    assert sha256(begun) not in partials(either)
    assert blobs(either)[sha256(data)].read_bytes() == data

    again = api("POST", "/models", manifest_of(data, name=random_bytes(4).hex())).ok(201)
    assert (again["state"], again["bytes_durable"]) == ("ready", 4000)
    anew = api("POST", "/models", document).ok(201)
    assert [file["offset"] for file in anew["files"]] == [4000, 0, 4000]


def test_deleting_a_model_keeps_what_another_one_begins_with(made: Installation, api: Http) -> None:
    shared = random_bytes(60)
    first, second = registered(api, shared), registered(api, shared, b"more")
    piece(api, first, 0, shared[:20]).ok()
    assert file_of(api, second)["offset"] == 20
    removed = api("DELETE", f"/models/{first}").ok()
    assert (removed["bytes_freed"], removed["bytes_retained_shared"]) == (0, 20)
    assert piece(api, second, 20, shared[20:]).ok()["state"] == "verified"


def test_a_model_that_is_being_written_is_not_deleted(made: Installation, api: Http) -> None:
    data = random_bytes(100)
    model_id = registered(api, data)
    with Stream(api, model_id, 0, 100) as stream:
        stream.send(data[:50])
        claimed(made, data)
        assert api("DELETE", f"/models/{model_id}").code == "model_busy"
        stream.send(data[50:])
        assert stream.answer()[1]["state"] == "verified"
    assert api("DELETE", f"/models/{model_id}").ok()["bytes_retained_shared"] == 100


# Projects.


def test_knowing_a_digest_gives_nobody_the_content_and_bytes_are_stored_once(
    made: Installation, api: Http, other: Http
) -> None:
    data = random_bytes(9000)
    document = manifest_of(data, name="shared")
    mine = api("POST", "/models", document).ok(201)["id"]
    piece(api, mine, 0, data).ok()
    blob = blobs(made)[sha256(data)]
    facts = blob.stat()

    theirs = other("POST", "/models", document).ok(201)
    assert (theirs["state"], theirs["bytes_durable"]) == ("registered", 0)
    assert piece(other, theirs["id"], 9000, b"").code == "empty_upload"
    wrong_end = bytes([data[-1] ^ 1])
    assert piece(other, theirs["id"], 0, data[:-1] + wrong_end).code == "source_mismatch"
    assert model_of(other, theirs["id"])["state"] == "failed"
    assert model_of(api, mine)["state"] == "ready"
    assert piece(other, theirs["id"], 0, data).ok()["state"] == "verified"
    after = blobs(made)[sha256(data)].stat()
    assert (after.st_ino, after.st_nlink, after.st_mtime_ns) == (facts.st_ino, 1, facts.st_mtime_ns)
    assert sha256(data) not in partials(made)

    assert other("DELETE", f"/models/{theirs['id']}").ok()["bytes_retained_shared"] == 9000
    assert model_of(api, mine)["state"] == "ready"
    assert blob.read_bytes() == data


def test_an_owner_may_share_content_across_projects(controllers: Start) -> None:
    made = controllers("sharing", FICC_CONTENT_SHARE_ACROSS_PROJECTS="true")
    api = http_of(made)
    other, third = projects_of(made, "other", "third").values()
    data = random_bytes(500)
    document = manifest_of(data, b"more", name="shared")
    waiting = other("POST", "/models", document).ok(201)["id"]
    piece(api, registered(api, data), 0, data).ok()
    assert other("GET", f"/models/{waiting}").ok()["bytes_durable"] == 0
    again = other("POST", "/models", document).ok(200)  # asked again, it is given
    assert (again["id"], again["files"][0]["state"]) == (waiting, "verified")
    assert other("POST", "/models", manifest_of(data, name="alone")).ok(201)["state"] == "ready"
    lying = manifest_of(random_bytes(3), name="lying")
    lying["files"][0].update(sha256=sha256(data), bytes=499)
    assert third("POST", "/models", lying).ok(201)["state"] == "registered"


# On the controller's own machine.


def test_a_local_file_is_placed_adopted_and_verified(made: Installation, api: Http, tmp_path: Path) -> None:
    data = random_bytes(700_000)
    source = tmp_path / "weights.gguf"
    source.write_bytes(data)
    incoming = made.directory / "content" / "incoming"
    model_id = registered(api, data)
    path = f"/models/{model_id}/files/0/adopt"
    piece(api, model_id, 0, data[:100]).ok()

    name = files.place(source, incoming, lambda done: None)
    assert api("POST", path, {"name": name}).ok()["state"] == "verified"
    assert blobs(made)[sha256(data)].read_bytes() == data
    source.write_bytes(b"changed afterwards")
    assert blobs(made)[sha256(data)].read_bytes() == data

    source.write_bytes(data)
    name = files.place(source, incoming, lambda done: None)
    assert api("POST", path, {"name": name}).ok()["state"] == "verified"
    assert list(incoming.iterdir()) == []  # nothing was missing, and nothing is left lying about


def test_a_local_file_is_hashed_like_any_other(made: Installation, api: Http, tmp_path: Path) -> None:
    source = tmp_path / "weights.gguf"
    source.write_bytes(b"another")
    incoming = made.directory / "content" / "incoming"
    model_id = registered(api, random_bytes(7))
    path = f"/models/{model_id}/files/0/adopt"
    name = files.place(source, incoming, lambda done: None)
    answer = api("POST", path, {"name": name})
    assert (answer.code, answer.json["offset"]) == ("source_mismatch", 0)
    assert list(incoming.iterdir()) == []
    for wrong_name in ("../x", "a/b", "", "x" * 129, ".x", "ä"):
        answer = api("POST", path, {"name": wrong_name})
        assert (answer.code, answer.param) == ("invalid_request", "name")
    assert api("POST", path, {"name": "nothing"}).code == "not_found"
    (incoming / "link").symlink_to(source)
    assert api("POST", path, {"name": "link"}).code == "source_mismatch"
    (incoming / "link").unlink()
    assert file_of(api, model_id)["state"] == "failed"


def test_answers_are_json_that_says_how_it_is_written(api: Http) -> None:
    answer = api("GET", "/models", limit="1")
    assert answer.headers["content-type"] == "application/json"
    assert json.loads(answer.body.decode("utf-8"))


def test_a_fault_of_ours_is_said_in_the_one_shape_of_errors_and_logged(made: Installation) -> None:
    api = projects_of(made, "broken")["broken"]
    model_id, table = registered(api, random_bytes(7)), schema.models
    broken = update(table).where(table.c.id == model_id).values(manifest={"format": "gguf"})
    with_rows(made, lambda tx: tx.execute(broken))
    answer = api("GET", f"/models/{model_id}", headers={"x-request-id": "the-broken-one"})
    assert (answer.status, answer.code) == (500, "internal")
    assert answer.headers["x-request-id"] == "the-broken-one"
    log = made.logs["controller"]
    made.until(lambda: "(request the-broken-one)" in log.read_text(), "it is logged")
    made.until(lambda: "KeyError" in log.read_text(), "its cause is logged")
    assert api("GET", "/health").ok()
