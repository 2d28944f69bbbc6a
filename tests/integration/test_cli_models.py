"""Models from elsewhere on the command line: a hub's preview, downloads with their progress, pause and go on."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support import source as sources
from support.gguf_files import encode, tiny_llama
from support.hub import StandInHub
from support.registry import Registry
from support.source import Source


@pytest.fixture(scope="module")
def hub(source: Source) -> StandInHub:
    made = StandInHub(source)
    made.add("owner/one", {"tiny.gguf": encode(*tiny_llama())})
    made.add(
        "owner/two", {"tiny-a.gguf": encode(*tiny_llama()), "tiny-b.gguf": encode(*tiny_llama(layers=3))}
    )
    return made


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory, source: Source, hub: StandInHub) -> Iterator[Registry]:
    made = Registry(tmp_path_factory.mktemp("ficc"), source, FICC_HUB_ENDPOINT=hub.endpoint)
    try:
        made.start("controller")
        yield made
    finally:
        made.stop()


def ficc(registry: Registry, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = registry.environment | {"SSL_CERT_FILE": str(registry.source.ca_file)}
    return subprocess.run(
        [sys.executable, "-m", "ficc.cli.main", *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )


def json_of(done: subprocess.CompletedProcess[str]) -> Any:
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_preview_shows_what_there_is_before_anything_is_fetched(registry: Registry) -> None:
    done = ficc(registry, "model", "preview", "hub:owner/two")
    assert done.returncode == 0, done.stderr
    for text in ("tiny-a", "tiny-b", "4,096", "metadata", "apache-2.0"):
        assert text in done.stdout
    assert "nothing of the weights" in done.stderr
    answer = json_of(ficc(registry, "model", "preview", "hub:owner/two:tiny-b.gguf", "--json"))
    assert [one["manifest"]["name"] for one in answer["manifests"]] == ["tiny-b"]


def test_a_hub_model_is_added_in_one_command(registry: Registry) -> None:
    done = ficc(registry, "model", "add", "hub:owner/one")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Ready  tiny  ")
    assert "ficc service create ALIAS --model tiny" in done.stderr
    again = json_of(ficc(registry, "model", "add", "hub:owner/one", "--json"))
    assert again["state"] == "ready"


def test_of_several_models_one_is_named(registry: Registry) -> None:
    done = ficc(registry, "model", "add", "hub:owner/two")
    assert done.returncode == 2
    assert "hub:owner/two:tiny-a.gguf" in done.stderr
    assert "hub:owner/two:tiny-b.gguf" in done.stderr
    added = json_of(ficc(registry, "model", "add", "hub:owner/two:tiny-a.gguf", "--name", "mine", "--json"))
    assert (added["manifest"]["name"], added["state"]) == ("mine", "ready")


def test_a_url_takes_its_publishers_digest(registry: Registry) -> None:
    body = os.urandom(100_000)
    url = registry.source.serve("/plain.safetensors", body)
    without = ficc(registry, "model", "add", url)
    assert without.returncode == 2
    assert "--sha256" in without.stderr
    assert "--hash-locally" in without.stderr
    digest = hashlib.sha256(body).hexdigest()
    added = json_of(ficc(registry, "model", "add", url, "--sha256", digest.upper(), "--json"))
    assert (added["state"], added["files"][0]["sha256"]) == ("ready", digest)


def test_a_url_without_a_digest_is_hashed_on_this_computer(registry: Registry) -> None:
    body = os.urandom(100_001)
    url = registry.source.serve("/here.safetensors", body)
    added = json_of(ficc(registry, "model", "add", url, "--hash-locally", "--json"))
    assert added["state"] == "ready"
    assert added["files"][0]["sha256"] == hashlib.sha256(body).hexdigest()
    assert added["manifest"]["files"][0].get("url") is None


def test_a_wrong_digest_fails_with_both(registry: Registry) -> None:
    body = os.urandom(1000)
    url = registry.source.serve("/wrong.safetensors", body)
    done = ficc(registry, "model", "add", url, "--sha256", "0" * 64)
    assert done.returncode == 1
    assert "source_mismatch" in done.stderr
    assert hashlib.sha256(body).hexdigest() in done.stderr


def test_a_download_is_paused_and_goes_on(registry: Registry) -> None:
    body = os.urandom(2 << 20)
    url = registry.source.serve("/slow.safetensors", body)
    registry.source.always("/slow.safetensors", sources.trickle(32 << 10, 0.05))
    digest = hashlib.sha256(body).hexdigest()
    sizes = ("--bytes", str(len(body)))
    begun = ficc(registry, "model", "add", url, "--sha256", digest, *sizes, "--no-wait")
    assert begun.returncode == 0, begun.stderr
    assert begun.stdout.startswith("Acquiring  slow  ")
    paused = ficc(registry, "model", "pause", "slow")
    assert paused.returncode == 0, paused.stderr
    assert paused.stdout.startswith("Paused  slow  ")
    registry.source.always("/slow.safetensors", None)
    done = ficc(registry, "model", "acquire", "slow")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Ready  slow  ")
    assert "verified" in done.stderr


def test_a_failed_download_says_why(registry: Registry) -> None:
    url = registry.source.url("/gone.safetensors")
    done = ficc(registry, "model", "add", url, "--sha256", "1" * 64, "--bytes", "10")
    assert done.returncode == 1
    assert "source_unavailable" in done.stderr
    assert "404" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "target", ["hub:nobody", "hub:a/b@", "nothere.gguf", "http://localhost/x.gguf", "https://localhost/x.bin"]
)
def test_wrong_usage_is_said_before_anything_is_done(registry: Registry, target: str) -> None:
    done = ficc(registry, "model", "add", target, "--sha256", "1" * 64, "--bytes", "10")
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr


def test_eviction_tells_what_it_frees(registry: Registry, tmp_path: Path) -> None:
    file = tmp_path / "local.safetensors"
    file.write_bytes(os.urandom(5000))
    json_of(ficc(registry, "model", "add", str(file), "--json"))
    removed = json_of(ficc(registry, "model", "remove", "local", "--evict", "--yes", "--json"))
    assert removed == {"removed": True, "bytes_freed": 5000, "bytes_retained_shared": 0}
