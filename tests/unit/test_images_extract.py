"""Layers applied to a root: whiteouts as the specification has them, and archives that try to leave."""

from __future__ import annotations

import os
import stat
import tarfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ficc.domain.errors import Refused
from ficc.images.extract import Extraction
from ficc.images.limits import ImageLimits
from support.oci_layouts import Bytes, folder, hard_link, layer, link, member


class Root:
    """A root that layers are applied to, with a neighbour that must stay as it is."""

    def __init__(self, path: Path) -> None:
        self.path = path / "root"
        self.path.mkdir()
        self.neighbour = path / "neighbour"
        self.neighbour.mkdir()
        (self.neighbour / "secret").write_text("secret")

    def apply(self, *layers: bytes, limits: ImageLimits | None = None) -> None:
        descriptor = os.open(self.path, os.O_RDONLY)
        try:
            extraction = Extraction(descriptor, limits or ImageLimits())
            for data in layers:
                extraction.apply(Bytes(data))
        finally:
            os.close(descriptor)

    def refuses(self, data: bytes, says: str, limits: ImageLimits | None = None) -> None:
        with pytest.raises(Refused, match=says) as caught:
            self.apply(data, limits=limits)
        assert caught.value.code == "image_refused"

    def files(self) -> dict[str, str]:
        """Contents of files, targets of links, by path."""
        found = {}
        for path in sorted(self.path.rglob("*")):
            name = str(path.relative_to(self.path))
            if path.is_symlink():
                found[name] = f"-> {os.readlink(path)}"
            elif path.is_file():
                found[name] = path.read_text()
        return found


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Root]:
    made = Root(tmp_path)
    yield made
    assert {path.name: path.read_text() for path in made.neighbour.iterdir()} == {"secret": "secret"}


def test_files_links_and_directories(root: Root) -> None:
    root.apply(
        layer(
            folder("usr", 0o700),
            member("usr/bin/tool", b"tool", mode=0o6777, mtime=1_700_000_000),
            member("etc/secret", b"s", mode=0o600),
            link("bin", "usr/bin"),
            link("lib", "/usr/lib"),
            hard_link("usr/bin/alias", "usr/bin/tool"),
        )
    )
    tool = root.path / "usr/bin/tool"
    assert root.files() == {
        "bin": "-> usr/bin",
        "etc/secret": "s",
        "lib": "-> /usr/lib",
        "usr/bin/alias": "tool",
        "usr/bin/tool": "tool",
    }
    assert stat.S_IMODE(tool.stat().st_mode) == 0o755, "no set-id bits, nobody else writes"
    assert stat.S_IMODE((root.path / "etc/secret").stat().st_mode) == 0o600
    assert stat.S_IMODE((root.path / "usr").stat().st_mode) == 0o755
    assert stat.S_IMODE((root.path / "usr/bin").stat().st_mode) == 0o755, "made although not listed"
    assert tool.stat().st_mtime == 1_700_000_000
    assert tool.stat().st_ino == (root.path / "usr/bin/alias").stat().st_ino
    assert tool.stat().st_uid == os.geteuid()


def test_modes_do_not_depend_on_the_umask(root: Root) -> None:
    before = os.umask(0o077)
    try:
        root.apply(layer(folder("a"), member("a/b/c", mode=0o644)))
    finally:
        os.umask(before)
    assert [stat.S_IMODE((root.path / name).stat().st_mode) for name in ("a", "a/b", "a/b/c")] == [
        0o755,
        0o755,
        0o644,
    ]


def test_an_upper_layer_replaces_what_a_lower_one_has(root: Root) -> None:
    root.apply(
        layer(member("a", b"1"), folder("d"), member("d/x", b"1"), link("l", "a"), folder("kept")),
        layer(folder("a"), member("a/b", b"2"), member("d", b"2"), member("l", b"2"), folder("kept")),
    )
    assert root.files() == {"a/b": "2", "d": "2", "l": "2"}
    assert (root.path / "kept").is_dir()


def test_a_file_replaced_does_not_change_its_other_names(root: Root) -> None:
    root.apply(layer(member("a", b"1"), hard_link("b", "a")), layer(member("b", b"2")))
    assert root.files() == {"a": "1", "b": "2"}


