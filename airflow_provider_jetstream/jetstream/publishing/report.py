"""The fate of the jobs that one call published."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from airflow_provider_jetstream.jetstream.errors import JetStreamProviderError, TerminalError, TransientError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from airflow_provider_jetstream.jetstream.client.publish_ack import PubAck

_NAMED_FAILURES = 5


@dataclass(frozen=True, slots=True)
class PublishFailure:
    """A job that isn't known to be stored.

    :param index: its position among the published jobs
    :param job_id: its id
    :param certain: whether it is certain that it isn't stored; otherwise the server's answer was lost
    """

    index: int
    job_id: str
    error: JetStreamProviderError
    certain: bool


@dataclass(slots=True)
class PublishReport:
    """The fate of every job of one call.

    :param stream: the stream that stored the jobs
    :param sequences: by index, the stream sequence; 0 where a job isn't known to be stored
    :param duplicates: how many jobs were stored already
    :param failures: the jobs not known to be stored
    :param message_ids: by index, the jobs' ``Nats-Msg-Id``; only of tasks with an idempotency key
    :param scheduled: the indexes of jobs whose schedule is stored; the job made of it gets a sequence of its own
    :param advised: the jobs that name one of the queue's advisory subjects: stream sequences by digests of subject and
        id; :func:`~airflow_provider_jetstream.jetstream.wait` takes it
    """

    stream: str | None = None
    sequences: array[int] = field(default_factory=lambda: array("Q"))
    duplicates: int = 0
    failures: list[PublishFailure] = field(default_factory=list)
    scheduled: set[int] = field(default_factory=set)
    message_ids: list[str] = field(default_factory=list)
    advised: dict[str, int] = field(default_factory=dict)

    def add_stored(self, sequence: int, *, scheduled: bool) -> None:
        """Append a job that was stored before this call."""
        if scheduled:
            self.scheduled.add(len(self.sequences))
        self.sequences.append(sequence)
        self.duplicates += 1

    def add_acknowledged(self, index: int, ack: PubAck, *, scheduled: bool) -> None:
        """Record the server's acknowledgement of the job at an index."""
        self.stream = ack.stream
        self.sequences[index] = ack.sequence
        self.duplicates += ack.duplicate
        if scheduled:
            self.scheduled.add(index)

    @property
    def stored(self) -> int:
        """How many jobs are stored."""
        return len(self.sequences) - len(self.failures)

    def raise_for_failures(self) -> None:
        """Return if all jobs are stored.

        :raises PublishRefusedError: some jobs can never be stored as they are
        :raises PublishIncompleteError: some jobs weren't stored this time
        """
        if not self.failures:
            return
        failures = sorted(self.failures, key=lambda failure: failure.index)
        named = "; ".join(
            f"job {failure.index} (id {failure.job_id}) {'is not stored' if failure.certain else 'may be stored'}:"
            f" {failure.error}"
            for failure in failures[:_NAMED_FAILURES]
        )
        rest = len(failures) - _NAMED_FAILURES
        message = (
            f"{self.stored} of {len(self.sequences)} jobs are stored{self._stored_ranges()}; {len(failures)} are not"
            f" known to be: {named}{f'; and {rest} more' if rest > 0 else ''}"
        )
        terminal = any(isinstance(failure.error, TerminalError) for failure in failures)
        raise (PublishRefusedError if terminal else PublishIncompleteError)(message, self)

    def _stored_ranges(self) -> str:
        spans = sequence_ranges(self.sequences)
        if not spans:
            return ""
        shown = ", ".join(f"{low}-{high}" if low != high else str(low) for low, high in spans[:_NAMED_FAILURES])
        return f" in {self.stream} (sequences {shown}{', …' if len(spans) > _NAMED_FAILURES else ''})"


def sequence_ranges(sequences: Iterable[int]) -> list[tuple[int, int]]:
    """Return the first and last sequence of each run of consecutive ones.

    :param sequences: in any order; zeros are left out
    """
    spans: list[tuple[int, int]] = []
    for sequence in sorted(set(sequences) - {0}):
        if spans and spans[-1][1] == sequence - 1:
            spans[-1] = (spans[-1][0], sequence)
        else:
            spans.append((sequence, sequence))
    return spans


def index_runs(sequences: Iterable[int]) -> list[tuple[int, int, int]]:
    """Return index, sequence and count of each run of jobs that were stored one after another.

    :param sequences: by index; 0 where a job isn't stored
    """
    runs: list[tuple[int, int, int]] = []
    for index, sequence in enumerate(sequences):
        if not sequence:
            continue
        if runs:
            first, start, count = runs[-1]
            if (index, sequence) == (first + count, start + count):
                runs[-1] = (first, start, count + 1)
                continue
        runs.append((index, sequence, 1))
    return runs


class PublishError(JetStreamProviderError):
    """Some jobs aren't known to be stored.

    Publishing them again with the same ids is safe within the stream's duplicate window.

    :param report: the fate of every job, by index
    """

    code = "JS400"

    def __init__(self, message: str, report: PublishReport) -> None:
        self.report = report
        super().__init__(message)


class PublishRefusedError(PublishError, TerminalError):
    """Some jobs can never be stored as they are."""

    code = "JS401"


class PublishIncompleteError(PublishError, TransientError):
    """Some jobs weren't stored this time: the queue was full, or the server didn't answer."""

    code = "JS402"
