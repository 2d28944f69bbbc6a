"""Manifests: every naming rule at its limit and one past it, shards, and the revision as bytes."""

from __future__ import annotations

import hashlib
import unicodedata
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ficc.domain import manifest as module
from ficc.domain.errors import Refused
from ficc.domain.manifest import fold, manifest, name_problem, require_sha256

A, B, C = "a" * 64, "b" * 64, "c" * 64
COMMIT = "0123456789abcdef0123456789abcdef01234567"


def file(name: str = "model.gguf", size: int = 10, sha256: str = A, **more: Any) -> dict[str, Any]:
    return {"name": name, "bytes": size, "sha256": sha256, **more}


def document(*files: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"name": "tiny", "format": "gguf", "files": list(files) or [file()], **more}


def named(*names: str, format: str = "gguf") -> dict[str, Any]:
    """A manifest of files with these names, each with a digest of its own."""
    files = [file(name, sha256=hashlib.sha256(name.encode()).hexdigest()) for name in names]
    return document(*files, format=format)


def refusal(doc: dict[str, Any]) -> Refused:
    with pytest.raises(Refused) as caught:
        manifest(doc)
    assert caught.value.code == "invalid_request"
    return caught.value


# The revision.


def test_the_revision_is_the_hash_of_these_bytes() -> None:
    """Written by hand: members sorted, nothing spaced, what is absent left out."""
    golden = (
        b'{"files":[{"bytes":10,"name":"model.gguf","sha256":"' + b"a" * 64 + b'"}],'
        b'"format":"gguf","name":"tiny"}'
    )
    assert manifest(document()).revision == hashlib.sha256(golden).hexdigest()


def test_the_revision_with_every_member() -> None:
    golden = (
        b'{"capabilities":["chat","embeddings"],"files":['
        b'{"bytes":0,"name":"README.md","sha256":"' + b"b" * 64 + b'"},'
        b'{"bytes":98362432,"name":"d/m.gguf","sha256":"'
        + b"a"
        * 64
        + b'","url":"https://host.example/m.gguf"}],'
        b'"format":"gguf","licence":"apache-2.0","name":"caf\xc3\xa9",'
        b'"source":{"kind":"hub","repository":"owner/name","revision":"' + COMMIT.encode() + b'"}}'
    )
    made = manifest(
        document(
            file("README.md", 0, B),
            file("d/m.gguf", 98362432, A, url="https://host.example/m.gguf"),
            name="café",
            licence="apache-2.0",
            capabilities=["chat", "embeddings"],
            source={"revision": COMMIT, "repository": "owner/name", "kind": "hub"},
        )
    )
    assert made.revision == hashlib.sha256(golden).hexdigest()
    assert made.bytes_total == 98362432


def test_null_equals_absent() -> None:
    nulls = document(file(url=None), capabilities=None, licence=None, source=None)
    assert manifest(nulls).revision == manifest(document()).revision
    assert "url" not in manifest(nulls).as_json()["files"][0]


def test_the_order_of_files_and_of_capabilities_counts() -> None:
    first, second = named("a.gguf", "b.gguf"), named("b.gguf", "a.gguf")
    assert manifest(first).revision != manifest(second).revision
    both, turned = (document(capabilities=c) for c in (["chat", "embeddings"], ["embeddings", "chat"]))
    assert manifest(both).revision != manifest(turned).revision


def test_a_manifest_reads_back_as_itself() -> None:
    made = manifest(document(file(url="https://host.example/x"), licence="mit", capabilities=["chat"]))
    assert manifest(made.as_json()) == made


def test_chat_is_what_a_model_serves_that_declares_nothing() -> None:
    assert manifest(document()).served_capabilities == ("chat",)
    assert manifest(document(capabilities=["embeddings"])).served_capabilities == ("embeddings",)
    assert manifest(document(capabilities=[])).served_capabilities == ()


# Digests.


