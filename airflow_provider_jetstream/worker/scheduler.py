"""Choosing whose jobs are taken next where a worker serves several consumers."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Protocol

from airflow_provider_jetstream.worker.availability import AvailabilityProbe
from airflow_provider_jetstream.worker.consumers import SHARE
from airflow_provider_jetstream.worker.fetcher import EXPIRES, PAUSE_AFTER_REFUSAL, Puller

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from nats.aio.msg import Msg

    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.worker.consumers import BoundConsumer


class PriorityScheduler:
    """Whose turn it is: the most urgent lane's that has jobs, unless another one has been passed over for too long.

    :param lanes: how many there are, at most :data:`~airflow_provider_jetstream.worker.consumers.SHARE`
    """

    def __init__(self, lanes: int) -> None:
        self._passed = [0] * lanes
        # All others may be due at the same time.
        self._most = SHARE - (lanes - 1)

    def next(self, ready: Sequence[bool], free: int) -> tuple[int, int] | None:
        """Choose.

        :param ready: for each lane, the most urgent one first, whether it has jobs
        :param free: how many jobs there is room for
        :return: the lane, and how many jobs it may have; ``None`` where no lane has any
        """
        waiting = [lane for lane, has_jobs in enumerate(ready) if has_jobs]
        if not waiting:
            return None
        first, *others = waiting
        due = max(waiting, key=self._passed.__getitem__)
        if self._passed[due] >= self._most:
            return due, 1
        return first, min([free, *(self._most - self._passed[other] for other in others)])

    def took(self, lane: int, count: int, ready: Sequence[bool]) -> None:
        """Take in what came of it.

        :param lane: the lane that was chosen
        :param count: how many jobs it gave
        :param ready: as it was then
        """
        for other, has_jobs in enumerate(ready):
            self._passed[other] = self._passed[other] + count if has_jobs and other != lane else 0


class Fetcher(Protocol):
    """Takes jobs."""

    async def take(self, count: int) -> None:
        """Take some, or wait for some for a while; not to be cancelled.

        :param count: how many at the most
        """


class _Priorities:
    def __init__(self, pullers: Sequence[Puller], bells: Sequence[AvailabilityProbe], wake: asyncio.Event) -> None:
        self._pullers = pullers
        self._bells = bells
        self._wake = wake
        self._turns = PriorityScheduler(len(bells))

    async def take(self, count: int) -> None:
        self._wake.clear()
        ready = [bell.available for bell in self._bells]
        turn = self._turns.next(ready, count)
        if turn is None:
            with suppress(TimeoutError):
                async with asyncio.timeout(EXPIRES):
                    await self._wake.wait()
            return
        lane, at_most = turn
        puller = self._pullers[lane]
        came = await puller.take_ready(at_most)
        self._turns.took(lane, came, ready)
        if came < at_most:
            self._bells[lane].arm(PAUSE_AFTER_REFUSAL if puller.refused else 0.0)


@asynccontextmanager
async def open_fetcher(
    connection: Connection,
    lanes: Sequence[BoundConsumer],
    take: Callable[[BoundConsumer, Msg], None],
    wake: asyncio.Event,
) -> AsyncIterator[Fetcher]:
    """Be ready to take jobs until the block is left.

    :param connection: the server
    :param lanes: where they come from, the most urgent one first
    :param take: is called with each job
    :param wake: set to have it wait no longer
    :return: what takes them
    """
    async with AsyncExitStack() as stack:
        pullers = [await stack.enter_async_context(Puller(connection, lane, partial(take, lane))) for lane in lanes]
        if len(lanes) == 1:
            yield pullers[0]
            return
        bells = [
            await stack.enter_async_context(AvailabilityProbe(connection, lane, wake.set).watching()) for lane in lanes
        ]
        yield _Priorities(pullers, bells, wake)
