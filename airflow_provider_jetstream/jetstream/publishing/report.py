"""What became of the jobs of one call."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from airflow_provider_jetstream.jetstream.errors import JetStreamProviderError, TerminalError, TransientError

if TYPE_CHECKING:
    from collections.abc import Iterable

_NAMED_FAILURES = 5


@dataclass(frozen=True, slots=True)
class Failure:
    """A job that isn't known to be stored.

    :param index: its place among the published
    :param job_id: its ``Nats-Msg-Id``
    :param error: why
    :param certain: whether it is certain that it isn't stored; otherwise the answer got lost
    """

    index: int
    job_id: str
    error: JetStreamProviderError
    certain: bool


@dataclass(slots=True)
class PublishReport:
    """The fate of every job of one call.

    :param stream: the stream that stored them
    :param sequences: by index, the stream sequence; 0 where a job isn't known to be stored
    :param duplicates: how many of them the server knew already
    :param failures: those not known to be stored
    :param scheduled: the indexes of those of which a schedule is stored; its sequence isn't that of the job to come
    """

    stream: str | None = None
    sequences: array[int] = field(default_factory=lambda: array("Q"))
    duplicates: int = 0
    failures: list[Failure] = field(default_factory=list)
    scheduled: set[int] = field(default_factory=set)

    def add_known(self, sequence: int, *, scheduled: bool) -> None:
        """Add a job that was stored before.

        :param sequence: its stream sequence
        :param scheduled: whether it is a schedule
        """
        if scheduled:
            self.scheduled.add(len(self.sequences))
        self.sequences.append(sequence)
        self.duplicates += 1

    @property
    def stored(self) -> int:
        """How many jobs are stored."""
        return len(self.sequences) - len(self.failures)

    def raise_for_failures(self) -> None:
        """Do nothing if all jobs are stored.

        :raises PublishRefusedError: some can never be stored as they are
        :raises PublishIncompleteError: some weren't stored this time
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
            f"{self.stored} of {len(self.sequences)} jobs are stored{self._where()}; {len(failures)} are not known to"
            f" be: {named}{f'; and {rest} more' if rest > 0 else ''}"
        )
        terminal = any(isinstance(failure.error, TerminalError) for failure in failures)
        raise (PublishRefusedError if terminal else PublishIncompleteError)(message, self)

    def _where(self) -> str:
        spans = ranges(self.sequences)
        if not spans:
            return ""
        shown = ", ".join(f"{low}-{high}" if low != high else str(low) for low, high in spans[:_NAMED_FAILURES])
        return f" in {self.stream} (sequences {shown}{', …' if len(spans) > _NAMED_FAILURES else ''})"


def ranges(sequences: Iterable[int]) -> list[tuple[int, int]]:
    """Write sequences as ranges, which stay small where jobs were stored in a row.

    :param sequences: in any order; zeros are left out
    :return: first and last of each run
    """
    spans: list[tuple[int, int]] = []
    for sequence in sorted(set(sequences) - {0}):
        if spans and spans[-1][1] == sequence - 1:
            spans[-1] = (spans[-1][0], sequence)
        else:
            spans.append((sequence, sequence))
    return spans


def index_runs(sequences: Iterable[int]) -> list[tuple[int, int, int]]:
    """Write sequences by index as runs, of which there are few where jobs were stored in a row.

    :param sequences: by index; 0 where there is none
    :return: index, sequence and count of each run
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

    Publishing them again with the same ids is safe inside the stream's duplicate window.

    :param message: which and why
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
