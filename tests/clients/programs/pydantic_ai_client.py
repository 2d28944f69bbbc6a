"""Pydantic AI over OpenAI's client."""

from __future__ import annotations

import asyncio
from typing import Any

from pydantic_ai import Agent, Embedder
from pydantic_ai.embeddings.openai import OpenAIEmbeddingModel
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
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
    run,
)


def agent(model: str = MODEL, token: str = TOKEN) -> Agent[None, str]:
    provider = OpenAIProvider(base_url=BASE_URL, api_key=token)
    return Agent(OpenAIChatModel(model, provider=provider), model_settings={"timeout": TIMEOUT_SECONDS})


def chat() -> dict[str, Any]:
    return {"text": agent().run_sync(HI).output}


def stream() -> dict[str, Any]:
    async def pieces() -> list[str]:
        async with agent().run_stream(HI) as result:
            return [piece async for piece in result.stream_text(delta=True, debounce_by=None)]

    return {"pieces": asyncio.run(pieces())}


def embeddings() -> dict[str, Any]:
    model = OpenAIEmbeddingModel(MODEL, provider=OpenAIProvider(base_url=BASE_URL, api_key=TOKEN))
    return {"vector": list(Embedder(model).embed_query_sync(HI).embeddings[0])}


def unknown_model() -> dict[str, Any]:
    return {"text": agent(UNKNOWN_MODEL).run_sync(HI).output}


def wrong_token() -> dict[str, Any]:
    return {"text": agent(token=WRONG_TOKEN).run_sync(HI).output}


def abort() -> None:
    async def leave() -> None:
        async with agent().run_stream(HANG) as result:
            text = await anext(result.stream_text(delta=True, debounce_by=None))
            await result.cancel()
            await aborted_in_loop(text)

    asyncio.run(leave())


run(chat, stream, embeddings, unknown_model, wrong_token, abort)
