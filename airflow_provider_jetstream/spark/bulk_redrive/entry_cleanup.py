"""Removing the entries of redriven letters at the end of a bulk redrive: a few purges, not a request for each of them.

Entries whose job is gone are told from letters by the audit, so that one that is cut off before leaves nothing that
could be redriven twice; a queue without an audit has them removed letter by letter.
"""

from __future__ import annotations

import logging
from datetime import datetime
from typing import TYPE_CHECKING

import numpy as np

from airflow_provider_jetstream.jetstream.client.stream_api import stream_info
from airflow_provider_jetstream.jetstream.contract import MAX_DELIVERIES, TERMINATED, copy_filter
from airflow_provider_jetstream.jetstream.dead_letters.entry import EntryKind
from airflow_provider_jetstream.jetstream.errors import ApiError, AuthenticationError, NotFoundError, TransientError
from airflow_provider_jetstream.jetstream.redrive.removal import remove_entries
from airflow_provider_jetstream.spark.connections import run_on_own_connection

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from numpy.typing import NDArray

    from airflow_provider_jetstream.jetstream.client.blocking.connection import BlockingConnection
    from airflow_provider_jetstream.jetstream.dead_letters.scan import Scan

log = logging.getLogger(__name__)

# The server keeps everybody else from the stream during a purge.
_AT_A_TIME = 20_000


def remove_finished_entries(given: Mapping[str, str], scan: Scan, redriven: Collection[int]) -> int:
    """Remove what a dead letter queue says about letters that are redriven; nothing is raised for what stays.

    :param given: where and as whom, as the data source's options say it
    :param scan: the look at the queue before
    :param redriven: stream sequences of the letters, all of them in the audit
    :return: how many entries had to stay, as far as is known
    """
    try:
        try:
            return run_on_own_connection(given, lambda over: _clear(over, scan, redriven, purge=True))
        except AuthenticationError as error:
            # The server says so to the connection and doesn't answer the request.
            log.warning("Finished entries of %s are removed one by one: %s", scan.dead_letter_queue, error)
            return run_on_own_connection(given, lambda over: _clear(over, scan, redriven, purge=False))
    except (AuthenticationError, TransientError) as error:
        log.warning("Finished entries of %s stay until the next redrive: %s", scan.dead_letter_queue, error)
        return sum(len(told) for sequence, told in scan.index.jobs() if sequence in redriven)


async def _clear(connection: BlockingConnection, scan: Scan, redriven: Collection[int], *, purge: bool) -> int:
    queue, index, letters = scan.queue, scan.index, scan.dead_letter_queue
    columns = index.columns()
    entries, kinds = np.array(columns.entries, np.uint64), np.array(columns.kinds, np.uint8)
    done = np.isin(np.array(columns.sequences, np.uint64), np.fromiter(redriven, np.uint64, len(redriven)))
    purged = np.zeros(len(entries), bool)
    try:
        info = await stream_info(connection, letters)
        if datetime.fromisoformat(info["created"]) > scan.snapshot.taken_at:
            # It was made anew, and counts from 1 again: what it holds is about other letters.
            return 0
        # What can't be read has to stay, and nobody knows where it is.
        if purge and not index.unreadable and not info["config"].get("deny_purge"):
            for subject, ours in _by_subject(queue.name, kinds):
                stays = entries[ours & ~done]
                end = int(np.min(stays)) if len(stays) else index.read_to + 1
                finished = ours & done & (entries < end)
                await _purge(connection, letters, subject, np.sort(entries[finished]))
                purged |= finished
    except (ApiError, NotFoundError, TransientError) as error:
        log.warning("Finished entries of %s are removed one by one, since they can't be purged: %s", letters, error)
    return await remove_entries(connection, queue, np.sort(entries[done & ~purged]).tolist())


def _by_subject(queue: str, kinds: NDArray[np.uint8]) -> Iterator[tuple[str, NDArray[np.bool_]]]:
    """Give filters of a dead letter queue, and which entries are all there is on each."""
    yield f"{MAX_DELIVERIES}.{queue}.*", kinds == EntryKind.DELIVERIES
    yield f"{TERMINATED}.{queue}.*", np.isin(kinds, (EntryKind.TERMINATION, EntryKind.DELETION))
    yield copy_filter(queue), np.isin(kinds, (EntryKind.COPY, EntryKind.PROVEN_COPY))


async def _purge(connection: BlockingConnection, letters: str, subject: str, entries: NDArray[np.uint64]) -> None:
    """Purge the first entries of a subject; there are no others up to the last of them."""
    for start in range(0, len(entries), _AT_A_TIME):
        last = int(entries[start : start + _AT_A_TIME][-1])
        await connection.api(f"STREAM.PURGE.{letters}", {"filter": subject, "seq": last + 1})
