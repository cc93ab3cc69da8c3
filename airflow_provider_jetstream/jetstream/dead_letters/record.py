"""The form in which a dead letter is kept: the job's body, its own headers, and headers that tell of its death.

Workers that give up a job write it, and so does a scan that sees a letter for the first time. The header contract is
described in docs/dead-letters.md; its version is a header of its own, so that later ones can be told apart.
"""

from __future__ import annotations

import json
import re
import unicodedata
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, NamedTuple

from airflow_provider_jetstream.jetstream.client.headers import Headers, Pairs, is_servers
from airflow_provider_jetstream.jetstream.contract import MSG_ID, NO_CONSUMER, copy_filter, parked_filter
from airflow_provider_jetstream.jetstream.dead_letters.death import Death, Reason

if TYPE_CHECKING:
    from collections.abc import Mapping

    from airflow_provider_jetstream.jetstream.client.message import StoredMessage

PREFIX = "Dead-Letter-"
VERSION = "1"
# Names a scan as the teller of a death: it has proved it, while a worker may have been stopped before its last word.
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
_KEPT = f"{PREFIX}Kept-Headers"

_LONGEST_TEXT = 1_000
# The client refuses other names, and changes values with line breaks in them or white space around them.
_NAME = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_DIGEST = re.compile(r"[0-9a-f]{8,64}")
_WHOLE = re.compile(r"[0-9]{1,20}")
_TOKEN = re.compile(r"[^\s.*>\ud800-\udfff]+")
_SUBJECT_TEXT = re.compile(r"[^\s\ud800-\udfff]+")
_UNSHOWN = frozenset({"Cc", "Cs"})


def record_headers(
    death: Death, *, subject: str, time: str, headers: Pairs, writer: str, parked: str | None = None
) -> Headers:
    """Give the headers under which a dead letter is kept.

    :param death: what is known about its end
    :param subject: the job's subject
    :param time: when the job was stored, in the server's own text or ISO 8601
    :param headers: the job's headers as they were stored
    :param teller: who keeps it; the same letter is kept once per teller
    :param parked: why it is taken out of circulation, if it is
    :return: headers that :func:`read_record` takes apart again
    """
    # Before the fingerprint is taken, so that whoever reads the record finds the same one.
    death = replace(
        death,
        explanation=one_line(death.explanation),
        error_class=one_line(death.error_class),
        error_message=one_line(death.error_message),
    )
    told = {
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
    }
    # All values of a name go the same way, so that they keep their order.
    special = {name for name, value in headers if not _sendable(name, value)}
    if kept := [pair for pair in headers if pair[0] in special]:
        # The server would act on its own ones, and the client can't send what isn't UTF-8; JSON keeps both.
        told[_KEPT] = json.dumps(kept)
    told[MSG_ID] = f"dead:{writer}:{death.stream}:{death.sequence}:{time}:{death.deliveries or 0}"
    sent = [pair for pair in headers if pair[0] not in special]
    return Headers([*sent, *((name, value) for name, value in told.items() if value)])


class Outline(NamedTuple):
    """What a kept letter says about which death it is of.

    :param sequence: the job's stream sequence
    :param consumer: who delivered the job, as far as it says
    :param reason: why it died
    :param died_at: when, or when the letter was kept
    :param created: when the work queue was created, in the server's own text; empty where it doesn't say
    :param deliveries: how often the job was delivered
    """

    sequence: int
    consumer: str | None
    reason: Reason
    died_at: datetime
    created: str
    deliveries: int | None


def read_outline(message: StoredMessage, stream: str) -> Outline | None:
    """Tell which death a kept letter is of, at a fraction of the price of :func:`read_record`.

    :param message: a message of the dead letter queue
    :param stream: the work queue whose letter it is, as its subject says
    :return: the death in short; ``None`` where it doesn't say which job it is
    """
    return _outline(message, dict(message.headers), stream)


def read_record(message: StoredMessage, stream: str) -> tuple[Death, StoredMessage, str | None] | None:
    """Take a kept letter apart.

    :param message: a message of the dead letter queue
    :param stream: the work queue whose letter it is, as its subject says
    :return: the death, the job as it was stored, and why it was parked; ``None`` where it doesn't say which job it is
    """
    told = dict(message.headers)
    if (outline := _outline(message, told, stream)) is None:
        return None
    death = Death(
        stream=stream,
        created=outline.created,
        sequence=outline.sequence,
        consumer=outline.consumer,
        reason=outline.reason,
        died_at=outline.died_at,
        first_failed_at=_moment(told.get(_FIRST_FAILURE)),
        deliveries=outline.deliveries,
        explanation=one_line(told.get(_EXPLANATION)),
        error_class=one_line(told.get(_ERROR_CLASS)),
        error_message=one_line(told.get(_ERROR_MESSAGE)),
        traceback_digest=_matching(_DIGEST, told.get(_TRACEBACK_DIGEST)),
        error_place=one_line(told.get(_ERROR_PLACE)),
    )
    # What the server's own headers say on a copy is about the copy.
    own = [pair for pair in message.headers if not pair[0].startswith(PREFIX) and not is_servers(pair[0])]
    job = type(message)(
        subject=_matching(_SUBJECT_TEXT, told.get(_SUBJECT)) or "",
        sequence=death.sequence,
        time=_time(told.get(_TIME)),
        headers=(*own, *_kept(told.get(_KEPT))),
        data=message.data,
    )
    return death, job, one_line(told.get(_PARKED))


def _outline(message: StoredMessage, told: Mapping[str, str], stream: str) -> Outline | None:
    consumer, addressed = _address(message.subject, stream)
    sequence = _count(told.get(_SEQUENCE)) or addressed
    if not sequence:
        return None
    return Outline(
        sequence,
        _matching(_TOKEN, told.get(_CONSUMER)) or consumer,
        _reason(told.get(_REASON)),
        _moment(told.get(_LAST_FAILURE)) or message.stored_at,
        _time(told.get(_CREATED)),
        _count(told.get(_DELIVERIES)),
    )


def one_line(text: str | None) -> str | None:
    """Make any text fit for a header, a log line and a table.

    :param text: the text
    :return: one line of at most a thousand characters; ``None`` where nothing is left
    """
    if not text:
        return None
    words = _words(text)
    if words.isascii() and words.isprintable():
        # By far the most frequent, and a twentieth of the price.
        return words[:_LONGEST_TEXT].rstrip() or None
    shown = ("\ufffd" if unicodedata.category(character) in _UNSHOWN else character for character in words)
    return "".join(shown)[:_LONGEST_TEXT].rstrip() or None


def _words(text: str) -> str:
    return " ".join(text[: 10 * _LONGEST_TEXT].split())


def _address(subject: str, stream: str) -> tuple[str | None, int | None]:
    """Tell which consumer and which sequence the subject of a copy names."""
    for filter_ in (copy_filter(stream), parked_filter(stream)):
        if subject.startswith(prefix := filter_.removesuffix(">")):
            consumer, _, sequence = subject.removeprefix(prefix).partition(".")
            return None if consumer == NO_CONSUMER else consumer or None, _count(sequence)
    return None, None


def _sendable(name: str, value: str) -> bool:
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
        # A worker that doesn't say why has given it up all the same.
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


def _kept(text: str | None) -> Pairs:
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
