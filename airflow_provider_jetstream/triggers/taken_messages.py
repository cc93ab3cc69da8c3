"""The messages that a shared pull has taken, until they are settled.

While Airflow stores a message's event, the server hears that it is in progress. A message that is delivered again
meanwhile, as after the server was away, isn't passed on again: only its acknowledgements go to the new delivery.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from airflow_provider_jetstream.jetstream.client.wire import encode_message
from airflow_provider_jetstream.jetstream.client.wire_text import encode_text
from airflow_provider_jetstream.jetstream.errors import (
    DeadlineError,
    JetStreamProviderError,
    UnreachableError,
)
from airflow_provider_jetstream.triggers.message_event import message_size
from airflow_provider_jetstream.worker.acknowledgement import nak
from airflow_provider_jetstream.worker.errors import GiveUpError

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterable

    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.worker.dead_lettering import DeadLetterWriter
    from airflow_provider_jetstream.worker.pulled_message import PulledMessage
    from airflow_provider_jetstream.worker.redelivery import RedeliveryPolicy

    # Of a recreated stream the sequences start again at 1.
    MessageKey: TypeAlias = tuple[int, int]

log = logging.getLogger(__name__)

# Airflow counts the event of a trigger that it has just deleted, as when the DAG is paused, as stored: it has no asset
# to store it for. It ends such a trigger a second or two later.
HOLD: Final = 5.0
_SIGNALS_PER_ACK_WAIT: Final = 3
# Backoffs don't shrink usually: the first step or the last is the shortest.
_MOST_STEPS: Final = 1_000
_TICKS: Final = (0.05, 0.5)
_ACKS_AT_ONCE: Final = 500
_NAKS_AT_ONCE: Final = 100
_PAUSES: Final = (0.5, 10.0)
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
        """What tells it from all other messages of its stream's name."""
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
            taken.ack_at = time.monotonic() + min(_PAUSES[0] * 2**taken.acks, _PAUSES[1])
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
