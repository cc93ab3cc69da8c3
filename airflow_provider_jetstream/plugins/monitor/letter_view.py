"""The page's models of a dead letter: a line in a list, and all details with the body as text."""

from __future__ import annotations

import json
from datetime import datetime
from typing import TYPE_CHECKING

from airflow_provider_jetstream.jetstream.client.headers import first
from airflow_provider_jetstream.jetstream.client.wire_text import readable_text
from airflow_provider_jetstream.jetstream.contract import AIRFLOW_TASK
from airflow_provider_jetstream.jetstream.dead_letters.letter import copied_from
from airflow_provider_jetstream.plugins.monitor.models.letters import (
    Attempt,
    AuditLine,
    LetterDetail,
    LetterLine,
    OriginOfLetter,
    Payload,
)

if TYPE_CHECKING:
    from airflow_provider_jetstream.jetstream.audit.log import AuditLog, LetterRecord
    from airflow_provider_jetstream.jetstream.dead_letters.letter import DeadLetter

_ACTION_TEXTS = {
    "redriven": "redriven as job {new}",
    "requeued": "requeued in place",
    "handled": "handled by a handler of the dead letter queue",
    "parked": "parked",
}
_DUMP_WIDTH = 16
_PRINTABLE = range(0x20, 0x7F)


def letter_line(letter: DeadLetter, *, hidden: bool) -> LetterLine:
    """Return a letter's line in a list.

    :param hidden: whether texts that may quote the body are left out
    """
    death, origin = letter.death, letter.origin
    text = None if hidden else death.error_message or death.explanation
    return LetterLine(
        sequence=letter.sequence,
        job_id=readable_text(letter.job_id),
        subject=readable_text(letter.subject),
        consumer=death.consumer,
        reason=death.reason.value,
        error_class=death.error_class,
        error_message=text and readable_text(text),
        error_place=death.error_place,
        fingerprint=death.fingerprint,
        traceback_digest=death.traceback_digest,
        died_at=death.died_at,
        deliveries=death.deliveries,
        redrives=letter.redrives,
        size=len(letter.body),
        parked=letter.parked and readable_text(letter.parked),
        origin=OriginOfLetter(
            dag_id=readable_text(origin.dag_id),
            run_id=readable_text(origin.run_id),
            task_id=readable_text(origin.task_id),
            map_index=origin.map_index,
        )
        if origin
        else None,
    )


def letter_detail(
    letter: DeadLetter, records: list[LetterRecord], dead_letter_queue: str, max_bytes: int, *, hidden: bool
) -> LetterDetail:
    """Return all details of a letter.

    :param records: the audit records about it and about the letter that it was redriven from, oldest first
    :param max_bytes: how much of its body is shown
    :param hidden: whether its body, its headers and texts that may quote them are left out
    """
    death = letter.death
    return LetterDetail(
        letter=letter_line(letter, hidden=hidden),
        source=letter.source.value,
        stored_at=_stored_at(letter),
        first_failed_at=death.first_failed_at,
        explanation=None if hidden or death.explanation is None else readable_text(death.explanation),
        hidden=hidden,
        payload=None if hidden else payload_of(letter.body, max_bytes),
        headers=[] if hidden else [(readable_text(name), readable_text(value)) for name, value in letter.headers],
        entries=list(letter.entries),
        dead_letter_queue=dead_letter_queue,
        attempts=_attempts(letter, records),
        audit=[
            AuditLine(
                at=record.at,
                action=record.action,
                sequence=record.sequence,
                new_sequence=record.new_sequence,
                new_stream=record.new_stream,
                why=record.why,
                who=record.who,
            )
            for record in reversed(records)
        ],
    )


async def read_records(letter: DeadLetter, audit: AuditLog | None) -> list[LetterRecord]:
    """Read the audit records about a letter and about the letter that it was redriven from, oldest first."""
    if audit is None:
        return []
    own = [record async for record in audit.history(letter.sequence)]
    if (redriven_from := copied_from(letter)) is None:
        return own
    before = [record async for record in audit.history(redriven_from)]
    # A letter of another queue may have the same sequence as one of this queue.
    is_copy = any(record.new_sequence == letter.sequence and not record.new_stream for record in before)
    return [*before, *own] if is_copy else own


def _attempts(letter: DeadLetter, records: list[LetterRecord]) -> list[Attempt]:
    death = letter.death
    attempts = [
        Attempt(
            at=record.at,
            what=record.action,
            text=_ACTION_TEXTS[record.action].format(new=record.new_sequence)
            + (f" of {record.new_stream}" if record.new_stream else "")
            + (f", {record.why}" if record.why else ""),
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
    return sorted(attempts, key=lambda attempt: attempt.at or death.died_at)


def dag_of(letter: DeadLetter) -> str | None:
    """Return the DAG that published a letter's job, if that is known."""
    return letter.origin.dag_id if letter.origin else None


def is_of_unknown_task(letter: DeadLetter) -> bool:
    """Return whether an Airflow task published a letter's job, and it isn't known any more which one.

    Its record may have expired, and every publisher of the queue may store something else under its key.
    """
    return letter.origin is None and first(letter.headers, AIRFLOW_TASK) is not None


def _stored_at(letter: DeadLetter) -> datetime | None:
    return datetime.fromisoformat(letter.time) if letter.time else None


def payload_of(body: bytes, max_bytes: int) -> Payload:
    """Return a body as text: indented where it is JSON, unchanged where it is text, else a hexadecimal dump.

    :param max_bytes: how many bytes of it are shown; indented JSON may have four times as many
    """
    cut, truncated = body[:max_bytes], len(body) > max_bytes
    text = _text(cut, truncated=truncated)
    if text is None:
        return Payload(kind="hex", text=_hex_dump(cut), size=len(body), truncated=truncated)
    if not truncated and (indented := _indented(text)) is not None and len(indented) <= 4 * max_bytes:
        return Payload(kind="json", text=indented, size=len(body), truncated=False)
    return Payload(kind="text", text=text, size=len(body), truncated=truncated)


def _text(cut: bytes, *, truncated: bool) -> str | None:
    try:
        text = cut.decode()
    except UnicodeDecodeError as error:
        # The cut may go through the middle of a character.
        if not truncated or error.start < len(cut) - 3:
            return None
        text = cut[: error.start].decode()
    return None if "\0" in text else text


def _indented(text: str) -> str | None:
    try:
        value = json.loads(text)
        # Only objects and lists: otherwise every text of digits would be called JSON.
        is_structured = isinstance(value, (dict, list))
        return readable_text(json.dumps(value, indent=2, ensure_ascii=False)) if is_structured else None
    except (ValueError, RecursionError):
        return None


def _hex_dump(cut: bytes) -> str:
    lines = (cut[start : start + _DUMP_WIDTH] for start in range(0, len(cut), _DUMP_WIDTH))
    return "\n".join(
        f"{number * _DUMP_WIDTH:08x}  {line.hex(' '):<{3 * _DUMP_WIDTH}} "
        f"{''.join(chr(byte) if byte in _PRINTABLE else '.' for byte in line)}"
        for number, line in enumerate(lines)
    )
