"""The content store on a real file system: partials grow, blobs do not change, and nothing else gets in."""

from __future__ import annotations

import hashlib
import os
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from ficc.content import store as content_store
from ficc.content.store import ContentStore, Key, hash_file
from ficc.controller.operations.context import new_id
from ficc.domain.errors import Refused

PROJECT = new_id()
DATA = b"the weights of a model " * 1000
SHA256 = hashlib.sha256(DATA).hexdigest()
KEY = Key(PROJECT, SHA256)
EVER = float("inf")


@pytest.fixture
def store(tmp_path: Path) -> ContentStore:
    made = ContentStore(tmp_path / "content", reserve_bytes=0)
    made.prepare()
    return made


def mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


def everything(store: ContentStore) -> set[str]:
    return {str(path.relative_to(store.root)) for path in store.root.rglob("*") if not path.is_dir()}


# Names.


@pytest.mark.parametrize(
    "sha256", ["", "../" * 20, SHA256.upper(), f"sha256:{SHA256}", SHA256[:-1], SHA256 + "\n"]
)
def test_a_digest_is_no_path_before_it_is_checked(store: ContentStore, sha256: str) -> None:
    calls = (
        lambda: store.blob(sha256),
        lambda: store.has_blob(sha256, 1),
        lambda: store.partial(Key(PROJECT, sha256)),
        lambda: store.write(Key(PROJECT, sha256), 0, b"x"),
        lambda: store.bin_blob(sha256),
        lambda: store.bin_partial(Key(PROJECT, sha256)),
    )
    for call in calls:
        with pytest.raises(Refused, match="64 lower-case hex"):
            call()
    assert everything(store) == set()


@pytest.mark.parametrize("project", ["", "..", "a/b", PROJECT + "/.."], ids=["none", "up", "two", "through"])
def test_a_project_is_no_path_before_it_is_checked(store: ContentStore, project: str) -> None:
    with pytest.raises(ValueError, match="project"):
        store.write(Key(project, SHA256), 0, b"x")
    assert everything(store) == set()


def test_nobody_else_may_look(store: ContentStore) -> None:
    store.write(KEY, 0, DATA)
    store.publish(KEY, len(DATA))
    store.write(Key(PROJECT, "0" * 64), 0, b"x")
    for path in (store.blobs, store.partials, store.incoming, store.blob(SHA256).parent):
        assert mode(path) == 0o700
    assert mode(store.partial(Key(PROJECT, "0" * 64))) == 0o600


# Partials.


def test_a_partial_grows_piece_by_piece(store: ContentStore) -> None:
    assert store.length(KEY) == 0
    for at in range(0, len(DATA), 7000):
        store.write(KEY, at, DATA[at : at + 7000])
    store.sync(KEY)
    assert store.length(KEY) == len(DATA)
    assert store.partial(KEY).read_bytes() == DATA


@pytest.mark.parametrize("taken_at_once", [None, 1, 7, 100_000])
def test_many_pieces_are_written_one_after_the_other_however_the_kernel_takes_them(
    store: ContentStore, monkeypatch: pytest.MonkeyPatch, taken_at_once: int | None
) -> None:
    whole = os.pwritev

    def some(fd: int, views: list[memoryview], offset: int) -> int:
        return whole(fd, [memoryview(b"".join(views))[:taken_at_once]], offset)

    if taken_at_once is not None:
        monkeypatch.setattr(os, "pwritev", some)
    pieces = [b"", DATA[:1], b"", *(DATA[at : at + 9] for at in range(1, len(DATA), 9)), b""]
    assert len(pieces) > 2 * content_store.PIECES_AT_ONCE
    store.write(KEY, 0)
    store.write(KEY, 0, *pieces)
    store.write(KEY, len(DATA), bytearray(b"and "), memoryview(b"more"))
    assert store.partial(KEY).read_bytes() == DATA + b"and more"


def test_a_partial_is_cut_and_never_made_longer(store: ContentStore) -> None:
    store.truncate(KEY, 5)
    assert everything(store) == set()
    store.write(KEY, 0, DATA)
    store.truncate(KEY, len(DATA) + 5)
    assert store.length(KEY) == len(DATA)
    store.truncate(KEY, 5)
    assert store.partial(KEY).read_bytes() == DATA[:5]
    store.truncate(KEY, 0)
    assert everything(store) == set()
    store.truncate(KEY, 0)


