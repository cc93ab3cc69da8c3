"""Jobs that ended after their last delivery had run out: their workers take longer than the consumer's ack wait.

A redrive waits for one ack wait after a death, and no longer: nothing on the server tells that a worker is still at it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from airflow_provider_jetstream.jetstream.dead_letters.end_order import CLOCK_SKEW
from airflow_provider_jetstream.jetstream.queue.finding import Risk
from airflow_provider_jetstream.jetstream.units import NANOSECONDS, format_duration

if TYPE_CHECKING:
    from collections.abc import Iterable

    from airflow_provider_jetstream.jetstream.dead_letters.status import NotDead
    from airflow_provider_jetstream.jetstream.queue.finding import Finding
    from airflow_provider_jetstream.jetstream.queue.snapshot import QueueSnapshot

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
