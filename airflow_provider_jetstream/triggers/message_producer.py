"""The shared pull of all triggers of one consumer in the mode ``payload``, as Airflow 3.3 drives it.

While Airflow stores a message's event, the server hears that it is in progress. A message that is delivered again
meanwhile, as after the server was away, isn't passed on again: only its acknowledgements go to the new delivery.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from airflow.triggers.shared_stream import SharedStreamProducer

from airflow_provider_jetstream.airflow_compat import conf
from airflow_provider_jetstream.jetstream.archive import ArchiveReader, republished_message
from airflow_provider_jetstream.jetstream.client.stream_api import (
    consumer_info,
    priority_fields,
    pull_subject,
    stream_info,
)
from airflow_provider_jetstream.jetstream.client.wire import encode_message
from airflow_provider_jetstream.jetstream.client.wire_text import encode_text
from airflow_provider_jetstream.jetstream.errors import (
    DeadlineError,
    JetStreamProviderError,
    UnreachableError,
)
from airflow_provider_jetstream.jetstream.queue.server_fields import field_findings, refusals
from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue
from airflow_provider_jetstream.jetstream.units import NANOSECONDS
from airflow_provider_jetstream.tasks.hook import hook_for
from airflow_provider_jetstream.triggers.message_event import message_size
from airflow_provider_jetstream.worker.acknowledgement import RedeliveryPolicy, acknowledge_markers, nak
from airflow_provider_jetstream.worker.dead_lettering import DeadLetterWriter
from airflow_provider_jetstream.worker.errors import GiveUpError, WorkerSetupError
from airflow_provider_jetstream.worker.fetching import ConsumerFetcher

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Coroutine, Hashable, Iterable, Mapping, Sequence

    from airflow.triggers.shared_stream import AdvanceItem

    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.triggers.message_event import PayloadOptions
    from airflow_provider_jetstream.worker.delivery import PulledMessage

    # Of a recreated stream the sequences start again at 1.
    MessageKey: TypeAlias = tuple[int, int]

log = logging.getLogger(__name__)

_PULL_PAUSES: Final = (0.5, 30.0)
_WHILE_LOST: Final = 5.0
# The server copies a message to the archive just after it has stored it.
_COPY_READS: Final = 5
_BETWEEN_READS: Final = 0.2
# The memory of a triggerer is that of all its triggers.
_MOST_BYTES: Final = 64 << 20
_BYTES_AT_ONCE: Final = 16 << 20
# Airflow's default.
_QUEUE_SIZE: Final = 1024

# Airflow counts the event of a trigger that it has just deleted, as when the DAG is paused, as stored: it has no asset
# to store it for. It ends such a trigger a second or two later.
HOLD: Final = 5.0
_SIGNALS_PER_ACK_WAIT: Final = 3
# Backoffs don't shrink usually: the first step or the last is the shortest.
_MOST_STEPS: Final = 1_000
_TICKS: Final = (0.05, 0.5)
_ACKS_AT_ONCE: Final = 500
_NAKS_AT_ONCE: Final = 100
_ACK_PAUSES: Final = (0.5, 10.0)
# So often, with the longest pause between, an acknowledgement is sent before the message counts as gone.
_MOST_ACKS: Final = 12
_DEAD_LETTERS_AT_ONCE: Final = 8
_FINISH_SECONDS: Final = 5.0


class _State(Enum):
    OPEN = "Airflow has it"
    HELD = "Airflow has stored its event"
    SETTLING = "it becomes a dead letter"


@dataclass(slots=True, eq=False)
class TakenMessage:
    """A message that was pulled and isn't settled.

    :ivar message: its latest delivery
    :ivar size: the bytes of its body and headers
    :ivar stored: stream and sequence of its copy, where it is too large for an event
    """

    message: PulledMessage
    size: int
    stored: dict[str, Any] | None = None
    refusal: GiveUpError | None = None
    state: _State = _State.OPEN
    signal_at: float = 0.0
    ack_at: float = 0.0
    acks: int = 0

    @property
    def key(self) -> MessageKey:
        """Sequence and time, which no two messages of streams of one name share."""
        return (self.message.sequence, self.message.stored_nanoseconds)

    def refuse(self, error: GiveUpError) -> None:
        """Note why it becomes a dead letter."""
        self.refusal = self.refusal or error


@dataclass(frozen=True, slots=True)
class ConsumerSession:
    """A consumer as it was found on the server, over one connection.

    :param capacity: how many of its messages may be taken and not settled
    :param max_batch: how many messages a request is for at most
    :param max_wait: how long a request waits for messages, in seconds
    :param next_subject: the subject of pull requests
    :param request_fields: what goes into each of them
    """

    connection: Connection
    redelivery: RedeliveryPolicy
    dead_letters: DeadLetterWriter
    capacity: int
    max_batch: int
    max_wait: float
    next_subject: str
    request_fields: dict[str, Any]
    is_fallback: bool = False

    @property
    def tick(self) -> float:
        """How often to look whose signal of progress is due, in seconds."""
        shortest = min(self.redelivery.ack_wait_seconds(attempt) for attempt in (1, _MOST_STEPS))
        return min(max(shortest / _SIGNALS_PER_ACK_WAIT / 2, _TICKS[0]), _TICKS[1])


@dataclass(slots=True)
class TakenMessages:
    """Settles messages, as a program whose job it is to store their events.

    :ivar session: by which messages are settled
    :ivar settled: is set whenever one is settled, or its body dropped
    :ivar size: the bytes of all bodies that are there
    """

    session: ConsumerSession | None = None
    settled: asyncio.Event = field(default_factory=asyncio.Event)
    size: int = 0
    _messages: dict[MessageKey, TakenMessage] = field(default_factory=dict)
    _failed: list[tuple[TakenMessage, str]] = field(default_factory=list)
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)
    _slots: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(_DEAD_LETTERS_AT_ONCE))

    def __len__(self) -> int:
        return len(self._messages)

    def take(self, message: PulledMessage) -> TakenMessage | None:
        """Note a delivery; ``None`` where it is a further one of a message that isn't settled."""
        taken = TakenMessage(message, message_size(message))
        if known := self._messages.get(taken.key):
            log.debug("message %d of %s was delivered again before it was settled", message.sequence, message.stream)
            if known.stored is not None:
                message.data = b""
            self.size += len(message.data) - len(known.message.data)
            known.message = message
            known.signal_at, known.acks = 0.0, 0
            known.ack_at = min(known.ack_at, time.monotonic() + HOLD)
            return None
        self._messages[taken.key] = taken
        self.size += len(message.data)
        taken.signal_at = time.monotonic() + self._signal_interval(taken)
        return taken

    def drop_body(self, taken: TakenMessage) -> None:
        """Forget the body of a message whose event names a copy."""
        if self._messages.get(taken.key) is taken:
            self.size -= len(taken.message.data)
            taken.message.data = b""
            self.settled.set()

    def accept(self, taken: TakenMessage) -> None:
        """Acknowledge a message whose event Airflow has stored, after :data:`HOLD` seconds."""
        if self._messages.get(taken.key) is taken:
            taken.state, taken.ack_at = _State.HELD, time.monotonic() + HOLD

    def reject(self, taken: TakenMessage) -> None:
        """Make a dead letter of a message."""
        taken.state = _State.SETTLING
        self._do(self._make_dead_letter(taken))

    def fail(self, taken: TakenMessage, reason: str) -> None:
        """Nak a message whose event Airflow hasn't stored, with the backoff of its consumer."""
        self._forget(taken)
        self._failed.append((taken, reason))
        if len(self._failed) == 1:
            self._do(self._nak_failed())

    async def run(self) -> None:
        """Signal progress and acknowledge, until it is cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._signal_progress())
            group.create_task(self._acknowledge())

    async def finish(self) -> None:
        """Settle all that is left, within some seconds; what isn't settled then comes back after its ack wait."""
        for taken in list(self._messages.values()):
            if taken.state is not _State.SETTLING:
                self.fail(taken, "the watcher was ended before Airflow was known to have stored the event")
        if self._tasks:
            _, pending = await asyncio.wait(self._tasks, timeout=_FINISH_SECONDS)
            for task in pending:
                task.cancel()

    def _do(self, steps: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(steps)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _forget(self, taken: TakenMessage) -> None:
        if self._messages.get(taken.key) is taken:
            del self._messages[taken.key]
            self.size -= len(taken.message.data)
            self.settled.set()

    def _signal_interval(self, taken: TakenMessage) -> float:
        if self.session is None:
            return _TICKS[1]
        return self.session.redelivery.ack_wait_seconds(taken.message.attempt) / _SIGNALS_PER_ACK_WAIT

    async def _signal_progress(self) -> None:
        while True:
            await asyncio.sleep(_TICKS[1] if self.session is None else self.session.tick)
            now = time.monotonic()
            due = [taken for taken in self._messages.values() if now >= taken.signal_at]
            # Signals of a lost connection would arrive late, when another program may have the message.
            if not due or self.session is None or not self.session.connection.is_connected:
                continue
            for taken in due:
                taken.signal_at = now + self._signal_interval(taken)
            frames = b"".join(encode_message(encode_text(taken.message.reply), b"+WPI") for taken in due)
            try:
                self.session.connection.write(frames, len(due))
            except UnreachableError as error:
                log.debug("signals of progress weren't sent: %s", error)

    async def _acknowledge(self) -> None:
        while True:
            await asyncio.sleep(_TICKS[1])
            now = time.monotonic()
            due = [taken for taken in self._messages.values() if taken.state is _State.HELD and now >= taken.ack_at]
            if due and self.session is not None and self.session.connection.is_connected:
                await self._acknowledge_now(self.session.connection, due[:_ACKS_AT_ONCE])

    async def _acknowledge_now(self, connection: Connection, due: list[TakenMessage]) -> None:
        answers: Iterable[bytes | JetStreamProviderError]
        try:
            answers = await connection.request_many([(taken.message.reply, b"+ACK") for taken in due])
        except JetStreamProviderError as error:
            answers = [error] * len(due)
        problem: JetStreamProviderError | None = None
        dropped = 0
        for taken, answer in zip(due, answers, strict=True):
            if isinstance(answer, bytes):
                self._forget(taken)
                continue
            problem = answer
            taken.acks += 1
            taken.ack_at = time.monotonic() + min(_ACK_PAUSES[0] * 2**taken.acks, _ACK_PAUSES[1])
            if taken.acks >= _MOST_ACKS:
                dropped += 1
                self._forget(taken)
        if problem is not None:
            log.warning(
                "%d acknowledgements aren't confirmed: %s (%s)",
                len(due),
                problem,
                f"{dropped} aren't sent again: where the messages still exist, their events are repeated"
                if dropped
                else "they are sent again",
            )

    async def _make_dead_letter(self, taken: TakenMessage) -> None:
        message, session = taken.message, self.session
        refusal = taken.refusal or GiveUpError("a watcher rejected the message")
        try:
            async with self._slots:
                is_settled = session is not None and await session.dead_letters.terminate(message, refusal)
            if session is not None and not is_settled:
                await nak(session.connection, taken.message, session.redelivery.backoff_delay(taken.message.attempt))
        except JetStreamProviderError as error:
            log.warning("message %d of %s isn't made a dead letter yet: %s", message.sequence, message.stream, error)
        finally:
            self._forget(taken)

    async def _nak_failed(self) -> None:
        # Many fail together, and one line of the log is enough for them.
        await asyncio.sleep(_TICKS[0])
        failed, self._failed = self._failed, []
        if (session := self.session) is None:
            return
        first = failed[0][0].message
        for reason, count in Counter(reason for _, reason in failed).items():
            log.warning("%d messages of %s/%s are handed back: %s", count, first.stream, first.consumer, reason)
        for start in range(0, len(failed), _NAKS_AT_ONCE):
            some = failed[start : start + _NAKS_AT_ONCE]
            problems = await asyncio.gather(*(self._nak(session, taken.message, reason) for taken, reason in some))
            if problem := next(filter(None, problems), None):
                log.warning("some of them come back only after their ack wait: %s", problem)

    async def _nak(
        self, session: ConsumerSession, message: PulledMessage, reason: str
    ) -> JetStreamProviderError | None:
        try:
            # Of a last delivery it stores the reason with the body.
            await session.dead_letters.record_failure(message, DeadlineError(reason))
            await nak(session.connection, message, session.redelivery.backoff_delay(message.attempt))
        except JetStreamProviderError as problem:
            return problem
        return None


class MessageProducer(SharedStreamProducer):
    """Pulls from a consumer for all watchers of one key, and settles each message by what became of its event.

    What keeps it from pulling (the server is away, the consumer is gone, a permission is missing) is logged at growing
    intervals, and it pulls again as soon as it can: a watcher that failed would be started every two seconds.
    """

    def __init__(
        self, nats_conn_id: str, work_queue: Mapping[str, Any], consumer: str, options: PayloadOptions
    ) -> None:
        self._hook = hook_for(nats_conn_id)
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
        pause = _PULL_PAUSES[0]
        while True:
            try:
                session = await self._open_session()
                async with ConsumerFetcher(session.connection, session, self._on_message) as fetcher:
                    while True:
                        await self._fetch(fetcher, session)
                        pause = _PULL_PAUSES[0]
            except JetStreamProviderError as error:
                where = f"{self._queue.name}/{self._consumer}"
                log.warning(
                    "No messages of %s are pulled, trying again in %g s: %s %s", where, pause, error.code, error
                )
            await asyncio.sleep(pause)
            pause = min(2 * pause, _PULL_PAUSES[1])

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

    def _on_message(self, message: PulledMessage, _requested_at: float) -> None:
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
    for attempt in range(_COPY_READS):
        if attempt:
            await asyncio.sleep(_BETWEEN_READS)
        archive = await ArchiveReader.open(connection, queue, await stream_info(connection, queue.name))
        if archive is None:
            return None
        copy = await archive.find_copy(message.sequence)
        if copy and message.is_same_as(republished_message(copy)) and copy.data == message.data:
            return {"stream": archive.stream, "sequence": copy.sequence}
    return None


async def _end(*tasks: asyncio.Task[None] | None) -> None:
    started = [task for task in tasks if task is not None]
    for task in started:
        task.cancel()
    await asyncio.gather(*started, return_exceptions=True)
