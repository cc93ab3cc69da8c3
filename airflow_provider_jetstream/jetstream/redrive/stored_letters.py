"""Records letters whose new jobs are stored in the audit, and removes what is left of them, in this order."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from airflow_provider_jetstream.jetstream.dead_letters.letter import BodySource, task_key_of
from airflow_provider_jetstream.jetstream.errors import JetStreamProviderError
from airflow_provider_jetstream.jetstream.publishing.manifest_record import renew_manifests
from airflow_provider_jetstream.jetstream.redrive.removal import remove_originals

if TYPE_CHECKING:
    from collections.abc import Sequence

    from airflow_provider_jetstream.jetstream.audit.log import AuditLog
    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.origin import Origin
    from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue
    from airflow_provider_jetstream.jetstream.redrive.claims import Claims
    from airflow_provider_jetstream.jetstream.redrive.finished_entries import FinishedEntries
    from airflow_provider_jetstream.jetstream.redrive.letter_records import Done, LetterRecords
    from airflow_provider_jetstream.jetstream.redrive.report import RedriveReport
    from airflow_provider_jetstream.jetstream.redrive.target import RedriveTarget


# Fewer letters wait for the batch before, and are finished before the next one begins.
LEAST_OVERLAPPED: Final = 50


@dataclass(slots=True)
class StoredBatch:
    """Letters whose new jobs, or whose parked records, are stored.

    :param intents: the audit's sequences of their intents
    :param done: the letters, each with its record
    :param is_unknown: whether it isn't known of each other letter that nothing is stored for it
    """

    intents: list[int]
    done: list[Done] = field(default_factory=list)
    is_unknown: bool = False


class StoredLetters:
    """Finishes the letters of one redrive.

    :param queue: the work queue
    :param target: the queue that gets the new jobs
    :param report: what was done is added to it
    :param claims: the claims of the letters' entries, where handlers may get them
    :param removes_entries: whether the entries of redriven letters are removed
    """

    def __init__(
        self,
        connection: Connection,
        queue: WorkQueue,
        target: RedriveTarget,
        audit: AuditLog,
        records: LetterRecords,
        finished_entries: FinishedEntries,
        report: RedriveReport,
        *,
        claims: Claims | None,
        removes_entries: bool,
    ) -> None:
        self._connection = connection
        self._queue = queue
        self._target = target
        self._audit = audit
        self._records = records
        self._finished_entries = finished_entries
        self._report = report
        self._claims = claims
        self._removes_entries = removes_entries

    async def finish(self, stored: Sequence[Done]) -> set[int]:
        """Record letters that are stored, and remove their originals and their entries.

        :param stored: letters with a new job, or parked ones
        :return: the stream sequences of those whose record is stored
        """
        if not stored:
            return set()
        failed = await self._records.write(stored)
        for sequence, why in failed.items():
            self._report.add_failure(sequence, why)
        recorded = [done for done in stored if done[1].sequence not in failed]
        await self._renew_origins(recorded)
        entries: list[int] = []
        for letter, record in await self._remove_originals(recorded):
            left = self._claims.release(letter) if self._claims else letter.entries
            if record.action == "parked":
                self._report.add_parked(letter.sequence)
                # Where parking was cut off before, the letter's entries include its own parked one.
                entries += (entry for entry in left if entry != record.new_sequence)
            else:
                self._report.add_redriven(letter.sequence, record.new_sequence, record.new_stream)
                entries += left if self._removes_entries else ()
        await self._finished_entries.add(entries)
        return {record.sequence for _, record in recorded}

    async def _renew_origins(self, done: Sequence[Done]) -> None:
        """Store the records of the tasks that published letters once more: their copies are younger than the records.

        Before the originals are removed, since nothing keeps the records then.
        """
        copies: dict[str, tuple[int, Origin | None]] = {}
        for letter, record in done:
            is_ours = record.new_stream == (self._target.stream if self._target.is_other else None)
            if is_ours and record.action == "redriven" and (key := task_key_of(letter.headers)):
                last, origin = copies.get(key, (0, None))
                copies[key] = max(last, record.new_sequence or 0), origin or letter.origin
        queue, created = self._target.queue, self._target.snapshot.created
        if copies and queue.events:
            await renew_manifests(self._connection, queue.name, queue.events.name, created, copies)

    async def _remove_originals(self, done: Sequence[Done]) -> list[Done]:
        """Remove the original jobs; return the letters whose original is gone."""
        await self._audit.require_lease()
        originals = {
            letter.sequence: None if letter.consumer_absent else letter.death.consumer
            for letter, _ in done
            if letter.source == BodySource.QUEUE
        }
        try:
            failed = await remove_originals(self._connection, self._queue.name, originals)
        except JetStreamProviderError as error:
            failed = dict.fromkeys(originals, error)
        for letter, record in done:
            if letter.sequence in failed:
                self._report.add_failure(letter.sequence, f"it is {record.action}, but {failed[letter.sequence]}")
        return [(letter, record) for letter, record in done if letter.sequence not in failed]
