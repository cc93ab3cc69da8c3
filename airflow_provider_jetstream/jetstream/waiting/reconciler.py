"""Finds ends without an event, slowly, so that no waiter waits for ever for a job that is gone.

A server that is killed loses the ack metrics and advisories that it was about to publish. It publishes no advisory
while no pull request comes. A job may expire, be purged, or be acknowledged by a worker that publishes no completion.
"""

from __future__ import annotations

import asyncio
import logging
from bisect import bisect_right
from itertools import pairwise
from typing import TYPE_CHECKING

from airflow_provider_jetstream.jetstream.client.advisory_probe import probe_consumers
from airflow_provider_jetstream.jetstream.client.concurrency import map_concurrently
from airflow_provider_jetstream.jetstream.client.message_reader import get_message
from airflow_provider_jetstream.jetstream.client.stream_api import stream_info
from airflow_provider_jetstream.jetstream.client.subjects import covered_by_any
from airflow_provider_jetstream.jetstream.errors import ApiError, NotFoundError, TransientError
from airflow_provider_jetstream.jetstream.queue.consumer_state import settled_sequence
from airflow_provider_jetstream.jetstream.waiting.job_end import EndKind, JobEnd

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Mapping
    from typing import Any

    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.client.message import StoredMessage
    from airflow_provider_jetstream.jetstream.waiting.cursor import Cursor
    from airflow_provider_jetstream.jetstream.waiting.end_evidence_check import EndEvidenceCheck

log = logging.getLogger(__name__)

INTERVAL = 15.0
# Per round and group of candidates: reading a job reads its body too.
_MAX_CANDIDATES = 64

_NO_ADVISORY = "used up its deliveries without an advisory"


class Reconciler:
    """Compares the awaited jobs with the stored ones.

    :param awaited: a live view of the jobs' stream sequences
    :param on_end: called with each end that is found
    :param wait_until_read: returns once every event stored so far has been read
    :param evidence: looks at each comparison whether the ends of jobs are stored
    """

    def __init__(
        self,
        connection: Connection,
        cursor: Cursor,
        awaited: Collection[int],
        on_end: Callable[[JobEnd], None],
        wait_until_read: Callable[[], Awaitable[None]],
        evidence: EndEvidenceCheck,
    ) -> None:
        self._connection = connection
        self._queue = cursor.queue
        self._awaited = awaited
        self._on_end = on_end
        self._wait_until_read = wait_until_read
        self._evidence = evidence
        self._suspected: dict[int, EndKind] = {}
        # The last candidate of each group, after which the next round continues.
        self._positions = [0, 0, 0]

    async def run(self) -> None:
        """Compare at each interval, without end."""
        while True:
            await asyncio.sleep(INTERVAL)
            try:
                await self._compare()
            except (TransientError, ApiError, NotFoundError) as error:
                if self._connection.is_closed:
                    raise
                log.warning("Comparing awaited jobs with %s failed, trying again: %s", self._queue, error)

    async def _compare(self) -> None:
        # An event that is stored and not read yet would look like an end without one.
        await self._wait_until_read()
        by_name = await probe_consumers(self._connection, self._queue)
        await self._evidence.check(by_name)
        consumers = by_name.values()
        first = (await stream_info(self._connection, self._queue))["state"]["first_seq"]
        settled = max([first - 1, *(info["ack_floor"]["stream_seq"] for info in consumers)])
        delivered = max([settled, *(info["delivered"]["stream_seq"] for info in consumers)])
        suspected_before, self._suspected = self._suspected, {}
        candidates = self._candidates(settled, delivered, suspected_before)

        async def read(sequence: int) -> StoredMessage | None:
            return await get_message(self._connection, self._queue, sequence)

        for sequence, message in zip(candidates, await map_concurrently(read, candidates), strict=True):
            if message is None:
                kind = EndKind.VANISHED
            elif _is_dead(message, consumers, by_name.held_above):
                kind = EndKind.DEAD
            else:
                continue
            # Twice, since an event may be on its way, and an acknowledged job leaves the stream a moment later.
            if suspected_before.get(sequence) is kind:
                self._on_end(JobEnd(kind, sequence, note=_NO_ADVISORY if kind is EndKind.DEAD else ""))
            else:
                self._suspected[sequence] = kind

    def _candidates(self, settled: int, delivered: int, suspected: Collection[int]) -> list[int]:
        """Choose the suspected jobs, and in turn some of those settled, delivered and not delivered yet."""
        awaited = sorted(sequence for sequence in self._awaited if sequence not in suspected)
        # A job settled for one consumer may belong to another one, and a job may vanish before its delivery.
        bounds = [0, bisect_right(awaited, settled), bisect_right(awaited, delivered), len(awaited)]
        chosen = [sequence for sequence in suspected if sequence in self._awaited]
        for group, (low, high) in enumerate(pairwise(bounds)):
            sequences = awaited[low:high]
            turn = sequences[bisect_right(sequences, self._positions[group]) :] or sequences
            turn = turn[:_MAX_CANDIDATES]
            self._positions[group] = turn[-1] if turn else 0
            chosen += turn
        return chosen


def _is_dead(message: StoredMessage, consumers: Collection[Mapping[str, Any]], held_above: int | None) -> bool:
    for info in consumers:
        config = info["config"]
        filters = config.get("filter_subjects") or [config.get("filter_subject") or ">"]
        if covered_by_any(filters, message.subject):
            return message.sequence <= settled_sequence(
                info["delivered"]["stream_seq"],
                info["ack_floor"]["stream_seq"],
                info["num_ack_pending"],
                held_above,
            )
    return False
