"""The log formats of a worker: text for people, or one JSON object per line for programs."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime

LOG_FORMATS = ("text", "json")

# Some of them move a terminal's cursor. A record's own line ends and indents stay.
_CONTROLS = {code: "\ufffd" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}

# What some programs take for the end of a line, besides what JSON escapes.
_LINE_ENDS = {ord(character): f"\\u{ord(character):04x}" for character in "\x85\u2028\u2029"}

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
        text = json.dumps(fields, default=str, ensure_ascii=False).translate(_LINE_ENDS)
        return text.encode(errors="replace").decode()


class TextFormatter(logging.Formatter):
    """Formats a record as text in which only its first line begins at the margin.

    A handler's error may repeat what the publisher of a job has written, line breaks included: nothing of that can pass
    for a record of its own.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Format a record; the lines of a traceback are indented."""
        first, *others = super().format(record).splitlines() or [""]
        text = "\n".join([first, *(f"    {line}" for line in others)])
        return text.translate(_CONTROLS).encode(errors="replace").decode()


def configure_logging(log_format: str) -> None:
    """Write all log records to standard error, in one of :data:`LOG_FORMATS`."""
    handler = logging.StreamHandler(sys.stderr)
    text = TextFormatter("%(asctime)s %(levelname)s %(message)s")
    handler.setFormatter(JsonFormatter() if log_format == "json" else text)
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    _configured[:] = [log_format]


def configured_format() -> str | None:
    """Return the format set in this process, if any; a handler's process uses the same one."""
    return _configured[0] if _configured else None
