"""The OpenAI-compatible side: admission, relay, cancellation. Plain ASGI, no framework per chunk."""
