"""The record of a dead letter: the job's body, its own headers, and headers that describe its death.

Records are written by workers that terminate a job, and by scans that find a letter without one. docs/dead-letters.md
describes the headers; their version is a header of its own.
"""

from __future__ import annotations

import json
import re
import unicodedata
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, NamedTuple

from airflow_provider_jetstream.jetstream.client.headers import Headers, Pairs, first, is_servers
from airflow_provider_jetstream.jetstream.contract import AIRFLOW_TASK, MSG_ID, NO_CONSUMER, copy_filter, parked_filter
from airflow_provider_jetstream.jetstream.dead_letters.death import Death, Reason
from airflow_provider_jetstream.jetstream.dead_letters.record_origin import format_origin, parse_origin

if TYPE_CHECKING:
    from collections.abc import Mapping

    from airflow_provider_jetstream.jetstream.client.message import StoredMessage
    from airflow_provider_jetstream.jetstream.origin import Origin

PREFIX = "Dead-Letter-"
VERSION = "1"
# The writer of a scan's records. A scan has proved the death; a worker may have been stopped before it terminated
# the job.
SCAN = "scan"

_VERSION = f"{PREFIX}Version"
_STREAM = f"{PREFIX}Stream"
_CREATED = f"{PREFIX}Stream-Created"
_SEQUENCE = f"{PREFIX}Sequence"
_SUBJECT = f"{PREFIX}Subject"
_TIME = f"{PREFIX}Time"
_CONSUMER = f"{PREFIX}Consumer"
_DELIVERIES = f"{PREFIX}Deliveries"
_REASON = f"{PREFIX}Reason"
_EXPLANATION = f"{PREFIX}Explanation"
_FIRST_FAILURE = f"{PREFIX}First-Failure"
_LAST_FAILURE = f"{PREFIX}Last-Failure"
_ERROR_CLASS = f"{PREFIX}Error-Class"
_ERROR_MESSAGE = f"{PREFIX}Error-Message"
_TRACEBACK_DIGEST = f"{PREFIX}Traceback-Digest"
_ERROR_PLACE = f"{PREFIX}Error-Place"
_FINGERPRINT = f"{PREFIX}Fingerprint"
_PARKED = f"{PREFIX}Parked"
_ORIGIN = f"{PREFIX}Origin"
_STORED_AS_JSON = f"{PREFIX}Kept-Headers"

_MAX_TEXT = 1_000
# The client refuses other names, and changes values with line breaks in them or white space around them.
_NAME = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_DIGEST = re.compile(r"[0-9a-f]{8,64}")
_WHOLE = re.compile(r"[0-9]{1,20}")
_TOKEN = re.compile(r"[^\s.*>\ud800-\udfff]+")
_SUBJECT_TEXT = re.compile(r"[^\s\ud800-\udfff]+")
_UNPRINTABLE = frozenset({"Cc", "Cs"})


def record_headers(
    death: Death,
    *,
    subject: str,
    time: str,
    headers: Pairs,
    writer: str,
    parked: str | None = None,
    origin: Origin | None = None,
) -> Headers:
    """Build the headers of a dead letter's record, which :func:`read_record` reads.

    :param subject: the job's subject
    :param time: when the job was stored, in the server's own text or ISO 8601
    :param headers: the job's headers as they were stored
    :param writer: what stores the record; the same letter is stored once per writer
    :param parked: why the letter is parked, if it is
    :param origin: the task that published the job, if it is known; stored where the job's headers hold only its key,
        since this record may stay for longer than the task's
    """
    # Before the fingerprint is computed, so that readers of the record compute the same one.
    death = replace(
        death,
        explanation=one_line(death.explanation),
        error_class=one_line(death.error_class),
        error_message=one_line(death.error_message),
    )
    fields = {
        _VERSION: VERSION,
        _STREAM: death.stream,
        _CREATED: death.created,
        _SEQUENCE: str(death.sequence),
        _SUBJECT: subject,
        _TIME: time,
        _CONSUMER: death.consumer,
        _DELIVERIES: None if death.deliveries is None else str(death.deliveries),
        _REASON: death.reason.value,
        _EXPLANATION: death.explanation,
        _FIRST_FAILURE: death.first_failed_at and death.first_failed_at.isoformat(),
        _LAST_FAILURE: death.died_at.isoformat(),
        _ERROR_CLASS: death.error_class,
        _ERROR_MESSAGE: death.error_message,
        _TRACEBACK_DIGEST: death.traceback_digest,
        _ERROR_PLACE: one_line(death.error_place),
        _FINGERPRINT: death.fingerprint,
        _PARKED: one_line(parked),
        _ORIGIN: format_origin(origin) if origin and first(headers, AIRFLOW_TASK) else None,
    }
    # All values of a name are stored in the same form, so that they keep their order.
    special = {name for name, value in headers if not _is_sendable(name, value)}
    if unsendable := [pair for pair in headers if pair[0] in special]:
        # The server would act on its own headers, and the client can't send what isn't UTF-8; JSON can hold both.
        fields[_STORED_AS_JSON] = json.dumps(unsendable)
    fields[MSG_ID] = f"dead:{writer}:{death.stream}:{death.sequence}:{time}:{death.deliveries or 0}"
    sent = [pair for pair in headers if pair[0] not in special]
    return Headers([*sent, *((name, value) for name, value in fields.items() if value)])


class Outline(NamedTuple):
    """The part of a record that identifies the death.

    :param sequence: the job's stream sequence
    :param consumer: the consumer that delivered the job, if the record states it
    :param reason: why the job died
    :param died_at: when it died, or when the record was stored
    :param created: when the work queue was created, in the server's own text; empty where the record doesn't state it
    :param deliveries: how often the job was delivered
    """

    sequence: int
    consumer: str | None
    reason: Reason
    died_at: datetime
    created: str
    deliveries: int | None


