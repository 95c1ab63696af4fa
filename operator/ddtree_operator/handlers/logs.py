"""Log lines for machines: one JSON object each, with the resource, the revision and the step they are about."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime

# What the lines of the running task are about: namespace, name, revision, step. Empty outside of a reconcile.
_about: ContextVar[dict[str, str] | None] = ContextVar("about", default=None)


@contextmanager
def about(**fields: str) -> Iterator[None]:
    """Lines in this block carry these fields, where they are not empty."""
    token = _about.set({k: v for k, v in fields.items() if v})
    try:
        yield
    finally:
        _about.reset(token)


def add(**fields: str) -> None:
    """Further fields until the block around it ends."""
    _about.set((_about.get() or {}) | {k: v for k, v in fields.items() if v})


class JsonFormatter(logging.Formatter):
    """One line of JSON per record."""

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        row: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        row |= _about.get() or {}
        if record.exc_info:
            row["error"] = self.formatException(record.exc_info)
        return json.dumps(row, ensure_ascii=False)


class TextFormatter(logging.Formatter):
    """One line for people."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        """The line, with what it is about in front of the message."""
        line = super().format(record)
        fields = _about.get()
        return line + (" (" + ", ".join(f"{k} {v}" for k, v in fields.items()) + ")" if fields else "")


def setup(level: str, form: str) -> None:
    """Configure the root logger. ``form`` is json or text."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if form == "json" else TextFormatter())
    logging.basicConfig(level=level, handlers=[handler], force=True)
    logging.getLogger("kopf").setLevel(logging.WARNING)
