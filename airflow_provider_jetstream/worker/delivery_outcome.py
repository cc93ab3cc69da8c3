"""How a delivery ended, and its line in the log."""

from __future__ import annotations

import logging
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from airflow_provider_jetstream.jetstream.errors import JetStreamProviderError
from airflow_provider_jetstream.jetstream.line_text import one_line
from airflow_provider_jetstream.worker.dead_lettering import error_text

if TYPE_CHECKING:
    from airflow_provider_jetstream.worker.delivery import Delivery
    from airflow_provider_jetstream.worker.pulled_message import PulledMessage

log = logging.getLogger("jetstream.worker")


class DeliveryOutcome(StrEnum):
    """How a delivery ended; the values are those of logs and metrics."""

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
