"""Keeping what is dead: a letter's body is copied when it is first seen, since its server may still lose it."""

from __future__ import annotations

import asyncio
import logging
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING
from uuid import uuid4

from airflow_provider_jetstream.jetstream.client.concurrency import map_concurrently
from airflow_provider_jetstream.jetstream.client.headers import Headers, wire_size
from airflow_provider_jetstream.jetstream.client.message_reader import get_message
from airflow_provider_jetstream.jetstream.client.publish_ack import store
from airflow_provider_jetstream.jetstream.client.stream_api import stream_info
from airflow_provider_jetstream.jetstream.client.subjects import covered_by_any
from airflow_provider_jetstream.jetstream.contract import MSG_ID, copy_filter, copy_subject
from airflow_provider_jetstream.jetstream.dead_letters.entry import EntryKind
from airflow_provider_jetstream.jetstream.dead_letters.entry_index import read_index
from airflow_provider_jetstream.jetstream.dead_letters.record import SCAN, record_headers
from airflow_provider_jetstream.jetstream.errors import ApiError, TransientError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.dead_letters.letter import DeadLetter
    from airflow_provider_jetstream.jetstream.dead_letters.scan import Scan

log = logging.getLogger(__name__)

# A job's copy stays this long at least.
_YOUNG = timedelta(minutes=1)
# What the server says takes a moment until the dead letter queue has stored it.
_ENTRIES_ARRIVE = timedelta(seconds=2)

_UNKEPT = frozenset({EntryKind.DELIVERIES, EntryKind.TERMINATION, EntryKind.DELETION})


class BodyPreserver:
    """Copies the bodies of dead letters into the dead letter queue, and then lets the archive go of what has ended.

    :param connection: the server
    :param scan: the look that finds the letters
    """

    def __init__(self, connection: Connection, scan: Scan) -> None:
        self._connection = connection
        self._scan = scan
        self._possible: bool | None = None
        self.preserved = 0
        self.not_preserved = 0

    async def preserve(self, letters: Sequence[DeadLetter]) -> None:
        """Copy the bodies that aren't copied yet.

        :param letters: some of what the look found
        """
        if self._possible is None:
            config = (await stream_info(self._connection, self._scan.dead_letter_queue))["config"]
            captured = covered_by_any(config.get("subjects") or [], copy_filter(self._scan.queue.name))
            # Interest retention drops at once what none of its consumers wants.
            self._possible = captured and config["retention"] != "interest"
        new = [letter for letter in letters if not letter.preserved]
        if not self._possible:
            self.not_preserved += len(new)
            return
        for letter, done in zip(new, await map_concurrently(self._copy, new), strict=True):
            if done:
                self.preserved += 1
                self._scan.unpreserved.discard(letter.sequence)
            else:
                self.not_preserved += 1

    async def release(self) -> int:
        """Let the archive go of copies that nobody needs any more.

        Those of jobs that have ended, up to the first that isn't kept; young copies stay. Every job has to have been
        looked at, and two seconds to have passed since.

        :return: how many copies were let go of
        """
        scan = self._scan
        consumers = scan.snapshot.consumers.values()
        if scan.archive is None or not scan.complete or scan.undeliverable or not consumers:
            return 0
        last = int(scan.snapshot.state["last_seq"])
        ended = min(each.settled if each.pending or each.in_flight else last for each in consumers)
        needed, before = min(scan.unpreserved | {ended + 1}), scan.snapshot.taken_at - _YOUNG
        if not await scan.archive.has_releasable(needed, before):
            return 0
        await asyncio.sleep((scan.loaded_at + _ENTRIES_ARRIVE - datetime.now(UTC)).total_seconds())
        # The news of the last ends before the look may have come after it.
        news = await read_index(
            self._connection, scan.dead_letter_queue, scan.queue.name, scan.snapshot.created, scan.index.read_to + 1
        )
        told = (job for job, mentions in news.jobs() if any(each.kind in _UNKEPT for each in mentions))
        return await scan.archive.release(min([needed, *told]), before)

    async def _copy(self, letter: DeadLetter) -> bool:
        death = letter.death
        headers = record_headers(death, subject=letter.subject, time=letter.time, headers=letter.headers, writer=SCAN)
        if len(letter.body) + wire_size(headers) > self._connection.max_payload:
            log.warning("%s is too large to be kept with the headers that tell of its death", letter.job_id)
            return False
        subject = copy_subject(death.stream, death.consumer, death.sequence)
        try:
            receipt = await store(self._connection, subject, letter.body, headers)
            if receipt.duplicate and await get_message(self._connection, receipt.stream, receipt.sequence) is None:
                # The server remembers ids longer than messages.
                named = (pair for pair in headers.items() if pair[0] != MSG_ID)
                again = Headers([*named, (MSG_ID, f"{headers[MSG_ID]}:{uuid4().hex}")])
                receipt = await store(self._connection, subject, letter.body, again)
        except (ApiError, TransientError) as error:
            log.warning("The body of dead letter %s couldn't be kept: %s", letter.job_id, error)
            return False
        return receipt.stream == self._scan.dead_letter_queue
