"""What a redrive would do, without doing it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from airflow_provider_jetstream.jetstream.dead_letters.scan import Scan
from airflow_provider_jetstream.jetstream.dead_letters.selection import group_of
from airflow_provider_jetstream.jetstream.errors import RedriveError
from airflow_provider_jetstream.jetstream.redrive.copies import max_job_size, outgoing_job
from airflow_provider_jetstream.jetstream.redrive.protocol import check_target, choose_protocol
from airflow_provider_jetstream.jetstream.redrive.redrive import require_sequences
from airflow_provider_jetstream.jetstream.redrive.repair import repaired_content
from airflow_provider_jetstream.jetstream.redrive.request import Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.dead_letters.letter import DeadLetter
    from airflow_provider_jetstream.jetstream.dead_letters.selection import GroupField
    from airflow_provider_jetstream.jetstream.queue.snapshot import QueueSnapshot
    from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue
    from airflow_provider_jetstream.jetstream.redrive.request import RedriveRequest

_SAMPLE = 5
_NAMED_FAILURES = 100
_BODY_SHOWN = 200
BY_CAUSE: tuple[GroupField, ...] = ("reason", "error_class", "fingerprint")


@dataclass(slots=True)
class Preview:
    """What a redrive would do.

    :param protocol: how
    :param guarantee: what that protects from
    :param redriven: how many letters would come back
    :param parked: how many would be taken out of circulation
    :param failed: original sequence → why it would stay; the first hundred
    :param failures: how many would stay
    :param groups: how many there are of each group
    :param sample: the first few
    :param uncertain: dead letters that can't be told yet
    :param undeliverable: jobs that no consumer takes
    :param risks: what could be lost as things are, a sentence each
    """

    protocol: Protocol
    guarantee: str
    redriven: int = 0
    parked: int = 0
    failed: dict[int, str] = field(default_factory=dict)
    failures: int = 0
    groups: Counter[tuple[str | None, ...]] = field(default_factory=Counter)
    sample: list[dict[str, Any]] = field(default_factory=list)
    uncertain: int = 0
    undeliverable: int = 0
    risks: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """Give the preview in a form that fits an XCom.

        :return: counts, groups and a sample
        """
        return {
            "dry_run": True,
            "protocol": self.protocol.value,
            "guarantee": self.guarantee,
            "redriven": self.redriven,
            "parked": self.parked,
            "failed": self.failures,
            "failures": dict(list(self.failed.items())[:20]),
            "groups": [{"group": list(group), "count": count} for group, count in self.groups.most_common(100)],
            "sample": self.sample,
            "uncertain": self.uncertain,
            "undeliverable": self.undeliverable,
            "risks": list(self.risks),
        }


async def preview(
    connection: Connection, queue: WorkQueue, request: RedriveRequest, group_by: Sequence[GroupField] = BY_CAUSE
) -> Preview:
    """Tell what a redrive would do; change nothing.

    :param connection: the server
    :param queue: the work queue
    :param order: what it would be asked to do
    :param group_by: what letters of a group share
    :return: the preview
    :raises RedriveOrderError: what is asked for isn't possible here
    :raises DeadLetterGoneError: a sequence that is asked for is no dead letter (any more)
    :raises QueueDeclarationError: the queue declares no dead letter queue
    :raises NotFoundError: the work queue or its dead letter queue doesn't exist
    """
    scan = await Scan.begin(connection, queue, vanished=request.selection.vanished)
    choice = choose_protocol(request, scan.snapshot, connection.api_level)
    await require_sequences(scan, request.selection)
    found = Preview(
        choice.protocol,
        choice.guarantee,
        uncertain=scan.reconciliation.uncertain,
        undeliverable=scan.undeliverable,
        risks=scan.risks,
    )
    limit = max_job_size(connection, marked=choice.protocol == Protocol.ATOMIC)
    async for letter in scan.letters(request.selection):
        preview_letter(found, request, letter, scan.snapshot, group_by, limit)
    return found


def preview_letter(
    found: Preview,
    order: RedriveRequest,
    letter: DeadLetter,
    around: QueueSnapshot,
    group_by: Sequence[GroupField],
    limit: int,
) -> None:
    """Take note of what would become of a letter.

    :param found: what takes note
    :param order: what is asked for
    :param letter: the dead letter
    :param around: how the queue is
    :param group_by: what letters of a group share
    :param limit: bytes that the server takes
    """
    found.groups[group_of(letter, group_by)] += 1
    if letter.copy_sequence is not None:
        # A redrive that was cut off has stored its new job already.
        found.redriven += 1
        return
    if order.must_park(letter):
        found.parked += 1
        return
    try:
        content = repaired_content(letter, order.transform)
        check_target(content.subject, around)
        job = outgoing_job(letter, content, order.subject, limit)
    except RedriveError as error:
        found.failures += 1
        if len(found.failed) < _NAMED_FAILURES:
            found.failed[letter.sequence] = str(error)
        return
    found.redriven += 1
    if len(found.sample) < _SAMPLE:
        found.sample.append(
            {
                "sequence": letter.sequence,
                "job_id": letter.job_id,
                "subject": job.subject,
                "reason": letter.death.reason.value,
                "error_class": letter.death.error_class,
                "error_place": letter.death.error_place,
                "redrives": letter.redrives,
                "body": job.content.body[:_BODY_SHOWN].decode("utf-8", "replace"),
                "changes": job.content.changes,
            }
        )
