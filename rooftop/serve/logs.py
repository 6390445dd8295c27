"""The log of a server's processes: a JSON object a line."""

from __future__ import annotations

import json
import logging
import time
import traceback
from datetime import UTC, datetime
from typing import TextIO

from rooftop.core.printable import printable_json

#: Loggers of the server: ours and uvicorn's.
_LOGGERS = ("rooftop.serve", "uvicorn.error")


#: Seconds between two lines about the same.
_EVERY_S = 60.0


class Seldom:
    """Warnings that strangers can cause, at most one a minute: the line says how often that was."""

    def __init__(self, log: logging.Logger) -> None:
        self._log, self._times, self._logged_s = log, 0, -_EVERY_S

    def warn(self, event: str, **fields: object) -> None:
        """Log a line, or only count."""
        self._times += 1
        if time.monotonic() - self._logged_s >= _EVERY_S:
            self._log.warning(event, extra={"fields": {"times": self._times, **fields}})
            self._logged_s, self._times = time.monotonic(), 0


class _Lines(logging.Formatter):
    """Records as JSON: time, level, event and the record's own fields."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "event": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["traceback"] = "".join(traceback.format_exception(*record.exc_info))
        return printable_json(json.dumps(line, ensure_ascii=False, default=str))


def start_logging(level: str, to: TextIO) -> logging.Logger:
    """The logger of the server, which writes records of ``level`` and above to ``to``."""
    handler = logging.StreamHandler(to)
    handler.setFormatter(_Lines())
    for name in _LOGGERS:
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        # uvicorn needs several lines for what one of ours says.
        logger.setLevel(
            level.upper() if name == _LOGGERS[0] else max(logging.WARNING, logging.getLevelName(level.upper()))
        )
    return logging.getLogger(_LOGGERS[0])
