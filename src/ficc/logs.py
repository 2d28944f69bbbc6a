"""Log lines: structlog over the standard library's loggers, for people or as JSON, on standard error."""

from __future__ import annotations

import logging
import sys

import structlog

from ficc.settings import Log


def configure(settings: Log, process: str) -> None:
    """Set the root logger up; `process` names who speaks."""
    shared: list[structlog.typing.Processor] = [
        structlog.stdlib.add_log_level,
        structlog.stdlib.PositionalArgumentsFormatter(),
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.stdlib.ExtraAdder(),
    ]
    renderer: structlog.typing.Processor
    if settings.format == "json":
        renderer = structlog.processors.JSONRenderer()
        shared.append(structlog.processors.format_exc_info)
    else:
        renderer = structlog.dev.ConsoleRenderer(
            colors=sys.stderr.isatty(),
            pad_event_to=0,
            exception_formatter=structlog.dev.plain_traceback,  # never the values of variables
        )

    def name_process(_: object, __: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
        event["process"] = process
        return event

    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                name_process,
                renderer,
            ],
        )
    )
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(settings.level.upper())
    for noisy in ("alembic", "uvicorn", "asyncio"):
        logging.getLogger(noisy).setLevel(max(logging.WARNING, root.level))
