"""Which entries about a job count, by the consumer whose workers brought them about; nothing is read here.

A worker may name the job of any consumer, so what it brings about counts only from one that may have had the job
(``queue/filter_marks.py``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from airflow_provider_jetstream.jetstream.dead_letters.entry import ADVISORIES, EntryKind

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from airflow_provider_jetstream.jetstream.client.message import StoredMessage
    from airflow_provider_jetstream.jetstream.dead_letters.entry import Entry
    from airflow_provider_jetstream.jetstream.queue.snapshot import QueueSnapshot

BY_WORKERS = frozenset({EntryKind.TERMINATION, EntryKind.COPY, EntryKind.HANDLED_CLAIM})
_STATED = BY_WORKERS | {EntryKind.PROVEN_COPY, EntryKind.PARKED}


def need_archive(entries: Iterable[Entry]) -> bool:
    """Return whether entries about a job that is gone are held against its copy in the archive."""
    return not _STATED.isdisjoint([entry.kind for entry in entries])


def believed_entries(
    snapshot: QueueSnapshot, sequence: int, job: StoredMessage | None, entries: Sequence[Entry]
) -> tuple[Entry, ...]:
    """Return the entries about a job without those of consumers that didn't have the job.

    :param sequence: the job's stream sequence
    :param job: as the queue or the archive stores it; ``None`` where neither does
    """
    if len({*snapshot.consumers, *(entry.consumer for entry in entries)}) == 1:
        return tuple(entries)
    if job is None:
        return _of_named(entries)
    return tuple(
        entry
        for entry in entries
        if entry.kind not in BY_WORKERS or snapshot.may_have_had(entry.consumer, sequence, job.subject, job.stored_at)
    )


def _of_named(entries: Sequence[Entry]) -> tuple[Entry, ...]:
    """Return entries without the records of consumers that no advisory names, and without contradicting terminations.

    Nothing tells which of two consumers had a job that is gone; that one used up the deliveries is the server's word.
    """
    named = {entry.consumer for entry in entries if entry.kind in ADVISORIES and entry.kind != EntryKind.TERMINATION}
    terminated = {entry.consumer for entry in entries if entry.kind == EntryKind.TERMINATION}
    if not named | terminated:
        return tuple(entries)
    believed = named or (terminated if len(terminated) == 1 else set())
    return tuple(entry for entry in entries if entry.kind not in BY_WORKERS or entry.consumer in {None, *believed})