def test_projects_have_partials_of_their_own(store: ContentStore) -> None:
    other = Key(new_id(), SHA256)
    store.write(KEY, 0, b"mine")
    store.write(other, 0, b"theirs")
    store.truncate(other, 0)
    assert store.partial(KEY).read_bytes() == b"mine"


def test_a_link_in_the_place_of_a_partial_is_not_followed(store: ContentStore, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(b"untouched")
    store.partial(KEY).parent.mkdir()
    store.partial(KEY).symlink_to(victim)
    with pytest.raises(OSError, match="symbolic links"):
        store.write(KEY, 0, DATA)
    with pytest.raises(OSError, match="symbolic links"):
        store.sync(KEY)
    with pytest.raises(OSError, match="symbolic links"):
        hash_file(store.partial(KEY), lambda count: None)
    with pytest.raises(OSError, match="symbolic links"):
        store.publish(KEY, len(b"untouched"))
    assert victim.read_bytes() == b"untouched"


# Full disks.


def test_the_reserve_is_kept_and_the_refusal_says_how_much_there_is(store: ContentStore) -> None:
    store.write(KEY, 0, DATA[:100])
    store.reserve_bytes = 1 << 60
    with pytest.raises(Refused) as refused:
        store.write(KEY, 100, DATA[100:])
    assert refused.value.code == "disk_full"
    assert refused.value.details["bytes_wanted"] == len(DATA) - 100
    assert refused.value.details["bytes_free"] > 0
    assert store.length(KEY) == 100


FULL_DISK = """
import subprocess, sys
from pathlib import Path
from ficc.content.store import ContentStore, Key
from ficc.domain.errors import Refused

root, project = Path(sys.argv[1]), sys.argv[2]
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "full", root], check=True)
store, key = ContentStore(root, reserve_bytes=-(1 << 40)), Key(project, "0" * 64)  # the check lets all pass
store.prepare()
store.write(key, 0, b"a" * 500_000)
store.sync(key)
try:
    store.write(key, 500_000, b"b" * 1_000_000)
except Refused as refused:
    print(refused.code)
store.truncate(key, 500_000)
store.write(key, 500_000, b"c" * 100_000)
print(store.partial(key).read_bytes() == b"a" * 500_000 + b"c" * 100_000)
"""


@pytest.mark.root
def test_a_disk_that_fills_up_in_the_middle_of_a_piece_loses_nothing_that_was_there(tmp_path: Path) -> None:
    root = tmp_path / "full"
    root.mkdir()
    command = ["unshare", "--mount", sys.executable, "-c", FULL_DISK, str(root), PROJECT]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.split() == ["disk_full", "True"], done.stderr
    assert list(root.iterdir()) == []  # the mount was the child's own


# Publishing.


def test_a_published_blob_is_whole_and_read_only(store: ContentStore) -> None:
    store.write(KEY, 0, DATA)
    store.publish(KEY, len(DATA))
    assert store.has_blob(SHA256, len(DATA))
    assert not store.has_blob(SHA256, len(DATA) - 1)
    assert store.blob(SHA256).read_bytes() == DATA
    assert mode(store.blob(SHA256)) == 0o444
    assert everything(store) == {f"blobs/{SHA256[:2]}/{SHA256}"}


def test_publishing_again_keeps_the_blob_and_drops_the_partial(store: ContentStore) -> None:
    store.write(KEY, 0, DATA)
    store.publish(KEY, len(DATA))
    before = store.blob(SHA256).stat()
    other = Key(new_id(), SHA256)
    store.write(other, 0, DATA)
    store.publish(other, len(DATA))
    store.publish(KEY, len(DATA))  # as after a crash between the rename and the row
    after = store.blob(SHA256).stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    assert everything(store) == {f"blobs/{SHA256[:2]}/{SHA256}"}


def test_a_partial_of_another_size_is_not_published(store: ContentStore) -> None:
    store.write(KEY, 0, DATA)
    with pytest.raises(OSError, match="changed its size"):
        store.publish(KEY, len(DATA) + 1)
    assert not store.blob(SHA256).exists()
    assert store.length(KEY) == len(DATA)


def test_a_damaged_blob_is_replaced(store: ContentStore) -> None:
    store.write(KEY, 0, DATA)
    store.publish(KEY, len(DATA))
    os.truncate(store.blob(SHA256), 10)  # a file system that lost the rest
    store.write(KEY, 0, DATA)
    store.publish(KEY, len(DATA))
    assert store.blob(SHA256).read_bytes() == DATA


def test_a_file_of_no_bytes_is_published_without_a_partial(store: ContentStore) -> None:
    empty = Key(PROJECT, hashlib.sha256().hexdigest())
    for _ in range(2):
        store.publish(empty, 0)
        assert store.has_blob(empty.sha256, 0)
        assert store.length(empty) == 0
    assert len(everything(store)) == 1


def test_what_is_durable_was_synced_with_every_directory_above_it(
    store: ContentStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[Path] = []
    real = content_store.sync_directory

    def sync(path: Path) -> None:
        synced.append(path)
        real(path)

    monkeypatch.setattr(content_store, "sync_directory", sync)
    store.write(KEY, 0, DATA)
    assert set(synced) == {store.partials, store.partials / PROJECT}
    synced.clear()
    store.publish(KEY, len(DATA))
    assert synced == [store.blobs, store.blob(SHA256).parent]


# Adoption.


def put(store: ContentStore, name: str, data: bytes = DATA) -> Path:
    path = store.incoming / name
    path.write_bytes(data)
    return path


def test_an_adopted_file_is_the_partial(store: ContentStore) -> None:
    put(store, "file").chmod(0o644)
    store.write(KEY, 0, b"begun before")
    store.adopt(KEY, "file", len(DATA))
    assert store.partial(KEY).read_bytes() == DATA
    assert mode(store.partial(KEY)) == 0o600
    assert list(store.incoming.iterdir()) == []


@pytest.mark.parametrize("name", ["", ".", "..", ".hidden", "../incoming/file", "a/b", "/etc/passwd", "a\0b"])
def test_only_names_in_the_incoming_directory_are_adopted(store: ContentStore, name: str) -> None:
    put(store, "file")
    for call in (lambda: store.adopt(KEY, name, len(DATA)), lambda: store.decline(name)):
        with pytest.raises(Refused) as refused:
            call()
        assert refused.value.code == "invalid_request"
    assert everything(store) == {"incoming/file"}


def test_a_file_that_is_not_there_is_not_adopted(store: ContentStore) -> None:
    with pytest.raises(Refused) as refused:
        store.adopt(KEY, "file", len(DATA))
    assert (refused.value.code, refused.value.param) == ("not_found", "name")


@pytest.mark.parametrize("kind", ["link", "hard link", "directory", "fifo", "shorter", "longer"])
def test_what_is_no_plain_file_of_this_size_is_not_adopted(
    store: ContentStore, tmp_path: Path, kind: str
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_bytes(DATA)
    path = store.incoming / "file"
    match kind:
        case "link":
            path.symlink_to(elsewhere)
        case "hard link":
            path.hardlink_to(elsewhere)
        case "directory":
            path.mkdir()
        case "fifo":
            os.mkfifo(path)
        case "shorter":
            path.write_bytes(DATA[1:])
        case "longer":
            path.write_bytes(DATA + b"x")
    with pytest.raises(Refused) as refused:
        store.adopt(KEY, "file", len(DATA))
    assert refused.value.code == "source_mismatch"
    assert not store.partial(KEY).exists()
    assert elsewhere.read_bytes() == DATA
    assert path.lstat()


@pytest.mark.root
def test_a_file_that_somebody_else_could_still_change_is_not_adopted(store: ContentStore) -> None:
    os.chown(put(store, "file"), 12345, 12345)
    with pytest.raises(Refused, match="owned by the controller"):
        store.adopt(KEY, "file", len(DATA))


def test_a_declined_file_is_gone(store: ContentStore) -> None:
    put(store, "file")
    store.decline("file")
    store.decline("file")
    assert everything(store) == set()


# Sweeping.


def test_the_sweeper_sees_what_the_store_made_and_leaves_all_else_alone(store: ContentStore) -> None:
    other = Key(new_id(), "0" * 64)
    store.write(KEY, 0, DATA)
    store.publish(KEY, len(DATA))
    store.write(other, 0, b"begun")
    put(store, "left")
    (store.partials / "lost+found").mkdir()
    (store.partials / "lost+found" / ("1" * 64)).write_bytes(b"?")
    (store.partials / "notes.txt").write_bytes(b"?")
    (store.partials / PROJECT).mkdir(exist_ok=True)
    (store.partials / PROJECT / "notes.txt").write_bytes(b"?")
    (store.blobs / "notes.txt").write_bytes(b"?")
    (store.blobs / "00").mkdir()
    (store.blobs / "00" / ("1" * 64)).write_bytes(b"misplaced")
    (store.incoming / ".being-copied").write_bytes(b"?")
    assert store.partial_keys(EVER) == [other]
    assert store.blob_digests(EVER) == [SHA256]
    assert store.incoming_names(EVER) == ["left"]


def test_what_just_changed_is_not_old(store: ContentStore) -> None:
    store.write(KEY, 0, DATA)
    os.utime(store.partial(KEY), (0, 0))  # a file's times say nothing of when it came here
    other = Key(PROJECT, "0" * 64)
    store.write(other, 0, b"begun")
    store.publish(KEY, len(DATA))
    put(store, "left")
    recently = time.time() - 60
    assert (store.partial_keys(recently), store.blob_digests(recently), store.incoming_names(recently)) == (
        [],
        [],
        [],
    )


# Removing.


def test_what_is_given_up_is_gone_from_its_place_at_once_and_from_the_disk_later(store: ContentStore) -> None:
    store.write(KEY, 0, DATA)
    store.publish(KEY, len(DATA))
    store.write(KEY, 0, DATA[:7])
    for move in (lambda: store.bin_blob(SHA256), lambda: store.bin_partial(KEY)):
        assert move()
        assert not move()  # a second time there is nothing to move
    assert not store.has_blob(SHA256, len(DATA))
    assert store.length(KEY) == 0
    assert everything(store) == {f"bin/{SHA256}", f"bin/{PROJECT}.{SHA256}"}
    store.empty_bin()
    store.empty_bin()
    assert everything(store) == set()


def test_what_is_given_up_again_before_the_bin_was_emptied_takes_no_more_room(store: ContentStore) -> None:
    for _ in range(2):
        store.write(KEY, 0, DATA)
        store.publish(KEY, len(DATA))
        assert store.bin_blob(SHA256)
    assert everything(store) == {f"bin/{SHA256}"}


# Hashing.


@pytest.mark.parametrize("size", [0, 1, content_store.HASH_BLOCK_BYTES, content_store.HASH_BLOCK_BYTES + 1])
def test_a_file_hashes_to_its_sha256_and_tells_how_far_it_is(tmp_path: Path, size: int) -> None:
    data = os.urandom(size)
    path = tmp_path / "file"
    path.write_bytes(data)
    told: list[int] = []
    assert hash_file(path, told.append).hexdigest() == hashlib.sha256(data).hexdigest()
    assert told == sorted(told)
    assert told[-1:] == ([size] if size else [])


def test_hashing_lets_other_threads_run(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.touch()
    os.truncate(path, 256 << 20)
    pauses: list[float] = []
    ended = threading.Event()

    def tick() -> None:
        last = time.monotonic()
        while not ended.is_set():
            time.sleep(0.001)
            now = time.monotonic()
            pauses.append(now - last)
            last = now

    thread = threading.Thread(target=tick)
    thread.start()
    hash_file(path, lambda count: None)
    ended.set()
    thread.join()
    # One block hashed with the lock held would take some 2 ms; the whole file far over 100 ms.
    assert sorted(pauses)[len(pauses) * 95 // 100] < 0.05


def test_who_asks_for_progress_can_end_the_hashing(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.touch()
    os.truncate(path, 1 << 40)  # hours of it

    def stop(count: int) -> None:
        raise InterruptedError

    with pytest.raises(InterruptedError):
        hash_file(path, stop)
