"""The record of a dead letter: the job's body, its own headers, and headers that describe its death.

Workers write a record when they terminate a job, and scans when they find a letter without one.
docs/dead-letter-record.md describes the headers; their version is a header of its own.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, NamedTuple

from pydantic import BaseModel, ConfigDict, ValidationError

from airflow_provider_jetstream.jetstream.client.headers import (
    ExactValue,
    Headers,
    Pairs,
    exact_pair,
    first,
    is_servers,
)
from airflow_provider_jetstream.jetstream.client.wire_text import UNKNOWN_BYTE, is_encodable
from airflow_provider_jetstream.jetstream.contract import AIRFLOW_TASK, MSG_ID, NO_CONSUMER, copy_filter, parked_filter
from airflow_provider_jetstream.jetstream.dead_letters.death import Death, Reason
from airflow_provider_jetstream.jetstream.evidence import proves_nothing
from airflow_provider_jetstream.jetstream.limits import LINE
from airflow_provider_jetstream.jetstream.line_text import one_line
from airflow_provider_jetstream.jetstream.origin import Origin

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from airflow_provider_jetstream.jetstream.client.headers import Pairs
    from airflow_provider_jetstream.jetstream.client.message import StoredMessage


_MAX_TEXT = 10_000


class _TaskNames(BaseModel):
    """The form in which a record names a task."""

    model_config = ConfigDict(strict=True)

    dag_id: str
    run_id: str
    task_id: str
    map_index: int = -1


def format_origin(origin: Origin) -> str:
    """Return a task as the record of a dead letter names it."""
    return json.dumps({name: getattr(origin, name) for name in _TaskNames.model_fields})


def parse_origin(text: str | None) -> Origin | None:
    """Read the task that a record names; ``None`` where it names none."""
    if not text or len(text) > _MAX_TEXT:
        return None
    try:
        names = _TaskNames.model_validate_json(text.encode(errors="replace"))
    except ValidationError:
        return None
    return Origin(names.dag_id, names.run_id, names.task_id, names.map_index)


# Clients refuse other names, and change values with line breaks in them or white space around them.
_NAME = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_WITH_LINE = 3


def needs_json(name: str, value: str) -> bool:
    """Return whether the server would act on a header, or a client read it as another one."""
    if is_servers(name) or not _NAME.fullmatch(name) or isinstance(value, ExactValue):
        return True
    try:
        value.encode()
    except UnicodeEncodeError:
        return True
    return value != value.strip() or bool({"\r", "\n"} & set(value))


def format_pairs(pairs: Iterable[tuple[str, str]]) -> str:
    """Format headers as a list of ``[name, value]``, or ``[name, value, line]`` where the line has another form."""
    return json.dumps(
        [[name, value, value.line] if isinstance(value, ExactValue) else [name, value] for name, value in pairs]
    )


def parse_pairs(text: str | None) -> Pairs:
    """Parse what :func:`format_pairs` has formatted; nothing where it is anything else."""
    if not text:
        return ()
    try:
        pairs = json.loads(text)
    except (ValueError, RecursionError):
        return ()
    if not isinstance(pairs, list) or not all(_is_pair(pair) for pair in pairs):
        return ()
    return tuple(exact_pair(*pair) if len(pair) == _WITH_LINE else (pair[0], pair[1]) for pair in pairs)


def _is_pair(value: object) -> bool:
    match value:
        case [str(), str()]:
            return True
        case [str(), str(), str(line)]:
            return is_encodable(line)
    return False


PREFIX = "Dead-Letter-"
VERSION = "1"
# The writer of a scan's records, which have subjects of their own.
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
_TRACEBACK = f"{PREFIX}Traceback"
_WORKER = f"{PREFIX}Worker"
_SECONDS = f"{PREFIX}Seconds"
_FINGERPRINT = f"{PREFIX}Fingerprint"
_PARKED = f"{PREFIX}Parked"
_ORIGIN = f"{PREFIX}Origin"
_STORED_AS_JSON = f"{PREFIX}Kept-Headers"

# The clocks of a cluster's servers differ by less.
_CLOCK_DIFFERENCE = timedelta(minutes=5)
_DIGEST = re.compile(r"[0-9a-f]{8,64}")
_WHOLE = re.compile(r"[0-9]{1,20}")
_DECIMAL = re.compile(r"[0-9]{1,9}(\.[0-9]{1,9})?")
# Of the functions of a traceback.
_BETWEEN = " > "
_TOKEN = re.compile(r"[^\s.*>\ud800-\udfff]+")
# Bytes that aren't UTF-8 are escaped as U+DC80 to U+DCFF.
_SUBJECT_TEXT = re.compile(r"[^\s\ud800-\udc7f\udd00-\udfff]+", re.ASCII)


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
        _SUBJECT: subject.replace(UNKNOWN_BYTE, "\ufffd"),
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
        _TRACEBACK: _traceback_line(death.traceback),
        _WORKER: one_line(death.worker),
        _SECONDS: None if death.seconds is None else f"{death.seconds:.3f}",
        _FINGERPRINT: death.fingerprint,
        _PARKED: one_line(parked),
        _ORIGIN: format_origin(origin) if origin and first(headers, AIRFLOW_TASK) else None,
    }
    # All values of a name are stored in the same form, so that they keep their order.
    special = {name for name, value in headers if name.startswith(PREFIX) or needs_json(name, value)}
    if as_json := [pair for pair in headers if pair[0] in special]:
        fields[_STORED_AS_JSON] = format_pairs(as_json)
    fields[MSG_ID] = f"dead:{writer}:{death.stream}:{death.sequence}:{time}:{death.deliveries or 0}"
    sent = [pair for pair in headers if pair[0] not in special]
    return Headers([*sent, *((name, value) for name, value in fields.items() if value)])


def _traceback_line(functions: Sequence[str]) -> str | None:
    """Return as many of the functions as one line holds, from the innermost on."""
    line = ""
    for function in reversed(functions):
        longer = f"{function}{_BETWEEN}{line}" if line else function
        if len(longer) > LINE:
            break
        line = longer
    return one_line(line)


class Outline(NamedTuple):
    """The part of a record that identifies the death.

    :param sequence: the job's stream sequence
    :param consumer: the consumer that delivered the job, if the record states it
    :param reason: why the job died
    :param died_at: when it died, and never later than the record was stored; or when the record was stored
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


