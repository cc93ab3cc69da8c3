"""What the audit and the stored ends know of a letter and of a redrive's jobs, read when somebody looks."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

from airflow_provider_jetstream.jetstream.audit.log import AuditLog
from airflow_provider_jetstream.jetstream.audit.redrives import RedriveOutcomes
from airflow_provider_jetstream.jetstream.client.stream_api import stream_info
from airflow_provider_jetstream.jetstream.client.streams import first_since as first_sequence_since
from airflow_provider_jetstream.jetstream.dead_letters.facts import resolve_origins
from airflow_provider_jetstream.jetstream.dead_letters.letter import DeadLetter, copied_from, origin_of, task_key_of
from airflow_provider_jetstream.jetstream.dead_letters.status import Status
from airflow_provider_jetstream.jetstream.errors import JetStreamProviderError
from airflow_provider_jetstream.jetstream.waiting.comparison import read_jobs
from airflow_provider_jetstream.jetstream.waiting.cursor import take_cursor
from airflow_provider_jetstream.jetstream.waiting.follower import shared_follower
from airflow_provider_jetstream.jetstream.waiting.policy import WaitPolicy
from airflow_provider_jetstream.jetstream.waiting.report import WaitReport
from airflow_provider_jetstream.jetstream.waiting.wait import wait

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from airflow_provider_jetstream.jetstream.audit.records import LetterRecord
    from airflow_provider_jetstream.jetstream.audit.redrives import Redrive
    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.client.message import StoredMessage
    from airflow_provider_jetstream.jetstream.dead_letters.scan import Scan
    from airflow_provider_jetstream.jetstream.dead_letters.status import NotDead
    from airflow_provider_jetstream.jetstream.origin import Origin
    from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue


# Redrives of one job in either direction; a queue that parks letters has far fewer.
_MOST = 20


@dataclass(slots=True)
class LetterHistory:
    """The audit records about a letter and its relatives.

    :param sequence: the letter's
    :param own: about the letter itself, oldest first
    :param records: about it, the letters that it was redriven from and the jobs that it became, oldest first
    :param outcome: what is known now of the last job that it became, or of itself, a sentence
    :param job: the letter's job as the archive has it, where it is a letter no more
    :param origin: the task that published it, where that is known
    """

    sequence: int
    own: list[LetterRecord] = field(default_factory=list)
    records: list[LetterRecord] = field(default_factory=list)
    outcome: str | None = None
    job: StoredMessage | None = None
    origin: Origin | None = None

    def leave_out_unseen(self, sees: Callable[[str], bool]) -> None:
        """Leave out who acted, and why, where that names a DAG that the user may not see.

        :param sees: whether the user may see a DAG; it may block
        """
        self.own = [_without_unseen(record, sees) for record in self.own]
        self.records = [_without_unseen(record, sees) for record in self.records]


async def read_history(scan: Scan, found: DeadLetter | NotDead) -> LetterHistory:
    """Read what the audit knows of a job.

    :param found: what the job is now
    """
    history = LetterHistory(found.sequence)
    audit = scan.audit
    if audit is None:
        return history
    if isinstance(found, DeadLetter):
        history.records = await read_records(found, audit)
        history.own = [record for record in history.records if record.sequence == found.sequence]
        return history
    history.own = await _records_of(audit, found.sequence)
    if not history.own:
        return history
    history.job = await _archived(scan, history.own[-1])
    history.origin = await _origin(scan, history.job) if history.job else None
    before = await _read_before(audit, next((record.copy_of for record in history.own if record.copy_of), None))
    history.records = [*before, *history.own]
    last = history.own[-1]
    result: DeadLetter | NotDead = found
    while (following := _next_job(last)) is not None and len(history.records) < 2 * _MOST:
        (result,) = await scan.classify([following])
        records = await _records_of(audit, following)
        history.records += records
        if isinstance(result, DeadLetter) or not records:
            break
        last = records[-1]
    history.outcome = await _outcome(scan, result, last)
    return history


async def _archived(scan: Scan, record: LetterRecord) -> StoredMessage | None:
    """Return the job of a record as the archive has it, unless the copy is of another job of its sequence."""
    job = await scan.archive.find(record.sequence) if scan.archive else None
    return job if job and record.stored_at in (None, job.time) else None


async def _origin(scan: Scan, job: StoredMessage) -> Origin | None:
    if (origin := origin_of(job.headers)) or (key := task_key_of(job.headers)) is None:
        return origin
    events = scan.queue.events
    return (await resolve_origins(scan.connection, scan.queue.name, events.name if events else None, [key])).get(key)


async def read_records(letter: DeadLetter, audit: AuditLog | None) -> list[LetterRecord]:
    """Read the audit records about a letter and about the letters that it was redriven from, oldest first."""
    if audit is None:
        return []
    own = await _records_of(audit, letter.sequence)
    if (redriven_from := copied_from(letter)) is None:
        return own
    before = await _records_of(audit, redriven_from)
    # A letter of another queue may have the same sequence as one of this queue.
    if not any(record.new_sequence == letter.sequence and not record.new_stream for record in before):
        return own
    earlier = await _read_before(audit, next((record.copy_of for record in before if record.copy_of), None))
    return [*earlier, *before, *own]


async def _read_before(audit: AuditLog, sequence: int | None) -> list[LetterRecord]:
    found: list[LetterRecord] = []
    for _ in range(_MOST):
        if sequence is None:
            break
        records = await _records_of(audit, sequence)
        found = [*records, *found]
        sequence = next((record.copy_of for record in records if record.copy_of), None)
    return found


async def _records_of(audit: AuditLog, sequence: int) -> list[LetterRecord]:
    return [record async for record in audit.history(sequence)]


def _without_unseen(record: LetterRecord, sees: Callable[[str], bool]) -> LetterRecord:
    dag_id = record.who.get("dag_id")
    if dag_id is None or (isinstance(dag_id, str) and sees(dag_id)):
        return record
    return record.model_copy(update={"who": {}, "why": None})


def _next_job(record: LetterRecord) -> int | None:
    if record.action != "redriven" or record.new_stream or record.new_sequence == record.sequence:
        return None
    return record.new_sequence


async def _outcome(scan: Scan, result: DeadLetter | NotDead, last: LetterRecord) -> str:
    """Return what is known now of the last job, a sentence.

    :param result: that job
    :param last: the last record about it, or about the letter that it was redriven from
    """
    job = result.sequence
    if isinstance(result, DeadLetter):
        return f"job {job} is a dead letter again since {result.death.died_at:%Y-%m-%dT%H:%M:%SZ}"
    if last.new_stream:
        return f"it is job {last.new_sequence} of {last.new_stream} now"
    if last.action in ("handled", "discarded"):
        return f"job {job}: {Status(last.action).meaning}"
    try:
        report = await read_ends(scan.connection, scan.queue, [job], last.at)
    except JetStreamProviderError as error:
        # The user of the connection may read letters only.
        return f"how job {job} ended can't be read: {error}"
    if report.last_end_at and not report.awaited:
        word = "was cancelled" if report.cancelled else "completed" if report.completed else "died again"
        took = max(0.0, (report.last_end_at - last.at).total_seconds())
        return f"job {job} {word} {report.last_end_at:%Y-%m-%dT%H:%M:%SZ}, {took:,.1f} s after the redrive"
    is_gone = bool(await gone_among(scan.connection, scan.queue.name, [job]))
    gone = "isn't stored any more; nothing that is stored tells how it ended"
    return f"job {job} {gone if is_gone else 'is pending or in flight'}"


# Outcomes of a redrive of more letters are known only as far as it recorded them itself.
MOST_JOBS = 20_000
_READING_SECONDS = 15.0
_ANY_END = WaitPolicy(max_dead=None, max_cancelled=None, max_unaccounted=None)


async def read_outcomes(connection: Connection, queue: WorkQueue, redrive: Redrive) -> RedriveOutcomes:
    """Return what became of a redrive's letters by now; its own record of it, where it has one or is too large."""
    known = redrive.outcomes
    if redrive.waves or not redrive.redriven or redrive.redriven > MOST_JOBS or sum(known.model_dump().values()):
        return known
    info = await stream_info(connection, queue.name)
    audit = await AuditLog.open(connection, queue, info["created"])
    if audit is None or redrive.created != info["created"]:
        return known
    jobs: set[int] = set()
    elsewhere = 0
    async for letter in audit.letters_of_run(redrive.run, redrive.from_sequence):
        if letter.action == "requeued":
            jobs.add(letter.sequence)
        elif letter.action == "redriven" and letter.new_sequence and not letter.new_stream:
            jobs.add(letter.new_sequence)
        elif letter.action == "redriven":
            elsewhere += 1
    report = await read_ends(connection, queue, jobs, redrive.began_at)
    gone = await gone_among(connection, queue.name, report.awaited)
    return RedriveOutcomes(
        completed=len(report.completed) + len(report.cancelled),
        died_again=len(report.dead),
        still_running=len(report.awaited) - len(gone),
        unknown=len(report.unaccounted) + len(gone) + elsewhere,
    )


