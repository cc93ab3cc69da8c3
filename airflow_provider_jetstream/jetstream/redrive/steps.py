"""The steps of a redrive, which leave a safe state whenever they are cut off.

For each letter, in this order: store the new job; record it in the audit; remove the original; remove the letter's
entries from the dead letter queue. A redrive that is killed in between and run again finds how far each letter came by
the new job's id, the marker, the audit or the missing original. All letters of a batch go through a step together.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

from airflow_provider_jetstream.jetstream.audit.log import LetterRecord
from airflow_provider_jetstream.jetstream.client.concurrency import map_concurrently
from airflow_provider_jetstream.jetstream.client.wire_text import readable_text
from airflow_provider_jetstream.jetstream.dead_letters.letter import BodySource, task_key_of
from airflow_provider_jetstream.jetstream.dead_letters.scan_context import require_dead_letters
from airflow_provider_jetstream.jetstream.dead_letters.status import ENDED, Status
from airflow_provider_jetstream.jetstream.errors import (
    ApiError,
    CopyTooLargeError,
    JetStreamProviderError,
    RedriveError,
    TransientError,
)
from airflow_provider_jetstream.jetstream.publishing.record_store import renew_records
from airflow_provider_jetstream.jetstream.redrive.copies import (
    store_jobs,
    store_parked,
)
from airflow_provider_jetstream.jetstream.redrive.copy_room import CopyRoom
from airflow_provider_jetstream.jetstream.redrive.protocol import check_target
from airflow_provider_jetstream.jetstream.redrive.redriven_job import CopyLimits, redriven_job
from airflow_provider_jetstream.jetstream.redrive.removal import RUN_AGAIN, remove_entries, remove_originals
from airflow_provider_jetstream.jetstream.redrive.repair import repaired_content

if TYPE_CHECKING:
    from collections.abc import Sequence

    from airflow_provider_jetstream.jetstream.audit.log import Action, AuditLog
    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.dead_letters.letter import DeadLetter
    from airflow_provider_jetstream.jetstream.dead_letters.status import NotDead
    from airflow_provider_jetstream.jetstream.origin import Origin
    from airflow_provider_jetstream.jetstream.queue.snapshot import QueueSnapshot
    from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue
    from airflow_provider_jetstream.jetstream.redrive.claims import Claims
    from airflow_provider_jetstream.jetstream.redrive.redriven_job import RedrivenJob
    from airflow_provider_jetstream.jetstream.redrive.report import RedriveReport
    from airflow_provider_jetstream.jetstream.redrive.request import Protocol, RedriveRequest

_Done: TypeAlias = "tuple[DeadLetter, LetterRecord]"


class Steps:
    """Redrives, parks and cleans up letters that were just proved.

    :param queue: the work queue
    :param snapshot: its stream, companions and consumers
    :param request: what to do with the letters
    :param protocol: how letters are brought back
    :param audit: the record of redrives, if it exists
    :param report: what was done is added to it
    :param removes_entries: whether the entries of redriven letters are removed with each of them
    :param claims: the claims of the letters' entries, where handlers may get them
    :param rest_in_place: whether letters whose copies are too large are left for :attr:`without_room`
    """

    def __init__(
        self,
        connection: Connection,
        queue: WorkQueue,
        snapshot: QueueSnapshot,
        request: RedriveRequest,
        protocol: Protocol,
        audit: AuditLog | None,
        report: RedriveReport,
        *,
        removes_entries: bool = True,
        claims: Claims | None = None,
        rest_in_place: bool = False,
    ) -> None:
        self._connection = connection
        self._queue = queue
        self._snapshot = snapshot
        self._dead_letter_queue = require_dead_letters(queue).name
        self._request = request
        self._limits = CopyLimits.of(connection, snapshot.config, protocol, request.protocol)
        letters_info = snapshot.companions.get(self._dead_letter_queue)
        self._room = CopyRoom(connection, snapshot.config, letters_info["config"] if letters_info else None)
        self._audit = audit
        self._report = report
        self._removes_entries = removes_entries
        self._claims = claims
        self._rest_in_place = rest_in_place
        self.without_room: dict[int, str] = {}

    async def redrive(self, letters: Sequence[DeadLetter]) -> None:
        """Redrive letters, or park those that were redriven too often.

        :param letters: the letters in the order in which their jobs are to be stored
        """
        # Whatever the request says now: a letter whose redrive was cut off has a new job, which may have run already.
        begun = [letter for letter in letters if letter.copy_sequence is not None]
        fresh = [letter for letter in letters if letter.copy_sequence is None]
        to_park = [letter for letter in fresh if self._request.must_park(letter)]
        to_copy = [letter for letter in fresh if not self._request.must_park(letter)]
        jobs = [job for letter in to_copy if (job := self._new_job(letter))]
        while begun or to_park or jobs:
            # What has no room now may have it once the originals of the others are removed.
            no_room = await self._room.for_copies(jobs)
            no_room |= await self._room.for_parked(
                to_park, {letter.sequence: self._why_parked(letter) for letter in to_park}
            )
            now = [*begun, *to_park, *(job.letter for job in jobs)]
            freed = any(letter.source == BodySource.QUEUE for letter in now if letter.sequence not in no_room)
            await self._redrive(
                begun,
                [letter for letter in to_park if letter.sequence not in no_room],
                [job for job in jobs if job.letter.sequence not in no_room],
            )
            begun, to_park = [], [letter for letter in to_park if letter.sequence in no_room]
            jobs = [job for job in jobs if job.letter.sequence in no_room]
            if not freed:
                for sequence, why in no_room.items():
                    self._report.add_failure(sequence, why)
                return

    async def _redrive(
        self, begun: Sequence[DeadLetter], to_park: Sequence[DeadLetter], jobs: Sequence[RedrivenJob]
    ) -> None:
        """Redrive and park letters for which there is room.

        :param begun: letters whose new jobs are stored
        """
        if self._claims:
            failed = await self._claims.take([*begun, *to_park, *(job.letter for job in jobs)])
            for sequence, why in failed.items():
                self._report.add_failure(sequence, why)
            begun = [letter for letter in begun if letter.sequence not in failed]
            to_park = [letter for letter in to_park if letter.sequence not in failed]
            jobs = [job for job in jobs if job.letter.sequence not in failed]
        stored = [self._already_copied(letter) for letter in begun]
        stored += [done for done in await map_concurrently(self._park, to_park) if done] + await self._copy(jobs)
        recorded = await self._record(stored)
        await self._renew_origins(recorded)
        entries: list[int] = []
        for letter, record in await self._remove_originals(recorded):
            left = self._claims.release(letter) if self._claims else letter.entries
            if record.action == "parked":
                self._report.add_parked(letter.sequence)
                # Where parking was cut off before, the letter's entries include its own parked one.
                entries += (entry for entry in left if entry != record.new_sequence)
            else:
                self._report.redriven.add(letter.sequence, record.new_sequence or 0)
                entries += left if self._removes_entries else ()
        await self._remove_entries(entries)

    async def clean_up(self, dismissed: Sequence[NotDead]) -> None:
        """Remove the entries of jobs that have ended, and jobs that are certainly done and still stored.

        :param dismissed: jobs that are no dead letters
        """
        entries: list[int] = []
        for job in dismissed:
            self._report.add_gone(job.sequence)
            if job.status in ENDED:
                entries += job.entries
        # The worker of such a job was stopped after it stored the completion and before it acknowledged the job; or a
        # handler of the dead letter queue has reported it. An acknowledged entry isn't enough: a purge looks alike.
        done = {
            job.sequence: job for job in dismissed if job.stored and (job.status == Status.COMPLETED or job.reported)
        }
        if done:
            originals = {sequence: job.consumer for sequence, job in done.items()}
            failed = await remove_originals(self._connection, self._queue.name, originals)
            for sequence, error in failed.items():
                self._report.add_failure(sequence, f"it is {done[sequence].status.value}, but {error}")
        await self._remove_entries(entries)

    async def record_requeued(self, letters: Sequence[DeadLetter]) -> None:
        """Record that letters are requeued in place, before they are.

        :raises RedriveError: that couldn't be recorded
        """
        if self._audit is None:
            return
        records = [
            self.letter_record(letter, "requeued", new_sequence=letter.sequence, subject=letter.subject)
            for letter in letters
        ]
        if error := next((error for error in await self._audit.write(records) if error), None):
            raise RedriveError(f"nothing was requeued, since that couldn't be recorded ({error}); {RUN_AGAIN}")

    def letter_record(
        self,
        letter: DeadLetter,
        action: Action,
        *,
        new_sequence: int,
        subject: str,
        changes: dict[str, Any] | None = None,
    ) -> LetterRecord:
        """Build the audit's record of one action on a letter.

        :param new_sequence: the sequence of the new job or of the parked letter
        :param subject: the new job's subject
        :param changes: what a transform changed
        """
        return LetterRecord(
            stream=letter.death.stream,
            created=letter.death.created,
            sequence=letter.sequence,
            action=action,
            new_sequence=new_sequence,
            subject=readable_text(subject),
            consumer=letter.death.consumer,
            redrives=letter.redrives + (action != "parked"),
            reason=letter.death.reason.value,
            died_at=letter.death.died_at,
            fingerprint=letter.death.fingerprint,
            why=self._request.why,
            who=self._request.who,
            run=self._request.run,
            changes=changes,
        )

    def _why_parked(self, letter: DeadLetter) -> str:
        return self._request.why or (f"dead again after {letter.redrives} redrives" if letter.redrives else "parked")

    async def _park(self, letter: DeadLetter) -> _Done | None:
        try:
            entry = await store_parked(self._connection, letter, self._dead_letter_queue, self._why_parked(letter))
        except (RedriveError, TransientError) as error:
            self._report.add_failure(letter.sequence, str(error))
            return None
        return letter, self.letter_record(letter, "parked", new_sequence=entry, subject=letter.subject)

    def _already_copied(self, letter: DeadLetter) -> _Done:
        subject = self._request.subject or letter.subject
        record = self.letter_record(letter, "redriven", new_sequence=letter.copy_sequence or 0, subject=subject)
        return letter, record

    async def _copy(self, jobs: Sequence[RedrivenJob]) -> list[_Done]:
        done: list[_Done] = []
        for job, sequence in zip(jobs, await store_jobs(self._connection, jobs), strict=True):
            letter = job.letter
            if isinstance(sequence, int):
                record = self.letter_record(
                    *(letter, "redriven"), new_sequence=sequence, subject=job.subject, changes=job.content.changes
                )
                done.append((letter, record.model_copy(update={"left_out": dict(job.left_out) or None})))
            else:
                self._report.add_failure(letter.sequence, str(sequence))
        return done

    def _new_job(self, letter: DeadLetter) -> RedrivenJob | None:
        try:
            content = repaired_content(letter, self._request.transform)
            check_target(content.subject, self._request.subject or letter.subject, self._snapshot)
            return redriven_job(letter, content, self._request.subject, self._limits)
        except CopyTooLargeError as error:
            if self._rest_in_place:
                self.without_room[letter.sequence] = str(error)
            else:
                self._report.add_failure(letter.sequence, str(error))
            return None
        except RedriveError as error:
            self._report.add_failure(letter.sequence, str(error))
            return None

    async def _record(self, done: Sequence[_Done]) -> list[_Done]:
        """Record what was stored; return the letters whose record is stored."""
        if self._audit is None:
            return list(done)
        # A redrive that was cut off may have stored the record as well.
        begun = [letter.sequence for letter, _ in done if letter.copy_sequence is not None]
        failed: dict[int, Exception] = {}
        recorded: set[int] = set()
        for sequence, (answer,) in zip(begun, await map_concurrently(self._has_record, begun), strict=True):
            if isinstance(answer, Exception):
                failed[sequence] = answer
            elif answer:
                recorded.add(sequence)
        records = [record for _, record in done if record.sequence not in recorded and record.sequence not in failed]
        errors = await self._audit.write(records)
        failed |= {record.sequence: error for record, error in zip(records, errors, strict=True) if error}
        for letter, record in done:
            if error := failed.get(letter.sequence):
                why = f"it is {record.action}, but that couldn't be recorded ({error}); {RUN_AGAIN}"
                self._report.add_failure(letter.sequence, why)
        return [(letter, record) for letter, record in done if letter.sequence not in failed]

    async def _renew_origins(self, done: Sequence[_Done]) -> None:
        """Store the records of the tasks that published letters once more: their copies are younger than the records.

        Before the originals are removed, since nothing keeps the records then.
        """
        copies: dict[str, tuple[int, Origin | None]] = {}
        for letter, record in done:
            if record.action == "redriven" and (key := task_key_of(letter.headers)):
                last, origin = copies.get(key, (0, None))
                copies[key] = max(last, record.new_sequence or 0), origin or letter.origin
        if not copies or self._queue.events is None:
            return
        created = self._snapshot.created
        await renew_records(self._connection, self._queue.name, self._queue.events.name, created, copies)

    async def _has_record(self, sequence: int) -> tuple[bool | ApiError | TransientError]:
        # In a tuple, since an error that is a result by itself would be raised for all letters.
        try:
            record = await self._audit.last_record(sequence) if self._audit else None
        except (ApiError, TransientError) as error:
            return (error,)
        return (record is not None and record.action != "handled",)

    async def _remove_originals(self, done: Sequence[_Done]) -> list[_Done]:
        """Remove the original jobs; return the letters whose original is gone."""
        originals = {letter.sequence: letter.death.consumer for letter, _ in done if letter.source == BodySource.QUEUE}
        try:
            failed = await remove_originals(self._connection, self._queue.name, originals)
        except JetStreamProviderError as error:
            failed = dict.fromkeys(originals, error)
        for letter, record in done:
            if letter.sequence in failed:
                self._report.add_failure(letter.sequence, f"it is {record.action}, but {failed[letter.sequence]}")
        return [(letter, record) for letter, record in done if letter.sequence not in failed]

    async def _remove_entries(self, entries: Sequence[int]) -> None:
        info = self._snapshot.companions.get(self._dead_letter_queue)
        config = info["config"] if info else None
        self._report.entries_left += await remove_entries(self._connection, self._queue, entries, config)
