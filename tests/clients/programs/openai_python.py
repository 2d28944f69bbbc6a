"""OpenAI's client for Python, the current release and the latest 2."""

from __future__ import annotations

from typing import Any

import openai
from steps import BASE_URL, HANG, HI, MODEL, TIMEOUT_SECONDS, TOKEN, UNKNOWN_MODEL, WRONG_TOKEN, aborted, run


def client(token: str = TOKEN) -> openai.OpenAI:
    return openai.OpenAI(base_url=BASE_URL, api_key=token, max_retries=0, timeout=TIMEOUT_SECONDS)


def ask(model: str, token: str = TOKEN) -> str | None:
    messages: Any = [{"role": "user", "content": HI}]
    return client(token).chat.completions.create(model=model, messages=messages).choices[0].message.content


def chat() -> dict[str, Any]:
    return {"text": ask(MODEL)}


def stream() -> dict[str, Any]:
    messages: Any = [{"role": "user", "content": HI}]
    chunks = client().chat.completions.create(model=MODEL, messages=messages, stream=True)
    return {"pieces": [chunk.choices[0].delta.content for chunk in chunks]}


def embeddings() -> dict[str, Any]:
    return {"vector": client().embeddings.create(model=MODEL, input=HI).data[0].embedding}


def unknown_model() -> dict[str, Any]:
    return {"text": ask(UNKNOWN_MODEL)}


def wrong_token() -> dict[str, Any]:
    return {"text": ask(MODEL, WRONG_TOKEN)}


def abort() -> None:
    messages: Any = [{"role": "user", "content": HANG}]
    one = client()
    chunks = one.chat.completions.create(model=MODEL, messages=messages, stream=True)
    text = next(chunks).choices[0].delta.content
    chunks.close()
    aborted(text)
    one.close()


run(chat, stream, embeddings, unknown_model, wrong_token, abort)