async def gone_among(connection: Connection, queue: str, jobs: Iterable[int]) -> set[int]:
    """Return which jobs aren't stored any more."""
    sequences = sorted(jobs)
    stored = await read_jobs(connection, queue, sequences)
    return {sequence for sequence, message in zip(sequences, stored, strict=True) if message is None}


async def read_ends(connection: Connection, queue: WorkQueue, jobs: Iterable[int], since: datetime) -> WaitReport:
    """Return which of some jobs have ended, as far as their ends are stored by now.

    :param since: from when on they may have ended
    """
    report = WaitReport(set(jobs))
    if queue.events is None or not report.awaited:
        return report
    cursor = await take_cursor(connection, queue)
    cursor = replace(
        cursor,
        events_from=await _start(connection, cursor.events, since),
        dead_letters_from=await _start(connection, cursor.dead_letters, since),
        audit_from=await _start(connection, cursor.audit, since),
    )
    async with shared_follower(connection, cursor) as follower:
        waiting = asyncio.create_task(wait(connection, cursor, report, policy=_ANY_END))
        # One step of the loop: the wait is registered before the reading begins.
        await asyncio.sleep(0)
        reading = asyncio.create_task(follower.read_stored())
        try:
            await asyncio.wait({reading, waiting}, timeout=_READING_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (reading, waiting):
                task.cancel()
                with suppress(asyncio.CancelledError, JetStreamProviderError):
                    await task
    return report


async def _start(connection: Connection, stream: str | None, since: datetime) -> int:
    return max(1, await first_since(connection, stream, since)) if stream else 1


async def first_since(connection: Connection, stream: str, since: datetime) -> int:
    """Return a sequence below which a stream stores nothing that is younger than a time."""
    info = await stream_info(connection, stream)
    return await first_sequence_since(connection, info, since - timedelta(seconds=1))
