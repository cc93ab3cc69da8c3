"""The manifest: what one task has published, stored in the events stream.

The server forgets message ids after the stream's ``duplicate_window``, which Airflow's default ``retry_delay`` exceeds.
The head of a manifest is stored before a task publishes, again as publishing goes on, and afterwards. It is closed once
the task has nothing more to do: then a task that is cleared publishes new jobs, while a retry publishes only what isn't
stored.
"""

from __future__ import annotations

import time
from array import array
from contextlib import suppress
from dataclasses import replace
from secrets import token_urlsafe
from typing import TYPE_CHECKING, Any, Final
from uuid import uuid4

from airflow_provider_jetstream.jetstream.client.concurrency import map_concurrently
from airflow_provider_jetstream.jetstream.client.stream_api import stream_info
from airflow_provider_jetstream.jetstream.client.subjects import covered_by_any
from airflow_provider_jetstream.jetstream.contract import manifest_filter
from airflow_provider_jetstream.jetstream.errors import ApiError, NotFoundError, TransientError
from airflow_provider_jetstream.jetstream.origin import TaskTry, digest_of
from airflow_provider_jetstream.jetstream.publishing.advisory_pages import AdvisoryPages
from airflow_provider_jetstream.jetstream.publishing.manifest_head import (
    ManifestHead,
    following_head,
    new_head,
    published_head,
    resumed_head,
)
from airflow_provider_jetstream.jetstream.publishing.manifest_reading import read_stored_jobs
from airflow_provider_jetstream.jetstream.publishing.manifest_removal import remove_unneeded_manifests
from airflow_provider_jetstream.jetstream.publishing.manifest_rows import UNVERIFIED, ManifestRows
from airflow_provider_jetstream.jetstream.publishing.manifest_store import CONFLICTS, ManifestStore, StoredHead
from airflow_provider_jetstream.jetstream.publishing.report import SCHEDULED, index_runs
from airflow_provider_jetstream.jetstream.publishing.stored_jobs import StoredJobs

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence
    from datetime import datetime

    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.origin import Origin
    from airflow_provider_jetstream.jetstream.publishing.job import OutgoingJob
    from airflow_provider_jetstream.jetstream.publishing.outgoing_run import OutgoingRun
    from airflow_provider_jetstream.jetstream.publishing.report import PublishReport
    from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue

# For the page: many publishers at once scatter a task's jobs over more runs than a record should hold.
_MAX_RUNS = 5_000
# Seconds after which the jobs of a slow source are recorded, though they fill no page.
_SAVE_INTERVAL = 10.0
# Most tasks spare the request for records that nothing needs any more; the others examine as many as these leave.
_REMOVAL_INTERVAL = 32

# How many other runs of one name a manifest can name.
_MAX_FURTHER_RUNS: Final = 8
# What :meth:`TaskTry.follows` returns at least for a try of the same run; less after a clear.
_SAME_START: Final = 2

_WRONG_STREAM: Final = 10060


