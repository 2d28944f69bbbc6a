"""Simon Willison's llm, with a model of its user's own; it has no embeddings but of models that it knows itself."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

from steps import (
    BASE_URL,
    HANG,
    HI,
    MODEL,
    TOKEN,
    UNKNOWN_MODEL,
    WRONG_TOKEN,
    aborted_in_loop,
    cancelled,
    run,
)

MODELS = [
    {"model_id": f"ficc-{name}", "model_name": name, "api_base": BASE_URL, "api_key_name": "ficc"}
    for name in (MODEL, UNKNOWN_MODEL)
]
FOLDER = Path(os.environ["LLM_USER_PATH"])
FOLDER.mkdir(exist_ok=True)
(FOLDER / "extra-openai-models.yaml").write_text(json.dumps(MODELS))
(FOLDER / "keys.json").write_text(json.dumps({"ficc": TOKEN}))

import llm  # noqa: E402  # it reads both files


def ask(model: str = MODEL, **more: Any) -> str:
    return llm.get_model(f"ficc-{model}").prompt(HI, stream=False, **more).text()


def chat() -> dict[str, Any]:
    return {"text": ask()}


def stream() -> dict[str, Any]:
    return {"pieces": [piece for piece in llm.get_model(f"ficc-{MODEL}").prompt(HI) if piece]}


def unknown_model() -> dict[str, Any]:
    return {"text": ask(UNKNOWN_MODEL)}


def wrong_token() -> dict[str, Any]:
    return {"text": ask(key=WRONG_TOKEN)}


def abort() -> None:
    """A stream of this client has no end but its own, or that of the task that waits for it."""

    async def leave() -> None:
        response = llm.get_async_model(f"ficc-{MODEL}").prompt(HANG)
        await aborted_in_loop(await cancelled(piece async for piece in response if piece))

    asyncio.run(leave())


run(chat, stream, unknown_model, wrong_token, abort)
