"""A worker's run that ends by itself: when its consumer has no more messages, or after so many of them."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Any

from airflow_provider_jetstream.jetstream.client.stream_api import consumer_info
from airflow_provider_jetstream.jetstream.errors import DeadlineError
from airflow_provider_jetstream.jetstream.publishing.report import sequence_ranges

if TYPE_CHECKING:
    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.worker.delivery import Delivery
    from airflow_provider_jetstream.worker.logs import DeliveryOutcome

# Seconds without a running handler and without an answer of the server, after which a run ends with an error.
_LONGEST_SILENCE = 60.0
_NAMED = 500


class BoundedRun:
    """Decides when a run has done enough, and counts what it has done.

    A consumer has no more messages once the server says so: a pull request that was opened after the last message has
    ended without one. Silence proves nothing.

    :param max_jobs: how many jobs may be started; ``None`` for any number
    :param wait: seconds to wait for the first message

    :ivar counts: how many deliveries had which outcome
    """

    def __init__(self, max_jobs: int | None = None, wait: float = 0.0) -> None:
        self._max_jobs = max_jobs
        self._wait = wait
        self._begun = 0
        self._ended = 0
        self._quiet_since: float | None = None
        self._last_quiet = 0.0
        self._heard_at = time.monotonic()
        self._refusal = ""
        self.counts: Counter[DeliveryOutcome] = Counter()
        self._ids: dict[DeliveryOutcome, list[str]] = defaultdict(list)
        self._sequences: dict[DeliveryOutcome, list[int]] = defaultdict(list)

    @property
    def left(self) -> int | None:
        """How many more jobs may be started; ``None`` for any number."""
        return None if self._max_jobs is None else max(0, self._max_jobs - self._begun)

    @property
    def is_over(self) -> bool:
        """Whether nothing is in flight, and no job may be started or none is there."""
        return self._begun == self._ended and (self.left == 0 or self._is_quiet)

    @property
    def _is_quiet(self) -> bool:
        wait = 0.0 if self._begun else self._wait
        return self._quiet_since is not None and self._last_quiet - self._quiet_since >= wait

    def note_arrival(self) -> None:
        """Note that a message has arrived."""
        self._quiet_since = None
        self._note_answer()

    def note_begin(self) -> None:
        """Note that a job has begun."""
        self._begun += 1

    def note_end(self, job: Delivery, outcome: DeliveryOutcome) -> None:
        """Note how a delivery ended; the server may be able to deliver its message again at once."""
        self._ended += 1
        self._quiet_since = None
        self._note_answer()
        self.counts[outcome] += 1
        self._sequences[outcome].append(job.sequence)
        if len(self._ids[outcome]) < _NAMED:
            self._ids[outcome].append(job.shown_id)

    def note_no_messages(self, opened_at: float) -> None:
        """Note that a pull request which was opened at this time has ended without a message."""
        self._note_answer()
        if self._quiet_since is None:
            self._quiet_since = opened_at
        self._last_quiet = time.monotonic()

    def note_refusal(self, reason: str) -> None:
        """Note that the server, or the connection, refused a pull request."""
        self._refusal = reason

    async def check(self, connection: Connection, stream: str, consumer: str, *, is_busy: bool) -> None:
        """End a run that can't go on.

        :param is_busy: whether a handler is running
        :raises NotFoundError: the consumer doesn't exist any more
        :raises DeadlineError: the server is away for too long
        """
        if is_busy:
            self._note_answer()
        if self._refusal and connection.is_connected:
            await consumer_info(connection, stream, consumer)
        if time.monotonic() - self._heard_at > _LONGEST_SILENCE:
            found = self._refusal or ("no answer" if connection.is_connected else "a lost connection")
            raise DeadlineError(
                f"expected answers to the pull requests for {stream}/{consumer} within {_LONGEST_SILENCE:g} s, found"
                f" {found}; what isn't acknowledged is delivered again"
            )
        self._refusal = ""

    def _note_answer(self) -> None:
        self._heard_at = time.monotonic()

    def as_json(self) -> dict[str, Any]:
        """Return how many deliveries had which outcome, and the first ids and ranges of sequences of each."""
        return {
            "deliveries": self._ended,
            "counts": {outcome.value: count for outcome, count in sorted(self.counts.items())},
            "ids": {outcome.value: ids for outcome, ids in sorted(self._ids.items())},
            "sequences": {
                outcome.value: sequence_ranges(sequences)[:_NAMED]
                for outcome, sequences in sorted(self._sequences.items())
            },
        }