@pytest.mark.parametrize(
    "digest",
    [
        "A" * 64,
        "sha256:" + A,
        "a" * 63,
        "a" * 65,
        "",
        "g" * 64,
        A + "\n",
        " " + A[1:],
        "../" + "a" * 61,
        "٠" * 64,
    ],
)
def test_a12_a_digest_is_64_lower_case_hex_characters_or_refused(digest: str) -> None:
    refused = refusal(document(file(sha256=digest)))
    assert refused.param == "files[0].sha256"
    with pytest.raises(Refused):
        require_sha256(digest, "sha256")


def test_a12_a_right_digest_passes() -> None:
    assert require_sha256(A, "sha256") == A


def test_one_digest_has_one_size() -> None:
    manifest(document(file("a.gguf", 10), file("b.gguf", 10)))
    assert refusal(document(file("a.gguf", 10), file("b.gguf", 11))).param == "files[1].bytes"


# File names.

BAD_NAMES = [
    *("../x", "/etc/x", "a\\b", "CON", "x.", "a:b"),  # the row's own
    *("", ".", "..", "a/../b", "./a", "a//b", "a/", "/", "~/..", "a/."),
    *("a\x00b", "a\nb", "\x7f", "a\x85b", "a\u202eb", "\ufeffa", "a\u2028b", "\ud800"),
    *('a"b', "a<b", "a>b", "a|b", "a?b", "a*b", "C:", "a:stream"),
    *("a ", " a", "d /a", "a/ b", "a. ", "d./a", "..."),
    *("con", "Con.gguf", "PRN", "aux.tar.gz", "NUL ", "nul .txt", "COM1", "com0.gguf", "lpt9", "LPT0"),
    *("COM¹", "lpt²", "com³.gguf", "d/nul", "conin$", "CONOUT$.txt"),
]


@pytest.mark.parametrize("name", BAD_NAMES)
def test_a13_a_name_that_is_not_plain_everywhere_is_refused_by_name(name: str) -> None:
    assert name_problem(name)
    refused = refusal(document(file("fine.gguf"), file(name, sha256=B)))
    assert refused.param == "files[1].name"
    assert repr(name) in refused.message


@pytest.mark.parametrize(
    "name",
    [
        *(
            "model.gguf",
            "a/b/c",
            "com10",
            "COM",
            "console",
            "lpt",
            "null",
            "CONx",
            "a.con",
            ".hidden",
            "..a",
            "a..b",
        ),
        *("Ü/日本語.gguf", "with space.gguf", "-dash", "a+b=c,d;e'f(g)[h]{i}!@#$%^&~`", "a" * 255),
    ],
)
def test_a13_a_plain_name_passes(name: str) -> None:
    assert name_problem(name) is None
    assert manifest(named("m.gguf", name)).files[1].name == name


def test_a13_a_component_has_255_bytes_at_most() -> None:
    assert name_problem("a" * 255) is None
    assert name_problem("a" * 256)
    assert name_problem("d/" + "é" * 127 + "e") is None
    assert name_problem("d/" + "é" * 128)


def test_a13_a_name_has_1024_bytes_at_most() -> None:
    """Five components and four slashes."""
    assert name_problem("/".join(["a" * 204] * 4 + ["b" * 204])) is None
    assert len("/".join(["a" * 204] * 5)) == 1024
    assert name_problem("/".join(["a" * 204] * 4 + ["b" * 205]))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("a.gguf", "a.gguf"),
        ("Model.gguf", "model.GGUF"),
        ("é.gguf", "e\u0301.gguf"),
        ("É.gguf", "e\u0301.gguf"),
        ("straße.gguf", "STRASSE.gguf"),
        ("d/A", "D/a"),
        ("ﬁ", "FI"),
        ("Σ", "ς"),
        ("\u212b", "å"),  # the sign of the unit
    ],
)
def test_a13_names_that_are_one_on_some_file_system_are_refused(one: str, other: str) -> None:
    refused = refusal(named("m.gguf", one, other))
    assert refused.param == "files[2].name"
    assert repr(one) in refused.message
    assert repr(other) in refused.message


