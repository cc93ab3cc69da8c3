"""The steps of a redrive, which leave a safe state whenever they are cut off.

For each letter, in this order: record the intent; store the new job; record it in the audit; remove the original;
remove the letter's entries from the dead letter queue. A redrive that is killed in between and run again finds how far
each letter came by its intent, the audit or the missing original. All letters of a batch go through a step
together.
"""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Final

from airflow_provider_jetstream.jetstream.audit.intent import Target
from airflow_provider_jetstream.jetstream.client.concurrency import map_concurrently
from airflow_provider_jetstream.jetstream.client.streams import Streams
from airflow_provider_jetstream.jetstream.contract import MSG_ID
from airflow_provider_jetstream.jetstream.dead_letters.letter import BodySource, task_key_of
from airflow_provider_jetstream.jetstream.dead_letters.status import ENDED, Status
from airflow_provider_jetstream.jetstream.errors import (
    ApiError,
    CopyTooLargeError,
    JetStreamProviderError,
    LeaseLostError,
    RedriveError,
    TransientError,
)
from airflow_provider_jetstream.jetstream.publishing.job import other_redrive_id
from airflow_provider_jetstream.jetstream.publishing.manifest_record import renew_manifests
from airflow_provider_jetstream.jetstream.queue.work_queue import require_dead_letters
from airflow_provider_jetstream.jetstream.redrive.copies import IdTaken, store_jobs, store_parked
from airflow_provider_jetstream.jetstream.redrive.letter_records import LetterRecords
from airflow_provider_jetstream.jetstream.redrive.protocol import RedriveTarget
from airflow_provider_jetstream.jetstream.redrive.redriven_job import (
    CopyLimit,
    CopyRoom,
    failure_text,
    parked_headers,
    redriven_job,
)
from airflow_provider_jetstream.jetstream.redrive.removal import RUN_AGAIN, remove_entries, remove_originals
from airflow_provider_jetstream.jetstream.redrive.repair import new_content

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence

    from airflow_provider_jetstream.jetstream.audit.intent import IntentLog, OpenIntent
    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.dead_letters.letter import DeadLetter
    from airflow_provider_jetstream.jetstream.dead_letters.status import NotDead
    from airflow_provider_jetstream.jetstream.origin import Origin
    from airflow_provider_jetstream.jetstream.queue.snapshot import QueueSnapshot
    from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue
    from airflow_provider_jetstream.jetstream.redrive.claims import Claims
    from airflow_provider_jetstream.jetstream.redrive.discard import Discards
    from airflow_provider_jetstream.jetstream.redrive.letter_records import Done
    from airflow_provider_jetstream.jetstream.redrive.redriven_job import RedrivenJob
    from airflow_provider_jetstream.jetstream.redrive.report import RedriveReport
    from airflow_provider_jetstream.jetstream.redrive.request import RedriveRequest

# Fewer letters wait for the batch before, and are finished before the next one begins.
LEAST_OVERLAPPED: Final = 50
# Finished entries are removed so many at once.
ENTRIES_AT_ONCE: Final = 2_000


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


