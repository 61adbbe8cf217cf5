"""Log lines on standard error: text for people, or JSON for programs."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from enum import StrEnum
from typing import Annotated

import typer

_TEXT_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_OWN_PACKAGES = ("decode_engine", "prefill_worker", "index_store")
_OF_ALL = frozenset({*vars(logging.makeLogRecord({})), "message", "asctime"})


class JsonFormatter(logging.Formatter):
    """One JSON object per record, with the fields that calls log beside the message."""

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        entry |= {name: value for name, value in vars(record).items() if name not in _OF_ALL and value != ""}
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str)


class LogLevel(StrEnum):
    """How much is logged."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


LogLevelOption = Annotated[
    LogLevel, typer.Option("--log-level", help="What is logged to standard error: this and what is worse.")
]


@contextmanager
def logging_to_stderr(level: LogLevel, as_json: bool) -> Iterator[None]:
    """Sends our own packages' records of that level and above to standard error, inside the block."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if as_json else logging.Formatter(_TEXT_FORMAT))
    loggers = [logging.getLogger(package) for package in _OWN_PACKAGES]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(level.upper())
        logger.addHandler(handler)
    try:
        yield
    finally:
        for logger, before in zip(loggers, levels, strict=True):
            logger.removeHandler(handler)
            logger.setLevel(before)
