"""Repairs of a letter before its redrive: what a transform may change, and what it changed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from airflow_provider_jetstream.jetstream.client.concurrency import in_thread
from airflow_provider_jetstream.jetstream.client.headers import is_servers
from airflow_provider_jetstream.jetstream.client.subjects import subject_problem
from airflow_provider_jetstream.jetstream.contract import (
    REDRIVE_CONSUMER,
    REDRIVE_COUNT,
    REDRIVE_SEQUENCE,
    REDRIVE_STREAM,
)
from airflow_provider_jetstream.jetstream.errors import JobError, RedriveError
from airflow_provider_jetstream.jetstream.field_names import checked_field_names
from airflow_provider_jetstream.jetstream.line_text import one_line, shown_value
from airflow_provider_jetstream.jetstream.publishing.job import Job
from airflow_provider_jetstream.jetstream.publishing.preparation import check_headers
from airflow_provider_jetstream.jetstream.task_values import TaskValue, packed_body

if TYPE_CHECKING:
    from collections.abc import Callable

    from airflow_provider_jetstream.jetstream.client.headers import Pairs
    from airflow_provider_jetstream.jetstream.dead_letters.letter import DeadLetter
    from airflow_provider_jetstream.jetstream.redrive.json_patch import JsonPatch

ORIGIN_HEADERS = frozenset({REDRIVE_COUNT, REDRIVE_STREAM, REDRIVE_SEQUENCE, REDRIVE_CONSUMER})

_MAX_VALUE = 500
# The audit's record has to fit into a message, whatever the body.
_MAX_CHANGES = 100_000
# Smaller bodies are patched in less time than a thread needs to begin.
_AT_ONCE = 4_096


class _Unchanged:
    def __repr__(self) -> str:
        return "UNCHANGED"


UNCHANGED: Final = _Unchanged()

# What code of an author may raise: of one letter, not of the redrive. That code runs between two awaits, so that a
# cancellation that it raises isn't the redrive's; what Airflow raises to end the task is none of these.
_FAULTS: Final = (Exception, asyncio.CancelledError, GeneratorExit)


@checked_field_names(JobError)
@dataclass(frozen=True, slots=True)
class Repair(TaskValue):
    """The changes that a transform makes to a letter.

    :param body: the new body, as :class:`~airflow_provider_jetstream.jetstream.Job` takes it; unchanged where absent
    :param headers: new values of headers, several in a tuple; ``None`` removes a header. Other headers are unchanged
    :param subject: the new job's subject, one of the same queue; as in the request where absent
    """

    body: Any = UNCHANGED
    headers: Mapping[str, str | tuple[str, ...] | None] = field(default_factory=dict)
    subject: str | None = None

    def serialize(self) -> dict[str, Any]:
        """Return what an XCom stores of the changes."""
        values = TaskValue.serialize(self)
        return values | {"body": packed_body(self.body)} if "body" in values else values


Transform: TypeAlias = "Callable[[DeadLetter], Repair | None]"


@dataclass(frozen=True, slots=True)
class Content:
    """Body and headers of a letter's new job.

    :param body: the body
    :param headers: the job's own headers, none of the server's
    :param changes: what differs from the letter, for the audit; ``None`` where nothing does
    :param subject: the subject that the repair names, if it names one
    """

    body: bytes
    headers: Pairs
    changes: dict[str, Any] | None = None
    subject: str | None = None


async def new_content(letter: DeadLetter, transform: Transform | None, patch: JsonPatch | None) -> Content:
    """Return what :func:`repaired_content` does; a patch of a large body is applied beside the event loop.

    :raises RedriveError: as there
    """
    if patch is None or len(letter.body) < _AT_ONCE:
        return repaired_content(letter, transform, patch)
    return await in_thread(lambda: repaired_content(letter, transform, patch))


def repaired_content(letter: DeadLetter, transform: Transform | None, patch: JsonPatch | None = None) -> Content:
    """Return the content of a letter's new job, repaired by a transform or a patch if there is one.

    :raises RedriveError: the transform raised, or returned something that can't be sent; or the patch can't be applied
    """
    own = _own_headers(letter)
    if patch is not None:
        return _patched(letter, patch, own)
    if transform is None:
        return Content(letter.body, own)
    try:
        repair = transform(letter)
    except _FAULTS as error:
        raise RedriveError(f"the transform raised {_described(error)}; the letter is untouched") from error
    if repair is None:
        return Content(letter.body, own)
    if not isinstance(repair, Repair):
        if isinstance(repair, Coroutine):
            # Python would warn that nobody awaits it.
            repair.close()
        raise RedriveError(
            f"expected the transform to return a Repair, or None for no change, found {type(repair).__name__}; the"
            " letter is untouched"
        )
    try:
        return apply_repair(letter, repair)
    except JobError as error:
        raise RedriveError(f"the transform's repair can't be sent: {error}; the letter is untouched") from None
    except _FAULTS as error:
        # Values of an author's own classes may raise wherever they are looked at.
        raise RedriveError(
            f"the transform's repair can't be sent: it can't be read ({_described(error)}); the letter is untouched"
        ) from error


def apply_repair(letter: DeadLetter, repair: Repair) -> Content:
    """Return the content of a letter's new job with the changes of a repair.

    :raises JobError: it is nothing that a job can have
    """
    own = _own_headers(letter)
    _check_subject(letter, repair.subject)
    body = letter.body if repair.body is UNCHANGED else Job(repair.body).payload()
    _check_headers(letter, repair.headers)
    unchanged = tuple(pair for pair in own if pair[0] not in repair.headers)
    added = tuple((name, value) for name, values in repair.headers.items() for value in _values(values))
    return Content(body, (*unchanged, *added), _changes(letter.body, body, own, repair.headers), repair.subject)


def _own_headers(letter: DeadLetter) -> Pairs:
    return tuple(pair for pair in letter.headers if not is_servers(pair[0]))


def _described(error: BaseException) -> str:
    """Return an error in a line that the report and the audit can hold, whatever an author's class makes of it."""
    try:
        text = one_line(str(error))
    except Exception:  # noqa: BLE001 - an error that can't be shown is named by its type
        text = None
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _patched(letter: DeadLetter, patch: JsonPatch, own: Pairs) -> Content:
    body = patch.patched(letter.body)
    if body == letter.body:
        return Content(body, own)
    # The fields of a record are shortened, and as Python reads them: the digests say which bodies these were.
    digests = {"before": sha256(letter.body).hexdigest(), "after": sha256(body).hexdigest()}
    return Content(body, own, (_changes(letter.body, body, own, {}) or {}) | {"sha256": digests})


