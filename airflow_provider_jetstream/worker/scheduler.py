"""Choosing the consumer from which a worker with several consumers fetches next."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Protocol

from airflow_provider_jetstream.worker.acknowledgement import acknowledge_markers
from airflow_provider_jetstream.worker.availability import AvailabilityProbe
from airflow_provider_jetstream.worker.consumers import FAIRNESS_WINDOW
from airflow_provider_jetstream.worker.credit_fetcher import CreditFetcher
from airflow_provider_jetstream.worker.fetcher import PAUSE_AFTER_REFUSAL, PULL_EXPIRES, ConsumerFetcher

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.errors import PermissionDeniedError
    from airflow_provider_jetstream.worker.consumers import BoundConsumer
    from airflow_provider_jetstream.worker.in_flight import InFlightJobs
    from airflow_provider_jetstream.worker.pulled_message import PulledMessage


class PriorityScheduler:
    """Chooses the most urgent consumer with jobs, unless another one has been skipped for too many jobs.

    Consumers are numbered from 0, the most urgent one, and there are at most
    :data:`~airflow_provider_jetstream.worker.consumers.FAIRNESS_WINDOW` of them. With ``strict`` no consumer is ever
    owed a job.
    """

    def __init__(self, consumers: int, *, strict: bool = False) -> None:
        self.strict = strict
        self._skipped = [0] * consumers
        # All other consumers may reach their limit at the same time.
        self._max_skipped = FAIRNESS_WINDOW - (consumers - 1)

    def next(self, ready: Sequence[bool], free: int) -> tuple[int, int] | None:
        """Return the next consumer and how many jobs to fetch from it; ``None`` where no consumer has jobs.

        :param ready: for each consumer whether it has jobs
        :param free: how many jobs the worker can start
        """
        waiting = [consumer for consumer, has_jobs in enumerate(ready) if has_jobs]
        if not waiting:
            return None
        first, *others = waiting
        if self.strict:
            return first, free
        most_skipped = max(waiting, key=self._skipped.__getitem__)
        if self._skipped[most_skipped] >= self._max_skipped:
            return most_skipped, 1
        return first, min([free, *(self._max_skipped - self._skipped[other] for other in others)])

    def record(self, consumer: int, count: int, ready: Sequence[bool]) -> None:
        """Record how many jobs the chosen consumer delivered; ``ready`` is the argument of :meth:`next`."""
        for other, has_jobs in enumerate(ready):
            self._skipped[other] = self._skipped[other] + count if has_jobs and other != consumer else 0


class Fetcher(Protocol):
    """Fetches jobs and has each started the moment it arrives."""

    async def fetch(self) -> None:
        """Fetch as many jobs as can be started, for a while; must not be cancelled."""

    async def drain(self) -> None:
        """Wait until no pull request is open."""


class _PriorityFetcher:
    def __init__(
        self,
        fetchers: Sequence[ConsumerFetcher],
        probes: Sequence[AvailabilityProbe],
        jobs: InFlightJobs,
        wake: asyncio.Event,
        scheduler: PriorityScheduler,
    ) -> None:
        self._fetchers = fetchers
        self._probes = probes
        self._jobs = jobs
        self._wake = wake
        self._scheduler = scheduler
        jobs.on_turn = wake.set

    async def fetch(self) -> None:
        self._wake.clear()
        ready = [probe.available for probe in self._probes]
        free = self._jobs.free
        choice = self._scheduler.next(ready, free) if free else None
        if choice is None:
            with suppress(TimeoutError):
                async with asyncio.timeout(PULL_EXPIRES):
                    await self._wake.wait()
            return
        consumer, requested = choice
        fetcher = self._fetchers[consumer]
        received = await fetcher.fetch_ready(requested)
        self._scheduler.record(consumer, received, ready)
        # A server under load may deliver fewer jobs than it has. With strict priorities that must not let others start.
        if received < requested and not (received and self._scheduler.strict):
            self._probes[consumer].arm(PAUSE_AFTER_REFUSAL if fetcher.is_refused else 0.0)

    async def drain(self) -> None:
        # No request is open after a fetch.
        return


def _deliver(jobs: InFlightJobs, consumer: BoundConsumer, message: PulledMessage) -> None:
    if found := acknowledge_markers(consumer.executor.connection, [message]):
        jobs.deliver(consumer.executor, found)


@asynccontextmanager
async def open_fetcher(
    connection: Connection,
    consumers: Sequence[BoundConsumer],
    jobs: InFlightJobs,
    wake: asyncio.Event,
    *,
    strict: bool = False,
) -> AsyncIterator[Fetcher]:
    """Open a fetcher for one consumer, or for several with the most urgent one first.

    :param jobs: gets the jobs
    :param wake: is set to end a wait for jobs
    :param strict: whether a consumer gets no job started while a more urgent one has any
    """
    async with AsyncExitStack() as stack:
        if len(consumers) == 1:
            yield await stack.enter_async_context(CreditFetcher(connection, consumers[0], jobs, wake))
            return
        fetchers = [
            await stack.enter_async_context(ConsumerFetcher(connection, consumer, partial(_deliver, jobs, consumer)))
            for consumer in consumers
        ]

        def on_denied(denial: PermissionDeniedError) -> None:
            jobs.denial = denial
            wake.set()

        probes = [
            await stack.enter_async_context(AvailabilityProbe(connection, consumer, wake.set, on_denied).watching())
            for consumer in consumers
        ]
        yield _PriorityFetcher(fetchers, probes, jobs, wake, PriorityScheduler(len(probes), strict=strict))
