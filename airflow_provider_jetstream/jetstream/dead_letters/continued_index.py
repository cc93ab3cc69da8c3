"""Reads on where an earlier scan of the same dead letter queue has stopped."""

from __future__ import annotations

from typing import TYPE_CHECKING

from airflow_provider_jetstream.jetstream.client.stream_api import stored_sequences
from airflow_provider_jetstream.jetstream.dead_letters.entry import HIGHEST_JOB
from airflow_provider_jetstream.jetstream.dead_letters.entry_index import EntryIndex, read_index
from airflow_provider_jetstream.jetstream.dead_letters.entry_parser import EntryParser

if TYPE_CHECKING:
    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.dead_letters.scan_context import ScanContext


async def current_index(
    connection: Connection, dead_letter_queue: str, now: ScanContext, read: tuple[EntryIndex, ScanContext, int] | None
) -> EntryIndex:
    """Return the entries up to a snapshot.

    :param read: what an earlier scan has read, its context, and how often the connection had been restored before it
    """
    index = await _continued(connection, now, *read) if read else None
    if index is None:
        state, created = now.dead_letter_queue["state"], now.snapshot.created
        span = max(1, state["first_seq"]), state["last_seq"]
        index = await read_index(connection, dead_letter_queue, now.queue.name, created, *span)
    return index


async def _continued(
    connection: Connection, now: ScanContext, index: EntryIndex, before: ScanContext, reconnects: int
) -> EntryIndex | None:
    """Add new entries to an index, and drop the removed ones.

    :param now: up to whose snapshot to read
    :param index: the entries up to the earlier snapshot; nothing continues it where this is cut off
    :param before: of the earlier scan
    :param reconnects: how often the connection had been restored before the earlier scan
    :return: the same index; ``None`` where all entries have to be read
    """
    start, index.read_to = index.read_to + 1, HIGHEST_JOB
    # A server that was away may have lost its last entries, and given their sequences to others.
    if connection.reconnects != reconnects or before.snapshot.created != now.snapshot.created or before.handlers:
        return None
    earlier, letters = before.dead_letter_queue, now.dead_letter_queue
    old, new = earlier["state"], letters["state"]
    if earlier["created"] != letters["created"] or not start - 1 == old["last_seq"] <= new["last_seq"]:
        return None
    parser = EntryParser(now.snapshot.queue, now.snapshot.created, connection.domain)
    first, name = max(start, new["first_seq"]), letters["config"]["name"]
    async for _ in index.read(connection, name, parser, first, new["last_seq"]):
        pass
    if new["messages"] - old["messages"] != new["last_seq"] - old["last_seq"]:
        stored = await stored_sequences(connection, name)
        if not stored.exact:
            index.read_to = HIGHEST_JOB
            return None
        index.drop_missing(stored)
    return index
