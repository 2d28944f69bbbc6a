"""LiteLLM as a library."""

from __future__ import annotations

from typing import Any

import litellm
from steps import BASE_URL, HANG, HI, MODEL, TIMEOUT_SECONDS, TOKEN, UNKNOWN_MODEL, WRONG_TOKEN, aborted, run

litellm.telemetry = False
litellm.suppress_debug_info = True  # standard output is for steps


def settings(model: str = MODEL, token: str = TOKEN) -> dict[str, Any]:
    return {
        "model": f"openai/{model}",
        "api_base": BASE_URL,
        "api_key": token,
        "max_retries": 0,
        "timeout": TIMEOUT_SECONDS,
    }


def ask(content: str = HI, stream: bool = False, **changes: str) -> Any:
    messages = [{"role": "user", "content": content}]
    return litellm.completion(messages=messages, stream=stream, **settings(**changes))


def texts(chunks: Any) -> Any:
    return (chunk.choices[0].delta.content for chunk in chunks if chunk.choices[0].delta.content)


def chat() -> dict[str, Any]:
    return {"text": ask().choices[0].message.content}


def stream() -> dict[str, Any]:
    return {"pieces": list(texts(ask(stream=True)))}


def embeddings() -> dict[str, Any]:
    return {"vector": litellm.embedding(input=[HI], **settings()).data[0]["embedding"]}


def unknown_model() -> dict[str, Any]:
    return {"text": ask(model=UNKNOWN_MODEL).choices[0].message.content}


def wrong_token() -> dict[str, Any]:
    return {"text": ask(token=WRONG_TOKEN).choices[0].message.content}


def abort() -> None:
    chunks = ask(HANG, stream=True)
    text = next(texts(chunks))
    chunks.close()
    aborted(text)


run(chat, stream, embeddings, unknown_model, wrong_token, abort)