def test_a_hard_link_replaces_what_was_there(root: Root) -> None:
    root.apply(layer(member("a", b"1"), folder("b")), layer(hard_link("b", "a")))
    assert root.files() == {"a": "1", "b": "1"}


def test_entries_below_a_link_of_the_image_land_where_it_leads_inside(root: Root) -> None:
    root.apply(
        layer(
            folder("usr/lib"), link("lib", "usr/lib"), link("d/abs", "/usr"), link("up", "../../../../usr")
        ),
        layer(member("lib/a", b"a"), member("d/abs/b", b"b"), member("up/c", b"c")),
    )
    assert root.files() == {
        "d/abs": "-> /usr",
        "lib": "-> usr/lib",
        "up": "-> ../../../../usr",
        "usr/b": "b",
        "usr/c": "c",
        "usr/lib/a": "a",
    }


def test_a_directory_that_replaces_a_link(root: Root) -> None:
    root.apply(layer(folder("t"), link("l", "t")), layer(folder("l"), member("l/a", b"a")))
    assert root.files() == {"l/a": "a"}


def test_whiteouts(root: Root) -> None:
    root.apply(
        layer(member("a", b"1"), member("d/x", b"1"), member("d/y", b"1"), member("e/z", b"1")),
        layer(member(".wh.a"), member("d/.wh.x"), member(".wh.e"), member("gone/.wh.b"), member(".wh.no")),
    )
    assert root.files() == {"d/y": "1"}
    assert not (root.path / "e").exists()
    assert not (root.path / "gone").exists()


@pytest.mark.parametrize("first", [True, False])
def test_an_opaque_whiteout_hides_the_lower_layers_only(root: Root, first: bool) -> None:
    opaque = member("d/.wh..wh..opq")
    brought = [member("d/new", b"2"), member("d/sub/new", b"2")]
    root.apply(
        layer(member("d/old", b"1"), member("d/sub/old", b"1"), member("d/other/old", b"1"), member("kept")),
        layer(*([opaque, *brought] if first else [*brought, opaque])),
    )
    assert root.files() == {"d/new": "2", "d/sub/new": "2", "kept": ""}
    assert not (root.path / "d/other").exists()


def test_a_whiteout_after_what_replaces_it_keeps_the_new(root: Root) -> None:
    root.apply(
        layer(member("d/old", b"1"), member("f", b"1")),
        layer(member("d/new", b"2"), member("f", b"2"), member(".wh.d"), member(".wh.f")),
    )
    assert root.files() == {"d/new": "2", "f": "2"}


def test_a_whiteout_does_not_follow_a_link(root: Root) -> None:
    root.apply(layer(member("t/a", b"1"), link("l", "t")), layer(member(".wh.l")))
    assert root.files() == {"t/a": "1"}


@pytest.mark.parametrize("name", [".wh.", ".wh..", ".wh...", "d/.wh...", ".wh..wh.aufs"])
def test_whiteouts_that_name_nothing_are_refused(root: Root, name: str) -> None:
    root.refuses(layer(member(name)), "not a whiteout")


def test_devices_of_a_usual_root_are_left_out_and_others_refused(root: Root) -> None:
    root.apply(
        layer(
            folder("dev"), member("dev/null", kind=tarfile.CHRTYPE), member("dev/sda", kind=tarfile.BLKTYPE)
        )
    )
    assert list((root.path / "dev").iterdir()) == []
    root.refuses(layer(member("etc/null", kind=tarfile.CHRTYPE)), "device or a fifo")
    root.refuses(layer(member("dev/../etc/null", kind=tarfile.CHRTYPE)), "leaves its directory")
    root.refuses(layer(member("dev/pipe", kind=tarfile.FIFOTYPE)), "device or a fifo")


