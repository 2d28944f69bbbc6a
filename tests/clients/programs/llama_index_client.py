"""LlamaIndex's integration of servers like OpenAI's."""

from __future__ import annotations

import asyncio
from typing import Any

from llama_index.core.llms import ChatMessage
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.llms.openai_like import OpenAILike
from steps import (
    BASE_URL,
    HANG,
    HI,
    MODEL,
    TIMEOUT_SECONDS,
    TOKEN,
    UNKNOWN_MODEL,
    WRONG_TOKEN,
    aborted_in_loop,
    cancelled,
    run,
)

SETTINGS: dict[str, Any] = {"api_base": BASE_URL, "max_retries": 0, "timeout": TIMEOUT_SECONDS}
GREETING = [ChatMessage(role="user", content=HI)]


def model(name: str = MODEL, token: str = TOKEN) -> OpenAILike:
    return OpenAILike(model=name, api_key=token, is_chat_model=True, **SETTINGS)


def chat() -> dict[str, Any]:
    return {"text": model().chat(GREETING).message.content}


def stream() -> dict[str, Any]:
    return {"pieces": [answer.delta for answer in model().stream_chat(GREETING)]}


def embeddings() -> dict[str, Any]:
    made = OpenAILikeEmbedding(model_name=MODEL, api_key=TOKEN, **SETTINGS)
    return {"vector": made.get_text_embedding(HI)}


def unknown_model() -> dict[str, Any]:
    return {"text": model(UNKNOWN_MODEL).chat(GREETING).message.content}


def wrong_token() -> dict[str, Any]:
    return {"text": model(token=WRONG_TOKEN).chat(GREETING).message.content}


def abort() -> None:
    """A stream of this client has no end but its own, or that of the task that waits for it."""

    async def leave() -> None:
        answers = await model().astream_chat([ChatMessage(role="user", content=HANG)])
        await aborted_in_loop(await cancelled(answer.delta async for answer in answers))

    asyncio.run(leave())


run(chat, stream, embeddings, unknown_model, wrong_token, abort)
