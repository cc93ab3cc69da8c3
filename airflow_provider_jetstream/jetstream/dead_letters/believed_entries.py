"""Which entries about a job count, by the consumer whose workers brought them about; nothing is read here.

The role of a worker is for one consumer, but a worker may name the job of any: in the record that it stores, and in
its ``+TERM``, of which the server announces a termination by that consumer although the consumer never had the job
(nats-server 2.10 to 2.15). So what workers bring about counts only from the consumer that had the job.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from airflow_provider_jetstream.jetstream.client.subjects import covered_by_any
from airflow_provider_jetstream.jetstream.client.wire_text import UNKNOWN_BYTE
from airflow_provider_jetstream.jetstream.dead_letters.entry import ADVISORIES, EntryKind
from airflow_provider_jetstream.jetstream.queue.filter_marks import unproved_up_to

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from airflow_provider_jetstream.jetstream.dead_letters.entry import Entry
    from airflow_provider_jetstream.jetstream.queue.snapshot import QueueSnapshot

_BY_WORKERS = frozenset({EntryKind.TERMINATION, EntryKind.COPY, EntryKind.HANDLED_COPY})
_STATED = _BY_WORKERS | {EntryKind.PROVEN_COPY, EntryKind.PARKED}


def need_archive(entries: Iterable[Entry]) -> bool:
    """Return whether entries about a job that is gone are held against its copy in the archive."""
    return not _STATED.isdisjoint([entry.kind for entry in entries])


def may_have_had(snapshot: QueueSnapshot, consumer: str | None, sequence: int, subject: str) -> bool:
    """Return whether a consumer may have delivered a job: its filters match the subject, or matched others before.

    Of a consumer that is gone, and of a subject of which only a part is known, it isn't known.

    :param subject: the job's
    """
    state = snapshot.consumers.get(consumer or "")
    if state is None or UNKNOWN_BYTE in subject or covered_by_any(state.filters, subject):
        return True
    return sequence <= unproved_up_to(snapshot.config, state.name, state.filters)


def believed_entries(
    snapshot: QueueSnapshot, sequence: int, subject: str | None, entries: Sequence[Entry]
) -> tuple[Entry, ...]:
    """Return the entries about a job without those of consumers that didn't have the job.

    :param sequence: the job's stream sequence
    :param subject: its subject, as the queue or the archive stores the job; ``None`` where neither does
    """
    if len({*snapshot.consumers, *(entry.consumer for entry in entries)}) == 1:
        return tuple(entries)
    if subject is None:
        return _of_named(entries)
    return tuple(
        entry
        for entry in entries
        if entry.kind not in _BY_WORKERS or may_have_had(snapshot, entry.consumer, sequence, subject)
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
    return tuple(entry for entry in entries if entry.kind not in _BY_WORKERS or entry.consumer in {None, *believed})
