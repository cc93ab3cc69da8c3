"""The jobs that are in flight: most of them in runs, and those by themselves of which more than a PubAck is known."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

from airflow_provider_jetstream.jetstream.publishing.runs_in_flight import RunsInFlight

if TYPE_CHECKING:
    from array import array
    from collections.abc import Sequence

    from airflow_provider_jetstream.jetstream.publishing.job_in_flight import JobInFlight

# Of all jobs in flight together: they are kept until they are stored.
_MAX_BYTES = 16 << 20


class FlightTable:
    """The jobs in flight.

    :param sequences: by index, the stream sequence of each job; 0 where it isn't known to be stored
    :ivar jobs: by index, those by themselves
    """

    def __init__(self, sequences: array[int]) -> None:
        self.runs = RunsInFlight(sequences)
        self.jobs: OrderedDict[int, JobInFlight] = OrderedDict()
        self._bytes = 0

    def __len__(self) -> int:
        return len(self.jobs) + self.runs.jobs

    @property
    def has_room_for_bytes(self) -> bool:
        """Whether the jobs in flight are small enough together for another one."""
        return self._bytes + self.runs.size <= _MAX_BYTES

    @property
    def deadline(self) -> float:
        """When the first job has to be sent again; endless without jobs."""
        return min(min((flight.deadline for flight in self.jobs.values()), default=float("inf")), self.runs.deadline)

    def add(self, index: int, flight: JobInFlight) -> None:
        """Add a job by itself."""
        self.jobs[index] = flight
        self._bytes += len(flight.payload)

    def remove(self, index: int) -> None:
        """Remove a job by itself."""
        self._bytes -= len(self.jobs.pop(index).payload)

    def part_run_of(self, index: int) -> Sequence[int]:
        """Hold the jobs of a job's run by themselves, if it is in one, and return their indexes."""
        return self._add_each(self.runs.take(index))

    def part_late_runs(self, now: float) -> None:
        """Hold the jobs of the runs by themselves whose time is over."""
        self._add_each(self.runs.take_late(now))

    def part_all_runs(self) -> None:
        """Hold all jobs by themselves."""
        self._add_each(self.runs.take_all())

    def _add_each(self, flights: Sequence[tuple[int, JobInFlight]]) -> Sequence[int]:
        for index, flight in flights:
            self.add(index, flight)
        return [index for index, _ in flights]
