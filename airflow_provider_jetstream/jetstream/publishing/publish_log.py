"""The publish log: one record per task of what it has published, stored in the events stream.

The server forgets message ids after the stream's ``duplicate_window``, which Airflow's default ``retry_delay`` exceeds.
A record is stored before a task publishes and again afterwards. It is closed once the task has nothing more to do:
then a task that is cleared publishes new jobs, while a retry of an open one publishes only what isn't stored.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final

from airflow_provider_jetstream.jetstream.client.stream_api import stream_info
from airflow_provider_jetstream.jetstream.client.subjects import covered_by_any
from airflow_provider_jetstream.jetstream.contract import publish_log_filter
from airflow_provider_jetstream.jetstream.errors import ApiError, NotFoundError, TransientError
from airflow_provider_jetstream.jetstream.publishing.advisory_pages import AdvisoryPages
from airflow_provider_jetstream.jetstream.publishing.publish_record import (
    ID_LENGTH,
    PublishRecord,
    following_record,
    identified_record,
    named_record,
    new_record,
    published_record,
)
from airflow_provider_jetstream.jetstream.publishing.record_removal import remove_unneeded_records
from airflow_provider_jetstream.jetstream.publishing.record_store import CONFLICTS, RecordStore, StoredRecord
from airflow_provider_jetstream.jetstream.publishing.report import index_runs
from airflow_provider_jetstream.jetstream.publishing.stored_jobs import StoredJobs, find_stored_jobs

if TYPE_CHECKING:
    from collections.abc import Mapping

    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.origin import Origin
    from airflow_provider_jetstream.jetstream.publishing.report import PublishReport
    from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue

# Many publishers at once scatter a task's jobs over more runs than a record should hold; a retry searches for them.
_MAX_RUNS = 5_000
# Of a record with an idempotency key: what it holds of the jobs' ids, and room for the rest of it.
_MAX_IDS = 60_000
_RECORD_RESERVE = 256 * 1024
# Most tasks spare the request for records that nothing needs any more; the others examine as many as these leave.
_REMOVAL_INTERVAL = 32

_WRONG_STREAM: Final = 10060


class PublishLog:
    """The publish log of one task.

    :param origin: the task; all its tries have the same log
    :param key: the key of the log, one token, where it isn't the task's; ``origin.log_key`` for one that all runs with
        the idempotency key of the task have
    """

    def __init__(self, connection: Connection, queue: WorkQueue, origin: Origin, key: str | None = None) -> None:
        self._connection = connection
        self._queue = queue
        self._origin = origin
        self._key = key or origin.key
        self._idempotency_key = origin.idempotency_key if self._key == origin.log_key != origin.key else None
        self._records = RecordStore(connection, queue.name, queue.events.name) if queue.events else None
        self._stored: StoredRecord | None = None
        self._begun: PublishRecord | None = None
        self._opened = False

    async def begin(
        self, info: Mapping[str, Any], cursor: Mapping[str, Any] | None = None
    ) -> tuple[PublishRecord, StoredJobs] | None:
        """Store the record of a task that begins to publish, or read the one of an earlier try.

        :param info: the work queue's STREAM.INFO, read before anything is published
        :param cursor: where the ends of jobs that are published from now on will be found
        :return: the record and the jobs that are stored already; ``None`` where the events stream captures no such
            records
        """
        if self._records is None:
            return None
        record = new_record(self._queue.name, info, self._origin, cursor).model_copy(
            update={"idempotency_key": self._idempotency_key}
        )
        try:
            # Most tasks are first tries: this condition saves them the request for an earlier record.
            self._stored = await self._records.store(self._key, record, after=0)
        except (ApiError, TransientError) as error:
            if not await self._has_record(error):
                return None
        else:
            self._begun = record
            return record, StoredJobs()

        def next_round(earlier: PublishRecord | None) -> PublishRecord | None:
            if earlier is None:
                return record
            if earlier.created == record.created and self._idempotency_key is not None:
                # Open while the run publishes what others haven't, since it may be cut off too. Jobs that aren't
                # recorded are its own then, unless there were too many.
                own = {"began_at": record.began_at, "queue_from": record.queue_from} if earlier.names_all_jobs else {}
                return earlier.model_copy(update={"closed": False, **own}) if earlier.closed else None
            if earlier.created == record.created and not earlier.closed:
                return None if earlier.origin else named_record(earlier, self._origin)
            return following_record(record, earlier, number=earlier.round + 1)

        self._stored = await self._records.update(self._key, next_round)
        self._begun = begun = self._stored.record if self._stored else record
        return begun, await self._stored_jobs(begun, resumed=begun.began_at != record.began_at)

    async def record_stored(self, report: PublishReport) -> None:
        """Record which jobs are stored; needs :meth:`begin` first."""
        if not self._records or not self._stored:
            return
        runs = index_runs(report.sequences)
        known = {"runs": runs if len(runs) <= _MAX_RUNS else None, "published": _job_count(report)}
        last_seen = self._stored.record

        def with_jobs(stored: PublishRecord | None) -> PublishRecord | None:
            if self._is_of_later_round(stored):
                return None
            published = published_record(stored or last_seen, report)
            return self._identified(published, report) or published.model_copy(update=known)

        self._stored = await self._records.update(self._key, with_jobs, self._stored)

    async def close(self, report: PublishReport | None = None) -> None:
        """Record that the task has nothing more to do, and remove records that nothing needs any more.

        :param report: the fate of its jobs, where :meth:`record_stored` hasn't recorded it
        """
        if self._records is None:
            return
        self._stored = self._stored or await self._records.read(self._key)
        last_seen = self._stored.record if self._stored else None
        # Before the record is closed, since a task that is killed after that would publish all its jobs again.
        await self._remove_unneeded_records()

        def closed(stored: PublishRecord | None) -> PublishRecord | None:
            record = stored or last_seen
            if record is None or record.closed or self._is_of_later_round(stored):
                return None
            if record.origin is None:
                record = named_record(record, self._origin)
            known: dict[str, Any] = {"closed": True, "runs": None}
            if self._idempotency_key is not None:
                # The jobs stay recorded, for other runs.
                identified = self._identified(published_record(record, report), report) if report else None
                return (identified or record).model_copy(update={"closed": True})
            if report is None:
                # Without runs, which jobs the task has isn't known.
                return record.model_copy(update=known if record.runs is not None else known | {"last_job": None})
            return published_record(record, report).model_copy(update=known | {"published": _job_count(report)})

        self._stored = await self._records.update(self._key, closed, self._stored)
        if self._queue.advisory_subjects:
            await AdvisoryPages(self._connection, self._queue, self._key).remove()
        await self._remove_older(self._records)

    def _is_of_later_round(self, stored: PublishRecord | None) -> bool:
        """Return whether the task was cleared while this try, which Airflow has given up, went on."""
        begun = self._begun
        return bool(stored and begun and (stored.created, stored.round) != (begun.created, begun.round))

    def _identified(self, record: PublishRecord, report: PublishReport) -> PublishRecord | None:
        if self._idempotency_key is None:
            return None
        room = max(0, (self._connection.max_payload - _RECORD_RESERVE) // (ID_LENGTH + 1))
        return identified_record(record, report, max_ids=min(_MAX_IDS, room), max_runs=_MAX_RUNS)

    async def announce(self, info: Mapping[str, Any]) -> bool:
        """Store the record of a task whose tries don't resume each other, before it publishes.

        :param info: the work queue's STREAM.INFO, read before anything is published
        :return: whether a record names the task now
        """
        if self._records is None:
            return False
        record = new_record(self._queue.name, info, self._origin)
        try:
            self._stored = await self._records.store(self._key, record, after=0)
        except (ApiError, TransientError) as error:
            if not await self._has_record(error):
                return False
        else:
            self._opened = True
            return True

        def reopened(earlier: PublishRecord | None) -> PublishRecord | None:
            # An open one belongs to an operator that publishes as the same task.
            self._opened = earlier is None or earlier.closed
            if earlier is None:
                return record
            return following_record(record, earlier, number=earlier.round) if earlier.closed else None

        self._stored = await self._records.update(self._key, reopened)
        return self._stored is not None

    async def conclude(self, report: PublishReport) -> None:
        """Record what a task has published after :meth:`announce`."""
        if not self._records or not self._stored:
            return
        closed = {"closed": True, "published": _job_count(report)} if self._opened else {}
        last_seen = self._stored.record

        def concluded(stored: PublishRecord | None) -> PublishRecord:
            return published_record(stored or last_seen, report).model_copy(update=closed)

        self._stored = await self._records.update(self._key, concluded, self._stored)
        await self._remove_older(self._records)
        await self._remove_unneeded_records()

    async def _remove_older(self, records: RecordStore) -> None:
        with suppress(ApiError, TransientError):
            await records.remove_older(self._key)

    async def _remove_unneeded_records(self) -> None:
        if self._stored and self._stored.sequence % _REMOVAL_INTERVAL == 0:
            with suppress(ApiError, TransientError):
                await remove_unneeded_records(self._connection, self._queue)

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
        return covered_by_any(subjects, publish_log_filter(self._queue.name))

    async def _stored_jobs(self, record: PublishRecord, *, resumed: bool) -> StoredJobs:
        """Return which jobs are stored.

        :param resumed: whether an earlier try may have stored jobs that the record doesn't have
        """
        recorded = record.recorded_jobs()
        if not resumed:
            return StoredJobs(recorded=recorded)
        if record.runs is not None and self._idempotency_key is None:
            return StoredJobs(runs=tuple(record.runs))
        # Also within the duplicate window: a server that was restarted has forgotten the ids of jobs that are done.
        found = await find_stored_jobs(
            self._connection,
            self._queue,
            created=datetime.fromisoformat(record.created),
            queue_from=record.queue_from,
            events_from=record.position("events_from") or 1,
            # Earlier versions gave jobs other ids.
            origin=replace(self._origin, round=record.round) if record.is_of_earlier_version else None,
        )
        return replace(found, recorded=recorded)


def _job_count(report: PublishReport) -> int:
    return sum(1 for sequence in report.sequences if sequence)