class Steps:
    """Redrives, parks and cleans up letters that were just proved.

    :param queue: the work queue
    :param snapshot: its stream, companions and consumers
    :param request: what to do with the letters
    :param intents: records what is about to be stored
    :param report: what was done is added to it
    :param target: the queue that gets the new jobs; the letters' own where absent
    :param removes_entries: whether the entries of redriven letters are removed
    :param claims: the claims of the letters' entries, where handlers may get them
    :param rest_in_place: whether letters whose copies are too large are left for :attr:`without_room`
    :param unchanged: returns those of some entries that are still the ones that were read. With it, finished entries
        stay until they are many, or :meth:`remove_entries` is called. One that a redrive leaves because it is cut off
        does no harm: the audit says what was done to its letter
    :param discards: returns what builds the records of letters that are discarded, where letters are
    """

    def __init__(
        self,
        connection: Connection,
        queue: WorkQueue,
        snapshot: QueueSnapshot,
        request: RedriveRequest,
        intents: IntentLog,
        report: RedriveReport,
        *,
        target: RedriveTarget | None = None,
        removes_entries: bool = True,
        claims: Claims | None = None,
        rest_in_place: bool = False,
        unchanged: Callable[[Sequence[int]], Awaitable[Sequence[int]]] | None = None,
        discards: Callable[[LetterRecords], Discards] | None = None,
    ) -> None:
        self._connection = connection
        # Before any of the letters is proved.
        self._reconnects = connection.reconnects
        self._queue = queue
        self._snapshot = snapshot
        self._dead_letter_queue = snapshot.companions[require_dead_letters(queue).name]
        self._request = request
        self._target = target or RedriveTarget(queue, snapshot)
        self._check_subject = lru_cache(maxsize=256)(self._target.check_subject)
        config = self._target.snapshot.config
        self._limit = CopyLimit.of(connection, config)
        self._room = CopyRoom(connection, config, self._dead_letter_queue["config"])
        self._last_copy: int = self._target.snapshot.state["last_seq"]
        self._intents = intents
        self._audit = intents.audit
        self._report = report
        self._claims = claims
        self._rest_in_place = rest_in_place
        self._overlaps = False
        self._finishing: asyncio.Task[set[int]] | None = None
        self.records = LetterRecords(intents.audit, request)
        self._discards = discards(self.records) if discards else None
        self.without_room: dict[int, str] = {}
        # A handler would get entries that were claimed, so these don't stay.
        self._entries_at_once = ENTRIES_AT_ONCE if unchanged and claims is None else 1
        self._entries: list[int] = []
        self._removes_entries = removes_entries
        self._unchanged = unchanged
        # Without an archive nothing tells another publisher's job from the new one, once it is done. Two attempts of a
        # task of Spark store a new job once only under an id that both compute.
        self._has_hidden_ids = removes_entries and self._target.for_intent(0).archive is None
        # Letters of which an earlier redrive may have stored a new job, and why that isn't known.
        self.set_aside: Mapping[int, str] = {}

    async def redrive(self, letters: Sequence[DeadLetter]) -> None:
        """Redrive or discard letters, or park those that were redriven too often.

        :param letters: the letters in the order in which their jobs are to be stored
        """
        letters = self._without_set_aside(letters)
        # Whatever the request says now: a letter whose redrive was cut off has a new job, which may have run already.
        begun = [letter for letter in letters if letter.copy_sequence is not None]
        fresh = [letter for letter in letters if letter.copy_sequence is None]
        if self._discards:
            discarded, failed = await self._discards.records_of(fresh)
            for sequence, why in failed.items():
                self._report.add_failure(sequence, why)
            if begun or discarded:
                await self._redrive(begun, [], [], discarded)
            return
        to_park = [letter for letter in fresh if self._request.must_park(letter)]
        to_copy = [letter for letter in fresh if not self._request.must_park(letter)]
        jobs = [job for letter in to_copy if (job := await self._new_job(letter))]
        while begun or to_park or jobs:
            # What has no room now may have it once the originals of the others are removed.
            no_room = await self._room.for_copies(jobs)
            no_room |= await self._room.for_parked(
                to_park, {letter.sequence: self._why_parked(letter) for letter in to_park}
            )
            if no_room and self._finishing:
                await self.finish_stored()
                continue
            now = [*begun, *to_park, *(job.letter for job in jobs)]
            freed = any(letter.source == BodySource.QUEUE for letter in now if letter.sequence not in no_room)
            await self._redrive(
                begun,
                [letter for letter in to_park if letter.sequence not in no_room],
                [job for job in jobs if job.letter.sequence not in no_room],
            )
            if no_room:
                await self.finish_stored()
            begun, to_park = [], [letter for letter in to_park if letter.sequence in no_room]
            jobs = [job for job in jobs if job.letter.sequence in no_room]
            if not freed:
                for sequence, why in no_room.items():
                    self._report.add_failure(sequence, why)
                return

    async def repeat(self, letters: Sequence[DeadLetter], opened: Mapping[int, Sequence[OpenIntent]]) -> set[int]:
        """Store the new jobs of letters once more, while the server still drops a job that is stored already.

        :param opened: by stream sequence the intents to store them, under the last one's id
        :return: the stream sequences of those that are recorded
        """
        jobs = [
            replace(
                job.with_id(opened[letter.sequence][-1].message_id),
                after=min(begun.intent.target.last for begun in opened[letter.sequence]),
                begun=frozenset(begun.content for begun in opened[letter.sequence]),
            )
            for letter in letters
            if (job := await self._new_job(letter))
        ]
        return await self._redrive([], [], jobs) if jobs else set()

    def unfinished(self, letters: Sequence[DeadLetter]) -> list[int]:
        """Return the stream sequences of those letters whose jobs are stored although they may have new ones."""
        return [
            letter.sequence
            for letter in letters
            if letter.source == BodySource.QUEUE
            and (letter.copy_sequence is not None or letter.sequence in self.set_aside)
        ]

    def _without_set_aside(self, letters: Sequence[DeadLetter]) -> Sequence[DeadLetter]:
        named = self._request.selection.sequences or ()
        aside = {letter.sequence for letter in letters if letter.sequence in self.set_aside} - set(named)
        for sequence in aside:
            self._report.add_failure(sequence, self.set_aside[sequence])
        return [letter for letter in letters if letter.sequence not in aside] if aside else letters

    async def _redrive(
        self,
        begun: Sequence[DeadLetter],
        to_park: Sequence[DeadLetter],
        jobs: Sequence[RedrivenJob],
        discarded: Sequence[Done] = (),
    ) -> set[int]:
        """Redrive and park the letters for which there is room; return the sequences of the recorded letters.

        :param begun: letters whose new jobs are stored
        :param discarded: letters for which nothing is stored but their record
        """
        if len(jobs) < LEAST_OVERLAPPED or not self._overlaps:
            await self.finish_stored()
            return await self._finish(await self._store(begun, to_park, jobs, discarded))
        batch = await self._store(begun, to_park, jobs)
        await self.finish_stored()
        self._finishing = asyncio.create_task(self._finish(batch))
        return set()

    async def _store(
        self,
        begun: Sequence[DeadLetter],
        to_park: Sequence[DeadLetter],
        jobs: Sequence[RedrivenJob],
        discarded: Sequence[Done] = (),
    ) -> StoredBatch:
        """Record the intents of letters and store their new jobs or their parked records."""
        batch = StoredBatch(self._intents.begin_batch())
        if error := await self._record_intents(to_park, jobs):
            why = (
                f"nothing was stored, since {self._audit.stream} couldn't record what is about to be ({error}): see to"
                " it that it takes records, then run it again"
            )
            for letter in (*to_park, *(job.letter for job in jobs)):
                self._report.add_failure(letter.sequence, why)
            to_park, jobs = [], []
        await self._audit.require_lease()
        if self._claims:
            fresh = [*(job.letter for job in jobs), *(letter for letter, _ in discarded)]
            failed = await self._claims.take([*begun, *to_park, *fresh])
            for sequence, why in failed.items():
                self._report.add_failure(sequence, why)
            begun = [letter for letter in begun if letter.sequence not in failed]
            to_park = [letter for letter in to_park if letter.sequence not in failed]
            jobs = [job for job in jobs if job.letter.sequence not in failed]
            discarded = [done for done in discarded if done[0].sequence not in failed]
        batch.done += discarded
        batch.done += ((letter, self.records.of_begun(letter)) for letter in begun)
        batch.done += [done for done in await map_concurrently(partial(self._park, batch), to_park) if done]
        await self._copy(batch, jobs)
        return batch

    async def _finish(self, batch: StoredBatch) -> set[int]:
        """Record letters that are stored and remove what is left of them; return the sequences of those recorded."""
        recorded = await self._finish_stored(batch.done)
        if not batch.is_unknown and all(record.sequence in recorded for _, record in batch.done):
            self._intents.close(batch.intents)
        return recorded

    @asynccontextmanager
    async def overlapping(self) -> AsyncIterator[None]:
        """Store the new jobs of a batch while those of the one before are recorded and its originals removed.

        In this block :meth:`redrive` returns before the rest is done; :meth:`finish_stored` waits for it.
        """
        self._overlaps = True
        try:
            yield
            await self.finish_stored()
        finally:
            self._overlaps = False
            if self._finishing:
                # As where the process ends here.
                self._finishing.cancel()
                with suppress(asyncio.CancelledError, Exception):
                    await self._finishing
                self._finishing = None

    async def finish_stored(self) -> None:
        """Wait until what :meth:`redrive` has stored is recorded, and the originals are removed."""
        if self._finishing:
            await self._finishing
        self._finishing = None

    async def _record_intents(
        self, to_park: Sequence[DeadLetter], jobs: Sequence[RedrivenJob]
    ) -> ApiError | TransientError | None:
        """Record what is about to be stored; return why it isn't known to be recorded."""
        letters, target = self._dead_letter_queue, self._target.for_intent(self._last_copy)
        parked_in = Target(
            stream=letters["config"]["name"], created=letters["created"], last=letters["state"]["last_seq"]
        )
        try:
            of_jobs = [(job.letter.sequence, job.headers[MSG_ID], job.own_content) for job in jobs]
            await self._intents.begin("redriven", target, of_jobs)
            of_letters = [
                (letter.sequence, parked_headers(letter, self._why_parked(letter))[MSG_ID], "") for letter in to_park
            ]
            await self._intents.begin("parked", parked_in, of_letters)
        except LeaseLostError:
            raise
        except (ApiError, TransientError) as error:
            return error
        return None

    async def finish_begun(self, stored: Sequence[Done]) -> set[int]:
        """Do the same for letters that earlier redrives have stored; their jobs may have ended already."""
        self._report.resumed += len(recorded := await self._finish_stored(stored))
        return recorded

    async def clean_up(self, dismissed: Sequence[NotDead]) -> None:
        """Remove the entries of jobs that have ended, and jobs that are certainly done, or discarded, and still stored.

        :param dismissed: jobs that are no dead letters
        """
        entries: list[int] = []
        for job in dismissed:
            self._report.add_gone(job.sequence)
            if job.status in ENDED:
                entries += job.entries
        # The worker of such a job was stopped after it stored the completion and before it acknowledged the job; or a
        # handler of the dead letter queue has reported it. An acknowledged entry isn't enough: a purge looks alike.
        is_done = {Status.COMPLETED, Status.DISCARDED}
        done = {job.sequence: job for job in dismissed if job.stored and (job.status in is_done or job.reported)}
        if done:
            await self._audit.require_lease()
            await self._connection.wait_until_connected(self._connection.timeout)
            if self._connection.reconnects != self._reconnects:
                # A server that lost its power may have given their sequences to others: the next redrive finds out.
                return
            originals = {sequence: job.consumer for sequence, job in done.items()}
            failed = await remove_originals(self._connection, self._queue.name, originals)
            for sequence, error in failed.items():
                self._report.add_failure(sequence, f"it is {done[sequence].status.value}, but {error}")
        await self.add_entries(entries)

    async def _finish_stored(self, stored: Sequence[Done]) -> set[int]:
        """Record letters that are stored, and remove their originals and their entries.

        :param stored: letters with a new job, or parked ones
        :return: the stream sequences of those whose record is stored
        """
        if not stored:
            return set()
        failed = await self.records.write(stored)
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
            elif record.action == "discarded":
                self._report.add_discarded(letter.sequence)
                entries += left
            else:
                self._report.add_redriven(letter.sequence, record.new_sequence, record.new_stream)
                entries += left if self._removes_entries else ()
        await self.add_entries(entries)
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
        failed: dict[int, JetStreamProviderError] = {}
        try:
            await self._connection.wait_until_connected(self._connection.timeout)
            if self._connection.reconnects != self._reconnects:
                failed = await self._replaced([letter for letter, _ in done if letter.sequence in originals])
            kept = {sequence: consumer for sequence, consumer in originals.items() if sequence not in failed}
            failed |= await remove_originals(self._connection, self._queue.name, kept)
        except JetStreamProviderError as error:
            failed = dict.fromkeys(originals, error)
        for letter, record in done:
            if letter.sequence in failed:
                self._report.add_failure(letter.sequence, f"it is {record.action}, but {failed[letter.sequence]}")
        return [(letter, record) for letter, record in done if letter.sequence not in failed]

    async def _replaced(self, letters: Sequence[DeadLetter]) -> dict[int, JetStreamProviderError]:
        """Return why originals stay whose sequences other jobs have: an acknowledgement would end those.

        A server that has lost its power gives the sequences of what it has lost to the next jobs.
        """
        stored = await Streams(self._connection).get_many(
            self._queue.name, sorted(letter.sequence for letter in letters)
        )
        return {
            letter.sequence: RedriveError(
                f"{self._queue.name} stores another job as {letter.sequence}, as where the server has lost its power;"
                f" {RUN_AGAIN}"
            )
            for letter in letters
            if (message := stored[letter.sequence]) and message.time != letter.time
        }

    async def add_entries(self, entries: Sequence[int]) -> None:
        """Add finished entries, which are removed once they are many."""
        self._entries += entries
        if len(self._entries) >= self._entries_at_once:
            await self.remove_entries()

    async def remove_entries(self) -> None:
        """Remove finished entries that are still stored."""
        # Those of a letter that an earlier redrive stored may have been added twice.
        entries, self._entries = list(dict.fromkeys(self._entries)), []
        finished = await self._unchanged(entries) if self._unchanged else entries
        config = self._dead_letter_queue["config"]
        left = await remove_entries(self._connection, self._queue, finished, config)
        self._report.entries_left += left + len(entries) - len(finished)

    def _why_parked(self, letter: DeadLetter) -> str:
        if self._request.undo:
            return self._request.why or "brought back after it was discarded"
        return self._request.why or (f"dead again after {letter.redrives} redrives" if letter.redrives else "parked")

    async def _park(self, batch: StoredBatch, letter: DeadLetter) -> Done | None:
        name = self._dead_letter_queue["config"]["name"]
        try:
            entry = await store_parked(self._connection, letter, name, self._why_parked(letter))
        except (RedriveError, TransientError) as error:
            self._add_unstored(batch, letter, error)
            return None
        return letter, self.records.record(letter, "parked", new_sequence=entry, subject=letter.subject)

    async def _copy(self, batch: StoredBatch, jobs: Sequence[RedrivenJob]) -> None:
        answers = await self._store_jobs(jobs)
        refused = [job for job, answer in zip(jobs, answers, strict=True) if isinstance(answer, RedriveError)]
        if refused and self._finishing:
            # The stream may have room once the originals of the batch before are removed.
            await self.finish_stored()
            again = iter(await self._store_jobs(refused))
            answers = [next(again) if isinstance(answer, RedriveError) else answer for answer in answers]
        for job, sequence in zip(jobs, answers, strict=True):
            if isinstance(sequence, int):
                batch.done.append((job.letter, self.records.of_copy(job, sequence)))
                self._last_copy = max(self._last_copy, sequence)
            else:
                self._add_unstored(batch, job.letter, sequence)

    async def _store_jobs(self, jobs: Sequence[RedrivenJob]) -> list[int | JetStreamProviderError]:
        """Store new jobs. A job whose id somebody else has used gets another id, recorded as an intent first."""
        target = self._target.for_intent(self._last_copy)
        answers = await store_jobs(self._connection, jobs, target)
        if not any(isinstance(answer, IdTaken) for answer in answers):
            return [answer for answer in answers if not isinstance(answer, IdTaken)]
        taken = [
            job.with_id(other_redrive_id(job.headers[MSG_ID]))
            for job, answer in zip(jobs, answers, strict=True)
            if isinstance(answer, IdTaken)
        ]
        if error := await self._record_intents([], taken):
            return [error if isinstance(answer, IdTaken) else answer for answer in answers]
        await self._audit.require_lease()
        again = iter(await store_jobs(self._connection, taken, target))
        return [_known(next(again)) if isinstance(answer, IdTaken) else answer for answer in answers]

    def _add_unstored(self, batch: StoredBatch, letter: DeadLetter, error: JetStreamProviderError) -> None:
        batch.is_unknown |= isinstance(error, TransientError)
        self._report.add_failure(letter.sequence, str(error))

    async def _new_job(self, letter: DeadLetter) -> RedrivenJob | None:
        try:
            content = await new_content(letter, self._request.transform, self._request.body_patch)
            self._check_subject(content.subject, self._request.subject or letter.subject)
            job = redriven_job(letter, content, self._request.subject, self._limit)
            if self._has_hidden_ids:
                job = job.with_id(other_redrive_id(job.headers[MSG_ID]))
            return replace(job, after=self._last_copy)
        except CopyTooLargeError as error:
            if self._rest_in_place:
                self.without_room[letter.sequence] = str(error)
            else:
                self._report.add_failure(letter.sequence, str(error))
        except RedriveError as error:
            self._report.add_failure(letter.sequence, failure_text(letter, error))
        return None


def _known(answer: int | IdTaken | JetStreamProviderError) -> int | JetStreamProviderError:
    if isinstance(answer, IdTaken):
        return RedriveError(f"message {answer.sequence} has the id of a new job, which was just made: original kept")
    return answer
