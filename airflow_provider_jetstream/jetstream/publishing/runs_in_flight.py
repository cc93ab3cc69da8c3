"""The runs of jobs that are sent and not all acknowledged yet, as long as nothing but plain PubAcks comes for them."""

from __future__ import annotations

from array import array
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from airflow_provider_jetstream.jetstream.publishing.job_in_flight import JobInFlight

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from airflow_provider_jetstream.jetstream.publishing.outgoing_run import OutgoingRun


@dataclass(slots=True)
class RunInFlight:
    """A run that is sent.

    :param first: the index of its first job
    :param deadline: when its jobs are sent again that have no answer, by the monotonic clock
    :param waiting: how many have none
    """

    first: int
    run: OutgoingRun
    deadline: float
    waiting: int


class RunsInFlight:
    """The runs of one call, in the order in which they were sent.

    :param sequences: by index, the stream sequence of each job; 0 where it isn't known to be stored
    :ivar jobs: how many jobs of theirs have no answer
    :ivar size: the size of the runs' bodies together
    """

    def __init__(self, sequences: array[int]) -> None:
        self._sequences = sequences
        self._runs: deque[RunInFlight] = deque()
        self.jobs = 0
        self.size = 0

    @property
    def deadline(self) -> float:
        """When the first run has to be sent again; endless without one."""
        return self._runs[0].deadline if self._runs else float("inf")

    def add(self, first: int, run: OutgoingRun, deadline: float) -> None:
        """Add a run that is being sent."""
        self._runs.append(RunInFlight(first, run, deadline, len(run)))
        self.jobs += len(run)
        self.size += run.size

    def record(self, indexes: Sequence[int], sequences: Sequence[int]) -> int:
        """Record the sequences of jobs, and return how many of them were waited for."""
        if not self._runs:
            return 0
        start, count = indexes[0], len(indexes)
        if (
            indexes[-1] - start == count - 1
            and self._is_awaited(start, count)
            and indexes == [*range(start, start + count)]
        ):
            # By far the most frequent case: the server answers in the order of the jobs.
            self._sequences[start : start + count] = array("Q", sequences)
            self._subtract(start, start + count)
            return count
        known = self._sequences
        recorded = 0
        for index, sequence in zip(indexes, sequences, strict=True):
            if self._is_awaited(index, 1):
                known[index] = sequence
                self._subtract(index, index + 1)
                recorded += 1
        return recorded

    def take(self, index: int) -> list[tuple[int, JobInFlight]]:
        """Remove the run of a job, and return its jobs without an answer; nothing where no run has the job."""
        runs = [run for _, _, run in self._overlaps(index, index + 1)]
        return [job for run in runs for job in self._taken(run)]

    def take_late(self, now: float) -> list[tuple[int, JobInFlight]]:
        """Remove the runs whose time is over, and return their jobs without an answer."""
        return [job for run in [run for run in self._runs if run.deadline <= now] for job in self._taken(run)]

    def take_all(self) -> list[tuple[int, JobInFlight]]:
        """Remove all runs, and return their jobs without an answer."""
        return [job for run in list(self._runs) for job in self._taken(run)]

    def _taken(self, run: RunInFlight) -> list[tuple[int, JobInFlight]]:
        self._runs.remove(run)
        self.jobs -= run.waiting
        self.size -= run.run.size
        return list(self._flights(run))

    def _flights(self, run: RunInFlight) -> Iterator[tuple[int, JobInFlight]]:
        for index in range(run.first, run.first + len(run.run)):
            if not self._sequences[index]:
                job = run.run.job(index - run.first)
                yield index, JobInFlight(job, job.body or b"", run.deadline)

    def _is_awaited(self, start: int, count: int) -> bool:
        """Return whether all these jobs are of runs, and none has an answer."""
        if not self._runs or start < self._runs[0].first:
            return False
        last = self._runs[-1]
        if start + count > last.first + len(last.run) or any(self._sequences[start : start + count]):
            return False
        # Between runs there are jobs that were sent one by one.
        return sum(high - low for low, high, _ in self._overlaps(start, start + count)) == count

    def _overlaps(self, start: int, end: int) -> Iterator[tuple[int, int, RunInFlight]]:
        for run in self._runs:
            if run.first >= end:
                return
            low, high = max(start, run.first), min(end, run.first + len(run.run))
            if low < high:
                yield low, high, run

    def _subtract(self, start: int, end: int) -> None:
        for low, high, run in list(self._overlaps(start, end)):
            run.waiting -= high - low
            self.jobs -= high - low
            if not run.waiting:
                self._runs.remove(run)
                self.size -= run.run.size
