"""Whether this controller can do its work."""

from __future__ import annotations

from typing import Any

from ficc import __version__
from ficc.controller.operations.context import Context


class Health:
    def __init__(self, context: Context) -> None:
        self._context = context

    async def check(self) -> dict[str, Any]:
        """Raises Refused `database_unavailable`."""
        await self._context.database.ping()
        return {"status": "ok", "version": __version__}
