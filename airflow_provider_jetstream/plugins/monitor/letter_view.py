"""The page's models of a dead letter: a line in a list, all details, and the body as text."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import asdict, dataclass
from datetime import datetime
from hashlib import sha256
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from airflow_provider_jetstream.jetstream.client.headers import first
from airflow_provider_jetstream.jetstream.client.wire_text import readable_text
from airflow_provider_jetstream.jetstream.contract import AIRFLOW_TASK
from airflow_provider_jetstream.plugins.monitor.models.letters import (
    Attempt,
    AuditLine,
    JobAttempt,
    LetterDetail,
    LetterLine,
    OriginOfLetter,
    Payload,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from airflow_provider_jetstream.jetstream.attempts import AttemptReport
    from airflow_provider_jetstream.jetstream.audit.records import LetterRecord
    from airflow_provider_jetstream.jetstream.client.headers import Pairs
    from airflow_provider_jetstream.jetstream.dead_letters.letter import DeadLetter
    from airflow_provider_jetstream.jetstream.origin import Origin
    from airflow_provider_jetstream.plugins.monitor.letter_history import LetterHistory


_DUMP_WIDTH = 16
_PRINTABLE = range(0x20, 0x7F)
_INDENT = "  "
# Of a text that is known to be JSON: texts, signs, and all that stands between them.
_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[{}\[\],:]|[^\s{}\[\],:"]+')
_NAMED_TWICE = 5


def payload_of(body: bytes, max_bytes: int) -> Payload:
    """Return a body for people.

    :param max_bytes: how many bytes of it are shown; indented JSON may have four times as many
    """
    cut, truncated = body[:max_bytes], len(body) > max_bytes
    raw = _text(cut, truncated=truncated)
    found: dict[str, Any] = {"size": len(body), "sha256": sha256(body).hexdigest(), "truncated": truncated}
    if raw is None:
        dump = _hex_dump(cut)
        return Payload(kind="binary", hex=dump, text=dump, **found)
    repeated = None if truncated else _repeated_names(raw)
    if repeated is None:
        return Payload(kind="text", raw=raw, text=raw, **found)
    indented = _indented(raw, 4 * max_bytes)
    notes = [
        f"the name {json.dumps(name, ensure_ascii=False)} comes {count} times in one object: most readers take the last"
        for name, count in repeated.most_common(_NAMED_TWICE)
    ]
    return Payload(kind="json", raw=raw, parsed=indented, notes=notes, text=indented or raw, **found)


def _text(cut: bytes, *, truncated: bool) -> str | None:
    try:
        text = cut.decode()
    except UnicodeDecodeError as error:
        # The cut may go through the middle of a character.
        if not truncated or error.start < len(cut) - 3:
            return None
        text = cut[: error.start].decode()
    return None if "\0" in text else text


def _repeated_names(text: str) -> Counter[str] | None:
    """Return the names that come more than once in an object of a JSON text, and how often; ``None`` for other text."""
    repeated: Counter[str] = Counter()

    def count(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(names := Counter(name for name, _ in pairs)) < len(pairs):
            repeated.update({readable_text(name): times for name, times in names.items() if times > 1})
        return {}

    try:
        # Only objects and lists: otherwise every text of digits would be called JSON.
        return repeated if isinstance(json.loads(text, object_pairs_hook=count), (dict, list)) else None
    except (ValueError, RecursionError):
        return None


def _indented(text: str, longest: int) -> str | None:
    """Indent a JSON text and change nothing else of it; ``None`` where it would grow beyond ``longest``.

    Written from its tokens rather than from its values: parsing ``{"a":1,"a":2,"f":1.10}`` would change it.
    """
    parts: list[str] = []
    depth = length = 0
    for found, following in pairwise([*_TOKEN.findall(text), ""]):
        if found in "{[":
            depth += 1
            part = found if following in "}]" else f"{found}\n{_INDENT * depth}"
        elif found in "}]":
            depth -= 1
            part = found if parts[-1] in ("{", "[") else f"\n{_INDENT * depth}{found}"
        else:
            part = {",": f",\n{_INDENT * depth}", ":": ": "}.get(found, found)
        parts.append(part)
        length += len(part)
        if length > longest:
            return None
    return "".join(parts)


def _hex_dump(cut: bytes) -> str:
    lines = (cut[start : start + _DUMP_WIDTH] for start in range(0, len(cut), _DUMP_WIDTH))
    return "\n".join(
        f"{number * _DUMP_WIDTH:08x}  {line.hex(' '):<{3 * _DUMP_WIDTH}} "
        f"{''.join(chr(byte) if byte in _PRINTABLE else '.' for byte in line)}"
        for number, line in enumerate(lines)
    )


_ACTION_TEXTS = {
    "redriven": "redriven as job {new}",
    "requeued": "requeued in place",
    "handled": "handled by a handler of the dead letter queue",
    "parked": "parked",
    "discarded": "discarded",
}


def attempt_view(attempt: AttemptReport, *, hidden: bool) -> JobAttempt:
    """Return an attempt at a job.

    :param hidden: whether texts that may quote the body are left out
    """
    values = asdict(attempt)
    if hidden:
        values["text"] = None
        values["error_message"] = values["error_message"] if attempt.state == "unanswered" else None
    return JobAttempt(**values)


@dataclass(frozen=True, slots=True)
class Hiding:
    """Which texts are left out, since the user may not see them.

    :param all: bodies, headers and texts that may quote them
    :param of_unknown: the same for jobs of tasks that aren't known, whose DAG may be anybody's
    """

    all: bool = False
    of_unknown: bool = False

    def hides(self, letter: DeadLetter) -> bool:
        """Return whether the texts of a letter are left out."""
        return self.all or (self.of_unknown and is_of_unknown_task(letter))


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
        origin=origin_view(origin),
        origin_known=not is_of_unknown_task(letter),
    )


def origin_view(origin: Origin | None) -> OriginOfLetter | None:
    """Return the task that published a job, for the page."""
    if origin is None:
        return None
    names = (readable_text(name) for name in (origin.dag_id, origin.run_id, origin.task_id))
    return OriginOfLetter(**dict(zip(("dag_id", "run_id", "task_id"), names, strict=True)), map_index=origin.map_index)


def letter_detail(
    letter: DeadLetter,
    history: LetterHistory,
    dead_letter_queue: str,
    max_bytes: int,
    *,
    tries: Sequence[AttemptReport],
    hidden: bool,
) -> LetterDetail:
    """Return all details of a letter.

    :param max_bytes: how much of its body is shown
    :param tries: the attempts at its job
    :param hidden: whether its body, its headers and texts that may quote them are left out
    """
    death = letter.death
    return LetterDetail(
        letter=letter_line(letter, hidden=hidden),
        state="parked" if letter.parked is not None else "dead",
        source=letter.source.value,
        stored_at=_stored_at(letter),
        first_failed_at=death.first_failed_at,
        worker=death.worker,
        seconds=death.seconds,
        traceback=list(death.traceback),
        explanation=None if hidden or death.explanation is None else readable_text(death.explanation),
        hidden=hidden,
        payload=None if hidden else payload_of(letter.body, max_bytes),
        headers=[] if hidden else _headers(letter.headers),
        entries=list(letter.entries),
        dead_letter_queue=dead_letter_queue,
        attempts=_attempts(letter, history.records),
        tries=[attempt_view(attempt, hidden=hidden) for attempt in tries],
        audit=_audit_lines(history, hidden=hidden),
    )


def ended_detail(history: LetterHistory, dead_letter_queue: str, max_bytes: int, *, hidden: bool) -> LetterDetail:
    """Return what audit and archive hold of a job that was a dead letter and is none any more.

    :param max_bytes: how much of its body is shown
    :param hidden: whether texts that may quote bodies are left out
    """
    last = history.own[-1]
    attempts = [_action(record, history.sequence) for record in history.records]
    if last.died_at:
        attempts.append(Attempt(at=last.died_at, what="death", text=_death_text(last.reason, None, last.consumer)))
    is_copy, job = last.action == "redriven", history.job
    if job and job.time:
        stored = Attempt(at=job.stored_at, what="stored", text=f"stored as job {history.sequence}")
        attempts.append(stored)
    return LetterDetail(
        letter=recorded_line(last, history, hidden=hidden),
        state=last.action,
        now=history.outcome,
        next=last.new_sequence if is_copy else None,
        next_queue=last.new_stream if is_copy else None,
        source="archive" if job else None,
        stored_at=job.stored_at if job else None,
        first_failed_at=None,
        explanation=None,
        hidden=hidden,
        payload=payload_of(job.data, max_bytes) if job and not hidden else None,
        headers=_headers(job.headers) if job and not hidden else [],
        entries=[],
        dead_letter_queue=dead_letter_queue,
        attempts=sorted(attempts, key=lambda attempt: attempt.at or last.at),
        audit=_audit_lines(history, hidden=hidden),
    )


def _headers(headers: Pairs) -> list[tuple[str, str]]:
    return [(readable_text(name), readable_text(value)) for name, value in headers]


def recorded_line(record: LetterRecord, history: LetterHistory | None = None, *, hidden: bool) -> LetterLine:
    """Return the line of a letter of which only the audit knows, and perhaps the archive.

    :param history: what else is known of it
    :param hidden: whether texts that may quote the body are left out
    """
    job, origin = (history.job, history.origin) if history else (None, None)
    return LetterLine(
        sequence=record.sequence,
        job_id=readable_text(record.job_id or str(record.sequence)),
        subject=readable_text(record.subject),
        consumer=record.consumer,
        reason=record.reason,
        error_class=record.error_class,
        error_message=None if hidden else record.error_message,
        error_place=None,
        fingerprint=record.fingerprint,
        traceback_digest=None,
        died_at=record.died_at or record.at,
        deliveries=None,
        redrives=record.redrives,
        size=len(job.data) if job else None,
        parked=record.why or "parked" if record.action == "parked" else None,
        origin=origin_view(origin),
        origin_known=origin is not None or (job is not None and first(job.headers, AIRFLOW_TASK) is None),
    )


def _audit_lines(history: LetterHistory, *, hidden: bool) -> list[AuditLine]:
    return [
        AuditLine(
            at=record.at,
            action=record.action,
            sequence=record.sequence,
            new_sequence=record.new_sequence,
            new_stream=record.new_stream,
            why=record.why,
            who=record.who,
            user=person_of(record.who),
            run=record.run,
            discarded_by=record.kept.redrive if record.kept and record.kept.copy_in != "nowhere" else None,
            changes=None if hidden else record.changes,
        )
        for record in reversed(history.records)
    ]


def person_of(who: Mapping[str, Any]) -> str | None:
    """Return the name of the person who started an operation, where one did and is named."""
    name = who.get("person")
    return readable_text(name) if isinstance(name, str) and name else None


def _action(record: LetterRecord, sequence: int) -> Attempt:
    return Attempt(
        at=record.at,
        what=record.action,
        text=_ACTION_TEXTS[record.action].format(new=record.new_sequence)
        + (f" of {record.new_stream}" if record.new_stream else "")
        + (f", {record.why}" if record.why else ""),
        sequence=record.sequence if record.sequence != sequence else None,
    )


def _death_text(reason: str, deliveries: int | None, consumer: str | None) -> str:
    times = f" after {deliveries} deliveries" if deliveries else ""
    return f"{reason}{times}{f' of consumer {consumer}' if consumer else ''}"


def _attempts(letter: DeadLetter, records: list[LetterRecord]) -> list[Attempt]:
    death = letter.death
    attempts = [_action(record, letter.sequence) for record in records]
    if stored := _stored_at(letter):
        attempts.append(Attempt(at=stored, what="stored", text=f"stored as job {letter.sequence}"))
    if death.first_failed_at and death.first_failed_at != death.died_at:
        attempts.append(Attempt(at=death.first_failed_at, what="first_failure", text="failed for the first time"))
    text = _death_text(death.reason.value, death.deliveries, death.consumer)
    attempts.append(Attempt(at=death.died_at, what="death", text=text))
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
