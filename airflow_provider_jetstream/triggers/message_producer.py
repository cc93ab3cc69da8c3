"""The shared pull of all triggers of one consumer in the mode ``payload``, as Airflow 3.3 drives it."""

from __future__ import annotations

import asyncio
import logging
from contextlib import AsyncExitStack, suppress
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final

from airflow.triggers.shared_stream import SharedStreamProducer

from airflow_provider_jetstream.airflow_compat import conf
from airflow_provider_jetstream.hooks.jetstream import JetStreamHook
from airflow_provider_jetstream.jetstream.archive import ArchiveReader, republished_message
from airflow_provider_jetstream.jetstream.client.pull_request import priority_fields, pull_subject
from airflow_provider_jetstream.jetstream.client.stream_api import consumer_info, stream_info
from airflow_provider_jetstream.jetstream.errors import (
    JetStreamProviderError,
    UnreachableError,
)
from airflow_provider_jetstream.jetstream.queue.server_fields import field_findings, refusals
from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue
from airflow_provider_jetstream.jetstream.units import NANOSECONDS
from airflow_provider_jetstream.triggers.taken_messages import ConsumerSession, TakenMessage, TakenMessages
from airflow_provider_jetstream.worker.acknowledgement import acknowledge_markers
from airflow_provider_jetstream.worker.dead_letter_target import is_same_message
from airflow_provider_jetstream.worker.dead_lettering import DeadLetterWriter
from airflow_provider_jetstream.worker.errors import GiveUpError, WorkerSetupError
from airflow_provider_jetstream.worker.fetcher import ConsumerFetcher
from airflow_provider_jetstream.worker.redelivery import RedeliveryPolicy

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Hashable, Mapping, Sequence

    from airflow.triggers.shared_stream import AdvanceItem

    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.triggers.message_event import PayloadOptions
    from airflow_provider_jetstream.worker.pulled_message import PulledMessage

log = logging.getLogger(__name__)

_PAUSES: Final = (0.5, 30.0)
_WHILE_LOST: Final = 5.0
# The server copies a message to the archive just after it has stored it.
_COPY_LOOKS: Final = 5
_BETWEEN_LOOKS: Final = 0.2
# The memory of a triggerer is that of all its triggers.
_MOST_BYTES: Final = 64 << 20
_BYTES_AT_ONCE: Final = 16 << 20
# Airflow's default.
_QUEUE_SIZE: Final = 1024


