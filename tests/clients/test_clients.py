"""Clients that people have, against a running installation, each in an environment of its own and over both base
URLs: that of a service and that of a project. They leave streams (G9) by their own means."""

from __future__ import annotations

import subprocess
from typing import Any

import pytest

from clients.environments import CLIENTS, Client
from clients.running import BASE_URLS, MODEL, OFFLINE, UNKNOWN_MODEL, WRONG_TOKEN, Outside, Run, Runs
from support.http import Http

pytestmark = pytest.mark.timeout(900)  # the first test of a client makes its environment
TEXT = "hello there"
VECTOR = [0.5, 0.25]


def parameters(step: str | None = None) -> list[Any]:
    """Each client that has a step, with each base URL."""
    return [
        pytest.param(
            client, url, id=f"{client.name}-{url}", marks=[pytest.mark.clients_ci] if client.in_ci else []
        )
        for client in CLIENTS
        for url in BASE_URLS
        if step not in client.lacks
    ]


def refusal(runs: Runs, url: str, model: str, token: str | None) -> str:
    """What we say to the same request."""
    path = runs.path(url).removeprefix("/api/v1") + "/chat/completions"
    http = Http(runs.installation.origin, token or runs.installation.token)
    answer = http("POST", path, {"model": model, "messages": [{"role": "user", "content": "Hi"}]})
    return str(answer.json["error"]["message"])


def raised(run: Run, step: str, kind: str, message: str) -> None:
    """The step ended in this kind of error, which says this."""
    found = run.step(step)
    assert kind in found.get("raised", []), found
    assert message in found["message"], found


@pytest.mark.parametrize(("client", "url"), parameters())
def test_chat(runs: Runs, client: Client, url: str) -> None:
    with runs.results.judging(client, url, "chat"):
        assert runs.of(client, url).step("chat") == {"text": TEXT}


@pytest.mark.parametrize(("client", "url"), parameters())
def test_stream(runs: Runs, client: Client, url: str) -> None:
    with runs.results.judging(client, url, "stream"):
        found = runs.of(client, url).step("stream")
        assert "".join(found.get("pieces", [])) == TEXT, found
        assert len(found["pieces"]) > 1


@pytest.mark.parametrize(("client", "url"), parameters("embeddings"))
def test_embeddings(runs: Runs, client: Client, url: str) -> None:
    with runs.results.judging(client, url, "embeddings"):
        assert runs.of(client, url).step("embeddings") == {"vector": VECTOR}


@pytest.mark.parametrize(("client", "url"), parameters())
def test_an_error_is_the_clients_own_and_has_our_words(runs: Runs, client: Client, url: str) -> None:
    with runs.results.judging(client, url, "error"):
        run = runs.of(client, url)
        raised(run, "unknown_model", client.unknown_model, refusal(runs, url, UNKNOWN_MODEL, None))
        raised(run, "wrong_token", client.wrong_token, refusal(runs, url, MODEL, WRONG_TOKEN))


@pytest.mark.parametrize(("client", "url"), parameters())
def test_an_aborted_stream_lets_the_engine_go(runs: Runs, client: Client, url: str) -> None:
    """The engine has no more to say when the client leaves, and the client's process lives on."""
    with runs.results.judging(client, url, "abort"):
        run = runs.of(client, url)
        assert run.step("abort") == {"text": "hello"}
        assert run.left


ASKING = {
    "openai": ("-c", "import urllib.request as r; r.urlopen('http://192.0.2.1/')"),
    "openai-npm": ("--eval", "fetch('http://192.0.2.1/').catch(() => {})"),
}


@pytest.mark.clients_ci
@pytest.mark.parametrize("name", ASKING)
def test_who_asks_others_is_noticed(name: str) -> None:
    (client,) = (client for client in CLIENTS if client.name == name)
    program, _ = client.command()
    with Outside() as outside:
        command = [program, *ASKING[name]]
        subprocess.run(command, env={**OFFLINE, **outside.environment}, capture_output=True, timeout=60)
        (line,) = outside.asked()
    assert "192.0.2.1" in line


@pytest.mark.parametrize(("client", "url"), parameters())
def test_it_asks_nobody_else(runs: Runs, client: Client, url: str) -> None:
    run = runs.of(client, url)
    assert (run.asked_outside, run.returncode) == ([], 0), run.errors