def read_outline(message: StoredMessage, stream: str) -> Outline | None:
    """Read which death a record describes, at a fraction of the time of :func:`read_record`.

    :param message: a message of the dead letter queue
    :param stream: the work queue that the message's subject names
    :return: ``None`` where the record doesn't state which job it is about
    """
    return _outline(message, dict(message.headers), stream)


class Record(NamedTuple):
    """A record in full.

    :param death: the death
    :param job: the job as it was stored
    :param parked: why it was parked, if it was
    :param origin: the task that published the job, where the record names it
    """

    death: Death
    job: StoredMessage
    parked: str | None
    origin: Origin | None


def read_record(message: StoredMessage, stream: str) -> Record | None:
    """Read a record in full.

    :param message: a message of the dead letter queue
    :param stream: the work queue that the message's subject names
    :return: ``None`` where the record doesn't state which job it is about
    """
    fields = dict(message.headers)
    if (outline := _outline(message, fields, stream)) is None:
        return None
    death = Death(
        stream=stream,
        created=outline.created,
        sequence=outline.sequence,
        consumer=outline.consumer,
        reason=outline.reason,
        died_at=outline.died_at,
        first_failed_at=_moment(fields.get(_FIRST_FAILURE)),
        deliveries=outline.deliveries,
        explanation=one_line(fields.get(_EXPLANATION)),
        error_class=one_line(fields.get(_ERROR_CLASS)),
        error_message=one_line(fields.get(_ERROR_MESSAGE)),
        traceback_digest=_matching(_DIGEST, fields.get(_TRACEBACK_DIGEST)),
        error_place=one_line(fields.get(_ERROR_PLACE)),
    )
    # The server's own headers of a record are about the record.
    own = [pair for pair in message.headers if not pair[0].startswith(PREFIX) and not is_servers(pair[0])]
    job = type(message)(
        subject=_matching(_SUBJECT_TEXT, fields.get(_SUBJECT)) or "",
        sequence=death.sequence,
        time=_time(fields.get(_TIME)),
        headers=(*own, *_parse_pairs(fields.get(_STORED_AS_JSON))),
        data=message.data,
    )
    return Record(death, job, one_line(fields.get(_PARKED)), parse_origin(fields.get(_ORIGIN)))


def _outline(message: StoredMessage, fields: Mapping[str, str], stream: str) -> Outline | None:
    consumer, sequence_in_subject = _address(message.subject, stream)
    sequence = _count(fields.get(_SEQUENCE)) or sequence_in_subject
    if not sequence:
        return None
    return Outline(
        sequence,
        _matching(_TOKEN, fields.get(_CONSUMER)) or consumer,
        _reason(fields.get(_REASON)),
        _moment(fields.get(_LAST_FAILURE)) or message.stored_at,
        _time(fields.get(_CREATED)),
        _count(fields.get(_DELIVERIES)),
    )


def one_line(text: str | None) -> str | None:
    """Turn any text into one line of at most a thousand characters, for headers, logs and tables.

    :return: ``None`` where nothing is left
    """
    if not text:
        return None
    words = _words(text)
    if words.isascii() and words.isprintable():
        # By far the most frequent case, in a twentieth of the time.
        return words[:_MAX_TEXT].rstrip() or None
    characters = ("\ufffd" if unicodedata.category(character) in _UNPRINTABLE else character for character in words)
    return "".join(characters)[:_MAX_TEXT].rstrip() or None


def _words(text: str) -> str:
    return " ".join(text[: 10 * _MAX_TEXT].split())


def _address(subject: str, stream: str) -> tuple[str | None, int | None]:
    """Return the consumer and the sequence that the subject of a record names."""
    for filter_ in (copy_filter(stream), parked_filter(stream)):
        if subject.startswith(prefix := filter_.removesuffix(">")):
            consumer, _, sequence = subject.removeprefix(prefix).partition(".")
            return None if consumer == NO_CONSUMER else consumer or None, _count(sequence)
    return None, None


def _is_sendable(name: str, value: str) -> bool:
    if name.startswith(PREFIX) or is_servers(name) or not _NAME.fullmatch(name):
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return value == value.strip() and not {"\r", "\n"} & set(value)


def _reason(text: str | None) -> Reason:
    try:
        return Reason(text or "")
    except ValueError:
        # A worker that states no reason has terminated the job all the same.
        return Reason.TERMINATED


def _moment(text: str | None) -> datetime | None:
    if not text:
        return None
    try:
        moment = datetime.fromisoformat(text)
        return moment.astimezone(UTC) if moment.tzinfo else moment.replace(tzinfo=UTC)
    except (ValueError, OverflowError):
        return None


def _time(text: str | None) -> str:
    return text if text and _moment(text) else ""


def _count(text: str | None) -> int | None:
    whole = _matching(_WHOLE, text)
    return int(whole) if whole else None


def _matching(pattern: re.Pattern[str], text: str | None) -> str | None:
    return text if text and pattern.fullmatch(text) else None


def _parse_pairs(text: str | None) -> Pairs:
    if not text:
        return ()
    try:
        pairs = json.loads(text)
    except (ValueError, RecursionError):
        return ()
    if not isinstance(pairs, list) or not all(_is_pair(pair) for pair in pairs):
        return ()
    return tuple((name, value) for name, value in pairs)


def _is_pair(value: object) -> bool:
    match value:
        case [str(), str()]:
            return True
    return False