class Manifest:
    """The manifest of one task.

    :param origin: the task; all its tries have the same manifest
    :param key: the key of the manifest, one token, where it isn't the task's; ``origin.manifest_key`` for one that all
        runs with the idempotency key of the task have, or of one of its calls
    """

    def __init__(self, connection: Connection, queue: WorkQueue, origin: Origin, key: str | None = None) -> None:
        self._connection = connection
        self._queue = queue
        self._origin = origin
        self._key = key or origin.key
        # That of the first run of this name; another run of the same name has one of its own.
        self._first_key = self._key
        has_own_key = self._key == origin.manifest_key != origin.key
        self._idempotency_key = origin.idempotency_key if has_own_key else None
        self._operation = origin.operation if has_own_key else None
        self._records = ManifestStore(connection, queue.name, queue.events.name) if queue.events else None
        self._rows = ManifestRows(connection, queue, self._key)
        self._known = StoredJobs()
        self._stored: StoredHead | None = None
        self._begun: ManifestHead | None = None
        self._opened = False
        self._is_of_other_runs = False
        self._takes_extra = False
        # The first sequence of the queue that a job of the manifest may have which isn't in it.
        self.unrecorded_from = 1
        self._save_at = time.monotonic() + _SAVE_INTERVAL

    @property
    def position(self) -> int:
        """The sequence in the events stream of what was stored last; 1 where nothing was."""
        return self._stored.sequence if self._stored else 1

    async def begin(
        self,
        info: Mapping[str, Any],
        cursor: Mapping[str, Any] | None = None,
        *,
        have_ended: Callable[[ManifestHead], Awaitable[bool]] | None = None,
    ) -> tuple[ManifestHead, StoredJobs] | None:
        """Store the head for a task that begins to publish, or read the one of an earlier try.

        :param info: the work queue's STREAM.INFO, read before anything is published
        :param cursor: where the ends of jobs that are published from now on will be found
        :param have_ended: returns whether all jobs of a manifest have ended for which waiting is over
        :return: the head and the jobs that are stored already; ``None`` where the events stream captures no such
            records
        """
        if self._records is None:
            return None
        record = new_head(self._queue.name, info, self._origin, cursor).model_copy(
            update={"idempotency_key": self._idempotency_key, "operation": self._operation}
        )
        try:
            # Most tasks are first tries: this condition saves them the request for an earlier record.
            self._stored = await self._records.store(self._key, record, after=0)
        except (ApiError, TransientError) as error:
            if not await self._has_record(error):
                return None
        else:
            self._begun = record
            self.unrecorded_from = record.queue_from
            return record, self._known
        record, stored = await self._own_record(self._records, record)
        earlier_head: ManifestHead | None = None
        ended_at = await self._ended_at(record, stored.record if stored else None, have_ended)

        def next_round(earlier: ManifestHead | None) -> ManifestHead | None:
            nonlocal earlier_head
            if earlier is None:
                return record
            if earlier.created == record.created and self._continues(earlier, has_ended=ended_at == earlier.began_at):
                earlier_head = earlier
                self._is_of_other_runs = self._idempotency_key is not None and earlier.closed
                return resumed_head(earlier, record)
            return following_head(record, earlier, number=earlier.round + 1)

        self._stored = await self._records.update(self._key, next_round, stored)
        self._begun = begun = self._stored.record if self._stored else record
        self.unrecorded_from = record.queue_from
        if earlier_head is not None:
            # Runs of one idempotency key may publish at the same time.
            is_shared = self._idempotency_key is not None
            first = earlier_head.queue_from if is_shared else earlier_head.unrecorded_from
            self.unrecorded_from = min(record.queue_from, first or record.queue_from)
            self._known = await read_stored_jobs(
                self._connection, self._queue, self._key, self._origin, earlier_head, self._rows
            )
            if earlier_head.max_tries != record.max_tries:
                self._known.forget_unverified()
        return begun, self._known

    async def _own_record(self, records: ManifestStore, record: ManifestHead) -> tuple[ManifestHead, StoredHead | None]:
        """Return the head that this try would store first, and the manifest of its run, where it is stored."""
        stored, is_own = await self._find_own(records, record.created)
        if is_own:
            return record.model_copy(update={"is_further_run": self._origin.is_further_run}), stored
        return await self._begin_further_run(records, record, stored), None

    async def _find_own(self, records: ManifestStore, created: str | None = None) -> tuple[StoredHead | None, bool]:
        """Find the manifest of the run among those of all runs of its name.

        :param created: when the queue's stream was created; manifests about an earlier one are anybody's
        :return: the manifest, and true; or that of the first run, and false where none is the run's
        """
        first = await records.read(self._first_key)
        attempt, earlier = self._origin.attempt, first.record.attempt if first else None
        if first is None or attempt is None or earlier is None or self._idempotency_key is not None:
            return first, True
        if created not in (None, first.record.created):
            return first, True
        found = [first]
        if self._is_followed(first.record) < _SAME_START:
            runs = [replace(self._origin, run=run, is_further_run=True) for run in first.record.further_runs]
            heads = await map_concurrently(lambda origin: records.read(origin.manifest_key), runs)
            found += [head for head in heads if head and head.record.created == first.record.created]

        def likelihood(head: StoredHead) -> tuple[int, bool, int, datetime]:
            noted = head.record.attempt or TaskTry()
            is_same_version = noted.dag_version is not None and noted.dag_version == attempt.dag_version
            return self._is_followed(head.record), is_same_version, noted.number or 0, head.record.began_at

        likeliest = max(found, key=likelihood)
        if not self._is_followed(likeliest.record):
            return first, False
        if likeliest is not first:
            self._become_further_run(likeliest.record.run or "")
        return likeliest, True

    def _is_followed(self, earlier: ManifestHead) -> int:
        """Return how surely a manifest is one that this try goes on with."""
        if self._origin.attempt is None or earlier.attempt is None:
            return _SAME_START
        tries, earlier_tries = self._origin.max_tries, earlier.max_tries
        raised_tries = tries is not None and earlier_tries is not None and tries > earlier_tries
        return self._origin.attempt.follows(earlier.attempt, raised_tries=raised_tries)

    async def _begin_further_run(
        self, records: ManifestStore, record: ManifestHead, first: StoredHead | None
    ) -> ManifestHead:
        """Note in the manifest of the first run that another run of its name has one of its own."""
        mark, attempt = record.run, self._origin.attempt
        runs = [first.record.run, *first.record.further_runs] if first else []
        if mark is None or mark in runs:
            # ``dag.test()`` gives a run that is made again the same start.
            mark = f"{mark or ''}/{attempt.try_id if attempt and attempt.try_id else uuid4().hex}"

        def noted(stored: ManifestHead | None) -> ManifestHead | None:
            if stored is None or mark in stored.further_runs:
                return None
            return stored.model_copy(update={"further_runs": [*stored.further_runs, mark][-_MAX_FURTHER_RUNS:]})

        await records.update(self._first_key, noted, first)
        self._become_further_run(mark)
        return record.model_copy(update={"run": mark, "is_further_run": True})

    def _become_further_run(self, mark: str) -> None:
        self._origin = replace(self._origin, run=mark, is_further_run=True)
        self._key = self._origin.manifest_key
        self._rows = ManifestRows(self._connection, self._queue, self._key)

    async def _ended_at(
        self,
        record: ManifestHead,
        earlier: ManifestHead | None,
        have_ended: Callable[[ManifestHead], Awaitable[bool]] | None,
    ) -> datetime | None:
        """Return when the round began whose jobs have all ended by now, though its waiting was over before."""
        if earlier is None or have_ended is None or not earlier.over or earlier.created != record.created:
            return None
        return earlier.began_at if await have_ended(earlier) else None

    def _continues(self, earlier: ManifestHead, *, has_ended: bool) -> bool:
        """Return whether a try goes on with the jobs of an earlier one; otherwise the task was cleared."""
        if self._idempotency_key is not None:
            return True
        if self._origin.max_tries is not None and earlier.max_tries == self._origin.max_tries:
            return True
        return not (earlier.closed or has_ended)

    def are_new(self, first: int, run: OutgoingRun) -> bool:
        """Note a run that is about to be sent; return ``False``, with nothing noted, where one may be stored."""
        return self._known.is_empty and self._rows.note_run(first, run)

    def sequence_of(self, index: int, job: OutgoingJob) -> int | None:
        """Return the stream sequence of a job that is about to be sent; ``None`` where it isn't known to be stored.

        :raises JobError: its given id is stored with another body
        """
        sequence = self._known.sequence_of(index, job)
        if not self._known.is_recorded(job):
            self._rows.note(index, job)
        return sequence

    def unverified(self, job: OutgoingJob) -> int | None:
        """Return the sequence of the message of which it isn't known whether it was a job; ``None`` without any."""
        return self._known.unverified(job)

    def note(self, index: int, job: OutgoingJob) -> None:
        """Note a job that is stored, though it wasn't sent."""
        self._rows.note(index, job)

    def note_unverified(self, job: OutgoingJob, sequence: int) -> None:
        """Note that it isn't known whether a job was the message that has its message id, so that no try sends it."""
        if digest := digest_of(job.message_id):
            self._rows.add(digest, job.key.body_digest, sequence | UNVERIFIED | (SCHEDULED if job.scheduled else 0))

    @property
    def salts(self) -> Sequence[str]:
        """What makes other message ids of jobs whose own ids somebody else has taken, the latest last."""
        return self._begun.salts if self._begun else ()

    async def add_salt(self) -> str:
        """Note what makes other message ids from now on, so that a later try finds jobs under them.

        :raises JetStreamProviderError: it isn't known to be noted
        """
        salt, last_seen = token_urlsafe(16), self._stored.record if self._stored else self._begun
        if self._records is None or self._begun is None or last_seen is None:
            raise TransientError("expected a manifest that notes other message ids, found none")

        def with_salt(stored: ManifestHead | None) -> ManifestHead | None:
            head = stored or last_seen
            is_known = self._is_of_later_round(stored) or salt in head.salts
            return None if is_known else head.model_copy(update={"salts": [*head.salts, salt]})

        self._stored = await self._records.update(self._key, with_salt, self._stored)
        if self._stored is None or salt not in self._stored.record.salts:
            raise TransientError("the task was cleared while this try of it went on: it publishes nothing more")
        self._begun = self._begun.model_copy(update={"salts": self._stored.record.salts})
        return salt

    @property
    def is_due(self) -> bool:
        """Whether the stored jobs may fill a page, or none were recorded for long."""
        return self._rows.may_fill_page or time.monotonic() >= self._save_at

    async def save_progress(self, report: PublishReport) -> None:
        """Record the jobs that are stored by now, where they fill a page, or none were recorded for long."""
        is_due = time.monotonic() >= self._save_at
        if not self._records or not self._stored or not self.is_due:
            return
        last_seen = self._stored.record

        def with_rows(stored: ManifestHead | None) -> ManifestHead | None:
            return None if self._is_of_later_round(stored) else self._rows.recorded(stored or last_seen)

        with suppress(ApiError, TransientError):
            if await self._rows.take(report, only_full=not is_due) or is_due:
                self._save_at = time.monotonic() + _SAVE_INTERVAL
                self._stored = await self._records.update(self._key, with_rows, self._stored)
                await self._remove_older(self._records)
            return
        # The server is away: what is stored meanwhile is recorded later.
        self._save_at = time.monotonic() + _SAVE_INTERVAL
        self._rows.postpone()

    def extra(self) -> array[int]:
        """Return the sequences of jobs that an earlier try has stored and that :meth:`sequence_of` wasn't asked for.

        What other runs with the task's idempotency key have published isn't this run's, and schedules aren't in the
        queue.
        """
        if self._is_of_other_runs:
            return array("Q")
        extra = self._known.extra()
        for digest, body_digest, sequence in self._known.not_listed():
            if sequence < SCHEDULED:
                extra.append(sequence)
            if not self._takes_extra:
                self._rows.add(digest, body_digest, sequence)
        self._takes_extra = True
        return extra

    async def record_stored(self, report: PublishReport) -> None:
        """Record which jobs are stored; needs :meth:`begin` first."""
        if not self._records or not self._stored:
            return
        await self._rows.take(report)
        last_seen = self._stored.record

        def with_jobs(stored: ManifestHead | None) -> ManifestHead | None:
            if self._is_of_later_round(stored):
                return None
            return self._recorded(stored or last_seen, report)

        self._stored = await self._records.update(self._key, with_jobs, self._stored)

    async def close(self, report: PublishReport | None = None) -> None:
        """Record that the task has nothing more to do, and remove records that nothing needs any more.

        :param report: the fate of its jobs, where :meth:`record_stored` hasn't recorded it
        """
        await self._conclude_waiting({"closed": True, "over": False}, report)

    async def mark_over(self) -> None:
        """Record that waiting is over for good although jobs may still run: a clear waits for them again."""
        await self._conclude_waiting({"over": True})

    async def _conclude_waiting(self, state: Mapping[str, bool], report: PublishReport | None = None) -> None:
        if self._records is None or not await self._has_own(self._records):
            return
        last_seen = self._stored.record if self._stored else None
        if report:
            await self._rows.take(report)
        # Before the record is closed, since a task that is killed after that would publish all its jobs again.
        await self._remove_unneeded_records()

        def concluded(stored: ManifestHead | None) -> ManifestHead | None:
            record = stored or last_seen
            if record is None or record.closed or self._is_of_later_round(stored):
                return None
            if report is not None:
                record = self._recorded(record, report)
            elif state.get("closed") and record.runs is None:
                # Without runs, which jobs the task has isn't known.
                record = record.model_copy(update={"last_job": None})
            return record.model_copy(update={**state, **({"runs": None} if state.get("closed") else {})})

        self._stored = await self._records.update(self._key, concluded, self._stored)
        if self._queue.advisory_subjects and state.get("closed"):
            await AdvisoryPages(self._connection, self._queue, self._key).remove()
        await self._remove_older(self._records)

    async def _has_own(self, records: ManifestStore) -> bool:
        """Find the manifest of the run unless this object has begun it; return whether it isn't another run's."""
        if self._stored:
            return True
        self._stored, is_own = await self._find_own(records)
        return is_own

    def _recorded(self, head: ManifestHead, report: PublishReport) -> ManifestHead:
        """Return a head with what a call has published."""
        runs = index_runs(report.queue_sequences())
        is_known = all(failure.certain for failure in report.failures)
        # A try that Airflow has given up goes on beside the one that has begun since.
        is_latest = self._begun is not None and head.begun_by == self._begun.begun_by
        stored = report.job_count
        count = len(self._known) + self._rows.added if self._idempotency_key is not None else stored
        outcome = {"runs": runs if len(runs) <= min(_MAX_RUNS, self._rows.max_runs) else None, "published": count}
        recorded = self._rows.recorded(published_head(head, report))
        has_all = self._takes_extra or next(self._known.not_listed(), None) is None
        is_complete = is_known and is_latest and has_all and not self._rows.overflows
        complete = {"unrecorded_from": None} if is_complete else {}
        return recorded.model_copy(update={**outcome, **complete})

    def _is_of_later_round(self, stored: ManifestHead | None) -> bool:
        """Return whether the task was cleared while this try, which Airflow has given up, went on."""
        begun = self._begun
        return bool(stored and begun and (stored.created, stored.round) != (begun.created, begun.round))

    async def announce(self, info: Mapping[str, Any]) -> bool:
        """Store the record of a task whose tries don't resume each other, before it publishes.

        :param info: the work queue's STREAM.INFO, read before anything is published
        :return: whether a record names the task now
        """
        if self._records is None:
            return False
        record = new_head(self._queue.name, info, self._origin)
        try:
            self._stored = await self._records.store(self._key, record, after=0)
        except (ApiError, TransientError) as error:
            if not await self._has_record(error):
                return False
        else:
            self._opened = True
            return True

        def reopened(earlier: ManifestHead | None) -> ManifestHead | None:
            if earlier is None:
                self._opened = True
                return record
            is_manifest = bool(earlier.rows or earlier.pages) and earlier.created == record.created
            # An open one belongs to an operator of the same task, a closed one with jobs to another call.
            self._opened = earlier.closed and not is_manifest
            if earlier.closed and is_manifest:
                return earlier.model_copy(update={"last_job": None})
            return following_head(record, earlier, number=earlier.round) if earlier.closed else None

        self._stored = await self._records.update(self._key, reopened)
        return self._stored is not None

    async def conclude(self, report: PublishReport) -> None:
        """Record what a task has published after :meth:`announce`."""
        if not self._records or not self._stored:
            return
        closed = {"closed": True, "published": report.job_count} if self._opened else {}
        last_seen = self._stored.record

        def concluded(stored: ManifestHead | None) -> ManifestHead:
            return published_head(stored or last_seen, report).model_copy(update=closed)

        self._stored = await self._records.update(self._key, concluded, self._stored)
        await self._remove_older(self._records)
        await self._remove_unneeded_records()

    async def _remove_older(self, records: ManifestStore) -> None:
        with suppress(ApiError, TransientError):
            if self._stored:
                await records.remove_older(self._key, self._stored.sequence)

    async def _remove_unneeded_records(self) -> None:
        if self._stored and self._stored.sequence % _REMOVAL_INTERVAL == 0:
            with suppress(ApiError, TransientError):
                await remove_unneeded_manifests(self._connection, self._queue)

    async def _has_record(self, error: ApiError | TransientError) -> bool:
        """Return whether a record couldn't be stored since the task has one already.

        :return: ``False`` where no events stream captures such records
        :raises ApiError: it couldn't be stored for another reason
        :raises TransientError: it isn't known whether it is stored
        """
        if isinstance(error, ApiError):
            if error.err_code not in {*CONFLICTS, _WRONG_STREAM}:
                raise error
            return error.err_code in CONFLICTS
        if await self._is_captured():
            raise error
        return False

    async def _is_captured(self) -> bool:
        try:
            events = self._queue.events.name if self._queue.events else ""
            subjects = (await stream_info(self._connection, events))["config"].get("subjects") or []
        except NotFoundError:
            return False
        return covered_by_any(subjects, manifest_filter(self._queue.name))
