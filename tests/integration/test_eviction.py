"""Eviction over HTTP, on both databases: what leaves the disk, what stays for others, what is listed and pruned
(A22)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from support.http import Http, caller_with, http_of, projects_of
from support.installation import Installation
from support.rows import manifest_of, random_bytes, sha256
from support.uploads import Stream, blobs, claimed, model_of, partials, piece, registered

Start = Callable[..., Installation]


@pytest.fixture(scope="module")
def others(controllers: Start) -> dict[str, Http]:
    """Somebody of another project, by the backend."""
    return {backend: projects_of(controllers(backend), "b")["b"] for backend in ("sqlite", "postgresql")}


@pytest.fixture
def a(either: Installation) -> Http:
    return http_of(either)


@pytest.fixture
def b(either: Installation, others: dict[str, Http]) -> Http:
    return others["postgresql" if "FICC_DATABASE_URL" in either.environment else "sqlite"]


def ready(api: Http, *contents: bytes, **members: Any) -> str:
    """A model with every byte."""
    model_id = registered(api, *contents, **members)
    for index, data in enumerate(contents):
        if model_of(api, model_id)["files"][index]["state"] != "verified":
            piece(api, model_id, 0, data, index).ok()
    return model_id


def evict(api: Http, model_id: str) -> tuple[int, int]:
    """Bytes freed and retained, as the eviction had been announced."""
    announced = api("GET", f"/models/{model_id}/eviction").ok()
    assert (announced["allowed"], announced["reason"]) == (True, None)
    removed = api("DELETE", f"/models/{model_id}", evict="true").ok()
    assert removed.pop("removed") is True
    assert removed == {name: announced[name] for name in removed}
    assert api("GET", f"/models/{model_id}").code == "not_found"
    return removed["bytes_freed"], removed["bytes_retained_shared"]


def contents(api: Http) -> dict[str, dict[str, Any]]:
    return {item["sha256"]: item for item in api("GET", "/content", limit="200").ok()["items"]}


def binned(made: Installation) -> list[str]:
    return [path.name for path in (made.directory / "content" / "bin").iterdir()]


# One project.


def test_an_evicted_models_bytes_are_gone_whether_complete_or_begun(either: Installation, a: Http) -> None:
    whole, begun, untouched = random_bytes(4000), random_bytes(50), random_bytes(9)
    document = manifest_of(whole, begun, untouched, whole, name=random_bytes(4).hex())
    model_id = a("POST", "/models", document).ok(201)["id"]
    piece(a, model_id, 0, whole).ok()
    piece(a, model_id, 0, begun[:10], index=1).ok()
    assert evict(a, model_id) == (4010, 0)
    assert sha256(whole) not in blobs(either)
    assert sha256(begun) not in partials(either)
    assert binned(either) == []
    assert not {sha256(whole), sha256(begun)} & set(contents(a))

    again = a("POST", "/models", document).ok(201)
    assert (again["state"], again["bytes_durable"]) == ("registered", 0)
    assert piece(a, again["id"], 4000, b"").code == "empty_upload"
    assert piece(a, again["id"], 0, whole).ok()["state"] == "verified"
    assert blobs(either)[sha256(whole)].read_bytes() == whole


def test_a22_bytes_that_another_model_of_the_project_has_stay(either: Installation, a: Http) -> None:
    shared, own, begun = random_bytes(3000), random_bytes(500), random_bytes(70)
    first, second = ready(a, shared, own), ready(a, shared, name=random_bytes(4).hex())
    third, fourth = registered(a, begun), registered(a, begun)
    piece(a, third, 0, begun[:30]).ok()
    assert evict(a, first) == (500, 3000)
    assert model_of(a, second)["state"] == "ready"
    assert blobs(either)[sha256(shared)].read_bytes() == shared
    assert evict(a, third) == (0, 30)
    assert piece(a, fourth, 30, begun[30:]).ok()["state"] == "verified"
    assert evict(a, second) == (3000, 0)
    assert sha256(shared) not in blobs(either)


def test_without_evict_verified_bytes_stay_and_a_later_eviction_finds_them(
    either: Installation, a: Http
) -> None:
    data = random_bytes(600)
    removed = a("DELETE", f"/models/{ready(a, data)}").ok()
    assert removed == {"removed": True, "bytes_freed": 0, "bytes_retained_shared": 600}
    again = registered(a, data)
    assert model_of(a, again)["state"] == "ready"
    assert evict(a, again) == (600, 0)
    assert sha256(data) not in blobs(either)


def test_a_model_that_failed_verification_is_evicted_like_any_other(either: Installation, a: Http) -> None:
    data = random_bytes(80)
    model_id = registered(a, data)
    assert piece(a, model_id, 0, random_bytes(80)).code == "source_mismatch"
    assert evict(a, model_id) == (0, 0)


def test_a_file_without_bytes_is_evicted_too(either: Installation, a: Http, b: Http) -> None:
    mine, theirs = registered(a, b""), registered(b, b"")
    for api, model_id in ((a, mine), (b, theirs)):
        assert piece(api, model_id, 0, b"").ok()["state"] == "verified"
    assert evict(a, mine) == (0, 0)
    assert sha256(b"") in blobs(either)
    assert evict(b, theirs) == (0, 0)
    assert sha256(b"") not in blobs(either)


def test_a_model_that_is_being_written_is_not_evicted(either: Installation, a: Http) -> None:
    data = random_bytes(100)
    model_id = registered(a, data)
    with Stream(a, model_id, 0, 100) as stream:
        stream.send(data[:50])
        claimed(either, data)
        view = a("GET", f"/models/{model_id}/eviction").ok()
        assert (view["allowed"], view["busy"], view["reason"]["code"]) == (False, True, "model_busy")
        answer = a("DELETE", f"/models/{model_id}", evict="true")
        assert (answer.code, answer.headers["retry-after"]) == ("model_busy", "1")
        stream.send(data[50:])
        assert stream.answer()[1]["state"] == "verified"
    assert evict(a, model_id) == (100, 0)


# Two projects.


@pytest.mark.parametrize("first", ["a", "b"])
def test_what_one_project_evicts_the_other_still_has(
    either: Installation, a: Http, b: Http, first: str
) -> None:
    data, own = random_bytes(5000), random_bytes(20)
    one, other = (a, b) if first == "a" else (b, a)
    gone, kept = ready(one, data, own), ready(other, data)
    file = blobs(either)[sha256(data)].stat()
    assert file.st_nlink == 1  # stored once
    assert evict(one, gone) == (20, 5000)
    assert model_of(other, kept)["state"] == "ready"
    after = blobs(either)[sha256(data)]
    assert (after.stat().st_ino, after.read_bytes()) == (file.st_ino, data)
    assert sha256(data) not in contents(one)

    # Who gave it up has to bring it again: that it is still here gives them nothing.
    again = registered(one, data)
    assert model_of(one, again)["bytes_durable"] == 0
    assert piece(one, again, 5000, b"").code == "empty_upload"
    assert piece(one, again, 0, data).ok()["state"] == "verified"
    assert evict(other, kept) == (0, 5000)
    assert evict(one, again) == (5000, 0)
    assert sha256(data) not in blobs(either)


def test_what_another_project_has_begun_keeps_nothing_and_is_not_touched(
    either: Installation, a: Http, b: Http
) -> None:
    data = random_bytes(300)
    mine, theirs = ready(a, data), registered(b, data)
    piece(b, theirs, 0, data[:200]).ok()
    assert evict(a, mine) == (300, 0)
    assert sha256(data) not in blobs(either)
    assert piece(b, theirs, 200, data[200:]).ok()["state"] == "verified"
    assert blobs(either)[sha256(data)].read_bytes() == data


def test_a_partial_does_not_tell_that_somebody_else_has_the_bytes(
    either: Installation, a: Http, b: Http
) -> None:
    data = random_bytes(300)
    ready(b, data)
    mine = registered(a, data)
    piece(a, mine, 0, data[:100]).ok()
    assert contents(a)[sha256(data)]["shared"] is False
    announced = a("GET", f"/models/{mine}/eviction").ok()
    assert (announced["bytes_freed"], announced["bytes_retained_shared"]) == (100, 0)
    piece(a, mine, 100, data[100:]).ok()
    assert contents(a)[sha256(data)]["shared"] is True


def test_another_projects_model_is_not_found(a: Http, b: Http) -> None:
    model_id = ready(a, random_bytes(10))
    assert b("GET", f"/models/{model_id}/eviction").code == "not_found"
    assert b("DELETE", f"/models/{model_id}", evict="true").code == "not_found"
    assert model_of(a, model_id)["state"] == "ready"


def test_an_owner_who_shares_content_keeps_it_as_long_as_any_project_has_it(controllers: Start) -> None:
    made = controllers("sharing", FICC_CONTENT_SHARE_ACROSS_PROJECTS="true")
    one, other = http_of(made), projects_of(made, "b")["b"]
    data = random_bytes(500)
    begun = registered(other, data)
    piece(other, begun, 0, data[:50]).ok()
    first = ready(one, data)
    second = ready(other, data)  # given: and what was begun of it needs no room any more
    assert model_of(other, begun)["state"] == "ready"
    assert evict(one, first) == (0, 500)
    assert evict(other, begun) == (0, 500)
    assert evict(other, second) == (500, 0)
    assert sha256(data) not in blobs(made)
    assert sha256(data) not in partials(made)
    assert model_of(one, registered(one, data))["state"] == "registered"


# The list, and pruning.


def test_content_is_listed_page_by_page_newest_first(either: Installation) -> None:
    api, other = projects_of(either, "lists", "lists too").values()
    data = [b"%d" % n * 10 for n in range(5)]
    models = [ready(api, one) for one in data]
    begun = registered(api, data[0], b"begun")
    piece(api, begun, 0, b"be", index=1).ok()
    ready(other, data[3])
    registered(api, b"nothing of it yet")
    seen: list[dict[str, Any]] = []
    query = {"limit": "2"}
    while True:
        page = api("GET", "/content", **query).ok()
        seen += page["items"]
        if page["next"] is None:
            break
        query["after"] = page["next"]
    assert [item["sha256"] for item in seen] == [sha256(one) for one in (b"begun", *data[::-1])]
    assert seen[0] == {
        "sha256": sha256(b"begun"),
        "state": "partial",
        "bytes": 5,
        "offset": 2,
        "references": [begun],
        "shared": False,
        "last_used_at": None,
    }
    assert [item["state"] for item in seen[1:]] == ["blob"] * 5
    assert [item["shared"] for item in seen[1:]] == [False, True, False, False, False]
    assert seen[5]["references"] == [begun, models[0]]
    for name, value in (("limit", "0"), ("after", "x"), ("colour", "red")):
        answer = api("GET", "/content", **{name: value})
        assert (answer.code, answer.param) == ("invalid_request", name)


def test_pruning_removes_what_no_model_has_and_nothing_else(either: Installation) -> None:
    one, other = projects_of(either, "prunes", "prunes too").values()
    alone, shared, used = random_bytes(1000), random_bytes(200), random_bytes(30)
    doomed = ready(one, alone, shared, used)
    keeps, theirs = ready(one, used), ready(other, shared)
    nothing = {"count": 0, "bytes_freed": 0, "bytes_retained_shared": 0}
    assert one("POST", "/content/prune", {"dry_run": False}).ok() == {"dry_run": False, **nothing}
    one("DELETE", f"/models/{doomed}").ok()
    assert [contents(one)[sha256(data)]["references"] for data in (alone, shared, used)] == [[], [], [keeps]]

    expected = {"count": 2, "bytes_freed": 1000, "bytes_retained_shared": 200}
    for _ in range(2):
        assert one("POST", "/content/prune", {"dry_run": True}).ok() == {"dry_run": True, **expected}
    assert other("POST", "/content/prune", {"dry_run": True}).ok() == {"dry_run": True, **nothing}
    assert sha256(alone) in blobs(either)
    assert one("POST", "/content/prune", {"dry_run": False}).ok() == {"dry_run": False, **expected}
    assert one("POST", "/content/prune", {"dry_run": False}).ok() == {"dry_run": False, **nothing}
    assert set(contents(one)) == {sha256(used)}
    assert sha256(alone) not in blobs(either)
    assert (model_of(one, keeps)["state"], model_of(other, theirs)["state"]) == ("ready", "ready")
    assert blobs(either)[sha256(shared)].read_bytes() == shared
    assert binned(either) == []


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"dry_run": "yes"}, "dry_run"),
        ({"dry_run": 1}, "dry_run"),
        ({}, "dry_run"),
        ({"dry_run": True, "colour": "red"}, "colour"),
        ([], "body"),
    ],
)
def test_a_prune_that_is_not_what_it_should_be(api: Http, body: Any, param: str) -> None:
    answer = api("POST", "/content/prune", body)
    assert (answer.code, answer.param) == ("invalid_request", param)


def test_evict_is_true_or_false(api: Http) -> None:
    model_id = registered(api, random_bytes(5))
    answer = api("DELETE", f"/models/{model_id}", evict="perhaps")
    assert (answer.code, answer.param) == ("invalid_request", "evict")
    answer = api("GET", f"/models/{model_id}/eviction", evict="true")
    assert (answer.code, answer.param) == ("invalid_request", "evict")
    assert api("DELETE", f"/models/{model_id}", evict="false").ok()


def test_scopes(made: Installation, api: Http) -> None:
    reads, manages = caller_with(made, "models:read"), caller_with(made, "models:manage")
    model_id = registered(api, random_bytes(5))
    for caller, scope, method, path, body in (
        (manages, "models:read", "GET", f"/models/{model_id}/eviction", None),
        (reads, "models:manage", "DELETE", f"/models/{model_id}", None),
        (reads, "models:manage", "GET", "/content", None),
        (reads, "models:manage", "POST", "/content/prune", {"dry_run": True}),
    ):
        answer = caller(method, path, body)
        assert (answer.code, answer.param) == ("denied", scope)
    assert reads("GET", f"/models/{model_id}/eviction").ok()["allowed"]
    assert manages("GET", "/content").ok()
    assert manages("POST", "/content/prune", {"dry_run": True}).ok()
    assert manages("DELETE", f"/models/{model_id}", evict="true").ok()
