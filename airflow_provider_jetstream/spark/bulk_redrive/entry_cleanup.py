"""Removes the entries of redriven letters at the end of a bulk redrive, with a few purges in place of many deletes.

The audit distinguishes entries whose job is gone from letters, so an interruption before the end leaves nothing that
could be redriven twice; without an audit, each task removes the entries of its letters.
"""

from __future__ import annotations

import logging
from datetime import datetime
from typing import TYPE_CHECKING

import numpy as np

from airflow_provider_jetstream.jetstream.client.stream_api import stream_info
from airflow_provider_jetstream.jetstream.contract import MAX_DELIVERIES, TERMINATED, copy_filter
from airflow_provider_jetstream.jetstream.dead_letters.entry import EntryKind
from airflow_provider_jetstream.jetstream.errors import ApiError, NotFoundError, PermissionDeniedError, TransientError
from airflow_provider_jetstream.jetstream.redrive.removal import remove_entries
from airflow_provider_jetstream.spark.connections import run_on_own_connection

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from numpy.typing import NDArray

    from airflow_provider_jetstream.jetstream.client.blocking.connection import BlockingConnection
    from airflow_provider_jetstream.jetstream.dead_letters.scan import Scan

log = logging.getLogger(__name__)

# The server locks the stream during a purge.
_ENTRIES_PER_PURGE = 20_000


def remove_finished_entries(options: Mapping[str, str], scan: Scan, redriven: Collection[int]) -> int:
    """Remove the entries of redriven letters, and return how many remain; nothing is raised for those.

    :param options: connection options of the data source
    :param scan: the scan before the redrive
    :param redriven: stream sequences of the letters, all of them in the audit
    """
    try:
        try:
            return run_on_own_connection(options, lambda connection: _remove(connection, scan, redriven, purge=True))
        except PermissionDeniedError as error:
            # The server sends the denial to the connection and doesn't answer the request.
            log.warning("Finished entries of %s are removed one by one: %s", scan.dead_letter_queue, error)
            return run_on_own_connection(options, lambda connection: _remove(connection, scan, redriven, purge=False))
    except (PermissionDeniedError, TransientError) as error:
        log.warning("Finished entries of %s stay until the next redrive: %s", scan.dead_letter_queue, error)
        return sum(len(entries) for sequence, entries in scan.index.jobs() if sequence in redriven)


async def _remove(connection: BlockingConnection, scan: Scan, redriven: Collection[int], *, purge: bool) -> int:
    queue, index, letters = scan.queue, scan.index, scan.dead_letter_queue
    columns = index.columns()
    entries, kinds = np.array(columns.entries, np.uint64), np.array(columns.kinds, np.uint8)
    finished = np.isin(np.array(columns.sequences, np.uint64), np.fromiter(redriven, np.uint64, len(redriven)))
    purged = np.zeros(len(entries), bool)
    try:
        info = await stream_info(connection, letters)
        if datetime.fromisoformat(info["created"]) > scan.snapshot.taken_at:
            # The stream was recreated and counts from 1 again: its entries are about other letters.
            return 0
        # Unreadable entries must stay, and their sequences aren't known.
        if purge and not index.unreadable and not info["config"].get("deny_purge"):
            for subject, on_subject in _by_subject(queue.name, kinds):
                staying = entries[on_subject & ~finished]
                end = int(np.min(staying)) if len(staying) else index.read_to + 1
                to_purge = on_subject & finished & (entries < end)
                await _purge(connection, letters, subject, np.sort(entries[to_purge]))
                purged |= to_purge
    except (ApiError, NotFoundError, TransientError) as error:
        log.warning("Finished entries of %s are removed one by one, since they can't be purged: %s", letters, error)
    return await remove_entries(connection, queue, np.sort(entries[finished & ~purged]).tolist())


def _by_subject(queue: str, kinds: NDArray[np.uint8]) -> Iterator[tuple[str, NDArray[np.bool_]]]:
    """Return filters of a dead letter queue, each with the mask of all entries that it matches."""
    yield f"{MAX_DELIVERIES}.{queue}.*", kinds == EntryKind.DELIVERIES
    yield f"{TERMINATED}.{queue}.*", np.isin(kinds, (EntryKind.TERMINATION, EntryKind.DELETION))
    yield copy_filter(queue), np.isin(kinds, (EntryKind.COPY, EntryKind.PROVEN_COPY))


async def _purge(connection: BlockingConnection, letters: str, subject: str, entries: NDArray[np.uint64]) -> None:
    """Purge the first entries of a subject, which has no others up to the last of them."""
    for start in range(0, len(entries), _ENTRIES_PER_PURGE):
        last = int(entries[start : start + _ENTRIES_PER_PURGE][-1])
        await connection.api(f"STREAM.PURGE.{letters}", {"filter": subject, "seq": last + 1})
