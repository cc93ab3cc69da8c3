"""The fate of the jobs that one call published."""

from __future__ import annotations

import logging
from array import array
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from airflow_provider_jetstream.jetstream.errors import (
    JetStreamProviderError,
    TerminalError,
    TransientError,
    WrongStreamError,
)
from airflow_provider_jetstream.jetstream.task_values import TaskReport

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from airflow_provider_jetstream.jetstream.client.publish_ack import PubAck
    from airflow_provider_jetstream.jetstream.publishing.job import OutgoingJob

logger = logging.getLogger(__name__)

# In the sequence of a job that is stored already: it is that of its schedule, in the queue's stream of schedules.
SCHEDULED: Final = 1 << 62
_NAMED_FAILURES = 5
_COMPARED_AT_ONCE = 1_024
# Jobs a run, on average, from which on ranges are made of runs.
_FEW_RUNS = 8


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


@dataclass(frozen=True, slots=True)
class RepeatedJob:
    """A job whose message id the server has stored already, as it says.

    :param index: its position among the published jobs
    :param stream: the stream that has the message
    :param sequence: the message's sequence
    """

    index: int
    job: OutgoingJob
    stream: str
    sequence: int


@dataclass(frozen=True, slots=True)
class Destination:
    """The stream in which jobs are to be stored, its creation and its domain, as far as they are known."""

    stream: str
    created: str = ""
    domain: str | None = None

    @classmethod
    def of(cls, queue: str, info: Mapping[str, Any] | None) -> Destination:
        """Return the stream of a queue, and what its STREAM.INFO says where that has been read."""
        return cls(queue, info["created"], info.get("domain", "")) if info else cls(queue)

    def problem(self, ack: PubAck, schedules: str | None = None) -> JetStreamProviderError | None:
        """Return what is wrong if another stream than the queue's, or that of its schedules, has stored a job."""
        stream = schedules or self.stream
        if ack.stream == stream and (self.domain is None or ack.domain == self.domain):
            return None
        expected, found = (
            f"{name} in the domain {domain}" if domain else name
            for name, domain in ((stream, self.domain), (ack.stream, ack.domain))
        )
        return WrongStreamError(
            f"expected {expected} to store it, found that {found} did, as sequence {ack.sequence}: its workers may do"
            f" this job; delete it there, and publish on a subject of {stream}"
        )


