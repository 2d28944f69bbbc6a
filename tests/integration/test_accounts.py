"""Under which accounts things run: a controller that root starts drops its rights; an executor without root says
what it cannot enforce here, and what it cannot enforce is refused, never accepted in silence."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from ficc.client.errors import ApiError
from ficc.settings import CONTROLLER_UID
from support.installation import Installation

pytestmark = [pytest.mark.root, pytest.mark.timeout(180)]

STRANGER = 12345
STRANGER_PY = Path(__file__).parents[1] / "support" / "stranger.py"


def test_a_controller_started_by_root_goes_on_without_rights(installation: Installation) -> None:
    process = psutil.Process(installation.processes["controller"].pid)
    assert set(process.uids()) == {CONTROLLER_UID}
    assert set(process.gids()) == {CONTROLLER_UID}
    status = dict(
        line.split(":\t", 1) for line in Path(f"/proc/{process.pid}/status").read_text().splitlines()
    )
    assert int(status["CapEff"], 16) == int(status["CapPrm"], 16) == 0
    assert status["Groups"].strip() == ""
    assert (installation.directory / "controller").stat().st_mode & 0o777 == 0o700
    assert (installation.directory / "content").stat().st_uid == CONTROLLER_UID
    executor = psutil.Process(installation.processes["executor"].pid)
    assert set(executor.uids()) == {0}


def test_a_closed_directory_shows_only_what_is_needed(tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    (closed / "needed" / "inner").mkdir(parents=True)
    (closed / "needed" / "inner" / "file").write_text("seen")
    (closed / "secret").write_text("not to be seen")
    closed.chmod(0o700)
    code = (
        "import sys, os; from pathlib import Path; from ficc.controller.account import become\n"
        f"become({STRANGER}, [Path(sys.prefix), Path(sys.base_prefix), Path({str(closed / 'needed')!r})])\n"
        f"print(os.getuid(), sorted(os.listdir({str(closed / 'needed')!r})), "
        f"Path({str(closed / 'needed/inner/file')!r}).read_text(), os.path.exists({str(closed / 'secret')!r}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(STRANGER), "['inner']", "seen", "False"]
    assert (closed / "secret").exists()  # the view was the process's own


@pytest.fixture(scope="module")
def unprivileged(tmp_path_factory: pytest.TempPathFactory, images: Path) -> Iterator[Installation]:
    """An installation whose two processes run under an account without any rights."""
    directory = tmp_path_factory.mktemp("stranger")
    for above in (directory, *directory.parents):
        if above.is_relative_to("/tmp") and above != Path("/tmp"):
            above.chmod(0o755)
    made = Installation(
        directory, images=images, command=(str(STRANGER_PY), str(STRANGER), str(directory), "-m")
    )
    for path in (directory, directory / "executor"):
        os.chown(path, STRANGER, STRANGER)
    (directory / "executor" / "images").unlink()
    subprocess.run(["cp", "-rl", str(images), str(directory / "executor" / "images")], check=True)
    subprocess.run(["chown", "-R", str(STRANGER), str(directory / "executor")], check=True)
    try:
        made.start()
        yield made
    finally:
        made.stop()


def delegated() -> bool:
    """Whether this machine lets an account without rights have limits: pure cgroup v2, delegated."""
    return Path("/sys/fs/cgroup/cgroup.controllers").exists()


def test_what_cannot_be_enforced_is_in_the_snapshot(unprivileged: Installation) -> None:
    node = unprivileged.node()
    assert node["accounts"] == "own"
    if delegated():
        pytest.skip("limits are delegated on this machine")
    for limit in ("cpu_millis", "memory_bytes", "swap_bytes", "processes"):
        assert "root" in node["unenforceable"][limit]


def test_what_cannot_be_enforced_is_refused(unprivileged: Installation, model_file: Path) -> None:
    if delegated():
        pytest.skip("limits are delegated on this machine")
    model = unprivileged.add_model(model_file, "smollm2")
    spec = unprivileged.specification("refused", model["id"])
    preview: dict[str, Any] = unprivileged.call("POST", "/inference/preview", spec)
    assert not preview["accepted"]
    problems = preview["replicas"][0]["problems"]
    assert {problem["code"] for problem in problems} == {"limits_unenforceable"}
    assert any("memory_bytes" in problem["message"] for problem in problems)
    with pytest.raises(ApiError) as caught:
        unprivileged.call("POST", "/inference", spec)
    assert (caught.value.status, caught.value.code) == (409, "does_not_fit")
    assert unprivileged.call("GET", "/inference")["items"] == []


def test_doctor_names_the_cause_and_the_fix(unprivileged: Installation) -> None:
    if delegated():
        pytest.skip("limits are delegated on this machine")
    done = subprocess.run(
        [sys.executable, *unprivileged.command, "ficc.cli.main", "doctor", "--json"],
        env=unprivileged.environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    checks = {check["check"]: check for check in json.loads(done.stdout)["checks"]}
    assert not checks["memory_bytes"]["ok"]
    assert "run the executor as root" in checks["memory_bytes"]["finding"]