class MessageProducer(SharedStreamProducer):
    """Pulls from a consumer for all watchers of one key, and settles each message by what became of its event.

    What keeps it from pulling (the server is away, the consumer is gone, a permission is missing) is logged at growing
    intervals, and it pulls again as soon as it can: a watcher that failed would be started every two seconds.
    """

    def __init__(
        self, nats_conn_id: str, work_queue: Mapping[str, Any], consumer: str, options: PayloadOptions
    ) -> None:
        self._hook = JetStreamHook(nats_conn_id)
        self._queue = WorkQueue.load(work_queue)
        self._consumer = consumer
        self._options = options
        self._taken = TakenMessages()
        self._arrived: asyncio.Queue[TakenMessage | None] = asyncio.Queue()
        self._connections = AsyncExitStack()
        self._work: asyncio.Task[None] | None = None
        self._settling: asyncio.Task[None] | None = None
        self._large: set[asyncio.Task[None]] = set()
        self._is_next_too_large = False

    async def open_stream(self) -> AsyncIterator[tuple[TakenMessage, TakenMessage]]:
        """Yield messages until the last watcher has left."""
        self._settling = asyncio.create_task(self._taken.run())
        self._work = asyncio.create_task(self._pull_forever())
        for task in (self._settling, self._work):
            task.add_done_callback(lambda _: self._arrived.put_nowait(None))
        while (taken := await self._arrived.get()) is not None:
            yield taken, taken
        # One of the tasks has failed, with an error that nobody has foreseen.
        for task in (self._work, self._settling):
            if task.done():
                task.result()

    def get_advance_lane(self, broker_payload: TakenMessage) -> Hashable:
        """Return a lane for each message: the server takes acknowledgements in any order."""
        return broker_payload.key

    async def advance(self, batch: Sequence[AdvanceItem]) -> None:
        """Settle messages whose events Airflow has stored, has not stored, or whose watchers have rejected them."""
        for item in batch:
            taken, outcome = item.broker_payload, item.outcome
            if outcome.rejected:
                self._taken.reject(taken)
            elif outcome.is_clean:
                self._taken.accept(taken)
            else:
                self._taken.fail(
                    taken,
                    f"{outcome.failed} of {outcome.failed + outcome.acked} watchers didn't get its event stored in time"
                    if outcome.failed
                    else "no watcher was there",
                )

    async def aclose(self) -> None:
        """Hand back what isn't settled, and leave the connection."""
        await _end(self._work, *self._large)
        try:
            await self._taken.finish()
        finally:
            await _end(self._settling)
            await self._connections.aclose()

    async def _pull_forever(self) -> None:
        pause = _PAUSES[0]
        while True:
            try:
                session = await self._open_session()
                async with ConsumerFetcher(session.connection, session, self._on_message) as fetcher:
                    while True:
                        await self._fetch(fetcher, session)
                        pause = _PAUSES[0]
            except JetStreamProviderError as error:
                where = f"{self._queue.name}/{self._consumer}"
                log.warning(
                    "No messages of %s are pulled, trying again in %g s: %s %s", where, pause, error.code, error
                )
            await asyncio.sleep(pause)
            pause = min(2 * pause, _PAUSES[1])

    async def _fetch(self, fetcher: ConsumerFetcher, session: ConsumerSession) -> None:
        if not await session.connection.wait_until_connected(_WHILE_LOST):
            if session.connection.is_closed:
                raise session.connection.close_reason or UnreachableError("the connection is closed")
            # It is restored, or closed, by itself, and says in the log why it can't be.
            return
        free = session.capacity - len(self._taken)
        if free > 0 and self._taken.size < _MOST_BYTES:
            # What a server stored before its limit was lowered may be larger than any request's bytes.
            at_once = 0 if self._is_next_too_large else max(_BYTES_AT_ONCE, 2 * session.connection.max_payload)
            count = min(free, session.max_batch)
            self._is_next_too_large = await fetcher.fetch(count, session.max_wait, at_once)
            return
        self._taken.settled.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(_WHILE_LOST):
                await self._taken.settled.wait()

    async def _open_session(self) -> ConsumerSession:
        """Look at the consumer, over the connection that there is or a new one.

        :raises WorkerSetupError: its messages can't be watched
        :raises NotFoundError: it doesn't exist
        """
        session = self._taken.session
        if session is None or session.connection.is_closed:
            await self._connections.aclose()
            connection: Connection = await self._connections.enter_async_context(self._hook.shared())
        else:
            connection = session.connection
        config = (await consumer_info(connection, self._queue.name, self._consumer))["config"]
        capacity = watched_capacity(config, f"{self._queue.name}/{self._consumer}")
        redelivery = RedeliveryPolicy.of(config)
        dead_letters = DeadLetterWriter(connection, self._queue, self._consumer, redelivery.max_deliver)
        await dead_letters.inspect_target()
        batch, wait = self._options.batch_size, self._options.max_wait
        self._taken.session = session = ConsumerSession(
            connection=connection,
            redelivery=redelivery,
            dead_letters=dead_letters,
            capacity=capacity,
            max_batch=min(batch, config.get("max_batch") or batch),
            max_wait=min(wait, config.get("max_expires", 0) / NANOSECONDS or wait),
            next_subject=pull_subject(self._queue.name, self._consumer, connection.api_prefix),
            request_fields=priority_fields(config),
        )
        return session

    def _on_message(self, message: PulledMessage) -> None:
        session = self._taken.session
        taken = (
            self._taken.take(message) if session is None or acknowledge_markers(session.connection, [message]) else None
        )
        if taken is None:
            return
        if taken.size <= self._options.max_size:
            self._arrived.put_nowait(taken)
            return
        task = asyncio.create_task(self._pass_on_large(taken))
        self._large.add(task)
        task.add_done_callback(self._large.discard)

    async def _pass_on_large(self, taken: TakenMessage) -> None:
        """Pass a message on that is in the archive, and make a dead letter of one that isn't."""
        message, session = taken.message, self._taken.session
        size, most = taken.size, self._options.max_size
        try:
            if session is not None:
                taken.stored = await _stored_copy(session.connection, self._queue, message)
        except JetStreamProviderError as error:
            self._taken.fail(taken, f"whether the archive has its {size} bytes isn't known: {error}")
            return
        if taken.stored is not None:
            self._taken.drop_body(taken)
            self._arrived.put_nowait(taken)
            return
        taken.refuse(
            GiveUpError(
                f"expected at most {most} bytes, or a copy in the archive that its event could name, found {size} bytes"
                " and no copy: raise max_size, or declare an archive"
            )
        )
        self._taken.reject(taken)


def watched_capacity(config: Mapping[str, Any], where: str) -> int:
    """Return how many messages a watched consumer may have in flight.

    :param config: the consumer's on the server
    :param where: queue and consumer, for the error
    :raises WorkerSetupError: Airflow would fail its watchers, or they couldn't share its messages
    """
    expected = f"expected consumer {where} to be one that a watcher can pull from, found"
    queue, _, consumer = where.partition("/")
    if refused := refusals(field_findings("consumer", {"config": config}, "worker", name=consumer, queue=queue)):
        raise WorkerSetupError(f"{expected} that {'; '.join(refused)}")
    most = conf.getint("triggerer", "shared_stream_subscriber_queue_size", fallback=_QUEUE_SIZE)
    in_flight = config.get("max_ack_pending") or -1
    if not 0 < in_flight < most:
        found = "no max_ack_pending" if in_flight < 1 else f"max_ack_pending {in_flight}"
        raise WorkerSetupError(
            f"expected consumer {where} to have a max_ack_pending below {most}, which is Airflow's [triggerer]"
            f" shared_stream_subscriber_queue_size, found {found}: Airflow fails a watcher for which more events"
            " wait; set a smaller max_ack_pending, or raise the setting of Airflow"
        )
    return int(in_flight)


async def _stored_copy(connection: Connection, queue: WorkQueue, message: PulledMessage) -> dict[str, Any] | None:
    """Return stream and sequence of the archive's copy of a message; ``None`` without one."""
    created = datetime.fromisoformat((await stream_info(connection, queue.name))["created"])
    for look in range(_COPY_LOOKS):
        if look:
            await asyncio.sleep(_BETWEEN_LOOKS)
        archive = await ArchiveReader.open(connection, queue, created)
        if archive is None:
            return None
        copy = await archive.find_copy(message.sequence)
        if copy and is_same_message(republished_message(copy), message) and copy.data == message.data:
            return {"stream": archive.stream, "sequence": copy.sequence}
    return None


async def _end(*tasks: asyncio.Task[None] | None) -> None:
    started = [task for task in tasks if task is not None]
    for task in started:
        task.cancel()
    await asyncio.gather(*started, return_exceptions=True)
