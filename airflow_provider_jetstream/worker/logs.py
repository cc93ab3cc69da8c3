"""The log formats of a worker: text for people, or one JSON object per line for programs."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime

LOG_FORMATS = ("text", "json")

_configured: list[str] = []


class JsonFormatter(logging.Formatter):
    """Formats a record as one JSON object; the mapping in a record's ``job`` attribute adds fields to it."""

    def format(self, record: logging.LogRecord) -> str:
        """Format a record as one line."""
        fields = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "job", {}),
        }
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields, default=str, ensure_ascii=False)


def configure_logging(log_format: str) -> None:
    """Write all log records to standard error, in one of :data:`LOG_FORMATS`."""
    handler = logging.StreamHandler(sys.stderr)
    text = logging.Formatter("%(asctime)s %(levelname)s %(message)s")
    handler.setFormatter(JsonFormatter() if log_format == "json" else text)
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    _configured[:] = [log_format]


def configured_format() -> str | None:
    """Return the format set in this process, if any; a handler's process uses the same one."""
    return _configured[0] if _configured else None
