"""Standard error: log lines as text for people or JSON for programs, and which device computes."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    import torch

_TEXT_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_OWN_PACKAGES = ("decode_engine", "index_store")
_EXTRAS = ("rpc", "reason", "milliseconds", "request_id")


class JsonFormatter(logging.Formatter):
    """One JSON object per record, with the fields that calls log beside the message."""

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        entry.update({name: getattr(record, name) for name in _EXTRAS if hasattr(record, name)})
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry)


@contextmanager
def logging_to_stderr(as_json: bool) -> Iterator[None]:
    """Sends our own packages' records of level INFO and above to standard error, inside the block."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if as_json else logging.Formatter(_TEXT_FORMAT))
    loggers = [logging.getLogger(package) for package in _OWN_PACKAGES]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.INFO)
        logger.addHandler(handler)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.removeHandler(handler)
            logger.setLevel(level)


def say_device(name: str) -> torch.device:
    """The device that was picked; says on standard error which, where that was left open.

    Raises InvalidArgumentError like `pick_device`.
    """
    from index_store.memory.devices import describe_device, pick_device

    device = pick_device(name)
    if name != device.type:
        typer.echo(f"computing on {describe_device(device)}", err=True)
    return device
