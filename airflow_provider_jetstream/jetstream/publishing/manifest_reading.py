"""Reads which jobs of a task are stored: from its manifest, and by a search where that doesn't have all of them."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING

from airflow_provider_jetstream.jetstream.publishing.manifest_rows import UNVERIFIED, read_rows, unpacked_rows
from airflow_provider_jetstream.jetstream.publishing.stored_jobs import StoredJobs
from airflow_provider_jetstream.jetstream.publishing.stored_search import find_stored_jobs

if TYPE_CHECKING:
    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.origin import Origin
    from airflow_provider_jetstream.jetstream.publishing.manifest_head import ManifestHead
    from airflow_provider_jetstream.jetstream.publishing.manifest_rows import ManifestRows
    from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue


async def read_stored_jobs(
    connection: Connection, queue: WorkQueue, key: str, origin: Origin, earlier: ManifestHead, rows: ManifestRows
) -> StoredJobs:
    """Return which jobs the earlier tries of a task have stored.

    :param key: the manifest's key
    :param earlier: its head as the try before this one left it
    :param rows: gets the rows that have to be stored again
    """
    known, search_from = StoredJobs(), earlier.unrecorded_from
    known.salts, known.of_any_task = earlier.salts, earlier.idempotency_key is not None
    # The events stream keeps the head of a key for its max_age after the last run, and so must its pages be kept.
    renews_pages = earlier.idempotency_key is not None
    rows.resume(earlier, renews_pages=renews_pages)
    async for page in read_rows(connection, queue.events.name if queue.events else "", queue.name, key, earlier):
        if page is None:
            # The events stream has forgotten it.
            search_from = earlier.queue_from
            continue
        for digest, body_digest, sequence in unpacked_rows(page):
            if sequence >= UNVERIFIED:
                known.add_unverified(digest, sequence - UNVERIFIED)
            elif not sequence or not known.add(digest, body_digest, sequence):
                continue
            if renews_pages:
                rows.add(digest, body_digest, sequence)
    if search_from is None:
        return known
    # Also within the duplicate window: a server that was restarted has forgotten the ids of jobs that are done.
    await find_stored_jobs(
        connection,
        queue,
        known,
        created=datetime.fromisoformat(earlier.created),
        queue_from=search_from,
        events_from=earlier.position("events_from") or 1,
        # Other calls of the task, and other runs of its name, have jobs with its key too.
        task_key=None if earlier.shares_task_key else origin.key,
    )
    return known
