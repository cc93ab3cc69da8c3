"""What is known of jobs that are about to be sent: whether an earlier try has stored them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    from airflow_provider_jetstream.jetstream.publishing.job import OutgoingJob
    from airflow_provider_jetstream.jetstream.publishing.outgoing_run import OutgoingRun

# Of jobs that are looked at one by one, so many are sent before other tasks of the event loop run.
SINGLE_JOBS: Final = 64
# Of a run.
RUN_SIZE: Final = 512


class KnownJobs(Protocol):
    """Knows which jobs are stored."""

    @property
    def verifies(self) -> bool:
        """Whether it finds out itself what the messages are that the server calls duplicates of jobs."""

    @property
    def run_size(self) -> int:
        """How many jobs are sent together at most."""

    def are_new(self, first: int, run: OutgoingRun) -> bool:
        """Note a run that is about to be sent; return ``False``, with nothing noted, where one may be stored.

        :param first: the index of its first job
        """

    def sequence_of(self, index: int, job: OutgoingJob) -> int | None:
        """Return the stream sequence of a job that is about to be sent; ``None`` where it isn't known to be stored."""


@dataclass(frozen=True, slots=True)
class NothingKnown:
    """Knows of no job that is stored."""

    verifies: bool = False
    run_size: int = RUN_SIZE

    def are_new(self, _first: int, _run: OutgoingRun) -> bool:
        """Return true."""
        return True

    def sequence_of(self, _index: int, _job: OutgoingJob) -> int | None:
        """Return ``None``."""
        return None


@dataclass(frozen=True, slots=True)
class AskedForEach:
    """Asks a function for each job."""

    stored_sequence: Callable[[int, OutgoingJob], int | None]
    run_size: int = SINGLE_JOBS
    verifies: bool = False

    def are_new(self, _first: int, _run: OutgoingRun) -> bool:
        """Return false."""
        return False

    def sequence_of(self, index: int, job: OutgoingJob) -> int | None:
        """Ask for a job."""
        return self.stored_sequence(index, job)
