"""The store: import, listing, removal, and what remains when it is killed at any moment."""

from __future__ import annotations

import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from ficc.domain.errors import Refused
from ficc.images.limits import ImageLimits
from ficc.images.record import ImageRecord
from ficc.images.store import MOUNT_POINTS, ImageStore
from support.oci_layouts import base_layer, blob, digest, hard_link, layer, layout, link, member

LOWER = base_layer(member("usr/bin/engine", b"engine", mode=0o755), link("bin", "usr/bin"))
UPPER = layer(member("etc/config", b"config"), hard_link("etc/same", "etc/config"))


class Clock:
    def __init__(self) -> None:
        self.now = datetime(2026, 1, 1, tzinfo=UTC)

    def __call__(self) -> datetime:
        self.now += timedelta(seconds=1)
        return self.now


@pytest.fixture
def store(tmp_path: Path) -> ImageStore:
    return ImageStore(tmp_path / "store", now=Clock())


def test_an_image_is_imported_listed_and_found(tmp_path: Path, store: ImageStore) -> None:
    path = layout(tmp_path / "layout", LOWER, UPPER, packed=True)
    record = store.import_layout(path)
    assert store.list() == [record]
    assert store.get(record.image_digest) == record
    document = record.as_json()
    assert json.loads(json.dumps(document)) == document
    assert ImageRecord.from_json(document) == record
    assert document == {
        "image_digest": digest(blob(path, "manifest").read_bytes()),
        "config_digest": digest(blob(path, "config").read_bytes()),
        "name": "tests/image",
        "created_at": "2026-01-01T00:00:01.000000Z",
        "bytes": len("engine") + len("config"),
        "entries": len(MOUNT_POINTS) + 1 + 3 + 1 + 3,  # /run; usr bin engine; /bin; etc and its two
        "layers": document["layers"],
        "environment": {"PATH": "/usr/bin"},
        "entrypoint": ["/usr/bin/engine"],
        "labels": {"a": "b"},
    }
    assert [one["diff_id"] for one in document["layers"]] == [digest(LOWER), digest(UPPER)]
    root = store.root_of(record.image_digest)
    assert (root / "bin/engine").read_bytes() == b"engine"
    kept = {name: digest((root.parent / name).read_bytes()) for name in ("manifest.json", "config.json")}
    assert kept == {"manifest.json": record.image_digest, "config.json": record.config_digest}


def test_importing_again_changes_nothing(tmp_path: Path, store: ImageStore) -> None:
    path = layout(tmp_path / "layout", LOWER)
    first = store.import_layout(path)
    before = store.root_of(first.image_digest).stat()
    assert store.import_layout(path) == first
    assert store.root_of(first.image_digest).stat() == before
    assert len(store.list()) == 1


def test_newest_first(tmp_path: Path, store: ImageStore) -> None:
    records = [
        store.import_layout(layout(tmp_path / str(number), LOWER, layer(member("n", b"%d" % number))))
        for number in range(3)
    ]
    assert store.list() == records[::-1]


def test_an_empty_store(store: ImageStore) -> None:
    assert store.list() == []
    with pytest.raises(Refused) as caught:
        store.get("sha256:" + "0" * 64)
    assert caught.value.code == "image_not_found"


@pytest.mark.parametrize(
    "wrong",
    ["", "latest", "sha256:", "sha256:" + "0" * 63, "sha256:" + "A" * 64, "sha256:../../etc", "0" * 64],
)
@pytest.mark.parametrize("ask", [ImageStore.get, ImageStore.root_of, ImageStore.remove])
def test_only_digests_name_images(
    store: ImageStore, ask: Callable[[ImageStore, str], object], wrong: str
) -> None:
    with pytest.raises(Refused) as caught:
        ask(store, wrong)
    assert (caught.value.code, caught.value.param) == ("invalid_request", "image_digest")


def test_removal(tmp_path: Path, store: ImageStore) -> None:
    kept = store.import_layout(layout(tmp_path / "kept", LOWER))
    gone = store.import_layout(layout(tmp_path / "gone", LOWER, UPPER))
    root = store.root_of(gone.image_digest)
    store.remove(gone.image_digest)
    assert store.list() == [kept]
    assert not root.exists()
    for ask in (store.get, store.root_of, store.remove):
        with pytest.raises(Refused) as caught:
            ask(gone.image_digest)
        assert caught.value.code == "image_not_found"
    assert store.import_layout(tmp_path / "gone").image_digest == gone.image_digest


