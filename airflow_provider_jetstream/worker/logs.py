"""What a worker logs: text for people, or one JSON object a line for programs."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime

FORMS = ("text", "json")

_chosen: list[str] = []


class JsonLines(logging.Formatter):
    """Writes a record as one JSON object, with what is told about a job as fields of it."""

    def format(self, record: logging.LogRecord) -> str:
        """Write a record.

        :param record: the record; ``job`` among its attributes is a mapping of further fields
        :return: one line
        """
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


def configure_logs(form: str) -> None:
    """Have everything that is logged written to standard error.

    :param form: one of :data:`FORMS`
    """
    handler = logging.StreamHandler(sys.stderr)
    text = logging.Formatter("%(asctime)s %(levelname)s %(message)s")
    handler.setFormatter(JsonLines() if form == "json" else text)
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    _chosen[:] = [form]


def current_form() -> str | None:
    """Tell what was chosen in this process.

    :return: the form, if any was; for processes that shall log in the same
    """
    return _chosen[0] if _chosen else None