def is_copy_of(death: Death, body: bytes, message: StoredMessage) -> bool:
    """Return whether a message of the dead letter queue is a record of a job, with its body.

    :param death: the job's
    """
    record = read_record(message, death.stream)
    return record is not None and record.death.sequence == death.sequence and message.data == body


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
        first_failed_at=_past(fields.get(_FIRST_FAILURE), message.stored_at),
        deliveries=outline.deliveries,
        explanation=one_line(fields.get(_EXPLANATION)),
        error_class=one_line(fields.get(_ERROR_CLASS)),
        error_message=one_line(fields.get(_ERROR_MESSAGE)),
        traceback_digest=_matching(_DIGEST, fields.get(_TRACEBACK_DIGEST)),
        error_place=one_line(fields.get(_ERROR_PLACE)),
        traceback=tuple(part for part in (one_line(fields.get(_TRACEBACK)) or "").split(_BETWEEN) if ":" in part),
        worker=one_line(fields.get(_WORKER)),
        seconds=float(seconds) if (seconds := _matching(_DECIMAL, fields.get(_SECONDS))) else None,
    )
    # The server's own headers of a record are about the record.
    own = [pair for pair in message.headers if not pair[0].startswith(PREFIX) and not is_servers(pair[0])]
    job = type(message)(
        # Who wrote the record may have read the subject in part only.
        subject=(_matching(_SUBJECT_TEXT, fields.get(_SUBJECT)) or "").replace("\ufffd", UNKNOWN_BYTE),
        sequence=death.sequence,
        time=_time(fields.get(_TIME), message.stored_at + _CLOCK_DIFFERENCE),
        headers=(*own, *parse_pairs(fields.get(_STORED_AS_JSON))),
        data=message.data,
    )
    return Record(death, job, one_line(fields.get(_PARKED)), parse_origin(fields.get(_ORIGIN)))


def _outline(message: StoredMessage, fields: Mapping[str, str], stream: str) -> Outline | None:
    if proves_nothing(message):
        return None
    consumer, sequence_in_subject = _address(message.subject, stream)
    sequence = _count(fields.get(_SEQUENCE)) or sequence_in_subject
    if not sequence:
        return None
    return Outline(
        sequence,
        _matching(_TOKEN, fields.get(_CONSUMER)) or consumer,
        _reason(fields.get(_REASON)),
        _past(fields.get(_LAST_FAILURE), message.stored_at) or message.stored_at,
        _time(fields.get(_CREATED)),
        _count(fields.get(_DELIVERIES)),
    )


def _address(subject: str, stream: str) -> tuple[str | None, int | None]:
    """Return the consumer and the sequence that the subject of a record names."""
    for filter_ in (copy_filter(stream), parked_filter(stream)):
        if subject.startswith(prefix := filter_.removesuffix(">")):
            consumer, _, sequence = subject.removeprefix(prefix).partition(".")
            return None if consumer == NO_CONSUMER else consumer or None, _count(sequence)
    return None, None


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


def _past(text: str | None, now: datetime) -> datetime | None:
    """Parse a time that anybody may have written; a later time than that of the server is wrong."""
    moment = _moment(text)
    return min(moment, now) if moment else None


def _time(text: str | None, latest: datetime | None = None) -> str:
    """Return a server's own text of a time; empty where no server can have written it."""
    moment = _moment(text)
    if not text or moment is None or (latest and moment > latest):
        return ""
    # With its zone, or it can't be compared with other times.
    return text if datetime.fromisoformat(text).tzinfo else ""


def _count(text: str | None) -> int | None:
    whole = _matching(_WHOLE, text)
    return int(whole) if whole else None


def _matching(pattern: re.Pattern[str], text: str | None) -> str | None:
    return text if text and pattern.fullmatch(text) else None
