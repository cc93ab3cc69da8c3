"""What has changed between two snapshots of a queue: whether they can be compared, and of which jobs more is stored."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from airflow_provider_jetstream.jetstream.advisories import AckMetric
from airflow_provider_jetstream.jetstream.client.bulk_read import read_bulk
from airflow_provider_jetstream.jetstream.contract import (
    completion_filter,
    handled_filter,
    letter_audit_subject,
)
from airflow_provider_jetstream.jetstream.evidence import event_of, proves_nothing
from airflow_provider_jetstream.jetstream.queue.end_evidence import ack_metric_filter
from airflow_provider_jetstream.jetstream.queue.snapshot import moved_back

if TYPE_CHECKING:
    from collections.abc import Mapping

    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.dead_letters.scan_context import ScanContext
    from airflow_provider_jetstream.jetstream.queue.consumer_state import ConsumerState
    from airflow_provider_jetstream.jetstream.queue.snapshot import QueueSnapshot

# So many new messages are read in any case; more only where there are as many letters.
_MOST_MESSAGES = 1_000
_DIGITS = 19


def has_gap(before: QueueSnapshot, after: QueueSnapshot, read_to: int, dead_letter_queue: str) -> bool:
    """Return whether the later snapshot isn't the earlier one's continuation.

    :param read_to: the last sequence of the dead letter queue that was read
    """
    names = before.companions.keys()
    if before.created != after.created or before.config != after.config or names != after.companions.keys():
        return True
    letters = after.companions[dead_letter_queue]
    return (
        before.consumers.keys() != after.consumers.keys()
        or int(after.state["last_seq"]) < int(before.state["last_seq"])
        or int(letters["state"]["last_seq"]) < read_to
        or before.companions[dead_letter_queue]["config"] != letters["config"]
        or any(_is_another(before.companions[name], info) for name, info in after.companions.items())
        or any(_is_anew(before.consumers[name], consumer) for name, consumer in after.consumers.items())
    )


def _is_another(before: Mapping[str, Any], after: Mapping[str, Any]) -> bool:
    moved = int(after["state"]["last_seq"]) < int(before["state"]["last_seq"])
    return bool(before["created"] != after["created"] or moved)


def _is_anew(before: ConsumerState, after: ConsumerState) -> bool:
    if before.created != after.created or before.filters != after.filters or moved_back(before, after):
        return True
    # Another server, or the same one after a restart, may have forgotten what it had published.
    return bool(before.up_since and after.up_since and before.up_since != after.up_since)


def new_messages(before: QueueSnapshot, context: ScanContext, read_to: int) -> int:
    """Return how many messages dead letter queue, events and audit have stored since the earlier snapshot.

    :param context: of the later one
    :param read_to: the last sequence of the dead letter queue that was read
    """
    companions = context.snapshot.companions
    new = sum(
        companions[name]["state"]["last_seq"] - before.companions[name]["state"]["last_seq"]
        for name in {context.events, context.snapshot.audit} - {None}
        if name
    )
    return int(new + max(0, context.dead_letter_queue["state"]["last_seq"] - read_to))


async def jobs_with_evidence(
    connection: Connection, before: QueueSnapshot, after: QueueSnapshot, context: ScanContext, letters: int
) -> set[int] | None:
    """Return the jobs of which events or audit have stored something since the earlier snapshot.

    :param letters: how many letters are known
    :return: ``None`` where more is stored than a proof of all letters reads
    """
    most = max(_MOST_MESSAGES, letters)
    jobs: set[int] = set()
    for info in (after.companions.get(context.events or ""), context.audit):
        if info is None:
            continue
        name, last = info["config"]["name"], info["state"]["last_seq"]
        read_to = before.companions[name]["state"]["last_seq"]
        if last - read_to > most:
            return None
        if last > read_to:
            jobs |= await _jobs_in(connection, info, read_to + 1, after.queue)
    return jobs


async def _jobs_in(connection: Connection, info: Mapping[str, Any], start: int, queue: str) -> set[int]:
    completed, metrics = completion_filter(queue).removesuffix(">"), ack_metric_filter(queue).removesuffix("*")
    records, reports = letter_audit_subject(queue, 0).removesuffix("0"), handled_filter(queue).removesuffix("*")
    jobs: set[int] = set()
    async for message in read_bulk(connection, info, start):
        if message.subject.startswith((completed, records, reports)):
            if not proves_nothing(message):
                jobs.add(int(message.subject.rpartition(".")[2]))
        elif message.subject.startswith(metrics) and isinstance(metric := event_of(message, queue), AckMetric):
            jobs.add(metric.stream_seq)
    return jobs
