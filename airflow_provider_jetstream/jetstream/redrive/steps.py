"""What is done with dead letters, step by step.

For each letter, in this order: store the new job; record it in the audit; remove the original; remove what the dead
letter queue holds about it. Whoever is killed in between and runs again finds by the id, the marker, the audit or the
missing original how far it came. The letters of a batch go through each step together.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

from airflow_provider_jetstream.jetstream.audit.log import LetterRecord
from airflow_provider_jetstream.jetstream.client.concurrency import map_concurrently
from airflow_provider_jetstream.jetstream.dead_letters.classifier import ENDED, Status
from airflow_provider_jetstream.jetstream.dead_letters.letter import Source
from airflow_provider_jetstream.jetstream.dead_letters.scan import require_dead_letters
from airflow_provider_jetstream.jetstream.errors import ApiError, JetStreamProviderError, RedriveError, TransientError
from airflow_provider_jetstream.jetstream.redrive.copies import (
    OutgoingJob,
    max_job_size,
    outgoing_job,
    store_copies,
    store_copies_with_markers,
    store_parked,
)
from airflow_provider_jetstream.jetstream.redrive.protocol import check_target
from airflow_provider_jetstream.jetstream.redrive.removal import RUN_AGAIN, remove_entries, remove_originals
from airflow_provider_jetstream.jetstream.redrive.repair import repaired_content
from airflow_provider_jetstream.jetstream.redrive.request import Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from airflow_provider_jetstream.jetstream.audit.log import Action, AuditLog
    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.dead_letters.classifier import NotDead
    from airflow_provider_jetstream.jetstream.dead_letters.letter import DeadLetter
    from airflow_provider_jetstream.jetstream.queue.snapshot import QueueSnapshot
    from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue
    from airflow_provider_jetstream.jetstream.redrive.report import RedriveReport
    from airflow_provider_jetstream.jetstream.redrive.request import RedriveRequest

_Done: TypeAlias = "tuple[DeadLetter, LetterRecord]"


class Steps:
    """Does what is asked for with letters that were just proved.

    :param connection: the server
    :param queue: the work queue
    :param around: how the queue is
    :param order: what is asked for
    :param protocol: how letters are brought back
    :param audit: where it is recorded, if anywhere
    :param report: takes note of what became of each letter
    :param clears: whether what the dead letter queue holds about redriven letters is removed with each of them
    """

    def __init__(
        self,
        connection: Connection,
        queue: WorkQueue,
        around: QueueSnapshot,
        order: RedriveRequest,
        protocol: Protocol,
        audit: AuditLog | None,
        report: RedriveReport,
        *,
        clears: bool = True,
    ) -> None:
        self._connection = connection
        self._queue = queue
        self._around = around
        self._letters = require_dead_letters(queue).name
        self._order = order
        self._store = store_copies_with_markers if protocol == Protocol.ATOMIC else store_copies
        self._largest = max_job_size(connection, marked=protocol == Protocol.ATOMIC)
        self._audit = audit
        self._report = report
        self._clears = clears

    async def redrive(self, letters: Sequence[DeadLetter]) -> None:
        """Redrive letters, or park those that were redriven too often.

        :param letters: the letters, in the order in which their jobs shall be stored
        """
        # Whatever is asked for now: the new job of one that was cut off is stored, and may be done already.
        begun = [letter for letter in letters if letter.copy_sequence is not None]
        fresh = [letter for letter in letters if letter.copy_sequence is None]
        worn_out = [letter for letter in fresh if self._order.must_park(letter)]
        others = [letter for letter in fresh if not self._order.must_park(letter)]
        stored = [self._begun(letter) for letter in begun]
        stored += [done for done in await map_concurrently(self._park, worn_out) if done] + await self._copy(others)
        recorded = await self._write_down(stored)
        entries: list[int] = []
        for letter, record in await self._remove_originals(recorded):
            if record.action == "parked":
                self._report.add_parked(letter.sequence)
                # Parking that was cut off may have found its own entry again.
                entries += (entry for entry in letter.entries if entry != record.new_sequence)
            else:
                self._report.redriven.add(letter.sequence, record.new_sequence or 0)
                entries += letter.entries if self._clears else ()
        self._report.entries_left += await remove_entries(self._connection, self._queue, entries)

    async def clean_up(self, dismissed: Sequence[NotDead]) -> None:
        """Remove what is left of jobs that have ended.

        :param dismissed: jobs that are no dead letters
        """
        entries: list[int] = []
        for each in dismissed:
            self._report.add_gone(each.sequence)
            if each.status not in ENDED:
                continue
            entries += each.entries
        # Their workers were stopped between storing the completion and acknowledging.
        completed = {
            each.sequence: each.consumer for each in dismissed if each.status == Status.COMPLETED and each.stored
        }
        if completed:
            failed = await remove_originals(self._connection, self._queue.name, completed)
            for sequence, error in failed.items():
                self._report.add_failure(sequence, f"it is completed, but {error}")
        self._report.entries_left += await remove_entries(self._connection, self._queue, entries)

    async def record_requeued(self, letters: Sequence[DeadLetter]) -> None:
        """Write down that letters are requeued in their place, before they are.

        :param letters: the letters
        :raises RedriveError: that couldn't be recorded
        """
        if self._audit is None:
            return
        records = [
            self.record(letter, "requeued", new_sequence=letter.sequence, subject=letter.subject) for letter in letters
        ]
        if error := next((each for each in await self._audit.write(records) if each), None):
            raise RedriveError(f"nothing was requeued, since that couldn't be recorded ({error}); {RUN_AGAIN}")

    def record(
        self,
        letter: DeadLetter,
        action: Action,
        *,
        new_sequence: int,
        subject: str,
        changes: dict[str, Any] | None = None,
    ) -> LetterRecord:
        """Make the audit's record of a letter.

        :param letter: the dead letter
        :param action: what is done with it
        :param new_sequence: where it is now
        :param subject: where it went
        :param changes: what was changed
        :return: the record
        """
        return LetterRecord(
            stream=letter.death.stream,
            created=letter.death.created,
            sequence=letter.sequence,
            action=action,
            new_sequence=new_sequence,
            subject=subject,
            redrives=letter.redrives + (action != "parked"),
            reason=letter.death.reason.value,
            died_at=letter.death.died_at,
            fingerprint=letter.death.fingerprint,
            why=self._order.why,
            who=self._order.who,
            run=self._order.run,
            changes=changes,
        )

    async def _park(self, letter: DeadLetter) -> _Done | None:
        why = self._order.why or (f"dead again after {letter.redrives} redrives" if letter.redrives else "parked")
        try:
            entry = await store_parked(self._connection, letter, self._letters, why)
        except (RedriveError, TransientError) as error:
            self._report.add_failure(letter.sequence, str(error))
            return None
        return letter, self.record(letter, "parked", new_sequence=entry, subject=letter.subject)

    def _begun(self, letter: DeadLetter) -> _Done:
        subject = self._order.subject or letter.subject
        return letter, self.record(letter, "redriven", new_sequence=letter.copy_sequence or 0, subject=subject)

    async def _copy(self, letters: Sequence[DeadLetter]) -> list[_Done]:
        jobs = [job for letter in letters if (job := self._outgoing(letter))]
        done: list[_Done] = []
        for job, sequence in zip(jobs, await self._store(self._connection, jobs), strict=True):
            letter = job.letter
            if isinstance(sequence, int):
                changes = job.content.changes
                record = self.record(letter, "redriven", new_sequence=sequence, subject=job.subject, changes=changes)
                done.append((letter, record))
            else:
                self._report.add_failure(letter.sequence, str(sequence))
        return done

    def _outgoing(self, letter: DeadLetter) -> OutgoingJob | None:
        try:
            content = repaired_content(letter, self._order.transform)
            check_target(content.subject, self._around)
            return outgoing_job(letter, content, self._order.subject, self._largest)
        except RedriveError as error:
            self._report.add_failure(letter.sequence, str(error))
            return None

    async def _write_down(self, done: Sequence[_Done]) -> list[_Done]:
        if self._audit is None:
            return list(done)
        # Of those that were cut off the record may be there.
        begun = [letter.sequence for letter, _ in done if letter.copy_sequence is not None]
        failed: dict[int, Exception] = {}
        told: set[int] = set()
        for sequence, found in zip(begun, await map_concurrently(self._is_recorded, begun), strict=True):
            if isinstance(found[0], Exception):
                failed[sequence] = found[0]
            elif found[0]:
                told.add(sequence)
        records = [record for _, record in done if record.sequence not in told and record.sequence not in failed]
        errors = await self._audit.write(records)
        failed |= {record.sequence: error for record, error in zip(records, errors, strict=True) if error}
        for letter, record in done:
            if error := failed.get(letter.sequence):
                why = f"it is {record.action}, but that couldn't be recorded ({error}); {RUN_AGAIN}"
                self._report.add_failure(letter.sequence, why)
        return [each for each in done if each[0].sequence not in failed]

    async def _is_recorded(self, sequence: int) -> tuple[bool | ApiError | TransientError]:
        try:
            return (bool(self._audit and await self._audit.last_record(sequence)),)
        except (ApiError, TransientError) as error:
            return (error,)

    async def _remove_originals(self, done: Sequence[_Done]) -> list[_Done]:
        stored = {letter.sequence: letter.death.consumer for letter, _ in done if letter.source == Source.QUEUE}
        try:
            failed = await remove_originals(self._connection, self._queue.name, stored)
        except JetStreamProviderError as error:
            failed = dict.fromkeys(stored, error)
        for letter, record in done:
            if letter.sequence in failed:
                self._report.add_failure(letter.sequence, f"it is {record.action}, but {failed[letter.sequence]}")
        return [each for each in done if each[0].sequence not in failed]
