"""The steps of a worker's contract, as they are seen in what the worker sends."""

from __future__ import annotations

import re
from enum import Enum
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from airflow_provider_jetstream.jetstream.client.wire import SentFrame

# ADR-15: domain and account are missing in some versions, and so is the last token.
_ACKNOWLEDGEMENT: Final = re.compile(
    r"\$JS\.ACK\.(?:[^.]+\.[^.]+\.)?([^.]+)\.([^.]+)\.\d+\.(\d{1,18})\.\d+\.\d+\.\d+(?:\..*)?"
)
_STORED: Final = re.compile(r"(completed|dead)\.([^.]+)\.([^.]+)\.(\d{1,18})")


class WorkerStep(Enum):
    """What a worker sends about a job; the value names it in the lines of a report."""

    PROGRESS = "in-progress"
    COMPLETION = "completion"
    """Or the end of a cancelled job, which has the same subject."""
    ACKNOWLEDGEMENT = "acknowledgement"
    FAILURE = "failure"
    RECORD = "record"
    TERMINATION = "termination"


class SentStep(NamedTuple):
    """A step, and the stream sequence of the job that it is about."""

    step: WorkerStep
    sequence: int


_STORED_STEPS: Final = {"completed": WorkerStep.COMPLETION, "dead": WorkerStep.RECORD}
_ANSWERS: Final = {
    b"+WPI": WorkerStep.PROGRESS,
    b"-NAK": WorkerStep.FAILURE,
    b"+TERM": WorkerStep.TERMINATION,
    b"+ACK": WorkerStep.ACKNOWLEDGEMENT,
}


def step_of(frame: SentFrame, queue: str, consumer: str) -> SentStep | None:
    """Return the step that a frame takes; ``None`` where it isn't about a job of this consumer."""
    if match := _STORED.fullmatch(frame.subject):
        kind, stream, name, sequence = match.groups()
        step = _STORED_STEPS[kind]
    elif match := _ACKNOWLEDGEMENT.fullmatch(frame.subject):
        stream, name, sequence = match.groups()
        # An empty answer acknowledges too, and so does one that the server doesn't know.
        step = _ANSWERS.get(frame.payload.partition(b" ")[0], WorkerStep.ACKNOWLEDGEMENT)
    else:
        return None
    return SentStep(step, int(sequence)) if (stream, name) == (queue, consumer) else None
