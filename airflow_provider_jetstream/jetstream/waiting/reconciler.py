"""Finding the ends that no event tells of, slowly, so that nobody waits for ever for a job that is gone.

A server that is killed forgets acknowledgement metrics and advisories that it was about to publish; it publishes none
of a death while nobody pulls; a job may expire, be purged, or be acknowledged by a worker that tells nobody.
"""

from __future__ import annotations

import asyncio
import logging
from bisect import bisect_right
from contextlib import suppress
from itertools import pairwise
from typing import TYPE_CHECKING

from airflow_provider_jetstream.jetstream.client.advisory_probe import probe_consumer
from airflow_provider_jetstream.jetstream.client.concurrency import map_concurrently
from airflow_provider_jetstream.jetstream.client.message_reader import get_message
from airflow_provider_jetstream.jetstream.client.stream_api import consumer_names, stream_info
from airflow_provider_jetstream.jetstream.client.subjects import covered_by_any
from airflow_provider_jetstream.jetstream.errors import ApiError, NotFoundError, TransientError
from airflow_provider_jetstream.jetstream.waiting.job_end import EndKind, JobEnd

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Mapping
    from typing import Any

    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.client.message import StoredMessage
    from airflow_provider_jetstream.jetstream.waiting.cursor import Cursor

log = logging.getLogger(__name__)

INTERVAL = 15.0
# Reading a job reads its body too.
_LOOKED_AT = 64

_UNTOLD = "used up its deliveries, and no advisory tells of it"


class Reconciler:
    """Compares what is awaited with what is stored.

    :param connection: the server
    :param mark: says which queue
    :param awaited: the stream sequences of the jobs, as they are at any time
    :param ended: is called with each end that is found
    :param all_read: returns once every event was read that is stored by now
    """

    def __init__(
        self,
        connection: Connection,
        mark: Cursor,
        awaited: Collection[int],
        ended: Callable[[JobEnd], None],
        all_read: Callable[[], Awaitable[None]],
    ) -> None:
        self._connection = connection
        self._queue = mark.queue
        self._awaited = awaited
        self._ended = ended
        self._all_read = all_read
        self._suspected: dict[int, EndKind] = {}
        self._reached = [0, 0, 0]

    async def run(self) -> None:
        """Compare again and again."""
        while True:
            await asyncio.sleep(INTERVAL)
            try:
                await self._compare()
            except (TransientError, ApiError, NotFoundError) as error:
                if self._connection.is_closed:
                    raise
                log.warning("Looking for ends that no event tells of failed, trying again: %s", error)

    async def _compare(self) -> None:
        # What is stored and not read yet would look like an end that no event tells of.
        await self._all_read()
        consumers = await self._look_at_consumers()
        first = (await stream_info(self._connection, self._queue))["state"]["first_seq"]
        settled = max([first - 1, *(info["ack_floor"]["stream_seq"] for info in consumers)])
        delivered = max([settled, *(info["delivered"]["stream_seq"] for info in consumers)])
        before, self._suspected = self._suspected, {}
        candidates = self._candidates(settled, delivered, before)

        async def stored(sequence: int) -> StoredMessage | None:
            return await get_message(self._connection, self._queue, sequence)

        for sequence, message in zip(candidates, await map_concurrently(stored, candidates), strict=True):
            kind = EndKind.VANISHED if message is None else _dead(sequence, message, consumers)
            # Twice, since an event may be on its way, and an acknowledged job leaves the stream a moment later.
            if kind is not None and before.get(sequence) is kind:
                self._ended(JobEnd(kind, sequence, note=_UNTOLD if kind is EndKind.DEAD else ""))
            elif kind is not None:
                self._suspected[sequence] = kind

    async def _look_at_consumers(self) -> list[Mapping[str, Any]]:
        found: list[Mapping[str, Any]] = []
        for name in await consumer_names(self._connection, self._queue):
            # One that is deleted meanwhile has no more deaths to tell.
            with suppress(NotFoundError):
                found.append(await probe_consumer(self._connection, self._queue, name))
        return found

    def _candidates(self, settled: int, delivered: int, before: Collection[int]) -> list[int]:
        """Choose the suspects, and in turn some of those that have ended, were delivered, and wait to be."""
        awaited = sorted(sequence for sequence in self._awaited if sequence not in before)
        # Not all that ended for one consumer did for another, and a job may go before its delivery.
        bounds = [0, bisect_right(awaited, settled), bisect_right(awaited, delivered), len(awaited)]
        chosen = [sequence for sequence in before if sequence in self._awaited]
        for index, (low, high) in enumerate(pairwise(bounds)):
            span = awaited[low:high]
            turn = span[bisect_right(span, self._reached[index]) :][:_LOOKED_AT] or span[:_LOOKED_AT]
            self._reached[index] = turn[-1] if turn else 0
            chosen += turn
        return chosen


def _dead(sequence: int, message: StoredMessage, consumers: Collection[Mapping[str, Any]]) -> EndKind | None:
    """Tell whether a stored job is one that its consumer will never deliver again."""
    for info in consumers:
        config = info["config"]
        filters = config.get("filter_subjects") or [config.get("filter_subject") or ">"]
        if covered_by_any(filters, message.subject):
            left_behind = info["delivered"]["stream_seq"] >= sequence and not info["num_ack_pending"]
            return EndKind.DEAD if left_behind or info["ack_floor"]["stream_seq"] >= sequence else None
    return None
