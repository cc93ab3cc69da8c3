"""Many concurrent waits for jobs: start them, complete their jobs in bulk, and count what they cost the server."""

import asyncio
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from airflow_provider_jetstream.jetstream import Cursor, WaitPolicy, WaitReport, WorkQueue, wait
from airflow_provider_jetstream.jetstream.client.nats_py import NatsPyConnection
from testbed.nats_server import NatsServer
from testbed.queues import store_completion

_BATCH = 250


@dataclass
class Waiter:
    """A running wait; ``remaining`` gets the number of jobs still awaited at each job end."""

    task: asyncio.Task[WaitReport]
    remaining: list[int] = field(default_factory=list)


async def consumer_names(connection: NatsPyConnection, stream: str) -> list[str]:
    """Return the names of a stream's consumers, at most a thousand."""
    return list((await connection.api(f"CONSUMER.NAMES.{stream}"))["consumers"] or ())


def start_waiting(
    connection: NatsPyConnection,
    cursor: Cursor,
    sequences: Iterable[int],
    policy: WaitPolicy | None = None,
    **stalls: Any,
) -> Waiter:
    """Start to wait for jobs, with a cursor taken before they were published; ``stalls`` says when a wait stalls."""
    ends: list[int] = []

    def note(report: WaitReport) -> None:
        ends.append(len(report.awaited))

    work = wait(connection, cursor, sequences, policy=policy, progress=note, **stalls)
    return Waiter(asyncio.create_task(work), ends)


async def wait_reports(waiters: Iterable[Waiter], within: float = 10.0) -> list[WaitReport]:
    """Return the reports of all waits; raises TimeoutError after ``within`` seconds."""
    tasks = [waiter.task for waiter in waiters]
    done, pending = await asyncio.wait(tasks, timeout=within)
    for task in pending:
        task.cancel()
    if pending:
        raise TimeoutError(
            f"{len(pending)} of {len(tasks)} waits are still running after {within:g} s, {len(done)} have ended"
        )
    return [task.result() for task in tasks]


async def wait_failures(waiters: Iterable[Waiter], within: float = 10.0) -> list[BaseException | None]:
    """Return the errors with which the waits ended, None for a wait that ended with a report."""
    with suppress(Exception):
        await wait_reports(waiters, within)
    return [waiter.task.exception() for waiter in waiters]


async def store_completions(connection: NatsPyConnection, queue: WorkQueue, sequences: Sequence[int]) -> None:
    """Store the completion events of many jobs."""
    for start in range(0, len(sequences), _BATCH):
        batch = sequences[start : start + _BATCH]
        await asyncio.gather(*(store_completion(connection, queue, sequence) for sequence in batch))


@dataclass
class WaitingCost:
    """Subscriptions and consumers on a server whose only other client is the waiting one, and their maxima so far.

    :param connection: a client that waits for nothing; its subscriptions aren't counted
    """

    server: NatsServer
    connection: NatsPyConnection
    streams: tuple[str, ...]
    max_subscriptions: int = 0
    max_consumers: int = 0

    async def count(self) -> tuple[int, int]:
        """Return the number of subscribed inboxes, without those for answers, and the number of consumers."""
        connections = await asyncio.to_thread(self.server.monitor, "connz?subs=1")
        inboxes = [
            subject
            for client in connections["connections"]
            if client["cid"] != self.connection.client.client_id
            for subject in client.get("subscriptions_list", [])
            if subject.startswith("_INBOX.") and not subject.endswith(".*")
        ]
        consumers = [name for stream in self.streams for name in await consumer_names(self.connection, stream)]
        self.max_subscriptions = max(self.max_subscriptions, len(inboxes))
        self.max_consumers = max(self.max_consumers, len(consumers))
        return len(inboxes), len(consumers)

    async def watch(self) -> None:
        """Count repeatedly, for ever."""
        while True:
            await self.count()

    async def equals(self, expected: tuple[int, int]) -> bool:
        """Return whether the current numbers of inboxes and consumers are as expected."""
        return await self.count() == expected
