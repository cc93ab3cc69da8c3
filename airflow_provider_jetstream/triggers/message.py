"""The trigger of DAGs that messages start, for Airflow's ``AssetWatcher``.

The doorbell is a small event whenever messages wait on a consumer, and again while they do. Airflow may create one DAG
run for several events, and may keep an event without a run until the next one comes. No message depends on that: an
event carries none, the run that it starts pulls whatever waits by then, and while messages wait another event follows.

In the mode ``payload`` each message is an event with its body. Airflow 3.3 runs one pull for all triggers of one key,
and says when the database has an event (``airflow.triggers.shared_stream``). Only then is its message acknowledged.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from dataclasses import fields
from typing import TYPE_CHECKING, Any, Final, Literal, Unpack, overload

from airflow.triggers.base import BaseEventTrigger, TriggerEvent

from airflow_provider_jetstream.jetstream.errors import ArgumentError, JetStreamProviderError, TransientError
from airflow_provider_jetstream.tasks import runtime
from airflow_provider_jetstream.tasks.arguments import check_positive_seconds, check_text, dict_of_text, dicts_as_texts
from airflow_provider_jetstream.tasks.hook import hook_for
from airflow_provider_jetstream.tasks.queue_source import load_queue
from airflow_provider_jetstream.triggers.message_event import PayloadOptions, message_event
from airflow_provider_jetstream.worker.errors import InvalidBodyError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Hashable, Mapping
    from typing import TypeAlias

    from airflow.triggers.shared_stream import SharedStreamProducer

    from airflow_provider_jetstream.jetstream.inspection.waiting_messages import WaitingMessages
    from airflow_provider_jetstream.jetstream.queue.work_queue import QueueSource
    from airflow_provider_jetstream.tasks.argument_types import PayloadArguments
    from airflow_provider_jetstream.triggers.message_event import BodyForm
    from airflow_provider_jetstream.triggers.message_producer import TakenMessage

    # A trigger's is Airflow's own kind.
    TriggerLog: TypeAlias = Any

DOORBELL: Final = "doorbell"
PAYLOAD: Final = "payload"

# A run that an event starts needs some seconds until it pulls.
DEFAULT_INTERVAL = 10.0
LONGEST_INTERVAL = 300.0

# Seconds: how long one request for the first message takes, and the pauses after a failure, doubled from first to last.
_LOOK = 60.0
_PAUSES = (1.0, 30.0)
_REPEAT_PROBLEM = 600.0
_JITTER = 0.2

_random = random.SystemRandom()


class JetStreamMessageTrigger(BaseEventTrigger):
    """Fires when messages wait on a consumer of a work queue.

    :param work_queue: a :class:`~airflow_provider_jetstream.jetstream.WorkQueue`, its dict, or its YAML's path
    :param consumer: the name of one of the queue's consumers
    :param mode: ``doorbell`` fires an event that says how many messages wait, and takes none: the DAG pulls them.
        ``payload`` takes the messages and fires one event for each with its body; it needs Airflow 3.3
    :param interval: of the mode ``doorbell``: seconds from an event to the next at least. While messages go on waiting,
        the time doubles from event to event, up to :data:`LONGEST_INTERVAL` seconds
    :param nats_conn_id: the Airflow connection
    :param payload: of the mode ``payload``: the fields of
        :class:`~airflow_provider_jetstream.triggers.message_event.PayloadOptions`
    :raises ArgumentError: an argument can't be used
    :raises QueueDeclarationError: the declaration can't be used, or has no such consumer
    """

    @overload
    def __init__(
        self,
        *,
        work_queue: QueueSource,
        consumer: str,
        mode: Literal["doorbell"] = ...,
        interval: float = ...,
        nats_conn_id: str = ...,
    ) -> None: ...

    @overload
    def __init__(
        self,
        *,
        work_queue: QueueSource,
        consumer: str,
        mode: Literal["payload"],
        nats_conn_id: str = ...,
        **payload: Unpack[PayloadArguments],
    ) -> None: ...

    def __init__(
        self,
        *,
        work_queue: QueueSource,
        consumer: str,
        mode: Literal["doorbell", "payload"] = DOORBELL,
        interval: float = DEFAULT_INTERVAL,
        nats_conn_id: str = "nats_default",
        **payload: Unpack[PayloadArguments],
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        check_text(nats_conn_id=nats_conn_id, consumer=consumer)
        check_positive_seconds(interval=interval)
        if mode not in (DOORBELL, PAYLOAD):
            raise ArgumentError(f"expected {DOORBELL} or {PAYLOAD} as mode, found {mode!r}: correct it")
        if payload and mode != PAYLOAD:
            raise ArgumentError(
                f"expected none of {', '.join(sorted(payload))} in the mode {mode}, found them: remove them, or set"
                f" mode={PAYLOAD!r}"
            )
        if mode == PAYLOAD:
            _require_payload_mode()
        queue = load_queue(dict_of_text(work_queue))
        queue.consumer(consumer)
        self.work_queue = queue.model_dump(mode="json", exclude_unset=True)
        self.consumer = consumer
        self.mode = mode
        self.interval = interval
        self.nats_conn_id = nats_conn_id
        self.payload = PayloadOptions.of(payload) if mode == PAYLOAD else None

    def serialize(self) -> tuple[str, dict[str, Any]]:
        """Return the class path and the arguments that recreate the trigger elsewhere; never a secret."""
        arguments = {
            "work_queue": self.work_queue,
            "consumer": self.consumer,
            "mode": self.mode,
            "nats_conn_id": self.nats_conn_id,
            **(self.payload.as_json() if self.payload else {"interval": self.interval}),
        }
        return f"{type(self).__module__}.{type(self).__name__}", dicts_as_texts(arguments)

    async def run(self) -> AsyncIterator[TriggerEvent]:
        """Fire an event whenever messages wait, and again while they do; of the mode ``doorbell``.

        :raises ArgumentError: the mode is another
        """
        if self.payload is not None:
            raise ArgumentError(
                "expected a triggerer to share the pull of mode='payload', found one that runs the trigger alone, as"
                " dag.test() does: run the DAG in a scheduler, or use mode='doorbell'"
            )
        stream = str(self.work_queue["name"])
        async for waiting in _ring(self.nats_conn_id, stream, self.consumer, self.interval, self.log):
            yield TriggerEvent(waiting)  # type: ignore[no-untyped-call]

    def shared_stream_key(self) -> Hashable | None:
        """Return what the triggers have in common that share one pull, in the mode ``payload``."""
        if self.payload is None:
            return None
        return _payload_key(self)

    @classmethod
    def create_shared_stream_producer(cls, kwargs: dict[str, Any]) -> Any:
        """Return what pulls for all triggers of one key, in the mode ``payload``."""
        return _payload_producer(kwargs)

    async def filter_shared_stream(self, shared_stream: AsyncIterator[Any]) -> AsyncIterator[TriggerEvent]:
        """Fire one event for each message of the shared pull, in the mode ``payload``."""
        if self.payload is None:
            raise ArgumentError("expected mode='payload' for a shared stream, found mode='doorbell'")
        async for event in _payload_events(self.payload.body, shared_stream):
            yield event


async def _ring(
    nats_conn_id: str, stream: str, consumer: str, interval: float, log: TriggerLog
) -> AsyncIterator[dict[str, Any]]:
    """Yield what waits on a consumer: at once where messages wait, and again while they do.

    Where the server is away, the consumer is gone or a permission is missing, that is logged once, and again every ten
    minutes, and the bell goes on when the problem is gone. A trigger that raised would be started anew by Airflow
    every two seconds.

    :param interval: seconds from one ring to the next at least; they double while the messages of the last event wait
    """
    problems = _Problems(f"{stream}/{consumer}", log)
    rings = _Rings(interval)
    while True:
        try:
            async with hook_for(nats_conn_id).shared() as connection:
                while True:
                    found = await runtime.wait_for_messages(connection, stream, consumer)
                    if found is None:
                        rings.rest()
                        found = await runtime.wait_for_messages(connection, stream, consumer, _LOOK)
                    problems.clear()
                    if found is None:
                        continue
                    rings.note_waiting(found)
                    if (left := rings.seconds_left()) > 0:
                        await asyncio.sleep(min(left, interval))
                        continue
                    yield found.as_json()
                    rings.note_event(found)
        except Exception as error:  # noqa: BLE001 - such as that of a connection id which Airflow doesn't know
            await asyncio.sleep(problems.note(error))


class _Rings:
    """When the next event may follow."""

    def __init__(self, interval: float) -> None:
        self._shortest = self._interval = interval
        self._rung_at = self._next_at = -LONGEST_INTERVAL
        self._deliveries = self._taken_at = 0

    def rest(self) -> None:
        """Note that none of the messages of the last event waits any more."""
        self._interval = self._shortest
        self._next_at = self._rung_at + self._shortest

    def note_waiting(self, found: WaitingMessages) -> None:
        """Note what waits now: other messages than at the last event, once as many were delivered since."""
        if not self._deliveries <= found.deliveries < self._taken_at:
            self.rest()

    def seconds_left(self) -> float:
        return self._next_at - time.monotonic()

    def note_event(self, found: WaitingMessages) -> None:
        """Note an event."""
        self._deliveries, self._taken_at = found.deliveries, found.deliveries + found.waiting
        self._rung_at = time.monotonic()
        self._next_at = self._rung_at + self._interval
        self._interval = max(self._shortest, min(2 * self._interval, LONGEST_INTERVAL))


class _Problems:
    """Logs what keeps the bell from ringing, and says how long to pause."""

    def __init__(self, where: str, log: TriggerLog) -> None:
        self._where = where
        self._log = log
        self._pause = _PAUSES[0]
        self._kind = ""
        self._logged_at = 0.0

    def note(self, error: Exception) -> float:
        """Note a failure, and return the seconds after which to try again."""
        now = time.monotonic()
        # A server that is away is first silent and then unreachable.
        code = error.code if isinstance(error, JetStreamProviderError) else type(error).__name__
        kind = "transient" if isinstance(error, TransientError) else code
        if kind != self._kind or now - self._logged_at >= _REPEAT_PROBLEM:
            self._kind, self._logged_at = kind, now
            self._log.warning("Messages of %s can't be seen, trying again: %s %s", self._where, code, error)
        pause, self._pause = self._pause, min(2 * self._pause, _PAUSES[1])
        return pause * (1 + _JITTER * _random.random())

    def clear(self) -> None:
        """Note that the consumer could be looked at."""
        if self._kind:
            self._log.info("Messages of %s can be seen again", self._where)
        self._kind, self._pause = "", _PAUSES[0]


def _require_payload_mode() -> None:
    """Refuse an Airflow that doesn't say when it has stored an event.

    :raises ArgumentError: it is older than 3.3
    """
    if hasattr(BaseEventTrigger, "create_shared_stream_producer"):
        return
    from airflow import __version__ as found

    raise ArgumentError(
        "expected Airflow 3.3 or newer for mode='payload', which acknowledges a message once Airflow has stored its"
        f" event, found {found}: upgrade Airflow, or use mode='doorbell'"
    )


def _payload_key(trigger: BaseEventTrigger) -> Hashable:
    """Return all that the shared pull uses; only the form of the body is each trigger's own."""
    path, arguments = trigger.serialize()
    return (path, json.dumps({name: value for name, value in arguments.items() if name != "body"}, sort_keys=True))


def _payload_producer(arguments: Mapping[str, Any]) -> SharedStreamProducer:
    """Return what pulls for all triggers of one key.

    :param arguments: those of the first trigger
    """
    # Not above: Airflow has what it stands on since 3.3.
    from airflow_provider_jetstream.triggers.message_producer import MessageProducer

    options = PayloadOptions.of(
        {field.name: arguments[field.name] for field in fields(PayloadOptions) if field.name in arguments}
    )
    queue = dict_of_text(arguments["work_queue"])
    return MessageProducer(arguments["nats_conn_id"], queue, arguments["consumer"], options)


async def _payload_events(form: BodyForm, shared_stream: AsyncIterator[TakenMessage]) -> AsyncIterator[TriggerEvent]:
    """Yield an event for each message, and reject those that can't be one.

    :param form: of the bodies
    """
    from airflow.triggers.shared_stream import reject_shared_stream_event

    async for taken in shared_stream:
        try:
            event = message_event(taken.message, form, taken.size, taken.stored)
        except InvalidBodyError as error:
            taken.refuse(error)
            reject_shared_stream_event()
        else:
            yield TriggerEvent(event)  # type: ignore[no-untyped-call]
