"""What a worker writes to its log: the line with which each delivery ends, as text or as JSON."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from airflow_provider_jetstream.jetstream.errors import JetStreamProviderError
from airflow_provider_jetstream.jetstream.line_text import one_line
from airflow_provider_jetstream.worker.handler import error_text

if TYPE_CHECKING:
    from airflow_provider_jetstream.worker.delivery import Delivery, PulledMessage


log = logging.getLogger("jetstream.worker")

LOG_FORMATS = ("text", "json")
# Some of them move a terminal's cursor. A record's own line ends and indents stay.
_CONTROLS = {code: "\ufffd" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}
# Characters that some programs take for the end of a line, and that JSON leaves as they are.
_LINE_ENDS = {ord(character): f"\\u{ord(character):04x}" for character in "\x85\u2028\u2029"}


class DeliveryOutcome(StrEnum):
    """How a delivery ended; logs and metrics show the values."""

    COMPLETED = "completed"
    """The handler did the job, and it is acknowledged."""
    RETRIED = "retried"
    """It failed, and the server delivers it again."""
    DEAD = "dead"
    """Its last delivery failed."""
    GIVEN_UP = "given_up"
    """The handler raised ``GiveUpError``: the job is dead."""
    EXPIRED = "expired"
    """It came after the time in its ``Job-Expires`` header: the job is dead."""
    CANCELLED = "cancelled"
    """A person or a task cancelled the job, before it was started or while it ran."""
    DELAYED = "delayed"
    """Its ``X-Execute-At`` is later; the server delivers it again at that time."""
    HANDED_BACK = "handed_back"
    """The worker stopped before the handler was done; the server delivers it to another worker at once."""
    LEFT = "left"
    """The worker stopped while the handler's thread was running; the server delivers it again after its ack wait."""
    UNSETTLED = "unsettled"
    """The server didn't confirm its acknowledgement; the server delivers it again after its ack wait."""


_LOG_LEVELS = {
    DeliveryOutcome.COMPLETED: logging.INFO,
    DeliveryOutcome.CANCELLED: logging.INFO,
    DeliveryOutcome.DELAYED: logging.INFO,
    DeliveryOutcome.HANDED_BACK: logging.INFO,
    DeliveryOutcome.UNSETTLED: logging.ERROR,
}


def is_outcome_logged(outcome: DeliveryOutcome) -> bool:
    """Return whether :func:`log_outcome` logs such an outcome at all."""
    return log.isEnabledFor(_LOG_LEVELS.get(outcome, logging.WARNING))


def log_outcome(
    worker: str,
    message: PulledMessage,
    job: Delivery,
    outcome: DeliveryOutcome,
    error: Exception | None,
    seconds: float,
) -> None:
    """Log the end of a delivery, with the traceback of a handler's own error.

    :param seconds: from its arrival to its end
    """
    fields: dict[str, Any] = {
        "worker": worker,
        "stream": message.stream,
        "consumer": message.consumer,
        "sequence": job.sequence,
        "job_id": job.shown_id,
        "attempt": job.attempt,
        "outcome": outcome.value,
        "seconds": round(seconds, 6),
    }
    reason = ""
    if error is not None:
        fields |= {"error": type(error).__name__, "code": getattr(error, "code", None)}
        reason = f": {one_line(error_text(error)) or 'no reason given'}"
    text = " ".join(f"{name}={value}" for name, value in fields.items() if value is not None)
    # The errors of this package explain themselves; a handler's own errors need their traceback.
    trace = None if isinstance(error, JetStreamProviderError) else error
    log.log(
        _LOG_LEVELS.get(outcome, logging.WARNING), "job ended %s%s", text, reason, extra={"job": fields}, exc_info=trace
    )


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
