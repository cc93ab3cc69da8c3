"""Tells the jobs without an entry that a consumer has delivered from those that it may have passed.

A consumer's numbers say nothing about jobs that its filters didn't match when it passed them: they count as dead, also
those that another consumer's worker has. What shows that something else than provisioning has changed consumers:
another one has more jobs in flight than its filters match; or this one has delivered less often than it has jobs; or
its filters aren't those of the last provisioning. Where neither shows, as after a reset to a later job of a busy
consumer, or where filters were changed and changed back while no worker had a job, the numbers are believed.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from airflow_provider_jetstream.jetstream.queue.filter_marks import unproved_up_to
from airflow_provider_jetstream.jetstream.queue.finding import Restriction

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from airflow_provider_jetstream.jetstream.queue.snapshot import QueueSnapshot

_NAMED = 5


@dataclass(slots=True)
class JudgedOrphans:
    """The jobs without an entry that are dead by their consumers' numbers.

    :param certain: stream sequences of those that are dead, in order
    :param disputed: of those that may never have been delivered, or that a worker may have
    :param findings: why they are uncertain, a sentence for each consumer
    """

    certain: array[int] = field(default_factory=lambda: array("Q"))
    disputed: array[int] = field(default_factory=lambda: array("Q"))
    findings: list[Restriction] = field(default_factory=list)


def tell_orphans(
    snapshot: QueueSnapshot, orphans: Mapping[str, Sequence[int]], inconsistent_consumers: Collection[str]
) -> JudgedOrphans:
    """Judge the jobs without an entry.

    :param orphans: by consumer their stream sequences in order
    :param inconsistent_consumers: consumers that have fewer dead letters than entries state
    """
    judged = JudgedOrphans()
    busy = {name for name in inconsistent_consumers if snapshot.consumers[name].in_flight}
    for name, sequences in orphans.items():
        unproved, why = _unproved(snapshot, name, busy - {name})
        disputed = [sequence for sequence in sequences if unproved is None or sequence <= unproved]
        judged.certain.extend(sequences[len(disputed) :])
        judged.disputed.extend(disputed)
        if disputed:
            text = (
                f"{len(disputed)} jobs without an entry are dead by the numbers of consumer {name} of"
                f" {snapshot.queue}, and {why}: something else than provisioning has changed consumers, so these jobs"
                " may never have been delivered, or a worker of another consumer may have them; they count as"
                f" uncertain: once no worker has them, redrive them by their sequences ({_shown(disputed)})"
            )
            judged.findings.append(Restriction("changed-consumer", text))
    judged.certain, judged.disputed = array("Q", sorted(judged.certain)), array("Q", sorted(judged.disputed))
    return judged


def passed_finding(queue: str, name: str, sequences: Sequence[int]) -> Restriction:
    """Return why jobs are uncertain that a consumer has neither delivered nor is about to deliver."""
    text = (
        f"{len(sequences)} jobs without an entry are neither delivered, pending nor in flight by the numbers of"
        f" consumer {name} of {queue}: it passed them before something else than provisioning gave it their subjects;"
        f" they count as uncertain: once no worker has them, redrive them by their sequences ({_shown(sequences)})"
    )
    return Restriction("changed-consumer", text)


def _unproved(snapshot: QueueSnapshot, name: str, others: Collection[str]) -> tuple[int | None, str]:
    """Return up to which sequence a consumer may have passed jobs, ``None`` for all, and what shows that.

    :param others: the others that have more jobs in flight than their filters match
    """
    consumer = snapshot.consumers[name]
    if others:
        return None, f"consumer {', '.join(sorted(others))} has more jobs in flight than its filters match"
    if consumer.dead is not None and consumer.deliveries < consumer.dead + consumer.in_flight:
        return None, f"it has delivered {consumer.deliveries} times since it was created or reset"
    unproved = unproved_up_to(snapshot.config, name, consumer.filters)
    return unproved, "its filters aren't, or weren't, those with which it was provisioned"


def _shown(sequences: Sequence[int]) -> str:
    more = f" and {len(sequences) - _NAMED} more" if len(sequences) > _NAMED else ""
    return ", ".join(map(str, sequences[:_NAMED])) + more