@dataclass(slots=True)
class PublishReport(TaskReport):
    """The fate of every job of one call.

    :param stream: the stream that stored the jobs
    :param sequences: by index, the stream sequence of the job, of its schedule for one of ``scheduled``; 0 where it
        isn't known to be stored
    :param duplicates: how many jobs were stored already
    :param failures: the jobs not known to be stored
    :param scheduled: the indexes of jobs whose schedule is stored, in the queue's stream of schedules; the job made of
        it gets a sequence of its own
    :param source_error: what the source of the jobs raised, after the jobs of the report
    :param is_cut: whether further jobs weren't read any more, since too many had failed, or none could be sent
    :param advised: the jobs that name one of the queue's advisory subjects: stream sequences by digests of subject and
        id; :func:`~airflow_provider_jetstream.jetstream.wait` takes it
    :param repeated: the jobs whose message ids a stored message has, before it is known whether that is the job
    :param held: by the indexes of jobs that aren't stored, since a job with their unique key waits, runs or is a dead
        letter, that job's sequence; 0 where the server doesn't say it. They are neither failures nor waited for
    :param extra: the sequences of jobs that an earlier try has stored, and that aren't among these jobs any more
    :param destination: the queue's stream; ``None`` where no queue was given
    :param manifest_key: the key of the manifest that names the jobs; ``None`` where there is none
    :param events_from: the position in the events stream from which the ends of the jobs can be stored
    :param handle: a handle on the jobs as JSON, by which another task or DAG can wait for them; ``None`` where nobody
        can
    """

    stream: str | None = None
    sequences: array[int] = field(default_factory=lambda: array("Q"))
    duplicates: int = 0
    failures: list[PublishFailure] = field(default_factory=list)
    scheduled: set[int] = field(default_factory=set)
    advised: dict[str, int] = field(default_factory=dict)
    source_error: Exception | None = None
    is_cut: bool = False
    repeated: list[RepeatedJob] = field(default_factory=list)
    held: dict[int, int] = field(default_factory=dict)
    extra: array[int] = field(default_factory=lambda: array("Q"))
    destination: Destination | None = None
    manifest_key: str | None = None
    events_from: int = 1
    handle: dict[str, Any] | None = None

    def add_stored(self, sequence: int) -> None:
        """Append a job that was stored before this call; the sequence of a schedule is marked."""
        if sequence & SCHEDULED:
            self.scheduled.add(len(self.sequences))
        self.sequences.append(sequence & ~SCHEDULED)
        self.duplicates += 1

    def add_acknowledged(self, index: int, ack: PubAck, *, scheduled: bool) -> None:
        """Record the server's acknowledgement of the job at an index."""
        self.sequences[index] = ack.sequence
        if scheduled:
            self.scheduled.add(index)
        else:
            self.stream = ack.stream

    def add_verified(self, repeated: RepeatedJob) -> None:
        """Record that the message with a job's message id is the job."""
        self.duplicates += 1
        self.sequences[repeated.index] = repeated.sequence
        if repeated.job.scheduled:
            self.scheduled.add(repeated.index)

    def add_failure(self, repeated: RepeatedJob, error: JetStreamProviderError, *, certain: bool = True) -> None:
        """Record that a job isn't known to be stored."""
        self.failures.append(PublishFailure(repeated.index, repeated.job.job_id, error, certain))

    def add_failures(self, repeated: Iterable[RepeatedJob], error: JetStreamProviderError) -> None:
        """Record that jobs aren't stored."""
        for job in repeated:
            self.add_failure(job, error)

    def withdraw(self, index: int) -> None:
        """Record that a job isn't known to be stored after all, which :meth:`add_stored` has recorded."""
        self.duplicates -= 1
        self.sequences[index] = 0
        self.scheduled.discard(index)

    @property
    def stored(self) -> int:
        """How many jobs are stored."""
        return len(self.sequences) - len(self.failures) - len(self.held)

    @property
    def job_count(self) -> int:
        """The number of the task's stored jobs, including jobs that its list doesn't name any more."""
        return len(self.sequences) - self.sequences.count(0) + len(self.extra)

    def queue_sequences(self) -> array[int]:
        """Return by index the sequence in the queue; 0 for a schedule, and where a job isn't known to be stored."""
        if not self.scheduled:
            return self.sequences
        sequences = self.sequences[:]
        for index in self.scheduled:
            sequences[index] = 0
        return sequences

    def awaited_ranges(self) -> list[tuple[int, int]]:
        """Return the sequences of :meth:`awaited` as ranges."""
        return sequence_ranges(self.queue_sequences() + self.extra)

    def awaited(self) -> set[int]:
        """Return the sequences of all jobs of the task, including jobs that its list doesn't name any more.

        Those of schedules are left out: they are of another stream.
        """
        return {*self.queue_sequences(), *self.extra} - {0}

    def as_json(self) -> dict[str, Any]:
        """Return the report in a form that fits an XCom: counts, sequences as ranges, and the handle."""
        return {
            "stream": self.stream or (self.destination.stream if self.destination else None),
            "published": self.stored,
            "duplicates": self.duplicates,
            "scheduled": len(self.scheduled),
            **({"held": len(self.held)} if self.held else {}),
            "sequences": sequence_ranges(self.queue_sequences()),
            **({"extra": sequence_ranges(self.extra)} if self.extra else {}),
            **({"handle": self.handle} if self.handle else {}),
        }

    def raise_for_failures(self) -> None:
        """Return if all jobs are stored.

        :raises Exception: what the source of the jobs raised, with a note of what is stored
        :raises PublishRefusedError: some jobs can never be stored as they are
        :raises PublishIncompleteError: some jobs weren't stored this time
        """
        if self.source_error:
            note = (
                f"the source of the jobs, which is read in a thread of its own, ended there; {self.stored} jobs before"
                f" are stored{self._stored_ranges()}"
            )
            self.source_error.add_note(note)
            logger.error("Publishing stopped, since %s", note)
            raise self.source_error
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
            f"{', and the jobs after them, which were not read' if self.is_cut else ''}"
        )
        terminal = any(isinstance(failure.error, TerminalError) for failure in failures)
        raise (PublishRefusedError if terminal else PublishIncompleteError)(message, self)

    def _stored_ranges(self) -> str:
        spans = sequence_ranges(self.queue_sequences())
        if not spans:
            return ""
        shown = ", ".join(f"{low}-{high}" if low != high else str(low) for low, high in spans[:_NAMED_FAILURES])
        return f" in {self.stream} (sequences {shown}{', …' if len(spans) > _NAMED_FAILURES else ''})"


def sequence_ranges(sequences: Iterable[int]) -> list[tuple[int, int]]:
    """Return the first and last sequence of each run of consecutive ones.

    :param sequences: in any order; zeros are left out
    """
    if isinstance(sequences, array) and len(runs := index_runs(sequences)) * _FEW_RUNS <= len(sequences):
        # Neither copied nor sorted: of a million, each takes long.
        return _joined(sorted((sequence, sequence + count - 1) for _, sequence, count in runs))
    ordered = sorted(sequences if isinstance(sequences, AbstractSet) else set(sequences))
    if ordered and ordered[0] == 0:
        del ordered[0]
    if ordered and ordered[-1] - ordered[0] == len(ordered) - 1:
        # By far the most frequent case.
        return [(ordered[0], ordered[-1])]
    return _joined((sequence, sequence) for sequence in ordered)


def _joined(ordered: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Join ranges, in the order of their first sequences, that overlap or follow each other."""
    spans: list[tuple[int, int]] = []
    for first, last in ordered:
        if spans and spans[-1][1] >= first - 1:
            spans[-1] = (spans[-1][0], max(spans[-1][1], last))
        else:
            spans.append((first, last))
    return spans


def index_runs(sequences: Sequence[int]) -> list[tuple[int, int, int]]:
    """Return index, sequence and count of each run of jobs that were stored one after another.

    :param sequences: by index; 0 where a job isn't stored
    """
    runs: list[tuple[int, int, int]] = []
    for start in range(0, len(sequences), _COMPARED_AT_ONCE):
        part = array("Q", sequences[start : start + _COMPARED_AT_ONCE])
        if part[0] and part[-1] - part[0] == len(part) - 1 and part == array("Q", range(part[0], part[-1] + 1)):
            # By far the most frequent case.
            _add_run(runs, start, part[0], len(part))
            continue
        for index, sequence in enumerate(part, start):
            if sequence:
                _add_run(runs, index, sequence, 1)
    return runs


def _add_run(runs: list[tuple[int, int, int]], index: int, sequence: int, count: int) -> None:
    if runs:
        first, start, length = runs[-1]
        if (index, sequence) == (first + length, start + length):
            runs[-1] = (first, start, length + count)
            return
    runs.append((index, sequence, count))


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