def test_a13_names_that_differ_somewhere_pass() -> None:
    assert len(manifest(named("a.gguf", "b.gguf", "d/a.gguf", "D/b.gguf")).files) == 4


@pytest.mark.parametrize(("one", "other"), [("d", "d/a"), ("d/e/f", "D/E"), ("É", "e\u0301/x")])
def test_a13_a_file_is_no_directory_of_another(one: str, other: str) -> None:
    assert "itself a file" in refusal(named("m.gguf", one, other)).message


@given(st.text(min_size=1, max_size=40))
def test_a13_whatever_passes_stays_below_its_directory(name: str) -> None:
    if name_problem(name) is None:
        assert not name.startswith("/")
        assert not {"", ".", ".."} & set(name.split("/"))
        assert not set(name) & set('\\:<>"|?*\0\n\r')
        assert len(name.encode()) <= 1024


@given(st.text(max_size=20))
def test_a13_folding_again_changes_nothing_and_forms_do_not_count(name: str) -> None:
    assert fold(unicodedata.normalize("NFD", name)) == fold(name) == fold(unicodedata.normalize("NFC", name))
    assert unicodedata.is_normalized("NFC", fold(name))


# Shards.


def shards(count: int, *numbers: int, stem: str = "big") -> list[str]:
    return [f"{stem}-{number:05d}-of-{count:05d}.gguf" for number in numbers]


def test_a14_shards_in_any_order_are_one_model_whose_entry_is_shard_1() -> None:
    made = manifest(named("README.md", *shards(3, 3, 1, 2)))
    assert made.entry.name == "big-00001-of-00003.gguf"


@pytest.mark.parametrize("missing", [1, 2, 3])
def test_a14_a_missing_shard_is_refused_by_its_name(missing: int) -> None:
    there = [number for number in (1, 2, 3) if number != missing]
    refused = refusal(named(*shards(3, *there)))
    assert f"big-0000{missing}-of-00003.gguf is missing" in refused.message


@pytest.mark.parametrize("names", [shards(0, 0), shards(2, 1, 2, 3), shards(1, 0, 1)])
def test_a14_shards_that_are_not_counted_from_1_are_refused(names: list[str]) -> None:
    assert "not numbered 1 to" in refusal(named(*names)).message


def test_a14_each_set_is_complete_by_itself() -> None:
    both = [*shards(2, 1, 2, stem="q4"), *shards(2, 2, 1, stem="q8")]
    assert manifest(named(*both)).entry.name == "q4-00001-of-00002.gguf"
    assert manifest(named(*reversed(both))).entry.name == "q8-00001-of-00002.gguf"
    assert "a/big-00002-of-00002.gguf is missing" in (
        refusal(named("a/big-00001-of-00002.gguf", "b/big-00002-of-00002.gguf")).message
    )


def test_a14_only_ascii_digits_number_a_shard() -> None:
    """An engine looks for the next shard by ASCII digits."""
    made = manifest(named("big-٠٠٠٠١-of-٠٠٠٠٢.gguf"))
    assert made.entry.name.startswith("big-٠")


def test_a14_another_format_has_no_shard_rule() -> None:
    names = ["model-00002-of-00002.safetensors", "config.json"]
    assert manifest(named(*names, format="safetensors")).entry.name == names[0]


@pytest.mark.parametrize(
    ("names", "entry"),
    [
        (["mmproj-model.gguf", "model.gguf"], "model.gguf"),
        (["README.md", "Model.GGUF"], "Model.GGUF"),
        (["mmproj/model.gguf"], "mmproj/model.gguf"),
        (["main.gguf", *shards(2, 1, 2, stem="draft")], "main.gguf"),
        (["mmproj-00001-of-00001.gguf", "main.gguf"], "main.gguf"),
        (["mmproj.gguf"], "mmproj.gguf"),
    ],
)
def test_the_entry_is_the_first_that_holds_weights(names: list[str], entry: str) -> None:
    assert manifest(named(*names)).entry.name == entry