@pytest.mark.parametrize("missing", MOUNT_POINTS)
def test_an_image_without_a_mount_point_is_refused(tmp_path: Path, store: ImageStore, missing: str) -> None:
    path = layout(tmp_path / "layout", base_layer(member("a"), without=[missing]))
    with pytest.raises(Refused, match=f"mounts over: /{missing};") as caught:
        store.import_layout(path)
    assert caught.value.code == "image_refused"
    _nothing_left(tmp_path / "store")


def test_a_mount_point_may_not_be_a_link(tmp_path: Path, store: ImageStore) -> None:
    without = [point for point in MOUNT_POINTS if point in ("tmp", "run/ficc")]
    path = layout(
        tmp_path / "layout",
        base_layer(link("tmp", "var/tmp"), member("var/tmp/x"), link("run", "var/run"), without=without),
        layer(member("var/run/ficc/x")),
    )
    with pytest.raises(Refused, match="/run/ficc, /tmp"):
        store.import_layout(path)


def test_a_refused_image_leaves_nothing(tmp_path: Path, store: ImageStore) -> None:
    path = layout(tmp_path / "layout", LOWER, UPPER)
    damaged = bytearray(blob(path, "layer").read_bytes())
    damaged[-1] ^= 1  # found only when the last byte of the last layer has been read
    blob(path, "layer").write_bytes(damaged)
    with pytest.raises(Refused, match="hashes to"):
        store.import_layout(path)
    _nothing_left(tmp_path / "store")


def test_limits_are_the_stores(tmp_path: Path) -> None:
    store = ImageStore(tmp_path / "store", limits=ImageLimits(entries_max=3))
    with pytest.raises(Refused, match="more than 3 entries"):
        store.import_layout(layout(tmp_path / "layout", LOWER))


def test_others_may_read_and_nobody_else_may_write(tmp_path: Path, store: ImageStore) -> None:
    before = os.umask(0o077)
    try:
        record = store.import_layout(layout(tmp_path / "layout", LOWER, layer(member("tmp/x", mode=0o666))))
    finally:
        os.umask(before)
    root = store.root_of(record.image_digest)
    for path in (root, root.parent, root.parent.parent, *root.rglob("*")):
        if not path.is_symlink():
            mode = stat.S_IMODE(path.stat().st_mode)
            assert mode & 0o7022 == 0, path
            assert not path.is_dir() or mode == 0o755, path
    assert stat.S_IMODE((tmp_path / "store/incoming").stat().st_mode) == 0o700


def test_a_directory_without_a_record_is_no_image_and_is_replaced(tmp_path: Path, store: ImageStore) -> None:
    path = layout(tmp_path / "layout", LOWER)
    record = store.import_layout(path)
    file = store.root_of(record.image_digest).parent / "record.json"
    for content in ("", "{}", "[]", json.dumps({**record.as_json(), "image_digest": digest(b"other")})):
        file.write_text(content)
        assert store.list() == []
        assert store.import_layout(path).image_digest == record.image_digest
        assert len(store.list()) == 1


def test_strangers_in_the_store_are_not_listed(tmp_path: Path, store: ImageStore) -> None:
    record = store.import_layout(layout(tmp_path / "layout", LOWER))
    (tmp_path / "store/images/readme").write_text("hello")
    (tmp_path / "store/images/lost+found").mkdir()
    assert store.list() == [record]


@pytest.mark.skipif(os.geteuid() != 0, reason="root becomes another account")
def test_an_unprivileged_account_owns_what_it_imports(store: ImageStore) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = layout(Path(folder, "layout"), LOWER, UPPER)
        os.chmod(folder, 0o755)
        os.mkdir(f"{folder}/theirs")
        os.chown(f"{folder}/theirs", 1234, 1234)
        theirs = ImageStore(Path(folder, "theirs/store"))

        def work() -> None:
            os.setgroups([])
            os.setgid(1234)
            os.setuid(1234)
            theirs.import_layout(path)
            theirs.remove(theirs.list()[0].image_digest)
            theirs.import_layout(path)

        assert _in_a_child(work) == 0
        root = theirs.root_of(theirs.list()[0].image_digest)
        assert {path.lstat().st_uid for path in root.rglob("*")} == {1234}
        ours = store.import_layout(path)
        assert {path.lstat().st_uid for path in store.root_of(ours.image_digest).rglob("*")} == {0}