def _check_subject(letter: DeadLetter, subject: object) -> None:
    # What is stored already is the queue's business, whatever its characters.
    if subject is None or subject == letter.subject:
        return
    if not isinstance(subject, str):
        raise JobError(f"expected a subject as text, found {type(subject).__name__}")
    if problem := subject_problem(subject, wildcards=False):
        raise JobError(f"expected a subject that jobs can have, found {shown_value(subject)}: {problem}")


def _check_headers(letter: DeadLetter, headers: object) -> None:
    if not isinstance(headers, Mapping) or not all(isinstance(name, str) for name in headers):
        raise JobError(f"expected headers by name, found {shown_value(headers)}")
    if reserved := sorted(ORIGIN_HEADERS & set(headers)):
        raise JobError(f"expected the job's own headers, found {reserved[0]}, which records its redrives")
    for name, values in headers.items():
        for value in values if isinstance(values, tuple) else (values,):
            # What is stored can be sent, even if it isn't UTF-8.
            kept = value is None or (name, value) in letter.headers
            check_headers(letter.job_id, {} if kept else {name: value})


def _values(values: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return values if isinstance(values, tuple) else () if values is None else (values,)


def _changes(
    before: bytes, after: bytes, headers: Pairs, repaired: Mapping[str, str | tuple[str, ...] | None]
) -> dict[str, Any] | None:
    changes: dict[str, Any] = {}
    if before != after:
        changes["body"] = _body_changes(before, after)
    old = {name: [value for key, value in headers if key == name] for name in repaired}
    if header_changes := {
        name: {"before": [_short(item) for item in old[name]] or None, "after": value and _short(value)}
        for name, value in repaired.items()
        if old[name] != list(_values(value))
    }:
        changes["headers"] = header_changes
    if len(json.dumps(changes)) > _MAX_CHANGES:
        changes = {"body": _digests(before, after), "headers": {"changed": len(header_changes)}}
    # JSON can escape what UTF-8 can't represent, and headers may be any bytes; the record has to be UTF-8.
    text = json.dumps(changes, ensure_ascii=False).encode("utf-8", "replace")
    return json.loads(text) or None


def _body_changes(before: bytes, after: bytes) -> dict[str, Any]:
    old, new = _object(before), _object(after)
    if old is None or new is None:
        return _digests(before, after)
    try:
        fields = _field_changes(old, new)
        json.dumps(fields, allow_nan=False)
    except (ValueError, RecursionError):
        # A number that JSON hasn't, or too many levels.
        return _digests(before, after)
    # Without a changed field only the JSON text differs.
    return fields or _digests(before, after)


def _field_changes(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    return {
        key: {"before": _short(old[key]) if key in old else None, "after": _short(new[key]) if key in new else None}
        for key in sorted({*old, *new})
        if key not in old or key not in new or old[key] != new[key]
    }


def _object(body: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _digests(before: bytes, after: bytes) -> dict[str, Any]:
    return {"before": _digest(before), "after": _digest(after)}


def _digest(body: bytes) -> dict[str, Any]:
    return {"bytes": len(body), "sha256": sha256(body).hexdigest()}


def _short(value: Any) -> Any:
    text = value if isinstance(value, str) else json.dumps(value)
    return value if len(text) <= _MAX_VALUE else f"{text[:_MAX_VALUE]}… ({len(text)} characters)"
