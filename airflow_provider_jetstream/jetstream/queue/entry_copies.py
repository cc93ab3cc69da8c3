"""The defaults with which a queue learns what handlers of its dead letter queue have handled.

The retention of a dead letter queue decides: from a work queue or an interest stream an acknowledged entry is gone, so
the server keeps a copy of each entry in the audit, and reports there which entries were terminated.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from airflow_provider_jetstream.jetstream.client.subjects import covered_by_any, overlaps
from airflow_provider_jetstream.jetstream.contract import (
    audit_filter,
    dead_letter_subjects,
    entry_copies_filter,
    entry_terminations,
    handled_filter,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

_REMOVING = ("workqueue", "interest")


def audit_subjects(queue: object, dead_letters: Mapping[str, Any] | None) -> tuple[str, ...]:
    """Return the subjects that an audit has by default.

    :param dead_letters: the declared fields of the dead letter queue
    """
    if dead_letters is None:
        return (audit_filter(queue),)
    subjects = (audit_filter(queue), handled_filter(queue))
    if not _is_copied(queue, dead_letters):
        return subjects
    terminations = entry_terminations(dead_letters.get("name"))
    # The server allows one stream per subject.
    taken = any(overlaps(subject, terminations) for subject in _captured(queue, dead_letters))
    return (*subjects, entry_copies_filter(queue), *([] if taken else [terminations]))


def with_entry_copies(
    queue: object, dead_letters: Mapping[str, Any], audit: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Return the declared fields of a dead letter queue, with ``republish`` where it has that by default.

    Copies that nothing would store aren't made.

    :param audit: the fields of the audit, with its subjects
    """
    rule = {"src": ">", "dest": entry_copies_filter(queue)}
    subjects = audit.get("subjects") or () if audit else ()
    if not covered_by_any((subjects,) if isinstance(subjects, str) else subjects, rule["dest"]):
        return {field: value for field, value in dead_letters.items() if (field, value) != ("republish", rule)}
    copied = {"republish": rule} if _is_copied(queue, dead_letters) else {}
    return copied | dict(dead_letters)


def _is_copied(queue: object, dead_letters: Mapping[str, Any]) -> bool:
    """Return whether an acknowledgement removes entries, and all of them are about jobs of this queue.

    A stream republishes to one destination only, so the entries of a dead letter queue that several work queues share
    aren't copied.
    """
    own = dead_letter_subjects(queue)
    captured = _captured(queue, dead_letters)
    return dead_letters.get("retention") in _REMOVING and all(covered_by_any(own, subject) for subject in captured)


def _captured(queue: object, dead_letters: Mapping[str, Any]) -> tuple[str, ...]:
    subjects = dead_letters.get("subjects") or dead_letter_subjects(queue)
    return (subjects,) if isinstance(subjects, str) else tuple(str(subject) for subject in subjects)
