"""Recipes, wheels and what people read when a build cannot work. Real builds are integration tests."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import platform
import shutil
import time
import zipfile
from pathlib import Path

import pytest

from ficc.domain.errors import Refused
from ficc.images import bootstrap, programs, wheels
from ficc.images.build import (
    BUILD_PREFIX,
    LLAMA_SERVER,
    XLLAMACPP,
    ImageFile,
    Recipe,
    build_llama_cpp,
    build_python_image,
    llama_cpp_recipe,
)
from ficc.images.layout import machine_architecture
from ficc.images.store import ImageStore
from ficc.images.wheels import Wheel
from support.oci_layouts import base_layer, layout, member

NOWHERE = "http://127.0.0.1:9/"  # the discard port, where nothing listens
needs_mmdebstrap = pytest.mark.skipif(
    shutil.which("mmdebstrap") is None, reason="mmdebstrap is not installed"
)


def silent(line: str) -> None:
    pass


def make_wheel(folder: Path, *, name: str = "tinything", extra: dict[str, bytes] | None = None) -> Path:
    """A wheel that pip accepts."""
    folder.mkdir(exist_ok=True)
    path = folder / f"{name}-1.0-py3-none-any.whl"
    info = f"{name}-1.0.dist-info"
    files = {
        f"{name}/__init__.py": b"answer = 42\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": b"",
        **(extra or {}),
    }
    with zipfile.ZipFile(path, "w") as archive:
        for inside, content in files.items():
            archive.writestr(inside, content)
    return path


def described(path: Path, sha256: str | None = None) -> Wheel:
    actual = sha256 or hashlib.sha256(path.read_bytes()).hexdigest()
    return Wheel("tinything", "1.0", "abi3", ("manylinux2014",), {machine_architecture(): actual})


@pytest.fixture
def offline_pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """pip that knows one folder of wheels and no index."""
    folder = tmp_path / "index"
    for name, value in {"NO_INDEX": "1", "FIND_LINKS": str(folder), "CONFIG_FILE": os.devnull}.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    return folder


def test_a_recipe_is_all_that_it_says() -> None:
    recipe = Recipe(name="a", entrypoint=("/e",), files=(ImageFile("e", b"1"),))
    changed = [
        dataclasses.replace(recipe, name="b"),
        dataclasses.replace(recipe, entrypoint=("/f",)),
        dataclasses.replace(recipe, files=(ImageFile("e", b"2"),)),
        dataclasses.replace(recipe, files=(ImageFile("e", b"1", executable=True),)),
        dataclasses.replace(recipe, packages=("libgomp1",)),
        dataclasses.replace(recipe, wheels=(XLLAMACPP,)),
        dataclasses.replace(recipe, environment={}),
        dataclasses.replace(recipe, labels={"a": "b"}),
        dataclasses.replace(recipe, mirror=NOWHERE),
    ]
    digests = {one.digest("bookworm") for one in [recipe, *changed]} | {recipe.digest("trixie")}
    assert len(digests) == len(changed) + 2
    assert dataclasses.replace(recipe).digest("bookworm") == recipe.digest("bookworm")


def test_the_launcher_is_the_shipped_file_and_finds_its_interpreter() -> None:
    (file,) = llama_cpp_recipe().files
    assert (f"/{file.path}", file.executable) == (LLAMA_SERVER, True)
    assert file.content.startswith(b"#!/usr/bin/python3 -IB\n")


def test_what_was_built_before_is_answered_from_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = ImageStore(tmp_path / "store")
    record = store.import_layout(layout(tmp_path / "layout", base_layer(member("a"))))
    built = tmp_path / "cache/built" / llama_cpp_recipe().digest("bookworm")
    built.parent.mkdir(parents=True)
    built.write_text(record.image_digest)
    monkeypatch.setenv("PATH", "")
    lines: list[str] = []

    def build() -> object:
        return build_llama_cpp(
            store,
            work_dir=tmp_path / "work",
            cache_dir=tmp_path / "cache",
            progress=lines.append,
            suite="bookworm",
        )

    assert build() == record
    assert lines == []
    store.remove(record.image_digest)
    with pytest.raises(Refused, match="mmdebstrap is not installed: `apt-get install mmdebstrap`") as caught:
        build()
    assert caught.value.code == "build_failed"
    assert [path.name for path in (tmp_path / "work").iterdir()] == ["images.lock"]


@needs_mmdebstrap
def test_a_mirror_that_cannot_be_reached(tmp_path: Path) -> None:
    recipe = Recipe(name="a", entrypoint=(), files=(), suite="bookworm", mirror=NOWHERE)
    with pytest.raises(Refused, match="mirror cannot be reached: check the network") as caught:
        build_python_image(
            ImageStore(tmp_path / "store"),
            recipe,
            work_dir=tmp_path / "work",
            cache_dir=tmp_path / "cache",
            progress=silent,
        )
    assert caught.value.code == "build_failed"
    assert "127.0.0.1:9" in caught.value.message, "the last lines of the tool follow the advice"
    assert [path.name for path in (tmp_path / "work").iterdir()] == ["images.lock"]


@needs_mmdebstrap
@pytest.mark.parametrize(
    ("suite", "packages"),
    [("--help", ()), ("", ()), ("Bookworm", ()), ("bookworm", ("a,b",)), ("x", ("?a",))],
)
def test_names_that_could_mean_something_else(tmp_path: Path, suite: str, packages: tuple[str, ...]) -> None:
    with pytest.raises(Refused, match="is not the name of a"):
        bootstrap.bootstrap(tmp_path / "root", suite=suite, packages=packages)
    assert not (tmp_path / "root").exists()


@pytest.mark.parametrize(
    ("system", "suite"),
    [
        ({"ID": "debian", "VERSION_CODENAME": "bookworm"}, "bookworm"),
        ({"ID": "ubuntu", "VERSION_CODENAME": "noble"}, "noble"),
    ],
)
def test_the_suite_is_the_machines(
    monkeypatch: pytest.MonkeyPatch, system: dict[str, str], suite: str
) -> None:
    monkeypatch.setattr(platform, "freedesktop_os_release", lambda: system)
    assert bootstrap.machine_suite() == suite


@pytest.mark.parametrize("system", [{"ID": "fedora", "PRETTY_NAME": "Fedora 44"}, {"ID": "debian"}])
def test_another_system_names_the_fix(monkeypatch: pytest.MonkeyPatch, system: dict[str, str]) -> None:
    monkeypatch.setattr(platform, "freedesktop_os_release", lambda: system)
    with pytest.raises(Refused, match="name the suite to build from"):
        bootstrap.machine_suite()


def test_a_command_that_takes_too_long_ends_with_its_children(tmp_path: Path) -> None:
    script = f"sleep 60 & echo $! > {tmp_path}/child; wait"
    with pytest.raises(Refused, match="took more than 1 s"):
        programs.run_bounded(["sh", "-c", script], seconds_max=1, what="Waiting")
    child = int((tmp_path / "child").read_text())
    deadline = time.monotonic() + 10
    while _alive(child) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not _alive(child)


@needs_mmdebstrap
def test_a_mirrors_password_is_not_repeated(tmp_path: Path) -> None:
    mirror = NOWHERE.replace("//", "//somebody:canary@")
    with pytest.raises(Refused, match="mirror cannot be reached") as caught:
        bootstrap.bootstrap(tmp_path / "root", suite="bookworm", packages=(), mirror=mirror)
    assert "canary" not in caught.value.message
    assert programs.last_lines(f"a\nGET {mirror}x failed\n") == f"a\nGET {NOWHERE}x failed"


def test_permission_bits_are_evened_out(tmp_path: Path) -> None:
    root = tmp_path / "root"
    (root / "d").mkdir(parents=True)
    for name, mode in {"program": 0o4711, "file": 0o600, "d/wide": 0o666}.items():
        (root / name).touch()
        (root / name).chmod(mode)
    (root / "d").chmod(0o1777)
    (root / "link").symlink_to("/etc/passwd")
    before = os.stat("/etc/passwd").st_mode
    bootstrap.even_out_modes(root)
    modes = {path.name: path.stat().st_mode & 0o7777 for path in root.rglob("*") if not path.is_symlink()}
    assert modes == {"d": 0o755, "program": 0o755, "file": 0o644, "wide": 0o644}
    assert os.stat("/etc/passwd").st_mode == before


def test_a_wheel_is_fetched_once_and_kept_by_its_digest(offline_pip: Path, tmp_path: Path) -> None:
    source = make_wheel(offline_pip)
    wheel = described(source)
    kept = wheels.fetch(wheel, python="3.11", cache=tmp_path / "cache")
    assert kept == tmp_path / "cache" / f"{wheel.pinned()}.whl"
    source.unlink()
    assert wheels.fetch(wheel, python="3.11", cache=tmp_path / "cache") == kept
    assert list((tmp_path / "cache").iterdir()) == [kept]
    wheels.unpack(kept, tmp_path / "lib")
    assert (tmp_path / "lib/tinything/__init__.py").read_bytes() == b"answer = 42\n"


def test_a_damaged_wheel_in_the_cache_is_fetched_again(offline_pip: Path, tmp_path: Path) -> None:
    wheel = described(make_wheel(offline_pip))
    kept = wheels.fetch(wheel, python="3.11", cache=tmp_path / "cache")
    kept.write_bytes(b"damaged")
    wheels.check(wheel, wheels.fetch(wheel, python="3.11", cache=tmp_path / "cache"))


def test_another_file_under_the_same_name(offline_pip: Path, tmp_path: Path) -> None:
    wheel = described(make_wheel(offline_pip), sha256="0" * 64)
    with pytest.raises(Refused, match=r"another file as tinything 1\.0 than the pinned one") as caught:
        wheels.fetch(wheel, python="3.11", cache=tmp_path / "cache")
    assert caught.value.code == "build_failed"
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_given_wheel_is_compared_too(tmp_path: Path) -> None:
    with pytest.raises(Refused, match=r"is not xllamacpp 2026\.10\.11549 as pinned"):
        wheels.check(XLLAMACPP, make_wheel(tmp_path))
    with pytest.raises(Refused, match="No such file"):
        wheels.check(XLLAMACPP, tmp_path / "nothing.whl")


def test_a_given_wheel_is_looked_at_before_anything_is_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(Refused, match=r"is not xllamacpp 2026\.10\.11549 as pinned"):
        build_llama_cpp(
            ImageStore(tmp_path / "store"),
            work_dir=tmp_path / "work",
            cache_dir=tmp_path / "cache",
            progress=pytest.fail,
            suite="bookworm",
            wheel=make_wheel(tmp_path / "wheels"),
        )
    assert not (tmp_path / "work").exists()


def test_a_build_clears_what_a_killed_one_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    left = tmp_path / "work" / f"{BUILD_PREFIX}left" / "root"
    left.mkdir(parents=True)
    with pytest.raises(Refused, match="mmdebstrap is not installed"):
        build_python_image(
            ImageStore(tmp_path / "store"),
            Recipe(name="a", entrypoint=(), files=(), suite="bookworm"),
            work_dir=tmp_path / "work",
            cache_dir=tmp_path / "cache",
            progress=silent,
        )
    assert [path.name for path in (tmp_path / "work").iterdir()] == ["images.lock"]


def test_an_index_without_the_wheel(offline_pip: Path, tmp_path: Path) -> None:
    wheel = described(make_wheel(tmp_path / "elsewhere"))
    offline_pip.mkdir()
    with pytest.raises(Refused, match=r"the package index has no tinything 1\.0"):
        wheels.fetch(wheel, python="3.11", cache=tmp_path / "cache")


def test_an_index_that_cannot_be_reached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"INDEX_URL": NOWHERE, "CONFIG_FILE": os.devnull}.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    wheel = described(make_wheel(tmp_path))
    with pytest.raises(Refused, match=r"index cannot be reached for tinything 1\.0: check the network"):
        wheels.fetch(wheel, python="3.11", cache=tmp_path / "cache")


def test_a_machine_that_the_wheel_is_not_made_for() -> None:
    wheel = dataclasses.replace(XLLAMACPP, sha256={"pdp11": "0" * 64})
    with pytest.raises(Refused, match=f"for {machine_architecture()}, only for pdp11"):
        wheel.pinned()


@pytest.mark.parametrize("inside", ["../evil.py", "/evil.py", "tinything-1.0.data/scripts/x"])
def test_a_wheel_that_would_write_elsewhere(tmp_path: Path, inside: str) -> None:
    path = make_wheel(tmp_path, extra={inside: b"x"})
    with pytest.raises(Refused, match="not a module's file"):
        wheels.unpack(path, tmp_path / "target/lib")
    assert not (tmp_path / "target/evil.py").exists()


def _alive(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"
