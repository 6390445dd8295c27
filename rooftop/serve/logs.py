"""Structured logs: a JSON object a line. What was asked and answered is in them only if that is wanted."""

from __future__ import annotations

import json
import logging
import traceback
from datetime import UTC, datetime
from typing import TextIO

from rooftop.errors import unknown

LEVELS = ("debug", "info", "warning", "error")
#: What the server logs as; uvicorn's own lines join them.
NAMES = ("rooftop.serve", "uvicorn.error")


class _Lines(logging.Formatter):
    """A record as JSON: time, level, event, and the fields that came with it."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "event": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["traceback"] = "".join(traceback.format_exception(*record.exc_info))
        return json.dumps(line, ensure_ascii=False, default=str)


def start_logging(level: str, to: TextIO) -> logging.Logger:
    """The logger of the server, writing to ``to`` from ``level`` on. Raises RooftopError for a level that is none."""
    if level not in LEVELS:
        raise unknown("log-level", level, LEVELS)
    handler = logging.StreamHandler(to)
    handler.setFormatter(_Lines())
    for name in NAMES:
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        # uvicorn says in several lines what one of ours does.
        logger.setLevel(
            level.upper() if name == NAMES[0] else max(logging.WARNING, logging.getLevelName(level.upper()))
        )
    return logging.getLogger(NAMES[0])
