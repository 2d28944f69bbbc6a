"""Previews of a hub's repositories, against a stand-in with the real answers' shape."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ficc.controller.operations.hub import STEP_BYTES
from ficc.controller.sources.hub import PAGES_MAX
from support import source as sources
from support.gguf_files import encode, tiny_bert, tiny_llama, write_shards
from support.http import caller_with
from support.hub import COMMIT, StandInHub
from support.model import smollm2
from support.registry import Registry
from support.source import Source

TOKEN = "hf_a-token-that-nobody-else-may-see"
REAL = "SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture(scope="module")
def hub(source: Source) -> StandInHub:
    made = StandInHub(source)
    real = smollm2().read_bytes()
    made.add("owner/smollm2", {"README.md": b"hello", REAL: real})
    return made


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory, source: Source, hub: StandInHub) -> Iterator[Registry]:
    directory = tmp_path_factory.mktemp("ficc")
    token = source.ca_file.parent / "token"
    token.write_text(TOKEN + "\n")
    token.chmod(0o644)
    made = Registry(
        directory,
        source,
        FICC_HUB_ENDPOINT=hub.endpoint,
        FICC_HUB_TOKEN_FILE=str(token),
        FICC_ACQUISITION_RANGE_BYTES=str(1 << 30),
    )
    try:
        made.start("controller")
        yield made
    finally:
        made.stop()


Preview = Callable[..., Any]


@pytest.fixture
def preview(registry: Registry) -> Preview:
    def ask(repository: str, revision: str = "main", **more: Any) -> Any:
        wanted = {"repository": repository, "revision": revision, **more}
        return registry.http("POST", "/models/hub-preview", wanted)

    return ask


def tiny() -> bytes:
    return encode(*tiny_llama())


def shards(folder: Path, name: str, count: int) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in write_shards(folder, name, *tiny_llama(), count)}


# What a preview tells.


def test_a_real_model_is_described_by_its_header_alone(preview: Preview, source: Source) -> None:
    answer = preview("owner/smollm2").ok()
    assert (answer["repository"], answer["requested_revision"], answer["commit"]) == (
        "owner/smollm2",
        "main",
        COMMIT,
    )
    (one,) = answer["manifests"]
    real = smollm2().read_bytes()
    (file,) = one["manifest"]["files"]
    assert file == {
        "name": REAL,
        "bytes": len(real),
        "sha256": hashlib.sha256(real).hexdigest(),
        "url": source.url(f"/owner/smollm2/resolve/{COMMIT}/{REAL}"),
    }
    assert one["manifest"]["source"] == {"kind": "hub", "repository": "owner/smollm2", "revision": COMMIT}
    assert one["manifest"]["licence"] == "apache-2.0"
    assert one["manifest"]["capabilities"] == ["chat"]
    gguf = one["gguf"]
    assert (gguf["architecture"], gguf["block_count"], gguf["chat_template"]) == ("llama", 30, True)
    assert gguf["context_length"] == 8192
    assert 134_000_000 < gguf["parameters"] < 163_000_000
    assert one["estimate"]["basis"] == "metadata"
    assert one["estimate"]["kv_cache_bytes"] > 0
    assert one["estimate"]["total_bytes"] > len(real)
    header = gguf["header_bytes"]
    assert header <= answer["bytes_read"] <= header + STEP_BYTES, "nothing of a weight beyond one step"


def test_what_it_previewed_can_be_registered_and_acquired(registry: Registry, preview: Preview) -> None:
    manifest = preview("owner/smollm2").ok()["manifests"][0]["manifest"]
    model = registry.http("POST", "/models", manifest).ok(201)
    registry.acquire(model)
    assert registry.becomes(model, "ready", "failed")["error"] is None
    assert registry.blob(smollm2().read_bytes()).stat().st_size == smollm2().stat().st_size


def test_a20_the_token_goes_to_the_hub_and_nowhere_else(
    registry: Registry, preview: Preview, source: Source
) -> None:
    before = len(source.requests)
    preview("owner/smollm2").ok()
    seen = source.requests[before:]
    assert {request.headers.get("authorization") for request in seen if "/cdn/" not in request.path} == {
        f"Bearer {TOKEN}"
    }
    content = [request for request in seen if "/cdn/" in request.path]
    assert content
    assert all("authorization" not in request.headers for request in content)
    for path in registry.directory.rglob("*"):
        if path.is_file() and path.stat().st_size < 64 << 20:
            data = path.read_bytes()
            assert TOKEN.encode() not in data, path
            assert b"X-Signature" not in data, path


def test_a14_shards_are_one_model_and_a_missing_one_is_named(
    hub: StandInHub, preview: Preview, tmp_path: Path
) -> None:
    whole, broken = shards(tmp_path, "whole", 3), shards(tmp_path, "broken", 3)
    del broken["broken-00002-of-00003.gguf"]
    files = {
        "mmproj-model-f16.gguf": tiny(),
        **dict(reversed(whole.items())),
        **broken,
        "single.gguf": tiny(),
    }
    hub.add("owner/shards", files)
    answer = preview("owner/shards").ok()
    names = [one["manifest"]["name"] for one in answer["manifests"]]
    assert names == ["single", "whole"]
    assert [file["name"] for file in answer["manifests"][1]["manifest"]["files"]] == sorted(whole)
    assert answer["projectors"] == ["mmproj-model-f16.gguf"]
    assert answer["incomplete"] == ["broken-00002-of-00003.gguf"]
    single, split = (one["gguf"]["parameters"] for one in answer["manifests"])
    assert single == split, "the shards' tensors together"

    refused = preview("owner/shards", filename="broken-00001-of-00003.gguf")
    assert (refused.status, refused.code, refused.param) == (422, "invalid_request", "filename")
    assert "broken-00002-of-00003.gguf" in refused.json["error"]["message"]
    one = preview("owner/shards", filename="whole-00003-of-00003.gguf").ok()
    assert [m["manifest"]["name"] for m in one["manifests"]] == ["whole"]


def test_an_embedding_model_is_told_by_its_pooling(hub: StandInHub, preview: Preview) -> None:
    hub.add("owner/bert", {"bert.gguf": encode(*tiny_bert())})
    (one,) = preview("owner/bert").ok()["manifests"]
    assert one["manifest"]["capabilities"] == ["embeddings"]


def test_a_long_list_of_files_is_read_page_by_page(hub: StandInHub, preview: Preview) -> None:
    files = {f"notes/{number}.txt": b"x" for number in range(25)} | {"z.gguf": tiny()}
    hub.add("owner/paged", files, page=10)
    assert [one["manifest"]["name"] for one in preview("owner/paged").ok()["manifests"]] == ["z"]


def test_a_list_of_files_has_so_many_pages_at_most(hub: StandInHub, preview: Preview) -> None:
    files = {"a.gguf": tiny()} | {f"notes/{number}.txt": b"x" for number in range(PAGES_MAX - 2)}
    hub.add("owner/full", files, page=1)  # and one page is a directory's
    assert [one["manifest"]["name"] for one in preview("owner/full").ok()["manifests"]] == ["a"]
    hub.add("owner/overfull", {**files, "z.gguf": tiny()}, page=1)
    refused = preview("owner/overfull")
    assert refused.code == "source_unavailable"
    assert f"more than {PAGES_MAX} pages" in refused.json["error"]["message"]


def test_a_renamed_repository_is_called_by_its_new_name(hub: StandInHub, preview: Preview) -> None:
    hub.add("owner/old", {"m.gguf": tiny()}, renamed_to="owner/new")
    answer = preview("owner/old").ok()
    assert answer["repository"] == "owner/new"
    assert answer["manifests"][0]["manifest"]["source"]["repository"] == "owner/new"


def test_the_callers_licence_stands_beside_the_hubs(hub: StandInHub, preview: Preview) -> None:
    hub.add("owner/licence", {"m.gguf": tiny()}, licence="other")
    answer = preview("owner/licence", licence="mit").ok()
    assert answer["licence"] == {"declared": "mit", "hub": "other"}
    assert answer["manifests"][0]["manifest"]["licence"] == "mit"


def test_a_commit_is_a_revision_like_any_other(preview: Preview) -> None:
    assert preview("owner/smollm2", COMMIT).ok()["commit"] == COMMIT


# What a hub may not, or does not, answer.


@pytest.mark.parametrize(
    ("status", "error", "code", "expected"),
    [
        (401, "RepoNotFound", "repository_not_found", 404),
        (404, "RepoNotFound", "repository_not_found", 404),
        (404, "RevisionNotFound", "repository_not_found", 404),
        (403, "GatedRepo", "repository_gated", 403),
        (401, "GatedRepo", "repository_gated", 403),
        (429, None, "hub_rate_limited", 429),
        (500, None, "source_unavailable", 502),
    ],
)
def test_each_refusal_of_the_hub_is_told_apart(
    hub: StandInHub, preview: Preview, status: int, error: str | None, code: str, expected: int
) -> None:
    name = f"owner/refused-{os.urandom(4).hex()}"
    more = {"retry_after": "17"} if status == 429 else {}
    hub.fails(name, status, error, **more)
    answer = preview(name)
    assert (answer.status, answer.code) == (expected, code)
    if status == 429:
        assert answer.headers["retry-after"] == "17"


def test_a_file_without_a_digest_is_refused_by_name_and_before_any_header_is_read(
    hub: StandInHub, source: Source, preview: Preview
) -> None:
    hub.add("owner/nodigest", {"a.gguf": tiny(), "plain.gguf": tiny()}, without_digest=("plain.gguf",))
    before = len(source.requests)
    answer = preview("owner/nodigest")
    assert (answer.status, answer.code) == (422, "content_hash_missing")
    assert "plain.gguf" in answer.json["error"]["message"]
    assert not [request.path for request in source.requests[before:] if "/resolve/" in request.path]


def test_a_header_that_lies_is_refused(hub: StandInHub, preview: Preview) -> None:
    hub.add("owner/liar", {"m.gguf": tiny()[:24] + b"\xff" * 100})
    answer = preview("owner/liar")
    assert (answer.status, answer.code) == (422, "model_header_refused")


def test_other_bytes_than_listed_are_refused(hub: StandInHub, source: Source, preview: Preview) -> None:
    body = tiny()
    hub.add("owner/changed", {"m.gguf": body})
    path = f"/owner/changed/resolve/{COMMIT}/m.gguf"
    source.always(path, sources.redirect(source.url("/x"), 302, x_linked_etag='"' + "0" * 64 + '"'))
    source.serve("/x", body)
    answer = preview("owner/changed")
    assert (answer.status, answer.code) == (422, "source_mismatch")


def test_the_next_page_stays_on_the_hub(hub: StandInHub, source: Source, preview: Preview) -> None:
    hub.add("owner/away", {"m.gguf": tiny()})
    link = '<https://127.0.0.1:1/api>; rel="next"'
    source.always(
        f"/api/models/owner/away/tree/{COMMIT}?recursive=true", sources.status(200, b"[]", link=link)
    )
    answer = preview("owner/away")
    assert (answer.status, answer.code) == (422, "source_refused")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"repository": "no-owner", "revision": "main"}, "repository"),
        ({"repository": "../x", "revision": "main"}, "repository"),
        ({"repository": "a/b", "revision": "../main"}, "revision"),
        ({"repository": "a/b", "revision": ""}, "revision"),
        ({"repository": "a/b", "revision": "main", "other": 1}, "other"),
    ],
)
def test_bad_input_names_its_field(registry: Registry, body: dict[str, Any], param: str) -> None:
    answer = registry.http("POST", "/models/hub-preview", body)
    assert (answer.status, answer.code, answer.param) == (422, "invalid_request", param)


def test_a_repository_without_gguf_says_so(hub: StandInHub, preview: Preview) -> None:
    hub.add("owner/none", {"model.bin": b"x"})
    answer = preview("owner/none")
    assert (answer.status, answer.code) == (404, "not_found")


def test_a_file_that_is_not_there(preview: Preview) -> None:
    answer = preview("owner/smollm2", filename="other.gguf")
    assert (answer.status, answer.code, answer.param) == (404, "not_found", "filename")
    assert REAL.removesuffix(".gguf") in answer.json["error"]["message"]


def test_search(registry: Registry, source: Source) -> None:
    source.always(
        "/api/models?search=smol&filter=gguf&sort=downloads&limit=50",
        sources.status(200, b'[{"id":"owner/smollm2","downloads":7,"gated":"auto"},{"id":"a/b"}]'),
    )
    found = registry.http("GET", "/hub/search", q="smol").ok()["items"]
    assert found == [
        {"repository": "owner/smollm2", "downloads": 7, "gated": True},
        {"repository": "a/b", "downloads": None, "gated": False},
    ]


def test_it_takes_models_manage(registry: Registry) -> None:
    reader = caller_with(registry, "models:read")
    answer = reader("POST", "/models/hub-preview", {"repository": "a/b", "revision": "main"})
    assert (answer.status, answer.code) == (403, "denied")
    assert reader("GET", "/hub/search", q="x").status == 403


# What the settings name.


@pytest.mark.parametrize(
    ("setting", "content", "why"),
    [
        pytest.param("acquisition.ca_file", None, "No such file", id="no_authorities"),
        pytest.param("acquisition.ca_file", b"nothing", "NO_CERTIFICATE", id="no_certificate"),
        pytest.param("hub.token_file", None, "No such file", id="no_token"),
        pytest.param("hub.token_file", b"\xff\xfe", "decode", id="no_text"),
    ],
)
def test_a_file_that_cannot_be_used_ends_the_start_and_is_named(
    tmp_path: Path, source: Source, setting: str, content: bytes | None, why: str
) -> None:
    file = source.ca_file.parent / os.urandom(8).hex()  # where the controller's own account may look
    if content is not None:
        file.write_bytes(content)
        file.chmod(0o644)
    named = {f"FICC_{setting.replace('.', '_').upper()}": str(file)}
    controller = Registry(tmp_path / "ficc", source, **named)
    with pytest.raises(AssertionError) as ended:
        controller.start("controller")
    said = controller.logs["controller"].read_text()
    assert f"controller: {setting} {file} cannot be used: " in said, ended
    assert why in said
    assert "Traceback" not in said