def test_a_gguf_manifest_has_a_gguf_file() -> None:
    assert "at least one .gguf file" in refusal(named("model.safetensors")).message


# Numbers of files and bytes.


def many(count: int) -> dict[str, Any]:
    return document(*(file(f"{index}.gguf") for index in range(count)))


def test_there_are_1_to_4096_files() -> None:
    assert len(manifest(many(4096)).files) == 4096
    assert refusal(many(4097)).param == "files"
    assert refusal({**document(), "files": []}).param == "files"


@pytest.mark.parametrize(("size", "fine"), [(0, True), (2**53 - 1, True), (-1, False), (2**53, False)])
def test_a_size_is_exact_to_every_reader(size: int, fine: bool) -> None:
    if fine:
        assert manifest(document(file(size=size))).bytes_total == size
    else:
        assert refusal(document(file(size=size))).param == "files[0].bytes"


def test_the_sum_of_sizes_is_exact_too() -> None:
    assert manifest(document(file(size=2**53 - 2), file("b.gguf", 1, B))).bytes_total == 2**53 - 1
    assert refusal(document(file(size=2**53 - 1), file("b.gguf", 1, B))).param == "files"


# Texts, sources, addresses.


@pytest.mark.parametrize("member", ["name", "licence"])
def test_texts_are_1_to_256_printable_characters(member: str) -> None:
    for fine in ("x", "x" * 256, "日本語 model", "é"):
        manifest(document(**{member: fine}))
    for bad in ("", "x" * 257, "a\nb", "a\x00", "a\u2028b", "a\u200bb", "\ud800"):
        assert refusal(document(**{member: bad})).param == member


def test_a_capability_is_listed_once() -> None:
    assert refusal(document(capabilities=["chat", "chat"])).param == "capabilities"


@pytest.mark.parametrize("revision", ["main", "A" * 40, "a" * 39, "a" * 41, "a" * 40 + "\n", ""])
def test_a_source_is_pinned_to_a_commit(revision: str) -> None:
    source = {"kind": "hub", "repository": "owner/name", "revision": revision}
    assert refusal(document(source=source)).param == "source.revision"
    manifest(document(source={**source, "revision": COMMIT}))


@pytest.mark.parametrize(
    "url",
    [
        *(
            "http://host.example/x",
            "ftp://host.example/x",
            "//host.example/x",
            "host.example/x",
            "https:///x",
            "",
        ),
        *("https://user@host.example/x", "https://user:secret@host.example/x", "https://@host.example/x"),
        *("https://host.example/x?token=1", "https://host.example/x?", "https://host.example/x#f"),
        *(
            "https://host.example/x#",
            "https://host.example/a b",
            "https://host.example/\n",
            "https://hóst.example/",
        ),
        *("https://host.example:99999/", "https://host.example:x/", "https://host.example\\@evil.example/x"),
        *("https://host.example\\x", "https://[::1", "https://host.example/" + "x" * 2028),
    ],
)
def test_a21_an_address_with_secrets_or_of_two_meanings_is_refused(url: str) -> None:
    assert refusal(document(file(url=url))).param == "files[0].url"


@pytest.mark.parametrize(
    "url",
    [
        "https://host.example/x%20y.gguf",
        "https://host.example:8443/a/b",
        "HTTPS://host.example/x",
        "https://host.example/" + "x" * 2027,
    ],
)
def test_a_plain_https_address_passes(url: str) -> None:
    assert manifest(document(file(url=url))).files[0].url == url


def test_the_longest_address_has_2048_characters() -> None:
    assert len("https://host.example/" + "x" * 2027) == module.URL_CHARACTERS_MAX