@pytest.mark.parametrize(
    ("members", "says"),
    [
        ([member("../evil", b"x")], "leaves its directory"),
        ([member("a/../../evil", b"x")], "leaves its directory"),
        ([hard_link("a", "../neighbour/secret")], "leaves its directory"),
        ([hard_link("a", "/etc/passwd")], "not a file before it"),
        ([link("out", "/"), hard_link("a", "out/etc/passwd")], "not a file before it"),
        ([folder("d"), hard_link("a", "d")], "not a file before it"),
        ([hard_link("a", "")], "hard link to the root"),
        ([member("f", b"x"), member("f/g", b"x")], "not a directory"),
        ([member(".", b"x")], "replaces the root"),
        ([link("a", "")], "unusable target"),
        ([link("a", "b"), link("b", "a"), member("a/x", b"x")], "too many symbolic links"),
        ([member("n" * 300, b"x")], "File name too long"),
        ([member("/".join(["d"] * 2500), b"x")], "longer than 4096 bytes"),
        ([member("/".join(["d"] * 150), b"x")], "more than 100 directories"),
        (
            [link("s", "/".join(["d"] * 90)), member("s/" + "/".join(["e"] * 90), b"x")],
            "more than 100 directories",
        ),
    ],
)
def test_hostile_archives_are_refused(
    root: Root, members: list[tuple[tarfile.TarInfo, bytes]], says: str
) -> None:
    root.refuses(layer(*members), says)


@pytest.mark.parametrize("through", ["..", "../neighbour", "/", "."])
def test_a_link_out_leads_nowhere_outside(root: Root, through: str) -> None:
    absolute = str(root.neighbour)
    root.apply(
        layer(
            link("out", through),
            member("out/neighbour/evil", b"x"),
            link("straight", absolute),
            member("straight/evil", b"x"),
            link("file", absolute + "/secret"),
            member("file", b"replaced"),
            link("late", absolute + "/secret"),
            hard_link("hard", "late"),
        )
    )
    assert (root.path / "file").read_text() == "replaced"
    assert (root.path / "hard").is_symlink(), "the link itself, not what it leads to"
    assert (root.path / absolute.lstrip("/") / "evil").is_file()


def test_a_hard_link_to_itself_changes_nothing(root: Root) -> None:
    root.apply(layer(member("a", b"1"), hard_link("a", "a"), hard_link("./a", "/a")))
    assert root.files() == {"a": "1"}


def test_limits_hold_over_all_layers(root: Root) -> None:
    two = layer(member("a", b"x" * 600), member("b", b"x" * 600))
    root.refuses(two, "more than 1 entries", ImageLimits(entries_max=1))
    root.refuses(two, "more than 1000 bytes", ImageLimits(files_bytes_max=1000))
    with pytest.raises(Refused, match="more than 2000 bytes"):
        root.apply(two, two, limits=ImageLimits(files_bytes_max=2000))


def test_extended_attributes_are_ignored(root: Root) -> None:
    info, data = member("a", b"1")
    info.pax_headers = {"SCHILY.xattr.user.x": "y", "SCHILY.xattr.security.capability": "z"}
    root.apply(layer((info, data)))
    assert os.listxattr(root.path / "a") == []


NAMES = st.sampled_from(
    ["a", "b", "c", "a/b", "a/b/c", "b/a", "/a", "./c", "a//b", "..", "a/..", ".wh.a", "b/.wh..wh..opq"]
)
TARGETS = st.sampled_from(["a", "b", "a/b", "/", "..", "../..", "../neighbour", "/a", ".", "c/../../..", "x"])
MEMBERS = st.one_of(
    st.builds(member, NAMES, st.binary(max_size=5)),
    st.builds(folder, NAMES),
    st.builds(link, NAMES, TARGETS),
    st.builds(hard_link, NAMES, TARGETS),
)


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(layers=st.lists(st.lists(MEMBERS, max_size=8), min_size=1, max_size=3))
def test_no_archive_touches_what_is_outside(
    tmp_path_factory: pytest.TempPathFactory, layers: list[list[tuple[tarfile.TarInfo, bytes]]]
) -> None:
    """Any mixture either applies or is refused; next to the root nothing appears, goes or changes."""
    root = Root(tmp_path_factory.mktemp("any"))
    beside = sorted(path.name for path in root.path.parent.iterdir())
    with suppress(Refused):
        root.apply(*(layer(*members) for members in layers))
    assert sorted(path.name for path in root.path.parent.iterdir()) == beside
    assert {path.name: path.read_text() for path in root.neighbour.iterdir()} == {"secret": "secret"}
    open_files = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if _exists(fd)]
    assert not [name for name in open_files if name.startswith(str(root.path))], "a descriptor was left open"


def _exists(descriptor: str) -> bool:
    return os.path.lexists(f"/proc/self/fd/{descriptor}")
