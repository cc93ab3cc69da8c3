"""From dead letters to what the page shows of them."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING

from airflow_provider_jetstream.jetstream.client.headers import first
from airflow_provider_jetstream.jetstream.contract import REDRIVE_SEQUENCE
from airflow_provider_jetstream.plugins.monitor.models import (
    Attempt,
    AuditLine,
    LetterDetail,
    LetterLine,
    OriginOfLetter,
)
from airflow_provider_jetstream.plugins.monitor.payload_view import payload_of, shown

if TYPE_CHECKING:
    from airflow_provider_jetstream.jetstream.audit.log import AuditLog, LetterRecord
    from airflow_provider_jetstream.jetstream.dead_letters.letter import DeadLetter

_DONE = {
    "redriven": "brought back as job {new}",
    "requeued": "made alive again in its place",
    "parked": "parked",
}


def letter_line(letter: DeadLetter, *, hidden: bool) -> LetterLine:
    """Tell of a letter in a list.

    :param letter: the letter
    :param hidden: whether texts that may quote the body are left out
    :return: a line
    """
    death, origin = letter.death, letter.origin
    text = None if hidden else death.error_message or death.explanation
    return LetterLine(
        sequence=letter.sequence,
        job_id=shown(letter.job_id),
        subject=shown(letter.subject),
        consumer=death.consumer,
        reason=death.reason.value,
        error_class=death.error_class,
        error_message=text and shown(text),
        error_place=death.error_place,
        fingerprint=death.fingerprint,
        traceback_digest=death.traceback_digest,
        died_at=death.died_at,
        deliveries=death.deliveries,
        redrives=letter.redrives,
        size=len(letter.body),
        parked=letter.parked and shown(letter.parked),
        origin=OriginOfLetter(
            dag_id=shown(origin.dag_id),
            run_id=shown(origin.run_id),
            task_id=shown(origin.task_id),
            map_index=origin.map_index,
        )
        if origin
        else None,
    )


def letter_detail(
    letter: DeadLetter, records: list[LetterRecord], dead_letter_queue: str, most: int, *, hidden: bool
) -> LetterDetail:
    """Tell all of a letter.

    :param letter: the letter
    :param records: what was done with it and with those that it was redriven from, oldest first
    :param dead_letter_queue: the stream that keeps it
    :param most: how much of its body
    :param hidden: whether its body, its headers and texts that may quote them are left out
    :return: what the page shows
    """
    death = letter.death
    return LetterDetail(
        letter=letter_line(letter, hidden=hidden),
        source=letter.source.value,
        stored_at=_stored_at(letter),
        first_failed_at=death.first_failed_at,
        explanation=None if hidden or death.explanation is None else shown(death.explanation),
        hidden=hidden,
        payload=None if hidden else payload_of(letter.body, most),
        headers=[] if hidden else [(shown(name), shown(value)) for name, value in letter.headers],
        entries=list(letter.entries),
        dead_letter_queue=dead_letter_queue,
        attempts=_attempts(letter, records),
        audit=[
            AuditLine(
                at=record.at,
                action=record.action,
                sequence=record.sequence,
                new_sequence=record.new_sequence,
                why=record.why,
                who=record.who,
            )
            for record in reversed(records)
        ],
    )


async def lives_of(letter: DeadLetter, audit: AuditLog | None) -> list[LetterRecord]:
    """Read what was done with a letter, and with the letter that it was redriven from.

    :param letter: the letter
    :param audit: the audit, if there is one
    :return: the records, oldest first
    """
    if audit is None:
        return []
    before = first(letter.headers, REDRIVE_SEQUENCE) or ""
    sequences = [*([int(before)] if before.isdecimal() else []), letter.sequence]
    return [record for sequence in sequences async for record in audit.history(sequence)]


def _attempts(letter: DeadLetter, records: list[LetterRecord]) -> list[Attempt]:
    death = letter.death
    attempts = [
        Attempt(
            at=record.at,
            what=record.action,
            text=f"{_DONE[record.action].format(new=record.new_sequence)}{f', {record.why}' if record.why else ''}",
            sequence=record.sequence if record.sequence != letter.sequence else None,
        )
        for record in records
    ]
    if stored := _stored_at(letter):
        attempts.append(Attempt(at=stored, what="stored", text=f"stored as job {letter.sequence}"))
    if death.first_failed_at and death.first_failed_at != death.died_at:
        attempts.append(Attempt(at=death.first_failed_at, what="first_failure", text="failed for the first time"))
    times = f" after {death.deliveries} deliveries" if death.deliveries else ""
    consumer = f" of consumer {death.consumer}" if death.consumer else ""
    attempts.append(Attempt(at=death.died_at, what="death", text=f"{death.reason.value}{times}{consumer}"))
    return sorted(attempts, key=lambda each: each.at or death.died_at)


def _stored_at(letter: DeadLetter) -> datetime | None:
    return datetime.fromisoformat(letter.time) if letter.time else None
