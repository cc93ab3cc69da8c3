"""Samples all queues of a server each 20 seconds, whether or not somebody looks, where no other API worker does.

It runs in the API server since that is what shows the numbers: it knows which connections to show, it is there whenever
somebody can look, and nothing else has to be deployed. A triggerer isn't part of every Airflow, and its loop belongs to
waiting tasks. Of several API workers one samples, see :mod:`~airflow_provider_jetstream.jetstream.inspection.samples`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import socket
from typing import TYPE_CHECKING

from airflow_provider_jetstream.airflow_compat import AirflowException
from airflow_provider_jetstream.jetstream.client.stream_api import ServerClock
from airflow_provider_jetstream.jetstream.contract import SAMPLE_STREAM
from airflow_provider_jetstream.jetstream.errors import JetStreamProviderError, NotFoundError
from airflow_provider_jetstream.jetstream.inspection.samples import (
    SAMPLE_SECONDS,
    TAKE_OVER_SECONDS,
    QueueSample,
    SampleStream,
)

if TYPE_CHECKING:
    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.plugins.monitor.server_poller import ServerPoller

log = logging.getLogger(__name__)

_INSPECTION_SECONDS = 15.0
_SAMPLES_OF_A_CONNECTION = 45


class Sampler:
    """Samples the queues of one server.

    :param poller: of the same server
    :param seconds: from one sample to the next
    """

    def __init__(self, poller: ServerPoller, seconds: float = SAMPLE_SECONDS) -> None:
        self._poller = poller
        self._seconds = seconds
        self._take_over = TAKE_OVER_SECONDS * seconds / SAMPLE_SECONDS
        self._holder = f"{socket.gethostname()}:{os.getpid()}:{random.randrange(2**32):08x}"  # noqa: S311

    async def run(self) -> None:
        """Sample until this is cancelled."""
        while True:
            try:
                async with self._poller.kept_connection() as connection:
                    # Then Airflow's connection is read again: it may name another server by now.
                    for _ in range(_SAMPLES_OF_A_CONNECTION):
                        pause = await self._sample(connection)
                        self._poller.shared.problem = None
                        await asyncio.sleep(pause)
            except (JetStreamProviderError, AirflowException, TimeoutError) as error:
                # The page names it beside its charts; a server that is away is named anyway.
                self._poller.shared.problem = str(error) or "the server took too long to answer"
                log.debug("The queues of %s aren't sampled: %s", self._poller.conn_id, error)
                await asyncio.sleep(self._seconds)

    async def _sample(self, connection: Connection) -> float:
        """Sample, unless another one does; return after how many seconds to go on."""
        stream = SampleStream(connection)
        last = await stream.last()
        if last is None:
            await stream.make()
        elif last.holder != self._holder:
            age = ((await ServerClock.read(connection, SAMPLE_STREAM)).now() - last.at).total_seconds()
            if age < self._take_over:
                return max(0.1, self._take_over - age + random.random() * self._seconds / 4)  # noqa: S311
        poller = self._poller
        await poller.shared.update(connection)
        async with asyncio.timeout(_INSPECTION_SECONDS):
            await poller.observe(connection)
        # Large queues are still being scanned then; the number of their dead letters isn't known.
        await poller.scanner.settled(self._seconds / 2)
        queues: dict[str, QueueSample] = {}
        for name, overview in poller.overviews.items():
            if sample := QueueSample.of(overview, poller.histories[name].watch, poller.dead(name)):
                queues[name] = sample
        try:
            if not await stream.append(self._holder, queues, last.sequence if last else 0):
                return self._seconds / 4
        except NotFoundError:
            await stream.make()
        return self._seconds
