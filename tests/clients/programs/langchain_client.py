"""LangChain's integration of OpenAI."""

from __future__ import annotations

from typing import Any

from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from steps import BASE_URL, HANG, HI, MODEL, TIMEOUT_SECONDS, TOKEN, UNKNOWN_MODEL, WRONG_TOKEN, aborted, run

SETTINGS: dict[str, Any] = {"base_url": BASE_URL, "max_retries": 0, "timeout": TIMEOUT_SECONDS}


def model(name: str = MODEL, token: str = TOKEN) -> ChatOpenAI:
    return ChatOpenAI(model=name, api_key=token, **SETTINGS)


def chat() -> dict[str, Any]:
    return {"text": model().invoke(HI).content}


def stream() -> dict[str, Any]:
    return {"pieces": [chunk.content for chunk in model().stream(HI) if chunk.content]}


def embeddings() -> dict[str, Any]:
    """Texts as they are: tokens would be counted by OpenAI's vocabulary, which is fetched from the internet."""
    made = OpenAIEmbeddings(model=MODEL, api_key=TOKEN, check_embedding_ctx_length=False, **SETTINGS)
    return {"vector": made.embed_query(HI)}


def unknown_model() -> dict[str, Any]:
    return {"text": model(UNKNOWN_MODEL).invoke(HI).content}


def wrong_token() -> dict[str, Any]:
    return {"text": model(token=WRONG_TOKEN).invoke(HI).content}


def abort() -> None:
    one = model()
    chunks = one.stream(HANG)
    text = next(chunk.content for chunk in chunks if chunk.content)
    chunks.close()
    aborted(text)


run(chat, stream, embeddings, unknown_model, wrong_token, abort)
