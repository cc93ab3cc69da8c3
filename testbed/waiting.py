"""Many who wait for jobs at once: starting them, ending their jobs in bulk, and counting what they cost the server."""

import asyncio
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from airflow_provider_jetstream.jetstream.client.connection import Connection
from airflow_provider_jetstream.jetstream.client.stream_api import consumer_names
from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue
from airflow_provider_jetstream.jetstream.waiting.cursor import Cursor
from airflow_provider_jetstream.jetstream.waiting.policy import WaitPolicy
from airflow_provider_jetstream.jetstream.waiting.report import WaitReport
from airflow_provider_jetstream.jetstream.waiting.wait import wait
from testbed.nats_server import NatsServer
from testbed.queues import complete

_AT_A_TIME = 250


@dataclass
class Waiting:
    """
    Somebody who waits, and how often they were told of an end.

    :param task: ends with the report
    :param ends: one entry for each end, the number of jobs still awaited
    """

    task: asyncio.Task[WaitReport]
    ends: list[int] = field(default_factory=list)


def waiting(
    connection: Connection, mark: Cursor, sequences: Iterable[int], tolerance: WaitPolicy | None = None
) -> Waiting:
    """
    Begin to wait for jobs.

    :param connection: the server
    :param mark: taken before publishing
    :param sequences: the jobs' stream sequences
    :param tolerance: what to put up with
    """
    ends: list[int] = []
    work = wait(connection, mark, sequences, policy=tolerance, progress=lambda report: ends.append(len(report.awaited)))
    return Waiting(asyncio.create_task(work), ends)


async def reports(waiters: Iterable[Waiting], within: float = 10.0) -> list[WaitReport]:
    """
    Return how all waits ended.

    :param waiters: who waits
    :param within: seconds until the test fails
    """
    tasks = [waiter.task for waiter in waiters]
    done, pending = await asyncio.wait(tasks, timeout=within)
    for task in pending:
        task.cancel()
    if pending:
        raise TimeoutError(f"{len(pending)} of {len(tasks)} still wait after {within:g} s, {len(done)} don't")
    return [task.result() for task in tasks]


async def failures(waiters: Iterable[Waiting], within: float = 10.0) -> list[BaseException | None]:
    """
    Return the errors with which all waits ended.

    :param waiters: who waits
    :param within: seconds until the test fails
    """
    with suppress(Exception):
        await reports(waiters, within)
    return [waiter.task.exception() for waiter in waiters]


async def complete_all(connection: Connection, queue: WorkQueue, sequences: Sequence[int]) -> None:
    """
    Store the completions of many jobs.

    :param connection: the server
    :param queue: the queue
    :param sequences: the jobs' stream sequences
    """
    for start in range(0, len(sequences), _AT_A_TIME):
        part = sequences[start : start + _AT_A_TIME]
        await asyncio.gather(*(complete(connection, queue, sequence) for sequence in part))


@dataclass
class Readers:
    """
    What waiting costs a server, and the most that it has cost.

    :param server: the server, with no client that follows anything but the one that waits
    :param connection: another one's connection
    :param streams: the streams that are read
    """

    server: NatsServer
    connection: Connection
    streams: tuple[str, ...]
    most_subscriptions: int = 0
    most_consumers: int = 0

    async def count(self) -> tuple[int, int]:
        """Return how many inboxes are subscribed to but those for answers to requests, and how many consumers are."""
        found = await asyncio.to_thread(self.server.monitor, "connz?subs=1")
        inboxes = [
            subject
            for client in found["connections"]
            for subject in client.get("subscriptions_list", [])
            if subject.startswith("_INBOX.") and not subject.endswith(".*")
        ]
        consumers = [name for stream in self.streams for name in await consumer_names(self.connection, stream)]
        self.most_subscriptions = max(self.most_subscriptions, len(inboxes))
        self.most_consumers = max(self.most_consumers, len(consumers))
        return len(inboxes), len(consumers)

    async def watch(self) -> None:
        """Count again and again."""
        while True:
            await self.count()

    async def are(self, expected: tuple[int, int]) -> bool:
        """
        Tell whether they are as many as expected now.

        :param expected: inboxes and consumers
        """
        return await self.count() == expected
