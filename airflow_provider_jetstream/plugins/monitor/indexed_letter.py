"""What the index of a queue's letters holds of each."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from airflow_provider_jetstream.jetstream.client.wire_text import readable_text
from airflow_provider_jetstream.jetstream.dead_letters.group import group_of
from airflow_provider_jetstream.jetstream.dead_letters.letter import task_key_of
from airflow_provider_jetstream.plugins.monitor.letter_query import KIND_FIELDS, LetterKind

if TYPE_CHECKING:
    from datetime import datetime

    from airflow_provider_jetstream.jetstream.dead_letters.letter import DeadLetter

_LONGEST_TEXT = 500
_HASH_BITS = 2**64 - 1


class IndexedLetter(NamedTuple):
    """The indexed fields of a letter.

    :param subject: as people read it
    :param entry: the last entry of the dead letter queue about it; 0 where there is none
    :param job: a digest of its job's id, of this process
    :param text: the error's text or the worker's explanation
    """

    kind: LetterKind
    subject: str
    died_at: datetime
    entry: int
    job: int
    text: str | None

    @classmethod
    def of(cls, letter: DeadLetter) -> IndexedLetter:
        """Return the indexed fields of a letter."""
        map_index = letter.origin.map_index if letter.origin else None
        unknown = letter.origin is None and task_key_of(letter.headers) is not None
        kind = LetterKind(letter.parked is not None, map_index, unknown, group_of(letter, KIND_FIELDS))
        text = letter.death.error_message or letter.death.explanation
        return cls(
            kind,
            readable_text(letter.subject),
            letter.death.died_at,
            max(letter.entries, default=0),
            digest_of(readable_text(letter.job_id)),
            text and readable_text(text)[:_LONGEST_TEXT],
        )


def digest_of(job_id: str) -> int:
    """Return a digest of a job's id, as people read it; another one in each process."""
    return hash(job_id) & _HASH_BITS