def test_imports_at_the_same_time_wait_for_each_other(tmp_path: Path, store: ImageStore) -> None:
    paths = [layout(tmp_path / str(number), _large(number)) for number in range(2)]
    children = [_child(lambda path=path: store.import_layout(path)) for path in paths * 3]  # type: ignore[misc]
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0] * 6
    assert len(store.list()) == 2
    assert all(_is_whole(store, record) for record in store.list())
    assert list((tmp_path / "store/incoming").iterdir()) == []


def test_killed_at_any_moment_it_holds_the_whole_image_or_none(tmp_path: Path) -> None:
    """Twelve imports, each killed a little later than the one before."""
    path = layout(tmp_path / "layout", _large(0), packed=True)
    started = time.monotonic()
    ImageStore(tmp_path / "measure").import_layout(path)
    whole_seconds = time.monotonic() - started
    store = ImageStore(tmp_path / "store")
    outcomes = []
    for step in range(12):
        child = _child(lambda: store.import_layout(path))
        time.sleep(whole_seconds * 1.3 * step / 11)
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        listed = store.list()
        outcomes.append(len(listed))
        for record in listed:
            assert _is_whole(store, record)
            store.remove(record.image_digest)
    assert outcomes[0] == 0
    store.import_layout(path)
    assert len(store.list()) == 1
    assert list((tmp_path / "store/incoming").iterdir()) == [], "what the killed ones left is swept"


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("action", ["import", "remove"])
def test_killed_around_the_rename(tmp_path: Path, store: ImageStore, action: str, after: bool) -> None:
    path = layout(tmp_path / "layout", LOWER)
    if action == "remove":
        store.import_layout(path)
    rename = os.rename

    def work() -> None:
        def dying(source: Path, target: Path) -> None:
            if after:
                rename(source, target)
            os.kill(os.getpid(), signal.SIGKILL)

        os.rename = dying  # type: ignore[assignment]
        if action == "import":
            store.import_layout(path)
        else:
            store.remove(store.list()[0].image_digest)

    assert _in_a_child(work) == -signal.SIGKILL
    expected = after if action == "import" else not after
    assert [_is_whole(store, record) for record in store.list()] == [True] * expected
    assert len(list((tmp_path / "store/incoming").iterdir())) == (not expected)
    store.import_layout(path)
    assert len(store.list()) == 1
    assert list((tmp_path / "store/incoming").iterdir()) == []


def test_a_full_disk_is_said_and_leaves_nothing(tmp_path: Path) -> None:
    layout(tmp_path / "layout", base_layer(member("big", bytes(2 << 20))))
    code = (
        "import sys; from pathlib import Path; from ficc.domain.errors import Refused\n"
        "from ficc.images.store import ImageStore\n"
        "store = ImageStore(Path(sys.argv[1]) / 'small/store')\n"
        "try: store.import_layout(Path(sys.argv[1]) / 'layout')\n"
        "except Refused as refused: print(refused.code, store.list())\n"
    )
    (tmp_path / "small").mkdir()
    mount = f'mount -t tmpfs -o size=1m none "{tmp_path}/small" || exit 77; exec "$@"'
    unshare = ("unshare", "--user", "--map-root-user", "--mount", "sh", "-c", mount, "sh")
    done = subprocess.run(
        [*unshare, sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True
    )
    if done.returncode in (1, 77) and "Traceback" not in done.stderr:
        pytest.skip("no mount in a user namespace here")
    assert done.stdout == "disk_full []\n", done.stderr


def _large(number: int) -> bytes:
    """Enough files that an import takes a while."""
    return base_layer(*(member(f"d{n % 40}/f{n}", b"%d/%d\n" % (number, n) * 300) for n in range(1500)))


def _is_whole(store: ImageStore, record: ImageRecord) -> bool:
    root = store.root_of(record.image_digest)
    found = [path.lstat() for path in root.rglob("*")]
    size = sum(about.st_size / about.st_nlink for about in found if stat.S_ISREG(about.st_mode))
    return (len(found), size) == (record.entries, record.bytes)


def _nothing_left(root: Path) -> None:
    assert list((root / "images").iterdir()) == []
    assert list((root / "incoming").iterdir()) == []


def _child(work: Callable[[], object]) -> int:
    child = os.fork()
    if child == 0:
        with suppress(BaseException):
            work()
            os._exit(0)
        os._exit(1)
    return child


def _in_a_child(work: Callable[[], object]) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(_child(work), 0)[1])


@pytest.fixture(autouse=True)
def _removable(tmp_path: Path) -> Iterator[None]:
    """These trees are large; pytest would keep them for three sessions."""
    yield
    shutil.rmtree(tmp_path, ignore_errors=True)
