"""Whether an end that is stored is about the message that is stored now; nothing is read here.

Each stream syncs by itself, so after a loss of power a queue's file may be older than the files of its companions. Then
new jobs get the sequences of ended jobs, within one creation of the stream. So an end counts only if the server
stored it after the message. The id of a worker's completion has the time at which the job was stored, which is exact.
For every other end the servers' times decide.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import Enum
from typing import TYPE_CHECKING, Final

from airflow_provider_jetstream.jetstream.queue.finding import Risk
from airflow_provider_jetstream.jetstream.units import NANOSECONDS, format_duration

if TYPE_CHECKING:
    from collections.abc import Iterable

    from airflow_provider_jetstream.jetstream.dead_letters.status import NotDead
    from airflow_provider_jetstream.jetstream.queue.finding import Finding
    from airflow_provider_jetstream.jetstream.queue.snapshot import QueueSnapshot

# Servers whose clocks are synchronised differ by milliseconds; this is for one that has just been started again, and
# for a clock that is set. A server takes longer than a second to be back, so that a larger difference does no harm.
CLOCK_SKEW: Final = timedelta(seconds=5)
# Workers of version 1 state the time of a job in seconds, as a floating-point number.
_ID_PRECISION: Final = 1_000_000
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND: Final = timedelta(microseconds=1)


class Order(Enum):
    """When an end was stored, compared with another moment, such as that at which the message was stored."""

    BEFORE = "before"
    AFTER = "after"
    UNCLEAR = "unclear"


@dataclass(frozen=True, slots=True)
class ServerTimes:
    """What is known of the clocks that the times of a queue and its companions are of.

    :param clustered: whether they may be of several servers
    :param up_since: since when no server of the queue has been restarted, where that is known: until then no sequence
        was given twice
    """

    clustered: bool = False
    up_since: datetime | None = None

    @classmethod
    def of(cls, snapshot: QueueSnapshot) -> ServerTimes:
        """Return what a snapshot tells."""
        consumers = snapshot.consumers.values()
        times = [consumer.up_since for consumer in consumers]
        known = [time for time in times if time is not None]
        return cls(
            clustered=any(consumer.clustered for consumer in consumers),
            up_since=max(known) if known and len(known) == len(times) else None,
        )

    @property
    def skew(self) -> timedelta:
        """By how much the server's times may differ."""
        return CLOCK_SKEW if self.clustered else timedelta()

    def order(self, end_at: datetime, moment: datetime) -> Order:
        """Return whether an end was stored before a moment or not."""
        if end_at < moment - self.skew:
            return Order.BEFORE
        is_one_clock = not self.clustered and self.up_since is not None and self.up_since <= moment
        return Order.AFTER if is_one_clock or end_at >= moment + CLOCK_SKEW else Order.UNCLEAR

    def bearing(self, end_at: datetime, stored_at: datetime, job_time: int | None = None) -> Order:
        """Return whether an end is about a message (``AFTER``), or about an earlier one of its sequence (``BEFORE``).

        :param end_at: when the end was stored
        :param stored_at: when the message was stored
        :param job_time: when the job of the end was stored, in nanoseconds since 1970, where the end names that
        """
        if job_time is not None:
            difference = job_time - (stored_at - _EPOCH) // _MICROSECOND * 1_000
            return Order.AFTER if abs(difference) < _ID_PRECISION else Order.BEFORE
        order = self.order(end_at, stored_at)
        first = min(end_at, stored_at) - CLOCK_SKEW
        if order is Order.UNCLEAR and self.clustered and self.up_since is not None and self.up_since <= first:
            return Order.AFTER
        return order


LATE_ENDS: Final = "late-ends"
UNCLEAR_ENDS: Final = "unclear-ends"
FOREIGN_ENDS: Final = "foreign-ends"
UNCLEAR_HANDLING: Final = "unclear-handling"
GIVEN_AGAIN: Final = "sequences-given-again"
NEW_JOB_LOST: Final = "new-jobs-without-copies"

_UNCERTAIN: Final = {
    UNCLEAR_ENDS: "whether jobs of {queue} ended isn't known (the first is {first}): an end is stored, but within"
    " {skew} s of the message of that sequence, and the server was restarted since or has several clocks, so it may be"
    " an earlier job's; find out, and redrive by sequence those that didn't end",
    FOREIGN_ENDS: "whether jobs of {queue} died isn't known (the first is {first}): a worker of a consumer that takes"
    " other subjects terminated them or stored records or ends of them; find out which worker does so, and redrive by"
    " sequence the jobs that died",
    UNCLEAR_HANDLING: "whether jobs of {queue} were handled isn't known (the first is {first}): a worker terminated"
    " them, so that they left the queue, and a handler acknowledged no more than that their deliveries were used up;"
    " find out whether it found them there, and redrive by sequence those that it didn't",
    GIVEN_AGAIN: "whether jobs of {queue} ended isn't known (the first is {first}): the server lost its power and gave"
    " their sequences to other jobs since, whose ends and records hide theirs; find out, and redrive by sequence those"
    " that didn't end",
    NEW_JOB_LOST: "whether jobs of {queue} were redriven isn't known (the first is {first}): the server was restarted"
    " after the audit's records of that, and neither queue nor archive has their new jobs, which a loss of power may"
    " have taken; find out whether these have run, and redrive by sequence the jobs of which they haven't",
}


def late_end_risks(jobs: Iterable[NotDead], snapshot: QueueSnapshot, known: Iterable[Finding]) -> tuple[Risk, ...]:
    """Return a risk for each consumer whose jobs have ended late.

    :param jobs: jobs that are no dead letters
    :param known: what was found before; nothing is repeated
    """
    late = {job.consumer for job in jobs if job.ended_late}
    risks = [_risk(consumer, snapshot) for consumer in sorted(name for name in late if name)]
    texts = {str(finding) for finding in known}
    return tuple(risk for risk in risks if str(risk) not in texts)


def unclear_end_risks(jobs: Iterable[NotDead], snapshot: QueueSnapshot, known: Iterable[Finding]) -> tuple[Risk, ...]:
    """Return risks that say why jobs are uncertain.

    :param jobs: jobs that are no dead letters
    :param known: what was found before; nothing is repeated
    """
    queue, texts = snapshot.queue, {str(finding) for finding in known}
    jobs, risks = list(jobs), list[Risk]()
    for name, text in _UNCERTAIN.items():
        if found := [job.sequence for job in jobs if job.why == name]:
            risks.append(Risk(name, text.format(queue=queue, first=found[0], skew=f"{CLOCK_SKEW.total_seconds():g}")))
    return tuple(risk for risk in risks if str(risk) not in texts)


def _risk(name: str, snapshot: QueueSnapshot) -> Risk:
    consumer = snapshot.consumers.get(name)
    wait = f" of {format_duration(round(consumer.max_ack_wait.total_seconds() * NANOSECONDS))}" if consumer else ""
    return Risk(
        LATE_ENDS,
        f"jobs of consumer {name} of {snapshot.queue} ended after the server had reported that their deliveries were"
        f" used up: workers take longer than its ack wait{wait} and report no progress, so that the server gives a job"
        " to a second worker, and a redrive to a third, while the first still has it;"
        " raise the ack wait, or have workers send in-progress signals",
    )
