"""Discards dead letters, and brings discarded ones back.

The record of a discarded letter in the audit has all that its parked record would have. Its body is there too, unless
the archive has a copy. A letter without either is refused, unless the request says that it may be dropped for good.

A letter is brought back parked: nothing runs before a person redrives it, since somebody may have published its job
again meanwhile.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from binascii import Error as Base64Error
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Final

from airflow_provider_jetstream.jetstream.audit.records import KeptLetter, encode_record
from airflow_provider_jetstream.jetstream.audit.redrives import read_record as read_redrive
from airflow_provider_jetstream.jetstream.client.concurrency import map_concurrently
from airflow_provider_jetstream.jetstream.client.headers import parse_headers
from airflow_provider_jetstream.jetstream.client.message import StoredMessage
from airflow_provider_jetstream.jetstream.client.subjects import covered_by_any
from airflow_provider_jetstream.jetstream.contract import parked_filter, parked_subject
from airflow_provider_jetstream.jetstream.dead_letters.letter import BodySource, DeadLetter, origin_of
from airflow_provider_jetstream.jetstream.dead_letters.record import read_record
from airflow_provider_jetstream.jetstream.dead_letters.scan import PAGE
from airflow_provider_jetstream.jetstream.dead_letters.status import NotDead, Status
from airflow_provider_jetstream.jetstream.errors import DeadLetterGoneError, RedriveError, RedriveRequestError
from airflow_provider_jetstream.jetstream.redrive.next_letters import NextLetters, ProvedPage
from airflow_provider_jetstream.jetstream.redrive.redriven_job import check_size, check_subject, parked_headers

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Collection, Mapping, Sequence

    from airflow_provider_jetstream.jetstream.audit.log import AuditLog
    from airflow_provider_jetstream.jetstream.audit.records import LetterRecord
    from airflow_provider_jetstream.jetstream.dead_letters.scan import Scan
    from airflow_provider_jetstream.jetstream.dead_letters.selection import Selection
    from airflow_provider_jetstream.jetstream.redrive.letter_records import Done, LetterRecords
    from airflow_provider_jetstream.jetstream.redrive.request import RedriveRequest

# Subject and headers of the record's message, and the time in it.
_AROUND_RECORD: Final = 1_024
_NAMED: Final = 5


class Discards:
    """Builds the records of letters that are to be discarded, with what brings each of them back.

    :param scan: the scan that found the letters
    :param request: of the redrive that discards them
    :param redrive: returns its id, once it has begun
    :param records: builds the records
    """

    def __init__(self, scan: Scan, request: RedriveRequest, redrive: Callable[[], str], records: LetterRecords) -> None:
        self._scan = scan
        self._request = request
        self._redrive = redrive
        self._records = records
        audit = scan.context.audit
        limit = int(audit["config"].get("max_msg_size") or -1) if audit else -1
        largest = scan.connection.max_payload
        self._record_limit = (limit if 0 < limit < largest else largest) - _AROUND_RECORD
        self._archive = scan.archive

    async def records_of(self, letters: Sequence[DeadLetter]) -> tuple[list[Done], dict[int, str]]:
        """Return letters with their records, and by stream sequence why others stay where they are."""
        done: list[Done] = []
        failed: dict[int, str] = {}
        for letter, found in zip(letters, await map_concurrently(self._record_of, letters), strict=True):
            if isinstance(found, str):
                failed[letter.sequence] = found
            else:
                done.append((letter, found))
        return done, failed

    async def _record_of(self, letter: DeadLetter) -> LetterRecord | str:
        parked = parked_headers(letter, "discarded")
        try:
            check_subject(letter, letter.subject)
            check_size(letter, letter.body, parked, self._scan.connection.max_payload)
            self._require_place()
        except RedriveError as error:
            return self._final(letter, str(error))
        kept = KeptLetter(
            redrive=self._redrive(),
            headers=b64encode(parked.encoded).decode(),
            copy_in="archive",
            last_entry=max(letter.entries, default=0),
        )
        if await self._is_archived(letter):
            # The archive has the very time, also where only a worker's copy is left, which may state a rounded one.
            return self._record(letter, kept).model_copy(update={"stored_at": letter.time})
        body = b64encode(letter.body).decode()
        record = self._record(letter, kept.model_copy(update={"copy_in": "record", "body": body}))
        size = len(encode_record(record))
        if size <= self._record_limit:
            return record
        archive = self._archive.stream if self._archive else "no archive"
        return self._final(
            letter,
            f"expected a copy of dead letter {letter.sequence} to bring it back from, found none in {archive}, and its"
            f" record of {size} bytes doesn't fit into the audit ({self._record_limit})",
        )

    def _final(self, letter: DeadLetter, problem: str) -> LetterRecord | str:
        """Return the record of a letter that nothing can bring back, or why it stays."""
        if not self._request.without_copy:
            problem = problem.removesuffix("; original kept")
            return f"{problem}; park it, or discard it without_copy, which can't be undone; original kept"
        return self._record(letter, KeptLetter(redrive=self._redrive(), headers="", copy_in="nowhere"))

    def _record(self, letter: DeadLetter, kept: KeptLetter) -> LetterRecord:
        return self._records.record(letter, "discarded", new_sequence=None, subject=letter.subject, kept=kept)

    def _require_place(self) -> None:
        """Raise unless the dead letter queue takes letters back.

        :raises RedriveError: it stores no parked letters
        """
        config, wanted = self._scan.context.dead_letter_queue["config"], parked_filter(self._scan.queue.name)
        if not covered_by_any(config.get("subjects") or [], wanted):
            raise RedriveError(
                f"expected {config['name']} to capture {wanted}, to which discarded letters come back, found that it"
                " doesn't: add that subject"
            )
        if config["retention"] == "interest":
            raise RedriveError(
                f"expected limits or workqueue retention of {config['name']}, to which discarded letters come back,"
                " found interest: it stores nothing that no consumer takes"
            )

    async def _is_archived(self, letter: DeadLetter) -> bool:
        copy = await self._archive.find(letter.sequence) if self._archive and letter.time else None
        return (
            copy is not None
            and (copy.time, copy.data) == (letter.time, letter.body)
            and sorted(copy.headers) == sorted(letter.headers)
        )


async def returning_letters(
    scan: Scan, audit: AuditLog, redrive: str, selection: Selection, add_failure: Callable[[int, str], None]
) -> AsyncGenerator[list[DeadLetter], None]:
    """Yield the letters that a redrive discarded and nothing has brought back since, some at a time.

    :param redrive: its id
    :param selection: the stream sequences of some of them; all where absent
    :param add_failure: called for each letter of which no copy is stored, with its stream sequence and why
    :raises RedriveRequestError: the audit has no such redrive
    :raises DeadLetterGoneError: a sequence wasn't discarded by it
    """
    found = await read_redrive(scan.connection, audit, redrive)
    if found is None or not found.plan.get("discard"):
        known = "no redrive of that id" if found is None else "a redrive that discarded nothing"
        raise RedriveRequestError(
            f"expected the id of a redrive that discarded letters of {audit.queue}, found {redrive!r}, {known}: see"
            " jetstream-queue redrive status for the ids"
        )
    sequences = sorted(selection.sequences or ())
    if selection.sequences is None:
        records = audit.letters(found.from_sequence)
        sequences = sorted({record.sequence async for record in records if _is_of(record, redrive)})
    for start in range(0, len(sequences), PAGE):
        last = await map_concurrently(audit.last_record, sequences[start : start + PAGE])
        discarded = {record.sequence: record for record in last if record and _is_of(record, redrive)}
        jobs = [
            job
            for job in await scan.classify(sorted(discarded))
            if isinstance(job, NotDead) and job.status == Status.DISCARDED
        ]
        letters: list[DeadLetter] = []
        for job, letter in zip(jobs, await map_concurrently(partial(_letter_of, scan, discarded), jobs), strict=True):
            if isinstance(letter, str):
                add_failure(job.sequence, letter)
            else:
                letters.append(letter)
        yield letters


def _is_of(record: LetterRecord, redrive: str) -> bool:
    return record.kept is not None and record.kept.redrive == redrive


async def require_discarded(audit: AuditLog, redrive: str, selection: Selection, done: Collection[int]) -> None:
    """Raise unless every sequence that a selection names was discarded by a redrive and not brought back since.

    :param done: sequences that an earlier try has brought back
    :raises DeadLetterGoneError: one wasn't
    """
    named = sorted(set(selection.sequences or ()).difference(done))
    records = await map_concurrently(audit.last_record, named)
    others = {
        sequence: f"it was {record.action} last" if record else "the audit has no record of it"
        for sequence, record in zip(named, records, strict=True)
        if record is None or not _is_of(record, redrive)
    }
    if others:
        causes = "; ".join(f"{sequence}: {cause}" for sequence, cause in list(others.items())[:_NAMED])
        raise DeadLetterGoneError(
            f"expected letters of {audit.queue} that {redrive} discarded, found otherwise for {len(others)} of"
            f" {len(named)} sequences ({causes}); nothing was brought back: leave them out"
        )


async def _letter_of(scan: Scan, records: Mapping[int, LetterRecord], job: NotDead) -> DeadLetter | str:
    """Return a discarded letter as it was, or why it can't be brought back.

    :param records: the record of each, by stream sequence
    """
    record, queue = records[job.sequence], scan.queue.name
    kept = record.kept
    if kept is None or kept.copy_in == "nowhere":
        return "it was discarded without a copy, so nothing brings it back"
    try:
        headers, body = parse_headers(b64decode(kept.headers)), b64decode(kept.body or "")
    except Base64Error:
        return "its record in the audit can't be read, so nothing brings it back"
    subject = parked_subject(queue, record.consumer, record.sequence)
    found = read_record(StoredMessage(subject, record.sequence, record.at.isoformat(), headers, body), queue)
    if found is None:
        return "its record in the audit can't be read, so nothing brings it back"
    if kept.copy_in == "archive":
        copy = await scan.archive.find(record.sequence) if scan.archive else None
        if copy is None or copy.time != found.job.time:
            archive = scan.archive.stream if scan.archive else "the archive"
            return f"expected {archive} to store its copy, found none: copies that reach its limits are dropped"
        body = copy.data
    origin = found.origin
    return DeadLetter(
        death=found.death,
        subject=found.job.subject,
        body=body,
        headers=found.job.headers,
        time=found.job.time,
        # One whose discarding was cut off is stored still.
        source=BodySource.QUEUE if job.stored else BodySource.COPY,
        entries=job.entries,
        preserved=True,
        ready_at=found.death.died_at,
        origin=origin_of(found.job.headers, {origin.key: origin} if origin else {}),
    )


class ReturningLetters(NextLetters):
    """The rule of a redrive that brings discarded letters back: all of them at once."""

    async def pages(self, scan: Scan, selection: Selection) -> AsyncGenerator[ProvedPage, None]:
        """Return the letters some at a time."""
        report, redrive = self.operation.report, self.operation.request.undo
        if scan.audit is None or redrive is None:
            return
        await require_discarded(scan.audit, redrive, selection, report.parked)
        async for letters in returning_letters(scan, scan.audit, redrive, selection, report.add_failure):
            # The lease keeps them as they are: nothing has to be proved again.
            yield ProvedPage(letters, [], inf)
